"""The memory of the heartbeats of one generation's ranks; `watchdog.py` is the ranks' side.

A file without a name, which ranks open through our descriptor of it: nothing is left behind, and nothing is on a disk
that may be slow. A number in the notify pipe, that of a process, reports that it has begun to train: until then there
is no heartbeat to read. A rank may have several such processes; one of them has its page.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import struct
from typing import Any, Literal

from ddpjob_core.heartbeat import (
    ANSWERED,
    ASKED,
    CELLS_BYTES,
    COLLECTIVES,
    COMPLETED,
    KIND,
    LENGTH,
    LOUD,
    NOTICE,
    OVER,
    PAGE_BYTES,
    PHASES,
    PID,
    SAVED,
    WAITED_IN,
)
from ddpjob_core.stall_limits import Phase
from ddprun.core.stall_monitor import Heartbeat
from ddprun.memory import create

READ_BYTES = 4096  # whole notices, which are written in one piece each
REFUSED = (errno.EACCES, errno.EPERM, errno.ENOSYS)


class Heartbeats:
    """The pages of this node's ranks."""

    def __init__(self, ranks: int) -> None:
        """Raises OSError, with nothing left open: it is tried again."""
        self._descriptor = _file()
        try:
            os.ftruncate(self._descriptor, ranks * PAGE_BYTES)
            memory = memoryview(mmap.mmap(self._descriptor, 0))
            self.notify_read, self._notify_write = os.pipe()
        except OSError:
            os.close(self._descriptor)
            raise
        os.set_blocking(self.notify_read, False)
        self._pages = [memory[rank * PAGE_BYTES :][:PAGE_BYTES] for rank in range(ranks)]
        self._cells = [page[:CELLS_BYTES].cast("q") for page in self._pages]
        self._asked = 0
        self._announced: set[int] = set()

    def where(self, local_rank: int) -> str:
        """What DDPJOB_BEATS is for this rank."""
        return f"{os.getpid()}:{self._descriptor}:{self._notify_write}:{local_rank}"

    def of(self, local_rank: int) -> Heartbeat:
        """This rank's heartbeat now."""
        cells = self._cells[local_rank]
        pid, phase, step, collectives = cells[:4]  # PID, PHASE, STEP, COLLECTIVES
        known: Phase | Literal[""] = PHASES[phase] if 0 <= phase < len(PHASES) else ""
        return Heartbeat(pid, known, step, collectives, cells[OVER] == 1, cells[COMPLETED] == 1)

    @property
    def furthest_step(self) -> int:
        """That a rank has made; one that was only loaded is not made here."""
        beats = map(self.of, range(len(self._cells)))
        return max((beat.step for beat in beats if beat.phase != "start"), default=0)

    @property
    def saved_step(self) -> int:
        """Of the newest checkpoint that a rank has saved or loaded; 0: none, or none is known."""
        return max((cells[SAVED] for cells in self._cells), default=0)

    @property
    def announced(self) -> set[int]:
        """The processes that have told that they train."""
        with contextlib.suppress(BlockingIOError):
            while read := os.read(self.notify_read, READ_BYTES):
                self._announced.update(number for (number,) in struct.iter_unpack(NOTICE, read))
        return self._announced

    def waited_in(self, local_rank: int) -> int:
        """The collective in which a rank that has ended waited until its timeout; 0: none, or it is not known."""
        return max(0, self._cells[local_rank][WAITED_IN])

    def ask(self, *, kind: int = LOUD) -> int:
        """Ask every rank where it is; it answers within half a second. The number of the question."""
        self._asked += 1
        for cells in self._cells:
            cells[KIND] = kind
            cells[ASKED] = self._asked
        return self._asked

    @property
    def asked(self) -> int:
        """The number of the last question."""
        return self._asked

    def begun_by(self, local_rank: int) -> int:
        """The operations of the default group that a rank had begun when it left it; -1: it has not left it."""
        cells = self._cells[local_rank]
        return cells[COLLECTIVES] if cells[OVER] == 1 else -1

    def answer(self, local_rank: int) -> dict[str, Any] | None:
        """To the last question; None: it has not answered."""
        cells = self._cells[local_rank]
        length = cells[LENGTH]
        if cells[ANSWERED] != self._asked or not 0 < length <= PAGE_BYTES - CELLS_BYTES or not cells[PID]:
            return None
        try:
            read = json.loads(bytes(self._pages[local_rank][CELLS_BYTES:][:length]))
        except ValueError:
            return None
        return read if isinstance(read, dict) else None

    def close(self) -> None:
        """No rank of this generation runs any more."""
        self._cells, self._pages = [], []  # nothing else refers to the memory
        for descriptor in (self._descriptor, self.notify_read, self._notify_write):
            os.close(descriptor)


def _file() -> int:
    """In memory; where the kernel refuses that always, on a disk: without heartbeats no rank would start.

    Raises OSError where it has none just now: ranks are started later.
    """
    try:
        return create("ddprun-beats")
    except OSError as error:
        if error.errno not in REFUSED:
            raise
    import tempfile  # here, because it is seldom needed, and each start would wait for it

    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
