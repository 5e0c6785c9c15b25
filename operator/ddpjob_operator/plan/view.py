"""Sorts what is observed of a job by its role. It only collects facts and never changes the status."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

from msgspec.structs import replace

from ddpjob_operator.job import api, times
from ddpjob_operator.job.launch import exit_codes
from ddpjob_operator.job.times import after, earliest, is_past
from ddpjob_operator.job.validation import Problem
from ddpjob_operator.observed import groups, stall
from ddpjob_operator.observed.cluster import ConflictingObject, Node, Observed, Pod
from ddpjob_operator.plan import invalid_job
from ddpjob_operator.plan.actions import DeletePod, Settings
from ddpjob_operator.pods import naming

# Seconds added to a pod's grace period, so that the kubelet can end the other containers and report that.
OUTLIVED_SECONDS = 10
# Seconds that a pod may outlive its grace period before its node counts as lost.
# Used in namespaced mode, where node status cannot be read.
HELD_SECONDS = 600
# The number of attempts, including the current one, whose pods stay for `kubectl logs`.
ATTEMPTS_KEPT = 3


@dataclass(frozen=True)
class Unreachable:
    pod: Pod
    since: dt.datetime
    lost_at: dt.datetime | None
    """When the pod will be given up; None while most nodes are not ready."""
    gone: bool
    """True if the object of the pod's node was deleted."""


