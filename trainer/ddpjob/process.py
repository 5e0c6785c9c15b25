"""The state of this process, its place among the ranks, and its SIGTERM handling. Standard library only.

`current` is the state. A forked child gets a new one, because it has none of its parent's threads. It is not a rank
until it calls `init`, `progress` or `should_stop`, and SIGTERM ends it. This module has the library's only fork hook.
"""

import atexit
import collections
import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from ddpjob_core.heartbeat import CELLS_BYTES
from ddpjob_core.rank_info import RankInfo, on_node

_TOOL, _TOOLS = "ddpjob", (3, 4)  # tool ids of sys.monitoring; debuggers, coverage and profilers use others


class Process:
    """The state of one process. Each comment names the file that sets the attributes below it and has their types."""

    def __init__(self, parent: "Process | None" = None) -> None:
        # Keeps the parent's state alive: the destructor of its store would join a thread that a fork does not have.
        self.parent = parent

        # Set by group/join.py:
        self.group: Any = None
        self.groups_joined: int = parent.groups_joined if parent else 0
        self.left: RankInfo | None = None
        """Place of this process in the group that it has left."""
        self.before_leaving: list[Any] = [*parent.before_leaving] if parent else []
        self.leaves_at_exit = False

        # Set by group/stop.py:
        self.agreement: Any = None
        self.sigterm: Sigterm | None = None
        self.stopped_at: int | None = None
        """Step at which `should_stop` has returned True."""
        self.stopped_raised = False
        self.marked: tuple[int, int] | None = None
        """Step of the last call of `should_stop`, and `optimizer_steps` at that call."""
        self.fails_at_exit = False
        """True if saving the last state failed at the exit, when an exception would reach nobody."""

        # Set by reporting/progress.py:
        self.latest: tuple[int, int | None, int | None, dict[str, Any], float] | None = None
        """(step, total, samples, metrics, time) of the last call; one tuple, so that readers need no lock."""
        self.checks_each_step = True
        """True before the first call of `progress`, and later only if faults are injected."""
        self.begun = False
        """True after the first call of `progress` has started the thread and the hooks."""
        self.stepping = False
        self.paused: str | None = None
        self.reporter: Any = None
        self.faults: list[Any] = []

        # Set by data.py:
        self.sampler: Callable[[], Any] | None = None
        """The GlobalBatchSampler that has given the last batch, as a weak reference."""

        # Set by checkpoint/snapshot.py:
        self.loader: Any = None
        """The `InMemory` of the first Snapshot that has loaded."""
        self.keeper: Any = None
        self.at_boundary: Callable[[int], None] | None = None
        """Called by `should_stop` with the steps made so far."""
        self.writers: dict[str, set[int]] = {}
        """Writer numbers that this process has taken, by folder."""
        self.saved_step: int | None = None
        """Step of the newest checkpoint that this process has saved or loaded."""
        self.unsaved: set[Any] = set()
        """Snapshots whose last state is not in their folder. Keeps them alive if the script drops them."""
        self.save_failed = ""
        """Why the last save failed; "" if it did not."""
        self.continue_random: Callable[[], None] | None = None
        """Restores the random states of `load` again; has no effect after the next optimizer step."""
        self.optimizer_steps = 0
        """Steps that any optimizer of this process has begun, counted from its first Snapshot."""
        self.saved_at: int | None = None
        """`optimizer_steps` at the last `save` or `keep`."""
        self.steps_of: collections.Counter[int] = collections.Counter()
        """The same for each optimizer, by its id."""
        self.gradients: int | None = None
        """Gradients of watched parameters that have arrived, to see if a batch was trained; None: none are watched."""
        self.resumed_step: int | None = None
        """Step of the loaded state."""
        self.resumed_from = ""
        """Origin of the loaded state: a folder, or the memory of some nodes."""
        self.not_kept = ""
        """Why the state is not kept in memory although that was requested; set by `checkpoint/in_memory`."""
        self.limit_needed: int | None = None
        """Memory limit in bytes that the container would need to keep the state; None if the limit is not the cause."""

        # Set by reporting/watchdog.py:
        self.cells = memoryview(bytearray(CELLS_BYTES)).cast("q")  # not shared before `watchdog.begin`
        self.watched = False
        self.in_torch = threading.Lock()  # held by the watchdog thread in torch's C++ code, and from the exit on

        # Set by reporting/rank_end.py:
        self.end: Any = None
        """The `RankEnd` that is written for the agent at the end of this process."""

        # Set by reporting/termination.py:
        self.reports_failure = False
        self.previous_hook: Any = parent.previous_hook if parent else None


