"""Lives of elastic jobs under ddprun: what they cover, and bugs made on purpose."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from scenario import elastic_scenario
from simulation import Simulation, simulate

from ddpjob_core import memory
from ddpjob_core.members import Members
from ddpjob_operator.plan import pod_replacement
from ddprun.core.leader_state import LeaderState

pytestmark = pytest.mark.timeout(900)  # CPU bound: a busy machine needs longer
BLOCK = 60
SEEDS_MAX = 1500
Mutant = Callable[[], contextlib.AbstractContextManager[Any]]


def under_ddprun(seeds: range) -> list[int]:
    """Return the seeds of elastic jobs under ddprun."""
    return [seed for seed in seeds if elastic_scenario(seed).launcher == "ddprun"]


def test_groups_shrink_and_grow_in_these_lives() -> None:
    shrunk = grown = 0
    for seed in under_ddprun(range(BLOCK)):
        life = Simulation(elastic_scenario(seed))
        assert not life.run().wrong
        shrunk, grown = shrunk + life.training.agents.shrunk, grown + life.training.agents.grown
    assert shrunk > 0
    assert grown > 0, "nodes come back, and nobody lets them join"


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


def replaced_before_the_pod_has_ended() -> contextlib.AbstractContextManager[Any]:
    """Bug: a pod that is still stopping is replaced while the other pods train."""
    return mock.patch.object(pod_replacement, "_still_ending", return_value=[])


# The first seed that finds each bug. If a code change makes it miss the bug, the test searches for another.
SEEDS: dict[Mutant, int] = {
    starts_with_too_few: 0,
    memory_first: 67,
    rank_is_the_place: 96,
    replaced_before_the_pod_has_ended: 202,
}


@pytest.mark.parametrize("mutant", SEEDS, ids=lambda mutant: mutant.__name__)
def test_the_simulation_finds_a_deliberate_bug_of_elastic_jobs(mutant: Mutant) -> None:
    for seed in (SEEDS[mutant], *under_ddprun(range(SEEDS_MAX))):
        with mutant():
            found = simulate(elastic_scenario(seed))
        if found.wrong and not simulate(elastic_scenario(seed), found.taken).wrong:
            return
    pytest.fail(f"not found in {SEEDS_MAX} seeds")
