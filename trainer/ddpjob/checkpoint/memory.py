"""The rank's side of the memory that outlives it: after a failure the survivors write the state, nobody before it.

Between a boundary (`should_stop(step)`, `keep`, `save`) and the next `optimizer.step()` nothing changes parameters and
optimizer state, and a survivor cannot come to the end of that step without the rank that has failed. So at a boundary a
rank writes only what is small, into its slots of the agent's memory, and the rest when the agent orders it, or when it
ends by an exception. From the next `optimizer.step()` until the next boundary nothing is written.

That nothing large changes in between is not believed: on the first steps the bits are summed at both ends, and later
the parameters' version counters are compared, and some of their values. For a script in which it is otherwise, and for
a rank that trains alone, the state is copied while all goes well (`copies.py`).
"""

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from ddpjob import process, threads
from ddpjob.checkpoint import copies, packed, random_states, room
from ddpjob.checkpoint.copies import Boundary, Copies
from ddpjob.checkpoint.device_copies import DeviceCopies
from ddpjob.checkpoint.kept import Kept, OutgrownError
from ddpjob.checkpoint.shared import Shared, State
from ddpjob.checkpoint.streams import Streams
from ddpjob.core import memory
from ddpjob.core.memory import ANSWER, CLOCK, COPIES, EARLY, PID, PROVEN, RESERVED, SAVED, UNABLE, Version
from ddpjob.core.rules import RESUMABLE_EXIT_CODE
from ddpjob.errors import StateError
from ddpjob.reporting import termination

PROOF_STEPS = 3
AGAIN_SECONDS = 0.001
DIRTY_SECONDS = 0.05  # more than the optimizer's step has usually taken
TRIES_LEAST = 50  # to write the state; where the rank gets a processor it has hundreds
STILL_SECONDS = 0.05  # a part of 16 MiB takes 4 ms on an idle machine
HELD_UP = 4  # so many times that is waited, where the main thread does not wait for a peer
SLACK = 1.05  # of the area: optimizers make the state of a parameter when it first has a gradient


