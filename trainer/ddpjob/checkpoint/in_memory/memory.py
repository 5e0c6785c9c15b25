"""The rank's side of the memory that outlives it: after a failure the surviving ranks write the state.

Inspiration: between a boundary (`should_stop(step)`, `keep`, `save`) and the next `optimizer.step()` nothing changes
parameters and optimizer state. No rank can finish that step without the failed rank. So every survivor still holds the
state of the last boundary, and copying it at each step is not needed.

Flow: at a boundary `Keeper` writes only small values (random states, buffers, settings) to its slots in the agent's
memory. It writes the large state (parameters, optimizer state) when the agent asks for it, or when it ends by an
exception. It writes nothing large between an `optimizer.step()` and the next boundary, because the state is then half
updated. Before the step it also writes the slot EARLY: the random states and buffers that a rank needs if it is killed
before the next boundary.

Proof: the Keeper checks that nothing large changes between a boundary and the next step. On the first PROOF_STEPS steps
it compares sums of all bits, later the version counters of the parameters and some of their values.

Terms: a script *marks* a step if it makes a boundary after it, and *names* a state if it passes it to `save` or `keep`.
Before the first call of these, the objects passed to `load` are assumed to be the state.

Life cycle: `door.py` creates one Keeper per process, for one `Snapshot`. The agent owns the memory and outlives the
Keeper. It has three hooks into torch: before every optimizer step, in the backward pass and before the forward pass.

Drawbacks: the script must mark its steps; the hooks run on every step of every optimizer; and there is much mutable
state here, because scripts differ in the order of boundaries and steps. Two kinds of training cannot rely on
survivors and copy the state regularly (`copies.py`): scripts that change parameters between boundary and step, and a
rank that trains alone. A state on a GPU is always copied (`device_copies.py`).
"""

import contextlib
import os
import threading
import time
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ddpjob import process
from ddpjob.checkpoint.in_memory import copies
from ddpjob.checkpoint.in_memory.copies import Boundary, Copies
from ddpjob.checkpoint.in_memory.device_copies import DeviceCopies
from ddpjob.checkpoint.in_memory.kept import Kept, OutgrownError, ReplacedError
from ddpjob.checkpoint.in_memory.mode import Event, Mode, after
from ddpjob.checkpoint.in_memory.places import Places
from ddpjob.checkpoint.in_memory.shared import AGAIN_SECONDS, Shared
from ddpjob.checkpoint.in_memory.slots import FORWARDED, LEARNED, PLACE, RANDOM, Early, Slots
from ddpjob.checkpoint.in_memory.steps import Makers, Numbers, Unmarked
from ddpjob.checkpoint.in_memory.streams import Streams
from ddpjob.checkpoint.in_memory.survivor import Survivor
from ddpjob.checkpoint.state import packed, random_states
from ddpjob.checkpoint.state.alike import moved
from ddpjob.errors import StateError
from ddpjob_core import memory
from ddpjob_core.memory import CLOCK, COPIES, EARLY, LOOSE, MISCOUNTED, PID, PROVEN, Held

PROOF_STEPS = 3
LOOSE_STEPS = 2  # steps in a row with a change after the boundary, before a report; one may be the end of an epoch


def _forward_begins(module: torch.nn.Module, _: Any) -> None:
    """Forward pre-hook of trained models; at module level, because a pickle of the model refers to it."""
    is_step = module.training and torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if is_step and (keeper := process.current.keeper) is not None:  # a pass without gradients is an evaluation
        keeper.has_called |= keeper.step_begins()


