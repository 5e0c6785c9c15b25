"""The end of gloo's work: until its threads have let go of every tensor, the interpreter must not end.

A collective that nobody waited for leaves its tensor to the thread that works on it. To release it that thread needs
the lock of the interpreter, and once the interpreter ends, whoever asks for the lock is ended on the spot, in the
middle of C++ that allows no such thing: "terminate called without an active exception", SIGABRT, at the end of a
training that went well. After a fixed pause of 20 ms so ended 16 of 250 jobs on a machine with ten processes for each
CPU.
"""

import contextlib
import os
import time

from ddpjob.reporting.watchdog import is_done, recorder

LOOK_SECONDS = 0.01
LOOKS = 2  # a thread may sleep for a moment between two locks
_THREADS = "pt_gloo"  # torch's name for the threads that work on collectives


def settle(seconds_max: float, *, wait_for_work: bool) -> None:
    """Wait until gloo's threads have nothing to do, at most that long.

    wait_for_work: also for collectives that have not come to their end; without it only for threads that run.
    """
    deadline = time.monotonic() + seconds_max
    quiet = 0
    while quiet < LOOKS and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)  # without the interpreter's lock, so that who wants it gets it
        busy = _threads_run() or (wait_for_work and _has_work())
        quiet = 0 if busy else quiet + 1


def _threads_run() -> bool:
    """Whether one of them computes, or would if it had a CPU; those that wait for work or for a peer sleep."""
    try:
        threads = os.listdir("/proc/self/task")
    except OSError:  # no Linux
        return False
    for thread in threads:
        with contextlib.suppress(OSError, ValueError), open(f"/proc/self/task/{thread}/stat") as stat:
            name, _, rest = stat.read().partition("(")[2].rpartition(")")
            if name.startswith(_THREADS) and rest.split()[0] != "S":
                return True
    return False


def _has_work() -> bool:
    """Whether a collective of gloo has begun and not come to its end, as far as torch's flight recorder knows."""
    with contextlib.suppress(Exception):
        entries = recorder("_dump_fr_trace_json")
        return any(e["profiling_name"].startswith("gloo:") and not is_done(e) for e in entries)
    return False
