"""`breakpoint()` in a rank of `ddpjob dev`: it waits until the user's terminal is lent to this rank (lend_terminal.py).

The rank prints a line that names a pipe of its own, as pid, descriptor and inode:

    ddprun: rank 1 waits in breakpoint() at train.py:12 (4711 5 88213)

`ddpjob dev` reads the line in the log, and writes a terminal's device into the pipe, in a pod by `kubectl exec`. The
rank keeps the pipe open until it gives the terminal back, at `continue` or at its end. So ranks get it in turns.
"""

from __future__ import annotations

import os
import pdb  # noqa: T100 - this is the debugger
import select
import sys
from types import FrameType
from typing import Any

DEVICE_BYTES_MAX = 4096


def stop(*_args: object, **_words: object) -> None:
    """Start pdb in the caller. The environment variable PYTHONBREAKPOINT names this function."""
    Debugger(nosigint=True).set_trace(sys._getframe().f_back)


class Debugger(pdb.Pdb):
    """pdb at a terminal that it borrows at its first stop and gives back when the script continues."""

    _pipe: tuple[int, int] | None = None
    _own: tuple[int, int, Any, Any]  # descriptors and streams of stdin and stdout before the terminal is borrowed

    def interaction(self, frame: FrameType | None, *rest: Any, **options: Any) -> None:
        if frame is not None and self._pipe is None:
            self._borrow(frame)
        super().interaction(frame, *rest, **options)

    def cmdloop(self, intro: Any = None) -> None:
        while True:
            try:
                return super().cmdloop(intro)
            except OSError:  # noqa: PERF203 - a connection is lost rarely
                if not self._is_cut_off():
                    raise
                self._give_back()
                assert self.curframe is not None, "pdb is in a frame"
                self._borrow(self.curframe)

    def do_EOF(self, arg: str) -> Any:  # noqa: N802 - pdb's name
        """Quit at Ctrl-D. If the input ends because the connection is lost, wait for the next terminal."""
        if self._is_cut_off():
            raise OSError("the terminal is gone")
        return super().do_EOF(arg)

    def set_continue(self) -> None:
        super().set_continue()
        self._give_back()

    def set_quit(self) -> None:
        super().set_quit()
        self._give_back()

    def _borrow(self, frame: FrameType) -> None:
        """Wait for a terminal, and use it as stdin and stdout, at descriptors 0 and 1 because readline needs that."""
        rank, place = os.environ.get("RANK", "0"), f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        read_end, write_end = self._pipe = os.pipe()
        inode = os.fstat(read_end).st_ino
        os.write(
            2, f"ddprun: rank {rank} waits in breakpoint() at {place} ({os.getpid()} {write_end} {inode})\n".encode()
        )
        device = os.read(read_end, DEVICE_BYTES_MAX).decode().strip()
        sys.stdout.flush()
        self._own = os.dup(0), os.dup(1), sys.stdin, sys.stdout
        terminal = os.open(device, os.O_RDWR | os.O_NOCTTY)
        for descriptor in (0, 1):
            os.dup2(terminal, descriptor)
        os.close(terminal)
        self.stdin = sys.stdin = open(0, closefd=False)  # noqa: SIM115 - open until the terminal is given back
        self.stdout = sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        self.prompt = f"rank {rank} (Pdb) "
        self.message(f"rank {rank} has the terminal until c or q; other ranks wait at their breakpoint()")

    def _give_back(self) -> None:
        if self._pipe is None:
            return
        stdin, stdout, *streams = self._own
        for kept, descriptor in ((stdin, 0), (stdout, 1)):
            os.dup2(kept, descriptor)
            os.close(kept)
        self.stdin, self.stdout = sys.stdin, sys.stdout = streams
        for end in self._pipe:
            os.close(end)
        self._pipe = None

    def _is_cut_off(self) -> bool:
        poller = select.poll()
        poller.register(0, 0)
        return self._pipe is not None and any(event & select.POLLHUP for _, event in poller.poll(0))
