"""All pods of a job or none: which scheduler or queue admits them, and what users see while the job waits."""

import dataclasses
from typing import Any

import documents
import msgspec
import pytest
from worlds import World, digits, job

from ddpjob_cli.describe.job import describe
from ddpjob_operator.gangs import choice, native
from ddpjob_operator.gangs.adapter import Adapter
from ddpjob_operator.job import api, validation
from ddpjob_operator.observed.groups import Admission, GangApi
from ddpjob_operator.plan.actions import CreateGroup, CreatePod, CreateService, DeleteGroup
from ddpjob_operator.pods import build

SERVED = {"native": GangApi("scheduling.k8s.io/v1alpha2")}
OFF = "gang native is not switched on in this operator (the chart's value gang.native.enabled)"


def gang(**spec: Any) -> World:
    """Return a job of two nodes where the API server serves PodGroups."""
    return digits(**spec).serves()


def queued(**spec: Any) -> World:
    """Return a job in a queue."""
    return World(job(gang="kueue", **spec)).serves("kueue", "kueue.x-k8s.io/v1beta1")


def test_without_a_gang_api_a_job_and_its_status_do_not_change() -> None:
    world = digits().running()
    assert world.status.gang is None
    assert world.groups == {}


@pytest.mark.parametrize(
    ("spec", "apis", "kind", "why"),
    [
        ({}, SERVED, "native", "the API server serves scheduling.k8s.io/v1alpha2"),
        ({}, {}, "none", OFF),
        ({}, {"native": GangApi(why_not="it does not")}, "none", "it does not"),
        ({"nodes": 1}, SERVED, "none", "one node needs no gang"),
        ({"gang": "none"}, SERVED, "none", "spec.gang is none"),
        ({"gang": "native"}, {}, "native", "spec.gang is native"),
        ({"topologyKey": "rack"}, {}, "native", "spec.topologyKey needs a gang"),
    ],
)
def test_auto_takes_the_gang_api_that_is_served_and_gives_the_reason(
    spec: dict[str, Any], apis: dict[str, GangApi], kind: str, why: str
) -> None:
    assert choice.choose(job(**spec), apis) == (kind, why)


def test_a_long_message_of_the_api_server_is_cut_and_the_end_of_the_job_is_kept() -> None:
    """A long message must be cut, but keep its end about the job: an RBAC error lists each missing role."""
    why = f"the operator may not list podgroups: {'; '.join(f'clusterrole {n} not found' for n in range(40))}"
    world = digits()
    world.gang_apis = {"native": GangApi(why_not=why)}
    world.step()
    status = validation.stored_status({"status": msgspec.to_builtins(world.status)})
    assert status.gang == api.Gang(kind="none", attempt=1, why=why[:500])
    assert world.settle().names() == ["digits-1-0", "digits-1-1"]


def test_a_job_for_another_scheduler_gets_no_pod_group_that_its_scheduler_ignores() -> None:
    template = {"spec": {"schedulerName": "volcano", "containers": [{"name": "trainer", "image": "i"}]}}
    assert choice.choose(job(template=template), SERVED) == ("none", "the template's schedulerName is volcano")


def test_the_pod_group_is_created_before_the_pods_and_the_status_gives_the_reason() -> None:
    world = gang()
    kinds = [type(action) for action in world.step().actions]
    assert kinds == [CreateService, CreateGroup, CreatePod, CreatePod]
    assert world.status.gang == api.Gang(
        kind="native", attempt=1, why="the API server serves scheduling.k8s.io/v1alpha2"
    )
    assert list(world.groups) == ["digits-1-00001"]


def test_a_job_that_requires_a_gang_creates_no_pod_if_no_gang_api_exists() -> None:
    """The job must create no pod. Without a gang, some of its pods could hold nodes for which another job waits."""
    world = digits(gang="native").settle()
    assert (world.names(), world.status.state, world.status.reason) == ([], "Pending", "GangUnavailable")
    assert world.status.message == f"no pod is created without its gang: {OFF}"
    world.serves().running()
    assert world.status.state == "Running"


def test_a_job_that_began_without_a_gang_gets_one_only_with_its_next_attempt() -> None:
    """A running job must not be restarted only to get a gang. It gets one with its next attempt."""
    world = digits().running().serves().settle()
    assert world.groups == {}
    world.exits(0, code=1).restarted()
    assert list(world.groups) == ["digits-2-00001"]


