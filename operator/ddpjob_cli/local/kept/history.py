"""What a run remembers of its course, for the table, `ddpjob list` and the report: bounded, whatever its length."""

from __future__ import annotations

import datetime as dt

import msgspec
from msgspec.structs import replace

from ddpjob_cli.local.kept import series
from ddpjob_cli.local.kept.series import Series
from ddpjob_core.failures import BRIEF_MAX, abridged
from ddpjob_operator.job import api, topology
from ddpjob_operator.job.status import present_progress

CHANGES_MAX = 400
SAMPLES, STEP_SECONDS = "samples/s", "s/step"
"""The names of the pace beside those of the job's metrics."""


class Facts(msgspec.Struct, rename="camel", frozen=True, kw_only=True):
    """What holds for the whole run."""

    job: str
    run: str
    started: dt.datetime
    nodes: int
    nproc_per_node: int
    ranks_follow_nodes: bool
    backend: str

    @property
    def world_size(self) -> int:
        """Ranks of the whole job."""
        return self.nodes * self.nproc_per_node


class StatusChange(msgspec.Struct, rename="camel", omit_defaults=True, frozen=True, kw_only=True):
    """From here on the run was in this state."""

    time: dt.datetime
    state: str
    attempt: int = 0
    generation: int = 0
    """Restarts in place since the attempt began."""
    training: bool = False
    """True if the ranks that run have reported a step."""
    reason: str = ""
    message: str = ""


class History(msgspec.Struct, rename="camel", kw_only=True):
    """The course of a run."""

    series: dict[str, Series] = {}
    changes: list[StatusChange] = []
    step: int = 0
    """That of the last progress taken."""
    seconds: float = -1.0
    """When that came, since the run began; -1: none has come since the last restart."""

    def take(self, status: api.Status, started: dt.datetime, now: dt.datetime) -> bool:
        """Note what a status adds; whether it is more than progress."""
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
            generation=generation(status),
            training=status.state == "Running" and present_progress(status) is not None,
            reason=status.reason,
            message=abridged(status.message, BRIEF_MAX),
        )
        if self.changes:
            last = self.changes[-1]
            if replace(change, time=last.time, reason=last.reason, message=last.message) == last:
                return False
            if (last.attempt, last.generation) != (change.attempt, change.generation):
                self.seconds = -1.0  # the time between two steps would be that of the restart
        self.changes.append(change)
        if len(self.changes) > CHANGES_MAX:
            # The first ones say how it began, the last ones how it ended.
            del self.changes[CHANGES_MAX // 4]
        return True

    def _take_progress(self, progress: api.Progress, seconds: float) -> None:
        if seconds <= self.seconds:
            return  # taken before: the status was written for another reason
        step, made = progress.step, progress.step - self.step
        if self.seconds >= 0 and made > 0:
            series.take(self.series, STEP_SECONDS, step, seconds, (seconds - self.seconds) / made)
        series.take(self.series, SAMPLES, step, seconds, progress.samples_per_second)
        for name, text in progress.metrics.items():
            series.take(self.series, name, step, seconds, series.number(text))
        self.step, self.seconds = step, seconds


def generation(status: api.Status) -> int:
    """Restarts of the ranks in their pods in this attempt."""
    counts = status.in_place
    return 0 if counts is None else counts.earlier + counts.application + counts.infrastructure + counts.stall


def facts(job: api.DDPJob, run: str, started: dt.datetime) -> Facts:
    """What holds for the whole run of a job."""
    return Facts(
        job=job.metadata.name,
        run=run,
        started=started,
        nodes=job.spec.nodes,
        nproc_per_node=topology.nproc_per_node(job.spec),
        ranks_follow_nodes=topology.ranks_follow_nodes(job.spec),
        backend=topology.backend(job.spec),
    )
