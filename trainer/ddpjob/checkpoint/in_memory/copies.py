"""Copies of the state in the agent's memory, made at boundaries while all goes well (rules: `ddpjob_core/copies.py`).

Where no survivor can write the state after a failure: a rank that trains alone, and a script in which parameters change
between a boundary and the next optimizer step. The memory has two areas, and a copy goes into the one that has not the
newest state. The step that makes it count is written last, at the next optimizer step: by then all ranks have come to
the boundary, and nothing has shown that the boundary is not what `save` takes.

Of a script that changes parameters after the boundary nobody knows whether the next step begins with what they were
before or after it. So there the first `save` or `keep` shows it: `should_stop` counts as a boundary where both find the
same parameters at the same step, else the steps count that the script names.

Besides, of a script that has no folder and saves between steps that it does not mark, each state that it saves is
copied at once, whatever that costs, because nothing else has it then (`memory.py` knows when).
"""

import collections
import contextlib
import os
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from ddpjob import process
from ddpjob.checkpoint.in_memory import room
from ddpjob.checkpoint.in_memory.kept import Kept
from ddpjob.checkpoint.in_memory.shared import Shared
from ddpjob.checkpoint.state import packed
from ddpjob.errors import StateError
from ddpjob_core import copies, memory
from ddpjob_core.copies import Plan
from ddpjob_core.memory import CHANGED, CLOCK, COPIES, COPY_SLOTS, PID, PLACED, SAVED, UNABLE, Held, Version

PACES_LEAST = 3
AGAIN_SECONDS = 0.001
ALONE = "a rank that trains alone leaves nobody who could write it"
IF_KILLED = "; a rank that ends by an exception still leaves its state in memory, one that is killed does not"
CHANGES = "parameters or optimizer state change between a boundary and the next optimizer.step()"


class Boundary(NamedTuple):
    """What a rank is at."""

    kept: Kept
    step: int
    named: bool
    """Whether the script names the state: `save`, `keep`."""
    small: Callable[[], Any]
    """What else belongs to the step, to be written at once."""
    assumed: bool
    must_be_copied: bool = False
    """Now: nobody else will have it, and the script has said `save`."""


class _Written(NamedTuple):
    """A copy that does not count yet."""

    area: int
    held: Held
    versions: list[Any]
    is_saved: bool
    """It is what `save` was given, and no matter what the next step begins with."""