@dataclass(frozen=True)
class View:
    """The job and what is observed, sorted once for all rules."""

    job: api.DDPJob
    """The job; its status is `recorded`. For an elastic job spec.nodes is the value at the start of the attempt."""
    asked_nodes: int
    """spec.nodes as the user has set it."""
    wanted_nodes: int
    """asked_nodes, or the number that the job's queue has admitted, if that is smaller."""
    leader: int
    """Place of the pod whose agent leads in this attempt."""
    stored: api.Status
    """The status exactly as the API server has it."""
    seen: Observed
    problems: tuple[Problem, ...]
    now: dt.datetime
    settings: Settings
    pods: dict[int, Pod]
    """Pods of the current attempt by place; if a pod was replaced, the newest."""
    deleted_pods: dict[int, Pod]
    """Pods of the current attempt that are gone, by place, as they were last seen."""
    older: tuple[Pod, ...]
    """Active pods of earlier attempts, and replaced ones, without those on lost nodes."""
    garbage: tuple[Pod, ...]
    """Pods of earlier attempts, and replaced ones, to delete: they ended long ago, or are on lost nodes."""
    removed: tuple[Pod, ...]
    """Live pods of an elastic ddprun job that spec.nodes took out of the current attempt. The others go on."""
    leaked: tuple[Pod, ...]
    """Pods of a deleted job of this name that are terminating on lost nodes: nobody else would ever delete them."""
    lost: frozenset[str]
    lost_by_node: frozenset[str]
    """The part of `lost` whose node the cluster reports as not ready; the rest only outlived its grace."""
    conflicts: tuple[ConflictingObject, ...]
    trackers: Mapping[int, stall.StepTracker]
    """The steps of each rank that reports in this attempt."""
    unreachable: tuple[Unreachable, ...]
    """Active pods on nodes that are not ready but not given up, by place."""

    @cached_property
    def spec(self) -> api.Spec:
        return self.job.spec

    @cached_property
    def recorded(self) -> api.Status:
        """The API server's status, with times corrected to this clock. A pod is deleted only for a reason in it."""
        return self.job.status

    @cached_property
    def known_pods(self) -> dict[int, Pod]:
        """The pods of the current attempt by place (number in the name), including those that are gone."""
        return {**self.deleted_pods, **self.pods}

    def known_pod(self, node_rank: int) -> Pod | None:
        place = self.spec.members.place(node_rank)
        return None if place is None else self.known_pods.get(place)

    @cached_property
    def active(self) -> list[Pod]:
        return [p for p in self.pods.values() if p.live and p.uid not in self.lost]

    @cached_property
    def active_of_all_attempts(self) -> list[Pod]:
        return [p for p in (*self.pods.values(), *self.older, *self.removed) if p.live]

    @cached_property
    def waiting(self) -> list[Pod]:
        """The pods of the current attempt whose trainers have not started, by place."""
        return [p for _, p in sorted(self.pods.items()) if p.trainer.state == "waiting"]

    @cached_property
    def stopping(self) -> list[Pod]:
        """The active pods that are being deleted."""
        return [p for p in self.active if p.deletion_requested_at is not None]

    @cached_property
    def stall_finding(self) -> stall.StallFinding | None:
        return stall.find(self.trackers, self.spec.stall, self.now)

    def failed(self, status: api.Status) -> list[Pod]:
        """Return pods, also deleted ones, that ended without completing and are not recorded as completed."""
        failed = [p for p in self.known_pods.values() if p.has_failed and p.place not in status.completed]
        # When an elastic job completes its training, a node that has not started finds no group to join.
        return [p for p in failed if p.place in status.started] if self.is_elastic and status.completed else failed

    @cached_property
    def hands_over_exit_code(self) -> bool | None:
        return exit_codes.zero_proves_success([*(self.settings.command or self.spec.facts.command)])

    @cached_property
    def is_elastic(self) -> bool:
        return self.spec.facts.min_nodes is not None

    def is_enough(self, places: Set[int]) -> bool:
        """True if these pods are enough to train: all, or an elastic job's minimum with its leader."""
        least, present = self.spec.facts.min_nodes, places & set(self.spec.members)
        is_all = len(present) == len(self.spec.members)
        # A leader that has run and is lost is replaced by another node at once.
        is_led = self.leader in present or (
            self.appoints and self.leader not in set(self.spec.members) - self.recorded.started
        )
        return is_all if least is None else len(present) >= least and is_led

    @cached_property
    def appoints(self) -> bool:
        """True if the agent of any node may lead: in an elastic ddprun job whose agents ask who leads, or have asked
        another operator. While progress is off, new pods cannot ask, and would follow node 0 in a second group."""
        may_ask = self.settings.answers_agents and self.spec.facts.resizes_in_place
        return may_ask and (self.seen.agents_ask or self.recorded.leader is not None)

    def trains_with_fewer(self, status: api.Status) -> bool:
        """True if an elastic job has enough nodes, so that it neither waits for others nor fails with them."""
        return self.is_elastic and self.is_enough(status.started)

    @cached_property
    def staying(self) -> Set[int]:
        """The places whose trainers are running and are not being stopped."""
        return {p.place for p in self.active if p.trainer.state == "running" and p.deletion_requested_at is None}

    def goes_on(self, status: api.Status) -> bool:
        """True if an elastic job under ddprun is training, and continues without the pods that are lost or stopping.
        Under torchrun a loss restarts the group: a new pod in a running rendezvous hung or failed in half of trials."""
        return self.spec.facts.resizes_in_place and status.state == "Running" and self.is_enough(self.staying)

    def participants(self, status: api.Status) -> Set[int]:
        """Return the numbers of the pods that training needs: all, or in an elastic job the started ones."""
        return status.started.intersection(self.spec.members) if self.is_elastic else set(self.spec.members)

    def stop(self, pods: Sequence[Pod], grace_seconds: int | None) -> tuple[DeletePod, ...]:
        """Return deletes of pods that are not terminating. On a lost node the grace is 0, because no kubelet
        answers. Elsewhere 0 would remove the object while its processes run, next to those of the next attempt."""
        stopped = []
        for pod in sorted(pods, key=by_identity):
            if pod.uid in self.lost:
                if pod.uid not in self.seen.undeletable:
                    stopped.append(DeletePod(pod.name, pod.uid, 0))
            elif pod.deletion_requested_at is None:
                stopped.append(DeletePod(pod.name, pod.uid, grace_seconds))
        return tuple(stopped)

    def clear_garbage(self) -> tuple[DeletePod, ...]:
        """Return deletes of pods of finished attempts: a pod on a lost node must not answer to its rank's DNS name."""
        over = [p for p in self.garbage if is_over(p, self.recorded)]
        removed = self.stop([p for p in self.removed if is_over(p, self.recorded)], None)
        return (*(DeletePod(p.name, p.uid, 0) for p in (*over, *self.leaked)), *removed)

    def active_deadline(self, status: api.Status) -> dt.datetime | None:
        return after(status.start_time, self.spec.active_deadline_seconds)

    def start_deadline(self, status: api.Status) -> dt.datetime | None:
        """Return the time by which enough nodes must be running; None if they have run in this attempt."""
        if self.is_enough(status.started):
            return None
        return after(status.starting_since or status.attempt_time, self.spec.start_deadline_seconds)


def sort(job: api.DDPJob, seen: Observed, now: dt.datetime, problems: tuple[Problem, ...], settings: Settings) -> View:
    retries = job.status.start_retries
    recorded = times.not_ahead(
        job.status,
        now,
        start_back_off_seconds=times.start_back_off_seconds(job.metadata.uid, retries) if retries else 0,
        avoid_seconds=settings.avoid_node_seconds,
    )
    # A status that was lost, as in a backup, is that of a suspended job: no attempt number may be used twice.
    if recorded.state is None and (last := max((recorded.attempt, *(p.attempt for p in owned(job, seen))))):
        recorded = replace(recorded, state="Suspended", attempt=last)
    read = invalid_job.as_it_was(replace(job, status=recorded), problems)
    return _sorted(read.status, read, read.spec.nodes, job.status, seen, now, problems, settings)


