"""The Kubernetes scheduler: a scheduling.k8s.io PodGroup, and `schedulingGroup` in each of its pods.

Kubernetes 1.36 serves v1alpha2 (gates GenericWorkload and GangScheduling; TopologyAwareWorkloadScheduling for
topologies), 1.37 serves v1beta1 and v1alpha3 (gate GenericWorkload). The fields used here are equal in all. The
condition differs: PodGroupScheduled in 1.36; PodGroupInitiallyScheduled from 1.37 on, which then stays True. minCount
is immutable in 1.36, so each attempt has its own group. No Workload is needed.

If the PodGroup is missing, its pods wait. A replaced pod joins the same PodGroup, and pods that are already placed
count. In 1.37 a deleted PodGroup stays until its last pod has ended.
"""

from __future__ import annotations

from ddpjob_operator.gangs.adapter import Adapter, Body, Raw
from ddpjob_operator.job import api, podspec
from ddpjob_operator.job.bounds import text
from ddpjob_operator.observed.groups import Admission
from ddpjob_operator.pods import build, naming

_SCHEDULED = ("PodGroupInitiallyScheduled", "PodGroupScheduled")


def body(job: api.DDPJob, attempt: int, api_version: str) -> Body:
    """Return the PodGroup of an attempt. An elastic job is placed as soon as minNodes of its pods fit."""
    spec: Body = {"schedulingPolicy": {"gang": {"minCount": job.spec.facts.min_nodes or job.spec.nodes}}}
    if job.spec.topology_key:
        spec["schedulingConstraints"] = {"topology": [{"key": job.spec.topology_key}]}
    if priority := podspec.mapping(job.spec.template, "spec").get("priorityClassName"):
        spec["priorityClassName"] = priority  # the group's own priority decides its order, not its pods' priority
    labels = {**naming.labels(job), naming.LABEL_ATTEMPT: str(attempt)}
    metadata = build.owned_metadata(job, ADAPTER.group_name(job, attempt), labels)
    return {"apiVersion": api_version, "kind": ADAPTER.kind, "metadata": metadata, "spec": spec}


def pod(body: Body, job: api.DDPJob, attempt: int) -> None:
    """Put a pod into the group of its attempt."""
    body["spec"]["schedulingGroup"] = {"podGroupName": ADAPTER.group_name(job, attempt)}


def read(raw: Raw) -> Admission:
    """Return whether the group is placed. Later preemptions are visible only in the pods."""
    conditions = {c.get("type"): c for c in (raw.get("status") or {}).get("conditions") or ()}
    found: Raw = next((conditions[kind] for kind in _SCHEDULED if kind in conditions), {})
    if found.get("status") == "True":
        return Admission("admitted")
    return Admission("waiting", text(found.get("message")) or text(found.get("reason")))


ADAPTER = Adapter(
    name="native",
    group="scheduling.k8s.io",
    versions=("v1beta1", "v1alpha3", "v1alpha2"),
    plural="podgroups",
    kind="PodGroup",
    per_attempt=True,
    body=body,
    pod=pod,
    read=read,
)
