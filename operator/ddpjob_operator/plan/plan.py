"""What to do next: the one function that decides, in the cluster, in the local run and in the simulation.

`plan(job, seen, now)` does no I/O, takes the time as an argument, gives a plan for any world, and never trusts an
event, only what is there. Whoever calls it writes the status first (only if it changed), sends the events, then
deletes, then creates. A pod is deleted only for a reason that the *observed* status already records: a failure or
a completed rank is never lost with the pod that proved it. So a stop takes two looks: one records, the next deletes.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from dataclasses import replace as replaced

from msgspec.structs import replace

from ddpjob_operator.failures import sentences
from ddpjob_operator.job import api, launcher, podspec, ranges, reasons, times, wording
from ddpjob_operator.job.reasons import Reason
from ddpjob_operator.job.validation import Problem
from ddpjob_operator.observed.cluster import Observed, Pod
from ddpjob_operator.plan import agent_restarts, group_restart, invalid_spec, pod_replacement, redacted, report_age
from ddpjob_operator.plan import pending as waiting
from ddpjob_operator.plan import status as statuses
from ddpjob_operator.plan.view import (
    Action,
    CreatePod,
    CreateService,
    Decision,
    DeleteJob,
    DeletePod,
    EndPod,
    Settings,
    View,
    after,
    earliest,
    is_over,
    is_past,
    is_stale,
    look,
    name_pods,
    new_attempt,
    next_loss,
    restart_grace_seconds,
)
from ddpjob_operator.pods import environment, naming

STOPPING_ALL = "; stopping all nodes"
START_BACK_OFF_SECONDS = (60, 120, 240, 480, 960, 1800)
# The kubelet's waiting reasons that mend themselves are not in here: ContainerCreating, PodInitializing.
CANNOT_START = frozenset(
    "ErrImagePull ImagePullBackOff ErrImageNeverPull InvalidImageName RegistryUnavailable ImageInspectError "
    "CreateContainerConfigError CreateContainerError RunContainerError CrashLoopBackOff".split()
)
_BREAKS_THE_GROUP = "the kubelet's own restarts would break the group"
# Steps on the way back that nobody wants an event for: that the job restarts, and that it runs again, is said.
_ON_THE_WAY = frozenset(
    r.name for r in (reasons.CREATING_PODS, reasons.STARTING_TRAINERS, reasons.WAITING_FOR_OLD_PODS)
)
_SETTINGS = Settings()
# [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553]
_BUILD_PATH = re.compile(r"\[(?:[\w.-]*/){2,40}[\w.-]+:\d{1,6}\] ?")
_PICTURES = re.compile(r"(?: ?GLHF!)? ?[\U0001f000-\U0001ffff\u2600-\u27bf\ufe0f\u200d]+")
_SPACES = re.compile(r" {2,}")


@dataclass(frozen=True)
class Event:
    """What `kubectl describe` shows under Events."""

    type: str
    reason: str
    message: str


@dataclass(frozen=True)
class Plan:
    """status: None where nothing is to be written. requeue_at: when time alone may change the answer."""

    actions: tuple[Action, ...] = ()
    status: api.Status | None = None
    events: tuple[Event, ...] = ()
    requeue_at: dt.datetime | None = None


def plan(
    job: api.DDPJob,
    seen: Observed,
    now: dt.datetime,
    *,
    problems: Sequence[Problem] = (),
    settings: Settings = _SETTINGS,
) -> Plan:
    """What to do next for `job`. problems: what validation found in its spec."""
    if job.metadata.deletion_timestamp is not None or job.spec.managed_by or is_stale(job, seen):
        return Plan()
    written, job = job.status, replace(job, status=_not_ahead(job, now, settings))
    recorded, job = job.status, invalid_spec.as_it_was(job, problems)
    scene = look(job, seen, now, tuple(problems), settings)
    verdict = next(v for rule in RULES if (v := rule(scene)) is not None)
    said = invalid_spec.with_remark(verdict.status, problems)
    said, again_at = waiting.said_once(said, now)
    new = statuses.finish(
        recorded,
        said,
        job,
        invalid_spec.sentence(problems),
        now,
        silent=is_past(report_age.old_at(scene.heard_at), now),
    )
    if new != written:
        new = redacted.status(new)
    new, wait_until = throttle(recorded, new, settings, now)
    by_time = (next_loss(job, seen, settings, now), group_restart.next_look(scene), again_at)
    again = earliest(verdict.requeue_at, wait_until, *by_time)
    return Plan(
        actions=(*clear(scene), *verdict.actions),
        status=None if new == written else new,
        events=redacted.events(
            (
                *events(recorded, new, verdict.status.message),
                *acceptance(recorded, new, problems),
                *restarts_in_place(recorded, new),
                *remarks(job, new),
            )
        ),
        requeue_at=again,
    )


# ------------------------------------------------------------------------------------------------ the rules, in order


def finished(s: View) -> Decision | None:
    """A terminal state is final; what is left is to clean up."""
    if s.recorded.state not in statuses.TERMINAL:
        return None
    unwanted = {"None": [], "Running": [p for p in s.mine.values() if p.live], "All": [*s.mine.values()]}
    actions: tuple[Action, ...] = s.stop([*unwanted[s.spec.clean_pod_policy], *s.older], None)
    ends = after(s.recorded.completion_time, s.spec.ttl_seconds_after_finished)
    if ends is not None and s.now >= ends:
        actions = (DeleteJob(s.job.metadata.uid),)
    # Frozen but for the pods that are still there.
    return Decision(replace(s.recorded, nodes=s.status.nodes), actions, ends if ends and s.now < ends else None)


def invalid(s: View) -> Decision | None:
    """A spec that cannot run starts nothing. What runs goes on as it was (invalid_spec.py)."""
    if not s.problems or s.status.attempt:
        return None
    text = invalid_spec.sentence(s.problems)
    return Decision(statuses.enter(s.status, "Pending", reasons.INVALID_SPEC, text, s.now))


def completed(s: View) -> Decision | None:
    """All trainers ended with 0, also those whose pods have vanished since."""
    # Of a suspended job spec.nodes may have changed since: the ranks that completed were ranks of another group.
    if not s.status.attempt or s.status.state in ("Failing", "Suspended") or s.missing(s.status.completed_nodes):
        return None
    text = f"all {s.spec.nodes} nodes completed" if s.spec.nodes > 1 else "the node completed"
    done = statuses.enter(s.status, "Succeeded", reasons.ALL_NODES_COMPLETED, text, s.now)
    return Decision(replace(done, completion_time=s.now))


def failing(s: View) -> Decision | None:
    """The job will fail whatever its pods do; they get their full grace to save."""
    if s.recorded.state != "Failing":
        return None
    if any(p.uid not in s.lost for p in s.live):
        return Decision(s.status, s.stop(s.live, None))
    text = s.recorded.message.removesuffix(STOPPING_ALL)
    failed = statuses.enter(s.status, "Failed", reasons.named(s.recorded.reason), text, s.now)
    return Decision(replace(failed, completion_time=s.now))


def suspended(s: View) -> Decision | None:
    """The pods stop with their full grace; the clocks start anew on resume. An invalid spec is not resumed."""
    if not s.spec.suspend and not (s.problems and s.recorded.state == "Suspended"):
        return None
    status = replace(statuses.enter(s.status, "Suspended", *_why_suspended(s), s.now), start_retries=0)
    if s.live:
        return Decision(status, s.stop(s.live, None) if s.recorded.state == "Suspended" else ())
    # Not before the last pod has ended: without a startTime the API server lets the template change (crd.py).
    return Decision(replace(status, start_time=None))


def past_deadline(s: View) -> Decision | None:
    """activeDeadlineSeconds after the (last) start the job fails, whatever it does."""
    if not is_past(s.active_deadline(), s.now):
        return None
    limit = s.spec.active_deadline_seconds
    text = f"not finished within activeDeadlineSeconds: {limit}{STOPPING_ALL}"
    return Decision(statuses.enter(s.status, "Failing", reasons.DEADLINE_EXCEEDED, text, s.now))


def attempt_still_ending(s: View) -> Decision | None:
    """No attempt starts while a process of the one before may live: two groups would train into one checkpoint."""
    if not s.older:
        return None
    told = [p for p in s.older if is_over(p, s.recorded)]
    broken = s.recorded.last_failure.attempt if s.recorded.last_failure else None
    soft = s.stop([p for p in told if p.attempt != broken], None)
    hard = s.stop([p for p in told if p.attempt == broken], restart_grace_seconds(s.spec))
    if _is_in_the_future(s):
        return Decision(s.status, (*soft, *hard), requeue_at=earliest(s.status.attempt_time, s.active_deadline()))
    of = "of the attempt before " if any(p.attempt < s.status.attempt for p in s.older) else ""
    text = f"attempt {s.status.attempt} waits for {name_pods(s.older)} {of}to stop"
    return _waiting(s, "Pending", reasons.WAITING_FOR_OLD_PODS, text, (*soft, *hard))


def start_overdue(s: View) -> Decision | None:
    """Not all nodes ran in time: release them all, for two half-placed jobs must not block each other for ever."""
    if not is_past(s.start_deadline(), s.now):
        return None
    retries = s.status.start_retries + 1
    again = s.now + dt.timedelta(seconds=start_back_off_seconds(s.job.metadata.uid, retries))
    running = sum(p.trainer.state == "running" for p in s.mine.values())
    text = (
        f"{running} of {s.spec.nodes} nodes ran within startDeadlineSeconds: {s.spec.start_deadline_seconds}; "
        f"all are released, next try at {wording.clock(again)}"
    )
    later = replace(new_attempt(s.status, again), start_retries=retries)
    return Decision(statuses.enter(later, "Pending", reasons.START_BACK_OFF, text, s.now))


def backing_off(s: View) -> Decision | None:
    """The next attempt is in the future."""
    if not _is_in_the_future(s):
        return None
    return Decision(s.status, requeue_at=earliest(s.status.attempt_time, s.active_deadline()))


def no_pod_can_be_made(s: View) -> Decision | None:
    """What a pod is made from cannot be read: what runs goes on, and nothing is added to it."""
    if not invalid_spec.keeps_pods_from_being_made(s.problems) or not _to_create(s):
        return None
    text = f"no pod can be made while the spec is invalid: {invalid_spec.sentence(s.problems)}"
    return _waiting(s, "Pending", reasons.INVALID_SPEC, text)


def name_taken(s: View) -> Decision | None:
    """A foreign object is never taken over; what a deleted job of the same name left goes away by itself."""
    if not s.conflicts or not _to_create(s):
        return None
    first = s.conflicts[0]
    more = f" and {len(s.conflicts) - 1} more" if len(s.conflicts) > 1 else ""
    if all(f.of_deleted_job for f in s.conflicts):
        text = f"waiting for {first.kind.lower()} {first.name}{more} of the deleted job of this name"
        return _waiting(s, "Pending", reasons.WAITING_FOR_DELETED_JOB, text)
    text = f"a {first.kind} named {first.name}{more} is not this job's. Delete it, or give the job another name"
    return _waiting(s, "Pending", reasons.NAME_TAKEN, text)


def create_refused(s: View) -> Decision | None:
    """The server would not create something; say its own sentence, and try again after a while."""
    wanted = [a for a in _to_create(s) if isinstance(a, CreatePod)]
    names = {naming.pod_name(s.job, a.attempt, a.rank, a.replacement) for a in wanted} | (
        set() if s.service else {s.job.metadata.name}
    )
    waiting = [r for r in s.refusals if r.name in names and r.retry_at > s.now]
    if not waiting:
        return None
    more = f" (and {len(waiting) - 1} more)" if len(waiting) > 1 else ""
    text = f"{waiting[0].name}{more} was refused: {waiting[0].message}"
    return _waiting(s, "Pending", reasons.CREATE_REFUSED, text, again=earliest(*(r.retry_at for r in waiting)))


def nodes_missing(s: View) -> Decision | None:
    """Create what is missing; a rank that has run is never created again in its attempt."""
    missing = _to_create(s)
    if not missing:
        return None
    # What was refused and is tried again: its words stand until the server has said something else.
    again = s.status.reason == reasons.CREATE_REFUSED.name and bool(s.refusals)
    if again or s.status.state in ("Starting", "Running"):
        return Decision(s.status, missing, earliest(s.active_deadline(), s.start_deadline()))
    count = sum(isinstance(action, CreatePod) for action in missing)
    text = f"attempt {s.status.attempt}: creating {count} of {s.spec.nodes} pods"
    return _waiting(s, "Pending", reasons.CREATING_PODS, text, missing)


def avoidance_over(s: View) -> Decision | None:
    """A pod that finds no node, and was made when one was avoided that no longer is: a pod's affinity never changes."""
    since = s.status.attempt_time
    over = [a.node for a in s.status.avoided_nodes if since is not None and since < a.until <= s.now]
    if not over or not any(p.trainer.state == "waiting" and p.unschedulable for p in s.mine.values()):
        return None
    text = f"{', '.join(over)} is no longer avoided: all pods are asked for anew"
    return Decision(statuses.enter(new_attempt(s.status, s.now), "Pending", reasons.CREATING_PODS, text, s.now))


