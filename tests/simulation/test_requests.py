"""A job's requests to the API server: each write shows something to users or creates an object for the job."""

from __future__ import annotations

import collections
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from crowd import Crowd
from model_api import Change, Kind, Raw
from model_training import Failure
from scenario import Scenario
from simulation import Simulation


def writes(scenario: Scenario, kind_of_run: type[Simulation] = Simulation) -> dict[str, int]:
    """Return the operator's writes by kind, in a run without faults."""
    simulation = kind_of_run(scenario)
    counts: collections.Counter[str] = collections.Counter()

    def changed(kind: Kind, change: Change) -> None:
        if change.actor.startswith("operator"):
            counts[f"{'change' if change.old else 'create'} {kind.plural}"] += 1

    def sent(event: Raw) -> None:
        counts[f"event {event['reason']}"] += 1

    simulation.api.listeners.append(changed)
    simulation.on_event = sent
    outcome = simulation.run()
    assert (outcome.wrong, outcome.end) == ([], "Succeeded")
    return dict(counts)


def asked(scenario: Scenario) -> set[str]:
    """Return the API groups to which a run without faults sends requests, in a cluster that serves all groups."""
    simulation, paths = Crowd(scenario), set()
    simulation.api.served |= {"scheduling.k8s.io/v1alpha2", "kueue.x-k8s.io/v1beta1"}
    request = simulation.api.request

    def seen(method: str, path: str, *more: Any) -> Any:
        paths.add(path)
        return request(method, path, *more)

    with mock.patch.object(simulation.api, "request", seen):
        outcome = simulation.run()
    assert (outcome.wrong, outcome.end) == ([], "Succeeded")
    return {path.split("/")[2] if path.startswith("/apis/") else "" for path in paths}


@pytest.mark.parametrize("gang", ["auto", "none"])
def test_no_request_is_sent_to_gang_and_queue_apis_that_are_switched_off(gang: str) -> None:
    """If gangs and queues are off, no request may go to their APIs: each would log a missing right."""
    labels = {"kueue.x-k8s.io/queue-name": "main"}
    scenario = Scenario(spec={"nodes": 2, "gang": gang}, training_seconds=200, labels=labels, clusterwide=True)
    groups = asked(scenario)
    assert groups & {"scheduling.k8s.io", "kueue.x-k8s.io", "visibility.kueue.x-k8s.io"} == set()
    assert "training.ddpjob.io" in groups, "else this test sees nothing"


@pytest.mark.parametrize("training_seconds", [30, 500])
def test_a_job_of_eight_pods_that_just_trains_costs_twelve_writes(training_seconds: int) -> None:
    """A job of eight pods that just trains must cost twelve writes, as docs/scaling.md says."""
    found = writes(Scenario(spec={"nodes": 8}, cluster_nodes=8, training_seconds=training_seconds))
    assert found == {"create services": 1, "create pods": 8, "change ddpjobs": 3}
    assert sum(found.values()) == 12


def test_a_job_that_just_trains_costs_no_read() -> None:
    """A job that just trains must cost no read, because the operator lists whole collections only."""
    simulation, reads = Simulation(Scenario(spec={"nodes": 8}, cluster_nodes=8, training_seconds=30)), set()
    request = simulation.api.request

    def seen(method: str, path: str, params: Any = None, *more: Any) -> Any:
        if method == "GET":
            reads.add((path.rpartition("/")[2], (params or {}).get("labelSelector", "")))
        return request(method, path, params, *more)

    with mock.patch.object(simulation.api, "request", seen):
        outcome = simulation.run()
    assert (outcome.wrong, outcome.end) == ([], "Succeeded")
    once = {"v1alpha1"}  # the published schema, read once at the operator's start
    assert {what for what, _ in reads} == {"ddpjobs", "pods", "services", "nodes"} | once
    assert {selector for _, selector in reads} <= {"", "training.ddpjob.io/job"}, "of no single job"


@pytest.mark.parametrize(("training_seconds", "events"), [(700, "Brief"), (30, "All")])
def test_the_end_of_a_long_job_adds_an_event_and_with_all_events_each_job_has_two(
    training_seconds: int, events: str
) -> None:
    """The end of a long job must add an Event, and with all Events on, each job must have two."""
    scenario = Scenario(spec={"nodes": 8}, cluster_nodes=8, training_seconds=training_seconds, events=events)
    found = writes(scenario)
    assert found["event AllNodesCompleted"] == 1
    assert found.get("event AllNodesRun", 0) == (1 if events == "All" else 0)


def test_a_failure_has_its_events_too() -> None:
    """A failure must have its own Events, because users search the Events of a namespace for restarts."""
    plain = Scenario(spec={"nodes": 8}, cluster_nodes=8, training_seconds=30)
    fails = replace(plain, failures={1: Failure(rank=3, after_seconds=5, code=1)})
    warnings = {"event RankFailed"}
    assert {what for what in writes(replace(fails, events="Warning")) if what.startswith("event")} == warnings
    told = warnings | {"event Restarting", "event AllNodesRun", "event AllNodesCompleted"}
    assert {what for what in writes(fails) if what.startswith("event")} == told


def test_a_gang_adds_only_the_write_of_its_group_and_a_queue_one_status_and_one_event() -> None:
    """A gang must add only the write of its group, a queue one status and one Event, however groups change."""
    plain = Scenario(spec={"nodes": 8}, cluster_nodes=8, training_seconds=30)
    native = writes(replace(plain, gang=True))
    of_group = {"create podgroups": 1, "change podgroups": 1}  # "change" is the delete at the end
    assert native == {"create services": 1, "create pods": 8, "change ddpjobs": 3} | of_group
    queued = writes(replace(plain, quota=8, labels={"kueue.x-k8s.io/queue-name": "main"}), Crowd)
    of_workload = {"create workloads": 1, "change workloads": 2, "event WaitingForAdmission": 1}
    events = {"event AllNodesRun": 1, "event AllNodesCompleted": 1}  # sent for a job that had to wait
    assert queued == {"create services": 1, "create pods": 8, "change ddpjobs": 4} | of_workload | events
