"""The operator's knowledge of the cluster's nodes, and when it does not count them as lost."""

import asyncio
import datetime as dt
from typing import Any

import pytest
from direct_client import DirectClient
from lists import taken
from model_api import ModelApi
from reconciling import caches, reconciler
from worlds import job

from ddpjob_operator.kube.api.runtime import Runtime
from ddpjob_operator.kube.watch.nodes import NodeCache
from ddpjob_operator.kube.work.executor import ConflictError
from ddpjob_operator.kube.work.job_state import JobState
from ddpjob_operator.observed.cluster import Node
from ddpjob_operator.plan.actions import DeletePod, Plan

NOW = dt.datetime(2031, 3, 5, 7, 40, tzinfo=dt.timezone.utc)


def node(name: str, ready: str = "True", since: str = "2031-03-05T07:11:13Z") -> dict[str, Any]:
    condition = {"type": "Ready", "status": ready, "lastTransitionTime": since}
    return {"metadata": {"name": name, "uid": name}, "status": {"conditions": [condition]}}


@pytest.fixture
def changes() -> list[str]:
    return []


@pytest.fixture
def nodes(changes: list[str]) -> NodeCache:
    return NodeCache(lambda names: changes.extend(sorted(names)), lambda: NOW)


def test_nodes_that_a_list_lacks_are_removed_in_the_order_of_their_names(nodes: NodeCache, changes: list[str]) -> None:
    names = sorted(f"node-{number}" for number in range(20))
    for name in names:
        nodes.put(node(name, "False"))
    changes.clear()
    nodes.drop({("", name) for name in names}, 1)
    assert changes[: len(names)] == names


def lost(nodes: NodeCache) -> list[str]:
    seen = nodes.seen()
    return sorted(name for name, node in seen.items() if not node.with_most)


class Clock:
    now = NOW

    def __call__(self) -> dt.datetime:
        return self.now

    def pass_(self, **time: float) -> None:
        self.now += dt.timedelta(**time)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def timed(clock: Clock) -> NodeCache:
    return NodeCache(lambda _: None, clock)


def test_the_listener_is_called_once_if_many_nodes_change_at_once() -> None:
    """The listener, which checks all pods, must be called once for many changed nodes. Called for each of 5,000 nodes,
    it would block the operator for 6 s."""
    told: list[int] = []
    nodes = NodeCache(lambda names: told.append(len(names)), lambda: NOW)
    for number in range(100):
        nodes.put(node(f"node-{number}"))
    nodes.drop(set(), 1)
    for number in range(60):
        nodes.put(node(f"node-{number}", "Unknown"))
    assert nodes.disrupted
    assert max(told) == 56, "those that were lost until now"
    assert len(told) == 60 + 1 + 4, "each, all that were lost until then, and the four after them once more"


def test_before_the_first_list_no_node_is_known(nodes: NodeCache) -> None:
    nodes.put(node("a", "Unknown"))
    assert nodes.seen() is None


def test_only_nodes_that_are_not_ready_are_reported_and_only_changes_call_the_listener(nodes, changes):
    taken(nodes, [node("a"), node("b", "Unknown")], 1)
    nodes.put(node("a"))
    assert (lost(nodes), changes) == (["b"], ["b"])
    nodes.put(node("b"))
    assert (lost(nodes), changes) == ([], ["b", "b"])


def test_the_time_a_node_is_not_ready_is_counted_by_our_own_clock(nodes: NodeCache) -> None:
    taken(nodes, [node("a"), node("b", "Unknown")], 1)
    nodes.put(node("b", "False"))
    seen = nodes.seen()
    assert seen["b"].since == NOW


def test_a_deleted_node_counts_as_not_ready_from_its_deletion(timed: NodeCache, clock: Clock) -> None:
    """A deleted node must count as not ready at once, for example a lost spot VM whose Node a cloud deletes."""
    taken(timed, [node("a"), node("b")], 1)
    clock.pass_(seconds=7)
    timed.remove("", "b", "b")
    assert timed.seen() == {"b": Node(ready=False, since=clock.now, gone=True)}


