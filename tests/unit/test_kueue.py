"""Jobs in a Kueue queue: the Workload that the operator writes, and the job's reaction to admission and eviction."""

from __future__ import annotations

import copy
import datetime as dt
import json
from dataclasses import replace as replaced
from typing import Any

import pytest
from msgspec.structs import replace
from worlds import START, World, job, manifest

from ddpjob_operator.gangs import choice, kueue
from ddpjob_operator.job import api, validation
from ddpjob_operator.kube.api import bounded_json
from ddpjob_operator.kube.watch import observe
from ddpjob_operator.observed.cluster import Pod, Refusal
from ddpjob_operator.observed.groups import Admission, GangApi, ObservedGroup, Placement
from ddpjob_operator.plan import leadership
from ddpjob_operator.plan.actions import CreatePod, DeleteGroup, DeletePod, TellGroup
from ddpjob_operator.pods import build

V1BETA1 = "kueue.x-k8s.io/v1beta1"
WORKLOADS = kueue.ADAPTER.resource
SERVED = {"kueue": GangApi(V1BETA1), "native": GangApi("scheduling.k8s.io/v1alpha2")}
LATER = START + dt.timedelta(seconds=30)
CONTAINER = {
    "command": ["torchrun", "train.py"],
    "env": [{"name": "TOKEN", "value": "s3cret"}],
    "resources": {"limits": {"nvidia.com/gpu": 4}},
}


def labelled(what: api.DDPJob, **labels: str) -> api.DDPJob:
    """Return the job with Kueue's labels, for example queue_name="main"."""
    found = {f"kueue.x-k8s.io/{name.replace('_', '-')}": value for name, value in labels.items()}
    return replace(what, metadata=replace(what.metadata, labels=found))


def queued(**spec: Any) -> World:
    """Return a job of two nodes with the label of a queue."""
    return World(labelled(job(**spec), queue_name="main")).serves("kueue", V1BETA1)


def admitted(**spec: Any) -> World:
    """Return an admitted job of two nodes whose pods are running."""
    return queued(**spec).settle().admits().running()


# ---------------------------------------------------------------- which jobs


@pytest.mark.parametrize(
    ("labels", "spec", "apis", "kind"),
    [
        ({"queue_name": "main"}, {}, SERVED, "kueue"),
        ({"queue_name": "main"}, {"nodes": 1}, SERVED, "kueue"),
        ({"queue_name": "main"}, {}, {"kueue": GangApi(why_not="away")}, "kueue"),
        ({"queue_name": "main"}, {"gang": "native"}, SERVED, "native"),
        ({"queue_name": "main"}, {"gang": "none"}, SERVED, "none"),
        ({"queue_name": "main"}, {}, {}, "none"),
        ({}, {}, {"kueue": GangApi(V1BETA1)}, "none"),
        ({}, {"gang": "kueue"}, SERVED, "kueue"),
    ],
)
def test_a_queue_label_means_kueue_if_the_operator_has_it_switched_on(
    labels: dict[str, str], spec: dict[str, Any], apis: dict[str, GangApi], kind: str
) -> None:
    """A queue's label must mean Kueue if it is switched on: a job must not take nodes without admission."""
    assert choice.choose(labelled(job(**spec), **labels), apis)[0] == kind


@pytest.mark.parametrize(
    ("labels", "spec", "apis", "is_warned"),
    [
        ({"queue_name": "main"}, {}, {}, True),
        ({"queue_name": "main"}, {"nodes": 1}, {"native": SERVED["native"]}, True),
        ({"queue_name": "main"}, {"gang": "native"}, {"native": SERVED["native"]}, True),
        ({"queue_name": "main"}, {"gang": "none"}, {}, False),
        ({"queue_name": "main"}, {}, SERVED, False),
        ({}, {}, {}, False),
    ],
)
def test_a_queue_label_that_the_operator_ignores_gets_a_warning_when_the_job_starts(
    labels: dict[str, str], spec: dict[str, Any], apis: dict[str, GangApi], is_warned: bool
) -> None:
    """A queue's label that the operator ignores must cause a warning, because the job runs outside every quota."""
    world = World(labelled(job(**spec), **labels))
    world.gang_apis = dict(apis)
    sent = [event for event in world.settle().events if event.reason == "QueueNotServed"]
    assert [(event.type, "queue-name: main" in event.message) for event in sent] == [("Warning", True)] * is_warned


def test_spec_gang_kueue_is_valid_and_means_the_queue_default() -> None:
    _, problems = validation.parse(manifest(gang="kueue"))
    assert problems == []
    assert kueue.body(job(gang="kueue"), 0, V1BETA1)["spec"]["queueName"] == "default"


def test_a_job_that_another_cluster_runs_is_left_alone() -> None:
    """A job that MultiKueue runs in another cluster must be left alone, although its object is also here."""
    world = queued(managedBy="kueue.x-k8s.io/multikueue")
    assert world.plan().actions == ()
    assert world.plan().status is None


# ---------------------------------------------------------------- the Workload, as Kueue documents it


WORKLOAD = {
    "apiVersion": V1BETA1,
    "kind": "Workload",
    "metadata": {
        "name": "digits",
        "namespace": "default",
        "labels": {"training.ddpjob.io/job": "digits"},
        "ownerReferences": [
            {
                "apiVersion": "training.ddpjob.io/v1alpha1",
                "kind": "DDPJob",
                "name": "digits",
                "uid": "7d0c6f1e-0000-4000-8000-000000000001",
                "controller": True,
            }
        ],
    },
    "spec": {
        "queueName": "main",
        "podSets": [
            {
                "name": "node",
                "count": 2,
                "template": {
                    "spec": {
                        "containers": [
                            {
                                "name": "trainer",
                                "image": "ddpjob-trainer",
                                "resources": {"limits": {"nvidia.com/gpu": 4}},
                            }
                        ],
                        "restartPolicy": "Never",
                    }
                },
            }
        ],
        "priorityClassName": "high",
        "priorityClassSource": "kueue.x-k8s.io/workloadpriorityclass",
        "priority": 1000,
    },
}


def test_a_workload_matches_the_kueue_documentation_and_has_no_commands_and_variables() -> None:
    """A Workload must show the requested resources, which administrators of a queue read, and not the commands."""
    full = labelled(job(container=CONTAINER), queue_name="main", priority_class="high")
    body = kueue.body(full, 0, V1BETA1)
    assert kueue.reads_for_group(full, V1BETA1) == ("/apis/kueue.x-k8s.io/v1beta1/workloadpriorityclasses/high",)
    kueue.complete(body, [{"value": 1000}])
    assert body == WORKLOAD


