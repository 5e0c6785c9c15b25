"""Which changes of a pod or a node cause a reconcile, and how soon."""

import dataclasses

import msgspec
import pytest
from worlds import START, manifest

from ddpjob_operator.kube.watch.triggers import (
    ALL_ENDED_SECONDS,
    ALL_RUN_SECONDS,
    SOME_CHANGED_SECONDS,
    group_changed,
    is_good_news,
    kind,
    pod_changed,
    uses_node,
)
from ddpjob_operator.observed.cluster import Container, Pod
from ddpjob_operator.observed.groups import Admission, ObservedGroup

RUNNING, WAITING = Container("running"), Container("waiting")
FAILED, COMPLETED = Container("ended", exit_code=1), Container("ended", exit_code=0)


def pod(rank: int = 0, trainer: Container = RUNNING, *, attempt: int = 1, replacement: int = 0, node: str = "") -> Pod:
    name = f"digits-{attempt}-{rank}"
    phase = "Running" if trainer.state != "ended" else "Failed" if trainer.exit_code else "Succeeded"
    return Pod(
        name=name,
        uid=f"{name}-{replacement}",
        owner_uid="u",
        attempt=attempt,
        place=rank,
        replacement=replacement,
        node=node,
        phase=phase,
        trainer=trainer,
    )


STOPPING = msgspec.structs.replace(pod(), deletion_requested_at=START)
CASES = {
    # name: (old pod, new pod, the other pods, seconds until the reconcile; None: no reconcile)
    "a pod that is gone": (pod(), None, [], 0.0),
    "a trainer that failed": (pod(), pod(trainer=FAILED), [pod(1)], 0.0),
    "a pod that is to stop": (pod(), STOPPING, [pod(1)], 0.0),
    "the first of two trainers that runs": (pod(trainer=WAITING), pod(), [pod(1, WAITING)], SOME_CHANGED_SECONDS),
    "the last of two trainers that runs": (pod(trainer=WAITING), pod(), [pod(1)], ALL_RUN_SECONDS),
    "the last trainer that completes": (pod(), pod(trainer=COMPLETED), [pod(1, COMPLETED)], ALL_ENDED_SECONDS),
    "a new pod": (None, pod(trainer=WAITING), [pod(1, WAITING)], SOME_CHANGED_SECONDS),
    "the only pod that is there yet": (pod(trainer=WAITING), pod(), [], SOME_CHANGED_SECONDS),
    "a pod of an older attempt waits": (
        pod(trainer=WAITING),
        pod(),
        [pod(1), pod(1, WAITING, attempt=0)],
        ALL_RUN_SECONDS,
    ),
    "a replaced pod has failed": (
        pod(trainer=WAITING),
        pod(),
        [pod(1, FAILED), pod(1, replacement=1)],
        ALL_RUN_SECONDS,
    ),
    "a pod that was scheduled": (pod(trainer=WAITING), pod(trainer=WAITING, node="a"), [pod(1, WAITING)], None),
    "nothing": (pod(), pod(), [pod(1)], None),
}


@pytest.mark.parametrize(("old", "new", "others", "seconds"), CASES.values(), ids=CASES)
def test_failures_and_deletions_are_reconciled_at_once_and_good_news_is_collected(old, new, others, seconds):
    """Good news must be collected, because a reconcile may write the status. Failures must be reconciled at once."""
    pods = others if new is None else [new, *others]
    assert pod_changed(old, new, pods, nodes=2) == seconds


def test_only_good_news_waits_until_the_pods_of_other_jobs_are_created() -> None:
    """A failure or the end of a job must not wait for a burst of starts, because it frees nodes for other jobs."""
    assert is_good_news(pod(), ALL_RUN_SECONDS)
    assert is_good_news(pod(trainer=WAITING), SOME_CHANGED_SECONDS)
    assert not is_good_news(STOPPING, 0.0)
    assert not is_good_news(pod(trainer=COMPLETED), ALL_ENDED_SECONDS)
    no_node = msgspec.structs.replace(pod(trainer=WAITING), unschedulable="0/3 nodes are available")
    assert not is_good_news(no_node, SOME_CHANGED_SECONDS)


def test_a_change_of_a_node_affects_the_jobs_with_a_live_pod_on_it() -> None:
    assert uses_node({"a"}, [pod(node="b"), pod(1, node="a")])
    assert not uses_node({"a"}, [pod(node="b")])
    assert not uses_node({"a"}, [pod(trainer=FAILED, node="a")])


def test_an_admission_is_reconciled_at_once_and_messages_of_a_scheduler_are_collected() -> None:
    """An admission or a deleted group must be reconciled at once. A scheduler's messages are collected."""
    group = ObservedGroup("native", "digits-1", "u", "o", attempt=1, admission=Admission("waiting", "no room"))
    assert group_changed(True, group) == 0.0
    assert group_changed(False, group) == SOME_CHANGED_SECONDS
    assert group_changed(False, dataclasses.replace(group, deletion_requested=True)) == 0.0
    assert group_changed(False, None) == 0.0


def test_new_jobs_wait_behind_others_of_their_size_and_started_jobs_do_not() -> None:
    of = [kind(manifest(nodes=nodes)) for nodes in (1, 2, 3, 8, 15, 2000)]
    assert of == sorted(of)
    assert len(set(of)) == 4, "1, 2 to 3, 8 to 15, 1,024 to 2,047"
    begun = kind(manifest(nodes=8) | {"status": {"attempt": 1}})
    assert begun not in of
    assert begun == kind(None), "so does what is gone"


@pytest.mark.parametrize("spec", [None, {}, {"nodes": "8"}, {"nodes": -1}, {"nodes": None}], ids=str)
def test_a_job_of_unknown_size_waits_with_the_smallest(spec: object) -> None:
    assert kind({"metadata": {}, "spec": spec}) == kind(manifest(nodes=1))
