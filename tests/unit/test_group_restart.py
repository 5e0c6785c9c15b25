"""A failure leads to one clean restart of the group, counted by its cause, or to a failed job with a reason."""

import dataclasses
import datetime as dt
import json

import pytest
from msgspec.structs import replace
from worlds import START, World, digits, job

from ddpjob_operator.job import api
from ddpjob_operator.observed import facts
from ddpjob_operator.observed.cluster import Node
from ddpjob_operator.plan.actions import CreatePod, DeletePod, Plan
from ddpjob_operator.plan.view import HELD_SECONDS

PEER_GONE = "RuntimeError: [..] Connection closed by peer [127.0.0.1]:4242"
NOBODY_CAME = "torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients. 1/2 clients joined."


def deleted(plan: Plan) -> list[tuple[str, int | None]]:
    return [(a.name, a.grace_seconds) for a in plan.actions if isinstance(a, DeletePod)]


def cause(world: World) -> api.JobFailure:
    assert world.status.last_failure is not None
    return world.status.last_failure


def charges(world: World) -> tuple[int, int, int]:
    """Return the restarts for application, infrastructure and stall."""
    r = world.status.restarts
    assert r.total == r.application + r.infrastructure + r.stall
    return r.application, r.infrastructure, r.stall


def fail_once_more(world: World, code: int = 1) -> World:
    """Let all run, rank 1 fail and its peer stop, until the next attempt begins."""
    world.runs(0, 1).settle().exits(1, code=code, message="ValueError: x").restarted()
    return world.after(400).settle()


# ---------------------------------------------------------------- one clean restart


def test_a_failed_rank_is_recorded_before_anything_is_deleted() -> None:
    world = digits().running().exits(1, code=3, message="ValueError: no such shard")
    first = world.step()
    assert first.actions == ()
    assert world.status.state == "Restarting"
    assert (cause(world).rank, cause(world).exit_code) == (1, 3)
    assert deleted(world.step()) == [("digits-1-0", 10)], (
        "a broken group gets the short grace; what ended keeps its log"
    )


def test_the_cause_is_unknown_and_nothing_is_charged_until_the_last_pod_has_ended() -> None:
    world = digits().running().exits(1, code=3).settle()
    assert world.status.state == "Restarting"
    assert (
        "stopping digits-1-0 on node-0; waiting for the other ranks before deciding the cause" in world.status.message
    )
    assert charges(world) == (0, 0, 0)
    assert (world.status.attempt, world.names()) == (1, ["digits-1-0", "digits-1-1"])
    world.stops(0).settle()
    assert charges(world) == (1, 0, 0)
    assert world.status.attempt == 2


@pytest.mark.parametrize(
    ("breaks", "known"),
    [
        (lambda w: w.exits(1, code=1, message="ValueError: no such shard"), True),
        (lambda w: w.exits(1, code=137, reason="OOMKilled"), True),
        (lambda w: w.exits(1, code=139), True),
        (lambda w: w.evicted(1, "PreemptionByScheduler"), True),
        (lambda w: w.node_lost(1).after(31), True),
        (lambda w: w.exits(1, code=1), False),
        (lambda w: w.exits(1, code=1, message=PEER_GONE), False),
        (lambda w: w.vanishes(1), False),
    ],
    ids=["exception", "memory", "signal", "preemption", "node", "bare-code", "peer-complains", "pod-gone"],
)
@pytest.mark.parametrize("command", ["torchrun", "ddprun"])
def test_a_message_that_names_the_cause_does_not_call_it_unknown(breaks, known: bool, command: str) -> None:
    """A message that names the cause must not end with `waiting for … the cause`, as if the cause were unknown."""
    world = breaks(digits(container={"command": [command, "train.py"]}).running())
    world.step()
    assert world.status.state == "Restarting"
    assert ("waiting for the other ranks before deciding the cause" not in world.status.message) == known, (
        world.status.message
    )


def test_the_status_shows_who_failed_why_and_what_happens_next() -> None:
    world = digits().running().exits(1, code=3, message="ValueError: no such shard").settle().stops(0)
    world.step()
    message = world.status.message
    assert "rank 1 (pod digits-1-1, node node-1) ended with exit code 3 (ValueError: no such shard)" in message
    assert message.endswith("restarting all 2 nodes: attempt 2, restart 1 of 3")


def test_a_restarting_job_shows_the_failure_that_it_restarts_after() -> None:
    world = digits().running().exits(1, code=137, reason="OOMKilled").restarted().runs(0).settle()
    assert world.status.state == "Restarting"
    assert world.status.message.startswith("after OOMKilled on rank 1: 1 of 2 nodes are running")
    world.unschedulable(1, "0/3 nodes are available").settle()
    assert (world.status.state, world.status.reason) == ("Restarting", "Unschedulable")


def test_a_complete_restart_has_three_events() -> None:
    world = digits().running()
    world.events.clear()
    world.exits(1, code=1).restarted().runs(0).settle().runs(1).settle()
    assert [e.reason for e in world.events] == ["RankFailed", "Restarting", "AllNodesRun"]


def test_a_pod_whose_only_container_has_ended_is_kept_while_its_phase_lags_behind() -> None:
    """A pod whose only container has ended must stay for `kubectl logs`, although its phase is late."""
    world = digits().running().exits(1, code=3)
    world.pods["digits-1-1"] = replace(world.pods["digits-1-1"], phase="Running")
    world.settle()
    assert world.pods["digits-1-1"].deletion_requested_at is None
    assert world.pods["digits-1-0"].deletion_requested_at is not None


def test_pods_that_ended_by_themselves_are_kept_for_three_attempts_for_their_logs() -> None:
    world = digits(backoffLimit=9).started()
    for _ in range(4):
        fail_once_more(world)
    assert world.names() == ["digits-3-1", "digits-4-1", "digits-5-0", "digits-5-1"]


def test_a_rank_that_completed_trains_again_with_its_group() -> None:
    world = digits().running().exits(0).settle().exits(1, code=1).settle()
    assert [n for n in world.names() if n.startswith("digits-2")] == ["digits-2-0", "digits-2-1"]
    assert world.status.completed_nodes == ""


