"""The rank's side of the memory that outlives it: after a failure the surviving ranks write the state.

Inspiration: between a boundary (`should_stop(step)`, `keep`, `save`) and the next `optimizer.step()` nothing changes
parameters and optimizer state, and no rank can finish that step without the failed rank. So every survivor still holds
the state of the last boundary, and copying it at each step is not needed.

Flow: at a boundary `Keeper` writes only small values (random states, buffers, settings) to its slots in the agent's
memory. It writes the large state (parameters, optimizer state) when the agent asks for it, or when it ends by an
exception. It writes nothing large between an `optimizer.step()` and the next boundary, because the state is then half
updated. Before the step it also writes the slot EARLY: the random states and buffers that a rank needs if it is killed
before the next boundary.

Trust: that nothing large changes in between is checked. On the first PROOF_STEPS steps all bits are summed at both
ends. Later the version counters of the parameters and some of their values are compared.

Life cycle: `door.py` creates one Keeper per process, for one `Snapshot`. The agent owns the memory and outlives the
Keeper. The Keeper has three hooks into torch: before every optimizer step, in the backward pass and before the forward
pass.

Drawbacks: the script must mark its steps; the hooks run on every step of every optimizer; and there is much mutable
state here, because the order of marks, saves and steps differs by script. Two kinds of training cannot rely on
survivors and copy the state regularly (`copies.py`): scripts that change parameters between boundary and step, and a
rank that trains alone. A state on a GPU is always copied (`device_copies.py`).
"""

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ddpjob import process
from ddpjob.checkpoint.in_memory import copies, room
from ddpjob.checkpoint.in_memory.copies import Boundary, Copies
from ddpjob.checkpoint.in_memory.device_copies import DeviceCopies
from ddpjob.checkpoint.in_memory.kept import Kept, ReplacedError
from ddpjob.checkpoint.in_memory.shared import Shared
from ddpjob.checkpoint.in_memory.slots import PLACE, Slots
from ddpjob.checkpoint.in_memory.streams import Streams
from ddpjob.checkpoint.in_memory.survivor import AGAIN_SECONDS, Survivor
from ddpjob.checkpoint.state import packed, random_states
from ddpjob.checkpoint.state.alike import moved
from ddpjob.errors import StateError
from ddpjob_core import memory
from ddpjob_core.memory import CLOCK, COPIES, EARLY, LOOSE, MISCOUNTED, PID, PROVEN, Version

PROOF_STEPS = 3
RANDOM = "random numbers"
"""Name of the random states among the values that are compared between a boundary and the next step."""
LOOSE_STEPS = 2  # in a row; a single one may be the end of an epoch


def _forward_begins(module: torch.nn.Module, _: Any) -> None:
    """Forward pre-hook of trained models. A module-level function, because a copy or a pickle of the model refers to
    it.
    """
    if not torch.compiler.is_compiling() and module.training and (keeper := process.current.keeper) is not None:
        keeper.step_begins()


class _Steps:
    """Counts optimizer steps between two boundaries, to find out if the script marks each step.

    Step numbers do not show that: scripts pass epochs or micro-batches, or skip numbers.
    """

    def __init__(self) -> None:
        self._made: dict[int, int] = {}
        self._is_first = True
        self.are_unmarked = False
        """True if an optimizer made several steps before the last boundary. Also true at the first boundary if `save`
        made
        it, because nothing is known yet. One of two optimizers may make several steps in each marked step; then copies
        are made that are not needed, which does no harm.
        """

    def one_more(self, optimizer: Any) -> int:
        """Count a step of this optimizer; return its steps since the last boundary."""
        made = self._made[id(optimizer)] = self._made.get(id(optimizer), 0) + 1
        return made

    def boundary(self, *, saved: bool) -> None:
        """saved: `save` made this boundary."""
        if self._made:
            self.are_unmarked = max(self._made.values()) > 1 or (self._is_first and saved)
            self._made.clear()
        self._is_first = False


