"""Decisions of node 0's agent in virtual time, without processes, sockets or a clock."""

import itertools
from typing import Any

import pytest
from leads import failure, start, taken

from ddpjob_core import budget, failures
from ddpjob_core.budget import Budget, Grant, Known, RestartHistory, Spent
from ddpjob_core.failure_policy import PolicyRule
from ddpjob_core.failures import RESUMABLE_EXIT_CODE as RESUMABLE
from ddpjob_core.failures import Failure, root_cause
from ddpjob_core.members import Members
from ddprun.core.leader_state import SAME_MISTAKE_SECONDS, EndOrder, LeaderState, Leave, StartOrder, Stop

JOIN_SECONDS = 600.0
T0 = 7.25  # an unusual value, so that use of the real clock is noticed


def lead(nodes: int, restarts: int = 3, **more: Any) -> LeaderState:
    return LeaderState(Members(range(nodes)), Budget(restarts, restarts, restarts, restarts), JOIN_SECONDS, T0, **more)


def running(nodes: int, restarts: int = 3, **more: Any) -> LeaderState:
    found = lead(nodes, restarts, **more)
    for node in range(nodes):
        found.joined(node, T0)
    assert taken(found) == [start(found, 0)]
    return found


def stop(found: LeaderState, failures: list[Failure], at: float = T0) -> None:
    """Let all nodes report that their ranks have ended, node 0 with these failures."""
    (order,) = taken(found)
    assert isinstance(order, Stop)
    for node in order.nodes:
        found.stopped(node, failures if node == 0 else [], at)


def fail(found: LeaderState, failures: list[Failure], at: float = T0) -> None:
    """Let ranks of node 0 fail and all nodes stop."""
    found.failed(0, failures, at)
    stop(found, failures, at)


def fails(found: LeaderState, at: float, then: StartOrder | type[EndOrder]) -> None:
    """Let a rank fail, and check the order that follows the longest back-off."""
    fail(found, [failure(code=9)], at)
    found.tick(at + 400)  # the longest back-off is 300 s
    (order,) = taken(found)
    assert order == then or type(order) is then


def fail_twice(found: LeaderState) -> None:
    """Let a rank fail twice; the next start then waits a second."""
    for _ in range(2):
        fail(found, [failure()])
        found.orders.clear()
    assert found.state == "pausing"


def test_nothing_starts_before_every_node_is_here() -> None:
    found = lead(3)
    found.joined(0, T0)
    found.joined(2, T0 + 100)
    assert taken(found) == []
    found.joined(1, T0 + 500)
    assert taken(found) == [start(found, 0)]


def test_an_appointed_leader_starts_as_soon_as_the_survivors_are_here_and_waits_a_moment_for_a_missing_one() -> None:
    """Waiting for pods that were scaled away would cost each survivor five seconds of training."""
    found = lead(4, least=1, last_call_seconds=5.0, leader=0, survivors={0, 1})
    found.joined(0, T0, 3)
    assert taken(found) == []
    found.joined(1, T0 + 0.1, 3)
    assert taken(found) == [StartOrder(4, Members((0, 1)), False)]


def test_the_nodes_of_a_smaller_job_do_not_wait_for_those_that_it_had() -> None:
    """A new pod must tell the leader how many nodes there are now: all ranks would stand still for the last call."""
    found = running(4, least=2, last_call_seconds=30.0, has_operator=True)
    for gone in (3, 2, 1):
        found.lost(gone, T0)
        for node in range(gone):
            found.stopped(node, [], T0)
    found.orders.clear()
    found.joined(1, T0 + 1, replacement=1, nodes=2, grant=Grant(3, 99, 10, replaced=3))
    assert taken(found) == [StartOrder(3, Members((0, 1)))]
    found.joined(3, T0 + 2, replacement=1, nodes=4, grant=Grant(3, 99, 10, replaced=3))
    assert not found.is_full, "the job is larger again"


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
    assert taken(found) == [start(found, 1)]


def test_a_node_that_has_finished_starts_again_with_the_others() -> None:
    """A node that has finished must start again with the others, because the group has a fixed size."""
    found = running(2)
    found.finished(0, T0)
    found.failed(1, [failure(rank=1)], T0)
    stop(found, [failure(rank=1)])
    assert taken(found) == [start(found, 1)]
    found.finished(1, T0)
    assert taken(found) == [], "what node 0 finished was the generation before"
    found.finished(0, T0)
    assert taken(found) == [EndOrder(0, None, "all ranks have ended")]


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
        fail(found, [failure(code=9)], at)
        at += budget.back_off_seconds(generation)
        found.tick(at)
        assert taken(found) == [start(found, generation)]
    fail(found, [failure(code=9)], at)
    (order,) = taken(found)
    assert (order.code, order.failure.exit_code) == (9, 9)


