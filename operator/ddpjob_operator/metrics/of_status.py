"""The series of one job, from its status alone: they are the same after a restart of the operator, and end with it."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ddpjob_operator.job import api
from ddpjob_operator.job.status import TERMINAL
from ddpjob_operator.metrics import names
from ddpjob_operator.plan import transitions

# A scraper comes every 15 to 60 s, so an ended job is still seen, and a cluster that keeps thousands of ended jobs
# does not pay for them at every scrape.
ENDED_SECONDS = 600.0


class Value(NamedTuple):
    """Of one series of a job; `label` is the value of the label that the family has beside the job's."""

    metric: names.Metric
    value: float
    label: str = ""


def state(status: api.Status) -> str:
    """One of the states, or NO_STATE."""
    return status.state if status.state in names.STATES else names.NO_STATE


def is_shown(status: api.Status, now: dt.datetime) -> bool:
    """Whether the job has series of its own: not once it has ended long ago."""
    ended = status.completion_time or status.state_time
    return status.state not in TERMINAL or (ended is not None and (now - ended).total_seconds() < ENDED_SECONDS)


def spent(status: api.Status, now: dt.datetime) -> dict[str, int]:
    """Seconds until now by what they were spent on. The status counts a state once it is over; here it counts while it
    holds."""
    until_now = transitions.goodput(status, now)
    return {name: getattr(until_now, f"{name}_seconds") for name in names.SPENT}


def values(status: api.Status, spent: Mapping[str, int]) -> Iterator[Value]:
    """What is known of a job now. spent: its seconds until now, as `spent` gives them, of which none ever falls."""
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
