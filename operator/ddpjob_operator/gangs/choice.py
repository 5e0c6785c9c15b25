"""Chooses the scheduler or queue that admits the pods of a job, by its spec, its labels and the served APIs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from ddpjob_operator.gangs import kueue
from ddpjob_operator.job import api, podspec
from ddpjob_operator.observed.groups import GangApi

Kind = Literal["none", "native", "kueue"]
DEFAULT_SCHEDULER = "default-scheduler"


def choose(job: api.DDPJob, apis: Mapping[str, GangApi]) -> tuple[Kind, str]:
    """Return an adapter's name or "none", and the reason. apis: the enabled ones, by adapter."""
    spec = job.spec
    if spec.gang == "none":
        return "none", "spec.gang is none"
    if spec.gang != "auto":
        return spec.gang, f"spec.gang is {spec.gang}"
    if kueue.QUEUE_LABEL in job.metadata.labels and "kueue" in apis:
        return "kueue", f"the label {kueue.QUEUE_LABEL} names a queue"
    if spec.topology_key:
        return "native", "spec.topologyKey needs a gang"
    if spec.nodes == 1:
        return "none", "one node needs no gang"
    scheduler = podspec.mapping(spec.template, "spec").get("schedulerName") or DEFAULT_SCHEDULER
    if scheduler != DEFAULT_SCHEDULER:
        return "none", f"the template's schedulerName is {scheduler}"
    if served := apis.get("native", GangApi()).api_version:
        return "native", f"the API server serves {served}"
    return "none", unavailable("native", apis)


def unserved_queue(job: api.DDPJob, apis: Mapping[str, GangApi]) -> str:
    """Return a warning if the job names a queue that is not used; "" if no queue is named, or spec.gang opts out."""
    queue = job.metadata.labels.get(kueue.QUEUE_LABEL)
    if queue is None or "kueue" in apis or job.spec.gang in ("none", "kueue"):
        return ""
    return f"the job starts outside of any quota: it has {kueue.QUEUE_LABEL}: {queue}, but {unavailable('kueue', apis)}"


def unavailable(name: str, apis: Mapping[str, GangApi]) -> str:
    """Return why an adapter cannot be used; "" if it can."""
    if name not in apis:
        return f"gang {name} is not switched on in this operator (the chart's value gang.{name}.enabled)"
    return "" if apis[name].api_version else apis[name].why_not
