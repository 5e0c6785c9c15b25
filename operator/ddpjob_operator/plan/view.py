"""The scene that the rules of `plan.py` judge: a job, what is there sorted by what it is to the job, and the time.

Here are the words of a plan (actions, verdicts) and what several rules ask of a scene. No rule decides anything here.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as replaced

from msgspec.structs import replace

from ddpjob_operator.job import api, budgets, podspec, ranges, reasons
from ddpjob_operator.job.validation import Problem
from ddpjob_operator.observed import stall
from ddpjob_operator.observed.cluster import ConflictingObject, Node, Observed, Pod, Refusal
from ddpjob_operator.plan import agent_restarts, report_age
from ddpjob_operator.plan import status as statuses
from ddpjob_operator.pods import naming

# Beyond the grace of a pod: for the kubelet to end what is left, and to say so.
OUTLIVED_SECONDS = 10
# The pods of so many attempts stay for `kubectl logs`, the present one included.
ATTEMPTS_KEPT = 3


# A status says so only once no pod of its attempt is to be made.
_ALL_PODS_WERE_MADE = frozenset(
    reason.name
    for reason in (
        reasons.UNSCHEDULABLE,
        reasons.CANNOT_START,
        reasons.STARTING_TRAINERS,
        reasons.ALL_NODES_RUN,
        reasons.STALL_SUSPECTED,
        reasons.OTHERS_COMPLETED,
    )
)


@dataclass(frozen=True)
class CreateService:
    """Create the job's headless Service."""


@dataclass(frozen=True)
class CreatePod:
    """Create the pod of a node. Its body follows from the job alone: pods are known by identity, never by content."""

    attempt: int
    rank: int
    avoid: tuple[str, ...] = ()
    """Cluster nodes that it must not run on."""
    replacement: int = 0
    """Which pod of this rank in this attempt it is."""


@dataclass(frozen=True)
class DeletePod:
    """Stop and delete a pod. grace_seconds: None is the pod's own terminationGracePeriodSeconds; 0 does not wait."""

    name: str
    uid: str
    grace_seconds: int | None = None


@dataclass(frozen=True)
class EndPod:
    """Stop a pod with its own terminationGracePeriodSeconds, and keep its object, with its log."""

    name: str
    uid: str


@dataclass(frozen=True)
class DeleteJob:
    """Delete the job itself, with all that it owns."""

    uid: str


Action = CreateService | CreatePod | DeletePod | EndPod | DeleteJob


@dataclass(frozen=True)
class Settings:
    """What the shell, not the user, decides."""

    progress_write_seconds: float = 10.0
    """Progress alone writes the status at most this often; with more than a hundred jobs less often, for all of them
    together may write 10 times a second (kube/progress_turns.py)."""
    lost_node_seconds: float = 30.0
    """A node that is not ready for so long is lost; the cluster itself takes 10 to 50 s to call it not ready."""
    config_error_seconds: float = 600.0
    """A container whose ConfigMap or Secret is missing for so long never starts."""
    avoid_node_seconds: float = 3600.0
    """How long a node that failed the job twice is avoided, and how far back failures count for it."""
    resume_hint: str = "set spec.suspend to false to go on"
    """What a user does with a suspended job."""
    keep_log_tail: bool = True
    """Whether the end of the log goes into the status."""


@dataclass(frozen=True)
class Decision:
    """What one rule says: what is true now, and what follows."""

    status: api.Status
    actions: tuple[Action, ...] = ()
    requeue_at: dt.datetime | None = None


@dataclass(frozen=True)
class Unheard:
    """A live pod whose node the cluster does not hear."""

    pod: Pod
    since: dt.datetime
    lost_at: dt.datetime | None
    """When it is given up; None while most nodes are not ready."""


