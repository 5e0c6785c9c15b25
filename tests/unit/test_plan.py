"""What plan() decides, and what users see: one test for each situation of a job."""

import datetime as dt
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from worlds import START, World, digits, job

from ddpjob_operator.job import api
from ddpjob_operator.job.status import find_condition
from ddpjob_operator.job.times import start_back_off_seconds
from ddpjob_operator.job.validation import Problem
from ddpjob_operator.observed.cluster import ConflictingObject, Container, Refusal
from ddpjob_operator.plan.actions import CreatePod, CreateService, DeleteJob, DeletePod, EndPod, Plan


def deleted(plan: Plan) -> list[tuple[str, int | None]]:
    return [(a.name, a.grace_seconds) for a in plan.actions if isinstance(a, DeletePod)]


def created(plan: Plan) -> list[tuple[int, int]]:
    return [(a.attempt, a.place) for a in plan.actions if isinstance(a, CreatePod)]


# ---------------------------------------------------------------- start


def test_a_new_job_gets_its_service_and_all_pods_in_one_reconcile() -> None:
    world = digits(nodes=3)
    todo = world.plan()
    assert todo.actions == (CreateService(), CreatePod(1, 0), CreatePod(1, 1), CreatePod(1, 2))
    assert (todo.status.state, todo.status.attempt, todo.status.start_time) == ("Pending", 1, START)


@pytest.mark.parametrize(
    ("rank_0", "state", "reason", "part"),
    [
        (lambda w: w.unschedulable(0, "0/3 nodes have nvidia.com/gpu"), "Pending", "Unschedulable", "0/3 nodes have"),
        (lambda w: w.waits(0, "ImagePullBackOff", "no such image"), "Pending", "CannotStart", "no such image"),
        (lambda w: w.waits(0, "ContainerCreating"), "Starting", "StartingTrainers", "1 of 2 nodes are running"),
    ],
)
def test_a_waiting_job_shows_what_it_waits_for(rank_0, state: str, reason: str, part: str) -> None:
    world = digits().started().runs(1)
    rank_0(world).settle()
    assert (world.status.state, world.status.reason) == (state, reason)
    assert part in world.status.message


def test_the_job_is_running_only_once_all_trainers_run() -> None:
    world = digits().started().runs(0).settle()
    assert world.status.state == "Starting"
    assert not world.is_true("Running")
    world.runs(1).settle()
    assert world.status.state == "Running"
    assert world.is_true("Running")
    assert world.status.display.nodes == "2/2"


# ---------------------------------------------------------------- success


def test_a_completed_node_still_counts_in_the_nodes_column() -> None:
    """A completed node must still count in the column NODES: 0/2 just before 2/2 looks like a loss of both nodes."""
    world = digits(nodes=3).running()
    for place, ready in ((0, 2), (2, 1)):
        world.exits(place).settle()
        assert world.status.state == "Running"
        assert (world.status.display.nodes, world.status.nodes.ready) == ("3/3", ready)


def test_the_job_succeeds_when_all_trainers_end_with_0() -> None:
    world = digits().running().after(60).exits(0).settle()
    assert world.status.state == "Running"
    assert world.status.completed_nodes == "0"
    world.exits(1).settle()
    assert world.status.state == "Succeeded"
    assert world.status.completion_time == START + dt.timedelta(seconds=60)
    assert world.is_true("Complete")


def test_a_succeeded_pod_that_disappears_while_its_peers_run_does_no_harm() -> None:
    world = digits().running().exits(1).settle().vanishes(1).settle()
    assert world.status.state == "Running"
    assert world.names() == ["digits-1-0"], "a rank that ended with 0 stays ended: it is not made again"
    world.exits(0).settle()
    assert world.status.state == "Succeeded"


def test_exit_0_after_a_stop_request_is_no_success() -> None:
    world = digits().running().after(5).deleted_first(0).exits(0).settle()
    assert world.status.completed_nodes == ""
    assert world.status.state == "Restarting"
    assert world.status.last_failure.reason == "StoppedFromOutside"


def test_a_trainer_that_ended_before_its_stop_request_has_completed() -> None:
    world = digits().running().exits(0).after(5).deleted_first(0).settle()
    assert world.status.completed_nodes == "0"
    assert world.status.state == "Running"


