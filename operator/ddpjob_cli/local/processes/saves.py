"""Detect saved source files, after which `ddpjob dev` restarts the ranks. Files are polled: inotify would need a watch
per folder and fails on network file systems, and watchfiles waits longer by default. A training that writes files must
not restart itself. So a file counts only if its text has changed and its kind is listed here. A file that appears while
ranks are running counts from their next start on, because loggers copy code. Hidden folders are skipped."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import time
from collections.abc import Iterable, Iterator

from ddpjob import own_files

PYTHON = ".py"
CONFIGURATIONS = (".yaml", ".yml", ".toml")
NAMED = (PYTHON, *CONFIGURATIONS, ".json", ".cfg", ".ini")
"""Kinds of files that count if an argument of the script names them."""
FOLDERS_MAX = 1000
ENTRIES_MAX = 5000  # entries read of one folder; a larger folder holds data
DEEP_MAX = 12
TEXT_BYTES_MAX = 1 << 20  # larger files are not read; a change of their size or time counts as a save
QUIET_SECONDS = 0.04
"""Seconds without a further change: an editor writes a file in several steps, `git checkout` many files."""
STORM_SECONDS = 1.0  # report many changes this long after the first one, even if more follow
_SKIPPED = frozenset("__pycache__ node_modules site-packages venv wandb mlruns lightning_logs".split())
State = tuple[int, int, int, bytes]
_GONE: State = (0, 0, 0, b"")


class SavedFiles:
    """Detects changes of the source files in folders and their subfolders, and of single files."""

    def __init__(self, folders: Iterable[str], named: Iterable[str] = ()) -> None:
        self._named = [os.path.abspath(path) for path in named if path.endswith(NAMED)]
        self._roots = list(dict.fromkeys(map(os.path.realpath, folders)))
        self._told: dict[str, bytes] = {}  # by path: digest of the text that the ranks have; b"" for a new file
        self._seen: dict[str, State] = {}
        self._configurations: set[str] | None = None
        self._since: float | None = None  # when the first unreported change was seen
        self._moved_at = 0.0
        self.is_cut = False  # True if there are more folders than can be watched
        self.adopt()
        self._configurations = {path for path in self._seen if not path.endswith(PYTHON)}

    def adopt(self) -> None:
        """Record new files as known, so that `poll` reports only their later changes."""
        for path in self._found():
            if path not in self._seen:
                self._seen[path] = _state(path, _GONE)
                self._told[path] = self._seen[path][-1]

    def poll(self, now: float, *, also_new: bool = False) -> set[str]:
        """Return files whose text has changed, once changes stop. also_new: include files that have appeared."""
        if also_new:
            new = [path for path in self._found() if path not in self._seen]
            self._seen |= dict.fromkeys(new, _GONE)
            self._told |= dict.fromkeys(new, b"")
        seen = {path: _state(path, before) for path, before in self._seen.items()}
        moves, self._seen = seen != self._seen, seen
        changed = {path for path, state in seen.items() if state[-1] != self._told[path]}
        self._moved_at = now if moves else self._moved_at
        self._since = (self._since or now) if changed else None
        if self._since is None or now < min(self._moved_at + QUIET_SECONDS, self._since + STORM_SECONDS):
            return set()
        self._told |= {path: seen[path][-1] for path in changed}
        self._since = None
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
    """Return the subfolders and the files of a folder. Links to folders are skipped, because they may form a cycle."""
    folders: list[str] = []
    files: list[str] = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for number, entry in enumerate(entries):
            if number > ENTRIES_MAX:
                return [], [path for path in files if path.endswith(PYTHON)]
            if entry.name.startswith("."):
                continue
            if not entry.is_dir(follow_symlinks=False):
                files.append(entry.path)
            elif not (entry.name in _SKIPPED or os.path.exists(f"{entry.path}/pyvenv.cfg")):
                folders.append(entry.path)
    return folders, files


def _state(path: str, known: State) -> State:
    """Return a file's metadata and a digest of its text. If the metadata are unchanged, the file is not read again."""
    try:
        found = os.stat(path)
        looks = found.st_mtime_ns, found.st_size, found.st_ino
        if known[:3] == looks:
            return known
        if not stat.S_ISREG(found.st_mode):
            return _GONE
        if found.st_size > TEXT_BYTES_MAX:
            return (*looks, repr(looks).encode())
        with open(own_files.open_named(path), "rb") as file:
            return (*looks, hashlib.sha256(file.read(TEXT_BYTES_MAX + 1)).digest())
    except OSError:
        return _GONE


def pause_after(began: float) -> float:
    """Return the seconds to wait after a poll that began at `began`, so that polling takes at most 5 % of a CPU."""
    return max(0.03, 20 * (time.monotonic() - began))