@dataclass(frozen=True)
class View:
    """The job and what is there, sorted once for all rules."""

    job: api.DDPJob
    recorded: api.Status
    """The status as observed: only what stands here may cost a pod."""
    status: api.Status
    """The status with the facts of this look noted."""
    service: bool
    mine: dict[int, Pod]
    """The pods of the present attempt by rank; of a rank whose pod was replaced alone, the newest."""
    deleted_pods: dict[int, Pod]
    """Pods of the present attempt that are gone, as they were last seen."""
    older: tuple[Pod, ...]
    """Pods of earlier attempts, or replaced ones, in which something may still run, those on lost nodes excepted."""
    left: tuple[Pod, ...]
    """Pods of earlier attempts, or that were replaced, that are to go: what ended long ago, what a lost node keeps."""
    orphans: tuple[Pod, ...]
    """Pods of a deleted job of this name that are stopping on lost nodes: nobody else would ever let go of them."""
    lost: frozenset[str]
    """uids of live pods whose node is declared lost."""
    lost_by_node: frozenset[str]
    """Those of them for which the cluster says that their node is not heard. That a pod stays beyond its grace says so
    only of the time since it was told to stop."""
    refusals: tuple[Refusal, ...]
    """What the server would not create, by the time of the next try."""
    conflicts: tuple[ConflictingObject, ...]
    """What stands where the job's objects should."""
    problems: tuple[Problem, ...]
    now: dt.datetime
    settings: Settings
    trackers: Mapping[int, stall.StepTracker] = field(default_factory=dict)
    """How the ranks of this attempt that report get on."""
    unheard: tuple[Unheard, ...] = ()
    """Its live pods on nodes that are not ready and not given up, by rank."""
    heard_at: dt.datetime | None = None
    """When rank 0 was heard last; None where nothing is expected of it."""

    @property
    def spec(self) -> api.Spec:
        """The job's spec."""
        return self.job.spec

    @property
    def alive(self) -> list[Pod]:
        """The pods of the present attempt in which something may still run, those on lost nodes excepted."""
        return [p for p in self.mine.values() if p.live and p.uid not in self.lost]

    @property
    def live(self) -> list[Pod]:
        """All pods in which something may still run, whatever their attempt."""
        return [p for p in (*self.mine.values(), *self.older) if p.live]

    @property
    def failed(self) -> list[Pod]:
        """The pods of the present attempt that ended otherwise than completed, those that are gone included. A rank
        that is recorded as completed stays so, whatever becomes of its pod."""
        completed = ranges.parse(self.status.completed_nodes)
        pods = {**self.deleted_pods, **self.mine}.values()
        return [p for p in pods if p.has_failed and p.rank not in completed]

    @property
    def standstill(self) -> stall.StallFinding | None:
        """What the reports prove of a job that makes no step."""
        return stall.find(self.trackers, self.spec.stall, self.now)

    def missing(self, present: str) -> bool:
        """Whether a rank is not in these ranges."""
        return not ranges.parse(present) >= set(range(self.spec.nodes))

    def stop(self, pods: Sequence[Pod], grace_seconds: int | None) -> tuple[DeletePod, ...]:
        """Stop them. One that is stopping is not told again; one on a lost node will never answer: it goes at once.

        Only those: with a grace of 0 the object goes before the kubelet has ended anything, and the next attempt would
        start beside the last.
        """
        found = []
        for pod in sorted(pods, key=by_identity):
            if pod.uid in self.lost:
                found.append(DeletePod(pod.name, pod.uid, 0))
            elif pod.deletion_requested_at is None:
                found.append(DeletePod(pod.name, pod.uid, grace_seconds))
        return tuple(found)

    def active_deadline(self) -> dt.datetime | None:
        """When the job must be finished."""
        return after(self.status.start_time, self.spec.active_deadline_seconds)

    def start_deadline(self) -> dt.datetime | None:
        """When all nodes must have run; None once they have in this attempt."""
        if not self.missing(self.status.started_nodes):
            return None
        return after(self.status.attempt_time, self.spec.start_deadline_seconds)


def look(job: api.DDPJob, seen: Observed, now: dt.datetime, problems: tuple[Problem, ...], settings: Settings) -> View:
    """Sort what is there by what it is to this job, and note its facts in the status."""
    status = job.status
    starts = not problems and not job.spec.suspend and status.state not in (*statuses.TERMINAL, "Failing")
    own = [_judged(p, job, now) for p in owned(job, seen)]
    if starts and (status.attempt == 0 or status.state == "Suspended"):
        # A status that was lost (a restored backup) must not bring an attempt to life twice.
        known = replace(status, attempt=max((status.attempt, *(p.attempt for p in own))))
        status = replace(new_attempt(known, now), start_time=now)
    gone = [p for p in seen.pods if p.live and is_past(lost_at(p, seen.nodes, settings), now)]
    lost = frozenset(p.uid for p in gone if is_own(p, job))
    mine = {p.rank: p for p in own if is_present(p, status) and 0 <= p.rank < job.spec.nodes}
    deleted_pods = {p.rank: p for p in seen.deleted_pods if is_own(p, job) and is_present(p, status)}
    others = sorted((p for p in own if not is_present(p, status)), key=by_identity)
    status = statuses.with_progress(note(status, mine, deleted_pods, job, seen), seen.reports.get(0))
    trackers = {rank: p for rank, p in seen.trackers.items() if p.attempt in (0, status.attempt)}
    status = statuses.with_idle(status, stall.idle_since(trackers, job.spec.stall, now))
    # What was said in the attempt before this one, which begins with this look, is counted already.
    agent = agent_restarts.newest(mine, deleted_pods, seen) if status.attempt == job.status.attempt else None
    return View(
        job=job,
        recorded=job.status,
        status=agent_restarts.with_agent(status, agent, job, mine, now),
        service=seen.service,
        mine=mine,
        deleted_pods=deleted_pods,
        older=tuple(p for p in others if p.live and p.uid not in lost),
        left=tuple(p for p in others if p.uid in lost or (not p.live and _is_long_ago(p, status))),
        orphans=tuple(sorted((p for p in gone if is_namesake(p, job) and p.deletion_requested_at), key=by_identity)),
        lost=lost,
        lost_by_node=frozenset(p.uid for p in gone if seen.nodes is not None or p.silent_since is not None) & lost,
        conflicts=tuple(
            sorted((*seen.conflicts, *_foreign_pods(job, seen, status)), key=lambda f: (f.of_deleted_job, f.name))
        ),
        refusals=tuple(sorted(seen.refusals, key=lambda r: (r.retry_at, r.name))),
        problems=problems,
        now=now,
        settings=settings,
        unheard=tuple(_unheard(mine, seen, settings, lost)),
        trackers=trackers,
        heard_at=report_age.heard_at(status, seen),
    )


