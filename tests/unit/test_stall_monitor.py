"""ddprun's watchdog: what the heartbeats of ranks prove, and which rank is named when a group has stalled."""

from __future__ import annotations

from typing import Any

import pytest

from ddpjob.reporting.frames import innermost
from ddpjob.reporting.watchdog import calls, last_collective, table, waited_in, waits_apart
from ddpjob_core import heartbeat, stall_limits
from ddpjob_core.failures import Failure
from ddprun.core import stall_monitor, stall_rules
from ddprun.core.deadlock import Position
from ddprun.core.stall_monitor import (
    BY_COLLECTIVES,
    BY_START,
    BY_STEPS,
    NOTHING,
    Heartbeat,
    HeartbeatTracker,
    StallReport,
)
from ddprun.core.stall_rules import Standstill, failure, kept_waiting
from ddprun.heartbeats import Heartbeats
from ddprun.watch_ranks import position

# ---- one node ----------------------------------------------------------------------------------------------


class Ranks:
    """The ranks of a node, checked once a second."""

    def __init__(self, timeout: float | None = None) -> None:
        self.timeout, self.now = timeout, 1000.0
        self.beats: dict[int, Heartbeat] = {}
        self.trackers: dict[int, HeartbeatTracker] = {}

    def say(
        self, rank: int = 0, phase: Any = "train", step: int = 0, collectives: int = 0, *, completed: bool = False
    ) -> Ranks:
        """Set the heartbeat of this rank from now on."""
        self.beats[rank] = Heartbeat(4711, phase, step, collectives, completed=completed)
        return self

    def look(self, seconds: int = 1) -> StallReport:
        """Check once a second for this many seconds; return the last report."""
        for _ in range(seconds):
            self.now += 1.0
            folded = {
                rank: stall_monitor.update(self.trackers.get(rank), beat, self.now) for rank, beat in self.beats.items()
            }
            self.trackers = {rank: pace for rank, pace in folded.items() if pace is not None}
        return stall_monitor.stall_report(self.trackers, self.timeout, self.now)

    def train(self, steps: int, seconds: int = 1) -> Ranks:
        """Let rank 0 make `steps` steps of `seconds` each."""
        for _ in range(steps):
            before = self.beats.get(0, Heartbeat(1, "train", 0, 0))
            self.say(step=before.step + 1)
            self.look(seconds)
        return self


def test_nothing_is_known_about_ranks_that_do_not_report() -> None:
    assert Ranks(2.0).say(phase="").look(100) == NOTHING


def test_a_rank_stalls_when_its_limit_is_over_and_at_the_next_check() -> None:
    ranks = Ranks(10.0).train(5)
    assert ranks.look(10).stalled is False
    said = ranks.look()
    assert (said.level, said.stalled, said.seconds, said.phase) == (BY_STEPS, True, 11.0, "train")


@pytest.mark.parametrize("phase", ["", "start"])
def test_a_configured_limit_applies_from_the_first_completed_collective(phase: Any) -> None:
    """A limit of 15 s must apply from the first completed collective on, in every phase."""
    ranks = Ranks(15.0).say(phase=phase, collectives=1)
    assert ranks.look(200).stalled is False, "the other rank may still load its data"
    ranks.say(phase=phase, collectives=1, completed=True)
    assert ranks.look().stalled is True
    ranks.say(phase=phase, collectives=2, completed=True)
    assert ranks.look(15).stalled is False
    assert ranks.look(2).stalled is True


def test_before_the_first_collective_completes_a_limit_of_seconds_is_raised_to_that_of_a_start() -> None:
    ranks = Ranks(15.0).say(phase="start", collectives=1)
    assert ranks.look(int(stall_limits.START_SECONDS)).stalled is False
    assert ranks.look(2).stalled is True


def test_without_a_configured_limit_those_of_the_operator_apply() -> None:
    ranks = Ranks().train(20)
    assert ranks.look(int(stall_limits.UNSEEN_TRAIN_SECONDS)).stalled is False
    assert ranks.look(2).stalled is True


def test_a_survived_pause_is_learned() -> None:
    ranks = Ranks().train(5)
    ranks.look(400)
    ranks.train(5)
    assert ranks.trackers[0].limit(None) == (1203.0, 1203.0)


def test_a_node_makes_progress_as_long_as_one_of_its_ranks_does() -> None:
    ranks = Ranks(10.0).train(3).say(rank=1, step=3)
    for step in range(4, 40):
        ranks.say(rank=0, step=step)
        assert ranks.look().stalled is False


def test_a_rank_without_steps_counts_only_if_no_rank_has_steps() -> None:
    ranks = Ranks(10.0).train(3).say(rank=1, phase="start")
    assert ranks.look(12).stalled is True
    alone = Ranks(10.0).say(rank=1, phase="start")
    assert alone.look(100) == StallReport(BY_START, False, 99.0, "start")


