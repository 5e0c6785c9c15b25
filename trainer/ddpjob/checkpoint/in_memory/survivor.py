"""After a failure a thread of each surviving rank writes the state, if it is still the state of the last complete step.

Flow: docs/dev/state-in-memory.md. A rank that ends by an exception also writes its state at exit. So does a rank that
stops on request, if there is no folder or its last save has failed.

Life cycle: `memory.Keeper` creates one Survivor per process. The thread is a daemon and runs until the process exits.
The Survivor reads the `Present`, which the Keeper writes.

Drawbacks: the thread races with the training thread. A lock and the CLOCK cell in shared memory protect only against
optimizer steps. Other changes by the script are found by comparing version counters before and after the write.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from ddpjob import process, threads
from ddpjob.checkpoint.in_memory.by_cadence.copies import Copies
from ddpjob.checkpoint.in_memory.kept import Kept
from ddpjob.checkpoint.in_memory.mode import Event, Mode, after
from ddpjob.checkpoint.in_memory.places import Places
from ddpjob.checkpoint.in_memory.shared import AGAIN_SECONDS, Shared
from ddpjob.checkpoint.in_memory.slots import RANDOM
from ddpjob.checkpoint.state import packed, random_states
from ddpjob.errors import StateError
from ddpjob.reporting import termination
from ddpjob_core import memory
from ddpjob_core.heartbeat import FAILED
from ddpjob_core.memory import ANSWER, CLOCK, COPIES, LOOSE, PID, SAVED, UNABLE, WROTE, Held, Version
from ddpjob_core.rules import RESUMABLE_EXIT_CODE

_BACKWARD = torch.autograd.backward.__code__
DIRTY_SECONDS = 0.05  # seconds to wait for the end of an optimizer step, which usually takes less
TRIES_LEAST = 50  # attempts to write, even after the time limit; a rank that gets CPU time makes hundreds
HELD_UP = 4  # a main thread that is waiting for CPU time may need this many times the usual duration of a step


class Present:
    """What a survivor needs to write the state. The training thread sets it, and the survivor's thread reads it."""

    def __init__(self, shared: Shared, copies: Copies, *, has_folder: bool) -> None:
        self.shared, self.copies, self.has_folder = shared, copies, has_folder
        self.mode, self.places, self.thread, self.pid = Mode.EMPTY, Places(), threading.get_ident(), os.getpid()
        self.kept: Kept | None = None
        self.living: Any = None
        """Optimizers and averages at the end of a step, which keep their state alive after the script's main() has
        returned. None after the next step has begun, to notice that the script drops one."""
        self.assumed = False
        """True if the objects are those of load(), because the script has not called save() yet."""
        self.lock = threading.Lock()
        """Lock, held while parameters and optimizer state must not change."""
        self.dirty_since = self.dirty_seconds = 0.0
        """Time of the last optimizer step, and the longest time from such a step to the end of it, in seconds."""
        self.names_each_step = False
        """True if the script passes plain values at every step."""
        self.is_asked = False
        """True if the agent has requested the state by closing its pipe."""

    @property
    def is_off(self) -> bool:
        """True if keeping was turned off, or in a forked process, whose objects do not belong to this training."""
        return self.mode is Mode.OFF or os.getpid() != self.pid

    def to(self, event: Event) -> None:
        """Enter the mode that follows this event. The agent waits only for ranks whose mode is READY."""
        before, self.mode = self.mode, after(self.mode, event)
        if before is not self.mode or event == "dropped":
            self.shared.cells[PID] = self.pid if self.mode is Mode.READY and not self.is_asked else 0

    def watched(self, kept: Kept) -> dict[str, Any]:
        """Small values by name, to see what the script has changed after the end of a step.

        Random states and buffers are those at the beginning of the next step, or the current ones if it has not begun.
        """
        places = self.places
        if places.begun is None and places.notices_begin and not places.has_begun:
            return kept.watched(kept.buffers_as_they_are() | {RANDOM: random_states.mark(random_states.compact())})
        return kept.watched(places.begun or places.marked)


