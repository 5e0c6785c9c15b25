"""Record the history of a run, with a size limit, for the table, `ddpjob list` and the report."""

from __future__ import annotations

import contextlib
import datetime as dt

import msgspec
from msgspec.structs import replace

from ddpjob_cli.local.run_files.run_folder import FACTS, HISTORY, STATUS, RunFolder
from ddpjob_cli.local.run_files.series import Series
from ddpjob_core.failures import BRIEF_MAX, abridged
from ddpjob_operator.job import api
from ddpjob_operator.job.status import apart_from_progress, present_progress

CHANGES_MAX = 400
NAMES_MAX = 24
PROGRESS_SECONDS = 5.0  # seconds between writes of only progress, because a long history has up to a megabyte
SAMPLES, STEP_SECONDS = "samples/s", "s/step"  # names of two series in addition to the job's metrics


class Facts(msgspec.Struct, rename="camel", frozen=True, kw_only=True):
    job: str
    run: str
    started: dt.datetime
    nodes: int
    nproc_per_node: int
    ranks_follow_nodes: bool
    backend: str
    spawns: bool = False
    """True if the script starts the ranks of its node itself: their number is unknown."""

    @property
    def world_size(self) -> int:
        return self.nodes * self.nproc_per_node


class StatusChange(msgspec.Struct, rename="camel", omit_defaults=True, frozen=True, kw_only=True):
    time: dt.datetime
    state: str
    attempt: int = 0
    generation: int = 0
    """Restarts in place in the attempt so far."""
    training: bool = False
    """True if the running ranks have reported a step."""
    reason: str = ""
    message: str = ""


class History(msgspec.Struct, rename="camel", kw_only=True):
    series: dict[str, Series] = {}
    changes: list[StatusChange] = []
    step: int = 0
    seconds: float = -1.0
    """Time of the last progress, in seconds since the start of the run; -1: none since the last restart."""

    def take(self, status: api.Status, started: dt.datetime, now: dt.datetime) -> bool:
        """Record changes in a status. Return True if more than the progress changed."""
        changed = self._take_change(status, now)
        progress = status.progress
        if progress is not None and present_progress(status) is progress:
            self._take_progress(progress, (progress.updated - started).total_seconds())
        return changed

    def _take_change(self, status: api.Status, now: dt.datetime) -> bool:
        change = StatusChange(
            time=now,
            state=status.state or "Pending",
            attempt=status.attempt,
            generation=status.restarted_in_place,
            training=status.state == "Running" and present_progress(status) is not None,
            reason=status.reason,
            message=abridged(status.message, BRIEF_MAX),
        )
        if self.changes:
            last = self.changes[-1]
            if replace(change, time=last.time, reason=last.reason, message=last.message) == last:
                return False
            if (last.attempt, last.generation) != (change.attempt, change.generation):
                self.seconds = -1.0  # unknown: the time of a restart is no time per step
        self.changes.append(change)
        if len(self.changes) > CHANGES_MAX:
            # Keep the first changes, which show the start, and the last, which show the end.
            del self.changes[CHANGES_MAX // 4]
        return True

    def _take_progress(self, progress: api.Progress, seconds: float) -> None:
        if seconds <= self.seconds:
            return  # no new progress; something else in the status has changed
        values: dict[str, float | str | None] = {SAMPLES: progress.samples_per_second, **progress.metrics}
        made = progress.step - self.step
        if self.seconds >= 0 and made > 0:
            values = {STEP_SECONDS: (seconds - self.seconds) / made, **values}
        for name, value in values.items():
            # Limit the names, because a script may use a new name in each step.
            if value is not None and (name in self.series or len(self.series) < NAMES_MAX):
                with contextlib.suppress(ValueError):  # metrics may be texts
                    number = float(value)
                    self.series.setdefault(name, Series()).add(progress.step, seconds, number)
        self.step, self.seconds = progress.step, seconds


class Record:
    """The files with facts, status and history of a run. On a full disk they are not written, but the job continues."""

    def __init__(self, job: api.DDPJob, folder: RunFolder, started: dt.datetime, *, spawns: bool = False) -> None:
        self.facts = Facts(
            job=job.metadata.name,
            run=folder.path.name,
            started=started,
            nodes=job.spec.nodes,
            nproc_per_node=job.spec.facts.nproc_per_node,
            ranks_follow_nodes=job.spec.facts.ranks_follow_nodes,
            spawns=spawns,
            backend=job.spec.facts.backend,
        )
        self.history = History()
        self._folder = folder
        self._before = api.Status()
        self._written_at = started
        self._error = ""
        self._write(FACTS, msgspec.json.encode(self.facts))

    def take(self, status: api.Status, now: dt.datetime) -> str:
        """Record a status. Return why a file could not be written; "" on success."""
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
            self._error = f"{self._folder.path / name}: {error.strerror}; ddpjob list may show an old state of this run"


def document(status: api.Status) -> bytes:
    return msgspec.json.format(msgspec.json.encode(status), indent=2) + b"\n"
