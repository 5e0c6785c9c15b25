r"""Ctrl-\ in `ddpjob run`, and `ddpjob stacks`, show where the ranks of a local run are. No torch is needed."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from fake_py_spy import path_with_py_spy
from shell import Cli, eventually

DDPRUN = {"command": [str(Path(sys.executable).parent / "ddprun"), "--no-preload", "train.py"]}
# Two nodes with two ranks each; rank 1 hangs in load_batch until a file exists.
HANGS = """
import os, signal, sys, time
import ddpjob
rank = int(os.environ.get("RANK", "0"))
def until_go():
    while not os.path.exists("go"): time.sleep(0.01)
def load_batch(): until_go()
ddpjob.progress(1)
open(f"up-{rank}", "w").write(str(os.getpid()))
load_batch() if rank == 1 else until_go()
"""


class Run:
    """`ddpjob run` of ranks that wait for the file `go`."""

    def __init__(self, cli: Cli, file: Path, ranks: int) -> None:
        self.cli, self.errors = cli, cli.folder / "stderr"
        with open(self.errors, "w") as errors, open(cli.folder / "stdout", "w") as out:
            self.process = cli.start("run", file, stdout=out, stderr=errors, stdin=subprocess.DEVNULL)
        eventually(lambda: all(self.pid(rank) for rank in range(ranks)), 60)

    def pid(self, rank: int) -> int:
        path = self.cli.folder / f"up-{rank}"
        return int(path.read_text() or 0) if path.exists() else 0

    def shown(self) -> str:
        return (self.cli.folder / "stdout").read_text() + self.errors.read_text()

    def ends_well(self) -> None:
        (self.cli.folder / "go").touch()
        assert self.process.wait(60) == 0, self.shown()


@pytest.fixture
def run(cli: Cli) -> Iterator[Run]:
    """Run two nodes of two ranks under ddprun."""
    started = Run(cli, cli.file(HANGS, container=DDPRUN, nprocPerNode=2), ranks=4)
    yield started
    started.process.send_signal(signal.SIGINT)
    started.process.send_signal(signal.SIGINT)
    started.process.wait(60)


def test_stacks_shows_each_distinct_position_once_with_its_ranks(run: Run) -> None:
    done = run.cli.run("stacks", "job")
    assert done.returncode == 0, done.stderr
    assert "stacks of ranks 0-1, innermost call first:\n  rank 0: step 1\n    train.py:6 in until_go\n" in done.stdout
    assert "  rank 1: step 1\n    train.py:6 in until_go\n    train.py:7 in load_batch\n" in done.stdout
    assert "  ranks 2-3: step 1\n" in done.stdout
    alone = run.cli.run("stacks", "--rank", 1)
    assert alone.stdout.startswith("  rank 1: step 1\n"), alone.stdout
    assert "rank 0" not in alone.stdout
    beyond = run.cli.run("stacks", "--rank", 9)
    assert (beyond.returncode, beyond.stdout) == (2, "")
    run.ends_well()


def test_ctrl_backslash_in_a_run_prints_the_stacks_and_ends_nothing(run: Run) -> None:
    run.process.send_signal(signal.SIGQUIT)
    run.process.send_signal(signal.SIGQUIT)
    eventually(lambda: run.shown().count("end of the stacks") >= 2)
    assert "[0]     train.py:7 in load_batch" in run.shown(), run.shown()
    run.ends_well()


def test_stacks_of_an_ended_or_unknown_run_give_one_sentence(cli: Cli) -> None:
    cli.run("run", cli.file("pass", container=DDPRUN), code=0)
    ended = cli.run("stacks")
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
    assert "is not running (Succeeded), so it has no stacks" in ended.stderr
    never = cli.run("stacks", "other")
    assert (never.returncode, never.stdout, never.stderr.count("\n")) == (2, "", 1)


@pytest.mark.parametrize("handles", [False, True])
def test_a_request_for_stacks_never_ends_ranks_of_another_launcher(cli: Cli, tmp_path: Path, handles: bool) -> None:
    """A request for stacks must never end ranks of another launcher: SIGQUIT ends a Python without a handler."""
    handler = "signal.signal(signal.SIGQUIT, lambda *_: open('asked', 'w').close())\n" if handles else ""
    script = HANGS.replace("rank = int", f"{handler}rank = int")
    starter = 'TORCHELASTIC_RUN_ID=1 "$0" -u train.py; exit $?'  # torchrun sets this variable too
    file = cli.file(script, container={"command": ["sh", "-c", starter, sys.executable]}, nodes=1)
    started = Run(cli, file, ranks=1)
    rank = psutil.Process(started.pid(0))
    asked = cli.run("stacks", "job")
    assert (asked.returncode, asked.stdout, asked.stderr.count("\n")) == (2, "", 1), asked.stderr
    if handles:
        assert "SIGQUIT was sent to 1 rank, which the script handles" in asked.stderr
        eventually(lambda: os.path.exists(cli.folder / "asked"))
    else:
        sentence = f"no stacks of process {rank.pid}: not started by ddprun; py-spy shows them (pip install py-spy)"
        assert sentence in asked.stderr, asked.stderr
        started.process.send_signal(signal.SIGQUIT)
        eventually(lambda: sentence in started.errors.read_text())
        cli.env["PATH"] = path_with_py_spy(tmp_path / "fake")
        seen = cli.run("stacks", "job", code=0).stdout
        assert f"  rank 0 (process {rank.pid}):\n    silent.py:3 in load\n" in seen, seen
    assert rank.is_running()
    started.ends_well()
