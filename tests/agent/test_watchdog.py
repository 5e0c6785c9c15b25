"""A stalled group is detected, each rank reports where it is, the culprit is named, and all ranks restart."""

import os
import re
import signal
import sys
import time
import types
from typing import Any, cast

import psutil
import pytest
from agents import Launcher, finish
from shell import eventually

from ddprun.heartbeats import Heartbeats
from ddprun.options import parse
from ddprun.watch_ranks import ANSWER_SECONDS, Watching

# Script that trains five steps; the tested failure happens in the first generation.
TRAIN = """
import os, re, sys, time
import ddpjob
life, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
def load_batch():
    time.sleep(1000)
open(f"up-{{life}}-{{rank}}", "w").close()
def here(): return [name for name in os.listdir(".") if name.startswith(f"up-{{life}}")]
while len(here()) < int(os.environ["WORLD_SIZE"]): time.sleep(0.01)
for step in range(1, 6):
    if life == 0 and step > 2: {trouble}
    ddpjob.progress(step)
    time.sleep(0.05)
"""
WAIT = "time.sleep(1000 * (step == 5))"
LIMIT = {"DDPJOB_STALL_TIMEOUT": "2"}


def found(text: str) -> tuple[int, str, str]:
    """Return (seconds without a step, explanation, budget) of the message about the restart."""
    match = re.search(r"restart 1: the group made no step for (\d+) s: (.*); charged to (\w+), waiting 0 s", text)
    assert match, text
    return int(match[1]), match[2], match[3]


def told(text: str, rank: int) -> str:
    """Return the answer of the rank: its stacks."""
    return text.partition(f"ddpjob: rank {rank} (process ")[2].partition("\ndd")[0]


@pytest.mark.parametrize("start", ["--no-preload", "--preload=json"])
def test_a_hanging_rank_is_found_and_named_and_all_ranks_restart(launcher: Launcher, start: str) -> None:
    script = launcher.script(TRAIN.format(trouble=f"load_batch() if rank == 1 else {WAIT}"))
    done = launcher.done(start, "--nproc", 2, script, **LIMIT)
    assert done.returncode == 0, done.stderr
    seconds, what, budget = found(done.stderr)
    assert 2 <= seconds <= 30, "the limit, a second to the next look, one for the answers, and the load of this machine"
    assert what == "rank 1 stands at step 2, the others are at 4; in train.py:6 in load_batch"
    assert budget == "stall"
    assert "line 6, in load_batch" in told(done.stderr, 1)
    assert "line 11, in <module>" in told(done.stderr, 0)
    assert "forkserver.py" not in done.stderr, "the stack begins in the script, however the rank was started"


def test_a_rank_whose_interpreter_is_blocked_is_named_because_it_cannot_answer(launcher: Launcher) -> None:
    held = "re.match('(a+)+b', 'a' * 60)"
    script = launcher.script(TRAIN.format(trouble=held))
    done = launcher.done("--no-preload", "--nproc", 1, script, **LIMIT)
    assert done.returncode == 0, done.stderr
    assert found(done.stderr)[1] == "rank 0 stands at step 2 and does not answer, the others wait"
    assert re.search(r"Current thread .*\n.*/re(/__init__)?\.py", done.stderr), "the stacks that faulthandler writes"


def test_a_rank_that_never_reports_is_not_named_if_another_one_stalls(launcher: Launcher) -> None:
    """A rank that never reports must not be named if another one stalls: nothing in it can answer."""
    script = launcher.script(
        """
        import os, time
        if os.environ["RANK"] == "0":
            import ddpjob
            ddpjob.progress(1)
            ddpjob.progress(2)
            time.sleep(1000 * (os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"))
        else:
            while os.environ["TORCHELASTIC_RESTART_COUNT"] == "0": time.sleep(0.01)
        """
    )
    done = launcher.done("--no-preload", "--nproc", 2, script, **LIMIT)
    assert done.returncode == 0, done.stderr
    assert found(done.stderr)[1].startswith("rank 0 stands at step 2")


def test_a_declared_pause_has_its_own_limit(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import time, ddpjob
        ddpjob.progress(1)
        with ddpjob.pause("save"): time.sleep(4)
        ddpjob.progress(2)
        """
    )
    done = launcher.done("--no-preload", script, **LIMIT)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_rank_that_hangs_during_its_exit_still_reports_its_position(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import atexit, os, time
        import ddpjob
        def save():
            time.sleep(1000 * (os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"))
        atexit.register(save)
        for step in range(1, 3): ddpjob.progress(step)
        """
    )
    done = launcher.done("--no-preload", script, **LIMIT)
    assert done.returncode == 0, done.stderr
    assert found(done.stderr)[1] == "rank 0 has trained and does not end; in train.py:5 in save"
    assert "line 5, in save" in told(done.stderr, 0)


