"""A rank's access to the shared memory of its node: cells, slots and areas (layout: `ddpjob_core/memory.py`)."""

import array
import contextlib
import fcntl
import functools
import mmap
import os
from collections.abc import Iterator
from typing import Any

import torch

from ddpjob import limits, process
from ddpjob.checkpoint.state import packed
from ddpjob.errors import StateError
from ddpjob_core import copies, memory
from ddpjob_core.memory import Held, Mark, Proof, Version

AGAIN_SECONDS = 0.001
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE: map all pages at once; one by one takes ten times as long


class Shared:
    """One rank's access to the shared memory that its agent owns.

    Memory is reserved before it is written, because the kernel kills a process that writes to a page for which there is
    no memory.
    """

    def __init__(self, where: str, attempt: int, generation: int) -> None:
        """where: value of DDPJOB_MEMORY. Raises OSError or ValueError if the agent or its memory is gone."""
        agent, file, pipe, ranks, local_rank = map(int, where.split(":"))
        self._path = f"/proc/{agent}/fd/{file}"
        self.attempt, self.generation, self.local_rank, self.ranks = attempt, generation, local_rank, ranks
        cells = memoryview(self._map(0, (1 + ranks) * memory.PAGE_BYTES)).cast("q")
        self.pipe = os.open(f"/proc/{agent}/fd/{pipe}", os.O_RDONLY | os.O_CLOEXEC)
        page = memory.PAGE_BYTES // 8
        self.node = cells[: memory.NODE_CELLS]
        firsts = (memory.area_cell(area, 0) for area in range(memory.AREAS))
        self._described = [self.node[first:][: memory.AREA_CELLS] for first in firsts]  # cells of each area
        self._all = [cells[(1 + rank) * page :][: memory.RANK_CELLS] for rank in range(ranks)]
        self.cells = self._all[local_rank]
        self._taken = [0] * memory.SLOTS  # number of bytes that this process has reserved for each slot
        self._areas: dict[int, mmap.mmap] = {}
        self.loaded: Held | None = None
        """The state that this generation has loaded from memory."""

    @contextlib.contextmanager
    def _file(self) -> Iterator[int]:
        """Open the memory's file briefly, because a script may close descriptors that stay open. Raises OSError."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        try:
            yield descriptor
        finally:
            with contextlib.suppress(OSError):  # fails if the script has closed the descriptor
                os.close(descriptor)

    def _map(self, offset: int, size: int) -> mmap.mmap:
        """Map a part of the memory's file. Raises OSError, also if the size is 0."""
        if size <= 0:
            raise OSError(5, "the memory is shorter than it was")
        with self._file() as descriptor:
            return mmap.mmap(descriptor, size, offset=offset)

    @property
    def is_current(self) -> bool:
        """True if the running ranks of this node are of this generation."""
        return bool(self.node[memory.GENERATION] == self.generation)

    @property
    def has_agent(self) -> bool:
        """True if the agent that owns the memory is alive, so that the memory outlives this process."""
        try:
            os.stat(self._path)
        except OSError as error:  # without permission to check, a later write will report the error
            return not isinstance(error, FileNotFoundError)
        return True

    def clocks_of_others(self) -> tuple[list[int], list[int]]:
        """Return the steps (CLOCK cells) of ranks that have not answered the agent's request to write: of the other
        living ranks of this node, and of killed ranks, also of other nodes."""
        living: list[int] = []
        gone = [self.node[memory.FURTHEST]]
        for rank, cells in enumerate(self._all):
            if rank != self.local_rank and cells[memory.PID] and cells[memory.ANSWER] == memory.NONE:
                is_alive = os.path.exists(f"/proc/{cells[memory.PID]}")
                (living if is_alive else gone).append(cells[memory.CLOCK])
        return living, gone

    @contextlib.contextmanager
    def locked(self, *, waits: bool = False) -> Iterator[bool]:
        """Yield True if this process has the lock for writing the areas. The kernel releases it if the process dies."""
        with self._file() as descriptor:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
                return
            try:
                yield True
            finally:  # unlock explicitly, because a DataLoader worker that was forked meanwhile has the descriptor, too
                with contextlib.suppress(OSError):  # fails if the script has closed the descriptor
                    fcntl.flock(descriptor, fcntl.LOCK_UN)

    # ---- the areas: under the lock -------------------------------------------------------------------------

    def reserve(self, size: int, area: int = 0) -> None:
        """Reserve this many bytes of memory for an area. Raises OSError."""
        if (before := self.reserved(area)) < size:
            with self._file() as descriptor:
                os.posix_fallocate(descriptor, self._place(area), size)
            self._areas[area] = mapped = self._map(self._place(area), size)
            # Write zeros, because a virtual machine may get its memory only at the first write.
            # Without these zeros a surviving rank would need 4 s for 1,500 MB.
            torch.frombuffer(mapped, dtype=torch.uint8)[before:].zero_()
            self._described[area][memory.RESERVED] = size

    def take(self, size: int, areas: int, *, later: int = 0) -> None:
        """Wait until no other rank is writing, and reserve this many bytes for each of the first `areas` areas.

        later: number of areas that will be needed later, for the memory limit that the error names. Raises StateError,
        OSError.
        """
        with self.locked(waits=True):
            reserved = [self.reserved(area) for area in range(memory.AREAS)]
            missing, both = (memory.missing(size, reserved, count) for count in (areas, later))
            if missing and (short := limits.shortage(missing, with_later=both)):
                process.current.limit_needed = short.limit_needed
                what = f"two copies of {size >> 20} MiB have no room: " if areas > 1 else ""
                raise StateError(what + short.why)
            for area in range(areas):
                self.reserve(size, area)

    def reserved(self, area: int = 0) -> int:
        """Return the number of reserved bytes of an area."""
        return int(self._described[area][memory.RESERVED])

    def mapped(self, area: int) -> mmap.mmap:
        """Return the mapping of an area's reserved bytes. Raises OSError."""
        found = self._areas.get(area)
        if found is None or len(found) < self.reserved(area):
            found = self._areas[area] = self._map(self._place(area), self.reserved(area))
            with contextlib.suppress(OSError):  # not supported before Linux 5.14
                found.madvise(_POPULATE_WRITE)
        return found

    def held(self) -> Held | None:
        """Describe the newest state in the areas; None if both are empty."""
        return self.held_in(self._newest_area)

    def held_in(self, area: int) -> Held | None:
        """Describe the state in this area; None if the area is empty."""
        step, generation, loads, size, total, assumed, every = self._described[area][memory.AREA_STEP :]
        held = Held(Version(self.attempt, generation, step), loads, size, total, bool(assumed), every)
        return held if step > 0 else None

    @property
    def _newest_area(self) -> int:
        none = Version(0, 0, 0)
        return max(range(memory.AREAS), key=lambda area: held.version if (held := self.held_in(area)) else none)

    def _place(self, area: int) -> int:
        return memory.layout(self.ranks)[1] + area * memory.OTHER_AREA_OFFSET

    def set_loads(self, version: Version, loads: int) -> None:
        """Set how often this state was loaded; 0 if the training made steps after the load.

        Does nothing if the newest state is another one, because a faster rank has already written a newer state.
        """
        area = self._newest_area
        held = self.held_in(area)
        if held is not None and held.version == version:
            self._described[area][memory.AREA_LOADS] = loads

    def newest(self, size: int) -> torch.Tensor:
        """Return the bytes of the newest state, not copied: they change when the area is written. Raises OSError."""
        mapped = self.mapped(self._newest_area)
        if not 0 < size <= len(mapped):
            raise OSError(5, "the memory is shorter than it was")
        return torch.frombuffer(mapped, dtype=torch.uint8)[:size]

    def write_copy(self, area: int, state: packed.Packed, held: Held, threads: int = 1) -> None:
        """Write a state to an area. `count_copy` makes it valid. Raises OSError."""
        self.forget_copy(area)
        packed.write(state, torch.frombuffer(self.mapped(area), dtype=torch.uint8), threads, self._report)
        self.describe_copy(area, held)

    def _report(self) -> None:
        self.node[memory.WROTE] += 1

    def describe_copy(self, area: int, held: Held) -> None:
        """Record which state was written to an area, but not its step, so that the copy is not valid yet."""
        self._described[area][memory.AREA_GENERATION :] = _cells_of(held)

    def count_copy(self, area: int, held: Held) -> bool:
        """Make a copy valid. Return False if surviving ranks have written over the copy. Raises OSError."""
        with self.locked(waits=True):
            if self._described[area][memory.AREA_GENERATION :] != _cells_of(held):
                return False
            self._described[area][memory.AREA_STEP] = held.version.step
            return True

    def forget_copy(self, area: int | None = None) -> None:
        """Mark an area as empty, by default the area with the newest state."""
        area = self._newest_area if area is None else area
        cells = self._described[area]
        cells[memory.AREA_STEP] = cells[memory.AREA_BYTES] = 0  # a copy that is not valid yet has only AREA_BYTES

    def write_rescued(self, state: packed.Packed, held: Held, threads: int) -> None:
        """Write the state of a surviving rank. The caller has the lock. Raises OSError.

        The older of two areas is overwritten. If only one area is reserved, memory has no state during the write.
        """
        others = [self.held_in(area) for area in range(memory.AREAS)]
        older = [one if one is not None and one.version < held.version else None for one in others]
        area = copies.area_for(older) if state.size <= self.reserved(1) else 0
        self.write_copy(area, state, held, threads)
        self._described[area][memory.AREA_STEP] = held.version.step

    def all_have_copied(self, step: int) -> bool:
        """True if each rank of this node has written its small values for the copy of this step."""
        version = Version(self.attempt, self.generation, step)
        return all(version in (self.slot_version(slot, cells) for slot in memory.COPY_SLOTS) for cells in self._all)

    # ---- the slots of this rank ----------------------------------------------------------------------------

    def write_slot(self, slot: int, step: int, data: bytes) -> None:
        """Write this value to a slot. Raises OSError, StateError."""
        first, size = memory.slot_cell(slot, memory.SLOT_STEP), len(data)
        self.cells[first] = 0  # marks the slot as empty until everything else is written
        if size > memory.SECTION_BYTES:
            raise StateError(
                f"buffers and other small objects have {size >> 20} MiB, but at most "
                f"{memory.SECTION_BYTES >> 20} MiB can be written at each step"
            )
        if size > self._taken[slot]:
            self._taken[slot] = -(-size // memory.PAGE_BYTES) * memory.PAGE_BYTES
            with self._file() as descriptor:
                at = memory.slot_offset(self.local_rank, slot, self.ranks)
                os.posix_fallocate(descriptor, at, self._taken[slot])
        offset = slot * memory.SECTION_BYTES
        self._slots[offset : offset + size] = data
        self.cells[first + memory.SLOT_GENERATION], self.cells[first + memory.SLOT_BYTES] = self.generation, size
        self.cells[first] = step

    @functools.cached_property
    def _slots(self) -> mmap.mmap:
        first = memory.slot_offset(self.local_rank, 0, self.ranks)
        return self._map(first, memory.SLOTS * memory.SECTION_BYTES)

    def forget_slot(self, slot: int) -> None:
        """Mark a slot as empty."""
        self.cells[memory.slot_cell(slot, memory.SLOT_STEP)] = 0

    def forget_slots(self, saved: Version | None = None) -> None:
        """Mark the slots of this generation as empty. Slots of older generations stay, because they belong to the state
        that was loaded. saved: version of the copy that stays, too.
        """
        for slot in range(memory.SLOTS):
            is_saved = saved is not None and slot in memory.COPY_SLOTS and self.slot_version(slot) == saved
            if self.cells[memory.slot_cell(slot, memory.SLOT_GENERATION)] == self.generation and not is_saved:
                self.forget_slot(slot)

    def slot_version(self, slot: int, cells: memoryview | None = None) -> Version | None:
        """Return the version of the value in a slot; None if the slot is empty. cells: cells of another rank."""
        cells = self.cells if cells is None else cells
        step = cells[memory.slot_cell(slot, memory.SLOT_STEP)]
        generation = cells[memory.slot_cell(slot, memory.SLOT_GENERATION)]
        return Version(self.attempt, generation, step) if step > 0 else None

    def has_left(self, version: Version) -> bool:
        """True if a slot has a value of this version's generation."""
        versions = map(self.slot_version, range(memory.SLOTS))
        return any(each is not None and each[:2] == version[:2] for each in versions)

    def was_here(self, version: Version) -> bool:
        """True if this node took part in the generation of this version."""
        return self.node[memory.SINCE] <= version.generation

    def record(self, first: int, step: int, value: int) -> None:
        """Write a mark (first: MARK_STEP; value: the step before) or a proof (PROOF_STEP; the sum of all bits)."""
        write_record(self.cells, first, step, self.generation, value)

    def mark(self) -> Mark | None:
        """Return the last two steps that this rank or its former process has completed; None if fewer than two."""
        marks: list[Mark] = []
        step, generation, before = self.cells[memory.MARK_STEP :][:3]
        if before > 0 and step > 0:
            marks.append(Mark(generation, step, before))
        one, other = (self.slot_version(slot) for slot in range(memory.EARLY))
        if one is not None and other is not None and one.generation == other.generation:
            marks.append(Mark(one.generation, max(one.step, other.step), min(one.step, other.step)))
        return max(marks, default=None)

    def read_slot(self, slot: int) -> Any:
        """Return the value that was written to a slot. Raises OSError, StateError."""
        begin, size = slot * memory.SECTION_BYTES, self.cells[memory.slot_cell(slot, memory.SLOT_BYTES)]
        return packed.loads(self._slots[begin : begin + size])

    def proof(self) -> Proof | None:
        """Return the last proof of this local rank, of any generation; None if there is none."""
        step, generation, total = self.cells[memory.PROOF_STEP :][:3]
        return Proof(generation, step, total) if step > 0 else None


def write_record(cells: memoryview, first: int, step: int, *others: int) -> None:
    """Write a record of successive cells. Its step makes it valid, so the step is 0 until the others are written."""
    cells[first] = 0
    for cell, value in enumerate(others, first + 1):
        cells[cell] = value
    cells[first] = step


def _cells_of(held: Held) -> "array.array[int]":
    """Return the cells that describe a state in an area, except its step."""
    version, loads, size, total, assumed, every = held
    return array.array("q", (version.generation, loads, size, total, assumed, every))
