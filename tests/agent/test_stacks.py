"""SIGQUIT to ddprun prints where the ranks are, in one text, and ends nothing; idle ranks are mentioned once."""

import os
import re
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from agents import Launcher, finish
from fake_py_spy import path_with_py_spy
from shell import eventually

from ddpjob_cli.client import stacks
from ddprun import processes
from ddprun.core import folded_stacks, idle
from ddprun.core.folded_stacks import RankStack
from ddprun.core.stall_monitor import Heartbeat
from ddprun.options import parse
from ddprun.watch_ranks import Watching

# Rank 1 hangs in load_batch, the others wait in wait_for_others, until a file lets all of them end.
TRAIN = """
import os, re, signal, sys, time
import ddpjob
rank = int(os.environ["RANK"])
def until_go():
    while not os.path.exists("go"): time.sleep(0.01)
def load_batch(): until_go()
def wait_for_others(): until_go()
ddpjob.progress(1)
ddpjob.progress(2 if rank == 1 else 3)
open(f"up-{rank}", "w").write(str(os.getpid()))
load_batch() if rank == 1 else wait_for_others()
"""


class Waiting:
    """A running `ddprun` whose ranks wait for the file `go`, with its stderr."""

    def __init__(self, launcher: Launcher, text: str, *words: object, ranks: int, **env: str) -> None:
        self.folder, self.ranks = launcher.folder, ranks
        self.errors = launcher.folder / "stderr"
        start = [] if any(str(word).startswith("--preload") for word in words) else ["--no-preload"]
        with open(self.errors, "wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ddprun", *start, f"--nproc-per-node={ranks}", *map(str, words),
                 launcher.script(text)],
                cwd=launcher.folder, env=launcher.env | env, stdout=errors, stderr=errors,
            )  # fmt: skip
        eventually(lambda: all(self.pid(rank) for rank in range(ranks)))

    def pid(self, rank: int) -> int:
        path = self.folder / f"up-{rank}"
        return int(path.read_text() or 0) if path.exists() else 0

    def text(self) -> str:
        return self.errors.read_text(errors="replace")

    def asked(self, number: int = signal.SIGQUIT, times: int = 1) -> str:
        """Send the signal, and return the text that follows it."""
        before = self.text().count(folded_stacks.END)
        for _ in range(times):
            self.process.send_signal(number)
        eventually(lambda: self.text().count(folded_stacks.END) > before)
        return self.text().rpartition("ddprun: " + folded_stacks.BEGIN)[2]

    def ends_well(self) -> None:
        (self.folder / "go").touch()
        assert self.process.wait(60) == 0, self.text()


def test_sigquit_prints_each_distinct_stack_with_its_ranks_and_ends_nothing(launcher: Launcher) -> None:
    r"""SIGQUIT must print where all ranks are, and end nothing: Ctrl-\ sends it, and users want to see a hang early."""
    run = Waiting(launcher, TRAIN, ranks=4)
    printed = run.asked(times=3)
    assert printed.startswith("ranks 0-3, innermost call first:"), printed
    assert re.search(
        r"  ranks 0, 2-3: step 3\n    train.py:6 in until_go\n    train.py:8 in wait_for_others\n"
        r"    train.py:12 in <module>\n  rank 1: step 2\n    train.py:6 in until_go\n    train.py:7 in load_batch\n",
        printed,
    ), printed
    assert "ddpjob: rank" not in run.text(), "the ranks themselves write nothing to the log"
    assert "train.py:7 in load_batch" in run.asked(), "it can be asked again"
    run.ends_well()


def test_a_stopped_rank_and_one_in_c_code_are_named_with_what_they_are_doing(launcher: Launcher) -> None:
    """A stopped rank, or a rank in C code, must be named with what it is doing, because it cannot answer."""
    held = TRAIN.replace("load_batch() if", "re.match('(a+)+b', 'a' * 40) if rank == 2 else load_batch() if")
    run = Waiting(launcher, held, ranks=3)
    os.kill(run.pid(0), signal.SIGSTOP)
    eventually(lambda: psutil.Process(run.pid(0)).status() == psutil.STATUS_STOPPED)
    printed = run.asked()
    assert f"rank 0 (process {run.pid(0)}): stopped by SIGSTOP or SIGTSTP; kill -CONT lets it go on" in printed
    in_c = f"rank 2 (process {run.pid(2)}): does not answer: it has been running C code that holds the interpreter"
    assert in_c in printed, printed
    assert "  rank 1: step 2\n" in printed
    os.kill(run.pid(0), signal.SIGCONT)
    run.process.send_signal(signal.SIGINT)
    run.process.send_signal(signal.SIGINT)
    run.process.wait(60)


