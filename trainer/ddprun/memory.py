"""Own the shared memory of a node, in which the training state outlives the ranks (layout: `ddpjob_core/memory.py`).

The agent creates a memfd; ranks open it through the agent's descriptor. Only written pages use memory. The memfd ends
with the agent, so it never has the state of another job or attempt.

After a failure the agent closes the pipe of the generation before any rank gets a signal. A thread in each rank waits
for this; a rank with the state of the newest step writes that state to the memfd. The agent waits a limited time for
ranks that may write a newer step than the memory already has.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Mapping

from ddpjob import threads
from ddpjob_core import memory

MFD_NOEXEC_SEAL = 0x0008  # missing in the os module; needed by kernels with vm.memfd_noexec=2
LOOK_SECONDS = 0.001
LATE_LOOK_SECONDS = 0.02  # seconds between checks of a slow write; a check reads the states of all threads from /proc


class Memory:
    """The shared memory of a node's ranks; it outlives each generation of ranks."""

    def __init__(self, ranks: int) -> None:
        """Create the memory file. Raise OSError if the kernel refuses it."""
        self._ranks = ranks
        self._descriptor = create("ddprun-state")
        os.ftruncate(self._descriptor, memory.layout(ranks)[1])
        cells = memoryview(mmap.mmap(self._descriptor, (1 + ranks) * memory.PAGE_BYTES)).cast("q")
        page = memory.PAGE_BYTES // 8
        self._node = cells[: memory.NODE_CELLS]
        self._cells = [cells[(1 + rank) * page :][: memory.RANK_CELLS] for rank in range(ranks)]
        self._read = self._write = -1
        self._wrote = 0, 0.0  # last value of WROTE, and its time in seconds after `order`

    def begin(self, generation: int) -> None:
        """Prepare the memory for a new generation of ranks. Raise OSError if no file descriptor is left."""
        is_first = self._read < 0
        self.order()
        self._close_read()
        for cells in self._cells:
            cells[memory.PID] = cells[memory.CLOCK] = cells[memory.ANSWER] = 0
        self._node[memory.FURTHEST] = 0
        if is_first or not memory.is_next(generation, self._node[memory.GENERATION]):
            self._node[memory.SINCE] = generation
        self._node[memory.GENERATION] = generation
        self._read, self._write = os.pipe()

    def where(self, local_rank: int) -> str:
        """Return the value of DDPJOB_MEMORY for this rank."""
        return f"{os.getpid()}:{self._descriptor}:{self._read}:{self._ranks}:{local_rank}"

    @property
    def keepers(self) -> list[int]:
        """Return the pids of the ranks that can write the state."""
        return [cells[memory.PID] for cells in self._cells if cells[memory.PID]]

    @property
    def clock(self) -> int:
        """Highest CLOCK of the ranks; CLOCK grows with the steps of a rank (ddpjob_core/memory.py)."""
        return max(cells[memory.CLOCK] for cells in self._cells)

    def order(self, furthest: int = 0) -> None:
        """Request the state from the ranks of this generation. furthest: CLOCK that another node's agent reported."""
        self._node[memory.FURTHEST] = max(self._node[memory.FURTHEST], furthest)
        if self._write >= 0:
            os.close(self._write)
            self._write = -1

    def waits_for(self, pids: Mapping[int, int], seconds: float) -> bool:
        """True if one of these running ranks may still write the state.

        pids: process ids by local rank. seconds: time since `order` was called.
        """
        whole = self.whole
        step = whole.step if whole is not None and whole.generation == self._node[memory.GENERATION] else 0
        if self._node[memory.area_cell(self._newest_area, memory.AREA_ASSUMED)]:
            step = 0  # the script has not called save() for this state, so a rank that has called save() overwrites it
        size, still = self._size, self._still(seconds)
        late = still >= memory.limit_seconds(size)  # is_held_up is called only if late, because it is expensive
        furthest = max(self.clock, self._node[memory.FURTHEST])
        return any(
            cells[memory.PID]
            and cells[memory.ANSWER] == memory.NONE
            and memory.is_waited_for(
                max(furthest, cells[memory.CLOCK]), step, seconds, still, size, late and threads.is_held_up(pid)
            )
            for cells, pid in ((self._cells[rank], pid) for rank, pid in pids.items())
        )

    def _still(self, seconds: float) -> float:
        """Return the seconds since a rank last wrote a piece of the state."""
        wrote = self._node[memory.WROTE]
        if wrote != self._wrote[0] or seconds < self._wrote[1]:
            self._wrote = wrote, seconds
        return seconds - self._wrote[1]

    def look_again(self, seconds: float) -> float:
        """Return the seconds until the next call of `waits_for`. seconds: time since `order` was called."""
        return LOOK_SECONDS if seconds < memory.limit_seconds(self._size) else LATE_LOOK_SECONDS

    @property
    def _size(self) -> int:
        """Number of bytes reserved for the state."""
        return self._node[memory.area_cell(0, memory.RESERVED)]

    @property
    def whole(self) -> memory.Version | None:
        """Version of the newest complete state in this memory, of any generation; None if there is none."""
        return self._in_area(self._newest_area)

    @property
    def _newest_area(self) -> int:
        return max(range(memory.AREAS), key=lambda area: self._in_area(area) or memory.Version(0, 0, 0))

    def _in_area(self, area: int) -> memory.Version | None:
        step = self._node[memory.area_cell(area, memory.AREA_STEP)]
        return memory.Version(0, self._node[memory.area_cell(area, memory.AREA_GENERATION)], step) if step > 0 else None

    def _close_read(self) -> None:
        if self._read >= 0:
            os.close(self._read)
            self._read = -1


def create(name: str) -> int:
    """Create an anonymous file in memory. Raise OSError."""
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC | MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:  # kernels before 6.3 do not know the flag
            raise
    return os.memfd_create(name)


def created(ranks: int) -> Memory | None:
    """Create the shared memory. None if the kernel refuses; a restart then continues from the checkpoint folder."""
    with contextlib.suppress(OSError):
        return Memory(ranks)
    return None
