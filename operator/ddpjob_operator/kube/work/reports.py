"""Takes reports of ranks and agents, and detects if reports do not reach this operator."""

from __future__ import annotations

import asyncio
import datetime as dt

import msgspec

from ddpjob_operator.kube.api.runtime import Runtime
from ddpjob_operator.kube.watch.store import Jobs, Key
from ddpjob_operator.kube.work.job_state import JobState, JobStates
from ddpjob_operator.observed import stall
from ddpjob_operator.observed.reports import Report, check_rank, latest

SILENCE_CHECK_SECONDS = 10.0
FIRST_REPORT_SECONDS = 0.1
# While a job's progress waits to be written, other changes in its reports cause a plan only this often (seconds).
# Without this limit, thousands of jobs would be planned every ten seconds in vain.
WAITING_SECONDS_MAX = 60.0
# Writes for all jobs together. Otherwise step numbers of thousands of jobs would keep the API server busy.
PROGRESS_WRITES_PER_SECOND = 10


class Reports:
    """Takes the reports of all jobs, and decides when their jobs are reconciled."""

    def __init__(self, jobs: Jobs, states: JobStates, runtime: Runtime, progress_write_seconds: float) -> None:
        self._jobs = jobs
        self._states = states
        self._runtime = runtime
        self._progress_write_seconds = progress_write_seconds
        self._next_write_at = float("-inf")
        self._silence: stall.Silence | None = None
        self._receiving_since: dt.datetime | None = None
        """End of the last silence of most jobs."""
        self.listening_since = runtime.now()

    def take(self, key: Key, report: Report) -> float | None:
        """Keep a report. Return the seconds until its job should be reconciled; None if the report contains nothing
        new, or its job does not exist.

        Raise BadReportError if a pod reports for a rank of another pod: it could fill our memory.
        """
        raw, spec = self._jobs.get(key), self._states.spec(key)
        if raw is None or spec is None:
            return None
        # Keep the report even before the job's first reconcile, because a confirmed report is not sent again.
        state = self._states.of(key, raw["metadata"]["uid"])
        if report.agent is not None:
            known, state.agent = state.agent, latest(state.agent, report)
            is_news = state.agent is report and (known is None or known.agent != report.agent)
            return FIRST_REPORT_SECONDS if is_news else None
        check_rank(spec, report.rank, report.node_rank)
        if report.rank:
            # The status shows the metrics of rank 0 only.
            report = msgspec.structs.replace(report, metrics={})
        state.reports.make_room(report, None if spec.facts.ranks_follow_nodes else spec.facts.nproc_per_node)
        if not self._states.has_room(key, state, report):
            return None
        return self._take_from_rank(state, report)

    def _take_from_rank(self, state: JobState, report: Report) -> float | None:
        known = state.reports.by_rank.get(report.rank)
        if known is not None and report.attempt < known.attempt:
            return None
        begins = known is None or _begins(known, report)
        is_alarm = bool(report.save_failed) and (known is None or not known.save_failed)
        is_news = state.reports.track(report, report.received_at or self._runtime.now(), self._receiving_since)
        if known is None or msgspec.structs.replace(report, received_at=known.received_at) != known:
            state.reports.keep(report)
            is_news = True
        if not is_news:
            return None
        # Write soon after rank 0's first step, which shows how long the start took and which steps are repeated.
        if (begins or is_alarm) and report.rank == 0:
            return FIRST_REPORT_SECONDS
        turn = 0.0 if state.progress_at is None else state.progress_at - self._runtime.clock()
        return max(self._progress_write_seconds, min(turn, WAITING_SECONDS_MAX))

    def wait_for_write(self, state: JobState) -> float:
        """Return the seconds until the progress of a job may be written. Jobs get slots in the order of their calls; a
        job that does not call again leaves its slot unused.
        """
        now = self._runtime.clock()
        if state.progress_at is None:
            state.progress_at = max(now, self._next_write_at)
            self._next_write_at = state.progress_at + 1.0 / PROGRESS_WRITES_PER_SECOND
        return max(0.0, state.progress_at - now)

    async def run(self) -> None:
        """Call `check_silence` regularly until cancelled."""
        while True:
            await asyncio.sleep(SILENCE_CHECK_SECONDS)
            try:
                self.check_silence()
            except Exception:
                # Do not raise: the end of this task would end the operator.
                self._runtime.log.exception("the check that reports reach this operator failed")

    def check_silence(self) -> None:
        """Detect that most jobs went silent together: the path to this operator is then broken, not the jobs. Jobs that
        report again get their full time before they count as stalled.
        """
        heard = []
        for key, state in self._states:
            status = (self._jobs.get(key) or {}).get("status") or {}
            if state.reports.last_at is not None and status.get("state") == "Running":
                heard.append(state.reports.last_at)
        silence = stall.silence(heard, self._runtime.now())
        if silence is not None:
            self._receiving_since = self._runtime.now() + dt.timedelta(seconds=1)  # times of reports are whole seconds
        if silence is not None and self._silence is None:
            self._runtime.log.warning("%s", silence.sentence())
        elif silence is None and self._silence is not None:
            self._runtime.log.info("reports of most jobs arrive again")
        self._silence = silence


def _begins(known: Report, report: Report) -> bool:
    """True if ranks have started or made their first step after the `known` report."""
    starts = (report.attempt, report.generation) > (known.attempt, known.generation)
    return starts or (report.step > 0 and not known.step) or (known.phase == "start" != report.phase)