def waiting_for_nodes(s: View) -> Decision | None:
    """Some trainers do not run yet."""
    not_running = [s.mine[r] for r in sorted(s.mine) if s.mine[r].trainer.state == "waiting"]
    if not not_running:
        return None
    avoided = earliest(*(a.until for a in s.status.avoided_nodes if a.until > s.now))
    again = avoided if any(p.unschedulable for p in not_running) else waiting.next_word(s, not_running)
    return _waiting(s, *_why_waiting(s, not_running), again=again)


def all_is_well(s: View) -> Decision | None:
    """The trainers of all nodes run, or have completed."""
    count = len(ranges.parse(s.status.completed_nodes))
    done = f" and {count} completed" if count else ""
    restarted = agent_restarts.count(s.status)
    times = f", restarted in place {restarted} time{'s' if restarted > 1 else ''}" if restarted else ""
    text = f"{s.spec.nodes - count} of {s.spec.nodes} nodes run{done}, attempt {s.status.attempt}{times}"
    reason, finding = reasons.ALL_NODES_RUN, s.standstill
    left, again = waiting.completed_long_ago(s)
    if left:
        reason, text = reasons.OTHERS_COMPLETED, left
    if finding is not None:
        reason, text = reasons.STALL_SUSPECTED, finding.sentence()
    status = statuses.enter(s.status, "Running", reason, f"{text}{waiting.for_nodes(s)}{_unheard(s)}", s.now)
    status = replace(status, start_retries=0, running_time=s.status.running_time or s.now)
    silence = (report_age.old_at(s.heard_at), report_age.missed_at(s.heard_at))
    return Decision(status, requeue_at=earliest(s.active_deadline(), again, *(t for t in silence if t and t > s.now)))