def test_v1beta2_names_a_priority_class_by_its_group_and_kind() -> None:
    template = {"spec": {"priorityClassName": "research", "containers": [{"name": "trainer", "image": "i"}]}}
    of_pods = job(template=template)
    assert kueue.reads_for_group(of_pods, V1BETA1) == ("/apis/scheduling.k8s.io/v1/priorityclasses/research",)
    assert kueue.body(of_pods, 0, V1BETA1)["spec"]["priorityClassSource"] == "scheduling.k8s.io/priorityclass"
    spec = kueue.body(of_pods, 0, "kueue.x-k8s.io/v1beta2")["spec"]
    named = {"group": "scheduling.k8s.io", "kind": "PriorityClass", "name": "research"}
    assert (spec["priorityClassRef"], "priorityClassName" in spec) == (named, False)
    assert kueue.reads_for_group(job(), V1BETA1) == ()


def test_in_v1beta2_a_workload_differs_only_in_its_priority_class() -> None:
    full = labelled(job(container=CONTAINER), queue_name="main", priority_class="high")
    body = kueue.body(full, 0, "kueue.x-k8s.io/v1beta2")
    assert kueue.reads_for_group(full, "kueue.x-k8s.io/v1beta2") == (
        "/apis/kueue.x-k8s.io/v1beta2/workloadpriorityclasses/high",
    )
    kueue.complete(body, [{"value": 1000}])
    old_names = {"priorityClassName", "priorityClassSource"}
    named = {"group": "kueue.x-k8s.io", "kind": "WorkloadPriorityClass", "name": "high"}
    spec = {name: value for name, value in WORKLOAD["spec"].items() if name not in old_names}  # type: ignore[attr-defined]
    assert body == {**WORKLOAD, "apiVersion": "kueue.x-k8s.io/v1beta2", "spec": {**spec, "priorityClassRef": named}}


@pytest.mark.parametrize("version", ["v1beta1", "v1beta2"])
def test_a_workload_has_a_priority_even_if_the_job_names_none(version: str) -> None:
    """A Workload must have a priority, as Kueue's own kinds: otherwise Kueue's visibility API (0.14.8) lists no job."""
    assert kueue.body(job(), 0, f"kueue.x-k8s.io/{version}")["spec"]["priority"] == 0


def test_an_elastic_job_may_be_admitted_partially() -> None:
    (podset,) = kueue.body(job(nodes=12, minNodes=4), 0, V1BETA1)["spec"]["podSets"]
    assert (podset["count"], podset["minCount"]) == (12, 4)


@pytest.mark.parametrize(
    ("key", "annotations", "wanted"),
    [
        (None, {}, {}),
        ("rack", {}, {"required": "rack"}),
        (None, {"required": "block"}, {"required": "block"}),
        (None, {"preferred": "rack"}, {"preferred": "rack"}),
        (None, {"unconstrained": "true"}, {"unconstrained": True}),
        (None, {"unconstrained": "false"}, {}),
    ],
    ids=str,
)
def test_a_topology_is_requested_by_the_field_of_the_job_or_by_the_kueue_annotations(
    key: str | None, annotations: dict[str, str], wanted: dict[str, Any]
) -> None:
    """Annotations in a job's template must request a topology as for Kueue's own kinds."""
    named = {f"kueue.x-k8s.io/podset-{name}-topology": value for name, value in annotations.items()}
    template = {"metadata": {"annotations": named}, "spec": {"containers": [{"name": "trainer", "image": "i"}]}}
    (podset,) = kueue.body(job(topologyKey=key, template=template), 0, V1BETA1)["spec"]["podSets"]
    rank = {"podIndexLabel": "training.ddpjob.io/rank"} if wanted else {}
    assert podset.get("topologyRequest", {}) == wanted | rank


# ---------------------------------------------------------------- what Kueue reports


def condition(kind: str, status: str, **more: str) -> dict[str, str]:
    return {"type": kind, "status": status, "lastTransitionTime": "2031-03-05T07:00:00Z", **more}


RESERVED = condition("QuotaReserved", "True", reason="QuotaReserved")
ADMITTED = condition("Admitted", "True", reason="Admitted")
PREEMPTED = condition("Evicted", "True", reason="Preempted", message="Preempted to accommodate a workload")
NO_ROOM = condition("QuotaReserved", "False", reason="Pending", message="insufficient unused quota, 4 more needed")


def workload(*conditions: dict[str, str], active: bool = True, **status: Any) -> dict[str, Any]:
    """Return a Workload as the API server has it."""
    found: dict[str, Any] = copy.deepcopy(WORKLOAD)
    found["metadata"] |= {"uid": "u", "generation": 3, "resourceVersion": "7"}
    found["spec"] |= {} if active else {"active": False}
    return {**found, "status": {"conditions": list(conditions), **status}}


ASSIGNED = {
    "clusterQueue": "main",
    "podSetAssignments": [{"name": "node", "count": 2, "flavors": {"cpu": "spot", "nvidia.com/gpu": "spot"}}],
}


@pytest.mark.parametrize(
    ("raw", "admission"),
    [
        (workload(), Admission("waiting")),
        (workload(NO_ROOM), Admission("waiting", "insufficient unused quota, 4 more needed")),
        (workload(RESERVED, ADMITTED), Admission("admitted")),
        (
            workload(RESERVED, admissionChecks=[{"name": "nodes", "state": "Pending", "message": "asked for 2"}]),
            Admission("waiting", "its quota is reserved; it waits for nodes: asked for 2"),
        ),
        (
            workload(RESERVED, ADMITTED, PREEMPTED),
            Admission("evicted", "Preempted to accommodate a workload", holds_quota=True),
        ),
        (
            workload(
                RESERVED,
                admissionChecks=[
                    {"name": "capacity", "state": "Ready", "message": ""},
                    {"name": "provisioning", "state": "Retry", "message": "Retrying after failure: no stock"},
                    {"name": "budget", "state": "Pending", "message": ""},
                ],
            ),
            Admission(
                "waiting",
                "its quota is reserved; it waits for provisioning: Retrying after failure: no stock, budget: Pending",
            ),
        ),
        (
            workload(
                RESERVED,
                condition("Evicted", "True", reason="AdmissionCheck", message="At least one admission check is false"),
                admissionChecks=[{"name": "provisioning", "state": "Rejected", "message": "no such machine"}],
            ),
            Admission("evicted", "At least one admission check is false", holds_quota=True),
        ),
        (workload(NO_ROOM, PREEMPTED), Admission("waiting", "insufficient unused quota, 4 more needed")),
        (
            workload(NO_ROOM, active=False),
            Admission("waiting", "its Workload is deactivated: spec.active is false", stopped=True),
        ),
        (
            workload(RESERVED, ADMITTED, condition("Finished", "True")),
            Admission("evicted", "its Workload is marked finished"),
        ),
    ],
)
def test_the_conditions_show_if_a_job_is_admitted_evicted_or_why_it_waits(
    raw: dict[str, Any], admission: Admission
) -> None:
    assert kueue.read(raw) == admission


