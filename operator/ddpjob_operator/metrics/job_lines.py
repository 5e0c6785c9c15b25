"""Write the series of jobs in both of Prometheus' text formats.

There are 28 lines per job: for 1,000 jobs prometheus-client's encoder takes a second, and this a tenth of it.
tests/unit/test_metrics_meter.py reads the lines with prometheus-client's parsers.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping

from ddpjob_operator.job import api
from ddpjob_operator.metrics import names, of_status

_STATES = (*names.STATES, names.NO_STATE)


def text(
    jobs: Iterable[tuple[str, str, api.Status, Mapping[str, int]]], now: dt.datetime, *, openmetrics: bool
) -> bytes:
    """Return all families without the end mark. jobs: namespace, name, status, and seconds by use. Jobs that ended long
    ago are left out.
    """
    lines: dict[str, list[str]] = {metric.name: _head(metric, openmetrics) for metric in names.OF_A_JOB}
    for namespace, name, status, spent in jobs:
        if of_status.is_shown(status, now):
            of_job = f'namespace="{escaped(namespace)}",job_name="{escaped(name)}"'
            for value in of_status.values(status, spent):
                lines[value.metric.name] += _lines(value, of_job)
    return "".join(line for of in lines.values() for line in of).encode()


def _head(metric: names.Metric, openmetrics: bool) -> list[str]:
    name, kind = (metric.name, metric.kind) if openmetrics else (metric.shown, metric.kind.replace("stateset", "gauge"))
    return [f"# HELP {name} {metric.help}\n", f"# TYPE {name} {kind}\n"]


def _lines(value: of_status.Value, of_job: str) -> list[str]:
    metric = value.metric
    if metric.kind == "stateset":
        name, held = metric.name, value.label
        return [f'{name}{{{of_job},{name}="{state}"}} {int(state == held)}\n' for state in _STATES]
    label = f',{metric.labels[-1]}="{value.label}"' if value.label else ""
    return [f"{metric.shown}{{{of_job}{label}}} {value.value!r}\n"]


def escaped(label: str) -> str:
    """Escape a label value and limit its length."""
    return names.bounded(label).replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
