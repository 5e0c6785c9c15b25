"""One pod is replaced, the others keep theirs: the smaller restart, where `ddprun` is the launcher.

The agents of the other pods have ended their ranks when they lost their peer. They keep their fork servers warm and
wait, so the new pod is all that is needed: its agent joins, and all ranks start as a new generation.
"""

from __future__ import annotations

import datetime as dt

from msgspec.structs import replace

from ddpjob_operator.failures import root_cause, termination_message
from ddpjob_operator.job import api, budgets, launcher, ranges, reasons, wording
from ddpjob_operator.observed.cluster import Pod
from ddpjob_operator.plan import group_restart
from ddpjob_operator.plan import status as statuses
from ddpjob_operator.plan.view import Decision, View, name_pods
from ddpjob_operator.pods import naming

# What no new pod mends while the others wait.
_OF_ALL_PODS = (root_cause.STALLED, group_restart.CONFIG_ERROR)


def replacing(s: View) -> Decision | None:
    """Wait until what is broken has ended, charge it, and make room for the pods that take its place."""
    first = s.recorded.last_failure
    if first is None or not statuses.is_broken(s.recorded):
        return None
    broken = broken_alone(s, first)
    if not broken:
        return None
    pods = [s.mine[rank] for rank in broken if rank in s.mine]
    settled = group_restart.settle(s, first)
    if not settled.verdict.restart:
        return None  # the others are stopped as well, and then the job fails
    ending = [p for p in pods if p.live and p.uid not in s.lost]
    if ending:
        unsettled = replace(settled.failure, failure_class="", charged_to="")
        text = f"{settled.text}; {name_pods(ending)} still stopping, the other nodes wait"
        return Decision(replace(statuses.with_failure(s.status, unsettled, settled.text), message=text))
    return Decision(_replaced(s, settled, broken))


def broken_alone(s: View, first: api.Failure) -> list[int]:
    """The nodes whose pods are lost while agents elsewhere wait for new ones; none where all have to start anew."""
    if not launcher.restarts_in_place(s.spec) or first.reason in _OF_ALL_PODS or s.status.completed_nodes:
        return []
    waiting = {p.rank for p in s.alive if p.deletion_requested_at is None}
    known = set(s.mine) | ranges.parse(s.status.started_nodes)
    broken = sorted(rank for rank in known - waiting if rank < s.spec.nodes)
    ends = [p for p in {**s.deleted_pods, **s.mine}.values() if p.rank in broken and p.ended]
    return broken if _a_first_pod_waits(s, waiting) and not any(_group_ended(p) for p in ends) else []


def _a_first_pod_waits(s: View, waiting: set[int]) -> bool:
    """Whether at least one of the pods with which the attempt began is left.

    It was in every generation, so the next one gets a new number, and Snapshot tells by it whose checkpoint is newer.
    And without it no older group is whole: in a part of the network that is cut off nodes are given up one after the
    other, while their ranks have never lost each other and go on writing.
    """
    return any(naming.replacement(s.status, rank) == 0 for rank in waiting)


def _group_ended(pod: Pod) -> bool:
    """Whether its agent ended because the group did: nothing is left in place, and its peers end as well."""
    message = termination_message.left(pod.trainer.message)
    return message is not None and message.ended


def _replaced(s: View, settled: group_restart.Settled, broken: list[int]) -> api.Status:
    status = settled.status(s)
    wait = settled.verdict.wait_seconds
    numbers = {str(rank): naming.replacement(status, rank) + 1 for rank in broken}
    status = replace(
        status,
        replacements={**status.replacements, **numbers},
        started_nodes=ranges.text(ranges.parse(status.started_nodes) - set(broken)),
        attempt_time=s.now + dt.timedelta(seconds=wait),
        running_time=None,
        first_step_time=None,
        furthest_step=budgets.furthest(status),
    )
    names = ", ".join(naming.pod_name(s.job, status.attempt, rank, numbers[str(rank)]) for rank in broken[:3])
    more = f" and {len(broken) - 3} more" if len(broken) > 3 else ""
    when = f" in {wording.duration(wait)}" if wait else ""
    others = s.spec.nodes - len(broken)
    kept = f"the other {others} nodes wait" if others > 1 else "the other node waits"
    text = f"{settled.text}; {names}{more} takes its place{when}, {kept} ({group_restart.charge(s, settled.verdict)})"
    return statuses.enter(status, "Restarting", reasons.REPLACING, text, s.now)
