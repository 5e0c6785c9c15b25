"""A waiting job's message says for what, for how long, and how to find out why. A Warning follows after ten minutes."""

import datetime as dt

import pytest
from msgspec.structs import replace
from worlds import START, World, digits

from ddpjob_operator.observed.cluster import Node

MONTH = 30 * 86400.0


def lives_on(world: World, seconds: float) -> World:
    """Let time pass, and plan whenever a plan is due."""
    end = world.now + dt.timedelta(seconds=seconds)
    while world.now < end:
        again = world.settle().plan().requeue_at
        world.now = min(end, max(world.now, again or end))
    return world.settle()


def warnings(world: World) -> list[str]:
    return [event.reason for event in world.events if event.type == "Warning"]


def test_a_volume_that_never_mounts_is_shown_with_its_pod_the_wait_and_the_command_to_inspect_it() -> None:
    """A volume that never mounts, as without its Secret, must be shown, and not only `waiting for node 0-1`."""
    world = digits().started().waits(0, "ContainerCreating").waits(1, "ContainerCreating").settle()
    assert world.status.message == "0 of 2 nodes are running; waiting for nodes 0-1"
    lives_on(world, 83)
    assert world.status.reason == "StartingTrainers"
    assert "digits-1-0 on node-0 has been in ContainerCreating for more than 1m" in world.status.message
    assert "`kubectl describe pod --namespace default digits-1-0` shows why" in world.status.message
    lives_on(world, 600)
    assert (world.status.state, world.status.reason) == ("Pending", "CannotStart")
    lives_on(world, MONTH)
    assert "for more than 7d" in world.status.message
    assert warnings(world) == ["CannotStart"], "one Warning is enough"


@pytest.mark.parametrize("why", ["4 Insufficient nvidia.com/gpu", "4 node(s) didn't match pod anti-affinity rules"])
def test_one_pod_per_node_is_named_only_if_it_separates_the_pods(why: str) -> None:
    """onePodPerNode must be named only if it keeps pods apart, and not if nodes have too few GPUs."""
    world = digits(onePodPerNode=True).started().unschedulable(0, f"0/4 nodes are available: {why}").settle()
    lives_on(world, 70)
    apart = "; onePodPerNode keeps them apart" if "anti-affinity" in why else ""
    assert (
        world.status.message == f"Unschedulable: 1 of 2 pods: 0/4 nodes are available: {why}, for more than 1m{apart}"
    )


def test_a_pod_without_a_scheduler_message_for_ten_minutes_gets_a_warning_too() -> None:
    world = digits().started().runs(0)
    lives_on(world, 700)
    assert warnings(world) == ["WaitsLong"]


def test_a_rank_that_hangs_silently_after_another_completed_is_shown_after_ten_minutes() -> None:
    """A rank that hangs silently after another completed must be shown, and not only `2 of 2 nodes are running`."""
    world = digits().running().exits(0).settle()
    lives_on(world, 590)
    assert world.status.reason == "AllNodesRun"
    lives_on(world, 20)
    assert (world.status.state, world.status.reason) == ("Running", "OthersCompleted")
    assert "node 1 still runs, attempt 1, and node 0 completed by 2031-03-05T07:11:13Z" in world.status.message
    assert "`kubectl logs --namespace default digits-1-1` may show where" in world.status.message
    lives_on(world, MONTH)
    assert warnings(world) == ["OthersCompleted"]
    world.exits(1).settle()
    assert world.status.state == "Succeeded"


def test_a_pod_that_does_not_stop_delays_the_next_attempt_with_one_warning() -> None:
    world = digits().running().exits(1, code=3).settle()
    lives_on(world, MONTH)
    assert "stopping digits-1-0 on node-0" in world.status.message
    assert warnings(world) == ["RankFailed"]


def test_remaining_pods_of_a_deleted_job_get_one_warning() -> None:
    world = digits().conflicting_pod("digits-7-0", label="digits", owner="somebody-before").settle()
    lives_on(world, MONTH)
    assert (world.status.state, world.status.reason) == ("Pending", "WaitsLong")
    assert "waiting for the deletion of pod digits-7-0 of the deleted job of this name" in world.status.message
    assert warnings(world) == ["WaitsLong"]


