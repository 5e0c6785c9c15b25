"""What a rank does after a failure: a thread of it writes the state that it holds, if nothing has changed that since
the last boundary, and tells the agent. So does a rank that ends by an exception, on its way out, and without a folder
one that was told to stop.

`memory.py` knows what is kept and what may be written; `shared.py` has the parts that ranks of a node write.
"""

import abc
import contextlib
import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpjob import process, threads
from ddpjob.checkpoint.in_memory.copies import Boundary, Copies
from ddpjob.checkpoint.in_memory.kept import Kept, OutgrownError, ReplacedError
from ddpjob.checkpoint.in_memory.places import Places
from ddpjob.checkpoint.in_memory.shared import Shared
from ddpjob.checkpoint.state import packed
from ddpjob.errors import StateError
from ddpjob.reporting import termination
from ddpjob_core import memory
from ddpjob_core.memory import ANSWER, CLOCK, COPIES, PID, SAVED, UNABLE, WROTE, Held, Version
from ddpjob_core.rules import RESUMABLE_EXIT_CODE

_FORWARD, _BACKWARD = DistributedDataParallel.forward.__code__, torch.autograd.backward.__code__
AGAIN_SECONDS = 0.001
DIRTY_SECONDS = 0.05  # more than the optimizer's step has usually taken
TRIES_LEAST = 50  # to write the state; where the rank gets a processor it has hundreds
HELD_UP = 4  # so many times that is waited, where the main thread does not wait for a peer