def test_a_limit_of_0_is_no_limit(launcher: Launcher) -> None:
    script = launcher.script("import time, ddpjob; ddpjob.progress(1); ddpjob.progress(2); time.sleep(4)")
    done = launcher.done("--no-preload", script, DDPJOB_STALL_TIMEOUT="0")
    assert (done.returncode, done.stderr) == (0, "")


def test_an_agent_that_was_itself_suspended_finds_no_stall(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import os, time, ddpjob
        for step in range(1, 1000):
            ddpjob.progress(step)
            time.sleep(0.1)
            if step == 5: open("up", "w").close()
            if os.path.exists("go") and step > 20: break
        """
    )
    agent = launcher.ddprun("--no-preload", script, **LIMIT)
    eventually(lambda: (launcher.folder / "up").exists())
    processes = psutil.Process(agent.pid).children()
    for pid in [*(p.pid for p in processes), agent.pid]:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(4)  # longer than the limit, but time in SIGSTOP must not count
    (launcher.folder / "go").touch()
    for pid in [agent.pid, *(p.pid for p in processes)]:
        os.kill(pid, signal.SIGCONT)
    done = finish(agent)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_stall_on_another_node_is_found_and_all_nodes_restart(launcher: Launcher) -> None:
    script = launcher.script(TRAIN.format(trouble=f"load_batch() if rank == 3 else {WAIT}"))
    done = [finish(agent) for agent in launcher.nodes(2, "--no-preload", "--nproc", 2, script, **LIMIT)]
    assert [d.returncode for d in done] == [0, 0], done[0].stderr + done[1].stderr
    assert found(done[0].stderr)[1:] == (
        "rank 3 stands at step 2, the others are at 4; in train.py:6 in load_batch",
        "stall",
    )
    assert "in load_batch" in told(done[1].stderr, 3)


def test_a_program_that_trained_and_has_ended_does_not_hang(launcher: Launcher) -> None:
    """A program that trained and has ended must not count as hanging, while its shell runs another program."""
    launcher.script("import ddpjob; ddpjob.progress(1)")
    launcher.script("#!/bin/sh\npython train.py && sleep 4\n", "all.sh").chmod(0o755)
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    done = launcher.done("--no-python", "./all.sh", PATH=path, **LIMIT)
    assert (done.returncode, done.stderr) == (0, "")


class Loses:
    """A node whose connection to node 0 breaks when the node sends this message."""

    def __init__(self) -> None:
        self.options = parse(["train.py"], {"DDPJOB_STALL_TIMEOUT": "2"})
        self.node = types.SimpleNamespace(running_ranks={0}, ended_well=None, rank=int)
        self.watching = Watching(cast(Any, self))
        self.group = self
        self.words: list[object] = []

    def watch(self, *_: object) -> None:
        """Do nothing, because this test uses no notifications."""

    unwatch = watch

    def stood(self, word: object, _now: float) -> None:
        self.words.append(word)
        self.watching.end()

    def answered(self, *word: object) -> None:
        self.words.append(word)


def test_an_agent_that_loses_node_0_during_a_query_stays_silent() -> None:
    agent = Loses()
    beats = Heartbeats(1)
    agent.watching.begin(beats)
    agent.watching.ask(100.0)
    agent.watching.tick(100.0 + ANSWER_SECONDS)
    assert len(agent.words) == 1, "it was cut short"
    assert agent.watching.deadline is None
    beats.close()


# ---- with torch --------------------------------------------------------------------------------------------

REDUCE = """
import os, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
life, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), dist.get_rank()
def load_batch():
    time.sleep(1000)
import ddpjob
for step in range(1, 41 if life == 0 else 4):
    ddpjob.progress(step)
    dist.all_reduce(torch.ones(8))
    if life == 0 and rank == 1 and step == 40: load_batch()
    time.sleep(0.01)