def test_a_workload_is_read_with_its_admission_and_its_recorded_conditions() -> None:
    ready = condition("PodsReady", "True", reason="Started")
    raw = workload(RESERVED, ADMITTED, ready, admission=ASSIGNED)
    group = observe.group(kueue.ADAPTER)(raw)
    assert group == ObservedGroup(
        adapter="kueue",
        name="digits",
        uid="u",
        owner_uid="7d0c6f1e-0000-4000-8000-000000000001",
        attempt=0,
        admission=Admission("admitted"),
        placement=Placement(count=2, flavors=("spot",)),
        nodes=2,
        queue="main",
        asked=("main", "high", ""),
        is_ready=True,
    )
    assert kueue.reads_for_pods(group.placement, V1BETA1) == ("/apis/kueue.x-k8s.io/v1beta1/resourceflavors/spot",)


def test_a_pod_consumes_what_its_provisioning_request_has_provisioned() -> None:
    """A pod must name its ProvisioningRequest in annotations, or the autoscaler provisions machines twice."""
    consume = {
        "autoscaling.x-k8s.io/consume-provisioning-request": "digits-provisioning-1",
        "autoscaling.x-k8s.io/provisioning-class-name": "queued-provisioning.gke.io",
    }
    update = {"name": "node", "annotations": consume, "nodeSelector": {"machines": "reserved-1"}}
    checks = [{"name": "provisioning", "state": "Ready", "message": "Provisioned", "podSetUpdates": [update]}]
    group = observe.group(kueue.ADAPTER)(workload(RESERVED, ADMITTED, admission=ASSIGNED, admissionChecks=checks))
    body: dict[str, Any] = {"metadata": {"annotations": {"own": "kept"}}, "spec": {}}
    kueue.place(body, group, [])
    assert body["metadata"]["annotations"] == {"own": "kept", **consume}
    assert body["spec"]["nodeSelector"] == {"machines": "reserved-1"}


def test_a_pod_runs_on_the_nodes_of_its_quota() -> None:
    """A pod must run on the nodes of its quota, because others are promised to other jobs."""
    taint = {"key": "spot", "operator": "Exists"}
    flavor = {"spec": {"nodeLabels": {"pool": "spot"}, "tolerations": [taint]}}
    update = {"name": "node", "nodeSelector": {"made-for": "digits"}, "annotations": {"capacity": "request-1"}}
    checks = [{"name": "nodes", "state": "Ready", "podSetUpdates": [update]}]
    group = observe.group(kueue.ADAPTER)(workload(RESERVED, ADMITTED, admission=ASSIGNED, admissionChecks=checks))
    body = build.pod(job(), 1, 0)
    body["spec"]["nodeSelector"] = {"pool": "any", "disk": "ssd"}
    kueue.place(body, group, [flavor])
    assert body["spec"]["nodeSelector"] == {"pool": "spot", "disk": "ssd", "made-for": "digits"}
    assert body["spec"]["tolerations"] == [taint]
    assert body["metadata"]["annotations"]["capacity"] == "request-1"
    assert "schedulingGates" not in body["spec"]


HOST = "kubernetes.io/hostname"
V1BETA1_TOPOLOGY = {"levels": ["rack"], "domains": [{"values": ["rack-1"], "count": 2}]}
V1BETA2_TOPOLOGY = {
    "levels": ["rack"],
    "slices": [{"domainCount": 1, "valuesPerLevel": [{"universalValue": "rack-1"}], "universalPodCount": 2}],
}


@pytest.mark.parametrize("topology", [V1BETA1_TOPOLOGY, V1BETA2_TOPOLOGY], ids=["v1beta1", "v1beta2"])
def test_if_kueue_assigns_the_nodes_of_each_pod_the_pod_waits_for_the_assignment(topology: dict[str, Any]) -> None:
    """If Kueue assigns the nodes, a pod must wait for it: the operator only sets a gate."""
    assigned = copy.deepcopy(ASSIGNED)
    assigned["podSetAssignments"][0]["topologyAssignment"] = topology  # type: ignore[index]
    group = observe.group(kueue.ADAPTER)(workload(RESERVED, ADMITTED, admission=assigned))
    body = build.pod(job(), 1, 0)
    kueue.place(body, group, [{"spec": {}}])
    assert body["spec"]["schedulingGates"] == [{"name": "kueue.x-k8s.io/topology"}]
    labels = body["metadata"]["labels"]
    assert (labels["kueue.x-k8s.io/tas"], labels["kueue.x-k8s.io/podset"]) == ("true", "node")
    assert body["metadata"]["annotations"]["kueue.x-k8s.io/workload"] == "digits"


@pytest.mark.parametrize(
    ("levels", "named"), [([], False), (["rack"], False), (["kubernetes.io/hostname"], True), (["rack", HOST], True)]
)
def test_kueue_assigns_nodes_if_the_lowest_level_of_its_topology_is_the_node(levels: list[str], named: bool) -> None:
    assigned = copy.deepcopy(ASSIGNED)
    if levels:
        assigned["podSetAssignments"][0]["topologyAssignment"] = {"levels": levels}  # type: ignore[index]
    assert kueue.placement(workload(RESERVED, ADMITTED, admission=assigned)).names_nodes is named


@pytest.mark.parametrize(("names_nodes", "avoided"), [(False, ("node-1",)), (True, ())])
def test_a_pod_avoids_a_bad_node_only_if_kueue_has_not_assigned_that_node(
    names_nodes: bool, avoided: tuple[str, ...]
) -> None:
    """A pod must not avoid the node that Kueue has assigned: it would fit nowhere while the job holds its quota."""
    world = admitted()
    placement = Placement(by_topology=True, names_nodes=names_nodes)
    world.groups = {n: replaced(g, placement=placement) for n, g in world.groups.items()}
    for _ in range(2):
        world.running().exits(1, code=1, message="RuntimeError: CUDA error: uncorrectable ECC error encountered")
        world.settle().stops_all()
        plans = [world.after(20).step() for _ in range(6)]
    made = [action for plan in plans for action in plan.actions if isinstance(action, CreatePod)]
    assert [a.node for a in world.status.avoided_nodes] == ["node-1"]
    assert {a.avoid for a in made} == {avoided}


def seen(body: dict[str, Any]) -> Pod:
    """Return the Workload as the operator keeps it: only the fields that bounded_json.py names."""
    (raw,) = bounded_json.page(
        json.dumps({"metadata": {"resourceVersion": "1"}, "items": [body]}).encode(), "pods"
    ).items
    return observe.pod(raw)


def test_a_pod_that_kueue_queues_by_itself_gets_a_message_with_the_fix() -> None:
    """A pod that Kueue queues by itself must cause a message with the fix: kubectl only shows a scheduling gate."""
    body = build.pod(job(), 1, 1)
    body["metadata"]["uid"] = "u"
    why = "Scheduling is blocked due to non-empty scheduling gates"
    gated = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": why}
    body["status"] = {"phase": "Pending", "conditions": [gated]}
    assert seen(body).unschedulable == why
    body["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/admission"}]
    helps = (
        "Kueue queues each pod of this job by itself; "
        "label the job with kueue.x-k8s.io/queue-name to queue it as a whole"
    )
    assert seen(body).unschedulable == helps
    body["status"]["conditions"] = []
    assert seen(body).unschedulable == "", "a pod that is not asked about yet waits for nobody"


