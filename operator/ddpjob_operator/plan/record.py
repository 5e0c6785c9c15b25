"""Writes facts that became true after the last reconcile into the status, because they must outlive their pods."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator

from msgspec.structs import replace

from ddpjob_core.findings import FINDINGS_MAX, NamedFinding, trained_alone
from ddpjob_operator.failures import root_cause, termination_message
from ddpjob_operator.job import api, bounds, ranges, reasons
from ddpjob_operator.job.validation import dotted
from ddpjob_operator.observed import stall
from ddpjob_operator.observed.reports import Report
from ddpjob_operator.plan import agent_restarts, late_nodes, leadership, transitions
from ddpjob_operator.plan.view import View
from ddpjob_operator.pods import naming

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


def record(view: View, status: api.Status) -> api.Status:
    """Return the status with started and completed nodes, progress, and the restarts that agents counted."""
    report = view.seen.reports.get(0)
    status = leadership.with_present(view, _with_findings(_with_nodes(view, status), view))
    not_kept = _not_kept(view, status)
    idle_since = stall.idle_since(view.trackers, view.spec.stall, view.now)
    status = transitions.with_idle(transitions.with_progress(status, report, not_kept), idle_since)
    # An attempt that begins in this reconcile has no agent yet.
    # The agent's known reports belong to the previous attempt, and were counted.
    has_agent = 0 < status.attempt == view.recorded.attempt
    return agent_restarts.with_agent(status, view) if has_agent else status


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
    is_started_again = status.start_retries > 0 and all(p.trainer.state == "waiting" for p in view.pods.values())
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
    if late := late_nodes.late(view, status):
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
    first = lacking[0]
    why = f"{_where(view, status, lacking)}{first.not_kept}"
    needed = max((one.limit_needed for one in lacking if one.limit_needed is not None), default=None)
    if first.limit_needed is None or needed is None:
        return why[: bounds.ADVICE_MAX]
    facts = view.spec.facts
    path = facts.trainer_path if facts.trainer else ("trainer",)
    field = dotted((*path, "resources", "limits", "memory"))
    return f"{why}; set {field} to {-(-needed // _MIB)}Mi or more"[: bounds.ADVICE_MAX]


def _lacking(view: View, status: api.Status) -> list[Report]:
    """Return the reports with `not_kept`, by rank. Reports of generations before rank 0's do not count."""
    zero = view.seen.reports.get(0)
    if zero is None:
        return []
    return [
        report
        for _, report in sorted(view.seen.reports.items())
        if report.not_kept
        and report.attempt in (0, status.attempt)
        and report.generation == zero.generation
        and view.spec.members.place(report.node_rank) is not None
    ]


def _where(view: View, status: api.Status, lacking: list[Report]) -> str:
    places = sorted({place for one in lacking if (place := view.spec.members.place(one.node_rank)) is not None})
    if len(view.spec.members) == 1:
        return ""
    more = f" and {len(places) - 1} more" if len(places) > 1 else ""
    return f"in pod {naming.present_pod_name(view.job, status, places[0])}{more}: "
