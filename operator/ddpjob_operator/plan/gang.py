"""Rules for jobs whose pods are admitted together: by a gang scheduler, or by a queue before the pods are created.

They use only the adapter table and each group's state (admitted, waiting, evicted); they know no Kubernetes API.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import replace as replaced

from msgspec.structs import replace

from ddpjob_operator.gangs import choice, kueue
from ddpjob_operator.gangs.adapter import Adapter
from ddpjob_operator.job import api, bounds, reasons, wording
from ddpjob_operator.job.status import TERMINAL
from ddpjob_operator.job.times import earliest
from ddpjob_operator.observed import groups
from ddpjob_operator.observed.cluster import Refusal
from ddpjob_operator.observed.groups import ObservedGroup, Tell
from ddpjob_operator.plan import lifecycle, pending
from ddpjob_operator.plan.actions import Action, CreateGroup, Decision, DeleteGroup, TellGroup
from ddpjob_operator.plan.transitions import enter
from ddpjob_operator.plan.view import View, name_pods

NEIGHBOURS_MAX = 3
EXACT_PLACES = 10
ASKED = "the queue has not answered yet"


def gang_chosen(view: View, status: api.Status) -> Decision | None:
    """Choose who admits an attempt's pods before the first one is created. A waiting job may still leave its queue."""
    attempt, gang = _upcoming(status), status.gang
    is_chosen = gang is not None and gang.attempt == attempt and not unavailable(view, status)
    is_in_queue = gang is not None and _is_queue(view, gang.kind) and not status.is_begun
    may_leave = is_in_queue and not view.active_of_all_attempts
    is_later = status.attempt_time is not None and status.attempt_time > view.now
    has_pods = attempt == status.attempt and bool(view.pods or view.deleted_pods or status.started)
    if (is_chosen and not may_leave) or is_later or has_pods:
        return None
    kind, why = _chosen(view, status)
    if kind == "none" and not view.seen.gang_apis:
        return None if gang is None else Decision(replace(status, gang=None), goes_on=True)
    since = gang.waiting_since if gang is not None and (gang.kind, gang.attempt) == (kind, attempt) else None
    # The API server's text may be long. A status longer than its type allows could never be read again.
    new = api.Gang(kind=kind, attempt=attempt, why=why[: bounds.WHY_MAX], waiting_since=since)
    return Decision(replace(status, gang=new), goes_on=True) if new != gang else None


def _chosen(view: View, status: api.Status) -> tuple[choice.Kind, str]:
    """Return the gang and the reason. A restart neither leaves nor enters an available queue, because a job that
    leaves loses its quota, and a job that enters loses its nodes."""
    kind, why = choice.choose(view.job, view.seen.gang_apis)
    had = status.gang.kind if status.gang is not None else "none"
    if not status.is_begun or kind == had:
        return kind, why
    if _is_queue(view, had) and had in view.seen.gang_apis:
        return had, "a restart keeps its place in the queue"
    is_there = had == "none" or not choice.unavailable(had, view.seen.gang_apis)
    if _is_queue(view, kind) and not _is_queue(view, had) and is_there:
        return had, "a restart does not join a queue"
    return kind, why


def evicted(view: View, status: api.Status) -> Decision | None:
    """Stop all pods, as for a suspension, if the queue revoked its admission; not if the queue's API is unavailable."""
    group, active = group_of(view, status), view.active_of_all_attempts
    # A job that is admitted again while its pods are stopping continues as if resumed: its pods stop first.
    if not is_to_stop(view, status) or (view.recorded.state == "Suspended" and not active):
        return None
    why = "its Workload was deleted" if group is None else group.admission.why
    stopping = f"; {name_pods(active)} still stopping" if active else ""
    return lifecycle.stop_all(view, status, reasons.EVICTED, f"evicted from its queue: {why}{stopping}")


def is_to_stop(view: View, status: api.Status) -> bool:
    """True if the job's queue has revoked its admission. Without the queue's API that is unknown."""
    queue, group = _queue_of(view, status), group_of(view, status)
    is_known = queue is not None and status.attempt > 0 and not _is_away(view, queue)
    return is_known and (group is None or not _is_admitted(group))


