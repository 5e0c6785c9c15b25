"""The session of `ddpjob dev`: a saved file or Enter restarts the ranks, and the run continues when they end. A thread
polls files and keyboard, and wakes the run. The run signals node 0's agent, which restarts the ranks. These restarts
count against no limit."""

from __future__ import annotations

import collections
import contextlib
import datetime as dt
import os
import queue
import re
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ddpjob_cli.local.processes import saves
from ddpjob_cli.local.processes.cluster import LocalPod
from ddpjob_core.heartbeat import RERUN_SIGNAL
from ddpjob_operator.job import api, wording
from ddprun import environment, lend_terminal, processes
from ddprun.core.leader_state import ALL_SUCCEEDED, STANDS

VARIABLE = "DDPJOB_DEV"
NAMES_MAX = 3
_STANDS = f"ddprun: {STANDS}"
_EXCEPTION = re.compile(r" \((.+)\)$")
# Matches the line that ddprun/breakpoints.py prints: a rank and its place, then pid, descriptor and inode.
_WAITS = re.compile(r"ddprun: (rank \d+ waits in breakpoint\(\) at .*) \((\d+) (\d+) (\d+)\)$")
LOAN_SECONDS = 120.0  # seconds in which loans to one rank are tried again if the API server refuses or is away
RETRY_SECONDS = 1.0
_ENDS = (0, lend_terminal.GONE, lend_terminal.INTERRUPTED)  # exit codes after which a loan is not tried again
HELD_MAX = 1000  # lines that other ranks print while one has the terminal; `ddpjob logs` shows all


@dataclass
class SessionNews:
    """What happened in the session after the last `look`: notes to print, a failure, a reason to end."""

    notes: list[str] = field(default_factory=list)
    printed: list[tuple[Any, str]] = field(default_factory=list)
    """Pods, each with a line that it printed while a rank had the terminal."""
    stood: bool = False
    """True if the ranks of all nodes have ended."""
    failure: api.JobFailure | None = None
    """The failure that ended the ranks, whose traceback is shown once."""
    stop: str = ""
    """Why the session ends; "" if it continues."""


class PodOfSession(Protocol):
    """A pod of a local run or of a cluster."""

    @property
    def attempt(self) -> int: ...
    @property
    def place(self) -> int: ...
    @property
    def name(self) -> str: ...


Lend = Callable[[PodOfSession, Sequence[str], Callable[[], bool]], int]
"""Lends the terminal to a process in a pod, named by pid, descriptor and inode, until the process gives it back or the
callable returns True. Returns an exit code of lend_terminal.py, or another one if it failed."""


def lend_here(_pod: PodOfSession, words: Sequence[str], is_over: Callable[[], bool]) -> int:
    return lend_terminal.lend(words[0], words[1], words[2], os.ttyname(0), is_over)


