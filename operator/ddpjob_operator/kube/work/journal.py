"""Records each plan that was carried out: lines of the log, and metrics."""

from __future__ import annotations

import logging

from ddpjob_operator.job import api
from ddpjob_operator.kube.api.runtime import Runtime
from ddpjob_operator.kube.work import decisions
from ddpjob_operator.kube.work.job_state import JobState
from ddpjob_operator.metrics.meter import Meter
from ddpjob_operator.plan.actions import Plan


class Journal:
    """Holds the executor's callback `recorded`."""

    def __init__(self, runtime: Runtime, meter: Meter) -> None:
        self._runtime = runtime
        self._meter = meter

    def recorded(self, job: api.DDPJob, todo: Plan, state: JobState) -> None:
        """Record a plan whose status was written. job: with the status before it."""
        log = self._runtime.log
        for line in decisions.lines(job, todo):
            log.info("%s", line.text, extra=line.fields())
        if log.isEnabledFor(logging.DEBUG) and (decision := decisions.decision(job, todo)) is not None:
            log.debug("%s", decision.text, extra=decision.fields())
        if todo.status is not None:
            agent = state.agent.agent if state.agent is not None else None
            now = self._runtime.now()
            state.restart = self._meter.changed(job.status, todo.status, now, state.restart, agent)
