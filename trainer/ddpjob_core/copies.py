"""When the state is copied into memory at a boundary, and over what: where no survivor can write it after a failure.

All ranks copy at the same steps. Rank 0 knows what a copy takes beside a step, and makes the plan: it writes it where
all ranks look, at boundaries that all of them know. The bytes of a copy are written by one rank of each node; each rank
writes its random states and what else is small. A copy counts from the next optimizer step on: by then every rank has
come to the boundary, so that none of them lacks its random states of that step.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ddpjob_core.memory import AREAS, EVERY_MAX, Held, Version

COST_MAX = 0.02
"""Of the time of all steps."""
EVERY_LEAST_ON_DEVICE = 4
"""A host that waits at a copy for the one before it then waits for work that is steps old, and no device is idle."""
LATER_ON_DEVICE = 1
"""Looks: the host of a rank waits at each for what its device did at the one before it, so all have come to that."""
AHEAD_ON_DEVICE = 3
"""Copies that a rank's host may be further than what counts: two as without a device, and the one of the looks."""
LOOK_STEPS = 4
"""Ranks look for a plan no more often: a look waits for an answer of the store."""
LESS = 4
"""A plan is made that copies more often where so much more often is possible: figures of a busy machine vary."""


class CopyPlan(NamedTuple):
    """From the first boundary at or after `first` on, the state is copied each `every` steps."""

    first: int
    every: int
    named: bool = False
    """Only at boundaries at which the script names the state itself (`save`, `keep`)."""
    changes: bool = False
    """Parameters change between a boundary and the next optimizer step, and rank 0 knows what `save` takes."""

    @property
    def next_within(self) -> int:
        """How many steps after a copy the next one is at the latest. Nobody knows when a script names its state
        again: saves are mostly rarer than `every`."""
        return EVERY_MAX if self.named else self.every

    def as_text(self) -> str:
        """For the other ranks."""
        return " ".join(str(int(value)) for value in self)


def plan_of(text: str) -> CopyPlan:
    """What `as_text` was made of. Raises ValueError."""
    first, every, named, changes = map(int, text.split())
    return CopyPlan(first, every, bool(named), bool(changes))


def every(copy_seconds: float, step_seconds: float, least: int = 1) -> int:
    """How many steps are between two copies, so that they take no more than COST_MAX of the time: a power of two, so
    that what was due with one plan mostly is with the next."""
    steps = least
    while steps < EVERY_MAX and copy_seconds > COST_MAX * steps * step_seconds:
        steps *= 2
    return steps


def corrected(wanted: int, present: int, share: float) -> int:
    """The steps between two copies, where copies have taken this share of all the time so far: figures of single copies
    and steps are too low where a processor is shared."""
    if share > COST_MAX:
        return min(EVERY_MAX, max(wanted, 2 * present))
    return max(wanted, present) if share > COST_MAX / 2 else wanted


def is_better(wanted: int, present: int) -> bool:
    """Whether a new plan is worth it."""
    return wanted > present or wanted * LESS <= present


def is_much_rarer(every: int, said: int) -> bool:
    """Whether a plan is worth another line in the log: a failure costs many more steps than was said."""
    return every >= said * LESS


def first_of_next(step: int, before: int, present: int, later: int = 0) -> int:
    """From which step on a plan counts that rank 0 makes at the boundary of `step`, the one after `before`: every rank
    looks there, and rank 0 has written it by then. present: the steps between two copies so far. later: by how many
    looks other ranks may be further than rank 0."""
    period = max(present, LOOK_STEPS)
    return (step + max(1, step - before)) // period * period + (1 + later) * period


def looks(step: int, before: int, present: int) -> bool:
    """Whether a rank looks for a new plan at the boundary of `step`, the one after `before`."""
    period = max(present, LOOK_STEPS)
    return step // period > before // period


def is_due(plan: CopyPlan, step: int, before: int) -> bool:
    """Whether the state is copied at the boundary of `step`. before: of the boundary before it that counts."""
    return step >= plan.first and (before < plan.first or step // plan.every > before // plan.every)


def area_for(held: Sequence[Held | None]) -> int:
    """The area that a copy is written into: never the one that has the newest state."""
    return min(range(AREAS), key=lambda area: _order(held[area].version if held[area] else None))  # type: ignore[union-attr]


def slot_for(versions: Sequence[Version | None], held: Version | None, loaded: Version | None) -> int:
    """The slot that a rank writes at a copy: the oldest, but not that of the newest state that it knows to be whole.

    held: the newest of its node. loaded: what this generation began with, which only another node may hold.
    """
    newest = max(_order(held), _order(loaded))

    def order(slot: int) -> tuple[bool, Version]:
        version = versions[slot]
        return version == newest, _order(version)

    return min(range(len(versions)), key=order)


def _order(version: Version | None) -> Version:
    return Version(0, 0, 0) if version is None else version
