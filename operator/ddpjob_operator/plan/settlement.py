"""Settles a failure once no more evidence can come: its cause, what it counts against, and if the job continues. Until
then the pods stop, but the log that explains the failure is kept."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from ddpjob_core import budget, rules
from ddpjob_core.failures import abridged
from ddpjob_operator.failures import root_cause, sentences, termination_message
from ddpjob_operator.failures.redaction import shown
from ddpjob_operator.job import api, budgets, podspec
from ddpjob_operator.observed.cluster import Pod
from ddpjob_operator.plan.actions import DeletePod, EndPod, Settings
from ddpjob_operator.plan.transitions import with_failure
from ddpjob_operator.plan.view import View
from ddpjob_operator.pods import naming

# Failures on one node within `avoid_node_seconds`, after which a job avoids the node. One failure may be chance.
FAILURES_TO_AVOID = 2
AVOIDED_MAX = 10
# Seconds for a kubelet to receive the deadline of a pod whose log is kept, and to report that the pod has ended.
KUBELET_SECONDS = 10
# Seconds; a job with an hour of grace to save must not wait that long for a rank that hangs.
GRACE_SECONDS_MAX = 60


@dataclass(frozen=True)
class Settled:
    cause: api.JobFailure
    """The cause as recorded while pods are still being stopped."""
    failure: api.JobFailure
    verdict: rules.Verdict

    @property
    def text(self) -> str:
        return sentences.sentence(self.failure)

    def status(self, view: View, status: api.Status) -> api.Status:
        status = with_failure(status, self.failure)
        if not self.verdict.restart:
            return status
        return replace(
            status,
            furthest_step=max(status.furthest, self.failure.step or 0) if status.furthest is not None else None,
            restarts=budgets.restarts(self.verdict.history),
            avoided_nodes=_avoided(status, view.settings, view.now, _bad_nodes(view)),
        )


def settle(view: View, status: api.Status, first: api.JobFailure, *, others_go_on: bool = False) -> Settled:
    """Return the cause behind the failure recorded first, the limit that it counts against, and if the job restarts.
    others_go_on: True if the other nodes of an elastic job train on."""
    cause, failure_class = _cause(view, status, first)
    if others_go_on and failure_class == "application" and root_cause.is_own(cause):
        failure_class = "infrastructure"  # an agent or an init container: failed ranks are the leader's to restart
    history, attempt = budgets.history(status), _attempt(view, status, cause)
    never_starts = root_cause.cannot_start(cause) and not _has_trained_before(status)
    if failure_class == "infrastructure" and never_starts and history.uncharged_in_a_row >= rules.STARTS_MAX:
        failure_class = "permanent"  # enough other nodes were tried
    failure_class = rules.of_complaints(failure_class, history, attempt)
    policy, outside = budgets.policy(view.spec), rules.from_outside(root_cause.read_back(cause))
    failure_class = rules.with_policy(failure_class, cause.exit_code, policy, from_outside=outside)
    if failure_class == "application" and _torchrun_gave_up(view, cause):
        given = view.spec.facts.max_restarts
        history = budget.with_application_spent(history, budgets.limits(view.spec), view.now, given)
    verdict = rules.judge(failure_class, history, attempt, budgets.limits(view.spec), view.now)
    if verdict.restart and not attempt.made_a_new_step and _is_repeated(view, cause, failure_class):
        failure_class = "permanent"
        verdict = rules.judge(failure_class, history, attempt, budgets.limits(view.spec), view.now)
    charged_to = (verdict.charged_to or "") if verdict.restart else ""
    return Settled(cause, replace(cause, failure_class=failure_class, charged_to=charged_to), verdict)


def _is_repeated(view: View, cause: api.JobFailure, failure_class: rules.Class) -> bool:
    is_wanted = any(rule.matches(cause.exit_code) for rule in budgets.policy(view.spec))
    return failure_class in rules.OWN and not is_wanted and is_again(cause, view.settings.failed_before)


def is_again(failure: api.JobFailure, before: api.JobFailure | None) -> bool:
    """True if a process raised an exception of the same type at the same line as before the last restart. The restart
    began this attempt or was in place."""
    if before is None or before.attempt not in (failure.attempt - 1, failure.attempt):
        return False
    return rules.is_again(root_cause.read_back(failure), root_cause.read_back(before))


def _torchrun_gave_up(view: View, cause: api.JobFailure) -> bool:
    """True if torchrun of an elastic job ended with 1 for a failed rank, after all restarts that it may make."""
    pod = view.known_pod(cause.node_rank) if view.is_elastic and not view.spec.facts.restarts_in_place else None
    return pod is not None and pod.name == cause.pod and pod.trainer.exit_code == 1 and root_cause.is_own(cause)


def _cause(view: View, status: api.Status, first: api.JobFailure) -> tuple[api.JobFailure, rules.Class]:
    """Return the cause, judged by the failure recorded first and by all failed pods, gone or not."""
    lost = [p for p, pod in view.pods.items() if pod.uid in view.lost_by_node]
    # A program on a slow volume may not be found until minutes after the pods have started.
    is_start = rules.cannot_start(root_cause.read_back(first))
    trains_after = budget.RESET_AFTER_SECONDS if is_start else budget.TRAINED_SECONDS
    failure, failure_class = root_cause.settle(
        context(view, status),
        first,
        view.failed(status),
        stepped=status.first_step_time is not None or _ran_seconds(view, status) >= trains_after,
        trained=_has_trained_before(status),
        nodes=view.spec.pods,
        lost=[failure_of(view, status, place, root_cause.NODE_LOST) for place in lost],
        early=_completed_early(view, status),
        steps={rank: tracker.step for rank, tracker in view.trackers.items()},
    )
    failure = _with_silent_node(view, with_limit(view, with_log(view, failure)), first)
    return replace(with_last_step(status, failure), failure_class=""), failure_class


def with_log(view: View, failure: api.JobFailure) -> api.JobFailure:
    pod = view.known_pod(failure.node_rank)
    is_wanted = failure.reason in root_cause.KEEPS_ITS_LOG and not failure.log_tail and view.settings.keep_log_tail
    # Without an exit code the message belongs to the pod and is no log.
    if pod is None or not is_wanted or pod.name != failure.pod or pod.trainer.exit_code is None:
        return failure
    return replace(failure, log_tail=root_cause.tail_of(pod))


def stop_but_keep_log(
    view: View, first: api.JobFailure | None, pods: Sequence[Pod], grace_seconds: int | None
) -> tuple[tuple[DeletePod | EndPod, ...], dt.datetime | None]:
    """Return the actions that stop these pods, and when to check again. first: the failure that is the reason. The one
    pod whose log explains a stall or a deadline keeps its object, so that `kubectl logs` still works.

    A kubelet ends a pod past its activeDeadlineSeconds as a delete would (SIGTERM, grace, SIGKILL), but keeps the
    object, as Failed with reason DeadlineExceeded. The API server lets this field be set or lowered on a running pod
    (pkg/apis/core/validation, ValidatePodUpdate)."""
    kept = first.pod if first is not None and first.reason in root_cause.KEEPS_ITS_LOG else None
    last = next(
        (p for p in pods if p.name == kept and p.deletion_requested_at is None and p.uid not in view.lost), None
    )
    if first is None or last is None:
        return view.stop(pods, grace_seconds), None
    grace = view.spec.facts.grace_seconds
    grace = min(grace, GRACE_SECONDS_MAX) if first.reason == root_cause.STALLED else grace
    # The clock may have been set back after the failure; times.py ensures that state_time is not in the future.
    until = min(first.time, view.recorded.state_time or first.time) + dt.timedelta(seconds=KUBELET_SECONDS + grace)
    if view.now >= until:
        # Neither the kubelet nor the process has answered: give up the log and delete the pod.
        return view.stop(pods, view.spec.grace_after_failure), None
    others = view.stop([p for p in pods if p is not last], grace_seconds)
    end = EndPod(last.name, last.uid, view.spec.grace_after_failure if grace_seconds is not None else None)
    return (*others, *(() if last.deadline_set else (end,))), until


def _with_silent_node(view: View, failure: api.JobFailure, first: api.JobFailure) -> api.JobFailure:
    """Add to a failure the node that was silent for a while, if the ranks report only lost peers."""
    silent = (pod.node for _, pod in sorted(view.known_pods.items()) if pod.was_silent)
    node = root_cause.evidence_of(first).silent_node or shown(next(silent, ""), root_cause.WORD_MAX)
    if not node or failure.reason != root_cause.PEER_LOST:
        return failure
    return replace(failure, evidence=replace(root_cause.evidence_of(failure), silent_node=node))


def _bad_nodes(view: View) -> list[str]:
    pods = view.known_pods
    messages = (termination_message.read_message(p.trainer.message) for p in pods.values() if p.ended)
    node_ranks = {node_rank for message in messages if message for node_rank in message.failure.bad_nodes}
    bad = (pods.get(place) for node_rank, place in enumerate(view.spec.members) if node_rank in node_ranks)
    return sorted({pod.node for pod in bad if pod is not None and pod.node})


def _avoided(
    status: api.Status, settings: Settings, now: dt.datetime, bad_nodes: Sequence[str]
) -> list[api.AvoidedNode]:
    node = status.failures[-1].node if status.failures else ""
    # Avoid a node again if the job fails there after avoidance was lifted, because another node may be free by now.
    again = {*bad_nodes, *(a.node for a in status.avoided_nodes if a.lifted and a.node == node)}
    kept = [a for a in status.avoided_nodes if a.until > now and a.node not in again]
    until = now + dt.timedelta(seconds=settings.avoid_node_seconds)
    kept += [api.AvoidedNode(node=node, until=until, message="the pre-flight found it bad") for node in bad_nodes]
    since = now - dt.timedelta(seconds=settings.avoid_node_seconds)
    count = sum(bool(node) and f.node == node and f.time > since for f in status.failures)
    if count >= FAILURES_TO_AVOID and node not in {a.node for a in kept}:
        kept.append(api.AvoidedNode(node=node, until=until, message=f"{count} failures of this job"))
    return kept[-AVOIDED_MAX:]


def _completed_early(view: View, status: api.Status) -> api.JobFailure | None:
    """Return the first node that completed early, because its end explains the lost connections of others. A pod
    created afterwards does not count, because the two were never in one group."""
    if view.is_elastic and view.is_enough(status.completed):
        return None  # enough nodes completed; the group may have gone on without a lost node
    pods, completed = view.known_pods, status.completed.intersection(view.spec.members)
    peers = [pod for place, pod in pods.items() if place not in completed]
    places = [n for n in completed if n not in pods or not any(_was_made_after(peer, pods[n]) for peer in peers)]
    if not places:
        return None
    ends = {place: (place in pods and pods[place].trainer.ended_at) or view.now for place in places}
    first = min(places, key=lambda place: (ends[place], place))
    failure = failure_of(view, status, first, root_cause.ENDED_EARLY)
    node = pods[first].node if first in pods else ""
    # status.progress has rank 0's step; the step of another rank is only in its own reports.
    step = failure.step if first == view.leader else None
    return replace(failure, node=node, step=step, time=ends[first])


def _was_made_after(pod: Pod, ended: Pod) -> bool:
    """True if a pod was created after another had ended, by the order in which the operator saw them. If that is
    unknown, compare durations, each by one clock, because clocks of nodes may differ by more than a short run."""
    if (ended.ended_seen or ended.first_seen) < pod.first_seen:
        return True
    at, before, accepted, over = pod.scheduled_at, ended.scheduled_at, ended.accepted_at, ended.trainer.ended_at
    if at is None or before is None or accepted is None or over is None:
        return False
    return at > before + (over - accepted)


def _has_trained_before(status: api.Status) -> bool:
    """True if an earlier attempt has trained, so image, command and modules were correct once."""
    if status.furthest_step:
        return True
    begun, ended = status.running_time, status.state_time
    in_this_attempt = (ended - begun).total_seconds() if status.state == "Restarting" and begun and ended else 0.0
    spent = status.goodput or api.Goodput()
    return spent.productive_seconds + spent.unreported_seconds - in_this_attempt >= budget.TRAINED_SECONDS


def _attempt(view: View, status: api.Status, failure: api.JobFailure) -> budget.Attempt:
    progress = status.attempt_progress
    step = max(progress.step if progress is not None else 0, failure.step or 0)  # the last reports may be missing
    # Lost connections are explained if a node did not report for a while, or if too few nodes ever ran.
    # If too few nodes ran, a rank waited in vain for a node that has no GPU yet.
    is_explained = root_cause.evidence_of(failure).silent_node or not view.is_enough(status.started)
    return budget.Attempt(
        made_a_new_step=step > (status.furthest_step or 0),
        reports_steps=status.furthest is not None,
        ran_seconds=_ran_seconds(view, status),
        only_complaints=failure.reason == root_cause.PEER_LOST and not is_explained,
    )


def _ran_seconds(view: View, status: api.Status) -> float:
    running = status.running_time
    return 0.0 if running is None else max(0.0, (view.now - running).total_seconds())


def with_limit(view: View, failure: api.JobFailure) -> api.JobFailure:
    if failure.init_container:
        return failure  # the memory limit of the trainer does not apply to an init container
    limit = podspec.limits(view.spec.template).get("memory")
    if failure.reason != "OOMKilled" or limit is None or failure.exception.startswith(root_cause.MEMORY):
        return failure
    text = f"{root_cause.MEMORY}{limit}" + (f"; {failure.exception}" if failure.exception else "")
    return replace(failure, exception=abridged(text, root_cause.EXCEPTION_MAX))


def with_last_step(status: api.Status, failure: api.JobFailure) -> api.JobFailure:
    progress = status.attempt_progress
    if progress is None:
        return failure
    step = progress.step if failure.step is None else failure.step
    generation = progress.generation if failure.generation is None else failure.generation
    return replace(failure, step=step, generation=generation)


def failure_of(view: View, status: api.Status, place: int, reason: str) -> api.JobFailure:
    """Return a failure with this reason of a pod that may be gone, so nothing is read from its containers."""
    pod = view.pods.get(place)
    failure = api.JobFailure(
        attempt=status.attempt,
        rank=view.spec.rank_of_place(place),
        node_rank=view.spec.members.node_rank(place),
        pod=pod.name if pod else naming.present_pod_name(view.job, status, place),
        node=pod.node if pod else "",
        reason=reason,
        time=view.now,
    )
    return with_last_step(status, failure)


def context(view: View, status: api.Status) -> root_cause.Context:
    port = status.master_addr.rpartition(":")[2]
    facts = view.spec.facts
    return root_cause.Context(
        attempt=status.attempt,
        members=view.spec.members,
        rank_of=lambda place: view.spec.rank_of_place(place),
        now=view.now,
        keep_log_tail=view.settings.keep_log_tail,
        port=int(port) if port.isdecimal() else None,
        # A killed torchrun may have completed early, but only if all nodes ran at the same time.
        # If the nodes never ran together, SIGKILL only means that stopping torchrun took too long.
        torchrun=facts.is_launcher_alone and not facts.restarts_in_place and status.running_time is not None,
    )
