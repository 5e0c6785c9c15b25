"""Series of one job, computed from its status alone: they survive a restart of the operator, and end with the job."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ddpjob_operator.job import api
from ddpjob_operator.job.status import TERMINAL
from ddpjob_operator.metrics import names
from ddpjob_operator.plan import transitions

# Scrapers come every 15 to 60 s, so they still see an ended job. Thousands of old jobs must not cost every scrape.
ENDED_SECONDS = 600.0


class Value(NamedTuple):
    """One value of a job's series. label: value of the family's own label, besides the job's."""

    metric: names.Metric
    value: float
    label: str = ""


def state(status: api.Status) -> str:
    """Return the state, or NO_STATE."""
    return status.state if status.state in names.STATES else names.NO_STATE


def is_shown(status: api.Status, now: dt.datetime) -> bool:
    """True if the job has its own series, which it loses some time after its end."""
    ended = status.completion_time or status.state_time
    return status.state not in TERMINAL or (ended is not None and (now - ended).total_seconds() < ENDED_SECONDS)


def spent(status: api.Status, now: dt.datetime) -> dict[str, int]:
    """Return seconds until now, by use. The status adds a state's time at its end; this includes the present state."""
    until_now = transitions.goodput(status, now)
    return {name: getattr(until_now, f"{name}_seconds") for name in names.SPENT}


def values(status: api.Status, spent: Mapping[str, int]) -> Iterator[Value]:
    """Yield all that is known of a job. spent: its seconds as `spent` returns them; none of them ever falls."""
    yield Value(names.JOB_STATE, 1.0, state(status))
    restarts, nodes = status.restarts or api.Restarts(), status.nodes or api.Nodes()
    if status.state_time is not None:
        yield Value(names.JOB_STATE_TIME, status.state_time.timestamp())
    yield Value(names.JOB_ATTEMPTS, status.attempt)
    for name in names.CLASSES:
        yield Value(names.JOB_RESTARTS, getattr(restarts, name), name)
    for name, seconds in spent.items():
        yield Value(names.JOB_SECONDS, seconds, name)
    yield Value(names.JOB_LOST_STEPS, status.goodput.lost_steps if status.goodput is not None else 0)
    yield Value(names.JOB_NODES, nodes.total)
    yield Value(names.JOB_READY, nodes.ready)
    if status.progress is not None:
        yield from _of_progress(status.progress)


def _of_progress(progress: api.Progress) -> Iterator[Value]:
    yield Value(names.JOB_STEP, progress.step)
    yield Value(names.JOB_PROGRESS_TIME, progress.updated.timestamp())
    for metric, value in (
        (names.JOB_STEPS_WANTED, progress.total_steps),
        (names.JOB_SAVED_STEP, progress.saved_step),
        (names.JOB_SAMPLES, progress.samples_per_second),
    ):
        if value is not None:
            yield Value(metric, value)