def test_a_node_that_is_not_ready_and_then_deleted_keeps_its_countdown(timed: NodeCache, clock: Clock) -> None:
    """The deletion of a Node that is not ready must not restart its countdown, and delay the job's recovery."""
    taken(timed, [node("a"), node("b")], 1)
    timed.put(node("b", "Unknown"))
    since = clock.now
    clock.pass_(seconds=20)
    timed.remove("", "b", "b")
    clock.pass_(seconds=1)
    taken(timed, [node("a")], 3)
    assert timed.seen() == {"b": Node(ready=False, since=since, gone=True)}


def test_a_node_deleted_while_most_are_silent_is_lost_from_then_on(timed: NodeCache, clock: Clock) -> None:
    """The time while most nodes are silent must not count: a node deleted then is lost from its deletion on."""
    taken(timed, [node(n) for n in "abcde"], 1)
    for name in "abcd":
        timed.put(node(name, "Unknown"))
    clock.pass_(minutes=10)
    timed.remove("", "a", "a")
    assert lost(timed) == ["a"]
    assert (timed.seen() or {})["a"].since == clock.now


@pytest.mark.parametrize("uid", ["b", "another"])
def test_a_node_that_returns_under_its_name_is_ready_again(timed: NodeCache, clock: Clock, uid: str) -> None:
    """A node that returns under its name must be ready again: a restarted machine has a new Node object."""
    taken(timed, [node("a"), node("b")], 1)
    timed.remove("", "b", "b")
    gone_since = clock.now
    clock.pass_(seconds=12)
    back = node("b", "False")
    back["metadata"]["uid"] = uid
    timed.put(back)
    assert timed.seen() == {"b": Node(ready=False, since=gone_since)}, "nothing was heard of its pods in between"
    back = node("b")
    back["metadata"]["uid"] = uid
    timed.put(back)
    assert timed.seen() == {}


def test_the_late_deletion_of_an_old_node_object_does_not_affect_the_new_one(nodes: NodeCache) -> None:
    """The late deletion of an old Node must not affect the new one, which a direct read may have shown already."""
    back = node("b")
    back["metadata"]["uid"] = "new"
    taken(nodes, [node("a"), node("b")], 1)
    nodes.put(back)
    nodes.remove("", "b", "b")
    assert nodes.seen() == {}
    nodes.remove("", "b", "new")
    assert lost(nodes) == ["b"]


def test_nodes_removed_by_an_autoscaler_do_not_count_as_an_outage(nodes: NodeCache) -> None:
    taken(nodes, [node(f"n{i}") for i in range(10)], 1)
    for i in range(8):
        nodes.remove("", f"n{i}", f"n{i}")
    nodes.put(node("n9", "Unknown"))
    assert not nodes.disrupted
    assert lost(nodes) == [*(f"n{i}" for i in range(8)), "n9"]


def test_the_api_server_is_queried_once_for_each_missing_node(nodes: NodeCache) -> None:
    """The operator must read each missing Node once, because the watch may be late, and the pod is not lost then."""
    assert nodes.unknown({"a"}) == [], "before the first list nothing is known"
    taken(nodes, [node("a"), node("b")], 1)
    nodes.remove("", "b", "b")
    assert nodes.unknown({"a", "b", "new"}) == ["b", "new"]
    nodes.is_gone("b")
    nodes.put(node("new"))
    assert nodes.unknown({"a", "b", "new"}) == []
    nodes.put(node("b"))
    nodes.remove("", "b", "b")
    assert nodes.unknown({"b"}) == ["b"], "it may have come back once more"


def test_no_node_counts_as_lost_if_most_are_silent_at_once(nodes, changes, caplog):
    """No node may count as lost if most are silent at once: the control plane is at fault, and jobs are healthy."""
    taken(nodes, [node(n) for n in "abcde"], 1)
    nodes.put(node("a", "Unknown"))
    nodes.put(node("b", "Unknown"))
    assert lost(nodes) == ["a", "b"]
    nodes.put(node("c", "Unknown"))
    assert lost(nodes) == []
    assert nodes.disrupted
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    changes.clear()
    nodes.put(node("c"))
    assert lost(nodes) == ["a", "b"]
    assert sorted(changes) == ["a", "b", "c"], "the jobs on those that are still lost are looked at again"


