"""An asyncio loop in which waiting costs nothing: when all tasks wait, the clock jumps to the next timer. The same
program with the same seed does the same things in the same order, however slow the machine is."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Callable
from typing import Any

# An odd start time, which reveals code that reads the real clock.
START = dt.datetime(2031, 3, 5, 7, 11, 13, tzinfo=dt.timezone.utc)

ROUND_SECONDS = 1e-7


class NothingToWaitForError(Exception):
    """Raised if all tasks wait for something that can never come."""


class VirtualLoop(asyncio.BaseEventLoop):
    """A loop of one thread, without sockets, whose clock starts at 0."""

    def __init__(self) -> None:
        super().__init__()
        self._seconds = 0.0
        self._clock_resolution = 1e-6
        self._selector = self

    def time(self) -> float:
        """Return seconds since the start."""
        return self._seconds

    def now(self) -> dt.datetime:
        """Return the time in whole seconds, as Kubernetes writes times."""
        return START + dt.timedelta(seconds=int(self._seconds))

    def run_in_executor(self, _executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Run the function immediately: work in threads takes no virtual time."""
        done: asyncio.Future[Any] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    def select(self, timeout: float | None) -> list[object]:
        """Jump to the next timer. BaseEventLoop calls this when no callback is ready."""
        if timeout is None:
            raise NothingToWaitForError
        # Advance the clock in each round. Otherwise a sleep below the precision of a float would never end.
        self._seconds += max(ROUND_SECONDS, timeout)
        return []

    def _process_events(self, events: list[object]) -> None:
        """Do nothing, because there are no events."""

    def _write_to_self(self) -> None:
        """Do nothing, because no other thread calls this."""
