"""What a rank writes into its slots at each step, with what can be used again of the last time.

Random states and buffers are one part, settings such as learning rates another one. Most of both is what it was a step
ago: it is not packed again while it is of the very same objects, and those never become another value.
"""

import operator
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch

from ddpjob.checkpoint import packed
from ddpjob.checkpoint.kept import Kept
from ddpjob.checkpoint.packed import Packed
from ddpjob.checkpoint.shared import Shared

PLACE = "\0ddpjob place"
"""The name of what `Keeper` adds to the settings: where in its step the rank was."""
_GENERATOR = "torch"  # its bytes are others at each step


class _States(NamedTuple):
    kept: Kept
    leaves_out: frozenset[tuple[str, str]]
    rng: dict[str, Any]
    packed: Packed
    """The generator's bytes first, then the buffers."""


class _Setting(NamedTuple):
    parts: list[Any] | None
    """While they are the very same, so is the value."""
    value: Any


class Slots:
    """Of one rank."""

    def __init__(self, shared: Shared, rank: int, world_size: int) -> None:
        self._shared, self._of = shared, (rank, world_size)
        self._states: _States | None = None
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
        values = [self._packed_states(kept, rng, frozenset(leaves_out))]
        if more is not None:
            is_plain = all(setting.parts is not None for setting in self._settings.values())
            values.append((packed.pack_plain if is_plain else packed.pack)(dict(more)))
        self._shared.write_slot(slot, step, *values)

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

    def _packed_states(self, kept: Kept, rng: dict[str, Any], leaves_out: frozenset[tuple[str, str]]) -> Packed:
        last, buffers = self._states, kept.tensors_of_buffers(leaves_out)
        is_as_last = last is not None and last.kept is kept and last.leaves_out == leaves_out
        if last is not None and is_as_last and _differ_in_torch_alone(rng, last.rng):
            tensors = [rng[_GENERATOR], *buffers]
            head, layouts, _, size = last.packed
            fits = len(tensors) == len(layouts) and layouts[0].size == len(rng[_GENERATOR])
            if fits and all(map(packed.is_laid_out, buffers, layouts[1:])):
                return Packed(head, layouts, tensors, size)
        as_tensor = torch.frombuffer(bytearray(rng[_GENERATOR]), dtype=torch.uint8)
        others = {name: state for name, state in rng.items() if name != _GENERATOR}
        found = packed.pack(self.value(kept, {_GENERATOR: as_tensor} | others, kept.buffers(leaves_out)))
        self._states = None  # tied buffers are one tensor, and need not be the next time
        if len(found.tensors) == 1 + len(buffers):
            self._states = _States(kept, leaves_out, rng, found._replace(tensors=()))
        return found


def _differ_in_torch_alone(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Python's and numpy's are the same objects while nothing was drawn; of a GPU there is a new one each time."""
    if one["python"] is not other["python"] or len(one) != len(other):
        return False
    return len(one) == 2 or (len(one) == 3 and "numpy" in one and one["numpy"] is other.get("numpy"))


def _are_the_same(ones: list[Any], others: list[Any]) -> bool:
    return len(ones) == len(others) and all(map(operator.is_, ones, others))