# The order is the design. The last rule always speaks.
RULES: tuple[Callable[[View], Decision | None], ...] = (
    finished,
    invalid,
    completed,
    failing,
    suspended,
    past_deadline,
    attempt_still_ending,
    pod_replacement.replacing,
    group_restart.restarting,
    group_restart.attempt_broken,
    start_overdue,
    backing_off,
    no_pod_can_be_made,
    name_taken,
    create_refused,
    nodes_missing,
    avoidance_over,
    waiting_for_nodes,
    all_is_well,
)


# ------------------------------------------------------------------------------------------------ leaves


def clear(s: View) -> tuple[DeletePod, ...]:
    """Pods of attempts that are recorded as over: what a lost node keeps must not answer to the rank's DNS name, and
    logs of long ago are many."""
    left = [p for p in s.left if is_over(p, s.recorded)]
    return tuple(DeletePod(p.name, p.uid, 0) for p in (*left, *s.orphans))


def _not_ahead(job: api.DDPJob, now: dt.datetime, settings: Settings) -> api.Status:
    retries = job.status.start_retries
    waits = start_back_off_seconds(job.metadata.uid, retries) if retries else 0
    return times.not_ahead(job.status, now, start_back_off_seconds=waits, avoid_seconds=settings.avoid_node_seconds)


