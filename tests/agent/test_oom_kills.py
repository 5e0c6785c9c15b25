"""A rank that the kernel killed because memory ran out is reported as such, not as killed by a person."""

import json
from pathlib import Path
from typing import Any

import pytest
from agents import Launcher, finish

from ddpjob_core import rules
from ddpjob_core.failures import KILLED_BY_KERNEL, Failure
from ddprun.oom_kills import OomKills, counting_file

EVENTS = "low 0\nhigh 0\nmax 31\noom 4\noom_kill {}\noom_group_kill 0\n"
# Paths by which PID 1 of a container finds its cgroup; the test replaces the kernel's counter by a file.
AGENT = """
import os, sys
from ddprun import main, oom_kills
oom_kills.counting_file = lambda: os.environ["MEMORY_EVENTS"]
main()
"""
# The kernel counts the kill before it sends SIGKILL.
KILLED_FOR_MEMORY = """
import os, signal, sys
if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) in TIMES:
    with open(os.environ["MEMORY_EVENTS"], "w") as events:
        events.write("oom 9\\noom_kill " + str(3 + int(os.environ["TORCHELASTIC_RESTART_COUNT"])) + "\\n")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_each_kill_is_counted_once(tmp_path: Path) -> None:
    file = tmp_path / "memory.events"
    file.write_text(EVENTS.format(2))
    kills = OomKills(str(file))
    assert not kills.another(), "those were before us"
    file.write_text(EVENTS.format(4))
    assert [kills.another() for _ in range(3)] == [True, True, False]
    file.write_text(EVENTS.format(5))
    kills.look()
    assert not kills.another(), "that one was none of this generation"


@pytest.mark.parametrize("text", [None, "", "oom_kill\n", "oom_kill many\n", "\xff"])
def test_without_a_kill_counter_no_rank_is_called_out_of_memory(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "memory.events"
    if text is not None:
        file.write_text(text)
    assert not OomKills(str(file)).another()


@pytest.mark.parametrize(
    ("own", "there", "found"),
    [
        ("0::/\n", ["memory.events"], "memory.events"),  # cgroup v2, with its own namespace
        ("0::/kubepods/pod1\n", ["kubepods/pod1/memory.events", "memory.events"], "kubepods/pod1/memory.events"),
        ("0::/of/the/host\n", ["memory.events"], "memory.events"),
        ("5:memory:/\n0::/\n", ["memory/memory.oom_control"], "memory/memory.oom_control"),  # cgroup v1
        ("5:cpu,memory:/a\n", ["memory/a/memory.oom_control"], "memory/a/memory.oom_control"),
        ("0::/\n", [], ""),
    ],
)
def test_the_file_with_the_kill_counter_is_found(tmp_path: Path, own: str, there: list[str], found: str) -> None:
    (tmp_path / "cgroup").write_text(own)
    for name in there:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    said = counting_file(str(tmp_path), str(tmp_path / "cgroup"))
    assert said == (str(tmp_path / found) if found else "")


def ended(launcher: Launcher, times: str) -> Any:
    launcher.script(AGENT, "in_a_container.py")
    (launcher.folder / "memory.events").write_text(EVENTS.format(2))
    script = launcher.script(KILLED_FOR_MEMORY.replace("TIMES", times))
    agent = launcher.ddprun(
        "--preload=json",
        "--max-restarts",
        1,
        script,
        module="in_a_container",
        MEMORY_EVENTS=str(launcher.folder / "memory.events"),
    )
    done = finish(agent)
    assert done.returncode == 137
    return done.stderr, json.loads((launcher.folder / "termination.json").read_text())


def test_an_out_of_memory_kill_is_named_in_the_log_and_in_the_message(launcher):
    said, message = ended(launcher, "(0, 1)")
    assert f"restart 1: rank 0 was killed by SIGKILL ({KILLED_BY_KERNEL})" in said
    assert (message["signal"], message["exception"]) == ("SIGKILL", KILLED_BY_KERNEL)
    assert rules.classify(Failure(exit_code=137, exception=message["exception"])) == "outOfMemory"


def test_a_rank_killed_by_a_person_is_not_called_out_of_memory(launcher: Launcher) -> None:
    """A rank killed by a person is not out of memory, even if a rank of the previous generation was."""
    said, message = ended(launcher, "(0,)")
    assert KILLED_BY_KERNEL in said
    assert (message["signal"], message["exception"]) == ("SIGKILL", "")
