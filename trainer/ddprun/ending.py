"""Decide which processes of a rank get a signal at once: those that train. Helpers get it after the rank has ended.

A DataLoader raises an exception in the rank when a worker ends. So a signal to the workers would interrupt the save
that the rank makes on the signal. Processes are classified from outside: by executable, parent, sockets, and what they
have announced to the agent (`reporting/watchdog.py`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping

from ddprun import processes

LOOK_SECONDS = 0.1
REMARK_SECONDS = 2.0  # seconds to wait for helpers before they are reported; most end within milliseconds of their rank
WAITED_SECONDS = (
    2.0  # seconds from the end of the processes below a rank to the rank's own signal: it may still read their output
)
NAMES_MAX = 4
_DATA_LOADER = "pt_data_worker"  # process name of a worker in torch 2.6 and later
_LISTENS = "0A"  # state of a listening socket in /proc/net/tcp
_MAPS_BYTES_MAX = 1 << 22


class Signalled:
    """Signals sent to the ranks of one generation, and the order in which their descendants end."""

    def __init__(self) -> None:
        self.numbers: set[int] = set()
        self.left: set[int] = set()
        """Descendants that are still running after the ranks have ended."""
        self._trainers: set[int] = set()  # descendants that train and got the ranks' signals
        self._held: dict[int, int] = {}  # ranks that get their signal after the training processes below them
        self._trainers_until: float | None = None  # time at which waiting ranks and helpers are signalled
        self._helpers_since: float | None = None  # time at which helpers were signalled
        self._has_remarked = False

    def send(self, ranks: Collection[int], number: int, announced: Collection[int]) -> None:
        """Signal the ranks, and those processes below them that train. announced: processes that reported training."""
        self.numbers.add(number)
        if not ranks:
            return
        parent_of = processes.parents()
        for rank in ranks:
            below = trainers(rank, announced, parent_of)
            self._trainers |= below
            if below and rank not in announced and processes.is_python(rank) and processes.would_end(rank, number):
                self._held[rank] = number
            else:
                processes.send([rank], number)
            processes.send(below, number)

    def look(self, *, has_ranks: bool, others: Callable[[], set[int]]) -> None:
        """Send the signals that are due. has_ranks: ranks are running. others: returns the agent's own processes."""
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
        if has_ranks:
            return
        self.left = {pid for pid in processes.descendants(os.getpid()) - others() if processes.is_running(pid)}
        if is_over and self._helpers_since is None:
            self._helpers_since = now
            processes.send(self.left, signal.SIGTERM)

    def remark(self, seconds_left: float) -> str:
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
    return found | (pythons and _between(rank, pythons, parent_of)) if pythons else below


def _first_pythons(rank: int, below: set[int], parent_of: Mapping[int, int]) -> Iterator[int]:
    """Yield the topmost Python processes below the rank."""
    pythons = {pid for pid in below if processes.is_python(pid)}
    for pid in pythons:
        if pythons.isdisjoint(_above(pid, rank, parent_of)):
            yield pid


def _between(rank: int, pids: set[int], parent_of: Mapping[int, int]) -> set[int]:
    """Return these processes and all between them and the rank."""
    return pids.union(*(_above(pid, rank, parent_of) for pid in pids))


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
