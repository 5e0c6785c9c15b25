"""How the pod of a stalled rank is ended: so that its object stays, and with it the one log that explains it.

The log of a pod is deleted with it. A pod whose activeDeadlineSeconds are over is ended by its kubelet in the same way
(SIGTERM, the pod's own grace, SIGKILL), as Failed with the reason DeadlineExceeded, and stays. The API server takes
that field also for a pod that runs, as long as it becomes less (pkg/apis/core/validation, ValidatePodUpdate).
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence

from msgspec.structs import replace

from ddpjob_operator.failures import root_cause
from ddpjob_operator.job import api, podspec
from ddpjob_operator.observed.cluster import Pod
from ddpjob_operator.plan.actions import DeletePod, EndPod, restart_grace_seconds
from ddpjob_operator.plan.view import View

# What a kubelet takes to receive the deadline, and to report the end of the pod.
KUBELET_SECONDS = 10
# A job whose pods may take an hour to save must not wait so long for one that hangs.
GRACE_SECONDS_MAX = 60


def stop(
    view: View, first: api.Failure, pods: Sequence[Pod], grace_seconds: int | None
) -> tuple[tuple[DeletePod | EndPod, ...], dt.datetime | None]:
    """Stop the pods of a broken attempt, and when to check them again. first: what is recorded as its cause."""
    hanging = next((p for p in pods if _hangs(p, first)), None)
    # The clock may have been set back since it was recorded; times.py keeps that of the state from being ahead.
    until = min(first.time, view.recorded.state_time or first.time) + dt.timedelta(
        seconds=KUBELET_SECONDS + min(podspec.grace_seconds(view.spec.template), GRACE_SECONDS_MAX)
    )
    if hanging is None or view.now >= until:
        # Neither its kubelet nor its process has answered, so its log is given up and the pod deleted.
        return view.stop(pods, restart_grace_seconds(view.spec) if hanging else grace_seconds), None
    others = view.stop([p for p in pods if p is not hanging], grace_seconds)
    return (*others, *(() if hanging.deadline_set else (EndPod(hanging.name, hanging.uid),))), until


def with_log(view: View, failure: api.Failure) -> api.Failure:
    """With the end of the log of the pod that was ended for it."""
    pod = view.known_pods.get(failure.node_rank) if failure.node_rank is not None else None
    if failure.reason != root_cause.STALLED or failure.log_tail or not view.settings.keep_log_tail or pod is None:
        return failure
    if pod.name != failure.pod or not pod.ended:
        return failure
    return replace(failure, log_tail=root_cause.tail_of(pod))


def _hangs(pod: Pod, first: api.Failure) -> bool:
    return first.reason == root_cause.STALLED and pod.name == first.pod and pod.deletion_requested_at is None
