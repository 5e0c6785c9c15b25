"""What the operator takes from the process around it: time, chance, its log. It is handed in, so that tests and the
simulation bring their own and patch nothing."""

from __future__ import annotations

import datetime as dt
import gc
import logging
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random


def _utc() -> dt.datetime:
    return dt.datetime.now(dt.timezone.utc)


def _freeze_heap() -> None:
    """The garbage collector need not walk again and again through the thousands of objects that the first lists have
    loaded and that stay."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def allow_open_files(count: int) -> None:
    """Raise the process's own limit, of 1,024 under containerd 2, as far as it may: a connection is an open file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


@dataclass(frozen=True)
class Runtime:
    """One for a process; SYSTEM is the real one."""

    clock: Callable[[], float] = time.monotonic
    """Seconds of a clock that nobody sets: for waits and time-outs."""
    utc: Callable[[], dt.datetime] = _utc
    """The wall clock: for times that others read."""
    random: Random = field(default_factory=Random)
    """Spreads requests of several operators. Not for secrets."""
    log: logging.Logger = field(default_factory=lambda: logging.getLogger("ddpjob_operator"))
    freeze_heap: Callable[[], None] = _freeze_heap

    def now(self) -> dt.datetime:
        """The wall clock in whole seconds, as Kubernetes writes times."""
        return self.utc().replace(microsecond=0)


SYSTEM = Runtime()
