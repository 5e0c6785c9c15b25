"""Which processes of a rank get a signal at once: those that train. Its helpers are left to it until it has ended.

A DataLoader raises in the rank when one of its workers ends, so a signal to the workers as well would lose the save
that the rank makes on that signal. Nothing is asked of a process here: its executable, its parent, what it has told
the agent (`reporting/watchdog.py`) and its sockets tell what it is.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping

from ddprun import processes

LOOK_SECONDS = 0.1
REMARK_SECONDS = 2.0  # most helpers end within milliseconds of their rank
WAITED_SECONDS = (
    2.0  # once training processes below a rank have ended: a rank may wait for them, a pipe hold their output
)
NAMES_MAX = 4
_DATA_LOADER = "pt_data_worker"  # the name that torch 2.6 and later give the process of a worker
_LISTENS = "0A"  # the state of a socket in /proc/net/tcp
_MAPS_BYTES_MAX = 1 << 22


class Signalled:
    """The signals that the ranks of one generation have had, and the order in which what they have started ends."""

    def __init__(self) -> None:
        self.numbers: set[int] = set()
        self.left: set[int] = set()
        """What the ranks have started and still runs, once they have ended themselves."""
        self._trainers: set[int] = set()  # below ranks; they have had the signals too
        self._held: dict[int, int] = {}  # ranks that get their signal after the processes that they wait for
        self._trainers_until: float | None = None  # how long others are left alone, once all of them have ended
        self._helpers_since: float | None = None  # when they got their signal
        self._has_remarked = False

    def send(self, ranks: Collection[int], number: int, announced: Collection[int]) -> None:
        """Signal the ranks and what trains below them. announced: processes that have told that they train."""
        self.numbers.add(number)
        if not ranks:
            return
        parent_of = processes.parents()
        for rank in ranks:
            below = trainers(rank, announced, parent_of)
            self._trainers |= below
            if below and rank not in announced and processes.is_python(rank) and _would_end(rank, number):
                self._held[rank] = number
            else:
                processes.send([rank], number)
            processes.send(below, number)

    def look(self, *, has_ranks: bool, others: Callable[[], set[int]]) -> None:
        """Go on with what comes after the signal. has_ranks: whether ranks run; others: processes of the agent."""
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
        """Return a sentence, once, if what the ranks have started does not end; else an empty text."""
        is_late = self._helpers_since is not None and time.monotonic() > self._helpers_since + REMARK_SECONDS
        if self._has_remarked or not is_late or not self.left:
            return ""
        self._has_remarked = True
        shown = sorted(self.left)[:NAMES_MAX]
        names = ", ".join(f"{_text(f'/proc/{pid}/comm').strip() or 'ended'} {pid}" for pid in shown)
        more = ", …" if len(self.left) > NAMES_MAX else ""
        return f"the ranks have ended, what they have started has not ({names}{more}): SIGKILL in {seconds_left:.0f} s"


def trainers(rank: int, announced: Collection[int], parent_of: Mapping[int, int]) -> set[int]:
    """Return the processes below a rank that train: they get each signal when the rank gets it.

    announced: processes that have told the agent that they train. parent_of: of all processes.

    Below a program that is not Python (a shell, a profiler) the first Python processes train, and what is between gets
    the signal as well; everything does where no Python is below it.
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


def _would_end(rank: int, number: int) -> bool:
    """Whether the signal would end this process at once, as the parent of torch.multiprocessing.spawn: the kernel then
    sends SIGINT to the training processes, which save nothing."""
    with contextlib.suppress(KeyError, ValueError):
        lines = _text(f"/proc/{rank}/status").splitlines()
        masks = dict(line.split(":\t", 1) for line in lines if line.startswith("Sig"))
        return not (int(masks["SigCgt"], 16) | int(masks["SigIgn"], 16)) >> (number - 1) & 1
    return False


def _first_pythons(rank: int, below: set[int], parent_of: Mapping[int, int]) -> Iterator[int]:
    """The Python processes above which, up to the rank, is no other."""
    pythons = {pid for pid in below if processes.is_python(pid)}
    for pid in pythons:
        if pythons.isdisjoint(_above(pid, rank, parent_of)):
            yield pid


def _between(rank: int, pids: set[int], parent_of: Mapping[int, int]) -> set[int]:
    """These processes and those between them and the rank."""
    return pids.union(*(_above(pid, rank, parent_of) for pid in pids))


def _above(pid: int, rank: int, parent_of: Mapping[int, int]) -> list[int]:
    above = []
    while (pid := parent_of.get(pid, rank)) != rank:
        above.append(pid)
    return above


def _has_own_group(pid: int, parent: int, listening: set[str]) -> bool:
    """Whether a process that has told nothing has formed a process group, as a spawned one may that does not import
    the library: gloo and NCCL listen on TCP. A fork has its parent's sockets, which tell nothing of it."""
    own = listening & _sockets(pid)
    return bool(own) and bool(own - _sockets(parent)) and "libtorch" in _text(f"/proc/{pid}/maps")


def _listening(pid: int) -> set[str]:
    """The inodes of the TCP sockets that are listened on in the network of this process."""
    lines = [*_text(f"/proc/{pid}/net/tcp").splitlines()[1:], *_text(f"/proc/{pid}/net/tcp6").splitlines()[1:]]
    fields = (line.split() for line in lines)
    return {words[9] for words in fields if len(words) > 9 and words[3] == _LISTENS}


def _sockets(pid: int) -> set[str]:
    """The inodes of its sockets."""
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
