"""`should_stop()`: one rank gets SIGTERM, and all ranks stop after the same step.

In the training loop, after each step and on every rank:

    stop = ddpjob.should_stop(step)
    if stop or step % 50 == 0:
        snapshot.save(step, model=model, optimizer=optimizer, sampler=sampler)
    if stop:
        raise ddpjob.Stopped(step)

The ranks agree through the group's store. A rank that gets SIGTERM sets a key there. When all ranks have seen the key,
each promises to wait for a decision at its next call of `should_stop`, and writes the step of that call. The last rank
to promise decides on the highest of these steps. No rank has passed that step, and every rank can still reach it,
because a thread makes the promise, even while training waits in a collective. A rank that has left the group cleanly
promises never to stop; then the other ranks finish, too.

This needs no collective: each step only takes a lock, and the thread polls the store twice a second. Training goes on
until all ranks have seen the key; otherwise each stop would cost half a second.
"""

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from typing import Any

from ddpjob import process
from ddpjob.errors import RendezvousError
from ddpjob.reporting import termination
from ddpjob_core import heartbeat, rules, stall_limits

POLL_SECONDS = 0.5
POLL_SECONDS_REQUESTED = 0.02
# Seconds for all ranks to agree on a step to stop at; running ranks answer at their next poll.
# If ranks do not agree in time, one of them is gone. SIGTERM then ends the process, so that the group restarts at once.
AGREE_SECONDS = 5.0
NEVER = 1 << 62
# Seconds that a stopped rank waits for rank 0's snapshot; the pod's grace period may end the wait earlier.
# Without this wait, torchrun would kill the other processes of the rank's node 30 s after the rank's end.
STOPPED_CLOSE_SECONDS = 600.0
LEAVE_LAST_SECONDS = 1.0  # rank 0 waits this long for the others to disconnect, which takes milliseconds
COUNT_SECONDS, COUNT_SECONDS_MAX = 0.01, 0.2  # seconds between polls; growing, because many ranks may poll for minutes

_REQUESTED, _SEEN, _PROMISES = "stop/asked", "stop/seen", "stop/here"
_DECISION, _STEP = "stop/at", "stop/step/{}"


def should_stop(step: int) -> bool:
    """Return True if the script must save and end: on every rank after the same step, once any rank got SIGTERM.

    step  steps made so far, counted as for `progress`. Call it on every rank after the same steps, from the main
          thread, and end by `raise Stopped(step)` when it returns True.

    After the first call SIGTERM does not end this process at once. If the script has its own handler, the handler is
    kept, and this rank only follows the others. Raises RendezvousError if a rank got SIGTERM and the others did not
    agree within the time-out of a step.
    """
    state, step = process.current, int(step)  # scripts may pass a float such as samples / batch
    state.marked = step, state.optimizer_steps
    if not state.stepping:  # without `progress`, this step shows the agent if a restart reached a new step
        state.cells[heartbeat.STEP] = step
    if state.at_boundary is not None:
        state.at_boundary(step)
    if state.agreement is None:
        state.agreement = _begin()
    if not state.agreement.reached(step):
        return False
    state.stopped_at = step
    return True


def ignore_sigterm(_worker_id: int = 0) -> None:
    """Ignore SIGTERM in processes that a rank needs until it stops: `DataLoader(...,
    worker_init_fn=ddpjob.ignore_sigterm)`.

    torchrun sends SIGTERM to a rank and to all its children. If it ends a DataLoader's worker, the DataLoader raises in
    the training loop, which then cannot save. After the rank has ended, SIGTERM ends its workers.
    """
    parent = os.getppid()

    def end_without_rank(number: int, _frame: Any) -> None:
        if os.getppid() != parent:
            os._exit(128 + number)

    signal.signal(signal.SIGTERM, end_without_rank)
    signal.siginterrupt(signal.SIGTERM, False)  # some libraries cannot handle EINTR


def must_leave_now() -> bool:
    """True if SIGTERM came again after `leave`: a stopped rank need not wait for a lost one."""
    return process.current.sigterm is not None and process.current.sigterm.received


def leave() -> None:
    """Announce that this rank leaves the group, so that a rank that gets SIGTERM now need not wait for it."""
    state = process.current
    agreement, sigterm = state.agreement, state.sigterm
    if sigterm is not None:
        sigterm.received = False
    state.agreement = None
    if agreement is not None:
        agreement.close()
        if sigterm is not None and state.stopped_at is None:
            sigterm.restore()


