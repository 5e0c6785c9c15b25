"""Finds the failure of an attempt that explains the others, and its class.

Reports of kernel, kubelet and node controller count most, because a process that is ended from outside may print
anything. What a process did by itself counts next, and the time last. Time alone proves little: the kubelet reports
whole seconds, and clocks of nodes differ.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from ddpjob_core import rules
from ddpjob_core.failures import Failure, Precedence
from ddpjob_core.members import Members
from ddpjob_operator.failures import log_lines, termination_message
from ddpjob_operator.failures.redaction import shown
from ddpjob_operator.failures.termination_message import Message, signal_name
from ddpjob_operator.job import api
from ddpjob_operator.observed.cluster import Pod

EXCEPTION_MAX, WORD_MAX = 300, 128
CLOCKS_DIFFER = dt.timedelta(seconds=2)
# Clocks of nodes differ by up to ten seconds. Used if observations do not show the order of failures.
NODE_CLOCKS_DIFFER = dt.timedelta(seconds=12)
# A rank may fail this long before its container ends: torchrun waits for other ranks, or a debugger is attached.
REPORTED_BEFORE_MAX = dt.timedelta(hours=1)

PEER_LOST, RESUMABLE, STOPPED, GONE, STALLED = "PeerLost", "Resumable", "StoppedFromOutside", "PodGone", "Stalled"
NODE_LOST, DEADLINE = "NodeLost", "JobDeadlineExceeded"
# The pod's object is kept after these failures, because only the log may show why the process hung.
KEEPS_ITS_LOG = (STALLED, DEADLINE)
ENDED_EARLY = "EndedEarly"
CONNECTION_LOST = "ConnectionLost"
UNFIT = "PreflightFailed"
MEMORY = "resources.limits.memory: "
CONFIG_ERROR = "CreateContainerConfigError"
# Reasons of the condition DisruptionTarget, as parts of a sentence.
DISRUPTIONS = {
    "PreemptionByScheduler": "was preempted by a pod of higher priority",
    "EvictionByEvictionAPI": "was evicted: its node is being drained, or another pod needs its place",
    "DeletionByTaintManager": "was ended because of a taint on its node",
    "DeletionByPodGC": "was deleted because its node is gone",
    "TerminationByKubelet": "was ended by the kubelet, which is short of a resource or shuts its node down",
}
# Disruptions that are reported only after the pod's end, so they may have begun before the operator stopped the pod.
_BY_KUBELET = frozenset(("TerminationByKubelet", "DeletionByPodGC"))
_BY_REASON: dict[str, api.Evidence] = {
    **dict.fromkeys((NODE_LOST, GONE), api.Evidence(precedence="NODE", vanished=True)),
    **{name: api.Evidence(precedence="NODE", disruption=name) for name in (*DISRUPTIONS, UNFIT, CONNECTION_LOST)},
    **{name: api.Evidence(precedence="NODE", pod_reason=name) for name in (*rules.NODE_REASONS, rules.POD_DEADLINE)},
    **{name: api.Evidence(precedence="NODE", container_reason=name) for name in rules.LOST_CONTAINER},
    **{
        name: api.Evidence(precedence="KERNEL", container_reason=name, raised=True)
        for name in ("OOMKilled", *rules.START_REASONS)
    },
    STOPPED: api.Evidence(precedence="DELETED", deletion_requested=True),
    STALLED: api.Evidence(precedence="OWN", stalled=True),
    DEADLINE: api.Evidence(precedence="STOPPED"),
    RESUMABLE: api.Evidence(precedence="RESUMABLE", raised=True),
    PEER_LOST: api.Evidence(precedence="SYMPTOM", raised=True),
    # The operator concludes this reason from lost connections of other ranks, which a lost node may explain too.
    ENDED_EARLY: api.Evidence(precedence="SYMPTOM"),
}
_NODES_OWN = rules.LOST_CONTAINER | frozenset(
    (NODE_LOST, "DeletionByPodGC", "UnexpectedAdmissionError", "TopologyAffinityError", "InvalidNodeInfo")
)
# Reasons that Kubernetes itself sets. Container runtimes' reasons (CRI-O: "seccomp killed") describe an exit code.
_CONTAINERS_OWN = frozenset(("", "Error", "Completed", "OOMKilled")) | rules.START_REASONS | rules.LOST_CONTAINER
_KILLED, _ABORTED, _TERMINATED, _INTERRUPTED = 137, 134, 143, 130
# Precedences of pods that did not end by themselves, but were evicted, lost, deleted or stopped.
_ENDED_WITHOUT_ITSELF = (Precedence.NODE, Precedence.DELETED, Precedence.NODE_LATE, Precedence.LATE, Precedence.STOPPED)
# Other ranks report a lost connection within a second; the node controller marks the node not ready after a minute.
_MAY_FOLLOW_A_LOST_NODE = (Precedence.UNKNOWN, Precedence.RESUMABLE, Precedence.SYMPTOM, Precedence.STOPPED)


@dataclass(frozen=True)
class Context:
    """Facts about an attempt that its pods do not show."""

    attempt: int
    members: Members
    rank_of: Callable[[int], int | None]
    """Returns the rank of a place with a single process; None if unknown."""
    now: dt.datetime
    keep_log_tail: bool = True
    port: int | None = None
    """Port assigned to rank 0."""
    torchrun: bool = False
    """True if the containers' own program is torchrun, which gets a SIGTERM, and all nodes ran together."""


