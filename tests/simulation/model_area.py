"""A model of an agent's memory: its areas, the slots of its ranks, and what they really contain."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ddpjob_core.memory import AREAS, Held, Mark, Version

if TYPE_CHECKING:
    from model_agents import Life

PARTS = 3
"""Number of parts of an area. A writer may die between any two parts."""


class State(NamedTuple):
    """The state of all ranks of a generation at one step."""

    life: int
    """Number of the generation. The next generation has this state until it makes a step."""
    step: int


NOTHING = State(0, 0)
TORN = State(-1, -1)
"""The state of a rank within its optimizer's step, and of an unfinished write."""


class Whole(NamedTuple):
    """A complete state in memory, and the generation that really wrote this state."""

    writer: Life
    state: State
    assumed: bool


@dataclass
class Place:
    """One of the areas of an agent's memory."""

    parts: list[State] = field(default_factory=lambda: [NOTHING] * PARTS)
    held: Held | None = None
    """What the cells say about the content."""
    writer: Life | None = None
    """The truth: the generation that wrote all parts; None if nothing complete is there."""

    @property
    def whole(self) -> Whole | None:
        """The complete state that is really in this area; None if the state is incomplete."""
        if self.writer is None or len(set(self.parts)) > 1:
            return None
        return Whole(self.writer, self.parts[0], self.held is not None and self.held.assumed)


@dataclass
class Area:
    """The memory of one agent. It is lost with the agent."""

    places: list[Place] = field(default_factory=lambda: [Place() for _ in range(AREAS)])
    slots: dict[int, list[Version]] = field(default_factory=dict)
    """The last two boundaries of each local rank."""
    copy_slots: dict[int, list[Version | None]] = field(default_factory=dict)
    """The last three copies of each local rank."""
    written_marks: dict[int, Mark] = field(default_factory=dict)
    proven: bool = False
    changes: int = 0
    """CHANGED or PLACED, as soon as ranks have detected this behaviour of the script."""
    excused: set[tuple[int, State]] = field(default_factory=set)
    """The truth: (local rank, state) of each copy without this rank, because it had no room or did not save."""
    copied: Whole | None = None
    """The truth: the newest copy that has counted here. Only a newer complete state may overwrite it."""

    @property
    def newest(self) -> Place:
        """Return the area that `Shared.held` would choose."""
        none = Version(0, 0, 0)
        return max(self.places, key=lambda place: place.held.version if place.held else none)

    @property
    def held(self) -> Held | None:
        """Return version and flags of the newest state, as the agent reads them from the memory."""
        return self.newest.held

    @property
    def marks(self) -> list[Mark]:
        """The last two steps that each rank has recorded, as `Shared.mark` returns them."""
        marks = (self._mark(local) for local in sorted({*self.slots, *self.written_marks}))
        return [mark for mark in marks if mark is not None]

    def _mark(self, local: int) -> Mark | None:
        copied, slots = self.written_marks.get(local), sorted(self.slots.get(local, []))
        found = [copied] if copied is not None and copied.before > 0 else []
        if len(slots) == 2 and slots[0].generation == slots[1].generation:
            found.append(Mark(slots[1].generation, slots[1].step, slots[0].step))
        return max(found, default=None)

    def has_small(self, version: Version) -> bool:
        """True if any rank of the agent has written its random states for this version."""
        return any(self.has_own(version, local) for local in {*self.slots, *self.copy_slots})

    def has_own(self, version: Version, local: int) -> bool:
        """True if this rank has written its random states for this version."""
        return version in self.slots.get(local, ()) or version in self.copy_slots.get(local, ())

    def all_have_copied(self, version: Version, ranks: int) -> bool:
        """Return what `Shared.all_have_copied` would return."""
        return all(version in self.copy_slots.get(local, ()) for local in range(ranks))

    def note(self, version: Version, local: int = 0) -> None:
        """Write a local rank's random states into the older of its two slots."""
        slots = self.slots.get(local, [])
        if version not in slots:
            self.slots[local] = [*sorted(slots)[-1:], version]

    def begin(self, place: Place, held: Held) -> None:
        """Begin to write after a failure. The area has no valid state until its last part is written."""
        if place.whole is not None and place.whole == self.copied:
            self.copied = None  # a write after a failure may overwrite the newest copy
        place.held = place.writer = None

    def end(self, place: Place, held: Held, life: Life) -> None:
        """Make the state valid, because its last part was written."""
        place.held, place.writer = held, life

    def count_load(self, version: Version) -> None:
        """Count another load of the newest state."""
        place = self.newest
        assert place.held is not None, "it was found there"
        assert place.held.version == version, "it was found there"
        place.held = place.held._replace(loads=place.held.loads + 1)

    def forget(self, generation: int) -> None:
        """Forget slots and copies of this generation, because the script has passed other objects."""
        self.slots = {
            local: [slot for slot in slots if slot.generation != generation] for local, slots in self.slots.items()
        }
        for slots in self.copy_slots.values():
            slots[:] = [slot and (None if slot.generation == generation else slot) for slot in slots]
        for place in self.places:
            if place.held is not None and place.held.every and place.held.version.generation == generation:
                self.begin(place, place.held)
