"""Run a function in a child process and receive its result in the agent's loop, because the function may block."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ddprun import processes

if TYPE_CHECKING:
    from ddprun.agent import Agent

SECONDS_MAX = 30.0  # needed for name resolution; requests have a shorter time-out (ddpjob/reporting/sender.py)
ANSWER_BYTES_MAX = 4096


class ChildCall:
    """One call at a time."""

    def __init__(self, agent: Agent, answered: Callable[[bytes, float], None]) -> None:
        """answered: takes the result of each call, and the time; b"" if the child was killed."""
        self._agent, self._answered = agent, answered
        self._child, self._pipe = 0, -1
        self.until = 0.0  # deadline of the running call

    @property
    def is_running(self) -> bool:
        return self._pipe >= 0

    def begin(self, work: Callable[[], bytes], now: float) -> None:
        """Start a call. Raise OSError if no process can be created."""
        self._child, self._pipe = processes.call_in_child(work)
        self.until = now + SECONDS_MAX
        self._agent.node.helpers.add(self._child)
        self._agent.watch(self._pipe, self.receive)

    def tick(self, now: float) -> None:
        """End a call that takes too long."""
        if self.is_running and now >= self.until:
            self.abandon()
            self._answered(b"no answer within %d s" % SECONDS_MAX, now)

    def wait(self, seconds: float) -> None:
        """Wait for the result of the running call."""
        if self.is_running and processes.readable(self._pipe, seconds):
            self.receive()

    def receive(self) -> None:
        try:
            answer = os.read(self._pipe, ANSWER_BYTES_MAX)
        except BlockingIOError:
            return
        self._close()
        self._answered(answer, time.monotonic())

    def abandon(self) -> None:
        """Kill the child. Its pid cannot belong to another process yet, because the child has not been reaped."""
        if self.is_running:
            processes.kill([self._child])
            self._close()

    def _close(self) -> None:
        self._agent.node.helpers.discard(self._child)
        self._agent.unwatch(self._pipe)
        os.close(self._pipe)
        self._pipe = -1
