"""`should_stop()`: one rank is told to stop (SIGTERM), and all ranks stop after the same step.

In the training loop, after each step and on every rank:

    stop = ddpjob.should_stop(step)
    if stop or step % 50 == 0:
        snapshot.save(step, model=model, optimizer=optimizer, sampler=sampler)
    if stop:
        raise ddpjob.Stopped(step)

How they agree, through the store where the group met. The rank that is told says so there. As soon as a rank knows, it
promises not to pass its next call of `should_stop` before the answer, and says which step that is; whoever promises
last sets the answer, the highest of these steps. No rank can have passed it, and every rank can still reach it: the
promise is given by a thread of its own, also while the training waits in a collective for a rank that has promised.
A rank that has left the group in order promises never to stop, and then the others finish as well.

Nothing of this costs a collective: a step pays for a lock, and the thread asks the store twice a second.
"""

import atexit
import contextlib
import os
import select
import signal
import sys
import threading
import time
from typing import Any

from ddpjob.core import rules, stall_limits
from ddpjob.errors import RendezvousError
from ddpjob.reporting import termination

POLL_SECONDS = 0.5
POLL_SECONDS_ASKED = 0.02
# The threads of living ranks answer at their next poll. Without an answer a rank is gone and nothing can be saved
# together: then SIGTERM ends the process, so that a failed group restarts at once and not after its whole grace.
AGREE_SECONDS = 5.0
NEVER = 1 << 62

_ASKED, _HERE, _AT, _STEP = "stop/asked", "stop/here", "stop/at", "stop/step/{}"


class Stopped(SystemExit):
    """Ends a training that was told to stop and has saved `step`: exit code 75, which is to be resumed, no failure."""

    def __init__(self, step: int) -> None:
        global _stopped_raised
        super().__init__(rules.RESUMABLE_EXIT_CODE)
        self.step = step
        _stopped_raised = True


def should_stop(step: int) -> bool:
    """Whether to save and end after this step: True on every rank after the same step, once any rank got SIGTERM.

    step  steps made so far, counted as for `progress`. Call it on every rank after the same steps, from the main
          thread, and end by `raise Stopped(step)` when it says True.

    From the first call on SIGTERM no longer ends this process at once, unless the script has a handler of its own: that
    one is left alone, and this rank only follows the others. Raises RendezvousError where a rank was told to stop and
    the others did not agree within the time-out of a step.
    """
    global _agreement, _stopped_at
    if _agreement is None:
        _agreement = _begin()
    if not _agreement.reached(step):
        return False
    _stopped_at = step
    return True


