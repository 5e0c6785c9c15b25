"""Clocks, randomness and log of the operator. Tests and the simulation pass their own."""

from __future__ import annotations

import datetime as dt
import gc
import logging
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random


def _freeze_heap() -> None:
    """Exempt the objects of the first lists from garbage collection, because there are thousands and they stay."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def allow_open_files(count: int) -> None:
    """Raise the soft limit of open files (1,024 under containerd 2) up to `count`. Each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class LogOnce:
    """Logs a text unless it was the last one. An empty text means that the problem is over, and is not logged."""

    def __init__(self, log: Callable[..., None]) -> None:
        self._log, self._last = log, ""

    def __call__(self, text: str) -> None:
        if text and text != self._last:
            self._log("%s", text)
        self._last = text


@dataclass(frozen=True)
class Runtime:
    """Clocks, randomness and log of one operator."""

    clock: Callable[[], float] = time.monotonic
    """Monotonic, in seconds, for waits and time-outs."""
    utc: Callable[[], dt.datetime] = lambda: dt.datetime.now(dt.timezone.utc)
    """Wall clock, for times that others read."""
    random: Random = field(default_factory=Random)
    """Jitter for requests of several operators. Not for secrets."""
    log: logging.Logger = field(default_factory=lambda: logging.getLogger("ddpjob_operator"))
    freeze_heap: Callable[[], None] = _freeze_heap

    def now(self) -> dt.datetime:
        """Return the wall clock in whole seconds, as metav1.Time stores it."""
        return self.utc().replace(microsecond=0)


SYSTEM = Runtime()