def test_a_control_plane_that_hears_no_node_for_hours_kills_nothing(timed: NodeCache, clock: Clock) -> None:
    taken(timed, [node(n) for n in "abcdefghij"], 1)
    for name in "abcdefghij":
        timed.put(node(name, "Unknown"))
        clock.pass_(seconds=5)
    clock.pass_(hours=6)
    for name in "abcdefghij":
        timed.put(node(name, "Unknown"))
    assert lost(timed) == []


def test_in_a_cluster_of_two_nodes_one_or_both_can_be_lost(nodes: NodeCache) -> None:
    taken(nodes, [node("a", "Unknown"), node("b", "Unknown")], 1)
    assert lost(nodes) == ["a", "b"]


class Server(DirectClient):
    """API server with these nodes, and a pod on the node gpu-1. is_newer: it has changed the pod unseen."""

    def __init__(self, *nodes: dict[str, Any], phase: str = "Running", is_newer: bool = False) -> None:
        super().__init__(ModelApi())
        for one in nodes:
            self.api.put("nodes", one)
        metadata = {"name": "digits-1-0", "namespace": "default", "uid": "u"}
        self.seen = self.api.put(
            "pods", {"metadata": metadata, "spec": {"nodeName": "gpu-1"}, "status": {"phase": phase}}
        )
        if is_newer:
            self.api.put("pods", self.seen)

    async def get(self, path: str, params: Any = None) -> dict[str, Any]:
        assert path.endswith("/pods/digits-1-0") or params == {"fieldSelector": "metadata.name=gpu-1"}, path
        return await super().get(path, params)

    def gives_up_its_pod(self, nodes: NodeCache) -> bool:
        """Let the operator delete the pod with a grace period of 0. Return True if the pod is gone."""
        copies = caches(nodes=nodes)
        copies.pods.put(self.seen)
        executor = reconciler(self, copies, Runtime()).executor
        asyncio.run(executor.execute(job(), Plan(actions=(DeletePod("digits-1-0", "u", 0),)), JobState("u")))
        return self.api.all("pods") == []


@pytest.mark.parametrize("newer", ["node", "pod"])
def test_a_pod_whose_kubelet_returns_before_the_watch_event_is_kept(nodes: NodeCache, newer: str) -> None:
    """A pod whose kubelet returns must be kept: a deletion without grace removes the object while the container is
    running, and two groups would write one folder (seed 701187 of the simulation with memory)."""
    taken(nodes, [node("gpu-1", "Unknown")], 1)
    server = Server(node("gpu-1", "True" if newer == "node" else "Unknown"), is_newer=newer == "pod")
    with pytest.raises(ConflictError):
        server.gives_up_its_pod(nodes)
    assert len(server.api.all("pods")) == 1
    if newer == "node":
        assert nodes.seen() == {}, "the next reconcile plans with a node that is ready"


@pytest.mark.parametrize("there", [(), (node("gpu-1", "Unknown"),)], ids=["gone", "not ready"])
def test_a_pod_on_a_lost_node_is_given_up(nodes: NodeCache, there: tuple[dict[str, Any], ...]) -> None:
    """A pod on a lost node must be removed, because nobody else deletes it and the next attempt needs its name."""
    taken(nodes, [node("gpu-1", "Unknown")], 1)
    assert Server(*there).gives_up_its_pod(nodes)


@pytest.mark.parametrize("phase", ["Failed", "Succeeded"])
def test_a_pod_that_ended_long_ago_is_removed_from_a_ready_node(nodes: NodeCache, phase: str) -> None:
    """A pod that ended long ago must be removed from a ready node: a job with such pods starts no fourth attempt."""
    taken(nodes, [], 1)
    assert Server(node("gpu-1"), phase=phase).gives_up_its_pod(nodes)


def test_an_operator_that_may_not_read_nodes_requests_none(nodes: NodeCache) -> None:
    """Without the right to read nodes, the operator must not send refused reads, which would keep the job waiting."""
    assert Server(node("gpu-1")).gives_up_its_pod(nodes)