def _wanted_nodes(job: api.DDPJob, asked_nodes: int, seen: Observed) -> int:
    own = (g for g in seen.groups if g.owner_uid == job.metadata.uid and g.placement.count)
    admitted = groups.size(groups.admitted(own)) - job.spec.spares
    return min(asked_nodes, admitted) if admitted > 0 and job.spec.facts.min_nodes is not None else asked_nodes


def in_attempt(view: View, status: api.Status) -> View:
    """Return the view for the attempt that begins with `status`: all existing pods then belong to older attempts."""
    return _sorted(status, view.job, view.asked_nodes, view.stored, view.seen, view.now, view.problems, view.settings)


def _sorted(
    status: api.Status,
    job: api.DDPJob,
    asked_nodes: int,
    stored: api.Status,
    seen: Observed,
    now: dt.datetime,
    problems: tuple[Problem, ...],
    settings: Settings,
) -> View:
    wanted_nodes = _wanted_nodes(job, asked_nodes, seen)
    # An elastic job has the number of nodes that its pods were made for; before the first pod, the number allowed now.
    job = replace(job, spec=job.spec.with_nodes(status.attempt_nodes or wanted_nodes))
    own = [_as_it_counts(p, job.spec, now) for p in owned(job, seen)]
    on_lost_nodes = [p for p in seen.pods if p.live and is_past(lost_at(p, seen.nodes, settings), now)]
    lost = frozenset(p.uid for p in on_lost_nodes if is_own(p, job))
    proven = frozenset(p.uid for p in on_lost_nodes if seen.nodes is not None or p.silent_since is not None)
    places = set(job.spec.members)
    pods = {p.place: p for p in own if is_present(p, status) and p.place in places}
    others = sorted((p for p in own if not is_present(p, status)), key=by_identity)
    is_resized = job.spec.facts.resizes_in_place
    removed = tuple(p for p in others if is_resized and p.live and p.uid not in lost and p.attempt == status.attempt)
    leaked = (p for p in on_lost_nodes if is_of_deleted_job(p, job) and p.deletion_requested_at)
    garbage = (p for p in others if p.uid in lost or (not p.live and _is_long_ago(p, status)))
    conflicts = (*seen.conflicts, *_conflicting_pods(job, seen, status))
    return View(
        job=job,
        asked_nodes=asked_nodes,
        wanted_nodes=wanted_nodes,
        leader=status.leader.place if status.leader is not None else job.spec.members.leader,
        stored=stored,
        seen=seen,
        problems=problems,
        now=now,
        settings=settings,
        pods=pods,
        deleted_pods={
            p.place: _as_it_counts(p, job.spec, now)
            for p in seen.deleted_pods
            if is_own(p, job) and is_present(p, status) and p.place in places
        },
        older=tuple(p for p in others if p.live and p.uid not in lost and p not in removed),
        removed=removed,
        garbage=tuple(p for p in garbage if p.uid not in seen.undeletable),
        leaked=tuple(sorted((p for p in leaked if p.uid not in seen.undeletable), key=by_identity)),
        lost=lost,
        lost_by_node=proven & lost,
        conflicts=tuple(sorted(conflicts, key=lambda c: (c.of_deleted_job, c.name))),
        trackers={rank: t for rank, t in seen.trackers.items() if t.attempt in (0, status.attempt)},
        unreachable=tuple(_unreachable(pods, seen, settings, lost)),
    )


def _as_it_counts(pod: Pod, spec: api.Spec, now: dt.datetime) -> Pod:
    """Return the pod with the facts that depend on the time and on its command."""
    if is_past(outlived_at(pod, spec), now):
        pod = replace(pod, outlived=True)
    if pod.trainer.hides_a_failure and spec.facts.launcher_is_replaced:
        pod = replace(pod, overcome=True)
    return pod


def is_present(pod: Pod, status: api.Status) -> bool:
    return _number(pod) == _present_number(status, pod.place)


def is_over(pod: Pod, status: api.Status) -> bool:
    return _number(pod) < _present_number(status, pod.place)


def _number(pod: Pod) -> tuple[int, int]:
    return (pod.attempt, pod.replacement)


def _present_number(status: api.Status, place: int) -> tuple[int, int]:
    return (status.attempt, naming.replacement(status, place))


def _is_long_ago(pod: Pod, status: api.Status) -> bool:
    if pod.attempt == status.attempt:
        return pod.replacement <= naming.replacement(status, pod.place) - ATTEMPTS_KEPT
    return pod.attempt <= status.attempt - ATTEMPTS_KEPT


