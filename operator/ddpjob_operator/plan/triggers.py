"""What shows that an attempt cannot go on, and so breaks it. The cause may be another one (settlement.py)."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator

from msgspec.structs import replace

from ddpjob_operator.failures import root_cause
from ddpjob_operator.job import api, launcher, ranges, reasons
from ddpjob_operator.job.reasons import Reason
from ddpjob_operator.job.status import TERMINAL, is_broken
from ddpjob_operator.job.times import after, is_past
from ddpjob_operator.observed import stall
from ddpjob_operator.observed.cluster import Pod
from ddpjob_operator.plan.settlement import failure_of, failure_of_pod, launched, rank_of, with_last_step, with_limit
from ddpjob_operator.plan.view import View
from ddpjob_operator.pods import naming

# An agent in the pod finds a stall itself, and restarts in place: what takes longer has no agent that can.
AGENT_FIRST = dt.timedelta(seconds=60)


def first_trigger(view: View, status: api.Status) -> tuple[Reason, api.Failure] | None:
    """What breaks this attempt, the strongest evidence first; None where nothing does."""
    return next(_triggers(view, status), None)


def _triggers(view: View, status: api.Status) -> Iterator[tuple[Reason, api.Failure]]:
    ended = (*_failed(view, status), *_gone(view, status))
    yield from sorted(ended, key=lambda trigger: root_cause.weigh(trigger[1]))
    yield from _stopped_from_outside(view, status)
    yield from _never_configured(view, status)
    yield from _stalled(view, status)


def _failed(view: View, status: api.Status) -> Iterator[tuple[Reason, api.Failure]]:
    if failed := view.failed(status):
        # The operator has requested no deletion in this attempt: who else did may explain what failed.
        pods = [*failed, *(p for p in view.active if p.deletion_requested_at is not None)]
        failure = root_cause.root_cause(
            status.attempt,
            pods,
            rank_of(view),
            view.now,
            keep_log_tail=view.settings.keep_log_tail,
            launched=launched(view, status),
        )
        yield reasons.RANK_FAILED, with_limit(view, with_last_step(status, failure))


def _gone(view: View, status: api.Status) -> Iterator[tuple[Reason, api.Failure]]:
    for pod in sorted((p for p in view.pods.values() if p.uid in view.lost), key=lambda p: p.rank):
        yield reasons.NODE_LOST, failure_of_pod(view, status, pod, root_cause.NODE_LOST)
    ran = ranges.parse(status.started_nodes) - ranges.parse(status.completed_nodes)
    for rank in sorted(ran - set(view.pods)):
        name = naming.present_pod_name(view.job, status, rank)
        yield reasons.RANK_FAILED, failure_of(view, status, rank, name, root_cause.GONE)


def _stopped_from_outside(view: View, status: api.Status) -> Iterator[tuple[Reason, api.Failure]]:
    for pod in view.active:
        if pod.deletion_requested_at is not None:
            yield reasons.DISRUPTED, failure_of_pod(view, status, pod, pod.disruption or root_cause.STOPPED)


def _never_configured(view: View, status: api.Status) -> Iterator[tuple[Reason, api.Failure]]:
    for pod in view.active:
        if is_past(_config_error_at(view, pod), view.now):
            failure = failure_of_pod(view, status, pod, root_cause.CONFIG_ERROR)
            yield reasons.RANK_FAILED, replace(failure, exception=pod.trainer.message[: root_cause.EXCEPTION_MAX])


def _stalled(view: View, status: api.Status) -> Iterator[tuple[Reason, api.Failure]]:
    finding = view.stall_finding
    if finding is None or finding.kind == "warning" or finding.node_rank not in view.pods:
        return
    if launcher.restarts_in_place(view.spec) and view.now < finding.until + AGENT_FIRST:
        return
    failure = failure_of_pod(view, status, view.pods[finding.node_rank], root_cause.STALLED)
    what = finding.what()[: root_cause.EXCEPTION_MAX]
    yield reasons.STALLED, replace(failure, rank=finding.rank, step=finding.step, exception=what)


def next_check(view: View, status: api.Status) -> dt.datetime | None:
    """When time alone may break this attempt."""
    if status.state in (*TERMINAL, "Failing", "Suspended") or is_broken(status):
        return None
    times = [*(_config_error_at(view, p) for p in view.active)]
    times.append(stall.requeue_at(view.trackers, view.spec.stall, view.now))
    return min((t for t in times if t is not None and t > view.now), default=None)


def _config_error_at(view: View, pod: Pod) -> dt.datetime | None:
    stuck = pod.trainer.state == "waiting" and pod.trainer.reason == root_cause.CONFIG_ERROR
    return after(pod.scheduled_at, view.settings.config_error_seconds) if stuck else None
