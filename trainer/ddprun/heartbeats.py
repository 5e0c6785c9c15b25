"""Shared memory for the heartbeats of one generation's ranks; `ddpjob/reporting/watchdog.py` is the ranks' side.

It is an anonymous file, which ranks open through the agent's descriptor. So no file is left behind, and no slow disk is
used. A process that begins to train writes its pid to the notify pipe; before that there is no heartbeat to read. A
rank may have several such processes; one of them owns its page.
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
    FAILED,
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

READ_BYTES = 4096  # bytes read at once; a multiple of a notice's size, because each notice is written atomically
REFUSED = (errno.EACCES, errno.EPERM, errno.ENOSYS)


class Heartbeats:
    """The heartbeat pages of this node's ranks."""

    def __init__(self, ranks: int) -> None:
        """Create the shared memory. If this raises OSError, nothing is left open, and the caller retries."""
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
        """Value of DDPJOB_BEATS for this rank."""
        return f"{os.getpid()}:{self._descriptor}:{self._notify_write}:{local_rank}"

    def of(self, local_rank: int) -> Heartbeat:
        """Return this rank's heartbeat."""
        cells = self._cells[local_rank]
        pid, phase, step, collectives = cells[:4]  # PID, PHASE, STEP, COLLECTIVES
        known: Phase | Literal[""] = PHASES[phase] if 0 <= phase < len(PHASES) else ""
        return Heartbeat(pid, known, step, collectives, cells[OVER] == 1, cells[COMPLETED] == 1)

    @property
    def furthest_step(self) -> int:
        """Highest step that a rank has made; loaded steps do not count."""
        beats = map(self.of, range(len(self._cells)))
        return max((beat.step for beat in beats if beat.phase != "start"), default=0)

    @property
    def saved_step(self) -> int:
        """Step of the newest checkpoint that a rank has saved or loaded; 0 if unknown."""
        return max((cells[SAVED] for cells in self._cells), default=0)

    @property
    def announced(self) -> set[int]:
        """Return the pids of the processes that have announced that they train."""
        with contextlib.suppress(BlockingIOError):
            while read := os.read(self.notify_read, READ_BYTES):
                self._announced.update(number for (number,) in struct.iter_unpack(NOTICE, read))
        return self._announced

    def waited_in(self, local_rank: int) -> int:
        """Return the collective in which an ended rank waited until its timeout; 0 if unknown."""
        return max(0, self._cells[local_rank][WAITED_IN])

    def ask(self, *, kind: int = LOUD) -> int:
        """Request the position of every rank. Return the number of the request; ranks answer within half a second."""
        self._asked += 1
        for cells in self._cells:
            cells[KIND] = kind
            cells[ASKED] = self._asked
        return self._asked

    def group_failed(self) -> None:
        """Tell the ranks, before their SIGTERM, that the group has failed: they cannot agree on a last step."""
        for cells in self._cells:
            cells[FAILED] = 1

    @property
    def asked(self) -> int:
        """Number of the last request."""
        return self._asked

    def begun_by(self, local_rank: int) -> int:
        """Return how many operations a rank had begun in the default group when it left; -1 if it has not left."""
        cells = self._cells[local_rank]
        return cells[COLLECTIVES] if cells[OVER] == 1 else -1

    def answer(self, local_rank: int) -> dict[str, Any] | None:
        """Return the answer to the last request; None if there is none."""
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
        """Free the pages. Call it when no rank of this generation is running."""
        self._cells, self._pages = [], []  # drops the last references to the memory
        for descriptor in (self._descriptor, self.notify_read, self._notify_write):
            os.close(descriptor)


def _file() -> int:
    """Create the file in memory, or on disk if the kernel always refuses: without heartbeats no rank would start.

    Raise OSError for a temporary failure; ranks are then started later.
    """
    try:
        return create("ddprun-beats")
    except OSError as error:
        if error.errno not in REFUSED:
            raise
    import tempfile  # imported late: it is seldom needed and delays each start

    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
