"""What the operator reads of pods and Services, in the forms that API servers and kubelets produce."""

import datetime as dt
from typing import Any

import pytest
from worlds import job

from ddpjob_operator.job import api
from ddpjob_operator.kube.watch import observe
from ddpjob_operator.observed.cluster import Container
from ddpjob_operator.pods import build

AT = "2031-03-05T07:11:13Z"
TIME = dt.datetime(2031, 3, 5, 7, 11, 13, tzinfo=dt.timezone.utc)
OWNER = {"apiVersion": api.API_VERSION, "kind": "DDPJob", "name": "digits", "uid": "job-1", "controller": True}


def pod(
    status: dict[str, Any] | None = None, containers: tuple[str, ...] = ("trainer",), **metadata: Any
) -> dict[str, Any]:
    labels = {
        "training.ddpjob.io/job": "digits",
        "training.ddpjob.io/attempt": "2",
        "training.ddpjob.io/rank": "3",
    }
    return {
        "metadata": {
            "name": "digits-2-3",
            "namespace": "team",
            "uid": "u",
            "labels": labels,
            "ownerReferences": [OWNER],
        }
        | metadata,
        "spec": {"nodeName": "gpu-7", "containers": [{"name": name} for name in containers]},
        "status": status or {},
    }


def state(name: str = "trainer", **state: Any) -> dict[str, Any]:
    return {"name": name, "ready": "running" in state, "state": state}


