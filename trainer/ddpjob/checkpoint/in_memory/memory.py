"""Keep the state of one rank in shared memory: after a failure each surviving rank can still write its state.

Flow: at the end of a step (a call of `should_stop(step)`, `keep` or `save`) `Keeper` writes only small values: random
states, buffers and settings. `Survivor` writes parameters and optimizer state after a failure. Before the optimizer
step the Keeper writes random states and buffers again (slot EARLY), for a rank that is killed before the step ends.

Proof: on the first PROOF_STEPS steps sums of all bits show that parameters do not change from the end of a step to the
next optimizer step; later version counters and samples do. docs/dev/state-in-memory.md explains why that suffices.

Life cycle: `door.py` creates one Keeper per process, for one `Snapshot`. The agent owns the memory and outlives it.

Drawbacks: the script must report the end of each step; the hooks run on every step of every optimizer; and there is
much mutable state here, because scripts call `should_stop` and `save` at different points of their loops.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ddpjob import process
from ddpjob.checkpoint.in_memory.by_cadence import copies
from ddpjob.checkpoint.in_memory.by_cadence.copies import Boundary, Copies
from ddpjob.checkpoint.in_memory.by_cadence.device_copies import DeviceCopies
from ddpjob.checkpoint.in_memory.by_cadence.streams import Streams
from ddpjob.checkpoint.in_memory.kept import Kept, OutgrownError, ReplacedError, may_be_assumed
from ddpjob.checkpoint.in_memory.mode import Mode
from ddpjob.checkpoint.in_memory.places import MARKED, SAVED
from ddpjob.checkpoint.in_memory.shared import AGAIN_SECONDS, Shared
from ddpjob.checkpoint.in_memory.slots import FORWARDED, LEARNED, PLACE, RANDOM, Slots
from ddpjob.checkpoint.in_memory.steps import ForwardPasses, Makers, Numbers, Unmarked
from ddpjob.checkpoint.in_memory.survivor import Present, Survivor
from ddpjob.checkpoint.state import half_done, packed, random_states
from ddpjob.checkpoint.state.alike import moved
from ddpjob.checkpoint.state.of_each_rank import outermost
from ddpjob.errors import StateError
from ddpjob_core import memory
from ddpjob_core.memory import CLOCK, COPIES, EARLY, LOOSE, MISCOUNTED, PROOF_STEP, PROVEN, Held

PROOF_STEPS = 3
SUMS_IN_BACKWARD = 2  # a step may have many micro-batches, and a sum reads the whole state
OTHERWISE = ["a restart begins at step 0", "a restart goes on from the last save"]
"""What the log says of a restart if memory has no state: without a folder, and with one."""
Pending = Callable[[Mapping[str, Any]], str]
"""Returns the name of a model with gradients that wait for an optimizer step; "" if there is none."""
LOOSE_STEPS = 2  # log a change after should_stop() after this many steps in a row; one step may be the end of an epoch


class Keeper:
    """Keeps the objects of one `Snapshot` in memory, for one process."""

    def __init__(
        self,
        shared: Shared,
        rank: int,
        world_size: int,
        store: Any,
        streams: Streams | None,
        pending: Pending,
        *,
        has_folder: bool,
    ) -> None:
        """store: the group's store. streams: CUDA streams of the rank's device, None for the CPU. has_folder: False if
        states are kept only in memory.
        """
        group = shared, rank, world_size, store
        own = Copies(*group, has_folder) if streams is None else DeviceCopies(*group, has_folder, streams)
        self.now = Present(shared, own, has_folder=has_folder)
        self._shared, self._places, self._rank = shared, self.now.places, rank
        self._otherwise = OTHERWISE[has_folder]
        self._outgrown: Mapping[str, Any] | None = None  # objects with replaced parameters; kept after this step
        self._slots = Slots(shared, rank, world_size)
        if (learned := self._slots.learned()) is not None:
            self._places.goes_on_from(learned)
        self._stepped = True  # True if an optimizer has stepped, but the script has not reported the end of the step
        self._numbers, self._makers, self._pending = Numbers(0), Makers(), pending
        # [0] counts optimizer steps between calls of should_stop(), keep() and save(), [1] those without should_stop().
        # The two counts are needed only if there is no folder.
        self._unmarked = [] if has_folder else [Unmarked(), Unmarked()]
        self._is_copied = False  # True if the saved state is copied, and no optimizer has stepped after that
        self._proofs_left = self._proofs_needed
        # (step, sum of all bits of its state, number of backward passes that check it); the next step checks it, too
        self._sum: tuple[int, int, int] | None = None
        self._room: threading.Thread | None = None
        self._has_told_of_saves = self._has_told_of_pending = False
        self._looks = 0  # 1: no loader was found while nothing was kept, so look once more; 2: do not look again
        self._is_unnamed = True  # True until save() or keep() is called, or the missing call is logged
        self._hooks: list[Any] = []
        self._passes = ForwardPasses(self._forward_begins, self._evaluates)
        self._pass = -1  # torch's number of the last backward pass; -1 if unknown
        register_optimizer_step_pre_hook(self.before_step)
        self.survivor = Survivor(self.now, self.give_up)

    @property
    def _proofs_needed(self) -> int:
        return 0 if 0 < self._shared.node[PROVEN] <= self._shared.generation else PROOF_STEPS

    @property
    def is_on(self) -> bool:
        """True if objects are kept in memory."""
        return self.now.kept is not None and not self.now.is_off

    def turn_off(self, why: str) -> None:
        """Stop keeping the state; from now on a restart loads from the folder."""
        self._passes.end()
        if not self.now.is_off:
            self.now.to("refused")
            self.now.copies.count_saved()
            self.now.copies.stop()
            self._shared.forget_slots(self.now.copies.saved)
            process.current.not_kept = why
            process.log(f"rank {self._rank}: the state is not kept in memory: {why}; {self._otherwise}")

    def register(self, objects: Mapping[str, Any], loaded: Mapping[str, Any] | None = None) -> None:
        """Keep these objects from now on. Plain values are captured only when the script passes them. loaded: the
        values that `load` has just returned from memory."""
        self._safely(self._note_epoch)
        if self.now.is_off:
            return
        if self._lacks_position:
            self._tell_of_loader()
            return
        was_assumed, self.now.assumed, self._is_unnamed = self.now.assumed, False, False
        self._safely(self._renew, objects, was_assumed, loaded)

    def _renew(self, objects: Mapping[str, Any], was_assumed: bool, loaded: Mapping[str, Any] | None) -> None:
        """Register these objects, unless only plain values are new."""
        kept = None if self.now.kept is None or loaded else self.now.kept.of(objects)
        if kept is None:
            self._register(objects, was_assumed, loaded)
        elif kept is not self.now.kept:
            self.now.living = None
            with self.now.lock:
                self._use(kept)

    def _use(self, kept: Kept) -> None:
        """Keep these objects; called with the lock held."""
        self.now.kept, self._outgrown, self._stepped = kept, None, True
        self._shared.cells[CLOCK] |= 1

    def _register(self, objects: Mapping[str, Any], was_assumed: bool, loaded: Mapping[str, Any] | None = None) -> None:
        kept = Kept(objects, loaded)
        if was_assumed:
            self._forget_assumed()  # the check begins again, because save() may get more objects than load() did
        elif self.now.kept is not None and not kept.has_parts_of(self.now.kept):
            self._prove_again()
        elif self.now.kept is not None and kept.watch.living() == self.now.kept.watch.living():
            kept.watch = self.now.kept.watch
        if self.now.kept is None or not kept.has_parts_of(self.now.kept):  # otherwise only plain values are new
            self._slots.forget_early()
        self.now.living = None
        with self.now.lock:
            self._use(kept)
            self.now.to("named")
            if not self._proofs_left:
                self.now.to("proven")
        for hook in self._hooks:
            hook.remove()
        self._hooks = [
            each.register_post_accumulate_grad_hook(self._before_reduce)  # type: ignore[no-untyped-call]
            for each in kept.first_gradients
        ]
        models = [each for each in objects.values() if isinstance(each, torch.nn.Module)]
        # A script may evaluate a model without its wrapper, or a part of it.
        self._passes.modules = {id(each) for model in models for each in (outermost(model), *model.modules())}
        if kept.by_value and self.now.has_folder:
            self._tell_of_saves(
                f"{', '.join(kept.by_value)}: saved by value, so memory has it only until the next optimizer step; "
                f"then {self._otherwise}. Give save() objects with state_dict(), or call keep(step, …) after each step"
            )

    def assume(self, objects: Mapping[str, Any]) -> None:
        """Keep the objects of `load` until the first `save` or `keep`, unless the script trains other objects."""
        if self.now.is_off or self.now.kept is not None or self._shared.node[MISCOUNTED]:
            return
        with contextlib.suppress(StateError):  # save() will report what is wrong with the objects
            if objects and may_be_assumed(objects):
                Kept(objects)
                self.register(objects)
                self.now.assumed = self._is_unnamed = True

    def forget_assumed(self) -> None:
        """Drop the objects of `load`, because the script trains others. Keep nothing until `save` or `keep`."""
        if self.now.assumed and not self.now.is_off:
            self.now.assumed = False
            self._forget_assumed()

    def _forget_assumed(self) -> None:
        self._prove_again()
        self._shared.forget_slots()
        self.now.copies.forget()

    def _prove_again(self) -> None:
        """Repeat the check of the first steps before a state is kept, because the objects are different now."""
        self._passes.end()
        with self.now.lock:
            self.now.kept, self._outgrown, self._sum, self._stepped = None, None, None, True
            self._shared.cells[CLOCK] |= 1
            self._shared.node[PROVEN], self._proofs_left = 0, PROOF_STEPS
            self.now.to("dropped")
        self.now.copies.give_up_last()

    def goes_on(self, step: int, held: Held | None = None) -> None:
        """Called when `load` returns this step: forget earlier step numbers. held: the state, if it is from memory."""
        self._numbers = Numbers(step)
        if held is not None:
            self._shared.loaded, self._proofs_left = held._replace(loads=held.loads + 1), self._proofs_needed

    def boundary(self, step: int, by: int = MARKED) -> None:
        """Called at the end of a step: parameters and optimizer state are those of this step. by: see `Places`."""
        named = by != MARKED
        for steps in self._unmarked[: 1 + named]:
            steps.boundary(saved=by == SAVED)
        if self.now.is_off:
            return
        if self._outgrown is not None:
            self._safely(self._register, self._outgrown, False)
        if why := self._numbers.problem(int(step), named=named, is_kept=self.now.kept is not None):
            # `load` would return a number that `should_stop` and `save` count differently
            self._shared.node[MISCOUNTED] = 1
            self._forget_assumed()
            self.turn_off(f"{why}: pass the number of steps made so far to both")
        self._safely(self._look_around, by)
        kept = self.now.kept
        if kept is None or self.now.mode is Mode.OFF:
            self._tell_unnamed(step)
            return
        must_copy = by == SAVED and self._must_copy(kept, step)
        # Within a gradient accumulation keep the first random states: a restart repeats all micro-batches of the step.
        is_renamed = named and not self._places.has_begun
        if not (self._stepped or self.now.copies.instead or must_copy or is_renamed) or (kept.by_value and not named):
            return  # no new state, or the last plain values belong to another step
        if self._unmarked and self._has_other(step):
            return
        if self.now.assumed and not kept.may_be_assumed():
            self.forget_assumed()
            return
        self._safely(self._take_in, kept, int(step), by, must_copy)

    def _look_around(self, by: int) -> None:
        """After the first optimizer step look for what the script has made after load(): a model's wrapper, and the
        DataLoader that provides the batches. by: the call that marks the step. Raises ReplacedError."""
        kept = self.now.kept
        if not self._slots.made or self._looks > (kept is not None):
            return
        if kept is not None and kept.was_wrapped():
            self._register(kept.objects, was_assumed=False)
        within = half_done.is_within_epoch()
        self._looks = 1 if kept is None and within is None else 2
        self._places.has_plain_loader = within is not None
        self._places.saves_within_epoch |= by != MARKED and within is True
        if self._lacks_position and kept is not None:
            self.forget_assumed()
            self._prove_again()
            self._tell_of_loader()

    def _tell_of_loader(self) -> None:
        self._is_unnamed = False
        self._tell_not_kept(
            "a DataLoader provides the batches, and no save() or keep() within an epoch has shown yet that the script "
            "can resume there (with a GlobalBatchSampler it can)"
        )

    def _note_epoch(self) -> None:
        """Called when the script saves: note if it does so within an epoch of a plain DataLoader."""
        places = self._places
        if places.has_plain_loader and not places.saves_within_epoch and half_done.is_within_epoch():
            places.saves_within_epoch, process.current.not_kept = True, ""

    @property
    def _lacks_position(self) -> bool:
        """True if the script may be unable to resume within an epoch, because it has saved only at the ends of epochs.
        An object of its own may know the position of its DataLoader, but need not."""
        places = self._places
        return places.has_plain_loader and not places.saves_within_epoch and self.now.has_folder

    def _has_other(self, step: int) -> bool:
        """True if memory has a copy with this step number, and an optimizer has stepped after it.

        The first copy stays: a second copy would mix values and random states of one step with parameters of another.
        """
        saved = self.now.copies.saved
        return saved is not None and saved.step == step and not self._is_copied

    def _must_copy(self, kept: Kept, step: int) -> bool:
        """True if the saved state is lost with the next step unless it is copied now."""
        if not self._unmarked or not self._unmarked[bool(kept.by_value)].are_unmarked:
            return False
        if not self.now.copies.instead and memory.step_of(self._shared.cells[CLOCK]) != step:
            self._stepped = True  # otherwise the state is not copied if should_stop() got another step number for it
        self._is_copied |= not self._has_other(step)
        return True

    def _take_in(self, kept: Kept, step: int, by: int, must_copy: bool) -> None:
        self.now.thread = threading.get_ident()
        if self._stepped and self._makers.has_hooked and not must_copy and (waits := self._pending(kept.objects)):
            self._tell_of_pending(waits, step)
            self._makers.boundary()
            return
        if self._slots.made:
            kept.loaded = {}
        settings, named = kept.settings(), by != MARKED
        if self._makers.boundary():
            self._tell_not_kept(
                "gradients are summed over the ranks after an optimizer's step has begun and before should_stop(), as "
                "with LBFGS or a second optimizer: a rank that fails there leaves no complete state"
            )
        rng, content = random_states.compact(), kept.buffers_as_they_are()
        values = kept.watched(content | {RANDOM: random_states.mark(rng)}, settings)
        self._learn(kept, step, values, by)
        own = self.now.copies
        if not own.instead and (self._stepped or named):
            self._note(kept, step, rng, settings, content)
        elif self._stepped:
            kept.watch.record()
            self.now.living = kept.watch.living()
            if own.on_device:
                self._is_proven(kept, step)
        if self._places.moved:
            # the last copy lacks changes made between should_stop() and save()
            own.renew(self.at(kept, step, by, must_copy))
        if own.instead or must_copy or (own.by_cadence and self.now.mode is not Mode.PROVING):
            is_again = own.instead and not self._stepped
            self._stepped = False
            (own.again if is_again else own.boundary)(self.at(kept, step, by, must_copy))
        if must_copy and not self.now.is_off and not process.current.not_kept:
            names = ", ".join(kept.by_value)
            why = f"{names}: saved by value" if names else "there are steps that the script does not mark"
            self._tell_of_saves(
                f"{why}, so what is saved is copied into memory, and a restart goes on from the last save(): to repeat "
                f"no step call {'keep(step, …)' if names else 'should_stop(step)'} after each step"
            )

    def _tell_of_pending(self, name: str, step: int) -> None:
        """Log once that a step is not kept; from the second such step on the job's status shows it, too."""
        why = (
            f"{name}: gradients wait for optimizer.step() at the end of step {step}: such a step is not kept. Call "
            f"should_stop(), keep() or save() right after an optimizer's step, or zero_grad() before, if they are not "
            f"used"
        )
        if self._has_told_of_pending:
            process.current.not_kept = process.current.not_kept or why
        elif self._rank == 0:
            process.log(f"{why}; {self._otherwise}")
        self._has_told_of_pending = True

    def _tell_unnamed(self, step: int) -> None:
        """Log once that nothing is kept, because `load` was not given all objects that the script trains."""
        if self._is_unnamed and self.now.mode is not Mode.OFF and step > self._numbers.began + PROOF_STEPS:
            self._is_unnamed = False
            if self._rank == 0:
                process.log(
                    f"load() did not get all objects that are trained: until save() or keep() gets them, nothing is "
                    f"kept in memory, and {self._otherwise}"
                )

    def _tell_of_saves(self, text: str) -> None:
        if not self._has_told_of_saves and self._rank == 0:
            self._has_told_of_saves = True
            process.log(text)

    def _tell_not_kept(self, why: str) -> None:
        """Log that memory lacks some steps, and report it in the job's status."""
        if not process.current.not_kept:
            process.current.not_kept = why
            if self._rank == 0:
                process.log(f"{why}; {self._otherwise}")

    def step_begins(self, sampler: Any = None) -> bool:
        """Called when the next step begins: random numbers and buffer changes from here on belong to the next step.
        Return True between the end of a step and the next optimizer step.

        sampler: a batch is taken from this sampler. If its position is not kept, an evaluation may be using it.
        """
        kept, places = self.now.kept, self._places
        if kept is None or not places.is_open or self.now.is_off:
            return False
        # True at the first batch: a forward pass before that batch was an evaluation, because no backward pass followed
        is_first = sampler is not None and places.repeated is None and not places.has_begun
        if places.begun is None or is_first:
            self._safely(self._note_begin, kept, sampler)
        return True

    def _note_begin(self, kept: Kept, sampler: Any) -> None:
        places = self._places
        if not (sampler is None or sampler.is_placed or sampler in kept.samplers().values()):
            return
        begun = kept.buffers_as_they_are() | {RANDOM: places.marked.get(RANDOM, 0)}
        # Read random states only if a lost draw would do harm, because that read takes a fifth of the cost per step,
        # or after save(): a change then shows where the script draws numbers.
        if places.by == SAVED or not places.trusts(RANDOM):
            begun[RANDOM] = random_states.mark(random_states.compact())
        places.notices_begin, places.begun = True, begun
        if sampler is not None:  # a restart does not repeat changes made before a batch is taken
            settings = kept.settings() if places.doubted else {}
            places.repeated = set(kept.optimizers) - moved(places.marked, settings)
        self._passes.end()
        is_loose = places.is_unsaved
        is_loose |= any(value != places.marked.get(name) and not places.trusts(name) for name, value in begun.items())
        if self._shared.cells[LOOSE] == self._slots.step:  # the script may have changed something after an evaluation
            is_loose |= bool(places.unsettled(kept.watched(begun)))
        self._shared.cells[LOOSE] = self._slots.step if is_loose else 0

    def _forward_begins(self) -> None:
        self._places.has_called |= self.step_begins()

    def _evaluates(self) -> None:
        """Called before a forward pass without gradients between the end of a step and the next step. An evaluation may
        draw random numbers, and the script may act on its result. A restart would repeat neither."""
        places = self._places
        if not self.now.is_off and places.is_open and places.begun is None and places.by != SAVED:
            self._shared.cells[LOOSE] = self._slots.step

    def _learn(self, kept: Kept, step: int, values: Mapping[str, Any], by: int) -> None:
        """Learn where in its loop the script changes small values, and which buffers its forward pass changes."""
        places = self._places
        for each, name in kept.buffered.items():
            if name not in kept.wrapped and (was := places.marked.get(each)):
                places.varied |= {f"{key} of {name}" for key, now in values[each].items() if was.get(key, now) != now}
        if places.is_open and by == MARKED:
            return
        if places.is_open:
            if new := places.named(values, {kept.watch.changed()} - {""}, by):
                self._tell_of_places(new, f"between should_stop({step}) or keep({step}, …) and save({step})")
        else:
            if kept.sampled or process.current.sampler is not None:
                samplers = kept.samplers()
                places.after_save(samplers)
                self._check_samplers(samplers, values)
            else:
                places.unsaved_steps, places.is_unsaved = 0, False
            places.boundary(values, by)
            self._passes.forget(is_step=self._slots.made == 1)
        self._passes.watch()
        is_loose = places.is_unsaved or places.suspects([RANDOM, *kept.buffered])
        self._shared.cells[LOOSE] = step if by != SAVED and is_loose else 0

    def _check_samplers(self, own: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        """Check that a kept sampler provides the batches. own: the kept samplers. Raises ReplacedError, StateError."""
        last = None if process.current.sampler is None else process.current.sampler()
        process.current.sampler = None
        unsaved = None if own or getattr(last, "is_placed", True) or half_done.has_position(values) else last
        self._places.is_unsaved = unsaved is not None and unsaved.may_be_trained
        self._check_unsaved(unsaved is not None and unsaved.is_trained)
        if last is None or not own or last in own.values():
            return
        if not moved({name: self._places.marked.get(name) for name in own}, {name: values[name] for name in own}):
            raise ReplacedError(f"{', '.join(own)}: the batches come from another sampler than the one given to save()")

    def _check_unsaved(self, is_unsaved: bool) -> None:
        """Check that the state has a sampler's position. is_unsaved: the last batch came from an unsaved sampler whose
        batches are trained. Raises ReplacedError, StateError."""
        self._places.unsaved_steps = self._places.unsaved_steps + 1 if is_unsaved else 0
        if self._places.unsaved_steps > 1:
            raise (ReplacedError if self.now.assumed else StateError)(
                "the batches come from a GlobalBatchSampler that load() and save() do not get, so a restart within an "
                "epoch may train its first batches again"
            )

    def _tell_of_places(self, names: Collection[str], where: str) -> None:
        """Log that the script changes objects after the end of a step. where: between which two calls."""
        if self._rank == 0:
            process.log(
                f"{', '.join(sorted(names))}: changed {where}. A restart within such a step does not use the memory, "
                f"and {self._otherwise}: call should_stop(step), or keep(step, …), as the last thing of each step"
            )

    def _leave(self, kept: Kept) -> None:
        """Find and log small values that have changed between the end of the last step and this optimizer step."""
        places = self._places
        self._passes.end()
        if not places.is_open:
            return
        values = kept.watched(places.begun or places.marked)
        repeated = {*kept.optimizers, RANDOM, *kept.buffered} if places.repeated is None else places.repeated
        new = places.step(values, repeated)
        if places.taken and places.repeated is None and self._rank == 0:  # no batch showed where the step begins
            process.log(
                f"{', '.join(sorted(places.taken))}: changed between should_stop() or keep() and each "
                f"optimizer.step(). A restart repeats only changes that belong to the next step. If they belong to the "
                f"step before, as in an evaluation, call should_stop(step) or keep(step, …) after them"
            )
        if places.loose:
            self.now.copies.give_up_last()
        if new:
            self._tell_of_places(new, "between should_stop() or keep() and the next optimizer.step()")
        places.loose_steps = places.loose_steps + 1 if places.loose else 0
        if places.loose_steps == LOOSE_STEPS:
            names = ", ".join(sorted(places.loose))
            self._tell_not_kept(f"{names}: changed between should_stop() or keep() and the next optimizer.step()")

    def at(self, kept: Kept, step: int, by: int, must_copy: bool) -> Boundary:
        def write(slot: int) -> None:
            small = ({} if self.now.copies.on_device else kept.buffers()) | kept.settings() | self._place(kept)
            self._slots.write(slot, step, kept, random_states.compact(), small)

        return Boundary(kept, step, by, write, self.now.assumed, must_copy)

    def _place(self, kept: Kept) -> dict[str, Any]:
        """Describe at which call of its step this rank is. After a restart, all ranks must agree on that call."""
        places, of_0 = self._places, kept.broadcast
        return {
            PLACE: {
                memory.NAMED: places.by,
                memory.MOVED: sorted(places.moved),
                memory.SAMPLE: b"" if self.now.copies.on_device else kept.watch.sampled,
                LEARNED: places.learned,
                memory.AFTER: sorted(self._slots.changed),
                memory.LATER: places.suspects([RANDOM, *kept.buffered]),
                "of_0": of_0,
                "own": sorted(kept.wrapped.difference(of_0)),
                "models": kept.models,
                memory.KNOWN: kept.known,
                memory.ASSUMED: self.now.assumed,
                "varied": places.varied,
            }
        }

    def _copy_because_of_changes(self, step: int | None = None) -> None:
        """Copy the state from now on, because parameters change after the end of a step. step: None if another rank, or
        an earlier generation, has found this."""
        changed = f"parameters or optimizer state changed between step {step} and the next optimizer.step()"
        self._sum, self._shared.node[PROVEN] = None, 0
        self.now.copies.begin_with_changes(copies.CHANGES if step is None else changed)
        self.now.to("changes")
        self._shared.forget_slot(EARLY)  # copies do not use it

    def _note(
        self, kept: Kept, step: int, rng: dict[str, Any], settings: Mapping[str, Any], content: Mapping[str, Any]
    ) -> None:
        shared, now = self._shared, self.now
        if "cuda" in rng:
            raise StateError("the script uses a GPU, and its group was made for CPUs")
        self._slots.begin(content, rng)
        self._places.has_begun = False
        with now.lock:
            kept.watch.record()
            now.living = kept.watch.living()
        small = {**kept.buffers(), **settings, **self._place(kept)}
        self._slots.write_boundary(step, kept, rng, small)
        with now.lock:
            if now.dirty_since:
                now.dirty_seconds = max(now.dirty_seconds, time.monotonic() - now.dirty_since)
            self._stepped = False
            now.names_each_step = step <= memory.step_of(shared.cells[CLOCK]) + 1
            shared.cells[CLOCK] = 2 * step
        if now.mode is not Mode.READY or kept.watch.has_grown():
            self._arm(kept, step)
        if now.mode is Mode.READY and (
            self._makers.has_more_passes or memory.proves_again(step, shared.reserved()) or kept.watch.was_rebound()
        ):
            self._sum = step, kept.total(), SUMS_IN_BACKWARD

    def at_boundary(self) -> tuple[int, dict[str, Any], dict[str, Any]] | None:
        """Return number, small values and random states of the end of the last step; None if a slot lacks them, or an
        optimizer has stepped since."""
        value = self._slots.read_boundary() if self.is_on and not (self._stepped or self.now.copies.instead) else None
        if value is None:
            return None
        del value["small"][PLACE]
        return self._slots.step, value["small"], random_states.expanded(value["rng"])

    def _is_proven(self, kept: Kept, step: int) -> bool:
        """True if only optimizers change parameters. If that is not known yet, sum the bits of this state."""
        if self._shared.node[COPIES]:
            self._copy_because_of_changes()
            return False
        if self.now.mode is Mode.PROVING:  # on each rank: equal sums show that the ranks are replicas
            self._sum = step, kept.total(), SUMS_IN_BACKWARD
        return self.now.mode is not Mode.PROVING

    def _arm(self, kept: Kept, step: int) -> None:
        """Once it is known that only optimizers change parameters, reserve memory; become READY if it is reserved.
        Optimizers allocate more state when a parameter gets its first gradient."""
        if not self._is_proven(kept, step):
            return
        size = packed.pack(kept.large()).size
        has_room = self._shared.reserved() >= size
        with self.now.lock:
            self.now.to("reserved" if has_room else "grown")
        if not has_room and (self._room is None or not self._room.is_alive()):
            args = self._reserve, size
            self._room = threading.Thread(target=self._safely, args=args, name="ddpjob-memory-room", daemon=True)
            self._room.start()

    def _reserve(self, size: int) -> None:
        """Reserve memory for the state. Runs in a thread, because the kernel needs half a second for a large state."""
        own = self.now.copies
        self._shared.take(memory.area_bytes(size), 1, later=memory.AREAS if own.by_cadence or own.saved else 0)
        with self.now.lock:  # no effect if other objects are kept by now
            self.now.to("reserved")

    # ---- the optimizer's step ------------------------------------------------------------------------------

    def before_step(self, optimizer: Any, *_: Any) -> None:
        """Hook before each step of any optimizer: count the step, and check the state if a new step begins."""
        self.now.living = None
        if self.now.is_off:
            return
        kept = self.now.kept
        own = None if kept is None else kept.watch.counters_of(optimizer)
        is_own = None if kept is None else own is not None
        if self.now.assumed and is_own is False:
            self.forget_assumed()
            kept = is_own = None
        self._makers.step(optimizer, is_own)
        if is_own is not False:
            self._numbers.step()
        if self._unmarked:
            self._count_unmarked(optimizer)
        if kept is None or self._stepped:
            self._other_step(optimizer)
            self._stepped, self._slots.made = True, self._slots.made + 1
            if own is not None:
                own.steps += 1
            return
        self._safely(self._end_boundary, kept, None if is_own else optimizer)
        self._slots.made += 1
        self._makers.first(optimizer)
        self._places.has_begun = False
        while not self._may_step(own):
            time.sleep(AGAIN_SECONDS)  # until the agent ends this process by a signal

    def _may_step(self, own: Any) -> bool:
        """Begin the step and return True; False if the ranks are being stopped and memory has the last state."""
        with self.now.lock:
            if self.survivor.is_done:
                return False
            if own is not None:
                own.steps += 1  # not earlier: a survivor would take the step for a change by the script
            self._stepped, self.now.dirty_since = True, time.monotonic()
            self._shared.cells[CLOCK] |= 1
        return True

    def _end_boundary(self, kept: Kept, other: Any) -> None:
        """Called when the first optimizer of a new step steps: check that parameters are unchanged, then make the last
        copy valid, or write random states and buffers to the slot EARLY. other: this optimizer if it is not kept."""
        self.now.copies.count_saved()
        kept.check_counts()
        if other is not None and self._makers.is_unknown(kept, other):
            raise ReplacedError("an optimizer that save() was not given makes steps")
        self._leave(kept)
        if self._sum is not None:
            self._compare(kept, *self._sum[:2])
        self.now.copies.before_step(kept)
        if self.now.copies.changes:
            self.now.to("changes")
        if not (self.now.copies.instead or self._places.has_begun):
            self._slots.write_early(kept)

    def _other_step(self, optimizer: Any) -> None:
        """Called before a second optimizer step, if the script has not reported the end of the first one."""
        self._safely(self.now.copies.before_other_step)
        if self.now.kept is not None and self._makers.again(optimizer):  # no backward pass has written EARLY again
            self._slots.give_up_early("an optimizer makes several steps after one backward pass", RANDOM, FORWARDED)

    def _count_unmarked(self, optimizer: Any) -> None:
        """Count an optimizer step. After two of them without a call of `should_stop`, `keep` or `save`, reset the load
        count, because the training does make progress."""
        self._is_copied = False
        made = [steps.one_more(optimizer) for steps in self._unmarked]
        if made[0] == 2 and self._shared.loaded is not None and self._shared.local_rank == 0:
            self._shared.set_loads(self._shared.loaded.version, 0)

    def _compare(self, kept: Kept, step: int, before: int) -> None:
        self._sum = None
        loaded = self._shared.loaded
        counted = not kept.watch.changed() or (loaded is not None and step == loaded.version.step)
        if kept.total() != before or not counted:
            self._copy_because_of_changes(step)
            return
        self._proofs_left = max(0, self._proofs_left - 1)
        if self._proofs_left == 0:
            self.now.to("proven")
            self._shared.record(PROOF_STEP, step, before)  # to check later that ranks are replicas
            self._shared.node[PROVEN] = 1 + self._shared.generation

    def _before_reduce(self, _parameter: Any) -> None:
        """Gradient hook: write random states and buffers before the other ranks can have all gradients of this rank.

        With all gradients, the other ranks may finish the step even if this rank is killed in it.
        """
        if (now := torch._C._current_graph_task_id()) == self._pass != -1:
            return  # another parameter has got a gradient first
        kept, self._pass = self.now.kept, now
        if kept is None or self.now.is_off:
            return
        self._numbers.has_worked = True
        self._makers.backward(has_stepped=self._stepped)
        self._places.has_begun |= not self._stepped
        if not self.now.copies.instead:
            self._safely(self._in_backward, kept)

    def _in_backward(self, kept: Kept) -> None:
        """Write EARLY. In the first backward passes of a step that is proved compare the sum, too: adversarial training
        changes weights for one backward pass, and puts them back before the optimizer's step."""
        if self._sum is not None and self._sum[2]:
            step, total, left = self._sum
            self._sum = step, total, left - 1
            if kept.watch.total() != total:  # does not check for new parameters: the last save must count before that
                self._copy_because_of_changes(step)
                return
        self._slots.write_early(kept, in_backward=True)

    def _safely(self, work: Callable[..., Any], *args: Any) -> None:
        """Call this function. After an error the state is not kept: a training that would succeed without memory must
        not end because of it."""
        try:
            work(*args)
        except Exception as error:
            self.give_up(error)

    def give_up(self, error: Exception) -> None:
        """Stop keeping the state. Keep it again after the next step if parameters were replaced (OutgrownError), after
        the next `save` if the script trains other objects (ReplacedError), and otherwise never.
        """
        if not isinstance(error, OutgrownError | ReplacedError):
            self.turn_off(str(error) if isinstance(error, StateError) else f"{type(error).__name__}: {error}")
            return
        kept, self._is_unnamed = self.now.kept, False
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
