"""Gangs on the scheduler of Kubernetes: only a real scheduler shows whether all pods of a job get nodes, or none.

Needs PodGroups (Kubernetes 1.36 with the feature gates GenericWorkload and GangScheduling) and at least four nodes with
the label type=kwok, which simulate pods without a kubelet."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from clusters import Namespace, Operator, job, kubectl, until
from faulty_api import FaultyApi

from ddpjob_operator.gangs.native import ADAPTER

pytestmark = [pytest.mark.alone, pytest.mark.timeout(400)]
NODES = 4
# More than half of a node's CPU, so that each pod takes a whole node.
WHOLE_NODE = {"requests": {"cpu": "100"}}
ROUNDS = 20
ENDS_WITHIN_SECONDS = 240.0


@pytest.fixture(scope="module")
def version() -> str:
    """Return the API version in which PodGroups are served."""
    with FaultyApi() as api:
        kinds = {v: (api.find(f"/apis/{ADAPTER.group}/{v}") or {}).get("resources") or () for v in ADAPTER.versions}
        served = [v for v, listed in kinds.items() if any(kind["name"] == ADAPTER.plural for kind in listed)]
        if not served:
            pytest.skip("this API server serves no PodGroups: scheduling.k8s.io/v1alpha2, or newer")
        nodes = api.call("GET", "/api/v1/nodes?labelSelector=type%3Dkwok")["items"]
        if len(nodes) < NODES:
            pytest.skip(f"needs {NODES} nodes with the label type=kwok, and there are {len(nodes)}")
    return f"{ADAPTER.group}/{served[0]}"


@pytest.fixture
def gangs(version: str, operators: Callable[..., Operator], namespace: Namespace) -> Gangs:
    operators(namespace.name, DDPJOB_GANGS="native").watches()
    return Gangs(namespace, version)


class Gangs:
    """A test's namespace, with the PodGroups of its jobs."""

    def __init__(self, namespace: Namespace, version: str) -> None:
        self.namespace, self.version = namespace, version
        self.path = f"/apis/{version}/namespaces/{namespace.name}/podgroups"

    def names(self) -> list[str]:
        """Return the names of the groups without the digits of the job's uid."""
        found = self.namespace.api.call("GET", self.path)["items"]
        return sorted(group["metadata"]["name"].rpartition("-")[0] for group in found)

    def name(self, job: str) -> str:
        """Return the name of the group of the job's first attempt."""
        uid = self.namespace.api.call("GET", f"{self.namespace.jobs_path}/{job}")["metadata"]["uid"]
        return f"{job}-1-{uid[-5:]}"

    def spec(self, job: str) -> dict[str, Any]:
        """Return the spec of the group of the job's first attempt."""
        found: dict[str, Any] = self.namespace.api.call("GET", f"{self.path}/{self.name(job)}")["spec"]
        return found

    def submit(
        self, name: str, nodes: int, run_for: str = "", command: Sequence[str] = ("torchrun", "train.py"), **spec: Any
    ) -> None:
        """Submit a job each of whose pods takes a whole node."""
        body = job(name, container={"resources": WHOLE_NODE, "command": [*command]}, nodes=nodes, **spec)
        template = body["spec"]["template"]
        template["spec"]["nodeSelector"] = {"type": "kwok"}
        template["spec"]["terminationGracePeriodSeconds"] = 1
        template["metadata"] = {"annotations": {"testbed/run-for": run_for}} if run_for else {}
        self.namespace.apply(body)

    def bound(self, name: str) -> int:
        """Return how many pods of a job have a node and have not ended."""
        ours = [p for p in self.namespace.pods() if p["metadata"]["labels"]["training.ddpjob.io/job"] == name]
        return sum(bool(p["spec"].get("nodeName")) and p["status"]["phase"] in ("Pending", "Running") for p in ours)


@pytest.fixture
def all_nodes(namespace: Namespace) -> int:
    return len(namespace.api.call("GET", "/api/v1/nodes?labelSelector=type%3Dkwok")["items"])


