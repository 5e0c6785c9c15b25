"""The next actions of a job: one pure function for the cluster, the local run and the simulation, for any observed
state. The caller writes the status first, sends the events, deletes, then creates. A pod is deleted only for a
reason in the *recorded* status; otherwise the evidence could be lost. So stopping pods takes two reconciles."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence
from dataclasses import replace

from ddpjob_operator.job import api
from ddpjob_operator.job.times import earliest
from ddpjob_operator.job.validation import Problem
from ddpjob_operator.observed.cluster import Observed
from ddpjob_operator.plan import gang, lifecycle, restart, startup
from ddpjob_operator.plan.actions import Decision, Plan, Settings
from ddpjob_operator.plan.finish import finish
from ddpjob_operator.plan.record import record
from ddpjob_operator.plan.view import View, in_attempt, is_stale, next_loss, sort

_SETTINGS = Settings()
Rule = Callable[[View, api.Status], Decision | None]

# docs/dev/architecture.md lists when each rule applies and what it does. The last rule always applies.
RULES: tuple[Rule, ...] = (
    lifecycle.finished,
    lifecycle.invalid,
    lifecycle.completed,
    lifecycle.failing,
    lifecycle.suspended,
    gang.gang_chosen,
    gang.evicted,
    gang.waiting_for_admission,
    lifecycle.waiting_for_room,
    lifecycle.beginning,
    lifecycle.past_deadline,
    startup.attempt_still_ending,
    restart.replacing,
    restart.restarting,
    restart.gave_up_waiting,
    restart.going_on,
    restart.attempt_broken,
    startup.rescaled,
    startup.start_overdue,
    startup.backing_off,
    startup.nodes_missing,
    startup.avoidance_over,
    startup.waiting_for_nodes,
    gang.growing,
    lifecycle.running,
)


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


def decide(view: View, status: api.Status) -> Decision:
    """Return the decision of the first rule that applies. If it begins an attempt, the later rules decide too."""
    for rule in RULES:
        decision = rule(view, status)
        if decision is None:
            continue
        if not decision.goes_on:
            groups, retry_at = gang.upkeep(view)
            actions = (*view.clear_garbage(), *groups, *decision.actions)
            again_at = earliest(decision.requeue_at, next_loss(view), restart.next_check(view, status), retry_at)
            return replace(decision, actions=actions, requeue_at=again_at)
        view = in_attempt(view, decision.status)
        status = record(view, decision.status)
    raise AssertionError("the last rule decides about every job")