# ---------------------------------------------------------------- what Kueue gets from the operator


def told(raw: dict[str, Any], what: Any) -> dict[str, dict[str, Any]] | None:
    status = kueue.tell(raw, what, "all nodes run", LATER)
    return None if status is None else {c["type"]: c for c in status["conditions"]}


def test_quota_is_released_with_the_admission_and_the_job_queues_again() -> None:
    """The quota must be released with the admission: Kueue does not do this for a Workload of another controller."""
    ready = condition("PodsReady", "True", reason="Started")
    raw = workload(RESERVED, ADMITTED, PREEMPTED, ready, admission=ASSIGNED)
    status = kueue.tell(raw, "quota returned", "waiting in the queue", LATER)
    assert status is not None
    assert "admission" not in status
    now = {"lastTransitionTime": "2031-03-05T07:11:43Z", "observedGeneration": 3}
    why = "Preempted to accommodate a workload"
    assert status["conditions"] == [
        {"type": "QuotaReserved", "status": "False", "reason": "Pending", "message": why, **now},
        {
            "type": "Admitted",
            "status": "False",
            "reason": "NoReservation",
            "message": "The workload has no reservation",
            **now,
        },
        PREEMPTED,
        {
            "type": "PodsReady",
            "status": "False",
            "reason": "WaitForStart",
            "message": "waiting in the queue",
            **now,
        },
        {"type": "Requeued", "status": "True", "reason": "Preempted", "message": why, **now},
    ]


@pytest.mark.parametrize(
    "reason", ["PodsReadyTimeout", "AdmissionCheck", "Deactivated", "DeactivatedDueToRequeuingLimitExceeded"]
)
def test_a_reason_after_which_kueue_itself_requeues_the_job_is_kept_exactly(reason: str) -> None:
    """A reason after which Kueue requeues a job must be kept exactly, because Kueue compares it. With another reason
    the job would be admitted at once or never."""
    conditions = told(workload(RESERVED, ADMITTED, {**PREEMPTED, "reason": reason}), "quota returned")
    assert conditions is not None
    assert (conditions["Requeued"]["status"], conditions["Requeued"]["reason"]) == (
        "False",
        reason.partition("DueTo")[0],
    )


def test_an_admission_that_arrived_meanwhile_is_not_withdrawn() -> None:
    assert told(workload(RESERVED, ADMITTED), "quota returned") is None
    assert told(workload(NO_ROOM, PREEMPTED), "quota returned") is None


def test_pods_ready_is_true_when_all_nodes_run_and_again_after_a_restart() -> None:
    """The condition PodsReady must be true when all nodes run, or Kueue's waitForPodsReady evicts the job."""
    raw = workload(RESERVED, ADMITTED)
    seen = []
    for what in ("ready", "unready", "ready"):
        status = kueue.tell(raw, what, "m", LATER)  # type: ignore[arg-type]
        assert status is not None
        raw = {**raw, "status": status}
        (ready,) = [c for c in status["conditions"] if c["type"] == "PodsReady"]
        seen.append((ready["status"], ready["reason"]))
        assert told(raw, what) is None, "it knows"
    assert seen == [("True", "Started"), ("False", "WaitForRecovery"), ("True", "Recovered")]
    assert told(workload(NO_ROOM), "ready") is None, "not admitted"


def test_the_end_of_a_job_is_written_to_its_workload_once() -> None:
    raw = workload(RESERVED, ADMITTED, admission=ASSIGNED)
    conditions = told(raw, "succeeded")
    assert conditions is not None
    assert (conditions["Finished"]["status"], conditions["Finished"]["reason"]) == ("True", "Succeeded")
    assert told(workload(RESERVED, condition("Finished", "True")), "failed") is None


# ---------------------------------------------------------------- from admission to the end


def test_a_job_keeps_its_quota_across_restarts_and_replacements_and_reports_when_it_runs() -> None:
    """The quota must be kept between two attempts, or other jobs take the nodes and the job queues again."""
    world = admitted()
    assert world.told == ["ready"]
    world.exits(0, code=1).restarted().running()
    world.evicted(1, "Evicted").restarted().after(600).running()
    assert (world.status.attempt, list(world.groups)) == (3, ["digits"])
    assert world.told == ["ready", "unready", "ready", "unready", "ready"]


@pytest.mark.parametrize("end", ["succeeded", "failed"])
def test_a_finished_job_releases_its_quota_when_the_last_pod_has_ended(end: str) -> None:
    world = admitted(backoffLimit=0)
    if end == "succeeded":
        world.exits(0).exits(1).settle()
    else:
        world.exits(0, code=1).settle()
        assert end not in world.told, "a pod still stops"
        world.stops_all().settle()
    assert world.told[-1] == end
    assert list(world.groups) == ["digits"], "the Workload stays with the job, as its record in the queue"
    assert world.settle().told.count(end) == 1


def test_a_preemption_stops_all_pods_with_full_grace_and_releases_the_quota_afterwards() -> None:
    """A preemption must stop pods with their full grace period, and release the quota only after their end."""
    world = admitted().admits("evicted", "preempted by resnet", holds_quota=True)
    world.step()
    assert (world.status.state, world.status.reason) == ("Suspended", "Evicted")
    assert not world.is_true("Suspended"), "its pods still have the nodes"
    stops = [action for action in world.step().actions if isinstance(action, DeletePod)]
    assert [stop.grace_seconds for stop in stops] == [None, None]
    assert world.settle().told == ["ready"], "its pods still stop"
    world.stops(0).settle()
    assert world.told == ["ready"], "one still stops"
    world.stops(1).settle()
    assert world.told == ["ready", "quota returned"]
    assert (world.status.reason, world.is_true("Suspended")) == ("WaitingForAdmission", True)
    assert world.status.start_time is None, "no deadline runs"
    world.admits().running()
    assert (world.status.state, world.status.attempt) == ("Running", 2)
    assert world.status.restarts is None or world.status.restarts.total == 0


def test_a_job_readmitted_while_its_pods_stop_stops_them_all_and_begins_a_new_attempt() -> None:
    world = admitted().admits("evicted", "preempted by resnet", holds_quota=True)
    world.step()
    world.admits().settle()
    assert all(pod.deletion_requested_at for pod in world.pods.values()), "what stops, stops"
    assert world.status.message == "resumes when 2 pods have ended"
    assert world.stops_all().settle().names() == ["digits-2-0", "digits-2-1"]