def test_one_of_two_jobs_for_all_nodes_runs_and_the_other_waits_with_no_pod_bound(gangs: Gangs, all_nodes: int) -> None:
    """The scheduler must give one job all nodes. If each job had half of the nodes, both would wait forever."""
    gangs.submit("first", all_nodes)
    gangs.namespace.reaches("Running", name="first", seconds=60)
    gangs.submit("second", all_nodes)
    message = gangs.namespace.reaches("Pending", "Unschedulable", name="second", seconds=60)
    assert gangs.bound("second") == 0
    assert f"{all_nodes} of {all_nodes} pods wait to be placed together: " in message
    assert f"; nodes are held by first ({all_nodes} nodes)" in message
    assert gangs.names() == ["first-1", "second-1"]
    gangs.namespace.kubectl("delete", "ddp", "first")
    gangs.namespace.reaches("Running", name="second", seconds=60)
    until(lambda: gangs.names() == ["second-1"], "the group of a deleted job goes with it")


def test_the_status_names_the_scheduler_of_the_pods_and_the_pods_name_their_group(gangs: Gangs, all_nodes: int) -> None:
    gangs.submit("digits", all_nodes)
    gangs.namespace.reaches("Running", seconds=60)
    gang = gangs.namespace.status()["gang"]
    assert gang == {"kind": "native", "attempt": 1, "why": f"the API server serves {gangs.version}"}
    groups = {p["spec"]["schedulingGroup"]["podGroupName"] for p in gangs.namespace.pods()}
    assert groups == {gangs.name("digits")}


def test_restart_suspend_resume_and_the_end_leave_no_group(gangs: Gangs, all_nodes: int) -> None:
    gangs.submit("digits", all_nodes)
    gangs.namespace.reaches("Running", seconds=60)
    gangs.namespace.exits("digits-1-1", 1, "a bug")
    until(lambda: gangs.namespace.status().get("attempt") == 2, "the next attempt begins", 60)
    gangs.namespace.reaches("Running", seconds=60)
    until(lambda: gangs.names() == ["digits-2"], "the group of the attempt before is gone")
    gangs.namespace.kubectl("patch", "ddp", "digits", "--type=merge", "-p", '{"spec": {"suspend": true}}')
    gangs.namespace.reaches("Suspended", "Suspended", seconds=60)
    until(lambda: gangs.names() == [], "a suspended job has no group")
    gangs.namespace.kubectl("patch", "ddp", "digits", "--type=merge", "-p", '{"spec": {"suspend": false}}')
    gangs.namespace.reaches("Running", seconds=60)
    assert gangs.names() == ["digits-3"]
    for place in range(all_nodes):
        gangs.namespace.exits(f"digits-3-{place}")
    gangs.namespace.reaches("Succeeded", seconds=60)
    until(lambda: gangs.names() == [], "a job that has ended has no group")


def test_a_replaced_pod_joins_its_gang(gangs: Gangs, all_nodes: int) -> None:
    """A replaced pod must join its gang: outside it, the pod could take a node for which another job waits."""
    gangs.submit("replaced", all_nodes, command=["ddprun", "train.py"])
    gangs.namespace.reaches("Running", name="replaced", seconds=60)
    gangs.namespace.kubectl("delete", "pod", "replaced-1-1", "--wait=false")
    until(lambda: "replaced-1-1-r1" in gangs.namespace.pod_names(), "the pod is replaced alone", 60)
    gangs.namespace.reaches("Running", name="replaced", seconds=60)
    pod = next(p for p in gangs.namespace.pods() if p["metadata"]["name"] == "replaced-1-1-r1")
    assert pod["spec"]["schedulingGroup"] == {"podGroupName": gangs.name("replaced")}


def test_an_elastic_job_starts_with_minNodes(gangs: Gangs, all_nodes: int) -> None:
    gangs.submit("other", all_nodes - 2)
    gangs.namespace.reaches("Running", name="other", seconds=60)
    gangs.submit("digits", all_nodes, minNodes=2)
    until(lambda: gangs.bound("digits") == 2, "two of its pods are bound", 60)