class Keeper:
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
        """otherwise: log text: what a restart does without memory. store: the group's store. streams: CUDA streams of
        the rank's device, None for the CPU. has_folder: False if the states are in memory only.
        """
        own = Copies(shared, rank, world_size, store) if world_size == 1 else None
        if streams is not None:
            own = DeviceCopies(shared, rank, world_size, store, streams)
            process.at_exit(own.keep_out_of_torch, 35)
        self.shared, self.copies, self.on_device, self.has_folder = shared, own, streams is not None, has_folder
        self._rank, self._world_size, self._otherwise, self._store = rank, world_size, otherwise, store
        self.mode = Mode.EMPTY
        self.kept: Kept | None = None
        self._outgrown: Mapping[str, Any] | None = None  # objects with new parameters, kept from the next boundary on
        self.assumed = False
        self.lock = threading.Lock()
        self.dirty_since = self.dirty_seconds = 0.0
        self.names_each_step = False
        self.places, self.thread, self.pid = Places(), threading.get_ident(), os.getpid()
        self._slots, self._early = Slots(shared, rank, world_size), Early(rank)
        if (learned := self._slots.learned()) is not None:
            self.places.goes_on_from(learned)
        self._turn: int | None = None  # slot for the next boundary; None until the first one
        self._noted = 0  # step of the last boundary
        self._stepped = True  # True if an optimizer made a step since the last boundary
        self.has_begun = self.has_called = False
        self._begun: Mapping[str, Any] | None = None  # random states and buffers when the next step began
        self._repeated: set[str] | None = None  # names of optimizers that had not changed when the step began
        self._notices_begin = False  # True once the beginning of a step was noticed
        self._numbers, self._makers = Numbers(0), Makers()
        # The first counts steps between any boundaries, the second between boundaries at which the script passes
        # everything. Only needed without a folder.
        self._unmarked = [] if has_folder else [Unmarked(), Unmarked()]
        self._is_copied = False  # True if the saved state is copied, and no optimizer has stepped since
        self._tensors = 0  # number of tensors in the optimizers' state at the last count
        self._loose_steps = 0  # steps in a row in which something changed between the boundary and the step
        self._proofs_left = self._proofs_needed
        self._sum: tuple[int, int] | None = None  # (step, sum of all bits of the state), compared before the next step
        self._room: threading.Thread | None = None
        self._has_told_of_saves = False
        self._is_unnamed = True  # save() and keep() have named nothing, and that is not logged yet
        self._hooks: list[Any] = []
        register_optimizer_step_pre_hook(self.before_step)
        self.survivor = Survivor(self)

    @property
    def _proofs_needed(self) -> int:
        return 0 if 0 < self.shared.node[PROVEN] <= self.shared.generation else PROOF_STEPS

    @property
    def is_on(self) -> bool:
        """True if something is kept."""
        return self.kept is not None and not self._is_off

    @property
    def _is_off(self) -> bool:
        """True if nothing is kept any more, or in a forked process, whose objects are not part of this training."""
        return self.mode is Mode.OFF or os.getpid() != self.pid

    def _to(self, event: Event) -> None:
        """Switch to the mode that follows, and tell the agent if it may wait for this rank to write the state."""
        before, self.mode = self.mode, after(self.mode, event)
        if before is not self.mode or event == "dropped":
            is_ready = self.mode is Mode.READY and not self.survivor.is_asked
            self.shared.cells[PID] = self.pid if is_ready else 0

    def turn_off(self, why: str) -> None:
        """Stop keeping the state; from now on a restart loads from the folder."""
        if not self._is_off:
            self._to("refused")
            if self.copies is not None:
                self.copies.count_saved()
                self.copies.stop()
            self.shared.forget_slots(None if self.copies is None else self.copies.saved)
            process.current.not_kept = why
            process.log(f"rank {self._rank}: the state is not kept in memory: {why}; {self._otherwise}")

    def register(self, objects: Mapping[str, Any]) -> None:
        """Keep these objects from now on. Plain values are captured only at the boundary at which they are passed."""
        if self._is_off:
            return
        was_assumed, self.assumed, self._is_unnamed = self.assumed, False, False
        if self.kept is not None and self.kept.is_of(objects):
            return
        with self._guarded():
            kept = Kept(objects)
            if was_assumed:
                self._forget_assumed()  # check again from the first step: save() may get more objects than load() did
            elif self.kept is not None and not kept.has_parts_of(self.kept):
                self._prove_again()
            elif self.kept is not None:
                kept.goes_on_from(self.kept)
            self._keep(kept)

    def _keep(self, kept: Kept) -> None:
        if self.kept is None or not kept.has_parts_of(self.kept):  # false if only plain values are new
            self._early.forget()
        with self.lock:  # slots and areas written so far are of other objects
            self.kept, self._outgrown, self._stepped = kept, None, True
            self._to("named")
            if not self._proofs_left:
                self._to("proven")
            self.shared.cells[CLOCK] |= 1
        for hook in self._hooks:
            hook.remove()
        self._hooks = [
            last.register_post_accumulate_grad_hook(self._before_reduce)  # type: ignore[no-untyped-call]
            for last in kept.first_gradients
        ]
        self._hooks += [model.register_forward_pre_hook(_forward_begins) for model in kept.called]
        if kept.by_value and self.has_folder:
            self._tell_of_saves(
                f"{', '.join(kept.by_value)}: saved by value, so memory has it only until the next optimizer step; "
                f"then {self._otherwise}. Give save() objects with state_dict(), or call keep(step, …) after each step"
            )

    def assume(self, objects: Mapping[str, Any]) -> None:
        """Keep `load`'s objects until the first `save` or `keep`, unless the script trains other objects."""
        if self._is_off or self.kept is not None or self.shared.node[MISCOUNTED]:
            return
        with contextlib.suppress(StateError):  # save() reports what is wrong with them
            if objects and Kept(objects).may_be_assumed():
                self.register(objects)
                self.assumed = self._is_unnamed = True

    def forget_assumed(self) -> None:
        """Drop the objects of `assume`: the script trains others. Keep nothing until the first `save` or `keep`."""
        if self.assumed and not self._is_off:
            self.assumed = False
            self._forget_assumed()

    def _forget_assumed(self) -> None:
        self._prove_again()
        self.shared.forget_slots()
        if self.copies is not None:
            self.copies.forget()

    def _prove_again(self) -> None:
        """Keep nothing until the check on the first steps is repeated, because other objects are kept now."""
        with self.lock:
            self.kept, self._outgrown, self._sum, self._stepped = None, None, None, True
            self.shared.cells[CLOCK] |= 1
            self.shared.node[PROVEN], self._proofs_left = 0, PROOF_STEPS
            self._to("dropped")
        if self.copies is not None:
            self.copies.give_up_last()

    def goes_on(self, step: int) -> None:
        """Called when `load` returns this step: forget earlier step numbers."""
        self._numbers = Numbers(step)

    def resumed(self, held: Held) -> None:
        """Record that all ranks have loaded this state from memory."""
        if self.shared.proven_elsewhere:
            self.shared.node[PROVEN] = self.shared.proven_elsewhere
        self.shared.loaded, self._proofs_left = held._replace(loads=held.loads + 1), self._proofs_needed

    def boundary(self, step: int, *, named: bool = False, saved: bool = False, kept_alone: bool = False) -> None:
        """Called when parameters and optimizer state are those of this step.

        named: the script passed everything that is kept, plain values too. saved: `save` made this boundary.
        kept_alone: `keep` made it.
        """
        if self._unmarked:
            for steps in self._unmarked[: 1 + named]:
                steps.boundary(saved=saved)
        if self._outgrown is not None and not self._is_off:
            with self._guarded():
                self._keep(Kept(self._outgrown))
        self._check_number(step, named)
        kept = self.kept
        if kept is None or self._is_off:
            self._tell_unnamed(step)
            return
        must_copy = saved and self._must_copy(kept, step)
        # Within a gradient accumulation keep the first random states: a restart repeats all micro-batches of the step.
        is_renamed = named and not self.has_begun
        if not (self._stepped or self._copies_instead or must_copy or is_renamed) or (kept.by_value and not named):
            return  # nothing is new, or plain values belong to another step
        if self._has_other(step):
            return
        if self.assumed and not kept.may_be_assumed():
            self.forget_assumed()
            return
        try:  # without `_guarded`, which would add a tenth to a boundary's time
            self._take_in(kept, int(step), named=named, must_copy=must_copy, counts=named and not kept_alone)
        except Exception as error:
            self.give_up(error)

    def _has_other(self, step: int) -> bool:
        """True if a copy with this step number exists and an optimizer has stepped since.

        Memory keeps the first copy: a later one would mix the values and random states of one step with the parameters
        of another.
        """
        saved = None if self.copies is None else self.copies.saved
        return saved is not None and saved.step == step and not self._is_copied

    def _must_copy(self, kept: Kept, step: int) -> bool:
        """True if the saved state is lost with the next step unless it is copied now."""
        if not self._unmarked or not self._unmarked[bool(kept.by_value)].are_unmarked:
            return False
        if not self._copies_instead and memory.step_of(self.shared.cells[CLOCK]) != step:
            self._stepped = True  # otherwise a state marked with another step number would not be copied
        if self.copies is None:
            self.copies = Copies(self.shared, self._rank, self._world_size, self._store)
        self._is_copied |= not self._has_other(step)
        return True

    def _take_in(self, kept: Kept, step: int, *, named: bool, must_copy: bool, counts: bool) -> None:
        self.thread = threading.get_ident()
        kept.check_gone()
        if self._makers.boundary():
            self._tell_not_kept(
                "gradients are summed over the ranks after an optimizer's step has begun and before should_stop(), as "
                "with LBFGS or a second optimizer: a rank that fails there leaves no whole state"
            )
        rng, settings, content = random_states.compact(), kept.settings(), kept.buffers_as_they_are()
        values = self._watched_with(kept, content | {RANDOM: random_states.mark(rng)}, settings)
        self._learn(kept, step, values, named=named, counts=counts)
        if not self._copies_instead and (self._stepped or named):
            self._note(kept, step, rng, settings, content)
        elif self._stepped:
            kept.record()
            if self.on_device:
                self._is_proven(kept, step)
        own = self.copies
        if own is not None and self.places.moved:
            own.renew(self.at(kept, step, named))  # the copy lacks changes made between should_stop() and save()
        if own is not None and (own.instead or self.mode is not Mode.PROVING or must_copy):
            self._copy(own, self.at(kept, step, named, must_copy))
        if must_copy and not self._is_off and not process.current.not_kept:
            names = ", ".join(kept.by_value)
            why = f"{names}: saved by value" if names else "there are steps that the script does not mark"
            self._tell_of_saves(
                f"{why}, so what is saved is copied into memory, and a restart goes on from the last save(): to repeat "
                f"no step call {'keep(step, …)' if names else 'should_stop(step)'} after each step"
            )

    def _tell_unnamed(self, step: int) -> None:
        """Log once that nothing is kept, because `load` was not given all objects that `save` will name."""
        if self._is_unnamed and not self._is_off and step > self._numbers.began + PROOF_STEPS:
            self._is_unnamed = False
            if self._rank == 0:
                process.log(
                    f"load() was not given all that is trained: until save() or keep() names it, nothing is kept in "
                    f"memory, and {self._otherwise}"
                )

    def _tell_of_saves(self, text: str) -> None:
        if not self._has_told_of_saves and self._rank == 0:
            self._has_told_of_saves = True
            process.log(text)

    def _tell_not_kept(self, why: str) -> None:
        """Log and report in the status that memory lacks some steps."""
        if not process.current.not_kept:
            process.current.not_kept = why
            if self._rank == 0:
                process.log(f"{why}; {self._otherwise}")

    def watched(self, kept: Kept) -> dict[str, Any]:
        """Values that are compared between a boundary and the next step, by name.

        Random states and buffers are those at the beginning of the next step, or the current ones if it has not begun.
        """
        begun = self._begun or self.places.marked
        if self._begun is None and self._notices_begin and not self.has_begun:
            begun = kept.buffers_as_they_are() | {RANDOM: random_states.mark(random_states.compact())}
        return self._watched_with(kept, begun, kept.settings())

    def _watched_with(self, kept: Kept, begun: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
        return {**begun, **settings, **kept.untrained()}

    def step_begins(self, sampler: Any = None) -> bool:
        """Called when the next step begins: random numbers and buffer changes from here on belong to it. Return True if
        a boundary is open.

        sampler: a batch is taken from this sampler. If its position is not kept, an evaluation may be using it.
        """
        kept, places = self.kept, self.places
        if kept is None or not places.is_open or self._is_off:
            return False
        # True if a forward pass came before the first batch, and no backward pass followed: it was an evaluation
        is_first = sampler is not None and self._repeated is None and not self.has_begun
        if self._begun is None or is_first:
            try:
                if sampler is None or sampler.is_placed or sampler in kept.samplers().values():
                    self._note_begin(kept, places, from_sampler=sampler is not None)
            except Exception as error:
                self.give_up(error)
        return True

    def _note_begin(self, kept: Kept, places: Places, *, from_sampler: bool) -> None:
        begun = kept.buffers_as_they_are() | {RANDOM: places.marked.get(RANDOM, 0)}
        # read random states only if a lost draw would do harm: the read takes a fifth of the cost per step
        if places.counts or not places.trusts(RANDOM):  # after save() we learn where the script draws
            begun[RANDOM] = random_states.mark(random_states.compact())
        self._notices_begin, self._begun = True, begun
        if from_sampler:  # a restart does not repeat changes made before a batch is taken
            settings = kept.settings() if places.doubted else {}
            self._repeated = set(kept.optimizers) - moved(places.marked, settings)
        is_loose = any(not places.trusts(name) and value != places.marked.get(name) for name, value in begun.items())
        self.shared.cells[LOOSE] = self._noted if is_loose else 0

    def _learn(self, kept: Kept, step: int, values: Mapping[str, Any], *, named: bool, counts: bool) -> None:
        """Learn where in its loop the script changes small values, and which buffers its forward pass changes.
        counts: see `Places`."""
        places = self.places
        if places.is_open and not named:
            return
        self._begun, self._repeated, self.has_called = None, None, False
        if places.is_open:
            if new := places.named(values, {kept.changed()} - {""}, counts=counts):
                self._tell_of_places(new, f"between should_stop({step}) or keep({step}, …) and save({step})")
        else:
            places.after_save(kept.samplers())
            self._check_samplers(kept, values)
            places.boundary(values, named=named, counts=counts)
        suspects = not counts and any(map(places.suspects, [RANDOM, *kept.buffered]))
        self.shared.cells[LOOSE] = step if suspects else 0

    def _check_samplers(self, kept: Kept, values: Mapping[str, Any]) -> None:
        """Check that a kept sampler provides the batches. Raises ReplacedError."""
        last = None if process.current.sampler is None else process.current.sampler()
        own, process.current.sampler = kept.samplers(), None
        if last is None or not own or last in own.values():
            return
        if not moved({name: self.places.marked.get(name) for name in own}, {name: values[name] for name in own}):
            raise ReplacedError(f"{', '.join(own)}: another sampler gives the batches than the one that save() has")

    def _tell_of_places(self, names: Collection[str], where: str) -> None:
        """Log that objects change between a boundary and the next step. where: between which calls."""
        if self._rank == 0:
            process.log(
                f"{', '.join(sorted(names))}: changed {where}. A restart within such a step does not use the memory, "
                f"and {self._otherwise}: call should_stop(step), or keep(step, …), as the last thing of each step"
            )

    def _leave(self, kept: Kept) -> None:
        """Find and log values that have changed between the boundary and the optimizer step that begins."""
        if not self.places.is_open:
            return
        values = self._watched_with(kept, self._begun or self.places.marked, kept.settings())
        repeated = {*kept.optimizers, RANDOM, *kept.buffered} if self._repeated is None else self._repeated
        new = self.places.step(values, repeated)
        if self.places.taken and self._repeated is None and self._rank == 0:  # otherwise they belong to the next step
            process.log(
                f"{', '.join(sorted(self.places.taken))}: changed between should_stop() or keep() and each "
                f"optimizer.step(). A restart repeats only changes that belong to the next step. If they belong to the "
                f"step before, as in an evaluation, call should_stop(step) or keep(step, …) after them"
            )
        if self.places.loose and self.copies is not None:
            self.copies.give_up_last()
        self._loose_steps = self._loose_steps + 1 if self.places.loose else 0
        if new:
            self._tell_of_places(new, "between should_stop() or keep() and the next optimizer.step()")
        if self._loose_steps == LOOSE_STEPS:
            names = ", ".join(sorted(self.places.loose))
            self._tell_not_kept(f"{names}: changed between should_stop() or keep() and the next optimizer.step()")

    def _check_number(self, step: int, named: bool) -> None:
        """Check that the script would pass the same step number to `save`, because `load` would return this number."""
        if self._is_off:
            return
        if why := self._numbers.problem(int(step), named=named, is_kept=self.kept is not None):
            self.shared.node[MISCOUNTED] = 1
            self._forget_assumed()
            self.turn_off(f"{why}: give both the number of steps made so far")

    @property
    def _copies_instead(self) -> bool:
        """True if only copies are kept, because survivors could not write a valid state."""
        return self.on_device or self.mode is Mode.COPYING

    def at(self, kept: Kept, step: int, named: bool, must_copy: bool = False) -> Boundary:
        def small() -> dict[str, Any]:
            small = ({} if self.on_device else kept.buffers()) | kept.settings() | self._place(kept)
            return self._slots.value(kept, random_states.compact(), small)

        return Boundary(kept, step, named, small, self.assumed, must_copy)

    def _place(self, kept: Kept) -> dict[str, Any]:
        """Return where in its step this rank is. The next generation checks that all ranks were at the same point."""
        sample = 0 if self.on_device else kept.sample()
        moved_ones = sorted(self.places.moved)
        moment = self.places.is_named + self.places.counts  # 0: should_stop(), 1: keep(), 2: save()
        place = {"named": moment, "moved": moved_ones, "sample": sample, LEARNED: self.places.learned}
        place["later"] = [name for name in [RANDOM, *kept.buffered] if self.places.suspects(name)]
        place |= {"of_0": kept.broadcast, "own": sorted(kept.with_own_buffers), "models": kept.models}
        return {PLACE: place | {"known": kept.known}}

    def _copy(self, own: Copies, at: Boundary) -> None:
        if own.instead and not self._stepped:
            own.again(at)
        else:
            self._stepped = False
            own.boundary(at)

    def _copy_because_of_changes(self, why: str) -> None:
        """Copy the state from now on, because parameters change after boundaries. why: for the log."""
        if self._store is None and self._world_size > 1:
            raise StateError(why)
        if self.copies is None:
            self.copies = Copies(self.shared, self._rank, self._world_size, self._store)
        self._sum = None
        self._to("changes")
        self.shared.forget_slot(EARLY)  # copies do not use it
        self.copies.begin_with_changes(why)

    def _note(
        self, kept: Kept, step: int, rng: dict[str, Any], settings: Mapping[str, Any], content: Mapping[str, Any]
    ) -> None:
        shared = self.shared
        if "cuda" in rng:
            raise StateError("the script uses a GPU, and its group was made for CPUs")
        self._early.boundary(content, rng, shared)
        self.has_begun = False
        with self.lock:
            kept.record()
        small = {**kept.buffers(), **settings, **self._place(kept)}
        self._slots.write(self._slot_to_write(step), step, kept, rng, small)
        with self.lock:
            if self.dirty_since:
                self.dirty_seconds = max(self.dirty_seconds, time.monotonic() - self.dirty_since)
            self._stepped = False
            self.names_each_step = step <= memory.step_of(shared.cells[CLOCK]) + 1
            shared.cells[CLOCK] = 2 * step
        if self.mode is not Mode.READY or not self._has_room_for(kept):
            self._arm(kept, step)
        elif memory.proves_again(step, shared.reserved()):
            self._sum = step, kept.total()

    def _slot_to_write(self, step: int) -> int:
        """Return the slot of the older boundary: two slots alternate. The same step goes to the same slot again."""
        if self._turn is not None and step == self._noted:
            return 1 - self._turn
        self._noted = step
        if self._turn is None:
            one, other = (self.shared.slot_version(slot) for slot in range(EARLY))
            self._turn = 0 if one is None or (other is not None and one < other) else 1
        turn, self._turn = self._turn, 1 - self._turn
        return turn

    def _is_proven(self, kept: Kept, step: int) -> bool:
        """True if it is proven that nothing large changes before the next step; otherwise sum the state of this
        boundary."""
        if self.shared.node[COPIES]:
            self._copy_because_of_changes(copies.CHANGES)
            return False
        if self.mode is Mode.PROVING:  # on all ranks, because equal sums show that they are replicas
            self._sum = step, kept.total()
        return self.mode is not Mode.PROVING

    def _has_room_for(self, kept: Kept) -> bool:
        """True if the state still fits. Optimizers allocate state when a parameter gets its first gradient."""
        count, self._tensors = self._tensors, kept.count_tensors()
        if self._tensors <= count or packed.pack(kept.large()).size <= self.shared.reserved():
            return True
        with self.lock:
            self._to("grown")
        return False

    def _arm(self, kept: Kept, step: int) -> None:
        """Offer the state to the agent if it is proven and has an area; without an area, reserve one in a thread."""
        if not self._is_proven(kept, step):
            return
        size = packed.pack(kept.large()).size
        if self.shared.reserved() >= size:
            self._to("reserved")
        elif self._room is None or not self._room.is_alive():
            self._room = threading.Thread(target=self._reserve, args=(size,), name="ddpjob-memory-room", daemon=True)
            self._room.start()

    def _reserve(self, size: int) -> None:
        """Reserve memory, in a thread: the kernel needs half a second for a large area."""
        with self._guarded():
            self.shared.take(memory.area_bytes(size), 1, later=0 if self.copies is None else memory.AREAS)
            with self.lock:  # has no effect if the objects, and so the proof, have changed
                self._to("reserved")

    # ---- the optimizer's step ------------------------------------------------------------------------------

    def before_step(self, optimizer: Any = None, *_: Any) -> None:
        """Called before each step of each optimizer of this process."""
        if self.kept is not None:
            self.kept.release()
        self._count_step(optimizer)
        if self.assumed and self.kept is not None and not self.kept.has(optimizer):
            self.forget_assumed()
        kept = self.kept
        if kept is None or self._is_off or self._stepped:
            if not self._is_off:
                self._other_step(optimizer)
            self._stepped = True
            if kept is None and optimizer is not None:
                self._makers.saw(optimizer)
            if kept is not None:
                kept.count_step(optimizer)
            return
        try:
            self._end_boundary(kept, optimizer)
        except Exception as error:
            self.give_up(error)
        self._makers.first(optimizer)
        self.has_begun = False
        kept.count_step(optimizer)
        while not self._may_step():
            time.sleep(AGAIN_SECONDS)  # the agent's signal follows

    def _may_step(self) -> bool:
        """Begin the step, unless the ranks are being stopped and the state before it is in memory already."""
        with self.lock:
            if self.survivor.is_done:
                return False
            self._stepped, self.dirty_since = True, time.monotonic()
            self.shared.cells[CLOCK] |= 1
        return True

    def _end_boundary(self, kept: Kept, optimizer: Any) -> None:
        """At the first optimizer step after a boundary, check the state, then make the copy valid or write EARLY."""
        if self.copies is not None:
            self.copies.count_saved()
        kept.check_counts()
        if self._makers.is_unknown(kept, optimizer):
            raise ReplacedError("an optimizer makes steps that save() was not given")
        self._leave(kept)
        if self._sum is not None:
            self._compare(kept, *self._sum)
        if self.copies is not None:
            self.copies.before_step(kept)
            if self.copies.changes:
                self._to("changes")
        if not (self._copies_instead or self.has_begun):
            self._early.write(kept, self._slots, self.shared)

    def _other_step(self, optimizer: Any) -> None:
        """Called at a step that follows another step without a boundary between: update copies and EARLY."""
        if self.copies is not None:
            with self._guarded():
                self.copies.before_other_step()
        if self.kept is not None and self._makers.again(optimizer):  # no backward pass will rewrite EARLY
            self._early.give_up(
                self.shared, "an optimizer makes several steps after one backward pass", RANDOM, FORWARDED
            )

    def _count_step(self, optimizer: Any) -> None:
        """Count the step. After two steps without a boundary, reset the load count: training does make progress."""
        if self._is_off:
            return
        kept = self.kept
        self._makers.step(kept, optimizer)
        if kept is None or kept.has(optimizer):
            self._numbers.step()
        if not self._unmarked:
            return
        self._is_copied = False
        made = [steps.one_more(optimizer) for steps in self._unmarked]
        if made[0] == 2 and self.shared.loaded is not None and self.shared.local_rank == 0:
            self.shared.set_loads(self.shared.loaded.version, 0)

    def _compare(self, kept: Kept, step: int, before: int) -> None:
        self._sum = None
        counted = not kept.changed() or (self.shared.loaded is not None and step == self.shared.loaded.version.step)
        if kept.total() != before or not counted:
            self.shared.node[PROVEN] = 0
            self._copy_because_of_changes(
                f"parameters or optimizer state changed between step {step} and the next optimizer.step()"
            )
            return
        self._proofs_left = max(0, self._proofs_left - 1)
        if self._proofs_left == 0:
            self._to("proven")
            self.shared.write_proof(step, before)
            self.shared.node[PROVEN] = 1 + self.shared.generation

    def _before_reduce(self, _parameter: Any) -> None:
        """Gradient hook, called in each backward pass before all of this rank's gradients can have reached the others.

        After that the other ranks may finish the step while this rank is killed in it.
        """
        kept = self.kept
        if kept is None or self._is_off:
            return
        self._numbers.has_worked = True
        self._makers.backward(has_stepped=self._stepped)
        self.has_begun |= not self._stepped
        if not self._copies_instead:
            try:
                self._early.write(kept, self._slots, self.shared, in_backward=True)
            except Exception as error:
                self.give_up(error)

    @contextlib.contextmanager
    def _guarded(self) -> Any:
        """Turn errors into "not kept": nothing in here may end a training that would succeed without it."""
        try:
            yield
        except Exception as error:
            self.give_up(error)

    def give_up(self, error: Exception) -> None:
        """Stop keeping the state: until the next boundary if the objects have other parameters now, until the next save
        if the script trains other objects than it passed, otherwise for good.
        """
        if not isinstance(error, OutgrownError | ReplacedError):
            self.turn_off(str(error) if isinstance(error, StateError) else f"{type(error).__name__}: {error}")
            return
        kept = self.kept
        self._prove_again()
        if isinstance(error, ReplacedError):
            until = ": the state is kept in memory again from the next save() or keep() on; until then"
        else:
            until = f" than before: until it was trained for {PROOF_STEPS} steps,"
            with contextlib.suppress(ReplacedError):
                self._outgrown = None if kept is None else kept.objects
        if isinstance(error, OutgrownError) and self.survivor.is_answering:
            process.log(f"rank {self._rank}: the state is not written: {error} than before; {self._otherwise}")
        elif self._rank == 0:
            process.log(f"{error}{until} {self._otherwise}")