@pytest.mark.parametrize(
    ("grant", "restarts"),
    [
        (Grant(0, 99, 10, replaced=1, known=Known(0, Spent(1))), 0),
        (Grant(1, 99, 10, replaced=1, known=Known(0, Spent(1))), 1),
        (Grant(1, 99, 10, replaced=1), 0),
        (Grant(1, 99, 10, replaced=1, known=Known(7, Spent(1))), 0),
    ],
    ids=["nothing is left", "one, and it knew of ours", "one, and it did not", "one, and it knew of another agent's"],
)
def test_what_the_operator_has_charged_meanwhile_comes_with_a_new_pod(grant: Grant, restarts: int) -> None:
    """A new pod's agent must know the restarts that the operator counted, or restarts would exceed backoffLimit."""
    found = running(2, restarts=3, has_operator=True)
    fail(found, [failure()])
    assert taken(found) == [start(found, 1)]
    found.lost(1, T0)
    stop(found, [])
    found.joined(1, T0, 1, 1, grant=grant)
    assert taken(found) == [start(found, 2)]
    fails(found, T0 + 1000, start(found, 3) if restarts else EndOrder)


def test_a_pod_that_was_made_earlier_knows_nothing_new_of_the_budget() -> None:
    found = running(2, restarts=1, has_operator=True)
    for number, grant in enumerate([Grant(5, 99, 10, replaced=2), Grant(0, 99, 10, replaced=1)], start=1):
        found.lost(1, T0)
        stop(found, [])
        found.joined(1, T0, number - 1, number, grant=grant)
        assert taken(found) == [start(found, number)]
    for number in (3, 4, 5):
        fails(found, T0 + number * 1000, start(found, number))


def test_infrastructure_has_its_own_limit_too() -> None:
    found = running(1, restarts=0)
    fail(found, [failure(code=143)])
    assert taken(found)[0].code == 143


def test_a_second_failure_in_a_row_waits_and_one_after_a_long_run_does_not() -> None:
    found = running(1)
    for at, pause in ((T0, 0), (T0, 1), (T0 + 700, 0)):
        fail(found, [failure()], at)
        if pause:
            assert taken(found) == []
            assert found.deadline == at + pause
            found.tick(at + pause)
        assert isinstance(taken(found)[0], StartOrder)


def test_what_can_never_start_is_not_tried_again() -> None:
    found = running(1)
    fail(found, [failure(code=127)])
    assert taken(found)[0].code == 127


TYPO = "NameError: name 'modle' is not defined"


@pytest.mark.parametrize(
    ("code", "exception"),
    [
        (1, TYPO),
        (1, "python: can't open file '/app/trian.py': [Errno 2] No such file"),
        (1, "SystemExit: /usr/bin/python: No module named trian"),
        (2, "train.py: error: unrecognized arguments: --lrr 1"),
        (127, ""),
    ],
)
def test_what_fails_on_all_nodes_before_the_first_step_is_not_tried_again(code: int, exception: str) -> None:
    """A failure on all nodes before the first step, such as `ddprun trian.py`, must not be tried again."""
    found = running(2, has_operator=True)
    found.failed(0, [failure(code=code, exception=exception)], T0)
    taken(found)
    for node in range(2):
        found.stopped(node, [failure(node, code=code, exception=exception)], T0)
    (order,) = taken(found)
    assert (order.code, order.failure.failure_class) == (code, "permanent")


def test_a_mistake_that_one_node_makes_twice_is_not_tried_a_third_time() -> None:
    """A mistake that only one node reports must be tried twice, because the other node may be stopped before it."""
    found = running(2)
    for then in (StartOrder, EndOrder):
        found.failed(0, [failure(exception=TYPO)], T0)
        assert (taken(found), found.deadline) == ([], T0 + SAME_MISTAKE_SECONDS)
        found.tick(T0 + SAME_MISTAKE_SECONDS)
        stop(found, [failure(exception=TYPO)])
        (order,) = taken(found)
        assert type(order) is then
    assert order.failure.failure_class == "permanent"


@pytest.mark.parametrize("kind", ["OSError", "torch.OutOfMemoryError"])
@pytest.mark.parametrize(
    ("local", "second", "then"),
    [
        (True, {}, EndOrder),
        (True, {"where": "train.py:5"}, StartOrder),
        (True, {"exception": "EOFError: shard 2"}, StartOrder),
        (True, {"step": 7}, StartOrder),
        (False, {}, StartOrder),
    ],
    ids=["the same", "another line", "another exception", "after a new step", "in a cluster"],
)
def test_on_one_machine_any_exception_that_comes_twice_at_one_line_ends_the_job(local, second, then, kind):
    """On one machine the same exception at the same line must end the job. In a cluster a node may be at fault."""
    first = {"exception": f"{kind}: shard 1", "where": "train.py:4"}
    found = running(2, local=local)
    fails_with = [failure(**first), failure(**first | {"exception": f"{kind}: shard 2"} | second)]
    for i, failed in enumerate(fails_with):
        if failed.step:
            found.reached(failed.step)
        fail(found, [failed], T0 + i)
        found.tick(T0 + 400)
        (order,) = taken(found)
    assert type(order) is then


