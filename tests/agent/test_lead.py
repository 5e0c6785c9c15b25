"""What node 0's agent decides, in its own time: no process, no socket, no clock."""

from __future__ import annotations

from typing import Any

import pytest

from ddpjob import rules
from ddpjob.agent.lead import RESUMABLE, End, Lead, Start, Stop, root_cause
from ddpjob.agent.options import Budget

JOIN_SECONDS = 600.0
T0 = 7.25  # odd, so that a real clock would show


def failure(rank: int = 0, code: int = 1, **known: Any) -> dict[str, Any]:
    return {
        "rank": rank,
        "exitCode": code,
        "signal": "",
        "exception": "",
        "symptom": False,
        "resumable": code == 75,
    } | known


def lead(nodes: int, restarts: int = 3) -> Lead:
    return Lead(nodes, Budget(restarts, restarts, restarts, restarts), JOIN_SECONDS, T0)


def running(nodes: int, restarts: int = 3) -> Lead:
    found = lead(nodes, restarts)
    for node in range(nodes):
        found.joined(node, T0)
    assert taken(found) == [Start(0)]
    return found


def taken(found: Lead) -> list[Any]:
    orders, found.orders[:] = list(found.orders), []
    return orders


def stop(found: Lead, failures: list[dict[str, Any]], at: float = T0) -> None:
    """All nodes say that their ranks are gone."""
    (order,) = taken(found)
    assert isinstance(order, Stop)
    for node in order.nodes:
        found.stopped(node, failures if node == 0 else [], at)


def test_resumable_is_the_codes_own_number() -> None:
    assert RESUMABLE == rules.RESUMABLE_EXIT_CODE


def test_nothing_starts_before_every_node_is_here() -> None:
    found = lead(3)
    found.joined(0, T0)
    found.joined(2, T0 + 100)
    assert taken(found) == []
    found.joined(1, T0 + 500)
    assert taken(found) == [Start(0)]


def test_nodes_that_do_not_come_end_the_job_as_infrastructure_and_are_named() -> None:
    found = lead(3)
    found.joined(0, T0)
    found.tick(T0 + JOIN_SECONDS - 1)
    assert taken(found) == []
    found.tick(T0 + JOIN_SECONDS)
    (order,) = taken(found)
    assert order.code == RESUMABLE
    assert "nodes 1, 2" in order.why


def test_a_failure_stops_every_node_once_and_starts_all_again_when_the_last_rank_is_gone() -> None:
    found = running(3)
    found.failed(1, [failure(rank=1)], T0)
    assert taken(found) == [Stop(frozenset({0, 1, 2}), 0, patient=False)]
    found.failed(2, [failure(rank=2)], T0)
    found.stopped(1, [failure(rank=1)], T0)
    found.stopped(0, [], T0)
    assert taken(found) == [], "node 2 may still run a rank of the old generation"
    found.stopped(2, [failure(rank=2)], T0)
    assert taken(found) == [Start(1)]


def test_a_node_that_has_finished_starts_again_with_the_others() -> None:
    """The group has one size: without its ranks nobody could meet."""
    found = running(2)
    found.finished(0, T0)
    found.failed(1, [failure(rank=1)], T0)
    stop(found, [failure(rank=1)])
    assert taken(found) == [Start(1)]
    found.finished(1, T0)
    assert taken(found) == [], "what node 0 finished was the generation before"
    found.finished(0, T0)
    assert taken(found) == [End(0, None, "all ranks have ended")]


def test_the_job_ends_when_all_nodes_have_finished_and_not_before() -> None:
    found = running(2)
    found.finished(1, T0)
    assert taken(found) == []
    found.finished(0, T0)
    assert taken(found)[0].code == 0


@pytest.mark.parametrize("restarts", [0, 1, 3])
def test_the_budget_is_spent_to_the_last_and_not_overrun(restarts: int) -> None:
    found, at = running(1, restarts), T0
    for generation in range(1, restarts + 1):
        found.failed(0, [failure(code=9)], at)
        stop(found, [failure(code=9)], at)
        at += rules.back_off_seconds(generation)
        found.tick(at)
        assert taken(found) == [Start(generation)]
    found.failed(0, [failure(code=9)], at)
    stop(found, [failure(code=9)], at)
    (order,) = taken(found)
    assert (order.code, order.failure["exitCode"]) == (9, 9)


