"""Runs of jobs whose pods are placed all at once, while neighbours take nodes; and bugs made on purpose."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from model_api import Change, Kind
from model_training import Failure
from scenario import Scenario, gang_scenario
from simulate import failing, report, shrink
from simulation import Simulation, simulate

from ddpjob_operator import gangs
from ddpjob_operator.gangs import native
from ddpjob_operator.plan import gang

pytestmark = pytest.mark.timeout(900)  # CPU bound: a busy machine needs longer
BLOCK = 50
LONG = range(BLOCK, 2000, BLOCK)
MUTANT_SEEDS_MAX = 500
Mutant = Callable[[], contextlib.AbstractContextManager[Any]]


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.long) for first in LONG)])
def test_no_part_of_a_gang_starts_alone_and_no_group_outlives_its_attempt(first: int) -> None:
    """No part of a gang may start alone, and no group may stay after its attempt: both hold nodes without use."""
    bad = failing(range(first, first + BLOCK), gang_scenario)
    assert not bad, report(shrink(min(bad, key=lambda outcome: len(outcome.taken)), gang_scenario))


def pod_outside_of_its_group() -> contextlib.AbstractContextManager[Any]:
    """Bug: the pods of node 1 do not name their group."""

    def join(body: Any, job: Any, attempt: int) -> None:
        if not body["metadata"]["name"].endswith("-1"):
            native.pod(body, job, attempt)

    return mock.patch.dict(gangs.ADAPTERS, native=dataclasses.replace(native.ADAPTER, pod=join))


def group_outlives_its_attempt() -> contextlib.AbstractContextManager[Any]:
    """Bug: nobody deletes a group while its job exists."""
    return mock.patch.object(gang, "unneeded", return_value=())


def group_goes_with_its_job_alone() -> contextlib.AbstractContextManager[Any]:
    """Bug: the operator deletes only the group of a job's last attempt. Groups of older attempts stay."""
    unneeded = gang.unneeded

    def of_the_last(view: Any) -> Any:
        return tuple(a for a in unneeded(view) if a.name.endswith(f"-{view.recorded.attempt}"))

    return mock.patch.object(gang, "unneeded", of_the_last)


def group_goes_before_its_pods() -> contextlib.AbstractContextManager[Any]:
    """Bug: the group of a suspended job is deleted while its pods are still stopping."""
    unneeded = gang.unneeded

    def at_once(view: Any) -> Any:
        own = [g for g in view.seen.groups if g.owner_uid == view.job.metadata.uid]
        early = [gang.DeleteGroup(g.adapter, g.name, g.uid) for g in own if view.recorded.state == "Suspended"]
        return tuple(early) or unneeded(view)

    return mock.patch.object(gang, "unneeded", at_once)


def group_of_the_first_attempt_forever() -> contextlib.AbstractContextManager[Any]:
    """Bug: all attempts name the group of the first attempt, which is deleted."""

    def join(body: Any, job: Any, _: int) -> None:
        native.pod(body, job, 1)

    return mock.patch.dict(gangs.ADAPTERS, native=dataclasses.replace(native.ADAPTER, pod=join))


def test_seeds_that_failed_once_stay_fixed() -> None:
    """Seed 700430: node 0 of an elastic job, whose pod was force-deleted when all nodes had ended, found the old store.
    Seed 710130: an operator that started with an old list saw no pods, and deleted the group of living pods. Seeds
    801808, 809053: a pod of a deleted job counted for the group of the next job with the same name."""
    for seed in (700430, 710130, 801808, 809053):
        outcome = simulate(gang_scenario(seed))
        assert not outcome.wrong, outcome.wrong


@pytest.mark.parametrize(("wants", "second"), [("auto", "none"), ("native", "native")])
def test_a_gang_api_that_disappears_costs_a_running_job_nothing_and_its_restart_only_the_gang(
    wants: str, second: str
) -> None:
    """If a gang API disappears, as v1alpha2 at an upgrade, a running job must go on. Its restart waits for the API, or
    runs without a gang under `auto`."""
    fails = {1: Failure(rank=1, after_seconds=1500, code=1)}
    life = Simulation(Scenario(spec={"nodes": 2, "gang": wants}, gang=True, training_seconds=2500, failures=fails))
    seen: dict[int, tuple[str, str]] = {}
    reasons: set[str] = set()

    def changed(kind: Kind, change: Change) -> None:
        status = change.object.get("status") or {}
        if kind.plural == "ddpjobs" and "gang" in status:
            seen[status["attempt"]] = (status["gang"]["kind"], status.get("state", ""))
            reasons.add(status.get("reason", ""))

    life.api.listeners.append(changed)
    life.loop.call_later(100, life.api.served.clear)
    life.loop.call_later(3000, life.api.served.add, "scheduling.k8s.io/v1alpha2")
    outcome = life.run()
    assert (outcome.wrong, outcome.end) == ([], "Succeeded")
    assert seen == {1: ("native", "Restarting"), 2: (second, "Succeeded")}
    assert ("GangUnavailable" in reasons) == (wants == "native")


# The first seed that finds each bug. If a code change makes a seed miss its bug, the test searches for another.
SEEDS: dict[Mutant, int] = {
    pod_outside_of_its_group: 0,
    group_outlives_its_attempt: 0,
    group_goes_with_its_job_alone: 1,
    group_goes_before_its_pods: 35,
    group_of_the_first_attempt_forever: 1,
}


@pytest.mark.parametrize("mutant", SEEDS, ids=lambda mutant: mutant.__name__)
def test_the_simulation_finds_a_deliberate_bug_of_gangs(mutant: Mutant) -> None:
    with mutant():
        seeds = (SEEDS[mutant], *range(MUTANT_SEEDS_MAX))
        found = next((o for seed in seeds if (o := simulate(gang_scenario(seed))).wrong), None)
    assert found is not None, f"not found in {MUTANT_SEEDS_MAX} seeds"
    fixed = simulate(gang_scenario(found.seed), found.taken)
    assert not fixed.wrong, fixed.wrong
