"""Node 0's decisions when ranks make no step, and how steps change a restart, without processes or a clock."""

import pytest
from leads import failure, start, taken

from ddpjob_core.budget import Budget
from ddpjob_core.failures import Failure
from ddpjob_core.members import Members
from ddprun.core.deadlock import Call, GroupCalls, Position, Waits
from ddprun.core.leader_state import ANSWER_SECONDS, Ask, EndOrder, LeaderState, Over, StartOrder, Stop
from ddprun.core.stall_monitor import BY_STEPS, NOTHING, StallReport

T0 = 7.25
STANDS, GETS_ON = StallReport(BY_STEPS, True, 300.0, "train"), StallReport(BY_STEPS, False, 2.0, "train")


def running(nodes: int, stalls: int = 10, application: int = 9) -> LeaderState:
    found = LeaderState(Members(range(nodes)), Budget(application, 9, stalls, 99), 600.0, T0)
    for node in range(nodes):
        found.joined(node, T0)
    assert taken(found) == [start(found, 0)]
    return found


def stand(found: LeaderState, at: float) -> None:
    """Let all nodes report a stall, and the positions of their ranks."""
    found.stood(1, GETS_ON, T0)
    found.stood(0, STANDS, at)
    found.stood(1, STANDS, at)
    assert taken(found) == [Ask(found.generation)]
    found.answered(0, STANDS, [Position(0, 42)], at + 1)
    found.answered(1, STANDS, [Position(1, 41, where="train.py:41 in load_batch")], at + 1)


def end(found: LeaderState, at: float, failures: list[Failure] | None = None) -> None:
    """End the ranks of all nodes."""
    orders = taken(found)
    assert any(isinstance(order, Stop) for order in orders)
    found.stopped(0, [], at)
    found.stopped(1, failures or [], at)


def test_a_stall_is_charged_to_its_own_budget_and_names_the_rank_that_blocks_the_others() -> None:
    found = running(2)
    stand(found, T0 + 300)
    end(found, T0 + 302)
    assert taken(found) == [start(found, 1)]
    assert found.charges.counts["stall"] == 1
    assert found.said == (
        "the group made no step for 300 s: rank 1 stands at step 41, the others are at 42; in train.py:41 in "
        "load_batch; charged to stall, waiting 0 s"
    )
    (charged,) = found.charges.failures
    assert (charged.rank, charged.step, charged.failure_class, charged.stalled) == (1, 41, "stall", True)


def test_a_stalled_rank_is_not_blamed_for_the_way_it_ends_when_it_is_stopped() -> None:
    found = running(2)
    stand(found, T0 + 300)
    dying = failure(1, exception="SystemExit: 1")
    end(found, T0 + 302, [dying])
    assert found.charges.failures[0].exception.startswith("made no step for 300 s")


def test_a_stall_beyond_the_budget_ends_the_job() -> None:
    found = running(2, stalls=0)
    stand(found, T0 + 300)
    end(found, T0 + 302)
    (over,) = taken(found)
    assert isinstance(over, EndOrder)
    assert (over.code, over.failure.rank, over.failure.stalled) == (75, 1, True)


def test_an_agent_that_does_not_answer_is_waited_for_only_briefly() -> None:
    found = running(2)
    found.stood(1, GETS_ON, T0)
    found.stood(0, STANDS, T0 + 300)
    found.stood(1, STANDS, T0 + 301)
    assert taken(found) == [Ask(0)]
    found.answered(0, STANDS, [Position(0, 42)], T0 + 302)
    assert found.deadline == T0 + 301 + ANSWER_SECONDS
    found.tick(T0 + 301 + ANSWER_SECONDS)
    assert isinstance(taken(found)[0], Stop)


def test_a_rank_that_makes_progress_after_all_ends_the_stall() -> None:
    found = running(2)
    found.stood(0, STANDS, T0 + 300)
    found.stood(1, STANDS, T0 + 300)
    taken(found)
    found.answered(0, STANDS, [Position(0, 42)], T0 + 301)
    found.answered(1, GETS_ON, [Position(1, 43)], T0 + 301)
    assert (taken(found), found.state, found.deadline) == ([], "running", None)