def test_each_attempt_has_its_own_group_that_is_deleted_when_its_pods_have_ended() -> None:
    world = gang().running().admits()
    world.exits(0, code=1).settle()
    assert list(world.groups) == ["digits-1-00001"], "a pod of it still stops"
    world.stops_all().settle()
    assert list(world.groups) == ["digits-2-00001"]


def test_a_replaced_pod_joins_the_group_of_its_attempt() -> None:
    world = World(job(container={"command": ["ddprun", "train.py"]})).serves().running()
    world.evicted(1, "Evicted").settle()
    assert world.names()[-1] == "digits-1-1-r1"
    assert list(world.groups) == ["digits-1-00001"]


@pytest.mark.parametrize("gang", ["native", "kueue"])
def test_an_elastic_ddprun_job_changes_its_size_in_the_same_attempt_and_group(gang: str) -> None:
    """Elastic jobs in a gang or queue must not restart when they are scaled: their ranks would stop for nothing."""
    spec = {"nodes": 4, "minNodes": 2, "container": {"command": ["ddprun", "train.py"]}}
    world = digits(gang=gang, **spec).serves(gang).settle().admits().running()
    groups = list(world.groups)
    world.change(nodes=2).settle().stops_all().settle()
    assert world.names() == ["digits-1-0", "digits-1-1"]
    world.change(nodes=3).settle()
    assert (world.names()[-1], world.status.state) == ("digits-1-2-r1", "Running")
    assert (world.status.attempt, list(world.groups)) == (1, groups)
    world.unschedulable(2, "0/3 nodes are available").settle()
    assert world.status.message.endswith("; Unschedulable: 1 of 3 pods: 0/3 nodes are available"), "it joins alone"


@pytest.mark.parametrize("end", ["suspended", "succeeded", "failed"])
def test_a_finished_or_suspended_job_leaves_no_group(end: str) -> None:
    """A job that has finished or is suspended must leave no group, because the group would count against a quota."""
    world = gang(backoffLimit=0).running().admits()
    if end == "suspended":
        world.change(suspend=True).settle()
        assert world.groups, "its pods still stop"
        world.stops_all()
    elif end == "succeeded":
        world.exits(0).exits(1)
    else:
        world.exits(0, code=1).settle().stops_all()
    world.settle()
    assert world.groups == {}
    assert world.status.state == {"suspended": "Suspended", "succeeded": "Succeeded", "failed": "Failed"}[end]


def test_a_resumed_job_gets_the_group_of_its_next_attempt() -> None:
    world = gang().running().change(suspend=True).settle().stops_all().settle()
    world.change(suspend=False).settle()
    assert (list(world.groups), world.names()) == (["digits-2-00001"], ["digits-2-0", "digits-2-1"])


def test_a_manually_deleted_group_is_created_again_for_waiting_pods() -> None:
    """A deleted group must be created again, because pods without their group wait for ever."""
    world = gang().started()
    world.groups.clear()
    assert world.plan().actions == (CreateGroup("native", 1),)
    world.running()
    world.groups.clear()
    assert world.plan().actions == (), "whoever is placed needs it no more"


def test_a_gang_api_that_disappears_does_not_disturb_a_running_job() -> None:
    world = gang().running().admits()
    world.gang_apis["native"] = GangApi(why_not="the API server does not serve podgroups")
    assert world.settle().status.state == "Running"
    world.exits(0, code=1).restarted()
    assert (world.status.gang or api.Gang(kind="native")).kind == "none", "auto goes on without it"
    assert world.names() == ["digits-1-0", "digits-2-0", "digits-2-1"]


def test_a_job_that_requires_a_gang_does_not_start_partially_if_the_api_disappears() -> None:
    world = gang(gang="native").running().admits()
    world.gang_apis["native"] = GangApi(why_not="the API server does not serve podgroups")
    world.exits(0, code=1).restarted()
    assert (world.status.reason, world.names()) == ("GangUnavailable", ["digits-1-0"])


