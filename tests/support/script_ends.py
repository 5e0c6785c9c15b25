"""Processes that end as a script does, with the interpreter's whole exit. Forked, because torch is imported already."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import signal
import sys
import time
from collections.abc import Callable


def finish(script: Callable[[int], None], world_size: int) -> dict[int, tuple[int, float]]:
    """Return (exit code, seconds until then) by rank, of processes that run the script and then the interpreter's whole
    exit. Forked, because torch is imported here; ended like a script: the exception is kept for atexit, atexit runs,
    the objects are destroyed."""
    begin, ranks, ended = time.monotonic(), {}, {}
    # Otherwise each rank's exit collects everything that this process has imported, which takes a second. ddprun's fork
    # server freezes it, too.
    gc.freeze()
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            _run_as_a_script(script, rank)
        ranks[pid] = rank
    gc.unfreeze()
    for pid in ranks:
        for _ in range(3000):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                break
            time.sleep(0.01)
        else:
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
        ended[ranks[pid]] = (os.waitstatus_to_exitcode(status), time.monotonic() - begin)
    return ended


def _run_as_a_script(script: Callable[[int], None], rank: int) -> None:
    code = 0
    atexit._clear()  # pytest's handlers do not belong to this script
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        script(rank)
    except BaseException:
        sys.last_type, code = sys.exc_info()[0], 1
    ctypes.pythonapi.Py_Exit(code)
