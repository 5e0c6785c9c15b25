"""How a pod that stands still is ended: so that its object stays, and with it the one log that explains it.

A deleted pod takes its log along. A pod whose activeDeadlineSeconds are over is ended by its kubelet in the same way
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
from ddpjob_operator.plan.view import DeletePod, EndPod, View, restart_grace_seconds

# What a kubelet takes to hear of it, and to write down the end.
HEARD_SECONDS = 10
# A job whose pods may take an hour to save must not wait so long for one that hangs.
GRACE_SECONDS_MAX = 60


def stop(
    s: View, first: api.Failure, pods: Sequence[Pod], grace_seconds: int | None
) -> tuple[tuple[DeletePod | EndPod, ...], dt.datetime | None]:
    """Stop the pods of a broken attempt, and when to look at that again. first: what is recorded as its cause."""
    hanging = next((p for p in pods if _hangs(p, first)), None)
    # The clock may have been set back since it was recorded; times.py keeps that of the state from being ahead.
    until = min(first.time, s.recorded.state_time or first.time) + dt.timedelta(
        seconds=HEARD_SECONDS + min(podspec.grace_seconds(s.spec.template), GRACE_SECONDS_MAX)
    )
    if hanging is None or s.now >= until:
        # Its kubelet is deaf, or its process: a delete is the last word.
        return s.stop(pods, restart_grace_seconds(s.spec) if hanging else grace_seconds), None
    others = s.stop([p for p in pods if p is not hanging], grace_seconds)
    return (*others, *(() if hanging.deadline_set else (EndPod(hanging.name, hanging.uid),))), until


def with_log(s: View, failure: api.Failure) -> api.Failure:
    """With the end of the log of the pod that we have ended for it."""
    pods = {**s.deleted_pods, **s.mine}
    pod = pods.get(failure.node_rank) if failure.node_rank is not None else None
    if failure.reason != root_cause.STALLED or failure.log_tail or not s.settings.keep_log_tail or pod is None:
        return failure
    if pod.name != failure.pod or not pod.ended:
        return failure
    return replace(failure, log_tail=root_cause.tail_of(pod))


def _hangs(pod: Pod, first: api.Failure) -> bool:
    return first.reason == root_cause.STALLED and pod.name == first.pod and pod.deletion_requested_at is None