def test_before_the_first_step_collectives_count_as_progress() -> None:
    ranks = Ranks(10.0)
    for begun in range(3000):
        assert ranks.say(phase="start", collectives=begun).look().stalled is False
    assert ranks.look(1800).stalled is False
    assert ranks.look(2).stalled is True


def test_a_declared_pause_has_the_limit_of_a_pause() -> None:
    ranks = Ranks(10.0).train(3).say(phase="save", step=3)
    assert ranks.look(1700).stalled is False
    assert ranks.look(110).phase == "save"
    assert ranks.look().stalled is True


def test_a_script_without_the_library_is_monitored_by_its_collectives() -> None:
    ranks = Ranks(10.0)
    for begun in range(5, 65, 10):
        said = ranks.say(phase="", collectives=begun).look()
    assert (said.level, said.stalled) == (BY_COLLECTIVES, False)
    assert ranks.look(11).stalled is True


def test_a_script_that_has_only_built_its_model_may_compile_for_long() -> None:
    ranks = Ranks(10.0).say(phase="", collectives=3)
    ranks.look()
    assert ranks.say(phase="", collectives=6).look(1000).stalled is False


def test_after_a_gap_between_our_checks_all_clocks_restart() -> None:
    ranks = Ranks(10.0).train(3)
    ranks.look(9)
    ranks.now += 3600.0
    ranks.trackers = stall_monitor.restart_clocks(ranks.trackers, ranks.now)
    assert ranks.look(10).stalled is False
    assert ranks.look(1).stalled is True


# ---- the group ---------------------------------------------------------------------------------------------

STANDS, GETS_ON = StallReport(BY_STEPS, True, 300.0, "train"), StallReport(BY_STEPS, False, 2.0, "train")


def test_constants_duplicated_to_avoid_an_import_are_equal() -> None:
    assert set(stall_rules.DOES_NOT) == set(stall_limits.DOES_NOT) == set(heartbeat.PHASES) - {""}


def test_the_group_stalls_when_all_nodes_that_count_do() -> None:
    group = Standstill()
    assert not group.heard(0, GETS_ON)
    assert not group.heard(1, STANDS)
    assert not group.heard(2, StallReport(BY_START, False, 9.0, "start"))
    assert group.heard(0, STANDS), "node 2 says no steps, and does not count"


def test_a_node_whose_ranks_have_ended_restarts_the_limit_of_the_others() -> None:
    group = Standstill()
    group.heard(0, GETS_ON)
    group.heard(1, STANDS)
    assert group.forget(0) == 300.0
    group = Standstill()
    group.heard(0, GETS_ON)
    group.heard(1, GETS_ON)
    assert group.forget(0) is None


def test_a_node_that_makes_progress_while_it_is_queried_withdraws_the_stall() -> None:
    group = Standstill()
    group.heard(0, STANDS)
    group.ask()
    assert group.answered(0, GETS_ON, [Position(0, 42)], {0})
    assert group.settle() is None
    assert group.heard(0, STANDS), "the next standstill is another one"


def test_an_agent_that_does_not_answer_is_not_waited_for() -> None:
    group = Standstill()
    group.heard(0, STANDS)
    group.heard(1, STANDS)
    group.ask()
    assert not group.answered(0, STANDS, [Position(0, 42)], {0, 1})
    found = group.settle()
    assert found.rank == 0


def test_without_the_library_only_a_rank_that_waits_for_another_proves_a_hang() -> None:
    stalled = StallReport(BY_COLLECTIVES, True, 300.0, "train")
    for waits in (False, True):
        group = Standstill()
        group.heard(0, stalled)
        group.ask()
        group.answered(0, stalled, [Position(0, 0, 8, "all_reduce", not waits), Position(1, 0, 7, "all_reduce")], {0})
        assert (group.settle() is not None) is waits


@pytest.mark.parametrize(("idle", "found"), [([True, True], True), ([True, False], False), ([False, False], False)])
def test_without_the_library_a_rank_that_waits_for_nobody_hangs_if_it_idles(idle: list[bool], found: bool) -> None:
    stalled = StallReport(BY_COLLECTIVES, True, 300.0, "train")
    group = Standstill()
    group.heard(0, stalled)
    group.ask()
    group.answered(
        0, stalled, [Position(rank, 0, 8, "all_reduce", idle=is_idle) for rank, is_idle in enumerate(idle)], {0}
    )
    failure = group.settle()
    assert (failure is not None) is found
    if failure is not None:
        assert "rank 0 has ended its last collective, 8 (all_reduce), and does not end" in failure.exception