def test_a_mistake_that_all_nodes_make_costs_no_restart() -> None:
    """A mistake that all nodes make must cost no restart: ranks get time to raise the same error."""
    found = running(3)
    for node in range(3):
        assert taken(found) == []
        found.failed(node, [failure(node, exception=TYPO)], T0 + node / 10)
        found.stopped(node, [failure(node, exception=TYPO)], T0 + node / 10)
    *_, order = taken(found)
    assert isinstance(order, EndOrder)
    assert order.failure.failure_class == "permanent"


def test_ranks_that_share_a_node_with_one_that_has_made_the_mistake_are_not_waited_for() -> None:
    found = running(2)
    found.failed(0, [failure(0, exception=TYPO)], T0)
    found.failed(1, [failure(2, exception=TYPO)], T0)
    stop(found, [failure(0, exception=TYPO)])
    assert taken(found)[0].failure.failure_class == "permanent"


@pytest.mark.parametrize(
    "happens",
    [
        lambda found: found.failed(1, [failure(1, exception="OSError: no route")], T0),
        lambda found: found.failed(1, [failure(1, exception="Connection closed by peer", symptom=True)], T0),
        lambda found: found.lost(1, T0),
        lambda found: found.finished(1, T0),
        lambda found: found.termination_requested(1, T0),
    ],
)
def test_nothing_else_is_waited_for_once_another_node_has_something_else_to_tell(happens: Any) -> None:
    found = running(3)
    found.failed(0, [failure(exception=TYPO)], T0)
    assert taken(found) == []
    happens(found)
    assert isinstance(taken(found)[0], Stop)


@pytest.mark.parametrize("what", [failure(exception="OSError: no route"), failure(code=7), failure(code=-9)])
def test_what_is_no_mistake_of_the_script_stops_the_others_at_once(what: Failure) -> None:
    found = running(2)
    found.failed(0, [what], T0)
    assert isinstance(taken(found)[0], Stop)


def test_a_long_mistake_is_the_same_on_node_0_and_on_a_node_whose_report_cuts_it() -> None:
    long = f"RuntimeError: Expected to have finished reduction in the prior iteration {'x' * failures.EXCEPTION_MAX}"
    found, told = running(2), [failures.abridged(long, n) for n in (failures.EXCEPTION_MAX, failures.BRIEF_MAX)]
    for rank, then in enumerate((StartOrder, EndOrder)):
        found.failed(rank, [failure(rank, exception=told[rank])], T0)
        found.tick(T0 + SAME_MISTAKE_SECONDS)
        assert isinstance(taken(found)[0], Stop)
        for node in range(2):
            found.stopped(node, [failure(rank, exception=told[rank])] if node == rank else [], T0)
        (order,) = taken(found)
        assert type(order) is then
    assert order.failure.failure_class == "permanent"


@pytest.mark.parametrize(("step", "loaded", "at"), [(1, 0, T0), (0, 9, T0), (0, 0, T0 + 61)])
def test_a_mistake_is_tried_again_once_the_job_has_trained(step: int, loaded: int, at: float) -> None:
    """A mistake must be tried again once the job has trained, for example one for a rare batch. An agent that is
    started again knows from the loaded step that the job has trained."""
    found = running(1)
    found.reached(step, loaded)
    fail(found, [failure(exception=TYPO)], at)
    assert isinstance(taken(found)[0], StartOrder)


NO_SCRIPT = "ddprun: there is no file train.py in /data"


NO_MODULE = "ModuleNotFoundError: No module named 'mymodel'"


@pytest.mark.parametrize("step", [0, 100], ids=["first attempt", "after training"])
@pytest.mark.parametrize(("code", "exception"), [(127, ""), (2, NO_SCRIPT), (1, NO_MODULE)])
def test_what_one_node_does_not_have_is_looked_for_on_another(code: int, exception: str, step: int) -> None:
    """A program or module that one node lacks must be tried on another node, because only its volume may be missing.
    Restarts on the same nodes would spend backoffLimit."""
    found = running(2, has_operator=True, furthest_step=step)
    found.failed(0, [failure(code=code, exception=exception)], T0)
    found.tick(T0 + SAME_MISTAKE_SECONDS)
    stop(found, [failure(code=code, exception=exception)], T0 + SAME_MISTAKE_SECONDS)
    (order,) = taken(found)
    assert (order.code, order.failure.failure_class) == (code, "infrastructure")
    assert order.why.endswith("; another node may have the program")