def waiting_for_admission(view: View, status: api.Status) -> Decision | None:
    """Create no pod before the queue admits the job. No deadline runs meanwhile."""
    adapter = _queue_of(view, status)
    if adapter is None or status.is_begun:
        return None
    group = group_of(view, status)
    # Without the API we cannot know whether the admission was revoked.
    if group is not None and _is_admitted(group) and not _is_away(view, adapter):
        return None
    text, again_at, actions = _requested(view, adapter, group, CreateGroup(adapter.name, _upcoming(status)))
    if group is None and any(g.number > 1 for g in _of_adapter(view, adapter.name)):
        actions = ()  # otherwise the job would request the same nodes twice until its further groups are deleted
    state: api.State = "Suspended" if status.attempt else "Pending"
    gang = status.gang or api.Gang(kind="none")
    since = gang.waiting_since or view.now
    waited, next_at = pending.waited(since, view.now)
    text = f"waiting in the queue: {text or ASKED}{waited}"
    entered = enter(status, state, reasons.WAITING_FOR_ADMISSION, text, view.now)
    later = [at for at in (again_at, next_at) if at is not None]
    entered = replace(entered, start_time=None, gang=replace(gang, waiting_since=since))
    return Decision(entered, actions, min(later, default=None))


def growing(view: View, status: api.Status) -> Decision | None:
    """Request a further group for the nodes that an elastic job lacks, while its other nodes train. Not with a
    topology, because the queue would choose another rack. Not if the job's labels name another queue by now."""
    adapter, first = _queue_of(view, status), group_of(view, status)
    missing = view.asked_nodes - view.wanted_nodes
    if adapter is None or first is None or missing <= 0 or not view.spec.facts.resizes_in_place:
        return None
    stays = not _is_away(view, adapter) and first.asked == kueue.asks(view.job) and not first.placement.by_topology
    if not stays or view.problems or status.completed_nodes:
        return None
    number = len(groups.admitted(_of_adapter(view, adapter.name))) + 1
    group = next((g for g in _of_adapter(view, adapter.name) if g.number == number), None)
    wanted = CreateGroup(adapter.name, status.attempt, number, missing)
    text, again_at, actions = _requested(view, adapter, group, wanted)
    text = f"waiting in the queue for {wording.count(missing, 'more node')}: {text or ASKED}"
    decision = lifecycle.running(view, status, text)
    return replaced(decision, actions=actions, requeue_at=earliest(again_at, decision.requeue_at))


def _requested(
    view: View, adapter: Adapter, group: ObservedGroup | None, wanted: CreateGroup
) -> tuple[str, dt.datetime | None, tuple[Action, ...]]:
    """Return why a queue has not admitted a group, when to retry, and what brings the group up to date."""
    name = adapter.group_name(view.job, wanted.attempt, wanted.number)
    text, again_at = _why_not_admitted(view, adapter, group, name)
    if group is None:
        return text, again_at, () if text else (wanted,)
    is_outdated = not group.deletion_requested and _is_outdated(
        view, adapter, group, wanted.nodes or view.wanted_nodes + view.spec.spares
    )
    return text, again_at, (DeleteGroup(group.adapter, group.name, group.uid),) if is_outdated else ()


def adapter_of(view: View, status: api.Status) -> Adapter | None:
    """Return the adapter that admits the pods; None if there is none, or this version does not know it."""
    return view.settings.adapters.get(status.gang.kind) if status.gang is not None else None


def _queue_of(view: View, status: api.Status) -> Adapter | None:
    """Return the adapter if it is a queue, which admits a job before its pods are created."""
    adapter = adapter_of(view, status)
    return adapter if adapter is not None and adapter.admits_first else None


def _is_queue(view: View, kind: choice.Kind) -> bool:
    adapter = view.settings.adapters.get(kind)
    return adapter is not None and adapter.admits_first


def group_of(view: View, status: api.Status) -> ObservedGroup | None:
    """Return the job's group for the pods of the current attempt, or of the next if none is running."""
    adapter = adapter_of(view, status)
    if adapter is None:
        return None
    wanted = (adapter.name, adapter.attempt_of(_upcoming(status)), 1)
    own = (g for g in _own(view) if (g.adapter, g.attempt, g.number) == wanted and not g.deletion_requested)
    return next(own, None)


def _of_adapter(view: View, name: str) -> list[ObservedGroup]:
    return [group for group in _own(view) if group.adapter == name]


def is_forgotten(view: View, status: api.Status) -> bool:
    """True if the number of admitted pods is unknown: the queue's API was never available to this operator."""
    queue = _queue_of(view, status)
    return queue is not None and _is_away(view, queue) and group_of(view, status) is None


def names_nodes(view: View, status: api.Status) -> bool:
    """True if the queue assigns a node to each pod. Such pods fit nowhere else, so node avoidance cannot apply."""
    group = group_of(view, status)
    return group is not None and group.placement.names_nodes


def to_create(view: View, status: api.Status) -> tuple[CreateGroup, ...]:
    adapter = adapter_of(view, status)
    if adapter is None or group_of(view, status) is not None or unavailable(view, status):
        return ()
    return (CreateGroup(adapter.name, status.attempt),)


