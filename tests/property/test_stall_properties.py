"""For any reports at any time, no healthy job is restarted and no hang is missed."""

import datetime as dt
from dataclasses import dataclass, replace

from hypothesis import example, given
from hypothesis import strategies as st
from worlds import START

from ddpjob_core import stall_limits
from ddpjob_operator.job import api
from ddpjob_operator.observed import stall
from ddpjob_operator.observed.reports import Phase, Report

RANKS = 4
phases: st.SearchStrategy[Phase | None] = st.sampled_from(["start", "train", "save", "evaluate", None])
timeouts = st.none() | st.integers(1, 7200)


@dataclass(frozen=True)
class Sent:
    """A report of a rank, sent some seconds after the previous report."""

    after: float
    rank: int
    step: int
    phase: Phase | None
    attempt: int

    @property
    def report(self) -> Report:
        return Report(step=self.step, rank=self.rank, node_rank=self.rank, attempt=self.attempt, phase=self.phase)


words = st.lists(
    st.builds(
        Sent,
        st.floats(0, 20) | st.floats(0, 1e6) | st.floats(-1e4, 0),
        st.integers(0, RANKS - 1),
        st.integers(0, 50),
        phases,
        st.integers(0, 3),
    ),
    max_size=60,
)


def spec(timeout: int | None) -> api.Stall:
    return api.Stall(timeout_seconds=timeout)


def at(seconds: float) -> dt.datetime:
    return START + dt.timedelta(seconds=seconds)


def received(trackers: dict[int, stall.StepTracker], report: Report, now: dt.datetime) -> dict[int, stall.StepTracker]:
    tracker = stall.update(trackers.get(report.rank), report, now)
    return trackers if tracker is None else trackers | {report.rank: tracker}


def received_all(reports: list[Sent]) -> tuple[dict[int, stall.StepTracker], dt.datetime]:
    trackers: dict[int, stall.StepTracker] = {}
    now = START
    for sent in reports:
        now += dt.timedelta(seconds=sent.after)
        trackers = received(trackers, sent.report, now)
    return trackers, now


def only(trackers: dict[int, stall.StepTracker], attempt: int) -> dict[int, stall.StepTracker]:
    return {rank: tracker for rank, tracker in trackers.items() if tracker.attempt == attempt}


@given(words, timeouts, st.floats(stall.SILENT_SECONDS + 0.001, 1e8))
def test_silence_never_causes_a_finding(reports: list[Sent], timeout: int | None, silent: float) -> None:
    """Silence must never cause a finding, because the trainer or its reports may be lost."""
    trackers, now = received_all(reports)
    later = max([now, *(tracker.heard_at for tracker in trackers.values())]) + dt.timedelta(seconds=silent)
    assert stall.find(trackers, spec(timeout), later) is None
    assert stall.requeue_at(trackers, spec(timeout), later) is None


@given(words, timeouts, st.floats(0, 600))
def test_a_finding_names_reporting_ranks_and_the_next_check_is_in_the_future(reports, timeout, later):
    trackers, now = received_all(reports)
    trackers, now = (
        only(trackers, max((p.attempt for p in trackers.values()), default=0)),
        now + dt.timedelta(seconds=later),
    )
    found, again = stall.find(trackers, spec(timeout), now), stall.requeue_at(trackers, spec(timeout), now)
    if found is not None:
        assert found.rank not in found.silent
        limit = found.limit.allowed if found.kind == "stall" else found.limit.expected
        assert found.idle_seconds > limit > 0
        assert len(found.sentence()) < 1000, "an Event has 1024 characters"
        assert not (timeout and found.kind == "warning"), "who sets a limit means it"
    assert again is None or again > now


@given(
    st.lists(st.tuples(st.floats(0, 0.999), st.sampled_from(["train", "train", "save"])), max_size=12),
    st.integers(10, 900),
    st.floats(10, stall.SILENT_SECONDS),
)
def test_a_job_with_gaps_below_its_limit_is_never_found_stalled(gaps, timeout, every):
    trackers: dict[int, stall.StepTracker] = {}
    now = 0.0
    for step, (share, phase) in enumerate([(0.0, "train"), *gaps], start=1):
        end = now + share * timeout
        while now < end:
            now = min(end, now + every)
            trackers = received(trackers, Report(step=step, attempt=1, phase=phase), at(now))
            assert stall.find(trackers, spec(timeout), at(now)) is None


@given(st.lists(st.floats(0, stall_limits.TRAIN_SECONDS - 0.001), max_size=20))
def test_a_job_with_gaps_below_five_minutes_gets_no_warning(gaps: list[float]) -> None:
    trackers: dict[int, stall.StepTracker] = {}
    now = 0.0
    for step, gap in enumerate([0.0, *gaps], start=1):
        end = now + gap
        while now < end:
            now = min(end, now + stall.REPORT_SECONDS)
            trackers = received(trackers, Report(step=step, attempt=1), at(now))
            assert stall.find(trackers, None, at(now)) is None


@given(words, timeouts, phases.filter(bool), st.integers(0, 60), st.integers(500, 30_000))
@example([], 600, "train", 41, 5000)
@example([], None, "train", 41, 5000)
def test_a_live_group_without_a_step_is_found_within_its_limit_plus_one_report(before, timeout, phase, step, every_ms):
    trackers, start = received_all(before)
    for rank in range(RANKS):
        trackers = received(trackers, Report(step=step, rank=rank, attempt=3, phase=phase), start)
    allowed = max(stall.limit(tracker, timeout).allowed for tracker in trackers.values())
    # The stall must be found at the latest one report after the limit.
    # Earlier reports only change the time of receipt, and processing all of them would take minutes.
    last = start + dt.timedelta(milliseconds=every_ms * (int(allowed * 1000) // every_ms + 1))
    trackers = {rank: replace(tracker, heard_at=last) for rank, tracker in trackers.items()}
    found = stall.find(trackers, spec(timeout), last)
    assert found.kind == "stall"


@given(words, st.lists(st.integers(0, RANKS - 1), unique=True, min_size=RANKS, max_size=RANKS))
def test_the_order_of_reports_from_ranks_does_not_matter(reports: list[Sent], order: list[int]) -> None:
    timed, now = [], START
    for sent in reports:
        now += dt.timedelta(seconds=sent.after)
        timed.append((now, sent.report))
    by_rank: dict[int, stall.StepTracker] = {}
    for rank in order:
        for when, report in timed:
            if report.rank == rank:
                by_rank = received(by_rank, report, when)
    assert by_rank == received_all(reports)[0]


@given(words, timeouts, st.floats(stall.SILENT_SECONDS + 0.001, 1e8), st.data())
def test_an_operator_that_was_down_never_causes_a_finding_by_itself(reports, timeout, away, data):
    trackers, now = received_all(reports)
    now = max([now, *(p.heard_at for p in trackers.values())]) + dt.timedelta(seconds=away)
    steps = data.draw(st.lists(st.integers(0, 50), min_size=RANKS, max_size=RANKS))
    for rank, step in enumerate(steps):
        trackers = received(trackers, Report(step=step, rank=rank, attempt=9), now)
        assert stall.find(only(trackers, 9), spec(timeout), now) is None
    known = received_all(reports)[0]
    for rank, tracker in list(known.items()):  # silence followed by one report is no stall
        known = received(known, Report(step=tracker.step, rank=rank, attempt=tracker.attempt, phase=tracker.phase), now)
    assert stall.find(known, spec(timeout), now) is None
