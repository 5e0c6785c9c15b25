"""Learn where in its loop a script changes what is small: learning rates, schedulers, samplers, its own objects.

The memory has them as they were at the last boundary. Three places are possible:

    within the step      between optimizer.step() and the boundary: the boundary has the change
    before save()        between should_stop(step) and save(step): a folder has the change, the boundary has not
    after save()         at the top of the loop: neither has it, and the script makes it again after a restart

A boundary that save() names is what a folder has, so it counts whatever follows. One that should_stop marks, or keep()
names, counts if nothing has changed since, except objects that are known to change after save(). A script that changes
something before save(), or may do so, could have more to do at any such boundary. There it counts only once the next
step has begun: see `is_settled`.

Settings of an optimizer, random numbers, or buffers that change at two steps in a row are taken for a learning rate
that is set at the top of the loop, or for augmentation there, until a save() shows otherwise. Without that, the
commonest scripts would have no memory before their first save.
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
        self._samplers: set[str] = set()
        self._unknown: set[str] = set()  # seen to change after a boundary, and no save() has shown where
        self.doubted: set[str] = set()
        """Names that alone changed after the last boundary, for once."""
        self.taken: set[str] = set()
        """Names that are taken for such a change from the last boundary on."""
        self.is_open = False
        """True from a boundary to the next optimizer step."""
        self.is_named = False
        """True if save() or keep() has named the state of that boundary."""
        self.counts = False
        """True if it counts whatever follows: save() has named it, or load() has returned it."""
        self.moved: set[str] = set()
        """Names that have changed between should_stop(step) and save(step), of that boundary."""
        self.loose: set[str] = set()
        """Names for which the last boundary did not have what a folder would have."""

    @property
    def learned(self) -> list[list[str]]:
        """What the next generation of this rank goes on from: it runs the same script."""
        return list(map(sorted, (self._within, self._before_save, self._after_save, self._unknown)))

    def goes_on_from(self, learned: Iterable[Iterable[str]]) -> None:
        """What an earlier generation has learned."""
        self._within, self._before_save, self._after_save, self._unknown = map(set, learned)

    def boundary(self, values: Mapping[str, Any], *, named: bool, counts: bool = False) -> None:
        """The first boundary after a step."""
        if self._started is not None:
            known = self._within
            self._within |= moved(self._started, {name: each for name, each in values.items() if name not in known})
            self._started = None
        self.marked, self.is_named, self.counts, self.is_open, self.moved = values, named, counts, True, set()

    def named(self, values: Mapping[str, Any], also: Collection[str] = (), *, counts: bool = True) -> set[str]:
        """save() or keep() names the state that was marked before. Return the names that are learned to be misplaced.
        also: what has changed besides."""
        found = moved(self.marked, values) | set(also)
        misplaced = self._of_open(found - self._samplers)
        new = misplaced - self._before_save
        self._before_save |= misplaced
        self.marked, self.is_named, self.counts, self.moved = values, True, counts, found
        return new

    def _of_open(self, names: Collection[str]) -> set[str]:
        """Those of the names for which the last boundary does not count whatever follows."""
        return set() if self.counts else set(names)

    def step(self, values: Mapping[str, Any], repeated: Collection[str] = ()) -> set[str]:
        """Called before an optimizer's step. Return names that were not known to change after a boundary. repeated:
        names of what scripts commonly change at the top of the loop."""
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
        """True if a change of it after the last boundary is no loss: a folder would not have it either."""
        return self.counts or name in self._after_save - self._before_save

    def suspects(self, name: str) -> bool:
        """True if it is known to change where a folder may have it and a boundary has not."""
        return name in self._before_save | self._unknown

    def after_save(self, names: Iterable[str]) -> None:
        """These are known to change at the top of the loop: samplers that are iterated.

        At the end of an epoch they move on by themselves before save(), and would again.
        """
        self._samplers = set(names)
        self._after_save |= self._samplers

    def unsettled(self, values: Mapping[str, Any]) -> list[str]:
        """Names for which the last boundary does not have what a folder would have."""
        return sorted(self._of_open(moved(self.marked, values)) - (self._after_save - self._before_save))

    def is_settled(self, schedulers: Iterable[str]) -> bool:
        """True if nothing is known to follow a boundary before the next step begins. schedulers: names of objects that
        a script is sure to step somewhere: between a boundary and the next step, if it was nowhere else so far."""
        return not self._of_open(self._before_save | self._unknown | (set(schedulers) - self._within))
