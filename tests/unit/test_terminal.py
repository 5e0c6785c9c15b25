"""Scripts print anything: a terminal gets only text and colors, and a pipe gets everything unchanged."""

import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from ddpjob_cli.commands import from_script, main, output, sources
from ddpjob_cli.describe.terminal import HELD_MAX, TerminalPieces, for_terminal

OBEYED = {
    "title": "\x1b]0;owned\x07",
    "title until ST": "\x1b]2;owned\x1b\\",
    "link": "\x1b]8;;http://example.org\x1b\\",
    "clipboard": "\x1b]52;c;cm0gLXJmIC8=\x07",
    "clear": "\x1b[2J",
    "clear of the history": "\x1b[3J",
    "clear of a line": "\x1b[2K",
    "move": "\x1b[10A",
    "home": "\x1b[H",
    "answer": "\x1b[6n\x1b[c",
    "mode": "\x1b[?1049h",
    "alternate characters": "\x1b(0\x0e",
    "reset": "\x1bc",
    "device control": "\x1bP+q544e\x1b\\",
    "application command": "\x1b_Gf=32;AAAA\x1b\\",
    "C1": "\x9b2J\x9d0;owned\x9c\x90q\x9c\x85",
    "bell, backspace and others": "\x07\x08\x0b\x0c\x00\x7f",
    "keyboard": "\x1b[>4;2m",
}


@pytest.mark.parametrize("name", OBEYED)
def test_a_terminal_executes_no_control_sequence_of_a_script(name: str) -> None:
    """A script must not change the window title for longer than the run, nor clear the lines above it."""
    assert for_terminal(f"before{OBEYED[name]}after") == "beforeafter"


@pytest.mark.parametrize(
    "text",
    ["\x1b[31mred\x1b[0m", "\x1b[1;38;2;1;2;3mx\x1b[m", "\x1b[4:3mcurly", "10%\r20%\r30%\n", "tab\tline\n", "größe ✔"],
)
def test_colors_progress_bars_and_texts_are_kept(text: str) -> None:
    assert for_terminal(text) == text
    assert TerminalPieces().feed(text.encode(), last=True) == text


def test_an_unterminated_title_hides_only_its_own_line() -> None:
    """A title without an end may hide the rest of its line, but all later lines must be shown."""
    assert for_terminal("a\x1b]0;title\nloss 0.1\n") == "a\nloss 0.1\n"


PIECES = st.lists(
    st.sampled_from(
        [
            "\x1b",
            "[",
            "]",
            "0;t",
            "\x07",
            "\\",
            "2J",
            "31m",
            "\x9b",
            "\x9d",
            "\r",
            "\n",
            "loss",
            "\x1b[0m",
            "P",
            ">",
            "?",
        ]
    )
)


@given(PIECES, st.integers(1, 5))
def test_no_control_sequence_passes_however_it_is_split(pieces: list[str], size: int) -> None:
    data = "".join(pieces).encode()
    shown = TerminalPieces()
    text = "".join(shown.feed(data[i : i + size]) for i in range(0, len(data), size)) + shown.feed(b"", last=True)
    left = text.replace("\x1b[31m", "").replace("\x1b[0m", "").replace("\x1b[m", "")
    assert not any((ord(letter) < 32 and letter not in "\r\n\t") or 127 <= ord(letter) < 160 for letter in left), ascii(
        text
    )


def test_a_color_split_into_two_pieces_is_complete() -> None:
    shown = TerminalPieces()
    assert shown.feed(b"a\x1b[3") == "a"
    assert shown.feed(b"1mred\xc3") == "\x1b[31mred"
    assert shown.feed(b"\xa4") == "ä"