def wait_for_all(store: Any, rank: int, world_size: int, limit_seconds: float) -> None:
    """Wait at most `limit_seconds` until every rank has called this. Raise RuntimeError if the store is gone."""
    if _all_counted(store, "leaving", world_size, limit_seconds):
        # Rank 0 may serve the store, so rank 0 leaves after the other ranks have read from the store for the last time.
        # Otherwise torch prints 20 lines of "recvValue failed" on each other rank at the end of a successful training.
        _all_counted(store, "gone", world_size if rank == 0 else 0, LEAVE_LAST_SECONDS)


def _all_counted(store: Any, key: str, wanted: int, limit_seconds: float) -> bool:
    """Count this rank, and wait at most `limit_seconds` until `wanted` ranks are counted. Return True if they are."""
    deadline = time.monotonic() + limit_seconds
    pause = COUNT_SECONDS
    count: int = store.add(key, 1)
    while count < wanted and time.monotonic() < deadline and not must_leave_now():
        time.sleep(pause)
        pause = min(1.2 * pause, COUNT_SECONDS_MAX)
        count = store.add(key, 0)
    return count >= wanted


class Agreement:
    """One group's agreement on a step. The training calls `reached`; the rest happens in a thread."""

    def __init__(self, store: Any, sigterm: process.Sigterm, rank: int, world_size: int, limit_seconds: float) -> None:
        self._store = store  # None if this rank is alone in its group
        self._sigterm = sigterm
        self._rank, self._world_size = rank, world_size
        self._limit_seconds = limit_seconds
        self._lock = threading.Lock()
        self._passed = -1
        self._seen = False  # True if this rank is counted among those that have seen the request
        self.promised = False
        self.decided = threading.Event()
        self._at = NEVER
        self._sigterm_at: float | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._watch, name="ddpjob-stop", daemon=True)
        self._thread.start()

    def reached(self, step: int) -> bool:
        with self._lock:
            if not self.promised:
                self._passed = step
                return False
        if not self.decided.wait(self._limit_seconds):
            raise RendezvousError(
                f"rank {self._rank}: a rank was told to stop, and the {self._world_size} ranks did not agree on a step "
                f"within {self._limit_seconds:g} s: one of them is gone (DistStoreError)."
            )
        return step >= self._at

    def close(self) -> None:
        self._closing = True
        self._sigterm.wake()
        self._thread.join(AGREE_SECONDS)
        with contextlib.suppress(RuntimeError):
            self._count_seen()
            self._promise(NEVER)

    def wait_for_others(self) -> None:
        """Wait until all ranks end, in a group that the script made."""
        self._sigterm.received = False
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # rank 0 is gone, and the store with it
                wait_for_all(self._store, self._rank, self._world_size, STOPPED_CLOSE_SECONDS)

    def _watch(self) -> None:
        try:
            while not self._closing and not self.decided.is_set():
                self._wait(POLL_SECONDS_REQUESTED if self._seen else POLL_SECONDS)
                if not self._closing:
                    self._decide_or_give_up()
        except RuntimeError:  # rank 0 is gone, and the store with it
            self._decide(NEVER)
            while not self._closing:
                if self._sigterm_at is not None:  # set by SIGTERM, also if the store was gone by then
                    self._give_up()
                self._wait(None)

    def _wait(self, seconds: float | None) -> None:
        if self._sigterm.wait(seconds) and self._sigterm_at is None:
            if process.current.cells[heartbeat.FAILED] and not os.environ.get("DDPJOB_RESTART_GRACE"):
                # A rank has failed, so no agreement is possible. Without this exit a restart would wait for SIGKILL.
                os._exit(128 + signal.SIGTERM)
            self._sigterm_at = time.monotonic()
            if self._store is not None and not self.decided.is_set():  # False if the group is gone or has decided
                self._store.set(_REQUESTED, "1")

    def _decide_or_give_up(self) -> None:
        store = self._store
        if not self._seen and (self._sigterm_at is not None or (store is not None and store.check([_REQUESTED]))):
            self._count_seen()
        if self._seen and not self.promised and (store is None or store.add(_SEEN, 0) >= self._world_size):
            self._promise(None)
        if self.promised and store is not None and store.check([_DECISION]):
            self._decide(int(store.get(_DECISION)))
        elif self._sigterm_at is not None and time.monotonic() > self._sigterm_at + AGREE_SECONDS:
            self._give_up()

    def _count_seen(self) -> None:
        if not self._seen:
            self._seen = True
            if self._store is not None:
                self._store.add(_SEEN, 1)

    def _promise(self, step: int | None) -> None:
        """Promise not to pass this step before the decision; by default the step of the next call of `should_stop`."""
        with self._lock:
            if self.promised:
                return
            self.promised = True
            promised = self._passed + 1 if step is None else step
        if self._store is None:
            self._decide(promised)
            return
        self._store.set(_STEP.format(self._rank), str(promised))
        if self._store.add(_PROMISES, 1) == self._world_size:
            steps = [int(self._store.get(_STEP.format(rank))) for rank in range(self._world_size)]
            self._store.set(_DECISION, str(max(steps)))

    def _decide(self, at: int) -> None:
        self._at = at
        self.promised = True
        self.decided.set()

    def _give_up(self) -> None:
        if self.decided.is_set() and self._at != NEVER:
            return
        process.log(f"rank {self._rank} got SIGTERM and ends without a save: a rank that must agree on a step is gone")
        if process.current.keeper is not None:  # the agent asks for no state, because it expects the agreement
            process.current.keeper.survivor.save()
        os._exit(128 + signal.SIGTERM)  # a thread cannot restore the signal's default action