class _Numbers:
    """Checks that `should_stop` and `save` get the number of steps made so far, and the same number for one state."""

    def __init__(self, began: int) -> None:
        """began: the step that `load` returned."""
        self._began = began
        self._last: tuple[int, bool] | None = None  # step of the last boundary, and True if save() or keep() made it
        self._marked: int | None = None  # step passed to should_stop since the last optimizer step
        self.has_worked = False
        """True if a backward pass or an optimizer step followed `load`."""
        self._has_stepped = False

    def step(self) -> None:
        """Record that an optimizer that is kept makes a step."""
        self._has_stepped, self.has_worked, self._marked = True, True, None

    def problem(self, step: int, *, named: bool, is_kept: bool) -> str:
        """Return what is wrong with the step number of this boundary, or "".

        named: save() or keep() made the boundary. is_kept: its objects are known, so their backward passes are seen.
        """
        why = self._of_save(step) if named else self._of_mark(step, is_kept=is_kept)
        if not named:
            self._marked = step
        self._last, self._has_stepped = (step, named), False
        return why

    def _of_save(self, step: int) -> str:
        if self._marked not in (None, step):
            return f"should_stop({self._marked}) and the state of step {step} that save() or keep() names are one"
        if self._has_stepped and self._last == (step, False):
            return f"should_stop({step}) was called before the step that save() or keep() calls {step}"
        return ""

    def _of_mark(self, step: int, *, is_kept: bool) -> str:
        if self._last is not None:
            is_other = self._has_stepped and self._last[0] == step
            return f"an optimizer made a step between two boundaries that are both called {step}" if is_other else ""
        if is_kept and step > self._began and not self.has_worked:
            return f"should_stop({step}) is called before step {step} is made"
        if step == self._began and self._has_stepped:
            return f"should_stop({step}) is called after the step that follows step {step}"
        return ""