class DevSession:
    """The part of `ddpjob dev` that restarts the ranks of a run at each save."""

    def __init__(self, files: saves.SavedFiles, idle_seconds: float, lend: Lend = lend_here) -> None:
        """lend: used at a terminal, for ranks that wait in `breakpoint()`."""
        self._idle_seconds, self._has_keyboard = idle_seconds, has_keyboard()
        self._lend, self._has_debugger = lend, has_terminal()
        self._waiting: queue.SimpleQueue[tuple[PodOfSession, str, Sequence[str]]] = queue.SimpleQueue()
        self.is_lent = False  # True while a rank has the terminal
        self._held: collections.deque[tuple[Any, str]] = collections.deque(maxlen=HELD_MAX)  # what pods printed then
        self._news: collections.deque[str] = collections.deque()
        self._asked: collections.deque[str] = collections.deque()  # reasons for the next restart
        # Set when all ranks have ended: the pod that reported this end, and its reason. None after the user was told.
        self._stood: tuple[PodOfSession, str] | None = None
        self._files = files
        self._stands = False  # True while no rank is running; new files then come from the user, not from the script
        self._lock = threading.Lock()  # guards _files and _stands
        self._active_at = time.monotonic()
        self._steps: object = None
        self._terminal = termios.tcgetattr(0) if os.isatty(0) else None
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []

    def begin(self, wake: Callable[[], None]) -> list[str]:
        """Start watching. wake: makes the run call `look`. Return sentences for the user."""
        works = [self._watch, *([self._lend_to_each] if self._has_debugger else [])]
        self._threads = [threading.Thread(target=work, args=(wake,), daemon=True) for work in works]
        for thread in self._threads:
            thread.start()
        enter = ", or Enter," if self._has_keyboard else ""
        cut = " There are too many folders to watch all: start it in the folder of the code." * self._files.is_cut
        return [f"A saved file{enter} starts all ranks again; Ctrl-C ends.{cut}"]

    def close(self) -> None:
        self._closed.set()
        for thread in self._threads:
            thread.join()

    def printed(self, pod: PodOfSession, lines: Sequence[str]) -> list[str]:
        """Return the lines to show: none while a rank has the terminal. Messages to this session are not shown."""
        self._active_at = time.monotonic()
        shown = []
        for line in lines:
            if line.startswith(_STANDS):  # `look` reports that all ranks have ended
                self._stood = (pod, line.removeprefix(_STANDS))
            elif self._has_debugger and (waits := _WAITS.search(line)):
                self._waiting.put((pod, waits[1], waits.groups()[1:]))
            else:
                shown.append(line)
        if self.is_lent:
            self._held.extend((pod, line) for line in shown)
            return []
        return shown

    def _lend_to_each(self, wake: Callable[[], None]) -> None:
        """Lend the terminal to ranks that wait in `breakpoint()`, one after the other."""
        while not self._closed.is_set():
            with contextlib.suppress(queue.Empty):
                pod, who, words = self._waiting.get(timeout=saves.QUIET_SECONDS)
                self._lend_to(pod, who, words, wake)

    def _lend_to(self, pod: PodOfSession, who: str, words: Sequence[str], wake: Callable[[], None]) -> None:
        while self._held and not self._closed.wait(saves.QUIET_SECONDS):  # shown before the next loan
            wake()
        self.is_lent = True
        wake()
        failed_at: float | None = None
        while (code := self._lend(pod, words, self._closed.is_set)) not in _ENDS:
            self._restore_terminal()
            failed_at = failed_at or time.monotonic()
            if time.monotonic() - failed_at > LOAN_SECONDS:
                self._news.append(f"{who}, but did not get the terminal; save a file to start all ranks again")
                break
            if self._closed.wait(RETRY_SECONDS):
                break
        self._restore_terminal()
        self.is_lent = False
        if code == lend_terminal.INTERRUPTED:
            self._closed.set()
            os.kill(os.getpid(), signal.SIGINT)
        wake()

    def _restore_terminal(self) -> None:
        if self._terminal is not None:  # a killed debugger may have switched off the echo
            termios.tcsetattr(0, termios.TCSANOW, self._terminal)

    def look(self, steps: object, restart: Callable[[], None]) -> SessionNews:
        """Restart the ranks if requested, and return events to report. steps: any value that changes with progress."""
        found = SessionNews([self._news.popleft() for _ in range(len(self._news))])
        if steps != self._steps:
            self._steps, self._active_at = steps, time.monotonic()
        if self._stood is not None and not self.is_lent:
            self._tell_end(found, *self._stood)
        if self._asked:
            whys = list(dict.fromkeys(self._asked.popleft() for _ in range(len(self._asked))))
            found.notes.append(f"↻ {', '.join(whys)}: all ranks start again")
            self._active_at = time.monotonic()
            self._adopt(stands=False)
            self._restore_terminal()
            with contextlib.suppress(queue.Empty):
                while True:
                    self._waiting.get_nowait()
            restart()
        if not self.is_lent:
            found.printed = [self._held.popleft() for _ in range(len(self._held))]
        if self.due_in() == 0.0:
            found.stop = f"{wording.duration(self._idle_seconds)} without a save or a line of output"
        return found

    def _tell_end(self, found: SessionNews, pod: PodOfSession, why: str) -> None:
        self._stood, found.stood = None, True
        self._adopt(stands=True)
        if why != ALL_SUCCEEDED:
            now = dt.datetime.now(dt.timezone.utc)
            exception = match[1] if (match := _EXCEPTION.search(why)) else ""
            found.failure = api.JobFailure(
                attempt=pod.attempt, node_rank=pod.place, pod=pod.name, exception=exception, time=now
            )
        enter = " or press Enter" if self._has_keyboard else ""
        needs = "; breakpoint() needs a terminal" if "(bdb.BdbQuit)" in why and not self._has_debugger else ""
        found.notes.append(f"{'✖' if found.failure else '✔'} {why}{needs}; save a file{enter} to start them again")

    def due_in(self) -> float | None:
        """Return the seconds until the session ends because nobody uses it; None if the session never ends."""
        if not self._idle_seconds:
            return None
        idle = time.monotonic() - self._active_at
        with contextlib.suppress(OSError):
            if os.isatty(0):  # the terminal's atime changes when the user types, for example into a debugger
                idle = min(idle, max(0.0, time.time() - os.fstat(0).st_atime))
        return max(0.0, self._idle_seconds - idle)

    def _adopt(self, *, stands: bool) -> None:
        with self._lock:
            self._files.adopt()
            self._stands = stands

    def _watch(self, wake: Callable[[], None]) -> None:
        pause = 0.0
        while not self._closed.is_set():
            if self._pressed_enter(pause):
                self._asked.append("Enter")
                wake()
            with self._lock:
                began = time.monotonic()
                changed = self._files.poll(began, also_new=self._stands)
            pause = saves.pause_after(began)
            if changed:
                self._asked.append(named(changed))
                wake()

    def _pressed_enter(self, seconds: float) -> bool:
        """Wait; return True if Enter was pressed within `seconds`. In the background, a read would stop us."""
        if not self._has_keyboard or self.is_lent or os.tcgetpgrp(0) != os.getpgrp():
            self._closed.wait(seconds)
            return False
        return processes.readable(0, seconds) and not self.is_lent and bool(os.read(0, 4096))


