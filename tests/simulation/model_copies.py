"""A model of periodic copies: what ranks do at boundaries (calls of `should_stop`, `save`, `keep`) without failures.

The real rules (`ddpjob_core.copies`) decide when a copy is made, what it overwrites, and which plan applies. The model
replaces `by_cadence/copies.py`. Rank 0 announces its plans in a Store. A copy has a random duration and several actions
(WORK), and the job may end between any two. The first rank of a node writes the state, each rank its random states."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from model_area import PARTS, TORN, Area, Place, State, Whole

from ddpjob_core import copies
from ddpjob_core.copies import CopyPlan, CopySchedule
from ddpjob_core.memory import CHANGED, COPY_SLOTS, PLACED, Held, Mark, Version

if TYPE_CHECKING:
    from model_agents import Life

WORK = ("note", "open", *["part"] * PARTS, "close")
STEP_SECONDS = 1.0
COST_SECONDS = (-2.5, -0.4)
"""Exponents of ten of a copy's duration. They lead to plans between a copy at each step and at every 32nd step."""
NO_ROOM_STEPS = (0, 0, 0, 1, 3)


@dataclass
class Store:
    """Rank 0's plans in a generation, each with the step at which rank 0 announced it."""

    plans: list[tuple[int, CopyPlan]] = field(default_factory=list)


class At(NamedTuple):
    """A boundary: a call of `should_stop`, `save` or `keep`, at which the rank may copy its state."""

    step: int
    named: bool
    """True if the script passes the state: at `save` and `keep`."""