def start_back_off_seconds(uid: str, retries: int) -> int:
    """1, 2, 4 ... 30 min, less up to a fifth that differs by job: two jobs that block each other part ways."""
    base = START_BACK_OFF_SECONDS[min(retries, len(START_BACK_OFF_SECONDS)) - 1]
    share = int.from_bytes(hashlib.sha256(f"{uid}/{retries}".encode()).digest()[:2], "big") / 2**16
    return round(base * (1 - share / 5))


def throttle(
    old: api.Status, new: api.Status, settings: Settings, now: dt.datetime
) -> tuple[api.Status, dt.datetime | None]:
    """Progress alone is written now and then; with anything else it goes along for free."""
    if old.progress is None or new.progress is None or old.progress.updated >= new.progress.updated:
        return new if old.progress is None or new.progress is None else replace(new, progress=old.progress), None
    due = old.progress.updated + dt.timedelta(seconds=settings.progress_write_seconds)
    if now >= due or statuses.apart_from_progress(old) != statuses.apart_from_progress(new):
        return new, None
    return old, due


def events(old: api.Status, new: api.Status, text: str) -> Iterator[Event]:
    """One event for each change of state or reason: as many as a person wants to read."""
    if new.state == "Restarting" and new.reason in _ON_THE_WAY:
        return
    if _has_news(old, new) and new.reason in reasons.ALL:
        reason = reasons.ALL[new.reason]
        # A failure that was not told before, for nothing was left to stop.
        first_word = new.state == "Restarting" != old.state
        yield _event(replaced(reason, warning=True) if first_word else reason, text)


