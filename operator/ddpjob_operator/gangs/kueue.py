"""The queues of Kueue: one Workload of kueue.x-k8s.io for the life of the job, which the operator writes itself.

Kueue needs no code for it, only `DDPJob.v1alpha1.training.ddpjob.io` under `integrations.externalFrameworks`. What it
does for its own kinds is done here: it leaves the quota of a Workload that it evicts with it until the pods have ended
and the owner takes the admission out of the status. No `reclaimablePods`: they never shrink while quota is held, and a
restart would lack what was given back.

0.14 serves v1beta1; v1beta2, from 0.15 on, differs in how a priority class is named.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from ddpjob_operator.gangs.adapter import Adapter, Body, Raw
from ddpjob_operator.job import api, bounds, launcher, podspec
from ddpjob_operator.job.bounds import text
from ddpjob_operator.observed.groups import Admission, ObservedGroup, Placement, Tell
from ddpjob_operator.pods import build, naming

GROUP = "kueue.x-k8s.io"
# The API by which it tells the places of those that wait; the first version that is served is taken.
PLACES_GROUP, PLACES_VERSIONS = "visibility.kueue.x-k8s.io", ("v1beta1", "v1beta2")
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
DEFAULT_QUEUE = "default"
PODSET = "node"
_TOPOLOGY = "kueue.x-k8s.io/podset-{}-topology"
_TOPOLOGY_GATE = "kueue.x-k8s.io/topology"
# The lowest level of a Topology where it is one at all.
_HOST = "kubernetes.io/hostname"
_POD_GATE = "kueue.x-k8s.io/admission"
# Of evictions whose reason begins so (DeactivatedDueToRequeuingLimitExceeded) Kueue itself says when the Workload may
# queue again: after a back-off, or when it is active again.
_REQUEUED_BY_KUEUE = ("PodsReadyTimeout", "AdmissionCheck", "Deactivated")
_NAMES_MAX = 16


def body(job: api.DDPJob, _attempt: int, api_version: str) -> Body:
    """The Workload of a job: as many pods as it has nodes. An elastic job may be admitted with as few as minNodes."""
    template = job.spec.template
    podset: Body = {"name": PODSET, "count": job.spec.nodes, "template": {"spec": _what_pods_ask_for(template)}}
    least = launcher.min_nodes(job.spec)
    if least is not None and least < job.spec.nodes:
        podset["minCount"] = least
    if topology := _topology_request(job):
        podset["topologyRequest"] = topology
    # As Kueue's own kinds without a class have it; its visibility API (0.14.8) fails on a Workload that has none.
    spec: Body = {"queueName": _queue(job), "podSets": [podset], "priority": 0}
    group, kind, name = _priority(job)
    if name and api_version.endswith("/v1beta1"):
        source = "kueue.x-k8s.io/workloadpriorityclass" if group == GROUP else "scheduling.k8s.io/priorityclass"
        spec |= {"priorityClassName": name, "priorityClassSource": source}
    elif name:
        spec["priorityClassRef"] = {"group": group, "kind": kind, "name": name}
    metadata = build.owned_metadata(job, ADAPTER.group_name(job, 0), naming.labels(job))
    return {"apiVersion": api_version, "kind": ADAPTER.kind, "metadata": metadata, "spec": spec}


def _queue(job: api.DDPJob) -> str:
    return job.metadata.labels.get(QUEUE_LABEL) or DEFAULT_QUEUE


def _what_pods_ask_for(template: Mapping[str, Any]) -> Body:
    """The template as far as quota and nodes depend on it: commands and variables are nobody's in the queue."""
    spec = build.as_given(podspec.mapping(template, "spec"))
    for kind in ("containers", "initContainers"):
        if kind in spec:
            kept = ("name", "image", "resources", "restartPolicy" if kind == "initContainers" else "")
            spec[kind] = [{name: one[name] for name in kept if name in one} for one in spec[kind]]
    return {**spec, "restartPolicy": "Never"}


def _topology_request(job: api.DDPJob) -> Body:
    """By spec.topologyKey, or by the annotations of the template that Kueue reads of other kinds. Ranks that are near
    each other get nodes that are."""
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
    """The API group, kind and name of the priority class; no name: none is named."""
    if name := job.metadata.labels.get(PRIORITY_LABEL):
        return GROUP, "WorkloadPriorityClass", name
    name = podspec.mapping(job.spec.template, "spec").get("priorityClassName") or ""
    return "scheduling.k8s.io", "PriorityClass", str(name)


def reads_for_group(job: api.DDPJob, api_version: str) -> tuple[str, ...]:
    """The priority class: Kueue refuses its name without its value."""
    group, _, name = _priority(job)
    version = api_version if group == GROUP else f"{group}/v1"
    plural = "workloadpriorityclasses" if group == GROUP else "priorityclasses"
    return (f"/apis/{version}/{plural}/{name}",) if name else ()


def complete(workload: Body, found: Sequence[Raw]) -> None:
    """Puts the value of the priority class into the Workload."""
    for priority in found:
        workload["spec"]["priority"] = priority.get("value", 0)


