"""What to do next: the one function that decides, in the cluster, in the local run and in the simulation.

`plan(job, seen, now)` does no I/O, takes the time as an argument, gives a plan for any world, and never trusts an
event, only what is there. Whoever calls it writes the status first (only if it changed), then deletes, then creates,
and then sends the events. A pod is deleted only for a reason that the *observed* status already records: a failure or
a completed rank is never lost with the pod that proved it. So a stop takes two looks: one records, the next deletes.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from ddpjob_operator import api, causes, contract, launcher, podspec, reasons
from ddpjob_operator import status as statuses
from ddpjob_operator.observed import Foreign, Observed, Pod, Refusal
from ddpjob_operator.reasons import Reason
from ddpjob_operator.validation import Problem

START_BACK_OFF_SECONDS = (60, 120, 240, 480, 960, 1800)
# The kubelet's waiting reasons that mend themselves are not in here: ContainerCreating, PodInitializing.
CANNOT_START = frozenset(
    "ErrImagePull ImagePullBackOff ErrImageNeverPull InvalidImageName RegistryUnavailable ImageInspectError "
    "CreateContainerConfigError CreateContainerError RunContainerError CrashLoopBackOff".split()
)


@dataclass(frozen=True)
class CreateService:
    """Create the job's headless Service."""


@dataclass(frozen=True)
class CreatePod:
    """Create the pod of a node. Its body follows from the job alone: pods are known by identity, never by content."""

    attempt: int
    rank: int


@dataclass(frozen=True)
class DeletePod:
    """Stop and delete a pod. grace_seconds: None is the pod's own terminationGracePeriodSeconds."""

    name: str
    uid: str
    grace_seconds: int | None = None


@dataclass(frozen=True)
class DeleteJob:
    """Delete the job itself, with all that it owns."""

    uid: str


Action = CreateService | CreatePod | DeletePod | DeleteJob


@dataclass(frozen=True)
class Event:
    """What `kubectl describe` shows under Events."""

    type: str
    reason: str
    message: str


@dataclass(frozen=True)
class Plan:
    """status: None where nothing is to be written. look_again_at: when time alone may change the answer."""

    actions: tuple[Action, ...] = ()
    status: api.Status | None = None
    events: tuple[Event, ...] = ()
    look_again_at: dt.datetime | None = None


@dataclass(frozen=True)
class Settings:
    """What the shell, not the user, decides."""

    progress_write_seconds: float = 10.0
    """Progress alone writes the status at most this often: with a hundred jobs that is 10 writes a second."""


@dataclass(frozen=True)
class Verdict:
    """What one rule says: what is true now, and what follows."""

    status: api.Status
    actions: tuple[Action, ...] = ()
    look_again_at: dt.datetime | None = None


@dataclass(frozen=True)
class Scene:
    """The job and what is there, sorted once for all rules."""

    job: api.DDPJob
    recorded: api.Status
    """The status as observed: only what stands here may cost a pod."""
    status: api.Status
    """The status with the facts of this look noted."""
    service: bool
    mine: dict[int, Pod]
    """The pods of the present attempt by rank."""
    older: tuple[Pod, ...]
    """Pods of earlier attempts in which something may still run."""
    refusals: tuple[Refusal, ...]
    """What the server would not create, by the time of the next try."""
    foreign: tuple[Foreign, ...]
    """What stands where the job's objects should."""
    problems: tuple[Problem, ...]
    now: dt.datetime

    @property
    def spec(self) -> api.Spec:
        """The job's spec."""
        return self.job.spec


def plan(
    job: api.DDPJob,
    seen: Observed,
    now: dt.datetime,
    *,
    problems: Sequence[Problem] = (),
    settings: Settings = Settings(),
) -> Plan:
    """What to do next for `job`. problems: what validation found in its spec."""
    if job.metadata.deletion_timestamp is not None or job.spec.managed_by or is_stale(job, seen):
        return Plan()
    scene = look(job, seen, now, tuple(problems))
    verdict = next(v for rule in RULES if (v := rule(scene)) is not None)
    new = statuses.with_progress(verdict.status, seen.reports.get(0))
    new = statuses.finish(job.status, new, job, _sentence(problems), now)
    new, wait_until = throttle(job.status, new, settings)
    return Plan(
        actions=verdict.actions,
        status=None if new == job.status else new,
        events=(*events(job.status, new), *remarks(job, new)),
        look_again_at=min((t for t in (verdict.look_again_at, wait_until) if t is not None), default=None),
    )