def test_a_waiting_gang_shows_why_for_whom_and_how_long_it_waits() -> None:
    world = gang().started().unschedulable(0, "0/2 nodes are available").unschedulable(1, "0/2 nodes are available")
    world.neighbours = {"resnet": 2}
    world.settle()
    assert (world.status.state, world.status.reason) == ("Pending", "Unschedulable")
    assert world.status.message == (
        "Unschedulable: 2 of 2 pods wait to be placed together: 0/2 nodes are available; nodes are held by resnet "
        "(2 nodes)"
    )
    due = world.plan().requeue_at
    assert due is not None
    assert (due - world.now).total_seconds() == 60
    world.after(61).admits("waiting", "0/1 placements are available").settle()
    assert world.status.message.endswith(
        "placed together: 0/2 nodes are available; nodes are held by resnet (2 nodes), for more than 1m"
    )


def test_a_gang_for_one_rack_also_shows_how_many_racks_were_tried() -> None:
    world = gang(topologyKey="rack").started().unschedulable(0, "Insufficient cpu").unschedulable(1, "Insufficient cpu")
    world.admits("waiting", "0/3 placements are available").settle()
    assert world.status.message.endswith("placed together: 0/3 placements are available; Insufficient cpu")


def test_the_message_of_a_gang_shows_what_keeps_each_pod_from_its_node() -> None:
    """The message must show each pod's reason: with only the first one, another pod's missing volume stays hidden."""
    world = gang().started().unschedulable(0, "Insufficient cpu").unschedulable(1, 'claim "data-1" not found').settle()
    assert world.status.message.endswith(
        'placed together: Insufficient cpu (digits-1-0); claim "data-1" not found (digits-1-1)'
    )


def test_a_reason_that_the_group_and_the_pods_share_is_shown_once() -> None:
    """A reason that the group and its pods share must be shown once: Kubernetes 1.36 writes it to all of them."""
    no, world = "no feasible placements found", gang(topologyKey="rack").started()
    world.unschedulable(0, no).unschedulable(1, no).admits("waiting", no).settle()
    assert world.status.message == f"Unschedulable: 2 of 2 pods wait to be placed together: {no}"


def test_the_start_deadline_releases_a_gang_and_the_next_try_has_a_new_deadline() -> None:
    world = gang(startDeadlineSeconds=60).started().unschedulable(0, "no room").unschedulable(1, "no room").after(61)
    world.settle().stops_all().settle()
    assert (world.status.reason, world.names(), world.groups) == ("StartBackOff", [], {})
    again = world.plan().requeue_at
    assert again is not None
    world.after((again - world.now).total_seconds()).settle()
    assert list(world.groups) == ["digits-2-00001"]


def test_an_elastic_job_is_placed_as_soon_as_minNodes_fit() -> None:
    elastic = job(nodes=4, minNodes=2)
    assert native.body(elastic, 1, "v")["spec"]["schedulingPolicy"] == {"gang": {"minCount": 2}}


def test_a_group_of_another_owner_is_never_deleted() -> None:
    world = gang().started()
    ours = world.groups["digits-1-00001"]
    world.groups["digits-0"] = dataclasses.replace(ours, name="digits-0", owner_uid="somebody", attempt=0)
    assert not any(isinstance(action, DeleteGroup) for action in world.settle().step().actions)


def test_describe_shows_who_admits_the_pods_and_why() -> None:
    world = gang().running()
    assert "Gang:       native: the API server serves scheduling.k8s.io/v1alpha2" in describe(
        world.job, world.now, world.now
    )
    assert not any(line.startswith("Gang") for line in describe(digits().running().job, world.now, world.now))


# ---------------------------------------------------------------- native: objects as Kubernetes has them


GROUP = {
    "kind": "PodGroup",
    "metadata": {
        "name": "digits-3-00001",
        "namespace": "default",
        "labels": {"training.ddpjob.io/job": "digits", "training.ddpjob.io/attempt": "3"},
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
        "schedulingPolicy": {"gang": {"minCount": 2}},
        "schedulingConstraints": {"topology": [{"key": "topology.kubernetes.io/rack"}]},
        "priorityClassName": "research",
    },
}


@pytest.mark.parametrize("version", ["v1alpha2", "v1alpha3", "v1beta1"])
def test_a_pod_group_matches_the_kubernetes_documentation_in_each_version(version: str) -> None:
    template = {"spec": {"priorityClassName": "research", "containers": [{"name": "trainer", "image": "i"}]}}
    full = job(topologyKey="topology.kubernetes.io/rack", template=template)
    api_version = f"scheduling.k8s.io/{version}"
    assert native.body(full, 3, api_version) == {**GROUP, "apiVersion": api_version}
    assert native.body(job(), 3, "v")["spec"] == {"schedulingPolicy": {"gang": {"minCount": 2}}}