def test_the_buffer_of_incomplete_sequences_is_limited() -> None:
    shown = TerminalPieces()
    assert shown.feed(b"\x1b]0;") == ""
    text = "".join(shown.feed(b"x" * 100) for _ in range(HELD_MAX // 100 + 20))
    assert text.endswith("x" * 100)


def test_bytes_that_are_not_utf_8_are_no_control_characters() -> None:
    """The byte 0x9b, which begins a control sequence (CSI) on an 8-bit terminal, must not reach a terminal."""
    assert TerminalPieces().feed(b"a\x9b2J", last=True) == "a\ufffd2J"


def test_a_pipe_gets_everything_unchanged(capfdbinary: pytest.CaptureFixture[bytes], monkeypatch) -> None:
    data = b"".join(text.encode() for text in OBEYED.values()) + b"\xff\n"
    output.write_printed(data)
    assert capfdbinary.readouterr().out == data
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    output.write_printed(b"a\x1b[2Jb\n")
    assert capfdbinary.readouterr().out == b"ab\n"


def test_file_names_are_shown_without_control_sequences(tmp_path: Path) -> None:
    (tmp_path / "\x1b]0;owned\x07.py").write_text("def f(:\n")
    (tmp_path / "\x1b[2Jloop.py").symlink_to("nowhere")
    result = CliRunner().invoke(main.cli, ["check", str(tmp_path)], standalone_mode=False)
    assert "error[syntax]" in result.stdout
    assert "so it is left out" in result.stderr
    assert "\x1b" not in result.stdout + result.stderr


HOSTILE_JOB = """
kind: DDPJob
apiVersion: training.ddpjob.io/v1alpha1
metadata: {name: digits}
spec:
  template:
    spec:
      "zz\\e[2J\\x9b2J": 1
      containers:
      - name: trainer
        image: "i\\e[2J"
        env: [{name: A, value: "$PATH\\e]0;owned\\a\\x9b2J"}]
        command: [torchrun, "--log\\e[2J", "$DATA/\\e[2J\\x9b2J", "~/x\\e[2J"]
"""


@pytest.mark.parametrize("words", ["run --dry-run", "submit --dry-run", "check", "check --format json", "convert"])
def test_no_escape_of_a_job_reaches_a_terminal(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Escape sequences in a command, or in an unknown field, must not reach the terminal with a warning about them."""
    job = tmp_path / "job.yaml"
    job.write_text(HOSTILE_JOB)
    monkeypatch.setattr(output, "_is_terminal", lambda: True)
    result = CliRunner().invoke(main.cli, [*words.split(), str(job)], standalone_mode=False, color=True)
    said = f"{result.stdout}{result.stderr}"
    assert said or result.exception
    assert "\x1b" not in said
    assert "\x9b" not in said


def test_an_answer_is_unchanged_only_in_a_pipe(capfd, monkeypatch):
    """Only a pipe may get an answer unchanged: the JSON of `ddpjob list -o json` may contain control characters."""
    text = "größe\x9b2J\x1b]0;owned\x07\n"
    output.answer(text)
    monkeypatch.setattr(output, "_is_terminal", lambda: True)
    output.answer(text)
    assert capfd.readouterr().out == f"{text}größe\n"


def test_every_line_on_stderr_is_printed_by_the_function_that_cleans_it() -> None:
    root = Path(output.__file__).parents[1]
    using = [file.name for file in root.rglob("*.py") if "click.echo(" in file.read_text(encoding="utf-8")]
    assert using == ["output.py"]


@pytest.mark.parametrize("end", ["\n", "\r", "\u2028", "\x85", "\n---\n"])
def test_a_name_in_a_script_cannot_add_a_line_to_the_yaml_of_init(end: str) -> None:
    name = f"--a{end}spec: {{nodes: 99}}"
    text = f"import argparse\np = argparse.ArgumentParser()\np.add_argument({name!r}, default='x')\np.parse_args()\n"
    made = from_script.job_yaml(sources.Source("train.py"), text)
    (document,) = yaml.safe_load_all(made)
    assert document["spec"]["nodes"] == 1