class Keeper(Survivor):
    """Keeps the objects of one `Snapshot` in memory, for one process."""

    def __init__(
        self,
        shared: Shared,
        rank: int,
        world_size: int,
        otherwise: str,
        store: Any = None,
        streams: Streams | None = None,
        *,
        has_folder: bool = True,
    ) -> None:
        """otherwise: for the log, what a restart does without memory. store: of the group. streams: of the device that
        the
        rank trains on, None for the CPU. has_folder: False if the states are in memory only.
        """
        own = Copies(shared, rank, world_size, store) if world_size == 1 else None
        if streams is not None:
            own = DeviceCopies(shared, rank, world_size, store, streams)
            process.at_exit(own.keep_out_of_torch, 35)
        super().__init__(shared, own, on_device=streams is not None, has_folder=has_folder)
        self._rank, self._world_size, self._otherwise = rank, world_size, otherwise
        # objects whose parameters have changed; kept again from the next boundary on
        self._outgrown: Mapping[str, Any] | None = None
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers that stepped without being passed to save()
        self._store = store
        self._slots = Slots(shared, rank, world_size)
        self._stepped = True  # True if an optimizer made a step since the last boundary
        self._stepper: int | None = None  # id of the optimizer that stepped first
        self._numbers = _Numbers(0)
        self._content: dict[tuple[str, str], Any] = {}  # buffers at the last boundary
        self._forwarded: dict[tuple[str, str], Any] = {}  # buffers that the forward pass changed, as they were after it
        self._tensors = 0  # number of tensors in the optimizers' state at the last count
        self._loose_steps = 0  # steps in a row in which something changed between the boundary and the step
        self._made: dict[int, int] = {}  # steps since the last boundary, by id of each kept optimizer
        # a kept optimizer has ever stepped; another one has stepped since the boundary
        self._has_made = self._others_make = False
        self._has_mixed = False  # a backward pass followed a step of a kept optimizer
        self._said_mixed = False
        self._early: dict[str, Any] | None = None  # random states before the last step
        self._begun: int | None = None  # mark of the random states when the next step began
        self._notices_begin = False  # True once the beginning of a step was noticed
        self._has_early = True
        self._has_hooked = False  # True if a backward pass was seen since the last optimizer step
        self._proofs_left = self._proofs_needed
        self._turn: int | None = None  # slot for the next boundary; None until the first one
        self._noted = 0  # step of the last boundary
        self._is_copied = False  # the saved state is copied, and no optimizer has stepped since
        self._sum: tuple[int, int] | None = None  # (step, sum) to compare before the next step
        self._room: threading.Thread | None = None
        self._loaded: Version | None = None
        self._told = False
        # One counts between boundaries of any kind, the other between those at which the script passes everything. They
        # are only needed without a folder.
        self._unmarked = [] if has_folder else [_Steps(), _Steps()]
        self._hooks: list[Any] = []
        register_optimizer_step_pre_hook(self.before_step)
        self._begin()

    @property
    def _proofs_needed(self) -> int:
        return 0 if 0 < self._shared.node[PROVEN] <= self._shared.generation else PROOF_STEPS

    @property
    def is_on(self) -> bool:
        """True if something is kept."""
        return self._kept is not None and not self._off

    def turn_off(self, why: str) -> None:
        """Stop keeping the state; from now on a restart loads from the folder."""
        if not self._off:
            self._off = True
            self._shared.cells[PID], self._is_armed = 0, False
            if self._copies is not None:
                self._copies.count_saved()
                self._copies.stop()
            self._shared.forget_slots(None if self._copies is None else self._copies.saved)
            process.current.not_kept = why
            process.log(f"rank {self._rank}: the state is not kept in memory: {why}; {self._otherwise}")

    def register(self, objects: Mapping[str, Any]) -> None:
        """Keep these objects from now on. Plain values are captured only at the boundary at which they are passed."""
        if os.getpid() != self._pid:
            return  # objects of a forked process are not part of this training
        was_assumed, self._assumed = self._assumed, False
        if self._off or (self._kept is not None and self._kept.is_of(objects)):
            return
        with self._guarded():
            kept = Kept(objects)
            if was_assumed:
                self._forget_assumed()  # also forgets the proof: a copy with averaged weights needs its own
            elif self._kept is not None and not kept.has_parts_of(self._kept):
                self._prove_again()
            elif self._kept is not None:
                kept.goes_on_from(self._kept)
            self._keep(kept)

    def _keep(self, kept: Kept) -> None:
        with self._lock:  # what was noted so far belongs to other objects
            self._kept, self._outgrown, self._stepped = kept, None, True
            self._shared.cells[CLOCK] |= 1
        for hook in self._hooks:
            hook.remove()
        self._hooks = [
            last.register_post_accumulate_grad_hook(self._before_reduce)  # type: ignore[no-untyped-call]
            for last in kept.first_gradients
        ]
        self._hooks += [model.register_forward_pre_hook(_forward_begins) for model in kept.called]
        if kept.by_value and self._has_folder and not self._told and self._rank == 0:
            self._told = True
            process.log(
                f"{', '.join(kept.by_value)}: saved by value, so the memory has that state until the next optimizer "
                f"step, and then {self._otherwise}: give save() objects with state_dict(), or call keep(step, …) after "
                f"each step"
            )

    def assume(self, objects: Mapping[str, Any]) -> None:
        """Keep the objects passed to `load` until `save` names some, if nothing else is trained."""
        if self._off or self._kept is not None or self._shared.node[MISCOUNTED]:
            return
        with contextlib.suppress(StateError):  # save() reports what is wrong with them
            if objects and Kept(objects).may_be_assumed():
                self.register(objects)
                self._assumed = True

    def forget_assumed(self) -> None:
        """The assumed objects are not the trained ones: keep nothing until `save` names some."""
        if self._assumed and os.getpid() == self._pid:
            self._assumed = False
            self._forget_assumed()

    def _forget_assumed(self) -> None:
        self._prove_again()
        self._shared.forget_slots()
        if self._copies is not None:
            self._copies.forget()

    def _prove_again(self) -> None:
        """Keep nothing, and forget the proof, because it belongs to other objects."""
        with self._lock:
            self._kept, self._outgrown, self._sum, self._stepped = None, None, None, True
            self._shared.cells[CLOCK] |= 1
            self._shared.cells[PID] = self._shared.node[PROVEN] = 0
            self._proofs_left, self._is_armed = PROOF_STEPS, False
        if self._copies is not None:
            self._copies.give_up_last()

    def _drop(self, why: str) -> None:
        """Keep nothing until the next save: the script trains other objects than it passed."""
        self._prove_again()
        if self._rank == 0:
            process.log(
                f"{why}: the state is kept in memory again from the next save() or keep() on; until then "
                f"{self._otherwise}"
            )

    def _has_outgrown(self, why: str) -> None:
        """The objects have other parameters now, so what was noted about them is void. Keep them again from the next
        boundary.
        """
        kept = self._kept
        self._prove_again()
        with contextlib.suppress(ReplacedError):
            self._outgrown = None if kept is None else kept.objects
        if self._answered.locked():  # locked: the agent asked for the state because a rank failed
            process.log(f"rank {self._rank}: the state is not written: {why} than before; {self._otherwise}")
        elif self._rank == 0:
            process.log(f"{why} than before: until it was trained for {PROOF_STEPS} steps, {self._otherwise}")

    def _check_named(self, kept: Kept, optimizer: Any) -> None:
        """Check that the script trains with the objects that it passed. Raises OutgrownError."""
        kept.check_counts()
        if optimizer is None or kept.has(optimizer) or optimizer in self._seen:
            return
        self._seen.add(optimizer)
        if kept.trains_with(optimizer):
            self._drop("an optimizer makes steps that save() was not given")

    def goes_on(self, step: int) -> None:
        """Called when `load` returns this step: forget the step numbers that came before."""
        self._numbers = _Numbers(step)

    def loads(self, version: Version) -> None:
        """Called when all ranks load this version from memory."""
        if self._shared.proven_elsewhere:
            self._shared.node[PROVEN] = self._shared.proven_elsewhere
        self._loaded, self._proofs_left = version, self._proofs_needed
        if self._copies is not None:
            self._copies.loaded = version

    def resumed(self, step: int, loads: int, total: int) -> None:
        """Record that this state was loaded from memory and is unchanged. loads: how often so far. total: sum of its
        bits.
        """
        self._resumed, self._resumed_total = (step, loads), total
        if self._copies is not None:
            self._copies.resumed(step)

    def boundary(self, step: int, *, named: bool = False, saved: bool = False) -> None:
        """Parameters and optimizer state are those of this step.

        named: the script passed everything that is kept, plain values too. saved: `save` made this boundary.
        """
        if self._unmarked:
            for steps in self._unmarked[: 1 + named]:
                steps.boundary(saved=saved)
        if self._outgrown is not None and not self._off:
            with self._guarded():
                self._keep(Kept(self._outgrown))
        self._check_number(step, named)
        kept = self._kept
        if kept is None or self._off or os.getpid() != self._pid:
            return
        must_copy = saved and self._must_copy(kept, step)
        # within an accumulation a new mark would repeat the micro-batches before it
        is_renamed = named and not self._has_begun
        if not (self._stepped or self._copies_instead or must_copy or is_renamed) or (kept.by_value and not named):
            return  # nothing is new, or plain values belong to another step
        if self._has_other(step):
            return
        if self._assumed and not kept.may_be_assumed():
            self.forget_assumed()
            return
        try:  # not `_guarded`, here and in the hooks: it would cost a tenth of a boundary's time
            self._take_in(kept, int(step), named=named, must_copy=must_copy)
        except Exception as error:
            self._give_up(error)

    def _has_other(self, step: int) -> bool:
        """True if a copy with this step number exists and an optimizer has stepped since.

        Memory keeps the first copy: a later one would mix the values and random states of one step with the parameters
        of another.
        """
        saved = None if self._copies is None else self._copies.saved
        return saved is not None and saved.step == step and not self._is_copied

    def _must_copy(self, kept: Kept, step: int) -> bool:
        """True if the saved state is lost with the next step unless it is copied now."""
        if not self._unmarked or not self._unmarked[bool(kept.by_value)].are_unmarked:
            return False
        if not self._copies_instead and memory.step_of(self._shared.cells[CLOCK]) != step:
            self._stepped = True  # otherwise a state already marked by another number would not be copied
        if self._copies is None:
            self._copies = self._new_copies()
        self._is_copied |= not self._has_other(step)
        return True

    def _take_in(self, kept: Kept, step: int, *, named: bool, must_copy: bool) -> None:
        self._thread = threading.get_ident()
        kept.check_gone()
        self._check_makers()
        rng, settings = random_states.compact(), self._slots.settings(kept)
        self._learn(kept, step, self._watched_with(kept, random_states.mark(rng), settings), named=named)
        if not self._copies_instead and (self._stepped or named):
            self._note(kept, step, rng, settings)
        elif self._stepped:
            kept.record()
            if self._on_device:
                self._is_proven(kept, step)
        own = self._copies
        if own is not None and self._places.moved:
            own.renew(self._at(kept, step, named))  # the copy made at should_stop is not what a folder would have
        if own is not None and (own.instead or not self._proofs_left or must_copy):
            self._copy(own, self._at(kept, step, named, must_copy))
        if must_copy and not self._off:
            self._tell_of_saves(kept)

    def _tell_of_saves(self, kept: Kept) -> None:
        if not self._told and self._rank == 0 and not process.current.not_kept:
            self._told = True
            values = ", ".join(kept.by_value)
            why = f"{values}: saved by value" if values else "there are steps that the script does not mark"
            process.log(
                f"{why}, so what is saved is copied into memory, and a restart goes on from the last save(): to repeat "
                f"no step call {'keep(step, …)' if values else 'should_stop(step)'} after each step"
            )

    def _check_makers(self) -> None:
        """Check that the kept optimizers made the last step. Raises ReplacedError."""
        made, self._made = self._made, {}
        others_make, self._others_make = self._others_make, False
        has_mixed, self._has_mixed = self._has_mixed, False
        if has_mixed and max(made.values(), default=0) == 1 and not self._said_mixed:
            self._said_mixed = True
            self._tell_not_kept(
                "gradients are summed over the ranks after an optimizer's step has begun and before should_stop(), as "
                "with LBFGS or a second optimizer: a rank that fails there leaves no whole state"
            )
        if others_make and not made and self._has_made:
            raise ReplacedError("an optimizer makes the steps that save() was not given")

    def _tell_not_kept(self, why: str) -> None:
        """Log and report in the status that memory lacks some steps."""
        if not process.current.not_kept:
            process.current.not_kept = why
            if self._rank == 0:
                process.log(f"{why}; {self._otherwise}")

    def _watched(self, kept: Kept) -> dict[str, Any]:
        """Values that are compared between a boundary and the next step, by name."""
        return self._watched_with(kept, self._marked_now())

    def _watched_with(self, kept: Kept, mark: int, settings: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """settings: the current ones, if the caller has them already."""
        settings = self._slots.settings(kept) if settings is None else settings
        named = {name: value for name, value in settings.items() if name not in kept.by_value}
        return named | kept.untrained() | {RANDOM: mark}

    def _marked_now(self) -> int:
        """Mark of the random states when the next step began; of the current ones if it has not begun."""
        if self._begun is not None:
            return self._begun
        is_known = self._notices_begin and not self._has_begun
        return random_states.mark(random_states.compact()) if is_known else self._places.marked.get(RANDOM, 0)

    def step_begins(self, sampler: Any = None) -> None:
        """The next step begins: random numbers drawn from here on belong to it.

        sampler: the one that is iterated. It counts only if it is kept, because an evaluation may use another sampler.
        """
        kept = self._kept
        if kept is None or self._begun is not None or not self._places.is_open or os.getpid() != self._pid:
            return
        if sampler is not None and not any(kept.objects[name] is sampler for name in kept.samplers()):
            return
        marked, is_trusted = self._places.marked.get(RANDOM, 0), self._places.trusts(RANDOM)
        # not read where it is known that a draw is no loss: it is a fifth of what the memory costs at a step
        is_read = self._places.is_named or not is_trusted  # after a save() the place of the draws is learned
        self._notices_begin, self._begun = True, random_states.mark(random_states.compact()) if is_read else marked
        self._shared.cells[LOOSE] = 0 if is_trusted or self._begun == marked else self._noted

    def _learn(self, kept: Kept, step: int, values: Mapping[str, Any], *, named: bool) -> None:
        """Learn where in its loop the script changes small values, and which buffers its forward pass changes."""
        places = self._places
        if places.is_open and not named:
            return
        self._begun = None
        if places.is_open:
            if new := places.named(values, {kept.changed()} - {""}):
                self._tell_of_places(new, f"between should_stop({step}) and save({step})")
            self._shared.cells[LOOSE] = 0
            return
        places.after_save(kept.samplers())
        self._check_samplers(kept, values)
        places.boundary(values, named=named)
        self._shared.cells[LOOSE] = 0 if named or not places.suspects(RANDOM) else step
        if not self._on_device and self._forwarded:
            content = kept.buffers_as_they_are()
            # the script changes it too, not only the forward pass
            if any(content.get(key) != was for key, was in self._forwarded.items()):
                self._has_early = False
                self._shared.forget_slot(EARLY)

    def _check_samplers(self, kept: Kept, values: Mapping[str, Any]) -> None:
        """Check that a kept sampler provides the batches. Raises ReplacedError."""
        last = None if process.current.sampler is None else process.current.sampler()
        names, process.current.sampler = kept.samplers(), None
        if last is None or not names or any(kept.objects[name] is last for name in names):
            return
        if not moved({name: self._places.marked.get(name) for name in names}, {name: values[name] for name in names}):
            raise ReplacedError(f"{', '.join(names)}: another sampler gives the batches than the one that save() has")

    def _tell_of_places(self, names: Collection[str], where: str) -> None:
        """Log that objects change between a boundary and the next step. where: between which calls."""
        if self._rank == 0:
            process.log(
                f"{', '.join(sorted(names))}: changed {where}. A restart within such a step does not use the memory, "
                f"and {self._otherwise}: call should_stop(step), or keep(step, …), as the last thing of each step"
            )

    def _leave(self, kept: Kept) -> None:
        """Compare the kept values with those at the boundary; called when an optimizer step begins."""
        if not self._places.is_open:
            return
        mark = self._places.marked.get(RANDOM, 0) if self._begun is None else self._begun
        new = self._places.step(self._watched_with(kept, mark), [*kept.optimizers, RANDOM])
        if self._places.is_loose and self._copies is not None:
            self._copies.give_up_last()
        self._loose_steps = self._loose_steps + 1 if self._places.is_loose else 0
        if new:
            self._tell_of_places(new, "between should_stop() and the next optimizer.step()")
        if self._loose_steps == LOOSE_STEPS:
            names = ", ".join(sorted(self._places.loose))
            self._tell_not_kept(f"{names}: changed between should_stop() and the next optimizer.step()")

    def _check_number(self, step: int, named: bool) -> None:
        """Check that the step number is the one that `save` would be given, because `load` would return it."""
        if self._off or os.getpid() != self._pid:
            return
        if why := self._numbers.problem(int(step), named=named, is_kept=self._kept is not None):
            self._shared.node[MISCOUNTED] = 1
            self._forget_assumed()
            self.turn_off(f"{why}: give both the number of steps made so far")

    @property
    def _copies_instead(self) -> bool:
        """True if only copies are kept, because survivors could not write a valid state."""
        return self._copies is not None and self._copies.instead

    def _at(self, kept: Kept, step: int, named: bool, must_copy: bool = False) -> Boundary:
        def small() -> dict[str, Any]:
            small = kept.small(buffers=not self._on_device) | self._place(kept)
            return self._slots.value(kept, random_states.compact(), small)

        return Boundary(kept, step, named, small, self._assumed, must_copy)

    def _place(self, kept: Kept) -> dict[str, Any]:
        """Describe this rank's position in the step: the next generation finds out if ranks left different moments of
        it.
        """
        sample = 0 if self._on_device else kept.sample()
        moved_ones = sorted(self._places.moved)
        place = {"named": self._places.is_named, "moved": moved_ones, "sample": sample}
        return {PLACE: place | {"of_0": kept.broadcast, "models": kept.models, "known": kept.known}}

    def _copy(self, own: Copies, at: Boundary) -> None:
        if own.instead and not self._stepped:
            own.again(at)
        else:
            self._stepped = False
            own.boundary(at)

    def _copy_because_of_changes(self, why: str) -> None:
        """Copy the state regularly, because parameters change between a boundary and the next step. why: for
        the log."""
        if self._store is None and self._world_size > 1:
            raise StateError(why)
        if self._copies is None:
            self._copies = self._new_copies()
        self._proofs_left, self._sum, self._shared.cells[PID], self._is_armed = 0, None, 0, False
        self._shared.forget_slot(EARLY)  # no copy needs it
        self._copies.begin_with_changes(why)

    def _new_copies(self) -> Copies:
        found = Copies(self._shared, self._rank, self._world_size, self._store)
        found.resumed(self._resumed[0])
        found.loaded = self._loaded
        return found

    def _note(self, kept: Kept, step: int, rng: dict[str, Any], settings: Mapping[str, Any]) -> None:
        shared = self._shared
        if "cuda" in rng:
            raise StateError("the script uses a GPU, and its group was made for CPUs")
        if self._has_early and self._early is not None and rng != self._early:
            self._has_early = False  # random numbers drawn after the gradients are not known before them
            shared.forget_slot(EARLY)
        self._early = None
        self._content, self._forwarded, self._has_begun = kept.buffers_as_they_are(), {}, False
        with self._lock:
            kept.record()
        more = {**settings, **self._place(kept)}
        self._slots.write(self._slot_to_write(step), step, kept, rng, more=more)
        with self._lock:
            if self._dirty_since:
                self._dirty_seconds = max(self._dirty_seconds, time.monotonic() - self._dirty_since)
            self._stepped, self._state = False, None
            self._names_each_step = step <= memory.step_of(shared.cells[CLOCK]) + 1
            shared.cells[CLOCK] = 2 * step
        if not self._is_armed or not self._has_room_for(kept):
            self._arm(kept, step)
        elif memory.proves_again(step, shared.reserved()):
            self._sum = step, kept.total()

    def _slot_to_write(self, step: int) -> int:
        """Slot of the older boundary: two slots alternate. The same step goes to the same slot again."""
        if self._turn is not None and step == self._noted:
            return 1 - self._turn
        self._noted = step
        if self._turn is None:
            one, other = (self._shared.slot_version(slot) for slot in range(EARLY))
            self._turn = 0 if one is None or (other is not None and one < other) else 1
        turn, self._turn = self._turn, 1 - self._turn
        return turn

    def _is_proven(self, kept: Kept, step: int) -> bool:
        """True if it is proven that nothing large changes between a boundary and the next step; else sum this
        boundary."""
        if self._shared.node[COPIES]:
            self._copy_because_of_changes(copies.CHANGES)
            return False
        if self._proofs_left:  # also if another rank has the proof: each rank's sum shows that the ranks are replicas
            self._sum = step, kept.total()
        return not self._proofs_left

    def _has_room_for(self, kept: Kept) -> bool:
        """True if the state still fits. Optimizers allocate state when a parameter gets its first gradient."""
        count, self._tensors = self._tensors, kept.count_tensors()
        if self._tensors <= count or packed.pack(kept.large()).size <= self._shared.reserved():
            return True
        with self._lock:
            self._shared.cells[PID], self._is_armed = 0, False
        return False

    def _arm(self, kept: Kept, step: int) -> None:
        """Offer the state to the agent as soon as there are room and proof; start a thread that reserves the room."""
        if not self._is_proven(kept, step):
            return
        size = packed.pack(kept.large()).size
        if self._shared.reserved() >= size:
            self._promise()
        elif self._room is None or not self._room.is_alive():
            self._room = threading.Thread(target=self._reserve, args=(size,), name="ddpjob-memory-room", daemon=True)
            self._room.start()

    def _reserve(self, size: int) -> None:
        """Reserve room, in a thread: the kernel needs half a second for a large area, and no boundary may follow for
        long.
        """
        with self._guarded():
            while self._shared.reserved() < size:
                with self._shared.locked() as alone:
                    if alone and self._shared.reserved() < size:
                        self._take(memory.area_bytes(size))
                        break
                time.sleep(AGAIN_SECONDS)
            with self._lock:  # the objects may have changed, and the proof with them
                if self._kept is not None and not (self._proofs_left or self._off or self._copies_instead):
                    self._promise()

    def _promise(self) -> None:
        """Tell the agent that it may wait for this rank to write the state. Not if it has already asked."""
        if not self._is_asked:
            self._shared.cells[PID], self._is_armed = os.getpid(), True

    def _take(self, size: int) -> None:
        """Reserve memory for this many bytes. Raises StateError, OSError."""
        reserved = [self._shared.reserved(area) for area in range(memory.AREAS)]
        both = 0 if self._copies is None else memory.missing(size, reserved, memory.AREAS)
        if short := room.shortage(memory.missing(size, reserved, 1), with_later=both):
            process.current.limit_needed = short.limit_needed
            raise StateError(short.why)
        self._shared.reserve(size)

    # ---- the optimizer's step ------------------------------------------------------------------------------

    def before_step(self, optimizer: Any = None, *_: Any) -> None:
        """Called before each step of each optimizer of this process."""
        if self._kept is not None:
            self._kept.release()
        self._count_step(optimizer)
        if self._assumed and self._kept is not None and not self._kept.has(optimizer):
            self.forget_assumed()
        kept = self._kept
        if kept is None or self._off or self._stepped or os.getpid() != self._pid:
            if not self._off and os.getpid() == self._pid:
                self._other_step(optimizer)
            self._stepped, self._has_hooked = True, False
            if kept is None and optimizer is not None:
                self._seen.add(optimizer)
            if kept is not None:
                kept.count_step(optimizer)
            return
        try:
            self._end_boundary(kept, optimizer)
        except Exception as error:
            self._give_up(error)
        self._stepper, self._has_begun, self._has_hooked = id(optimizer), False, False
        kept.count_step(optimizer)
        with self._lock:
            self._stepped, self._dirty_since = True, time.monotonic()
            self._shared.cells[CLOCK] |= 1

    def _end_boundary(self, kept: Kept, optimizer: Any) -> None:
        """Handle the first optimizer step after a boundary."""
        if self._copies is not None:
            self._copies.count_saved()
        self._check_named(kept, optimizer)
        if self._kept is kept:
            self._leave(kept)
        if self._kept is kept and self._sum is not None:
            self._compare(kept)
        if self._kept is kept and self._copies is not None:
            self._copies.before_step(kept)
        if self._kept is kept and not (self._copies_instead or self._has_begun):
            self._write_early(kept)

    def _other_step(self, optimizer: Any) -> None:
        """Handle a step without a boundary before it: of a second optimizer, or in a script that does not mark each
        step.
        """
        if self._copies is not None:
            with self._guarded():
                self._copies.before_other_step()
        if self._stepper == id(optimizer) and not self._has_hooked:
            self._stepper, self._has_early = None, False
            # it is older than the first of these steps, and no backward pass rewrites it
            self._shared.forget_slot(EARLY)

    def _count_step(self, optimizer: Any) -> None:
        """Count the step. Without frequent boundaries no slot would tell that steps followed the loaded state."""
        if self._off or os.getpid() != self._pid:
            return
        kept = self._kept
        if kept is None or kept.has(optimizer):
            self._numbers.step()
            self._made[id(optimizer)] = 1 + self._made.get(id(optimizer), 0)
            self._has_made = kept is not None
        else:
            self._others_make = True
        if not self._unmarked:
            return
        self._is_copied = False
        made = [steps.one_more(optimizer) for steps in self._unmarked]
        if made[0] == 2 and self._loaded is not None and self._shared.local_rank == 0:
            self._shared.forget_loads(self._loaded)

    def _compare(self, kept: Kept) -> None:
        step, before = self._sum or (0, 0)
        self._sum = None
        counted = not kept.changed() or step == self._resumed[0]
        if kept.total() != before or not counted:
            self._shared.node[PROVEN] = 0
            self._copy_because_of_changes(
                f"parameters or optimizer state changed between step {step} and the next optimizer.step()"
            )
            return
        self._proofs_left = max(0, self._proofs_left - 1)
        if self._proofs_left == 0:
            self._shared.write_proof(step, before)
            self._shared.node[PROVEN] = 1 + self._shared.generation

    def _before_reduce(self, _parameter: Any) -> None:
        """Gradient hook, called in each backward pass before all of this rank's gradients can have reached the others.

        After that the other ranks may finish the step while this rank is killed in it.
        """
        kept = self._kept
        if kept is None or self._off or os.getpid() != self._pid:
            return
        self._numbers.has_worked = True
        self._has_hooked = True
        if self._stepped:
            self._has_mixed |= bool(self._made)
        else:
            self._has_begun = True
        if not self._copies_instead:
            try:
                self._write_early(kept, in_backward=True)
            except Exception as error:
                self._give_up(error)

    def _write_early(self, kept: Kept, *, in_backward: bool = False) -> None:
        """Write the random states and buffers. They are lost if this rank is killed before the next boundary; the other
        ranks have everything else.

        in_backward: another micro-batch may have changed buffers without drawing random numbers.
        """
        rng = random_states.compact() if self._has_early else None
        if rng is None or (rng == self._early and not (in_backward and kept.tensors_of_buffers())):
            return
        self._early = rng
        step, content = self._shared.cells[CLOCK] // 2 + 1, kept.buffers_as_they_are()
        # A weight average that is updated after the step is one step older here than on the ranks that finish the step.
        self._forwarded = {key: what for key, what in content.items() if what != self._content.get(key)}
        unchanged = content.keys() - self._forwarded.keys()
        self._slots.write(EARLY, step, kept, rng, leaves_out=unchanged)
