"""Limits CPU time for reading a stranger's script: rules follow values, and some chains are long. CPU time, so that a
loaded machine finds as much as an idle one."""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

from ddpjob_check.parsing import TooLongError

T = TypeVar("T")

# Starting Python takes 0.6 s, and parsing and freeing a tree, which no signal interrupts, up to 0.5 s: 5 s in all.
FILE_SECONDS = 3.0
PART = 0.6  # of the remaining time, so that a slow rule leaves some for later ones
PART_SECONDS_MIN = 0.2
AGAIN_SECONDS = 0.05  # an error raised in a destructor is lost, so it is raised again until it arrives


class CpuLimit:
    """Processor time for one file. Each part of the work, such as a rule, gets only a share."""

    def __init__(self, file_seconds: float = FILE_SECONDS) -> None:
        self._left = file_seconds

    def __call__(self, work: Callable[[], T]) -> T:
        """Return the result of the work. Raise TooLongError. Only the main thread gets signals, and so has a limit."""
        if self._left <= 0:
            raise TooLongError
        is_armed, least = True, 0.0
        part = min(self._left, max(self._left * PART, PART_SECONDS_MIN))

        def stop(_number: int, _frame: FrameType | None) -> None:
            nonlocal least
            least = part  # the timer counts kernel ticks, and may be some milliseconds early
            if is_armed:
                raise TooLongError

        try:
            before = signal.signal(signal.SIGVTALRM, stop)
        except ValueError:
            return work()
        began, collects = time.process_time(), gc.isenabled()
        gc.disable()  # it would traverse the tree repeatedly, for half of the time
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, part, AGAIN_SECONDS)
            return work()
        finally:
            is_armed = False
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)
            if collects:
                gc.enable()
            self._left -= max(least, time.process_time() - began)
