"""The operator's reaction to reports: when it reconciles a job, if the job is stalled, and if reports arrive at all."""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import sys
from dataclasses import replace
from typing import Any

import pytest
from worlds import START, UID, digits, manifest

from ddpjob_operator.job import api, storage, validation
from ddpjob_operator.kube.api.client import Client
from ddpjob_operator.kube.api.runtime import Runtime
from ddpjob_operator.kube.operator import Operator
from ddpjob_operator.kube.ports.receive import Sender
from ddpjob_operator.kube.settings import OperatorSettings
from ddpjob_operator.kube.watch.store import Jobs, Key
from ddpjob_operator.kube.work.job_state import OF_A_RANK, JobState, JobStates
from ddpjob_operator.kube.work.reconcile import is_large
from ddpjob_operator.kube.work.reports import FIRST_REPORT_SECONDS, WAITING_SECONDS_MAX, Reports
from ddpjob_operator.observed import stall
from ddpjob_operator.observed.reports import AgentCounts, AgentReport, BadReportError, Phase, Report, read_report

FIVE_MINUTES = api.Stall(timeout_seconds=300)


class Desk:
    """The part of an operator that takes reports, its clock, and jobs that were reconciled once."""

    def __init__(self, *names: str, limits: storage.StoredLimits = storage.DEFAULT) -> None:
        self.now = START
        self.jobs, self.seconds = Jobs(lambda _: None), 0.0
        self.states = JobStates(self.jobs, limits)
        runtime = Runtime(clock=lambda: self.seconds, utc=lambda: self.now)
        self.reports = Reports(self.jobs, self.states, runtime, 10.0)
        for name in names or ("digits",):
            self.running(name)
            self.states.of(("default", name), UID)

    def running(
        self,
        name: str = "digits",
        *,
        attempt: int = 1,
        state: str = "Running",
        nproc: int = 1,
        command: list[str] | None = None,
    ) -> None:
        container = {"command": command} if command else None
        body = manifest(name, nodes=1000, nprocPerNode=nproc, container=container)
        body["metadata"]["resourceVersion"] = str(self.now.timestamp() + attempt)[:10]
        body["status"] = {"state": state, "attempt": attempt}
        self.jobs.put(body)

    def hears(
        self, step: int, name: str = "digits", *, rank: int = 0, phase: Phase = "train", attempt: int = 1, **more: Any
    ) -> float | None:
        """Let a report arrive; return the seconds until the reconcile that it causes."""
        fields = {"step": step, "rank": rank, "node_rank": rank, "phase": phase, "attempt": attempt}
        return self.reports.take(("default", name), Report(**fields, received_at=self.now, **more))

    def after(self, seconds: float) -> Desk:
        self.now += dt.timedelta(seconds=seconds)
        return self

    def state(self, name: str = "digits") -> JobState:
        return self.states.of(("default", name), UID)

    def found(self, name: str = "digits") -> stall.StallFinding | None:
        """Return the stall that the next reconcile finds, or None."""
        key: Key = ("default", name)
        job, _ = validation.parse(self.jobs.get(key) or {})
        trackers = {r: t for r, t in self.state(name).reports.trackers.items() if t.attempt == job.status.attempt}
        return stall.find(trackers, FIVE_MINUTES, self.now)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"step": 306}, {"step": 306, "phase": "start", "generation": 1}),
        ({"step": 306, "phase": "start", "generation": 1}, {"step": 307, "generation": 1}),
        ({"step": 306}, {"step": 307, "generation": 1}),
        ({"step": 285, "phase": "start", "resumed_step": 285}, {"step": 286, "resumed_step": 285}),
    ],
    ids=["ranks start in place", "and make a step", "a start that was lost", "a resume from a snapshot"],
)
def test_the_first_step_after_a_restart_is_shown_at_once(before: dict[str, Any], after: dict[str, Any]) -> None:
    """The first step after a restart must be shown at once: STEP, PROGRESS and ETA would be blank for 12 s."""
    desk = Desk()
    desk.hears(**before)
    assert desk.after(1).hears(**after) == FIRST_REPORT_SECONDS
    step = {**after, "step": after["step"] + 1}
    if after.get("phase") != "start":
        assert (desk.after(5).hears(**step) or 0) >= 10


def test_an_unknown_phase_is_refused_with_its_field_and_a_missing_one_means_training() -> None:
    assert read_report(b'{"step": 1}', START).phase == "train"
    assert read_report(b'{"step": 0, "phase": "start"}', START).phase == "start"
    with pytest.raises(BadReportError, match=r"'lunch' - at `\$\.phase`"):
        read_report(b'{"step": 1, "phase": "lunch"}', START)


# ---------------------------------------------------------------- when a report causes a reconcile


