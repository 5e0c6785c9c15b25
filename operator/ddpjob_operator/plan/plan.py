"""The next actions of a job: one pure function for the cluster, the local run and the simulation, for any observed
state. The caller writes the status first, sends the events, deletes, then creates. A pod is deleted only for a
reason in the *recorded* status; otherwise the evidence could be lost. So stopping pods takes two reconciles."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence

from ddpjob_operator.job import api
from ddpjob_operator.job.validation import Problem
from ddpjob_operator.observed.cluster import Observed
from ddpjob_operator.plan.actions import Plan, Settings
from ddpjob_operator.plan.decide import decide
from ddpjob_operator.plan.finish import finish
from ddpjob_operator.plan.record import record
from ddpjob_operator.plan.view import is_stale, sort

_SETTINGS = Settings()


def plan(
    job: api.DDPJob,
    seen: Observed,
    now: dt.datetime,
    *,
    problems: Sequence[Problem] = (),
    settings: Settings = _SETTINGS,
) -> Plan:
    """Return the plan for `job`. problems: the mistakes that validation found in its spec."""
    if job.metadata.deletion_timestamp is not None or job.spec.managed_by or is_stale(job, seen):
        return Plan()
    view = sort(job, seen, now, tuple(problems), settings)
    status = record(view, view.recorded)
    decision = decide(view, status)
    return finish(view, decision)
