"""What a user sees on a real terminal."""

import os
import re
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pexpect
import pyte
import pytest
import yaml

SCRIPT = """
    import json, os, sys, time, urllib.request
    def report(step):
        body = dict(step=step, totalSteps=1125, rank=0, attempt=1, etaSeconds=24,
                    samplesPerSecond=5210.4, metrics={"loss": "0.412"})
        token = open(os.environ["DDPJOB_STATUS_TOKEN_FILE"]).read()
        head = {"Authorization": "Bearer " + token}
        request = urllib.request.Request(os.environ["DDPJOB_STATUS_URL"], json.dumps(body).encode(), head)
        urllib.request.urlopen(request)
    if os.environ["RANK"] == "0":
        report(312)
        print("a line of the training " + "x" * 100 + " its end")
    while not os.path.exists("go"):
        time.sleep(0.02)
        if os.path.exists("report") and os.environ["RANK"] == "0":
            os.remove("report")
            report(313)
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    trainer = {"name": "trainer", "image": "none", "command": [sys.executable, "train.py"]}
    body = {
        "apiVersion": "training.ddpjob.io/v1alpha1",
        "kind": "DDPJob",
        "metadata": {"name": "digits"},
        "spec": {"nodes": 2, "template": {"spec": {"containers": [trainer]}}},
    }
    (tmp_path / "digits.yaml").write_text(yaml.safe_dump(body))
    return tmp_path / "digits.yaml"


class Terminal:
    """`ddpjob run` on a terminal of a given width. `text` is what the terminal shows now."""

    def __init__(self, job: Path, columns: int, shell: bool = False, **environment: str) -> None:
        self.screen = pyte.Screen(columns, 24)
        self._stream = pyte.ByteStream(self.screen)
        env = {**os.environ, "TERM": "xterm-256color", "XDG_STATE_HOME": str(job.parent / "state"), **environment}
        for name in ("COLUMNS", "LINES"):
            env.pop(name, None)
        argv = ["-m", "ddpjob_cli", "run", str(job)]
        self.raw = b""
        argv, program = (["--norc", "-i"], "bash") if shell else (argv, sys.executable)
        env["PS1"] = "$ "
        self.child = pexpect.spawn(program, argv, cwd=job.parent, env=env, dimensions=(24, columns))

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip()

    def type(self, text: str, end: str = "\n") -> None:
        """Type on the keyboard."""
        self.child.send(text + end)

    def resize(self, columns: int) -> None:
        """Change the width. pyte cuts existing lines, as xterm does."""
        self.screen.resize(24, columns)
        self.child.setwinsize(24, columns)

    def until(self, shown: Callable[[str], object], seconds: float = 30) -> str:
        """Read until `shown` accepts the text of the screen; return the text."""
        end = time.monotonic() + seconds
        while not shown(self.text):
            assert time.monotonic() < end, f"never shown; the screen is\n{self.text}"
            try:
                data = self.child.read_nonblocking(65536, timeout=0.1)
            except pexpect.TIMEOUT:
                continue
            except pexpect.EOF:
                assert shown(self.text), f"ended with\n{self.text}"
                break
            self.raw += data
            self._stream.feed(data)
        return self.text


def test_the_table_shows_state_steps_pace_and_nodes_and_output_scrolls_above_it(job: Path) -> None:
    terminal = Terminal(job, columns=110)
    text = terminal.until(lambda t: "step 312" in t and "its end" in t and t.count(" MB") == 2)
    assert re.search(r"^Running  step 312/1125  27 %  24s left  attempt 1  elapsed \d+s$", text, re.M)
    assert re.search(r"^5,210 samples/s  loss 0\.412$", text, re.M)
    assert re.search(r"^━{29,30}─{79,80}$", text, re.M), "the bar is as wide as the screen"
    assert re.search(r"^ +node 0 +rank 0 +Running +step 312 +pid \d+ +CPU +\d+ % +[\d.]+ MB$", text, re.M)
    assert re.search(r"^ +node 1 +rank 1 +Running +pid \d+ +CPU +\d+ % +[\d.]+ MB$", text, re.M)
    assert text.index("a line of the training") < text.index("Running  step")
    (job.parent / "go").touch()
    text = terminal.until(lambda t: "✔ digits Succeeded" in t)
    assert re.search(r"✔ digits Succeeded in \d+s   loss 0\.412", text)
    assert "node 0" not in text, "the table gives the terminal back"
    assert terminal.child.wait() == 0


def test_a_terminal_of_40_columns_shows_the_same_lines_cut_and_never_wrapped(job: Path) -> None:
    terminal = Terminal(job, columns=40)
    text = terminal.until(lambda t: "Running  step 312" in t and "node 1" in t)
    head = next(line for line in text.splitlines() if line.startswith("Running  step"))
    assert head == "Running  step 312/1125  27 %  24s left", "what matters most has room"
    long = next(line for line in text.splitlines() if "node 0" in line)
    assert len(long) <= 40
    (job.parent / "go").touch()
    terminal.until(lambda t: "✔ digits Succeeded" in t)


def test_a_terminal_that_shrinks_to_20_columns_and_grows_again_keeps_one_table(job: Path) -> None:
    """A terminal that shrinks to 20 columns and grows again must show one table, without parts of old ones."""
    terminal = Terminal(job, columns=100)
    terminal.until(lambda t: "Running  step 312" in t and "node 1" in t)
    for columns in (20, 100):
        terminal.resize(columns)
        text = terminal.until(lambda t: len([line for line in t.splitlines() if "─" in line]) == 1 and "node 1" in t)
        assert max(map(len, text.splitlines())) <= columns
    (job.parent / "go").touch()
    text = terminal.until(lambda t: "✔ digits Succeeded" in t)
    assert "node 0" not in text
    assert terminal.child.wait() == 0


def test_in_the_background_there_are_plain_lines_and_the_table_returns_with_fg(job: Path) -> None:
    """In the background there must be plain lines, and with fg the table again: it would overwrite the prompt."""
    shell = Terminal(job, columns=100, shell=True)
    shell.type(f"{sys.executable} -m ddpjob_cli run {job.name}")
    shell.until(lambda t: "Running  step 312" in t and "━" in t and "node 1" in t)
    shell.type("\x1a", end="")
    text = shell.until(lambda t: "Stopped" in t and t.endswith("$"))
    assert "━" not in text, "the table gives the terminal back"
    assert "the training continues" in text
    shell.type("bg")
    shell.type("touch report")
    text = shell.until(lambda t: "Running  step 313/1125" in t)
    assert "━" not in text
    shell.type("fg")
    shell.until(lambda t: "━" in t and "node 1" in t and "step 313" in t)
    (job.parent / "go").touch()
    shell.until(lambda t: "✔ digits Succeeded" in t)
    shell.type("exit")
    shell.child.wait()


def test_no_color_is_respected(job: Path) -> None:
    terminal = Terminal(job, columns=80, NO_COLOR="1")
    terminal.until(lambda t: "step 312" in t)
    (job.parent / "go").touch()
    terminal.until(lambda t: "✔ digits Succeeded" in t)
    assert not re.search(rb"\x1b\[[\d;]*(3[0-7]|38)[;m]", terminal.raw)


def test_a_terminal_that_cannot_redraw_gets_plain_lines(job: Path) -> None:
    (job.parent / "go").touch()
    terminal = Terminal(job, columns=80, TERM="dumb")
    terminal.until(lambda t: "✔ digits Succeeded" in t)
    assert b"\x1b[" not in terminal.raw
