"""The group restart: an attempt is broken, all its pods are stopped, and the next attempt starts or the job fails.

Three reconciles, each by what is recorded: `attempt_broken` records the trigger; `restarting` stops the pods that still
run, and when the last one has ended (or its node is lost) settles the cause, because peers often report "connection
closed" before the out-of-memory kill behind it is known; then the next attempt is in the status, and the rules of
startup.py make its pods.
"""

from __future__ import annotations

import datetime as dt

from msgspec.structs import replace

from ddpjob.core import rules
from ddpjob_operator.failures import root_cause
from ddpjob_operator.job import api, budgets, launcher, reasons, wording
from ddpjob_operator.job.reasons import Reason
from ddpjob_operator.job.status import unsettled_failure
from ddpjob_operator.plan import culprit, pending
from ddpjob_operator.plan.actions import Decision, restart_grace_seconds
from ddpjob_operator.plan.settlement import Settled, settle
from ddpjob_operator.plan.transitions import enter, new_attempt, with_failure
from ddpjob_operator.plan.triggers import first_trigger
from ddpjob_operator.plan.view import View, name_pods

_WHY_IT_STOPS: dict[rules.Stop, tuple[Reason, str]] = {
    "BackoffLimitExceeded": (reasons.BACKOFF_LIMIT_EXCEEDED, "{restarts}backoffLimit: {limit} allows no {more}"),
    "NoProgress": (
        reasons.NO_PROGRESS,
        "{charged} charged failures in a row without a new step, so another try is not worth it",
    ),
    "PermanentFailure": (reasons.PERMANENT_FAILURE, "another try cannot help"),
    "TooManyInfrastructureFailures": (
        reasons.TOO_MANY_INFRASTRUCTURE_FAILURES,
        "{uncharged} restarts without a charge and without a new step, so another try is not worth it",
    ),
    "TooManyStalls": (reasons.TOO_MANY_STALLS, "restarted {stalls} times because no step was made"),
}


def attempt_broken(view: View, status: api.Status) -> Decision | None:
    """One rank is lost, so the group is broken: the others would hang in a collective until their time-out."""
    trigger = first_trigger(view, status)
    if trigger is None:
        return None
    reason, failure = trigger
    text = root_cause.sentence(failure)
    status = with_failure(status, failure, text)
    agents_wait = launcher.restarts_in_place(view.spec)
    if not view.active and not agents_wait:
        # Nothing is left to stop or to wait for, so the trigger is all the evidence there will be: one reconcile, and
        # one event. The attempt ends first, since the time that it trained is counted when its state changes.
        ended = enter(status, "Restarting", reason, text, view.now)
        return _next_attempt(view, ended, settle(view, ended, failure))
    # Where agents wait in the other pods, the next reconcile decides whether these stop (pod_replacement.py).
    message = text + _open_question(failure) if agents_wait else _ending(view, text, failure)
    return Decision(enter(status, "Restarting", reason, message, view.now))


def restarting(view: View, status: api.Status) -> Decision | None:
    """Stop what is left of a broken attempt; when nothing is, start the next one or fail."""
    first = unsettled_failure(view.recorded)
    return None if first is None else restart_all(view, status, first, settle(view, status, first))


def restart_all(view: View, status: api.Status, first: api.Failure, settled: Settled) -> Decision:
    """The same, with the cause settled by what is known now. first: the failure as it is recorded."""
    if not view.active:
        return _next_attempt(view, status, settled)
    # A pod that is ended from outside gets its full grace to save, so its peers get theirs: they stop at one agreed
    # step.
    grace = None if view.recorded.reason == reasons.DISRUPTED.name else restart_grace_seconds(view.spec)
    text = root_cause.sentence(settled.cause)
    actions, again_at = culprit.stop(view, first, view.active, grace)
    # The cause is recorded at each reconcile, because the evidence of a pod goes with its object.
    message = _ending(view, text, settled.cause)
    return Decision(replace(with_failure(status, settled.cause, text), message=message), actions, again_at)


def _next_attempt(view: View, status: api.Status, settled: Settled) -> Decision:
    """All pods have ended: start again, or fail."""
    charged, verdict = settled.status(view, status), settled.verdict
    if not verdict.restart:
        reason, why = _why_it_stops(view, settled.failure, verdict)
        failed = enter(charged, "Failed", reason, f"{settled.text}; {why}", view.now)
        return Decision(replace(failed, completion_time=view.now))
    later = new_attempt(charged, view.now + dt.timedelta(seconds=verdict.wait_seconds))
    text = _going_on(view, settled, later.attempt)
    return Decision(enter(later, "Restarting", reasons.RESTARTING, text, view.now))


def _ending(view: View, text: str, failure: api.Failure) -> str:
    left = f"stopping {name_pods(view.active)}" if view.active else "all pods have ended"
    return f"{text}; {left}{_open_question(failure)}{pending.unreachable_nodes(view)}"


def _open_question(failure: api.Failure) -> str:
    return "" if root_cause.is_a_cause(failure) else "; cause not yet known"


def _going_on(view: View, settled: Settled, attempt: int) -> str:
    wait = settled.verdict.wait_seconds
    who = f"all {view.spec.nodes} nodes restart" if view.spec.nodes > 1 else "the node restarts"
    when = f" in {wording.duration(wait)}" if wait else ""
    return f"{settled.text}; {who}{when} as attempt {attempt} ({charge(view, settled.verdict)})"


def charge(view: View, verdict: rules.Verdict) -> str:
    """What a restart costs, in words."""
    history = verdict.history
    if verdict.charged_to == "application":
        used = rules.counted(history, budgets.limits(view.spec), view.now)
        return f"restart {used} of {view.spec.backoff_limit}"
    if verdict.charged_to == "stall":
        return f"stall {history.stall} of {rules.STALLS_MAX}"
    return f"not charged to backoffLimit; {history.infrastructure} so far"


def _why_it_stops(view: View, failure: api.Failure, verdict: rules.Verdict) -> tuple[Reason, str]:
    reason, text = _WHY_IT_STOPS[verdict.stop]
    if verdict.stop == "PermanentFailure" and any(
        r.action == "FailJob" and r.matches(failure.exit_code) for r in budgets.policy(view.spec)
    ):
        return reason, "failurePolicy says FailJob for this exit code"
    used = rules.counted(verdict.history, budgets.limits(view.spec), view.now)
    return reason, text.format(
        restarts=("" if not used else "restarted once: " if used == 1 else f"restarted {used} times: "),
        limit=view.spec.backoff_limit,
        more="more" if used else "restart",
        charged=verdict.history.charged_in_a_row + 1,
        stalls=verdict.history.stall,
        uncharged=verdict.history.uncharged_in_a_row,
    )