def is_present(pod: Pod, status: api.Status) -> bool:
    """Whether it is the pod that counts of its rank, in the present attempt."""
    return _turn(pod) == _present_turn(status, pod.rank)


def is_over(pod: Pod, status: api.Status) -> bool:
    """Whether another pod has taken its place, by what is recorded."""
    return _turn(pod) < _present_turn(status, pod.rank)


def _turn(pod: Pod) -> tuple[int, int]:
    """Which of the pods of its rank it is, over all attempts."""
    return (pod.attempt, pod.replacement)


def _present_turn(status: api.Status, rank: int) -> tuple[int, int]:
    return (status.attempt, naming.replacement(status, rank))


def _is_long_ago(pod: Pod, status: api.Status) -> bool:
    if pod.attempt == status.attempt:
        return pod.replacement <= naming.replacement(status, pod.rank) - ATTEMPTS_KEPT
    return pod.attempt <= status.attempt - ATTEMPTS_KEPT


def note(
    status: api.Status, mine: dict[int, Pod], deleted_pods: dict[int, Pod], job: api.DDPJob, seen: Observed
) -> api.Status:
    """The facts that outlive their pods: who has run, who has completed."""
    # A name is used once: what had a node may have run, and may still run where nobody looks.
    ran = {r for r, p in mine.items() if p.trainer.state != "waiting" and not p.trainer.init}
    started = ran | {r for r, p in deleted_pods.items() if p.node}
    done = {r for r, p in {**deleted_pods, **mine}.items() if p.has_completed}
    if (done or status.completed_nodes) and status.reason in _ALL_PODS_WERE_MADE:
        # It was there, and is not: without it the others could not have completed. A new pod would wait for them.
        started |= set(range(job.spec.nodes)) - set(mine)
    ready = sum(p.trainer.state == "running" and p.trainer.ready and p.live for p in mine.values())
    meet = seen.master_addr if seen.master_addr is not None else str(naming.endpoint(job, status.attempt))
    return replace(
        status,
        started_nodes=ranges.text(ranges.parse(status.started_nodes) | started),
        completed_nodes=ranges.text(ranges.parse(status.completed_nodes) | done),
        nodes=api.Nodes(total=job.spec.nodes, ready=ready),
        master_addr=meet if status.attempt else "",
    )


def new_attempt(status: api.Status, at: dt.datetime) -> api.Status:
    """The next life of all pods, not before `at`: nobody has started or completed in it."""
    return replace(
        status,
        attempt=status.attempt + 1,
        attempt_time=at,
        started_nodes="",
        completed_nodes="",
        replacements={},
        in_place=None,
        running_time=None,
        first_step_time=None,
        furthest_step=budgets.furthest(status),
    )


def lost_at(pod: Pod, nodes: Mapping[str, Node] | None, settings: Settings) -> dt.datetime | None:
    """When the node of a pod is declared lost; None while nothing speaks for it.

    Where nodes can be read, by what the cluster says of them; a pod that stays beyond its grace on a node that is not
    ready is lost whatever the other nodes do. Elsewhere by what the node controller does to the pod,
    or by a pod that stays beyond its grace: a kubelet that lives would have ended it.
    """
    patience = dt.timedelta(seconds=settings.lost_node_seconds)
    if nodes is not None:
        node = nodes.get(pod.node)
        if node is None or node.ready or node.since is None:
            return None
        if not node.with_most:
            return node.since + patience
        return None if pod.deletion_deadline is None else max(node.since, pod.deletion_deadline) + patience
    since = earliest(pod.silent_since, pod.deletion_deadline)
    return None if since is None or not pod.node else since + patience


