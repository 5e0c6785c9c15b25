"""Ignores the failure of a node of an elastic job that started just before training ended and joined no group. A false
success is worse than a needless restart, so the conditions are strict: the node reports a lost peer or nothing, and it
started after the last call of the other nodes and shortly before they completed."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence, Set

from ddpjob_core.failures import Precedence
from ddpjob_operator.failures import root_cause, termination_message
from ddpjob_operator.job import api, ranges
from ddpjob_operator.observed.cluster import Pod
from ddpjob_operator.plan.settlement import context
from ddpjob_operator.plan.view import View
from ddpjob_operator.pods.environment import JOIN_SECONDS

# Seconds that torchrun (2.13) waits for more nodes once it has the minimum (its `last_call`).
# Default in torch/distributed/elastic/rendezvous/dynamic_rendezvous.py: RendezvousTimeout._DEFAULT_TIMEOUTS.
LAST_CALL_SECONDS = 30
# Seconds that importing torch takes at most, even from a slow file system.
IMPORT_SECONDS = 60


def late(view: View, status: api.Status) -> Set[int]:
    """Return the numbers of pods that never joined a group: under ddprun all that node 0's agent does not name at the
    end, under torchrun those that failed late. status: already with this reconcile's nodes."""
    completed, started = status.completed, status.started
    if view.spec.facts.resizes_in_place:
        members = _members_at_the_end(view)
        # If a user scales away nodes that have trained, too few are left. The waiting nodes end with 0 as well.
        return (started | completed) - members if view.is_enough(members) else set()
    # A node that failed before enough others completed may have trained with them.
    if not view.is_elastic or not view.is_enough(status.completed) or view.recorded.is_broken:
        return set()
    if not completed <= set(view.known_pods):
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
