"""End the ranks of one generation: they write their state, get a signal, and are killed after their grace period.

Only processes that train get the signal at once. Helpers get it after their rank has ended: a DataLoader raises an
exception in the rank when a worker ends, so a signal to the workers would interrupt the save that the rank makes on the
signal. Processes are classified from outside: by executable, parent, sockets, and what they have announced to the agent
(`reporting/watchdog.py`).
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping

from ddprun import processes
from ddprun.memory import Memory

HELD_SECONDS = 60.0  # limit for the end of a killed rank: freeing GPU memory or a large dataset takes tens of seconds
KILL_AGAIN_SECONDS = 0.05
LOOK_SECONDS = 0.1
REMARK_SECONDS = 2.0  # seconds to wait for helpers before they are reported; most end within milliseconds of their rank
WAITED_SECONDS = (
    2.0  # seconds from the end of the processes below a rank to the rank's own signal: it may still read their output
)
NAMES_MAX = 4
_DATA_LOADER = "pt_data_worker"  # process name of a worker in torch 2.6 and later
_LISTENS = "0A"  # state of a listening socket in /proc/net/tcp
_MAPS_BYTES_MAX = 1 << 22


class Ending:
    """How the ranks of one generation are ended. Each start replaces it."""

    def __init__(self, ranks: Mapping[int, int], memory: Memory | None) -> None:
        """ranks: pids of the running ranks, by local rank. memory: None if these ranks write no state."""
        self._ranks, self._memory = ranks, memory
        self.by_group = False  # True if the ranks are ended because of another rank
        self.began_at = math.inf  # time.time() at `begin`, to compare with termination messages
        self._asked_at: float | None = None  # when ranks were requested to write their state; `_then` follows
        self._then: tuple[int, float] = (0, 0.0)  # signal to send when ranks have written their state; seconds of grace
        self._kill_at: float | None = None
        self._killed_at: float | None = None  # when SIGKILL was first sent
        self.numbers: set[int] = set()
        """Signals that were sent."""
        self.left: set[int] = set()
        """Descendants that are still running after the ranks have ended."""
        self._trainers: set[int] = set()  # descendants that train and got the ranks' signals
        self._held: dict[int, int] = {}  # ranks that get their signal after the training processes below them
        self._trainers_until: float | None = None  # time at which waiting ranks and helpers are signalled
        self._helpers_since: float | None = None  # time at which helpers were signalled
        self._has_remarked = False

    def begin(self) -> None:
        """Record that the ranks are ended because of another rank."""
        if not self.by_group:
            self.by_group, self.began_at = True, time.time()

    def waits(self, number: int, grace_seconds: float, now: float, furthest: int) -> bool:
        """Ask the ranks to write their state into memory. True if they do; `due` returns the signal when they have."""
        if self._memory is None or self.numbers:
            return False
        self._memory.order(furthest)
        writes = self._is_writing(now)
        if writes and self._asked_at is None:
            self._asked_at, self._then = now, (number, grace_seconds)
        return writes

    def due(self, now: float) -> tuple[int, float] | None:
        """Return the signal and its grace period if the ranks have written the state that the signal waited for."""
        return None if self._asked_at is None or self._is_writing(now) else self._then

    def _is_writing(self, now: float) -> bool:
        since = 0.0 if self._asked_at is None else now - self._asked_at
        return self._memory is not None and self._memory.waits_for(self._ranks, since)

    def send(self, number: int, kill_at: float, announced: Collection[int]) -> None:
        """Signal the ranks, and those processes below them that train. announced: processes that reported training.

        Later calls can only shorten the grace period: a rank that has saved and is exiting has removed its handlers, so
        a second SIGTERM would turn its exit code 75 into 143.
        """
        self._asked_at = None
        self._kill_at = kill_at if self._kill_at is None else min(self._kill_at, kill_at)
        if number in self.numbers:
            return
        self.numbers.add(number)
        parent_of = processes.parents() if self._ranks else {}
        for rank in self._ranks.values():
            below = trainers(rank, announced, parent_of)
            self._trainers |= below
            if below and rank not in announced and processes.is_python(rank) and processes.would_end(rank, number):
                self._held[rank] = number
            else:
                processes.send([rank], number)
            processes.send(below, number)

    def kill_now(self, now: float) -> None:
        """End the grace period now."""
        self._kill_at = now

    def deadline(self, now: float) -> float | None:
        """Time of the next call of `tick`; None if none is due."""
        if self._asked_at is not None:
            assert self._memory is not None, "ranks write into it"
            return now + self._memory.look_again(now - self._asked_at)
        if self._kill_at is None:
            return None
        return min(self._kill_at, now + LOOK_SECONDS) if now < self._kill_at else now + KILL_AGAIN_SECONDS

    def tick(self, now: float, others: Callable[[], set[int]]) -> str:
        """Send SIGKILL when the grace period is over. Return a sentence about processes that do not end; "" if none."""
        if self._kill_at is None:
            return ""
        if now < self._kill_at:
            self.look(others)
            return self._remark(self._kill_at - now)
        if self._ranks:
            processes.kill(self._ranks.values())
            self._killed_at = self._killed_at or now  # not `_kill_at`, which may be long ago if the agent was suspended
        else:
            self.left = set()  # `LocalRanks.settle` kills these processes
        return ""

    def outlives_sigkill(self, now: float) -> bool:
        """True if a rank does not end after SIGKILL, because it waits in the kernel for a disk or driver."""
        return self._killed_at is not None and bool(self._ranks) and now > self._killed_at + HELD_SECONDS

    def look(self, others: Callable[[], set[int]]) -> None:
        """Send the signals that are due to processes below the ranks. others: returns the agent's own processes."""
        now = time.monotonic()
        if any(processes.is_running(pid) for pid in self._trainers):
            is_over = False
        else:
            self._trainers_until = self._trainers_until or (now + WAITED_SECONDS if self._trainers else now)
            is_over = now >= self._trainers_until
        if is_over:
            for rank, number in self._held.items():
                processes.send([rank], number)
            self._held.clear()
        if self._ranks:
            return
        self.left = {pid for pid in processes.descendants(os.getpid()) - others() if processes.is_running(pid)}
        if is_over and self._helpers_since is None:
            self._helpers_since = now
            processes.send(self.left, signal.SIGTERM)

    def _remark(self, seconds_left: float) -> str:
        """Return a sentence if descendants of the ranks do not end; "" if they end, and at later calls."""
        is_late = self._helpers_since is not None and time.monotonic() > self._helpers_since + REMARK_SECONDS
        if self._has_remarked or not is_late or not self.left:
            return ""
        self._has_remarked = True
        shown = sorted(self.left)[:NAMES_MAX]
        names = ", ".join(f"{_text(f'/proc/{pid}/comm').strip() or 'ended'} {pid}" for pid in shown)
        more = ", …" if len(self.left) > NAMES_MAX else ""
        text = "the ranks have ended, but processes that they started have not"
        return f"{text} ({names}{more}): SIGKILL in {seconds_left:.0f} s"


