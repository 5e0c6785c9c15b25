"""Plan when the state is copied into memory, for trainings in which no survivor can write it later.

Copies are made at boundaries: calls of `should_stop(step)`, `keep` or `save`.
All ranks copy at the same steps. Rank 0 measures the cost of a copy relative to a step, and writes the plan to the
store. All ranks check the store at the same boundaries. One rank of each node writes the bytes of a copy; each rank
writes its random states and other small objects. A copy counts from the next optimizer step on: by then every rank has
reached the boundary, so none lacks its random states.
"""

import collections
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from ddpjob_core.memory import AREAS, EVERY_MAX, Held, Version

COST_MAX = 0.02
"""Maximum share of the time of all steps that copies may take."""
EVERY_LEAST_ON_DEVICE = 4
"""Minimum number of steps between two copies. The host then waits only for old work, so the device is never idle."""
LATER_ON_DEVICE = 1
"""Number of checks for a plan that ranks may be apart. At each check the host waits for its device's previous check."""
AHEAD_ON_DEVICE = 3
"""Copies that a rank's host may be ahead of the last valid one: two as without a device, and one for the checks."""
LOOK_STEPS = 4
"""Minimum number of steps between two checks for a plan, because a check waits for the store."""
LESS = 4
"""A plan with more frequent copies must copy this many times more often, because measurements of busy machines vary."""

PACES_LEAST = 3
"""Number of steps that are measured before the first plan."""


class CopyPlan(NamedTuple):
    """Plan of rank 0: copy the state every `every` steps, from the first boundary at or after step `first` on."""

    first: int
    every: int
    least: int = 0
    """Copy at 0: all boundaries; 1: those of `keep` and `save`; 2: only those of `save`."""
    changes: bool = False
    """Parameters change between a boundary and the next optimizer step, and rank 0 knows what `save` is given."""

    @property
    def next_within(self) -> int:
        """Return the maximum number of steps until the next copy; EVERY_MAX if the script decides, because it may save
        more rarely than `every`."""
        return EVERY_MAX if self.least else self.every

    def as_text(self) -> str:
        """Convert the plan to text for the store."""
        return " ".join(str(int(value)) for value in self)


def plan_of(text: str) -> CopyPlan:
    """Parse the text of `as_text`. Raise ValueError."""
    first, every, least, changes = map(int, text.split())
    return CopyPlan(first, every, least, bool(changes))


def every(copy_seconds: float, step_seconds: float, least: int = 1) -> int:
    """Return the steps between two copies that keep their cost below COST_MAX: a power of two, so that the steps of two
    plans mostly coincide.
    """
    steps = least
    while steps < EVERY_MAX and copy_seconds > COST_MAX * steps * step_seconds:
        steps *= 2
    return steps


def corrected(wanted: int, present: int, share: float) -> int:
    """Return the steps between two copies, given the share of all time that copies have taken so far: single
    measurements of copies and steps are too low on a shared processor.
    """
    if share > COST_MAX:
        return min(EVERY_MAX, max(wanted, 2 * present))
    return max(wanted, present) if share > COST_MAX / 2 else wanted


def is_better(wanted: int, present: int) -> bool:
    """True if the wanted number of steps between copies differs enough from the present number to change the plan."""
    return wanted > present or wanted * LESS <= present


def is_much_rarer(every: int, said: int) -> bool:
    """True if the log must name a new plan, because a failure would cost many more steps than the logged plan."""
    return every >= said * LESS


def first_of_next(step: int, before: int, present: int, later: int = 0) -> int:
    """Return the first step of a plan that rank 0 makes at the boundary of `step`. Every rank checks for a plan before
    that first step. before: step of the previous boundary. present: steps between two copies so far. later: other ranks
    may be ahead of rank 0 by this many checks."""
    period = max(present, LOOK_STEPS)
    return (step + max(1, step - before)) // period * period + (1 + later) * period


def looks(step: int, before: int, present: int) -> bool:
    """True if a rank checks the store for a new plan at the boundary of `step`. before: step of the boundary before."""
    period = max(present, LOOK_STEPS)
    return step // period > before // period


