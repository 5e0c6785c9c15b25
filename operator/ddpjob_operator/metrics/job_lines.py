"""Series of one job, computed from its status alone: they survive an operator's restart, and end with the job.

There are 28 lines per job. For 1,000 jobs prometheus-client's encoder takes a second, and this module a tenth of it.
tests/unit/test_metrics_meter.py reads the lines with prometheus-client's parsers.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator, Mapping

from ddpjob_operator.job import api
from ddpjob_operator.job.status import TERMINAL
from ddpjob_operator.metrics import names
from ddpjob_operator.plan import transitions

# Seconds for which an ended job is exported. Scrapers come every 15 to 60 s, and old jobs must not slow every scrape.
ENDED_SECONDS = 600.0


def state(status: api.Status) -> str:
    """Return the job's state; NO_STATE for an unset or unknown one."""
    return status.state if status.state in names.STATES else names.NO_STATE


def spent(status: api.Status, now: dt.datetime) -> dict[str, int]:
    """Return the seconds spent productive, idle, starting … until now. The status has only those of past states."""
    until_now = transitions.goodput(status, now)
    return {name: getattr(until_now, f"{name}_seconds") for name in names.SPENT}


def values(status: api.Status, spent: Mapping[str, int]) -> Iterator[tuple[names.Metric, float | None, str]]:
    """Yield metric, value, and the value of the metric's own label. spent: result of `spent`, which never decreases."""
    restarts, nodes = status.restarts or api.Restarts(), status.nodes or api.Nodes()
    yield names.JOB_STATE, 1.0, state(status)
    yield names.JOB_STATE_TIME, None if status.state_time is None else status.state_time.timestamp(), ""
    yield names.JOB_ATTEMPTS, status.attempt, ""
    yield from ((names.JOB_RESTARTS, getattr(restarts, name), name) for name in names.CLASSES)
    yield from ((names.JOB_SECONDS, seconds, name) for name, seconds in spent.items())
    yield names.JOB_LOST_STEPS, status.goodput.lost_steps if status.goodput is not None else 0, ""
    yield names.JOB_NODES, nodes.total, ""
    yield names.JOB_READY, nodes.ready, ""
    if (progress := status.progress) is not None:
        yield names.JOB_STEP, progress.step, ""
        yield names.JOB_PROGRESS_TIME, progress.updated.timestamp(), ""
        yield names.JOB_STEPS_WANTED, progress.total_steps, ""
        yield names.JOB_SAVED_STEP, progress.saved_step, ""
        yield names.JOB_SAMPLES, progress.samples_per_second, ""


def text(
    jobs: Iterable[tuple[str, str, api.Status, Mapping[str, int]]], now: dt.datetime, *, openmetrics: bool
) -> bytes:
    """Return all metric families, without the final `# EOF`. jobs: namespace, name, status, and seconds by `spent`."""
    lines: dict[str, list[str]] = {}
    for metric in names.OF_A_JOB:
        kind = metric.kind if openmetrics else metric.kind.replace("stateset", "gauge")
        name = metric.name if openmetrics else metric.shown
        lines[metric.name] = [f"# HELP {name} {metric.help}\n", f"# TYPE {name} {kind}\n"]
    for namespace, name, status, spent in jobs:
        ended = status.completion_time or status.state_time
        if status.state not in TERMINAL or (ended is not None and (now - ended).total_seconds() < ENDED_SECONDS):
            of_job = f'namespace="{escaped(namespace)}",job_name="{escaped(name)}"'
            for metric, value, label in values(status, spent):
                if value is not None:
                    lines[metric.name] += _lines(metric, value, label, of_job)
    return "".join(line for of in lines.values() for line in of).encode()


def _lines(metric: names.Metric, value: float, label: str, of_job: str) -> list[str]:
    if metric.kind == "stateset":
        name, states = metric.name, (*names.STATES, names.NO_STATE)
        return [f'{name}{{{of_job},{name}="{state}"}} {int(state == label)}\n' for state in states]
    own = f',{metric.labels[-1]}="{label}"' if label else ""
    return [f"{metric.shown}{{{of_job}{own}}} {value!r}\n"]


def escaped(label: str) -> str:
    """Escape a label value and limit its length."""
    return names.bounded(label).replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