def test_a_script_that_no_node_has_is_not_tried_again_also_where_ranks_were_stopped_before_they_looked_for_it() -> None:
    found = running(2, has_operator=True)
    found.failed(0, [failure(code=2, exception=NO_SCRIPT)], T0)
    taken(found)
    found.stopped(0, [failure(code=2, exception=NO_SCRIPT)], T0)
    found.stopped(1, [], T0, lacks_program=True)
    (order,) = taken(found)
    assert (order.code, order.failure.failure_class) == (2, "permanent")


@pytest.mark.parametrize("where", [{}, {"has_operator": True, "local": True}], ids=["no operator", "one machine"])
def test_without_other_nodes_an_import_error_of_one_node_is_tried_twice(where: Any) -> None:
    """An import may succeed the next time, for example of a module that another rank was building."""
    found = running(2, **where)
    for then in (StartOrder, EndOrder):
        found.failed(0, [failure(exception=NO_MODULE)], T0)
        found.tick(T0 + SAME_MISTAKE_SECONDS)
        stop(found, [failure(exception=NO_MODULE)])
        (order,) = taken(found)
        assert type(order) is then
    assert order.failure.failure_class == "permanent"


def test_on_one_machine_a_script_that_is_gone_after_training_is_not_started_for_ever() -> None:
    """There are no other nodes, so these starts must use up the restarts that are left."""
    where = {"has_operator": True, "local": True, "furthest_step": 500}
    found = LeaderState(Members(range(2)), Budget(3, 99, 9, 999), JOIN_SECONDS, T0, **where)
    found.joined(0, T0)
    found.joined(1, T0)
    assert len(taken(found)) == 1
    failed = failure(code=2, exception=NO_SCRIPT)
    for restarts in range(6):
        at = T0 + 30 * restarts
        found.failed(0, [failed], at)
        found.tick(at + SAME_MISTAKE_SECONDS)
        stop(found, [failed], at + SAME_MISTAKE_SECONDS)
        found.tick(at + 29)  # the sixth back-off is 16 s
        if any(isinstance(order, EndOrder) for order in taken(found)):
            break
    assert restarts < 5


def test_an_import_that_fails_because_of_a_gpu_is_repeated_in_place() -> None:
    """A device that is busy for a moment must not cost new pods, as a missing module does."""
    found = running(2, has_operator=True, furthest_step=100)
    failed = failure(code=1, exception="ImportError: CUDA-capable device(s) is/are busy or unavailable")
    found.failed(0, [failed], T0)
    found.tick(T0 + SAME_MISTAKE_SECONDS)
    stop(found, [failed])
    (order,) = taken(found)
    assert isinstance(order, StartOrder)


def test_a_script_that_was_removed_since_the_ranks_began_explains_no_other_failure() -> None:
    found = running(2, has_operator=True)
    found.failed(0, [failure(code=1, exception="OSError: no space left")], T0)
    taken(found)
    found.stopped(0, [failure(code=1, exception="OSError: no space left")], T0, lacks_program=True)
    found.stopped(1, [], T0, lacks_program=True)
    assert isinstance(taken(found)[0], StartOrder)


def test_a_lost_node_stops_the_others_which_wait_for_it() -> None:
    found = running(3)
    found.lost(2, T0)
    (order,) = taken(found)
    assert order.nodes == {0, 1}
    found.stopped(0, [], T0)
    found.stopped(1, [], T0)
    assert taken(found) == []
    found.joined(2, T0 + 60)
    assert taken(found) == [start(found, 1)]


def test_a_node_that_is_lost_while_all_stop_is_not_waited_for_until_the_next_start() -> None:
    found = running(2)
    found.failed(0, [failure()], T0)
    taken(found)
    found.stopped(0, [failure()], T0)
    found.lost(1, T0)
    found.joined(1, T0 + 1)
    assert taken(found) == [start(found, 1)]


def test_a_new_leader_knows_how_far_the_job_had_come() -> None:
    """A new leader must know the highest step, or a job that crashes at each load restarts for ever."""
    found = running(1, restarts=9, furthest_step=100)
    for number in (1, 2):
        fails(found, T0 + number * 1000, start(found, number))
    fails(found, T0 + 5000, EndOrder)


def test_steps_that_were_made_before_a_pod_was_lost_are_progress_all_the_same() -> None:
    """Steps before a lost pod must count as progress. Otherwise a job with days between failures would fail."""
    found = running(2, restarts=9, has_operator=True)
    found.reached(5)
    fails(found, T0 + 1000, start(found, 1))
    found.reached(5000)
    found.lost(1, T0 + 2000)
    stop(found, [])
    found.joined(1, T0 + 2000, 1, 1)
    assert taken(found) == [start(found, 2)]
    for number in (3, 4, 5):
        fails(found, T0 + number * 10_000, start(found, number))
    fails(found, T0 + 90_000, EndOrder)


