"""Node 0's decisions in a session of `ddpjob dev`: saving a file restarts all ranks, and a failure does not."""

from typing import Any

import pytest
from leads import failure, start, taken

from ddpjob_core.budget import Budget
from ddpjob_core.members import Members
from ddprun.core.leader_state import ALL_SUCCEEDED, EndOrder, LeaderState, Leave, Stand, Stop

T0 = 100.0
STOP = Stop(frozenset({0, 1}), 0, patient=False)


def running(**more: Any) -> LeaderState:
    """Return the state of two nodes whose first generation is running."""
    found = LeaderState(Members(range(2)), Budget(3, 3, 3, 3), 60.0, T0, has_operator=True, dev=True, **more)
    for node in range(2):
        found.joined(node, T0)
    assert taken(found) == [start(found, 0)]
    return found


def stop_all(found: LeaderState, **of_node_1: Any) -> None:
    found.stopped(0, [], T0)
    found.stopped(1, [failure(1, **of_node_1)] if of_node_1 else [], T0)


def test_running_ranks_are_stopped_and_restarted_at_once_without_a_charge() -> None:
    found = running()
    for generation in range(1, 9):
        found.rerun(T0)
        found.rerun(T0)  # a second save of a file
        assert taken(found) == [STOP._replace(generation=generation - 1)]
        stop_all(found)
        assert taken(found) == [start(found, generation)]
    assert (found.charges.restarts, found.charges.failures) == (0, [])


def test_a_save_while_ranks_stop_for_a_failure_restarts_them_without_a_wait() -> None:
    found = running()
    found.failed(1, [failure(1, exception="ValueError: a")], T0)
    found.rerun(T0)
    assert taken(found) == [STOP], "the other node has no moment to raise the same"
    stop_all(found, exception="ValueError: a")
    assert taken(found) == [start(found, 1)]


@pytest.mark.parametrize("exception", ["ModuleNotFoundError: No module named 'x'", "OSError: x", ""])
def test_after_a_failure_all_nodes_wait_for_a_save(exception: str) -> None:
    found = running()
    for generation in range(9):
        found.failed(1, [failure(1, exception=exception)], T0)
        found.tick(T0 + 9)
        assert taken(found) == [STOP._replace(generation=generation)]
        stop_all(found, exception=exception)
        (order,) = taken(found)
        assert isinstance(order, Stand)
        assert (exception in order.why, order.succeeded, found.deadline) == (True, False, None)
        found.rerun(T0)
        assert taken(found) == [start(found, generation + 1)]
    assert (found.charges.restarts, found.charges.failures) == (0, [])


def test_after_the_end_of_the_script_all_nodes_wait_and_a_termination_ends_them() -> None:
    found = running()
    found.finished(0, T0)
    found.finished(1, T0)
    assert taken(found) == [Stand(ALL_SUCCEEDED, succeeded=True)]
    found.rerun(T0)
    assert taken(found) == [start(found, 1)]
    found.finished(0, T0)
    found.finished(1, T0)
    taken(found)
    found.termination_requested(1, T0)
    assert taken(found) == []
    found.termination_requested(0, T0)
    (order,) = taken(found)
    assert isinstance(order, Leave)


def test_a_node_that_has_succeeded_restarts_with_one_that_is_running() -> None:
    found = running()
    found.finished(1, T0)
    found.rerun(T0)
    assert taken(found) == [STOP]
    stop_all(found)
    assert taken(found) == [start(found, 1)]


def test_a_node_lost_meanwhile_is_waited_for() -> None:
    found = running()
    found.rerun(T0)
    taken(found)
    found.lost(1, T0)
    found.stopped(0, [], T0)
    assert taken(found) == []
    found.rerun(T0)
    found.joined(1, T0, 0, 1)
    assert taken(found) == [start(found, 1)]


def test_a_save_before_the_ranks_have_started_changes_nothing() -> None:
    found = LeaderState(Members(range(2)), Budget(3, 3, 3, 3), 60.0, T0, dev=True)
    found.rerun(T0)
    assert taken(found) == []
    checking = LeaderState(Members(range(1)), Budget(3, 3, 3, 3), 60.0, T0, dev=True, preflight=True)
    checking.joined(0, T0)
    taken(checking)
    checking.rerun(T0)
    assert taken(checking) == []
    found.tick(T0 + 61)
    (order,) = taken(found)
    assert isinstance(order, EndOrder)
