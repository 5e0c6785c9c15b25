"""Small jobs with every single fault at every single point: a crash before and after each write; each watch event late,
lost alone or with its stream, or sent twice; each old state of the cluster shown to an operator that restarts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

import mutants
import pytest
import this_tree
from faults import POINTS
from model_training import Failure
from scenario import Deed, Scenario
from simulation import Outcome, simulate

T = TypeVar("T")
pytestmark = pytest.mark.timeout(900)  # CPU bound: a busy machine needs longer
LIVES = {
    "one node trains": Scenario(spec={"nodes": 1}, training_seconds=5),
    "two nodes train": Scenario(training_seconds=5),
    "two nodes, a rank fails once": Scenario(training_seconds=5, failures={1: Failure(1, 1.0, 1)}),
    "two nodes, suspended and resumed": Scenario(training_seconds=40, deeds=(Deed(5, "suspend", seconds=1),)),
    "deleted and applied again": Scenario(spec={"nodes": 1}, training_seconds=9, deeds=(Deed(5, "delete and apply"),)),
    "a node is cut off and comes back": Scenario(training_seconds=9, deeds=(Deed(5, "node cut", seconds=150),)),
    "under ddprun a rank fails, then node 0's agent": Scenario(
        launcher="ddprun", training_seconds=9, failures={1: Failure(1, 1.0, 1)}, deeds=(Deed(6, "agent killed"),)
    ),
}
# `make test` runs these. The other stories resemble tests elsewhere: one attempt, two attempts, a deletion.
BY_DAY = (
    "two nodes, a rank fails once",
    "two nodes, suspended and resumed",
    "a node is cut off and comes back",
    "under ddprun a rank fails, then node 0's agent",
)
# `make test` tests a sixth of the points, with another offset in each commit; `make test-long` tests all points.
EACH_LIFE = [
    *((name, 6) for name in BY_DAY),
    *(pytest.param(name, 1, marks=pytest.mark.long) for name in LIVES),
]
of_each_life = pytest.mark.parametrize(("name", "one_of"), EACH_LIFE)
WATCHES = ("watch.pods", "watch.services", "watch.ddpjobs", "watch.nodes")
STALE_VERSIONS = (1, 2, 4, 6, 8, 11)
STUBBORN = {"sigterm#0": "ignored", "sigterm#1": "ignored"}


def planned(outcome: Outcome) -> dict[str, str]:
    """Return the actions and failures that belong to the run itself, because they are no injected faults."""
    return dict(outcome.taken)


def part(places: Iterable[T], one_of: int) -> Iterator[T]:
    """Yield one in `one_of` of the points."""
    return itertools.islice(places, this_tree.number() % one_of, None, one_of)


def single_faults(life: Outcome) -> Iterator[tuple[str, str]]:
    for point, count in life.passed.items():
        for number in range(count):
            for fault in POINTS[point]:
                yield f"{point}#{number}", fault


def check(life: Scenario, only: dict[str, str]) -> None:
    outcome = simulate(life, only)
    assert not outcome.wrong, "\n".join([*outcome.story, f"with {only}:", *outcome.wrong])
    assert outcome.end == "Succeeded", "\n".join([*outcome.story, f"with {only} it ends {outcome.end}"])


@of_each_life
def test_a_job_ends_as_usual_with_any_single_fault_at_any_point(name: str, one_of: int) -> None:
    undisturbed = simulate(LIVES[name])
    assert not undisturbed.wrong
    assert undisturbed.end == "Succeeded"
    count = 0
    for place, fault in part(single_faults(undisturbed), one_of):
        check(LIVES[name], {**planned(undisturbed), place: fault})
        count += 1
    print(f"{count} single faults")
    assert count > 100 // one_of


@pytest.mark.parametrize(
    "name", [*BY_DAY, *(pytest.param(name, marks=pytest.mark.long) for name in LIVES if name not in BY_DAY)]
)
def test_a_job_ends_if_any_single_watch_event_is_lost(name: str) -> None:
    """A job must end if any single watch event is lost. Otherwise it holds its GPUs until the operator restarts."""
    undisturbed = simulate(LIVES[name])
    events = [(point, number) for point in WATCHES for number in range(undisturbed.passed.get(point, 0))]
    for point, number in events:
        check(LIVES[name], {**planned(undisturbed), f"{point}#{number}": "never"})
    assert len(events) > 5


def old_states(name: str) -> Iterator[tuple[Scenario, dict[str, str]]]:
    """Let the operator die after each write. Its successor gets an old list, and no events of pods."""
    undisturbed = simulate(LIVES[name])
    first = undisturbed.passed["list"]
    stale = {f"list#{n}": "stale" for n in range(first, first + 4)}
    late = {f"watch.pods#{n}": "late" for n in range(1, 60)}
    for behind in STALE_VERSIONS:
        for number in range(undisturbed.passed["write"]):
            faults = {**planned(undisturbed), f"write#{number}": "crash after", **stale}
            for some in ({}, {**late, **STUBBORN}):
                yield replace(LIVES[name], stale_by=behind), {**faults, **some}


@of_each_life
def test_a_restart_of_the_operator_after_any_write_with_any_old_state_does_no_harm(name: str, one_of: int) -> None:
    for life, faults in part(old_states(name), one_of):
        check(life, faults)


def test_trusting_an_old_copy_after_a_start_is_detected() -> None:
    with mutants.copy_believed():
        assert any(simulate(life, faults).wrong for life, faults in old_states("two nodes, suspended and resumed"))


def requests_that_outlive_their_sender(seeds: range) -> Iterator[tuple[Scenario, dict[str, str]]]:
    """Delay each write in turn, one per run. During the delay the operator dies, and the user applies the job again."""
    deeds = (Deed(5, "suspend", seconds=60), Deed(5.3, "crash"), Deed(6, "delete and apply"))
    for seed in seeds:
        life = Scenario(seed=seed, spec={"nodes": 1}, training_seconds=30, deeds=deeds)
        undisturbed = simulate(life)
        for number in range(undisturbed.passed["write"]):
            yield life, {**planned(undisturbed), f"write#{number}": "slow"}


@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 24), marks=pytest.mark.long)], ids=str)
def test_a_request_that_arrives_after_its_sender_has_died_does_no_harm(seeds: range) -> None:
    for life, faults in requests_that_outlive_their_sender(seeds):
        check(life, faults)


def test_a_delete_without_a_uid_is_detected() -> None:
    with mutants.delete_without_uid():
        assert any(simulate(life, faults).wrong for life, faults in requests_that_outlive_their_sender(range(24)))


def parts_cut_off() -> Iterator[Scenario]:
    """Cut the nodes of a job under ddprun off from the cluster, but not from each other, one node after the other."""
    spec = {"nodes": 2, "onePodPerNode": True}
    deeds = [Deed(20, "nodes cut", number, 400) for number in range(1, 5)]
    for seed, deed, clusterwide in itertools.product(range(4), deeds, (True, False)):
        yield Scenario(
            seed=seed,
            spec=spec,
            launcher="ddprun",
            cluster_nodes=6,
            training_seconds=300,
            clusterwide=clusterwide,
            deeds=(deed,),
        )


def test_a_group_that_continues_unseen_has_no_second_group_in_its_attempt() -> None:
    for life in parts_cut_off():
        outcome = simulate(life)
        assert not outcome.wrong, "\n".join([*outcome.story, *outcome.wrong])
        assert outcome.end == "Succeeded", "\n".join([*outcome.story, f"it ends {outcome.end}"])


def test_replacing_all_pods_of_a_job_in_one_attempt_is_detected() -> None:
    with mutants.all_replaced_in_turn():
        assert any(simulate(life).wrong for life in parts_cut_off())


def networks_that_fail_again_and_again() -> Iterator[Scenario]:
    """Cut a node off several times near the end of training: until it is not ready, but not until it is given up."""
    spec = {"nodes": 2, "onePodPerNode": True, "backoffLimit": 1}
    deeds = tuple(Deed(at, "node cut", 1, 46) for at in (30, 84, 140))
    for seed, clusterwide in itertools.product(range(6), (True, False)):
        yield Scenario(seed=seed, spec=spec, cluster_nodes=2, training_seconds=60, clusterwide=clusterwide, deeds=deeds)


def test_ranks_that_lose_their_peers_by_a_known_network_failure_are_not_charged_to_the_script() -> None:
    for life in networks_that_fail_again_and_again():
        outcome = simulate(life)
        assert not outcome.wrong, "\n".join([*outcome.story, *outcome.wrong])


def test_forgetting_the_past_silence_of_a_node_is_detected() -> None:
    with mutants.silence_forgotten():
        assert any(simulate(life).wrong for life in networks_that_fail_again_and_again())
