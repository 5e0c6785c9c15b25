"""Lend this terminal to a rank that waits in `breakpoint()` (breakpoints.py), until the rank gives it back or ends.

    python3 -I -S -c TEXT PID DESCRIPTOR INODE

`ddpjob dev --cluster` sends this text into a pod by `kubectl exec -t`. It needs Python 3.8 and imports nothing of ours.
Exit codes: 0 the rank gave the terminal back or ended, 3 no such rank is waiting, 130 Ctrl-C.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Callable  # noqa: UP035 - Python 3.8

GONE, INTERRUPTED = 3, 130
LOOK_SECONDS = 0.05


def lend(pid: str, descriptor: str, inode: str, device: str, is_over: Callable[[], object] = lambda: False) -> int:
    """Lend the terminal `device`. is_over: returns true if the terminal must be taken back. Return the exit code."""
    pipe = f"/proc/{pid}/fd/{descriptor}"
    code = GONE
    try:
        while os.readlink(pipe) == f"pipe:[{inode}]" and not is_over():
            if code == GONE:
                with open(pipe, "w") as file:
                    file.write(device)
                code = 0
            time.sleep(LOOK_SECONDS)
    except OSError:  # the rank has ended
        pass
    return code


def end_former() -> None:
    """End an earlier process that lent a terminal to this rank: it may outlive its client's connection."""
    own = _command_line("self")
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if int(pid) != os.getpid() and _command_line(pid) == own:
            os.kill(int(pid), signal.SIGKILL)


def _command_line(pid: str) -> bytes:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


def main() -> int:
    """Lend the terminal of this process."""
    end_former()
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    for number in (signal.SIGQUIT, signal.SIGTSTP):
        signal.signal(number, signal.SIG_IGN)
    return lend(sys.argv[1], sys.argv[2], sys.argv[3], os.ttyname(0))


if __name__ == "__main__":
    sys.exit(main())