def test_all_nodes_learn_that_the_ranks_of_one_have_succeeded() -> None:
    """All nodes must learn that the ranks of one node have succeeded: an idle rank of another node then hangs."""
    found = running(3)
    taken(found)
    found.finished(1, T0)
    found.finished(2, T0)
    assert found.orders == [Over(found.generation)], "once is enough"


def test_the_limit_of_the_others_restarts_when_a_node_has_ended() -> None:
    found = running(2)
    found.stood(0, GETS_ON, T0)
    found.stood(1, STANDS, T0 + 300)
    found.finished(0, T0 + 500)
    assert (taken(found), found.deadline) == ([], T0 + 800)
    found.tick(T0 + 800)
    assert taken(found) == [Ask(0)]


def test_a_rank_that_fails_while_all_are_queried_is_the_cause() -> None:
    found = running(2)
    found.stood(0, STANDS, T0 + 300)
    found.stood(1, STANDS, T0 + 300)
    taken(found)
    crash = failure(0, 139, signal="SIGSEGV")
    found.failed(0, [crash], T0 + 300.5)
    found.answered(1, STANDS, [Position(1, 41)], T0 + 301)
    end(found, T0 + 302)
    assert found.charges.failures[0].failure_class == "application"


def test_steps_reset_the_back_off_and_missing_steps_stop_the_job() -> None:
    found = running(2)

    def fail(step: int) -> str:
        found.reached(step)
        found.failed(1, [failure(1)], T0)
        end(found, T0)
        return found.said.partition("; ")[2] if found.state != "over" else taken(found)[-1].why.partition("; ")[2]

    assert fail(5) == "charged to application, waiting 0 s"
    assert fail(9) == "charged to application, waiting 0 s", "it went beyond step 5"
    assert fail(9) == "charged to application, waiting 1 s"
    found.tick(T0 + 1)
    assert fail(8) == "charged to application, waiting 2 s"
    found.tick(T0 + 3)
    assert fail(9) == "3 restarts in a row brought no new step: not restarted"
    assert found.charges.furthest_step == 9


@pytest.mark.parametrize("state", ["gathering", "over"])
def test_late_answers_about_a_stall_change_nothing(state: str) -> None:
    found = running(2)
    if state == "over":
        for node in (0, 1):
            found.finished(node, T0)
    else:
        found.failed(0, [failure()], T0)
        found.lost(1, T0)
        found.stopped(0, [], T0)
    taken(found)
    found.stood(0, STANDS, T0 + 1)
    found.answered(0, STANDS, [Position(0)], T0 + 2)
    assert (found.state, taken(found)) == (state, [])


# ---- after a timeout ---------------------------------------------------------------------------------------

TIMED_OUT = failure(
    0, exception="RuntimeError: Timed out waiting 5000ms for recv operation", symptom=True, waited_in=42
)
LOST = failure(2, exception="RuntimeError: Connection closed by peer", symptom=True)
HANGS = Position(1, 41, 41, "all_reduce", where="train.py:41 in load_batch")
WAITS = Position(2, 41, 42, "all_reduce", done=False)
AT = T0 + 100


def times_out(nodes: int = 3, **more: int) -> LeaderState:
    """Let rank 0, one per node, end by its timeout of waiting for another rank; no node has answered yet."""
    found = running(nodes, **more)
    found.failed(0, [TIMED_OUT], AT)
    found.stopped(0, [TIMED_OUT], AT)
    assert taken(found) == [Ask(0, timed_out=0)]
    assert found.deadline == AT + ANSWER_SECONDS
    return found


def settled(found: LeaderState, nodes: set[int], at: float = AT + 1) -> str:
    """Stop the ranks of these nodes, which are still running, and return the leader's conclusion."""
    assert taken(found) == [Stop(frozenset(nodes), 0, patient=False)]
    assert found.deadline is None
    for node in nodes:
        found.stopped(node, [], at)
    return found.said