def read(raw: Raw) -> Admission:
    """Admitted, evicted, or why it waits, in Kueue's own words."""
    status = raw.get("status") or {}
    reserved, evicted = _condition(raw, "QuotaReserved"), _condition(raw, "Evicted")
    holds_quota = reserved.get("status") == "True"
    if evicted.get("status") == "True" and holds_quota:
        why = text(evicted.get("message")) or text(evicted.get("reason"))
        return Admission("evicted", why, holds_quota=True)
    if _is_true(raw, "Finished"):
        return Admission("evicted", "its Workload says that it is finished")
    if holds_quota and _is_true(raw, "Admitted"):
        return Admission("admitted")
    if (raw.get("spec") or {}).get("active") is False:
        return Admission("waiting", "its Workload is deactivated: spec.active is false", stopped=True)
    if holds_quota:
        checks = [c for c in status.get("admissionChecks") or () if c.get("state") != "Ready"][:_NAMES_MAX]
        told = (f"{text(c.get('name'))}: {text(c.get('message')) or text(c.get('state'))}" for c in checks)
        return Admission("waiting", f"it has its quota, and waits for {', '.join(told) or 'its admission'}")
    return Admission("waiting", text(reserved.get("message")) or text(reserved.get("reason")))


def placement(raw: Raw) -> Placement:
    """How many pods, and on which nodes: by the flavors of the quota, and by what admission checks add."""
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
    count = bounds.integer(first.get("count"), 0, bounds.NODES_MAX)
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


def observed(raw: Raw) -> dict[str, Any]:
    """What only a queue says of a group: its pods, its queue, and what it was told."""
    podsets, queue = (raw.get("spec") or {}).get("podSets") or (), text((raw.get("spec") or {}).get("queueName"))
    return {
        "placement": placement(raw),
        "nodes": bounds.integer(podsets[0].get("count"), 0, bounds.NODES_MAX) if podsets else None,
        "queue": queue,
        "asked": (queue, *_asked(raw)),
        "is_ready": _is_true(raw, "PodsReady"),
        "is_over": _is_true(raw, "Finished"),
    }


def asks(job: api.DDPJob) -> tuple[str, ...]:
    """The LocalQueue, the priority class and the topology: labels and spec.topologyKey change at any time, a template
    only while its job is suspended."""
    return _queue(job), _priority(job)[2], str(_topology_request(job).get("required") or "")


def _asked(raw: Raw) -> tuple[str, str]:
    """The priority class and the topology of a Workload."""
    spec = raw.get("spec") or {}
    priority = spec.get("priorityClassName") or (spec.get("priorityClassRef") or {}).get("name")
    podsets = spec.get("podSets") or [{}]
    return text(priority), text((podsets[0].get("topologyRequest") or {}).get("required"))


def pending_path(api_version: str, namespace: str, queue: str) -> str:
    """Those that wait in a LocalQueue, in its order; the first thousand of them."""
    return f"/apis/{api_version}/namespaces/{namespace}/localqueues/{quote(queue, safe='')}/pendingworkloads"


def read_places(raw: Raw) -> dict[str, int]:
    """Of the ClusterQueue, which others wait for as well: who is before a job there is admitted before it."""
    found = {}
    for item in raw.get("items") or ():
        before = bounds.integer(item.get("positionInClusterQueue"), 0, bounds.TURNS_MAX)
        if before is not None:
            found[text(item["metadata"]["name"])] = before + 1
    return found


def reads_for_pods(placed: Placement, api_version: str) -> tuple[str, ...]:
    """The flavors: an admission names them, and they have the labels of the nodes."""
    return tuple(f"/apis/{api_version}/resourceflavors/{name}" for name in placed.flavors)


def pod(_body: Body, _job: api.DDPJob, _attempt: int) -> None:
    """Without an admission a pod has nothing of Kueue: as the pod of an external framework it is left alone."""


def place(pod_body: Body, group: ObservedGroup, flavors: Sequence[Raw]) -> None:
    """The pod runs where its quota is. What flavors and checks ask for outranks the template: elsewhere the pod would
    use what the queue has promised to others."""
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
        # Kueue puts the nodes of each pod into its selector, and then takes the gate away.
        metadata["labels"] |= {"kueue.x-k8s.io/tas": "true", "kueue.x-k8s.io/podset": PODSET}
        metadata["annotations"]["kueue.x-k8s.io/workload"] = group.name
        spec["schedulingGates"] = [*(spec.get("schedulingGates") or []), {"name": _TOPOLOGY_GATE}]


def queued_alone(pod_body: Raw) -> str:
    """Why Kueue holds a single pod back; empty: it does not. Of a job with the label of a queue it leaves all pods
    alone; without that its integration of pods, and a LocalQueue `default`, put each pod into the queue by itself."""
    gates = podspec.mappings(podspec.mapping(pod_body, "spec"), "schedulingGates")
    if not any(gate.get("name") == _POD_GATE for gate in gates):
        return ""
    return f"Kueue queues each pod of this job by itself; label the job with {QUEUE_LABEL} to queue it as a whole"


def tell(raw: Raw, what: Tell, message: str, now: dt.datetime) -> Body | None:
    """The status of the Workload, with what Kueue is to know."""
    status, conditions = dict(raw.get("status") or {}), _Conditions(raw, now)
    if what == "quota returned":
        evicted = _condition(raw, "Evicted")
        if not (evicted.get("status") == "True" and _is_true(raw, "QuotaReserved")):
            return None
        why, reason = text(evicted.get("message")), text(evicted.get("reason"))
        status.pop("admission", None)
        conditions.put("QuotaReserved", "False", "Pending", why)
        conditions.put("Admitted", "False", "NoReservation", "The workload has no reservation")
        requeued = "False" if reason.startswith(_REQUEUED_BY_KUEUE) else "True"
        conditions.put("Requeued", requeued, reason or "Evicted", why)
        if _condition(raw, "PodsReady"):
            conditions.put("PodsReady", "False", "WaitForStart", message)
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
    """The conditions of a Workload, to be changed."""

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
