"""Lives of elastic jobs under ddprun: what they cover, and bugs made on purpose."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import model_agents
import pytest
from model_training import Failure
from msgspec.structs import replace as update
from scenario import Deed, Scenario, elastic_scenario
from simulation import Simulation, simulate

from ddpjob_core import memory
from ddpjob_core.members import Members
from ddpjob_operator.plan import leadership, restart, startup
from ddpjob_operator.pods import agent_environment
from ddprun.core.appointment import Appointment
from ddprun.core.connected import Connected
from ddprun.core.leader_state import LeaderState

pytestmark = pytest.mark.timeout(900)  # CPU bound: a busy machine needs longer
BLOCK = 60
SEEDS_MAX = 1500
Mutant = Callable[[], contextlib.AbstractContextManager[Any]]


def under_ddprun(seeds: range) -> list[int]:
    """Return the seeds of elastic jobs under ddprun."""
    return [seed for seed in seeds if elastic_scenario(seed).launcher == "ddprun"]


def test_groups_shrink_and_grow_in_these_lives() -> None:
    shrunk = grown = appointed = 0
    for seed in under_ddprun(range(BLOCK)):
        life = Simulation(elastic_scenario(seed))
        assert not life.run().wrong
        agents = life.training.agents
        shrunk, grown, appointed = shrunk + agents.shrunk, grown + agents.grown, appointed + agents.appointed
    assert shrunk > 0
    assert grown > 0, "nodes come back, and nobody lets them join"
    assert appointed > 0, "leaders are lost, and nobody else leads"


def test_seeds_that_failed_once_stay_fixed() -> None:
    """Seeds 119, 2763: a job grew while its former leader saved, and waited for a second leader of the same term.
    Seed 2680: the operator had charged a failure, and the leader restarted ranks once more than backoffLimit allows."""
    for seed in (119, 2680, 2763):
        outcome = simulate(elastic_scenario(seed))
        assert not outcome.wrong, outcome.wrong


def starts_with_too_few() -> contextlib.AbstractContextManager[Any]:
    """Bug: one node fewer than minNodes is enough."""
    begin = LeaderState.__init__

    def begins(self: LeaderState, *words: Any, least: int, **more: Any) -> None:
        begin(self, *words, least=max(1, least - 1), **more)

    return mock.patch.object(LeaderState, "__init__", begins)


def memory_first() -> contextlib.AbstractContextManager[Any]:
    """Bug: after a change of the group, ranks load the state in memory even if the folder has a newer one."""
    return mock.patch.object(memory, "is_newer", return_value=False)


def rank_is_the_place() -> contextlib.AbstractContextManager[Any]:
    """Bug: nodes keep the ranks that they would have if all nodes were connected."""
    return mock.patch.object(Members, "node_rank", lambda _, place: place)


def same_term_again() -> contextlib.AbstractContextManager[Any]:
    """Bug: all appointed leaders have the same term."""
    after_loss = leadership.after_loss

    def appoint(view: Any, status: Any, lost: Any) -> Any:
        found = after_loss(view, status, lost)
        is_same = found.leader is None or found.leader == status.leader
        return found if is_same else update(found, leader=update(found.leader, term=2))

    return mock.patch.object(leadership, "after_loss", appoint)


def a_new_pod_of_node_0_leads_at_once() -> contextlib.AbstractContextManager[Any]:
    """Bug: a group grows beside the appointed leader's one, without the operator."""
    environment = agent_environment.environment

    def unaware(*of: Any) -> Any:
        return {name: value for name, value in environment(*of).items() if name != "DDPJOB_LEADER_APPOINTED"}

    return mock.patch.object(agent_environment, "environment", unaware)


def older_term_taken() -> contextlib.AbstractContextManager[Any]:
    """Bug: an agent follows the leader of each answer, also of a late one."""
    return mock.patch.object(Appointment, "replaces", lambda told, known: told.term != known.term)


def numbers_of_another_leader() -> contextlib.AbstractContextManager[Any]:
    """Bug: in memory, generations of all leaders have the same numbers, so an old leader's state may be loaded."""
    return mock.patch.object(model_agents, "numbered", lambda _, generation: generation)


def replaced_before_the_pod_has_ended() -> contextlib.AbstractContextManager[Any]:
    """Bug: a lost pod that is still stopping is replaced in the status. If it leads, its last report is lost."""
    return mock.patch.object(restart, "_still_ending", return_value=[])


