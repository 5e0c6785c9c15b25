"""Leave gloo's groups without a hang or an abort after a successful training.

Groups are kept forever. A group's destructor joins gloo's threads while it holds the GIL, and a thread that has just
finished a collective needs the GIL to release the tensor (ProcessGroupGloo::runLoop -> decref_pyobject). The process
that drops the last reference then hangs: close() did in 5 of 46 groups of 3, and the DDP model at the end of a script
in 2 of 16. A pending collective also blocks the destructor until its timeout. Threads and sockets of a kept group end
with the process.

These threads must be idle before the interpreter ends, because a collective that nobody waited for leaves its tensor to
a thread. A thread that takes the GIL after that is ended within C++ code that does not allow it: "terminate called
without an active exception", SIGABRT, after a successful training. With a fixed pause of 20 ms instead, 16 of 250 jobs
ended so on a machine with ten processes per CPU.
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

SETTLE_SECONDS = 2.0  # time for pending collectives, which take milliseconds
SETTLE_AFTER_ERROR_SECONDS = 0.2  # short: pending collectives may never end, and peers should see the failure soon
POLL_SECONDS = 0.01
IDLE_POLLS = 2  # polls in a row that find threads idle, because a busy thread may sleep between two locks
_THREADS = "pt_gloo"  # name of the threads in which gloo runs collectives
_settles_at_exit: set[int] = set()  # processes in which `settle_at_exit` is registered


def never_destroy(group: Any) -> None:
    """Keep a reference to the group forever, so that its destructor never runs."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def keep_all_of(c10d: Any) -> None:
    """Keep every gloo group that this torch module creates, also by new_group, and end the process only when their
    threads are idle. If torch renames `_new_process_group_helper`, only the groups of `ddpjob.init` are kept.
    """
    make = getattr(c10d, "_new_process_group_helper", None)
    if make is None:
        return

    def make_and_keep(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        with contextlib.suppress(Exception):
            group = made[0] if isinstance(made, tuple) else made
            if "gloo" in str(c10d.get_backend_config(group)):  # "cpu:gloo,cuda:nccl" with two backends
                never_destroy(group)
                atexit.unregister(settle_at_exit)
                atexit.register(settle_at_exit, os.getpid())
                _settles_at_exit.add(os.getpid())
        return made

    c10d._new_process_group_helper = make_and_keep


def settle_at_exit(process: int) -> None:
    """Call `settle` in the process that has the threads, not in a fork of it."""
    if os.getpid() == process:
        settle(failed=hasattr(sys, "last_traceback"))


def settle_unless_at_exit() -> None:
    """Call `settle` if the exit of this process does not."""
    if os.getpid() not in _settles_at_exit:
        settle(failed=False)


def settle(*, failed: bool, seconds_max: float | None = None) -> None:
    """Wait until gloo's threads are idle, at most 2 s.

    After a failure wait only 0.2 s, and only for running threads: a collective that has begun may never end.
    """
    if seconds_max is None:
        seconds_max = SETTLE_AFTER_ERROR_SECONDS if failed else SETTLE_SECONDS
    deadline = time.monotonic() + seconds_max
    idle = 0
    while idle < IDLE_POLLS and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)  # releases the GIL to a thread that needs it
        idle = 0 if threads_run() else idle + 1
        if idle == IDLE_POLLS and not failed and has_work():  # takes 50 ms of CPU after 2000 collectives
            idle = 0


def threads_run() -> bool:
    """True if one of gloo's threads is running or waits for a CPU. Threads that wait for work or a peer sleep."""
    for path in glob.glob("/proc/self/task/*/stat"):  # empty outside Linux
        with contextlib.suppress(OSError, ValueError), open(path) as stat:
            name, _, rest = stat.read().partition("(")[2].rpartition(")")
            if name.startswith(_THREADS) and rest.split()[0] != "S":
                return True
    return False


def has_work() -> bool:
    """True if a gloo collective has begun and not ended, according to torch's flight recorder."""
    with contextlib.suppress(Exception):
        entries = recorder("_dump_fr_trace_json")
        return any(e["profiling_name"].startswith("gloo:") and not is_done(e) for e in entries)
    return False
