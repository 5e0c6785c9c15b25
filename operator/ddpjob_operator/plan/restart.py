"""Restarts after the loss of a rank: of the group in all pods, or under `ddprun` in the lost pods alone.

The group restart: all pods stop; then the next attempt starts, or the job fails. It takes three reconciles, each driven
by the recorded status:
1. `attempt_broken` records the trigger.
2. `restarting` stops the other pods. After the last pod has ended, or its node is lost, the rule finds the cause.
   It waits because other ranks often report "connection closed" before the out-of-memory kill of a rank is known.
3. The status has the next attempt, and the rules of startup.py create its pods.

The replacement of lost pods: agents of the other pods end the ranks, keep the fork servers warm, and wait for the new
pods. Then all ranks start as a new generation.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from ddpjob_core import budget, rules
from ddpjob_core.failures import abridged
from ddpjob_operator.failures import root_cause, sentences, termination_message
from ddpjob_operator.failures.redaction import shown
from ddpjob_operator.job import api, budgets, podspec, ranges, reasons, wording
from ddpjob_operator.job.reasons import Reason
from ddpjob_operator.job.status import TERMINAL, saved_step
from ddpjob_operator.job.times import after, is_past
from ddpjob_operator.observed import stall
from ddpjob_operator.observed.cluster import Pod
from ddpjob_operator.plan import gang, leadership, pending
from ddpjob_operator.plan.actions import Decision
from ddpjob_operator.plan.settlement import (
    Settled,
    context,
    failure_of,
    is_again,
    settle,
    stop_but_keep_log,
    with_last_step,
    with_limit,
)
from ddpjob_operator.plan.transitions import enter, new_attempt, with_failure, with_goodput, with_idle, with_new_ranks
from ddpjob_operator.plan.view import View, name_pods
from ddpjob_operator.pods import naming

# Time for agents in the pods to find a stall and restart the ranks in place, before the operator restarts the job.
AGENT_FIRST = dt.timedelta(seconds=60)
# Time within which a failed node is marked not ready, or its object is deleted.
UNHEARD = dt.timedelta(seconds=60)
# Seconds after an attempt's start. Earlier lost connections count as failures, so that backoffLimit ends a broken job.
GIVES_UP_AFTER_SECONDS = 60
# Failures that a new pod cannot fix while the others wait.
_OF_ALL_PODS = (root_cause.STALLED, root_cause.CONFIG_ERROR)
_WHY_IT_STOPS: dict[budget.Stop, tuple[Reason, str]] = {
    "BackoffLimitExceeded": (reasons.BACKOFF_LIMIT_EXCEEDED, "{gave_up}"),
    "NoProgress": (
        reasons.NO_PROGRESS,
        "{charged} charged failures in a row without a new step, so the job is not retried",
    ),
    "PermanentFailure": (reasons.PERMANENT_FAILURE, "a retry cannot succeed"),
    "TooManyInfrastructureFailures": (
        reasons.TOO_MANY_INFRASTRUCTURE_FAILURES,
        "{uncharged} restarts without a charge and without a new step, so the job is not retried",
    ),
    "TooManyStalls": (reasons.TOO_MANY_STALLS, "restarted {stalls} times because no step was made"),
}


def attempt_broken(view: View, status: api.Status) -> Decision | None:
    """Break the attempt if a rank is lost. Otherwise the others would hang in a collective until their time-out."""
    trigger = next(triggers(view, status), None)
    if trigger is None:
        return None
    reason, failure = trigger
    text = sentences.sentence(failure)
    status = with_failure(with_idle(status, idle_since(view, status, failure)), failure)
    agents_wait = view.spec.facts.restarts_in_place
    if not view.active and not agents_wait:
        # No other pod must end first, so no more evidence will come: settle in one reconcile, with one Event.
        # End the attempt first, because its training time is counted when the state changes.
        ended = enter(status, "Restarting", reason, text, view.now)
        return _next_attempt(view, ended, settle(view, ended, failure))
    # If agents are waiting in the other pods, the next reconcile decides if these pods stop (`replacing`).
    message = text + _open_question(failure) if agents_wait else _ending(view, text, failure)
    return Decision(enter(status, "Restarting", reason, message, view.now))


def idle_since(view: View, status: api.Status, failure: api.JobFailure) -> dt.datetime | None:
    """Return since when a group with a lost node is idle: its last step, but not before the node's failure."""
    progress, pod = status.progress, view.known_pod(failure.node_rank)
    if failure.reason not in (root_cause.NODE_LOST, "DeletionByPodGC") or progress is None or pod is None:
        return None
    node = (view.seen.nodes or {}).get(pod.node)
    unheard = (node.since if node is not None else pod.silent_since) or view.now
    stepped = progress.updated if progress.attempt == status.attempt else unheard
    return min(view.now, max(stepped, unheard - UNHEARD))


def gave_up_waiting(view: View, status: api.Status) -> Decision | None:
    """Recreate all pods if running pods gave up waiting for late pods (after 600 s, or JOIN_SECONDS if elastic).
    This is no failure, and startDeadlineSeconds still counts from the first try."""
    late = [p for p in view.waiting if p.place not in status.started]
    if not late or view.is_enough(status.started) or view.spec.facts.restarts_in_place:
        return None
    trigger = next(triggers(view, status), None)
    is_patient = is_past(after(status.attempt_time, GIVES_UP_AFTER_SECONDS), view.now)
    if trigger is None or trigger[1].reason != root_cause.PEER_LOST or not is_patient:
        return None
    later = new_attempt(status, view.now)
    later = replace(later, starting_since=status.starting_since or status.attempt_time)
    reason, why = _why_late(view, status, late)
    text = f"{why}; {trigger[1].pod} gave up waiting for them, so all pods are created again: attempt {later.attempt}"
    state: api.State = "Restarting" if status.state == "Restarting" else "Pending"
    return Decision(enter(later, state, reason, text, view.now))


def _why_late(view: View, status: api.Status, late: Sequence[Pod]) -> tuple[Reason, str]:
    unplaced = [p for p in late if p.unschedulable]
    if unplaced:
        waited, _ = pending.waited(status.starting_since or status.attempt_time, view.now)
        why = f"{len(unplaced)} of {view.spec.pods} pods: {pending.why_unschedulable(unplaced)}{waited}"
        return reasons.UNSCHEDULABLE, f"Unschedulable: {why}"
    creating, _ = pending.creating(view, status, late)
    first = late[0]
    why = creating or ": ".join(part for part in (first.name, first.trainer.reason, first.trainer.message) if part)
    return reasons.CANNOT_START, f"{len(late)} of {view.spec.pods} pods have not started: {why}"


def restarting(view: View, status: api.Status) -> Decision | None:
    first = view.recorded.unsettled_failure
    return None if first is None else restart_all(view, status, first, settle(view, status, first))


def restart_all(view: View, status: api.Status, first: api.JobFailure, settled: Settled) -> Decision:
    """Stop the remaining pods of a broken attempt, then start the next one or fail. first: the recorded failure."""
    if not view.active:
        return _next_attempt(view, status, settled)
    # A pod that is deleted from outside gets its full grace to save.
    # The peers of a pod that is deleted from outside get their full grace too: all ranks stop after the same step.
    grace = None if view.recorded.reason == reasons.DISRUPTED.name else view.spec.grace_after_failure
    actions, again_at = stop_but_keep_log(view, first, view.active, grace)
    # Record the cause at each reconcile: a pod's evidence disappears with its object.
    message = _ending(view, settled.text, settled.cause)
    return Decision(replace(with_failure(status, settled.cause), message=message), actions, again_at)


def _next_attempt(view: View, status: api.Status, settled: Settled) -> Decision:
    charged, verdict = settled.status(view, status), settled.verdict
    if not verdict.restart:
        reason, why = _why_it_stops(view, settled.failure, verdict)
        failed = enter(charged, "Failed", reason, f"{settled.text}; {why}", view.now)
        return Decision(replace(failed, completion_time=view.now))
    later = new_attempt(charged, view.now + dt.timedelta(seconds=verdict.wait_seconds))
    kept = podspec.files_outlive_a_pod(view.spec.template, elsewhere=view.settings.keeps_files)
    text = _going_on(view, settled, later.attempt) + from_step(charged, kept=kept)
    return Decision(enter(later, "Restarting", reasons.RESTARTING, text, view.now))


def replacing(view: View, status: api.Status) -> Decision | None:
    """Wait until the lost pods have ended, count the failure, and return the status in which they are replaced."""
    first = view.recorded.unsettled_failure
    lost = [] if first is None else lost_alone(view, status, first)
    if first is None or not lost:
        return None
    settled = settle(view, status, first)
    if not settled.verdict.restart:
        return restart_all(view, status, first, settled)  # stops the other pods too, then fails the job
    if ending := _still_ending(view, lost):
        message = f"{settled.text}; {name_pods(ending)} still stopping, the other nodes wait"
        return Decision(replace(with_failure(status, settled.cause), message=message))
    status, wait = settled.status(view, status), settled.verdict.wait_seconds
    status = with_new_ranks(status, view.now + dt.timedelta(seconds=wait))
    others = len(view.staying) if view.is_elastic else view.spec.nodes - len(lost)
    kept = f"the other {others} nodes wait" if others != 1 else "the other node waits"
    kept = "the others go on" if view.is_enough(view.staying) else kept
    when = f" in {wording.duration(wait)}" if wait else ""
    return Decision(_replaced(view, status, "Restarting", settled, lost, f"{when}, {kept}"))


def going_on(view: View, status: api.Status) -> Decision | None:
    """Replace the pods that an elastic job has lost, while its other nodes train. No agent waits, so the job stays
    Running, and other pods bring no more evidence."""
    trigger = next(triggers(view, status), None)
    if trigger is None or not view.goes_on(status):
        return None
    lost = lost_alone(view, status, trigger[1])
    lost = sorted(set(lost).difference(p.place for p in _still_ending(view, lost)))
    if not lost or not (settled := settle(view, status, trigger[1], others_go_on=True)).verdict.restart:
        return None
    # Add up the goodput first: once a pod is replaced, time before the first step counts as restart and not as start.
    since = idle_since(view, status, trigger[1])
    status = with_goodput(with_idle(status, since), view.now)
    status = settled.status(view, with_idle(status, since and view.now))  # idle until the next step
    # Remember the furthest step: if the other nodes make no step until the next loss, both losses count as in a row.
    status = replace(status, furthest_step=status.furthest)
    return Decision(_replaced(view, status, "Running", settled, lost, ", the others go on"))


def _still_ending(view: View, lost: Sequence[int]) -> list[Pod]:
    """Return lost pods in which ranks may be running. Sidecars run until the pod is replaced and deleted."""
    pods = (p for place in lost if (p := view.pods.get(place)) is not None)
    return [p for p in pods if p.live and not p.has_failed and p.uid not in view.lost]


def lost_alone(view: View, status: api.Status, first: api.JobFailure) -> list[int]:
    """Return the numbers of lost pods that are replaced while agents elsewhere wait; [] if all restart or stop."""
    all_stop = view.spec.suspend or gang.is_to_stop(view, status)
    all_start = first.reason in _OF_ALL_PODS or status.completed_nodes
    if all_stop or all_start or not view.spec.facts.restarts_in_place:
        return []
    # New pods that cannot ask would follow node 0, although another node has led. A new attempt begins with node 0.
    if leadership.leader(view.job, view.recorded).term > 1 and not view.settings.answers_agents:
        return []
    waiting = {p.place for p in view.active if p.deletion_requested_at is None and not p.has_failed}
    known = set(view.pods) | status.started
    lost = sorted((known - waiting).intersection(view.spec.members))
    ended = [p for p in view.known_pods.values() if p.place in lost and p.ended]
    messages = [termination_message.read_message(p.trainer.message) for p in ended]
    # An agent that ended together with its group cannot restart ranks in place, and the other agents end as well.
    group_ended = any(message is not None and message.ended for message in messages)
    # A waiting pod of the last group shows that no older group still trains.
    # In a partition the nodes of a group may be lost one by one while their ranks train.
    if group_ended or not leadership.in_last_group(view, status, waiting, lost):
        return []
    return lost


