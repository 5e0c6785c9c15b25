"""Which failure explains the others, and what it was.

What the kernel, the kubelet and the node controller found counts first, because a process that is ended from outside
may print anything; then what a process did by itself; then time. Time alone proves little: the kubelet has whole
seconds, by clocks that differ from node to node.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from ddpjob.core import failures, rules
from ddpjob.core.failures import Precedence
from ddpjob_operator.failures import log_lines, termination_message
from ddpjob_operator.failures.redaction import mask, shown
from ddpjob_operator.failures.termination_message import ContainerReport, signal_name
from ddpjob_operator.job import api
from ddpjob_operator.observed.cluster import Pod

LOG_TAIL_MAX = 2048
"""Bytes of the log's end in the status."""
EXCEPTION_MAX, WORD_MAX = 300, 128
CLOCKS_DIFFER = dt.timedelta(seconds=2)
# Clocks of nodes differ by up to ten seconds. For where no observation shows which came first.
NODE_CLOCKS_DIFFER = dt.timedelta(seconds=12)
# How long before its container a rank may have failed: torchrun waits for the others, and a rank for its debugger.
REPORTED_BEFORE_MAX = dt.timedelta(hours=1)
NumbersOf = Callable[[int], "tuple[int | None, int]"]
"""The rank of a place's only process, None where that is not known, and its node rank."""

PEER_LOST, RESUMABLE, STOPPED, GONE, STALLED = "PeerLost", "Resumable", "StoppedFromOutside", "PodGone", "Stalled"
NODE_LOST = "NodeLost"
ENDED_EARLY = "EndedEarly"
CONNECTION_LOST = "ConnectionLost"
UNFIT = "PreflightFailed"
MEMORY = "resources.limits.memory: "
CONFIG_ERROR = "CreateContainerConfigError"
# Reasons of the condition DisruptionTarget, and what they say.
DISRUPTIONS = {
    "PreemptionByScheduler": "was preempted by a pod of higher priority",
    "EvictionByEvictionAPI": "was evicted: its node is drained, or its place is wanted",
    "DeletionByTaintManager": "was ended because of a taint on its node",
    "DeletionByPodGC": "was deleted because its node is gone",
    "TerminationByKubelet": "was ended by the kubelet, which is short of a resource or shuts its node down",
}
# Only the kubelet does these, or the node controller in its place, and they are reported when they are over: they may
# have begun before the operator stopped the pod.
_BY_KUBELET = frozenset(("TerminationByKubelet", "DeletionByPodGC"))
_BY_REASON: dict[str, api.Evidence] = {
    **dict.fromkeys((NODE_LOST, GONE), api.Evidence(precedence="NODE", vanished=True)),
    **{word: api.Evidence(precedence="NODE", disruption=word) for word in (*DISRUPTIONS, UNFIT, CONNECTION_LOST)},
    **{word: api.Evidence(precedence="NODE", pod_reason=word) for word in (*rules.NODE_REASONS, rules.POD_DEADLINE)},
    **{word: api.Evidence(precedence="NODE", container_reason=word) for word in rules.LOST_CONTAINER},
    **{
        word: api.Evidence(precedence="KERNEL", container_reason=word, raised=True)
        for word in ("OOMKilled", *rules.START_REASONS)
    },
    STOPPED: api.Evidence(precedence="DELETED", deletion_requested=True),
    STALLED: api.Evidence(precedence="OWN", stalled=True),
    RESUMABLE: api.Evidence(precedence="RESUMABLE", raised=True),
    PEER_LOST: api.Evidence(precedence="SYMPTOM", raised=True),
    # Found because of complaints, which a lost node may still explain.
    ENDED_EARLY: api.Evidence(precedence="SYMPTOM"),
}
_NODES_OWN = frozenset((NODE_LOST, "UnexpectedAdmissionError", "DeletionByPodGC")) | rules.LOST_CONTAINER
# The words of containers that say more than the exit code. A runtime has others (CRI-O: "seccomp killed"): they are no
# disruption, which is what a recorded reason that nobody knows is taken for.
_CONTAINERS_OWN = frozenset(("", "Error", "Completed", "OOMKilled")) | rules.START_REASONS | rules.LOST_CONTAINER
_KILLED, _ABORTED, _TERMINATED, _INTERRUPTED = 137, 134, 143, 130