def created_before_the_pod_has_ended() -> contextlib.AbstractContextManager[Any]:
    """Bug: a pod is created while the one before it at its place is still stopping, so two ranks train there."""
    absent = startup._absent
    return mock.patch.object(startup, "_absent", lambda view, status: absent(replace(view, removed=()), status))


def a_spare_starts() -> contextlib.AbstractContextManager[Any]:
    """Bug: spares train, so the job has more nodes than its user wants."""
    return mock.patch.object(Connected, "size", property(lambda nodes: len(nodes.places)))


def a_spare_is_waited_for() -> contextlib.AbstractContextManager[Any]:
    """Bug: a start waits for the spares, too."""
    waits_until = Connected.waits_until

    def waits(nodes: Connected, now: float, latest: float) -> float | None:
        is_all = len(nodes.here) == len(nodes.places) or now >= latest
        return waits_until(nodes, now, latest) if is_all else latest

    return mock.patch.object(Connected, "waits_until", waits)


def the_end_of_a_spare_stops_all() -> contextlib.AbstractContextManager[Any]:
    """Bug: the loss of a node that only waits stops the ranks of all others."""
    lost = LeaderState.lost

    def stops(lead: LeaderState, node: int, now: float) -> None:
        only_waits = lead.state == "running" and node not in lead.members
        lost(lead, node, now)
        if only_waits:
            lead._stop([lead._lose(node)], now)

    return mock.patch.object(LeaderState, "lost", stops)


# The first seed that finds each bug. If a code change makes it miss the bug, the test searches for another.
SEEDS: dict[Mutant, int] = {
    starts_with_too_few: 0,
    memory_first: 3,
    rank_is_the_place: 96,
    same_term_again: 24,
    a_new_pod_of_node_0_leads_at_once: 3,
    older_term_taken: 141,
    replaced_before_the_pod_has_ended: 19,
    a_spare_starts: 15,
    a_spare_is_waited_for: 3,
    the_end_of_a_spare_stops_all: 19,
}


@pytest.mark.parametrize("mutant", SEEDS, ids=lambda mutant: mutant.__name__)
def test_the_simulation_finds_a_deliberate_bug_of_elastic_jobs(mutant: Mutant) -> None:
    for seed in (SEEDS[mutant], *under_ddprun(range(SEEDS_MAX))):
        with mutant():
            found = simulate(elastic_scenario(seed))
        if found.wrong and not simulate(elastic_scenario(seed), found.taken).wrong:
            return
    pytest.fail(f"not found in {SEEDS_MAX} seeds")


def a_group_that_comes_back() -> Iterator[Scenario]:
    """Cut two nodes off, and lose the leader. Its next pod leads without them, and without a receiver does not know how
    many generations there were."""
    spec = {"nodes": 3, "minNodes": 1, "onePodPerNode": True, "backoffLimit": 6}
    failures = {generation: Failure(1, 4.0, 139) for generation in (1, 2)}
    for number in range(5):
        yield replace(ELASTIC, spec=spec, receiver=False, cluster_nodes=5, training_seconds=400, failures=failures,
                      deeds=(Deed(60, "nodes cut", number, 90), Deed(62, "agent killed")))  # fmt: skip


def a_user_who_scales_down_and_back() -> Iterator[Scenario]:
    """Scale to one node, and back while the surplus pods are still stopping."""
    yield replace(ELASTIC, deeds=(Deed(60, "scaled"),), rates={"sigterm": {"ignored": 0.8}})


ELASTIC = Scenario(launcher="ddprun", spec={"nodes": 3, "minNodes": 1}, cluster_nodes=6, slots=1, training_seconds=100)
# Bugs that need a certain order of events.
ORDERS: dict[Mutant, Callable[[], Iterator[Scenario]]] = {
    numbers_of_another_leader: a_group_that_comes_back,
    created_before_the_pod_has_ended: a_user_who_scales_down_and_back,
}


@pytest.mark.parametrize("mutant", ORDERS, ids=lambda mutant: mutant.__name__)
def test_a_deliberate_bug_is_found_in_a_certain_order_of_events(mutant: Mutant) -> None:
    for life in ORDERS[mutant]():
        outcome = simulate(life)
        assert (outcome.wrong, outcome.end) == ([], "Succeeded"), "\n".join([*outcome.story, *outcome.wrong])
    with mutant():
        assert any(simulate(life).wrong for life in ORDERS[mutant]())
