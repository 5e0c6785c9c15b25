"""Copies of a state on a GPU, made while the host continues: like `copies.py`, but they become valid later.

Reasons: docs/dev/state-in-memory.md, "On GPUs". The first rank of each node queues a copy on a second stream, from the
device into pinned shared memory. The copy becomes valid after the next backward pass, whose gradients are summed over
all ranks. The host checks this every few steps.

Life cycle: `memory.Keeper` creates one DeviceCopies per process that trains on a GPU. Each `_Flight` is one copy, until
it is valid or dropped.
"""

import threading
import time
from collections.abc import Mapping
from typing import Any

import torch

from ddpjob import process
from ddpjob.checkpoint.in_memory.by_cadence.copies import Boundary, Copies
from ddpjob.checkpoint.in_memory.by_cadence.streams import StreamMark, Streams, Ticket
from ddpjob.checkpoint.in_memory.kept import BUFFERS, Kept
from ddpjob.checkpoint.in_memory.shared import Shared
from ddpjob.checkpoint.state import packed
from ddpjob.errors import StateError
from ddpjob_core import copies, memory
from ddpjob_core.memory import Held, Version

ON_DEVICE = "after a failure it is unknown which step a GPU has reached"
SUMMED_AT_ONCE = 1 << 20  # bytes; below this, starting a thread takes as long as the checksum
ABORTS = ("1", "2")  # NCCL's modes that abort the group: the device then continues without the others


class _Flight:
    """A copy that the device is writing; it becomes valid some steps later."""

    def __init__(self, at: Boundary, in_torch: threading.Lock) -> None:
        """in_torch: the lock to hold during the checksum, because a thread may compute it."""
        self.step, self.versions = at.step, at.kept.watch.counters()
        self._in_torch = in_torch
        self.counts = True
        """False for a trial copy, which only measures the cost."""
        self.is_saved = at.must_be_copied
        self.host_seconds = 0.0
        self.passed: StreamMark | None = None
        """CUDA event after the copy and the backward pass of the next step; None before that pass."""
        self.held: Held | None = None
        """Description of the copy without its checksum; None if another rank of this node writes it."""
        self.area = 0
        self.ticket: Ticket | None = None
        self.total: int | None = None
        self.parts: list[torch.Tensor] = []
        """The copied tensors in shared memory that the checksum covers."""
        self._summing: threading.Thread | None = None

    def is_down(self) -> bool:
        """True if the copy is complete, has its checksum, and all ranks have completed its step. Does not wait."""
        if self.ticket is not None and not self.ticket.is_done():
            return False
        return not self._sums() and self.passed is not None and self.passed.is_done()

    def come_down(self) -> bool:
        """Wait until the copy is complete. Return False if no optimizer step has followed the copied step."""
        self.settle()
        if self.passed is None:
            return False
        if self._sums():
            assert self._summing is not None, "it sums"
            self._summing.join()
        self.passed.wait()
        return True

    def settle(self) -> None:
        """Wait until the device has written all bytes of the copy."""
        if self.ticket is not None:
            self.ticket.wait()

    def _sums(self) -> bool:
        """True while a thread is computing the checksum of a large state. This may take longer than a step."""
        if self.held is None or not self.counts or self.total is not None:
            return False
        if self.held.size < SUMMED_AT_ONCE:
            self._sum()
            return False
        if self._summing is None:
            self._summing = threading.Thread(target=self._sum, name="ddpjob-memory-sum", daemon=True)
            self._summing.start()
        return self._summing.is_alive()

    def _sum(self) -> None:
        with self._in_torch:
            self.total = packed.total(self.parts)

    @property
    def seconds(self) -> float:
        """Seconds that training waited for the copy; for a trial copy its whole duration, which is an upper bound."""
        if self.ticket is None:
            return self.host_seconds
        return self.host_seconds + (self.ticket.held_seconds if self.counts else self.ticket.seconds)