# What was deleted, or lost with its node, before or after the first sign.
_ENDED_WITHOUT_ITSELF = (
    Precedence.NODE,
    Precedence.DELETED,
    Precedence.NODE_LATE,
    Precedence.LATE,
    Precedence.STOPPED,
)
# Peers complain within a second; the cluster needs a minute to call the node not ready.
_MAY_FOLLOW_A_LOST_NODE = (Precedence.UNKNOWN, Precedence.RESUMABLE, Precedence.SYMPTOM, Precedence.STOPPED)


@dataclass(frozen=True)
class Launched:
    """What is known of how the ranks were started."""

    port: int | None = None
    """That rank 0 was given."""
    torchrun: bool = False


UNKNOWN_LAUNCH = Launched()


@dataclass(frozen=True)
class End:
    """How one pod ended, beside the others."""

    failure: api.Failure
    deleted_at: dt.datetime | None = None
    """When its deletion was requested; None also for what ends without that: a lost node, an eviction."""
    everywhere: bool = False
    """Whether it speaks for all nodes."""
    done: bool = False
    """Whether the ranks in it had all ended with 0 before it was stopped."""
    seen: int = 0
    """In which observation its end was first seen; 0: when its pod was."""
    deletion_seen: int = 0
    """Likewise that its deletion was requested."""

    @property
    def precedence(self) -> Precedence:
        """As kept with the failure."""
        return precedence_of(self.failure)

    def was_deleted_after(self, other: End) -> bool:
        """Whether its deletion was requested after the other had ended: by what was seen first, else by clocks."""
        if self.deleted_at is None:
            return False
        if other.seen != self.deletion_seen:
            return other.seen < self.deletion_seen
        return self.deleted_at > other.failure.time + NODE_CLOCKS_DIFFER


def root_cause(
    attempt: int,
    failed: Iterable[Pod],
    numbers_of: NumbersOf,
    now: dt.datetime,
    *,
    keep_log_tail: bool = True,
    launched: Launched = UNKNOWN_LAUNCH,
) -> api.Failure:
    """The cause as far as the first signs show it, before the operator has stopped anything.

    `failed`: at least one pod of the attempt that ended badly, and those that somebody else has told to stop. Ties go
    to the lower rank, so that the answer does not depend on the order of the pods.
    """
    ends = [_end(attempt, p, numbers_of, now, outside=True, tail=keep_log_tail, launched=launched) for p in failed]
    own = [e for e in ends if e.precedence in (Precedence.OWN, Precedence.UNKNOWN)]
    # What was deleted when something had failed by itself already is not what made that fail.
    earlier = [e for e in ends if not any(e.was_deleted_after(o) for o in own)]
    return _first(earlier or ends).failure


def settle(
    first: api.Failure,
    failed: Sequence[Pod],
    numbers_of: NumbersOf,
    now: dt.datetime,
    *,
    stepped: bool,
    trained: bool = False,
    nodes: int | None = None,
    keep_log_tail: bool = True,
    lost: Sequence[api.Failure] = (),
    early: api.Failure | None = None,
    steps: Mapping[int, int] | None = None,
    launched: Launched = UNKNOWN_LAUNCH,
) -> tuple[api.Failure, rules.Class]:
    """The root cause and its class (before failurePolicy), now that the last pod of the attempt has ended.

    first: as recorded at the first sign, the strongest of all that was there before the operator stopped anything; its
    pod may be gone. failed: the attempt's pods that ended otherwise than completed. So those that were told to stop
    were told by the operator, or for nothing that matters any more, unless they are `first`. stepped: whether the
    attempt made a step; trained: whether an earlier one did. nodes: of the job; None: as many as `failed`. lost: pods
    that are given up with their nodes. early: a node that has completed. steps: what ranks have reported.
    """
    outside = _ended_from_outside(first)
    ends = [
        _end(
            first.attempt,
            _as_recorded(p, first),
            numbers_of,
            now,
            outside=outside and p.name == first.pod,
            tail=keep_log_tail,
            launched=launched,
        )
        for p in sorted(failed, key=lambda p: (p.place, p.uid))
    ]
    if first.reason == STALLED:
        return _classed(first, "stall")
    recorded = _recorded(first, ends)
    cause = _first([*recorded, *ends], first.pod)
    if lost and cause.precedence in _MAY_FOLLOW_A_LOST_NODE:
        cause = _first([End(gone) for gone in lost])
    early = early or next((end.failure for end in ends if end.done), None)
    if cause.precedence == Precedence.SYMPTOM and (cause.failure.reason == ENDED_EARLY or early is not None):
        return _classed(_ended_early(early, cause.failure, steps or {}), "application")
    if nodes != 1 and cause.precedence >= Precedence.RESUMABLE:
        return _classed(cause.failure, "infrastructure")
    if not cannot_start(cause.failure):
        return _classed(cause.failure, rules.classify(rules_evidence(cause.failure)))
    everywhere = _on_all_nodes([*recorded, *ends], nodes)
    return _classed(cause.failure, _of_no_start(cause, stepped=stepped, trained=trained, everywhere=everywhere))


