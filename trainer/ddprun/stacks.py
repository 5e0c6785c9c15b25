"""Answer SIGQUIT: every rank is asked for its stack, and one folded text is printed. It ends nothing."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ddpjob_core.heartbeat import STACK, STACKS_SIGNAL
from ddprun import processes
from ddprun.core import folded_stacks
from ddprun.core.folded_stacks import RankStack
from ddprun.heartbeats import Heartbeats
from ddprun.node import say

if TYPE_CHECKING:
    from ddprun.agent import Agent

ANSWER_SECONDS = 0.6
AGAIN_SECONDS = 0.2  # while the watchdog waits for answers of its own
STATES = {
    "T": "stopped by SIGSTOP or SIGTSTP; kill -CONT lets it go on",
    "t": "held by a debugger",
    "D": "does not answer: the kernel holds it, for instance for a disk or a driver",
    "R": "does not answer: it has been running C code that holds the interpreter",
    "S": "does not answer: it waits in C code that holds the interpreter",
}
UNWATCHED = "cannot be asked: it has formed no process group and reported no step"


class StacksQuestion:
    """One question at a time; signals meanwhile are ignored."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._beats: Heartbeats | None = None
        self._number = 0  # of the question in the ranks' memory
        self.deadline: float | None = None

    def ask(self, beats: Heartbeats | None, now: float) -> None:
        """Start a question; the stacks are printed soon."""
        if self._beats is not None:
            return
        if beats is None or not self._agent.node.running_ranks:
            say(f"{folded_stacks.NONE}no rank runs on this node now")
            return
        self._beats, self._number, self.deadline = beats, 0, now

    def end(self) -> None:
        """Drop the question, because the ranks are ending."""
        if self._beats is not None:
            self._beats, self.deadline = None, None
            say(f"{folded_stacks.NONE}the ranks are ending")

    def tick(self, now: float, *, is_free: bool) -> None:
        """Continue. is_free: the ranks have no other question to answer."""
        if self.deadline is None or now < self.deadline or self._beats is None:
            return
        if self._number and self._number == self._beats.asked:
            self._print(self._beats)
        elif is_free:
            self._number, self.deadline = self._beats.ask(kind=STACK), now + ANSWER_SECONDS
        else:
            self._number, self.deadline = 0, now + AGAIN_SECONDS

    def _print(self, beats: Heartbeats) -> None:
        found = [self._of(rank, beats) for rank in sorted(self._agent.node.running_ranks)]
        self._beats, self.deadline = None, None
        say(f"{folded_stacks.text(found)}\n{folded_stacks.PROGRAM}{folded_stacks.END}")

    def _of(self, local_rank: int, beats: Heartbeats) -> RankStack:
        rank, beat = self._agent.node.rank(local_rank), beats.of(local_rank)
        answer = beats.answer(local_rank)
        pid = beat.pid if os.path.exists(f"/proc/{beat.pid}") and beat.pid else self._agent.node.pid(local_rank)
        if answer is not None:
            return RankStack(rank, pid, beat.step, answer)
        state = state_of(pid)
        if state in ("T", "t"):
            return RankStack(rank, pid, beat.step, state=STATES[state])
        if not beat.pid:
            return RankStack(rank, pid, state=UNWATCHED)
        told = "; its stacks are in its log" if write_stacks(beat.pid) else ""
        return RankStack(rank, pid, beat.step, state=STATES.get(state, "does not answer") + told)


def state_of(pid: int) -> str:
    """Return the letter of its state in /proc; "" if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return ""


def write_stacks(pid: int) -> bool:
    """Let faulthandler print the stacks in the process itself. True if it was signalled: without faulthandler the
    signal would kill it.
    """
    if pid > 0 and processes.catches(pid, STACKS_SIGNAL):
        processes.send([pid], STACKS_SIGNAL)
        return True
    return False
