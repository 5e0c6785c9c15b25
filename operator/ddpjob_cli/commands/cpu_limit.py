"""Limit the CPU time for checking a stranger's script, because rules follow values through long chains. CPU time
makes the findings equal on a loaded and an idle machine."""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

from ddpjob_check.parsing import TooLongError

T = TypeVar("T")

# A check takes at most 5 s in total: starting Python takes 0.6 s, and no signal interrupts parsing and freeing a tree.
FILE_SECONDS = 3.0
PART = 0.6  # share of the remaining time for one part, so that time is left for later rules
PART_SECONDS_MIN = 0.2
AGAIN_SECONDS = 0.05  # seconds until the error is raised again, because an error raised in a destructor is lost


class CpuLimit:
    """Limits the processor time for one file. Each part of the work, such as a rule, gets only a share."""

    def __init__(self, file_seconds: float = FILE_SECONDS) -> None:
        self._left = file_seconds

    def __call__(self, work: Callable[[], T]) -> T:
        """Return the work's result. Raise TooLongError, but only in the main thread: other threads get no signals."""
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
        gc.disable()  # the collector would spend half of the time on traversing the syntax tree
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
