"""A job has stalled if its reports prove it. These tests show what reports prove, and what they cannot prove."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from worlds import START

from ddpjob_core import stall_limits
from ddpjob_operator.job import api
from ddpjob_operator.observed import stall
from ddpjob_operator.observed.reports import Phase, Report

MINUTE, HOUR = 60.0, 3600.0
NEVER = api.Stall(timeout_seconds=0)


class Trainers:
    """Ranks of a job that report every five seconds."""

    def __init__(self, **settings: Any) -> None:
        self.setting = api.Stall(**settings) if settings else None
        self.now = START
        self.trackers: dict[int, stall.StepTracker] = {}
        self.saying: dict[int, Report] = {}
        self.receiving_since: dt.datetime | None = None

    def makes(self, step: int, phase: Phase | None = "train", *, rank: int = 0, attempt: int = 1) -> Trainers:
        """Set the step and phase that this rank reports from now on."""
        self.saying[rank] = Report(step=step, rank=rank, node_rank=rank // 8, attempt=attempt, phase=phase)
        return self

    def report(self, seconds: float = 5.0) -> Trainers:
        """Let all ranks report after this many seconds."""
        self.now += dt.timedelta(seconds=seconds)
        for rank, report in self.saying.items():
            pace = stall.update(self.trackers.get(rank), report, self.now, self.receiving_since)
            if pace is not None:
                self.trackers[rank] = pace
        return self

    def stay(self, seconds: float) -> Trainers:
        """Report for this many seconds without a new step."""
        for _ in range(round(seconds / 5)):
            self.report()
        return self

    def train(self, steps: int, seconds: float = 5.0, *, ranks: tuple[int, ...] = (0,)) -> Trainers:
        """Let these ranks make `steps` steps of `seconds` each."""
        for _ in range(steps):
            self.stay(seconds - 5)
            for rank in ranks:
                before = self.saying.get(rank)
                self.makes(before.step + 1 if before else 1, rank=rank)
            self.report()
        return self

    def silent(self, seconds: float) -> Trainers:
        """Let this many seconds pass without a report."""
        self.now += dt.timedelta(seconds=seconds)
        return self

    @property
    def found(self) -> str:
        """Return what the stall rules find: "stall", "warning" or ""."""
        finding = stall.find(self.trackers, self.setting, self.now)
        return "" if finding is None else finding.kind

    @property
    def sentence(self) -> str:
        finding = stall.find(self.trackers, self.setting, self.now)
        return "" if finding is None else finding.sentence()


def test_a_job_without_a_step_for_longer_than_its_time_out_has_stalled() -> None:
    job = Trainers(timeout_seconds=600).train(20)
    assert job.stay(600).found == "", "not yet: the limit is the longest time that is allowed"
    assert job.report().found == "stall"
    assert job.sentence == "the job has made no step for 10m5s (last step 20; limit 10m)"


def test_no_rank_is_accused_while_all_are_at_the_same_step() -> None:
    """No rank may be accused while all are at the same step: nobody knows which rank the others wait for."""
    job = Trainers(timeout_seconds=600).train(41, ranks=(0, 8)).stay(700)
    assert job.sentence == (
        "the job has made no step for 11m40s (last step 41; limit 10m); last steps: rank 0: 41, rank 8: 41"
    )


def test_the_rank_with_the_lowest_step_is_named_with_the_last_step_of_each() -> None:
    job = Trainers(timeout_seconds=600).train(41, ranks=(0, 8, 16)).makes(42).makes(42, rank=16)
    job.report().stay(900)
    assert job.sentence == (
        "rank 8 (node 1) has made no step for 15m5s (last step 41; limit 10m); "
        "last steps: rank 0: 42, rank 8: 41, rank 16: 42"
    )


def test_only_some_of_hundreds_of_ranks_are_named_including_the_slowest() -> None:
    job = Trainers(timeout_seconds=10)
    for node in range(300):
        job.makes(step=40 if node == 77 else 41, rank=8 * node)
    job.stay(20)
    assert job.sentence.startswith("rank 616 (node 77) has made no step for 15s (last step 40; limit 10s); last steps")
    assert job.sentence.endswith("rank 48: 41, rank 616: 40 and 292 others, up to 41")


def test_a_silent_rank_is_mentioned_and_does_not_count_as_stalled() -> None:
    job = Trainers(timeout_seconds=600).train(41, ranks=(0, 8))
    del job.saying[0]
    job.stay(700)
    assert job.sentence == (
        "the job has made no step for 11m40s (last step 41; limit 10m); last steps: rank 0: 41 (silent now), rank 8: 41"
    )


@pytest.mark.parametrize("phase", ["start", "train"])
def test_a_hang_that_agents_have_ended_does_not_teach_a_longer_limit(phase: Phase) -> None:
    """A hang that agents have ended must not lengthen the limit, or the next hang is found three times later."""
    trainers = Trainers().train(30).stay(20 * MINUTE)
    before = trainers.trackers[0].learned
    trainers.makes(0 if phase == "start" else 4, phase).report()
    assert trainers.trackers[0].learned == before


def test_a_single_lost_report_does_not_restart_the_clock() -> None:
    job = Trainers(timeout_seconds=600).train(20).stay(300)
    assert job.report(seconds=20).stay(285).found == "stall", "the sender comes again after 20 s"


def test_time_before_the_operator_could_receive_reports_does_not_count() -> None:
    job = Trainers(timeout_seconds=600).train(20).stay(590)
    job.receiving_since = job.now + dt.timedelta(seconds=1)
    assert job.stay(600).found == ""
    assert job.stay(10).found == "stall"


def test_a_time_out_of_0_turns_it_off() -> None:
    job = Trainers().train(20).stay(10 * HOUR)
    assert job.found == "stall"
    assert stall.find(job.trackers, NEVER, job.now) is None
    assert stall.requeue_at(job.trackers, NEVER, job.now) is None


# ---------------------------------------------------------------- learning


def test_without_a_time_out_a_first_long_gap_only_warns_and_a_hang_is_still_found() -> None:
    job = Trainers().train(100)
    assert job.stay(300).found == ""
    assert job.report().found == "warning"
    assert job.sentence == (
        "the job has made no step since 2031-03-05T07:19:33Z (last step 100), longer than the 5m expected; if "
        "that lasts until 2031-03-05T07:49:33Z, the group restarts. Declare long pauses with ddpjob.pause(), or set "
        "spec.stall.timeoutSeconds"
    )
    before = job.sentence
    assert job.stay(1490).sentence == before, "one Event, not one for each reconcile"
    assert job.stay(10).found == "stall"
    assert job.sentence == "the job has made no step for 30m5s (last step 100; limit 30m)"


@pytest.mark.parametrize("later", [False, True], ids=["at once", "after shorter gaps and while nobody is heard"])
def test_a_survived_gap_is_learned_and_does_not_warn_again(later: bool) -> None:
    job = Trainers().train(100).train(1, seconds=400)
    job = job.train(10).silent(HOUR).report().train(2) if later else job
    assert job.stay(3 * 400).found == "", "three times the longest gap"
    assert job.report().found == "stall", "and a hang is found at once: it has been warned of"


def test_long_steps_may_take_ten_times_as_long_and_a_first_gap_twice_that() -> None:
    job = Trainers().train(10, seconds=20 * MINUTE)
    assert job.stay(200 * MINUTE).found == ""
    assert job.stay(200 * MINUTE).found == "warning"
    assert job.report().found == "stall"


def test_one_slow_step_does_not_define_the_pace() -> None:
    job = Trainers().train(5).train(1, seconds=90).train(5)
    assert job.stay(300).found == ""
    assert job.report().found == "warning", "neither ten times the slow step nor three times the gap, 270 s"


def test_steps_between_two_reports_share_the_time() -> None:
    job = Trainers().makes(100).report()
    for step in range(200, 2000, 100):
        job.makes(step).report()
    assert job.trackers[0].learned.step_seconds == (0.05,) * stall_limits.STEPS_REMEMBERED


@pytest.mark.parametrize(
    ("timeout", "step", "phase", "hours", "said"),
    [
        (60, 0, "start", 0.5, "made no step for 30m5s (before the first step; limit 30m)"),
        (60, 0, "train", 0.5, "made no step for 30m5s (before the first step; limit 30m)"),
        (60, 20, "save", 0.5, "been saving for 30m5s (last step 20; limit 30m)"),
        (60, 20, "evaluate", 0.5, "been evaluating for 30m5s (last step 20; limit 30m)"),
        (7200, 0, "start", 2, "made no step for 2h (before the first step; limit 2h)"),
        (3600, 20, "evaluate", 3, "been evaluating for 3h (last step 20; limit 3h)"),
    ],
)
def test_imports_and_declared_pauses_have_their_own_limit_which_grows_with_the_step_limit(
    timeout: int, step: int, phase: Phase, hours: float, said: str
) -> None:
    """A pause's limit must grow with the step limit: if a step may take an hour, a save may take three."""
    job = Trainers(timeout_seconds=timeout).train(step).makes(step, phase).report()
    assert job.stay(hours * HOUR).found == ""
    assert job.report().found == "stall"
    assert job.sentence == f"the job has {said}"


