"""The status must name a failed init container, because the trainer never ran."""

from typing import Any

from msgspec.structs import replace
from worlds import World, digits

from ddpjob_operator.kube.watch import observe
from ddpjob_operator.observed.cluster import Container


def init_fails(
    world: World, rank: int, code: int = 5, message: str = "connecting\ncannot fetch data", reason: str = "Error"
) -> World:
    """Let the init container `fetch` of a node fail, and with it the pod."""
    pod = world._pod(rank)
    ended = Container("ended", reason, message, exit_code=code, ended_at=world.now, init="fetch")
    world.pods[pod.name] = replace(pod, node=f"node-{rank}", phase="Failed", trainer=ended)
    return world


def test_the_failure_names_the_init_container_its_output_and_its_log() -> None:
    """The message must name the init container and its log: `rank 0 ended with exit code 5` points to the wrong log."""
    world = init_fails(digits(backoffLimit=0).started(), 0).restarted()
    failure = world.status.last_failure
    assert (failure.init_container, failure.exit_code, failure.exception) == ("fetch", 5, "cannot fetch data")
    assert failure.log_tail == "connecting\ncannot fetch data"
    assert world.status.message.startswith(
        'init container "fetch" of pod digits-1-0 ended with exit code 5 (cannot fetch data), '
        "see kubectl logs digits-1-0 -c fetch"
    )
    assert "rank" not in world.status.message


def test_the_memory_limit_of_the_trainer_is_not_named_for_an_init_container() -> None:
    """Users must not be told to raise the trainer's memory limit, because an init container has its own."""
    world = digits(backoffLimit=0, container={"resources": {"limits": {"memory": "8Gi"}}}).started()
    world = init_fails(world, 0, 137, "fetching", "OOMKilled").restarted()
    assert world.status.message.startswith(
        'init container "fetch" of pod digits-1-0 was killed because it used more memory than its limit (OOMKilled)'
    )


def test_a_node_whose_init_container_failed_has_not_started() -> None:
    world = init_fails(digits().started(), 0).settle()
    assert world.status.started_nodes == ""


def test_the_message_of_the_restart_names_the_init_container() -> None:
    world = init_fails(digits().started(), 1).restarted()
    assert world.status.attempt == 2
    assert world.status.message.startswith('after exit code 5 of init container "fetch" of digits-1-1: ')


def seen(*inits: dict[str, Any], reason: str = "") -> Container:
    """Return the trainer as the operator observes it in a pod whose init containers failed."""
    statuses = [
        {"name": f"i{n}", "state": {"terminated": {"exitCode": one["code"], "reason": "Error", "message": "why"}}}
        for n, one in enumerate(inits)
    ]
    listed = [{"name": f"i{n}", **one.get("spec", {})} for n, one in enumerate(inits)]
    spec = {"initContainers": listed, "containers": [{"name": "trainer"}]}
    status = {"phase": "Failed", "initContainerStatuses": statuses} | ({"reason": reason} if reason else {})
    return observe.pod({"metadata": {"name": "d-1-0", "uid": "u"}, "spec": spec, "status": status}).trainer


def test_a_sidecar_that_was_stopped_with_its_pod_is_not_the_failure() -> None:
    always = {"restartPolicy": "Always"}
    assert seen({"code": 143, "spec": always}, {"code": 3}).init == "i1"
    assert seen({"code": 143, "spec": always}).init == ""


def test_a_pod_that_was_evicted_during_its_init_container_counts_as_evicted() -> None:
    assert (seen({"code": 137}, reason="Evicted").init, seen({"code": 137}, reason="Evicted").reason) == ("", "Evicted")
