"""Write random states, buffers and settings (for example learning rates) of a rank to its slots in shared memory."""

import contextlib
from collections.abc import Mapping
from typing import Any

from ddpjob import process
from ddpjob.checkpoint.in_memory.kept import Kept
from ddpjob.checkpoint.in_memory.shared import Shared
from ddpjob.checkpoint.state import packed, random_states
from ddpjob.errors import StateError
from ddpjob_core.memory import CLOCK, COPY_SLOTS, EARLY

PLACE = "\0ddpjob place"
"""Key in the settings: `Keeper._place`, which describes at which call of its step the rank was."""
LEARNED = "learned"
"""Key within PLACE: `Places.learned`, the places in the loop where the script changes small values."""
RANDOM, FORWARDED = "random numbers", "buffers"
"""The two kinds of values in the slot EARLY, as the log names them."""


class Slots:
    """Writes the slots of one rank: its small values at the last two steps, and before the next optimizer step (EARLY).

    EARLY is for a rank that is killed between the all-reduce of its gradients and the end of the step. It has random
    states and buffers as they are during the backward pass. If the script changes one of the two after the backward
    pass, EARLY does not keep it, because its value at the end of the step is different.
    """

    def __init__(self, shared: Shared, rank: int, world_size: int) -> None:
        self._shared, self._of = shared, (rank, world_size)
        self.step = 0
        """Step of the last boundary that was written."""
        self._last: int | None = None  # slot of that boundary
        self.made, self._made_before = 0, 0
        """Numbers of optimizer steps after the last boundary, and between that boundary and the one before it."""
        self._has = {RANDOM, FORWARDED}
        self.changed: set[str] = set()
        """Names of values that changed after the gradients of the last step, for the first time."""
        # Random states before the last optimizer step: {} until they are read, None if they are given up.
        self._rng: dict[str, Any] | None = {}
        self._content: Mapping[str, Mapping[str, Any]] | None = None  # buffers at the end of the last step
        # Values after the forward pass: of buffers that it changed, and of all buffers that may differ between ranks.
        self._forwarded: dict[tuple[str, str], Any] = {}

    def write(self, slot: int, step: int, kept: Kept, rng: Any, small: Mapping[str, Any], made: int = 0) -> None:
        """Write the small values of this step to a slot. made: number of optimizer steps of this step. Raises
        StateError, OSError."""
        value = {
            "of": self._of,
            "by_value": bool(kept.by_value),
            "rng": rng,
            "gives_up": RANDOM not in self._has,
            "small": small,
            "made": made,
        }
        self._shared.write_slot(slot, step, packed.dumps(value))

    def write_boundary(self, step: int, kept: Kept, rng: dict[str, Any], small: dict[str, Any]) -> None:
        """Write the small values of this step to the slot with the older of the last two steps. A step that is repeated
        is written to its own slot. Raises StateError, OSError."""
        if self._last is None:
            one, other = (self._shared.slot_version(slot) for slot in range(EARLY))
            self._last, self.step = int(one is None or (other is not None and one < other)), -1
        if step != self.step:
            self._last, self.step = 1 - self._last, step
        self.write(self._last, step, kept, rng, small, self._made_before)

    def read_boundary(self) -> Any:
        """Return the value of the last boundary; None if none was written. Raises StateError, OSError."""
        return None if self._last is None else self._shared.read_slot(self._last)

    def learned(self) -> Any:
        """Return `Places.learned` from the newest slot of this rank; None if the rank has written no slot."""
        slots = (*range(EARLY), *COPY_SLOTS)
        versions = {version: slot for slot in slots if (version := self._shared.slot_version(slot)) is not None}
        with contextlib.suppress(StateError, OSError, LookupError, TypeError, ValueError):
            return self._shared.read_slot(versions[max(versions)])["small"][PLACE][LEARNED]
        return None

    def give_up_early(self, why: str, *what: str) -> set[str]:
        """Stop writing random states or buffers to EARLY, because they change after the backward pass. Return the names
        of those that were written before."""
        given_up = self._has & {*what}
        if self._of[0] == 0 and given_up:
            process.log(
                f"{why}: a rank that is killed between its backward pass and should_stop() loses its "
                f"{' and '.join(what)}"
            )
        if given_up:
            self._has -= given_up
            self._shared.forget_slot(EARLY)
        return given_up

    def forget_early(self) -> None:
        """Forget random states and buffers of the last step, because other objects are kept now."""
        self._rng, self._content, self._forwarded = {}, None, {}

    def begin(self, content: Mapping[str, Mapping[str, Any]], rng: dict[str, Any]) -> None:
        """Begin the next step. Give up random states or buffers that the script has changed after the backward pass.

        content: content of the buffers at the end of the last step. rng: random states at the end of the last step.
        """
        if self.made:  # False at a second call for the same step
            self.made, self._made_before = 0, self.made
        if RANDOM in self._has and self._rng and rng != self._rng:
            self.changed |= self.give_up_early("random numbers are drawn after the gradients", RANDOM)
        if any(content.get(each, {}).get(key) != was for (each, key), was in self._forwarded.items()):
            self.changed |= self.give_up_early("buffers change after the gradients", FORWARDED)
        self._rng, self._content, self._forwarded = {}, content, {}

    def write_early(self, kept: Kept, *, in_backward: bool = False) -> None:
        """Write random states and buffers to EARLY if they have changed; None for random states that are given up.

        in_backward: a later micro-batch may have changed buffers without drawing random numbers."""
        self.changed, rng = set(), random_states.compact() if RANDOM in self._has else None
        if rng == self._rng and not (in_backward and FORWARDED in self._has and kept.buffered):
            return
        self._rng, small = rng, {}
        if content := kept.buffers_as_they_are():
            # Leave out buffers that the forward pass did not change, such as an average that is updated after a step.
            # A buffer that is updated after a step would be one step older than on the ranks that finish the step.
            before, own = self._content, kept.with_own_buffers
            if before is None:  # in the first step it is not known which buffers the forward pass changes
                before, own = content, kept.wrapped
            self._forwarded = {
                (each, key): what
                for each, its in content.items()
                for key, what in its.items()
                if kept.buffered[each] in own or what != before.get(each, {}).get(key)
            }
            forwarded = self._forwarded if FORWARDED in self._has else {}
            small = kept.buffers({(kept.buffered[each], key) for each, key in forwarded})
        self.write(EARLY, self._shared.cells[CLOCK] // 2 + 1, kept, rng, small, self.made)