def _replaced(
    view: View, status: api.Status, state: api.State, settled: Settled, lost: list[int], what_others_do: str
) -> api.Status:
    numbers = {str(place): naming.replacement(status, place) + 1 for place in lost}
    status = replace(
        status,
        replacements={**status.replacements, **numbers},
        started_nodes=ranges.text(status.started - set(lost)),
    )
    status = leadership.after_loss(view, status, lost)
    names = ", ".join(naming.pod_name(view.job, status.attempt, place, numbers[str(place)]) for place in lost[:3])
    more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
    cost = charge(view, settled.verdict)
    where = from_step(status, kept=False)  # the pods that stay may have a later step in memory
    is_its = [view.spec.members.node_rank(place) for place in lost] == [settled.failure.node_rank]
    how = "takes its place" if is_its else "replaces a lost pod" if len(lost) == 1 else "replace the lost pods"
    text = f"{settled.text}; {names}{more} {how}{what_others_do} ({cost}){where}"
    return enter(status, state, reasons.REPLACING, text, view.now)


def triggers(view: View, status: api.Status) -> Iterator[tuple[Reason, api.JobFailure]]:
    """Yield (reason, failure) for each sign of a broken attempt, strongest first. `settle` later finds the cause."""
    ended = (*_failed(view, status), *_gone(view, status))
    yield from sorted(ended, key=lambda trigger: root_cause.precedence_of(trigger[1]))
    for pod in _needed(view, status):
        if pod.deletion_requested_at is not None and not view.goes_on(status):
            failure = failure_of(view, status, pod.place, pod.disruption or root_cause.STOPPED)
            word = shown(pod.disruption, root_cause.WORD_MAX)
            evidence = api.Evidence(precedence="NODE", disruption=word) if word else None
            yield reasons.DISRUPTED, replace(failure, evidence=evidence)
    for pod in _needed(view, status) if is_past(_config_error_at(view, status), view.now) else ():
        if root_cause.lacks_configuration(pod):
            failure = failure_of(view, status, pod.place, root_cause.CONFIG_ERROR)
            what = abridged(pod.trainer.message, root_cause.EXCEPTION_MAX)
            yield reasons.RANK_FAILED, replace(failure, exception=what)
    yield from _stalled(view, status)


def _failed(view: View, status: api.Status) -> Iterator[tuple[Reason, api.JobFailure]]:
    if failed := view.failed(status):
        # The operator has deleted no pod in this attempt, so a deletion by somebody else may explain the failure.
        pods = [*failed, *view.stopping]
        failure = root_cause.root_cause(context(view, status), pods)
        reason = reasons.NODE_LOST if failure.reason == "DeletionByPodGC" else reasons.RANK_FAILED
        yield reason, with_limit(view, with_last_step(status, failure))


def _gone(view: View, status: api.Status) -> Iterator[tuple[Reason, api.JobFailure]]:
    for pod in sorted((p for p in view.pods.values() if p.uid in view.lost), key=lambda p: p.place):
        yield reasons.NODE_LOST, failure_of(view, status, pod.place, root_cause.NODE_LOST)
    ran = status.started - status.completed
    for place in sorted(ran.intersection(view.spec.members) - set(view.pods)):
        yield reasons.RANK_FAILED, failure_of(view, status, place, root_cause.GONE)


def _needed(view: View, status: api.Status) -> list[Pod]:
    """Return the active pods that the attempt needs to continue."""
    only = view.participants(status) if view.trains_with_fewer(status) else set(view.spec.members)
    return [p for p in view.active if p.place in only]


