"""Decides which changes of pods, groups and nodes need a reconcile of the job, and how soon. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

from msgspec.structs import replace

from ddpjob_operator.observed.cluster import Pod
from ddpjob_operator.observed.groups import ObservedGroup

# Without a wait, a job's pods, which change in bursts, would cause 16 status writes for 8 pods (bench/operator_api.py).
# So the reconcile for a pod that starts or succeeds waits for other pods; failures and deletions do not wait.
# The wait is longer once the last trainer has ended, because the pods' phases change after that.
ALL_RUN_SECONDS = 0.02
ALL_ENDED_SECONDS = 0.1
SOME_CHANGED_SECONDS = 3.0


def pod_changed(old: Pod | None, new: Pod | None, pods: Iterable[Pod], nodes: int) -> float | None:
    """Return the seconds until a reconcile; None if the change needs none. pods: the job's pods."""
    if new is None or (new.ended and new.trainer.exit_code != 0) or new.deletion_requested_at is not None:
        return 0.0
    if (
        old is not None
        and old.trainer == new.trainer  # a cheap test, before `replace` copies a pod
        and replace(old, node=new.node, scheduled_at=new.scheduled_at, accepted_at=new.accepted_at) == new
    ):
        return None  # the pod was only scheduled, and no rule depends on that
    if not _all_changed(new, pods, nodes):
        return SOME_CHANGED_SECONDS
    return ALL_RUN_SECONDS if new.trainer.state == "running" else ALL_ENDED_SECONDS


def is_good_news(new: Pod, in_seconds: float) -> bool:
    """True if the reconcile would only write that pods exist or are running, which is not urgent. The end of a job is
    urgent for its queue, and a pod that cannot be scheduled is urgent for the user.
    """
    return in_seconds > 0 and not new.ended and not new.unschedulable


def group_changed(admits_first: bool, new: ObservedGroup | None) -> float:
    """Return the seconds until a reconcile after a change of a group. new: None if the group is gone.

    admits_first: pods are created only after the admission. A gang scheduler's group only repeats what its pods show,
    in many small steps, so it can wait.
    """
    return 0.0 if admits_first or new is None or new.deletion_requested else SOME_CHANGED_SECONDS


def uses_node(names: Set[str], pods: Iterable[Pod]) -> bool:
    """True if a live pod of the job is on one of these nodes."""
    return any(pod.node in names and pod.live for pod in pods)


def kind(job: Mapping[str, Any] | None) -> int:
    """Return the kind of a job for the queue: 0 if the job has begun, else a number that grows with the job's size.

    Kinds take turns, so neither a restart nor a job of one pod waits behind hundreds of larger jobs applied at once.
    """
    if job is None or (job.get("status") or {}).get("attempt"):
        return 0
    nodes = (job.get("spec") or {}).get("nodes", 1)
    return max(1, nodes.bit_length()) if isinstance(nodes, int) else 1


def _all_changed(new: Pod, pods: Iterable[Pod], nodes: int) -> bool:
    """True if the trainers of all nodes have the same state, and none is waiting.

    It returns at the first pod that is waiting: it is called for each change of each pod, and a job may have thousands.
    """
    newest: dict[int, Pod] = {}
    if new.trainer.state == "waiting":
        return False
    for pod in pods:
        if pod.attempt != new.attempt:
            continue
        if pod.trainer.state == "waiting":  # this pod is the newest with its rank, because only ended pods are replaced
            return False
        known = newest.get(pod.place)
        if known is None or known.replacement <= pod.replacement:
            newest[pod.place] = pod
    return len(newest) >= nodes and all(pod.trainer.state == new.trainer.state for pod in newest.values())