# ------------------------------------------------------------------------------------------------ the rules, in order


def finished(s: Scene) -> Verdict | None:
    """A terminal state is final; what is left is to clean up."""
    if s.recorded.state not in statuses.TERMINAL:
        return None
    unwanted = {"None": [], "Running": [p for p in s.mine.values() if p.live], "All": [*s.mine.values()]}
    actions: list[Action] = [*_delete([*unwanted[s.spec.clean_pod_policy], *s.older], None)]
    ends = _after(s.recorded.completion_time, s.spec.ttl_seconds_after_finished)
    if ends is not None and s.now >= ends:
        actions = [DeleteJob(s.job.metadata.uid)]
    # Frozen but for the pods that are still there.
    return Verdict(replace(s.recorded, nodes=s.status.nodes), tuple(actions), ends if ends and s.now < ends else None)


def invalid(s: Scene) -> Verdict | None:
    """A spec that cannot run starts nothing, and what runs may only be suspended."""
    if not s.problems:
        return None
    if s.status.attempt:
        return suspended(s) or Verdict(s.status)
    return Verdict(statuses.enter(s.status, "Pending", reasons.INVALID_SPEC, _sentence(s.problems), s.now))


def completed(s: Scene) -> Verdict | None:
    """All trainers ended with 0, also those whose pods have vanished since."""
    # Of a suspended job spec.nodes may have changed since: the ranks that completed were ranks of another group.
    if not s.status.attempt or s.status.state in ("Failing", "Suspended") or _missing(s, s.status.completed_nodes):
        return None
    text = f"all {s.spec.nodes} nodes completed" if s.spec.nodes > 1 else "the node completed"
    done = statuses.enter(s.status, "Succeeded", reasons.ALL_NODES_COMPLETED, text, s.now)
    return Verdict(replace(done, completion_time=s.now))


def failing(s: Scene) -> Verdict | None:
    """The job will fail: its pods are stopped, and the cause is settled when the last of them has ended.

    Not at the first signal: peers' "connection closed" is often seen before the out-of-memory kill behind it.
    """
    if s.recorded.state != "Failing":
        return None
    broken = s.recorded.reason == reasons.RANK_FAILED.name
    alive = [p for p in (*s.mine.values(), *s.older) if p.live]
    if alive:
        text = _failing_message(s, alive)
        stop = _delete(alive, restart_grace_seconds(s.spec) if broken else None)
        return Verdict(replace(s.status, message=text), tuple(stop))
    status, text = s.status, s.recorded.message
    if broken:
        status, text = _settle(s)
    failed = statuses.enter(status, "Failed", reasons.ALL[s.recorded.reason], text, s.now)
    return Verdict(replace(failed, completion_time=s.now))


def suspended(s: Scene) -> Verdict | None:
    """The pods stop with their full grace; the clocks start anew on resume."""
    if not s.spec.suspend:
        return None
    alive = [p for p in (*s.mine.values(), *s.older) if p.live]
    text = f"suspended; {_pods(alive)} still stopping" if alive else "suspended; set spec.suspend to false to go on"
    status = statuses.enter(s.status, "Suspended", reasons.SUSPENDED, text, s.now)
    status = replace(status, start_time=None, start_retries=0)
    return Verdict(status, tuple(_delete(alive, None)) if s.recorded.state == "Suspended" else ())


def past_deadline(s: Scene) -> Verdict | None:
    """activeDeadlineSeconds after the (last) start the job fails, whatever it does."""
    end = _active_deadline(s)
    if end is None or s.now < end:
        return None
    limit = s.spec.active_deadline_seconds
    text = f"not finished within activeDeadlineSeconds: {limit}; stopping all nodes"
    return Verdict(statuses.enter(s.status, "Failing", reasons.DEADLINE_EXCEEDED, text, s.now))