def test_a_script_that_counts_epochs_is_not_restarted_in_its_first_epoch() -> None:
    job = Trainers().makes(0, "start").report().stay(50 * MINUTE)
    assert job.found == "warning"
    job.makes(1).report()
    assert job.stay(2 * HOUR).found == "", "the first epoch has taught what one takes"


def test_a_resumed_job_does_not_count_as_fast() -> None:
    job = Trainers().makes(0, "start").report().stay(10 * MINUTE).makes(1041).report()
    assert job.trackers[0].learned.step_seconds == (605.0,), "1041 steps were not made in ten minutes"


def test_a_new_operator_knows_no_pace_of_an_old_job() -> None:
    job = Trainers().makes(7).report()
    assert job.stay(30 * MINUTE).found == "", "the middle of an epoch, for all that is known"
    assert job.report().found == "warning"
    assert job.stay(150 * MINUTE).found == "stall"


def test_a_step_with_only_its_end_reported_teaches_no_step_time() -> None:
    job = Trainers().makes(7).report().stay(MINUTE).makes(8).report()
    assert job.trackers[0].learned.step_seconds == (), "an epoch of an hour, of which a new operator received a minute"
    job.silent(HOUR).report().stay(MINUTE).makes(9).report()
    assert job.trackers[0].learned.step_seconds == ()
    assert job.stay(HOUR).makes(10).report().trackers[0].learned.step_seconds == (3605.0,)


