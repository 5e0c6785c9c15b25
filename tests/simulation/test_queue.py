"""Walks of jobs through a queue with quota and preemption: no quota is used twice, held after the end, or lost."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace as replaced
from typing import Any
from unittest import mock

import pytest
from model_queue import Walk

from ddpjob_operator.gangs import kueue
from ddpjob_operator.plan import actions, decide, gang
from ddpjob_operator.plan.actions import Decision, DeleteGroup, TellGroup
from ddpjob_operator.plan.view import View

WALKS, WALKS_BY_NIGHT = 100, 30_000
MUTANT_WALKS = 50


def test_no_quota_is_used_twice_or_held_after_the_end_and_all_jobs_end() -> None:
    evictions = 0
    for seed in range(WALKS):
        walk = Walk(seed)
        assert walk.run() == [], f"seed {seed}"
        evictions += walk.evictions
    assert evictions > WALKS, "a walk without an eviction tells little"


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_same_in_many_walks() -> None:
    for seed in range(WALKS, WALKS_BY_NIGHT):
        assert Walk(seed).run() == [], f"seed {seed}"


def quota_returned_early() -> contextlib.AbstractContextManager[Any]:
    """The quota is returned as soon as the eviction is recorded."""
    to_tell = gang.to_tell

    def early(view: View) -> tuple[TellGroup, ...]:
        group = gang.group_of(view, view.recorded)
        if group is not None and group.admission.holds_quota and view.recorded.reason == "Evicted":
            return (TellGroup(group.adapter, group.name, group.uid, "quota returned", "m"),)
        return to_tell(view)

    return mock.patch.object(gang, "to_tell", early)


def quota_never_returned() -> contextlib.AbstractContextManager[Any]:
    """The operator leaves it to the queue, as for the queue's own kinds."""
    return mock.patch.object(gang, "to_tell", return_value=())


def a_second_workload() -> contextlib.AbstractContextManager[Any]:
    """Each attempt requests a new place."""
    each = replaced(kueue.ADAPTER, per_attempt=True)
    return mock.patch.object(actions, "ADAPTERS", {"kueue": each})


def eviction_unheard() -> contextlib.AbstractContextManager[Any]:
    """Only a suspension by the user stops a job."""
    rules = tuple(rule for rule in decide.RULES if rule.__name__ != "evicted")
    return mock.patch.object(decide, "RULES", rules)


def label_unheard() -> contextlib.AbstractContextManager[Any]:
    """A job always requests its first queue, although its label has changed."""
    waiting = gang.waiting_for_admission

    def deaf(view: View, status: Any) -> Decision | None:
        decision = waiting(view, status)
        if decision is None:
            return None
        return replaced(decision, actions=tuple(a for a in decision.actions if not isinstance(a, DeleteGroup)))

    rules = tuple(deaf if rule.__name__ == "waiting_for_admission" else rule for rule in decide.RULES)
    return mock.patch.object(decide, "RULES", rules)


def kills() -> contextlib.AbstractContextManager[Any]:
    """An eviction stops the pods as a failure does."""
    evicted = gang.evicted

    def hard(view: View, status: Any) -> Decision | None:
        decision = evicted(view, status)
        if decision is None:
            return None
        stops = tuple(replaced(a, grace_seconds=1) if hasattr(a, "grace_seconds") else a for a in decision.actions)
        return replaced(decision, actions=stops)

    rules = tuple(hard if rule.__name__ == "evicted" else rule for rule in decide.RULES)
    return mock.patch.object(decide, "RULES", rules)


@pytest.mark.parametrize(
    "mutant",
    [quota_returned_early, quota_never_returned, a_second_workload, eviction_unheard, label_unheard, kills],
    ids=lambda mutant: mutant.__name__,
)
def test_each_bug_made_on_purpose_is_found(mutant: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
    with mutant():
        assert any(Walk(seed).run() for seed in range(MUTANT_WALKS))