def test_a_preempted_job_whose_nodes_had_all_completed_has_succeeded_and_leaves_the_queue() -> None:
    """If all nodes have completed, a preempted job has succeeded, and must not wait for quota to train again."""
    world = admitted().admits("evicted", "preempted by resnet", holds_quota=True)
    world.step()
    assert world.status.reason == "Evicted"
    world.exits(0).exits(1).settle()
    assert (world.status.state, world.told[-1]) == ("Succeeded", "succeeded")


def test_a_failure_before_an_eviction_is_charged_and_fails_a_job_without_restarts_left() -> None:
    """A failure before an eviction must be charged: otherwise a failing script in a preempted queue never ends."""
    world = admitted(backoffLimit=0).exits(1, 1)
    world.step()
    world.admits("evicted", "preempted by resnet", holds_quota=True).settle().stops_all().settle()
    assert (world.status.state, world.status.reason, world.told[-1]) == ("Failed", "BackoffLimitExceeded", "failed")
    assert world.status.last_failure.failure_class == "application"


def test_a_failure_before_an_eviction_uses_up_a_restart_and_the_job_queues_again() -> None:
    """After an eviction the next attempt must wait for an admission, because other jobs have the quota."""
    world = admitted(backoffLimit=3).exits(1, 1)
    world.step()
    world.admits("evicted", "preempted by resnet", holds_quota=True).settle()
    assert world.told == ["ready"], "a pod still stops"
    world.stops_all().settle()
    assert (world.status.state, world.status.reason) == ("Suspended", "WaitingForAdmission")
    assert world.told[-1] == "quota returned"
    assert not any(pod.live for pod in world.pods.values())
    world.admits().after(600).running()
    assert world.status.state == "Running"
    assert world.status.restarts.application == 1


def test_an_eviction_stops_nodes_that_wait_for_a_slowly_ending_pod() -> None:
    """An eviction must stop nodes that wait for a replacement: they would use the quota of others."""
    world = admitted(container={"command": ["ddprun", "train.py"]}).deleted_first(1).settle()
    world.admits("evicted", "preempted by resnet", holds_quota=True).settle()
    assert all(pod.deletion_requested_at is not None for pod in world.pods.values())
    world.stops_all().settle()
    assert (world.status.reason, world.told[-1]) == ("WaitingForAdmission", "quota returned")


def test_an_admission_that_is_withdrawn_during_the_start_releases_everything() -> None:
    world = queued().settle().admits().settle()
    assert len(world.names()) == 2
    world.admits("evicted", "its queue was stopped", holds_quota=True).settle().stops_all().settle()
    assert (world.names(), world.told) == ([], ["quota returned"])
    assert world.status.message == "waiting in the queue: its queue was stopped"


def test_an_eviction_before_the_first_pod_releases_the_quota_at_once() -> None:
    world = queued().settle().admits("evicted", "preempted", holds_quota=True).settle()
    assert (world.names(), world.told, world.status.state) == ([], ["quota returned"], "Pending")


def test_pods_of_an_evicted_job_that_are_found_later_are_stopped_too() -> None:
    """If the answer to a create was lost, its pod is found only later, and must be stopped as well."""
    world = admitted().admits("evicted", "preempted", holds_quota=True).settle()
    late = replace(next(iter(world.pods.values())), deletion_requested_at=None, deletion_deadline=None)
    world.stops_all().settle()
    world.pods[late.name] = late
    assert any(isinstance(action, DeletePod) for action in world.step().actions)


def test_a_suspended_job_releases_its_quota_when_its_pods_have_ended_and_queues_again() -> None:
    world = admitted().change(suspend=True).settle()
    assert list(world.groups) == ["digits"], "its pods still stop"
    world.stops_all().settle()
    assert world.groups == {}
    world.change(suspend=False).settle()
    assert (list(world.groups), world.names()) == (["digits"], [])


def test_a_job_that_is_resumed_while_its_pods_stop_keeps_its_quota() -> None:
    """A job that is resumed while its pods stop must keep its quota, and not go to the end of the queue."""
    world = admitted().change(suspend=True).settle().change(suspend=False).settle()
    assert world.status.message == "resumes when 2 pods have ended"
    world.stops_all().settle()
    assert (world.names(), world.told) == (["digits-2-0", "digits-2-1"], ["ready", "unready"])


def test_a_job_evicted_while_it_waits_to_resume_releases_its_quota_when_its_pods_have_ended() -> None:
    world = admitted().change(suspend=True).settle().change(suspend=False).settle()
    world.admits("evicted", "preempted by resnet", holds_quota=True).settle()
    assert world.status.message == "evicted from its queue: preempted by resnet; 2 pods still stopping"
    assert "quota returned" not in world.told
    world.stops_all().settle()
    assert (world.names(), world.told[-1]) == ([], "quota returned")
    assert world.status.reason == "WaitingForAdmission"


def test_deleting_a_workload_by_hand_is_an_eviction() -> None:
    """A Workload that is deleted by hand must count as an eviction, because other jobs get its quota at once."""
    world = admitted()
    world.groups.clear()
    world.settle()
    assert world.status.message == "evicted from its queue: its Workload was deleted; 2 pods still stopping"
    world.stops_all().settle()
    assert list(world.groups) == ["digits"]


def test_a_job_keeps_running_while_its_queue_api_is_unavailable_and_delays_a_restart() -> None:
    world = admitted()
    world.gang_apis["kueue"] = GangApi(why_not="the API server does not serve workloads")
    world.groups.clear()
    assert world.settle().status.state == "Running"
    world.exits(0, code=1).restarted()
    assert (world.status.reason, world.names()) == ("GangUnavailable", ["digits-1-0"])
    assert world.status.message.endswith("no pod is created without its gang: the API server does not serve workloads")


@pytest.mark.parametrize("begun", [False, True])
def test_a_waiting_job_leaves_its_queue_while_its_spec_is_invalid(begun: bool) -> None:
    """A waiting job must leave its queue while its spec is invalid: it would hold quota and create no pods."""
    world = queued().settle()
    if begun:
        world.admits().running().admits("evicted", "preempted", holds_quota=True).settle()
        world.problems = [validation.Problem(("spec", "template"), "bad")]
        assert list(world.settle().groups) == ["digits"], "its pods still use the quota"
        world.stops_all()
    world.problems = [validation.Problem(("spec", "template"), "bad")]
    assert (world.settle().status.reason, world.groups, world.names()) == ("InvalidSpec", {}, [])
    world.problems = []
    assert (world.settle().status.reason, list(world.groups)) == ("WaitingForAdmission", ["digits"])
    assert world.admits().running().status.state == "Running"


def test_a_running_job_keeps_its_quota_when_its_spec_becomes_invalid() -> None:
    """A running job must keep its quota although its spec is invalid, because its pods still use it."""
    world = admitted()
    world.problems = [validation.Problem(("spec", "template"), "bad")]
    assert (world.settle().status.state, list(world.groups)) == ("Running", ["digits"])