def attempt_still_ending(s: Scene) -> Verdict | None:
    """No attempt starts while a process of the one before may live: two groups would train into one checkpoint."""
    if not s.older:
        return None
    stop = [p for p in s.older if p.attempt < s.recorded.attempt]
    broken = s.recorded.last_failure
    soft = [p for p in stop if broken is None or broken.attempt != p.attempt]
    hard = [p for p in stop if p not in soft]
    actions = [*_delete(soft, None), *_delete(hard, restart_grace_seconds(s.spec))]
    text = f"attempt {s.status.attempt} waits for {_pods(s.older)} of the attempt before to stop"
    return Verdict(statuses.enter(s.status, "Pending", reasons.WAITING_FOR_OLD_PODS, text, s.now), tuple(actions))


def rank_failed(s: Scene) -> Verdict | None:
    """One rank failed, so the group is broken: the others hang in a collective until their time-out."""
    failed = [p for p in s.mine.values() if _has_failed(p)]
    vanished = sorted(
        contract.numbers(s.status.started_nodes) - contract.numbers(s.status.completed_nodes) - set(s.mine)
    )
    if not failed and not vanished:
        return None
    cause = _cause(s, failed, vanished)
    status = statuses.with_failure(s.status, cause, causes.sentence(cause))
    alive = [p for p in s.mine.values() if p.live]
    status = statuses.enter(status, "Failing", reasons.RANK_FAILED, causes.sentence(cause), s.now)
    return Verdict(replace(status, message=_failing_message(dataclasses.replace(s, status=status), alive)))


def start_overdue(s: Scene) -> Verdict | None:
    """Not all nodes ran in time: release them all, for two half-placed jobs must not block each other for ever."""
    end = _start_deadline(s)
    if end is None or s.now < end:
        return None
    retries = s.status.start_retries + 1
    wait = start_back_off_seconds(s.job.metadata.uid, retries)
    running = sum(p.trainer.state == "running" for p in s.mine.values())
    text = (
        f"{running} of {s.spec.nodes} nodes ran within startDeadlineSeconds: {s.spec.start_deadline_seconds}; "
        f"all are released, next try in {statuses.duration(wait)}"
    )
    after = replace(new_attempt(s.status, s.now + dt.timedelta(seconds=wait)), start_retries=retries)
    return Verdict(statuses.enter(after, "Pending", reasons.START_BACK_OFF, text, s.now))


def backing_off(s: Scene) -> Verdict | None:
    """The next attempt is in the future."""
    if s.status.attempt_time is None or s.now >= s.status.attempt_time:
        return None
    return Verdict(s.status, look_again_at=_earliest(s.status.attempt_time, _active_deadline(s)))


def name_taken(s: Scene) -> Verdict | None:
    """A foreign object is never taken over; what a deleted job of the same name left goes away by itself."""
    if not s.foreign or not _to_create(s):
        return None
    first = s.foreign[0]
    more = f" and {len(s.foreign) - 1} more" if len(s.foreign) > 1 else ""
    if all(f.deleted_job for f in s.foreign):
        text = f"waiting for {first.kind.lower()} {first.name}{more} of the deleted job of this name"
        return Verdict(statuses.enter(s.status, "Pending", reasons.WAITING_FOR_DELETED_JOB, text, s.now))
    text = f"a {first.kind} named {first.name}{more} is not this job's. Delete it, or give the job another name"
    return Verdict(statuses.enter(s.status, "Pending", reasons.NAME_TAKEN, text, s.now))


def create_refused(s: Scene) -> Verdict | None:
    """The server would not create something; say its own sentence, and try again after a while."""
    wanted = [a for a in _to_create(s) if isinstance(a, CreatePod)]
    names = {contract.pod_name(s.job, a.attempt, a.rank) for a in wanted} | (
        set() if s.service else {s.job.metadata.name}
    )
    waiting = [r for r in s.refusals if r.name in names and r.retry_at > s.now]
    if not waiting:
        return None
    more = f" (and {len(waiting) - 1} more)" if len(waiting) > 1 else ""
    text = f"{waiting[0].name}{more} was refused: {waiting[0].message}"
    again = _earliest(*(r.retry_at for r in waiting), _active_deadline(s), _start_deadline(s))
    return Verdict(statuses.enter(s.status, "Pending", reasons.CREATE_REFUSED, text, s.now), look_again_at=again)


