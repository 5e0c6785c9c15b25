"""Replaces one pod of a `ddprun` job while the others stay: agents of the other pods end the ranks, keep the fork
servers warm, and wait for the new pod. Then all ranks start as a new generation."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence

from msgspec.structs import replace

from ddpjob_operator.failures import root_cause, termination_message
from ddpjob_operator.job import api, ranges, reasons, wording
from ddpjob_operator.observed.cluster import Pod
from ddpjob_operator.plan import gang, group_restart, leadership
from ddpjob_operator.plan.actions import Decision
from ddpjob_operator.plan.settlement import Settled, settle
from ddpjob_operator.plan.transitions import enter, with_failure, with_goodput, with_idle, with_new_ranks
from ddpjob_operator.plan.view import View, name_pods
from ddpjob_operator.pods import naming

# Failures that a new pod cannot fix while the others wait.
_OF_ALL_PODS = (root_cause.STALLED, root_cause.CONFIG_ERROR)


def replacing(view: View, status: api.Status) -> Decision | None:
    """Wait until the lost pods have ended, count the failure, and return the status in which they are replaced."""
    first = view.recorded.unsettled_failure
    lost = [] if first is None else lost_alone(view, status, first)
    if first is None or not lost:
        return None
    settled = settle(view, status, first)
    if not settled.verdict.restart:
        return group_restart.restart_all(view, status, first, settled)  # stops the other pods too, then fails the job
    if ending := _still_ending(view, lost):
        message = f"{settled.text}; {name_pods(ending)} still stopping, the other nodes wait"
        return Decision(replace(with_failure(status, settled.cause, settled.text), message=message))
    status, wait = settled.status(view, status), settled.verdict.wait_seconds
    status = with_new_ranks(status, view.now + dt.timedelta(seconds=wait))
    others = len(view.staying) if view.is_elastic else view.spec.nodes - len(lost)
    kept = f"the other {others} nodes wait" if others != 1 else "the other node waits"
    kept = "the others go on" if view.is_enough(view.staying) else kept
    when = f" in {wording.duration(wait)}" if wait else ""
    return Decision(_replaced(view, status, "Restarting", settled, lost, f"{when}, {kept}"))


def going_on(view: View, status: api.Status) -> Decision | None:
    """Replace the pods that an elastic job has lost, while its other nodes train. No agent waits, so the job stays
    Running, and other pods bring no more evidence."""
    trigger = next(group_restart.triggers(view, status), None)
    if trigger is None or not view.goes_on(status):
        return None
    lost = lost_alone(view, status, trigger[1])
    lost = sorted(set(lost).difference(p.place for p in _still_ending(view, lost)))
    if not lost or not (settled := settle(view, status, trigger[1], others_go_on=True)).verdict.restart:
        return None
    # Add up the goodput first: once a pod is replaced, time before the first step counts as restart and not as start.
    idle_since = group_restart.idle_since(view, status, trigger[1])
    status = with_goodput(with_idle(status, idle_since), view.now)
    status = settled.status(view, with_idle(status, idle_since and view.now))  # idle until the next step
    # Remember the furthest step: if the other nodes make no step until the next loss, both losses count as in a row.
    status = replace(status, furthest_step=status.furthest)
    return Decision(_replaced(view, status, "Running", settled, lost, ", the others go on"))


def _still_ending(view: View, lost: Sequence[int]) -> list[Pod]:
    """Return lost pods in which ranks may be running. Sidecars run until the pod is replaced and deleted."""
    pods = (p for place in lost if (p := view.pods.get(place)) is not None)
    return [p for p in pods if p.live and not p.has_failed and p.uid not in view.lost]


def lost_alone(view: View, status: api.Status, first: api.JobFailure) -> list[int]:
    """Return the numbers of lost pods that are replaced while agents elsewhere wait; [] if all restart or stop."""
    all_stop = view.spec.suspend or gang.is_to_stop(view, status)
    all_start = first.reason in _OF_ALL_PODS or status.completed_nodes
    if all_stop or all_start or not view.spec.facts.restarts_in_place:
        return []
    # New pods that cannot ask would follow node 0, although another node has led. A new attempt begins with node 0.
    if leadership.leader(view.job, view.recorded).term > 1 and not view.settings.answers_agents:
        return []
    waiting = {p.place for p in view.active if p.deletion_requested_at is None and not p.has_failed}
    known = set(view.pods) | status.started
    lost = sorted((known - waiting).intersection(view.spec.members))
    ended = [p for p in view.known_pods.values() if p.place in lost and p.ended]
    messages = [termination_message.read_message(p.trainer.message) for p in ended]
    # An agent that ended together with its group cannot restart ranks in place, and the other agents end as well.
    group_ended = any(message is not None and message.ended for message in messages)
    # A waiting pod of the last group shows that no older group still trains.
    # In a partition the nodes of a group may be lost one by one while their ranks train.
    if group_ended or not leadership.in_last_group(view, status, waiting, lost):
        return []
    return lost


def _replaced(
    view: View, status: api.Status, state: api.State, settled: Settled, lost: list[int], what_others_do: str
) -> api.Status:
    numbers = {str(place): naming.replacement(status, place) + 1 for place in lost}
    status = replace(
        status,
        replacements={**status.replacements, **numbers},
        started_nodes=ranges.text(status.started - set(lost)),
    )
    status = leadership.after_loss(view, status, lost)
    names = ", ".join(naming.pod_name(view.job, status.attempt, place, numbers[str(place)]) for place in lost[:3])
    more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
    cost = group_restart.charge(view, settled.verdict)
    where = group_restart.from_step(status, kept=False)  # the pods that stay may have a later step in memory
    is_its = [view.spec.members.node_rank(place) for place in lost] == [settled.failure.node_rank]
    how = "takes its place" if is_its else "replaces a lost pod" if len(lost) == 1 else "replace the lost pods"
    text = f"{settled.text}; {names}{more} {how}{what_others_do} ({cost}){where}"
    return enter(status, state, reasons.REPLACING, text, view.now)
