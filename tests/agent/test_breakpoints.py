"""`breakpoint()` in a rank of `ddpjob dev` stops in pdb at a terminal that is lent to the rank. No torch."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest
from shell import eventually

from ddprun import lend_terminal

SCRIPT = """
answer = 41
try:
    breakpoint()
    print("went on with", answer, flush=True)
except Exception as error:
    print("ended by", type(error).__name__, flush=True)
input()
"""
WAITS = re.compile(r"ddprun: rank 1 waits in breakpoint\(\) at train.py:\d+ \((\d+) (\d+) (\d+)\)\n")


class Terminal:
    """A terminal that is lent to a process, as `ddpjob dev` lends its own."""

    def __init__(self, words: tuple[str, ...]) -> None:
        self.master, self._slave = os.openpty()
        self.text, self.code = "", -1
        self._thread = threading.Thread(target=self._lend, args=(words, os.ttyname(self._slave)))
        self._thread.start()

    def _lend(self, words: tuple[str, ...], device: str) -> None:
        self.code = lend_terminal.lend(*words, device)

    def shows(self, what: str) -> None:
        while what not in self.text:
            self.text += os.read(self.master, 4096).decode()

    def enter(self, line: str) -> None:
        os.write(self.master, f"{line}\n".encode())

    def returned(self) -> int:
        """Wait until the rank gives the terminal back; return lend_terminal's exit code."""
        self._thread.join(30)
        return self.code

    def cut_off(self) -> None:
        os.close(self._slave)
        os.close(self.master)


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    (tmp_path / "train.py").write_text(SCRIPT)
    environ = os.environ | {"PYTHONBREAKPOINT": "ddprun.breakpoints.stop", "RANK": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "train.py"], cwd=tmp_path, env=environ, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as process:
        yield process
        process.kill()


def waits(rank: subprocess.Popen[str]) -> tuple[str, ...]:
    """Return what the rank's line names: pid, descriptor and inode."""
    line = rank.stderr.readline()
    found = WAITS.fullmatch(line)
    assert found, line
    return found.groups()


def test_a_rank_has_a_terminal_from_its_breakpoint_until_it_continues(rank: subprocess.Popen[str]) -> None:
    words = waits(rank)
    terminal = Terminal(words)
    terminal.shows("rank 1 (Pdb) ")
    terminal.enter("answer = 42; print('typed')")
    terminal.shows("\ntyped")
    terminal.enter("c")
    assert terminal.returned() == 0
    assert rank.stdout.readline() == "went on with 42\n"
    assert lend_terminal.lend(*words, "/dev/null") == lend_terminal.GONE


def test_ctrl_d_and_quit_end_the_script_and_give_the_terminal_back(rank: subprocess.Popen[str]) -> None:
    terminal = Terminal(waits(rank))
    terminal.shows("(Pdb) ")
    os.write(terminal.master, b"\x04")
    assert terminal.returned() == 0
    assert rank.stdout.readline() == "ended by BdbQuit\n"


def test_a_rank_whose_terminal_is_gone_waits_for_the_next_one(rank: subprocess.Popen[str]) -> None:
    """A rank whose terminal is gone must wait for the next one: an ended connection is no Ctrl-D."""
    first = Terminal(waits(rank))
    first.shows("(Pdb) ")
    first.cut_off()
    second = Terminal(waits(rank))
    assert first.returned() == 0
    second.shows("(Pdb) ")
    second.enter("c")
    assert rank.stdout.readline() == "went on with 41\n"


def test_a_second_client_ends_the_one_whose_connection_was_lost(rank: subprocess.Popen[str]) -> None:
    """A second client must end the process of a first one that lost its connection: both would read the user's keys."""
    words = ["-I", "-S", lend_terminal.__file__, *waits(rank)]
    first = pexpect.spawn(sys.executable, words, encoding="utf-8")
    first.expect_exact("(Pdb)")
    second = pexpect.spawn(sys.executable, words, encoding="utf-8")
    first.expect(pexpect.EOF)
    first.close()  # containerd closes the terminal of a process that has ended
    third = Terminal(waits(rank))
    third.shows("(Pdb) ")
    second.expect(pexpect.EOF)
    assert second.wait() == 0


def test_a_killed_rank_gives_its_terminal_back(rank: subprocess.Popen[str]) -> None:
    terminal = Terminal(waits(rank))
    terminal.shows("(Pdb) ")
    rank.kill()
    rank.wait()
    eventually(lambda: terminal.code == 0)