def test_a_sidecar_delays_the_end_of_the_job_only_for_its_grace_and_is_then_stopped() -> None:
    world = digits(nodes=1).running().exits(0, phase="Running").settle()
    assert world.plan().requeue_at == world.now + dt.timedelta(seconds=40)
    todo = world.after(40).settle().plan()
    assert world.status.state == "Succeeded"
    assert world.pods["digits-1-0"].deletion_requested_at is not None
    assert todo.actions == ()


@pytest.mark.parametrize("ends", ["Evicted", "Terminated"])
def test_a_trainer_that_exits_with_0_at_its_eviction_next_to_a_sidecar_has_not_completed(ends):
    """Exit code 0 at an eviction must not count as completed while a sidecar uses its grace period."""
    world = digits(nodes=1).running().exits(0, phase="Running").settle().after(29).settle()
    assert (world.status.state, world.status.completed_nodes) == ("Running", "")
    world.evicted(0, ends).settle()
    assert (world.status.attempt, world.status.last_failure and world.status.last_failure.charged_to) == (
        2,
        "infrastructure",
    )


# ---------------------------------------------------------------- suspend, resume, deletion


def test_a_job_created_suspended_creates_nothing_and_starts_no_clock() -> None:
    world = digits(suspend=True, activeDeadlineSeconds=10).settle().after(100).settle()
    assert (world.status.state, world.status.start_time, world.names()) == ("Suspended", None, [])


def test_a_suspension_is_recorded_before_the_pods_are_stopped_with_their_full_grace() -> None:
    world = digits().running().change(suspend=True)
    assert world.step().actions == ()
    assert world.status.state == "Suspended"
    assert deleted(world.step()) == [("digits-1-0", None), ("digits-1-1", None)]
    assert world.settle().status.message == "suspended; 2 pods still stopping"


def test_the_suspended_condition_waits_for_the_last_pod() -> None:
    """The condition Suspended must wait for the last pod, because the user may then use the GPUs and the volume."""
    world = digits().running().change(suspend=True).settle()
    assert (world.status.state, world.status.reason) == ("Suspended", "Suspending")
    shown = find_condition(world.status, "Suspended")
    assert (shown.status, shown.reason) == ("False", "Suspending")
    assert shown.message == "suspended; 2 pods still stopping"
    assert world.status.start_time is not None, "without it the API server lets nodes and template change"
    world.stops(0).settle()
    assert not world.is_true("Suspended")
    world.stops(1).settle()
    assert world.is_true("Suspended")
    assert (world.status.reason, world.status.start_time) == ("Suspended", None)
    assert world.status.last_failure is None, "what stops for it is not a failure"


def test_a_resume_is_a_new_attempt_with_new_clocks() -> None:
    world = digits(activeDeadlineSeconds=100).running().after(90).change(suspend=True).settle().stops_all().settle()
    world.after(1000).change(suspend=False).settle()
    assert world.status.attempt == 2
    assert world.names() == ["digits-2-0", "digits-2-1"]
    assert world.status.start_time == world.now
    assert world.runs(0, 1).after(99).settle().status.state == "Running"


def test_a_new_attempt_starts_only_when_all_pods_of_the_old_one_have_ended() -> None:
    world = digits(nodes=3).running().change(suspend=True).settle().change(suspend=False).settle()
    assert (world.status.state, world.status.reason) == ("Suspended", "WaitingForOldPods")
    assert world.status.message == "resumes when 3 pods have ended"
    assert world.events[-1].message == world.status.message
    world.stops(0).stops(2).settle()
    assert (world.names(), world.status.attempt) == (["digits-1-1"], 1)
    assert world.status.message == "resumes when digits-1-1 on node-1 has ended"
    assert not world.is_true("Suspended"), "whoever waits for it would take the GPUs that the pod still holds"
    assert world.status.start_time is not None, "without it the API server lets nodes and template change"
    world.stops(1).settle()
    assert world.names() == ["digits-2-0", "digits-2-1", "digits-2-2"]


def test_the_clocks_of_a_resumed_job_start_when_the_pods_of_its_last_attempt_have_ended() -> None:
    """The clocks of a resumed job must start when its old pods have ended, whose saves may take an hour."""
    world = digits(activeDeadlineSeconds=100, startDeadlineSeconds=20).running().change(suspend=True).settle()
    world.change(suspend=False).settle().after(3000).settle().stops_all().settle()
    assert world.status.attempt == 2
    assert (world.status.start_time, world.status.attempt_time) == (world.now, world.now)