@pytest.mark.parametrize(("given", "grace"), [(0, 1), (3, 3), (60, 60)])
def test_restart_grace_seconds_may_be_as_low_as_one(given: int, grace: int) -> None:
    """The grace period must be at least 1 s: with 0 the API server removes a pod before its process has ended."""
    world = digits(restartGraceSeconds=given).running().exits(1, code=1)
    world.step()
    assert deleted(world.step()) == [("digits-1-0", grace)]


def test_a_pod_that_started_and_disappeared_between_two_reconciles_is_not_recreated_under_its_name() -> None:
    """The pod must not be created again under its name: its process may be running unobserved as the same rank."""
    world = digits().started().runs(0, 1)
    world.deleted_pods.append(world.pods.pop("digits-1-1"))
    world.restarted()
    assert world.names() == ["digits-2-0", "digits-2-1"]


@pytest.mark.parametrize("seen", ["its deletion", "nothing"])
def test_a_pod_that_disappeared_without_a_node_is_recreated_under_its_name_only_if_its_deletion_was_seen(seen) -> None:
    """A pod that disappeared while the operator saw nothing may have run: a second pod of its name would begin with
    generation 0 again, and a checkpoint folder with a later generation would refuse its ranks."""
    world = digits().started()
    world = world.deleted_first(1) if seen == "its deletion" else world
    world.deleted_pods.append(world.pods.pop("digits-1-1"))
    world.restarted()
    assert world.names() == (["digits-1-0", "digits-1-1"] if seen == "its deletion" else ["digits-2-0", "digits-2-1"])


def test_a_rank_that_completed_between_two_reconciles_counts_as_completed() -> None:
    world = digits().started().runs(0, 1).exits(1)
    world.deleted_pods.append(world.pods.pop("digits-1-1"))
    assert world.settle().exits(0).settle().status.state == "Succeeded"


@pytest.mark.parametrize("resumed", ["when its pods have stopped", "before"])
def test_a_failure_that_came_before_a_suspension_is_charged(resumed: str) -> None:
    """A failure before a suspension must be charged: suspend and resume must not give a script more restarts."""
    world = digits(backoffLimit=3).running().exits(1, code=1).settle().change(suspend=True).settle()
    if resumed == "before":
        world.change(suspend=False).settle().stops_all().settle()
        assert (world.status.state, world.status.attempt) == ("Restarting", 2)
    else:
        world.stops_all().settle().change(suspend=False).settle()
    assert (charges(world), cause(world).failure_class) == ((1, 0, 0), "application")


def test_a_job_without_restarts_left_fails_if_it_is_suspended_after_a_failure() -> None:
    world = digits(backoffLimit=0).running().exits(1, code=1).settle().change(suspend=True).settle()
    world.stops_all().settle()
    assert (world.status.state, world.status.reason) == ("Failed", "BackoffLimitExceeded")


def test_the_deadline_also_ends_a_restarting_job() -> None:
    world = digits(activeDeadlineSeconds=60).running().exits(1, code=1).settle().after(60).settle().stops_all().settle()
    assert (world.status.state, world.status.reason) == ("Failed", "DeadlineExceeded")


def test_no_deadline_ends_a_job_that_will_be_suspended_after_its_failure_is_settled() -> None:
    """No deadline may end a job that will be suspended, while its pods take a minute to stop after a failure."""
    world = digits(activeDeadlineSeconds=60).running().exits(1, code=1).settle().change(suspend=True).settle()
    world.after(60).settle().stops_all().settle()
    assert (world.status.state, world.status.restarts and world.status.restarts.application) == ("Suspended", 1)


# ---------------------------------------------------------------- budgets


def test_a_script_that_always_fails_ends_the_job_after_its_budget_with_the_true_cause() -> None:
    world = digits(backoffLimit=2).started()
    for _ in range(2):
        fail_once_more(world)
    assert charges(world) == (2, 0, 0)
    fail_once_more(world)
    assert (world.status.state, world.status.reason) == ("Failed", "BackoffLimitExceeded")
    assert "rank 1 (pod digits-3-1, node node-1) ended with exit code 1 (ValueError: x)" in world.status.message
    assert "gave up after 2 restarts (backoffLimit: 2)" in world.status.message
    assert charges(world) == (2, 0, 0)
    assert world.is_true("Failed")
    assert [f.attempt for f in world.status.failures] == [1, 2, 3]
    assert not any(p.live for p in world.pods.values())


def test_nothing_is_created_during_a_back_off_and_the_message_shows_the_wait() -> None:
    world = digits(backoffLimit=9).started()
    for _ in range(3):
        world.runs(0, 1).settle().exits(1, code=1).restarted()
        message, attempt = world.status.message, world.status.attempt
        pods = [n for n in world.names() if n.startswith(f"digits-{attempt}-")]
        world.after(2).settle()
    assert "restarting all 2 nodes in 2s: attempt 4, restart 3 of 9" in message
    assert pods == []


def test_a_new_step_makes_the_next_restart_immediate_again() -> None:
    world = digits(backoffLimit=9).started()
    for step in (10, 20, 30):
        world.runs(0, 1).settle().reports_step(step).settle().exits(1, code=1).restarted()
        assert world.status.attempt_time == world.now


def test_a_job_without_a_new_step_is_stopped_whatever_its_budget() -> None:
    world = digits(backoffLimit=99).started()
    world.runs(0, 1).settle().reports_step(100)
    world = fail_once_more(world)
    for _ in range(3):
        assert world.status.state == "Restarting"
        world.runs(0, 1).settle().reports_step(90)
        world = fail_once_more(world)
    assert (world.status.state, world.status.reason) == ("Failed", "NoProgress")
    assert "without a new step" in world.status.message


