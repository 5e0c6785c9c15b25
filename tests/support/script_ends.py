"""Forked processes that end like a script, including the exit of the interpreter. A fork need not import torch."""

import atexit
import ctypes
import gc
import os
import signal
import sys
import time
from collections.abc import Callable


def finish(script: Callable[[int], None], world_size: int) -> dict[int, tuple[int, float]]:
    """Run the script in forked processes that exit like a new Python: atexit functions run, with the exception, and all
    objects are destroyed. Return (exit code, seconds until the exit) by rank."""
    begin, ranks, ended = time.monotonic(), {}, {}
    # Freeze all imported objects, as ddprun's fork server does.
    # Otherwise each rank's garbage collector visits all imported objects at exit, which takes a second.
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
    atexit._clear()  # pytest's handlers must not run in this script
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        script(rank)
    except BaseException:
        sys.last_type, code = sys.exc_info()[0], 1
    ctypes.pythonapi.Py_Exit(code)