def cannot_start(failure: api.Failure) -> bool:
    """Whether it ended before any of its own code ran: that may be the job's mistake, its node's, or the hour's."""
    own = failure.reason in ("", "Error", *rules.START_REASONS)
    return own and rules.cannot_start(failure.reason, failure.exit_code, failure.exception)


def from_outside(failure: api.Failure) -> bool:
    """Whether what is not in the pod ended it; no rule about exit codes speaks of that."""
    return rules.from_outside(rules_evidence(failure))


def blames_node(failure: api.Failure) -> bool:
    """Whether the node itself may be at fault, so that a job may stay away from it."""
    if failure.failure_class != "infrastructure":
        return False
    if failure.reason != CONFIG_ERROR and cannot_start(failure):
        return True
    return failure.reason in _NODES_OWN or rules.DEVICE.search(failure.exception) is not None


def evidence_of(failure: api.Failure) -> api.Evidence:
    """What was seen of a failure. Of one without, which only a reason is known of or an older operator has recorded, it
    is what the reason proves: a reason that nobody knows proves nothing, so that the application is charged for it."""
    if failure.evidence is not None and failure.evidence.precedence in Precedence.__members__:
        return failure.evidence
    if (known := _BY_REASON.get(failure.reason)) is not None:
        return msgspec.structs.replace(known, pod_message=failure.exception) if known.pod_reason else known
    if rules.is_of_node(failure.reason):
        return api.Evidence(precedence="NODE", pod_reason=failure.reason, pod_message=failure.exception)
    raised = "" if log_lines.is_last_line(failure.exception) else failure.exception
    own = failures.Failure(
        exit_code=failure.exit_code,
        exception=raised,
        symptom=rules.is_symptom(raised),
        resumable=failure.exit_code == rules.RESUMABLE_EXIT_CODE,
    )
    return api.Evidence(precedence=own.precedence.name, raised=bool(raised))


def precedence_of(failure: api.Failure) -> Precedence:
    """How a failure ranks as the cause of others."""
    return Precedence[evidence_of(failure).precedence]


def rules_evidence(failure: api.Failure) -> rules.Evidence:
    """What the class of a failure follows from."""
    e = evidence_of(failure)
    return rules.Evidence(
        exit_code=failure.exit_code,
        reason=e.container_reason,
        pod_reason=e.pod_reason,
        pod_message=e.pod_message,
        disruption=e.disruption,
        exception=failure.exception if e.raised else "",
        deletion_requested=e.deletion_requested,
        vanished=e.vanished,
        stalled=e.stalled,
    )


def is_a_cause(first: api.Failure) -> bool:
    """Whether a first sign says why: an exception, a kill, a lost node. A lost peer, a pod that is gone and a bare exit
    code say only that something has happened."""
    precedence = precedence_of(first)
    says = bool(first.exception or first.signal) or precedence not in (Precedence.OWN, Precedence.LATE)
    return says and precedence not in _MAY_FOLLOW_A_LOST_NODE and first.reason != GONE


def who(failure: api.Failure) -> str:
    """rank 37"""
    if failure.init_container:
        return f'init container "{failure.init_container}" of {failure.pod}'
    return f"rank {failure.rank}" if failure.rank is not None else f"node {failure.node_rank}"


def own_lines(log: str) -> list[str]:
    """The lines that the training printed itself: what torchrun adds when a worker has failed is cut off."""
    lines = log.splitlines()
    ends = (i for i, line in enumerate(lines) if re.match(r"[EW]\d{4} \d\d:\d\d:\d\d.*torch/distributed/elastic", line))
    return [line for line in lines[: next(ends, len(lines))] if line.strip()]


