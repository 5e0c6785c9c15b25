"""Read what faulthandler wrote in a process that a signal killed, as a traceback."""

from __future__ import annotations

import re
import signal

SIGNALS = (signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL)
"""Signals that `faulthandler.enable` handles."""
CALLS_MAX = 20
_BEGIN = "Fatal Python error: "
_THREAD = re.compile(r"^(Current thread|Thread) 0x")
_MORE_THREADS = "..."
_CALL = re.compile(r'^  File "(.*)", line (\d+) in (.+)$')
_FORK_SERVER = "/ddprun/forkserver.py"


def calls(dump: str) -> list[str]:
    """Return the calls of the thread that the signal hit, as lines of a traceback, most recent last.

    dump: faulthandler's text. C++ threads (of gloo, of NCCL's watchdog) have no Python calls. Then return those of the
    main thread, which most likely waits for that thread. faulthandler lists it last, after at most 99 others. With more
    threads return nothing.
    """
    current: list[str] = []
    last: list[str] = []
    is_current = is_over = False
    for line in dump.rpartition(_BEGIN)[2].splitlines():  # a child of the rank may have crashed before
        if line == _MORE_THREADS:
            last = []
        elif thread := _THREAD.match(line):
            is_current, is_over, last = thread[1] == "Current thread", False, []
        elif found := _CALL.match(line):
            is_over = is_over or found[1].endswith(_FORK_SERVER)  # the script's calls end here
            if not is_over:
                (current if is_current else last).insert(0, f'  File "{found[1]}", line {found[2]}, in {found[3]}')
    return (current or last)[-CALLS_MAX:]