def test_after_a_timeout_the_awaited_rank_is_named_and_charged_as_a_stall() -> None:
    found = times_out()
    found.answered(1, STANDS, [HANGS], AT + 1)
    assert taken(found) == [], "node 2 has not answered"
    found.answered(2, STANDS, [WAITS], AT + 1)
    assert settled(found, {1, 2}) == (
        "the group made no progress until rank 0 timed out: rank 1 has ended collective 41 (all_reduce), the others "
        "are at 42; in train.py:41 in load_batch; charged to stall, waiting 0 s"
    )
    assert taken(found) == [start(found, 1)]
    (charged,) = found.charges.failures
    assert (charged.rank, charged.failure_class, charged.stalled) == (1, "stall", True)
    assert found.charges.counts["stall"] == 1


def test_in_unclear_cases_the_rank_that_timed_out_is_the_cause() -> None:
    found = times_out()
    found.answered(1, STANDS, [HANGS], AT + 1)
    found.answered(2, STANDS, [HANGS._replace(rank=2)], AT + 1)
    assert settled(found, {1, 2}).startswith("rank 0 ended with exit code 1 (RuntimeError: Timed out")
    assert found.charges.failures[0].failure_class == "infrastructure"


def test_a_node_whose_ranks_have_ended_is_not_waited_for() -> None:
    found = times_out()
    found.answered(1, STANDS, [HANGS], AT + 0.2)
    found.stopped(2, [LOST], AT + 0.3)
    assert settled(found, {1}).startswith("the group made no progress until rank 0 timed out: rank 1 has ended")


def test_a_node_that_does_not_answer_is_waited_for_only_briefly() -> None:
    found = times_out()
    found.answered(1, STANDS, [HANGS], AT + 1)
    found.tick(AT + ANSWER_SECONDS - 0.1)
    assert taken(found) == []
    found.tick(AT + ANSWER_SECONDS)
    assert settled(found, {1, 2}).startswith("rank 0 ended"), "its rank may be the one"


def test_ranks_that_all_end_by_themselves_are_not_stopped() -> None:
    found = times_out(2)
    found.stopped(1, [LOST], AT + 0.1)
    assert taken(found) == [start(found, 1)]
    assert found.said.startswith("rank 0 ended with exit code 1 (RuntimeError: Timed out")


@pytest.mark.parametrize("event", ["lost", "told", "finished", "crashed"])
def test_any_other_event_ends_the_query(event: str) -> None:
    """Any other event must end the wait for answers: a better cause, a silent node, or a rank that must save."""
    found = times_out()
    found.answered(1, STANDS, [HANGS], AT + 0.1)
    if event == "lost":
        found.lost(2, AT + 0.2)
    elif event == "told":
        found.termination_requested(2, AT + 0.2)
    elif event == "finished":
        found.finished(2, AT + 0.2)
    else:
        found.failed(2, [failure(2, 139, signal="SIGSEGV")], AT + 0.2)
    assert taken(found) == [Stop(frozenset({1} if event == "lost" else {1, 2}), 0, patient=False)]
    found.answered(2, STANDS, [WAITS], AT + 0.3)
    found.tick(AT + ANSWER_SECONDS)
    assert taken(found) == []


def test_complaints_of_other_ranks_do_not_end_the_query() -> None:
    found = times_out()
    found.failed(2, [LOST], AT + 0.1)
    assert (taken(found), found.deadline) == ([], AT + ANSWER_SECONDS)


@pytest.mark.parametrize("cause", ["crash", "early"])
def test_a_rank_that_failed_by_itself_or_ended_early_is_still_the_cause(cause: str) -> None:
    found = times_out()
    found.answered(1, STANDS, [HANGS], AT + 1)
    found.answered(2, STANDS, [WAITS], AT + 1)
    taken(found)
    found.stopped(1, [], AT + 1.1, (4, 40) if cause == "early" else None)
    found.stopped(2, [failure(2, 139, signal="SIGSEGV")] if cause == "crash" else [], AT + 1.2)
    who = "rank 2 was killed by SIGSEGV" if cause == "crash" else "rank 4 ended with exit code 0 after step 40"
    assert found.said.startswith(who)