def nodes_missing(s: Scene) -> Verdict | None:
    """Create what is missing; a rank that has run is never created again in its attempt."""
    missing = _to_create(s)
    if not missing:
        return None
    status = s.status
    # What was refused and is tried again: its words stand until the server has said something else.
    again = status.reason == reasons.CREATE_REFUSED.name and bool(s.refusals)
    if status.state not in ("Starting", "Running") and not again:
        count = sum(isinstance(action, CreatePod) for action in missing)
        text = f"attempt {status.attempt}: creating {count} of {s.spec.nodes} pods"
        status = statuses.enter(status, "Pending", reasons.CREATING_PODS, text, s.now)
    return Verdict(status, missing, _earliest(_active_deadline(s), _start_deadline(s)))


def waiting_for_nodes(s: Scene) -> Verdict | None:
    """Some trainers do not run yet."""
    waiting = [s.mine[r] for r in sorted(s.mine) if s.mine[r].trainer.state == "waiting"]
    if not waiting:
        return None
    state, reason, text = _why_waiting(s, waiting)
    again = _earliest(_active_deadline(s), _start_deadline(s))
    return Verdict(statuses.enter(s.status, state, reason, text, s.now), look_again_at=again)


def all_is_well(s: Scene) -> Verdict | None:
    """The trainers of all nodes run, or have completed."""
    count = len(contract.numbers(s.status.completed_nodes))
    done = f" and {count} completed" if count else ""
    text = f"{s.spec.nodes - count} of {s.spec.nodes} nodes run{done}, attempt {s.status.attempt}"
    status = statuses.enter(s.status, "Running", reasons.ALL_NODES_RUN, text, s.now)
    return Verdict(replace(status, start_retries=0), look_again_at=_active_deadline(s))


# The order is the design. The last rule always speaks.
RULES: tuple[Callable[[Scene], Verdict | None], ...] = (
    finished,
    invalid,
    completed,
    failing,
    suspended,
    past_deadline,
    attempt_still_ending,
    rank_failed,
    start_overdue,
    backing_off,
    name_taken,
    create_refused,
    nodes_missing,
    waiting_for_nodes,
    all_is_well,
)


# ------------------------------------------------------------------------------------------------ leaves


def look(job: api.DDPJob, seen: Observed, now: dt.datetime, problems: tuple[Problem, ...]) -> Scene:
    """Sort what is there by what it is to this job, and note its facts in the status."""
    status = job.status
    starts = not problems and not job.spec.suspend and status.state not in (*statuses.TERMINAL, "Failing")
    own = _own(job, seen)
    if starts and (status.attempt == 0 or status.state == "Suspended"):
        # A status that was lost (a restored backup) must not bring an attempt to life twice.
        known = replace(status, attempt=max((status.attempt, *(p.attempt for p in own))))
        status = replace(new_attempt(known, now), start_time=now)
    mine = {p.rank: p for p in own if p.attempt == status.attempt and 0 <= p.rank < job.spec.nodes}
    older = tuple(sorted((p for p in own if p.attempt != status.attempt and p.live), key=_by_identity))
    return Scene(
        job=job,
        recorded=job.status,
        status=note(status, mine, job, seen),
        service=seen.service,
        mine=mine,
        older=older,
        foreign=tuple(
            sorted((*seen.foreign, *_foreign_pods(job, seen, status.attempt)), key=lambda f: (f.deleted_job, f.name))
        ),
        refusals=tuple(sorted(seen.refusals, key=lambda r: (r.retry_at, r.name))),
        problems=problems,
        now=now,
    )


def note(status: api.Status, mine: dict[int, Pod], job: api.DDPJob, seen: Observed) -> api.Status:
    """The facts that outlive their pods: who has run, who has completed."""
    started = {r for r, p in mine.items() if p.trainer.state != "waiting"}
    done = {r for r, p in mine.items() if has_completed(p)}
    ready = sum(p.trainer.state == "running" and p.trainer.ready and p.live for p in mine.values())
    meet = seen.master_addr if seen.master_addr is not None else str(contract.endpoint(job, status.attempt))
    return replace(
        status,
        started_nodes=contract.ranges(contract.numbers(status.started_nodes) | started),
        completed_nodes=contract.ranges(contract.numbers(status.completed_nodes) | done),
        nodes=api.Nodes(total=job.spec.nodes, ready=ready),
        master_addr=meet if status.attempt else "",
    )


def new_attempt(status: api.Status, at: dt.datetime) -> api.Status:
    """The next life of all pods, not before `at`: nobody has started or completed in it."""
    return replace(status, attempt=status.attempt + 1, attempt_time=at, started_nodes="", completed_nodes="")


