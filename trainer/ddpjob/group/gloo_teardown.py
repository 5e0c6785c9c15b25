"""The end of gloo's groups, which must not hang or abort a rank that has done its work.

Its groups are kept for ever, because the destructor of one joins gloo's threads while it holds the interpreter's lock,
and a thread that has just finished a collective wants that lock to release the tensor (ProcessGroupGloo::runLoop ->
decref_pyobject). The process that drops the last reference then hangs: close() did in 5 of 46 groups of 3, with stacks
that show it, and the DDP model does as well at the end of a script (2 of 16). A collective still under way holds the
destructor until its time-out besides (20 s of 20 s). Kept, its threads and sockets end with the process.

Those threads must be idle before the interpreter ends, because a collective that nobody waited for leaves its tensor to
the thread that works on it. Once the interpreter ends, a thread that takes its lock is ended on the spot, in the
middle of C++ that allows no such thing: "terminate called without an active exception", SIGABRT, at the end of a
training that went well. With a fixed pause of 20 ms instead, 16 of 250 jobs ended so on a machine with ten processes
for each CPU.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import glob
import os
import sys
import time
from typing import Any

from ddpjob.reporting.watchdog import is_done, recorder

SETTLE_SECONDS = 2.0  # for collectives that nobody waited for; they take milliseconds
SETTLE_AFTER_ERROR_SECONDS = 0.2  # they may never end then, and the peers in them shall notice soon
POLL_SECONDS = 0.01
IDLE_POLLS = 2  # a thread may sleep for a moment between two locks
_THREADS = "pt_gloo"  # torch's name for the threads that work on collectives


def never_destroy(group: Any) -> None:
    """Keep one reference for ever."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def keep_all_of(c10d: Any) -> None:
    """Keep every group of gloo that this module of torch makes from now on, also by new_group; and let this process end
    only when their threads are idle. Where this function of torch has another name, only those of `ddpjob.init` are
    kept."""
    make = getattr(c10d, "_new_process_group_helper", None)
    if make is None:
        return

    def make_and_keep(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        with contextlib.suppress(Exception):
            group = made[0] if isinstance(made, tuple) else made
            if "gloo" in str(c10d.get_backend_config(group)):  # "cpu:gloo,cuda:nccl" where there are two
                never_destroy(group)
                atexit.unregister(_settle_at_exit)
                atexit.register(_settle_at_exit, os.getpid())
        return made

    c10d._new_process_group_helper = make_and_keep


def _settle_at_exit(process: int) -> None:
    """In the process that has the threads, and not in a fork of it."""
    if os.getpid() == process:
        settle(failed=hasattr(sys, "last_traceback"))


def settle(*, failed: bool, seconds_max: float | None = None) -> None:
    """Wait until gloo's threads have nothing to do, for 2 s at most.

    After a failure only for threads that run, and 0.2 s: a collective that has begun may never end.
    """
    if seconds_max is None:
        seconds_max = SETTLE_AFTER_ERROR_SECONDS if failed else SETTLE_SECONDS
    deadline = time.monotonic() + seconds_max
    idle = 0
    while idle < IDLE_POLLS and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)  # without the interpreter's lock, so that a thread that wants it gets it
        idle = 0 if threads_run() or (not failed and has_work()) else idle + 1


def threads_run() -> bool:
    """Whether one of them computes, or would if it had a CPU; those that wait for work or for a peer sleep."""
    for path in glob.glob("/proc/self/task/*/stat"):  # none where there is no Linux
        with contextlib.suppress(OSError, ValueError), open(path) as stat:
            name, _, rest = stat.read().partition("(")[2].rpartition(")")
            if name.startswith(_THREADS) and rest.split()[0] != "S":
                return True
    return False


def has_work() -> bool:
    """Whether a collective of gloo has begun and not come to its end, as far as torch's flight recorder knows."""
    with contextlib.suppress(Exception):
        entries = recorder("_dump_fr_trace_json")
        return any(e["profiling_name"].startswith("gloo:") and not is_done(e) for e in entries)
    return False