def test_a_declared_pause_teaches_the_length_of_pauses_and_not_of_steps() -> None:
    job = Trainers().train(20).makes(20, "evaluate").report().stay(2 * HOUR)
    assert job.found == "warning"
    assert "The limit is spec.stall.timeoutSeconds" in job.sentence, "it has been declared already"
    job.makes(20).report()
    assert job.stay(300).found == ""
    assert job.report().found == "warning", "a step is still expected within five minutes"
    job.makes(21).report().makes(21, "evaluate").report()
    assert job.stay(5 * HOUR).found == ""


def test_the_start_and_the_end_of_a_pause_are_signs_of_life() -> None:
    job = Trainers(timeout_seconds=60).train(20)
    for phase in ("evaluate", "train") * 10:
        assert job.makes(20, phase).report().stay(50).found == ""


# ---------------------------------------------------------------- several ranks


def test_a_group_makes_progress_as_long_as_one_rank_does() -> None:
    job = Trainers(timeout_seconds=60).makes(5, rank=8).train(100)
    assert job.found == "", "a script may call progress() on rank 0 alone; a rank that hangs stops all others"
    assert job.stay(65).found == "stall"


def test_a_rank_that_never_reports_a_step_hides_no_hang() -> None:
    job = Trainers(timeout_seconds=60).makes(0, "start", rank=8).train(5).stay(65)
    assert job.found == "stall"
    assert "for 1m5s (last step 5; " in job.sentence, "init() speaks on each node, progress() perhaps on rank 0 alone"