def test_a_resumed_job_waits_for_a_pod_on_a_lost_node_only_until_the_time_in_its_message() -> None:
    """A resumed job must wait for a pod on a lost node only until the time in its message: the kubelet is silent."""
    world = digits().running().node_lost(1).change(suspend=True).settle().change(suspend=False).settle().stops(0)
    world.after(1).settle()
    assert world.status.message == (
        "resumes when digits-1-1 on node-1 has ended; node node-1 (node 1) is not ready since 07:11:13; "
        "given up at 07:11:43"
    )
    world.after(30).settle()
    assert world.names() == ["digits-2-0", "digits-2-1"]


def test_a_pod_on_a_lost_node_is_deleted_before_the_pods_of_a_resumed_job_are_created() -> None:
    """A pod on a lost node must be deleted before new pods are created: it may still be writing (seed 1003759)."""
    world = digits().running().node_lost(1).change(suspend=True).settle().change(suspend=False).settle().stops(0)
    world.after(31)
    todo = world.step()
    assert (deleted(todo), created(todo), world.status.attempt) == ([("digits-1-1", 0)], [], 1)
    assert created(world.step()) == [(2, 0), (2, 1)]


def test_a_resumed_job_whose_pods_do_not_end_shows_one_warning() -> None:
    """A resumed job whose pods do not end, for example because of a finalizer, must show one warning."""
    world = digits().running().change(suspend=True).settle().change(suspend=False).settle().after(600).settle()
    assert (world.status.state, world.status.reason) == ("Suspended", "WaitsLong")
    assert world.status.message == "resumes when 2 pods have ended"
    assert [event.reason for event in world.events if event.type == "Warning"] == ["WaitsLong"]
    assert not world.is_true("Suspended")
    world.after(600).settle().stops_all().settle()
    assert world.status.attempt == 2


def test_a_job_whose_nodes_all_completed_before_their_stop_request_has_succeeded() -> None:
    """If all nodes had completed before the suspension, a resume must not repeat the training."""
    world = digits().running().change(suspend=True)
    world.step()
    assert (world.status.state, world.status.reason) == ("Suspended", "Suspending")
    world.exits(0).exits(1).settle()
    assert (world.status.state, world.status.message) == ("Succeeded", "all 2 nodes completed")


def test_nodes_changed_while_suspended_take_effect_on_resume_and_a_completed_node_trains_again() -> None:
    """A completed node must train again after a resume with more nodes: the others need it for the rendezvous."""
    world = digits().running().exits(0).settle().change(suspend=True).settle().stops_all().settle()
    world.change(nodes=1).settle()
    assert world.status.state == "Suspended", "fewer nodes make no success of it"
    world.change(nodes=3).settle().change(suspend=False).settle()
    assert [n for n in world.names() if n.startswith("digits-2")] == ["digits-2-0", "digits-2-1", "digits-2-2"]


def test_a_deleted_job_is_left_to_the_garbage_collector() -> None:
    world = digits().started()
    world.job = replace(world.job, metadata=replace(world.job.metadata, deletion_timestamp=world.now))
    world.vanishes(0)
    assert world.plan() == Plan()


def test_a_job_that_another_controller_manages_is_not_touched() -> None:
    assert World(job(managedBy="kueue.x-k8s.io/multikueue")).plan() == Plan()


# ---------------------------------------------------------------- deadlines


def test_a_deadline_counts_from_the_start_also_when_it_was_moved_on() -> None:
    """The deadline must count from the start, which stays the same when `ddpjob dev --cluster` moves the deadline."""
    world = digits(activeDeadlineSeconds=60).running().after(50).change(active_deadline_seconds=110).settle()
    assert world.after(59).settle().status.state == "Running"
    assert world.after(1).settle().status.reason == "DeadlineExceeded"


