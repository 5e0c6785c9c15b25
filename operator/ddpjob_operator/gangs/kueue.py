"""Queues of Kueue: one kueue.x-k8s.io Workload for all attempts of a job, which the operator writes itself.

Kueue only needs `DDPJob.v1alpha1.training.ddpjob.io` under `integrations.externalFrameworks`. The operator does what
Kueue does for its own kinds. An evicted Workload keeps its quota until the pods have ended and its owner removes the
admission from the status. An admitted Workload cannot grow: `podSets` is immutable, and `reclaimablePods`, which frees
quota of a job that was made smaller, cannot shrink. So an elastic job queues for more nodes with a further Workload,
NAME.2. Kueue 0.14 serves v1beta1; v1beta2, from 0.15 on, names a priority class differently.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from ddpjob_operator.gangs.adapter import Adapter, Body, Raw
from ddpjob_operator.job import api, bounds, podspec
from ddpjob_operator.job.bounds import text
from ddpjob_operator.observed.groups import Admission, ObservedGroup, Placement, Tell
from ddpjob_operator.pods import build, naming

GROUP = "kueue.x-k8s.io"
# The API that shows positions in queues; the first served version is used.
PLACES_GROUP, PLACES_VERSIONS = "visibility.kueue.x-k8s.io", ("v1beta1", "v1beta2")
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
DEFAULT_QUEUE = "default"
PODSET = "node"
_TOPOLOGY = "kueue.x-k8s.io/podset-{}-topology"
_TOPOLOGY_GATE = "kueue.x-k8s.io/topology"
# The usual label of a Topology's lowest level: the node itself.
_HOST = "kubernetes.io/hostname"
_POD_GATE = "kueue.x-k8s.io/admission"
# After evictions whose reason begins with one of these, Kueue decides when the Workload may queue again.
# A longer reason (DeactivatedDueTo…) is cut to one of these in the condition Requeued, as Kueue (0.14 to 0.19) expects.
_REQUEUED_BY_KUEUE = ("PodsReadyTimeout", "AdmissionCheck", "Deactivated")
_NAMES_MAX = 16


def body(job: api.DDPJob, _attempt: int, api_version: str) -> Body:
    """Return the Workload of a job. An elastic job may be admitted with minNodes, but not without its spares."""
    template = job.spec.template
    podset: Body = {"name": PODSET, "count": job.spec.pods, "template": {"spec": _what_pods_ask_for(template)}}
    least = job.spec.facts.min_nodes
    if least is not None and least < job.spec.nodes and not job.spec.spares:
        podset["minCount"] = least
    if topology := _topology_request(job):
        podset["topologyRequest"] = topology
    # Kueue's visibility API (0.14.8) fails on a Workload without priority. Kueue's own kinds have 0 by default, too.
    spec: Body = {"queueName": _queue(job), "podSets": [podset], "priority": 0}
    group, kind, name = _priority(job)
    if name and api_version.endswith("/v1beta1"):
        source = "kueue.x-k8s.io/workloadpriorityclass" if group == GROUP else "scheduling.k8s.io/priorityclass"
        spec |= {"priorityClassName": name, "priorityClassSource": source}
    elif name:
        spec["priorityClassRef"] = {"group": group, "kind": kind, "name": name}
    metadata = build.owned_metadata(job, ADAPTER.group_name(job, 0), naming.labels(job))
    return {"apiVersion": api_version, "kind": ADAPTER.kind, "metadata": metadata, "spec": spec}


def further(workload: Body, name: str, nodes: int) -> None:
    """Turn the Workload of a job into a further one, for some or all of the nodes that the job lacks."""
    workload["metadata"]["name"] = name
    (podset,) = workload["spec"]["podSets"]
    podset |= {"count": nodes, "minCount": 1}


def _queue(job: api.DDPJob) -> str:
    return job.metadata.labels.get(QUEUE_LABEL) or DEFAULT_QUEUE


def _what_pods_ask_for(template: Mapping[str, Any]) -> Body:
    """Return the parts of the template that decide about quota and nodes, without commands and variables."""
    spec = build.as_given(podspec.mapping(template, "spec"))
    for kind in ("containers", "initContainers"):
        if kind in spec:
            kept = ("name", "image", "resources", "restartPolicy" if kind == "initContainers" else "")
            spec[kind] = [{name: one[name] for name in kept if name in one} for one in spec[kind]]
    return {**spec, "restartPolicy": "Never"}


def _topology_request(job: api.DDPJob) -> Body:
    """Return the topology request of spec.topologyKey, or of Kueue's own annotations. Neighbouring ranks get
    neighbouring nodes.
    """
    annotations = podspec.mapping(podspec.mapping(job.spec.template, "metadata"), "annotations")
    request: Body = {}
    for name in ("required", "preferred"):
        if level := annotations.get(_TOPOLOGY.format(name)):
            request[name] = level
    if job.spec.topology_key:
        request["required"] = job.spec.topology_key
    if str(annotations.get(_TOPOLOGY.format("unconstrained"))).lower() == "true":
        request["unconstrained"] = True
    return request | {"podIndexLabel": naming.LABEL_RANK} if request else {}


def _priority(job: api.DDPJob) -> tuple[str, str, str]:
    """Return API group, kind and name of the priority class; the name is "" if there is none."""
    if name := job.metadata.labels.get(PRIORITY_LABEL):
        return GROUP, "WorkloadPriorityClass", name
    name = podspec.mapping(job.spec.template, "spec").get("priorityClassName") or ""
    return "scheduling.k8s.io", "PriorityClass", str(name)


def reads_for_group(job: api.DDPJob, api_version: str) -> tuple[str, ...]:
    """Return the API path of the job's priority class, if any, because the Workload needs the value of the class."""
    group, _, name = _priority(job)
    version = api_version if group == GROUP else f"{group}/v1"
    plural = "workloadpriorityclasses" if group == GROUP else "priorityclasses"
    return (f"/apis/{version}/{plural}/{name}",) if name else ()