def test_restarts_in_a_row_go_on_from_what_a_newer_pod_was_told_and_what_nobody_had_heard() -> None:
    found = running(2, restarts=9, has_operator=True)
    for number in (1, 2):
        fails(found, T0 + number * 1000, start(found, number))
    found.lost(1, T0)
    stop(found, [])
    heard_of_one = Grant(9, 90, 9, 4, 3, replaced=1, known=Known(0, Spent(1)))
    found.joined(1, T0, 2, 1, grant=heard_of_one)
    assert (found.charges.counts["inARow"], found.charges.counts["chargedInARow"]) == (5, 4)


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
    found = running(2)
    found.failed(1, [failure(rank=1, code=75)], T0)
    assert taken(found)[0].patient


@pytest.mark.parametrize("node", [0, 1])
def test_a_job_that_was_told_to_stop_starts_nothing_again(node: int) -> None:
    found = running(2)
    found.termination_requested(node, T0)
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
        fail_twice(found)
    found.termination_requested(0, T0)
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
    assert root_cause(failures).rank == guilty


def test_complaints_about_lost_peers_alone_are_free_once_and_not_for_ever() -> None:
    """Lost peers alone must be charged the second time: if only some ranks call a collective, no other error shows."""
    found = running(2, restarts=9)
    for at, charged in ((T0, "infrastructure"), (T0 + 4000, "application"), (T0 + 8000, "application")):
        fail(found, [failure(symptom=True)], at)
        assert f"charged to {charged}" in found.said
        found.tick(at + 400)
        taken(found)


def test_the_operator_says_whether_complaints_were_free_already() -> None:
    found = LeaderState(Members(range(1)), Budget(9, 9, 9, 9, RestartHistory(peers_lost=1)), JOIN_SECONDS, T0)
    found.joined(0, T0)
    taken(found)
    fail(found, [failure(symptom=True)])
    assert "charged to application" in found.said


def test_ranks_that_could_not_be_started_are_no_complaint_and_free_each_time() -> None:
    """Ranks that could not be started must not be charged, however often: the machine is at fault, not the script."""
    found = running(1, restarts=9)
    for at in (T0, T0 + 4000, T0 + 8000):
        fail(found, [failure(code=75, symptom=True, unstarted=True)], at)
        assert "charged to infrastructure" in found.said
        found.tick(at + 400)
        taken(found)


@pytest.mark.parametrize("whole_node", [True, False], ids=["2x1", "1x2"])
def test_a_rank_that_ended_well_while_its_peer_complains_is_the_cause(whole_node: bool) -> None:
    """A rank that ended with 0 while its peer complains must be charged as the cause: it had less data."""
    found = running(2 if whole_node else 1)
    complaint = failure(1, symptom=True, step=20, exception="RuntimeError: Connection closed by peer")
    if whole_node:
        found.finished(0, T0, (0, 20))
    found.failed(int(whole_node), [complaint], T0)
    taken(found)
    for node in range(1 + whole_node):
        found.stopped(node, [complaint] if node == int(whole_node) else [], T0, (0, 20) if node == 0 else None)
    said = "rank 0 ended with exit code 0 after step 20 while rank 1 was in step 21: the ranks make different numbers"
    assert found.said.startswith(said)
    assert "charged to application" in found.said
    assert (found.charges.failures[0].rank, found.charges.failures[0].early) == (0, True)


def test_a_lost_node_explains_a_complaint_beside_a_rank_that_ended_well() -> None:
    found = running(3)
    found.finished(0, T0, (0, 20))
    found.failed(1, [failure(1, symptom=True)], T0)
    taken(found)
    found.lost(2, T0)
    for node in (0, 1):
        found.stopped(node, [failure(1, symptom=True)] if node else [], T0)
    assert "charged to infrastructure" in found.said


def test_a_new_leader_goes_on_from_the_generation_that_the_others_have_seen() -> None:
    """A new leader must continue the numbers of generations, or two of them write to the same log files."""
    found = lead(3)
    found.joined(0, T0)
    found.joined(1, T0, 4)
    found.joined(2, T0, 3)
    assert taken(found) == [start(found, 5)]


# ---- with an operator, which replaces lost pods --------------------------------------------------------------


def with_operator(nodes: int, restarts: int = 3) -> LeaderState:
    return running(nodes, restarts, has_operator=True)


def lose(found: LeaderState, *lost: int, at: float = T0) -> None:
    """Let the connection to these nodes be lost, and all others stop."""
    for node in lost:
        found.lost(node, at)
    orders = taken(found)
    assert [type(order) for order in orders] == [Stop]
    for node in orders[0].nodes:
        found.stopped(node, [], at)


def terminate(found: LeaderState, node: int, at: float = T0) -> None:
    """Let a node get SIGTERM: its ranks end, all other ranks stop with them, and its agent leaves."""
    found.termination_requested(node, at)
    found.failed(node, [failure(node, 143)], at)
    (order,) = taken(found)
    assert order == Stop(frozenset(order.nodes), found.generation, patient=True)
    for other in order.nodes - {node}:
        found.stopped(other, [failure(other, 75)], at)
    if node == 0:
        found.stopped(0, [failure(0, 143)], at)
    else:
        found.lost(node, at)


