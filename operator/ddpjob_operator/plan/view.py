"""What is observed of a job, sorted by what it is to the job. Facts only: nothing here changes the status."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

from msgspec.structs import replace

from ddpjob_core.members import Members
from ddpjob_operator.job import api, exit_codes, launcher, podspec, times, topology
from ddpjob_operator.job.times import after, earliest, is_past
from ddpjob_operator.job.validation import Problem
from ddpjob_operator.observed import stall
from ddpjob_operator.observed.cluster import ConflictingObject, Node, Observed, Pod
from ddpjob_operator.plan import invalid_spec
from ddpjob_operator.plan.actions import DeletePod, Settings
from ddpjob_operator.pods import naming

# Beyond the grace of a pod: for the kubelet to end what is left, and to report it.
OUTLIVED_SECONDS = 10
# In namespaced mode, for a pod that stays beyond its grace on a node of which nobody says that it is not ready.
HELD_SECONDS = 600
# The pods of so many attempts stay for `kubectl logs`, the present one included.
ATTEMPTS_KEPT = 3


@dataclass(frozen=True)
class Unreachable:
    """An active pod whose node is not ready."""

    pod: Pod
    since: dt.datetime
    lost_at: dt.datetime | None
    """When it is given up; None while most nodes are not ready."""
    gone: bool
    """True if its node's object was deleted."""


