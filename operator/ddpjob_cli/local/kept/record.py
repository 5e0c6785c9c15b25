"""What a run leaves in its folder beside the logs: its facts, its status and its course."""

from __future__ import annotations

import datetime as dt

import msgspec

from ddpjob_cli.local.kept import history
from ddpjob_cli.local.kept.run_folder import FACTS, HISTORY, STATUS, RunFolder
from ddpjob_operator.job import api
from ddpjob_operator.job.status import apart_from_progress

PROGRESS_SECONDS = 5.0
"""Between two writings for progress alone: the course of a long run is up to a megabyte."""


class Record:
    """The record of one run. A disk that is full costs the record, never the job."""

    def __init__(self, job: api.DDPJob, folder: RunFolder, started: dt.datetime) -> None:
        self.facts = history.facts(job, folder.path.name, started)
        self.history = history.History()
        self._folder = folder
        self._before = api.Status()
        self._written_at = started
        self._error = ""
        self._write(FACTS, msgspec.json.encode(self.facts))

    def take(self, status: api.Status, now: dt.datetime) -> str:
        """Keep a status; returns why it could not be written, empty where it was."""
        changed = self.history.take(status, self.facts.started, now)
        due = (now - self._written_at).total_seconds() >= PROGRESS_SECONDS
        if changed or due or apart_from_progress(status) != apart_from_progress(self._before):
            self._write(STATUS, document(status))
            self._written_at = now
            if changed or due:
                self._write(HISTORY, msgspec.json.encode(self.history))
        self._before = status
        return self._error

    def _write(self, name: str, data: bytes) -> None:
        try:
            self._folder.write(name, data)
        except OSError as error:
            self._error = f"{self._folder.path / name}: {error.strerror}; ddpjob list may not show this run as it is"


def document(status: api.Status) -> bytes:
    """The status as others read it."""
    return msgspec.json.format(msgspec.json.encode(status), indent=2) + b"\n"
