"""Check how a script reports its steps: step numbers, missing reports, and the optimizers that make the steps."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from ddpjob.checkpoint.in_memory.kept import Kept, ReplacedError


class Unmarked:
    """Counts optimizer steps between two calls of should_stop, keep or save, to see if the script reports each step.

    Step numbers do not show this, because scripts pass epochs or micro-batches, or skip numbers.
    """

    def __init__(self) -> None:
        self._made: dict[int, int] = {}
        self._is_first = True
        self.are_unmarked = False
        """True if an optimizer made several steps before the last call. Also true after the first call if it is `save`.
        Unneeded copies are made if one of two optimizers makes several steps in each reported step.
        """

    def one_more(self, optimizer: Any) -> int:
        """Count a step of this optimizer. Return its number of steps after the last call of should_stop or save."""
        made = self._made[id(optimizer)] = self._made.get(id(optimizer), 0) + 1
        return made

    def boundary(self, *, saved: bool) -> None:
        """At the end of a step, set `are_unmarked` and count from 0 again. saved: True if the script called `save`."""
        if self._made:
            self.are_unmarked = max(self._made.values()) > 1 or (self._is_first and saved)
            self._made.clear()
        self._is_first = False


class Numbers:
    """Checks that `should_stop` and `save` get the number of steps made so far, the same one for the same state."""

    def __init__(self, began: int) -> None:
        """began: the step that `load` returned."""
        self.began = began
        self._last: tuple[int, bool] | None = None  # last reported step, and True if save() or keep() reported it
        self._marked: int | None = None  # step passed to should_stop after the last optimizer step
        self.has_worked = False
        """True if a backward pass or an optimizer step followed `load`."""
        self._has_stepped = False

    def step(self) -> None:
        """Record that an optimizer whose state is kept makes a step."""
        self._has_stepped, self.has_worked, self._marked = True, True, None

    def problem(self, step: int, *, named: bool, is_kept: bool) -> str:
        """Return what is wrong with this step number; "" if nothing is.

        named: save() or keep() got the number. is_kept: the objects are known, so their backward passes were seen.
        """
        has_stepped, last, marked = self._has_stepped, self._last, self._marked
        self._last, self._has_stepped = (step, named), False
        if named:
            if marked not in (None, step):
                return f"should_stop({marked}) and save() or keep() with step {step} name the same state"
            if has_stepped and last == (step, False):
                return f"should_stop({step}) was called before an optimizer step, but save() or keep() after it"
            return ""
        self._marked = step
        if last is not None:
            is_other = has_stepped and last[0] == step
            return f"an optimizer made a step between two calls with step {step}" if is_other else ""
        if is_kept and step > self.began and not self.has_worked:
            return f"should_stop({step}) is called before step {step} is made"
        if step == self.began and has_stepped:
            return f"should_stop({step}) is called after step {step + 1} was made"
        return ""


class Makers:
    """Records which optimizers make each step, to notice an optimizer that the script did not pass to `save`."""

    def __init__(self) -> None:
        self._made: set[int] = set()  # ids of kept optimizers that have stepped after the last should_stop()
        self._is_once = True  # False if a kept optimizer has stepped twice
        self._others_make = False  # True if an optimizer that is not kept has stepped after the last should_stop()
        self._has_made = False  # True if a kept optimizer has ever stepped
        self._has_mixed = False  # True if a backward pass followed a kept optimizer's step
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers that stepped while nothing was kept
        self._first: int | None = None  # id of the optimizer that stepped first after the last should_stop()
        self.has_hooked = False
        """True if a backward pass followed the last optimizer step."""
        self._passes = self._passes_most = 0  # number of backward passes in this step, and in any step before
        self.has_more_passes = False
        """True if the last step had more backward passes than any step before, as when adversarial training begins."""

    def step(self, optimizer: Any, is_own: bool | None) -> None:
        """Record a step of this optimizer. is_own: True if the optimizer is kept; None if nothing is."""
        if is_own is False:
            self._others_make = True
            return
        self._is_once &= id(optimizer) not in self._made
        self._made.add(id(optimizer))
        self._has_made = is_own is not None
        if is_own is None:
            self._seen.add(optimizer)

    def backward(self, *, has_stepped: bool) -> None:
        """Record that a backward pass has begun. has_stepped: True if an optimizer has stepped after should_stop()."""
        self.has_hooked, self._passes = True, self._passes + 1
        self._has_mixed |= has_stepped and bool(self._made)

    def boundary(self) -> bool:
        """True if a backward pass followed an optimizer step within the step that ends now, as with LBFGS. Raises
        ReplacedError if only optimizers that are not kept have stepped."""
        made, others_make, is_mixed = self._made, self._others_make, self._has_mixed and self._is_once
        self._made, self._is_once, self._others_make, self._has_mixed = set(), True, False, False
        self.has_more_passes = self._passes > self._passes_most
        self._passes, self._passes_most = 0, max(self._passes, self._passes_most)
        if others_make and not made and self._has_made:
            raise ReplacedError("an optimizer that save() was not given makes the steps")
        return is_mixed

    def is_unknown(self, kept: Kept, optimizer: Any) -> bool:
        """True at the first step of an optimizer that is not kept, but trains kept parameters."""
        if optimizer in self._seen:
            return False
        self._seen.add(optimizer)
        return kept.watch.trains_with(optimizer)

    def first(self, optimizer: Any) -> None:
        """Record the optimizer that steps first after should_stop()."""
        self._first, self.has_hooked = id(optimizer), False

    def again(self, optimizer: Any) -> bool:
        """True if this optimizer stepped first after should_stop(), and now steps again without a backward pass."""
        is_again = self._first == id(optimizer) and not self.has_hooked
        self._first, self.has_hooked = None if is_again else self._first, False
        return is_again


class ForwardPasses:
    """Notices forward passes of kept models, or parts of them, between the end of a step and the next step. With
    gradients the next step has begun; without them it is an evaluation, unless the step before had the same one, as of
    a momentum encoder.

    Only in that time torch's global hook is used. A hook on the model itself would be pickled with it, and
    torch.jit.script refuses a model with hooks.
    """

    def __init__(self, begins: Callable[[], None], evaluates: Callable[[], None]) -> None:
        self._begins, self._evaluates = begins, evaluates
        self._handle: Any = None
        self.modules: set[int] = set()
        """Ids of the kept models, with and without their wrappers, and of their parts."""
        self._evaluated: set[int] = set()
        self._evaluated_before: set[int] = set()

    def forget(self, *, is_step: bool) -> None:
        """Called at the end of a step. is_step: True if one optimizer step was made since the last call."""
        self._evaluated_before, self._evaluated = (self._evaluated if is_step else set()), set()

    def watch(self) -> None:
        """Notice passes from now on."""
        if self._handle is None:
            self._handle = register_module_forward_pre_hook(self._calls)

    def end(self) -> None:
        """Called when the next step has begun."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _calls(self, module: torch.nn.Module, _: Any) -> None:
        number = id(module)
        if number not in self.modules or torch.compiler.is_compiling():
            return
        if module.training and torch.is_grad_enabled():
            self._begins()
            return
        self._evaluated.add(number)
        if number not in self._evaluated_before:
            self._evaluates()