@pytest.mark.parametrize(
    ("comes", "charged", "why"),
    [(0, 1, "charged to infrastructure"), (1, 0, "a new pod has replaced it"), (4, 0, "a new pod has replaced it")],
)
def test_a_lost_node_is_charged_here_only_where_its_own_pod_comes_back(comes: int, charged: int, why: str) -> None:
    """A lost node is charged here if its own pod connects again; for a new pod the operator has charged it."""
    found = with_operator(3)
    lose(found, 2)
    assert (taken(found), found.charges.restarts) == ([], 0), "who is charged is not known yet"
    found.joined(2, T0 + 60, 0, comes)
    assert taken(found) == [start(found, 1)]
    assert (found.charges.restarts, found.charges.counts["infrastructure"]) == (charged, charged)
    assert why in found.said


def test_without_an_operator_a_lost_node_is_charged_at_once() -> None:
    found = running(2)
    lose(found, 1)
    assert found.charges.counts["infrastructure"] == 1
    found.joined(1, T0 + 60, 0, 1)
    assert (taken(found), found.charges.restarts) == ([start(found, 1)], 1)


def test_a_node_that_comes_back_before_the_others_have_stopped_is_charged_too() -> None:
    found = with_operator(2)
    found.lost(1, T0)
    taken(found)
    found.joined(1, T0)
    assert (taken(found), found.charges.restarts) == ([], 0), "node 0 may still run a rank of the old generation"
    found.stopped(0, [], T0)
    assert (taken(found), found.charges.restarts) == ([start(found, 1)], 1)


def test_two_nodes_that_are_lost_together_cost_one_restart() -> None:
    found = with_operator(3)
    lose(found, 1, 2)
    found.joined(1, T0 + 1)
    found.joined(2, T0 + 2)
    assert (taken(found), found.charges.restarts) == ([start(found, 1)], 1)


def test_a_rank_that_had_failed_before_its_node_was_lost_is_charged_as_ever() -> None:
    found = with_operator(2)
    found.failed(1, [failure(1, 9)], T0)
    taken(found)
    found.stopped(0, [], T0)
    found.lost(1, T0)
    assert found.charges.counts["application"] == 1
    found.joined(1, T0 + 60, 0, 1)
    assert (taken(found), found.charges.restarts) == ([start(found, 1)], 1)


def test_a_connection_that_is_lost_too_often_ends_the_job() -> None:
    found = with_operator(2, restarts=0)
    lose(found, 1)
    found.joined(1, T0 + 1)
    (order,) = taken(found)
    assert (order.code, order.failure.vanished) == (RESUMABLE, True)


def test_a_pod_that_has_been_replaced_cannot_come_back() -> None:
    found = with_operator(2)
    lose(found, 1)
    found.joined(1, T0 + 60, 0, 2)
    assert [found.is_outdated(1, replacement) for replacement in range(4)] == [True, True, False, False]
    assert not found.is_outdated(0, 0), "each node counts its own pods"


@pytest.mark.parametrize("node", [1, 2])
def test_when_one_node_is_told_the_others_save_and_wait_for_its_replacement(node: int) -> None:
    found = with_operator(3)
    terminate(found, node)
    assert (taken(found), found.state, found.charges.restarts) == ([], "gathering", 0)
    found.joined(node, T0 + 60, 0, 1)
    assert taken(found) == [start(found, 1)]
    assert f"node {node} was told to stop" in found.said


@pytest.mark.parametrize("has_operator", [True, False])
def test_node_0_that_is_told_when_its_ranks_have_ended_lets_the_others_save_and_goes(has_operator: bool) -> None:
    """Node 0 must let the others save and then leave. If it stayed until SIGKILL, the others would get no time."""
    found = running(2, has_operator=has_operator)
    found.finished(0, T0)
    found.termination_requested(0, T0)
    (order,) = taken(found)
    assert isinstance(order, Stop)
    assert order.patient
    for node in (0, 1):
        found.stopped(node, [], T0)
    (order,) = taken(found)
    assert type(order) is (Leave if has_operator else EndOrder)
    assert found.charges.restarts == 0


def test_node_0_that_is_told_while_a_pre_flight_fails_goes() -> None:
    found = lead(2, has_operator=True, preflight=True)
    for node in (0, 1):
        found.joined(node, T0)
    found.failed(1, [failure(1)], T0)
    found.termination_requested(0, T0)
    found.orders.clear()
    for node in (1, 0):
        found.stopped(node, [], T0)
    assert [type(order) for order in taken(found)] == [Leave]


