"""The memory in which the ranks of one generation say where they stand; `watchdog.py` is their side, and says how.

A file without a name, which ranks open through our descriptor of it: nothing is left behind, and nothing is on a disk
that may be slow. A byte in the bell says that a rank has begun: until then there is nothing to look at.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from typing import Any

from ddpjob.agent.core.stall_monitor import Beat
from ddpjob.core.heartbeat import ANSWERED, ASKED, CELLS_BYTES, LENGTH, OVER, PAGE_BYTES, PHASES, PID

_BEAT = struct.Struct("4q")  # PID, PHASE, STEP, COLLECTIVES
_CELL = struct.Struct("q")


class Beats:
    """The pages of this node's ranks."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._descriptor = os.memfd_create("ddprun-beats")
        os.ftruncate(self._descriptor, ranks * PAGE_BYTES)
        self._memory = mmap.mmap(self._descriptor, 0)
        self.bell, self._rope = os.pipe()
        os.set_blocking(self.bell, False)
        self._asked = 0

    def where(self, local_rank: int) -> str:
        """What DDPJOB_BEATS is for this rank."""
        return f"{os.getpid()}:{self._descriptor}:{self._rope}:{local_rank}"

    def of(self, local_rank: int) -> Beat:
        """What this rank says now."""
        pid, phase, step, collectives = _BEAT.unpack_from(self._memory, local_rank * PAGE_BYTES)
        over = self._cell(local_rank * PAGE_BYTES, OVER) == 1
        return Beat(pid, PHASES[phase] if 0 <= phase < len(PHASES) else "", step, collectives, over)

    @property
    def furthest_step(self) -> int:
        """That a rank has made; one that was only loaded is not made here."""
        beats = [self.of(rank) for rank in range(self._ranks)]
        return max((beat.step for beat in beats if beat.phase != "start"), default=0)

    def ask(self) -> None:
        """Every rank shall say where it is, in the next half second."""
        self._asked += 1
        for rank in range(self._ranks):
            _CELL.pack_into(self._memory, rank * PAGE_BYTES + ASKED * _CELL.size, self._asked)

    def answer(self, local_rank: int) -> dict[str, Any] | None:
        """To the last question; None: it has not answered."""
        page = local_rank * PAGE_BYTES
        answered, length = (self._cell(page, cell) for cell in (ANSWERED, LENGTH))
        if answered != self._asked or not 0 < length <= PAGE_BYTES - CELLS_BYTES or not self._cell(page, PID):
            return None
        begin = page + CELLS_BYTES
        try:
            read = json.loads(self._memory[begin : begin + length])
        except ValueError:
            return None
        return read if isinstance(read, dict) else None

    def close(self) -> None:
        """No rank of this generation runs any more."""
        self._memory.close()
        for descriptor in (self._descriptor, self.bell, self._rope):
            os.close(descriptor)

    def _cell(self, page: int, cell: int) -> int:
        return int(_CELL.unpack_from(self._memory, page + cell * _CELL.size)[0])
