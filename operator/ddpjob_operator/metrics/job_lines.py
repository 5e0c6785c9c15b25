"""Series of one job, computed from its status alone: they survive a restart of the operator, and end with the job.

There are 28 lines per job: for 1,000 jobs prometheus-client's encoder takes a second, and this a tenth of it.
tests/unit/test_metrics_meter.py reads the lines with prometheus-client's parsers.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from ddpjob_operator.job import api
from ddpjob_operator.job.status import TERMINAL
from ddpjob_operator.metrics import names
from ddpjob_operator.plan import transitions

# Scrapers come every 15 to 60 s, so they still see an ended job. Thousands of old jobs must not cost every scrape.
ENDED_SECONDS = 600.0


class JobValue(NamedTuple):
    """One value of a series. label: of the family's own label, besides the job's."""

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


def values(status: api.Status, spent: Mapping[str, int]) -> Iterator[JobValue]:
    """Yield all that is known of a job. spent: as `spent` returns it; none of them ever falls."""
    yield JobValue(names.JOB_STATE, 1.0, state(status))
    restarts, nodes = status.restarts or api.Restarts(), status.nodes or api.Nodes()
    if status.state_time is not None:
        yield JobValue(names.JOB_STATE_TIME, status.state_time.timestamp())
    yield JobValue(names.JOB_ATTEMPTS, status.attempt)
    for name in names.CLASSES:
        yield JobValue(names.JOB_RESTARTS, getattr(restarts, name), name)
    for name, seconds in spent.items():
        yield JobValue(names.JOB_SECONDS, seconds, name)
    yield JobValue(names.JOB_LOST_STEPS, status.goodput.lost_steps if status.goodput is not None else 0)
    yield JobValue(names.JOB_NODES, nodes.total)
    yield JobValue(names.JOB_READY, nodes.ready)
    if status.progress is not None:
        yield from _of_progress(status.progress)


def _of_progress(progress: api.Progress) -> Iterator[JobValue]:
    yield JobValue(names.JOB_STEP, progress.step)
    yield JobValue(names.JOB_PROGRESS_TIME, progress.updated.timestamp())
    for metric, value in (
        (names.JOB_STEPS_WANTED, progress.total_steps),
        (names.JOB_SAVED_STEP, progress.saved_step),
        (names.JOB_SAMPLES, progress.samples_per_second),
    ):
        if value is not None:
            yield JobValue(metric, value)


def text(
    jobs: Iterable[tuple[str, str, api.Status, Mapping[str, int]]], now: dt.datetime, *, openmetrics: bool
) -> bytes:
    """Return all families without the end mark. jobs: namespace, name, status, and seconds by use."""
    lines: dict[str, list[str]] = {metric.name: _head(metric, openmetrics) for metric in names.OF_A_JOB}
    for namespace, name, status, spent in jobs:
        if is_shown(status, now):
            of_job = f'namespace="{escaped(namespace)}",job_name="{escaped(name)}"'
            for value in values(status, spent):
                lines[value.metric.name] += _lines(value, of_job)
    return "".join(line for of in lines.values() for line in of).encode()


def _head(metric: names.Metric, openmetrics: bool) -> list[str]:
    name, kind = (metric.name, metric.kind) if openmetrics else (metric.shown, metric.kind.replace("stateset", "gauge"))
    return [f"# HELP {name} {metric.help}\n", f"# TYPE {name} {kind}\n"]


def _lines(value: JobValue, of_job: str) -> list[str]:
    metric = value.metric
    if metric.kind == "stateset":
        name, held = metric.name, value.label
        return [
            f'{name}{{{of_job},{name}="{state}"}} {int(state == held)}\n' for state in (*names.STATES, names.NO_STATE)
        ]
    label = f',{metric.labels[-1]}="{value.label}"' if value.label else ""
    return [f"{metric.shown}{{{of_job}{label}}} {value.value!r}\n"]


def escaped(label: str) -> str:
    """Escape a label value and limit its length."""
    return names.bounded(label).replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