def test_a_told_node_that_is_still_here_is_not_started_with() -> None:
    found = with_operator(2)
    found.failed(0, [failure()], T0)
    taken(found)
    found.stopped(0, [failure()], T0)
    found.termination_requested(1, T0)
    found.stopped(1, [], T0)
    assert (taken(found), found.state) == ([], "gathering")
    found.lost(1, T0)
    found.joined(1, T0 + 60, 0, 1)
    assert taken(found) == [start(found, 1)]


@pytest.mark.parametrize("waits_for", ["peers", "back-off"])
def test_a_node_that_is_told_before_ranks_run_is_waited_for_anew(waits_for: str) -> None:
    found = lead(3, has_operator=True) if waits_for == "peers" else with_operator(3)
    if waits_for == "peers":
        found.joined(0, T0)
        found.joined(1, T0)
    else:
        fail_twice(found)
    found.termination_requested(1, T0)
    found.lost(1, T0)
    if waits_for == "peers":
        found.joined(2, T0)
    found.tick(T0 + 60)
    assert (taken(found), found.state) == ([], "gathering")
    found.joined(1, T0 + 61, 0, 1)
    assert isinstance(taken(found)[0], StartOrder)


def test_node_0_that_is_told_leaves_when_all_have_saved_and_ends_nothing() -> None:
    found = with_operator(3)
    terminate(found, 0)
    (order,) = taken(found)
    assert isinstance(order, Leave)
    assert (found.state, found.charges.restarts) == ("over", 0)


@pytest.mark.parametrize("waits_for", ["peers", "back-off"])
def test_node_0_that_is_told_while_no_rank_runs_leaves_at_once(waits_for: str) -> None:
    found = lead(2, has_operator=True) if waits_for == "peers" else with_operator(1)
    if waits_for == "back-off":
        fail_twice(found)
    found.termination_requested(0, T0)
    assert [type(order) for order in taken(found)] == [Leave]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
@pytest.mark.parametrize("between", ["told", "stopped"])
def test_when_all_are_told_node_0_waits_for_none_of_them_whatever_the_order(order, between):
    """If all nodes got SIGTERM, node 0's agent must leave at once, because each agent now ends its own ranks."""
    found = with_operator(3)
    if between == "told":
        for node in order:
            found.termination_requested(node, T0)
        found.failed(0, [failure(0, 143)], T0)
        found.stopped(0, [failure(0, 143)], T0)
    else:
        for node in order:
            found.termination_requested(node, T0)
            found.failed(node, [failure(node, 143)], T0)
            if node == 0:
                found.stopped(0, [failure(0, 143)], T0)
            elif found.state != "over":
                found.lost(node, T0)
    assert isinstance(taken(found)[-1], Leave)


@pytest.mark.parametrize("event", ["stopped", "told", "lost"])
def test_node_0_that_is_told_waits_for_ranks_elsewhere_that_are_still_saving(event: str) -> None:
    found = with_operator(2)
    found.termination_requested(0, T0)
    found.failed(0, [failure(0, 143)], T0)
    taken(found)
    found.stopped(0, [failure(0, 143)], T0)
    assert taken(found) == [], "node 1 would end its ranks at once without its leader"
    if event == "stopped":
        found.stopped(1, [failure(1, 75)], T0)
    elif event == "told":
        found.termination_requested(1, T0)  # from now on this node ends its ranks itself
    else:
        found.lost(1, T0)
    assert isinstance(taken(found)[0], Leave)


def test_a_failure_before_the_node_was_told_is_charged_and_one_after_it_is_not() -> None:
    for first, charged in (("failed", 1), ("told", 0)):
        found = with_operator(2)
        if first == "told":
            found.termination_requested(1, T0)
        found.failed(0, [failure(0, 9)], T0)
        if first == "failed":
            found.termination_requested(1, T0)
        taken(found)
        found.stopped(0, [failure(0, 9)], T0)
        found.lost(1, T0)
        assert found.charges.restarts == charged, first


def test_the_replacement_may_come_before_the_others_have_stopped() -> None:
    found = with_operator(3)
    found.termination_requested(1, T0)
    found.failed(1, [failure(1, 143)], T0)
    taken(found)
    found.lost(1, T0)
    found.joined(1, T0, 0, 1)
    found.stopped(0, [failure(0, 75)], T0)
    assert taken(found) == []
    found.stopped(2, [failure(2, 75)], T0)
    assert (taken(found), found.charges.restarts) == ([start(found, 1)], 0)
    assert found.said == "node 1 was told to stop"


def test_all_ranks_have_ended_well_is_not_forgotten_for_a_node_that_is_told() -> None:
    found = with_operator(2)
    found.finished(0, T0)
    found.termination_requested(1, T0)
    found.finished(1, T0)
    assert taken(found) == [EndOrder(0, None, "all ranks have ended")]


