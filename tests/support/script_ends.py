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
    """(exit code, seconds until then) by rank, of processes that run the script and then the interpreter's whole exit.

    Forked, because torch is imported here already; ended as a script is: the exception is noted for atexit, atexit
    runs, the objects are destroyed.
    """
    begin, ranks, ended = time.monotonic(), {}, {}
    # Else each rank's exit collects all that this process has imported, for a second. ddprun's fork server freezes too.
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
    atexit._clear()  # what pytest registered is not this script's
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        script(rank)
    except BaseException:
        sys.last_type, code = sys.exc_info()[0], 1
    ctypes.pythonapi.Py_Exit(code)