def test_steps_that_only_a_failure_names_are_new_steps_once() -> None:
    """Reports may be refused for hours. A job that trains meanwhile must not end with NoProgress."""
    world = digits(backoffLimit=99).started()
    world.runs(0, 1).settle().reports_step(240)
    for step in (1294, 2000, 2600, 3100, 3600, 3600, 3600):
        assert world.status.state != "Failed", world.status.message
        error = json.dumps({"ddpjob": 1, "exception": "ValueError: x", "step": step})
        world.runs(0, 1).settle().exits(1, code=1, message=error).restarted().after(400).settle()
    world = fail_once_more(world)
    assert (world.status.state, world.status.reason) == ("Failed", "NoProgress")


def test_only_restarts_within_the_window_count_if_a_window_is_set() -> None:
    world = digits(backoffLimit=1, backoffWindowSeconds=3600).started()
    for _ in range(4):
        fail_once_more(world)
        world.after(3600)
    assert charges(world) == (4, 0, 0)
    fail_once_more(world)
    assert world.status.state == "Restarting"
    fail_once_more(world)
    assert world.status.reason == "BackoffLimitExceeded"


def test_failure_policy_fails_the_job_at_once_for_the_named_exit_codes() -> None:
    policy = {"rules": [{"action": "FailJob", "onExitCodes": {"operator": "In", "values": [78]}}]}
    world = digits(failurePolicy=policy).running().exits(1, code=78).restarted()
    assert (world.status.state, world.status.reason) == ("Failed", "PermanentFailure")
    assert "failurePolicy says FailJob" in world.status.message
    world = digits(failurePolicy=policy).running().exits(1, code=77).restarted()
    assert world.status.state == "Restarting"


def test_failure_policy_can_restart_without_a_charge() -> None:
    policy = {"rules": [{"action": "Ignore", "onExitCodes": {"operator": "NotIn", "values": [1]}}]}
    world = digits(failurePolicy=policy, backoffLimit=0).running().exits(1, code=42).restarted()
    assert charges(world) == (0, 1, 0)


NO_START: dict[str, dict[str, object]] = {
    "no driver": {
        "code": 128,
        "reason": "StartError",
        "message": "nvidia-container-cli: initialization error: nvml error: driver not loaded",
    },
    "no runtime": {"code": 128, "reason": "StartError", "message": "OCI runtime create failed: no such device"},
    "no program": {"code": 127},
    "no right to run it": {"code": 126},
    "no libcuda": {"message": "ImportError: libcuda.so.1: cannot open shared object file: No such file or directory"},
    "no module": {"message": "ModuleNotFoundError: No module named 'mymodel'"},
    "no script": {"code": 2, "message": "/usr/bin/python3: can't open file '/nfs/train.py': [Errno 2] No such file"},
}


@pytest.mark.parametrize("how", NO_START.values(), ids=NO_START.keys())
@pytest.mark.parametrize(("nodes", "broken"), [(1, 1), (2, 2), (4, 1)])
@pytest.mark.parametrize("reports", [True, False], ids=["steps", "no steps"])
@pytest.mark.parametrize("after", [1, 70])
def test_a_job_that_has_trained_never_fails_because_it_cannot_start(how, nodes, broken, reports, after):
    """A start that fails, for example on a broken GPU, must never fail a job that has trained before, also if the start
    takes a minute because of a slow volume."""
    world = digits(nodes=nodes).running()
    if reports:
        world.reports_step(50_000).settle()
    world.after(2 * 86400).settle().deleted_first(0).settle()
    for rank in range(nodes):
        world.vanishes(rank)
    world.settle().after(1).settle().runs(*range(nodes)).settle()
    for rank in range(broken):
        world.after(after).exits(rank, **{"code": 1, **how})  # type: ignore[arg-type]
    world.restarted()
    assert (cause(world).failure_class, world.status.state) == ("infrastructure", "Restarting"), world.status.message
    assert charges(world) == (0, 2, 0)
    assert world.status.failures[-1].node, "the node is blamed, and avoided when it happens again"


@pytest.mark.parametrize("how", NO_START.values(), ids=NO_START.keys())
def test_one_node_that_cannot_start_fails_a_new_job_only_after_other_nodes_were_tried(how: dict[str, object]) -> None:
    """A new job must be tried on other nodes first: one node without a driver must not fail it."""
    world, starts = digits(nodes=3).running(), 0
    while world.status.state != "Failed" and starts < 1000:
        world.runs(0, 1, 2).settle().after(1).exits(1, **{"code": 1, **how})  # type: ignore[arg-type]
        world.restarted().after(400).settle()
        starts += 1
    assert (starts, world.status.reason) == (11, "PermanentFailure"), world.status.message


@pytest.mark.parametrize("reports", [True, False], ids=["steps", "no steps"])
def test_a_module_that_is_missing_in_the_middle_of_training_is_charged_to_the_script(reports: bool) -> None:
    """A failing `import wandb` at the first checkpoint must count against backoffLimit, or it repeats for ever. Without
    step reports a job has trained after ten minutes: imports from a slow volume may take some."""
    world = digits().running()
    world = world.reports_step(100).settle() if reports else world.after(601).settle()
    world.exits(0, code=1, message="ImportError: no wandb").restarted()
    assert charges(world) == (1, 0, 0)


def test_a_missing_config_map_fails_the_job_only_after_a_while() -> None:
    world = digits().started().waits(0, "CreateContainerConfigError", 'configmap "settings" not found').settle()
    assert world.status.reason == "CannotStart"
    assert world.plan().requeue_at == START + dt.timedelta(seconds=600)
    world.after(599).settle()
    assert world.status.reason == "CannotStart"
    world.after(1).settle().stops_all().settle()
    assert (world.status.state, world.status.reason) == ("Failed", "PermanentFailure")
    assert 'configmap "settings" not found' in world.status.message


LACKS = ("CreateContainerConfigError", 'configmap "settings" not found')


def test_the_time_without_a_config_map_counts_across_starts_that_took_too_long() -> None:
    """The time without a ConfigMap must count across starts, or a job with a short start deadline restarts for ever."""
    world = digits(startDeadlineSeconds=300).started().waits(0, *LACKS).settle().after(300).settle()
    assert world.status.reason == "StartBackOff"
    assert world.status.attempt_time is not None
    world.stops_all().settle().now = world.status.attempt_time
    world.settle().waits(0, "ContainerCreating").settle().waits(0, *LACKS).settle()
    assert world.status.unconfigured_since == START
    world.now = START + dt.timedelta(seconds=600)
    world.settle().stops_all().settle()
    assert world.status.reason == "PermanentFailure"


