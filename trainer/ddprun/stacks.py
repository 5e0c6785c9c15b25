"""Answer SIGQUIT: ask every rank for its stack, and print one folded text. No process is ended."""

from __future__ import annotations

import contextlib
import json
import os
from typing import TYPE_CHECKING

from ddpjob.reporting import frames
from ddpjob_core.heartbeat import STACK, STACKS_SIGNAL
from ddprun import processes, py_spy
from ddprun.calls import ChildCall
from ddprun.core import crash, folded_stacks
from ddprun.core.folded_stacks import RankStack
from ddprun.heartbeats import Heartbeats
from ddprun.node import say, text_of

if TYPE_CHECKING:
    from ddprun.agent import Agent

ANSWER_SECONDS = 0.6
AGAIN_SECONDS = 0.2  # seconds until the next try, while the ranks are still answering the watchdog
PY_SPY_RANKS_MAX = 4
STATES = {
    "T": "stopped by SIGSTOP or SIGTSTP; kill -CONT lets it go on",
    "t": "held by a debugger",
    "D": "does not answer: it waits in the kernel, for example for a disk or a driver",
    "R": "does not answer: it has been running C code that holds the interpreter",
    "S": "does not answer: it waits in C code that holds the interpreter",
}
UNWATCHED = "cannot be asked: no process group and no reported step"


class StacksQuestion:
    """Requests the stacks of the ranks and prints them. Another signal during a request is ignored."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._beats: Heartbeats | None = None
        self._number = 0  # number of the request for stacks in the heartbeat memory; 0: not sent yet
        self._call = ChildCall(agent, self._print)  # runs py-spy
        self._found: list[RankStack] = []
        self._is_open = False
        self.deadline: float | None = None

    def ask(self, beats: Heartbeats | None, now: float) -> None:
        """Ask the ranks for their stacks, which are printed soon."""
        if self._is_open:
            return
        if beats is None or not self._agent.node.running_ranks:
            say(f"{folded_stacks.NONE}no rank runs on this node now")
            return
        self._is_open, self._beats, self._number, self.deadline = True, beats, 0, now

    def end(self) -> None:
        """Drop the request, because the ranks are ending."""
        if self._is_open:
            self._call.abandon()
            self._is_open, self._beats, self.deadline = False, None, None
            say(f"{folded_stacks.NONE}the ranks are ending")

    def tick(self, now: float, *, is_free: bool) -> None:
        """Send a due request, or print the answers. is_free: True if the ranks have no other request to answer."""
        if self.deadline is None or now < self.deadline or self._beats is None:
            return
        if self._call.is_running:
            self._call.tick(now)
        elif self._number and self._number == self._beats.asked:
            self._collect(now)
        elif is_free:
            self._number, self.deadline = self._beats.ask(kind=STACK), now + ANSWER_SECONDS
            for rank in self._agent.node.running_ranks:
                if not self._beats.of(rank).pid:  # no thread in this rank answers requests
                    self._request_by_signal(rank)
        else:
            self._number, self.deadline = 0, now + AGAIN_SECONDS

    def _request_by_signal(self, local_rank: int) -> None:
        with contextlib.suppress(OSError):
            os.truncate(self._agent.node.crash_file(local_rank), 0)
        write_stacks(self._agent.node.pid(local_rank))

    def _collect(self, now: float) -> None:
        assert self._beats is not None, "they were asked"
        self._found = [self._of(rank, self._beats) for rank in sorted(self._agent.node.running_ranks)]
        silent = [one.pid for one in self._found if one.answer is None and one.pid and one.state != STATES["T"]]
        program = py_spy.program() if silent else None
        if program is not None:
            self._start_py_spy(program, silent[:PY_SPY_RANKS_MAX], now)
        else:
            self._print()

    def _of(self, local_rank: int, beats: Heartbeats) -> RankStack:
        rank, beat = self._agent.node.rank(local_rank), beats.of(local_rank)
        answer = beats.answer(local_rank)
        pid = beat.pid if os.path.exists(f"/proc/{beat.pid}") and beat.pid else self._agent.node.pid(local_rank)
        if answer is not None:
            return RankStack(rank, pid, beat.step, answer)
        state = "".join(processes.stat(pid)[:1])
        if state in ("T", "t"):
            return RankStack(rank, pid, beat.step, state=STATES[state])
        if not beat.pid:
            calls = crash.stack(text_of(self._agent.node.crash_file(local_rank)))
            folded = frames.folded([frames.Frame(*call) for call in calls])
            return RankStack(rank, pid, answer={"stack": folded}) if calls else RankStack(rank, pid, state=UNWATCHED)
        told = "; its stacks are in its log" if write_stacks(beat.pid) else ""
        return RankStack(rank, pid, beat.step, state=STATES.get(state, "does not answer") + told)

    def _start_py_spy(self, program: str, pids: list[int], now: float) -> None:
        try:
            self._call.begin(lambda: _py_spy(program, pids), now, py_spy.SECONDS * len(pids) + 1)
        except OSError:
            return self._print()
        self.deadline = self._call.until
        return None

    def _print(self, output: bytes = b"", _now: float = 0.0) -> None:
        stacks = {}
        with contextlib.suppress(ValueError):  # no answer in time
            stacks = json.loads(output)
        found = [one._replace(stack=stacks.get(str(one.pid), ())) for one in self._found]
        self._found, self._is_open, self._beats, self.deadline = [], False, None, None
        say(f"{folded_stacks.text(found)}\n{folded_stacks.PROGRAM}{folded_stacks.END}")


def _py_spy(program: str, pids: list[int]) -> bytes:
    return json.dumps({pid: py_spy.stack(program, pid) for pid in pids}).encode()


def write_stacks(pid: int) -> bool:
    """Let faulthandler print the stacks in the process itself. False if it has no handler: the signal would kill it."""
    if pid > 0 and processes.catches(pid, STACKS_SIGNAL):
        processes.send([pid], STACKS_SIGNAL)
        return True
    return False