@dataclass(frozen=True)
class View:
    """The job and what is observed, sorted once for all rules."""

    job: api.DDPJob
    """Its status is `recorded`. Of an elastic job spec.nodes is what its attempt began with."""
    wanted_nodes: int
    """spec.nodes as it is now: that of the next attempt."""
    stored: api.Status
    """The status exactly as the API server has it."""
    seen: Observed
    problems: tuple[Problem, ...]
    """What validation found in the spec."""
    now: dt.datetime
    settings: Settings
    pods: dict[int, Pod]
    """The pods of the present attempt by place; of a place whose pod was replaced alone, the newest."""
    deleted_pods: dict[int, Pod]
    """Pods of the present attempt that are gone, by place, as they were last seen."""
    older: tuple[Pod, ...]
    """Active pods of earlier attempts, or replaced ones, those on lost nodes excepted."""
    garbage: tuple[Pod, ...]
    """Pods of earlier attempts, or replaced ones, that are to go: ended long ago, or on lost nodes."""
    leaked: tuple[Pod, ...]
    """Pods of a deleted job of this name that are terminating on lost nodes: nobody else would ever delete them."""
    lost: frozenset[str]
    """uids of active pods whose node is lost."""
    lost_by_node: frozenset[str]
    """Those of them whose node the cluster calls not ready. A pod that stays beyond its grace proves a lost node only
    for the time since its deletion was requested."""
    conflicts: tuple[ConflictingObject, ...]
    """Objects that carry a name the job needs, and are not the job's."""
    trackers: Mapping[int, stall.StepTracker]
    """The steps of each rank of this attempt that reports."""
    unreachable: tuple[Unreachable, ...]
    """Its active pods on nodes that are not ready and not given up, by place."""

    @cached_property
    def spec(self) -> api.Spec:
        """The job's spec."""
        return self.job.spec

    @cached_property
    def facts(self) -> launcher.JobFacts:
        """What follows from the job's template."""
        return launcher.facts(self.spec)

    @cached_property
    def members(self) -> Members:
        """The places of the job's nodes, by node rank."""
        return topology.members(self.spec)

    @cached_property
    def recorded(self) -> api.Status:
        """The status as the API server has it, in times of this clock: a pod is deleted only for what is in here."""
        return self.job.status

    @cached_property
    def known_pods(self) -> dict[int, Pod]:
        """The pods of the present attempt by place, those that are gone included."""
        return {**self.deleted_pods, **self.pods}

    def known_pod(self, node_rank: int) -> Pod | None:
        """The pod of a node rank in the present attempt, also one that is gone."""
        place = self.members.place(node_rank)
        return None if place is None else self.known_pods.get(place)

    @cached_property
    def active(self) -> list[Pod]:
        """The pods of the present attempt in which something may still run, those on lost nodes excepted."""
        return [p for p in self.pods.values() if p.live and p.uid not in self.lost]

    @cached_property
    def active_of_all_attempts(self) -> list[Pod]:
        """All pods in which something may still run, also on lost nodes."""
        return [p for p in (*self.pods.values(), *self.older) if p.live]

    @cached_property
    def stall_finding(self) -> stall.StallFinding | None:
        """What the reports prove of a job that makes no step."""
        return stall.find(self.trackers, self.spec.stall, self.now)

    def failed(self, status: api.Status) -> list[Pod]:
        """The pods of the present attempt that ended otherwise than completed, those that are gone included. A node
        that is recorded as completed stays so, whatever becomes of its pod."""
        completed = status.completed
        failed = [p for p in self.known_pods.values() if p.has_failed and p.place not in completed]
        return [p for p in failed if not self.comes_too_late(status, p.place)]

    @cached_property
    def hands_over_exit_code(self) -> bool:
        """True if exit code 0 proves that the last launcher of the command has ended with 0."""
        return exit_codes.is_handed_over(self.facts.command)

    @cached_property
    def is_elastic(self) -> bool:
        """True if the group trains with fewer nodes than all."""
        return self.facts.min_nodes is not None

    def is_enough(self, places: Set[int]) -> bool:
        """True if the group trains with these places: all of them, or those that an elastic job wants at least.

        Node 0 is always one of them, because its torchrun holds the store at which the others meet.
        """
        least, present = self.facts.min_nodes, places & set(self.members)
        is_all = len(present) == len(self.members)
        return is_all if least is None else len(present) >= least and self.members.leader in present

    def trains_with_fewer(self, status: api.Status) -> bool:
        """True if an elastic job has enough nodes: it waits for no other, and no other that ends breaks it."""
        return self.is_elastic and self.is_enough(status.started)

    def participants(self, status: api.Status) -> Set[int]:
        """The places that the training needs: all, or those of an elastic job that have started."""
        return status.started.intersection(self.members) if self.is_elastic else set(self.members)

    def comes_too_late(self, status: api.Status, place: int) -> bool:
        """True if an elastic job had ended its training when the node started: it finds no group to join."""
        has_started = place in status.started
        return self.is_elastic and bool(status.completed_nodes) and not has_started

    def stop(self, pods: Sequence[Pod], grace_seconds: int | None) -> tuple[DeletePod, ...]:
        """Delete these pods. One that is terminating is left alone; one on a lost node goes at once, since its kubelet
        will never answer.

        Only there the grace is 0, because the object then goes before a kubelet has ended anything, and the next
        attempt would start beside the last.
        """
        stopped = []
        for pod in sorted(pods, key=by_identity):
            if pod.uid in self.lost:
                if pod.uid not in self.seen.undeletable:
                    stopped.append(DeletePod(pod.name, pod.uid, 0))
            elif pod.deletion_requested_at is None:
                stopped.append(DeletePod(pod.name, pod.uid, grace_seconds))
        return tuple(stopped)

    def active_deadline(self, status: api.Status) -> dt.datetime | None:
        """When the job must be finished."""
        return after(status.start_time, self.spec.active_deadline_seconds)

    def start_deadline(self, status: api.Status) -> dt.datetime | None:
        """When all nodes, or enough of them, must have run; None once they have in this attempt."""
        if self.is_enough(status.started):
            return None
        return after(status.starting_since or status.attempt_time, self.spec.start_deadline_seconds)


def sort(job: api.DDPJob, seen: Observed, now: dt.datetime, problems: tuple[Problem, ...], settings: Settings) -> View:
    """What is observed, sorted by what it is to the recorded attempt of this job."""
    retries = job.status.start_retries
    recorded = times.not_ahead(
        job.status,
        now,
        start_back_off_seconds=times.start_back_off_seconds(job.metadata.uid, retries) if retries else 0,
        avoid_seconds=settings.avoid_node_seconds,
    )
    read = invalid_spec.as_it_was(replace(job, status=recorded), problems)
    return _sorted(read.status, read, job.status, seen, now, problems, settings)


def _wanted_nodes(job: api.DDPJob, seen: Observed) -> int:
    """spec.nodes; of an elastic job that a queue has admitted in part, as many as it has admitted."""
    if launcher.facts(job.spec).min_nodes is None:
        return job.spec.nodes
    own = (g for g in seen.groups if g.owner_uid == job.metadata.uid and g.admission.state == "admitted")
    return min((job.spec.nodes, *(g.placement.count for g in own if g.placement.count)))


