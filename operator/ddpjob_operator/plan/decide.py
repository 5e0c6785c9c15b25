"""The rules in order. The first that applies decides the new status, and which pods are created or stopped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ddpjob_operator.job import api
from ddpjob_operator.job.times import earliest
from ddpjob_operator.plan import gang, group_restart, lifecycle, pod_replacement, startup
from ddpjob_operator.plan.actions import Decision
from ddpjob_operator.plan.record import record
from ddpjob_operator.plan.view import View, in_attempt, next_loss

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
    lifecycle.resuming,
    lifecycle.starting,
    lifecycle.past_deadline,
    startup.attempt_still_ending,
    pod_replacement.replacing,
    group_restart.restarting,
    group_restart.gave_up_waiting,
    pod_replacement.going_on,
    group_restart.attempt_broken,
    startup.rescaled,
    startup.start_overdue,
    startup.backing_off,
    startup.no_pod_can_be_made,
    startup.gang_unavailable,
    startup.name_taken,
    startup.create_refused,
    startup.nodes_missing,
    startup.leader_unplaced,
    startup.avoidance_over,
    startup.waiting_for_nodes,
    gang.growing,
    lifecycle.running,
)


def decide(view: View, status: api.Status) -> Decision:
    """Return the decision of the first rule that applies. If it begins an attempt, the later rules decide too."""
    for rule in RULES:
        decision = rule(view, status)
        if decision is None:
            continue
        if not decision.goes_on:
            groups, retry_at = gang.upkeep(view)
            actions = (*view.clear_garbage(), *groups, *decision.actions)
            again_at = earliest(decision.requeue_at, next_loss(view), group_restart.next_check(view, status), retry_at)
            return replace(decision, actions=actions, requeue_at=again_at)
        view = in_attempt(view, decision.status)
        status = record(view, decision.status)
    raise AssertionError("the last rule decides about every job")
