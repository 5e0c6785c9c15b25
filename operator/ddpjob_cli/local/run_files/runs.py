"""The runs on this machine, read from their folders, for `ddpjob list`, `ddpjob logs` and `ddpjob report`."""

from __future__ import annotations

import datetime as dt
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from ddpjob import own_files
from ddpjob_cli.local.run_files import run_folder
from ddpjob_cli.local.run_files.history import Facts, History
from ddpjob_cli.manifest.yamlfile import InputError
from ddpjob_operator.job import api
from ddpjob_operator.job.status import TERMINAL

RECORD_BYTES_MAX = 16 << 20  # the history of a long run is up to a megabyte
_T = TypeVar("_T")

KILLED = "Killed"  # state of a run whose process ended without writing its end


@dataclass(frozen=True)
class Run:
    folder: Path
    facts: Facts
    status: api.Status
    running: bool

    @property
    def state(self) -> str:
        """Return the state in the run's status; Killed if the process of the run is gone before its end."""
        if self.running or self.status.state in (*TERMINAL, "Suspended"):
            return {"Suspended": "Stopped"}.get(self.status.state or "", self.status.state or "Pending")
        return KILLED

    def logs(self) -> dict[int, dict[int, list[Path]]]:
        """Return the logs by attempt and node: one for each pod of the node, the oldest first."""
        pattern = re.compile(rf"{re.escape(self.facts.job)}-(\d+)-(\d+)(?:-r(\d+))?\.log")
        try:
            matches = {path: pattern.fullmatch(path.name) for path in self.folder.iterdir()}
        except OSError:  # another process has removed the folder
            return {}
        numbers = {path: [int(number or 0) for number in match.groups()] for path, match in matches.items() if match}
        found: dict[int, dict[int, list[Path]]] = {}
        for path in sorted(numbers, key=numbers.__getitem__):
            attempt, node, _ = numbers[path]
            found.setdefault(attempt, {}).setdefault(node, []).append(path)
        return found

    def history(self) -> History:
        return _read(self.folder / run_folder.HISTORY, History) or History()


def find_all(base: Path | None = None) -> list[Run]:
    """Return all runs, the newest first. base: folder with the jobs' folders; None is the user's state folder."""
    runs = (read(folder) for _, folder in run_folder.folders(base))
    return sorted((run for run in runs if run is not None), key=lambda run: run.facts.started, reverse=True)


def find(job: str | None, base: Path | None = None) -> Run:
    """Return the last run of a job, or of any job. Raise InputError if there is none."""
    runs = find_all(base)
    found = next((run for run in runs if job in (None, run.facts.job)), None)
    if found is not None:
        return found
    where = (base or run_folder.state_home() / "ddpjob").absolute()
    known = ", ".join(sorted({run.facts.job for run in runs}))
    if job is None or not known:
        raise InputError(f"no run is kept in {where}; start one with ddpjob run, or name another folder with --dir")
    raise InputError(f'no run of "{job}" is kept in {where}; there are runs of: {known}')


def read(folder: Path) -> Run | None:
    """Return the run in a folder; None if its facts cannot be read, for example because it has only begun."""
    # Check for a live process before reading the status. Otherwise a run that ends in between would look killed.
    running = run_folder.is_running(folder)
    facts = _read(folder / run_folder.FACTS, Facts)
    if facts is None:
        return None
    return Run(folder, facts, _read(folder / run_folder.STATUS, api.Status) or api.Status(), running)


def age(run: Run, now: dt.datetime) -> float:
    return max(0.0, (now - run.facts.started).total_seconds())


def took(run: Run, now: dt.datetime) -> float | None:
    """Return the seconds from the run's start to its end, or to now; None if its end is unknown."""
    if run.running:
        return age(run, now)
    ended = run.status.completion_time or (run.status.state_time if run.state != KILLED else None)
    return None if ended is None else max(0.0, (ended - run.facts.started).total_seconds())


def _read(path: Path, kind: type[_T]) -> _T | None:
    try:
        return msgspec.json.decode(own_files.read_file(path, RECORD_BYTES_MAX), type=kind)
    except (OSError, ValueError, RecursionError):  # not written yet, or written by another version
        return None


def chunks(path: Path, offset: int = 0, size: int = 1 << 16) -> Iterator[bytes]:
    with open(own_files.open_file(path, os.O_RDONLY), "rb") as file:
        file.seek(offset)
        while data := file.read(size):
            yield data