def test_active_deadline_fails_the_job_and_stops_its_pods_with_their_full_grace() -> None:
    world = digits(activeDeadlineSeconds=60).running()
    assert world.plan().requeue_at == START + dt.timedelta(seconds=60)
    world.after(60).step()
    assert (world.status.state, world.status.reason) == ("Failing", "DeadlineExceeded")
    todo = world.step()
    assert deleted(todo) == [("digits-1-1", None)]
    assert [a for a in todo.actions if isinstance(a, EndPod)] == [EndPod("digits-1-0", world.pods["digits-1-0"].uid)]
    world.settle().stops_all().settle()
    assert (world.status.state, world.status.reason) == ("Failed", "DeadlineExceeded")
    assert world.names() == ["digits-1-0"], "with its log"
    assert world.status.message == "not finished within activeDeadlineSeconds: 60", "nothing is stopping any more"


def test_the_log_tail_of_a_rank_still_running_at_the_deadline_is_kept() -> None:
    """The end of the log of a rank that is running at the deadline must be kept, because it explains the hang."""
    world = digits(nodes=3, activeDeadlineSeconds=60).running().reports_step(812)
    world.reports_step(812, rank=1, node_rank=1).reports_step(811, rank=2, node_rank=2).after(60).settle()
    assert world.pods["digits-1-2"].deadline_set
    ended = Container("ended", "Error", "epoch 3\nwaiting for the data server", exit_code=143, ended_at=world.now)
    world._change(2, phase="Failed", reason="DeadlineExceeded", trainer=ended)
    world.stops(0).stops(1).settle()
    failure = world.status.last_failure
    assert (failure.rank, failure.failure_class, failure.charged_to) == (2, "permanent", "")
    assert "waiting for the data server" in failure.log_tail
    assert [line.message for line in world.status.failures] == [
        "rank 2 (pod digits-1-2, node node-2) was still running at step 812: "
        "the activeDeadlineSeconds of the job are over"
    ]


def test_a_pod_that_does_not_end_at_the_deadline_is_deleted_after_its_grace() -> None:
    world = digits(activeDeadlineSeconds=60).running().after(60).settle()
    assert world.plan().requeue_at == world.now + dt.timedelta(seconds=40)
    world.stops(1).after(40)
    assert deleted(world.step()) == [("digits-1-0", 10)]
    world.stops(0).settle()
    assert world.status.state == "Failed"


def test_a_deadline_names_no_rank_if_none_runs_or_one_has_already_failed() -> None:
    world = digits(activeDeadlineSeconds=60).started().after(60).settle().stops_all().settle()
    assert (world.status.state, world.status.last_failure) == ("Failed", None)
    world = digits(activeDeadlineSeconds=60).running().exits(1, code=3).settle().after(60).settle().stops_all().settle()
    assert world.status.last_failure.exit_code == 3


def test_a_job_that_completes_at_its_deadline_has_succeeded() -> None:
    assert digits(activeDeadlineSeconds=60).running().after(60).exits(0).exits(1).settle().status.state == "Succeeded"


def test_the_start_deadline_releases_all_pods_and_a_later_attempt_tries_again() -> None:
    world = digits(startDeadlineSeconds=120).started().runs(0).settle()
    assert world.plan().requeue_at == START + dt.timedelta(seconds=120)
    world.after(120).settle()
    assert (world.status.state, world.status.attempt, world.status.start_retries) == ("Pending", 2, 1)
    message = world.status.message
    assert message.startswith(
        "1 of 2 nodes ran within startDeadlineSeconds: 120; all pods are deleted, next try at 07:1"
    )
    assert message.endswith(" UTC")
    world.stops_all().settle()
    assert (world.status.reason, world.status.message) == ("StartBackOff", message), "no pod is there to wait for"
    assert world.names() == [], "two half-placed jobs must not block each other"
    again = world.plan().requeue_at
    assert 48 <= (again - world.now).total_seconds() <= 60
    world.now = again
    world.settle()
    assert world.names() == ["digits-2-0", "digits-2-1"]
    assert world.runs(0, 1).settle().status.start_retries == 0, "once all run, the waits begin again"
    assert world.after(1000).settle().status.attempt == 2, "and the start deadline is over"


def test_the_waits_between_starts_double_up_to_30_minutes_and_differ_between_jobs() -> None:
    waits = [start_back_off_seconds("a", n) for n in range(1, 9)]
    for wait, base in zip(waits, (60, 120, 240, 480, 960, 1800, 1800, 1800), strict=True):
        assert 0.8 * base <= wait <= base
    assert waits != [start_back_off_seconds("b", n) for n in range(1, 9)]