def test_a_waiting_job_starts_no_pod_while_its_queue_api_is_unavailable() -> None:
    """While the queue's API is unavailable, a waiting job must create no pod: its admission may be withdrawn."""
    for world in (queued(), queued().settle().admits("waiting", "busy").settle(), queued().settle().admits()):
        world.gang_apis["kueue"] = GangApi(why_not="the API server cannot list Workloads")
        known = list(world.groups)
        world = relabelled(world, queue_name="research")
        assert (world.settle().names(), list(world.groups)) == ([], known)
        assert world.status.message == "waiting in the queue: the API server cannot list Workloads"
        world.serves("kueue", V1BETA1).settle()
        assert world.status.message != "waiting in the queue: the API server cannot list Workloads"


def test_a_refusal_of_kueue_is_shown_and_retried() -> None:
    """A refusal of Kueue, such as of its webhook, must be shown in the status and retried."""
    world = queued()
    later = world.now + dt.timedelta(seconds=10)
    world.refusals = [Refusal(WORKLOADS, "digits", "failed calling webhook", later)]
    world.settle()
    assert world.status.message == ("waiting in the queue: Workload digits was refused: failed calling webhook")
    assert (list(world.groups), world.plan().requeue_at) == ([], later)
    world.after(11).settle()
    assert list(world.groups) == ["digits"]
    world.admits().running().admits("evicted", "preempted", holds_quota=True).settle().stops_all()
    world.refusals = [Refusal(WORKLOADS, "digits", "failed calling webhook", world.now + dt.timedelta(seconds=10))]
    world.settle()
    assert world.status.message.endswith("Workload digits was refused: failed calling webhook")
    assert "quota returned" not in world.told
    world.after(11).settle()
    assert world.told[-1] == "quota returned"


def test_a_refused_service_does_not_delay_the_release_of_the_quota() -> None:
    """A refused Service must not delay the release of the quota, although it has the Workload's name."""
    world = queued().settle().admits()
    world.refusals = [Refusal("Service", "digits", "exceeded quota: services", world.now + dt.timedelta(seconds=300))]
    assert world.settle().status.message == "digits was refused: exceeded quota: services"
    world.admits("evicted", "preempted", holds_quota=True).settle()
    assert world.told == ["quota returned"]


def admitted_in_part() -> World:
    """Return a world with a job of up to four nodes that was admitted with three, which are running."""
    return queued(nodes=4, minNodes=2).settle().admits_part("digits", 3).settle().runs(0, 1, 2).settle()


def test_an_elastic_job_runs_and_restarts_with_the_admitted_number_of_nodes() -> None:
    """A job that was admitted with fewer nodes must run and restart with exactly these, also after a failure."""
    world = admitted_in_part()
    assert world.names() == ["digits-1-0", "digits-1-1", "digits-1-2"]
    assert (world.status.state, world.status.attempt) == ("Running", 1)
    assert world.status.nodes == api.Nodes(total=3, ready=3)
    world.evicted(0, "Evicted").restarted()
    assert world.status.attempt == 2
    assert [n for n in world.names() if n.startswith("digits-2")] == ["digits-2-0", "digits-2-1", "digits-2-2"]
    assert world.runs(0, 1, 2).settle().status.state == "Running"


def test_a_partially_admitted_job_keeps_running_if_a_new_operator_cannot_reach_its_queue() -> None:
    """A partially admitted job must keep running if its queue cannot be reached: nobody could admit new pods."""
    world = admitted_in_part()
    known, world.groups = world.groups, {}
    world.gang_apis["kueue"] = GangApi(why_not="the API server does not serve workloads")
    assert (world.settle().status.state, world.status.attempt) == ("Running", 1)
    world.groups, world.gang_apis["kueue"] = known, GangApi(V1BETA1)
    assert (world.settle().status.state, world.status.attempt) == ("Running", 1)


def test_a_workload_for_other_pods_than_those_of_the_job_is_replaced_while_it_waits() -> None:
    world = queued(nodes=4, minNodes=2).settle().change(nodes=3)
    group = world.groups["digits"]
    assert DeleteGroup("kueue", "digits", group.uid) in world.plan().actions
    assert world.settle().groups["digits"].nodes == 3


# ---------------------------------------------------------------- a size that changes while the job is running


def grows(**spec: Any) -> World:
    """Return a ddprun job of two to eight nodes that was admitted with four, which are running."""
    ddprun = {"command": ["ddprun", "train.py"]}
    world = queued(**{"nodes": 8, "minNodes": 2, "container": ddprun, **spec}).settle().admits_part("digits", 4)
    return world.settle().runs(0, 1, 2, 3).settle()


def quota(world: World) -> dict[str, int | None]:
    """Return the number of pods for which each group has quota; None for groups that wait."""
    return {n: g.placement.count if g.admission.state == "admitted" else None for n, g in world.groups.items()}


def test_a_job_admitted_in_part_queues_for_the_rest_and_grows_while_its_nodes_train() -> None:
    """A job admitted in part must grow when there is room, and its running nodes must not stop for it."""
    world = grows()
    assert quota(world) == {"digits": 4, "digits.2": None}
    assert (world.groups["digits.2"].nodes, world.status.reason) == (4, "EnoughNodesRun")
    world.groups["digits.2"] = replaced(world.groups["digits.2"], admission=Admission("waiting", "no room"))
    text = "4 of 4 nodes are running, attempt 1; waiting in the queue for 4 more nodes: no room"
    assert world.settle().status.message == text
    world.admits_part("digits.2", 3).settle()
    assert world.names()[4:] == ["digits-1-4", "digits-1-5", "digits-1-6"]
    world.runs(4, 5, 6).settle()
    assert quota(world) == {"digits": 4, "digits.2": 3, "digits.3": None}
    world.admits_part("digits.3", 1).settle().runs(7).settle()
    assert (world.status.message, world.status.reason) == ("8 of 8 nodes are running, attempt 1", "AllNodesRun")
    for place in range(8):
        world.exits(place)
    assert (world.settle().status.state, list(world.groups)) == ("Succeeded", ["digits"])


def test_a_smaller_job_gives_the_quota_of_its_pods_back_when_they_have_ended_and_queues_to_grow() -> None:
    """Other jobs must get the quota of the nodes that left, but not before their pods have ended."""
    world = grows(nodes=4).change(nodes=2).settle()
    assert (quota(world), world.told) == ({"digits": 4}, ["ready"])
    world.stops_all().settle()
    assert (quota(world), world.names(), world.told[-1]) == ({"digits": 2}, ["digits-1-0", "digits-1-1"], "smaller")
    world.change(nodes=3).settle()
    assert quota(world) == {"digits": 2, "digits.2": None}
    world.change(nodes=4).settle()
    assert world.groups["digits.2"].nodes == 2, "the request follows spec.nodes while it waits"
    world.admits_part("digits.2", 2).settle().runs(2, 3).settle()
    assert (world.status.attempt, world.status.reason) == (1, "AllNodesRun")
    world.change(nodes=3).settle().stops_all().settle()
    assert quota(world) == {"digits": 2, "digits.2": 1}
    world.change(nodes=2).settle()
    assert "digits.2" in world.groups, "a pod of it still stops"
    assert quota(world.stops_all().settle()) == {"digits": 2}