WITHOUT_GROUP = """
import os, time
open(f"up-{os.environ['RANK']}", "w").write(str(os.getpid()))
def load(): time.sleep(0.01)
while not os.path.exists("go"): load()
"""


@pytest.mark.parametrize("handler", ["", "1"])
def test_a_rank_without_a_group_shows_its_stack_too(launcher: Launcher, handler: str) -> None:
    """A rank that hangs before it forms a group, such as in a download, must show its stack, too."""
    run = Waiting(launcher, WITHOUT_GROUP, "--preload=json", ranks=3, PYTHONFAULTHANDLER=handler)
    for _ in range(2):
        assert "  ranks 0-2:\n    train.py:4 in load\n    train.py:5 in <module>\n" in run.asked()
    run.ends_well()


def test_py_spy_if_installed_shows_ranks_that_cannot_answer(launcher: Launcher, tmp_path: Path) -> None:
    """If py-spy is installed, it must show the stacks of ranks that cannot answer (no group, no fork server)."""
    run = Waiting(launcher, WITHOUT_GROUP, ranks=2, PATH=path_with_py_spy(tmp_path / "bin"))
    assert (
        f"  ranks 0-1 (processes {run.pid(0)}, {run.pid(1)}): cannot be asked: no process group and no reported step\n"
        "    silent.py:3 in load\n    (above it 1 frame of libraries, innermost time.py:1 in wait)\n"
    ) in run.asked()
    run.ends_well()


def test_if_sigquit_is_left_to_end_the_job_another_signal_still_prints_stacks(launcher):
    """If SIGQUIT is set to end the job, `ddpjob stacks` uses another signal, because it must never end a job."""
    run = Waiting(launcher, TRAIN, "--signals-to-handle=SIGTERM,SIGQUIT", ranks=1)
    assert "rank 0: step 3" in run.asked(45)
    run.process.send_signal(signal.SIGQUIT)
    assert run.process.wait(60) != 0
    assert folded_stacks.END in run.text()


def test_without_a_running_rank_one_sentence_reports_it(launcher: Launcher) -> None:
    agent = launcher.ddprun("--nnodes=2", "--node-rank=1", "--master-port=1", launcher.script("pass"))
    eventually(lambda: processes.catches(agent.pid, signal.SIGQUIT))
    agent.send_signal(signal.SIGQUIT)
    agent.send_signal(signal.SIGQUIT)
    assert "no stacks: no rank runs on this node now" in agent.stderr.readline()
    agent.send_signal(signal.SIGTERM)
    finish(agent)


def test_64_ranks_at_two_positions_give_two_stacks() -> None:
    """Ranks with equal stacks must be shown once, because 64 stacks push the important lines off the screen."""
    here = {"stack": ["train.py:9 in backward"], "sequence": 25, "op": "all_reduce", "done": False}
    there = {"stack": ["train.py:4 in load"], "sequence": 24, "op": "all_reduce", "done": True}
    ranks = [RankStack(rank, 1000 + rank, 7, there if rank == 40 else here) for rank in range(64)]
    assert folded_stacks.text(ranks).splitlines() == [
        "stacks of ranks 0-63, innermost call first:",
        "  ranks 0-39, 41-63: step 7, in collective 25 (all_reduce)",
        "    train.py:9 in backward",
        "  rank 40: step 7, has ended collective 24 (all_reduce)",
        "    train.py:4 in load",
    ]


@pytest.mark.parametrize("answer", [{}, {"stack": 3}, {"stack": [1], "sequence": "x"}, {"sequence": -1, "op": None}])
def test_a_nonsensical_answer_is_shown_without_an_error(answer: dict[str, object]) -> None:
    assert "rank 0" in folded_stacks.text([RankStack(0, 1, 0, answer)])