def test_the_limit_at_the_end_of_a_short_training_is_not_that_of_a_start() -> None:
    """At the end of a short training, the half hour that a start may take must not be the limit."""
    ranks = Ranks(10.0).say(phase="", collectives=3)
    assert ranks.look(100).stalled is False
    ranks.beats[0] = ranks.beats[0]._replace(over=True)
    assert ranks.look(10).stalled is False, "from then on"
    assert ranks.look(2).stalled is True


def at(rank: int, sequence: int = 0, *, step: int = 41, done: bool = False, where: str = "") -> Position:
    return Position(rank, step, sequence, "all_reduce" if sequence else "", done, where)


@pytest.mark.parametrize(
    ("positions", "rank", "sentence"),
    [
        (
            [at(0, 1042), at(3, 1041, done=True, where="train.py:41 in load_batch"), at(5, 1042)],
            3,
            "rank 3 has ended collective 1041 (all_reduce), the others are at 1042; in train.py:41 in load_batch",
        ),
        ([at(0, 9), at(1, 7), at(2, 8)], 1, "rank 1 stands in collective 7 (all_reduce), the others are at 8 to 9"),
        ([at(0, 9), at(1, 9, done=True)], 1, "rank 1 has ended collective 9 (all_reduce), as the others do"),
        ([at(0, 9, step=5), at(1, 9, step=4)], 1, "rank 1 stands in collective 9 (all_reduce), as the others do"),
        ([at(0, 9), at(1, step=7)], 0, "rank 0 stands in collective 9 (all_reduce)"),
        ([at(0, step=41, done=True), at(1, step=40, done=True)], 1, "rank 1 stands at step 40, the others are at 41"),
        ([at(0, step=0, done=True), at(1, step=0, done=True)], 0, "rank 0 stands at step 0, as the others do"),
        ([at(7, step=3, done=True)], 7, "rank 7 stands at step 3"),
        (
            [at(0, 9), Position(1, 40, answers=False)],
            1,
            "rank 1 stands at step 40 and does not answer, the others wait",
        ),
        (
            [at(0, 9), at(2, 8, done=True), Position(1, 40, answers=False)],
            2,
            "rank 2 has ended collective 8 (all_reduce), the others are at 9",
        ),
    ],
)
def test_the_rank_that_is_furthest_behind_is_named(positions: list[Position], rank: int, sentence: str) -> None:
    found = failure(positions, 300.4, "train")
    assert (found.rank, found.exception) == (rank, f"made no step for 300 s: {sentence}")
    assert (found.stalled, found.resumable, found.symptom) == (True, False, False)


def timed_out(rank: int, sequence: int) -> Failure:
    return Failure(rank, exit_code=1, symptom=True, step=41, waited_in=sequence)


BEHIND = at(3, 1041, done=True, where="train.py:41 in load_batch")


@pytest.mark.parametrize(
    ("failures", "positions", "sentence"),
    [
        (
            [timed_out(0, 1042)],
            [BEHIND, at(5, 1042)],
            "rank 3 has ended collective 1041 (all_reduce), the others are at 1042; in train.py:41 in load_batch",
        ),
        (
            [timed_out(0, 1043), timed_out(2, 1045)],
            [at(3, 1042)],
            "rank 3 stands in collective 1042 (all_reduce), the others are at 1043 to 1045",
        ),
        (
            [timed_out(0, 1042), Failure(1, exit_code=1, symptom=True)],
            [BEHIND._replace(idle=True)],
            "rank 3 has ended its last collective, 1041 (all_reduce), and does not end; in train.py:41 in load_batch",
        ),
        (
            [timed_out(0, 1042)],
            [Position(3, 41, answers=False), at(5, 1042)],
            "rank 3 stands at step 41 and does not answer, the others wait",
        ),
        (
            [timed_out(0, 1042)],
            [BEHIND, Position(5, 41, answers=False, apart=True)],
            "rank 3 has ended collective 1041 (all_reduce), the others are at 1042; in train.py:41 in load_batch",
        ),
    ],
)
def test_a_rank_that_others_waited_for_until_their_timeouts_is_named(failures, positions, sentence):
    found = kept_waiting(failures, positions)
    assert (found.rank, found.stalled, found.symptom) == (3, True, False)
    assert found.exception == f"made no progress until rank 0 timed out: {sentence}"