def unavailable(view: View, status: api.Status) -> str:
    """Return why the chosen gang is unavailable; "" if it is available, its group exists, or no gang is wanted."""
    if status.gang is None or status.gang.kind == "none" or group_of(view, status) is not None:
        return ""
    return choice.unavailable(status.gang.kind, view.seen.gang_apis)


def upkeep(view: View) -> tuple[tuple[Action, ...], dt.datetime | None]:
    """Return the groups to delete, the reports to the queue, and when to repeat a refused report."""
    adapter = adapter_of(view, view.recorded)
    own = [] if adapter is None else [_refused(view, adapter, group.name) for group in _of_adapter(view, adapter.name)]
    return (*unneeded(view), *to_tell(view)), earliest(*(refused.retry_at for refused in own if refused is not None))


def unneeded(view: View) -> tuple[DeleteGroup, ...]:
    """Return groups to delete: of finished attempts, and of a job that has ended, is suspended or cannot start by the
    recorded status. Their pods have ended, and their API is available."""
    recorded = view.recorded
    is_held = view.spec.suspend and recorded.state == "Suspended"
    # A spec with problems cannot start. Its group would hold quota that nobody can use until the spec is fixed.
    is_held |= bool(view.problems) and not recorded.is_begun
    over = recorded.state in TERMINAL or is_held
    gang = recorded.gang or api.Gang(kind="none")
    active = [p for p in view.active_of_all_attempts if p.uid not in view.lost]
    found = []
    for group in sorted(_own(view), key=lambda g: (g.adapter, g.attempt, g.name)):
        adapter = view.settings.adapters.get(group.adapter)
        is_present = group.adapter == gang.kind and group.attempt in (0, recorded.attempt)
        is_next = group.attempt > recorded.attempt
        if group.attempt:
            in_use = any(p.attempt == group.attempt for p in active)
        elif is_present:
            is_new = group.number > 1 and group.admission.state == "waiting"
            in_use = not is_new and any(p.place >= _first_place(view, group) for p in active)
        else:  # Later attempts began after the job had left the queue, so their pods do not use its quota.
            in_use = any(p.attempt < gang.attempt for p in active)
        # A finished job's group stays, because the queue keeps its result. The group does not hold quota any more.
        is_first = adapter is not None and adapter.admits_first and group.number == 1
        stays = is_first and recorded.state in TERMINAL and is_present
        is_over = (over and not stays) or not (is_present or is_next) or _is_surplus(view, group)
        may_go = adapter is not None and not _is_away(view, adapter) and not group.deletion_requested
        if is_over and not in_use and may_go:
            found.append(DeleteGroup(group.adapter, group.name, group.uid))
    return tuple(found)


def _first_place(view: View, group: ObservedGroup) -> int:
    """Return the first place whose pod uses the quota of this group of a queue."""
    earlier = groups.admitted(_of_adapter(view, group.adapter))
    return groups.size(g for g in earlier if g.number < group.number)


def _is_surplus(view: View, group: ObservedGroup) -> bool:
    """True for a further group that the job no longer needs, or that its queue has evicted: the job then has fewer
    nodes, and queues for more."""
    if group.number == 1:
        return False
    first, state, recorded = _first_place(view, group), group.admission.state, view.recorded
    admitted = groups.admitted(_of_adapter(view, group.adapter))
    is_wanted = first < view.asked_nodes and group.number <= len(admitted) + 1 and state != "evicted"
    may_have_pods = state != "waiting" and recorded.is_begun and (recorded.attempt_nodes or 0) > first
    return not is_wanted and not may_have_pods


def to_tell(view: View) -> tuple[TellGroup, ...]:
    """Return the next reports to the queue. They free quota only after the status records the end of its last pod."""
    recorded, adapter = view.recorded, _queue_of(view, view.recorded)
    if adapter is None or _is_away(view, adapter):
        return ()
    gone = {group.uid for group in unneeded(view)}
    told = []
    for group in _of_adapter(view, adapter.name):
        news = _news(view, group)
        if news and not (group.deletion_requested or group.uid in gone or _refused(view, adapter, group.name)):
            pods = _pods_in_use(view, group) if news == "smaller" else 0
            told.append(TellGroup(group.adapter, group.name, group.uid, news, recorded.message, pods))
    return tuple(told)