# ---- the user's policy and the operator's counts --------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "order", "charged"),
    [
        (3, EndOrder, ""),
        (4, StartOrder, "infrastructure"),
        (5, StartOrder, "application"),
        (127, StartOrder, "application"),
    ],
)
def test_the_users_failure_policy_decides_by_the_exit_code(code: int, order: type, charged: str) -> None:
    rules_ = (PolicyRule("FailJob", frozenset({3}), False), PolicyRule("Ignore", frozenset({4}), False),
              PolicyRule("Count", frozenset({3, 4}), True))  # fmt: skip
    found = running(1, policy=rules_)
    fail(found, [failure(code=code)])
    assert [type(one) for one in taken(found)] == [order]
    assert [one.charged_to for one in found.charges.failures] == ([charged] if charged else [])


def test_restarts_in_a_row_go_on_from_where_the_operators_stand() -> None:
    """Restarts in a row must continue from the operator's count, or each new pod restarts without a back-off."""
    found = LeaderState(
        Members(range(1)), Budget(9, 9, 9, 9, RestartHistory(in_a_row=4, charged_in_a_row=2)), JOIN_SECONDS, T0
    )
    found.joined(0, T0)
    taken(found)
    assert (found.charges.counts["inARow"], found.charges.counts["chargedInARow"], found.charges.restarts) == (4, 2, 0)
    fail(found, [failure()])
    assert found.deadline == T0 + budget.back_off_seconds(5)
    assert (
        found.charges.counts["inARow"],
        found.charges.counts["chargedInARow"],
        found.charges.counts["application"],
    ) == (5, 3, 1)


def test_the_last_five_failures_are_kept_with_their_class_and_budget() -> None:
    found, at = running(1, restarts=9), T0
    for code in range(1, 8):
        fail(found, [failure(code=code)], at)
        at += 700  # seconds; a failure after this time is not one in a row
        found.tick(at)
        taken(found)
    assert [one.exit_code for one in found.charges.failures] == [3, 4, 5, 6, 7]
    assert {(one.failure_class, one.charged_to) for one in found.charges.failures} == {("application", "application")}


# ---- groups in which some places are empty -------------------------------------------------------------------


def led(*places: int, restarts: int = 3, **more: Any) -> LeaderState:
    found = LeaderState(Members(places), Budget(restarts, restarts, restarts, restarts), JOIN_SECONDS, T0, **more)
    for place in sorted(places):
        assert taken(found) == []
        found.joined(place, T0)
    return found


def test_a_generation_starts_when_its_members_are_here_and_not_when_as_many_others_are() -> None:
    found = LeaderState(Members((0, 2)), Budget(3, 3, 3, 3), JOIN_SECONDS, T0)
    found.joined(0, T0)
    found.tick(T0 + JOIN_SECONDS)
    (order,) = taken(found)
    assert order.why.startswith("nodes 2 did not connect")
    assert taken(led(0, 2)) == [StartOrder(0, Members((0, 2)))]


def test_a_lost_pod_is_reported_by_its_place_and_waited_for_there() -> None:
    found = led(0, 2, has_operator=True)
    found.orders.clear()
    found.lost(2, T0)
    assert taken(found) == [Stop(frozenset({0}), 0, patient=False)]
    found.stopped(0, [], T0)
    assert not found.charges.failures, "who is charged is known when it comes again"
    found.joined(2, T0)
    assert [failure.node_rank for failure in found.charges.failures] == [2], (
        "the same pod: only its connection was lost"
    )


def test_the_leader_is_the_first_member_and_need_not_be_at_place_0() -> None:
    found = led(3, 1, has_operator=True)
    found.orders.clear()
    found.termination_requested(1, T0)
    found.failed(1, [failure(rank=1, code=143)], T0)
    found.stopped(1, [failure(rank=1, code=143)], T0)
    found.stopped(3, [], T0)
    assert found.state == "gathering", "the leader goes on, and waits for another pod at place 1"
    found = led(3, 1, has_operator=True)
    found.termination_requested(3, T0)
    found.failed(3, [failure(code=143)], T0)
    found.stopped(3, [failure(code=143)], T0)
    found.stopped(1, [], T0)
    assert isinstance(taken(found)[-1], Leave)


def test_a_stop_whose_save_failed_does_not_end_as_one_that_saved() -> None:
    """A stop whose save failed must not look saved, although the other nodes' ranks exit with 75."""
    found = running(2)
    found.termination_requested(1, T0)
    stopped_well = failures.Failure(1, exit_code=RESUMABLE, resumable=True)
    unsaved = failures.Failure(
        0, exit_code=1, exception="ddpjob.errors.SnapshotError: the state of step 7 was not saved"
    )
    found.failed(1, [stopped_well], T0)
    (order,) = taken(found)
    assert isinstance(order, Stop)
    assert order.patient
    found.stopped(1, [stopped_well], T0)
    found.stopped(0, [unsaved], T0)
    (end,) = taken(found)
    assert (end.code, end.failure) == (1, unsaved)
    assert end.why.startswith("told to stop; rank 0 ended with exit code 1 (ddpjob.errors.SnapshotError: the state")
