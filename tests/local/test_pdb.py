"""`ddpjob run --pdb RANK` starts a debugger in one rank, on the run's terminal. No torch is needed."""

import os
import re
import sys
from pathlib import Path

import pexpect
import pytest
from shell import SECONDS_MAX, Cli

DEBUGGED = """
import os, sys
rank = os.environ["RANK"]
print(f"hello from {{rank}}")  # one write: the run prints on this terminal, too
answer = 41
breakpoint()
if rank == "1":
    print(f"went on with {{answer}}")
{end}
"""


def on_a_terminal(cli: Cli, *words: object, typed: str = "") -> tuple[int, str]:
    """Return exit code and output of a run on a terminal, after these lines were typed into its debugger."""
    argv = ["-m", "ddpjob_cli", "run", *map(str, words)]
    child = pexpect.spawn(
        sys.executable, argv, cwd=cli.folder, env=cli.env, timeout=SECONDS_MAX, encoding="utf-8", dimensions=(50, 400)
    )
    shown = ""
    if typed:
        child.expect_exact("(Pdb)")
        shown = child.before + child.after
        child.send(typed)
    child.expect(pexpect.EOF)
    return child.wait(), (shown + child.before).replace("\r\n", "\n")


GO_ON = "answer = 42\nc\n"


@pytest.mark.parametrize("launcher", [None, "ddprun"])
def test_a_debugger_in_one_rank_reads_from_the_terminal_and_the_others_print_into_their_logs(cli, launcher):
    """A debugger in one rank must read from the terminal: from /dev/null, BdbQuit ends the training."""
    container = {"command": [launcher, "train.py"]} if launcher else None
    code, shown = on_a_terminal(cli, cli.file(DEBUGGED.format(end=""), container=container), "--pdb", 1, typed=GO_ON)
    assert code == 0, shown
    assert "hello from 1" in shown
    assert "went on with 42" in shown
    assert "hello from 0" not in shown
    folder = Path(re.search(r"the output of the others is in (\S+)", shown)[1])
    assert any("hello from 0" in log.read_text() for log in folder.glob("*.log"))


def test_a_rank_that_fails_under_the_debugger_is_named_and_not_restarted(cli: Cli) -> None:
    end = "    raise OSError('no such shard')"
    code, shown = on_a_terminal(cli, cli.file(DEBUGGED.format(end=end)), "--pdb", 1, typed=GO_ON)
    assert code == 1
    assert shown.count("went on with 42") == 1
    assert "OSError: no such shard" in shown.splitlines()[-1]


@pytest.mark.parametrize(
    ("rank", "said"),
    [
        ("9", "--pdb 9: there is no such rank: the job has ranks 0 to 1"),
        ("-1", "--pdb -1: there is no such rank: the job has ranks 0 to 1"),
        ("1", "--pdb 1: stdin is not a terminal, and a debugger needs one: run it without a pipe"),
    ],
)
def test_a_debugger_for_a_missing_rank_or_on_a_pipe_is_refused_at_once(cli: Cli, rank: str, said: str) -> None:
    with open(os.devnull) as nothing:
        done = cli.run("run", cli.file("open('started', 'w')"), "--pdb", rank, stdin=nothing)
    assert (done.returncode, done.stderr.strip()) == (2, said)
    assert not (cli.folder / "started").exists()


def test_a_command_that_starts_its_ranks_in_another_way_is_refused(cli: Cli) -> None:
    """A command that starts its ranks without $PYTHON_EXEC must be refused, because no rank gets the terminal."""
    job = cli.file("pass", nprocPerNode=2)
    code, shown = on_a_terminal(cli, job, "--pdb", 1)
    assert code == 2
    assert "needs a command in which torchrun or ddprun starts a Python script" in shown