def test_the_ten_minutes_without_a_config_map_survive_a_change_of_the_leader() -> None:
    """A missing ConfigMap fails a job after ten minutes. Changes of the leader must not start these minutes again."""
    world = digits().started().waits(0, *LACKS).settle()
    for _ in range(4):
        new = digits()
        new.job, new.pods, new.service, new.now = world.job, world.pods, world.service, world.now
        world = new.after(150).settle()
    assert (world.status.state, world.status.unconfigured_since) == ("Restarting", START)
    assert world.stops_all().settle().status.reason == "PermanentFailure"


def test_a_config_map_that_exists_in_between_restarts_the_wait() -> None:
    world = digits().started().waits(0, *LACKS).settle().after(500).runs(0).settle()
    assert world.status.unconfigured_since is None
    world.waits(1, *LACKS).settle().after(500).settle()
    assert world.status.reason == "CannotStart"


def test_a_config_map_that_is_briefly_missing_after_a_long_pull_fails_no_job() -> None:
    """A ConfigMap that is late in the kubelet's cache, as after a long pull, must not fail the job."""
    world = digits().started().waits(0, "ContainerCreating").settle().after(660).settle()
    world.waits(0, "CreateContainerConfigError", "failed to sync configmap cache: timed out")
    assert world.settle().status.reason == "CannotStart"
    world.runs(0, 1).settle()
    assert (world.status.state, world.status.attempt) == ("Running", 1)


# ---------------------------------------------------------------- causes


def test_the_cause_is_the_rank_that_failed_and_not_the_first_peer_that_noticed() -> None:
    world = digits().running().exits(0, code=1, message=PEER_GONE).settle()
    assert cause(world).rank == 0
    world.after(3).exits(1, code=137, reason="OOMKilled").settle()
    assert (cause(world).rank, cause(world).reason, cause(world).failure_class) == (1, "OOMKilled", "outOfMemory")
    assert len(world.status.failures) == 1, "an attempt has one cause"
    assert charges(world) == (1, 0, 0)


def test_an_attempt_with_only_complaints_about_peers_is_free_once() -> None:
    """An attempt in which all ranks only lost a peer is not charged the first time: the network may be the cause."""
    world = digits(backoffLimit=1).running().exits(0, code=1, message=PEER_GONE).restarted()
    assert charges(world) == (0, 1, 0)
    world.runs(0, 1).settle().after(3600).exits(0, code=1, message=PEER_GONE).restarted()
    assert charges(world) == (1, 1, 0)
    world.after(400).settle().runs(0, 1).settle().after(3600).exits(1, code=1, message=PEER_GONE).restarted()
    assert (world.status.state, world.status.reason) == ("Failed", "BackoffLimitExceeded")
    assert "lost its peers" in world.status.message


def cut_off_for_a_while(world: World, place: int) -> World:
    """Mark the pod as not ready, as the node controller does if a node does not report, and then as ready again."""
    pod = world.pods[f"digits-{world.status.attempt}-{place}"]
    for silent_since in (world.now, None):
        pod = world.pods[pod.name] = facts.merge(pod, replace(pod, silent_since=silent_since))
        world.settle()
    return world


def test_complaints_are_free_if_a_node_of_the_attempt_did_not_report_for_a_while() -> None:
    """Lost peers must not be charged if a node of the attempt was silent: a switch may restart every day."""
    world = digits(backoffLimit=0)
    for attempt in range(1, 6):
        world.running()
        cut_off_for_a_while(world, 1).exits(0, code=1, message=PEER_GONE).settle()
        assert "no rank failed first; node node-1 did not report for a while" in world.status.message
        world.restarted().after(400).settle()
        assert (world.status.attempt, charges(world)) == (attempt + 1, (0, attempt, 0))
    world.running().exits(0, code=1, message=PEER_GONE).restarted()
    assert charges(world) == (0, 6, 0), "the first that nothing explains"
    world.after(400).running().exits(0, code=1, message=PEER_GONE).restarted()
    assert (world.status.state, world.status.reason) == ("Failed", "BackoffLimitExceeded")


def test_a_node_that_did_not_report_explains_complaints_even_after_its_pod_is_gone() -> None:
    """The recorded failure must show that a node was silent, because a new operator knows nothing else."""
    world = digits(backoffLimit=0, nodes=3).running().exits(0, code=1, message=PEER_GONE).restarted().running()
    cut_off_for_a_while(world, 1).exits(0, code=1, message=PEER_GONE).settle()
    world.pods["digits-2-1"] = replace(world.pods["digits-2-1"], was_silent=False)
    world.restarted()
    assert (world.status.attempt, charges(world)) == (3, (0, 2, 0))


def test_an_error_of_the_script_is_charged_even_if_a_node_did_not_report() -> None:
    world = cut_off_for_a_while(digits(backoffLimit=0).running(), 1)
    world.exits(0, code=1, message="ValueError: no such shard").restarted()
    assert (world.status.state, world.status.reason) == ("Failed", "BackoffLimitExceeded")


def test_a_rank_that_exits_with_0_while_its_peer_waits_for_it_is_charged_as_the_cause() -> None:
    world = digits(backoffLimit=0).running().reports_step(20, rank=0).settle()
    world.reports_step(20, rank=1, node_rank=1).exits(0).settle()
    world.after(2).exits(1, code=1, message=PEER_GONE).settle()
    assert (world.status.state, world.status.reason) == ("Failed", "BackoffLimitExceeded")
    sentence = "rank 0 (pod digits-1-0, node node-0) ended with exit code 0 after step 20 while rank 1 was in step 21: "
    assert sentence + "the ranks make different numbers of steps" in world.status.message
    assert (cause(world).rank, cause(world).exit_code, cause(world).failure_class) == (0, 0, "application")
    assert PEER_GONE in cause(world).log_tail, "the log of the peer is kept"