def is_stale(job: api.DDPJob, seen: Observed) -> bool:
    """Whether pods of a newer attempt than the status knows are there: then the status that was read is an old one.

    An empty status is no old one but a lost one, or a write that follows will conflict: that costs nothing.
    """
    return job.status.state is not None and max((p.attempt for p in _own(job, seen)), default=0) > job.status.attempt


def has_completed(pod: Pod) -> bool:
    """Ended with 0 by itself. Exit 0 after being told to stop is not success."""
    return pod.trainer.state == "ended" and pod.trainer.exit_code == 0 and not pod.told_to_stop


def restart_grace_seconds(spec: api.Spec) -> int:
    """After a failure the group is broken: nothing can be saved together, so the full grace would only cost time."""
    grace = podspec.grace_seconds(spec.template)
    return min(10, grace) if spec.restart_grace_seconds is None else spec.restart_grace_seconds


def start_back_off_seconds(uid: str, retries: int) -> int:
    """1, 2, 4 ... 30 min, less up to a fifth that differs by job: two jobs that block each other part ways."""
    base = START_BACK_OFF_SECONDS[min(retries, len(START_BACK_OFF_SECONDS)) - 1]
    share = int.from_bytes(hashlib.sha256(f"{uid}/{retries}".encode()).digest()[:2], "big") / 2**16
    return round(base * (1 - share / 5))


def throttle(old: api.Status, new: api.Status, settings: Settings) -> tuple[api.Status, dt.datetime | None]:
    """Progress alone is written now and then; with anything else it goes along for free."""
    if old.progress is None or new.progress is None or old.progress.updated >= new.progress.updated:
        return new if old.progress is None or new.progress is None else replace(new, progress=old.progress), None
    due = old.progress.updated + dt.timedelta(seconds=settings.progress_write_seconds)
    if new.progress.updated >= due or statuses.apart_from_progress(old) != statuses.apart_from_progress(new):
        return new, None
    return old, due


def events(old: api.Status, new: api.Status) -> Iterator[Event]:
    """One event for each change of state or reason: as many as a person wants to read."""
    if (old.state, old.reason) != (new.state, new.reason) and new.reason in reasons.ALL:
        yield _event(reasons.ALL[new.reason], new.message)
    elif not statuses.condition(old, "Accepted") and old.conditions and statuses.condition(new, "Accepted"):
        yield Event("Normal", "Accepted", "the spec is valid now")


def remarks(job: api.DDPJob, new: api.Status) -> Iterator[Event]:
    """What the user set and the job changes, or what may keep the ranks apart; said once, with the first attempt."""
    if job.status.attempt or not new.attempt:
        return
    policy = job.spec.template["spec"].get("restartPolicy", "Never")
    if policy != "Never":
        text = f"restartPolicy: {policy} becomes Never: the kubelet's own restarts would break the group"
        yield _event(reasons.RESTART_POLICY_CHANGED, text)
    names = ", ".join(contract.overridden(job))
    if names:
        text = f"{names}: your value and not the job's; the ranks meet only if it is right on every node"
        yield _event(reasons.RENDEZVOUS_OVERRIDDEN, text)
    for text in launcher.warnings(job.spec):
        yield _event(reasons.LAUNCHER_OPTION, text)


def _event(reason: Reason, message: str) -> Event:
    return Event("Warning" if reason.warning else "Normal", reason.name, message)


def _own(job: api.DDPJob, seen: Observed) -> list[Pod]:
    return [p for p in seen.pods if job.metadata.uid and p.owner_uid == job.metadata.uid]


def _settle(s: Scene) -> tuple[api.Status, str]:
    """The cause, now that all that can be known is known. A cause whose pod has vanished since stays as recorded."""
    failed = [p for p in s.mine.values() if _has_failed(p)]
    first = s.recorded.last_failure
    if first is not None and first.pod not in {p.name for p in failed}:
        return s.status, causes.sentence(first)
    cause = _cause(s, failed, [])
    text = causes.sentence(cause)
    return statuses.with_failure(s.status, cause, text), text


def _cause(s: Scene, failed: list[Pod], vanished: Sequence[int]) -> api.Failure:
    attempt, rank_of = s.status.attempt, functools.partial(contract.rank_of_node, s.spec)
    if failed:
        return causes.root_cause(attempt, failed, rank_of, s.now)
    rank = vanished[0] if vanished else 0
    return causes.gone(attempt, rank, contract.pod_name(s.job, attempt, rank), rank_of, s.now)


