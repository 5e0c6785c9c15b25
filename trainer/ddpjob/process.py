"""What belongs to this process alone: its state, its place among the ranks, its SIGTERM. Standard library only.

`current` is the state. A forked child gets a new one: it is not a rank until it calls `init`, `progress` or
`should_stop` itself, its parent's threads are not there, and SIGTERM ends it. This is the library's only hook at a
fork.
"""

import atexit
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


class Process:
    """The state of one process. What is `Any` has its type in the file that the comment names."""

    def __init__(self, parent: "Process | None" = None) -> None:
        # The parent's state is never dropped: the destructor of its store joins a thread that the fork does not have.
        self.parent = parent

        # group/join.py
        self.group: Any = None
        self.groups_joined: int = parent.groups_joined if parent else 0
        self.left: RankInfo | None = None
        """Its place in the group that it has left."""
        self.before_leaving: list[Any] = [*parent.before_leaving] if parent else []
        self.leaves_at_exit = False

        # group/stop.py
        self.agreement: Any = None
        self.sigterm: Sigterm | None = None
        self.stopped_at: int | None = None
        """The step at which `should_stop` has returned True."""
        self.stopped_raised = False
        self.marked: tuple[int, int] | None = None
        """The step that `should_stop` was called with last, and `optimizer_steps` then."""
        self.fails_at_exit = False
        """Whether the last state could not be saved, which is known too late to be raised."""

        # reporting/progress.py
        self.latest: tuple[int, int | None, int | None, dict[str, Any], float] | None = None
        """(step, total, samples, metrics, when) of the last call; assigned as one, so that its reader needs no lock."""
        self.checks_each_step = True
        """The first call starts what there is to start; later ones only check where faults were ordered."""
        self.begun = False
        """What the first call starts is there."""
        self.stepping = False
        self.paused: str | None = None
        self.reporter: Any = None
        self.faults: list[Any] = []

        # data.py
        self.sampler: Callable[[], Any] | None = None
        """The GlobalBatchSampler that has given the last batch, as a weak reference."""

        # checkpoint/snapshot.py
        self.loader: Any = None
        """What the first Snapshot that has loaded keeps in memory."""
        self.keeper: Any = None
        self.at_boundary: Callable[[int], None] | None = None
        """Called by `should_stop` with the steps made so far."""
        self.writers: dict[str, set[int]] = {}
        """The writer numbers that it has taken in each folder."""
        self.saved_step: int | None = None
        """Of the newest checkpoint that this process has saved or loaded."""
        self.unsaved: set[Any] = set()
        """The Snapshots whose last state is not in their folder: a script may forget them before its end."""
        self.save_failed = ""
        """Why the last save has failed."""
        self.continue_random: Callable[[], None] | None = None
        """Sets the random states once more to those that `load` has restored, until the next optimizer step."""
        self.optimizer_steps = 0
        """That this process has begun since it has made a Snapshot, of any optimizer."""
        self.resumed_step: int | None = None
        """Of the state that it has loaded."""
        self.resumed_from = ""
        """Where that state was: a folder, or the memory of which nodes."""
        self.not_kept = ""
        """Why the state is not kept in memory, where it was to be; `ddpjob/checkpoint/in_memory/memory.py` knows it."""
        self.limit_needed: int | None = None
        """Bytes that the container's memory limit must be for that, where it is the limit that is too small."""

        # reporting/watchdog.py
        self.cells = memoryview(bytearray(CELLS_BYTES)).cast("q")  # nobody reads these, until `watchdog.begin`
        self.watched = False
        self.in_torch = threading.Lock()  # held by the thread while it is in torch's C++, and from the exit on

        # reporting/rank_end.py
        self.end: Any = None
        """What the agent is given at the end of this process."""

        # reporting/termination.py
        self.reports_failure = False
        self.previous_hook: Any = parent.previous_hook if parent else None


