"""The memory of this rank's node, as the rank sees it: cells, slots and the area (layout: `ddpjob_core/memory.py`)."""

import contextlib
import fcntl
import mmap
import os
import threading
import zlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from ddpjob.checkpoint import crew, packed
from ddpjob.errors import StateError
from ddpjob_core import copies, memory
from ddpjob_core.memory import (
    AREA_ASSUMED,
    AREA_BEGUN,
    AREA_BYTES,
    AREA_EVERY,
    AREA_GENERATION,
    AREA_HEAD,
    AREA_LOADS,
    AREA_STEP,
    AREA_SUM,
    BEGUN_AREA,
    DONE,
    FIRST_PART,
    FREE,
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

MAPPED_SLOTS = memory.EARLY + 1  # those that are written at each step
TOUCHED_BYTES = 1 << 20  # in a call, which the interpreter does not wait for
LOOKS_EVERY = 100  # writes; whether the file is still open takes as long as the write
_OF_HELD = AREA_STEP, AREA_GENERATION, AREA_LOADS, AREA_BYTES, AREA_SUM, AREA_ASSUMED, AREA_EVERY


class State:
    """What one rank holds at a step, to be written by all ranks of its node that hold the same."""

    def __init__(self, packed_state: packed.Packed, step: int, loads: int, *, assumed: bool, threads: int = 1) -> None:
        """threads: that sum and write it."""
        self.threads = threads
        self.step, self.size, self.parts = step, packed_state.size, packed.Parts(packed_state)
        total, head = packed.total(packed_state.tensors, threads), zlib.crc32(packed_state.head)
        self.cells = {
            AREA_LOADS: loads,
            AREA_BYTES: self.size,
            AREA_SUM: total,
            AREA_ASSUMED: int(assumed),
            AREA_HEAD: head,
            AREA_EVERY: 0,
        }
        """That must be equal where two ranks write parts of one state."""


class Shared:
    """One rank's view of its agent's memory."""

    def __init__(self, where: str, attempt: int, generation: int) -> None:
        """where: DDPJOB_MEMORY. Raises OSError, ValueError where the agent or its memory is not there."""
        agent, file, pipe, ranks, local_rank = map(int, where.split(":"))
        self._path, self._pipe_path = f"/proc/{agent}/fd/{file}", f"/proc/{agent}/fd/{pipe}"
        self.attempt, self.generation, self.local_rank, self.ranks = attempt, generation, local_rank, ranks
        self._opened = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        self._identity = _identity(self._opened)
        self.pipe = os.open(self._pipe_path, os.O_RDONLY | os.O_CLOEXEC)
        cells = memoryview(mmap.mmap(self._opened, (1 + ranks) * memory.PAGE_BYTES)).cast("q")
        page = memory.PAGE_BYTES // 8
        self.node = cells[: memory.NODE_CELLS]
        self._all = [cells[(1 + rank) * page :][: memory.RANK_CELLS] for rank in range(ranks)]
        self.cells = self._all[local_rank]
        self._area = memory.layout(ranks)[1]
        self._slots: mmap.mmap | None = None  # the first ones of this rank
        self._taken = [0] * MAPPED_SLOTS  # memory that this process has made them have, in bytes
        self._heads: list[list[bytes]] = [[] for _ in range(MAPPED_SLOTS)]  # that are there
        self._looks = 0
        self.proven_elsewhere = 0
        """PROVEN of the nodes that have the state which is loaded, where this one has not."""

    @property
    def _file(self) -> int:
        """Raises OSError."""
        self._check_open()
        return self._opened

    def _check_open(self) -> None:
        """Raises OSError where the script has closed it: another file may have its number."""
        if _identity(self._opened) != self._identity:
            raise OSError(9, "the script has closed the descriptor of the memory")

    @property
    def is_current(self) -> bool:
        """Whether the ranks that run on this node are of this generation."""
        return bool(self.node[GENERATION] == self.generation)

    @property
    def has_agent(self) -> bool:
        """Whether the memory outlives this process."""
        try:
            os.stat(self._path)
        except FileNotFoundError:
            return False
        except OSError:
            pass  # who may not look there says so when it writes
        return True

    def others(self) -> set[int]:
        """The other local ranks that live, take part, and have not answered yet."""
        return {rank for rank in self._unanswered() if os.path.exists(f"/proc/{self._all[rank][memory.PID]}")}

    def clocks_of_others(self) -> tuple[list[int], list[int]]:
        """Of those, and of the ranks that were killed, on other nodes too."""
        living = self.others()
        gone = [self._all[rank][memory.CLOCK] for rank in self._unanswered() if rank not in living]
        return [self._all[rank][memory.CLOCK] for rank in living], [*gone, self.node[memory.FURTHEST]]

    def _unanswered(self) -> list[int]:
        return [
            rank
            for rank, cells in enumerate(self._all)
            if rank != self.local_rank and cells[memory.PID] and cells[memory.ANSWER] == memory.NONE
        ]

    @contextlib.contextmanager
    def locked(self) -> Iterator[bool]:
        """Whether this process alone writes the areas now. Who dies gives the lock back."""
        with self._lock_file() as descriptor:
            yield _locks(descriptor, fcntl.LOCK_EX)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until this process alone writes the areas, and do so."""
        with self._lock_file() as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield

    @contextlib.contextmanager
    def _lock_file(self) -> Iterator[int]:
        """What holds a lock, until the end of this."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        try:
            yield descriptor
        finally:
            with contextlib.suppress(OSError):  # the script has closed it
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # a DataLoader's worker, forked meanwhile, has it too
                os.close(descriptor)

    # ---- the area: under the lock --------------------------------------------------------------------------

    def reserve(self, size: int, area: int = 0) -> None:
        """Take memory for so many bytes of an area. Raises OSError."""
        if (before := self.reserved(area)) < size:
            os.posix_fallocate(self._file, self._place(area), size)
            self._touch(self._place(area) + before, self._place(area) + size)
            self.node[memory.area_cell(area, RESERVED)] = size

    def _touch(self, begin: int, end: int) -> None:
        """Write zeros there, because a virtual machine may get its memory when that is first written to: a rescue of
        1,500 MB then takes 4 s, and 0.4 where it was."""
        zeros = memoryview(bytes(TOUCHED_BYTES))
        while begin < end:
            begin += os.pwrite(self._file, zeros[: end - begin], begin)

    def reserved(self, area: int = 0) -> int:
        """For how many bytes of an area memory is taken."""
        size: int = self.node[memory.area_cell(area, RESERVED)]
        return size

    def held(self) -> Held | None:
        """The newest that an area has."""
        return self.held_in(self._newest_area)

    def held_in(self, area: int) -> Held | None:
        """What this area has."""
        step, generation, *others = (self.node[memory.area_cell(area, cell)] for cell in _OF_HELD)
        if step <= 0:
            return None
        loads, size, total, assumed, every = others
        return Held(Version(self.attempt, generation, step), loads, size, total, bool(assumed), every)

    @property
    def _newest_area(self) -> int:
        none = Version(0, 0, 0)
        return max(range(memory.AREAS), key=lambda area: held.version if (held := self.held_in(area)) else none)

    def _place(self, area: int) -> int:
        return self._area + area * memory.OTHER_AREA_OFFSET

    def count_load(self, version: Version) -> None:
        """This state was loaded once more. Not where a faster rank has loaded it too, has failed, and has written it
        anew by now: the load is counted in that one."""
        area = self._newest_area
        held = self.held_in(area)
        if held is not None and held.version == version:
            self.node[memory.area_cell(area, AREA_LOADS)] += 1

    def forget_loads(self, version: Version) -> None:
        """A step was made after this state was loaded, and no boundary tells of it."""
        area = self._newest_area
        held = self.held_in(area)
        if held is not None and held.version == version:
            self.node[memory.area_cell(area, AREA_LOADS)] = 0

    def newest(self, size: int) -> torch.Tensor:
        """The bytes of the newest value, where they are: they change when an area is written again. Raises OSError.

        To read them from the file takes three times as long as to look at them here.
        """
        area = self._newest_area
        if not 0 < size <= self.reserved(area):
            raise OSError(5, "the memory is shorter than it was")
        return torch.frombuffer(self._mapped(area, size), dtype=torch.uint8)

    def mapped(self, area: int) -> mmap.mmap:
        """What is reserved of an area, as memory. Raises OSError, ValueError."""
        return self._mapped(area, self.reserved(area))

    def _mapped(self, area: int, size: int) -> mmap.mmap:
        return mmap.mmap(self._file, size, offset=self._place(area))

    # ---- the areas: copies ---------------------------------------------------------------------------------

    def write_copy(self, area: int, state: packed.Packed, held: Held) -> None:
        """Write a state over what an area has; it counts from `count_copy` on. Raises OSError."""
        self.forget_copy(area)
        packed.Parts(state).write(self._file, self._place(area), 0, state.size)
        self.describe_copy(area, held)

    def describe_copy(self, area: int, held: Held) -> None:
        """Whose state was written there."""
        for cell, value in _described(area, held):
            self.node[cell] = value

    def count_copy(self, area: int, held: Held) -> bool:
        """What was written is whole; whether it still is there. Survivors of a failure may have begun to write over it.
        Raises OSError."""
        with self.alone():
            is_begun = self.node[AREA_BEGUN] and self.node[BEGUN_AREA] == area
            if is_begun or any(self.node[cell] != value for cell, value in _described(area, held)):
                return False
            self.node[memory.area_cell(area, AREA_STEP)] = held.version.step
            return True

    def forget_copy(self, area: int | None = None) -> None:
        """Nothing is there; by default in the newest."""
        area = self._newest_area if area is None else area
        if area == self.node[BEGUN_AREA]:
            self.node[AREA_BEGUN] = 0
        self.node[memory.area_cell(area, AREA_STEP)] = 0

    # ---- the areas: parts ----------------------------------------------------------------------------------

    def _begun_cell(self, cell: int) -> int:
        """Where this one of the area is that is begun."""
        return memory.area_cell(self.node[BEGUN_AREA], cell)

    def _parts(self) -> memoryview:
        """The cells of the parts of what is begun."""
        count = len(memory.parts(self.node[self._begun_cell(AREA_BYTES)]))
        return self.node[FIRST_PART : FIRST_PART + min(count, memory.PARTS_MAX)]

    def parts_done(self, step: int) -> int:
        """How many parts of the state of this step are written."""
        return sum(cell == DONE for cell in self._parts()) if self._is_begun(step) else 0

    def has_work(self, step: int, *, takes_over: bool) -> bool:
        """Whether this rank has a part to write, or a state to begin or to call whole."""
        return not self._is_begun(step) or all(c == DONE for c in self._parts()) or self._next(takes_over) is not None

    def _is_begun(self, step: int) -> bool:
        begun: int = self.node[AREA_BEGUN]
        return begun == step and self.node[self._begun_cell(AREA_GENERATION)] == self.generation

    def _next(self, takes_over: bool, in_work: Collection[int] = ()) -> int | None:
        """in_work: the parts that threads of this process write."""
        cells = [DONE if part in in_work else cell for part, cell in enumerate(self._parts())]
        return memory.next_part(cells, self.local_rank, self.ranks, self.others(), takes_over=takes_over)

    @contextlib.contextmanager
    def begun(self, state: State) -> Iterator[bool]:
        """Whether an area is for this state now; while it is, nobody begins another one. Who dies gives that back.

        What is there is lost as soon as another state is begun, unless there is room for two: then the newest stays.
        """
        with self._lock_file() as descriptor:
            if _locks(descriptor, fcntl.LOCK_SH) and not self._is_for(state) and _locks(descriptor, fcntl.LOCK_EX):
                own = Version(self.attempt, self.generation, state.step)
                if not memory.is_there(self.held(), own, assumed=bool(state.cells[AREA_ASSUMED])):
                    self._begin(state)
            yield _locks(descriptor, fcntl.LOCK_SH) and self._is_for(state)

    def _is_for(self, state: State) -> bool:
        is_same = all(self.node[self._begun_cell(cell)] == value for cell, value in state.cells.items())
        return is_same and self._is_begun(state.step)

    def _begin(self, state: State) -> None:
        self.node[AREA_BEGUN] = 0
        own, held = Version(self.attempt, self.generation, state.step), map(self.held_in, range(memory.AREAS))
        older = [one if one is not None and one.version < own else None for one in held]
        self.node[BEGUN_AREA] = copies.area_for(older) if state.size <= self.reserved(1) else 0
        self.node[self._begun_cell(AREA_STEP)] = 0
        for cell, value in {**state.cells, AREA_GENERATION: self.generation}.items():
            self.node[self._begun_cell(cell)] = value
        parts = self._parts()
        for part in range(len(parts)):
            parts[part] = FREE
        self.node[AREA_BEGUN] = state.step

    def write_parts(self, state: State, *, takes_over: bool) -> bool:
        """Write what others do not, where the state is begun; whether it is whole now. Raises OSError."""
        parts, places, place = self._parts(), memory.parts(state.size), self._place(self.node[BEGUN_AREA])
        area, in_work, lock = None, set[int](), threading.Lock()
        if state.threads > 1:
            with contextlib.suppress(OSError, ValueError):  # no descriptor is left, or addresses are limited
                area = self._mapped(self.node[BEGUN_AREA], state.size)

        def take() -> int | None:
            with lock:
                part = self._next(takes_over, in_work)
                if part is not None:
                    parts[part] = 1 + self.local_rank
                    in_work.add(part)
                return part

        def write_some(_: int) -> None:
            while (part := take()) is not None:
                if area is None or not state.parts.copy(area, *places[part]):
                    state.parts.write(self._file, place, *places[part])
                parts[part] = DONE
                with lock:
                    in_work.discard(part)

        crew.each(write_some, range(state.threads), state.threads)
        if not all(cell == DONE for cell in parts):
            return False
        self.node[self._begun_cell(AREA_STEP)] = state.step
        return True

    def all_have_copied(self, step: int) -> bool:
        """Whether each rank of this node has written a slot with its copy of this step."""
        cell = memory.slot_cell
        return all(
            any(
                cells[cell(slot, memory.SLOT_STEP)] == step
                and cells[cell(slot, memory.SLOT_GENERATION)] == self.generation
                for slot in memory.COPY_SLOTS
            )
            for cells in self._all
        )

    # ---- the slots of this rank ----------------------------------------------------------------------------

    def write_slot(self, slot: int, step: int, *values: packed.Packed) -> None:
        """Replace what is there. Raises OSError, StateError."""
        cells, first = self.cells, memory.slot_cell(slot, 0)
        cells[first + memory.SLOT_STEP] = 0
        size = sum(value.size for value in values)
        if size > memory.SECTION_BYTES:
            raise StateError(
                f"buffers and what else is small have {size >> 20} MiB, and {memory.SECTION_BYTES >> 20} MiB can be "
                f"written at each step"
            )
        if slot < MAPPED_SLOTS and size <= self._taken[slot] and self._slots is not None:
            self._write_to_mapping(self._slots, slot, values)
        else:
            self._write_to_file(slot, values, size)
        cells[first + memory.SLOT_GENERATION] = self.generation
        cells[first + memory.SLOT_BYTES] = size
        cells[first + memory.SLOT_STEP] = step

    def _write_to_mapping(self, mapping: mmap.mmap, slot: int, values: Sequence[packed.Packed]) -> None:
        """What can be written without the kernel; heads that are there already, from two steps ago, are not."""
        heads, before = [value.head for value in values], self._heads[slot]
        self._heads[slot] = []
        self._looks -= 1
        if self._looks <= 0:
            self._looks = LOOKS_EVERY
            self._check_open()
        offset = slot * memory.SECTION_BYTES
        for value in values:
            packed.copy(mapping, offset, value, head=heads != before)
            offset += value.size
        self._heads[slot] = heads

    def _write_to_file(self, slot: int, values: Sequence[packed.Packed], size: int) -> None:
        """The first time, because the kernel says so where it has no memory for it; who writes to a mapping is killed.
        Raises OSError."""
        file, offset = self._file, memory.slot_offset(self.local_rank, slot, self.ranks)
        for value in values:
            packed.write(file, offset, value)
            offset += value.size
        if slot >= MAPPED_SLOTS:
            return
        self._taken[slot], self._heads[slot] = max(self._taken[slot], size), []
        if self._slots is None:
            with contextlib.suppress(OSError, ValueError):  # no descriptor is left, or addresses are limited
                place = memory.slot_offset(self.local_rank, 0, self.ranks)
                self._slots = mmap.mmap(file, MAPPED_SLOTS * memory.SECTION_BYTES, offset=place)

    def forget_slot(self, slot: int) -> None:
        """Nothing is there."""
        self.cells[memory.slot_cell(slot, memory.SLOT_STEP)] = 0

    def forget_slots(self, saved: Version | None = None) -> None:
        """Nothing of this generation is there; what an older one has left belongs to the state in the area.

        saved: but for the slot with a copy of this one.
        """
        for slot in range(memory.SLOTS):
            is_saved = saved is not None and slot in memory.COPY_SLOTS and self.slot_version(slot) == saved
            if self.cells[memory.slot_cell(slot, memory.SLOT_GENERATION)] == self.generation and not is_saved:
                self.forget_slot(slot)

    def slot_version(self, slot: int) -> Version | None:
        """Of what a slot has."""
        step = self.cells[memory.slot_cell(slot, memory.SLOT_STEP)]
        generation = self.cells[memory.slot_cell(slot, memory.SLOT_GENERATION)]
        return Version(self.attempt, generation, step) if step > 0 else None

    def write_mark(self, step: int, before: int) -> None:
        """The last boundaries of this rank, where it writes no slot at each."""
        self.cells[memory.MARK_STEP] = 0
        self.cells[memory.MARK_GENERATION], self.cells[memory.MARK_BEFORE] = self.generation, before
        self.cells[memory.MARK_STEP] = step

    def mark(self) -> Mark | None:
        """The last boundaries of this rank, or of the one that was in its place; None: there were fewer than two."""
        marks: list[Mark] = []
        generation, step, before = (self.cells[memory.MARK_GENERATION + number] for number in range(3))
        if before > 0 and step > 0:
            marks.append(Mark(generation, step, before))
        one, other = (self.slot_version(slot) for slot in range(memory.EARLY))
        if one is not None and other is not None and one.generation == other.generation:
            marks.append(Mark(one.generation, max(one.step, other.step), min(one.step, other.step)))
        return max(marks, default=None)

    def read_slot(self, slot: int) -> Any:
        """The value. Raises StateError."""
        size = self.cells[memory.slot_cell(slot, memory.SLOT_BYTES)]
        values = packed.read_all(self._file, memory.slot_offset(self.local_rank, slot, self.ranks), size)
        for settings in values[1:]:
            values[0]["small"] |= settings
        return values[0]

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


def _described(area: int, held: Held) -> Iterator[tuple[int, int]]:
    """What the cells of an area say of a state, but for its step."""
    values = (held.version.generation, held.loads, held.size, held.total, int(held.assumed), held.every)
    for cell, value in zip(_OF_HELD[1:], values, strict=True):
        yield memory.area_cell(area, cell), value


def _locks(descriptor: int, kind: int) -> bool:
    """Whether it has this lock now, without waiting."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino
