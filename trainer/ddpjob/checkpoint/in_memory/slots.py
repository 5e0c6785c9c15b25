"""What a rank writes into its slots at each step: random states, buffers, and settings such as learning rates."""

from typing import Any

from ddpjob.checkpoint.in_memory.kept import Kept
from ddpjob.checkpoint.in_memory.shared import Shared
from ddpjob.checkpoint.state import packed, random_states
from ddpjob_core.memory import CLOCK, EARLY

PLACE = "\0ddpjob place"
"""The name of what `Keeper` adds to the settings: where in its step the rank was."""


class Slots:
    """Of one rank."""

    def __init__(self, shared: Shared, rank: int, world_size: int) -> None:
        self._shared, self._of = shared, (rank, world_size)

    def write(self, slot: int, step: int, kept: Kept, rng: dict[str, Any], small: dict[str, Any]) -> None:
        """Raises StateError, OSError."""
        self._shared.write_slot(slot, step, packed.dumps(self.value(kept, rng, small)))

    def value(self, kept: Kept, rng: dict[str, Any], small: Any) -> dict[str, Any]:
        """What is read from a slot."""
        return {"of": self._of, "by_value": bool(kept.by_value), "rng": rng, "small": small}


class Early:
    """The slot EARLY: what a rank needs that is killed after its gradients are summed, and before the next boundary.

    Useful as long as random numbers and buffers stay as the backward pass finds them.
    """

    def __init__(self) -> None:
        self._is_useful = True
        self._rng: dict[str, Any] | None = None  # random states before the last step
        self._content: dict[tuple[str, str], Any] | None = None  # buffers at the last boundary
        # Those that the forward pass changed, as they were after it; all where each rank has its own.
        self._forwarded: dict[tuple[str, str], Any] = {}

    def give_up(self, shared: Shared) -> None:
        """It does not have what the next boundary has."""
        self._is_useful = False
        shared.forget_slot(EARLY)

    def forget(self) -> None:
        """Forget the last step: it was of other objects."""
        self._rng, self._content, self._forwarded = None, None, {}

    def boundary(self, kept: Kept, rng: dict[str, Any], shared: Shared) -> None:
        """The next boundary. rng: its random states: those drawn after the gradients are not known before them."""
        if self._is_useful and self._rng is not None and rng != self._rng:
            self.give_up(shared)
        self._rng, self._content, self._forwarded = None, kept.buffers_as_they_are(), {}

    def check_buffers(self, kept: Kept, shared: Shared) -> None:
        """Give up if the script changes buffers too, not only the forward pass."""
        content = kept.buffers_as_they_are() if self._forwarded else {}
        if any(content.get(key) != was for key, was in self._forwarded.items()):
            self.give_up(shared)

    def write(self, kept: Kept, slots: Slots, shared: Shared, *, in_backward: bool = False) -> None:
        """Write random states and buffers. in_backward: another micro-batch may have changed buffers without drawing
        random numbers."""
        rng = random_states.compact() if self._is_useful else None
        if rng is None or (rng == self._rng and not (in_backward and any(kept.buffers().values()))):
            return
        self._rng = rng
        step, content = shared.cells[CLOCK] // 2 + 1, kept.buffers_as_they_are()
        # A weight average that is updated after the step is one step older here than on the ranks that finish the step.
        before, own = self._content, kept.with_own_buffers
        if before is None:  # before the first boundary nobody knows which ones the forward pass changes
            before, own = content, kept.wrapped
        self._forwarded = {key: what for key, what in content.items() if key[0] in own or what != before.get(key)}
        unchanged = content.keys() - self._forwarded.keys()
        slots.write(EARLY, step, kept, rng, kept.buffers(unchanged))
