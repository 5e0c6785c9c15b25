"""/metrics in Prometheus' text format: jobs by state, their restarts, where their time went, and who leads.

Numbers of all watched namespaces together and no names, because every pod of the cluster may be able to ask. What it
says of jobs follows from their stored statuses, so it is the same after a restart of the operator.
"""

from __future__ import annotations

import typing
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ddpjob_operator.job import api

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STATES = typing.get_args(api.State)
NO_STATE = "None"
"""The label of a job without a state: no operator has seen it yet, or its status cannot be read."""
CLASSES = ("application", "infrastructure", "stall")
USES = ("productive", "idle", "unreported", "starting", "restarting")


def text(jobs: Iterable[Mapping[str, Any]], *, leads: bool, oldest_reconcile_seconds: float, version: str) -> str:
    """The whole answer. Jobs are counted by the operator that leads, so that a sum over all pods counts each once."""
    lines = _info(leads, oldest_reconcile_seconds, version)
    return "\n".join([*lines, *(_of_jobs(jobs) if leads else ())]) + "\n"


def _info(leads: bool, oldest_reconcile_seconds: float, version: str) -> list[str]:
    return [
        *_head("ddpjob_operator_info", "The version of this operator."),
        f'ddpjob_operator_info{{version="{version}"}} 1',
        *_head("ddpjob_operator_leads", "1 for the operator that holds the Lease."),
        f"ddpjob_operator_leads {int(leads)}",
        *_head("ddpjob_operator_oldest_reconcile_seconds", "How long the reconcile that began first is under way."),
        f"ddpjob_operator_oldest_reconcile_seconds {oldest_reconcile_seconds:.3f}",
    ]


def _of_jobs(jobs: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    states: Counter[str] = Counter()
    restarts: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    for job in jobs:
        status = _mapping(job, "status")
        state = status.get("state")
        states[str(state) if state in STATES else NO_STATE] += 1
        for name in CLASSES:
            restarts[name] += _count(_mapping(status, "restarts"), name)
        for name in USES:
            seconds[name] += _count(_mapping(status, "goodput"), f"{name}Seconds")
    yield from _head("ddpjob_jobs", "DDPJobs by their state.")
    yield from (f'ddpjob_jobs{{state="{name}"}} {states[name]}' for name in (*STATES, NO_STATE))
    yield from _head("ddpjob_restarts", "Restarts of the DDPJobs that exist, by what they were charged to.")
    yield from (f'ddpjob_restarts{{charged_to="{name}"}} {restarts[name]}' for name in CLASSES)
    yield from _head(
        "ddpjob_seconds", "Seconds of the DDPJobs that exist, by what they were spent on (status.goodput)."
    )
    yield from (f'ddpjob_seconds{{spent="{name}"}} {seconds[name]}' for name in USES)


def _head(name: str, help_text: str) -> tuple[str, str]:
    return f"# HELP {name} {help_text}", f"# TYPE {name} gauge"


def _mapping(owner: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Of a status that anybody may have edited."""
    value = owner.get(name)
    return value if isinstance(value, Mapping) else {}


def _count(owner: Mapping[str, Any], name: str) -> int:
    value = owner.get(name)
    return value if isinstance(value, int) else 0