def acceptance(old: api.Status, new: api.Status, problems: Sequence[Problem]) -> Iterator[Event]:
    """That the spec of a job has become invalid, or valid, where no change of its state says so."""
    before, after = statuses.find_condition(old, "Accepted"), statuses.find_condition(new, "Accepted")
    if after is None or (before is not None and (before.status, before.message) == (after.status, after.message)):
        return
    if after.status == "False" and not invalid_spec.speaks_of_it(new):
        yield _event(reasons.INVALID_SPEC, invalid_spec.remark(problems, goes_on=new.state != "Suspended"))
    elif after.status == "True" and before is not None and not _has_news(old, new):
        what = "status can be read" if before.reason == reasons.UNREADABLE_STATUS.name else "spec is valid"
        yield Event("Normal", "Accepted", f"the {what} now")


def _has_news(old: api.Status, new: api.Status) -> bool:
    return (old.state, old.reason) != (new.state, new.reason)


def restarts_in_place(old: api.Status, new: api.Status) -> Iterator[Event]:
    """What an agent has restarted since the last look changes no state: it is over when it is heard of."""
    failure, count = new.last_failure, agent_restarts.count(new)
    if count > agent_restarts.count(old) and old.attempt == new.attempt and failure is not None:
        # What is being settled meanwhile is the last failure, and not what they have overcome.
        settling = statuses.is_broken(old) or statuses.is_broken(new)
        free = "" if failure.charged_to in ("", "application") else " (not charged to backoffLimit)"
        what = "" if settling else f"{sentences.sentence(failure)}{free}; "
        text = f"{what}all ranks have started again in their pods (restart {count} in place)"
        yield _event(reasons.RESTARTED_IN_PLACE, text)


def remarks(job: api.DDPJob, new: api.Status) -> Iterator[Event]:
    """What the user set and the job changes, or what may keep the ranks apart; said once, with the first attempt."""
    if job.status.attempt or not new.attempt:
        return
    policy = job.spec.template["spec"].get("restartPolicy", "Never")
    if policy != "Never":
        text = f"restartPolicy: {policy} becomes Never: {_BREAKS_THE_GROUP}"
        yield _event(reasons.RESTART_POLICY_CHANGED, text)
    for container, field in podspec.restarts_of_the_kubelet(job.spec.template):
        text = f"{field} of container {container.get('name')} is left out: {_BREAKS_THE_GROUP}"
        yield _event(reasons.RESTART_POLICY_CHANGED, text)
    if podspec.grace_seconds(job.spec.template) == 0:
        text = "terminationGracePeriodSeconds: 0 becomes 1: with 0 a pod is forgotten before its processes have ended"
        yield _event(reasons.GRACE_RAISED, text)
    names = ", ".join(environment.overridden(job))
    if names:
        text = f"{names}: your value and not the job's; the ranks meet only if it is right on every node"
        yield _event(reasons.RENDEZVOUS_OVERRIDDEN, text)
    for text in launcher.warnings(job.spec):
        yield _event(reasons.LAUNCHER_OPTION, text)


