"""Learn where in its loop a script changes what is small: learning rates, schedulers, samplers, its own objects.

The memory has them as they were at the last boundary. Three places are possible:

    within the step      between optimizer.step() and the boundary: the boundary has the change
    before save()        between should_stop(step) and save(step): a folder has the change, the boundary has not
    after save()         at the top of the loop: neither has it, and the script makes it again after a restart

A boundary that save() names is what a folder has, so it counts whatever follows. One that keep() names does, too, but
not for schedulers: a scheduler that is stepped after keep() would be one step behind after a restart, which a folder
written at the end of an epoch is not. One that should_stop marks counts if nothing has changed since, except objects
that are known to change after save(). A script that changes something before save(), or may do so, could have more to
do at any such boundary. There it counts only once the next step has begun: see `is_settled`.

Settings of an optimizer, or random numbers, that change at two steps in a row are taken for a learning rate that is set
at the top of the loop, or for augmentation there, until a save() shows otherwise. Without that, the commonest scripts
would have no memory before their first save.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ddpjob.checkpoint.state.alike import moved


class Places:
    """What one rank knows of its script."""

    def __init__(self) -> None:
        self.marked: Mapping[str, Any] = {}
        """Values at the last boundary."""
        self._started: Mapping[str, Any] | None = None  # values before the step that led there
        self._within: set[str] = set()
        self._before_save: set[str] = set()
        self._after_save: set[str] = set()
        self._unknown: set[str] = set()  # seen to change after a boundary, and no save() has shown where
        self._rates: set[str] = set()  # optimizers whose settings alone changed after the last boundary, for once
        self.is_open = False
        """True from a boundary to the next optimizer step."""
        self.is_named = False
        """True if save() or keep() has named the state of that boundary."""
        self._unnamed: set[str] = set()  # schedulers, if keep() alone has named it
        self.moved: set[str] = set()
        """Names that have changed between should_stop(step) and save(step), of that boundary."""
        self.loose: set[str] = set()
        """Names for which the last boundary did not have what a folder would have."""

    def boundary(self, values: Mapping[str, Any], *, named: bool, but: Collection[str] = ()) -> None:
        """The first boundary after a step. but: names for which `named` does not count."""
        if self._started is not None:
            known = self._within
            self._within |= moved(self._started, {name: each for name, each in values.items() if name not in known})
            self._started = None
        self.marked, self.is_named, self.is_open, self.moved = values, named, True, set()
        self._unnamed = set(but)

    def named(self, values: Mapping[str, Any], also: Collection[str] = (), *, but: Collection[str] = ()) -> set[str]:
        """save() or keep() names the state that was marked before. Return the names that are learned to be misplaced.
        also: what has changed besides. but: see `boundary`."""
        found = moved(self.marked, values) | set(also)
        misplaced = self._of_open(found)
        new = misplaced - self._before_save
        self._before_save |= misplaced
        self.marked, self.is_named, self.moved, self._unnamed = values, True, found, set(but)
        return new

    def _of_open(self, names: Collection[str]) -> set[str]:
        """Those of the names for which the last boundary does not count whatever follows."""
        return self._unnamed & set(names) if self.is_named else set(names)

    def step(self, values: Mapping[str, Any], optimizers: Collection[str] = ()) -> set[str]:
        """Called before an optimizer's step. Return names that were not known to change after a boundary. optimizers:
        names of what scripts commonly change at the top of the loop."""
        found = moved(self.marked, values)
        self._started, self.is_open, self.loose = values, False, set()
        if self.is_named:
            self._after_save |= found - self._unnamed
            self._unknown -= self._after_save
            if not (found := self._of_open(found)):
                return set()
        self.loose = found - (self._after_save - self._before_save)
        before, self._rates = self._rates, set()
        if self.loose and self.loose <= set(optimizers) - self._before_save - self._unknown:
            if self.loose <= before:
                self._after_save |= self.loose
                self.loose = set()
            else:
                self._rates = set(self.loose)
            return set()
        new = (self.loose | before) - self._after_save - self._before_save - self._unknown
        self._unknown |= new
        return new

    def trusts(self, name: str) -> bool:
        """True if a change of it after the last boundary is no loss: a folder would not have it either."""
        return self.is_named or name in self._after_save - self._before_save

    def suspects(self, name: str) -> bool:
        """True if it is known to change where a folder may have it and a boundary has not."""
        return name in self._before_save | self._unknown

    def after_save(self, names: Iterable[str]) -> None:
        """These are known to change at the top of the loop: a sampler that is iterated."""
        self._after_save |= set(names)

    def unsettled(self, values: Mapping[str, Any]) -> list[str]:
        """Names for which the last boundary does not have what a folder would have."""
        return sorted(self._of_open(moved(self.marked, values)) - (self._after_save - self._before_save))

    def is_settled(self, schedulers: Iterable[str]) -> bool:
        """True if nothing is known to follow a boundary before the next step begins. schedulers: names of objects that
        a script is sure to step somewhere: between a boundary and the next step, if it was nowhere else so far."""
        return not self._of_open(self._before_save | self._unknown | (set(schedulers) - self._within))