def test_the_active_deadline_also_ends_a_job_that_waits_for_its_next_start() -> None:
    world = digits(startDeadlineSeconds=60, activeDeadlineSeconds=90).started().after(60).settle().stops_all().settle()
    assert world.after(30).settle().status.reason == "DeadlineExceeded"


# ---------------------------------------------------------------- clean-up


@pytest.mark.parametrize(
    ("policy", "left"), [("None", ["digits-1-0", "digits-1-1"]), ("Running", ["digits-1-1"]), ("All", [])]
)
def test_clean_pod_policy_decides_which_pods_remain_after_the_end_of_the_job(policy: str, left: list[str]) -> None:
    """The policies Running and All must delete digits-1-0, whose sidecar is still running."""
    world = (
        digits(cleanPodPolicy=policy)
        .running()
        .exits(0, phase="Running")
        .exits(1)
        .after(40)
        .settle()
        .stops_all()
        .settle()
    )
    assert world.status.state == "Succeeded"
    assert world.names() == left


def test_clean_pod_policy_all_also_removes_pods_of_earlier_attempts() -> None:
    """The policy All must also delete pods of earlier attempts, which keep a name, an IP and local volumes."""
    world = digits(cleanPodPolicy="All").running().exits(1, code=3).settle().stops_all().settle().after(5).settle()
    assert "digits-1-1" in world.names(), "while the job goes on it stays for its log"
    world.running().exits(0).exits(1).settle()
    assert (world.status.state, world.names()) == ("Succeeded", [])


def test_the_ttl_deletes_a_finished_job_on_time_and_not_before() -> None:
    world = digits(ttlSecondsAfterFinished=30).running().exits(0).exits(1).settle()
    assert world.after(29).plan().actions == ()
    assert world.plan().requeue_at == world.now + dt.timedelta(seconds=1)
    assert world.after(1).plan().actions == (DeleteJob(world.job.metadata.uid),)


# ---------------------------------------------------------------- objects of others


def test_a_foreign_pod_with_the_needed_name_gives_a_clear_condition_and_is_not_taken_over() -> None:
    world = digits().conflicting_pod("digits-1-1").settle()
    assert (world.status.state, world.status.reason) == ("Pending", "NameTaken")
    assert "digits-1-1" in world.status.message
    assert world.names() == []


def test_a_foreign_service_with_the_needed_name_gives_a_clear_condition() -> None:
    world = digits()
    world.conflicts = [ConflictingObject("Service", "digits")]
    assert "a Service named digits is not this job's" in world.settle().status.message
    world.conflicts = []
    assert world.settle().names() == ["digits-1-0", "digits-1-1"]


def test_a_deleted_and_reapplied_job_waits_for_its_old_pods_and_shows_it() -> None:
    world = digits().conflicting_pod("digits-7-0", label="digits", owner="uid-of-the-deleted-job").settle()
    assert world.status.reason == "WaitingForDeletedJob"
    assert "digits-7-0 of the deleted job" in world.status.message
    world.conflicting_pods.clear()
    assert world.settle().names() == ["digits-1-0", "digits-1-1"]


def test_a_status_older_than_the_pods_is_not_acted_upon() -> None:
    world = digits().running()
    old = world.job
    world.change(suspend=True).settle().stops_all().change(suspend=False).settle()
    world.job = old
    assert world.plan() == Plan()


@pytest.mark.parametrize("suspend", [False, True])
def test_a_job_whose_status_was_lost_stops_its_pods_and_gets_a_new_attempt_number(suspend: bool) -> None:
    world = digits().running().change(suspend=suspend)
    world.job = replace(world.job, status=api.Status())
    world.settle().stops_all().settle().change(suspend=False).settle()
    assert world.names() == ["digits-2-0", "digits-2-1"]


def test_the_attempt_of_a_status_without_a_state_never_goes_back() -> None:
    """A number that is used twice gives two pods the same name, and reports of the first count for the second."""
    world = digits().running()
    world.job = replace(world.job, status=api.Status(attempt=3))
    assert world.settle().stops_all().settle().status.attempt == 4