def test_infrastructure_has_its_own_limit_too() -> None:
    found = running(1, restarts=0)
    found.failed(0, [failure(code=143)], T0)
    stop(found, [failure(code=143)])
    assert taken(found)[0].code == 143


def test_a_second_failure_in_a_row_waits_and_one_after_a_long_run_does_not() -> None:
    found = running(1)
    for at, pause in ((T0, 0), (T0, 1), (T0 + 700, 0)):
        found.failed(0, [failure()], at)
        stop(found, [failure()], at)
        if pause:
            assert taken(found) == []
            assert found.deadline == at + pause
            found.tick(at + pause)
        assert isinstance(taken(found)[0], Start)


def test_what_can_never_start_is_not_tried_again() -> None:
    found = running(1)
    found.failed(0, [failure(code=127)], T0)
    stop(found, [failure(code=127)])
    assert taken(found)[0].code == 127


def test_a_lost_node_stops_the_others_which_wait_for_it() -> None:
    found = running(3)
    found.lost(2, T0)
    (order,) = taken(found)
    assert order.nodes == {0, 1}
    found.stopped(0, [], T0)
    found.stopped(1, [], T0)
    assert taken(found) == []
    found.joined(2, T0 + 60)
    assert taken(found) == [Start(1)]


def test_a_node_that_is_lost_while_all_stop_is_not_waited_for_until_the_next_start() -> None:
    found = running(2)
    found.failed(0, [failure()], T0)
    taken(found)
    found.stopped(0, [failure()], T0)
    found.lost(1, T0)
    found.joined(1, T0 + 1)
    assert taken(found) == [Start(1)]


def test_late_news_of_a_node_that_is_gone_change_nothing() -> None:
    found = running(2)
    found.lost(1, T0)
    taken(found)
    found.finished(1, T0)
    found.failed(1, [failure()], T0)
    found.stopped(1, [failure()], T0)
    assert taken(found) == []
    found.stopped(0, [], T0)
    assert found.state == "gathering"


def test_ranks_that_save_together_are_given_the_time_for_it() -> None:
    """One rank got SIGTERM and all agreed on a step: those that are still writing must not be killed."""
    found = running(2)
    found.failed(1, [failure(rank=1, code=75)], T0)
    assert taken(found)[0].patient


def test_a_job_that_was_told_to_stop_starts_nothing_again() -> None:
    found = running(2)
    found.told(T0)
    assert taken(found) == [], "its ranks may save first"
    found.failed(0, [failure(code=143)], T0)
    assert taken(found) == [Stop(frozenset({0, 1}), 0, patient=True)]
    found.stopped(0, [failure(code=143)], T0)
    found.lost(1, T0)
    assert taken(found)[0].code == RESUMABLE


@pytest.mark.parametrize("waits_for", ["peers", "back-off"])
def test_a_job_without_ranks_that_is_told_to_stop_ends_at_once(waits_for: str) -> None:
    found = lead(2) if waits_for == "peers" else running(1)
    if waits_for == "back-off":
        for _ in range(2):
            found.failed(0, [failure()], T0)
            stop(found, [failure()])
            found.orders.clear()
    found.told(T0)
    assert taken(found)[0].code == RESUMABLE


@pytest.mark.parametrize(
    ("failures", "guilty"),
    [
        ([failure(0, symptom=True), failure(1, 7)], 1),
        ([failure(0, vanished=True), failure(1, 7)], 1),
        ([failure(0, symptom=True), failure(1, vanished=True)], 1),
        ([failure(2), failure(1)], 2),
        ([failure(2, symptom=True), failure(1, symptom=True)], 2),
        ([failure(0, 75), failure(1, 9)], 1),
    ],
    ids=str,
)
def test_the_guilty_rank_is_the_first_that_has_a_reason_of_its_own(failures: list[Any], guilty: int) -> None:
    assert root_cause(failures)["rank"] == guilty


def test_an_attempt_with_symptoms_only_is_not_charged_to_the_application() -> None:
    found = running(2, restarts=1)
    said = failure(symptom=True)
    found.failed(0, [said], T0)
    stop(found, [said])
    assert "charged to infrastructure" in found.said


def test_a_new_leader_goes_on_from_the_generation_that_the_others_have_seen() -> None:
    """Else a process of an old generation and one of the new would have the same number, and the same log files."""
    found = lead(3)
    found.joined(0, T0)
    found.joined(1, T0, 4)
    found.joined(2, T0, 3)
    assert taken(found) == [Start(5)]