class DeviceCopies(Copies):
    """One rank's part of the copies of a state on a GPU."""

    _least = copies.EVERY_LEAST_ON_DEVICE
    _later = copies.LATER_ON_DEVICE
    _because = ON_DEVICE
    on_device = True

    def __init__(
        self, shared: Shared, rank: int, world_size: int, store: Any, has_folder: bool, streams: Streams
    ) -> None:
        super().__init__(shared, rank, world_size, store, has_folder)
        self._streams = streams
        self._areas: dict[int, torch.Tensor] = {}
        self._mapped: list[torch.Tensor] = []
        self._said_pinned = False
        self._flight: _Flight | None = None
        self._left: _Flight | None = None  # a dropped copy that the device may still be writing
        self._looked: StreamMark | None = None  # CUDA event after the first backward pass that follows a check
        self._has_looked = False  # True from a check until the next backward pass

    def give_up_last(self) -> None:
        self._left, self._flight = self._flight or self._left, None

    # ---- at a boundary -------------------------------------------------------------------------------------

    def boundary(self, at: Boundary) -> None:
        if copies.looks(at.step, self.schedule.step, self.schedule.every):
            if self._looked is not None:
                self._looked.wait()
            self._looked, self._has_looked = None, True
        self._land()
        super().boundary(at)

    def _copy(self, at: Boundary, every: int) -> None:
        if self._flight is not None and self._flight.come_down():
            self._count()
        self.give_up_last()
        began = time.perf_counter()
        self._write_slot(at)
        flight = _Flight(at, self.in_torch)
        if self._is_writer:
            self._begin(flight, at, every)
        flight.host_seconds = time.perf_counter() - began
        self._flight = flight
        # The device waits at once if the script itself may change parameters, or if `save` needs this copy.
        if (self.changes or at.must_be_copied) and flight.ticket is not None:
            flight.ticket.hold()

    def _try(self, at: Boundary) -> bool:
        if not self.schedule.costs and self._flight is None:
            began, flight = time.perf_counter(), _Flight(at, self.in_torch)
            self._begin(flight, at, 1)
            flight.counts, flight.host_seconds = False, time.perf_counter() - began
            self._flight = flight if flight.ticket is not None else None
        return bool(self.schedule.costs)

    def _begin(self, flight: _Flight, at: Boundary, every: int) -> None:
        """Queue a copy on the device, unless the state has outgrown the reserved memory. Raises StateError."""
        shared = self._shared
        value = self._value(at.kept)
        state = packed.pack(value)
        # The buffers are the last tensors. The checksum leaves them out, because they differ by rank.
        large = len(state.tensors) - len(packed.tensors_of(value[BUFFERS]))
        area = copies.area_for([shared.held_in(area) for area in range(memory.AREAS)])
        target = self._areas[area]
        if state.size > len(target):
            self._room = None
            return
        for tensor in state.tensors:
            if tensor.device.type != "cpu" and tensor.device != self._streams.device:
                raise StateError(f"a tensor is on {tensor.device}, and this rank trains on {self._streams.device}")
        if self._left is not None:
            self._left.settle()
            self._left = None
        shared.forget_copy(area)
        parts = packed.places(state, target)
        head = torch.frombuffer(bytearray(state.head), dtype=torch.uint8)
        sources = [packed.flat_bytes(tensor) for tensor in state.tensors]
        pairs = [(part, source) for part, source in zip(parts, sources, strict=True) if len(part)]
        ticket = self._streams.begin_copy([(target[: len(head)], head), *pairs])
        version = Version(shared.attempt, shared.generation, at.step)
        ahead = every if every >= memory.EVERY_MAX else copies.AHEAD_ON_DEVICE * every
        held = Held(version, 0, state.size, 0, at.assumed, ahead)
        flight.ticket, flight.area, flight.held, flight.parts = ticket, area, held, parts[:large]

    def _value(self, kept: Kept) -> dict[str, Any]:
        return kept.large_with_buffers(self._streams.clone)

    def _land(self) -> None:
        """Make the copy in progress valid if it is complete."""
        if self._flight is not None and self._flight.is_down():
            self._count()

    def _count(self) -> None:
        flight, self._flight = self._flight, None
        assert flight is not None, "it was looked at"
        self.schedule.pay(flight.seconds)
        with self._lock:
            if flight.total is not None and flight.held is not None and not self._stopped:
                held = flight.held._replace(total=flight.total)
                self._shared.describe_copy(flight.area, held)
                self._shared.count_copy(flight.area, held)

    # ---- the next optimizer step ---------------------------------------------------------------------------

    def before_step(self, kept: Kept) -> None:
        """Before an optimizer step, make the device wait for its copies. The host does not wait."""
        if self._streams.is_recording():
            raise StateError("a CUDA graph makes the optimizer's steps, so no step is noticed")
        flight, looked = self._flight, self._has_looked
        is_new = flight is not None and flight.passed is None
        if flight is not None and is_new and flight.counts:
            if not flight.is_saved and not self._is_as_it_was(kept, flight.versions):
                self.give_up_last()
                self.begin_with_changes(f"parameters changed after step {flight.step}, but not in optimizer.step()")
                return
            self.before_other_step()
        if is_new or looked:
            mark = self._streams.mark()
            self._has_looked = False
            if flight is not None and is_new:
                flight.passed = mark
            if looked:
                self._looked = mark

    def before_other_step(self) -> None:
        """Make the device wait for the copy again, because a second optimizer may use another stream."""
        if self._flight is not None and self._flight.is_saved:
            self._land()
        if self._flight is not None and self._flight.ticket is not None and self._flight.counts:
            self._flight.ticket.hold()

    # ---- room ----------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Map and pin the shared memory of both copies. Old mappings stay, because the device may still write there."""
        try:
            for area in range(memory.AREAS):
                if area in self._areas and len(self._areas[area]) == self._shared.reserved(area):
                    continue
                self._areas[area] = mapped = torch.frombuffer(self._shared.mapped(area), dtype=torch.uint8)
                self._mapped.append(mapped)
                with self.in_torch:
                    why = self._streams.pin(mapped)
                if why and not self._said_pinned:
                    self._said_pinned = True
                    process.log(f"rank {self._rank}: {why}: the host waits for each copy of the state into memory")
        except (RuntimeError, ValueError, AssertionError) as error:
            raise StateError(f"the memory cannot be mapped for the GPU: {error}") from error


def would_go_on(backend: str, world_size: int, environ: Mapping[str, str]) -> str:
    """Return the reason why a device could make steps after a peer has failed; "" if it could not.

    An aborted collective completes like a successful one, with undefined buffers. Modes 1 (TearDown) and 2
    (CleanUpOnly) abort, mode 3 (SkipCleanUp) does not: torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp:167-174, torch
    2.13.0.
    """
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"  # `ddpjob.init` changes the value 1 that ddprun sets to 3
    how = environ.get(name) or environ.get(name.removeprefix("TORCH_")) or ""
    if world_size == 1 or backend != "nccl" or how not in ABORTS:
        return ""
    return f"{name}={how} lets a GPU go on after a collective was aborted; 3, PyTorch's default, does not"