def _news(view: View, group: ObservedGroup) -> Tell | None:
    recorded = view.recorded
    if group.number > 1 and group.admission.state != "admitted":
        return None  # it is deleted, and gives its quota back by that
    if recorded.state in TERMINAL:
        ended = not view.active_of_all_attempts and not group.is_over
        return ("succeeded" if recorded.state == "Succeeded" else "failed") if ended else None
    if group.admission.holds_quota:
        # No pod uses the quota: before the suspension was recorded, pods of unanswered create requests were looked up.
        return None if recorded.is_begun or view.active_of_all_attempts else "quota returned"
    if group.admission.state != "admitted":
        return None
    if (recorded.state == "Running") != group.is_ready:
        return "ready" if recorded.state == "Running" else "unready"
    is_smaller = _pods_in_use(view, group) < (group.placement.count or 0) and not group.placement.by_topology
    return "smaller" if is_smaller and recorded.state == "Running" else None


def _pods_in_use(view: View, group: ObservedGroup) -> int:
    """Return how many pods use the quota of a group, or will. Under torchrun all: the job could not grow again."""
    count = group.placement.count or 0
    if not view.spec.facts.resizes_in_place:
        return count
    nodes = max(view.asked_nodes, view.recorded.attempt_nodes or 0) + view.spec.spares
    places = max((nodes, *(p.place + 1 for p in view.active_of_all_attempts)))
    return max(0, min(count, places - _first_place(view, group)))


def why_waiting(view: View, status: api.Status, unplaced: int, scheduler: str) -> str:
    """Return why the scheduler places no pod of the gang, and which jobs use the nodes. scheduler: its message."""
    group = group_of(view, status)
    of_group = group.admission.why if group is not None and view.spec.topology_key else ""
    why = "; ".join(dict.fromkeys(text for text in (of_group, scheduler) if text))
    together = f"{unplaced} of {view.spec.pods} pods wait to be placed together: {why}"
    return f"{together}{_held_by(view.seen.neighbours)}{pending.waited_for_nodes(view, status)[0]}"


def _held_by(neighbours: Mapping[str, int]) -> str:
    if not neighbours:
        return ""
    most = sorted(neighbours.items(), key=lambda job: (-job[1], job[0]))
    named = ", ".join(f"{name} ({wording.count(nodes, 'node')})" for name, nodes in most[:NEIGHBOURS_MAX])
    more = f" and {len(most) - NEIGHBOURS_MAX} more" if len(most) > NEIGHBOURS_MAX else ""
    return f"; nodes are held by {named}{more}"


def _why_not_admitted(
    view: View, adapter: Adapter, group: ObservedGroup | None, name: str
) -> tuple[str, dt.datetime | None]:
    """Return why the queue has not admitted a group, and when to retry; "" if the group must still be created."""
    if why := choice.unavailable(adapter.name, view.seen.gang_apis):
        return why, None
    if refused := _refused(view, adapter, name):
        return f"{adapter.kind} {name} was refused: {refused.message}", refused.retry_at
    if group is not None:
        why = group.admission.why or ASKED  # same text as without a group, to save a status write
        return f"{_place(group.admission.place)}{why}", None
    taken = [c for c in view.conflicts if (c.kind, c.name) == (adapter.resource, name)]
    return (f"a {adapter.resource} named {name} is not this job's. Delete it" if taken else ""), None


def _place(place: int | None) -> str:
    """Return the position, rounded if large: otherwise each admission would rewrite the status of all later jobs."""
    if place is None:
        return ""
    step = 10 ** (len(str(place)) - 1)
    return f"position {place}: " if place <= EXACT_PLACES else f"position {place // step * step} or later: "


def _refused(view: View, adapter: Adapter, name: str) -> Refusal | None:
    of_group = (r for r in view.seen.refusals if (r.kind, r.name) == (adapter.resource, name))
    return next((r for r in of_group if r.retry_at > view.now), None)


def _is_away(view: View, adapter: Adapter) -> bool:
    return bool(choice.unavailable(adapter.name, view.seen.gang_apis))


def _is_outdated(view: View, adapter: Adapter, group: ObservedGroup, nodes: int) -> bool:
    """True if a group without quota no longer matches the job, or was already reported as finished."""
    differs = group.nodes is not None and group.nodes != nodes
    # A replacement would restart a group that the queue or a user has stopped.
    if adapter.admits_first and group.asked and not group.admission.stopped:
        differs |= group.asked != kueue.asks(view.job)
    return (differs or group.is_over) and not group.admission.holds_quota and not _is_away(view, adapter)


def _is_admitted(group: ObservedGroup) -> bool:
    return group.admission.state == "admitted" and not group.deletion_requested


def _own(view: View) -> list[ObservedGroup]:
    return [g for g in view.seen.groups if g.owner_uid == view.job.metadata.uid != ""]


def _upcoming(status: api.Status) -> int:
    """Return the current attempt; the next one if the job has not started or is suspended."""
    return status.attempt if status.is_begun else status.attempt + 1