def test_a_preemption_of_the_nodes_that_came_later_stops_only_these() -> None:
    """If only the later nodes are preempted, the others must train on, and the job must queue for nodes again."""
    world = grows(nodes=6).admits_part("digits.2", 2).settle().runs(4, 5).settle()
    first, evicted = world.groups["digits.2"], Admission("evicted", "preempted by resnet", holds_quota=True)
    world.groups["digits.2"] = replaced(first, admission=evicted)
    world.settle()
    stopping = [pod.place for pod in world.pods.values() if pod.deletion_requested_at is not None]
    assert (world.status.state, stopping, world.groups["digits.2"].uid) == ("Running", [4, 5], first.uid)
    assert any("the queue has admitted 4 nodes, and attempt 1 has 6" in event.message for event in world.events)
    answer = leadership.answer(world.job, replace(world.pods["digits-1-0"], address="10.0.0.1"), 29400)
    assert answer is not None
    assert answer["places"] == "0-3", "a new leader must wait for no pod that was preempted"
    world.stops_all().settle()
    assert (world.status.attempt, quota(world)) == (1, {"digits": 4, "digits.2": None})
    assert world.groups["digits.2"].uid != first.uid


def test_a_preemption_of_the_first_nodes_stops_all_and_the_job_queues_as_a_whole() -> None:
    world = grows(nodes=6).admits_part("digits.2", 2).settle().runs(4, 5).settle()
    evicted = Admission("evicted", "preempted by resnet", holds_quota=True)
    world.groups["digits"] = replaced(world.groups["digits"], admission=evicted)
    world.settle().stops_all().settle()
    assert (world.status.reason, quota(world)) == ("WaitingForAdmission", {"digits": None})
    assert world.groups["digits"].nodes == 6


def test_a_job_whose_first_workload_is_deleted_requests_no_node_twice() -> None:
    world = grows()
    del world.groups["digits"]
    world.settle()
    assert world.groups == {}, "what waits for more nodes is withdrawn at once"
    assert list(world.stops_all().settle().groups) == ["digits"]
    world = grows().admits_part("digits.2", 4).settle().runs(4, 5, 6, 7).settle()
    del world.groups["digits"]
    assert list(world.settle().groups) == ["digits.2"], "its pods still stop"
    world.stops_all().step()
    assert "digits" not in world.groups
    assert list(world.settle().groups) == ["digits"]


def test_pods_are_told_the_admitted_number_of_nodes() -> None:
    """Agents wait 30 s for nodes that were not admitted, and a pod at a place above spec.nodes could not be made."""
    world = grows()
    assert {"name": "PET_NNODES", "value": "2:4"} in build.pod(world.job, 1, 0)["spec"]["containers"][0]["env"]
    assert build.pod(world.change(nodes=2).job, 1, 3)["metadata"]["name"] == "digits-1-3"


def test_a_suspended_job_leaves_the_queue_with_all_its_groups() -> None:
    world = grows().change(suspend=True).settle().stops_all().settle()
    assert (world.groups, world.is_true("Suspended")) == ({}, True)


@pytest.mark.parametrize("why", ["torchrun", "topology", "moves", "not elastic"])
def test_some_jobs_do_not_queue_for_more_nodes(why: str) -> None:
    """A job must not queue for nodes that could not join: torchrun restarts all, and another rack is too far away."""
    world = grows(**{"container": None} if why == "torchrun" else {})
    world = admitted() if why == "not elastic" else world
    if why == "topology":
        world.groups = {"digits": replaced(world.groups["digits"], placement=Placement(count=4, by_topology=True))}
    elif why == "moves":
        del world.groups["digits.2"]
        world = relabelled(world, queue_name="research")
    assert list(world.settle().groups) == ["digits"]


def test_a_refused_request_for_more_nodes_is_shown_and_retried() -> None:
    world = grows(nodes=4)
    later = world.now + dt.timedelta(seconds=10)
    world.refusals = [Refusal(WORKLOADS, "digits.2", "failed calling webhook", later)]
    world.change(nodes=5).settle()
    assert world.status.message.endswith("1 more node: Workload digits.2 was refused: failed calling webhook")
    assert (list(world.groups), world.plan().requeue_at) == (["digits"], later)
    assert "digits.2" in world.after(11).settle().groups


def test_a_further_workload_asks_for_some_of_the_missing_nodes() -> None:
    body = kueue.body(job(nodes=8, minNodes=4, container={"command": ["ddprun", "x.py"]}), 0, V1BETA1)
    kueue.further(body, "digits.2", 3)
    (podset,) = body["spec"]["podSets"]
    assert (podset["count"], podset["minCount"], body["metadata"]["name"]) == (3, 1, "digits.2")
    raw = {**body, "metadata": {**body["metadata"], "uid": "u"}}
    assert observe.group(kueue.ADAPTER)(raw).number == 2


def test_freed_quota_is_counted_as_kueue_counts_it() -> None:
    """A Workload for 8 pods that was admitted with 4 uses 4, until fewer than 4 of the 8 are left."""
    raw = workload(RESERVED, ADMITTED, admission={"podSetAssignments": [{"name": "node", "count": 4}]})
    raw["spec"]["podSets"][0]["count"] = 8
    status = kueue.tell(raw, "smaller", "m", LATER, pods=3)
    assert status is not None
    assert status["reclaimablePods"] == [{"name": "node", "count": 5}]
    assert (kueue.placement(raw).count, kueue.placement({**raw, "status": status}).count) == (4, 3)
    assert kueue.tell({**raw, "status": status}, "smaller", "m", LATER, pods=3) is None, "it knows"
    evicted = {**status, "conditions": [RESERVED, PREEMPTED]}
    returned = kueue.tell({**raw, "status": evicted}, "quota returned", "m", LATER)
    assert returned is not None
    assert "reclaimablePods" not in returned, "the job queues with all its nodes again"


def test_spares_in_a_queue_have_quota_too() -> None:
    (podset,) = kueue.body(job(nodes=2, spares=1, container={"command": ["ddprun", "x.py"]}), 0, V1BETA1)["spec"][
        "podSets"
    ]
    assert (podset["count"], "minCount" in podset) == (3, False)
    world = queued(spares=1, container={"command": ["ddprun", "x.py"]}).settle().admits_part("digits", 3).running()
    assert (world.status.message, world.told) == ("2 of 2 nodes are running and 1 spare, attempt 1", ["ready"])


def relabelled(world: World, **labels: str) -> World:
    """Let the user change the labels of the job."""
    world.job = labelled(world.job, **labels)
    return world