def test_in_1_37_a_placed_group_stays_admitted_even_if_its_pods_are_preempted() -> None:
    """A preempted group of Kubernetes 1.37 stays "scheduled" until its pods are evicted. It must not seem to wait."""
    placed = {"type": "PodGroupInitiallyScheduled", "status": "True", "reason": "Scheduled"}
    preempted = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": "m"}
    assert native.read({"status": {"conditions": [preempted, placed]}}) == Admission("admitted")


def test_a_pod_names_the_group_of_its_attempt() -> None:
    body = build.pod(job(), 3, 1)
    native.pod(body, job(), 3)
    assert body["spec"]["schedulingGroup"] == {"podGroupName": "digits-3-00001"}


@pytest.mark.parametrize("kind", ["PodGroupScheduled", "PodGroupInitiallyScheduled"])
def test_the_condition_of_each_version_shows_if_a_group_is_placed(kind: str) -> None:
    def says(**condition: str) -> Admission:
        return native.read({"status": {"conditions": [{"type": kind, **condition}]}})

    assert says(status="True").state == "admitted"
    assert says(status="False", reason="Unschedulable", message="no room") == Admission("waiting", "no room")
    assert says(status="False", reason="Unschedulable") == Admission("waiting", "Unschedulable")
    assert native.read({}) == Admission("waiting")


# ---------------------------------------------------------------- a queue, which admits before a pod is made


def test_a_queued_job_has_one_group_for_its_whole_life_and_no_pod_before_admission() -> None:
    world = queued(activeDeadlineSeconds=60).settle()
    assert (list(world.groups), world.names(), world.status.state) == (["digits"], [], "Pending")
    world.admits("waiting", "3 more GPUs are needed", place=4).settle()
    assert world.status.message == "waiting in the queue: position 4: 3 more GPUs are needed"
    world.after(3600).settle()
    assert world.status.message.endswith(", for more than 1h")
    assert world.status.start_time is None, "no deadline runs"
    world.admits().running()
    world.exits(0, code=1).restarted()
    assert (list(world.groups), world.names()[1:]) == (["digits"], ["digits-2-0", "digits-2-1"])


# ---------------------------------------------------------------- the adapter that docs/dev/gang-adapters.md shows


@pytest.fixture
def volcano() -> Adapter:
    """Return the adapter for Volcano from the code block of the page."""
    (block,) = (b for b in documents.blocks("python") if b.page.name == "gang-adapters.md")
    names: dict[str, Any] = {}
    exec(block.text, names)
    found = names["ADAPTER"]
    assert isinstance(found, Adapter)
    return found


def test_the_table_for_volcano_creates_the_objects_that_volcano_documents(volcano: Adapter) -> None:
    """The page's table for Volcano must create the objects that Volcano documents, because readers copy it."""
    elastic = job(nodes=8, minNodes=6)
    body = volcano.body(elastic, 2, "scheduling.volcano.sh/v1beta1")
    assert (body["kind"], body["metadata"]["name"], body["spec"]) == ("PodGroup", "digits-2-00001", {"minMember": 6})
    pod = build.pod(elastic, 2, 1)
    volcano.pod(pod, elastic, 2)
    assert pod["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == "digits-2-00001"
    assert pod["spec"]["schedulerName"] == "volcano"
    full = {"type": "Unschedulable", "status": "True", "reason": "NotEnoughResources", "message": "6/8 tasks in gang"}
    assert volcano.read({"status": {"phase": "Inqueue", "conditions": [full]}}) == Admission("waiting", full["message"])
    assert volcano.read({"status": {"phase": "Running"}}).state == "admitted"
    assert volcano.read({}) == Admission("waiting")


def test_the_rules_work_with_the_table_for_volcano_as_with_the_others(volcano: Adapter) -> None:
    world = digits(gang="native").serves(api_version="scheduling.volcano.sh/v1beta1")
    adapters = {"native": dataclasses.replace(volcano, name="native")}
    world.settings = dataclasses.replace(world.settings, adapters=adapters)
    world.running()
    assert (list(world.groups), world.status.state) == (["digits-1-00001"], "Running")
    world.exits(1, code=1).restarted()
    assert list(world.groups) == ["digits-2-00001"]
    world.change(suspend=True).settle().stops_all().settle()
    assert (world.groups, world.status.state) == ({}, "Suspended")