if life == 0: dist.all_reduce(torch.ones(8))
dist.barrier()
dist.destroy_process_group()
"""


def test_the_rank_that_did_not_reach_the_collective_is_named(launcher: Launcher) -> None:
    script = launcher.script(REDUCE)
    done = finish(launcher.warm("--nproc", 2, script, DDPJOB_STALL_TIMEOUT="3", OMP_NUM_THREADS="1"), 150)
    assert done.returncode == 0, done.stderr
    assert found(done.stderr)[1:] == (
        "rank 1 has ended collective 40 (all_reduce), the others are at 41; in train.py:7 in load_batch",
        "stall",
    )
    assert re.search(r"41 all_reduce .*, not done", told(done.stderr, 0)), "what the flight recorder knows"
    assert re.search(r"40 all_reduce .*, done", told(done.stderr, 1))
    assert "thread ddpjob-" not in done.stderr, "the library's own threads always wait, and hid the one that matters"


TIMES_OUT = """
import datetime, os, time
import torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=3))
life, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), dist.get_rank()
def load_batch():
    time.sleep(1000)
for step in range(1, 6):
    if life == 0 and rank == 1 and step == 5: load_batch()
    dist.all_reduce(torch.ones(8))
dist.destroy_process_group()
"""


def test_the_rank_that_another_waited_for_until_the_timeout_of_torch_is_named_as_in_a_stall(launcher: Launcher) -> None:
    """The rank that another waited for until torch's timeout must be named. Agents are not forked from this process,
    because torch's flight recorder is off in such a fork."""
    started = launcher.nodes(2, "--preload=torch", launcher.script(TIMES_OUT), OMP_NUM_THREADS="1")
    done = [finish(agent, 150) for agent in started]
    assert [d.returncode for d in done] == [0, 0], done[0].stderr
    assert "ddprun: rank 0 waited until its timeout: each rank is asked for its position\n" in done[0].stderr
    assert (
        "restart 1: the group made no progress until rank 0 timed out: rank 1 has ended collective 4 (all_reduce), the "
        "others are at 5; in train.py:7 in load_batch; charged to stall, waiting 0 s"
    ) in done[0].stderr
    assert "line 7, in load_batch" in told(done[-1].stderr, 1)


ENDS = """
import os, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
life, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), dist.get_rank()
def upload():
    {hang}
for step in range(3): dist.all_reduce(torch.ones(8))
{leave}
if rank == 1 and life == 0: upload()
open(f"done-{{rank}}", "w").close()
"""
HANGS = "time.sleep(1000)"
WORKS = "until = time.monotonic() + 8\n    while time.monotonic() < until: sum(range(1000))"
END_LIMIT = {"DDPJOB_STALL_TIMEOUT": "3", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(("nodes", "leave"), [(1, "dist.destroy_process_group()"), (2, "")])
def test_a_rank_that_hangs_after_its_last_collective_is_found_without_the_library(launcher, nodes, leave):
    """A rank that hangs after its last collective must be found, although the other ranks have ended."""
    script = launcher.script(ENDS.format(hang=HANGS, leave=leave))
    started = launcher.nodes(nodes, "--nproc", 2 // nodes, script, is_warm=True, **END_LIMIT)
    done = [finish(agent, 150) for agent in started]
    assert [d.returncode for d in done] == [0] * nodes, done[0].stderr
    seconds, what, budget = found(done[0].stderr)
    assert what == "rank 1 has ended its last collective, 3 (all_reduce), and does not end; in train.py:7 in upload"
    assert (budget, seconds >= 3) == ("stall", True)


def test_a_rank_that_works_alone_after_its_last_collective_is_left_alone(launcher: Launcher) -> None:
    """A rank that works alone after its last collective, such as in an evaluation, must not be ended."""
    script = launcher.script(ENDS.format(hang=WORKS, leave="dist.destroy_process_group()"))
    done = finish(launcher.warm("--nproc", 2, script, **END_LIMIT), 150)
    assert (done.returncode, "restart" in done.stderr) == (0, False), done.stderr


def test_a_process_that_hangs_after_the_end_of_its_script_is_found(launcher: Launcher) -> None:
    hang = "import atexit; torch.kept = Held()"
    # PyDLL holds the GIL during the call. The loop is needed, because a signal ends one sleep.
    held = "class Held:\n    def __del__(self):\n        while True: ctypes.PyDLL(None).sleep(1000)"
    script = launcher.script("import ctypes\n" + held + ENDS.format(hang=hang, leave=""))
    done = finish(launcher.warm("--nproc", 2, script, **END_LIMIT), 150)
    assert done.returncode == 0, done.stderr
    assert found(done.stderr)[1] == "rank 1 has trained and does not end, nor answer"
