"""Which changes of a pod or a node are worth a reconcile of its job, how soon, and behind whom it waits. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

from msgspec.structs import replace

from ddpjob_operator.observed.cluster import Pod
from ddpjob_operator.observed.groups import ObservedGroup

# Pods of one job change in bursts, and each reconcile may write the status: 8 pods would make 16 writes
# (bench/operator_api.py). So good news waits for more of it, and failures and deletions do not. After the last trainer
# that runs there is no more of it; after the last that ended the phases of the pods follow.
ALL_RUN_SECONDS = 0.02
ALL_ENDED_SECONDS = 0.1
SOME_CHANGED_SECONDS = 3.0


def pod_changed(old: Pod | None, new: Pod | None, pods: Iterable[Pod], nodes: int) -> float | None:
    """Seconds until a reconcile is worth it; None: the change alone is not. pods: those that the job has now."""
    if new is None or (new.ended and new.trainer.exit_code != 0) or new.deletion_requested_at is not None:
        return 0.0
    same = old is not None and old.trainer == new.trainer  # asked first, because to make a pod takes longer
    if old is not None and same and replace(old, node=new.node, scheduled_at=new.scheduled_at) == new:
        return None  # it has only been scheduled, and no rule asks for that
    if not _all_changed(new, pods, nodes):
        return SOME_CHANGED_SECONDS
    return ALL_RUN_SECONDS if new.trainer.state == "running" else ALL_ENDED_SECONDS


def is_good_news(new: Pod, in_seconds: float) -> bool:
    """Whether a reconcile in so many seconds only writes that pods are there, or run: nobody waits for that. For the
    end of a job a queue waits, and for a pod that finds no node its user."""
    return in_seconds > 0 and not new.ended and not new.unschedulable


def group_changed(admits_first: bool, new: ObservedGroup | None) -> float:
    """Seconds until a reconcile is worth it for what a gang scheduler or a queue says; None: the group is gone.
    admits_first: whether pods are made only once it admits. A scheduler says of a group what its pods show as well,
    step by step while they are bound."""
    return 0.0 if admits_first or new is None or new.deletion_requested else SOME_CHANGED_SECONDS


def uses_node(names: Set[str], pods: Iterable[Pod]) -> bool:
    """Whether a change of these nodes is worth a reconcile of the job that has these pods."""
    return any(pod.node in names and pod.live for pod in pods)


def kind(job: Mapping[str, Any] | None) -> int:
    """Behind which other jobs one waits for its reconcile: 0: those that have begun; else new ones of its size, so that
    neither a restart nor a job of one pod waits behind hundreds of larger ones that were applied at once."""
    if job is None or (job.get("status") or {}).get("attempt"):
        return 0
    nodes = (job.get("spec") or {}).get("nodes", 1)
    return max(1, nodes.bit_length()) if isinstance(nodes, int) else 1


def _all_changed(new: Pod, pods: Iterable[Pod], nodes: int) -> bool:
    """Whether the trainers of all nodes have come to the same state, and are done with waiting.

    Asked at each change of each pod, of which a job may have thousands: it ends at the first that waits.
    """
    newest: dict[int, Pod] = {}
    if new.trainer.state == "waiting":
        return False
    for pod in pods:
        if pod.attempt != new.attempt:
            continue
        if pod.trainer.state == "waiting":  # none that waits has been replaced: a replacement is made after the end
            return False
        known = newest.get(pod.place)
        if known is None or known.replacement <= pod.replacement:
            newest[pod.place] = pod
    return len(newest) >= nodes and all(pod.trainer.state == new.trainer.state for pod in newest.values())
