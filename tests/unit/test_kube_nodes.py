"""What the operator knows of the cluster's nodes, and when it does not believe that they are lost."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from lists import taken

from ddpjob_operator.kube.nodes import Nodes

NOW = dt.datetime(2031, 3, 5, 7, 40, tzinfo=dt.timezone.utc)


def node(name: str, ready: str = "True") -> dict[str, Any]:
    condition = {"type": "Ready", "status": ready, "lastTransitionTime": "2031-03-05T07:11:13Z"}
    return {"metadata": {"name": name, "uid": name}, "status": {"conditions": [condition]}}


@pytest.fixture
def changes() -> list[str]:
    return []


@pytest.fixture
def nodes(changes: list[str]) -> Nodes:
    return Nodes(changes.append, lambda: NOW)


def lost(nodes: Nodes) -> list[str]:
    seen = nodes.seen()
    assert seen is not None
    return sorted(seen)


def test_before_the_first_list_nothing_is_known(nodes: Nodes) -> None:
    nodes.put(node("a", "Unknown"))
    assert nodes.seen() is None


def test_only_nodes_that_are_not_ready_are_told_and_only_changes_wake_anyone(nodes: Nodes, changes: list[str]) -> None:
    taken(nodes, [node("a"), node("b", "Unknown")], 1)
    nodes.put(node("a"))
    assert (lost(nodes), changes) == (["b"], ["b"])
    nodes.put(node("b"))
    assert (lost(nodes), changes) == ([], ["b", "b"])


def test_since_when_is_counted_by_our_own_clock_for_the_clusters_may_be_minutes_off(nodes: Nodes) -> None:
    taken(nodes, [node("a"), node("b", "Unknown")], 1)
    nodes.put(node("b", "False"))
    seen = nodes.seen()
    assert seen is not None
    assert seen["b"].since == NOW


def test_a_node_that_is_gone_is_no_longer_told(nodes: Nodes) -> None:
    taken(nodes, [node("a"), node("b", "False")], 1)
    nodes.remove("", "b", "b")
    assert lost(nodes) == []
    taken(nodes, [node("a"), node("b", "False")], 2)
    taken(nodes, [node("a")], 3)
    assert lost(nodes) == []


def test_when_most_nodes_are_not_heard_at_once_none_counts_as_lost(
    nodes: Nodes, changes: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """It is the control plane that does not hear: all jobs of the cluster would be killed for nothing."""
    taken(nodes, [node(n) for n in "abcde"], 1)
    nodes.put(node("a", "Unknown"))
    nodes.put(node("b", "Unknown"))
    assert lost(nodes) == ["a", "b"]
    nodes.put(node("c", "Unknown"))
    assert lost(nodes) == []
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    changes.clear()
    nodes.put(node("c"))
    assert lost(nodes) == ["a", "b"]
    assert sorted(changes) == ["a", "b", "c"], "the jobs on those that are still lost are looked at again"


def test_in_a_cluster_of_two_one_node_can_be_lost_and_both(nodes: Nodes) -> None:
    taken(nodes, [node("a", "Unknown"), node("b", "Unknown")], 1)
    assert lost(nodes) == ["a", "b"]