def _event(reason: Reason, message: str) -> Event:
    return Event("Warning" if reason.warning else "Normal", reason.name, shortened(message))


def shortened(text: str) -> str:
    """For a line of `kubectl describe`: without the places in gloo's sources, and what it adds for fun.

    The status keeps every word.
    """
    return _SPACES.sub(" ", _PICTURES.sub("", _BUILD_PATH.sub("", text))).strip()


def _waiting(
    s: View,
    state: api.State,
    reason: Reason,
    text: str,
    actions: tuple[Action, ...] = (),
    again: dt.datetime | None = None,
) -> Decision:
    """Not all nodes run yet. After a failure that is a restart until they do, and says after what."""
    if s.status.state == "Restarting":
        state, text = "Restarting", f"{_after_what(s)}{text}"
    status = statuses.enter(s.status, state, reason, text, s.now)
    return Decision(status, actions, earliest(again, s.active_deadline(), s.start_deadline()))


def _after_what(s: View) -> str:
    failure = s.status.last_failure
    return f"after {sentences.short(failure)}: " if failure is not None and statuses.is_restarted(s.status) else ""


def _why_suspended(s: View) -> tuple[Reason, str]:
    if s.live:
        return reasons.SUSPENDING, f"suspended; {name_pods(s.live)} still stopping"
    if s.spec.suspend:
        return reasons.SUSPENDED, f"suspended; {s.settings.resume_hint}"
    return reasons.INVALID_SPEC, f"{invalid_spec.sentence(s.problems)}; suspended until that is mended"


def _unheard(s: View) -> str:
    if s.heard_at is None or not is_past(report_age.missed_at(s.heard_at), s.now):
        return ""
    return f"; no report since {wording.clock(s.heard_at)}"


def _is_in_the_future(s: View) -> bool:
    return s.status.attempt_time is not None and s.now < s.status.attempt_time


def _to_create(s: View) -> tuple[Action, ...]:
    known = ranges.parse(s.status.started_nodes) | set(s.mine)
    avoid = tuple(sorted(a.node for a in s.status.avoided_nodes if a.until > s.now))
    status = s.status
    missing = (rank for rank in range(s.spec.nodes) if rank not in known)
    pods = [CreatePod(status.attempt, rank, avoid, naming.replacement(status, rank)) for rank in missing]
    return (*(() if s.service else (CreateService(),)), *pods)


def _why_waiting(s: View, pods: Sequence[Pod]) -> tuple[api.State, Reason, str]:
    total = s.spec.nodes
    homeless = [p for p in pods if p.unschedulable]
    if homeless:
        where = "; onePodPerNode keeps them apart" if total > 1 and podspec.gpus(s.spec.template) else ""
        text = f"Unschedulable: {len(homeless)} of {total} pods: {homeless[0].unschedulable}{where}"
        return "Pending", reasons.UNSCHEDULABLE, text
    stuck = [p for p in pods if p.trainer.reason in CANNOT_START]
    if stuck:
        first = stuck[0]
        why = f"{first.trainer.reason}: {first.trainer.message}"
        return "Pending", reasons.CANNOT_START, f"{len(stuck)} of {total} pods cannot start: {first.name}: {why}"
    who, many = ranges.for_people([p.rank for p in pods]), "s" if len(pods) > 1 else ""
    text = f"{total - len(pods)} of {total} nodes run; waiting for node{many} {who}"
    slow, long = waiting.to_be_created(s, pods)
    if slow and long:
        return "Pending", reasons.CANNOT_START, f"{text}; {slow}"
    return "Starting", reasons.STARTING_TRAINERS, f"{text}; {slow}" if slow else text


__all__ = [
    "Action",
    "CreatePod",
    "CreateService",
    "DeleteJob",
    "DeletePod",
    "EndPod",
    "Event",
    "Plan",
    "Settings",
    "plan",
]