class Survivor:
    """Writes this rank's state when another rank has failed, and at its own end."""

    def __init__(self, now: Present, give_up: Callable[[Exception], None]) -> None:
        """give_up: called with an error because of which the state cannot be kept."""
        self._now, self._give_up = now, give_up
        self._answered = threading.Lock()
        self._tries, self._wrote = 0, (0, 0.0)  # (last value of WROTE, time of its last change)
        self._ends = False  # True if the process ends by an exception, so that no step follows
        threading.Thread(target=self._wait, name="ddpjob-memory", daemon=True).start()
        process.at_exit(self._at_exit, 40)

    @property
    def is_done(self) -> bool:
        """True if all ranks are being stopped, and the memory has this rank's state: a further step would be lost.

        False if another rank has completed a later step than this rank: the memory needs the state of that step.
        """
        shared, clock = self._now.shared, self._now.shared.cells[CLOCK]
        if not process.current.cells[FAILED] or not memory.is_clean(clock) or not shared.has_agent:
            return False
        return self._is_there(memory.step_of(clock)) and memory.turn(clock, *shared.clocks_of_others()) != "wait"

    @property
    def is_answering(self) -> bool:
        """True while this rank writes its state or waits until it may write."""
        return self._answered.locked()

    def _wait(self) -> None:
        """Wait for the failure of a rank, after which the agent closes its end of the pipe. Then write the state."""
        with contextlib.suppress(OSError):
            os.read(self._now.shared.pipe, 1)
            self._now.is_asked, self._now.living = True, None
            self.save()

    def _at_exit(self) -> None:
        error = termination.ending()
        failed = error is not None and termination.exit_code(error) not in (0, RESUMABLE_EXIT_CODE)
        # Write the state also after a requested stop: if only one pod ends, the other pods keep it in their memory.
        is_saved = self._now.has_folder and not process.current.save_failed
        if failed or (process.current.stopped_at is not None and not is_saved):
            if failed:  # the traceback has the variables of the script, so it has replaced what is dropped
                self._now.living = None
            self._ends = True
            self.save()
        if os.getpid() == self._now.pid:  # skip it in a forked child, whose copy of the lock may be locked for ever
            self._now.pid = 0  # multiprocessing calls this function a second time
            self._now.copies.stop()
            # Block the threads here, because a return from torch's C++ code after the interpreter's end would abort.
            for lock in (self._answered, self._now.copies.in_torch):
                lock.acquire()

    def save(self) -> None:
        """Write the state if the last step is complete, or becomes complete in time, and answer the agent."""
        if os.getpid() != self._now.pid or not self._now.shared.has_agent:
            return
        if self._now.copies.on_device:
            # The device may have made steps without the failed rank, so its current state is not used.
            self._now.copies.stop()
            return
        with self._answered:
            shared, cells = self._now.shared, self._now.shared.cells
            if not cells[PID] or cells[ANSWER] != memory.NONE:
                return
            answer, began = None, time.monotonic()
            self._tries, self._wrote = 0, (shared.node[WROTE], began)
            try:  # an error here must not end a training that would succeed without memory
                while answer is None and self._has_time(began):
                    answer = self._try_to_save(began)
                    if answer is None:
                        self._pause()
            except Exception as error:
                self._give_up(error)
            cells[ANSWER] = answer or UNABLE

    def _has_time(self, began: float, part: float = 1.0) -> bool:
        """True until this part of the time limit is over. A rank that gets no CPU time has more time."""
        size, now, wrote = self._now.shared.reserved(), time.monotonic(), self._now.shared.node[WROTE]
        if wrote != self._wrote[0]:  # another rank is writing
            self._wrote = wrote, now
        is_early = now < (self._wrote[1] if part == 1 else began) + part * memory.limit_seconds(size)
        return now < began + part * memory.longest_seconds(size) and (is_early or self._tries < part * TRIES_LEAST)

    def _pause(self) -> None:
        self._tries += 1
        time.sleep(AGAIN_SECONDS)

    def _try_to_save(self, began: float) -> int | None:
        """Return the answer for the agent (SAVED or UNABLE); None to try again. began: time of the agent's request."""
        shared, kept = self._now.shared, self._now.kept
        if kept is None or self._now.mode is Mode.OFF or not shared.is_current:
            return UNABLE
        if self._now.copies.count_saved():
            return SAVED
        kept.check_gone()
        if self._now.places.is_open and (answer := self._unsettled(kept, began)) != SAVED:
            if answer == UNABLE:
                self._now.copies.give_up_last()
            return answer
        if self._now.copies.instead or shared.node[COPIES]:
            return self._now.copies.finish(kept)
        if self._now.mode is not Mode.READY:
            return UNABLE
        with self._now.lock:
            clock = shared.cells[CLOCK]
            if not memory.is_clean(clock):
                return None if self._comes_to_a_boundary(kept) else UNABLE
            step = memory.step_of(clock)
            kept.check()
            self._check_unchanged(kept, step)
            while (turn := self._turn_to_write(clock, began)) == "stay":
                self._pause()
            if turn == "wait":
                return None
            answer = SAVED if self._is_there(step) else self._write(kept, step)
        return None if answer == SAVED and self._comes_further(clock, began) else answer

    def _unsettled(self, kept: Kept, began: float) -> int | None:
        """Check that memory has the same small values as a save to the folder would have. Return SAVED if it has them,
        UNABLE if not, None if that is not known yet. began: time of the agent's request.
        """
        shared, places, why = self._now.shared, self._now.places, ""
        step = memory.step_of(shared.cells[CLOCK])
        try:
            if names := places.unsettled(self._now.watched(kept)):
                kept.check()  # raises if the model was moved to another device, which also changes its buffers
                why = f"{', '.join(names)}: changed after should_stop() or keep()"
                if places.begun is None:  # otherwise the next step has begun meanwhile
                    shared.cells[LOOSE] = step  # no other rank has this rank's change
        except RuntimeError:  # the script is changing a dict while this thread reads it
            return None if self._has_time(began, 0.5) else UNABLE
        is_settled = places.is_settled(kept.idle) and shared.cells[LOOSE] != step
        if not why and not is_settled and not self._is_in_step():
            if self._has_time(began, 0.5):
                return None
            why = "the script is between should_stop() or keep() and the next step, where it may still change values"
        if why:
            process.log(f"the state is not written: {why}")
        return UNABLE if why else SAVED

    def _is_in_step(self) -> bool:
        """True if a forward pass of the model, or a backward pass, has begun the next step."""
        frame = sys._current_frames().get(self._now.thread)
        has_begun = self._now.places.has_called or self._now.places.has_begun
        while frame is not None and not has_begun:
            has_begun, frame = frame.f_code is _BACKWARD, frame.f_back
        return has_begun

    def _turn_to_write(self, clock: int, began: float) -> str:
        """Return "write", "wait" or "stay" as `memory.turn` does. Always return "write" after half of the time limit,
        or if the memory already has the newest state that any rank can reach."""
        living, gone = self._now.shared.clocks_of_others()
        if self._ends:  # this rank will complete no further step
            gone = []
        furthest = memory.next_boundary(max([clock, *living, *map(memory.passed, gone)]))
        if not self._has_time(began, 0.5) or self._is_there(furthest):
            return "write"
        return memory.turn(clock, living, gone)

    def _comes_further(self, clock: int, began: float) -> bool:
        """True if this rank may soon write the state of the next step, because a rank was killed after that step's
        gradients were summed. Until then the memory has the state before it, because the rest of the step may need all
        ranks."""
        gone = self._now.shared.clocks_of_others()[1]
        return not self._ends and any(other > clock for other in gone) and self._has_time(began, 0.5)

    def _is_there(self, step: int) -> bool:
        """True if the memory already has the state of this step."""
        own = Version(self._now.shared.attempt, self._now.shared.generation, step)
        return memory.is_there(self._now.shared.held(), own, assumed=self._now.assumed)

    def _check_unchanged(self, kept: Kept, step: int) -> None:
        """Raise StateError if the parameters have changed after this step.

        After a load the bits are compared, not the version counters. DistributedDataParallel writes the same values
        again when it wraps a model (_sync_module_states, torch/nn/parallel/distributed.py:1066, torch 2.13.0), and a
        script may change the optimizer's state before its first step. If the bits differ, nothing is lost: the nodes
        still have the state that was loaded.
        """
        loaded = self._now.shared.loaded
        if loaded is not None and step == loaded.version.step:
            if packed.total(packed.tensors_of(kept.large())) != loaded.total:
                raise StateError(f"the state changed after step {step} was loaded, but not in optimizer.step()")
        elif name := kept.watch.changed():
            self._now.shared.node[COPIES] = memory.CHANGED  # tell the next generation to make copies
            what = name if name == "parameters" else f"{name}: its state"
            raise StateError(f"{what} changed after step {step}, but not in optimizer.step()")

    def _comes_to_a_boundary(self, kept: Kept) -> bool:
        """True if the rank is in optimizer.step(), and will soon complete its step without the other ranks."""
        usual, taken = 2 * self._now.dirty_seconds + DIRTY_SECONDS, time.monotonic() - self._now.dirty_since
        if self._ends or (kept.by_value and not self._now.names_each_step) or taken > HELD_UP * usual:
            return False
        return taken < usual or threads.would_run(self._now.pid, self._now.pid)

    def _write(self, kept: Kept, step: int) -> int | None:
        """Write the state and return SAVED. Return None while another rank of this node is writing the state; if that
        rank dies, the next attempt of this rank writes."""
        shared, loaded = self._now.shared, self._now.shared.loaded
        loads = loaded.loads if loaded is not None and step == loaded.version.step else 0
        with shared.locked() as alone:
            if not alone:
                return None
            if not self._is_there(step):
                state = packed.pack(kept.large())
                if state.size > shared.reserved():
                    room = shared.reserved()
                    raise StateError(f"the state has grown to {state.size} bytes, but {room} are reserved")
                threads = packed.threads(1, state.size)
                version = Version(shared.attempt, shared.generation, step)
                held = Held(version, loads, state.size, packed.total(state.tensors, threads), self._now.assumed)
                self._check_unchanged(kept, step)  # a change during the write would make the checksum wrong
                shared.write_rescued(state, held, threads)
        return SAVED