# ---- the agreement of this process -------------------------------------------------------------------------


def _begin() -> Agreement:
    state, place = process.current, process.place()
    state.stopped_at, state.stopped_raised = None, False
    state.sigterm = state.sigterm or process.Sigterm()
    store = None if place.world_size == 1 else store_of_group()
    if place.world_size == 1 or store is not None:
        state.sigterm.handle()
    process.at_exit_of_child(end_as_it_must, 5)
    # The time limit is long enough for other ranks that are in a `pause`.
    limit_seconds = state.group.world.timeout_step_seconds if state.group else 2 * stall_limits.PAUSE_SECONDS
    return Agreement(store, state.sigterm, place.rank, place.world_size, limit_seconds)


def store_of_group() -> Any:
    """Return the store of the group: that of `init`, else that of the script's own group."""
    group = process.current.group
    if group is not None and group.store is not None:
        return group.store
    dist: Any = sys.modules.get("torch.distributed")
    made = process.torch_group() is not None
    return dist.PrefixStore("ddpjob", dist.distributed_c10d._get_default_store()) if made else None


# ---- the end -----------------------------------------------------------------------------------------------


def fail_at_exit(problem: BaseException) -> None:
    """Make this process fail in `end_as_it_must`, because the last state is not saved, and it is too late to raise."""
    termination.tell(problem)
    process.log(str(problem))
    process.current.fails_at_exit = True


def end_as_it_must() -> None:
    """End with 1 if the last state is not saved, and with 75 after a stop, however the script ends: a training that
    stopped early must not look completed."""
    if process.current.fails_at_exit:
        if (agreement := process.current.agreement) is not None and process.current.stopped_at is not None:
            agreement.wait_for_others()  # the other ranks need the store, which this rank may serve
        _end_now(1)
    _end_as_resumable()


def _end_as_resumable() -> None:
    state = process.current
    error, step = termination.ending(), state.stopped_at
    if step is None or not (error is None or isinstance(error, SystemExit)):
        return
    termination.tell_stopped(step)
    # None if the group of `init` was left, and in a second call (multiprocessing's exit handlers and atexit both call).
    agreement, state.agreement = state.agreement, None
    ends_well = error is None or termination.exit_code(error) in (0, rules.RESUMABLE_EXIT_CODE)
    if agreement is not None and state.group is None and ends_well:  # a process that has not left must end within 2 s
        agreement.wait_for_others()
    if not state.stopped_raised and (error is None or termination.exit_code(error) == 0):
        process.log(
            f"stopped after step {step}: exit code {rules.RESUMABLE_EXIT_CODE}, not 0, because the training is "
            f"not complete. End the script by `raise ddpjob.Stopped(step)`."
        )
        _end_now(rules.RESUMABLE_EXIT_CODE)


def _end_now(code: int) -> None:
    """End the process at once, because sys.exit() has no effect at the exit."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


atexit.register(end_as_it_must)  # registered first, at the import, so it runs after join.py's handler left the group