def ignore_sigterm(_worker_id: int = 0) -> None:
    """For processes that a rank needs until it stops: `DataLoader(..., worker_init_fn=ddpjob.ignore_sigterm)`.

    torchrun sends SIGTERM to a rank and to all that the rank has started. A DataLoader whose worker ends by it raises
    in the training, which then cannot save. The workers end with their rank in any case.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def stopped_at() -> int | None:
    """The step at which `should_stop` has said True."""
    return _stopped_at


def told_to_leave() -> bool:
    """Whether SIGTERM came once more, after `leave`: a rank that has stopped need not wait for one that is gone."""
    return _told_to_leave


def leave() -> None:
    """The group is about to be left: whoever is told now need not wait for this rank."""
    global _agreement, _told_to_leave
    agreement, _agreement, _told_to_leave = _agreement, None, False
    if agreement is not None:
        agreement.close()
        if _stopped_at is None:
            _stop_listening()


class _Agreement:
    """One group's way to one step; `reached` is called by the training, all else happens in the thread."""

    def __init__(self, store: Any, rank: int, world_size: int, limit_seconds: float) -> None:
        self._store = store  # None: alone
        self._rank, self._world_size = rank, world_size
        self._limit_seconds = limit_seconds
        self._lock = threading.Lock()
        self._passed = -1
        self._promised = False
        self._decided = threading.Event()
        self._at = NEVER
        self._told_at: float | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._watch, name="ddpjob-stop", daemon=True)
        self._thread.start()

    def reached(self, step: int) -> bool:
        with self._lock:
            if not self._promised:
                self._passed = step
                return False
        if not self._decided.wait(self._limit_seconds):
            raise RendezvousError(
                f"rank {self._rank}: a rank was told to stop, and the {self._world_size} ranks did not agree on a step "
                f"within {self._limit_seconds:g} s: one of them is gone (DistStoreError)."
            )
        return step >= self._at

    def close(self) -> None:
        self._closing = True
        _ring()
        self._thread.join(AGREE_SECONDS)
        with contextlib.suppress(RuntimeError):
            self._promise(NEVER)

    def _watch(self) -> None:
        try:
            while not self._closing and not self._decided.is_set():
                self._listen(POLL_SECONDS_ASKED if self._promised else POLL_SECONDS)
                if not self._closing:
                    self._look()
        except RuntimeError:  # the store is gone, and rank 0 with it
            self._decide(NEVER)
            while not self._closing:
                self._listen(None)
                if self._told_at is not None:
                    self._give_up()

    def _listen(self, seconds: float | None) -> None:
        if _heard_sigterm(seconds) and self._told_at is None:
            self._told_at = time.monotonic()
            if self._store is not None:
                self._store.set(_ASKED, "1")

    def _look(self) -> None:
        if not self._promised and (self._told_at is not None or self._others_ask()):
            self._promise(None)
        if self._promised and self._store is not None and self._store.check([_AT]):
            self._decide(int(self._store.get(_AT)))
        elif self._told_at is not None and time.monotonic() > self._told_at + AGREE_SECONDS:
            self._give_up()

    def _others_ask(self) -> bool:
        return self._store is not None and bool(self._store.check([_ASKED]))

    def _promise(self, step: int | None) -> None:
        """Not to pass this step before the answer; by default the next at which the training asks."""
        with self._lock:
            if self._promised:
                return
            self._promised = True
            mine = self._passed + 1 if step is None else step
        if self._store is None:
            self._decide(mine)
            return
        self._store.set(_STEP.format(self._rank), str(mine))
        if self._store.add(_HERE, 1) == self._world_size:
            steps = [int(self._store.get(_STEP.format(rank))) for rank in range(self._world_size)]
            self._store.set(_AT, str(max(steps)))

    def _decide(self, at: int) -> None:
        self._at = at
        self._promised = True
        self._decided.set()

    def _give_up(self) -> None:
        if self._decided.is_set() and self._at != NEVER:
            return
        _say(f"rank {self._rank} was told to stop, and a rank that must agree is gone: ended without saving")
        os._exit(128 + signal.SIGTERM)  # a thread cannot restore the signal's own action


# ---- the place of this process -----------------------------------------------------------------------------


def _begin() -> _Agreement:
    from ddpjob.reporting.progress import where

    global _stopped_at, _stopped_raised
    _stopped_at, _stopped_raised = None, False
    place = where(os.environ)
    store = None if place.world_size == 1 else _store()
    if place.world_size == 1 or store is not None:
        _start_listening()
    util = sys.modules.get("multiprocessing.util")
    if util is not None:
        util.Finalize(None, _end_as_resumable, exitpriority=5)  # after the group is left (join.py uses 10)
    return _Agreement(store, place.rank, place.world_size, _limit_seconds())


def _store() -> Any:
    """Where the group met: by `init`, else as the script made it."""
    init = sys.modules.get("ddpjob.group.join")
    store = None if init is None else init.store_of(init.active())
    if store is not None:
        return store
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_initialized():
        return None
    return dist.PrefixStore("ddpjob", dist.distributed_c10d._get_default_store())


def _limit_seconds() -> float:
    init = sys.modules.get("ddpjob.group.join")
    world = None if init is None else init.active()
    return (
        2 * stall_limits.PAUSE_SECONDS if world is None else world.timeout_step_seconds
    )  # the others may be in a pause


