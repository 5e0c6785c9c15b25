"""An asyncio in which waiting costs nothing: when everybody waits, the clock jumps to the next timer.

The same program with the same seed does the same things in the same order, however slow the machine.
"""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Callable
from typing import Any

# An odd moment, so that code which reads the real clock is found out.
START = dt.datetime(2031, 3, 5, 7, 11, 13, tzinfo=dt.timezone.utc)

ROUND_SECONDS = 1e-7


class NothingToWaitForError(Exception):
    """All tasks wait for something that can never come."""


class VirtualLoop(asyncio.BaseEventLoop):
    """A loop of one thread, without sockets. Its clock starts at 0."""

    def __init__(self) -> None:
        super().__init__()
        self._seconds = 0.0
        self._clock_resolution = 1e-6
        self._selector = self

    def time(self) -> float:
        """Seconds since the start."""
        return self._seconds

    def now(self) -> dt.datetime:
        """Whole seconds, as Kubernetes writes times."""
        return START + dt.timedelta(seconds=int(self._seconds))

    def run_in_executor(self, _executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """At once: what a thread does takes no virtual time."""
        done: asyncio.Future[Any] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    def select(self, timeout: float | None) -> list[object]:
        """What BaseEventLoop calls when no callback is ready."""
        if timeout is None:
            raise NothingToWaitForError
        # Each round takes a moment, as everywhere: who sleeps for less than a float can tell must come to an end.
        self._seconds += max(ROUND_SECONDS, timeout)
        return []

    def _process_events(self, events: list[object]) -> None:
        """There are never any."""

    def _write_to_self(self) -> None:
        """Nobody calls from another thread."""
