"""Find, list and change the DDPJobs of a namespace."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable
from dataclasses import dataclass

from ddpjob_cli.client.connection import Cluster, Raw
from ddpjob_cli.client.errors import ClusterError, NotFoundError
from ddpjob_cli.manifest.yamlfile import InputError
from ddpjob_operator.job import api, bounds, validation
from ddpjob_operator.job.typos import suggestion
from ddpjob_operator.pods import naming

ALL = f"/apis/{api.GROUP}/{api.VERSION}/{api.PLURAL}"
NAMED_MAX = 10  # names in a message


@dataclass(frozen=True)
class Stored:
    raw: Raw
    job: api.DDPJob

    @property
    def created(self) -> dt.datetime | None:
        return bounds.time(self.raw["metadata"].get("creationTimestamp"))

    @property
    def trainer(self) -> str:
        return str(self.job.spec.facts.trainer.get("name") or "trainer")


class NoJobError(InputError):
    """No job has this name."""


class JobGoneError(ClusterError):
    """The job existed at an earlier read, and was deleted."""


def of_raw(raw: Raw) -> Stored:
    return Stored(raw, validation.parse(raw)[0])


def path_of(cluster: Cluster, name: str = "") -> str:
    path = f"/apis/{api.GROUP}/{api.VERSION}/namespaces/{cluster.namespace}/{api.PLURAL}"
    return f"{path}/{name}" if name else path


def items(cluster: Cluster, *, all_namespaces: bool = False, selector: str | None = None) -> list[Raw]:
    """Return all jobs, or those that match a label selector, sorted by namespace and name."""
    params = {"labelSelector": selector} if selector else {}
    found = cluster.get(ALL if all_namespaces else path_of(cluster), **params).get("items") or []
    return sorted(found, key=lambda raw: (raw["metadata"].get("namespace", ""), raw["metadata"]["name"]))


def find(cluster: Cluster, name: str) -> Stored:
    """Return a job by its name. Raise NoJobError with the existing names, InputError for an invalid name."""
    return _named(cluster, name, cluster.get)


def _named(cluster: Cluster, name: str, ask: Callable[[str], Raw]) -> Stored:
    if not re.fullmatch(api.NAME_PATTERN, name):  # any other text could lead to another path of the API
        raise InputError(f"{name!r} is not the name of a DDPJob: lower-case letters, digits and -")
    try:
        return of_raw(ask(path_of(cluster, name)))
    except NotFoundError:
        raise NoJobError(_not_there(cluster, name)) from None


def again(cluster: Cluster, before: Stored) -> Stored:
    """Read a job again. Raise JobGoneError if it was deleted, or if another job has its name now."""
    name = before.job.metadata.name
    try:
        now = of_raw(cluster.get(path_of(cluster, name)))
    except NotFoundError:
        ttl = before.job.spec.ttl_seconds_after_finished
        why = "" if ttl is None else f"; it may have finished, because its ttlSecondsAfterFinished is {ttl}"
        raise JobGoneError(f"{name} was deleted{why}") from None
    if now.job.metadata.uid != before.job.metadata.uid:
        raise JobGoneError(f"{name} was deleted, and created again")
    return now


def patch(cluster: Cluster, name: str, spec: Raw) -> Stored:
    return _named(cluster, name, lambda path: cluster.patch(path, {"spec": spec}))


def pods(cluster: Cluster, name: str) -> list[Raw]:
    selector = f"{naming.LABEL_JOB}={name}"
    found = cluster.get(f"/api/v1/namespaces/{cluster.namespace}/pods", labelSelector=selector).get("items") or []
    return sorted(found, key=lambda pod: (attempt_of(pod), place_of(pod), pod["metadata"].get("creationTimestamp", "")))


def running(cluster: Cluster, stored: Stored) -> list[Raw]:
    """Return the running pods of a job's newest attempt, by node rank."""
    found = [pod for pod in pods(cluster, stored.job.metadata.name) if state_of(pod, stored.trainer) == "Running"]
    last = max(map(attempt_of, found), default=0)
    return [pod for pod in found if attempt_of(pod) == last]


def events(cluster: Cluster, job: Stored, *, of_pods: bool = False) -> list[Raw]:
    name = job.job.metadata.name
    path = f"/api/v1/namespaces/{cluster.namespace}/events"
    params = {} if of_pods else {"fieldSelector": f"involvedObject.name={name},involvedObject.kind={api.KIND}"}
    pod_names = {pod["metadata"]["name"] for pod in pods(cluster, name)} if of_pods else set()

    def wanted(about: Raw) -> bool:
        if about.get("kind") == api.KIND:
            return about.get("name") == name and about.get("uid") in (None, "", job.job.metadata.uid)
        return about.get("kind") == "Pod" and about.get("name") in pod_names

    return [event for event in cluster.get(path, **params).get("items") or [] if wanted(event["involvedObject"])]


def state_of(pod: Raw, trainer: str) -> str:
    """Return for example Running, Pending (ErrImagePull), Failed (exit code 1), Failed (OOMKilled, exit code 137)."""
    status = pod.get("status") or {}
    phase = "Terminating" if pod["metadata"].get("deletionTimestamp") else status.get("phase") or "Unknown"
    for container in [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]:
        state = container.get("state") or {}
        waiting, ended = state.get("waiting") or {}, state.get("terminated") or {}
        if waiting.get("reason") not in (None, "PodInitializing", "ContainerCreating"):
            return f"{phase} ({waiting['reason']})"
        if container.get("name") == trainer and ended:
            return f"{phase} ({_end_of(status, ended)})" if ended.get("exitCode") else phase
    if phase == "Failed" and status.get("reason"):
        return f"{phase} ({status['reason']})"
    unscheduled = (c for c in status.get("conditions") or () if c.get("type") == "PodScheduled")
    return next((f"{phase} ({c.get('reason')})" for c in unscheduled if c.get("status") == "False"), phase)


def _end_of(pod_status: Raw, terminated: Raw) -> str:
    reason = pod_status.get("reason") or terminated.get("reason")
    code = f"exit code {terminated.get('exitCode')}"
    return code if reason in (None, "Error") else f"{reason}, {code}"


def attempt_of(pod: Raw) -> int:
    return _number(pod, naming.LABEL_ATTEMPT)


def place_of(pod: Raw) -> int:
    return _number(pod, naming.LABEL_RANK)


def log_path(pod: Raw) -> str:
    metadata = pod["metadata"]
    return f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}/log"


def _not_there(cluster: Cluster, name: str) -> str:
    text = f"no DDPJob {name} in namespace {cluster.namespace}"
    try:
        names = [raw["metadata"]["name"] for raw in items(cluster)]
    except ClusterError:
        return f"{text} ({cluster.context})"
    shown = ", ".join(names[:NAMED_MAX]) + (", …" if len(names) > NAMED_MAX else "")
    return f"{text} ({cluster.context}){suggestion(name, names)} (there: {shown or 'none'})"


def _number(pod: Raw, label: str) -> int:
    text = (pod["metadata"].get("labels") or {}).get(label, "")
    return int(text) if text.isdigit() else 0