def _failing_message(s: Scene, alive: Sequence[Pod]) -> str:
    if s.status.last_failure is None or s.status.reason != reasons.RANK_FAILED.name:
        return s.status.message
    text = causes.sentence(s.status.last_failure)
    return f"{text}; stopping {_pods(alive)}, the cause is settled when all have ended" if alive else text


def _has_failed(pod: Pod) -> bool:
    return pod.ended and not has_completed(pod)


def _to_create(s: Scene) -> tuple[Action, ...]:
    known = contract.numbers(s.status.started_nodes) | set(s.mine)
    pods = [CreatePod(s.status.attempt, rank) for rank in range(s.spec.nodes) if rank not in known]
    return (*(() if s.service else (CreateService(),)), *pods)


def _missing(s: Scene, present: str) -> bool:
    return not contract.numbers(present) >= set(range(s.spec.nodes))


def _delete(pods: Sequence[Pod], grace_seconds: int | None) -> Iterator[DeletePod]:
    """A pod that is already being deleted is not deleted again."""
    for pod in sorted(pods, key=_by_identity):
        if pod.stop_asked_at is None:
            yield DeletePod(pod.name, pod.uid, grace_seconds)


def _foreign_pods(job: api.DDPJob, seen: Observed, attempt: int) -> Iterator[Foreign]:
    names = {contract.pod_name(job, attempt, rank) for rank in range(job.spec.nodes)}
    for pod in seen.pods:
        if pod.owner_uid == job.metadata.uid and job.metadata.uid:
            continue
        # A namesake's pod answers to the same DNS name, whatever its attempt, until it has ended.
        namesake = pod.job == job.metadata.name and bool(pod.owner_uid)
        if pod.name in names or (namesake and not pod.ended):
            yield Foreign("Pod", pod.name, deleted_job=namesake)


def _why_waiting(s: Scene, waiting: Sequence[Pod]) -> tuple[api.State, Reason, str]:
    total = s.spec.nodes
    homeless = [p for p in waiting if p.unschedulable]
    if homeless:
        where = "; onePodPerNode keeps them apart" if total > 1 and podspec.gpus(s.spec.template) else ""
        text = f"Unschedulable: {len(homeless)} of {total} pods: {homeless[0].unschedulable}{where}"
        return "Pending", reasons.UNSCHEDULABLE, text
    stuck = [p for p in waiting if p.trainer.reason in CANNOT_START]
    if stuck:
        first = stuck[0]
        why = f"{first.trainer.reason}: {first.trainer.message}"
        return "Pending", reasons.CANNOT_START, f"{len(stuck)} of {total} pods cannot start: {first.name}: {why}"
    who = contract.list_ranks([p.rank for p in waiting])
    return "Starting", reasons.STARTING_TRAINERS, f"{total - len(waiting)} of {total} nodes run; waiting for node {who}"


def _active_deadline(s: Scene) -> dt.datetime | None:
    return _after(s.status.start_time, s.spec.active_deadline_seconds)


def _start_deadline(s: Scene) -> dt.datetime | None:
    """None once all nodes have run in this attempt."""
    if not _missing(s, s.status.started_nodes):
        return None
    return _after(s.status.attempt_time, s.spec.start_deadline_seconds)


def _after(start: dt.datetime | None, seconds: int | None) -> dt.datetime | None:
    return None if start is None or seconds is None else start + dt.timedelta(seconds=seconds)


def _earliest(*times: dt.datetime | None) -> dt.datetime | None:
    return min((t for t in times if t is not None), default=None)


def _by_identity(pod: Pod) -> tuple[int, int, str]:
    return (pod.attempt, pod.rank, pod.uid)


def _pods(pods: Sequence[Pod]) -> str:
    if len(pods) == 1:
        return pods[0].name + (f" on {pods[0].node}" if pods[0].node else "")
    return f"{len(pods)} pods"


def _sentence(problems: Sequence[Problem]) -> str:
    return "; ".join(str(p) for p in problems)


__all__ = ["Action", "CreatePod", "CreateService", "DeleteJob", "DeletePod", "Event", "Plan", "Settings", "plan"]