def test_a_refused_create_makes_the_job_pending_with_the_server_message_and_is_retried() -> None:
    world = digits()
    world.step()
    world.vanishes(1)
    again = world.now + dt.timedelta(seconds=4)
    world.refusals = [Refusal("Pod", "digits-1-1", "exceeded quota: pods, requested: 1, used: 1, limited: 1", again)]
    world.settle()
    assert (world.status.state, world.status.reason) == ("Pending", "CreateRefused")
    assert "digits-1-1 was refused: exceeded quota: pods" in world.status.message
    assert world.plan().requeue_at == again
    todo = world.after(4).plan()
    assert (todo.actions, todo.status, todo.events) == ((CreatePod(1, 1),), None, ()), "no word changes until then"
    world.refusals = []
    assert world.settle().status.reason == "StartingTrainers"


# ---------------------------------------------------------------- status


def test_an_invalid_spec_starts_nothing_and_the_message_names_the_field() -> None:
    world = digits()
    world.problems = [Problem(("spec", "backend"), "mpi is not there")]
    world.settle()
    assert (world.status.state, world.status.reason) == ("Pending", "InvalidSpec")
    assert world.names() == []
    accepted = next(c for c in world.status.conditions if c.type == "Accepted")
    assert (accepted.status, accepted.message) == ("False", "spec.backend: mpi is not there")
    world.problems = []
    assert world.settle().is_true("Accepted")


def test_progress_alone_is_written_at_most_every_ten_seconds() -> None:
    world = digits().running().reports_step(1, total_steps=100).settle()
    assert world.status.progress.step == 1
    world.after(4).reports_step(5, total_steps=100)
    assert world.plan().status is None
    assert world.plan().requeue_at == START + dt.timedelta(seconds=10)
    world.after(6).reports_step(11, total_steps=100)
    todo = world.plan()
    assert todo.status.progress.step == 11


def test_progress_is_written_together_with_any_other_change() -> None:
    world = digits().running().reports_step(1).settle().after(1).reports_step(2).exits(0).settle()
    assert world.status.progress.step == 2


def test_the_columns_of_kubectl_get_show_steps_percent_and_time_left() -> None:
    world = digits().running().reports_step(312, total_steps=1125, eta_seconds=11_400).settle()
    assert world.status.display is not None
    shown = world.status.display
    assert (shown.nodes, shown.step, shown.progress, shown.eta) == ("2/2", "312/1125", "27%", "3h10m")


def test_a_message_about_one_node_uses_the_singular() -> None:
    assert digits(nodes=1).running().settle().status.message == "1 of 1 node is running, attempt 1"


def test_the_time_left_disappears_when_rank_0_is_silent_and_the_message_shows_since_when() -> None:
    """If rank 0 is silent, the ETA must disappear: an old one of 6m5s looks like a job that is nearly done."""
    world = digits().running().reports_step(541, total_steps=2000, eta_seconds=365).settle()
    assert world.plan().requeue_at == START + dt.timedelta(seconds=30)
    assert shown(world) == ("541/2000", "27%", "6m5s")
    world.after(29).settle()
    assert shown(world) == ("541/2000", "27%", "6m5s")
    world.after(1).settle()
    assert shown(world) == ("541/2000", "27%", "")
    assert world.plan().requeue_at == START + dt.timedelta(seconds=60)
    world.after(30).settle()
    assert world.status.message == "2 of 2 nodes are running, attempt 1; no report since 07:11:13 UTC"
    world.reports_step(700, total_steps=2000, eta_seconds=300).settle()
    assert world.status.message == "2 of 2 nodes are running, attempt 1"
    assert shown(world) == ("700/2000", "35%", "5m")


def test_a_rank_that_repeats_the_same_step_is_not_silent() -> None:
    world = digits().running()
    for _ in range(20):
        world.after(5).reports_step(3, eta_seconds=60, total_steps=100).settle()
    assert shown(world) == ("3/100", "3%", "1m")
    assert "no report" not in world.status.message


@pytest.mark.parametrize("more", [{"final": True}, {"phase": None}])
def test_a_rank_that_sent_its_last_report_or_reports_rarely_is_not_called_silent(more: dict[str, object]) -> None:
    world = digits().running().reports_step(3).settle()
    world.reports[0] = msgspec.structs.replace(world.reports[0], **more)
    assert "no report" not in world.after(300).settle().status.message