def trainers(rank: int, announced: Collection[int], parent_of: Mapping[int, int]) -> set[int]:
    """Return the processes below a rank that train: they get each signal together with the rank.

    announced: processes that reported that they train. parent_of: of all processes.

    Below a program that is not Python (a shell, a profiler), the topmost Python processes train, and those in between
    get the signal too; without Python below it, all do.
    """
    below = processes.descendants(rank, parent_of)
    found = below.intersection(announced)
    listening: set[str] | None = None
    for pid in below - found:
        if processes.is_python(pid) and _text(f"/proc/{pid}/comm").strip() != _DATA_LOADER:
            listening = _listening(pid) if listening is None else listening
            if _has_own_group(pid, parent_of[pid], listening):
                found.add(pid)
    if not below or processes.is_python(rank):
        return found
    pythons = set(_first_pythons(rank, below, parent_of))
    return found.union(pythons, *(_above(pid, rank, parent_of) for pid in pythons)) if pythons else below


def _first_pythons(rank: int, below: set[int], parent_of: Mapping[int, int]) -> Iterator[int]:
    """Yield the topmost Python processes below the rank."""
    pythons = {pid for pid in below if processes.is_python(pid)}
    for pid in pythons:
        if pythons.isdisjoint(_above(pid, rank, parent_of)):
            yield pid


def _above(pid: int, rank: int, parent_of: Mapping[int, int]) -> list[int]:
    above = []
    while (pid := parent_of.get(pid, rank)) != rank:
        above.append(pid)
    return above


def _has_own_group(pid: int, parent: int, listening: set[str]) -> bool:
    """True if a process without the library, for example a spawned one, has formed a process group: it then listens
    on TCP, as gloo and NCCL do. Sockets inherited by a fork do not count.
    """
    own = listening & _sockets(pid)
    return bool(own) and bool(own - _sockets(parent)) and "libtorch" in _text(f"/proc/{pid}/maps")


def _listening(pid: int) -> set[str]:
    """Return inodes of the listening TCP sockets in the process's network."""
    lines = [*_text(f"/proc/{pid}/net/tcp").splitlines()[1:], *_text(f"/proc/{pid}/net/tcp6").splitlines()[1:]]
    fields = (line.split() for line in lines)
    return {words[9] for words in fields if len(words) > 9 and words[3] == _LISTENS}


def _sockets(pid: int) -> set[str]:
    """Return inodes of the process's sockets."""
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                if target.startswith("socket:["):
                    found.add(target[8:-1])
    return found


def _text(path: str) -> str:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read(_MAPS_BYTES_MAX).decode(errors="replace")
    return ""
