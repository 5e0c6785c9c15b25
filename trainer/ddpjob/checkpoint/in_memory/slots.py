"""What a rank writes into its slots at each step: random states, buffers, and settings such as learning rates.

A setting is not copied again while it consists of the very same objects, if those never become another value.
"""

import operator
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from ddpjob.checkpoint.in_memory.kept import Kept
from ddpjob.checkpoint.in_memory.shared import Shared
from ddpjob.checkpoint.state import packed

PLACE = "\0ddpjob place"
"""The name of what `Keeper` adds to the settings: where in its step the rank was."""


class _Setting(NamedTuple):
    parts: list[Any] | None
    """While they are the very same, so is the value."""
    value: Any


class Slots:
    """Of one rank."""

    def __init__(self, shared: Shared, rank: int, world_size: int) -> None:
        self._shared, self._of = shared, (rank, world_size)
        self._kept: Kept | None = None
        self._settings: dict[str, _Setting] = {}

    def write(
        self,
        slot: int,
        step: int,
        kept: Kept,
        rng: dict[str, Any],
        *,
        more: Mapping[str, Any] | None = None,
        leaves_out: Collection[tuple[str, str]] = (),
    ) -> None:
        """more: what is written besides random states and buffers. leaves_out: buffers, by the name of the model and
        their key. Raises StateError, OSError."""
        small = kept.buffers(leaves_out) | dict(more or {})
        self._shared.write_slot(slot, step, packed.dumps(self.value(kept, rng, small)))

    def value(self, kept: Kept, rng: dict[str, Any], small: Any) -> dict[str, Any]:
        """What is read from a slot."""
        return {"of": self._of, "by_value": bool(kept.by_value), "rng": rng, "small": small}

    def settings(self, kept: Kept) -> dict[str, Any]:
        """The settings as they are now; the same values while they are of the very same objects."""
        if self._kept is not kept:
            self._kept, self._settings = kept, {}
        values = {}
        for name in kept.names_of_settings():
            last, parts = self._settings.get(name), kept.parts_of(name)
            if last is None or parts is None or last.parts is None or not _are_the_same(parts, last.parts):
                is_constant = parts is not None and kept.is_constant(name)
                value = kept.setting(name, is_constant=is_constant)
                last = self._settings[name] = _Setting(parts if is_constant else None, value)
            values[name] = last.value
        return values


def _are_the_same(ones: list[Any], others: list[Any]) -> bool:
    return len(ones) == len(others) and all(map(operator.is_, ones, others))