def restart_ranks(pods: Iterable[LocalPod]) -> None:
    """Signal the agents of a local run to restart the ranks."""
    parent_of = processes.parents()
    below = [{pod.pid, *processes.descendants(pod.pid, parent_of)} for pod in pods if pod.live and pod.pid]
    # Agents without a handler are skipped: they are still starting, and have no ranks yet.
    processes.send((pid for pids in below for pid in pids if processes.catches(pid, RERUN_SIGNAL)), RERUN_SIGNAL)


def named(paths: Collection[str]) -> str:
    """Return for example `train.py and 2 more files changed`, or `model.py is gone`."""
    shown = [os.path.relpath(path) for path in sorted(paths)]
    more = len(shown) - NAMES_MAX
    text = ", ".join(shown[:NAMES_MAX]) + (f" and {wording.count(more, 'more file')}" if more > 0 else "")
    return f"{text} {'changed' if any(map(os.path.exists, paths)) else 'is gone'}"


def variables(pdb: int | None) -> list[str]:
    """Return the variables of the ranks of a session. pdb: the rank that stops at `breakpoint()`; None: all ranks."""
    ranks = environment.ALL_RANKS if pdb is None else pdb
    return [f"{VARIABLE}=1", *([f"{environment.PDB}={ranks}"] if has_terminal() else [])]


def has_keyboard() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def has_terminal() -> bool:
    """True if a debugger can read and print here."""
    return has_keyboard() and sys.stdout.isatty()