def test_a_new_operator_counts_silence_only_from_its_own_start() -> None:
    world = digits().running().reports_step(3, eta_seconds=60).settle().after(300)
    world.reports, world.trackers, world.listening_since = {}, {}, world.now
    assert "no report" not in world.settle().status.message
    assert shown(world)[2] == "1m"
    assert world.after(60).settle().status.message.endswith("; no report since 07:16:13 UTC")


def test_after_a_restart_the_metrics_of_the_previous_attempt_are_not_shown() -> None:
    world = digits().running().reports_step(541, total_steps=2000, eta_seconds=365).settle()
    world.exits(1, code=1).settle()
    assert shown(world) == ("541/2000", "27%", ""), "how far it had come, and no promise"
    world.restarted().after(1).runs(0, 1).settle()
    assert (world.status.state, world.status.attempt, shown(world)) == ("Running", 2, ("", "", ""))
    assert world.status.progress is not None, "what is known of the training is kept"
    world.reports_step(501, total_steps=2000, eta_seconds=400).settle()
    assert shown(world) == ("501/2000", "25%", "6m40s")


def shown(world: World) -> tuple[str, str, str]:
    """Return the columns STEP, PROGRESS and ETA."""
    return (world.status.display.step, world.status.display.progress, world.status.display.eta)


def test_a_report_of_an_older_attempt_is_not_progress() -> None:
    world = digits().running().reports_step(9)
    world.change(suspend=True).settle().stops_all().change(suspend=False).settle().runs(0, 1).settle()
    assert world.status.progress is None or world.status.progress.step == 9
    world.after(60).reports_step(3).settle()
    assert (world.status.progress.step, world.status.progress.attempt) == (3, 2)


def test_a_complete_job_has_only_a_few_events() -> None:
    world = digits().running().exits(0).settle().exits(1).settle()
    assert [(e.type, e.reason) for e in world.events] == [
        ("Normal", "CreatingPods"),
        ("Normal", "StartingTrainers"),
        ("Normal", "AllNodesRun"),
        ("Normal", "AllNodesCompleted"),
    ]
    assert routine(world) == ["AllNodesRun", "AllNodesCompleted"], "its conditions say as much"


def routine(world: World) -> list[str]:
    """Return the reasons of the Events that are left out at the level Brief."""
    return [e.reason for e in world.events if e.is_routine]


def test_the_end_of_a_job_has_an_event_if_the_job_was_long_or_is_deleted() -> None:
    """A long job must have an Event for its end. A deleted job must have one too, so that a log store has a trace."""
    assert routine(digits().running().after(600).exits(0).settle().exits(1).settle()) == ["AllNodesRun"]
    deleted = digits(ttlSecondsAfterFinished=0).running().exits(0).settle().exits(1).settle()
    assert routine(deleted) == ["AllNodesRun"]


def test_after_a_restart_or_a_suspension_an_event_shows_that_the_job_runs_again() -> None:
    failed = digits().running().exits(1, code=1).restarted().runs(0).settle().runs(1).settle()
    assert failed.events[-1].reason == "AllNodesRun"
    assert not failed.events[-1].is_routine
    suspended = digits().running().change(suspend=True).settle().stops_all().change(suspend=False).settle()
    suspended.runs(0, 1).settle()
    assert suspended.events[-1].reason == "AllNodesRun"
    assert not suspended.events[-1].is_routine


def test_changes_of_the_job_and_overrides_by_the_user_are_reported_once() -> None:
    own = {"env": [{"name": "MASTER_ADDR", "value": "10.0.0.1"}], "command": ["torchrun", "--max-restarts=3", "x.py"]}
    what = job(container=own)
    what.spec.template["spec"]["restartPolicy"] = "OnFailure"
    world = World(what).running()
    world.change(suspend=True).settle().stops_all().change(suspend=False).settle()
    sent = [e for e in world.events if e.reason in ("RestartPolicyChanged", "RendezvousOverridden", "LauncherOption")]
    assert [e.reason for e in sent] == ["RestartPolicyChanged", "RendezvousOverridden", "LauncherOption"]
    assert "OnFailure becomes Never" in sent[0].message
    assert "MASTER_ADDR" in sent[1].message