@pytest.mark.parametrize("nodes", [1, 2, 5])
def test_a_silent_node_is_named_before_it_is_given_up(nodes: int) -> None:
    """The message must name the silent node during the 40 to 80 seconds until it is given up."""
    world = digits(nodes=nodes).running().after(5).node_lost(nodes - 1).settle()
    assert world.status.reason == "AllNodesRun"
    sentence = f"node node-{nodes - 1} (node {nodes - 1}) is not ready since 07:11:18; given up at 07:11:48"
    assert sentence in world.status.message
    world.nodes = {}
    assert "not ready" not in world.settle().status.message


def test_a_node_whose_object_was_deleted_is_named_as_gone_and_given_up_like_an_unready_one() -> None:
    world = digits().running().after(5).node_deleted(1).settle()
    assert "node node-1 (node 1) is gone since 07:11:18; given up at 07:11:48" in world.status.message
    assert world.plan().requeue_at == START + dt.timedelta(seconds=35)
    world.after(30).settle()
    assert world.status.last_failure.reason == "NodeLost"
    assert "(pod digits-1-1, node node-1) was lost with its node" in world.status.message


def test_a_node_with_two_pods_of_the_job_is_named_once() -> None:
    world = digits(nodes=3).running()
    world.pods = {name: replace(pod, node="node-0") if pod.place < 2 else pod for name, pod in world.pods.items()}
    world.node_lost(0).settle()
    sentence = "; node node-0 (nodes 0-1) is not ready since 07:11:13; given up at 07:11:43"
    assert world.status.message.endswith(sentence)
    assert world.status.message.count("not ready") == 1


def test_a_pod_past_its_grace_on_an_unready_node_is_lost_whatever_the_other_nodes_do() -> None:
    """A pod past its grace period on an unready node must count as lost, even if most nodes are powered off."""
    world = digits().running()
    world.nodes = {"node-1": Node(ready=False, since=START, with_most=True)}
    world.settle().after(3600).settle()
    assert "most other nodes are not ready either, so none is given up" in world.status.message
    world.deleted_first(1).settle().after(59).settle().stops(0)
    assert "stopping digits-1-1 on node-1" in world.settle().status.message
    world.after(2).settle()
    assert world.status.last_failure is not None
    assert world.status.attempt == 2


CPU = "0/9 nodes are available: 9 Insufficient cpu"
VOLUME = "0/9 nodes are available: 9 node(s) had volume node affinity conflict"


def test_all_reasons_why_pods_find_no_node_are_shown_with_the_most_common_first() -> None:
    """All reasons why pods find no node must be shown: after a fix of only one, the job would still be pending."""
    world = digits(nodes=4).started().unschedulable(0, VOLUME)
    world.unschedulable(1, CPU).unschedulable(3, CPU).runs(2).settle()
    assert world.status.message == f"Unschedulable: 3 of 4 pods: {CPU} (2 pods); {VOLUME} (digits-1-0)"
    world.unschedulable(0, CPU).settle()
    assert world.status.message == f"Unschedulable: 3 of 4 pods: {CPU}"


def test_different_reasons_for_a_hundred_pods_give_a_message_of_limited_length() -> None:
    """Different reasons for a hundred pods, such as a volume for each, must give a message of limited length."""
    world = digits(nodes=100).started()
    for place in range(100):
        world.unschedulable(place, f'persistentvolumeclaim "data-{place}" not found' + 500 * "." * (place == 1))
    world.settle()
    message = world.status.message
    first = 'Unschedulable: 100 of 100 pods: persistentvolumeclaim "data-0" not found (digits-1-0); '
    assert message.startswith(first + 'persistentvolumeclaim "data-1" not found...')
    assert "...… (digits-1-1); " in message
    assert message.endswith('; persistentvolumeclaim "data-2" not found (digits-1-2); something else (97 pods)')
    assert len(message) < 800