@pytest.mark.parametrize("nodes", [2, 3, 8])
@pytest.mark.parametrize("early", [0, 1])
def test_a_rank_that_exits_early_with_0_is_named_even_without_reports(nodes: int, early: int) -> None:
    world = digits(nodes=nodes, backoffLimit=0).running().exits(early).settle().after(1)
    for rank in set(range(nodes)) - {early}:
        world.exits(rank, code=1, message=PEER_GONE)
    world.settle()
    assert world.status.reason == "BackoffLimitExceeded"
    peer = min(set(range(nodes)) - {early})
    assert f"ended with exit code 0 while rank {peer} still waited for it" in world.status.message
    assert cause(world).rank == early


@pytest.mark.parametrize(
    ("command", "reason"),
    [(["torchrun", "train.py"], "EndedEarly"), (["sh", "-c", "torchrun train.py; date"], "PeerLost")],
)
def test_a_sigkill_proves_an_early_end_only_of_a_torchrun_that_got_the_sigterm(command: list[str], reason: str) -> None:
    """An unanswered SIGTERM proves an early end only of torchrun: a shell does not answer SIGTERM either, and each
    network failure would be charged."""
    world = digits(container={"command": command}).running().exits(1, code=1, message=PEER_GONE).settle()
    world.after(30).exits(0, code=137).settle()
    assert cause(world).reason == reason


def test_a_lost_node_is_the_cause_even_if_another_rank_has_completed() -> None:
    world = digits(nodes=3, backoffLimit=0).running().exits(0).settle().exits(1, code=1, message=PEER_GONE)
    world.node_lost(2).settle().after(30).restarted()
    assert (charges(world), cause(world).reason) == ((0, 1, 0), "NodeLost")


def test_a_node_lost_while_a_failed_group_stops_is_not_the_cause() -> None:
    world = digits(backoffLimit=1).running().exits(0, code=3, message="ValueError: no such shard").settle()
    world.node_lost(1).settle().after(30).restarted()
    assert charges(world) == (1, 0, 0)


def test_a_port_in_use_that_the_script_chose_is_charged_to_the_script_and_named() -> None:
    """A port in use that the script has chosen must be charged to the script; the operator's own port must not."""
    sentence = (
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. "
    )
    taken = sentence + "port: {}, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"
    world = digits(backoffLimit=0).running().exits(0, code=1, message=taken.format(29500)).restarted()
    assert (world.status.reason, "port: 29500" in world.status.message) == ("BackoffLimitExceeded", True)
    given = int(digits().running().status.master_addr.rpartition(":")[2])
    world = digits(backoffLimit=0).running().exits(0, code=1, message=taken.format(given)).restarted()
    assert charges(world) == (0, 1, 0), "what was given to rank 0 may have been taken by another pod of that node"
    world = digits(backoffLimit=0).running().exits(1, code=1, message=taken.format(given)).restarted()
    assert world.status.reason == "BackoffLimitExceeded", "only rank 0 has any business there"


def test_the_out_of_memory_message_names_the_limit() -> None:
    container = {"resources": {"limits": {"memory": "64Mi"}}}
    world = World(job(container=container, backoffLimit=0)).running()
    world.exits(1, code=137, reason="OOMKilled").restarted()
    assert "used more memory than its limit of 64Mi (resources.limits.memory)" in world.status.message


def test_the_message_of_a_pod_that_is_being_stopped_is_the_cause_even_after_its_object_is_gone() -> None:
    world = digits(nodes=3).running().exits(0, code=1, message=PEER_GONE).settle()
    assert cause(world).reason == "PeerLost"
    world.exits(1, code=1, message="ValueError: no such shard").settle()
    assert cause(world).exception == "ValueError: no such shard"
    world.vanishes(1).settle().stops(2).settle()
    assert (cause(world).rank, charges(world)) == (1, (1, 0, 0))


def test_the_message_of_a_pod_that_ended_between_two_reconciles_is_also_the_cause() -> None:
    world = digits().running().exits(0, code=1, message=PEER_GONE).settle()
    world.exits(1, code=1, message="ValueError: no such shard")
    world.deleted_pods.append(world.pods.pop("digits-1-1"))
    world.settle()
    assert (cause(world).exception, charges(world)) == ("ValueError: no such shard", (1, 0, 0))


# ---------------------------------------------------------------- nodes and pods ended from outside


def test_a_pod_that_disappears_while_running_is_a_named_infrastructure_failure() -> None:
    world = digits(backoffLimit=0).running().vanishes(1).restarted()
    assert charges(world) == (0, 1, 0)
    assert (cause(world).rank, cause(world).pod, cause(world).reason) == (1, "digits-1-1", "PodGone")


def test_peers_of_a_deleted_pod_get_their_full_grace_so_that_all_ranks_save_together() -> None:
    world = digits(backoffLimit=0).running().deleted_first(1)
    assert world.step().actions == ()
    assert (world.status.state, world.status.reason) == ("Restarting", "Disrupted")
    assert deleted(world.step()) == [("digits-1-0", None)]
    world.stops_all().settle()
    assert charges(world) == (0, 1, 0)
    assert cause(world).reason == "StoppedFromOutside"


def test_a_lost_node_is_given_up_after_30_seconds_and_not_before() -> None:
    world = digits(backoffLimit=0).running().node_lost(1).settle()
    assert world.status.state == "Running"
    assert world.plan().requeue_at == world.now + dt.timedelta(seconds=30)
    world.after(30).step()
    assert (world.status.state, world.status.reason) == ("Restarting", "NodeLost")
    assert deleted(world.step()) == [("digits-1-0", 10)], "nobody would answer for the lost pod: it proves the cause"
    world.stops(0).settle()
    assert charges(world) == (0, 1, 0)
    assert (cause(world).node, cause(world).reason) == ("node-1", "NodeLost")
    assert world.names() == ["digits-2-0", "digits-2-1"], "the lost pod went at once: its DNS name would lead nowhere"


