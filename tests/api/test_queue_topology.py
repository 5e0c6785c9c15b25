"""Kueue chooses the node of each pod (topology aware scheduling). Only Kueue and the scheduler show if our pods fit.
Needs everything that test_queue.py needs, and at least four nodes with the label type=kwok, which simulate pods.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from clusters import Namespace, Operator, job, kubectl, until
from queues import QUEUE_LABEL, Queue

pytestmark = pytest.mark.alone
RACK = "ddpjob.test/tas-rack"
NODES = 4
# More than half of a node's CPU, so that each pod takes a whole node.
WHOLE_NODE = {"requests": {"cpu": "100"}}
BAD_GPU = "RuntimeError: CUDA error: uncorrectable ECC error encountered"


class Racks:
    """A queue whose nodes are in two racks. Kueue chooses the node of each pod."""

    def __init__(self, queue: Queue, racks: Mapping[str, str]) -> None:
        self.queue, self.racks = queue, racks
        self.namespace = queue.namespace
        self.of_one = len(racks) // 2
        """Nodes per rack."""

    def submit(self, nodes: int, annotations: Mapping[str, str] | None = None, **spec: Any) -> None:
        """Submit a job each of whose pods takes a whole node."""
        container = {"resources": WHOLE_NODE, "command": spec.pop("command", ["torchrun", "train.py"])}
        body = job(container=container, nodes=nodes, **spec)
        body["metadata"]["labels"] = {QUEUE_LABEL: "main"}
        template = body["spec"]["template"]
        template["metadata"] = {"annotations": dict(annotations or {})}
        template["spec"] |= {"nodeSelector": {"type": "kwok"}, "terminationGracePeriodSeconds": 1}
        self.namespace.apply(body)

    def runs_on(self, attempt: int = 1) -> dict[str, str]:
        """Wait until an attempt is running; return the node of each of its pods."""
        self.namespace.reaches("Running", seconds=60)
        own = [p for p in self.namespace.pods() if p["metadata"]["name"].startswith(f"digits-{attempt}-")]
        assert not any(pod["spec"].get("schedulingGates") for pod in own)
        return {pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in own}

    def fails(self, attempt: int, message: str = "a bug") -> None:
        """Let the pod of rank 1 fail, and wait for the next attempt."""
        self.namespace.exits(f"digits-{attempt}-1", 1, message)
        until(lambda: self.namespace.status().get("attempt") == attempt + 1, "the next attempt begins", 60)

    def used(self, nodes: Mapping[str, str]) -> list[str]:
        """Return the rack of the node of each pod, in the order of the pods."""
        return [self.racks[node] for _, node in sorted(nodes.items())]


@pytest.fixture
def racks(kueue_api: str, namespace: Namespace, operators: Callable[..., Operator]) -> Iterator[Racks]:
    names = kubectl("get", "nodes", "-l", "type=kwok", "-o", "jsonpath={.items[*].metadata.name}").split()
    if len(names) < NODES:
        pytest.skip(f"needs {NODES} nodes with the label type=kwok, and there are {len(names)}")
    found = {name: f"rack-{number * 2 // len(names)}" for number, name in enumerate(names)}
    queue = Queue(namespace, kueue_api)
    try:
        for name, rack in found.items():
            kubectl("label", "--overwrite", "node", name, f"{RACK}={rack}")
        queue.create(
            "topologies", "Topology", {"levels": [{"nodeLabel": RACK}, {"nodeLabel": "kubernetes.io/hostname"}]}
        )
        queue.make({"nodeLabels": {"type": "kwok"}, "topologyName": namespace.name}, "cpu", 1000)
        operators(namespace.name, DDPJOB_GANGS="kueue").watches()
        yield Racks(queue, found)
    finally:
        namespace.api.mend()
        queue.remove()
        kubectl("label", "node", *names, f"{RACK}-")
        kubectl("uncordon", *names)


def test_all_pods_of_a_job_are_on_nodes_of_one_rack_and_a_restart_keeps_them_there(racks: Racks) -> None:
    """All pods must share a rack, because gradients that cross racks slow each step down without an error."""
    racks.submit(racks.of_one, topologyKey=RACK)
    first = racks.runs_on()
    assert len(first) == len(set(first.values())) == racks.of_one
    assert len(set(racks.used(first))) == 1
    racks.fails(1)
    second = racks.runs_on(2)
    assert list(second.values()) == list(first.values()), "rank 0 finds the data that it had cached on its node"


def test_a_node_that_failed_the_job_twice_is_used_again_if_the_queue_assigns_it(racks: Racks) -> None:
    """A node that failed the job twice must be used again if Kueue assigns it: a pod that avoids its assigned node fits
    nowhere, and the job holds its quota for an hour."""
    racks.submit(racks.of_one, topologyKey=RACK)
    first = racks.runs_on()
    racks.fails(1, BAD_GPU)
    racks.runs_on(2)
    racks.fails(2, BAD_GPU)
    assert list(racks.runs_on(3).values()) == list(first.values())
    assert [a["node"] for a in racks.namespace.status()["avoidedNodes"]] == [first["digits-1-1"]]


def test_a_suspended_and_resumed_job_gets_no_node_that_was_cordoned_meanwhile(racks: Racks) -> None:
    racks.submit(racks.of_one, topologyKey=RACK)
    bad = racks.runs_on()["digits-1-1"]
    kubectl("cordon", bad)
    racks.namespace.kubectl("patch", "ddp", "digits", "--type=merge", "-p", '{"spec": {"suspend": true}}')
    racks.namespace.reaches("Suspended", "Suspended", seconds=60)
    racks.namespace.kubectl("patch", "ddp", "digits", "--type=merge", "-p", '{"spec": {"suspend": false}}')
    assert bad not in racks.runs_on(2).values()


def test_a_replaced_pod_is_in_the_rack_of_its_peers(racks: Racks) -> None:
    racks.submit(racks.of_one, topologyKey=RACK, command=["ddprun", "train.py"])
    first = racks.runs_on()
    racks.namespace.kubectl("delete", "pod", "digits-1-1", "--wait=false")
    until(lambda: "digits-1-1-r1" in racks.namespace.pod_names(), "the pod is replaced alone", 60)
    now = racks.runs_on()
    assert (now["digits-1-0"], now["digits-1-1-r1"]) == (first["digits-1-0"], first["digits-1-1"])


def test_consecutive_ranks_share_a_rack_if_no_rack_has_room_for_all(racks: Racks) -> None:
    """If no rack has room for all, consecutive ranks must share one, so that a ring crosses the racks twice only."""
    racks.submit(2 * racks.of_one, {"kueue.x-k8s.io/podset-preferred-topology": RACK})
    used = racks.used(racks.runs_on())
    assert sorted(used) in (used, used[::-1])
    assert len(set(used)) == 2


def test_a_job_that_fits_in_no_rack_waits_without_a_pod_and_reports_it(racks: Racks) -> None:
    racks.submit(racks.of_one + 1, topologyKey=RACK)
    until(lambda: "topology" in racks.namespace.status().get("message", ""), "Kueue's own sentence", 60)
    assert racks.namespace.pods() == []