class Keeper:
    """What one process keeps in memory: the objects of one `Snapshot`."""

    def __init__(
        self,
        shared: Shared,
        rank: int,
        world_size: int,
        otherwise: str,
        store: Any = None,
        streams: Streams | None = None,
    ) -> None:
        """otherwise: what happens where nothing is kept, for the log. store: of the group. streams: of the device that
        the rank trains on, if it is not the CPU."""
        self._shared, self._rank, self._world_size, self._otherwise = shared, rank, world_size, otherwise
        self._kept: Kept | None = None
        self._assumed = False  # the objects are those of load(): save() has named none
        self._outgrown: Mapping[str, Any] | None = None  # they have other parameters now
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers that made steps without being named
        self._off = ""  # why nothing is kept
        self._store = store
        self._on_device = streams is not None
        self._copies = Copies(shared, rank, world_size, store) if world_size == 1 else None
        if streams is not None:
            self._copies = DeviceCopies(shared, rank, world_size, store, streams)
        self._lock = threading.Lock()  # held while parameters and optimizer state must not change
        self._stepped = True  # whether an optimizer has made a step since the last boundary
        self._versions: list[Any] = []
        self._early: dict[str, Any] | None = None  # the random states before the last step
        self._has_early = True
        self._proofs_left = 0 if shared.node[PROVEN] else PROOF_STEPS
        self._turn: int | None = None  # the slot of the next boundary
        self._sum: tuple[int, int] | None = None  # to be compared before the next step: its step, the sum
        self._room: threading.Thread | None = None
        self._resumed: tuple[int, int] = (0, 0)  # the step that was loaded from memory, and how often
        self._resumed_total = 0
        self._loaded: Version | None = None
        self._answered = threading.Lock()
        self._state: State | None = None  # what is being written
        self._moved = 0, 0.0  # how many parts were written, and since when
        self._tries = 0
        self._dirty_since = self._dirty_seconds = 0.0  # how long it takes from the optimizer's step to the boundary
        self._ends = False  # by an exception: no boundary follows
        self._told = False
        self._hooks: list[Any] = []
        self._pid = os.getpid()
        register_optimizer_step_pre_hook(self.before_step)
        threading.Thread(target=self._wait, name="ddpjob-memory", daemon=True).start()
        process.at_exit(self._at_exit, 40)

    @property
    def is_on(self) -> bool:
        """Whether it keeps something."""
        return self._kept is not None and not self._off

    def turn_off(self, why: str, *, quiet: bool = False) -> None:
        """From now on a restart goes on from the folder."""
        if not self._off:
            self._off = why or "memory=False"
            self._shared.cells[PID] = 0
            self._shared.forget_slots()
            if self._copies is not None:
                self._copies.stop()
            if not quiet:
                process.current.not_kept = why
                process.log(f"rank {self._rank}: the state is not kept in memory: {why}; {self._otherwise}")

    def register(self, objects: Mapping[str, Any]) -> None:
        """The objects that are kept from now on. Values are so only at the boundary at which they are named."""
        was_assumed, self._assumed = self._assumed, False
        if self._off or (self._kept is not None and self._kept.is_of(objects)):
            return
        with self._guarded():
            kept = Kept(objects)
            if was_assumed:
                self._forget_assumed()  # and what was proved of it: a copy that is averaged is another matter
            elif self._kept is not None and not kept.has_parts_of(self._kept):
                self._prove_again()
            self._keep(kept)

    def _keep(self, kept: Kept) -> None:
        with self._lock:  # what was noted until now is of other objects
            self._kept, self._outgrown, self._stepped = kept, None, True
            self._shared.cells[CLOCK] |= 1
        for hook in self._hooks:
            hook.remove()
        self._hooks = [
            last.register_post_accumulate_grad_hook(self._before_reduce)  # type: ignore[no-untyped-call]
            for last in kept.first_gradients
        ]
        if kept.by_value and not self._told and self._rank == 0:
            self._told = True
            process.log(
                f"{', '.join(kept.by_value)}: saved by value, so the memory has the state of the last save, not of "
                f"every step: give save() objects with state_dict(), or call keep(step, …) after each step"
            )

    def assume(self, objects: Mapping[str, Any]) -> None:
        """`load` has named these: until `save` names what there is, they are kept, if nothing else is trained."""
        if self._off or self._kept is not None:
            return
        with contextlib.suppress(StateError):  # save() says what is wrong with them
            if objects and Kept(objects).may_be_assumed():
                self.register(objects)
                self._assumed = True

    def forget_assumed(self) -> None:
        """What was assumed is wrong: nothing is kept until `save` names it."""
        if self._assumed:
            self._assumed = False
            self._forget_assumed()

    def _forget_assumed(self) -> None:
        self._prove_again()
        self._shared.forget_slots()
        if self._copies is not None:
            self._copies.forget()

    def _prove_again(self) -> None:
        """Nothing is kept, and what was proved is of other objects."""
        with self._lock:
            self._kept, self._outgrown, self._sum, self._stepped = None, None, None, True
            self._shared.cells[CLOCK] |= 1
            self._shared.cells[PID] = self._shared.node[PROVEN] = 0
            self._proofs_left = PROOF_STEPS
        if self._copies is not None:
            self._copies.give_up_last()

    def _has_outgrown(self, why: str) -> None:
        """The objects have other parameters than they had, so what is noted of them does not fit them."""
        kept = self._kept
        self._prove_again()
        self._outgrown = None if kept is None else kept.objects
        if self._answered.locked():  # a rank has failed
            process.log(f"rank {self._rank}: the state is not written: {why} than before; {self._otherwise}")
        elif self._rank == 0:
            process.log(f"{why} than before: until it was trained for {PROOF_STEPS} steps, {self._otherwise}")

    def _check_named(self, kept: Kept, optimizer: Any) -> None:
        """Whether the script trains with what it has named. Raises OutgrownError."""
        kept.check_counts()
        if optimizer is None or kept.has(optimizer) or optimizer in self._seen:
            return
        self._seen.add(optimizer)
        if kept.trains_with(optimizer):
            self._prove_again()
            if self._rank == 0:
                process.log(
                    f"an optimizer makes steps that save() was not given: the state is kept in memory again from the "
                    f"next save() or keep() on; until then {self._otherwise}"
                )

    def loads(self, version: Version) -> None:
        """All ranks load this state from memory."""
        self._loaded = version
        if self._copies is not None:
            self._copies.loaded = version

    def resumed(self, step: int, loads: int, total: int) -> None:
        """This state was loaded from memory, so often by now, and nothing has changed it yet. total: of its bits."""
        self._resumed, self._resumed_total = (step, loads), total
        if self._copies is not None:
            self._copies.resumed(step)

    def boundary(self, step: int, *, named: bool = False) -> None:
        """Parameters and optimizer state are those of this step. named: with all that the script keeps, values too."""
        if self._outgrown is not None and not self._off:
            with self._guarded():
                self._keep(Kept(self._outgrown))
        kept = self._kept
        if kept is None or self._off or os.getpid() != self._pid or not (self._stepped or self._copies_instead):
            return
        if kept.by_value and not named:
            return  # of another step than this one
        if self._assumed and not kept.may_be_assumed():
            self.forget_assumed()
            return
        with self._guarded():
            if not self._copies_instead:
                self._note(kept, int(step))
            elif self._on_device and self._stepped:
                self._versions = kept.versions()
                self._is_proven(kept, int(step))
            if self._copies is not None and (self._copies.instead or not self._proofs_left):
                self._copy(self._copies, kept, int(step), named)

    @property
    def _copies_instead(self) -> bool:
        """Whether copies are all that is kept, because survivors could not write what they hold."""
        return self._copies is not None and self._copies.instead

    def _at(self, kept: Kept, step: int, named: bool) -> Boundary:
        def small() -> dict[str, Any]:
            return self._slot(random_states.compact(), kept.small(buffers=not self._on_device))

        return Boundary(kept, step, named, small, self._assumed)

    def _copy(self, own: Copies, kept: Kept, step: int, named: bool) -> None:
        at = self._at(kept, step, named)
        if own.instead and not self._stepped:
            own.again(at)
        else:
            self._stepped = False
            own.boundary(at)

    def _copy_because_of_changes(self, why: str) -> None:
        """Parameters change between a boundary and the next step. why: for the log."""
        if self._copies is None:
            if self._store is None and self._world_size > 1:
                raise StateError(why)
            self._copies = Copies(self._shared, self._rank, self._world_size, self._store)
            self._copies.resumed(self._resumed[0])
            self._copies.loaded = self._loaded
        self._proofs_left, self._sum, self._shared.cells[PID] = 0, None, 0
        self._copies.begin_with_changes(why)

    def _note(self, kept: Kept, step: int) -> None:
        shared = self._shared
        rng = random_states.compact()
        if "cuda" in rng:
            raise StateError("the script uses a GPU, and its group was made for CPUs")
        if self._has_early and self._early is not None and rng != self._early:
            self._has_early = False  # what is drawn after the gradients is not known before them
            shared.forget_slot(EARLY)
        self._early = None
        shared.write_slot(self._slot_to_write(), packed.pack(self._slot(rng, kept.small())), step)
        with self._lock:
            if self._dirty_since:
                self._dirty_seconds = max(self._dirty_seconds, time.monotonic() - self._dirty_since)
            self._versions, self._stepped, self._state = kept.versions(), False, None
            shared.cells[CLOCK] = 2 * step
        if not shared.cells[PID]:
            self._arm(kept, step)

    def _slot_to_write(self) -> int:
        """That of the older boundary: the two are written in turns."""
        if self._turn is None:
            one, other = (self._shared.slot_version(slot) for slot in range(EARLY))
            self._turn = 0 if one is None or (other is not None and one < other) else 1
        turn, self._turn = self._turn, 1 - self._turn
        return turn

    def _slot(self, rng: Any, small: Any) -> dict[str, Any]:
        by_value = bool(self._kept and self._kept.by_value)
        return {"of": (self._rank, self._world_size), "by_value": by_value, "rng": rng, "small": small}

    def _is_proven(self, kept: Kept, step: int) -> bool:
        """Whether nothing large changes between a boundary and the next step; else see what there is at this one."""
        if self._shared.node[COPIES]:
            self._copy_because_of_changes(copies.CHANGES)
            return False
        if self._shared.node[PROVEN]:
            self._proofs_left = 0
        if self._proofs_left:
            self._sum = step, packed.total(packed.tensors_of(kept.large()))
        return not self._proofs_left

    def _arm(self, kept: Kept, step: int) -> None:
        """Nothing is promised to the agent before there is room, and proof."""
        if not self._is_proven(kept, step):
            return
        size = packed.pack(kept.large()).size
        if self._shared.node[RESERVED] >= size:
            self._shared.cells[PID] = os.getpid()
        elif self._room is None or not self._room.is_alive():
            self._room = threading.Thread(target=self._reserve, args=(size,), name="ddpjob-memory-room", daemon=True)
            self._room.start()

    def _reserve(self, size: int) -> None:
        """In a thread: the kernel needs half a second for a large area."""
        with self._guarded():
            while self._shared.node[RESERVED] < size:
                with self._shared.locked() as alone:
                    if alone and self._shared.node[RESERVED] < size:
                        size = int(size * SLACK)
                        if short := room.shortage(size):
                            process.current.limit_needed = short.limit_needed
                            raise StateError(short.why)
                        self._shared.reserve(size)
                        return
                time.sleep(AGAIN_SECONDS)

    # ---- the optimizer's step ------------------------------------------------------------------------------

    def before_step(self, optimizer: Any = None, *_: Any) -> None:
        """Called before each step of each optimizer of this process."""
        if self._assumed and self._kept is not None and not self._kept.has(optimizer):
            self.forget_assumed()
        kept = self._kept
        if kept is None or self._off or self._stepped or os.getpid() != self._pid:
            if self._copies is not None and not self._off and os.getpid() == self._pid:
                with self._guarded():
                    self._copies.before_other_step()
            self._stepped = True
            if kept is None and optimizer is not None:
                self._seen.add(optimizer)
            return
        with self._guarded():
            self._check_named(kept, optimizer)
            if self._kept is kept and self._sum is not None:
                self._compare(kept)
            if self._kept is kept and self._copies is not None:
                self._copies.before_step(kept)
            if self._kept is kept and not self._copies_instead:
                self._write_early(kept)
        with self._lock:
            self._stepped, self._dirty_since = True, time.monotonic()
            self._shared.cells[CLOCK] |= 1

    def _compare(self, kept: Kept) -> None:
        step, before = self._sum or (0, 0)
        self._sum = None
        counted = kept.versions() == self._versions or step == self._resumed[0]
        if packed.total(packed.tensors_of(kept.large())) != before or not counted:
            self._shared.node[PROVEN] = 0
            self._copy_because_of_changes(
                f"parameters or optimizer state changed between step {step} and the next optimizer.step()"
            )
            return
        self._proofs_left -= 1
        if self._proofs_left == 0:
            self._shared.write_proof(step, before)
            self._shared.node[PROVEN] = 1

    def _before_reduce(self, _parameter: Any) -> None:
        """Called in each backward, before this rank's gradients can all have reached the others: from then on they may
        make the step, and this rank be killed before it comes to it."""
        kept = self._kept
        if kept is None or self._off or self._stepped or self._copies_instead or os.getpid() != self._pid:
            return
        with self._guarded():
            self._write_early(kept)

    def _write_early(self, kept: Kept) -> None:
        """A rank that is killed before the next boundary leaves its random states; the others have the rest."""
        rng = random_states.compact() if self._has_early else None
        if rng is None or rng == self._early:
            return
        self._early = rng
        step = self._shared.cells[CLOCK] // 2 + 1
        self._shared.write_slot(EARLY, packed.pack(self._slot(rng, kept.buffers())), step)

    # ---- after a failure -----------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Until the agent closes its end of the pipe: a rank of the group has failed."""
        with contextlib.suppress(OSError):
            os.read(self._shared.pipe, 1)
            self.save()

    def _at_exit(self) -> None:
        error = termination.ending()
        if error is not None and termination.exit_code(error) not in (0, RESUMABLE_EXIT_CODE):
            self._ends = True
            self.save()

    def save(self) -> None:
        """Write the state, if it is clean, or becomes so in time; and tell the agent."""
        if os.getpid() != self._pid:
            return
        if self._on_device and self._copies is not None:
            self._copies.stop()  # the device may go on without the lost rank: nothing of that counts
            return
        with self._answered:
            cells = self._shared.cells
            if not cells[PID] or cells[ANSWER] != memory.NONE:
                return
            answer, began = None, time.monotonic()
            self._moved, self._tries = (0, began), 0
            with self._guarded():
                while answer is None and self._has_time(began):
                    answer = self._try_to_save(is_patient=self._has_time(began, 0.5))
                    self._tries += 1
                    if answer is None:
                        time.sleep(AGAIN_SECONDS)
            self._state = None
            cells[ANSWER] = answer or UNABLE

    def _has_time(self, began: float, part: float = 1.0) -> bool:
        """Whether that part of the time is not over. By tries too: a rank without a processor has only lost time."""
        size, now = self._shared.node[RESERVED], time.monotonic()
        is_early = now < (self._moved[1] if part == 1 else began) + part * memory.limit_seconds(size)
        return now < began + part * memory.longest_seconds(size) and (is_early or self._tries < part * TRIES_LEAST)

    def _try_to_save(self, *, is_patient: bool) -> int | None:
        """What is to be told to the agent; None: not yet."""
        shared, kept = self._shared, self._kept
        if kept is None or self._off or not shared.is_current:
            return UNABLE
        if self._copies is not None and (self._copies.instead or shared.node[COPIES]):
            return self._copies.finish(kept)
        if shared.node[COPIES]:
            return UNABLE
        with self._lock:
            clock = shared.cells[CLOCK]
            if not memory.is_clean(clock):
                return None if self._comes_to_a_boundary(kept) else UNABLE
            step = memory.step_of(clock)
            kept.check()
            self._check_unchanged(kept, step)
            own = Version(shared.attempt, shared.generation, step)
            if memory.is_there(shared.held(), own, assumed=self._assumed):
                return SAVED
            if is_patient and memory.turn(clock, shared.clocks_of_others()) == "wait":
                return None
            return self._write(kept, step)

    def _check_unchanged(self, kept: Kept, step: int) -> None:
        """Raises StateError where parameters are not those of this step."""
        if kept.versions() != self._versions and not self._is_as_loaded(kept, step):
            self._shared.node[COPIES] = memory.CHANGED  # from the next generation on
            raise StateError(f"parameters changed after step {step}, and by no optimizer.step()")

    def _is_as_loaded(self, kept: Kept, step: int) -> bool:
        """Whether the bits are those that were loaded: DistributedDataParallel writes the same ones again when it takes
        a model that was loaded before."""
        return step == self._resumed[0] and packed.total(packed.tensors_of(kept.large())) == self._resumed_total

    def _comes_to_a_boundary(self, kept: Kept) -> bool:
        """Whether it is worth to wait: the rank is within the optimizer's step, and no peer is needed to its end."""
        usual, taken = 2 * self._dirty_seconds + DIRTY_SECONDS, time.monotonic() - self._dirty_since
        if self._ends or kept.by_value or taken > HELD_UP * usual:
            return False
        return taken < usual or threads.would_run(self._pid, self._pid)

    def _write(self, kept: Kept, step: int) -> int | None:
        """Write what the other ranks of this node do not; None: the state is not whole yet."""
        shared, now = self._shared, time.monotonic()
        loads = self._resumed[1] if step == self._resumed[0] else 0
        if self._copies is not None and self._copies.write_now(self._at(kept, step, False), loads):
            return SAVED
        if (done := shared.parts_done(step)) != self._moved[0]:
            self._moved = done, now
        takes_over = now > self._moved[1] + STILL_SECONDS
        helps = memory.helps(shared.local_rank, shared.others(), len(os.sched_getaffinity(0)))
        if not (helps or takes_over) or not shared.has_work(step, takes_over=takes_over):
            return None
        if self._state is None or self._state.step != step:
            self._state = self._state_of(kept, step)
            self._check_unchanged(kept, step)  # the script may change them meanwhile; later the sum would not agree
        with shared.begun(self._state) as is_begun:
            if is_begun and shared.write_parts(self._state, takes_over=takes_over):
                return SAVED
        return None

    def _state_of(self, kept: Kept, step: int) -> State:
        state = packed.pack(kept.large())
        if state.size > self._shared.node[RESERVED]:
            raise StateError(f"it has grown to {state.size >> 20} MiB")
        resumed, loads = self._resumed
        return State(state, step, loads if step == resumed else 0, assumed=self._assumed)

    @contextlib.contextmanager
    def _guarded(self) -> Any:
        """Nothing here ends a training that goes well without it."""
        try:
            yield
        except OutgrownError as error:
            self._has_outgrown(str(error))
        except StateError as error:
            self.turn_off(str(error))
        except Exception as error:
            self.turn_off(f"{type(error).__name__}: {error}")