@pytest.mark.parametrize(
    "failures",
    [
        [failure(0, exception=TIMED_OUT.exception, symptom=True)],
        [TIMED_OUT, failure(1, 139, signal="SIGSEGV")],
        [TIMED_OUT, failure(1, 75)],
    ],
    ids=["not in a collective of all ranks", "another one has crashed", "another one was told to stop, and has saved"],
)
def test_no_rank_is_queried_if_the_answers_could_not_help(failures: list[Failure]) -> None:
    found = running(2)
    found.failed(0, failures, AT)
    assert [type(order) for order in taken(found)] == [Stop]


def test_no_rank_is_queried_after_a_node_has_finished_or_during_a_measurement() -> None:
    found = running(2)
    found.finished(1, AT)
    found.failed(0, [TIMED_OUT], AT)
    assert [type(order) for order in taken(found)] == [Stop]
    found = LeaderState(Members(range(1)), Budget(9, 9, 9, 9), 600.0, T0, preflight=True)
    found.joined(0, T0)
    found.failed(0, [TIMED_OUT], AT)
    assert [type(order) for order in taken(found)] == [StartOrder, Stop]


# ---- a deadlock ----------------------------------------------------------------------------------------------

STILL = StallReport(NOTHING.level, False, 0.0, "start", still=True)


def waits(rank: int, op: str) -> Position:
    groups = (GroupCalls("0", (), 7, (Call(7, op, "[4] float32", 16),)),)
    return Position(rank, waits=Waits("sync", 2, groups), where=f"train.py:{40 + rank} in step")


def asked(found: LeaderState) -> None:
    """Let both nodes report that their ranks used no CPU for seconds, so that the leader requests their positions."""
    found.stood(0, STILL, T0 + 7)
    assert taken(found) == []
    found.stood(1, STILL, T0 + 7)
    assert taken(found) == [Ask(found.generation, quiet=True)]


def test_a_certain_deadlock_is_a_stall_before_any_limit() -> None:
    found = running(2)
    asked(found)
    found.answered(0, STILL, [waits(0, "all_reduce")], T0 + 8)
    found.answered(1, STILL, [waits(1, "barrier")], T0 + 8)
    end(found, T0 + 9)
    assert found.said == (
        "the group is deadlocked: rank 0 waits in all_reduce [4] float32 (collective 7, train.py:40 in step), rank 1 "
        "in barrier [4] float32 (collective 7, train.py:41 in step): these never meet; charged to stall, waiting 0 s"
    )
    assert (found.charges.failures[0].failure_class, found.charges.counts["stall"]) == ("stall", 1)


@pytest.mark.parametrize(
    "answers",
    [
        [(0, STILL, waits(0, "all_reduce")), (1, STILL, waits(1, "all_reduce"))],
        [(0, STILL, waits(0, "all_reduce")), (1, STILL, Position(1))],
        [(0, STILL, waits(0, "all_reduce")), (1, NOTHING, waits(1, "barrier"))],  # rank 1 has used CPU again
        [(0, STILL, waits(0, "all_reduce"))],
    ],
)
def test_an_uncertain_deadlock_is_left_to_the_limits_and_not_queried_again_until_a_rank_has_run(answers):
    found = running(2)
    asked(found)
    for node, report, position in answers:
        found.answered(node, report, [position], T0 + 8)
    found.tick(T0 + 7 + ANSWER_SECONDS)
    found.stood(0, STILL, T0 + 20)
    assert (taken(found), found.state, found.deadline) == ([], "running", None)
    for node in range(2):
        found.stood(node, NOTHING, T0 + 30)
    asked(found)


def test_a_limit_that_expires_during_the_query_counts() -> None:
    found = running(2)
    asked(found)
    found.stood(0, STANDS._replace(still=True), T0 + 8)
    found.stood(1, STANDS._replace(still=True), T0 + 8)
    found.answered(0, STANDS._replace(still=True), [Position(0)], T0 + 8)
    found.answered(1, STANDS._replace(still=True), [Position(1)], T0 + 8)
    assert taken(found) == [Ask(found.generation)]
