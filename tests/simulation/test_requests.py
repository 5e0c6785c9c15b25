"""What a job costs the API server: each write is one that a user sees, or an object that the job needs."""

from __future__ import annotations

import collections

from model_api import Change, Kind, Raw
from scenario import Scenario
from simulation import Simulation


def writes(scenario: Scenario) -> dict[str, int]:
    """The operator's, by what they write, in a life without faults."""
    simulation = Simulation(scenario)
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


def test_a_job_of_eight_pods_that_just_trains_costs_fourteen_writes() -> None:
    """In a storm of jobs each write more makes every start later: this is what docs/scaling.md reckons with."""
    found = writes(Scenario(spec={"nodes": 8}, cluster_nodes=8, training_seconds=30))
    events = {"event AllNodesRun": 1, "event AllNodesCompleted": 1}
    assert found == {"create services": 1, "create pods": 8, "change ddpjobs": 3} | events
    assert sum(found.values()) == 14