# ---- SIGTERM -----------------------------------------------------------------------------------------------


def _start_listening() -> None:
    """Let SIGTERM arrive as a byte in a pipe.

    A rank that is blocked in a collective never runs its Python handler; the interpreter's own, in C, writes to the
    wakeup descriptor at once, and a thread reads it.
    """
    global _pipe, _listening
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return
    _listening = True
    signal.signal(signal.SIGTERM, _note)
    signal.siginterrupt(signal.SIGTERM, False)  # system calls of libraries that know no EINTR go on
    others = signal.set_wakeup_fd(_the_pipe()[1], warn_on_full_buffer=False)
    if others != -1:  # an event loop's: _note is enough, a little later
        signal.set_wakeup_fd(others)


def _stop_listening() -> None:
    global _listening
    if _listening and threading.current_thread() is threading.main_thread():
        _listening = False
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if (descriptor := signal.set_wakeup_fd(-1)) not in (-1, _the_pipe()[1]):
            signal.set_wakeup_fd(descriptor)


def _the_pipe() -> tuple[int, int]:
    global _pipe
    if _pipe is None:
        _pipe = os.pipe()
        os.set_blocking(_pipe[0], False)
        os.set_blocking(_pipe[1], False)
    return _pipe


def _note(number: int, _frame: Any) -> None:
    global _told_to_leave
    _told_to_leave = _agreement is None
    with contextlib.suppress(BlockingIOError):  # full: it has been heard
        os.write(_the_pipe()[1], bytes([number]))


def _ring() -> None:
    with contextlib.suppress(BlockingIOError):
        os.write(_the_pipe()[1], b"\0")


def _heard_sigterm(seconds: float | None) -> bool:
    """Wait that long at most, for SIGTERM or `_ring`."""
    read = _the_pipe()[0]
    poller = select.poll()
    poller.register(read, select.POLLIN)
    if not poller.poll(None if seconds is None else seconds * 1000):
        return False
    return signal.SIGTERM in os.read(read, 4096)


# ---- the end -----------------------------------------------------------------------------------------------


def _end_as_resumable() -> None:
    """A training that stopped before its end must not look completed, however the script ends after it."""
    error = termination.ending()
    if _stopped_at is None or not (error is None or isinstance(error, SystemExit)):
        return
    termination.tell_stopped(_stopped_at)
    if not _stopped_raised and (error is None or termination.exit_code(error) == 0):
        _say(
            f"stopped after step {_stopped_at}: exit code {rules.RESUMABLE_EXIT_CODE}, not 0, for the training is not "
            f"complete. End the script by `raise ddpjob.Stopped(step)`."
        )
        sys.stdout.flush()
        os._exit(rules.RESUMABLE_EXIT_CODE)


def _say(sentence: str) -> None:
    with contextlib.suppress(Exception):
        print(f"ddpjob: {sentence}", file=sys.stderr, flush=True)


_agreement: _Agreement | None = None
_pipe: tuple[int, int] | None = None
_listening = False
_told_to_leave = False
_mask: set[int | signal.Signals] | None = None
_stopped_at: int | None = None
_stopped_raised = False


def _hold_sigterm() -> None:
    """While a process forks: what is meant for the child must not be heard through the parent's pipe."""
    global _mask
    _mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}) if _listening else None


def _let_sigterm_come() -> None:
    if _mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _mask)


def _forget_in_child() -> None:
    """A forked child is no rank: SIGTERM ends it."""
    global _agreement, _pipe, _stopped_at, _stopped_raised
    _agreement, _stopped_at, _stopped_raised = None, None, False
    _stop_listening()
    _pipe = None
    _let_sigterm_come()


os.register_at_fork(before=_hold_sigterm, after_in_parent=_let_sigterm_come, after_in_child=_forget_in_child)
atexit.register(_end_as_resumable)  # at the import: what join.py registers later runs before it, and leaves the group