def _unheard(mine: Mapping[int, Pod], seen: Observed, settings: Settings, lost: frozenset[str]) -> Iterator[Unheard]:
    for _, pod in sorted(mine.items()):
        node = (seen.nodes or {}).get(pod.node)
        since = pod.silent_since if seen.nodes is None else node.since if node is not None and not node.ready else None
        if pod.live and pod.uid not in lost and since is not None:
            yield Unheard(pod, since, lost_at(pod, seen.nodes, settings))


def _judged(pod: Pod, job: api.DDPJob, now: dt.datetime) -> Pod:
    return replaced(pod, outlived=True) if is_past(outlived_at(pod, job.spec), now) else pod


def is_done_beside_sidecars(pod: Pod) -> bool:
    """Whether its trainer has ended with 0 and another container has not ended at all."""
    return pod.trainer.state == "ended" and pod.trainer.exit_code == 0 and pod.sidecars_run


def outlived_at(pod: Pod, spec: api.Spec) -> dt.datetime | None:
    """When a sidecar that still runs shows that nobody ends the pod; None where none does.

    Who evicts a pod, or shuts its node down, tells all its containers at once and gives each the pod's grace: a trainer
    that saves and ends with 0 looks as if it had completed, for as long as its sidecar takes.
    """
    since = pod.done_since or pod.trainer.ended_at
    if since is None or not is_done_beside_sidecars(pod):
        return None
    return since + dt.timedelta(seconds=podspec.grace_seconds(spec.template) + OUTLIVED_SECONDS)


def next_loss(job: api.DDPJob, seen: Observed, settings: Settings, now: dt.datetime) -> dt.datetime | None:
    """When the next node will be declared lost, or a rank completed beside its sidecar, if nothing changes."""
    pods = (p for p in seen.pods if p.live and (is_own(p, job) or is_namesake(p, job)))
    times = (lost_at(p, seen.nodes, settings) for p in pods)
    done = (outlived_at(p, job.spec) for p in owned(job, seen))
    return earliest(*(t for t in (*times, *done) if t is not None and t > now))


def is_stale(job: api.DDPJob, seen: Observed) -> bool:
    """Whether pods of a newer attempt than the status knows are there: then the status that was read is an old one.

    An empty status is no old one but a lost one, or a write that follows will conflict: that costs nothing.
    """
    status = job.status
    return status.state is not None and any(_turn(p) > _present_turn(status, p.rank) for p in owned(job, seen))


def owned(job: api.DDPJob, seen: Observed) -> list[Pod]:
    """The pods that this job made."""
    return [p for p in seen.pods if is_own(p, job)]


def is_own(pod: Pod, job: api.DDPJob) -> bool:
    """Whether this job made it."""
    return bool(job.metadata.uid) and pod.owner_uid == job.metadata.uid


def is_namesake(pod: Pod, job: api.DDPJob) -> bool:
    """Whether a deleted job of the same name made it: of two jobs of one name only one can be there."""
    return pod.job == job.metadata.name and bool(pod.owner_uid) and not is_own(pod, job)


def restart_grace_seconds(spec: api.Spec) -> int:
    """After a failure the group is broken: nothing can be saved together, so the full grace would only cost time."""
    grace = podspec.grace_seconds(spec.template)
    return max(1, min(10, grace) if spec.restart_grace_seconds is None else spec.restart_grace_seconds)


def after(start: dt.datetime | None, seconds: float | None) -> dt.datetime | None:
    """So many seconds later; None where either is not set."""
    return None if start is None or seconds is None else start + dt.timedelta(seconds=seconds)


def earliest(*times: dt.datetime | None) -> dt.datetime | None:
    """The earliest of those that are set."""
    return min((t for t in times if t is not None), default=None)


def is_past(time: dt.datetime | None, now: dt.datetime) -> bool:
    """Whether a time that is set has come."""
    return time is not None and now >= time


def by_identity(pod: Pod) -> tuple[int, int, int, str]:
    """A key to sort pods by."""
    return (pod.attempt, pod.rank, pod.replacement, pod.uid)


def name_pods(pods: Sequence[Pod]) -> str:
    """`digits-1-0 on gpu-07`, or how many they are."""
    if len(pods) == 1:
        return pods[0].name + (f" on {pods[0].node}" if pods[0].node else "")
    return f"{len(pods)} pods"


def _foreign_pods(job: api.DDPJob, seen: Observed, status: api.Status) -> Iterator[ConflictingObject]:
    ranks = range(job.spec.nodes)
    names = {naming.present_pod_name(job, status, rank) for rank in ranks}
    for pod in seen.pods:
        if is_own(pod, job):
            continue
        # A namesake's pod answers to the same DNS name, whatever its attempt, until it has ended.
        namesake = is_namesake(pod, job)
        if pod.name in names or (namesake and not pod.ended):
            yield ConflictingObject("Pod", pod.name, of_deleted_job=namesake)
