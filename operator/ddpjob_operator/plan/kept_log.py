"""Stops the one pod whose log explains a stall or a deadline, but keeps its object, so that `kubectl logs` still works.

A kubelet ends a pod past its activeDeadlineSeconds as a delete would (SIGTERM, grace, SIGKILL), but keeps the object,
as Failed with reason DeadlineExceeded. The API server lets this field be set or lowered on a running pod
(pkg/apis/core/validation, ValidatePodUpdate).
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence

from msgspec.structs import replace

from ddpjob_operator.failures import root_cause, sentences
from ddpjob_operator.job import api
from ddpjob_operator.observed.cluster import Pod
from ddpjob_operator.plan.actions import DeletePod, EndPod
from ddpjob_operator.plan.settlement import failure_of, with_log
from ddpjob_operator.plan.transitions import with_failure
from ddpjob_operator.plan.view import View

# Seconds for a kubelet to receive the deadline, and to report that the pod has ended.
KUBELET_SECONDS = 10
# Seconds; a job with an hour of grace to save must not wait that long for a rank that hangs.
GRACE_SECONDS_MAX = 60


def stop(
    view: View, first: api.JobFailure | None, pods: Sequence[Pod], grace_seconds: int | None
) -> tuple[tuple[DeletePod | EndPod, ...], dt.datetime | None]:
    """Return the actions that stop these pods, and when to check again. first: the failure that is the reason."""
    kept = first.pod if first is not None and first.reason in root_cause.KEEPS_ITS_LOG else None
    last = next(
        (p for p in pods if p.name == kept and p.deletion_requested_at is None and p.uid not in view.lost), None
    )
    if first is None or last is None:
        return view.stop(pods, grace_seconds), None
    grace = view.spec.facts.grace_seconds
    grace = min(grace, GRACE_SECONDS_MAX) if first.reason == root_cause.STALLED else grace
    # The clock may have been set back after the failure; times.py ensures that state_time is not in the future.
    until = min(first.time, view.recorded.state_time or first.time) + dt.timedelta(seconds=KUBELET_SECONDS + grace)
    if view.now >= until:
        # Neither the kubelet nor the process has answered: give up the log and delete the pod.
        return view.stop(pods, view.spec.grace_after_failure), None
    others = view.stop([p for p in pods if p is not last], grace_seconds)
    end = EndPod(last.name, last.uid, view.spec.grace_after_failure if grace_seconds is not None else None)
    return (*others, *(() if last.deadline_set else (end,))), until


def with_deadline(view: View, status: api.Status) -> api.Status:
    """Record the rank furthest behind at the deadline. An unsettled failure is kept, as it explains more."""
    running = {p.place: p for p in view.active if p.trainer.state == "running"}
    if not running or view.recorded.is_broken:
        return status
    steps = {
        place: t.step for t in view.trackers.values() if (place := view.spec.members.place(t.node_rank)) in running
    }
    place = min(running, key=lambda p: (steps.get(p, max(steps.values(), default=0)), view.spec.members.node_rank(p)))
    failure = failure_of(view, status, place, root_cause.DEADLINE)
    return with_failure(status, failure, sentences.sentence(failure))


def with_end_at_deadline(view: View, status: api.Status) -> api.Status:
    """Add the end of the log to the failure that `with_deadline` recorded, once its pod has ended."""
    failure = view.recorded.last_failure
    if failure is None or failure.reason != root_cause.DEADLINE or failure.failure_class:
        return status
    failure = replace(with_log(view, failure), failure_class="permanent")
    return with_failure(status, failure, sentences.sentence(failure))