def test_reports_of_a_job_whose_progress_waits_to_be_written_cause_one_reconcile_a_minute() -> None:
    """Reports of a job whose progress waits to be written must cause one reconcile a minute, because plans of 2,000
    jobs every 10 s take a tenth of a CPU."""
    desk = Desk()
    for number in range(300):
        desk.reports.wait_for_write(JobState(f"other-{number}"))
    assert desk.hears(41) == FIRST_REPORT_SECONDS, "what is new does not wait"
    assert desk.hears(42) == 10.0, "it has not asked for its turn yet"
    state = desk.states.of(("default", "digits"), UID)
    assert desk.reports.wait_for_write(state) == pytest.approx(30)
    assert desk.hears(43) == pytest.approx(30)
    desk.seconds = 15.0
    assert desk.hears(44) == pytest.approx(15)
    desk.seconds = 29.0
    assert desk.hears(45) == 10.0
    for number in range(1000):
        desk.reports.wait_for_write(JobState(f"third-{number}"))
    state.progress_at = None
    desk.reports.wait_for_write(state)
    assert desk.hears(46) == WAITING_SECONDS_MAX, "for the rest of what it says"


def test_repeated_reports_of_hundreds_of_ranks_cause_no_reconcile_and_no_write() -> None:
    desk = Desk()
    for rank in range(200):
        desk.hears(41, rank=rank, metrics={"loss": "1"})
    first = dict(desk.state().reports.by_rank)
    desk.after(5)
    assert [desk.hears(41, rank=rank, metrics={"loss": "1"}) for rank in range(200)] == [None] * 200
    assert desk.state().reports.by_rank == first, "status.progress.updated stays, so there is nothing to write"


def test_a_report_of_an_agent_before_the_first_reconcile_of_its_job_is_kept() -> None:
    """An agent's report before the first reconcile of its job must be kept, because agents do not repeat it."""
    desk = Desk()
    desk.states.forget([("default", "digits")])
    agent = AgentReport(restarts=AgentCounts(application=1))
    assert desk.hears(3, agent=agent) == FIRST_REPORT_SECONDS
    kept = desk.state().agent
    assert kept.agent == agent


def test_a_repeated_step_writes_no_status() -> None:
    world = digits().running().reports_step(41, metrics={"loss": "1"}).settle()
    assert world.after(60).reports_step(41, metrics={"loss": "1"}).plan().status is None
    assert world.after(60).reports_step(41, metrics={"loss": "2"}).plan().status is not None
    assert world.reports_step(42, metrics={"loss": "1"}).plan().status is not None


def test_the_first_report_and_step_of_rank_0_are_handled_soon_and_later_ones_rarely() -> None:
    desk = Desk()
    assert desk.hears(0, phase="start") == FIRST_REPORT_SECONDS
    assert desk.hears(0, rank=8, phase="start") == 10
    assert desk.after(5).hears(1) == FIRST_REPORT_SECONDS, "lost steps and the time of the start are measured by it"
    assert desk.after(5).hears(2) == 10
    assert desk.after(5).hears(2, metrics={"loss": "1"}) == 10, "a metric is news, too"
    assert desk.after(5).hears(2, metrics={"loss": "1"}) is None
    assert desk.after(5).hears(0, attempt=2, phase="start") == FIRST_REPORT_SECONDS
    assert desk.after(5).hears(99, attempt=1) is None, "an attempt that is over"


def test_a_rank_that_reports_again_after_a_silence_causes_a_reconcile() -> None:
    desk = Desk()
    desk.hears(41)
    assert desk.hears(42) == 10
    assert desk.after(60).hears(42) == 10, "its time has started again, and only a reconcile knows when it ends"


def test_all_reports_of_ten_seconds_cause_one_reconcile() -> None:
    async def run() -> None:
        made = Operator(OperatorSettings(), Client(), runtime=Runtime(clock=lambda: 1000.0))
        body = manifest()
        body["metadata"]["resourceVersion"] = "1"
        made.caches.jobs.put(body)
        schedule, key = made.queue.schedule, ("default", "digits")
        made.states.of(key, UID)
        for step in range(2):
            made.report(Sender(*key, node_rank=0, attempt=1), Report(step=step, attempt=1, received_at=START))
            while (at := schedule.next_at()) is not None and schedule.pop(at) is not None:
                schedule.done(key, at)
        for rank in range(100):
            seconds = dt.timedelta(seconds=rank / 10)
            made.report(
                Sender(*key, node_rank=0, attempt=1), Report(step=2 + rank, attempt=1, received_at=START + seconds)
            )
        due = schedule.next_at()
        assert 9 < due - 1000.0 <= 10
        assert len(schedule) == 1
        made.report(Sender("default", "another", node_rank=0), Report(step=1))
        assert len(schedule) == 1, "a job that nobody has looked at yet"

    asyncio.run(run())


# ---------------------------------------------------------------- stalls


