"""Learn where in its loop a script changes small values: learning rates, schedulers, samplers, its own objects.

The memory has these values as of the last boundary. They can change in three places:

    within the step between optimizer.step() and the boundary: the boundary has the change
    before save()        between should_stop(step) and save(step): a folder has the change, the boundary has not
    after save()         at the top of the loop: neither has it, and the script repeats it after a restart

A boundary *counts* if a restart may continue from its state:

    named by save()            always, because a folder has the same values
    marked by should_stop(),   if nothing has changed after it, except values known to change after save(); if the
    or named by keep()         script changes something before save(), only when the next step has begun: `is_settled`

If optimizer settings, random numbers or buffers change at two steps in a row, they are assumed to change at the top of
the loop (a learning rate, an augmentation), until a save() disproves it. Without this assumption the most common
scripts would have no memory before their first save.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ddpjob.checkpoint.state.alike import moved


class Places:
    """The places where a rank's script changes each value, as far as they are known."""

    def __init__(self) -> None:
        self.marked: Mapping[str, Any] = {}
        """Values at the last boundary."""
        self._started: Mapping[str, Any] | None = None  # values before the last step; None after its boundary
        self._within: set[str] = set()
        self._before_save: set[str] = set()
        self._after_save: set[str] = set()
        self._samplers: set[str] = set()
        self._unknown: set[str] = set()  # names that change before or after save(): not known yet
        self.doubted: set[str] = set()
        """Names of values that may change at the top of the loop, and changed at one step so far."""
        self.taken: set[str] = set()
        """Names of `doubted` that changed again at the last step: they are assumed to change at the top of the loop."""
        self.is_open = False
        """True from a boundary to the next optimizer step."""
        self.is_named = False
        """True if save() or keep() has named the state of that boundary."""
        self.counts = False
        """True if that boundary always counts: save() has named it, or load() has returned it."""
        self.moved: set[str] = set()
        """Names that changed between should_stop(step) and save(step) at that boundary."""
        self.loose: set[str] = set()
        """Names of values that differed between the last boundary and a file that save() would have written."""

    @property
    def learned(self) -> list[list[str]]:
        """Return the known places for the next generation of this rank, which runs the same script."""
        return list(map(sorted, (self._within, self._before_save, self._after_save, self._unknown)))

    def goes_on_from(self, learned: Iterable[Iterable[str]]) -> None:
        """Take over the places that an earlier generation has learned."""
        self._within, self._before_save, self._after_save, self._unknown = map(set, learned)

    def boundary(self, values: Mapping[str, Any], *, named: bool, counts: bool = False) -> None:
        """Called at the first boundary after a step. named, counts: see the attributes `is_named` and `counts`."""
        if self._started is not None:
            known = self._within
            self._within |= moved(self._started, {name: each for name, each in values.items() if name not in known})
            self._started = None
        self.marked, self.is_named, self.counts, self.is_open, self.moved = values, named, counts, True, set()

    def named(self, values: Mapping[str, Any], also: Collection[str] = (), *, counts: bool = True) -> set[str]:
        """Called when save() or keep() names the state of the last boundary. Return names that are newly known to
        change before save(). also: further names that have changed."""
        found = moved(self.marked, values) | set(also)
        misplaced = self._of_open(found - self._samplers)
        new = misplaced - self._before_save
        self._before_save |= misplaced
        self.marked, self.is_named, self.counts, self.moved = values, True, counts, found
        return new

    def _of_open(self, names: Collection[str]) -> set[str]:
        """Return the names, or none if the last boundary always counts."""
        return set() if self.counts else set(names)

    def step(self, values: Mapping[str, Any], repeated: Collection[str] = ()) -> set[str]:
        """Called before an optimizer's step. Return names that were not known to change after a boundary. repeated:
        names of values that scripts often change at the top of the loop."""
        found = moved(self.marked, values)
        self._started, self.is_open, self.loose, self.taken = values, False, set(), set()
        if self.counts:
            self._after_save |= found
            self._unknown -= self._after_save
            return set()
        self.loose = found - (self._after_save - self._before_save)
        before, self.doubted = self.doubted, set()
        if self.loose and self.loose <= set(repeated) - self._before_save - self._unknown:
            if self.loose <= before:
                self._after_save |= self.loose
                self.loose, self.taken = set(), self.loose
            else:
                self.doubted = set(self.loose)
            return set()
        new = (self.loose | before) - self._after_save - self._before_save - self._unknown
        self._unknown |= new
        return new

    def trusts(self, name: str) -> bool:
        """True if a restart may lose this value's change after the last boundary: a file would lack the change too."""
        return self.counts or name in self._after_save - self._before_save

    def suspects(self, name: str) -> bool:
        """True if this value may change before save(): a file may have a change that the last boundary lacks."""
        return name in self._before_save | self._unknown

    def after_save(self, names: Iterable[str]) -> None:
        """Record names that are known to change at the top of the loop: samplers that are iterated.

        At the end of an epoch a sampler changes by itself before save(), and does so again after a restart.
        """
        self._samplers = set(names)
        self._after_save |= self._samplers

    def unsettled(self, values: Mapping[str, Any]) -> list[str]:
        """Names of values that differ between the last boundary and a file that save() would write now."""
        return sorted(self._of_open(moved(self.marked, values)) - (self._after_save - self._before_save))

    def is_settled(self, idle: Iterable[str]) -> bool:
        """True if no value is known to change between a boundary and the next step. idle: names of objects that a
        script must change somewhere: between a boundary and the next step, unless they were seen to change elsewhere.
        """
        unseen = set(idle) - self._within - self._after_save
        return not self._of_open(self._before_save | self._unknown | unseen)
