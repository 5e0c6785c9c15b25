"""If ranks are in collectives that can never meet, a message names them within seconds. Other hangs get none."""

import os
import re
import signal
import subprocess

import pytest
from agents import Launcher, finish
from shell import eventually

from ddpjob.threads import times_run

# In the first generation ranks call mismatched collectives (DEADLOCKS); in the second all call the same one.
SCRIPT = """
import os, threading, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, again = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
one, x = dist.new_group([0, 1]), torch.ones(4)
dist.all_reduce(x)
{steps}
print("done")
"""
# Lines of the script after `if again: pass`, and the message that they must cause.
DEADLOCKS = {
    "another operation": (
        "elif rank == 0: dist.all_reduce(x)\nelse: dist.barrier()",
        "rank 0 waits in all_reduce [4] float32 (collective 2, train.py:9 in <module>), "
        "rank 1 in barrier (collective 2, train.py:10 in <module>): these never meet",
    ),
    "groups that wait for each other": (
        "elif rank == 0: dist.barrier()\nelse: dist.barrier(one)",
        "rank 0 waits in barrier (collective 2, train.py:9 in <module>), "
        "rank 1 first in barrier (collective 1 of group 1, train.py:10 in <module>): each waits for the other",
    ),
    "the backward pass of DDP": (
        "else:\n model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))\n"
        " if rank == 0: dist.barrier()\n else: model(x).sum().backward()",
        "rank 0 waits in barrier (collective N, train.py:11 in <module>), "
        "rank 1 in all_reduce [5] float32 (collective N, train.py:12 in <module>): these never meet",
    ),
}


@pytest.mark.parametrize(
    "name", ["another operation", *(pytest.param(name, marks=pytest.mark.long) for name in list(DEADLOCKS)[1:])]
)
def test_a_certain_deadlock_is_named_whatever_the_limit(launcher: Launcher, name: str) -> None:
    lines, told = DEADLOCKS[name]
    script = launcher.script(SCRIPT.format(steps=f"if again: pass\n{lines}"))
    done = finish(launcher.warm("--nproc", 2, script, DDPJOB_STALL_TIMEOUT="900", OMP_NUM_THREADS="1"), 150)
    assert done.returncode == 0, done.stderr
    stderr = re.sub(r"collective \d+, train.py:1[12]", lambda number: re.sub(r" \d+", " N", number[0]), done.stderr)
    assert f"restart 1: the group is deadlocked: {told}; charged to stall, waiting 0 s" in stderr
    assert "is stalled" not in done.stderr, "the two lines say it all"


def test_a_stopped_process_does_not_count_as_sleeping_and_a_continued_one_counts_as_running() -> None:
    """A rank that a debugger has stopped must not count as a rank that waits in a collective."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        try:
            eventually(lambda: times_run(process.pid) != "")
            before = times_run(process.pid)
            os.kill(process.pid, signal.SIGSTOP)
            eventually(lambda: times_run(process.pid) == "")
            os.kill(process.pid, signal.SIGCONT)
            eventually(lambda: times_run(process.pid) not in ("", before))
        finally:
            process.kill()
    assert times_run(process.pid) == ""