def in_attempt(view: View, status: api.Status) -> View:
    """The same facts, sorted for the attempt that begins with `status`: all pods there are now belong to older ones."""
    job = replace(view.job, spec=launcher.with_nodes(view.spec, view.wanted_nodes))
    return _sorted(status, job, view.stored, view.seen, view.now, view.problems, view.settings)


def _sorted(
    status: api.Status,
    job: api.DDPJob,
    stored: api.Status,
    seen: Observed,
    now: dt.datetime,
    problems: tuple[Problem, ...],
    settings: Settings,
) -> View:
    wanted_nodes = _wanted_nodes(job, seen)
    # An elastic job with the nodes that the pods of its attempt were made for, or before the first pod may have now.
    job = replace(job, spec=launcher.with_nodes(job.spec, status.attempt_nodes or wanted_nodes))
    own = [_as_it_counts(p, job.spec, now) for p in owned(job, seen)]
    on_lost_nodes = [p for p in seen.pods if p.live and is_past(lost_at(p, seen.nodes, settings), now)]
    lost = frozenset(p.uid for p in on_lost_nodes if is_own(p, job))
    proven = frozenset(p.uid for p in on_lost_nodes if seen.nodes is not None or p.silent_since is not None)
    places = set(topology.members(job.spec))
    pods = {p.place: p for p in own if is_present(p, status) and p.place in places}
    others = sorted((p for p in own if not is_present(p, status)), key=by_identity)
    leaked = (p for p in on_lost_nodes if is_of_deleted_job(p, job) and p.deletion_requested_at)
    garbage = (p for p in others if p.uid in lost or (not p.live and _is_long_ago(p, status)))
    conflicts = (*seen.conflicts, *_conflicting_pods(job, seen, status))
    return View(
        job=job,
        wanted_nodes=wanted_nodes,
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
        older=tuple(p for p in others if p.live and p.uid not in lost),
        garbage=tuple(p for p in garbage if p.uid not in seen.undeletable),
        leaked=tuple(sorted((p for p in leaked if p.uid not in seen.undeletable), key=by_identity)),
        lost=lost,
        lost_by_node=proven & lost,
        conflicts=tuple(sorted(conflicts, key=lambda c: (c.of_deleted_job, c.name))),
        trackers={rank: t for rank, t in seen.trackers.items() if t.attempt in (0, status.attempt)},
        unreachable=tuple(_unreachable(pods, seen, settings, lost)),
    )


def _as_it_counts(pod: Pod, spec: api.Spec, now: dt.datetime) -> Pod:
    """The pod with what follows from the time and from its command."""
    if is_past(outlived_at(pod, spec), now):
        pod = replace(pod, outlived=True)
    if pod.trainer.hides_a_failure and exit_codes.may_be_replaced(launcher.facts(spec).command):
        pod = replace(pod, overcome=True)
    return pod


def is_present(pod: Pod, status: api.Status) -> bool:
    """True if it is the pod that counts of its place, in the present attempt."""
    return _number(pod) == _present_number(status, pod.place)


def is_over(pod: Pod, status: api.Status) -> bool:
    """True if another pod has taken its place."""
    return _number(pod) < _present_number(status, pod.place)


def _number(pod: Pod) -> tuple[int, int]:
    """Which of the pods of its place it is, over all attempts."""
    return (pod.attempt, pod.replacement)


def _present_number(status: api.Status, place: int) -> tuple[int, int]:
    return (status.attempt, naming.replacement(status, place))


def _is_long_ago(pod: Pod, status: api.Status) -> bool:
    if pod.attempt == status.attempt:
        return pod.replacement <= naming.replacement(status, pod.place) - ATTEMPTS_KEPT
    return pod.attempt <= status.attempt - ATTEMPTS_KEPT


