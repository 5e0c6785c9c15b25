"""Learn where in its loop a script changes small values: learning rates, schedulers, samplers, its own objects.

The memory has these values as they were when the script last called should_stop(), keep() or save(). They can change in
three places of the loop:

    before should_stop() after optimizer.step(): the memory has the change
    before save()        between should_stop(step) and save(step): a folder has the change, the memory has not
    after save()         at the top of the loop: neither has the change, and the script repeats it after a restart

A restart may continue from a state in memory

    after save()               always, because a folder has the same values
    after should_stop()        if nothing has changed after the call, except values known to change after save(). If the
    or keep()                  script changes a value before save(), only when the next step has begun: `is_settled`

If optimizer settings, random numbers or buffers change at two steps in a row, they are assumed to change at the top of
the loop (for example a learning rate, or an augmentation), until a save() disproves it. Without this assumption the
most common scripts would have no memory before their first save.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ddpjob.checkpoint.state.alike import moved

MARKED, KEPT, SAVED = range(3)
"""The call that gets a state: should_stop(), keep() or save(). A folder has the same small values as SAVED; so a state
that load() has returned is SAVED, too."""


class Places:
    """The places where a rank's script changes each value, as far as they are known."""

    def __init__(self) -> None:
        self.marked: Mapping[str, Any] = {}
        """Small values at the last call of should_stop(), keep() or save()."""
        self._started: Mapping[str, Any] | None = None  # values before the optimizer step; None after should_stop()
        self._within: set[str] = set()
        self._before_save: set[str] = set()
        self._after_save: set[str] = set()
        self._samplers: set[str] = set()
        self._unknown: set[str] = set()  # names of values that change before or after save(): not known which
        self.varied: set[str] = set()
        """Names of buffers outside of DistributedDataParallel that have changed: each rank may have its own."""
        self.doubted: set[str] = set()
        """Names of values that may change at the top of the loop, and changed at one step so far."""
        self.taken: set[str] = set()
        """Names of values that changed at two steps in a row: they are assumed to change at the top of the loop."""
        self.is_open = False
        """True from the end of a step to the next optimizer step."""
        self.by = MARKED
        """The call that got the state of the last step."""
        self.moved: set[str] = set()
        """Names of values that changed between should_stop(step) and save(step) of the last step."""
        self.loose: set[str] = set()
        """Names of values that save() would have written differently from memory, just before the optimizer step."""
        self.loose_steps = 0
        """Number of steps in a row that had such values."""
        self.has_plain_loader = False
        """True if the batches come from a DataLoader that cannot save its position."""
        self.saves_within_epoch = False
        """True if the script has called save() or keep() within an epoch, so that it can resume there."""
        self.unsaved_steps = 0
        """Number of steps in a row whose batch came from a GlobalBatchSampler that the script does not save."""
        self.is_unsaved = False
        """True if the batch of the last step may have come from such a sampler."""
        self.notices_begin = False
        """True after a forward pass or a sampler has shown when a step begins."""
        self.has_begun = False
        """True if a backward pass has begun after the end of the last step."""
        self.has_called = False
        """True if a forward pass with gradients has begun after the end of the last step."""
        self.begun: Mapping[str, Any] | None = None
        """Random states and buffers when the next step began."""
        self.repeated: set[str] | None = None
        """Names of optimizers whose settings had not changed when the step began."""

    @property
    def learned(self) -> list[set[str]]:
        """The known places in the loop, for the next generation of this rank, which runs the same script."""
        shown = {"saves within an epoch"} if self.saves_within_epoch else set()
        return [self._within, self._before_save, self._after_save, self._unknown, self.varied, shown]

    def goes_on_from(self, learned: Iterable[Iterable[str]]) -> None:
        """Take over the places in the loop that an earlier generation has learned."""
        self._within, self._before_save, self._after_save, self._unknown, self.varied, shown = map(set, learned)
        self.saves_within_epoch = bool(shown)

    def boundary(self, values: Mapping[str, Any], by: int) -> None:
        """Called at the first should_stop(), keep() or save() after an optimizer step."""
        if self._started is not None:
            self._within |= moved(self._started, values, self._within)
            self._started = None
        self.marked, self.by, self.is_open, self.moved = values, by, True, set()
        self.has_called, self.begun, self.repeated = False, None, None

    def named(self, values: Mapping[str, Any], also: Collection[str] = (), by: int = SAVED) -> set[str]:
        """Return the names of values that changed before save(), if that was not known yet. Called if save() or keep()
        follows another call at the same step. also: names of other values that have changed."""
        found = moved(self.marked, values) | set(also)
        misplaced = set() if self.by == SAVED else found - self._samplers
        new = misplaced - self._before_save
        self._before_save |= misplaced
        self.marked, self.by, self.moved = values, by, found
        self.has_called, self.begun, self.repeated = False, None, None
        return new

    def step(self, values: Mapping[str, Any], repeated: Collection[str] = ()) -> set[str]:
        """Called before an optimizer step. Return names of values that were not known to change after should_stop().
        repeated: names of values that scripts often change at the top of the loop."""
        found = moved(self.marked, values)
        self._started, self.is_open, self.loose, self.taken = values, False, set(), set()
        if self.by == SAVED:
            self._after_save |= found
            self._unknown -= self._after_save
            return set()
        self.loose = {name for name in found if not self.trusts(name)}
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
        """True if a restart may lose a change of this value after the last step: save() would not have it either."""
        return self.by == SAVED or (name in self._after_save and name not in self._before_save)

    def suspects(self, names: Iterable[str]) -> list[str]:
        """Return the names of the values that may change between should_stop() and save(): memory lacks the change."""
        return sorted((self._before_save | self._unknown).intersection(names))

    def after_save(self, names: Iterable[str]) -> None:
        """Record names of samplers that a loop iterates: they change at the top of the loop.

        At the end of an epoch a sampler changes by itself before save(), and changes again after a restart.
        """
        self._samplers = set(names)
        self._after_save |= self._samplers

    def unsettled(self, values: Mapping[str, Any]) -> list[str]:
        """Return names of values that save() would now write differently from memory."""
        return sorted(name for name in moved(self.marked, values) if not self.trusts(name))

    def is_settled(self, idle: Iterable[str]) -> bool:
        """True if no value is known to change between a boundary and the next step. idle: names of objects that a
        script must change somewhere: between a boundary and the next step, unless they were seen to change elsewhere.
        """
        unseen = set(idle) - self._within - self._after_save
        return self.by == SAVED or not (self._before_save | self._unknown | unseen)