def is_due(plan: CopyPlan, step: int, before: int) -> bool:
    """True if the state is copied at the boundary of `step`. before: step of the boundary that was checked last."""
    return step >= plan.first and (before < plan.first or step // plan.every > before // plan.every)


class CopySchedule:
    """When a rank makes copies. Rank 0 decides on plans and announces them; the others read each before its first
    step."""

    def __init__(self, least: int = 1, later: int = 0) -> None:
        """least: minimum number of steps between two copies. later: as in `first_of_next`."""
        self._least, self._later = least, later
        self.plan: CopyPlan | None = None
        self.next: CopyPlan | None = None
        """The announced plan, not used before its first step."""
        self.announced = 0
        """Number of plans that rank 0 has announced, or this rank has read."""
        self.step = self.before = 0
        """Steps of the present boundary and of the boundary before it."""
        self.checked = 0
        """Step of the last boundary that was checked for a copy."""
        self.costs: collections.deque[float] = collections.deque(maxlen=5)
        """Seconds that the last copies took."""
        self._paces: collections.deque[float] = collections.deque(maxlen=15)
        self._spent, self._has_copied = 0.0, False  # duration of all copies in seconds; True after a copy of this plan

    @property
    def every(self) -> int:
        """Number of steps between two copies."""
        return 1 if self.plan is None else self.plan.every

    def boundary(self, step: int, pace: float | None) -> None:
        """Come to the boundary of this step. pace: seconds of a step without the copy; None if not measured."""
        if pace is not None:
            self._paces.append(pace)
        if step != self.step:
            self.before, self.step = self.step, step

    @property
    def looks(self) -> bool:
        """True if a rank other than rank 0 checks for a new plan at this boundary."""
        return self.next is None and looks(self.step, self.before, self.every)

    def announce(self, plan: CopyPlan) -> None:
        """Use this plan from its first step on."""
        self.next, self.announced = plan, self.announced + 1

    def begin_next(self) -> CopyPlan | None:
        """Use the announced plan if its first step has come. Return the plan that it replaces."""
        if self.next is None or self.step < self.next.first:
            return None
        before, self.plan, self.next = self.plan, self.next, None
        return before

    def is_due(self, plan: CopyPlan, step: int) -> bool:
        """True if the state is copied at this step, by this plan."""
        before, self.checked = self.checked, step
        return is_due(plan, step, before)

    def pay(self, seconds: float) -> None:
        """Add the duration of a copy."""
        self.costs.append(seconds)
        self._spent, self._has_copied = self._spent + seconds, True

    @property
    def may_decide(self) -> bool:
        """True if rank 0 may make a new plan: it knows the duration of a step, and all ranks have the last plan."""
        return self.next is None and len(self._paces) >= PACES_LEAST

    def decide(self, seconds: float, *, least: int, changes: bool, is_alone: bool) -> CopyPlan | None:
        """Return a new plan of rank 0, which applies from its first step on; None if the present plan stays. seconds:
        duration of the training so far. least, changes: as in CopyPlan. is_alone: True if there is no other rank."""
        plan = self.plan
        is_as_planned = plan is not None and (plan.least, plan.changes) == (least, changes)
        if is_as_planned and not self._has_copied:
            return None
        self._has_copied = False
        steps = every(statistics.median(self.costs), statistics.median(self._paces), self._least)
        steps = corrected(steps, self.every, self._spent / seconds)
        # At most double the interval: a restart rejects a copy if a rank is more than two old intervals ahead of it.
        steps = steps if plan is None else min(steps, 2 * plan.every)
        if is_as_planned and not is_better(steps, self.every):
            return None
        if is_alone:
            first = self.step if plan is None else plan.first  # a new plan causes no extra copy
            self.plan = CopyPlan(first, steps, least, changes)
            return self.plan
        found = CopyPlan(first_of_next(self.step, self.before, self.every, self._later), steps, least, changes)
        self.announce(found)
        return found


def area_for(held: Sequence[Held | None]) -> int:
    """Return the area to write a copy into: never the area with the newest state."""
    return min(range(AREAS), key=lambda area: _order(held[area].version if held[area] else None))  # type: ignore[union-attr]


def slot_for(versions: Sequence[Version | None], held: Version | None, loaded: Version | None) -> int:
    """Return the slot for a rank's next copy: the oldest slot, except the slot of the newest complete state.

    held: newest state in the memory of this node. loaded: state that this generation loaded, maybe from another node.
    """
    newest = max(_order(held), _order(loaded))

    def order(slot: int) -> tuple[bool, Version]:
        version = versions[slot]
        return version == newest, _order(version)

    return min(range(len(versions)), key=order)


def _order(version: Version | None) -> Version:
    return Version(0, 0, 0) if version is None else version