@dataclass(frozen=True)
class PodEnd:
    """How and when one pod ended, for comparison with other pods."""

    failure: api.JobFailure
    pod: Pod | None = None
    """None for a failure that is only known from the status."""
    message: Message = field(default_factory=Message)
    done: bool = False
    """True if all ranks had ended with 0 before the pod's stop. Exit code 0 proves this only if the store was lost."""

    @property
    def precedence(self) -> Precedence:
        """The priority of this failure as a cause: the failure with the lowest number explains the others."""
        return precedence_of(self.failure)

    @property
    def seen(self) -> int:
        """The observation in which the pod's end was first seen; 0: the first of the pod."""
        return 0 if self.pod is None else self.pod.ended_seen

    def has_raised(self, exception: str) -> bool:
        """True if the pod's log has this exception or message of argparse, also of a rank that was stopped later."""
        log = self.message.log
        said = (*(one.exception for one in termination_message.raised(log)), log_lines.refused(log))
        return exception in (self.failure.exception, *(shown(text, EXCEPTION_MAX) for text in said))

    def was_deleted_after(self, other: PodEnd) -> bool:
        """True if this pod's deletion was requested after the other pod ended. Clocks count if the order is unknown.
        False for a lost node and an eviction without a request."""
        pod = self.pod
        if pod is None or pod.deletion_requested_at is None:
            return False
        if self.precedence == Precedence.NODE and not pod.disruption:
            return False
        if other.seen != pod.deletion_seen:
            return other.seen < pod.deletion_seen
        return pod.deletion_requested_at > other.failure.time + NODE_CLOCKS_DIFFER


def root_cause(context: Context, failed: Sequence[Pod]) -> api.JobFailure:
    """Return the cause as known before the operator stops anything.

    failed: at least one failed pod of the attempt, and pods that were deleted from outside. Of equal failures, the
    failure of the lowest node rank wins, so that the order of pods does not matter.
    """
    ends = [_end(context, pod, outside=True) for pod in failed]
    own = [e for e in ends if e.precedence in (Precedence.OWN, Precedence.UNKNOWN)]
    # A pod deleted after another had failed by itself did not cause that failure.
    earlier = [e for e in ends if not any(e.was_deleted_after(o) for o in own)]
    return _first(earlier or ends).failure


def settle(
    context: Context,
    first: api.JobFailure,
    failed: Sequence[Pod],
    *,
    stepped: bool,
    trained: bool = False,
    nodes: int | None = None,
    lost: Sequence[api.JobFailure] = (),
    early: api.JobFailure | None = None,
    steps: Mapping[int, int] | None = None,
) -> tuple[api.JobFailure, rules.Class]:
    """Return the root cause and its class (before failurePolicy), after the attempt's last pod has ended.

    first: the result of root_cause(). Its pod may be deleted, also by others than the operator.
    failed: the attempt's pods that did not complete. Only the operator may have deleted a running one.
    stepped: this attempt has trained. trained: an earlier attempt has.
    nodes: number of pods; None: as in `failed`. lost: failures of pods on lost nodes.
    early: failure of a node that completed early. steps: last reported step of each rank.
    """
    if first.reason == STALLED:
        return first, "stall"
    outside = _ended_from_outside(first)
    # A pod recorded with an exit code had ended before its deletion, even if both were observed at once.
    # For ENDED_EARLY the recorded code comes from the pod's ranks, not from the launcher.
    recorded_code = first.exit_code is not None and first.reason != ENDED_EARLY
    had_ended = recorded_code and precedence_of(first) not in _ENDED_WITHOUT_ITSELF
    seen = [
        msgspec.structs.replace(pod, ended_first=True) if had_ended and pod.name == first.pod else pod for pod in failed
    ]
    ends = [
        _end(context, pod, outside=outside and pod.name == first.pod)
        for pod in sorted(seen, key=lambda pod: (pod.place, pod.uid))
    ]
    all_ends = [*_recorded(first, ends), *ends]
    number = len({end.failure.node_rank for end in all_ends}) if nodes is None else nodes
    cause = _first(all_ends, first.pod)
    if lost and cause.precedence in _MAY_FOLLOW_A_LOST_NODE:
        cause = _first([PodEnd(gone) for gone in lost])
    # torchrun answers SIGTERM with 0 only if it had lost its store, which is in node 0's torchrun.
    store_gone = any(e.failure.node_rank == 0 and e.precedence == Precedence.SYMPTOM for e in all_ends)
    done = (e.failure for e in ends if e.done and (store_gone or e.failure.exit_code != 0))
    early = early or next(done, None)
    if cause.precedence == Precedence.SYMPTOM and (cause.failure.reason == ENDED_EARLY or early is not None):
        return _ended_early(early, cause.failure, steps or {}), "application"
    if nodes != 1 and cause.precedence >= Precedence.RESUMABLE:
        return cause.failure, "infrastructure"
    own = read_back(cause.failure)
    if rules.cannot_start(own):
        alike = [end for end in all_ends if rules.cannot_start(read_back(end.failure))]
    else:
        alike = [end for end in all_ends if end.has_raised(own.exception)]
    # A missing ConfigMap is missing on all nodes. Agents have compared all nodes.
    everywhere = cause.failure.reason == CONFIG_ERROR or any(e.message.agreed == "permanent" for e in all_ends)
    everywhere |= len({end.failure.node_rank for end in alike}) >= number
    return cause.failure, rules.class_of(own, everywhere=everywhere, stepped=stepped, trained=trained)


def lacks_configuration(pod: Pod) -> bool:
    """True if a container waits for a missing ConfigMap or Secret."""
    return pod.trainer.state == "waiting" and pod.trainer.reason == CONFIG_ERROR


def cannot_start(failure: api.JobFailure) -> bool:
    """True if the failure came before any code of the program ran: because of job, node or a temporary error."""
    return failure.reason in ("", "Error", *rules.START_REASONS) and rules.cannot_start(read_back(failure))


def blames_node(failure: api.JobFailure) -> bool:
    """True if the node may have caused the failure, so that a job may avoid the node."""
    if failure.failure_class != "infrastructure":
        return False
    if failure.reason != CONFIG_ERROR and cannot_start(failure):
        return True
    return failure.reason in _NODES_OWN or rules.DEVICE.search(failure.exception) is not None


def evidence_of(failure: api.JobFailure) -> api.Evidence:
    """Return the recorded evidence of a failure; else, for a failure recorded by an older operator, what its reason
    proves. An unknown reason proves nothing, so the failure counts as the application's."""
    if failure.evidence is not None and failure.evidence.precedence in Precedence.__members__:
        return failure.evidence
    if (known := _BY_REASON.get(failure.reason)) is not None:
        return msgspec.structs.replace(known, pod_message=failure.exception) if known.pod_reason else known
    if rules.is_of_node(failure.reason):
        return api.Evidence(precedence="NODE", pod_reason=failure.reason, pod_message=failure.exception)
    raised = "" if failure.exception.startswith(log_lines.LAST_LINE) else failure.exception
    own = Failure(
        exit_code=failure.exit_code,
        exception=raised,
        symptom=rules.is_symptom(raised),
        resumable=failure.exit_code == rules.RESUMABLE_EXIT_CODE,
    )
    return api.Evidence(precedence=own.precedence.name, raised=bool(raised))


def precedence_of(failure: api.JobFailure) -> Precedence:
    """Return the priority of a recorded failure as a cause; the lowest number explains the others."""
    return Precedence[evidence_of(failure).precedence]


def read_back(failure: api.JobFailure) -> Failure:
    """Return a recorded failure as the type that the rules take."""
    fields = msgspec.structs.asdict(evidence_of(failure))
    del fields["precedence"], fields["silent_node"], fields["hidden"]
    # argparse raises no exception: it prints a sentence and exits with 2.
    has_own = fields.pop("raised") or rules.is_mistake(failure.exception, failure.exit_code)
    exception = failure.exception if has_own else ""
    return Failure(exit_code=failure.exit_code, exception=exception, where=failure.where, **fields)


def is_a_cause(first: api.JobFailure) -> bool:
    """True if the failure shows a cause: an exception, a kill, a lost node. A lost peer, a vanished pod and an exit
    code without text show none."""
    precedence = precedence_of(first)
    is_explained = bool(first.exception or first.signal) or precedence not in (Precedence.OWN, Precedence.LATE)
    return is_explained and precedence not in _MAY_FOLLOW_A_LOST_NODE and first.reason != GONE


def is_own(failure: api.JobFailure) -> bool:
    """True if a process of the pod ended by itself, not by the kernel, a lost peer or something outside."""
    return precedence_of(failure) in (Precedence.OWN, Precedence.UNKNOWN, Precedence.LATE)


def who(failure: api.JobFailure) -> str:
    """Return who failed: `rank 37`; `node 4` if the rank is unknown; `init container "copy" of bert-1-4`."""
    if failure.init_container:
        return f'init container "{failure.init_container}" of {failure.pod}'
    return f"rank {failure.rank}" if failure.rank is not None else f"node {failure.node_rank}"


def tail_of(pod: Pod) -> str:
    """Return the end of the log of a pod that has ended."""
    return log_lines.tail(_read(pod).log)


def _ended_early(early: api.JobFailure | None, complaint: api.JobFailure, steps: Mapping[int, int]) -> api.JobFailure:
    """Return a node's early completion as the cause of lost connections: other ranks wait for it in a collective."""
    if early is None or complaint.reason == ENDED_EARLY:
        return complaint  # no node completed early, or its early end is recorded already
    known = complaint.step if complaint.rank is None else steps.get(complaint.rank, complaint.step)
    step = early.step if early.rank is None else steps.get(early.rank, early.step)
    return msgspec.structs.replace(
        early,
        reason=ENDED_EARLY,
        exit_code=0,
        signal="",
        exception=rules.ended_early(step, who(complaint), known),
        step=step or None,
        log_tail=complaint.log_tail,
        evidence=_BY_REASON[ENDED_EARLY],
    )


def _end(context: Context, pod: Pod, *, outside: bool) -> PodEnd:
    message = _read(pod, context.port if pod.place == context.members.leader else None)
    own = message.failure
    code = pod.trainer.exit_code if own.exit_code is None else own.exit_code
    code = 0 if own.early else code
    precedence = _precedence(pod, own, code, outside=outside)
    if precedence == Precedence.STOPPED and message.agreed:
        precedence = Precedence.LATE  # also for a SIGKILL, which would otherwise count as a kill by the kubelet
    reason = _reason(pod, own, precedence)
    failure = api.JobFailure(
        attempt=context.attempt,
        rank=_rank(pod, own, context),
        node_rank=context.members.node_rank(pod.place),
        pod=pod.name,
        init_container=pod.trainer.init,
        node=pod.node,
        exit_code=code,
        signal=signal_name(code),
        reason=reason,
        step=own.step or None,
        exception=shown(_text(pod, message, code if context.keep_log_tail else None), EXCEPTION_MAX),
        where=shown(own.where, WORD_MAX),
        log_tail=log_lines.tail(message.log) if context.keep_log_tail else "",
        evidence=_evidence(pod, own, precedence, reason),
        time=_time(pod, own, context.now),
    )
    # Wait for the pod's phase: an eviction may have ended the pod, and a wrong record would never be corrected.
    is_stopped = precedence == Precedence.STOPPED and not pod.live
    # After its ranks ended with 0, torchrun waits up to five minutes for other nodes in C++ code that ignores SIGTERM.
    # At any other time torchrun reacts at once to a SIGTERM: it prints a line and exits with 1.
    # If torchrun loses its store while it waits, it exits with 143, or with 0 if its logging swallows the SIGTERM.
    silent = pod.trainer.ran and (code == 0 or (code == _KILLED and "death signal" not in message.log))
    return PodEnd(failure, pod, message, done=is_stopped and (message.done or (context.torchrun and silent)))


def _text(pod: Pod, message: Message, code: int | None) -> str:
    """Return the exception, or the kubelet's text about a container that it could not start or a pod that it ended.

    code: None if nothing of the log may be shown.
    """
    last = pod.trainer.message.strip().rpartition("\n")[2]
    if pod.trainer.reason in rules.START_REASONS:
        known = last
    else:
        known = message.failure.exception or (last if pod.trainer.init else "") or pod.message
    return known or _runtime_reason(pod) or log_lines.of(message.log, code, message.failure.rank)


def _evidence(pod: Pod, own: Failure, precedence: Precedence, reason: str) -> api.Evidence:
    """Return the evidence that is not in the failure's own fields, without the pod's reasons if the kernel kills it."""
    starts = pod.trainer.reason in rules.START_REASONS
    evidence = api.Evidence(
        precedence=precedence.name,
        hidden=pod.trainer.hides_a_failure,
        raised=starts or bool(own.exception),
        container_reason=shown(pod.trainer.reason, WORD_MAX),
        stalled=own.stalled,
    )
    if precedence == Precedence.KERNEL:
        return evidence
    return msgspec.structs.replace(
        evidence,
        pod_reason=shown(pod.reason, WORD_MAX),
        pod_message=shown(pod.message, EXCEPTION_MAX),
        disruption=UNFIT if reason == UNFIT else shown(pod.disruption, WORD_MAX),
        deletion_requested=pod.deleted_first and precedence != Precedence.LATE,
    )


def _rank(pod: Pod, own: Failure, context: Context) -> int | None:
    if own.bad_nodes:
        return None  # the message is about all pods, and no rank of this pod failed first
    return context.rank_of(pod.place) if own.rank is None else own.rank


def _read(pod: Pod, port: int | None = None) -> Message:
    """Return the pod's message, corrected by how its container ended. port: the rendezvous port that the pod serves."""
    message = termination_message.read(pod.trainer.message)
    own = message.failure
    if not own.rank and port and rules.port_in_use(own.exception) == port:
        # Another process used the port that the operator chose; the next attempt uses another port.
        own = own._replace(symptom=True)
    code = pod.trainer.exit_code
    # A rank lost its connection, and then a signal killed the container.
    # A lost peer does not explain the signal, except SIGABRT (NCCL aborts after a lost peer), SIGTERM and SIGINT.
    if own.symptom and signal_name(code) and code not in (_ABORTED, _TERMINATED, _INTERRUPTED):
        own = own._replace(symptom=False, exit_code=code, rank=None, exception="")
    return message._replace(failure=own)


def _precedence(pod: Pod, own: Failure, code: int | None, *, outside: bool) -> Precedence:
    if pod.trainer.reason == "OOMKilled":
        return Precedence.KERNEL
    if pod.deleted_first and not outside:
        # A drain or preemption after the operator's deletion is not the cause.
        # After the deletion the kubelet may report ContainerStatusUnknown.
        if pod.reason or pod.disruption in _BY_KUBELET or pod.trainer.reason == "Unknown":
            return Precedence.NODE_LATE
        return Precedence.LATE if _failed_before_its_deletion(own, code) else Precedence.STOPPED
    if pod.disruption or pod.reason or (pod.trainer.is_lost and pod.trainer.ran):
        return Precedence.NODE
    if pod.deleted_first:
        return Precedence.DELETED
    if pod.trainer.reason in rules.START_REASONS:
        return Precedence.KERNEL
    return own._replace(exit_code=code, resumable=own.resumable or code == rules.RESUMABLE_EXIT_CODE).precedence


def _failed_before_its_deletion(own: Failure, code: int | None) -> bool:
    """True if a rank failed before the pod's deletion. Such a pod may run for another half minute, because torchrun
    waits for other ranks.
    """
    if own.stalled or own.early:
        return True  # after a SIGTERM agents do not write these facts, so they were true before the deletion
    if own.symptom or own.resumable or own.exception.startswith(("KeyboardInterrupt", "SystemExit")):
        return False
    if code in (0, rules.RESUMABLE_EXIT_CODE, _INTERRUPTED, _KILLED, _TERMINATED):
        return False
    # Launchers and interpreters exit with 1 or SIGABRT's code after a SIGTERM, so these codes show no own failure.
    return bool(own.exception) or own.exit_code is not None or code not in (None, 1, _ABORTED)


def _ended_from_outside(first: api.JobFailure) -> bool:
    """True if the pod is recorded as deleted from outside, or lost with its node."""
    return precedence_of(first) in (Precedence.NODE, Precedence.DELETED)


def _first(ends: Sequence[PodEnd], recorded: str = "") -> PodEnd:
    """Return the PodEnd that explains the others. recorded: the pod whose failure was recorded first."""

    def order(end: PodEnd) -> tuple[Precedence, bool, int, dt.datetime, int]:
        failure = end.failure
        return (end.precedence, failure.pod != recorded, end.seen, failure.time, failure.node_rank)

    return min(ends, key=order)


def _recorded(first: api.JobFailure, ends: Sequence[PodEnd]) -> list[PodEnd]:
    """Return the first failure as an additional PodEnd, if its pod is gone or shows less than was recorded."""
    now = next((e for e in ends if e.failure.pod == first.pod), None)
    if now is None:
        return [PodEnd(first)]
    if not _ended_from_outside(first):
        # A pod that the operator has deleted may show less than the record: without a container it "exits" with 137.
        return [PodEnd(first)] if now.precedence > precedence_of(first) else []
    merged = msgspec.structs.replace(
        first,
        exit_code=now.failure.exit_code,
        signal=now.failure.signal,
        step=first.step if now.failure.step is None else now.failure.step,
        exception=first.exception or now.failure.exception,
        log_tail=now.failure.log_tail,
        evidence=evidence_of(first),
    )
    return [PodEnd(merged)]


def _reason(pod: Pod, own: Failure, precedence: Precedence) -> str:
    if precedence in (Precedence.OWN, Precedence.LATE) and (own.stalled or own.early):
        return STALLED if own.stalled else ENDED_EARLY
    if precedence == Precedence.KERNEL:
        return pod.trainer.reason
    if precedence in (Precedence.RESUMABLE, Precedence.SYMPTOM):
        return RESUMABLE if precedence == Precedence.RESUMABLE else PEER_LOST
    if pod.reason or pod.disruption:
        return pod.disruption or pod.reason
    if precedence in (Precedence.NODE, Precedence.NODE_LATE) and not pod.trainer.is_lost:
        return UNFIT
    reason = "Error" if _runtime_reason(pod) or pod.trainer.hides_a_failure else pod.trainer.reason
    was_deleted = precedence in (Precedence.DELETED, Precedence.STOPPED)
    return STOPPED if was_deleted and reason in ("", "Completed", "Error") else reason


def _runtime_reason(pod: Pod) -> str:
    """Return the pod's reason if a container runtime made it up to describe an exit code; else ""."""
    known = pod.trainer.exit_code is None or pod.trainer.reason in _CONTAINERS_OWN
    return "" if known else pod.trainer.reason


def _time(pod: Pod, own: Failure, now: dt.datetime) -> dt.datetime:
    """Return when the rank failed, as it reported. If that is implausible, return when its container ended. Both are
    times of the node's clock; the result is neither before the pod was bound nor after the present second."""
    ended = pod.trainer.ended_at
    if ended is None:
        return pod.deletion_requested_at or now
    failed = dt.datetime.fromtimestamp(own.time, dt.timezone.utc)
    failed = failed if dt.timedelta() <= ended + CLOCKS_DIFFER - failed <= REPORTED_BEFORE_MAX else ended
    return min(max(failed, pod.bound_at or failed), now + dt.timedelta(microseconds=999_999))