class Sigterm:
    """Passes SIGTERM to a waiting thread, as a byte in a pipe.

    A rank that is blocked in a collective runs no Python handler. The interpreter's handler in C still writes to the
    wakeup descriptor at once.
    """

    def __init__(self) -> None:
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        os.set_blocking(self._write_end, False)
        self._handled = False
        self._mask: set[int | signal.Signals] | None = None
        self.received = False

    def handle(self) -> None:
        """Handle SIGTERM, so that it does not end this process. Does nothing if the script has a handler."""
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            self._handled = True
            signal.signal(signal.SIGTERM, self._note)
            signal.siginterrupt(signal.SIGTERM, False)  # some libraries cannot handle EINTR
            before = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
            if before != -1:  # the script's event loop needs this descriptor; our handler _note writes the byte later
                signal.set_wakeup_fd(before)

    def restore(self) -> None:
        """Let SIGTERM end this process again."""
        if self._handled and threading.current_thread() is threading.main_thread():
            self._handled = False
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if (descriptor := signal.set_wakeup_fd(-1)) not in (-1, self._write_end):
                signal.set_wakeup_fd(descriptor)

    def wait(self, seconds: float | None) -> bool:
        """Wait at most this long for SIGTERM or `wake`. Return True for SIGTERM."""
        poller = select.poll()
        poller.register(self._read_end, select.POLLIN)
        if not poller.poll(None if seconds is None else seconds * 1000):
            return False
        return signal.SIGTERM in os.read(self._read_end, 4096)

    def wake(self) -> None:
        self._write(0)

    def block(self) -> None:
        """Block SIGTERM during a fork: a signal for the child must not be written to the parent's pipe."""
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}) if self._handled else None

    def unblock(self) -> None:
        if self._mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _note(self, number: int, _frame: Any) -> None:
        self.received = True
        self._write(number)

    def _write(self, number: int) -> None:
        with contextlib.suppress(BlockingIOError):  # if the pipe is full, the reader wakes up anyway
            os.write(self._write_end, bytes([number]))


current = Process()


def replace() -> None:
    """Give this process a new state, as in a forked child."""
    global current
    current = Process(current)


def _before_fork() -> None:
    if current.sigterm is not None:
        current.sigterm.block()


def _after_fork_in_parent() -> None:
    if current.sigterm is not None:
        current.sigterm.unblock()


def _after_fork_in_child() -> None:
    sigterm = current.sigterm
    replace()
    if sigterm is not None:
        sigterm.restore()
        sigterm.unblock()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


def at_exit(action: Callable[[], object], priority: int) -> None:
    """Run the action once at the end of this process, also in a child of multiprocessing."""
    atexit.unregister(action)  # a forked child has inherited the registration
    atexit.register(action)
    at_exit_of_child(action, priority)


def at_exit_of_child(action: Callable[[], object], priority: int) -> None:
    """Register an action with multiprocessing, because its children call atexit functions late or not at all.

    Higher priorities run first: the termination message (30), the last report of progress (20), leaving the group (10).
    The last ones (5) set the exit code 75 of a stopped rank, and end a snapshot's heartbeat.
    """
    util = sys.modules.get("multiprocessing.util")
    if util is not None:
        util.Finalize(None, action, exitpriority=priority)
        if sys.version_info >= (3, 13) and sys.modules["multiprocessing"].parent_process():
            _end_child_as_before_3_13(util._exit_function)


def _end_child_as_before_3_13(run_finalizers: Callable[[], None]) -> None:
    """From Python 3.13 on a child drops its exception, and then its finalizers run as one of atexit's functions. Run
    them before the other functions, and keep the exception in sys.last_value, as the interpreter does for a script."""
    atexit.unregister(run_finalizers)
    atexit.register(run_finalizers)  # the last one runs first
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined, unused-ignore]  # from Python 3.12 on
    users = {monitoring.get_tool(number): number for number in _TOOLS}
    if _TOOL in users or None not in users:  # a fork has inherited our tool, or other tools use all ids
        return

    def see(*_place: object) -> None:
        if (error := sys.exc_info()[1]) is not None:
            sys.last_value = error

    # No other hook sees the exception of a child that is already running, or whose class has its own run().
    monitoring.use_tool_id(users[None], _TOOL)
    monitoring.register_callback(users[None], monitoring.events.LINE, see)
    bootstrap = sys.modules["multiprocessing.process"].BaseProcess._bootstrap
    monitoring.set_local_events(users[None], bootstrap.__code__, monitoring.events.LINE)


def place() -> RankInfo:
    """Return this process's rank and node from its group, else from the environment, else rank 0 of 1. Never raises."""
    if current.group is not None:
        return current.group.place  # type: ignore[no-any-return]
    rank, world_size = torch_group() or (number("RANK", 0), number("WORLD_SIZE", 1))
    return on_node(rank, world_size, number)


def torch_group() -> tuple[int, int] | None:
    """Return rank and size of torch's default group, also the script's; None without one. Does not import torch."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return dist.get_rank(), dist.get_world_size()


def has_had_torch_group() -> bool:
    """True if torch's default group exists or has existed: torch keeps the address of the rendezvous after the script
    has destroyed the group, unless the script passed a store."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    group = torch_group()
    return (group is not None and group[1] > 1) or getattr(c10d, "_default_pg_init_method", None) is not None


def number(name: str, default: int) -> int:
    """Return an environment variable as an integer; the default if it is missing or no integer."""
    try:
        return int(os.environ[name])
    except (KeyError, ValueError):
        return default


def step_made() -> None:
    """Switch the group to its shorter time-out after the first step. `progress` and `accumulate` call this."""
    if current.group is not None:
        current.group.use_step_timeout()


def latest_step() -> int:
    """Return the last reported step; 0 if there is none, or if the script has passed something that is no number."""
    try:
        return 0 if current.latest is None else int(current.latest[0])
    except (TypeError, ValueError, OverflowError, RuntimeError):  # text, nan, infinity, a tensor of several values
        return 0


def log(text: str) -> None:
    """Write a line to stderr in one call, because ranks share it. Never raises, also if stderr is closed."""
    with contextlib.suppress(Exception):
        sys.stderr.write(f"ddpjob: {text}\n")
        sys.stderr.flush()
