"""Which source files were saved: `ddpjob dev` starts the ranks again then.

The files are polled. inotify would need a watch for each folder, has none on network file systems, and would save some
20 ms of a restart; the package watchfiles waits longer than that for more changes, unless its defaults are changed.

A training writes files too, and must not restart itself:

- A file counts if its text has changed, so a script that copies its configuration into a folder restarts nothing.
- A file that appears while ranks run counts from their next start on: it may be their own, as the copies of the code
  that some loggers make. Nothing imports it before another file changes.
- Of other kinds than Python only the files below, so not a metrics.json; and never what is in a hidden folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import time
from collections.abc import Iterable, Iterator

PYTHON = ".py"
CONFIGURATIONS = (".yaml", ".yml", ".toml")
NAMED = (PYTHON, *CONFIGURATIONS, ".json", ".cfg", ".ini")
"""Kinds of files that count if an argument of the script names them."""
FOLDERS_MAX = 1000
ENTRIES_MAX = 5000
"""Of one folder; one with more holds data."""
DEEP_MAX = 12
TEXT_BYTES_MAX = 1 << 20
"""Larger files are not read: their size and time count."""
QUIET_SECONDS = 0.04
"""Without a further change, until it counts: an editor writes a file in several steps, `git checkout` many files."""
STORM_SECONDS = 1.0
"""After the first of many changes, whatever still changes."""
_SKIPPED = frozenset("__pycache__ node_modules site-packages venv wandb mlruns lightning_logs".split())
State = tuple[int, int, int, bytes]


class SavedFiles:
    """The source files in some folders and below, and others by their names."""

    def __init__(self, folders: Iterable[str], named: Iterable[str] = ()) -> None:
        self._named = [os.path.abspath(path) for path in named if path.endswith(NAMED)]
        self._roots = list(dict.fromkeys(map(os.path.realpath, folders)))
        self._files: dict[str, State | None] = {}  # None: it is gone, and its last state was told
        self._configurations: set[str] | None = None
        self._missing: set[str] = set()
        self.is_cut = False
        """True if there are more folders than are watched."""
        self.adopt()
        self._configurations = {path for path in self._files if not path.endswith(PYTHON)}

    def adopt(self) -> None:
        """Take in the files that have appeared, without telling of them."""
        for path in self._found():
            if path not in self._files:
                self._files[path] = _state(path, None)

    def poll(self, *, also_new: bool = False) -> set[str]:
        """Return the files that have changed since the last call. also_new: those that have appeared as well."""
        changed = set()
        for path, known in self._files.items():
            now = _state(path, known)
            if now is None and known is not None and path not in self._missing:
                self._missing.add(path)  # an editor may be about to put the new file in its place
                continue
            self._missing.discard(path)
            if (now and now[-1]) != (known and known[-1]):
                changed.add(path)
            self._files[path] = now
        if also_new:
            new = [path for path in self._found() if path not in self._files]
            self._files |= {path: _state(path, None) for path in new}
            changed.update(new)
        return changed

    def _found(self) -> Iterator[str]:
        yield from filter(os.path.isfile, self._named)
        for root in self._roots:
            yield from self._below(root)

    def _below(self, root: str) -> Iterator[str]:
        is_home = root in ("/", os.path.realpath(os.path.expanduser("~")))
        left, number = [(root, 0)], 0
        while left:
            folder, depth = left.pop(0)
            number += 1
            if number > FOLDERS_MAX:
                self.is_cut = True
                return
            folders, files = _entries(folder)
            yield from (path for path in files if self._counts(path))
            if depth < DEEP_MAX and not is_home:
                left += [(path, depth + 1) for path in folders]

    def _counts(self, path: str) -> bool:
        if path.endswith(PYTHON):
            return True
        return path.endswith(CONFIGURATIONS) and (self._configurations is None or path in self._configurations)


def _entries(folder: str) -> tuple[list[str], list[str]]:
    """The folders and the files in it. Links to folders are not followed: they may lead in a circle."""
    folders: list[str] = []
    files: list[str] = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for number, entry in enumerate(entries):
            if number > ENTRIES_MAX:
                return [], [path for path in files if path.endswith(PYTHON)]
            if entry.name.startswith("."):
                continue
            if not entry.is_dir():
                files.append(entry.path)
            elif not (entry.is_symlink() or entry.name in _SKIPPED or os.path.exists(f"{entry.path}/pyvenv.cfg")):
                folders.append(entry.path)
    return folders, files


def _state(path: str, known: State | None) -> State | None:
    """What identifies its text, at the end; None if it is not there. A file that looks as before is not read again."""
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):
            return None
        looks = found.st_mtime_ns, found.st_size, found.st_ino
        if known is not None and known[:3] == looks:
            return known
        if found.st_size > TEXT_BYTES_MAX:
            return (*looks, repr(looks).encode())
        with open(path, "rb") as file:
            return (*looks, hashlib.sha256(file.read(TEXT_BYTES_MAX + 1)).digest())
    except OSError:
        return None


class Coalesced:
    """Changes that come shortly after each other count once."""

    def __init__(self) -> None:
        self._changed: set[str] = set()
        self._first = self._last = 0.0

    def take(self, changed: set[str], now: float) -> set[str]:
        """Return what has changed when no more does, and nothing before."""
        if changed:
            self._first = self._first if self._changed else now
            self._last = now
            self._changed |= changed
        if not self._changed or (now < self._last + QUIET_SECONDS and now < self._first + STORM_SECONDS):
            return set()
        found, self._changed = self._changed, set()
        return found


def pause_after(began: float) -> float:
    """Seconds until the next poll, after one that began then: many files take at most 5 % of a CPU."""
    return max(0.03, 20 * (time.monotonic() - began))