class Sigterm:
    """SIGTERM as a byte in a pipe, for a thread that waits for it.

    A rank that is blocked in a collective never runs its Python handler; the interpreter's own handler, in C, writes to
    the wakeup descriptor at once.
    """

    def __init__(self) -> None:
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        os.set_blocking(self._write_end, False)
        self._handled = False
        self._mask: set[int | signal.Signals] | None = None
        self.received = False

    def handle(self) -> None:
        """From now on SIGTERM does not end this process. A handler of the script is left alone."""
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            self._handled = True
            signal.signal(signal.SIGTERM, self._note)
            signal.siginterrupt(signal.SIGTERM, False)  # system calls of libraries that know no EINTR go on
            before = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
            if before != -1:  # an event loop's: _note is enough, a little later
                signal.set_wakeup_fd(before)

    def restore(self) -> None:
        """From now on SIGTERM ends this process again."""
        if self._handled and threading.current_thread() is threading.main_thread():
            self._handled = False
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if (descriptor := signal.set_wakeup_fd(-1)) not in (-1, self._write_end):
                signal.set_wakeup_fd(descriptor)

    def wait(self, seconds: float | None) -> bool:
        """Wait at most that long for SIGTERM or `wake`: whether it was SIGTERM."""
        poller = select.poll()
        poller.register(self._read_end, select.POLLIN)
        if not poller.poll(None if seconds is None else seconds * 1000):
            return False
        return signal.SIGTERM in os.read(self._read_end, 4096)

    def wake(self) -> None:
        self._write(0)

    def block(self) -> None:
        """While the process forks: a signal for the child must not arrive through the parent's pipe."""
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}) if self._handled else None

    def unblock(self) -> None:
        if self._mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _note(self, number: int, _frame: Any) -> None:
        self.received = True
        self._write(number)

    def _write(self, number: int) -> None:
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes the reader as well
            os.write(self._write_end, bytes([number]))


current = Process()


def replace() -> None:
    """Begin a state of its own, as in a forked child."""
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
    """Run it once at the end of this process, also of a child of multiprocessing."""
    atexit.unregister(action)  # a fork has inherited it
    atexit.register(action)
    at_exit_of_child(action, priority)


def at_exit_of_child(action: Callable[[], object], priority: int) -> None:
    """Run it at the end of a child of multiprocessing, which runs no atexit.

    From the highest priority on: the termination message (30), the last post (20), leaving the group (10), and what
    needs the group to be left: exit code 75, the end of a snapshot's heartbeat (5).
    """
    util = sys.modules.get("multiprocessing.util")
    if util is not None:
        util.Finalize(None, action, exitpriority=priority)


def place() -> RankInfo:
    """Where this process is: by its group, else by the environment, else alone. Never raises."""
    if current.group is not None:
        return current.group.place  # type: ignore[no-any-return]
    rank, world_size = torch_group() or (number("RANK", 0), number("WORLD_SIZE", 1))
    return on_node(rank, world_size, number)


def torch_group() -> tuple[int, int] | None:
    """Rank and size of torch's default group, also of one that the script made; torch is not imported for it."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return dist.get_rank(), dist.get_world_size()


def has_had_torch_group() -> bool:
    """True if torch's default group exists, or existed once: a script may have destroyed it.

    torch keeps the address of the rendezvous, unless the script has passed a store.
    """
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    group = torch_group()
    return (group is not None and group[1] > 1) or getattr(c10d, "_default_pg_init_method", None) is not None


def number(name: str, default: int) -> int:
    """A variable of the environment as a number; the default where it is none."""
    try:
        return int(os.environ[name])
    except (KeyError, ValueError):
        return default


def step_made() -> None:
    """The first step ends the long time-out of the group; `progress` and `accumulate` call it."""
    if current.group is not None:
        current.group.use_step_timeout()


def latest_step() -> int:
    """The last step that was reported; 0 before, and where it is not a number: the termination message names it too."""
    try:
        return 0 if current.latest is None else int(current.latest[0])
    except (TypeError, ValueError, OverflowError, RuntimeError):  # a text, nan, infinity; a tensor of several
        return 0


def log(text: str) -> None:
    """A line on stderr, in one write: ranks share it. Never raises: a closed stderr must not end a training."""
    with contextlib.suppress(Exception):
        sys.stderr.write(f"ddpjob: {text}\n")
        sys.stderr.flush()