def _stalled(view: View, status: api.Status) -> Iterator[tuple[Reason, api.JobFailure]]:
    finding = view.stall_finding
    place = None if finding is None else view.spec.members.place(finding.node_rank)
    if finding is None or finding.kind == "warning" or place is None or place not in view.pods:
        return
    if view.spec.facts.restarts_in_place and view.now < finding.until + AGENT_FIRST:
        return
    failure = failure_of(view, status, place, root_cause.STALLED)
    what = abridged(finding.what(), root_cause.EXCEPTION_MAX)
    # Only the first rank of a node reports, and this rank may be waiting for another rank of the node.
    rank = finding.rank if view.spec.facts.nproc_per_node == 1 else None
    yield reasons.STALLED, replace(failure, rank=rank, step=finding.step, exception=what)


def next_check(view: View, status: api.Status) -> dt.datetime | None:
    if status.state in (*TERMINAL, "Failing", "Suspended") or status.is_broken:
        return None
    stalls_at = stall.requeue_at(view.trackers, view.spec.stall, view.now)
    times = (stalls_at, _config_error_at(view, status))
    return min((t for t in times if t is not None and t > view.now), default=None)


def _config_error_at(view: View, status: api.Status) -> dt.datetime | None:
    return after(status.unconfigured_since, view.settings.config_error_seconds)


def _ending(view: View, text: str, failure: api.JobFailure) -> str:
    left = f"stopping {name_pods(view.active)}" if view.active else "all pods have ended"
    return f"{text}; {left}{_open_question(failure)}{pending.unreachable_nodes(view)}"


def _open_question(failure: api.JobFailure) -> str:
    return "" if root_cause.is_a_cause(failure) else "; waiting for the other ranks before deciding the cause"


def _going_on(view: View, settled: Settled, attempt: int) -> str:
    wait = settled.verdict.wait_seconds
    who = f"all {view.spec.pods} nodes" if view.spec.pods > 1 else "the node"
    when = f" in {wording.duration(wait)}" if wait else ""
    return f"{settled.text}; restarting {who}{when}: attempt {attempt}, {charge(view, settled.verdict)}"


def from_step(status: api.Status, *, kept: bool) -> str:
    """Return for example `, from step 500`; "" if no checkpoint was reported. kept: the checkpoint still exists."""
    step = saved_step(status)
    if step is None:
        return ""
    return f", from step {step}" if kept else f", last saved at step {step}"


def charge(view: View, verdict: rules.Verdict) -> str:
    history = verdict.history
    if verdict.charged_to == "application":
        used = budget.counted(history, budgets.limits(view.spec), view.now)
        return f"restart {used} of {view.spec.backoff_limit}"
    if verdict.charged_to == "stall":
        return f"stall {history.stall} of {budget.STALLS_MAX}"
    return f"not charged to backoffLimit; {history.infrastructure} so far"


def _why_it_stops(view: View, failure: api.JobFailure, verdict: rules.Verdict) -> tuple[Reason, str]:
    reason, text = _WHY_IT_STOPS[verdict.stop]
    if verdict.stop == "PermanentFailure" and any(
        r.action == "FailJob" and r.matches(failure.exit_code) for r in budgets.policy(view.spec)
    ):
        return reason, "failurePolicy says FailJob for this exit code"
    if verdict.stop == "PermanentFailure" and is_again(failure, view.settings.failed_before):
        return reason, "the same exception at the same line twice in a row, so the job is not retried"
    used = budget.counted(verdict.history, budgets.limits(view.spec), view.now)
    limit = f"{view.settings.limit_name} {view.spec.backoff_limit}"
    gave_up = f"gave up after {wording.count(used, 'restart')} ({limit})"
    return reason, text.format(
        gave_up=gave_up if used else f"{limit} allows no restart",
        charged=verdict.history.charged_in_a_row + 1,
        stalls=verdict.history.stall,
        uncharged=verdict.history.uncharged_in_a_row,
    )