def log_tail(log: str) -> str:
    """The last 2 kB of a log, masked. A first line that was cut is left out: it may be the rest of a credential."""
    # Masked before it is cut: without its name a password is not known. A kubelet cuts characters, too.
    raw = mask(log).strip("\n").encode()
    if len(raw) <= LOG_TAIL_MAX and len(log.encode()) < LOG_TAIL_MAX - 3:
        return raw.decode()
    first, _, rest = raw[-LOG_TAIL_MAX:].decode(errors="ignore").partition("\n")
    return rest or first


def tail_of(pod: Pod) -> str:
    """The end of the log of a pod that has ended, whatever ended it."""
    return log_tail(_read(pod, None).log)


# ---------------------------------------------------------------- weighing


def _of_no_start(cause: End, *, stepped: bool, trained: bool, everywhere: bool) -> rules.Class:
    """For good only where neither a node nor the hour can be the reason: the job has never trained, and every node says
    so. A missing ConfigMap is missing for all of them."""
    if cause.failure.reason not in rules.START_REASONS and stepped:
        return "application"  # it was there when this attempt began
    if (found := rules.classify(rules_evidence(cause.failure))) == "infrastructure":
        return found
    forever = everywhere or cause.failure.reason == CONFIG_ERROR
    return "permanent" if forever and not trained and not stepped else "infrastructure"


def _ended_early(early: api.Failure | None, complaint: api.Failure, steps: Mapping[int, int]) -> api.Failure:
    """What only peers complained of, beside a node that has completed: that one called fewer collectives."""
    if early is None or complaint.reason == ENDED_EARLY:
        return complaint  # as it was recorded
    known = complaint.step if complaint.rank is None else steps.get(complaint.rank, complaint.step)
    step = early.step if early.rank is None else steps.get(early.rank, early.step)
    said = rules.ended_early(step, who(complaint), known)
    return msgspec.structs.replace(
        early,
        reason=ENDED_EARLY,
        exit_code=0,
        signal="",
        exception=said,
        step=step or None,
        log_tail=complaint.log_tail,
        evidence=_BY_REASON[ENDED_EARLY],
    )


def _end(
    attempt: int, pod: Pod, numbers_of: NumbersOf, now: dt.datetime, *, outside: bool, tail: bool, launched: Launched
) -> End:
    rank, node_rank = numbers_of(pod.place)
    report = _read(pod, launched.port if node_rank == 0 else None)
    code = pod.trainer.exit_code if report.exit_code is None else report.exit_code
    code = 0 if report.early else code
    precedence = _precedence(pod, report, code, outside=outside)
    reason = _own_reason(report, precedence) or _reason(pod, precedence)
    failure = api.Failure(
        attempt=attempt,
        rank=_rank(report, rank),
        node_rank=node_rank,
        pod=pod.name,
        init_container=pod.trainer.init,
        node=pod.node,
        exit_code=code,
        signal=signal_name(code),
        reason=reason,
        step=report.step or None,
        exception=shown(_text(pod, report, code, tail=tail), EXCEPTION_MAX),
        log_tail=log_tail(report.log) if tail else "",
        evidence=_evidence(pod, report, precedence, reason),
        time=_time(pod, report, now),
    )
    ended_by_node = precedence == Precedence.NODE and not pod.disruption
    return End(
        failure,
        deleted_at=None if ended_by_node else pod.deletion_requested_at,
        everywhere=report.permanent,
        done=_had_ended(report, code, precedence, launched),
        seen=pod.ended_seen,
        deletion_seen=pod.deletion_seen,
    )


def _text(pod: Pod, report: ContainerReport, code: int | None, *, tail: bool) -> str:
    return _detail(pod, report) or _runtimes_word(pod) or (log_lines.of(report.log, code) if tail else "")


def _evidence(pod: Pod, report: ContainerReport, precedence: Precedence, reason: str) -> api.Evidence:
    """What counts beside the failure's own fields. Nothing outside a pod explains what the kernel has done in it."""
    starts = pod.trainer.reason in rules.START_REASONS
    own = api.Evidence(
        precedence=precedence.name,
        raised=starts or bool(report.exception),
        container_reason=shown(pod.trainer.reason, WORD_MAX),
        stalled=report.stalled,
    )
    if precedence == Precedence.KERNEL:
        return own
    return msgspec.structs.replace(
        own,
        pod_reason=shown(pod.reason, WORD_MAX),
        pod_message=shown(pod.message, EXCEPTION_MAX),
        disruption=UNFIT if reason == UNFIT else shown(pod.disruption, WORD_MAX),
        deletion_requested=pod.deleted_first and precedence != Precedence.LATE,
    )


def _had_ended(report: ContainerReport, code: int | None, precedence: Precedence, launched: Launched) -> bool:
    """Whether only the launcher was left to be stopped. When its ranks have all ended with 0, torchrun waits for the
    other nodes in C++ code for up to five minutes, and SIGTERM does not reach it; at any other time it answers at once,
    with a line of its own."""
    if precedence != Precedence.STOPPED or not launched.torchrun:
        return False
    return report.done or (code == _KILLED and "death signal" not in report.log)


def _rank(report: ContainerReport, rank_of_pod: int | None) -> int | None:
    if report.bad_nodes:
        return None  # one pod speaks for all, and no rank of it is to blame
    return rank_of_pod if report.rank is None else report.rank


def _own_reason(report: ContainerReport, precedence: Precedence) -> str:
    if precedence != Precedence.OWN:
        return ""
    return STALLED if report.stalled else ENDED_EARLY if report.early else ""


def _read(pod: Pod, port: int | None) -> ContainerReport:
    """What the pod says, as far as how its container ended leaves it true. port: that of the store, where it has it."""
    report = termination_message.read(pod.trainer.message)
    if not report.rank and port and rules.port_in_use(report.exception) == port:
        # Another process took the port that we had chosen; the next attempt gets another one.
        report = replace(report, symptom=True)
    if report.symptom and _was_killed(pod.trainer.exit_code):
        # A rank complained, and then the container itself was killed.
        return replace(report, symptom=False, exit_code=pod.trainer.exit_code, rank=None, exception="")
    return report


def _precedence(pod: Pod, report: ContainerReport, code: int | None, *, outside: bool) -> Precedence:
    if pod.trainer.reason == "OOMKilled":
        return Precedence.KERNEL
    if pod.deleted_first and not outside:
        return _precedence_of_stopped(pod, report, code)
    if pod.disruption or pod.reason or (pod.trainer.is_lost and pod.trainer.ran):
        return Precedence.NODE
    if pod.deleted_first:
        return Precedence.DELETED
    return Precedence.KERNEL if pod.trainer.reason in rules.START_REASONS else _own_precedence(report, code)


def _precedence_of_stopped(pod: Pod, report: ContainerReport, code: int | None) -> Precedence:
    """We have told it to stop. Who drains its node or preempts it after that does nothing more to it, and of a
    container that is gone by then the kubelet knows nothing (ContainerStatusUnknown)."""
    if pod.reason or pod.disruption in _BY_KUBELET or pod.trainer.reason == "Unknown":
        return Precedence.NODE_LATE
    return Precedence.LATE if _failed_before_its_deletion(report, code) else Precedence.STOPPED


def _own_precedence(report: ContainerReport, code: int | None) -> Precedence:
    resumable = report.resumable or code == rules.RESUMABLE_EXIT_CODE
    return failures.Failure(
        exit_code=code,
        exception=report.exception,
        resumable=resumable,
        symptom=report.symptom,
        stalled=report.stalled,
        early=report.early,
        bad_nodes=report.bad_nodes,
    ).precedence


def _failed_before_its_deletion(report: ContainerReport, code: int | None) -> bool:
    """A pod whose rank has failed may live on for half a minute, while torchrun waits for its other ranks."""
    if report.symptom or report.resumable or report.exception.startswith(("KeyboardInterrupt", "SystemExit")):
        return False
    if code in (0, rules.RESUMABLE_EXIT_CODE, _INTERRUPTED, _KILLED, _TERMINATED):
        return False
    # No launcher and no interpreter answers SIGTERM with another code than these two.
    return bool(report.exception) or report.exit_code is not None or code not in (None, 1, _ABORTED)


def _was_killed(code: int | None) -> bool:
    """Whether a signal ended it that no lost peer explains: with NCCL, aborts follow a lost peer."""
    return bool(signal_name(code)) and code not in (_ABORTED, _TERMINATED, _INTERRUPTED)


def _detail(pod: Pod, report: ContainerReport) -> str:
    """The exception, or what the kubelet says of a container that it could not start, or of a pod that it ended."""
    if pod.trainer.reason in rules.START_REASONS:
        return pod.trainer.message.strip().rpartition("\n")[2]
    last = pod.trainer.message.strip().rpartition("\n")[2] if pod.trainer.init else ""
    return report.exception or last or pod.message


