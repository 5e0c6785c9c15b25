"""The rules of an attempt that begins: its pods are made, get their nodes, and start their trainers."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import replace as replaced

from msgspec.structs import replace

from ddpjob_operator.failures import sentences
from ddpjob_operator.job import api, podspec, ranges, reasons, wording
from ddpjob_operator.job.reasons import Reason
from ddpjob_operator.job.status import is_restarted
from ddpjob_operator.job.times import after, earliest, is_past, start_back_off_seconds
from ddpjob_operator.observed.cluster import Pod
from ddpjob_operator.plan import gang, invalid_spec, lifecycle, pending
from ddpjob_operator.plan.actions import Action, CreateGroup, CreatePod, CreateService, Decision, restart_grace_seconds
from ddpjob_operator.plan.late_nodes import LAST_CALL_SECONDS
from ddpjob_operator.plan.transitions import enter, new_attempt
from ddpjob_operator.plan.view import View, is_over, name_pods
from ddpjob_operator.pods import naming

# Waiting reasons of the kubelet after which it tries again without success. ContainerCreating and PodInitializing are
# not among them, because they end by themselves.
CANNOT_START = frozenset(
    "ErrImagePull ImagePullBackOff ErrImageNeverPull InvalidImageName RegistryUnavailable ImageInspectError "
    "CreateContainerConfigError CreateContainerError RunContainerError CrashLoopBackOff".split()
)


def attempt_still_ending(view: View, status: api.Status) -> Decision | None:
    """No attempt starts while a process of the one before may run: two groups would train into one checkpoint."""
    if not view.older:
        return None
    over = [p for p in view.older if is_over(p, view.recorded)]
    broken = view.recorded.last_failure.attempt if view.recorded.last_failure else None
    soft = view.stop([p for p in over if p.attempt != broken], None)
    hard = view.stop([p for p in over if p.attempt == broken], restart_grace_seconds(view.spec))
    if wait := backing_off(view, status):
        return Decision(status, (*soft, *hard), wait.requeue_at)
    of = "of the attempt before " if any(p.attempt < status.attempt for p in view.older) else ""
    text = f"attempt {status.attempt} waits for {name_pods(view.older)} {of}to stop"
    return _waiting(view, status, "Pending", reasons.WAITING_FOR_OLD_PODS, text, (*soft, *hard))


def rescaled(view: View, status: api.Status) -> Decision | None:
    """spec.nodes of an elastic job has changed: its pods stop with their full grace, as for a suspension, and the next
    attempt has the new number. A running torchrun cannot take in more nodes than it was told of, and one whose peers
    are taken away may hang. Once some have completed the training is about to end, and is not begun again."""
    if view.wanted_nodes == view.spec.nodes or view.problems or gang.is_forgotten(view, status):
        return None
    if status.completed_nodes:
        return None
    # Within a back-off its end stands: what it keeps from being tried too often is not the number of nodes.
    wait = backing_off(view, status)
    later = new_attempt(status, (status.attempt_time if wait else None) or view.now)
    was = f"spec.nodes is {view.wanted_nodes}, and attempt {status.attempt} has {view.spec.nodes}"
    again = f" at {wording.clock(later.attempt_time)}" if wait and later.attempt_time else ""
    text = f"{was}: all nodes stop, and start again as attempt {later.attempt}{again}"
    return Decision(enter(later, "Restarting", reasons.RESCALED, text, view.now))


def start_overdue(view: View, status: api.Status) -> Decision | None:
    """Not all nodes ran in time: release them all, because two half-placed jobs would block each other for ever."""
    if not is_past(view.start_deadline(status), view.now):
        return None
    retries = status.start_retries + 1
    again = view.now + dt.timedelta(seconds=start_back_off_seconds(view.job.metadata.uid, retries))
    count = sum(p.trainer.state == "running" for p in view.pods.values())
    text = (
        f"{count} of {view.spec.nodes} nodes ran within startDeadlineSeconds: {view.spec.start_deadline_seconds}; "
        f"all are released, next try at {wording.clock(again)}"
    )
    later = replace(new_attempt(status, again), start_retries=retries)
    return Decision(enter(later, "Pending", reasons.START_BACK_OFF, text, view.now))


def backing_off(view: View, status: api.Status) -> Decision | None:
    """The next attempt is in the future."""
    if status.attempt_time is None or view.now >= status.attempt_time:
        return None
    return Decision(status, requeue_at=earliest(status.attempt_time, view.active_deadline(status)))


def no_pod_can_be_made(view: View, status: api.Status) -> Decision | None:
    """What a pod is made from cannot be read: the pods that run go on, and none is added."""
    if not invalid_spec.keeps_pods_from_being_made(view.problems) or not _to_create(view, status):
        return None
    text = f"no pod can be made while the spec is invalid: {invalid_spec.sentence(view.problems)}"
    return _waiting(view, status, "Pending", reasons.INVALID_SPEC, text)


def gang_unavailable(view: View, status: api.Status) -> Decision | None:
    """The job asks for a gang, and nobody here would place one: a part of its pods could hold nodes for ever."""
    why = gang.unavailable(view, status)
    if not why or not _to_create(view, status):
        return None
    return _waiting(view, status, "Pending", reasons.GANG_UNAVAILABLE, f"no pod is made without its gang: {why}")


def name_taken(view: View, status: api.Status) -> Decision | None:
    """A conflicting object is never taken over; what a deleted job of the same name left goes away by itself."""
    if not view.conflicts or not _to_create(view, status):
        return None
    first = view.conflicts[0]
    more = f" and {len(view.conflicts) - 1} more" if len(view.conflicts) > 1 else ""
    if all(c.of_deleted_job for c in view.conflicts):
        text = f"waiting for {first.kind.lower()} {first.name}{more} of the deleted job of this name"
        return _waiting(view, status, "Pending", reasons.WAITING_FOR_DELETED_JOB, text)
    text = f"a {first.kind} named {first.name}{more} is not this job's. Delete it, or give the job another name"
    return _waiting(view, status, "Pending", reasons.NAME_TAKEN, text)


def create_refused(view: View, status: api.Status) -> Decision | None:
    """The API server refuses an object; its own sentence is shown, and another try follows after a while."""
    missing = _to_create(view, status)
    wanted = [a for a in missing if isinstance(a, CreatePod)]
    named = {("Pod", naming.pod_name(view.job, a.attempt, a.place, a.replacement)) for a in wanted}
    named |= set() if view.seen.service else {("Service", view.job.metadata.name)}
    groups = [(view.settings.adapters[a.adapter], a.attempt) for a in missing if isinstance(a, CreateGroup)]
    named |= {(adapter.resource, adapter.group_name(view.job, attempt)) for adapter, attempt in groups}
    refused = [r for r in view.seen.refusals if (r.kind, r.name) in named and r.retry_at > view.now]
    if not refused:
        return None
    first = min(refused, key=lambda r: (r.retry_at, r.name))
    more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
    text = f"{first.name}{more} was refused: {first.message}"
    return _waiting(view, status, "Pending", reasons.CREATE_REFUSED, text, again_at=first.retry_at)


def nodes_missing(view: View, status: api.Status) -> Decision | None:
    """Create what is missing; the pod of a node that has run is never created again in its attempt."""
    missing = _to_create(view, status)
    if not missing:
        return None
    # Of what was refused and is tried again the API server's message stands until it has answered otherwise.
    retried = status.reason == reasons.CREATE_REFUSED.name and bool(view.seen.refusals)
    only_group = all(isinstance(action, CreateGroup) for action in missing)
    if retried or only_group or status.state in ("Starting", "Running"):
        return Decision(status, missing, earliest(view.active_deadline(status), view.start_deadline(status)))
    count = sum(isinstance(action, CreatePod) for action in missing)
    text = f"attempt {status.attempt}: creating {count} of {view.spec.nodes} pods"
    more = count + len(ranges.parse(status.started_nodes) | set(view.pods)) < view.spec.nodes
    return _waiting(view, status, "Pending", reasons.CREATING_PODS, text, missing, view.now if more else None)


def avoidance_over(view: View, status: api.Status) -> Decision | None:
    """A pod is unschedulable, and was made when a node was avoided that no longer is: all pods are made again, because
    the affinity of a pod never changes."""
    since = status.attempt_time
    over = [a.node for a in status.avoided_nodes if since is not None and since < a.until <= view.now]
    waiting = [p for p in view.pods.values() if p.trainer.state == "waiting" and p.unschedulable]
    if not over or not waiting or view.trains_with_fewer(status) or gang.names_nodes(view, status):
        return None
    text = f"{', '.join(over)} is no longer avoided: all pods are created again"
    later = new_attempt(status, view.now)
    return Decision(enter(later, "Pending", reasons.CREATING_PODS, text, view.now))


def waiting_for_nodes(view: View, status: api.Status) -> Decision | None:
    """Some trainers do not run yet."""
    not_running = [pod for _, pod in sorted(view.pods.items()) if pod.trainer.state == "waiting"]
    if not not_running:
        return None
    avoided = earliest(*(a.until for a in status.avoided_nodes if a.until > view.now))
    unschedulable = any(p.unschedulable for p in not_running)
    again_at = pending.next_creating_text_at(view, status, not_running)
    again_at = earliest(avoided, pending.waited_for_nodes(view, status)[1]) if unschedulable else again_at
    return _waiting(view, status, *_why_waiting(view, status, not_running), again_at=again_at)


def _waiting(
    view: View,
    status: api.Status,
    state: api.State,
    reason: Reason,
    text: str,
    actions: tuple[Action, ...] = (),
    again_at: dt.datetime | None = None,
) -> Decision:
    """Not all nodes run yet. After a failure that is a restart until they do, and the message names the failure."""
    last_call_at = after(status.attempt_time, LAST_CALL_SECONDS) if view.trains_with_fewer(status) else None
    comes_soon = reason in (reasons.CREATING_PODS, reasons.STARTING_TRAINERS)
    if last_call_at is not None and (not comes_soon or status.running_time or view.now >= last_call_at):
        decision = lifecycle.running(view, status, text)
        return replaced(decision, actions=actions, requeue_at=earliest(again_at, decision.requeue_at))
    failure = status.last_failure
    if status.state == "Restarting":
        cause = f"after {sentences.short(failure)}: " if failure is not None and is_restarted(status) else ""
        state, text = "Restarting", f"{cause}{text}"
    entered = enter(status, state, reason, text, view.now)
    deadlines = (view.active_deadline(status), view.start_deadline(status))
    return Decision(entered, actions, earliest(again_at, last_call_at, *deadlines))


def _to_create(view: View, status: api.Status) -> tuple[Action, ...]:
    if view.is_elastic and status.completed_nodes:
        return ()  # the training has ended: a new node would find no group to join
    known = ranges.parse(status.started_nodes) | set(view.pods)
    avoid = () if gang.names_nodes(view, status) else _avoided(view, status)
    missing = [place for place in view.members if place not in known]
    if view.is_elastic and view.members.leader in missing:
        missing = [view.members.leader]  # first in the scheduler's queue: no group trains without it
    pods = [CreatePod(status.attempt, place, avoid, naming.replacement(status, place)) for place in missing]
    unplaced = any(p.live and not p.node for p in view.pods.values())
    groups = gang.to_create(view, status) if pods or unplaced else ()
    return (*(() if view.seen.service else (CreateService(),)), *groups, *pods)


def _avoided(view: View, status: api.Status) -> tuple[str, ...]:
    return tuple(sorted(a.node for a in status.avoided_nodes if a.until > view.now))


def _why_waiting(view: View, status: api.Status, pods: Sequence[Pod]) -> tuple[api.State, Reason, str]:
    total = view.spec.nodes
    unschedulable = [p for p in pods if p.unschedulable]
    if unschedulable and gang.adapter_of(view, status) is not None:
        unplaced, why = sum(not p.node for p in pods), pending.why_unschedulable(unschedulable)
        text = gang.why_waiting(view, status, unplaced, why)
        return "Pending", reasons.UNSCHEDULABLE, f"Unschedulable: {text}"
    if unschedulable:
        where = "; onePodPerNode keeps them apart" if total > 1 and podspec.gpus(view.spec.template) else ""
        why, (waited, _) = pending.why_unschedulable(unschedulable), pending.waited_for_nodes(view, status)
        text = f"Unschedulable: {len(unschedulable)} of {total} pods: {why}{where}{waited}"
        return "Pending", reasons.UNSCHEDULABLE, text
    if stuck := [p for p in pods if p.trainer.reason in CANNOT_START]:
        first = stuck[0]
        why = f"{first.trainer.reason}: {first.trainer.message}"
        return "Pending", reasons.CANNOT_START, f"{len(stuck)} of {total} pods cannot start: {first.name}: {why}"
    text = f"waiting for {pending.name_nodes([p.place for p in pods])}"
    if not view.trains_with_fewer(status):
        text = f"{total - len(pods)} of {total} nodes are running; {text}"
    creating, is_long = pending.creating(view, status, pods)
    if creating and is_long:
        return "Pending", reasons.CANNOT_START, f"{text}; {creating}"
    return "Starting", reasons.STARTING_TRAINERS, f"{text}; {creating}" if creating else text