class Survivor(abc.ABC):
    """A rank as it is between two boundaries, and what it does when another one has failed."""

    def __init__(self, shared: Shared, own: Copies | None, *, on_device: bool, has_folder: bool) -> None:
        self._shared, self._copies, self._on_device, self._has_folder = shared, own, on_device, has_folder
        self._kept: Kept | None = None
        self._assumed = False  # the objects are those of load(): save() has named none
        self._off = False  # for good
        self._lock = threading.Lock()  # held while parameters and optimizer state must not change
        self._resumed: tuple[int, int] = (0, 0)  # the step that was loaded from memory, and how often
        self._resumed_total = 0
        self._dirty_since = self._dirty_seconds = 0.0  # how long it takes from the optimizer's step to the boundary
        self._names_each_step = False  # the script: values too, at the last boundary and at the step before it
        self._answered = threading.Lock()
        self._tries, self._wrote = 0, (0, 0.0)  # WROTE as it was seen last, and since when
        self._ends = False  # by an exception: no boundary follows
        self._is_asked = False  # by its agent, to write the state
        self._is_armed = False  # there is room, and proof that nothing large changes between boundary and step
        self._places = Places()
        self._thread = threading.get_ident()  # that trains
        self._has_begun = False  # a backward pass, since the last boundary
        self._pid = os.getpid()

    def _begin(self) -> None:
        threading.Thread(target=self._wait, name="ddpjob-memory", daemon=True).start()
        process.at_exit(self._at_exit, 40)

    @abc.abstractmethod
    def turn_off(self, why: str) -> None:
        """From now on a restart goes on from the folder."""

    @abc.abstractmethod
    def _has_outgrown(self, why: str) -> None:
        """The objects have other parameters than they had."""

    @abc.abstractmethod
    def _drop(self, why: str) -> None:
        """The script trains with other objects."""

    @abc.abstractmethod
    def _watched(self, kept: Kept) -> Mapping[str, Any]:
        """What is compared between a boundary and the next step."""

    @abc.abstractmethod
    def _at(self, kept: Kept, step: int, named: bool) -> Boundary:
        """What this rank would be at."""

    def _wait(self) -> None:
        """Until the agent closes its end of the pipe: a rank of the group has failed."""
        with contextlib.suppress(OSError):
            os.read(self._shared.pipe, 1)
            self._is_asked = True
            if self._kept is not None:
                self._kept.release()
            self.save()

    def _at_exit(self) -> None:
        error = termination.ending()
        failed = error is not None and termination.exit_code(error) not in (0, RESUMABLE_EXIT_CODE)
        # All ranks stop where one pod is told to go, and the agents of the others hold what is in their memory.
        is_saved = self._has_folder and not process.current.save_failed
        if failed or (process.current.stopped_at is not None and not is_saved):
            self._ends = True
            self.save()
        if os.getpid() == self._pid:  # a fork has the lock as it was, and no such thread
            self._pid = 0  # multiprocessing calls this once more
            self._answered.acquire()  # a thread that comes back from C++ when the interpreter has ended aborts it

    def save(self) -> None:
        """Write the state, if it is clean, or becomes so in time; and tell the agent."""
        if os.getpid() != self._pid or not self._shared.has_agent:
            return
        if self._on_device and self._copies is not None:
            self._copies.stop()  # the device may go on without the lost rank: nothing of that counts
            return
        with self._answered:
            shared, cells = self._shared, self._shared.cells
            if not cells[PID] or cells[ANSWER] != memory.NONE:
                return
            answer, began = None, time.monotonic()
            self._tries, self._wrote = 0, (shared.node[WROTE], began)
            with self._guarded():
                while answer is None and self._has_time(began):
                    answer = self._try_to_save(began)
                    if answer is None:
                        self._pause()
            cells[ANSWER] = answer or UNABLE

    def _has_time(self, began: float, part: float = 1.0) -> bool:
        """Whether that part of the time is not over. By tries too: a rank without a processor has only lost time."""
        size, now, wrote = self._shared.reserved(), time.monotonic(), self._shared.node[WROTE]
        if wrote != self._wrote[0]:  # another rank is writing
            self._wrote = wrote, now
        is_early = now < (self._wrote[1] if part == 1 else began) + part * memory.limit_seconds(size)
        return now < began + part * memory.longest_seconds(size) and (is_early or self._tries < part * TRIES_LEAST)

    def _pause(self) -> None:
        self._tries += 1
        time.sleep(AGAIN_SECONDS)

    def _try_to_save(self, began: float) -> int | None:
        """What is to be told to the agent; None: not yet. began: when it was asked."""
        shared, kept = self._shared, self._kept
        if kept is None or self._off or not shared.is_current:
            return UNABLE
        if self._copies is not None and self._copies.finish_saved():
            return SAVED
        kept.check_gone()
        if self._places.is_open and (answer := self._unsettled(kept, began)) != SAVED:
            if answer == UNABLE and self._copies is not None:
                self._copies.give_up_last()
            return answer
        if self._copies is not None and (self._copies.instead or shared.node[COPIES]):
            return self._copies.finish(kept)
        if shared.node[COPIES] or not self._is_armed:
            return UNABLE
        with self._lock:
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
            return SAVED if self._is_there(step) else self._write(kept, step)

    def _unsettled(self, kept: Kept, began: float) -> int | None:
        """SAVED if the last boundary has all that a folder would have; UNABLE if it has not; None if that is not known
        yet. began: when this rank was asked."""
        places, why = self._places, ""
        try:
            if names := places.unsettled(self._watched(kept)):
                why = f"{', '.join(names)}: changed after should_stop()"
        except RuntimeError:  # the script changes a dict meanwhile
            return None if self._has_time(began, 0.5) else UNABLE
        if not why and not places.is_settled(kept.idle) and not self._is_in_step():
            if self._has_time(began, 0.5):
                return None
            why = "the script is between should_stop() and the next step, where more may follow"
        if why:
            process.log(f"the state is not written: {why}")
        return UNABLE if why else SAVED

    def _is_in_step(self) -> bool:
        """Whether the thread that trains has begun the next step: it is in a forward or backward pass of the model."""
        frame = sys._current_frames().get(self._thread)
        while frame is not None and not self._has_begun:
            if frame.f_code is _FORWARD and frame.f_locals["self"].module.training:
                return True
            if frame.f_code is _BACKWARD:
                return True
            frame = frame.f_back
        return self._has_begun

    def _turn_to_write(self, clock: int, began: float) -> str:
        """As `memory.turn`, for half of the time, and as long as what it would wait for is not there."""
        living, gone = self._shared.clocks_of_others()
        if self._ends:  # it comes to no boundary any more
            gone = []
        furthest = memory.next_boundary(max([clock, *living, *map(memory.passed, gone)]))
        if not self._has_time(began, 0.5) or self._is_there(furthest):
            return "write"
        return memory.turn(clock, living, gone)

    def _is_there(self, step: int) -> bool:
        """Whether the memory has what ranks have at this step."""
        own = Version(self._shared.attempt, self._shared.generation, step)
        return memory.is_there(self._shared.held(), own, assumed=self._assumed)

    def _check_unchanged(self, kept: Kept, step: int) -> None:
        """Raises StateError where parameters are not those of this step.

        Of what was loaded the bits count: DistributedDataParallel writes the same ones again when it takes a model, and
        a script may change the optimizer's state before its first step. Nodes that had the state have it still.
        """
        if step == self._resumed[0]:
            if packed.total(packed.tensors_of(kept.large())) != self._resumed_total:
                raise StateError(f"the state changed after step {step} was loaded, and by no optimizer.step()")
        elif name := kept.changed():
            self._shared.node[COPIES] = memory.CHANGED  # from the next generation on
            what = name if name == "parameters" else f"{name}: its state"
            raise StateError(f"{what} changed after step {step}, and by no optimizer.step()")

    def _comes_to_a_boundary(self, kept: Kept) -> bool:
        """Whether it is worth to wait: the rank is within the optimizer's step, and no peer is needed to its end."""
        usual, taken = 2 * self._dirty_seconds + DIRTY_SECONDS, time.monotonic() - self._dirty_since
        if self._ends or (kept.by_value and not self._names_each_step) or taken > HELD_UP * usual:
            return False
        return taken < usual or threads.would_run(self._pid, self._pid)

    def _write(self, kept: Kept, step: int) -> int | None:
        """Write the state; None while another rank of this node is writing. If that one dies, this one writes."""
        shared, (resumed, loads) = self._shared, self._resumed
        loads = loads if step == resumed else 0
        if self._copies is not None and self._copies.write_now(self._at(kept, step, False), loads):
            return SAVED
        with shared.locked() as alone:
            if not alone:
                return None
            if not self._is_there(step):
                state = packed.pack(kept.large())
                if state.size > shared.reserved():
                    room = shared.reserved()
                    raise StateError(f"it has grown to {state.size} bytes since room was made for {room}")
                threads = packed.threads(1, state.size)
                version = Version(shared.attempt, shared.generation, step)
                held = Held(version, loads, state.size, packed.total(state.tensors, threads), self._assumed)
                self._check_unchanged(kept, step)  # the script may change them meanwhile: then the sum does not agree
                shared.write_rescued(state, held, threads)
        return SAVED

    @contextlib.contextmanager
    def _guarded(self) -> Any:
        """Nothing here ends a training that goes well without it."""
        try:
            yield
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        if isinstance(error, OutgrownError):
            self._has_outgrown(str(error))
        elif isinstance(error, ReplacedError):
            self._drop(str(error))
        elif isinstance(error, StateError):
            self.turn_off(str(error))
        else:
            self.turn_off(f"{type(error).__name__}: {error}")