def test_the_start_deadline_releases_a_gang(gangs: Gangs, all_nodes: int) -> None:
    gangs.submit("other", all_nodes)
    gangs.namespace.reaches("Running", name="other", seconds=60)
    gangs.submit("digits", all_nodes, startDeadlineSeconds=3)
    gangs.namespace.reaches("Pending", "StartBackOff", seconds=60)
    until(lambda: gangs.names() == ["other-1"], "its group goes with its pods")


@pytest.fixture
def racks(all_nodes: int) -> Iterator[str]:
    """Label half of the nodes as one rack and half as another; yield the key of the label."""
    names = kubectl("get", "nodes", "-l", "type=kwok", "-o", "name").split()
    for number, name in enumerate(names):
        kubectl("label", "--overwrite", name, f"ddpjob.test/rack={number * 2 // all_nodes}")
    yield "ddpjob.test/rack"
    kubectl("label", *names, "ddpjob.test/rack-")


def test_a_topology_key_keeps_all_pods_in_one_rack_and_a_job_that_fits_in_none_waits(
    gangs: Gangs, all_nodes: int, racks: str
) -> None:
    """A topology key must keep all pods in one rack. Needs the feature gate TopologyAwareWorkloadScheduling."""
    gangs.submit("digits", all_nodes // 2, topologyKey=racks)
    gangs.namespace.reaches("Running", seconds=60)
    constraint = gangs.spec("digits").get("schedulingConstraints")
    if constraint is None:
        pytest.skip("this API server drops schedulingConstraints: TopologyAwareWorkloadScheduling is off")
    assert constraint == {"topology": [{"key": racks}]}
    nodes = gangs.namespace.api.call("GET", "/api/v1/nodes?labelSelector=type%3Dkwok")["items"]
    rack_of = {node["metadata"]["name"]: node["metadata"]["labels"][racks] for node in nodes}
    assert len({rack_of[p["spec"]["nodeName"]] for p in gangs.namespace.pods()}) == 1
    gangs.namespace.kubectl("delete", "ddp", "digits")
    gangs.submit("large", all_nodes // 2 + 1, topologyKey=racks)
    gangs.namespace.reaches("Pending", "Unschedulable", name="large", seconds=60)
    assert gangs.bound("large") == 0


def test_a_missing_topology_binds_no_pod_and_is_reported(gangs: Gangs) -> None:
    gangs.submit("digits", 2, topologyKey="ddpjob.test/nobody-has-it")
    until(lambda: gangs.names() == ["digits-1"], "its group is there")
    if "schedulingConstraints" not in gangs.spec("digits"):
        pytest.skip("this API server drops schedulingConstraints: TopologyAwareWorkloadScheduling is off")
    message = gangs.namespace.reaches("Pending", "Unschedulable", seconds=60)
    assert gangs.bound("digits") == 0
    assert message.startswith("Unschedulable: 2 of 2 pods wait to be placed together: ")
    print(message)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, ROUNDS))])
def test_a_mix_of_gang_jobs_never_blocks_itself(gangs: Gangs, all_nodes: int, seed: int) -> None:
    """Jobs that each take some nodes for a short time must all end. `make test-long` runs twenty mixes."""
    sizes = random.Random(seed)
    names = [f"job-{number}" for number in range(sizes.randrange(3, 7))]
    for name in names:
        gangs.submit(name, sizes.randrange(all_nodes // 2, all_nodes + 1), run_for=f"{sizes.randrange(1, 4)}s")
    end = time.monotonic() + ENDS_WITHIN_SECONDS
    while any(gangs.namespace.status(name).get("state") != "Succeeded" for name in names):
        assert time.monotonic() < end, {name: gangs.namespace.status(name).get("message") for name in names}
        time.sleep(0.2)
    until(lambda: gangs.names() == [], "no group is left")
