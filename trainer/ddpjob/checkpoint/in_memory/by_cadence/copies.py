"""Copies of the state in the agent's memory, made during normal training, if no survivor could write the state later.

Rules: `ddpjob_core/copies.py`. Reasons: docs/dev/state-in-memory.md, "Copies by cadence". Without a folder, a state
passed to `save` is also copied at once if the script reports no other steps (`memory.py` decides this).

Life cycle: `memory.Keeper` creates one Copies per process. A daemon thread reserves the areas once.

Drawbacks: the memory must have room for two copies. A restart repeats the steps after the last copy.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from ddpjob import process
from ddpjob.checkpoint.in_memory.kept import Kept
from ddpjob.checkpoint.in_memory.places import KEPT, MARKED, SAVED
from ddpjob.checkpoint.in_memory.shared import Shared
from ddpjob.checkpoint.state import packed
from ddpjob.errors import StateError
from ddpjob_core import copies, memory
from ddpjob_core.copies import CopyPlan, CopySchedule
from ddpjob_core.memory import CHANGED, CLOCK, COPIES, COPY_SLOTS, MISPLACED, PID, PLACED, SHOWN, UNABLE, Held, Version

ALONE = "there is no other rank that could write it"
IF_KILLED = "; a rank that ends by an exception still leaves its state in memory, a killed rank does not"
CHANGES = "parameters or optimizer state change between the end of a step and the next optimizer.step()"


class Boundary(NamedTuple):
    """The state of a rank at the end of a step."""

    kept: Kept
    step: int
    by: int
    """The call that got the state: MARKED, KEPT or SAVED (`places.py`)."""
    write: Callable[[int], None]
    """Writes random states, buffers and settings of this step to a slot; call it at once, because they change."""
    assumed: bool
    must_be_copied: bool = False
    """True if `save` got this state and nothing else will have it, so it is copied now."""


class _Written(NamedTuple):
    """A copy that is written, but becomes valid only at the next optimizer step."""

    area: int
    held: Held
    versions: list[Any]
    is_saved: bool
    """True if `save` got this state. The copy then becomes valid even if parameters change before the next step."""


class Copies:
    """One rank's part of the copies: each rank writes its random states, buffers and settings; the first rank of each
    node also writes parameters and optimizer state."""

    _least = 1  # minimum number of steps between two copies
    _later = 0  # number of plan checks by which another rank may be ahead of rank 0
    _because = ALONE
    on_device = False

    def __init__(self, shared: Shared, rank: int, world_size: int, store: Any, has_folder: bool) -> None:
        """store: the group's store, which has rank 0's plan; None if this rank trains alone. has_folder: True if save()
        writes to a folder, too."""
        self._shared, self._rank, self._world_size, self._store = shared, rank, world_size, store
        self.changes = False
        """True if parameters change between the end of a step and the next optimizer step."""
        self.instead = self.on_device
        """True if copies replace survivors: a state that a survivor writes after a failure could be wrong."""
        self.saved: Version | None = None
        """Version of the last copy that was made for save()."""
        self.schedule = CopySchedule(self._least, self._later)
        self._noted: tuple[list[Any], int] | None = None  # parameter versions, and the call that found them
        self._copied = 0  # step of the last copy
        self._shows = SAVED if has_folder else KEPT  # the least call whose parameters are right without comparison
        self._is_shown = False  # True if the script has made this call
        self._is_placed = False  # True if should_stop() and save() find the same parameters at the same step
        self._trusted = MARKED  # the least call with the parameters that save() finds, as far as is known
        self.in_torch = threading.Lock()
        """Lock, held while a thread runs torch's C++ code for a copy, and from the exit of the process on."""
        self._lock = threading.Lock()  # held while this process writes a copy
        self._written: _Written | None = None
        self._room: threading.Thread | None = None
        self._stopped = False
        self._said: CopyPlan | None = None  # the plan that was logged last
        self._began = self._ended = 0.0  # times of the first and of the last boundary

    @property
    def by_cadence(self) -> bool:
        """True if the plan decides when to copy. False if only states that the script saves are copied."""
        return self.instead or self._world_size == 1

    def begin_with_changes(self, why: str) -> None:
        """Copy from now on, because parameters change after the end of a step. why: reason for the log. Raises
        StateError if the group has no store."""
        if self.changes:
            return
        if self._store is None and self._world_size > 1:
            raise StateError(why)
        known = self._shared.node[COPIES]
        self.changes = self.instead = True
        self._is_placed, self._is_shown = known == PLACED, known > CHANGED
        self._trusted = SAVED if known == MISPLACED else MARKED
        self._shared.node[COPIES] = max(CHANGED, known)
        self.forget()
        if self._rank == 0 and not self._is_placed:
            process.log(f"{why}: from the next save() on, the state is copied at steps that save() or keep() get")

    def stop(self) -> None:
        """Make no further copy, and none valid. Any thread may call this."""
        with self._lock:
            self._stopped, self._written = True, None

    def give_up_last(self) -> None:
        """Discard the copy that is not valid yet, because the script has changed the copied values."""
        with self._lock:
            self._written = None

    def forget(self) -> None:
        """Invalidate copies by ranks of this generation, except copies made for `save`."""
        self.count_saved()
        self.give_up_last()
        self._room = None
        for slot in COPY_SLOTS:
            if self._is_own(self._shared.slot_version(slot)):
                self._shared.forget_slot(slot)
        for area in range(memory.AREAS if self._is_writer else 0):
            held = self._shared.held_in(area)
            if held is not None and held.every and self._is_own(held.version):
                self._shared.forget_copy(area)

    def _is_own(self, version: Version | None) -> bool:
        return version is not None and version.generation == self._shared.generation and version != self.saved

    @property
    def _is_writer(self) -> bool:
        return self._shared.local_rank == 0

    # ---- at a boundary -------------------------------------------------------------------------------------

    def boundary(self, at: Boundary) -> None:
        """At the first `should_stop` or `save` of a step, read a new plan, copy if due. Raises StateError, OSError."""
        schedule = self.schedule
        self._began = self._began or time.perf_counter()
        made = at.step - schedule.step if self._ended else 0
        schedule.boundary(at.step, (time.perf_counter() - self._ended) / made if made > 0 else None)
        self._noted = (self._versions_of(at.kept), at.by) if self.changes else None
        if self.instead:
            self._shared.record(memory.MARK_STEP, at.step, schedule.before)  # it writes no slot at each step
        self._look()
        self._copy_if_due(at)
        self._ended = time.perf_counter()

    def again(self, at: Boundary) -> None:
        """At a second call for the same step (`save` after `should_stop`), compare the parameters, and copy if due.
        Raises StateError, OSError."""
        if at.must_be_copied:
            self.schedule.step = at.step
            self._copy_if_due(at)
            return
        if self._noted is None or at.step != self.schedule.step:
            return
        versions, by = self._noted
        least, most = sorted((by, at.by))
        if self._trusted <= least < most:
            if self._versions_of(at.kept) != versions:
                self._misplaced(most)
            elif most >= self._shows:
                self._is_placed |= least == MARKED
                self._shared.node[COPIES] = PLACED if self._is_placed else SHOWN
        self._copy_if_due(at)
        self._ended = time.perf_counter()

    def renew(self, at: Boundary) -> None:
        """Write the copy of this step again, because values have changed between should_stop() and save()."""
        if self._copied == at.step and not self._stopped:
            self._copy(at, memory.EVERY_MAX if self.schedule.plan is None else self.schedule.plan.next_within)

    def _misplaced(self, by: int) -> None:
        """Invalidate copies made at other calls than this one, because it finds other parameters."""
        self.forget()
        self._is_placed, self._trusted = False, by
        self._shared.node[COPIES] = MISPLACED if by == SAVED else CHANGED

    def _copy_if_due(self, at: Boundary) -> None:
        loaded = self._shared.loaded
        if self._stopped or (loaded is not None and at.step == loaded.version.step):
            return
        self._is_shown |= at.by >= self._shows
        if at.must_be_copied:
            self._copy_saved(at)
        if at.must_be_copied or not self.by_cadence or (self._is_writer and not self._has_room(at.kept)):
            return
        if self._rank == 0:
            self._decide(at)
        plan = self.schedule.plan
        if plan is None or plan.changes < self.changes:
            return
        if at.by < max(plan.least, self._trusted):
            return
        if self.schedule.is_due(plan, at.step):
            self._copied = at.step
            self._copy(at, plan.next_within)

    def _copy_saved(self, at: Boundary) -> None:
        """Copy a state for `save`. Waits until memory is reserved."""
        for _ in range(2):  # copy a second time if the state has outgrown the reserved memory
            while self._is_writer and not self._stopped and not self._has_room(at.kept):
                if self._room is not None:
                    self._room.join()
            if self._stopped:
                return
            self.schedule.checked = at.step
            self.saved = Version(self._shared.attempt, self._shared.generation, at.step)
            self._copy(at, memory.EVERY_SAVED)
            if not self._is_writer or self._room is not None:
                return

    def _copy(self, at: Boundary, every: int) -> None:
        began, shared = time.perf_counter(), self._shared
        self._write_slot(at)
        if self._is_writer:
            with self._lock:
                shared.cells[CLOCK], shared.cells[PID] = 2 * at.step, os.getpid()
                written = self._write(at, every)
                versions = self._versions_of(at.kept)
                self._written = None if written is None else _Written(*written, versions, at.must_be_copied)
            if at.must_be_copied and self._world_size == 1:
                self.count_saved()  # there is no other rank to wait for
        self.schedule.pay(time.perf_counter() - began)

    def _write_slot(self, at: Boundary) -> None:
        """Write this rank's random states, buffers and optimizer settings to one of its slots for copies."""
        shared, held = self._shared, self._shared.held()
        versions = [shared.slot_version(slot) for slot in COPY_SLOTS]
        own = Version(shared.attempt, shared.generation, at.step)
        if own in versions:  # this step is saved again, perhaps with other values
            slot = COPY_SLOTS[versions.index(own)]
        else:
            slot = COPY_SLOTS[copies.slot_for(versions, held and held.version, shared.loaded and shared.loaded.version)]
        at.write(slot)

    def _write(self, at: Boundary, every: int) -> tuple[int, Held] | None:
        """Write parameters and optimizer state. Return the area and a description of the copy, which is not valid yet;
        None if the state has outgrown the reserved memory.

        Raises StateError, OSError.
        """
        shared = self._shared
        state = packed.pack(self._value(at.kept))
        version = Version(shared.attempt, shared.generation, at.step)
        held = Held(version, 0, state.size, packed.total(state.tensors), at.assumed, every)
        if state.size > min(map(shared.reserved, range(memory.AREAS))):
            self._room = None
            return None
        with shared.locked(waits=True):  # surviving ranks may be writing after a failure
            area = copies.area_for([shared.held_in(area) for area in range(memory.AREAS)])
            shared.write_copy(area, state, held)
            return area, held

    # ---- the next optimizer step, or the end ---------------------------------------------------------------

    def before_other_step(self) -> None:
        """Called before another optimizer makes its update in the same step. Does nothing for a state on the CPU."""

    def count_saved(self) -> bool:
        """Make the copy for `save` valid, once all ranks have completed its step or a rank has failed. Return False if
        there is no such copy. Raises OSError.

        After a failure the copy may lack random states of ranks that had not called `save`.
        """
        with self._lock:
            written = self._written
            if written is None or not written.is_saved:
                return False
            self._written = None
            return self._shared.count_copy(written.area, written.held)

    def before_step(self, kept: Kept) -> None:
        """Make the last copy valid unless parameters have changed. By now all ranks have completed the copied step."""
        with self._lock:
            written, self._written = self._written, None
            if written is None:
                return
            if self._is_as_it_was(kept, written.versions):
                self._shared.count_copy(written.area, written.held)
                return
        step = written.held.version.step
        self.begin_with_changes(f"parameters changed after step {step}, but not in optimizer.step()")

    def finish(self, kept: Kept) -> int:
        """After a failure, make the last copy valid if every rank has written its small values. Return memory.SAVED
        or UNABLE as the answer to the agent."""
        if self.count_saved():
            return memory.SAVED
        with self._lock:
            written, self._written = self._written, None
            if written is None or not self._is_as_it_was(kept, written.versions):
                return UNABLE
            all_are_here = self._world_size == self._shared.ranks
            step = written.held.version.step
            if self._world_size > 1 and not (all_are_here and self._shared.all_have_copied(step)):
                return UNABLE
            return memory.SAVED if self._shared.count_copy(written.area, written.held) else UNABLE

    def _versions_of(self, kept: Kept) -> list[Any]:
        """Return values that show a change of parameters. On a GPU only version counters: a read would block."""
        return kept.watch.counters() if self.on_device else kept.watch.versions()

    def _is_as_it_was(self, kept: Kept, versions: list[Any]) -> bool:
        """True if version counters and samples show no change of parameters after the copy."""
        is_same = self._versions_of(kept) == versions and not kept.watch.changed()
        return is_same or (self.schedule.plan is not None and self.schedule.plan.changes)

    # ---- the plan ------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Read the next copy plan from the group's store, and use the plan from its first step on."""
        schedule = self.schedule
        if self._rank > 0 and self._store is not None and self.by_cadence and schedule.looks:
            with contextlib.suppress(RuntimeError):  # the store is gone, because rank 0 has died
                if self._store.check([self._key]):
                    schedule.announce(copies.plan_of(self._store.get(self._key).decode()))
        before, plan = schedule.begin_next(), schedule.plan
        if before and plan and before.changes and plan.least > max(before.least, self._trusted):
            self._misplaced(plan.least)  # rank 0 has found other parameters there

    def _decide(self, at: Boundary) -> None:
        """On rank 0, plan how often to copy, if there is no plan or a better plan is possible."""
        if not self.schedule.may_decide or (self.changes and not self._is_shown):
            return
        if not self.schedule.costs and not self._try(at):
            return
        key, seconds, is_alone = self._key, time.perf_counter() - self._began, self._world_size == 1
        least = max(KEPT, self._trusted) if self.changes and not self._is_placed else MARKED
        plan = self.schedule.decide(seconds, least=least, changes=self.changes, is_alone=is_alone)
        if plan is not None and not is_alone:
            self._store.set(key, plan.as_text())
            self._store.get(key)  # blocks until the store has the plan, so that other ranks find it
        if plan is not None:
            self._tell(plan)

    def _try(self, at: Boundary) -> bool:
        """Make a first copy to measure its cost; False if it does not fit into memory. Raises StateError, OSError."""
        began = time.perf_counter()
        with self._lock:
            self._written = None
            if self._write(at, 1) is None:
                return False
        self.schedule.costs.append(time.perf_counter() - began)
        return True

    def _tell(self, plan: CopyPlan) -> None:
        """Log the plan if it differs much from the logged one."""
        said = self._said
        if said is not None and said[2:] == plan[2:] and not copies.is_much_rarer(plan.every, said.every):
            return
        self._said = plan
        steps = "at each step" if plan.every == 1 else f"every {plan.every} steps"
        where = ("", " that save() or keep() name", " that save() names")[plan.least]
        process.log(f"the state is copied {steps}{where}, because {CHANGES if plan.changes else self._because}")

    @property
    def _key(self) -> str:
        return f"ddpjob/copies/{self._shared.generation}/{self.schedule.announced}"

    # ---- room ----------------------------------------------------------------------------------------------

    def _has_room(self, kept: Kept) -> bool:
        if self._room is None:
            size = memory.area_bytes(packed.pack(self._value(kept)).size)
            self._room = threading.Thread(target=self._reserve, args=(size,), name="ddpjob-memory-room", daemon=True)
            self._room.start()
        return not self._room.is_alive()

    def _value(self, kept: Kept) -> dict[str, Any]:
        """Return the values to copy: parameters and optimizer state."""
        return kept.large()

    def _reserve(self, size: int) -> None:
        """Reserve memory for two copies. Runs in a thread, because the kernel needs half a second for a large state."""
        try:
            self._shared.take(size, memory.AREAS)
            self._prepare()
        except (StateError, OSError) as error:
            self.stop()
            what = "kept in memory" if self.instead else "copied"
            process.current.not_kept = (
                f"{error}{IF_KILLED}" if self._world_size == 1 and not self.instead else str(error)
            )
            process.log(f"rank {self._rank}: the state is not {what}: {error}")

    def _prepare(self) -> None:
        """Called in the thread of `_reserve` when the memory is reserved. Raises OSError."""
