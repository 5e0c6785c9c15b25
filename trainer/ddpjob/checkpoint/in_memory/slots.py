"""What a rank writes into its slots at each step: random states, buffers, and settings such as learning rates."""

import contextlib
from typing import Any

from ddpjob import process
from ddpjob.checkpoint.in_memory.kept import Kept
from ddpjob.checkpoint.in_memory.shared import Shared
from ddpjob.checkpoint.state import packed, random_states
from ddpjob.errors import StateError
from ddpjob_core.memory import CLOCK, COPY_SLOTS, EARLY

PLACE = "\0ddpjob place"
"""The name of what `Keeper` adds to the settings: where in its step the rank was."""
LEARNED = "learned"
"""In it: `Places.learned`."""
RANDOM, FORWARDED = "random numbers", "buffers"
"""What `Early` has, as the log names it."""


class Slots:
    """Of one rank."""

    def __init__(self, shared: Shared, rank: int, world_size: int) -> None:
        self._shared, self._of = shared, (rank, world_size)

    def write(self, slot: int, step: int, kept: Kept, rng: dict[str, Any] | None, small: dict[str, Any]) -> None:
        """Raises StateError, OSError."""
        self._shared.write_slot(slot, step, packed.dumps(self.value(kept, rng, small)))

    def learned(self) -> Any:
        """What this rank had learned at its newest boundary; None if there is none."""
        slots = (*range(EARLY), *COPY_SLOTS)
        versions = {version: slot for slot in slots if (version := self._shared.slot_version(slot)) is not None}
        with contextlib.suppress(StateError, OSError, LookupError, TypeError, ValueError):
            return self._shared.read_slot(versions[max(versions)])["small"][PLACE][LEARNED]
        return None

    def value(self, kept: Kept, rng: dict[str, Any] | None, small: Any) -> dict[str, Any]:
        """What is read from a slot."""
        return {"of": self._of, "by_value": bool(kept.by_value), "rng": rng, "small": small}


class Early:
    """The slot EARLY: what a rank needs that is killed after its gradients are summed, and before the next boundary.

    Has random numbers and buffers, each as long as they stay as the backward pass finds them.
    """

    def __init__(self, rank: int) -> None:
        self._rank, self._has = rank, {RANDOM, FORWARDED}
        self._rng: dict[str, Any] | None = None  # random states before the last step
        self._content: dict[tuple[str, str], Any] | None = None  # buffers at the last boundary
        # Those that the forward pass changed, as they were after it; all where each rank has its own.
        self._forwarded: dict[tuple[str, str], Any] = {}

    def give_up(self, shared: Shared, why: str, *what: str) -> None:
        """It does not have what the next boundary has."""
        if self._rank == 0 and not self._has.isdisjoint(what):
            process.log(
                f"{why}: a rank that is killed between its backward pass and should_stop() does not get its "
                f"{' and '.join(what)} back"
            )
        self._has -= {*what}
        shared.forget_slot(EARLY)

    def forget(self) -> None:
        """Forget the last step: it was of other objects."""
        self._rng, self._content, self._forwarded = None, None, {}

    def boundary(self, kept: Kept, rng: dict[str, Any], shared: Shared) -> None:
        """The next boundary. rng: its random states: those drawn after the gradients are not known before them."""
        if RANDOM in self._has and self._rng is not None and rng != self._rng:
            self.give_up(shared, "random numbers are drawn after the gradients", RANDOM)
        self._rng, self._content, self._forwarded = None, kept.buffers_as_they_are(), {}

    def check_buffers(self, kept: Kept, shared: Shared) -> None:
        """Give up if the script changes buffers too, not only the forward pass."""
        content = kept.buffers_as_they_are() if self._forwarded else {}
        if any(content.get(key) != was for key, was in self._forwarded.items()):
            self.give_up(shared, "buffers change after the gradients", FORWARDED)

    def write(self, kept: Kept, slots: Slots, shared: Shared, *, in_backward: bool = False) -> None:
        """Write random states and buffers. in_backward: another micro-batch may have changed buffers without drawing
        random numbers."""
        rng = random_states.compact() if RANDOM in self._has else None
        if rng == self._rng and not (in_backward and FORWARDED in self._has and any(kept.buffers().values())):
            return
        self._rng = rng
        step, content = shared.cells[CLOCK] // 2 + 1, kept.buffers_as_they_are()
        # A weight average that is updated after the step is one step older here than on the ranks that finish the step.
        before, own = self._content, kept.with_own_buffers
        if before is None:  # before the first boundary nobody knows which ones the forward pass changes
            before, own = content, kept.wrapped
        self._forwarded = {key: what for key, what in content.items() if key[0] in own or what != before.get(key)}
        unchanged = content.keys() - self._forwarded.keys() if FORWARDED in self._has else content.keys()
        slots.write(EARLY, step, kept, rng, kept.buffers(unchanged))
