"""The rules of an attempt's start: create its pods, wait for their nodes and for their trainers."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Sequence
from dataclasses import replace as replaced

from msgspec.structs import replace

from ddpjob_operator.failures import sentences
from ddpjob_operator.job import api, ranges, reasons, wording
from ddpjob_operator.job.reasons import Reason
from ddpjob_operator.job.times import after, earliest, is_past, start_back_off_seconds
from ddpjob_operator.observed.cluster import ConflictingObject, Pod
from ddpjob_operator.plan import gang, invalid_job, leadership, lifecycle, pending
from ddpjob_operator.plan.actions import Action, CreateGroup, CreatePod, CreateService, Decision
from ddpjob_operator.plan.record import LAST_CALL_SECONDS
from ddpjob_operator.plan.transitions import enter, new_attempt, with_new_ranks
from ddpjob_operator.plan.view import View, is_over, name_pods, owned
from ddpjob_operator.pods import build, naming

# The kubelet's waiting reasons after which its retries rarely succeed.
# ContainerCreating and PodInitializing end by themselves.
CANNOT_START = frozenset(
    "ErrImagePull ImagePullBackOff ErrImageNeverPull InvalidImageName RegistryUnavailable ImageInspectError "
    "CreateContainerConfigError CreateContainerError RunContainerError CrashLoopBackOff".split()
)

# Minimum seconds between two replacements of the same node's pod while other nodes are training.
NEXT_POD_SECONDS = 10


def attempt_still_ending(view: View, status: api.Status) -> Decision | None:
    """Start no attempt while a process of the previous attempt may be running, because both write one checkpoint."""
    if not view.older:
        return None
    over = [p for p in view.older if is_over(p, view.recorded)]
    broken = view.recorded.last_failure.attempt if view.recorded.last_failure else None
    soft = view.stop([p for p in over if p.attempt != broken], None)
    hard = view.stop([p for p in over if p.attempt == broken], view.spec.grace_after_failure)
    if wait := backing_off(view, status):
        return Decision(status, (*soft, *hard), wait.requeue_at)
    of = "of the attempt before " if any(p.attempt < status.attempt for p in view.older) else ""
    text = f"attempt {status.attempt} waits for {name_pods(view.older)} {of}to stop"
    return _waiting(view, status, "Pending", reasons.WAITING_FOR_OLD_PODS, text, (*soft, *hard))


def rescaled(view: View, status: api.Status) -> Decision | None:
    """Change the size of an elastic job if spec.nodes changed, or the number that its queue has admitted. torchrun
    accepts no more nodes than its maximum and may hang without peers, so its job restarts, with full grace. Once some
    nodes have completed, training is about to end. A leader that was scaled away ends first: the next pod at its place
    would lead in its term."""
    if view.wanted_nodes == view.spec.nodes or view.problems or gang.is_forgotten(view, status):
        return None
    if status.completed_nodes or leadership.leader(view.job, status).place not in view.spec.members:
        return None
    now = f"spec.nodes is {view.wanted_nodes}"
    if view.wanted_nodes < view.asked_nodes:
        now = f"the queue has admitted {wording.count(view.wanted_nodes, 'node')}"
    was = f"{now}, and attempt {status.attempt} has {view.spec.nodes}"
    if view.spec.facts.resizes_in_place:
        return Decision(_resized(view, status, was))
    # Keep the end of a back-off: it was started by a failure, not by the change of spec.nodes.
    wait = backing_off(view, status)
    later = new_attempt(status, (status.attempt_time if wait else None) or view.now)
    again = f" at {wording.clock(later.attempt_time)}" if wait and later.attempt_time else ""
    text = f"{was}: all nodes stop, and start again as attempt {later.attempt}{again}"
    return Decision(enter(later, "Restarting", reasons.RESCALED, text, view.now))


def _resized(view: View, status: api.Status, was: str) -> api.Status:
    """Return the status with another number of nodes in the same attempt: pods with higher numbers stop as for a
    suspension (view.removed), so all ranks save at one step, and the other nodes continue. New pods join later."""
    removed = {place for place in view.spec.members if place >= view.wanted_nodes}
    known = removed & (status.started | set(view.pods))
    # A later pod at this place gets another name.
    numbers = {str(place): naming.replacement(status, place) + 1 for place in known}
    later = replace(
        status,
        attempt_nodes=view.wanted_nodes,
        starting_since=view.now,  # perhaps no node is left that has started
        replacements={**status.replacements, **numbers},
        started_nodes=ranges.text(status.started - removed),
    )
    what = "new nodes join the others" if not removed else "the others go on without the nodes above it"
    return enter(later, status.state or "Pending", reasons.RESCALED, f"{was}: {what}", view.now)


def start_overdue(view: View, status: api.Status) -> Decision | None:
    """Release all pods if not all nodes ran in time, because two half-placed jobs would block each other forever."""
    if not is_past(view.start_deadline(status), view.now):
        return None
    retries = status.start_retries + 1
    again = view.now + dt.timedelta(seconds=start_back_off_seconds(view.job.metadata.uid, retries))
    count = sum(p.trainer.state == "running" for p in view.pods.values())
    text = (
        f"{count} of {view.spec.pods} nodes ran within startDeadlineSeconds: {view.spec.start_deadline_seconds}; "
        f"all pods are deleted, next try at {wording.clock(again)}"
    )
    # Allow avoided nodes again: startDeadlineSeconds may be shorter than the wait after which avoidance is lifted.
    later = _lifted(status, view.now) if _unschedulable(view) else status
    later = replace(new_attempt(later, again), start_retries=retries, unconfigured_since=status.unconfigured_since)
    return Decision(enter(later, "Pending", reasons.START_BACK_OFF, text, view.now))


def backing_off(view: View, status: api.Status) -> Decision | None:
    if status.attempt_time is None or view.now >= status.attempt_time:
        return None
    return Decision(status, requeue_at=earliest(status.attempt_time, view.active_deadline(status)))


def nodes_missing(view: View, status: api.Status) -> Decision | None:
    """Create missing objects, unless something prevents it. Never create a pod again for a node that has run in this
    attempt. Running pods continue in any case."""
    missing = _to_create(view, status)
    if not missing and (later := {at: place for place in _absent(view, status) if (at := _waits(view, status, place))}):
        at = min(later)
        text = f"node {later[at]} gets its next pod at {wording.clock(at)}"
        return _waiting(view, status, "Pending", reasons.CREATING_PODS, text, again_at=at)
    if not missing:
        return None
    if obstacle := next(_obstacles(view, status, missing), None):
        reason, text, again_at = obstacle
        return _waiting(view, status, "Pending", reason, text, again_at=again_at)
    # Keep the API server's message about a refused object until a retry gets a different answer.
    retried = status.reason == reasons.CREATE_REFUSED.name and bool(view.seen.refusals)
    only_group = all(isinstance(action, CreateGroup) for action in missing)
    if retried or only_group or status.state in ("Starting", "Running"):
        return Decision(status, missing, earliest(view.active_deadline(status), view.start_deadline(status)))
    count = sum(isinstance(action, CreatePod) for action in missing)
    text = f"attempt {status.attempt}: creating {count} of {view.spec.pods} pods"
    more = count + len(status.started | set(view.pods)) < view.spec.pods
    return _waiting(view, status, "Pending", reasons.CREATING_PODS, text, missing, view.now if more else None)


def _obstacles(
    view: View, status: api.Status, missing: Sequence[Action]
) -> Iterator[tuple[Reason, str, dt.datetime | None]]:
    """Yield what prevents the missing objects, the first obstacle first: reason, message, and when to try again."""
    if invalid_job.keeps_pods_from_being_made(view.problems):
        text = f"no pod can be created while the spec is invalid: {invalid_job.sentence(view.problems)}"
        yield reasons.INVALID_SPEC, text, None
    if why := gang.unavailable(view, status):  # some pods without their gang could hold nodes forever
        yield reasons.GANG_UNAVAILABLE, f"no pod is created without its gang: {why}", None
    if view.conflicts:
        yield *_name_taken(view.conflicts), None
    refusals = [r for r in view.seen.refusals if r.retry_at > view.now]
    named = _names(view, missing) if refusals else set()
    if refused := [r for r in refusals if (r.kind, r.name) in named]:
        first = min(refused, key=lambda r: (r.retry_at, r.name))
        more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        yield reasons.CREATE_REFUSED, f"{first.name}{more} was refused: {first.message}", first.retry_at


def _names(view: View, missing: Sequence[Action]) -> set[tuple[str, str]]:
    """Return kind and name of each object that is to be created."""
    pods = [a for a in missing if isinstance(a, CreatePod)]
    groups = [(view.settings.adapters[a.adapter], a.attempt) for a in missing if isinstance(a, CreateGroup)]
    named = {("Pod", naming.pod_name(view.job, a.attempt, a.place, a.replacement)) for a in pods}
    named |= {(adapter.resource, adapter.group_name(view.job, attempt)) for adapter, attempt in groups}
    return named if view.seen.service else {("Service", view.job.metadata.name), *named}


def _name_taken(conflicts: Sequence[ConflictingObject]) -> tuple[Reason, str]:
    """Return why no object is created. Another owner's object is never taken over; a deleted job's disappear soon."""
    first = conflicts[0]
    more = f" and {len(conflicts) - 1} more" if len(conflicts) > 1 else ""
    if all(c.of_deleted_job for c in conflicts):
        text = f"waiting for the deletion of {first.kind.lower()} {first.name}{more} of the deleted job of this name"
        return reasons.WAITING_FOR_DELETED_JOB, text
    text = f"a {first.kind} named {first.name}{more} is not this job's. Delete it, or give the job another name"
    return reasons.NAME_TAKEN, text


def avoidance_over(view: View, status: api.Status) -> Decision | None:
    """Create an unschedulable pod again if its node is no longer avoided, or if the pod fits nowhere else."""
    waiting = _unschedulable(view)
    if not waiting or view.trains_with_fewer(status) or gang.names_nodes(view, status):
        return None
    since = status.attempt_time
    over = [a for a in status.avoided_nodes if since is not None and since < a.until <= view.now and not a.lifted]
    if not over and not is_past(_lifts_at(view, status), view.now):
        return None
    later = _made_again(view, status if over else _lifted(status, view.now), waiting)
    now_used = [a for a in later.avoided_nodes if a.lifted and a not in status.avoided_nodes]
    names = ", ".join(a.node for a in over)
    why = f"{names} is no longer avoided" if over else "; ".join(map(sentences.avoided, now_used))
    made = [f"pod {p.name} is" for p in waiting] if later.attempt == status.attempt else []
    what = made[0] if len(made) == 1 else f"{len(made)} pods are" if made else "all pods are"
    state: api.State = "Restarting" if status.state == "Restarting" else "Pending"
    return Decision(enter(later, state, reasons.AVOIDANCE_OVER, f"{why}; {what} created again", view.now))


def _unschedulable(view: View) -> list[Pod]:
    return [p for p in view.waiting if p.unschedulable and p.live]


def _made_again(view: View, status: api.Status, waiting: Sequence[Pod]) -> api.Status:
    """Return the status in which unschedulable pods are created again. Agents that wait for a replacement keep their
    pods, some with the training state in memory."""
    if status.replacements:
        numbers = {str(p.place): naming.replacement(status, p.place) + 1 for p in waiting}
        later = replace(with_new_ranks(status, view.now), replacements={**status.replacements, **numbers})
    else:
        later = new_attempt(status, view.now)
    return replace(later, starting_since=status.starting_since or status.attempt_time)


def _in_force(status: api.Status, now: dt.datetime) -> list[api.AvoidedNode]:
    return [a for a in status.avoided_nodes if a.until > now and not a.lifted]


def _lifted(status: api.Status, now: dt.datetime) -> api.Status:
    banned = _in_force(status, now)
    return replace(status, avoided_nodes=[replace(a, lifted=a in banned or a.lifted) for a in status.avoided_nodes])


def _lifts_at(view: View, status: api.Status) -> dt.datetime | None:
    """Return when pods have found no other node for too long; None if no node is avoided or all pods have nodes."""
    if not _in_force(status, view.now):
        return None
    times = (p.unschedulable_since or status.attempt_time for p in _unschedulable(view))
    return after(earliest(*times), view.settings.avoid_unless_unschedulable_seconds)


def waiting_for_nodes(view: View, status: api.Status) -> Decision | None:
    if not view.waiting:
        # If an earlier pod at a place of an elastic job is still stopping, the next pod is created after its end.
        earlier = [p for p in view.removed if p.place in view.spec.members and p.place not in view.pods]
        text = f"waiting for {name_pods(earlier)} to stop"
        return _waiting(view, status, "Pending", reasons.WAITING_FOR_OLD_PODS, text) if earlier else None
    avoided = earliest(_lifts_at(view, status), *(a.until for a in _in_force(status, view.now)))
    unschedulable = any(p.unschedulable for p in view.waiting)
    again_at = pending.next_creating_text_at(view, status, view.waiting)
    again_at = earliest(avoided, pending.waited_for_nodes(view, status)[1]) if unschedulable else again_at
    return _waiting(view, status, *_why_waiting(view, status, view.waiting), again_at=again_at)


def _waiting(
    view: View,
    status: api.Status,
    state: api.State,
    reason: Reason,
    text: str,
    actions: tuple[Action, ...] = (),
    again_at: dt.datetime | None = None,
) -> Decision:
    """Return the decision while some nodes are not running. After a failure the state is Restarting, with a message."""
    # Agents wait for late nodes (the last call) only at the start, and not for the replacement of a lost pod.
    last_call = 0 if view.spec.facts.restarts_in_place and status.replacements else LAST_CALL_SECONDS
    last_call_at = after(status.attempt_time, last_call) if view.trains_with_fewer(status) else None
    comes_soon = reason in (reasons.CREATING_PODS, reasons.STARTING_TRAINERS)
    if last_call_at is not None and (not comes_soon or status.running_time or view.now >= last_call_at):
        decision = lifecycle.running(view, status, text)
        return replaced(decision, actions=actions, requeue_at=earliest(again_at, decision.requeue_at))
    failure = status.last_failure
    if status.state == "Restarting":
        cause = f"after {sentences.short(failure)}: " if failure is not None and status.is_restarted else ""
        state, text = "Restarting", f"{cause}{text}"
    entered = enter(status, state, reason, text, view.now)
    deadlines = (view.active_deadline(status), view.start_deadline(status))
    return Decision(entered, actions, earliest(again_at, last_call_at, *deadlines))


def _to_create(view: View, status: api.Status) -> tuple[Action, ...]:
    avoid = () if gang.names_nodes(view, status) else tuple(sorted(a.node for a in _in_force(status, view.now)))
    missing = [place for place in _absent(view, status) if not _waits(view, status, place)]
    if view.is_elastic and view.leader in missing:
        missing = [view.leader]  # first in the scheduler's queue, because no group trains without node 0
    pods = [CreatePod(status.attempt, place, avoid, naming.replacement(status, place)) for place in missing]
    unplaced = any(p.live and not p.node for p in view.pods.values())
    groups = gang.to_create(view, status) if pods or unplaced else ()
    return (*(() if view.seen.service else (CreateService(),)), *groups, *pods)


def _absent(view: View, status: api.Status) -> list[int]:
    """Return the places that have no pod and have not run. At the end of an elastic training none is missing: a new
    node would find no group to join."""
    known = status.started | set(view.pods) | {p.place for p in view.removed}
    return [] if view.is_elastic and status.completed_nodes else [p for p in view.spec.members if p not in known]


def _waits(view: View, status: api.Status, place: int) -> dt.datetime | None:
    """Return when a lost pod is replaced while others train; None if at once. The first loss is replaced at once, but a
    kubelet may reject each further pod within a second, and no back-off of the group slows that down."""
    number = naming.replacement(status, place) - 1
    if number < 1 or not view.trains_with_fewer(status):
        return None
    own = (
        p for p in owned(view.job, view.seen) if (p.attempt, p.place, p.replacement) == (status.attempt, place, number)
    )
    at = after(next((p.bound_at for p in own), None), NEXT_POD_SECONDS)
    return None if at is None or view.now >= at else at


def _avoids(view: View, status: api.Status) -> str:
    """Return the avoided nodes as text, because the scheduler's message does not name them."""
    if gang.names_nodes(view, status):
        return ""
    banned = "".join(f"; {sentences.avoided(a)}" for a in _in_force(status, view.now))
    if not banned or view.trains_with_fewer(status):
        return banned
    wait = wording.duration(view.settings.avoid_unless_unschedulable_seconds)
    return f"{banned}; pods that find no other node for {wait} may go there"


def _why_waiting(view: View, status: api.Status, pods: Sequence[Pod]) -> tuple[api.State, Reason, str]:
    total = view.spec.pods
    unschedulable = [p for p in pods if p.unschedulable]
    if unschedulable and gang.adapter_of(view, status) is not None and not view.trains_with_fewer(status):
        unplaced, why = sum(not p.node for p in pods), pending.why_unschedulable(unschedulable)
        text = gang.why_waiting(view, status, unplaced, why)
        return "Pending", reasons.UNSCHEDULABLE, f"Unschedulable: {text}{_avoids(view, status)}"
    if unschedulable:
        why, (waited, _) = pending.why_unschedulable(unschedulable), pending.waited_for_nodes(view, status)
        # The scheduler's message contains this text if a pod of this or another job keeps the pod off the node.
        apart = build.wants_one_pod_per_node(view.spec) and "anti-affinity" in why
        where = "; onePodPerNode keeps them apart" if total > 1 and apart else ""
        text = f"Unschedulable: {len(unschedulable)} of {total} pods: {why}{waited}{where}{_avoids(view, status)}"
        return "Pending", reasons.UNSCHEDULABLE, text
    if stuck := [p for p in pods if p.trainer.reason in CANNOT_START]:
        first = stuck[0]
        why = f"{first.trainer.reason}: {first.trainer.message}"
        return "Pending", reasons.CANNOT_START, f"{len(stuck)} of {total} pods cannot start: {first.name}: {why}"
    text = f"waiting for {pending.name_nodes([p.place for p in pods])}"
    if not view.trains_with_fewer(status):
        text = f"{wording.running(min(view.spec.nodes, total - len(pods)), view.spec.nodes)}; {text}"
    creating, is_long = pending.creating(view, status, pods)
    if creating and is_long:
        return "Pending", reasons.CANNOT_START, f"{text}; {creating}"
    return "Starting", reasons.STARTING_TRAINERS, f"{text}; {creating}" if creating else text
