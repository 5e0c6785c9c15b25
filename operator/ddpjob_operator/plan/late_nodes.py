"""Nodes of an elastic job that started when its training was about to end: they have joined no group, and fail nothing.

That a node has trained cannot be seen where its ranks report nothing, and a success too many is a wrong result, while a
restart too many costs only time. So a node counts as late only where it complains of its peers, or says nothing, and
where its start agrees with that: after the last call of the others, and shortly before they completed.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence, Set

from ddpjob_core.failures import Precedence
from ddpjob_operator.failures import root_cause
from ddpjob_operator.job import api
from ddpjob_operator.job.status import is_broken
from ddpjob_operator.observed.cluster import Pod
from ddpjob_operator.plan.settlement import context
from ddpjob_operator.plan.view import View

# No torchrun waits longer for its group (join_timeout, environment.py).
JOIN_SECONDS = 900
# How long torchrun waits for more nodes once the least are there (last_call_timeout of its c10d rendezvous).
LAST_CALL_SECONDS = 30
# A torchrun is imported within a minute, also from a slow file system. One that ends without a word has shown less.
IMPORT_SECONDS = 60


def late(view: View, status: api.Status) -> Set[int]:
    """The places that have started and failed, and were in no group when the training ended. status: with the nodes
    that have started and completed until now."""
    completed, started = status.completed, status.started
    # What was seen to fail before the others completed may have been one of them.
    if not view.is_elastic or not view.is_enough(status.completed) or is_broken(view.recorded):
        return set()
    if not completed <= set(view.known_pods):
        return set()
    others = [view.known_pods[place] for place in sorted(completed)]
    failed = (p for place, p in view.known_pods.items() if place in started - completed and p.has_failed)
    return {p.place for p in failed if not _has_reported(view, status, p) and _is_late(view, status, p, others)}


def _is_late(view: View, status: api.Status, pod: Pod, others: Sequence[Pod]) -> bool:
    """others: the pods that have completed. Clocks of nodes differ by less than a last call takes."""
    starts = [_started_at(other) for other in others]
    ends = [other.trainer.ended_at for other in others if other.trainer.ended_at is not None]
    begun = max((start for start in starts if start is not None), default=None)
    start, within = _started_at(pod), _late_by(view, status, pod)
    if start is None or begun is None or None in starts or not ends or not within:
        return False
    return start >= max(begun + dt.timedelta(seconds=LAST_CALL_SECONDS), min(ends) - dt.timedelta(seconds=within))


def _started_at(pod: Pod) -> dt.datetime | None:
    """When its container started; where that is not known, when it got its node."""
    return pod.trainer.started_at or pod.scheduled_at


def _late_by(view: View, status: api.Status, pod: Pod) -> int:
    """How many seconds before the end a node may have started that ended like this and had not joined; 0: it failed by
    itself, or was ended from outside."""
    failure = root_cause.root_cause(context(view, status), [pod])
    precedence = root_cause.precedence_of(failure)
    if precedence == Precedence.SYMPTOM:
        return JOIN_SECONDS
    says_nothing = precedence == Precedence.UNKNOWN and pod.trainer.exit_code == 1 and not pod.trainer.message.strip()
    return IMPORT_SECONDS if says_nothing else 0


def _has_reported(view: View, status: api.Status, pod: Pod) -> bool:
    """Whether a rank of it has: ranks start when their node has joined."""
    node_rank = view.members.node_rank(pod.place)
    reports = (r.node_rank for r in view.seen.reports.values() if r.attempt in (0, status.attempt))
    return node_rank in {*reports, *(tracker.node_rank for tracker in view.trackers.values())}