def test_a_stopping_pod_on_a_lost_node_does_not_block_the_job_for_ever() -> None:
    world = digits().running().exits(0, code=1).settle()
    assert world.pods["digits-1-1"].deletion_requested_at is not None
    world.node_lost(1).after(30).settle()
    assert world.names() == ["digits-1-0", "digits-2-0", "digits-2-1"]


def test_a_suspended_job_and_one_beyond_its_deadline_do_not_wait_for_a_lost_node() -> None:
    world = digits().running().node_lost(1).change(suspend=True).settle().stops(0).after(30).settle()
    assert world.names() == []
    world = digits(activeDeadlineSeconds=40).running().node_lost(1).after(20).settle().after(20).settle()
    world.stops_all().settle()
    assert world.status.state == "Failed"


def test_a_node_that_returns_in_time_costs_nothing() -> None:
    world = digits().running().node_lost(1).after(29).settle()
    world.nodes = {}
    assert world.after(100).settle().status.state == "Running"


def test_without_the_right_to_read_nodes_the_report_of_the_node_controller_counts() -> None:
    world = digits().running()
    world.nodes = None
    world.pods["digits-1-1"] = replace(world.pods["digits-1-1"], silent_since=world.now)
    world.after(29).settle()
    assert world.status.state == "Running"
    world.after(1).settle()
    assert world.status.reason == "NodeLost"


@pytest.mark.parametrize(("ran", "seconds"), [(False, 60), (True, 30 + HELD_SECONDS)])
def test_without_the_right_to_read_nodes_a_pod_that_outlives_its_grace_is_given_up(ran: bool, seconds: int) -> None:
    """Without the right to read nodes, a pod that outlives its grace period must be given up, but not as long as its
    process may be running next to the new group."""
    world = digits().running() if ran else digits().settle().runs(0)._change(1, node="node-1").settle()
    world.nodes = None
    world.deleted_first(1).settle().stops(0).after(seconds - 1).settle()
    assert world.names() == ["digits-1-1"]
    world.after(1).settle()
    assert world.names() == ["digits-2-0", "digits-2-1"]


def test_a_slowly_stopping_pod_on_a_responsive_node_is_waited_for() -> None:
    world = digits().running().deleted_first(1).settle().stops(0).after(3600).settle()
    assert world.names() == ["digits-1-1"]
    assert "digits-1-1 on node-1" in world.status.message


def test_a_pod_of_a_deleted_job_of_the_same_name_on_a_lost_node_does_not_block_the_new_job_for_ever() -> None:
    world = digits().conflicting_pod("digits-1-1", label="digits", owner="uid-of-the-deleted-job")
    world.conflicting_pods = [
        replace(p, node="node-7", deletion_requested_at=world.now) for p in world.conflicting_pods
    ]
    world.nodes = {"node-7": Node(ready=False, since=world.now)}
    world.settle()
    assert world.status.reason == "WaitingForDeletedJob"
    again = world.plan().requeue_at
    assert again <= world.now + dt.timedelta(seconds=30)
    assert deleted(world.after(30).plan()) == [("digits-1-1", 0)]


def twice_lost(world: World) -> World:
    """Return a world that has lost node-1 twice: the node is ready again, but the job avoids it."""
    world.running()
    for _ in range(2):
        world.runs(0, 1).settle().node_lost(1).after(30).restarted()
        world.nodes = {}
        world.after(2).settle()
    return world


def test_a_node_that_fails_the_job_twice_is_avoided_for_an_hour_and_shown() -> None:
    world = twice_lost(digits())
    assert [(a.node, a.until > world.now) for a in world.status.avoided_nodes] == [("node-1", True)]
    world.exits(1, code=1).settle().stops_all()
    world.step()
    made = [a for a in world.after(400).plan().actions if isinstance(a, CreatePod)]
    assert {a.avoid for a in made} == {("node-1",)}
    world.settle().after(3600).runs(0, 1).settle().exits(1, code=1).restarted()
    assert world.status.avoided_nodes == []


NO_NODE = "0/2 nodes are available: 1 node(s) didn't match Pod's node affinity/selector, 1 node(s) were unschedulable"


def test_a_node_is_avoided_only_while_the_pods_fit_elsewhere() -> None:
    """If the pods fit on no other node, a node must not be avoided only because it was lost twice."""
    world = twice_lost(digits()).runs(0).unschedulable(1, NO_NODE).settle()
    attempt = world.status.attempt
    world.after(59).settle()
    assert world.status.attempt == attempt
    assert world.plan().requeue_at == world.now + dt.timedelta(seconds=1), "nothing else would wake us"
    world.after(1).settle().stops_all()
    made = [a for _ in range(3) for a in world.step().actions if isinstance(a, CreatePod)]
    assert [(a.attempt, a.place, a.avoid) for a in made] == [(attempt + 1, 0, ()), (attempt + 1, 1, ())]
    world.settle().runs(0, 1).settle()
    assert world.status.state == "Running"


def test_the_message_names_the_avoided_node_the_end_of_the_avoidance_and_the_reason() -> None:
    """The message must explain the avoidance, because the scheduler's message mentions an unknown node affinity."""
    world = twice_lost(digits()).runs(0).unschedulable(1, NO_NODE).settle()
    until = world.status.avoided_nodes[0].until
    said = f"node node-1 is avoided until {until:%H:%M:%S} UTC (2 failures of this job)"
    assert f"{NO_NODE}; {said}; pods that find no other node for 1m may go there" in world.status.message
    world.events.clear()
    world.after(60).settle()
    (event,) = [e for e in world.events if e.reason == "AvoidanceOver"]
    assert event.type == "Warning"
    assert event.message == (
        "node node-1 is used although it was to be avoided (2 failures of this job): pods fit on no other node; "
        "all pods are created again"
    )


def test_avoidance_is_lifted_even_if_the_start_gives_up_sooner() -> None:
    world = twice_lost(digits(startDeadlineSeconds=20)).runs(0).unschedulable(1, NO_NODE).settle().after(20).settle()
    assert world.status.reason == "StartBackOff"
    assert world.status.attempt_time is not None
    world.stops_all().now = world.status.attempt_time
    made = [a for _ in range(3) for a in world.step().actions if isinstance(a, CreatePod)]
    assert [a.avoid for a in made] == [(), ()]
    assert [a.lifted for a in world.status.avoided_nodes] == [True]


def test_the_minute_starts_when_the_pod_finds_no_node_whoever_is_leader() -> None:
    """The minute must start when no node is found, and not when the pod is held back by a quota or queue."""
    world = twice_lost(digits()).after(300).runs(0).unschedulable(1, NO_NODE).settle()
    attempt = world.status.attempt
    world.after(30).settle()
    assert world.status.attempt == attempt
    world.after(30).settle()
    assert world.status.attempt == attempt + 1


def test_a_node_that_fails_the_job_again_after_its_avoidance_was_lifted_is_avoided_again() -> None:
    """After an avoidance was lifted, a new failure on the node must start it again: other nodes may be free by then."""
    world = twice_lost(digits()).runs(0).unschedulable(1, NO_NODE).settle().after(60).restarted()
    assert [a.lifted for a in world.status.avoided_nodes] == [True]
    world.runs(0, 1).settle().node_lost(1).after(30).settle().stops_all().settle()
    assert [(a.node, a.lifted) for a in world.status.avoided_nodes] == [("node-1", False)]


def test_pods_that_fit_on_no_node_are_recreated_once_and_then_wait() -> None:
    world = twice_lost(digits()).unschedulable(0, NO_NODE).unschedulable(1, NO_NODE).settle().after(60).restarted()
    attempt = world.status.attempt
    world.unschedulable(0, "0/2 nodes are available").unschedulable(1, "0/2 nodes are available").settle()
    for _ in range(5):
        world.after(70).settle()
    assert world.status.attempt == attempt
    assert "avoided" not in world.status.message


# ---------------------------------------------------------------- stall


def test_a_stalled_job_is_restarted_and_shows_the_step_of_each_rank() -> None:
    world = digits(stall={"timeoutSeconds": 60}).running()
    for step in (1, 2, 3):
        world.reports_step(step).after(5).settle()
    for _ in range(14):
        world.reports_step(3).after(5).settle()
    assert (world.status.state, world.status.reason) == ("Restarting", "Stalled")
    world.restarted()
    assert (cause(world).reason, cause(world).step) == ("Stalled", 3)
    assert charges(world) == (0, 0, 1)


# ---------------------------------------------------------------- honest numbers


def test_goodput_excludes_waiting_and_repeated_steps() -> None:
    world = digits().running().after(10).reports_step(1).settle().after(90).reports_step(100).settle()
    world.exits(1, code=1).after(5).settle().stops(0).settle()
    world.after(5).runs(0, 1).settle().after(10).reports_step(81).settle().after(40).exits(0).exits(1).settle()
    spent = world.status.goodput
    assert (spent.starting_seconds, spent.productive_seconds, spent.restarting_seconds) == (10, 135, 15)
    assert spent.lost_steps == 20


def test_a_pod_bound_to_a_node_that_is_not_ready_has_its_own_timeout() -> None:
    """A pod on a node that is not ready yet must get more time, and not cost an attempt."""
    world = digits().started()
    world.nodes = {"node-1": Node(ready=False, since=world.now)}
    world.after(25).runs(0, 1)
    assert world.after(20).settle().status.state == "Running"
    assert world.after(15).settle().status.reason == "NodeLost", "but not for ever"


def test_a_disappeared_rank_is_not_recreated_after_its_peers_have_completed() -> None:
    """A rank that disappeared after its peers completed must not be created again: it has completed unobserved."""
    world = digits().started().settle()
    assert world.status.reason == "StartingTrainers"
    world.exits(0).vanishes(1).settle()
    assert world.status.attempt == 2
    assert (world.status.last_failure.reason, world.status.last_failure.charged_to) == ("PodGone", "infrastructure")


LAUNCHERS = pytest.mark.parametrize("command", ["python", "torchrun", "ddprun"])


@LAUNCHERS
def test_a_rank_whose_pod_was_never_created_gets_it_even_if_others_have_completed(command: str) -> None:
    world = digits(nodes=3, container={"command": [command, "train.py"]}, backoffLimit=0)
    world.step()
    world.vanishes(1).vanishes(2).exits(0)
    assert world.status.reason == "CreatingPods"
    world.settle()
    assert world.names() == ["digits-1-0", "digits-1-1", "digits-1-2"]
    world.exits(1).exits(2).settle()
    assert (world.status.state, world.status.attempt, charges(world)) == ("Succeeded", 1, (0, 0, 0))


@LAUNCHERS
def test_a_rank_that_starts_after_a_peer_ended_does_not_prove_that_the_peer_ended_early(command: str) -> None:
    world = digits(container={"command": [command, "train.py"]}, backoffLimit=0)
    world.step()
    world.vanishes(1).runs(0).after(30).exits(0).after(5).step()
    assert (world.status.reason, world.names()) == ("CreatingPods", ["digits-1-0", "digits-1-1"])
    world.runs(1).settle().after(600).exits(1, code=1, message=PEER_GONE).settle()
    assert (charges(world), cause(world).node_rank, cause(world).reason) == ((0, 1, 0), 1, "PeerLost")


def test_a_slowly_stopping_pod_does_not_explain_an_earlier_failure() -> None:
    """A pod that only stops slowly must not explain an earlier failure: the rank that ended early is the cause."""
    world = digits(nodes=3).running().reports_step(5)
    world.nodes = None
    world.exits(1).exits(
        2, code=1, message="RuntimeError: [/gloo/pair.cc:553] Connection closed by peer [10.0.0.7]:31234"
    )
    world.settle().after(60).settle()
    assert (world.status.last_failure.reason, world.status.last_failure.node_rank) == ("EndedEarly", 1)


@pytest.mark.parametrize(("word", "code"), [("seccomp killed", 159), ("Signaled", 139), ("Exited", 3)])
def test_the_reason_that_a_container_runtime_gives_for_an_exit_code_is_no_disruption(word: str, code: int) -> None:
    """An exit code with a runtime's own reason, such as CRI-O's `seccomp killed`, must be charged to the script."""
    world = digits(backoffLimit=0).running().exits(0, code, reason=word).restarted()
    assert (world.status.state, world.status.reason) == ("Failed", "BackoffLimitExceeded")
    assert f"({word})" in world.status.message
    assert cause(world).reason == "Error"


NO_GPU = "0/2 nodes are available: 1 Insufficient nvidia.com/gpu"


def waits_in_vain(world: World, seconds: float) -> World:
    """Return a world where pod 1 cannot be scheduled, and pod 0 exits because its rendezvous timed out."""
    world.runs(0).unschedulable(1, NO_GPU).settle().after(seconds)
    return world.exits(0, code=1, message=f"{NOBODY_CAME}\n").settle().stops_all().settle()


@pytest.mark.parametrize("min_nodes", [None, 2])
def test_a_rank_that_timed_out_waiting_for_a_node_without_a_gpu_is_not_charged(min_nodes: int | None) -> None:
    """A rank that timed out waiting for a node must not be charged: three hours in a full cluster are no failure."""
    elastic = {} if min_nodes is None else {"minNodes": min_nodes}
    world = digits(backoffLimit=1, **elastic).started()
    for attempt in range(2, 40):
        waits_in_vain(world, 600)
        assert world.status.attempt == attempt
        assert world.status.last_failure is None
    assert charges(world) == (0, 0, 0)
    world.unschedulable(0, NO_GPU).unschedulable(1, NO_GPU).settle()
    assert (world.status.state, world.status.reason) == ("Pending", "Unschedulable")
    assert world.status.message == f"Unschedulable: 2 of 2 pods: {NO_GPU}, for more than 6h"
    world.runs(0).runs(1).settle()
    assert (world.status.state, world.status.starting_since) == ("Running", None)


@pytest.mark.parametrize(
    ("other", "lacks"),
    [(NO_GPU, f"2 of 3 pods: {NO_GPU}"), ("no volume", f"2 of 3 pods: {NO_GPU} (digits-1-1); no volume (digits-1-2)")],
)
def test_the_message_names_which_rank_gave_up_waiting_and_for_what(other: str, lacks: str) -> None:
    world = digits(nodes=3).started().runs(0).unschedulable(1, NO_GPU).unschedulable(2, other).settle().after(600)
    plan = world.exits(0, code=1, message=f"{NOBODY_CAME}\n").plan()
    assert (plan.status.state, plan.status.reason) == ("Pending", "Unschedulable")
    assert plan.status.message == (
        f"Unschedulable: {lacks}, for more than 10m; digits-1-0 gave up waiting for them, so all pods are created "
        "again: attempt 2"
    )


def test_a_rank_that_timed_out_waiting_for_an_image_is_not_charged_and_the_slow_pod_is_named() -> None:
    """A time-out while another pod pulls a large image must not be charged, and the message must name that pod."""
    world = digits(backoffLimit=0).started().runs(0).waits(1, "ContainerCreating").settle().after(600)
    plan = world.exits(0, code=1, message=f"{NOBODY_CAME}\n").plan()
    assert (plan.status.state, plan.status.reason) == ("Pending", "CannotStart")
    assert plan.status.message.startswith(
        "1 of 2 pods have not started: digits-1-1 on node-1 has been in ContainerCreating"
    )
    assert "digits-1-0 gave up waiting for them" in plan.status.message
    world.settle().stops_all().settle()
    assert (world.status.attempt, world.status.last_failure, charges(world)) == (2, None, (0, 0, 0))
    world.runs(0).runs(1).settle()
    assert world.status.state == "Running"


def test_the_start_deadline_counts_from_the_first_attempt_that_found_no_nodes() -> None:
    """The start deadline must count from the first attempt without nodes: otherwise two jobs could block each other."""
    world = waits_in_vain(digits(startDeadlineSeconds=1500).started(), 600)
    waits_in_vain(world, 600)
    world.runs(0).unschedulable(1, NO_GPU).settle().after(299).settle()
    assert world.status.reason == "Unschedulable"
    world.after(1).settle()
    assert (world.status.reason, world.status.start_retries) == ("StartBackOff", 1)
    world.stops_all().after(70).settle().runs(0).unschedulable(1, NO_GPU).settle().after(1400).settle()
    assert world.status.reason == "Unschedulable", "the next try has its own time"


@pytest.mark.parametrize(("seconds", "said"), [(5, NOBODY_CAME), (600, "ValueError: no such shard")])
def test_a_script_that_fails_by_itself_while_another_pod_is_unschedulable_is_charged(seconds: float, said: str) -> None:
    """A script that fails by itself must be charged even if another pod cannot be scheduled."""
    world = digits().started().runs(0).unschedulable(1, NO_GPU).settle().after(seconds)
    world.exits(0, code=1, message=f"{said}\n").settle()
    assert cause(world).exception == said
    assert world.status.restarts is not None


# ---------------------------------------------------------------- the same exception twice in a local run

TRACEBACK = (
    'Traceback (most recent call last):\n  File "/a/train.py", line {line}, in main\n    go()\nOSError: {text}\n'
)


def _again(world: World, line: int, text: str = "no such shard") -> World:
    """Let rank 1 raise and the group stop, then start the next attempt unless the job fails."""
    before = world.status.last_failure
    world.settings = dataclasses.replace(world.settings, failed_before=before)
    world.running().exits(1, code=1, message=TRACEBACK.format(line=line, text=text))
    return world.restarted().after(400).settle()


@pytest.mark.parametrize(("line", "is_over"), [(7, True), (8, False)])
def test_repeating_an_exception_at_the_same_line_ends_the_job_only_on_one_machine(line: int, *, is_over: bool) -> None:
    """A repeated exception must end the job only on one machine: in a cluster a file system may be the cause."""
    world = _again(_again(digits(), 7), line, "another text")
    assert (world.status.state == "Failed") == is_over
    if is_over:
        assert "the same exception at the same line twice in a row" in world.status.message