@pytest.mark.parametrize(
    ("beat", "lines"),
    [
        (Heartbeat(0, "", 0, 0), 1),
        (Heartbeat(0, "train", 7, 0), 1),
        (Heartbeat(0, "save", 7, 0), 0),
        (Heartbeat(0, "evaluate", 7, 0), 0),
    ],
    ids=["without the library", "in a step", "in a pause to save", "in a pause to evaluate"],
)
@pytest.mark.parametrize(("nodes", "name", "how"), [(1, "digits", "ddpjob stacks digits"), (2, "", "kill -QUIT ")])
def test_an_agent_mentions_its_idle_ranks_in_one_line(capsys, beat, lines, nodes, name, how):
    """An agent must mention idle ranks in one line: without it, a script without the library hangs silently."""
    agent: Any = types.SimpleNamespace(
        options=parse([f"--nnodes={nodes}", "--node-rank=0", "train.py"], {}),
        node=types.SimpleNamespace(running_ranks={0}, pid=lambda _: -1),
        environ={"DDPJOB_NAME": name},
        watch=lambda *_: None,
    )
    watching = Watching(agent)
    watching.begin(cast(Any, types.SimpleNamespace(of=lambda _: beat, notify_read=-1)))
    begun = time.monotonic()
    for seconds in range(1, 300, 5):
        watching.tick(begun + seconds)
    told = capsys.readouterr().err
    assert told.count("\n") == lines, told
    whose = " of node 0" if nodes > 1 else ""
    assert told.startswith(f"ddprun: all ranks{whose} have been idle for 60s; stacks: {how}" if lines else "")


def looks(clock: idle.IdleClock, times: range, cpu: float = 0.0, mark: object = None) -> list[str]:
    """Let rank 0 use this share of a CPU, and rank 1 almost none; return the messages of the clock at these times."""
    said = (clock.look(float(now), {0: cpu * now, 1: 0.001 * now}, mark) for now in times)  # type: ignore[arg-type]
    return [text for text in said if text]


def test_idle_ranks_are_mentioned_once_per_idle_period() -> None:
    clock = idle.IdleClock(60)
    assert looks(clock, range(0, 600, 5)) == [idle.IDLE]
    clock.look(600.0, {0: 100.0, 1: 1.0})
    assert clock.look(655.0, {0: 100.0, 1: 1.0}) == ""
    assert clock.look(661.0, {0: 100.0, 1: 1.0}) == idle.IDLE


def test_a_group_with_one_computing_rank_is_not_idle() -> None:
    assert looks(idle.IdleClock(60), range(0, 600, 5), cpu=0.1) == []


def test_ranks_that_spin_in_one_collective_are_mentioned_although_they_use_the_cpu() -> None:
    """Ranks that poll in one collective, as NCCL does, must be mentioned although they use the CPU."""
    assert looks(idle.IdleClock(60), range(0, 600, 5), cpu=1.0, mark=((7, 7), (7, 7))) == [idle.NO_PROGRESS]


@pytest.mark.parametrize("cpu", [0.0, 1.0])
def test_ranks_that_make_steps_are_not_idle_also_if_they_hardly_use_the_cpu(cpu: float) -> None:
    """Ranks that wait in each step for a device or for data must not be called idle."""
    moving = idle.IdleClock(60)
    assert not any(moving.look(float(now), {0: cpu * now}, now // 30) for now in range(0, 600, 5))
    assert moving.look(600.0, {0: cpu * 600}) == "", "a rank that leaves the group has been busy until now"


def test_a_pause_is_never_idle_and_its_end_restarts_the_clock() -> None:
    clock = idle.IdleClock(60)
    looks(clock, range(0, 55, 5))
    assert clock.look(55.0, {}) == ""
    assert looks(clock, range(60, 120, 5)) == []
    assert looks(clock, range(120, 130, 5)) == [idle.IDLE]


def test_the_command_in_a_pod_signals_only_agents(tmp_path: Path) -> None:
    """Only agents may get the signal: it would kill a shell, a rank without a handler, or PID 1 and thus the pod."""
    script = tmp_path / "train.py"
    script.write_text("import time; print('up', flush=True); time.sleep(600)")
    agent = subprocess.Popen(
        [sys.executable, "-m", "ddprun", "--no-preload", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "ddprun"])
    try:
        assert agent.stdout.readline() == b"up\n"
        proc = tmp_path / "proc"
        proc.mkdir()
        for pid in (other.pid, os.getpid(), *processes.descendants(agent.pid)):
            (proc / str(pid)).symlink_to(f"/proc/{pid}")
        in_pod = ["sh", "-c", stacks.ASK.replace("/proc", str(proc))]
        assert subprocess.run(in_pod, check=False).returncode == stacks.NO_AGENT
        (proc / str(agent.pid)).symlink_to(f"/proc/{agent.pid}")
        assert subprocess.run(in_pod, check=False).returncode == 0
        assert agent.stderr.readline().startswith(b"ddprun: stacks of rank 0")
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
        agent.terminate()
        agent.communicate()
