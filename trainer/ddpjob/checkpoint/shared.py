"""The memory of this rank's node, as the rank sees it: cells, slots and the area (`core/memory.py` has the layout)."""

import contextlib
import fcntl
import mmap
import os
from collections.abc import Iterator
from typing import Any

from ddpjob.checkpoint import packed
from ddpjob.core import memory
from ddpjob.core.memory import (
    AREA_ASSUMED,
    AREA_BYTES,
    AREA_GENERATION,
    AREA_LOADS,
    AREA_STEP,
    AREA_SUM,
    GENERATION,
    PROOF_GENERATION,
    PROOF_STEP,
    PROOF_SUM,
    RESERVED,
    Held,
    Mark,
    Proof,
    Version,
)


class Shared:
    """One rank's view of its agent's memory."""

    def __init__(self, where: str, attempt: int, generation: int) -> None:
        """where: DDPJOB_MEMORY. Raises OSError, ValueError where the agent or its memory is not there."""
        agent, file, pipe, ranks, local_rank = map(int, where.split(":"))
        self._path, self._pipe_path = f"/proc/{agent}/fd/{file}", f"/proc/{agent}/fd/{pipe}"
        self.attempt, self.generation, self.local_rank, self._ranks = attempt, generation, local_rank, ranks
        self._opened = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        self._identity = _identity(self._opened)
        self.pipe = os.open(self._pipe_path, os.O_RDONLY | os.O_CLOEXEC)
        cells = memoryview(mmap.mmap(self._opened, (1 + ranks) * memory.PAGE_BYTES)).cast("q")
        page = memory.PAGE_BYTES // 8
        self.node = cells[: memory.NODE_CELLS]
        self._all = [cells[(1 + rank) * page :][: memory.RANK_CELLS] for rank in range(ranks)]
        self.cells = self._all[local_rank]
        self._area = memory.layout(ranks)[1]

    @property
    def _file(self) -> int:
        """Raises OSError where the script has closed it: another file may have its number."""
        if _identity(self._opened) != self._identity:
            raise OSError(9, "the script has closed the descriptor of the memory")
        return self._opened

    @property
    def is_current(self) -> bool:
        """Whether the ranks that run on this node are of this generation."""
        return bool(self.node[GENERATION] == self.generation)

    def clocks_of_others(self) -> list[int]:
        """Of the ranks of this node that live, take part, and have not answered yet."""
        others = [cells for rank, cells in enumerate(self._all) if rank != self.local_rank]
        waiting = [cells for cells in others if cells[memory.PID] and cells[memory.ANSWER] == memory.NONE]
        return [cells[memory.CLOCK] for cells in waiting if os.path.exists(f"/proc/{cells[memory.PID]}")]

    @contextlib.contextmanager
    def locked(self) -> Iterator[bool]:
        """Whether this process alone writes the area now. Who dies gives the lock back, a fork of it has no part."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(descriptor)

    # ---- the area: under the lock --------------------------------------------------------------------------

    def reserve(self, size: int) -> None:
        """Take memory for so many bytes of the area. Raises OSError."""
        if self.node[RESERVED] < size:
            os.posix_fallocate(self._file, self._area, size)
            self.node[RESERVED] = size

    def write_area(self, state: packed.Packed, step: int, loads: int, *, assumed: bool) -> None:
        """Replace what is there; until it ends, nothing is. Raises OSError."""
        self.node[AREA_STEP] = 0
        packed.write(self._file, self._area, state)
        self.node[AREA_GENERATION], self.node[AREA_LOADS] = self.generation, loads
        self.node[AREA_BYTES], self.node[AREA_SUM] = state.size, packed.total(state.tensors)
        self.node[AREA_ASSUMED] = assumed
        self.node[AREA_STEP] = step

    def held(self) -> Held | None:
        """What the area has."""
        step = self.node[AREA_STEP]
        if step <= 0:
            return None
        version = Version(self.attempt, self.node[AREA_GENERATION], step)
        node = self.node
        return Held(version, node[AREA_LOADS], node[AREA_BYTES], node[AREA_SUM], bool(node[AREA_ASSUMED]))

    def count_load(self) -> None:
        """What the area has was loaded once more."""
        self.node[AREA_LOADS] += 1

    def read_area(self, size: int) -> Any:
        """The value. Raises StateError."""
        return packed.read(self._file, self._area, size)

    def read_area_into(self, data: memoryview) -> None:
        """The bytes, for a peer. Raises OSError."""
        done = 0
        while done < len(data):
            count = os.preadv(self._file, [data[done : done + (1 << 30)]], self._area + done)
            if count <= 0:
                raise OSError(5, "the memory is shorter than it was")
            done += count

    # ---- the slots of this rank ----------------------------------------------------------------------------

    def write_slot(self, slot: int, value: packed.Packed, step: int) -> None:
        """Replace what is there. Raises OSError."""
        cell = memory.slot_cell
        self.cells[cell(slot, memory.SLOT_STEP)] = 0
        if value.size > memory.SECTION_BYTES:
            raise OSError(28, "too large for its slot")
        packed.write(self._file, memory.slot_offset(self.local_rank, slot, self._ranks), value)
        self.cells[cell(slot, memory.SLOT_GENERATION)] = self.generation
        self.cells[cell(slot, memory.SLOT_BYTES)] = value.size
        self.cells[cell(slot, memory.SLOT_STEP)] = step

    def forget_slot(self, slot: int) -> None:
        """Nothing is there."""
        self.cells[memory.slot_cell(slot, memory.SLOT_STEP)] = 0

    def forget_slots(self) -> None:
        """Nothing of this generation is there; what an older one has left belongs to the state in the area."""
        for slot in range(memory.SLOTS):
            if self.cells[memory.slot_cell(slot, memory.SLOT_GENERATION)] == self.generation:
                self.forget_slot(slot)

    def slot_version(self, slot: int) -> Version | None:
        """Of what a slot has."""
        step = self.cells[memory.slot_cell(slot, memory.SLOT_STEP)]
        generation = self.cells[memory.slot_cell(slot, memory.SLOT_GENERATION)]
        return Version(self.attempt, generation, step) if step > 0 else None

    def mark(self) -> Mark | None:
        """The last boundaries of this rank, or of the one that was in its place; None: there were fewer than two."""
        one, other = (self.slot_version(slot) for slot in range(memory.EARLY))
        if one is None or other is None or one.generation != other.generation:
            return None
        return Mark(one.generation, max(one.step, other.step), min(one.step, other.step))

    def read_slot(self, slot: int) -> Any:
        """The value. Raises StateError."""
        size = self.cells[memory.slot_cell(slot, memory.SLOT_BYTES)]
        return packed.read(self._file, memory.slot_offset(self.local_rank, slot, self._ranks), size)

    # ---- the proof that ranks are replicas -----------------------------------------------------------------

    def write_proof(self, step: int, total: int) -> None:
        """What this rank's parameters summed to at this step."""
        self.cells[PROOF_STEP] = 0
        self.cells[PROOF_GENERATION], self.cells[PROOF_SUM] = self.generation, total
        self.cells[PROOF_STEP] = step

    def proof(self) -> Proof | None:
        """Of this rank, or of the one that was in its place."""
        step = self.cells[PROOF_STEP]
        return Proof(self.cells[PROOF_GENERATION], step, self.cells[PROOF_SUM]) if step > 0 else None


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino
