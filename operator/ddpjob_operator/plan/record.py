"""Writes facts that became true after the last reconcile into the status, because they must outlive their pods."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Sequence, Set

from msgspec.structs import replace

from ddpjob_core.budget import Spent, newly_spent, with_newly_spent
from ddpjob_core.failures import Failure, Precedence
from ddpjob_core.findings import FINDINGS_MAX, NamedFinding, trained_alone
from ddpjob_operator.failures import root_cause, termination_message
from ddpjob_operator.failures.redaction import shown
from ddpjob_operator.job import api, bounds, budgets, ranges, reasons
from ddpjob_operator.job.validation import dotted
from ddpjob_operator.observed import stall
from ddpjob_operator.observed.cluster import Pod
from ddpjob_operator.observed.reports import AgentReport, Report
from ddpjob_operator.plan import leadership
from ddpjob_operator.plan.settlement import context
from ddpjob_operator.plan.transitions import with_failure, with_idle, with_progress
from ddpjob_operator.plan.view import View
from ddpjob_operator.pods import naming
from ddpjob_operator.pods.environment import JOIN_SECONDS

_MIB = 1 << 20
# Reasons that occur only after all pods of the attempt were created.
_ALL_PODS_WERE_MADE = (
    reasons.UNSCHEDULABLE.name,
    reasons.CANNOT_START.name,
    reasons.STARTING_TRAINERS.name,
    reasons.ALL_NODES_RUN.name,
    reasons.ENOUGH_NODES_RUN.name,
    reasons.STALL_SUSPECTED.name,
    reasons.OTHERS_COMPLETED.name,
)
# Seconds that torchrun (2.13) waits for more nodes once it has the minimum (its `last_call`).
# Default in torch/distributed/elastic/rendezvous/dynamic_rendezvous.py: RendezvousTimeout._DEFAULT_TIMEOUTS.
LAST_CALL_SECONDS = 30
# Seconds that importing torch takes at most, even from a slow file system.
IMPORT_SECONDS = 60


def record(view: View, status: api.Status) -> api.Status:
    """Return the status with started and completed nodes, progress, and the restarts that agents counted."""
    report = view.seen.reports.get(0)
    status = leadership.with_present(view, _with_findings(_with_nodes(view, status), view))
    not_kept = _not_kept(view, status)
    idle_since = stall.idle_since(view.trackers, view.spec.stall, view.now)
    status = with_idle(with_progress(status, report, not_kept), idle_since)
    # An attempt that begins in this reconcile has no agent yet.
    # The agent's known reports belong to the previous attempt, and were counted.
    has_agent = 0 < status.attempt == view.recorded.attempt
    return with_agent(status, view) if has_agent else status


def _with_findings(status: api.Status, view: View) -> api.Status:
    """Add each finding that makes a success suspicious once. Findings must outlive the pods that report them."""
    if not status.attempt:
        return status
    new = (api.StoredFinding(reason=one.reason, message=one.message) for one in _reported(view, status))
    found = list(dict.fromkeys((*status.findings, *new)))[:FINDINGS_MAX]
    return replace(status, findings=found) if found != status.findings else status


def _reported(view: View, status: api.Status) -> Iterator[NamedFinding]:
    # Under torchrun only the library knows that no group was formed.
    report = view.seen.reports.get(0)
    if report is not None and report.alone and report.attempt == status.attempt:
        yield trained_alone(report.world_size or view.spec.world_size)
    for _, pod in sorted(view.known_pods.items()):
        if pod.has_completed and pod.trainer.message:
            yield from termination_message.findings(pod.trainer.message, trusted=view.hands_over_exit_code)


def _unconfigured_since(view: View, status: api.Status) -> dt.datetime | None:
    """Return when the operator first saw that a pod lacks a ConfigMap or Secret. The time when the pod got its node
    is too early, because pulling an image may exceed the limit. It is kept in the status, because leaders change."""
    if any(root_cause.lacks_configuration(pod) for pod in view.active):
        return status.unconfigured_since or view.now
    is_started_again = status.start_retries > 0 and len(view.waiting) == len(view.pods)
    return status.unconfigured_since if is_started_again else None


def _with_nodes(view: View, status: api.Status) -> api.Status:
    unconfigured_since = _unconfigured_since(view, status)
    # A pod that may have had a node counts as started: it may be running unobserved, and its name is used once.
    # A pod that was first seen without a node and then with a deletion never gets one.
    ran = {p.place for p in view.pods.values() if p.trainer.state != "waiting" and not p.trainer.init}
    started = ran | {p.place for p in view.deleted_pods.values() if p.node or p.deletion_requested_at is None}
    # Node 0's pod is created first (startup.py). Without an operator it may have led and gone, and a second pod of its
    # name would lead in the same term.
    is_first = not naming.replacement(status, view.leader)
    if view.spec.facts.resizes_in_place and ran and is_first and view.leader not in view.known_pods:
        started.add(view.leader)
    completed = {p.place for p in view.known_pods.values() if p.has_completed}
    if completed or status.completed_nodes:
        started = _with_the_group(view, status, started, completed)
    ready = sum(p.trainer.state == "running" and p.trainer.ready and p.live for p in view.pods.values())
    known = view.seen.master_addr
    address = str(naming.endpoint(view.job, status.attempt)) if known is None else known
    status = replace(
        status,
        started_nodes=ranges.text(status.started | started),
        completed_nodes=ranges.text(status.completed | completed),
        unconfigured_since=unconfigured_since,
        attempt_nodes=(status.attempt_nodes or view.spec.nodes) if view.is_elastic and status.attempt else None,
        nodes=api.Nodes(total=view.spec.nodes, ready=min(view.spec.nodes, ready)),  # a spare is no node that trains
        master_addr=address if status.attempt else "",
    )
    # A node that never joined a group does not belong to the training, even after its pod is gone.
    if late := _late(view, status):
        trained, over = (ranges.text(places - late) for places in (status.started, status.completed))
        status = replace(status, started_nodes=trained, completed_nodes=over)
    return status


def _with_the_group(view: View, status: api.Status, started: set[int], completed: set[int]) -> set[int]:
    known = status.started | completed
    if view.is_elastic and view.is_enough(known):
        # When nodes complete, waiting pods get room and start, but the rendezvous is over. Do not count such pods.
        return started & known
    if status.reason not in _ALL_PODS_WERE_MADE:
        return started  # a pod may be missing because the operator stopped before creating it
    # All pods have existed, so a missing pod has run. A new pod with the same number would wait in vain for the others.
    return started | (set(view.spec.members) - set(view.pods))


def _not_kept(view: View, status: api.Status) -> str:
    """Return why state is not kept in memory, in which pods, and which limit to raise; "" if no rank reports that."""
    lacking = _lacking(view, status)
    if not lacking:
        return ""
    places, first = sorted({place for place, _ in lacking}), lacking[0][1]
    more = f" and {len(places) - 1} more" if len(places) > 1 else ""
    pod = naming.present_pod_name(view.job, status, places[0])
    why = f"in pod {pod}{more}: {first.not_kept}" if len(view.spec.members) > 1 else first.not_kept
    needed = max((report.limit_needed for _, report in lacking if report.limit_needed is not None), default=None)
    if first.limit_needed is not None and needed is not None:
        facts = view.spec.facts
        path = facts.trainer_path if facts.trainer else ("trainer",)
        field = dotted((*path, "resources", "limits", "memory"))
        why = f"{why}; set {field} to {-(-needed // _MIB)}Mi or more"
    return why[: bounds.ADVICE_MAX]


def _lacking(view: View, status: api.Status) -> list[tuple[int, Report]]:
    """Return place and report of the ranks with `not_kept`, by rank. Generations before rank 0's do not count."""
    zero = view.seen.reports.get(0)
    return [
        (place, report)
        for _, report in sorted(view.seen.reports.items())
        if report.not_kept
        and report.attempt in (0, status.attempt)
        and (zero is not None and report.generation == zero.generation)
        and (place := view.spec.members.place(report.node_rank)) is not None
    ]


def _late(view: View, status: api.Status) -> Set[int]:
    """Return the places of an elastic job whose nodes never joined a group, so that their failures do not count: under
    ddprun all that node 0's agent does not name at the end, under torchrun those that failed late. status: with this
    reconcile's nodes. A false success is worse than a needless restart, so a late node reports a lost peer or nothing,
    and started after the last call of the other nodes and shortly before they completed."""
    completed, started = status.completed, status.started
    if view.spec.facts.resizes_in_place:
        members = _members_at_the_end(view)
        # If a user scales away nodes that have trained, too few are left. The waiting nodes end with 0 as well.
        return (started | completed) - members if view.is_enough(members) else set()
    # A node that failed before enough others completed may have trained with them.
    is_over = view.is_elastic and view.is_enough(completed) and not view.recorded.is_broken
    if not is_over or not completed <= set(view.known_pods):
        return set()
    others = [view.known_pods[place] for place in sorted(completed)]
    # If a rank of a node has reported, the node had joined a group.
    reported = {r.node_rank for r in view.seen.reports.values() if r.attempt in (0, status.attempt)}
    reported |= {tracker.node_rank for tracker in view.trackers.values()}
    failed = (p for place, p in view.known_pods.items() if place in started - completed and p.has_failed)
    silent = (p for p in failed if view.spec.members.node_rank(p.place) not in reported)
    return {p.place for p in silent if _is_late(view, status, p, others)}


def _members_at_the_end(view: View) -> Set[int]:
    """Return the places whose ranks have all ended with 0, by the last message of node 0's agent; none without one."""
    leader = view.known_pods.get(view.leader)
    has_ended = leader is not None and leader.has_completed
    message = termination_message.read_message(leader.trainer.message) if has_ended and leader is not None else None
    return ranges.parse(message.agent.members) if message is not None and message.agent is not None else set()


def _is_late(view: View, status: api.Status, pod: Pod, others: Sequence[Pod]) -> bool:
    """True if a pod started too late to join. others: completed pods. Assumes clocks within LAST_CALL_SECONDS."""
    starts = [_started_at(other) for other in others]
    ends = [other.trainer.ended_at for other in others if other.trainer.ended_at is not None]
    begun = max((start for start in starts if start is not None), default=None)
    start, within = _started_at(pod), _late_by(view, status, pod)
    if start is None or begun is None or None in starts or not ends or not within:
        return False
    return start >= max(begun + dt.timedelta(seconds=LAST_CALL_SECONDS), min(ends) - dt.timedelta(seconds=within))


def _started_at(pod: Pod) -> dt.datetime | None:
    return pod.trainer.started_at or pod.scheduled_at


def _late_by(view: View, status: api.Status, pod: Pod) -> int:
    """Return how many seconds before the end a late node may have started; 0 if it failed by itself or was stopped."""
    attempt = context(view, status)
    precedence = root_cause.precedence_of(root_cause.root_cause(attempt, [pod]))
    if precedence == Precedence.SYMPTOM:
        return JOIN_SECONDS
    says_nothing = precedence == Precedence.UNKNOWN and pod.trainer.exit_code == 1 and not pod.trainer.message.strip()
    return IMPORT_SECONDS if says_nothing else 0


def newest_agent(view: View) -> AgentReport | None:
    """Return the newest counts of node 0's agent, from its last report or its termination message."""
    leader = view.known_pods.get(view.leader)
    message = termination_message.read_message(leader.trainer.message) if leader is not None and leader.ended else None
    agents = [agent for agent in (view.seen.agent, message.agent if message is not None else None) if agent is not None]
    # With equal counts `max` returns the first, which is the agent's report: only the report contains the failures.
    return max(agents, key=lambda a: (a.replacement, a.restarts.total), default=None)


def with_agent(status: api.Status, view: View) -> api.Status:
    """Return the status with the restarts in place that the leader's agent (ddprun) has made, but the status does not
    count yet. `ddpjob_core.budget` counts them."""
    agent, leader = newest_agent(view), view.leader
    counted, number = (status, 0) if agent is None else _counted(status, agent, view.job, view.now)
    if agent is None or not number:
        return status
    made = counted.attempt_progress
    status = with_idle(counted, None if made is None else made.updated)
    # Record that all first pods have run: ranks start only after all nodes have joined, except in an elastic job.
    # Without this record, a second pod of the same name would count as the first, and start again at generation 0.
    leads = {leader} if agent.replacement == leadership.turn(view.job, status) else set()
    firsts = set() if view.is_elastic else {p for p in view.spec.members if naming.replacement(status, p) == 0}
    ran = (leads | firsts).intersection(view.spec.members)  # a leader that was scaled away may still report
    status = replace(status, started_nodes=ranges.text(status.started | ran))
    # The agent has already counted these steps as progress, so later failures must not count them again.
    status = replace(status, furthest_step=status.furthest)
    if status.is_broken:
        return status  # lastFailure stays the failure that is being classified
    for reported in agent.failures[-number:]:
        status = with_failure(status, _failure(status, reported, view))
    return status


def _counted(status: api.Status, agent: AgentReport, job: api.DDPJob, now: dt.datetime) -> tuple[api.Status, int]:
    history, limits, spent = budgets.history(status), budgets.limits(job.spec), budgets.known(status)
    known, counts = status.in_place, agent.restarts
    reported = Spent(counts.application, counts.infrastructure, counts.stall)
    new = newly_spent(spent, agent.replacement, reported, history, limits, now)
    if not new.total:
        return status, 0
    if known is None or known.replacement != agent.replacement:
        known = api.InPlace(replacement=agent.replacement, earlier=status.restarted_in_place)
    failures = agent.failures[-new.total :]
    history = with_newly_spent(
        history,
        new,
        limits,
        now,
        in_a_row=counts.in_a_row,
        charged_in_a_row=counts.charged_in_a_row,
        peers_lost=sum(f.charged_to == "infrastructure" and f.only_complains for f in failures),
        made_a_new_step=(status.furthest or 0) > (status.furthest_step or 0),
    )
    known = replace(known, **{name: getattr(known, name) + n for name, n in new._asdict().items()})
    return replace(status, restarts=budgets.restarts(history), in_place=known), new.total


def _failure(status: api.Status, failure: Failure, view: View) -> api.JobFailure:
    assert failure.node_rank is not None, "a report without it is refused"
    place = view.spec.members.place(failure.node_rank)
    pod = None if place is None else view.pods.get(place)
    is_known = failure.rank is not None and failure.rank < view.spec.world_size
    return api.JobFailure(
        attempt=status.attempt,
        rank=failure.rank if is_known else None,
        node_rank=failure.node_rank,
        pod="" if place is None else naming.present_pod_name(view.job, status, place),
        node=pod.node if pod is not None else "",
        exit_code=None if failure.stalled else failure.exit_code,
        signal=failure.signal,
        reason=_reason(failure),
        failure_class=failure.failure_class,
        charged_to=failure.charged_to,
        step=failure.step or None,
        generation=failure.generation,
        exception=shown(failure.exception, root_cause.EXCEPTION_MAX),
        where=shown(failure.where, root_cause.WORD_MAX),
        time=view.now,
    )


def _reason(failure: Failure) -> str:
    if failure.stalled:
        return root_cause.STALLED
    if failure.rank is None:
        return root_cause.CONNECTION_LOST
    if failure.only_complains:
        return root_cause.PEER_LOST
    return root_cause.ENDED_EARLY if failure.early else "Error"
