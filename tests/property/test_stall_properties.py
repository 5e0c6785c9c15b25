"""Whatever trainers say and whenever, no healthy job is restarted, and no hang stays unseen."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, replace

from hypothesis import example, given
from hypothesis import strategies as st
from worlds import START

from ddpjob.core import stall_limits
from ddpjob_operator.job import api
from ddpjob_operator.observed import stall
from ddpjob_operator.observed.reports import Phase, Report

RANKS = 4
phases: st.SearchStrategy[Phase | None] = st.sampled_from(["start", "train", "save", "evaluate", None])
# How long an example takes says more of the machine than of the code.
timeouts = st.none() | st.integers(1, 7200)


@dataclass(frozen=True)
class Word:
    """A report of a rank, some seconds after the one before."""

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
        Word,
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


def said(trackers: dict[int, stall.StepTracker], report: Report, now: dt.datetime) -> dict[int, stall.StepTracker]:
    pace = stall.update(trackers.get(report.rank), report, now)
    return trackers if pace is None else trackers | {report.rank: pace}


def told(spoken: list[Word]) -> tuple[dict[int, stall.StepTracker], dt.datetime]:
    trackers: dict[int, stall.StepTracker] = {}
    now = START
    for word in spoken:
        now += dt.timedelta(seconds=word.after)
        trackers = said(trackers, word.report, now)
    return trackers, now


def only(trackers: dict[int, stall.StepTracker], attempt: int) -> dict[int, stall.StepTracker]:
    return {rank: pace for rank, pace in trackers.items() if pace.attempt == attempt}


@given(words, timeouts, st.floats(stall.SILENT_SECONDS + 0.001, 1e8))
def test_silence_never_gives_a_finding(spoken: list[Word], timeout: int | None, silent: float) -> None:
    trackers, now = told(spoken)
    later = max([now, *(pace.heard_at for pace in trackers.values())]) + dt.timedelta(seconds=silent)
    assert stall.find(trackers, spec(timeout), later) is None
    assert stall.requeue_at(trackers, spec(timeout), later) is None


@given(words, timeouts, st.floats(0, 600))
def test_a_finding_speaks_of_ranks_that_are_heard_and_the_next_look_is_in_the_future(
    spoken: list[Word], timeout: int | None, later: float
) -> None:
    trackers, now = told(spoken)
    trackers, now = (
        only(trackers, max((p.attempt for p in trackers.values()), default=0)),
        now + dt.timedelta(seconds=later),
    )
    found, again = stall.find(trackers, spec(timeout), now), stall.requeue_at(trackers, spec(timeout), now)
    if found is not None:
        assert found.rank not in found.silent
        assert found.idle_seconds > found.limit_seconds > 0
        assert len(found.sentence()) < 1000, "an Event has 1024 characters"
        assert not (timeout and found.kind == "warning"), "who sets a limit means it"
    assert again is None or again > now


@given(
    st.lists(st.tuples(st.floats(0, 0.999), st.sampled_from(["train", "train", "save"])), max_size=12),
    st.integers(10, 900),
    st.floats(10, stall.SILENT_SECONDS),
)
def test_a_job_that_keeps_stepping_with_gaps_below_its_limit_is_never_found(
    gaps: list[tuple[float, Phase]], timeout: int, every: float
) -> None:
    trackers: dict[int, stall.StepTracker] = {}
    now = 0.0
    for step, (share, phase) in enumerate([(0.0, "train"), *gaps], start=1):
        end = now + share * timeout
        while now < end:
            now = min(end, now + every)
            trackers = said(trackers, Report(step=step, attempt=1, phase=phase), at(now))
            assert stall.find(trackers, spec(timeout), at(now)) is None


@given(st.lists(st.floats(0, stall_limits.TRAIN_SECONDS - 0.001), max_size=20))
def test_a_job_whose_gaps_are_shorter_than_five_minutes_is_not_even_warned(gaps: list[float]) -> None:
    trackers: dict[int, stall.StepTracker] = {}
    now = 0.0
    for step, gap in enumerate([0.0, *gaps], start=1):
        end = now + gap
        while now < end:
            now = min(end, now + stall.REPORT_SECONDS)
            trackers = said(trackers, Report(step=step, attempt=1), at(now))
            assert stall.find(trackers, None, at(now)) is None


@given(words, timeouts, phases.filter(bool), st.integers(0, 60), st.integers(500, 30_000))
@example([], 600, "train", 41, 5000)
@example([], None, "train", 41, 5000)
def test_a_group_that_is_alive_and_makes_no_step_is_found_within_its_limit_and_one_report(
    before: list[Word], timeout: int | None, phase: Phase, step: int, every_ms: int
) -> None:
    trackers, start = told(before)
    for rank in range(RANKS):
        trackers = said(trackers, Report(step=step, rank=rank, attempt=3, phase=phase), start)
    allowed = max(stall.limit(pace, timeout).allowed for pace in trackers.values())
    # One report later than the limit at the latest. What came in between changed nothing but when it was heard, and
    # folding all of it would take minutes.
    last = start + dt.timedelta(milliseconds=every_ms * (int(allowed * 1000) // every_ms + 1))
    trackers = {rank: replace(pace, heard_at=last) for rank, pace in trackers.items()}
    found = stall.find(trackers, spec(timeout), last)
    assert found is not None
    assert found.kind == "stall"


@given(words, st.lists(st.integers(0, RANKS - 1), unique=True, min_size=RANKS, max_size=RANKS))
def test_the_order_in_which_ranks_are_heard_does_not_matter(spoken: list[Word], order: list[int]) -> None:
    timed, now = [], START
    for word in spoken:
        now += dt.timedelta(seconds=word.after)
        timed.append((now, word.report))
    by_rank: dict[int, stall.StepTracker] = {}
    for rank in order:
        for when, report in timed:
            if report.rank == rank:
                by_rank = said(by_rank, report, when)
    assert by_rank == told(spoken)[0]


@given(words, timeouts, st.floats(stall.SILENT_SECONDS + 0.001, 1e8), st.data())
def test_an_operator_that_was_away_never_causes_a_finding_by_itself(
    spoken: list[Word], timeout: int | None, away: float, data: st.DataObject
) -> None:
    trackers, now = told(spoken)
    now = max([now, *(p.heard_at for p in trackers.values())]) + dt.timedelta(seconds=away)
    steps = data.draw(st.lists(st.integers(0, 50), min_size=RANKS, max_size=RANKS))
    for rank, step in enumerate(steps):
        trackers = said(trackers, Report(step=step, rank=rank, attempt=9), now)
        assert stall.find(only(trackers, 9), spec(timeout), now) is None
    known = told(spoken)[0]
    for rank, pace in list(known.items()):  # and in the attempt that it knew
        known = said(known, Report(step=pace.step, rank=rank, attempt=pace.attempt, phase=pace.phase), now)
    assert stall.find(known, spec(timeout), now) is None