def test_devices_of_a_resource_claim_get_a_warning_that_they_do_not_count_as_gpus() -> None:
    """A job whose GPUs come from a ResourceClaim must not silently train with gloo and one process per node."""

    def told(**spec: Any) -> list[str]:
        own = {"resources": {"claims": [{"name": "gpus"}], **spec.pop("resources", {})}}
        world = World(job(container=own, **spec)).running()
        return [e.message for e in world.events if e.reason == "DevicesNotCounted"]

    assert told() == [
        "devices of a resourceClaim are not counted as GPUs, so spec.backend is gloo, spec.nprocPerNode is 1, "
        "spec.onePodPerNode is false: set these fields to match the claim"
    ]
    assert "spec.nprocPerNode" not in told(nprocPerNode=8)[0]
    assert told(nprocPerNode=8, backend="nccl", onePodPerNode=True) == []
    assert told(resources={"limits": {"nvidia.com/gpu": 1}}) == []


@pytest.mark.parametrize(("code", "shown"), [(0, "2/2"), (1, "1/2")])
def test_the_nodes_column_of_a_finished_job_shows_the_completed_nodes(code: int, shown: str) -> None:
    """A successful job must not show 0/2 nodes, which reads like a failure."""
    world = digits(backoffLimit=0).running().exits(0).settle().exits(1, code=code).restarted()
    assert world.status.state in ("Succeeded", "Failed")
    assert world.status.display.nodes == shown


def test_the_status_omits_empty_fields_and_keeps_the_restarts_by_class() -> None:
    """The status must omit empty lists. The four restart counts stay even at 0, for scripts and the column RESTARTS."""
    shown = msgspec.to_builtins(digits().running().status)
    assert shown["restarts"] == {"application": 0, "infrastructure": 0, "stall": 0, "total": 0}
    assert all("message" not in c or c["message"] for c in shown["conditions"])


def test_wide_columns_show_the_restarts_by_their_class() -> None:
    """The wide columns must show restarts by class, because only those for the script's failures need action."""
    world = digits()
    assert world.started().status.display.restarts == ""
    world.running().exits(0, code=1).restarted()
    assert world.status.display.restarts == "1 application"
    world.running().evicted(1, "Evicted").restarted()
    assert world.status.display.restarts == "1 application, 1 infrastructure"


@pytest.mark.parametrize(("limit", "kind"), [(0, "Failed"), (3, "Running")])
def test_exactly_one_condition_repeats_the_message(limit: int, kind: str) -> None:
    """Only one condition may have the message, or `kubectl describe` prints its 200 characters up to five times."""
    world = digits(backoffLimit=limit).running().exits(0, code=1, message="ValueError: boom").settle()
    world.stops(1).settle()
    assert [c.type for c in world.status.conditions if c.message] == [kind]
    said = find_condition(world.status, kind)
    assert said.message == world.status.message
    assert all(c.reason for c in world.status.conditions)


@pytest.mark.parametrize("end", ["succeeds", "fails", "is too late"])
def test_a_finished_job_has_a_completion_time_however_it_ended(end: str) -> None:
    """A finished job must have a completion time, for which `kubectl wait` can wait, however the job ended."""
    world = digits(backoffLimit=0, activeDeadlineSeconds=100).running()
    assert world.status.completion_time is None
    if end == "succeeds":
        world.exits(0).exits(1).settle()
    elif end == "fails":
        world.exits(0, code=1).restarted()
    else:
        world.after(101).settle().stops_all().settle()
    assert world.status.state == ("Succeeded" if end == "succeeds" else "Failed")
    assert world.status.completion_time == world.now


def test_a_condition_keeps_its_time_until_it_changes() -> None:
    world = digits().running().after(500).exits(0).settle()
    running = next(c for c in world.status.conditions if c.type == "Running")
    assert (running.status, running.last_transition_time) == ("True", START)


def test_the_status_stays_under_16_kb_with_the_longest_logs_and_many_nodes() -> None:
    world = digits(nodes=100).running()
    world.reports_step(1, metrics={f"m{i:061}": "9" * 64 for i in range(16)})
    for rank in range(100):
        world.exits(rank, code=rank % 2, message="ValueError: " + "x" * 5000)
    world.settle()
    assert len(msgspec.json.encode(world.status)) < 16_000