@pytest.mark.parametrize(
    ("labels", "topology", "asked"),
    [
        ({"queue_name": "main", "priority_class": "high"}, None, ("main", "high", "")),
        ({"queue_name": "main"}, "rack", ("main", "", "rack")),
    ],
    ids=["priority", "topology"],
)
def test_the_workload_of_a_waiting_job_follows_changes_of_the_job(
    labels: dict[str, str], topology: str | None, asked: tuple[str, str, str]
) -> None:
    """The Workload of a waiting job must follow changes of the job's labels and topology."""
    world = relabelled(queued(topologyKey="rak").settle(), **labels).change(topology_key=topology).settle()
    assert world.groups["digits"].asked == asked


def test_a_job_in_a_missing_queue_moves_to_the_right_one_when_its_label_is_fixed() -> None:
    """A job with a typo in its label must not wait for a queue that nobody creates, until a user suspends it."""
    world = queued().settle().admits("waiting", "LocalQueue main doesn't exist").settle()
    wrong = world.groups["digits"]
    assert relabelled(world, queue_name="research").plan().actions == (DeleteGroup("kueue", "digits", wrong.uid),)
    world.settle()
    assert (world.groups["digits"].asked, world.names()) == (("research", "", ""), [])
    assert world.admits().running().status.state == "Running"


@pytest.mark.parametrize("version", [V1BETA1, "kueue.x-k8s.io/v1beta2"])
def test_a_workload_is_compared_with_the_same_values_that_are_written(version: str) -> None:
    """A read Workload must be compared with the same values that are written, or the job is queued again and again."""
    pod = {"containers": [{"name": "trainer", "image": "i"}]}
    annotations = {"kueue.x-k8s.io/podset-required-topology": "block", "kueue.x-k8s.io/podset-preferred-topology": "a"}
    jobs = [
        job(),
        job(topologyKey="rack"),
        job(template={"metadata": {"annotations": annotations}, "spec": {**pod, "priorityClassName": "research"}}),
        labelled(job(topologyKey="rack", minNodes=1), queue_name="main", priority_class="high"),
    ]
    for each in jobs:
        raw = kueue.body(each, 0, version)
        assert observe.group(kueue.ADAPTER)({**raw, "metadata": {**raw["metadata"], "uid": "u"}}).asked == kueue.asks(
            each
        )


def test_an_admitted_job_keeps_its_queue_until_it_queues_again_whatever_its_labels_become() -> None:
    """A running job must stay in the queue that admitted it, because its pods use this queue's quota."""
    world = relabelled(admitted(), queue_name="research").settle()
    assert (world.status.state, world.groups["digits"].asked) == ("Running", ("main", "", ""))
    world.admits("evicted", "preempted", holds_quota=True).settle().stops_all().settle()
    assert world.told[-1] == "quota returned"
    assert world.groups["digits"].asked == ("research", "", "")


def test_a_job_that_is_stopped_in_its_queue_stays_stopped_whatever_its_labels_become() -> None:
    """The job's owner must not be able to undo an administrator's stop by a change of the label."""
    stopped = kueue.read({"spec": {"active": False}})
    world = admitted().admits("evicted", "deactivated", holds_quota=True).settle().stops_all().settle()
    uid = world.admits("waiting", stopped.why, stopped=True).settle().groups["digits"].uid
    relabelled(world, queue_name="main", priority_class="low").settle()
    assert world.groups["digits"].uid == uid
    world.admits("waiting", "busy").settle()
    assert world.groups["digits"].asked == ("main", "low", ""), "it follows its labels once it waits again"


@pytest.mark.parametrize("how", ["label", "field"])
def test_a_restart_keeps_the_quota_even_if_the_job_will_leave_its_queue(how: str) -> None:
    """The job must not train outside its queue after its next failure, on resources promised to others."""
    world = admitted()
    world = (relabelled(world) if how == "label" else world.change(gang="none")).settle()
    world.exits(1, code=1).restarted().running()
    assert (world.status.attempt, list(world.groups)) == (2, ["digits"])
    assert world.status.gang == api.Gang(kind="kueue", attempt=2, why="a restart keeps its place in the queue")
    world.change(suspend=True).settle().stops_all().settle().change(suspend=False).running()
    assert (world.status.attempt, world.groups, world.status.state) == (3, {}, "Running")


def test_a_running_job_joins_a_queue_when_it_is_resumed_and_not_at_a_failure() -> None:
    """A running job must join a queue when it is resumed, and not at a failure, where it would lose its nodes."""
    world = relabelled(World(job()).serves("kueue", V1BETA1).running(), queue_name="main").settle()
    world.exits(1, code=1).restarted().running()
    assert (world.status.state, world.status.attempt, world.groups) == ("Running", 2, {})
    assert world.status.gang == api.Gang(kind="none", attempt=2, why="a restart does not join a queue")
    world.change(suspend=True).settle().stops_all().settle().change(suspend=False).settle()
    assert (world.status.reason, list(world.groups)) == ("WaitingForAdmission", ["digits"])


def test_a_job_whose_queue_was_switched_off_restarts_without_it() -> None:
    """If a queue is switched off, the job must restart without an admission, which nobody could give."""
    world = admitted()
    world.gang_apis.clear()
    world.groups.clear()
    world.exits(1, code=1).restarted()
    assert world.names() == ["digits-1-1", "digits-2-0", "digits-2-1"]


@pytest.mark.parametrize("how", ["label", "field"])
def test_a_waiting_job_leaves_its_queue_if_the_user_removes_it(how: str) -> None:
    """A waiting job must be able to leave its queue, for example `default`, which may not exist."""
    world = queued().settle().admits("waiting", "insufficient unused quota").settle()
    world = relabelled(world) if how == "label" else world.change(gang="none")
    world.running()
    assert (world.status.state, world.groups) == ("Running", {})
    assert (world.status.gang or api.Gang(kind="kueue")).kind == "none"


def test_pods_stopped_by_an_eviction_keep_their_full_grace_if_the_job_leaves_its_queue() -> None:
    """Pods of an evicted job must keep their full grace period to save, even if the job leaves its queue."""
    world = admitted().admits("evicted", "preempted", holds_quota=True)
    world.step()
    world = relabelled(world)
    stops = [action for _ in range(3) for action in world.step().actions if isinstance(action, DeletePod)]
    assert [stop.grace_seconds for stop in stops] == [None, None]
    world.stops_all().running()
    assert (world.status.state, world.status.attempt, world.groups) == ("Running", 2, {})


def test_a_workload_marked_as_finished_by_somebody_is_replaced_when_the_pods_have_ended() -> None:
    """The finished Workload must be replaced: its quota is free, and Kueue never admits it again."""
    world = admitted()
    before = world.groups["digits"]
    world.groups["digits"] = replaced(before, is_over=True, admission=Admission("evicted", "finished"))
    world.settle()
    assert world.groups["digits"].uid == before.uid, "its pods still stop"
    world.stops_all().settle()
    assert world.groups["digits"].uid != before.uid
    assert not any(isinstance(a, (CreatePod, TellGroup)) for a in world.plan().actions)