def complete(workload: Body, found: Sequence[Raw]) -> None:
    """Put the value of the priority class into the Workload."""
    for priority in found:
        workload["spec"]["priority"] = priority.get("value", 0)


def read(raw: Raw) -> Admission:
    """Return the Workload's admission: admitted, evicted, or waiting with Kueue's reason."""
    status = raw.get("status") or {}
    reserved, evicted = _condition(raw, "QuotaReserved"), _condition(raw, "Evicted")
    holds_quota = reserved.get("status") == "True"
    if evicted.get("status") == "True" and holds_quota:
        why = text(evicted.get("message")) or text(evicted.get("reason"))
        return Admission("evicted", why, holds_quota=True)
    if _is_true(raw, "Finished"):
        return Admission("evicted", "its Workload is marked finished")
    if holds_quota and _is_true(raw, "Admitted"):
        return Admission("admitted")
    if (raw.get("spec") or {}).get("active") is False:
        return Admission("waiting", "its Workload is deactivated: spec.active is false", stopped=True)
    if holds_quota:
        checks = [c for c in status.get("admissionChecks") or () if c.get("state") != "Ready"][:_NAMES_MAX]
        told = (f"{text(c.get('name'))}: {text(c.get('message')) or text(c.get('state'))}" for c in checks)
        return Admission("waiting", f"its quota is reserved; it waits for {', '.join(told) or 'its admission'}")
    return Admission("waiting", text(reserved.get("message")) or text(reserved.get("reason")))


def placement(raw: Raw) -> Placement:
    """Return how many pods are admitted, and on which nodes, from flavors and admission checks."""
    status = raw.get("status") or {}
    assigned = [a for a in (status.get("admission") or {}).get("podSetAssignments") or () if a.get("name") == PODSET]
    if not assigned:
        return Placement()
    first = assigned[0]
    topology = first.get("topologyAssignment") or {}
    levels = topology.get("levels") or []
    checks = status.get("admissionChecks") or ()
    updates = [u for c in checks for u in c.get("podSetUpdates") or () if u.get("name") == PODSET]
    merged = {
        field: {name: value for update in updates for name, value in (update.get(field) or {}).items()}
        for field in ("nodeSelector", "labels", "annotations")
    }
    count, asked = bounds.integer(first.get("count"), 0, bounds.NODES_MAX), _requested(raw)
    if count is not None and asked is not None:
        count = min(count, max(0, asked - _freed(raw)))  # as Kueue counts (totalRequestsFromAdmission)
    return Placement(
        count=count,
        flavors=tuple(dict.fromkeys(text(name) for name in (first.get("flavors") or {}).values())),
        node_selector=merged["nodeSelector"],
        tolerations=tuple(one for update in updates for one in update.get("tolerations") or ()),
        labels=merged["labels"],
        annotations=merged["annotations"],
        by_topology=bool(topology),
        names_nodes=_HOST in levels[-1:],
    )