def lost_at(pod: Pod, nodes: Mapping[str, Node] | None, settings: Settings) -> dt.datetime | None:
    """Return when the node of a pod counts as lost; None if nothing suggests that."""
    patience = dt.timedelta(seconds=settings.lost_node_seconds)
    if nodes is not None:
        node = nodes.get(pod.node)
        if node is None or node.ready or node.since is None:
            return None
        if not node.with_most:
            # The wait begins when the pod was bound, if later: after an API outage, new pods may be bound to this node.
            return max(node.since, pod.bound_at or node.since) + patience
        return None if pod.deletion_deadline is None else max(node.since, pod.deletion_deadline) + patience
    if not pod.node:
        return None
    # The kernel may hold a process (NFS, a GPU's driver) although the node works.
    held = dt.timedelta(seconds=HELD_SECONDS) if pod.trainer.state == "running" else dt.timedelta()
    by_silence = None if pod.silent_since is None else pod.silent_since + patience
    by_grace = None if pod.deletion_deadline is None else pod.deletion_deadline + max(patience, held)
    return earliest(by_silence, by_grace)


def _unreachable(
    pods: Mapping[int, Pod], seen: Observed, settings: Settings, lost: frozenset[str]
) -> Iterator[Unreachable]:
    for _, pod in sorted(pods.items()):
        node = (seen.nodes or {}).get(pod.node)
        since = pod.silent_since if seen.nodes is None else node.since if node is not None and not node.ready else None
        if pod.live and pod.uid not in lost and since is not None:
            gone = node is not None and node.gone
            yield Unreachable(pod, since, lost_at(pod, seen.nodes, settings), gone)


def outlived_at(pod: Pod, spec: api.Spec) -> dt.datetime | None:
    """Return when a running sidecar proves that the pod is not being stopped; None without a sidecar. An eviction
    signals all containers at once, so a trainer that saves and ends with 0 looks completed until its sidecar ends."""
    since = pod.done_since or pod.trainer.ended_at
    if since is None or not pod.done_beside_sidecars:
        return None
    return since + dt.timedelta(seconds=spec.facts.grace_seconds + OUTLIVED_SECONDS)


def next_loss(view: View) -> dt.datetime | None:
    """Return when, without new observations, a node counts as lost, or a rank with a running sidecar as completed."""
    job, seen = view.job, view.seen
    pods = (p for p in seen.pods if p.live and (is_own(p, job) or is_of_deleted_job(p, job)))
    lost = (lost_at(p, seen.nodes, view.settings) for p in pods)
    done = (outlived_at(p, job.spec) for p in owned(job, seen))
    return earliest(*(t for t in (*lost, *done) if t is not None and t > view.now))


def is_stale(job: api.DDPJob, seen: Observed) -> bool:
    """True if pods belong to a newer attempt than the status, so the status is outdated. False for an empty status."""
    status = job.status
    return status.state is not None and any(_number(p) > _present_number(status, p.place) for p in owned(job, seen))


def owned(job: api.DDPJob, seen: Observed) -> list[Pod]:
    return [p for p in seen.pods if is_own(p, job)]


def is_own(pod: Pod, job: api.DDPJob) -> bool:
    return bool(job.metadata.uid) and pod.owner_uid == job.metadata.uid


def is_of_deleted_job(pod: Pod, job: api.DDPJob) -> bool:
    return pod.job == job.metadata.name and bool(pod.owner_uid) and not is_own(pod, job)


def by_identity(pod: Pod) -> tuple[int, int, int, str]:
    return (pod.attempt, pod.place, pod.replacement, pod.uid)


def name_pods(pods: Sequence[Pod]) -> str:
    if len(pods) == 1:
        return pods[0].name + (f" on {pods[0].node}" if pods[0].node else "")
    return f"{len(pods)} pods"


def _conflicting_pods(job: api.DDPJob, seen: Observed, status: api.Status) -> Iterator[ConflictingObject]:
    others = [pod for pod in seen.pods if not is_own(pod, job)]
    places = job.spec.members if others else ()
    names = {naming.present_pod_name(job, status, place) for place in places}
    for pod in others:
        # A pod of a deleted job with this name answers to the same DNS name until it has ended, in any attempt.
        # A pod of a deleted job has no owner if the job was deleted with --cascade=orphan.
        of_deleted = is_of_deleted_job(pod, job)
        orphaned = pod.job == job.metadata.name and not pod.owner_uid and pod.attempt > 0
        if pod.name in names or ((of_deleted or orphaned) and not pod.ended):
            yield ConflictingObject("Pod", pod.name, of_deleted_job=of_deleted)