def _ended_from_outside(first: api.Failure) -> bool:
    """Whether it is recorded as a pod that somebody else, or its node, was ending when all began."""
    return precedence_of(first) in (Precedence.NODE, Precedence.DELETED)


def _as_recorded(pod: Pod, first: api.Failure) -> Pod:
    """The pod, with the order that the record proves: what is recorded with its end had ended before we told it to
    stop, also for an operator that sees both at once."""
    # Of one that ended early its ranks are recorded, and not what its launcher ended with.
    recorded = first.exit_code is not None and first.reason != ENDED_EARLY
    ended = pod.name == first.pod and recorded and precedence_of(first) not in _ENDED_WITHOUT_ITSELF
    return replace(pod, ended_first=True) if ended else pod


def _first(ends: Sequence[End], recorded: str = "") -> End:
    """The end that explains the others. recorded: the pod whose end was seen, and recorded, before all others."""

    def order(end: End) -> tuple[bool, int, dt.datetime, int]:
        failure = end.failure
        return (failure.pod != recorded, end.seen, failure.time, failure.node_rank)

    return failures.root_cause(sorted(ends, key=order))


def _recorded(first: api.Failure, ends: Sequence[End]) -> list[End]:
    """The first sign as an end of its own: its pod is gone, or no longer shows as much as was recorded."""
    now = next((e for e in ends if e.failure.pod == first.pod), None)
    if now is None:
        return [End(first)]
    if not _ended_from_outside(first):
        # What is seen of it since we have deleted it may say less: a container that was never made "exits" 137.
        return [End(first)] if now.precedence > precedence_of(first) else []
    merged = msgspec.structs.replace(
        first,
        exit_code=now.failure.exit_code,
        signal=now.failure.signal,
        step=first.step if now.failure.step is None else now.failure.step,
        exception=first.exception or now.failure.exception,
        log_tail=now.failure.log_tail,
        evidence=evidence_of(first),
    )
    ended_by_node = first.reason in (NODE_LOST, GONE) or first.reason in rules.NODE_REASONS
    return [End(merged, deleted_at=None if ended_by_node else now.deleted_at or first.time)]


def _on_all_nodes(ends: Sequence[End], nodes: int | None) -> bool:
    """On one alone, that node may be the reason. Agents that have ended by agreement have compared theirs."""
    if any(end.everywhere for end in ends):
        return True
    unable = {end.failure.node_rank for end in ends if _shows_no_start(end.failure)}
    return len(unable) >= (len({end.failure.node_rank for end in ends}) if nodes is None else nodes)


def _shows_no_start(failure: api.Failure) -> bool:
    e = rules_evidence(failure)
    return rules.cannot_start(e.reason, e.exit_code, e.exception)


def _classed(failure: api.Failure, found: rules.Class) -> tuple[api.Failure, rules.Class]:
    return msgspec.structs.replace(failure, failure_class=found), found


def _reason(pod: Pod, precedence: Precedence) -> str:
    if precedence == Precedence.KERNEL:
        return pod.trainer.reason
    of_node = pod.reason or pod.disruption or pod.trainer.is_lost
    if precedence in (Precedence.NODE, Precedence.NODE_LATE) and not of_node:
        return UNFIT
    if precedence in (Precedence.RESUMABLE, Precedence.SYMPTOM):
        return RESUMABLE if precedence == Precedence.RESUMABLE else PEER_LOST
    if pod.reason or pod.disruption:
        return pod.disruption or pod.reason
    word = "Error" if _runtimes_word(pod) else pod.trainer.reason
    told = precedence in (Precedence.DELETED, Precedence.STOPPED) and word in ("", "Completed", "Error")
    return STOPPED if told else word


def _runtimes_word(pod: Pod) -> str:
    """What the container runtime says of an exit code, in a word that is its own."""
    known = pod.trainer.exit_code is None or pod.trainer.reason in _CONTAINERS_OWN
    return "" if known else pod.trainer.reason


def _time(pod: Pod, report: ContainerReport, now: dt.datetime) -> dt.datetime:
    """The container may end long after the rank that failed; what a message claims beyond reason is not believed."""
    ended = pod.trainer.ended_at
    if ended is None:
        return pod.deletion_requested_at or now
    failed = dt.datetime.fromtimestamp(report.time, dt.timezone.utc)
    return failed if dt.timedelta() <= ended + CLOCKS_DIFFER - failed <= REPORTED_BEFORE_MAX else ended
