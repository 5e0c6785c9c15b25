"""Which changes of a pod or a node are worth a reconcile of its job, and how soon. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from ddpjob_operator.observed.cluster import Pod

# Pods of one job change in bursts, and each reconcile may write the status: 8 pods would make 16 writes
# (bench/operator_api.py). So good news waits for more of it, and failures and deletions do not.
ALL_CHANGED_SECONDS = 0.1
SOME_CHANGED_SECONDS = 3.0


def pod_changed(old: Pod | None, new: Pod | None, pods: Iterable[Pod], nodes: int) -> float | None:
    """Seconds until a reconcile is worth it; None: the change alone is not. pods: those that the job has now."""
    if new is None or (new.ended and new.trainer.exit_code != 0) or new.deletion_requested_at is not None:
        return 0.0
    same = old is not None and old.trainer == new.trainer  # asked first, because to make a pod takes longer
    if old is not None and same and dataclasses.replace(old, node=new.node, scheduled_at=new.scheduled_at) == new:
        return None  # it has only been scheduled, and no rule asks for that
    return ALL_CHANGED_SECONDS if _all_changed(new, pods, nodes) else SOME_CHANGED_SECONDS


def uses_node(name: str, pods: Iterable[Pod]) -> bool:
    """Whether a change of this node is worth a reconcile of the job that has these pods."""
    return any(pod.node == name and pod.live for pod in pods)


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