class Copies:
    """What one rank does of it: each writes what is small, the first of each node the state."""

    _least = 1  # steps between two copies
    _later = 0  # looks that other ranks may be further
    _because = ALONE

    def __init__(self, shared: Shared, rank: int, world_size: int, store: Any) -> None:
        """store: of the group, where rank 0 tells its plan; None where this rank trains alone."""
        self._shared, self._rank, self._world_size, self._store = shared, rank, world_size, store
        self.changes = False
        """Whether parameters change between a boundary and the next step."""
        self.saved: Version | None = None
        """What was copied last because the script has saved it."""
        self.loaded: Version | None = None
        """What this generation has loaded from memory."""
        self._plan: Plan | None = None
        self._next: Plan | None = None  # told, and not in force yet
        self._told = 0  # plans that rank 0 has told, or another rank has seen
        self._step = self._before = self._counted = 0  # this boundary, the one before, the last that counted
        self._resumed = 0  # the step that was loaded: it is in memory
        self._noted: tuple[list[Any], bool] | None = None  # the parameters' versions at this boundary, and by whom
        self._copied = 0  # the step of the last copy
        self._is_named = False  # the script has named a state
        self._is_placed: bool | None = None  # whether should_stop finds what save does
        self._lock = threading.Lock()  # held while a copy is written
        self._written: _Written | None = None
        self._room: threading.Thread | None = None
        self._stopped = False
        self._said: tuple[bool, bool, int] | None = None
        self._ended = 0.0
        self._began = time.perf_counter()
        self._spent, self._has_copied = 0.0, False  # the seconds of all copies; whether there was one since the plan
        self._paces: collections.deque[float] = collections.deque(maxlen=15)
        self._costs: collections.deque[float] = collections.deque(maxlen=5)

    @property
    def instead(self) -> bool:
        """Whether what survivors would write after a failure cannot be trusted."""
        return self.changes

    @property
    def by_cadence(self) -> bool:
        """Whether states are copied that the script does not save, too."""
        return self.changes or self._world_size == 1

    def begin_with_changes(self, why: str) -> None:
        """Parameters change between a boundary and the next step. why: for the log."""
        if self.changes:
            return
        is_placed = self._shared.node[COPIES] == PLACED
        self.changes, self._is_placed, self._is_named = True, is_placed or None, is_placed
        self._shared.node[COPIES] = max(CHANGED, self._shared.node[COPIES])
        self.forget()
        if self._rank == 0 and not is_placed:
            process.log(f"{why}: the state is copied at the steps that save() or keep() name, from the first one on")

    def resumed(self, step: int) -> None:
        """The state of this step is in memory already."""
        self._resumed = step

    def stop(self) -> None:
        """Make no further copy."""
        self._stopped = True
        self.give_up_last()

    def give_up_last(self) -> None:
        """The copy that does not count yet is of other objects."""
        with self._lock:
            self._written = None

    def forget(self) -> None:
        """What this generation has copied is not what it should be, but for what the script has saved."""
        self.count_saved()
        with self._lock:
            self._written = self._room = None
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
        """The first of a step. Raises StateError, OSError."""
        if self._ended and at.step > self._step:
            self._paces.append((time.perf_counter() - self._ended) / (at.step - self._step))
        if at.step != self._step:
            self._before, self._step = self._step, at.step
        self._noted = (self._versions_of(at.kept), at.named) if self.changes else None
        if self.instead:
            self._shared.write_mark(at.step, self._before)
        self._look()
        self._copy_if_due(at)
        self._ended = time.perf_counter()

    def again(self, at: Boundary) -> None:
        """Another one of the same step: `save` after `should_stop`. Raises StateError, OSError."""
        if at.must_be_copied:
            self._step = at.step
            self._copy_if_due(at)
            return
        if self._noted is None or at.step != self._step:
            return
        versions, named = self._noted
        if named != at.named and self._is_placed is not False:
            if self._versions_of(at.kept) == versions:
                self._is_placed, self._shared.node[COPIES] = True, PLACED
            else:
                self._misplaced()
        self._copy_if_due(at)
        self._ended = time.perf_counter()

    def renew(self, at: Boundary) -> None:
        """The copy of this step, if there is one that does not count yet, has not what the script saves now."""
        if self._copied == at.step and not self._stopped:
            self._copy(at, memory.EVERY_MAX if self._plan is None else self._plan.next_within)

    def _misplaced(self) -> None:
        """`save` finds other parameters than should_stop: what was copied there is of no step."""
        self.forget()
        self._is_placed, self._shared.node[COPIES] = False, CHANGED

    def _copy_if_due(self, at: Boundary) -> None:
        if self._stopped or at.step == self._resumed:
            return
        self._is_named |= at.named
        if at.must_be_copied:
            self._copy_saved(at)
        if at.must_be_copied or not self.by_cadence or (self._is_writer and not self._has_room(at.kept)):
            return
        if self._rank == 0:
            self._decide(at)
        plan = self._plan
        if plan is None or plan.changes < self.changes:
            return
        if not at.named and (plan.named or self._is_placed is False):
            return
        counted, self._counted = self._counted, at.step
        if copies.is_due(plan, at.step, counted):
            self._copied = at.step
            self._copy(at, plan.next_within)

    def _copy_saved(self, at: Boundary) -> None:
        """Waits for the room, which the first one has not yet."""
        for _ in range(2):  # it may have outgrown the areas
            while self._is_writer and not self._stopped and not self._has_room(at.kept):
                if self._room is not None:
                    self._room.join()
            if self._stopped:
                return
            self._counted = at.step
            self.saved = Version(self._shared.attempt, self._shared.generation, at.step)
            self._copy(at, memory.EVERY_MAX)
            if not self._is_writer or self._room is not None:
                return

    def _copy(self, at: Boundary, every: int) -> None:
        began, shared = time.perf_counter(), self._shared
        self._write_slot(at)
        if self._is_writer:
            with self._lock:
                shared.cells[CLOCK], shared.cells[PID] = 2 * at.step, os.getpid()
                written, versions = self._write(at, every), self._versions_of(at.kept)
                self._written = None if written is None else _Written(*written, versions, at.must_be_copied)
            if at.must_be_copied and self._world_size == 1:
                self.count_saved()  # no other rank has to come there
        self._pay(time.perf_counter() - began)

    def _pay(self, seconds: float) -> None:
        """A copy has taken that long."""
        self._costs.append(seconds)
        self._spent, self._has_copied = self._spent + seconds, True

    def _write_slot(self, at: Boundary) -> None:
        """What belongs to this rank and is small."""
        shared, held = self._shared, self._shared.held()
        versions = [shared.slot_version(slot) for slot in COPY_SLOTS]
        own = Version(shared.attempt, shared.generation, at.step)
        if own in versions:  # it is saved once more, and may have other values
            slot = COPY_SLOTS[versions.index(own)]
        else:
            slot = COPY_SLOTS[copies.slot_for(versions, held and held.version, self.loaded)]
        shared.write_slot(slot, at.step, packed.dumps(at.small()))

    def _write(self, at: Boundary, every: int, loads: int = 0) -> tuple[int, Held] | None:
        """Into which area the state was written; it does not count yet. None: it has outgrown the areas. Raises
        StateError, OSError."""
        shared = self._shared
        state = packed.pack(self._value(at.kept))
        version = Version(shared.attempt, shared.generation, at.step)
        held = Held(version, loads, state.size, packed.total(state.tensors), at.assumed, every)
        if state.size > min(map(shared.reserved, range(memory.AREAS))):
            self._room = None
            return None
        with shared.alone():  # survivors of a failure may be writing
            area = copies.area_for([shared.held_in(area) for area in range(memory.AREAS)])
            shared.write_copy(area, state, held)
            return area, held

    def write_now(self, at: Boundary, loads: int) -> bool:
        """At its end a rank that trains alone writes the state, over the older of the two copies; whether it could.
        Raises StateError, OSError."""
        if self._world_size > 1:
            return False
        with self._lock:
            self._written = None
            may_write = not (self._stopped or self._room is None or self._room.is_alive())
            written = self._write(at, 0, loads) if may_write else None
            return written is not None and self._shared.count_copy(*written)

    # ---- the next optimizer step, or the end ---------------------------------------------------------------

    def before_other_step(self) -> None:
        """Another optimizer makes the same step."""

    def count_saved(self) -> bool:
        """All ranks have come to the boundary: what was saved there counts, whatever becomes of the objects. Whether
        there is such a copy. Raises OSError."""
        with self._lock:
            written = self._written
            if written is None or not written.is_saved:
                return False
            self._written = None
            return self._shared.count_copy(written.area, written.held)

    def before_step(self, kept: Kept) -> None:
        """All ranks have come to the boundary: what was copied there counts."""
        self.count_saved()
        with self._lock:
            written, self._written = self._written, None
            if written is None:
                return
            if self._is_as_it_was(kept, written.versions):
                self._shared.count_copy(written.area, written.held)
                return
        step = written.held.version.step
        self.begin_with_changes(f"parameters changed after step {step}, and by no optimizer.step()")

    def finish(self, kept: Kept) -> int:
        """A rank has failed: the copy that was under way counts, if each rank has left its random states with it. What
        to tell the agent."""
        if self.finish_saved():
            return SAVED
        with self._lock:
            written, self._written = self._written, None
            if written is None or not self._is_as_it_was(kept, written.versions):
                return UNABLE
            if not self._all_are_at(written.held.version.step):
                return UNABLE
            return SAVED if self._shared.count_copy(written.area, written.held) else UNABLE

    def finish_saved(self) -> bool:
        """A rank has failed: what this one has saved since the last step counts; whether it has.

        Ranks that had not come to the save have no random states of it, as where survivors write a state.
        """
        return self.count_saved()

    def _versions_of(self, kept: Kept) -> list[Any]:
        """What shows whether parameters have changed."""
        return kept.versions()

    def _is_as_it_was(self, kept: Kept, versions: list[Any]) -> bool:
        """Whether nothing speaks against the boundary."""
        is_same = self._versions_of(kept) == versions and not kept.changed()
        return is_same or (self._plan is not None and self._plan.changes)

    def _all_are_at(self, step: int) -> bool:
        """Whether all ranks of the group are of this node, and have written their slots of that step."""
        return self._world_size == 1 or (self._world_size == self._shared.ranks and self._shared.all_have_copied(step))

    # ---- the plan ------------------------------------------------------------------------------------------

    @property
    def _every(self) -> int:
        return 1 if self._plan is None else self._plan.every

    def _look(self) -> None:
        """Take the next plan where it begins to be in force."""
        looks = self._rank > 0 and self._store is not None and self._next is None and self.by_cadence
        if looks and copies.looks(self._step, self._before, self._every):
            with contextlib.suppress(RuntimeError):  # the store is gone, and rank 0 with it
                if self._store.check([self._key]):
                    self._next = copies.plan_of(self._store.get(self._key).decode())
                    self._told += 1
        if self._next is not None and self._step >= self._next.first:
            before, self._plan, self._next = self._plan, self._next, None
            if before and before.changes and self._plan.named > before.named and self._is_placed is not False:
                self._misplaced()  # as rank 0 has found, which alone calls save

    def _decide(self, at: Boundary) -> None:
        """Make a plan where there is none, or another one is better."""
        if self._next is not None or len(self._paces) < PACES_LEAST or (self.changes and not self._is_named):
            return
        if not self._costs and not self._try(at):
            return
        plan, named = self._plan, self.changes and not self._is_placed
        is_as_planned = plan is not None and (plan.named, plan.changes) == (named, self.changes)
        if is_as_planned and not self._has_copied:
            return
        self._has_copied = False
        every = copies.every(statistics.median(self._costs), statistics.median(self._paces), self._least)
        every = copies.corrected(every, self._every, self._spent / (time.perf_counter() - self._began))
        every = every if plan is None else min(every, 2 * plan.every)  # the next generation knows how far ranks may be
        if not is_as_planned or copies.is_better(every, self._every):
            self._tell(every, named)

    def _try(self, at: Boundary) -> bool:
        """Copy for the first time, to see what it takes; whether that is known now. Raises StateError, OSError."""
        began = time.perf_counter()
        with self._lock:
            self._written = None
            if self._write(at, 1) is None:
                return False
        self._costs.append(time.perf_counter() - began)
        return True

    def _tell(self, every: int, named: bool) -> None:
        if self._world_size == 1:
            first = self._step if self._plan is None else self._plan.first  # a new plan alone is no reason for a copy
            self._plan = Plan(first, every, named, self.changes)
        else:
            first = copies.first_of_next(self._step, self._before, self._every, self._later)
            self._next = Plan(first, every, named, self.changes)
            self._store.set(self._key, self._next.as_text())
            self._store.get(self._key)  # so that the other ranks find it from now on
        self._told += 1
        before, present = self._said, (named, self.changes, every)
        if before is not None and before[:2] == present[:2] and not copies.is_much_rarer(every, before[2]):
            return
        self._said = present
        steps = "at each step" if every == 1 else f"each {every} steps"
        where = " that save() or keep() name" if named else ""
        process.log(f"the state is copied {steps}{where}, because {CHANGES if self.changes else self._because}")

    @property
    def _key(self) -> str:
        return f"ddpjob/copies/{self._shared.generation}/{self._told}"

    # ---- room ----------------------------------------------------------------------------------------------

    def _has_room(self, kept: Kept) -> bool:
        if self._room is None:
            size = memory.area_bytes(packed.pack(self._value(kept)).size)
            self._room = threading.Thread(target=self._reserve, args=(size,), name="ddpjob-memory-room", daemon=True)
            self._room.start()
        return not self._room.is_alive()

    def _value(self, kept: Kept) -> dict[str, Any]:
        """What an area holds."""
        return kept.large()

    def _reserve(self, size: int) -> None:
        """In a thread: the kernel needs half a second for a large area."""
        try:
            while not self._take(size):
                time.sleep(AGAIN_SECONDS)
            self._prepare()
        except (StateError, OSError) as error:
            self.stop()
            what = "kept in memory" if self.instead else "copied"
            process.current.not_kept = (
                f"{error}{IF_KILLED}" if self._world_size == 1 and not self.instead else str(error)
            )
            process.log(f"rank {self._rank}: the state is not {what}: {error}")

    def _take(self, size: int) -> bool:
        """Memory for so many bytes of each area; False: another rank writes there. Raises StateError, OSError."""
        shared = self._shared
        with shared.locked() as alone:
            if alone:
                missing = memory.missing(size, [*map(shared.reserved, range(memory.AREAS))], memory.AREAS)
                if missing and (short := room.shortage(missing)):
                    process.current.limit_needed = short.limit_needed
                    raise StateError(f"two copies of {size >> 20} MiB have no room: {short.why}")
                for area in range(memory.AREAS):
                    shared.reserve(size, area)
            return alone

    def _prepare(self) -> None:
        """There is room; in the same thread. Raises OSError."""
