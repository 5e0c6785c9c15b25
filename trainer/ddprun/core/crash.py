"""Read faulthandler's text from a process: after a signal that killed it, or one that requested its stack."""

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
    """Return the calls of a process that a signal killed, as lines of a traceback, most recent last."""
    _, begin, text = dump.rpartition(_BEGIN)  # the last dump; children and requests write earlier ones
    lines = [f'  File "{file}", line {line}, in {name}' for file, line, name in stack(text if begin else "")]
    return lines[:CALLS_MAX][::-1]


def stack(dump: str) -> list[tuple[str, int, str]]:
    """Return file, line and function of each call of the thread that the signal hit, innermost first.

    dump: faulthandler's text. If the signal hit a C++ thread (of gloo, of NCCL's watchdog), it has no Python calls.
    Then return the main thread's, which most likely waits for it. faulthandler lists the main thread last, after at
    most 99 others; with more threads return nothing.
    """
    current: list[tuple[str, int, str]] = []
    last: list[tuple[str, int, str]] = []
    is_current = is_over = False
    for line in dump.splitlines():
        if line == _MORE_THREADS:
            last = []
        elif thread := _THREAD.match(line):
            is_current, is_over, last = thread[1] == "Current thread", False, []
        elif found := _CALL.match(line):
            is_over = is_over or found[1].endswith(_FORK_SERVER)  # calls below the fork server's are not the script's
            if not is_over:
                (current if is_current else last).append((found[1], int(found[2]), found[3]))
    return current or last
