"""Runs of several jobs in one cluster, with gangs or in a queue; and bugs made on purpose that one job cannot show."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from crowd import Crowd, crowd_scenario, growing_scenario, simulate_crowd
from model_api import Change, Kind
from model_kueue import Kueue, is_true
from scenario import Deed, Scenario
from simulate import lives, report, shrink

from ddpjob_operator.gangs import kueue
from ddpjob_operator.observed.groups import Placement
from ddpjob_operator.plan import gang
from ddpjob_operator.plan.actions import DeleteGroup, TellGroup
from ddpjob_operator.plan.view import View

pytestmark = pytest.mark.timeout(900)  # CPU bound: a busy machine needs longer
BY_DAY = range(24)
BLOCK = 125
LONG = range(0, 5000, BLOCK)
MUTANT_SEEDS_MAX = 300
Mutant = Callable[[], contextlib.AbstractContextManager[Any]]
# Seeds that once showed a bug in the model or in the operator.
ONCE_FAILED = (227, 874, 3269, 4711)
GROWING_BY_DAY = (*range(8), 87, 105, 135)


def check(seeds: Sequence[int], scenario: Callable[[int], Scenario] = crowd_scenario) -> Counter[str]:
    """Return how often each event happened in these runs. No run may show a violation."""
    bad, counted = lives(seeds, scenario)
    assert not bad, report(shrink(min(bad, key=lambda outcome: len(outcome.taken)), scenario))
    return counted


def test_jobs_that_do_not_fit_together_all_end_and_no_quota_is_used_twice_or_lost() -> None:
    """Jobs that do not fit together must all end, and no quota may be used twice or be lost."""
    counted = check((*BY_DAY, *ONCE_FAILED))
    assert counted["preemptions"] > 0, "lives without a preemption tell little"
    assert counted["admissions in part"] > 0, "nor do those in which all elastic jobs have all nodes they asked for"


def test_elastic_jobs_that_change_their_size_use_no_quota_twice_and_give_all_of_it_back() -> None:
    """Nodes must join only with quota, and others may have the quota of nodes that leave only after their end."""
    counted = check(GROWING_BY_DAY, growing_scenario)
    assert counted["parts of a quota given back"] > 0 < counted["admissions in part"]


@pytest.mark.parametrize("version", ["v1beta1", "v1beta2"])
@pytest.mark.parametrize("deed", ["workload inactive", "queue stopped"])
def test_a_job_stopped_by_its_queue_continues_when_the_queue_allows_it(version: str, deed: str) -> None:
    """A job that its queue stopped must continue when the queue allows it, as when a Workload is reactivated."""
    labels = {kueue.QUEUE_LABEL: "main", kueue.PRIORITY_LABEL: "high"}
    deeds = (Deed(100, deed, 0, 60),)
    life = Scenario(cluster_nodes=2, training_seconds=200, quota=2, labels=labels, kueue=version, deeds=deeds)
    outcome = simulate_crowd(life)
    assert (outcome.wrong, outcome.end, outcome.counted["preemptions"]) == ([], "Succeeded", 1)


@pytest.mark.long
@pytest.mark.parametrize("first", LONG)
def test_crowded_jobs_end_correctly_in_thousands_of_simulations(first: int) -> None:
    counted = check(range(first, first + BLOCK))
    assert counted["preemptions"] > 0 < counted["admissions in part"]


@pytest.mark.long
@pytest.mark.parametrize("first", LONG)
def test_elastic_jobs_change_their_size_correctly_in_thousands_of_simulations(first: int) -> None:
    """Like the test of a few seeds above."""
    check(range(first, first + BLOCK), growing_scenario)


def test_a_job_of_another_manager_is_left_alone_next_to_a_running_one() -> None:
    """A job of another manager, such as MultiKueue, must be left alone: pods here would train it twice."""
    plain = Scenario(cluster_nodes=4, training_seconds=20, quota=4, labels={"kueue.x-k8s.io/queue-name": "main"})
    spec = {**plain.spec, "managedBy": "kueue.x-k8s.io/multikueue"}
    crowd = Crowd(replace(plain, more=(replace(plain, name="theirs", spec=spec),)))
    theirs: list[str] = []
    crowd.api.listeners.append(
        lambda kind, change: theirs.append(f"{change.actor} {kind.plural} {change.object['metadata']['name']}")
    )
    # The run must not wait for this job, which never ends in this cluster.
    crowd._rests = lambda name: name == "theirs" or Crowd._rests(crowd, name)  # type: ignore[method-assign]
    outcome = crowd.run()
    assert outcome.end == "Succeeded "
    assert [line for line in theirs if "theirs" in line] == ["user ddpjobs theirs"]


@pytest.mark.parametrize(
    ("wrong", "says", "asked"),
    [
        ({kueue.QUEUE_LABEL: "mian"}, "LocalQueue mian doesn't exist", ["mian", "main"]),
        (
            {kueue.PRIORITY_LABEL: "hgih"},
            'Workload digits was refused: workloadpriorityclasses.kueue.x-k8s.io "hgih" not found',
            ["main"],
        ),
    ],
    ids=["queue", "priority class"],
)
def test_a_job_whose_label_names_a_missing_object_reports_it_and_trains_once_it_is_fixed(
    wrong: dict[str, str], says: str, asked: list[str]
) -> None:
    """A job whose label names a missing object must report this, and train once when the label is corrected."""
    right = {kueue.QUEUE_LABEL: "main", kueue.PRIORITY_LABEL: "high"}
    crowd = Crowd(Scenario(cluster_nodes=2, training_seconds=20, quota=4, labels=right | wrong))
    said: set[str] = set()
    made: list[str] = []

    def changed(kind: Kind, change: Change) -> None:
        said.add((change.object.get("status") or {}).get("message", "") if kind.plural == "ddpjobs" else "")
        if kind.plural == "workloads" and change.old is None:
            made.append(change.object["spec"]["queueName"])

    def mend() -> None:
        (job,) = crowd.api.all("ddpjobs")
        crowd.api.change("ddpjobs", job, "user", metadata={"labels": right})

    crowd.api.listeners.append(changed)
    crowd.loop.call_later(100, mend)
    outcome = crowd.run()
    assert (outcome.wrong, outcome.end, made) == ([], "Succeeded", asked)
    assert f"waiting in the queue: {says}" in said


def test_an_operator_that_may_not_read_flavors_reports_it_and_creates_no_pod_elsewhere() -> None:
    """An operator that may not read flavors must report this, and create no pod on nodes of other users."""
    crowd = Crowd(Scenario(cluster_nodes=2, training_seconds=20, quota=4, labels={kueue.QUEUE_LABEL: "main"}))
    request, no = crowd.api.request, {"kind": "Status", "code": 403, "reason": "Forbidden", "message": "cannot get"}
    said: set[str] = set()
    made: list[float] = []

    def refused(method: str, path: str, *more: Any) -> Any:
        return (403, no) if "/resourceflavors/" in path and crowd.loop.time() < 100 else request(method, path, *more)

    def changed(kind: Kind, change: Change) -> None:
        said.add((change.object.get("status") or {}).get("message", "") if kind.plural == "ddpjobs" else "")
        if kind.plural == "pods" and change.old is None:
            made.append(change.at)

    crowd.api.listeners.append(changed)
    with mock.patch.object(crowd.api, "request", refused):
        outcome = crowd.run()
    assert (outcome.wrong, outcome.end) == ([], "Succeeded")
    assert min(made) >= 100
    assert any("cannot get" in message for message in said), said


def quota_returned_early() -> contextlib.AbstractContextManager[Any]:
    """Bug: the quota is given back as soon as the eviction is recorded, while the job's pods are still stopping."""
    to_tell = gang.to_tell

    def early(view: View) -> tuple[TellGroup, ...]:
        group = gang.group_of(view, view.recorded)
        if group is not None and group.admission.holds_quota and view.recorded.reason == "Evicted":
            return (TellGroup(group.adapter, group.name, group.uid, "quota returned", "m"),)
        return to_tell(view)

    return mock.patch.object(gang, "to_tell", early)