@dataclass(eq=False)
class Copying:
    """The periodic copies that one rank makes in one generation."""

    rank: int
    ranks: int
    per_node: int
    area: Area
    life: Life
    store: Store
    stamp: Callable[[int, int], Held]
    """Returns the cells for the state of a step. Second argument: number of steps until the next copy."""
    state: Callable[[int], State]
    """Returns the rank's state at a step."""
    chance: random.Random
    changes: bool
    """True if parameters change between a boundary and the next step, or the rank trains alone."""
    has_place: bool
    """True if `should_stop` finds the same state as `save`."""
    starts: int
    """Step of the first boundary that may be copied."""
    loaded: Version | None
    """Version that this generation has loaded from memory."""
    schedule: CopySchedule = field(default_factory=CopySchedule)
    todo: list[str] = field(default_factory=list)
    """Remaining actions of the current copy."""
    _is_named: bool = False
    _is_placed: bool | None = None
    _room_at: int | None = None
    _seconds: float = 0.0
    """Duration of all steps."""
    _place: Place = field(default_factory=Place)
    _held: Held | None = None
    """Cells of the copy that is being made or waits for the next optimizer step."""
    _is_written: bool = False

    def __post_init__(self) -> None:
        self._is_placed = self.area.changes == PLACED or None
        self._is_named = self.area.changes == PLACED
        self._cost = 10 ** self.chance.uniform(*COST_SECONDS)

    @property
    def step(self) -> int:
        """Step of the last boundary."""
        return self.schedule.step

    @property
    def least(self) -> int:
        """Return the earliest step from which the job may resume if it fails now and this node survives.
        0: no copy is required yet, or the script decides when to copy.
        """
        plan = self.schedule.plan
        if plan is None or plan.least or self.step <= plan.first + plan.every + 1:
            return 0
        own = (state for local, state in self.area.excused if local == self.local)
        excused = max((state.step for state in own if state.life == self.life.number), default=0)
        return self.step - plan.every if excused < self.step - 2 * plan.every else 0

    @property
    def local(self) -> int:
        """Return the local rank."""
        return self.rank % self.per_node

    @property
    def is_writer(self) -> bool:
        """True if this rank writes the state of its node."""
        return self.local == 0

    # ---- without a failure ---------------------------------------------------------------------------------

    def comes_to(self, at: At) -> None:
        """Make an optimizer step, and call `should_stop`, `save` or `keep` after it."""
        if at.step == self.step:
            return self._again(at)
        self.begins_a_step()
        if at.step >= self.starts:
            pace = STEP_SECONDS if self.step else None
            self._seconds += pace or 0
            self.schedule.boundary(at.step, pace)
            if self.changes:
                self.area.changes = max(CHANGED, self.area.changes)
                self.area.written_marks[self.local] = Mark(self._version.generation, at.step, self.schedule.before)
            self._look()
            self._copy_if_due(At(at.step, False))
            if at.named:
                self._again(at)
        return None

    def begins_a_step(self) -> None:
        """Begin the next step. All ranks have completed the last step by now, so copies made after that step count."""
        self.work()
        if self._is_written:
            self.count()

    def count(self) -> None:
        """Make the written copy the newest state of its area."""
        assert self._held is not None, "it was written"
        self._is_written = False
        self._place.held, self._place.writer = self._held, self.life
        self.area.copied = Whole(self.life, self.state(self._held.version.step), self._held.assumed)

    def work(self, most: int = len(WORK)) -> None:
        """Do up to `most` of the remaining actions of the current copy."""
        for _ in range(min(most, len(self.todo))):
            getattr(self, f"_{self.todo.pop(0)}")()

    @property
    def is_complete(self) -> bool:
        """True if the copy that waits for the next optimizer step is already complete: all ranks are on this node and
        have written their random states."""
        is_all = self.ranks == self.per_node and self.area.all_have_copied(self._version, self.per_node)
        return self._is_written and is_all

    def drop(self) -> None:
        """Drop the waiting copy, because a newer state is being written."""
        self.todo, self._is_written = [], False

    def forget(self, starts: int) -> None:
        """Forget all copies, because the script has passed other objects to `save` or `keep`."""
        self.drop()
        self.starts = starts

    @property
    def has_room(self) -> bool:
        """True if both areas are reserved."""
        return self._room_at is not None and self.step >= self._room_at

    @property
    def _version(self) -> Version:
        return self.stamp(self.step, 0).version

    # ---- a boundary ----------------------------------------------------------------------------------------

    def _again(self, at: At) -> None:
        """Copy again at a `save` after `should_stop`, if the script changes parameters between the two calls."""
        if not self.changes or not at.named or at.step < self.starts:
            return
        self._is_placed = self.has_place
        self.area.changes = PLACED if self.has_place else CHANGED
        self._copy_if_due(at)

    def _look(self) -> None:
        if self.rank > 0 and self.schedule.looks and self.schedule.announced < len(self.store.plans):
            told_at, plan = self.store.plans[self.schedule.announced]
            if told_at < self.step or self.chance.random() < 0.5:
                self.schedule.announce(plan)
        self.schedule.begin_next()

    def _copy_if_due(self, at: At) -> None:
        if self.loaded is not None and at.step == self.loaded.step:
            return  # memory has the loaded state already
        self._is_named |= at.named
        if self._room_at is None:
            self._room_at = at.step + self.chance.choice(NO_ROOM_STEPS if self.is_writer else (0,))
        own = self.local, State(self.life.number, at.step)
        if not self.has_room:
            self.area.excused.add(own)
            return
        if self.rank == 0:
            self._decide(at)
        plan = self.schedule.plan
        if plan is None or plan.changes < self.changes or (plan.least and not at.named):
            if plan is not None and plan.least:
                self.area.excused.add(own)
            return
        self.area.excused.discard(own)
        if self.schedule.is_due(plan, at.step):
            self._held = self.stamp(at.step, plan.next_within)
            self.todo, self._is_written = list(WORK if self.is_writer else WORK[:1]), False
            self.schedule.pay(self._takes())

    def _takes(self) -> float:
        return self._cost * self.chance.choice((0.7, 1.0, 1.0, 1.3, 8.0))

    def _decide(self, at: At) -> None:
        if not self.schedule.may_decide or (self.changes and not self._is_named):
            return
        if not self.schedule.costs:
            self._held = self.stamp(at.step, 1)
            self._open()
            self._place.parts = [self.state(at.step)] * PARTS
            self.schedule.costs.append(self._takes())
        named, is_alone = self.changes and not self._is_placed, self.ranks == 1
        plan = self.schedule.decide(self._seconds, least=int(named), changes=self.changes, is_alone=is_alone)
        if plan is not None and not is_alone:
            self.store.plans.append((self.step, plan))

    # ---- the steps of a copy -------------------------------------------------------------------------------

    def _note(self) -> None:
        """Write this rank's random states."""
        held, slots = self.area.held, self.area.copy_slots.setdefault(self.local, [None] * len(COPY_SLOTS))
        slots[copies.slot_for(slots, held and held.version, self.loaded)] = self._version

    def _open(self) -> None:
        """Invalidate the area before it is overwritten."""
        self._place = self.area.places[copies.area_for([place.held for place in self.area.places])]
        self._place.held, self._place.writer, self._place.parts = None, None, [TORN] * PARTS

    def _part(self) -> None:
        self._place.parts[self._place.parts.index(TORN)] = self.state(self.step)

    def _close(self) -> None:
        self._is_written = True