@pytest.mark.parametrize(
    ("failures", "positions"),
    [
        ([timed_out(0, 1042)], []),
        ([Failure(0, exit_code=1, symptom=True)], [BEHIND]),
        ([timed_out(0, 1042)], [at(3, 1042, done=True)]),
        ([timed_out(0, 1042)], [at(3, 1043)]),
        ([timed_out(0, 1042)], [BEHIND, at(5, 1041, done=True)]),
        ([timed_out(0, 1042), timed_out(2, 1041)], [BEHIND]),
        ([timed_out(0, 1042)], [BEHIND._replace(apart=True)]),
        ([timed_out(0, 1042)], [BEHIND, Position(5, 41, answers=False)]),
        ([timed_out(0, 1042)], [Position(3, 41, answers=False), Position(5, 41, answers=False)]),
        ([timed_out(0, 1042)], [Position(3, 41, answers=False), at(5, 1042, done=True)]),
        ([timed_out(0, 1042)], [Position(3, 41, answers=False, apart=True)]),
        ([timed_out(0, 1042)], [at(3, step=40, done=True)]),
    ],
    ids=[
        "none is left",
        "it did not wait in a collective of all ranks",
        "in the same collective",
        "in a later one",
        "two are behind",
        "another one was as far behind, and timed out as well",
        "it waits in another group",
        "another one may be in the way",
        "two do not answer",
        "one does not answer, and another one has left its collective",
        "it is on its way out",
        "where it is, is not known",
    ],
)
def test_no_rank_is_named_if_it_is_unclear_whom_the_others_waited_for(failures, positions):
    assert kept_waiting(failures, positions) is None


# ---- the position of a rank --------------------------------------------------------------------------------


def entry(sequence: int, group: str = "0", **more: Any) -> dict[str, Any]:
    named = {"process_group": [group, "default_pg"], "profiling_name": "gloo:all_reduce", "state": "scheduled"}
    return {"collective_seq_id": sequence, "is_p2p": False, "retired": True, **named, **more}


def test_the_last_collective_of_the_default_group_counts_because_all_ranks_number_it_equally() -> None:
    recorded = [entry(7), entry(8, retired=False), entry(99, group="1"), entry(100, is_p2p=True)]
    assert last_collective(recorded) == {"sequence": 8, "op": "all_reduce", "done": False}
    assert last_collective([entry(5, state="completed", retired=False)])["done"] is True
    assert last_collective([]) == {}


def test_a_rank_waited_in_its_last_collective_if_it_has_begun_nothing_later() -> None:
    assert waited_in([entry(7), entry(8)], 8) == 8
    assert waited_in([entry(7), entry(8)], 9) == 0, "a recv, which gloo counts and does not record"
    assert waited_in([entry(8), entry(1, group="1")], 8) == 0
    assert waited_in([entry(8), entry(9, is_p2p=True)], 8) == 0
    assert waited_in([entry(5), entry(8)], 8) == 0, "its number has sends in it that other ranks have not made"
    assert waited_in([], 0) == 0


def test_a_rank_that_may_wait_outside_the_default_group_reports_it() -> None:
    """A rank that may wait in another group must report this, or it seems to hang after its last collective."""
    assert not waits_apart([entry(7), entry(1, group="1"), entry(8, retired=False)], 8)
    assert not waits_apart([entry(7), entry(8)], None), "the group is left"
    assert not waits_apart([], None)
    assert waits_apart([entry(8), entry(1, group="1", retired=False)], 8)
    assert waits_apart([entry(8), entry(9, is_p2p=True, retired=False)], 8)
    assert waits_apart([entry(8)], 9)
    assert waits_apart([entry(5), entry(8)], 8)


def test_the_table_of_collectives_is_short() -> None:
    assert len(table([entry(n, input_sizes=[[10**6] * 100]) for n in range(50)])) == 8
    assert max(map(len, table([entry(1, input_sizes=[[10**6] * 100])]))) < 200


def test_the_innermost_line_is_of_the_users_own_code() -> None:
    import sys

    assert innermost(calls(sys._getframe())).startswith("test_stall_monitor.py:")
    inside: list[str] = []
    sorted([1], key=lambda _: inside.append(innermost(calls(sys._getframe()))) or 0)
    assert inside[0].endswith("in <lambda>")
    assert innermost(calls(None)) == ""


@pytest.mark.parametrize("answer", [None, {}, {"sequence": 3, "op": "x" * 500, "done": False, "where": "y" * 500}])
def test_an_answer_is_bounded_and_a_missing_answer_is_valid(answer: dict[str, Any] | None) -> None:
    said = position(3, 41, answer)
    assert (said.rank, said.step, said.answers) == (3, 41, answer is not None)
    assert len(said.op + said.where) <= 160


def test_the_shared_memory_of_a_node_has_one_page_per_rank_with_answers_to_the_last_question() -> None:
    beats = Heartbeats(3)
    try:
        assert [beats.of(rank) for rank in range(3)] == [Heartbeat(0, "", 0, 0)] * 3
        assert beats.furthest_step == 0
        beats.ask()
        assert beats.answer(1) is None
        assert beats.where(2).endswith(":2")
    finally:
        beats.close()
