"""A limit of processor time for what reads a stranger's script: the rules follow values, and some ways are long.

The time is this process's own, so a loaded machine finds as much as an idle one.
"""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

from ddpjob_check.rule import TooLongError

T = TypeVar("T")

# Python's start takes 0.6 s, and the parser and the end of a tree, which no signal interrupts, up to 0.5 s: 5 s in all.
FILE_SECONDS = 3.0
PART = 0.6  # of the time that is left, so that a rule that takes too long leaves some for those after it
PART_SECONDS_MIN = 0.2
AGAIN_SECONDS = 0.05
"""An error that is raised in a destructor is lost, so it is raised again until it arrives."""


class CpuLimit:
    """Processor time for one file. Each part of the work, such as a rule, has only some of it."""

    def __init__(self, file_seconds: float = FILE_SECONDS) -> None:
        self._left = file_seconds

    def __call__(self, work: Callable[[], T]) -> T:
        """The result of the work. Raises TooLongError. Without a limit outside of the main thread, which alone gets
        signals."""
        if self._left <= 0:
            raise TooLongError
        is_armed, least = True, 0.0
        part = min(self._left, max(self._left * PART, PART_SECONDS_MIN))

        def stop(_number: int, _frame: FrameType | None) -> None:
            nonlocal least
            least = part  # the timer counts in ticks of the kernel, and may be some milliseconds early
            if is_armed:
                raise TooLongError

        try:
            before = signal.signal(signal.SIGVTALRM, stop)
        except ValueError:
            return work()
        began, collects = time.process_time(), gc.isenabled()
        gc.disable()  # it would go through the tree again and again, half of the time
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