def test_ranks_that_wait_for_an_evaluation_on_rank_0_get_its_limit() -> None:
    job = Trainers(timeout_seconds=60).train(5, ranks=(0, 8)).makes(5, "evaluate").report()
    assert job.stay(20 * MINUTE).found == ""


def test_the_group_has_the_limit_of_the_rank_that_may_take_longest() -> None:
    job = Trainers().train(100, ranks=(0, 8)).makes(100, "evaluate").report().stay(31 * MINUTE)
    assert job.found == "warning", "rank 8 is past its half hour, rank 0 has three hours for an evaluation"
    assert "if that lasts until 2031-03-05T10:19:38Z" in job.sentence
    assert job.stay(150 * MINUTE).found == "stall"


def test_a_process_that_restarts_in_its_pod_counts_as_progress() -> None:
    job = Trainers(timeout_seconds=60).train(20).stay(55).makes(11).report()
    assert job.stay(60).found == ""


# ---------------------------------------------------------------- attempts and other protocols


def test_a_new_attempt_starts_from_zero_and_reports_of_the_old_one_are_ignored() -> None:
    job = Trainers(timeout_seconds=60).train(20).stay(65).makes(20, attempt=2).report()
    assert job.found == ""
    assert job.trackers[0].learned == stall_limits.Learned()
    job.makes(99, attempt=1).stay(10)
    assert job.trackers[0].step == 20, "a process that survives on a lost node speaks for nobody"


def test_a_sender_that_reports_only_progress_proves_no_stall() -> None:
    assert Trainers(timeout_seconds=60).makes(5, None).report().stay(600).trackers == {}


# ---------------------------------------------------------------- when to check again


def test_the_next_check_is_at_the_end_of_the_limit_and_then_at_each_report() -> None:
    job = Trainers(timeout_seconds=600).train(20)
    last_step_at = job.now
    assert stall.requeue_at(job.stay(300).trackers, job.setting, job.now) == last_step_at + dt.timedelta(seconds=600)
    job.stay(300)
    assert stall.requeue_at(job.trackers, job.setting, job.now) == job.now + dt.timedelta(seconds=stall.REPORT_SECONDS)
    assert stall.requeue_at(job.trackers, job.setting, job.silent(31).now) is None, "the next report is the next check"


def test_a_warning_is_checked_again_when_it_becomes_a_stall() -> None:
    job = Trainers().train(100)
    last_step_at = job.now
    assert stall.requeue_at(job.trackers, None, job.now) == last_step_at + dt.timedelta(minutes=5)
    assert job.stay(305).found == "warning"
    assert stall.requeue_at(job.trackers, None, job.now) == last_step_at + dt.timedelta(minutes=30)


def test_while_other_ranks_are_within_their_limit_an_overdue_rank_is_not_checked_more_often() -> None:
    job = Trainers(timeout_seconds=60).makes(5, rank=8).train(100)
    at = stall.requeue_at(job.trackers, job.setting, job.now)
    assert at == job.now + dt.timedelta(seconds=stall.SILENT_SECONDS), "rank 0 may fall silent, no earlier"


# ---------------------------------------------------------------- many jobs silent at once


def test_no_job_has_stalled_if_most_go_silent_together() -> None:
    def silence(*seconds_ago: float) -> stall.Silence | None:
        return stall.silence([START - dt.timedelta(seconds=s) for s in seconds_ago], START)

    assert silence() is None
    assert silence(1, 2, 3) is None
    assert silence(40) is None, "one job alone may have its own reason"
    assert silence(1, 40) is None
    assert silence(1, 2, 40, 41) is None, "half of them is not more than half"
    found = silence(1, 40, 41)
    assert found.sentence() == (
        "2 of the 3 jobs that report went silent together: their reports do not arrive. Until they do, no job is "
        "restarted for a stall"
    )
    assert silence(400, 401, 402) is not None, "as long as it lasts"
    assert silence(1, 400, 401) is None, "they have been gone for long, and the rest goes on"
