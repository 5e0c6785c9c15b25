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
READ_BYTES = 1 << 16


class ChildCall:
    """One call at a time."""

    def __init__(self, agent: Agent, answered: Callable[[bytes, float], None]) -> None:
        """answered: takes the result of each call, and the time; b"" if the child was killed."""
        self._agent, self._answered = agent, answered
        self._child, self._pipe, self._answer = 0, -1, b""
        self._seconds = self.until = 0.0  # limit and deadline of the running call

    @property
    def is_running(self) -> bool:
        return self._pipe >= 0

    def begin(self, work: Callable[[], bytes], now: float, seconds: float = SECONDS_MAX) -> None:
        """Start a call. Raise OSError if no process can be created."""
        self._child, self._pipe = processes.call_in_child(work)
        self._answer, self._seconds, self.until = b"", seconds, now + seconds
        self._agent.node.helpers.add(self._child)
        self._agent.watch(self._pipe, self._receive)

    def tick(self, now: float) -> None:
        """End a call that takes too long."""
        if self.is_running and now >= self.until:
            self.abandon()
            self._answered(b"no answer within %d s" % self._seconds, now)

    def wait(self, seconds: float) -> None:
        """Wait for the result of the running call."""
        while self.is_running and processes.readable(self._pipe, seconds):
            self._receive()

    def _receive(self) -> None:
        try:
            read = os.read(self._pipe, READ_BYTES)
        except BlockingIOError:
            return
        self._answer += read
        if not read:
            self._close()
            self._answered(self._answer, time.monotonic())

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
