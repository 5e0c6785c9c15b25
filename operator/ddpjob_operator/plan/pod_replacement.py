"""Replaces one pod of a `ddprun` job while the others stay: their agents end their ranks, keep the fork servers warm
and wait for the new pod. Then all ranks start as a new generation."""

from __future__ import annotations

import datetime as dt

from msgspec.structs import replace

from ddpjob_operator.failures import root_cause, termination_message
from ddpjob_operator.job import api, ranges, reasons, wording
from ddpjob_operator.job.status import unsettled_failure
from ddpjob_operator.plan import gang, group_restart
from ddpjob_operator.plan.actions import Decision
from ddpjob_operator.plan.settlement import Settled, settle
from ddpjob_operator.plan.transitions import enter, with_failure, with_new_ranks
from ddpjob_operator.plan.view import View, name_pods
from ddpjob_operator.pods import naming

# Failures that a new pod cannot fix while the others wait.
_OF_ALL_PODS = (root_cause.STALLED, root_cause.CONFIG_ERROR)


def replacing(view: View, status: api.Status) -> Decision | None:
    """Wait until the lost pods have ended, count the failure, and return the status in which they are replaced."""
    first = unsettled_failure(view.recorded)
    lost = [] if first is None else lost_alone(view, status, first)
    if first is None or not lost:
        return None
    settled = settle(view, status, first)
    if not settled.verdict.restart:
        return group_restart.restart_all(view, status, first, settled)  # stop all pods; then the job fails
    ending = [p for place in lost if (p := view.pods.get(place)) and p.live and p.uid not in view.lost]
    if ending:
        message = f"{settled.text}; {name_pods(ending)} still stopping, the other nodes wait"
        return Decision(replace(with_failure(status, settled.cause, settled.text), message=message))
    return Decision(_replaced(view, status, settled, lost))


def lost_alone(view: View, status: api.Status, first: api.JobFailure) -> list[int]:
    """Return the numbers of lost pods that are replaced while agents elsewhere wait; [] if all restart or stop."""
    all_stop = view.spec.suspend or gang.is_to_stop(view, status)
    all_start = first.reason in _OF_ALL_PODS or status.completed_nodes
    if all_stop or all_start or not view.facts.restarts_in_place:
        return []
    waiting = {p.place for p in view.active if p.deletion_requested_at is None}
    known = set(view.pods) | status.started
    lost = sorted((known - waiting).intersection(view.members))
    ended = [p for p in view.known_pods.values() if p.place in lost and p.ended]
    messages = [termination_message.read_message(p.trainer.message) for p in ended]
    # An agent that ended together with its group cannot restart ranks in place, and the other agents end as well.
    group_ended = any(message is not None and message.ended for message in messages)
    if group_ended or not _one_was_in_the_last_group(view, status, waiting, lost):
        return []
    return lost


def _one_was_in_the_last_group(view: View, status: api.Status, waiting: set[int], lost: list[int]) -> bool:
    """True if a waiting pod was in the newest generation of ranks: a first pod of the attempt, or a replacement
    whose ranks have reported. Snapshot finds the newest checkpoint by the number of that generation, which this
    pod's agent knows. The pod also proves that no older group still writes: in a partition, nodes may be lost one by
    one while their ranks train. If a lost pod has run, a waiting pod that has not run does not count as a first pod:
    it may replace a lost pod of the same name that was never seen."""
    started = {
        (view.members.place(report.node_rank), report.replacement)
        for report in view.seen.reports.values()
        if report.attempt == status.attempt
    }
    ran = status.started
    first = waiting & ran if ran.intersection(lost) else waiting
    numbers = ((place, naming.replacement(status, place)) for place in waiting)
    return any((number == 0 and place in first) or (place, number) in started for place, number in numbers)


def _replaced(view: View, status: api.Status, settled: Settled, lost: list[int]) -> api.Status:
    status = settled.status(view, status)
    wait = settled.verdict.wait_seconds
    numbers = {str(place): naming.replacement(status, place) + 1 for place in lost}
    status = replace(
        with_new_ranks(status, view.now + dt.timedelta(seconds=wait)),
        replacements={**status.replacements, **numbers},
        started_nodes=ranges.text(status.started - set(lost)),
    )
    names = ", ".join(naming.pod_name(view.job, status.attempt, place, numbers[str(place)]) for place in lost[:3])
    more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
    when = f" in {wording.duration(wait)}" if wait else ""
    others = view.spec.nodes - len(lost)
    kept = f"the other {others} nodes wait" if others > 1 else "the other node waits"
    if view.is_enough(set(view.members).difference(lost)):  # nodes of an elastic job do not wait for the new pod
        kept = "the others go on"
    cost = group_restart.charge(view, settled.verdict)
    where = group_restart.from_step(status, kept=view.members.leader not in lost or group_restart.files_stay(view))
    text = f"{settled.text}; {names}{more} takes its place{when}, {kept} ({cost}){where}"
    return enter(status, "Restarting", reasons.REPLACING, text, view.now)