def lost_at(pod: Pod, nodes: Mapping[str, Node] | None, settings: Settings) -> dt.datetime | None:
    """When the node of a pod counts as lost; None while nothing shows that it is.

    Where nodes can be read, by their condition Ready, and a node whose object was deleted is not ready; a pod that
    stays beyond its grace on a node that is not ready is lost whatever the other nodes do. Patience begins anew where a
    pod was bound later: after an outage of the API server a scheduler may believe for seconds that a node is ready
    which we know is not, and the next pod would go there too. Elsewhere by what the node controller does to the pod, or
    by a pod that stays beyond its grace, because a kubelet that runs would have ended it. Where the trainer runs by
    what that kubelet last said, and the node controller has no doubt, its process may be one that the kernel holds
    (NFS, a GPU's driver), so that takes HELD_SECONDS.
    """
    patience = dt.timedelta(seconds=settings.lost_node_seconds)
    if nodes is not None:
        node = nodes.get(pod.node)
        if node is None or node.ready or node.since is None:
            return None
        if not node.with_most:
            return max(node.since, pod.bound_since or pod.scheduled_at or node.since) + patience
        return None if pod.deletion_deadline is None else max(node.since, pod.deletion_deadline) + patience
    if not pod.node:
        return None
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
    """When a sidecar that still runs shows that nobody ends the pod; None where none does.

    An eviction or the shutdown of a node signals all containers of a pod at once and gives each the pod's grace: a
    trainer that saves and ends with 0 looks as if it had completed, for as long as its sidecar takes.
    """
    since = pod.done_since or pod.trainer.ended_at
    if since is None or not pod.done_beside_sidecars:
        return None
    return since + dt.timedelta(seconds=podspec.grace_seconds(spec.template) + OUTLIVED_SECONDS)


def next_loss(view: View) -> dt.datetime | None:
    """When the next node will be lost, or a rank completed beside its sidecar, if nothing changes."""
    job, seen = view.job, view.seen
    pods = (p for p in seen.pods if p.live and (is_own(p, job) or is_of_deleted_job(p, job)))
    lost = (lost_at(p, seen.nodes, view.settings) for p in pods)
    done = (outlived_at(p, job.spec) for p in owned(job, seen))
    return earliest(*(t for t in (*lost, *done) if t is not None and t > view.now))


def is_stale(job: api.DDPJob, seen: Observed) -> bool:
    """True if there are pods of a newer attempt than the status knows, so that the status that was read is an old one.

    An empty status is not old but lost, or a write that follows will conflict, which costs nothing.
    """
    status = job.status
    return status.state is not None and any(_number(p) > _present_number(status, p.place) for p in owned(job, seen))


def owned(job: api.DDPJob, seen: Observed) -> list[Pod]:
    """The pods that this job made."""
    return [p for p in seen.pods if is_own(p, job)]


def is_own(pod: Pod, job: api.DDPJob) -> bool:
    """True if this job made it."""
    return bool(job.metadata.uid) and pod.owner_uid == job.metadata.uid


def is_of_deleted_job(pod: Pod, job: api.DDPJob) -> bool:
    """True if a deleted job of the same name made it: of two jobs of one name only one can exist."""
    return pod.job == job.metadata.name and bool(pod.owner_uid) and not is_own(pod, job)


def by_identity(pod: Pod) -> tuple[int, int, int, str]:
    """A key to sort pods by."""
    return (pod.attempt, pod.place, pod.replacement, pod.uid)


def name_pods(pods: Sequence[Pod]) -> str:
    """`digits-1-0 on gpu-07`, or how many they are."""
    if len(pods) == 1:
        return pods[0].name + (f" on {pods[0].node}" if pods[0].node else "")
    return f"{len(pods)} pods"


def _conflicting_pods(job: api.DDPJob, seen: Observed, status: api.Status) -> Iterator[ConflictingObject]:
    others = [pod for pod in seen.pods if not is_own(pod, job)]
    places = topology.members(job.spec) if others else ()
    names = {naming.present_pod_name(job, status, place) for place in places}
    for pod in others:
        # A pod of the deleted job answers to the same DNS name, whatever its attempt, until it has ended. It has no
        # owner where the job was deleted with --cascade=orphan.
        of_deleted = is_of_deleted_job(pod, job)
        orphaned = pod.job == job.metadata.name and not pod.owner_uid and pod.attempt > 0
        if pod.name in names or ((of_deleted or orphaned) and not pod.ended):
            yield ConflictingObject("Pod", pod.name, of_deleted_job=of_deleted)