ENDED = {"exitCode": 1, "reason": "Error", "message": "the log's end", "finishedAt": AT}
TRAINERS: dict[str, tuple[dict[str, Any], Container]] = {
    "a pod that nobody has looked at": ({}, Container("waiting")),
    "an image that is not there": (
        {"phase": "Pending", "containerStatuses": [state(waiting={"reason": "ImagePullBackOff", "message": "no"})]},
        Container("waiting", "ImagePullBackOff", "no"),
    ),
    "a trainer that runs": (
        {"phase": "Running", "containerStatuses": [state(running={"startedAt": AT})]},
        Container("running", ready=True),
    ),
    "a trainer that failed": (
        {"phase": "Failed", "containerStatuses": [state(terminated=ENDED)]},
        Container("ended", "Error", "the log's end", exit_code=1, ended_at=TIME),
    ),
    "a trainer that is done while its sidecar runs": (
        {
            "phase": "Running",
            "containerStatuses": [state("sidecar", running={}), state(terminated=ENDED | {"exitCode": 0})],
        },
        Container("ended", "Error", "the log's end", exit_code=0, ended_at=TIME),
    ),
    "an evicted pod without a word of its containers": (
        {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."},
        Container("ended", "Evicted", "The node was low on resource: memory."),
    ),
    "a pod that succeeded without a word of its containers": (
        {"phase": "Succeeded"},
        Container("ended", "Completed", exit_code=0),
    ),
    "an init container that cannot start": (
        {
            "phase": "Pending",
            "initContainerStatuses": [state("copy", waiting={"reason": "ErrImagePull", "message": "denied"})],
            "containerStatuses": [state(waiting={"reason": "PodInitializing"})],
        },
        Container("waiting", "ErrImagePull", "init container copy: denied"),
    ),
    "an init container that runs": (
        {
            "phase": "Pending",
            "initContainerStatuses": [state("copy", running={})],
            "containerStatuses": [state(waiting={"reason": "PodInitializing"})],
        },
        Container("waiting", "PodInitializing"),
    ),
    "an init container that failed": (
        {
            "phase": "Failed",
            "initContainerStatuses": [state("copy", terminated=ENDED)],
            "containerStatuses": [state(waiting={"reason": "PodInitializing"})],
        },
        Container("ended", "Error", "the log's end", exit_code=1, ended_at=TIME, init="copy"),
    ),
}


@pytest.mark.parametrize(("status", "want"), TRAINERS.values(), ids=TRAINERS)
def test_the_state_of_the_trainer_is_that_of_its_container_or_of_what_blocks_it(status, want):
    assert observe.pod(pod(status, ("trainer", "sidecar"))).trainer == want


def test_a_sidecar_that_a_webhook_inserts_first_is_not_taken_for_the_trainer() -> None:
    """A sidecar that a webhook inserts first must not be taken for the trainer: its exit code 0 would hide failed
    ranks."""
    made = build.pod(job(container={"name": "pytorch"}), attempt=1, place=0)
    made["metadata"]["uid"] = "u"
    made["spec"]["containers"].insert(0, {"name": "gke-gcsfuse-sidecar"})
    done = {"exitCode": 0, "reason": "Completed", "finishedAt": AT}
    ended = [state("gke-gcsfuse-sidecar", terminated=done), state("pytorch", terminated=ENDED)]
    failed = observe.pod({**made, "status": {"phase": "Failed", "containerStatuses": ended}})
    assert (failed.trainer.exit_code, failed.has_failed, failed.has_completed) == (1, True, False)
    runs = [state("gke-gcsfuse-sidecar", running={"startedAt": AT}), state("pytorch", terminated=done)]
    beside = observe.pod({**made, "status": {"phase": "Running", "containerStatuses": runs}})
    assert (beside.trainer.exit_code, beside.sidecars_run) == (0, True)


def test_the_trainer_is_the_first_container_if_none_has_the_name() -> None:
    status = {"containerStatuses": [state("b", running={}), state("a", waiting={"reason": "x"})]}
    assert observe.pod(pod(status, ("a", "b"))).trainer == Container("waiting", "x")


def test_the_job_and_the_node_of_a_pod_are_read() -> None:
    seen = observe.pod(pod({"phase": "Running"}))
    assert (seen.name, seen.uid, seen.owner_uid, seen.job) == ("digits-2-3", "u", "job-1", "digits")
    assert (seen.attempt, seen.place, seen.node, seen.phase) == (2, 3, "gpu-7", "Running")


@pytest.mark.parametrize("references", [None, [], [{**OWNER, "controller": False}]])
def test_a_pod_without_a_controller_belongs_to_no_job(references: Any) -> None:
    assert observe.pod(pod(ownerReferences=references)).owner_uid == ""


@pytest.mark.parametrize("labels", [None, {}, {"training.ddpjob.io/rank": "-1", "training.ddpjob.io/attempt": "x"}])
def test_labels_of_others_give_no_rank_and_no_attempt(labels: Any) -> None:
    seen = observe.pod(pod(labels=labels))
    assert (seen.attempt, seen.place) == (-1, -1)


def test_a_deletion_was_requested_one_grace_period_before_its_timestamp() -> None:
    assert observe.pod(pod()).deletion_requested_at is None
    asked = observe.pod(pod(deletionTimestamp=AT, deletionGracePeriodSeconds=30)).deletion_requested_at
    assert asked == TIME - dt.timedelta(seconds=30)
    assert observe.pod(pod(deletionTimestamp=AT)).deletion_requested_at == TIME


@pytest.mark.parametrize(
    ("status", "reason", "shown", "since"),
    [
        ("False", "Unschedulable", "0/3 nodes are available", TIME),
        ("False", "SchedulingGated", "0/3 nodes are available", None),
        ("True", "", "", None),
    ],
)
def test_the_message_of_the_scheduler_is_kept_while_it_searches_for_a_node(status, reason, shown, since):
    """The scheduler's message must count from the search for a node: a queue may hold the pod for hours before it."""
    condition = {"type": "PodScheduled", "status": status, "reason": reason, "lastTransitionTime": AT}
    seen = observe.pod(pod({"conditions": [condition | {"message": "0/3 nodes are available"}]}))
    assert (seen.unschedulable, seen.unschedulable_since) == (shown, since)


def test_a_service_of_a_deleted_job_differs_from_a_conflicting_one() -> None:
    job = api.Metadata(name="digits", uid="job-2")
    assert observe.conflicts("Service", pod(), job).of_deleted_job
    assert not observe.conflicts("Service", pod(ownerReferences=[]), job).of_deleted_job
    assert not observe.conflicts("Service", pod(ownerReferences=[{**OWNER, "name": "other"}]), job).of_deleted_job


def test_a_running_sidecar_differs_from_a_lagging_phase() -> None:
    def seen(*states: dict) -> bool:
        statuses = [{"name": name, "state": state} for name, state in zip(("trainer", "logger"), states, strict=False)]
        spec = {"containers": [{"name": "trainer"}, {"name": "logger"}][: len(states)]}
        metadata = {"name": "digits-1-0", "uid": "u"}
        return observe.pod({"metadata": metadata, "spec": spec, "status": {"containerStatuses": statuses}}).sidecars_run

    ended = {"terminated": {"exitCode": 1}}
    assert not seen(ended)
    assert not seen(ended, ended)
    assert seen(ended, {"running": {}})
