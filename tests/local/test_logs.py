"""The screen stays readable and no output is lost, whatever a training prints."""

import os
from pathlib import Path

import pytest

from ddpjob import own_files
from ddpjob_cli.local.processes.logs import LINE_MAX, TAIL_BYTES, Log


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "digits-1-0.log")


def fed(log: Log, *chunks: bytes) -> list[str]:
    return [line for chunk in chunks for line in log.feed(chunk)]


def test_lines_that_arrive_in_pieces_are_shown_complete(log: Log) -> None:
    assert fed(log, b"ep", b"och 1\nepo", b"ch 2\n", b"rest") == ["epoch 1", "epoch 2"]
    assert list(log.close()) == ["rest"]


def test_a_line_of_10_mb_is_cut_on_the_screen_and_complete_in_the_file(log: Log) -> None:
    (line,) = fed(log, b"x" * 10_000_000, b"\n")
    assert line.startswith("x" * LINE_MAX + " … [9,995,904 bytes more in ")
    assert log.path.stat().st_size == 10_000_001


def test_bytes_that_are_not_text_are_shown_escaped_and_kept(log: Log) -> None:
    assert fed(log, b"loss \xff\xfe 0.1\n") == ["loss \ufffd\ufffd 0.1"]
    assert log.path.read_bytes() == b"loss \xff\xfe 0.1\n"


def test_a_progress_bar_that_rewrites_its_line_shows_its_last_state(log: Log) -> None:
    assert fed(log, b" 1%|\r 50%|\r100%|\r\n") == ["100%|"]


def test_places_are_rewritten_in_the_file_too_even_if_they_arrive_in_pieces(tmp_path: Path) -> None:
    """Places in a notebook's temporary script must be rewritten in the log file, too: the script is gone later."""
    log = Log(tmp_path / "log", lambda text: text.replace("nb.py:6", "nb.ipynb:cell 3:3"))
    assert fed(log, b"\xff in n", b"b.py:6\n 1%|\r 2%|\rnb.p") == ["\ufffd in nb.ipynb:cell 3:3"]
    assert log.bar == " 2%|"
    assert fed(log, b"y:6\r\nnb.py:", b"6") == ["nb.ipynb:cell 3:3"]
    assert list(log.close()) == ["nb.ipynb:cell 3:3"]
    names = b"nb.ipynb:cell 3:3"
    assert log.path.read_bytes() == b"\xff in %s\n 1%%|\r 2%%|\r%s\r\n%s" % (names, names, names)


def test_the_end_of_the_output_is_kept_for_the_status(log: Log) -> None:
    fed(log, b"x" * 50_000 + b"ValueError: last words\n")
    assert log.tail.endswith("ValueError: last words\n")
    assert len(log.tail) == TAIL_BYTES


def test_a_full_disk_stops_the_log_file_and_not_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_files, "open_file", lambda _path, flags: os.open("/dev/full", flags))
    log = Log(tmp_path / "log")
    assert fed(log, b"one\n", b"two\n") == ["one", "two"]
    assert "No space left on device; the rest of this node's log is lost" in log.error


def test_the_last_state_of_a_progress_bar_of_many_kb_is_shown_too(log: Log) -> None:
    """The last state of a progress bar of many kB must be shown, and not one from a minute ago."""
    bar = b"".join(b"\r%3d%%|%s| %d/100" % (i, b"#" * i + b" " * (100 - i), i) for i in range(101))
    assert fed(log, *(bar[i : i + 700] for i in range(0, len(bar), 700)), b"\n") == [f"100%|{'#' * 100}| 100/100"]
    assert fed(log, b"x" * 5000, b"\rshort\n") == ["short"]


def test_the_state_of_a_progress_bar_is_known_before_its_line_ends(log: Log) -> None:
    """The state of a progress bar must be known before its line ends, or a CI log shows nothing for hours."""
    assert fed(log, b"epoch 1") == []
    assert log.bar == "", "an unfinished line of text is not a bar"
    assert fed(log, b"\n\r0/600", b"\r12/600") == ["epoch 1"]
    assert log.bar == "12/600"
    assert fed(log, b"\r600/600\n") == ["600/600"]
    assert log.bar == ""