def _requested(raw: Raw) -> int | None:
    podsets: Sequence[Raw] = (raw.get("spec") or {}).get("podSets") or ({},)
    return bounds.integer(podsets[0].get("count"), 0, bounds.NODES_MAX)


def _freed(raw: Raw) -> int:
    """Return how many of the requested pods use no quota any more."""
    listed = (raw.get("status") or {}).get("reclaimablePods") or ()
    return bounds.integer(next((p.get("count") for p in listed), 0), 0, bounds.NODES_MAX) or 0


def observed(raw: Raw) -> dict[str, Any]:
    """Return facts that only a queue's object has: number of pods, queue, and conditions that the operator wrote."""
    number = bounds.number(text(raw["metadata"].get("name")).partition(".")[2], bounds.NODES_MAX)
    queue = text((raw.get("spec") or {}).get("queueName"))
    return {
        "number": max(1, number),
        "placement": placement(raw),
        "nodes": _requested(raw),
        "queue": queue,
        "asked": (queue, *_asked(raw)),
        "is_ready": _is_true(raw, "PodsReady"),
        "is_over": _is_true(raw, "Finished"),
    }


def asks(job: api.DDPJob) -> tuple[str, ...]:
    """Return the job's current requests: LocalQueue, priority class and topology. These may change at any time, but
    the template only while the job is suspended."""
    return _queue(job), _priority(job)[2], str(_topology_request(job).get("required") or "")


def _asked(raw: Raw) -> tuple[str, str]:
    """Return the priority class and topology of a Workload."""
    spec = raw.get("spec") or {}
    priority = spec.get("priorityClassName") or (spec.get("priorityClassRef") or {}).get("name")
    podsets = spec.get("podSets") or [{}]
    return text(priority), text((podsets[0].get("topologyRequest") or {}).get("required"))


def pending_path(api_version: str, namespace: str, queue: str) -> str:
    """Return the path of the first thousand jobs that wait in a LocalQueue."""
    return f"/apis/{api_version}/namespaces/{namespace}/localqueues/{quote(queue, safe='')}/pendingworkloads"


def read_places(raw: Raw) -> dict[str, int]:
    """Return positions in the ClusterQueue by job. A ClusterQueue orders the jobs of all its LocalQueues."""
    found = {}
    for item in raw.get("items") or ():
        before = bounds.integer(item.get("positionInClusterQueue"), 0, bounds.TURNS_MAX)
        if before is not None:
            found[text(item["metadata"]["name"])] = before + 1
    return found


def reads_for_pods(placed: Placement, api_version: str) -> tuple[str, ...]:
    """Return the paths of the flavors that an admission names. Flavors have the node labels."""
    return tuple(f"/apis/{api_version}/resourceflavors/{name}" for name in placed.flavors)


def pod(_body: Body, _job: api.DDPJob, _attempt: int) -> None:
    """Change nothing, because Kueue ignores pods of an external framework."""


def place(pod_body: Body, group: ObservedGroup, flavors: Sequence[Raw]) -> None:
    """Restrict the pod to the nodes of its quota. Flavors and checks outrank the template, because on other nodes
    the pod would use quota that was promised to other jobs."""
    placed, spec, metadata = group.placement, pod_body["spec"], pod_body["metadata"]
    specs = [podspec.mapping(flavor, "spec") for flavor in flavors]
    selector = {name: value for one in specs for name, value in podspec.mapping(one, "nodeLabels").items()}
    selector |= placed.node_selector
    tolerations = [*(t for one in specs for t in one.get("tolerations") or ()), *placed.tolerations]
    if selector:
        spec["nodeSelector"] = {**(spec.get("nodeSelector") or {}), **selector}
    if tolerations:
        has = spec.get("tolerations") or []
        spec["tolerations"] = [*has, *(t for t in tolerations if t not in has)]
    metadata["labels"] = {**(metadata.get("labels") or {}), **placed.labels}
    metadata["annotations"] = {**(metadata.get("annotations") or {}), **placed.annotations}
    if placed.by_topology:
        # Kueue adds the nodes to each pod's selector, and then removes the gate.
        metadata["labels"] |= {"kueue.x-k8s.io/tas": "true", "kueue.x-k8s.io/podset": PODSET}
        metadata["annotations"]["kueue.x-k8s.io/workload"] = group.name
        spec["schedulingGates"] = [*(spec.get("schedulingGates") or []), {"name": _TOPOLOGY_GATE}]