def later_quota_returned_early() -> contextlib.AbstractContextManager[Any]:
    """Bug: the quota of nodes that came later is given back while their pods are still stopping."""
    unneeded = gang.unneeded

    def early(view: View) -> tuple[DeleteGroup, ...]:
        of_others = [g for g in view.seen.groups if g.number > 1 and g.admission.state == "evicted"]
        return tuple({*unneeded(view), *(DeleteGroup(g.adapter, g.name, g.uid) for g in of_others)})

    return mock.patch.object(gang, "unneeded", early)


def quota_never_returned() -> contextlib.AbstractContextManager[Any]:
    """Bug: giving the quota back is left to the queue, as for Kueue's own kinds. The preempting job waits forever."""
    to_tell = gang.to_tell

    def never(view: View) -> tuple[TellGroup, ...]:
        return tuple(tell for tell in to_tell(view) if tell.what != "quota returned")

    return mock.patch.object(gang, "to_tell", never)


def end_untold() -> contextlib.AbstractContextManager[Any]:
    """Bug: the operator does not tell the queue that a job has ended. Later jobs wait forever."""
    to_tell = gang.to_tell

    def never(view: View) -> tuple[TellGroup, ...]:
        return tuple(tell for tell in to_tell(view) if tell.what not in ("succeeded", "failed"))

    return mock.patch.object(gang, "to_tell", never)


def more_pods_than_admitted() -> contextlib.AbstractContextManager[Any]:
    """Bug: an elastic job that was admitted in part creates all its pods, on nodes that the queue gives to others."""
    return mock.patch.object(kueue, "placement", return_value=Placement())


def quota_counted_by_nobody() -> contextlib.AbstractContextManager[Any]:
    """Bug in the model: the queue forgets the quota that an evicted job still uses. The judge must report this."""
    holders = Kueue.holders

    def forgets(queue: Kueue) -> list[Any]:
        return [workload for workload in holders(queue) if not is_true(workload, "Evicted")]

    return mock.patch.object(Kueue, "holders", forgets)


# The first seed that finds each bug. If a code change makes a seed miss its bug, the test searches for another.
SEEDS: dict[Mutant, int] = {
    quota_returned_early: 7,
    quota_never_returned: 1,
    end_untold: 1,
    more_pods_than_admitted: 21,
    quota_counted_by_nobody: 245,
    later_quota_returned_early: 22,
}


@pytest.mark.parametrize("mutant", SEEDS, ids=lambda mutant: mutant.__name__)
def test_two_jobs_reveal_a_deliberate_bug(mutant: Mutant) -> None:
    """Runs of two jobs must find this deliberate bug."""
    life = growing_scenario if mutant is later_quota_returned_early else crowd_scenario
    with mutant():
        seeds = (SEEDS[mutant], *range(MUTANT_SEEDS_MAX))
        found = next((o for seed in seeds if (o := simulate_crowd(life(seed))).wrong), None)
    assert found is not None, f"not found in {MUTANT_SEEDS_MAX} seeds"
    fixed = simulate_crowd(life(found.seed), found.taken)
    assert not fixed.wrong, fixed.wrong