def test_a_sender_that_reports_only_new_steps_is_shown_and_never_counts_as_stalled() -> None:
    desk = Desk()
    for _ in range(100):
        desk.reports.take(("default", "digits"), Report(step=7, attempt=1, phase=None, received_at=desk.now))
        desk.after(5)
    assert desk.state().reports.by_rank[0].step == 7
    assert desk.found() is None


# ---------------------------------------------------------------- missing reports


def test_no_job_is_restarted_if_most_go_silent_together_and_the_log_says_so_once(caplog):
    caplog.set_level(logging.INFO)
    names = ("a", "b", "c")
    desk = Desk(*names)
    for _ in range(40):  # three jobs hang
        desk.after(5)
        for name in names:
            desk.hears(41, name)
        desk.reports.check_silence()
    for _ in range(40):  # one job still reports
        desk.after(5).hears(41, "c")
        desk.reports.check_silence()
        assert desk.found("c") is None, "its 5 minutes end while most are silent"
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert warnings[0].startswith("2 of the 3 jobs that report went silent together")
    for _ in range(10):
        desk.after(5)
        for name in names:
            desk.hears(41, name)
        desk.reports.check_silence()
    assert caplog.messages[-1] == "reports of most jobs arrive again"
    assert desk.found("c") is None, "and its time starts again"


def test_jobs_that_have_ended_or_are_being_stopped_may_be_silent(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk("a", "b", "c", "d")
    for name in ("a", "b"):
        desk.hears(100, name, final=True)
    for name in ("c", "d"):
        desk.hears(41, name)
        desk.running(name, state="Failing", attempt=2)
    desk.after(60).reports.check_silence()
    assert caplog.messages == []


def test_a_pod_reports_only_for_its_own_ranks_and_cannot_fill_the_memory() -> None:
    """A pod may report only its own ranks, because reports for 100,000 ranks would fill the operator's memory."""
    desk = Desk()
    desk.after(5).running(nproc=4)
    for rank in range(8, 12):
        desk.reports.take(("default", "digits"), Report(step=1, rank=rank, node_rank=2, attempt=1))
    for rank in (0, 7, 12, 3999, 4000, 2**53 - 1):
        with pytest.raises(
            BadReportError, match=rf"rank: {rank} is not (?:on node 2, which has ranks 8 to 11|one of the)"
        ):
            desk.reports.take(("default", "digits"), Report(step=1, rank=rank, node_rank=2, attempt=1))
    assert sorted(desk.state().reports.by_rank) == sorted(desk.state().reports.trackers) == [8, 9, 10, 11]


def test_if_ranks_do_not_follow_nodes_a_pod_reports_for_as_many_ranks_as_it_has() -> None:
    """If torchrun numbers the nodes, a pod may report any ranks, but only as many as it has."""
    desk = Desk()
    desk.after(5).running(nproc=2, command=["torchrun", "--rdzv-backend=c10d", "train.py"])
    for rank in range(1000):
        desk.reports.take(("default", "digits"), Report(step=1, rank=rank, node_rank=5, attempt=1))
    assert list(desk.state().reports.by_rank) == [998, 999]
    desk.reports.take(("default", "digits"), Report(step=1, rank=998, node_rank=6, attempt=1))
    assert desk.state().reports.by_rank[998].node_rank == 6


def test_all_reports_of_a_namespace_fit_into_its_share_of_the_memory() -> None:
    """Memory for reports must be limited by namespace: 100 pods of 1,024 ranks would fill 512 MiB in 17 minutes."""
    room = 11 * (OF_A_RANK + sys.getsizeof("é" * 300))
    desk = Desk("a", "b", limits=replace(storage.DEFAULT, reports=4 * room, reports_in_namespace=room))
    for name in ("a", "b"):
        for rank in range(100):
            desk.hears(1, name, rank=rank, not_kept="é" * 300)
    assert len(desk.state("a").reports.by_rank) + len(desk.state("b").reports.by_rank) == 11
    assert list(desk.state("b").reports.by_rank) == [0], "a status shows rank 0"
    desk.hears(2, "a", rank=99)
    assert 99 not in desk.state("a").reports.trackers
    desk.states.forget([("default", "a")])
    desk.hears(2, "b", rank=99)
    assert sorted(desk.state("b").reports.trackers) == [0, 99]


def test_a_job_with_thousands_of_reports_is_planned_outside_of_the_event_loop() -> None:
    """A job with many reports must be planned in a thread: 100,000 reports would block the event loop for 0.4 s."""
    what = digits().running().job
    assert not is_large(what, reports=1_000)
    assert is_large(what, reports=9_000)


def test_only_rank_0s_metrics_are_kept() -> None:
    desk = Desk()
    desk.hears(1, rank=0, metrics={"loss": "1"})
    desk.hears(1, rank=1, metrics={"loss": "x" * 64})
    assert [desk.state().reports.by_rank[rank].metrics for rank in (0, 1)] == [{"loss": "1"}, {}]