def queued_alone(pod_body: Raw) -> str:
    """Return why Kueue holds back a single pod; "" if Kueue does not hold it.

    Kueue leaves pods of a job with a queue label alone. Without this label, Kueue's pod integration and a LocalQueue
    named `default` queue each pod by itself.
    """
    gates = podspec.mappings(podspec.mapping(pod_body, "spec"), "schedulingGates")
    if not any(gate.get("name") == _POD_GATE for gate in gates):
        return ""
    return f"Kueue queues each pod of this job by itself; label the job with {QUEUE_LABEL} to queue it as a whole"


def tell(raw: Raw, what: Tell, message: str, now: dt.datetime, pods: int = 0) -> Body | None:
    """Return the Workload's new status for this report; None if nothing changes. pods: as in TellGroup."""
    status, conditions = dict(raw.get("status") or {}), _Conditions(raw, now)
    if what == "quota returned":
        evicted = _condition(raw, "Evicted")
        if not (evicted.get("status") == "True" and _is_true(raw, "QuotaReserved")):
            return None
        why, reason = text(evicted.get("message")), text(evicted.get("reason"))
        status.pop("admission", None)
        status.pop("reclaimablePods", None)
        conditions.put("QuotaReserved", "False", "Pending", why)
        conditions.put("Admitted", "False", "NoReservation", "The workload has no reservation")
        by_kueue = next((one for one in _REQUEUED_BY_KUEUE if reason.startswith(one)), "")
        conditions.put("Requeued", "False" if by_kueue else "True", by_kueue or reason or "Evicted", why)
        if _condition(raw, "PodsReady"):
            conditions.put("PodsReady", "False", "WaitForStart", message)
    elif what == "smaller":
        freed = (_requested(raw) or 0) - pods
        if freed <= _freed(raw) or not _is_true(raw, "Admitted"):
            return None
        status["reclaimablePods"] = [{"name": PODSET, "count": freed}]
    elif what in ("succeeded", "failed"):
        if _is_true(raw, "Finished"):
            return None
        conditions.put("Finished", "True", what.capitalize(), message)
    elif not _is_true(raw, "Admitted") or _is_true(raw, "PodsReady") == (what == "ready"):
        return None
    else:
        recovers = _condition(raw, "PodsReady").get("reason") in ("WaitForRecovery", "Recovered")
        reason = ("Recovered" if recovers else "Started") if what == "ready" else "WaitForRecovery"
        conditions.put("PodsReady", "True" if what == "ready" else "False", reason, message)
    return {**status, "conditions": conditions.listed}


class _Conditions:
    """A copy of a Workload's conditions, in which `put` sets one."""

    def __init__(self, raw: Raw, now: dt.datetime) -> None:
        self.listed = [dict(c) for c in (raw.get("status") or {}).get("conditions") or ()]
        self._generation = (raw.get("metadata") or {}).get("generation")
        self._now = f"{now:%Y-%m-%dT%H:%M:%SZ}"

    def put(self, kind: str, status: str, reason: str, message: str) -> None:
        before = next((c for c in self.listed if c.get("type") == kind), None)
        since = before["lastTransitionTime"] if before is not None and before.get("status") == status else self._now
        new = {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": since}
        if self._generation is not None:
            new["observedGeneration"] = self._generation
        if before is None:
            self.listed.append(new)
        else:
            self.listed[self.listed.index(before)] = new


def _condition(raw: Raw, kind: str) -> Raw:
    listed = (raw.get("status") or {}).get("conditions") or ()
    return next((c for c in listed if c.get("type") == kind), {})


def _is_true(raw: Raw, kind: str) -> bool:
    return bool(_condition(raw, kind).get("status") == "True")


ADAPTER = Adapter(
    name="kueue",
    group=GROUP,
    versions=("v1beta1", "v1beta2"),
    plural="workloads",
    kind="Workload",
    per_attempt=False,
    body=body,
    pod=pod,
    read=read,
    admits_first=True,
)
