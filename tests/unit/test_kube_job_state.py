"""The operator's memory of a job: the times at which it first observed something."""

import datetime as dt

from msgspec.structs import replace
from worlds import START

from ddpjob_operator.kube.watch.store import Jobs
from ddpjob_operator.kube.work.job_state import JobState, JobStates
from ddpjob_operator.observed.cluster import Container, Pod

AHEAD = dt.timedelta(minutes=23)  # the API server's clock is this much ahead of ours


def pod(uid: str = "a", **fields: dt.datetime) -> Pod:
    return Pod("digits-1-0", uid, "job", 1, 0, node="gpu-07", trainer=Container("running", ready=True), **fields)


def test_the_time_until_a_node_is_lost_counts_from_our_first_observation() -> None:
    """The time until a node counts as lost must run from our first observation: the server's clock may be ahead."""
    memory, later = JobState("uid"), START + dt.timedelta(seconds=20)
    asked = START + AHEAD
    stopping = pod(deletion_requested_at=asked, deletion_deadline=asked + dt.timedelta(seconds=10), silent_since=asked)
    (seen,) = memory.by_own_clock([stopping], START)
    assert (seen.silent_since, seen.deletion_deadline) == (START, START + dt.timedelta(seconds=10))
    assert memory.by_own_clock([stopping], later) == [seen], "the clock runs on from the first time it was seen"


def test_a_pod_bound_in_the_future_by_the_server_clock_counts_as_bound_when_we_saw_it() -> None:
    """A pod bound "in the future" must count as bound when we saw it. Otherwise a failed node is noticed too late."""
    memory, bound = JobState("uid"), pod(scheduled_at=START + AHEAD)
    for seconds in (0, 20, 40, 24 * 60):
        assert memory.by_own_clock([bound], START + dt.timedelta(seconds=seconds))[0].bound_at == START
    early = pod("b", scheduled_at=START - AHEAD)
    assert memory.by_own_clock([early], START) == [early]


def test_pod_times_that_are_compared_come_from_one_clock() -> None:
    """Times of pods that are compared must come from one clock. After a jump of our clock, a peer would seem to be
    created after its end, and the wrong rank would be blamed."""
    memory = JobState("uid")
    (first,) = memory.by_own_clock([pod(scheduled_at=START + AHEAD)], START)
    later, peer = START + 2 * AHEAD, pod("b", scheduled_at=START + AHEAD)
    seen = memory.by_own_clock([first, peer], later)
    assert seen[0].scheduled_at == seen[1].scheduled_at == START + AHEAD


def test_a_pod_whose_kubelet_is_back_gets_its_full_grace_before_it_is_given_up() -> None:
    """A pod must get its full grace period after its kubelet is back. Otherwise two groups would run at once (seed 3441
    of the simulation with memory)."""
    memory, back_at = JobState("uid"), START + dt.timedelta(seconds=29)
    stopping = pod(deletion_requested_at=START, deletion_deadline=START + dt.timedelta(seconds=1))
    silent = replace(stopping, silent_since=START)
    assert memory.by_own_clock([silent], START)[0].deletion_deadline == START + dt.timedelta(seconds=1)
    for now in (back_at, back_at + dt.timedelta(seconds=9)):
        assert memory.by_own_clock([stopping], now)[0].deletion_deadline == back_at + dt.timedelta(seconds=1)


def test_the_wait_for_a_pod_whose_node_reports_again_starts_from_zero() -> None:
    memory, later = JobState("uid"), START + dt.timedelta(seconds=20)
    memory.by_own_clock([pod(silent_since=START)], START)
    assert memory.by_own_clock([pod()], later)[0].silent_since is None
    assert memory.by_own_clock([pod(silent_since=START)], later)[0].silent_since == later


def test_the_time_that_a_sidecar_runs_on_is_counted_by_our_clock() -> None:
    """The time for which a sidecar runs on must be counted by our clock: with a node's clock a job waits too long, or
    an eviction counts as success."""
    memory, done = JobState("uid"), Container("ended", "Completed", exit_code=0, ended_at=START + AHEAD)
    beside = replace(pod(), trainer=done, sidecars_run=True)
    assert memory.by_own_clock([beside], START)[0].done_since == START
    assert memory.by_own_clock([beside], START + dt.timedelta(seconds=20))[0].done_since == START


def test_of_the_deleted_pods_only_the_newest_of_each_place_is_kept() -> None:
    """Only the newest deleted pod of a place may be kept: a user may create and delete pods for hours, 1.5 kB each."""
    states = JobStates(Jobs(lambda _: None))
    memory = states.of(("default", "digits"), "job")
    for number in range(1000):
        states.pod_deleted(("default", "digits"), replace(pod(f"uid-{number}"), name=f"name-{number}"))
    assert [kept.uid for kept in memory.deleted_pods.values()] == ["uid-999"]
    states.pod_deleted(("default", "digits"), replace(pod("replaced"), replacement=1))
    states.pod_deleted(("default", "digits"), pod("late"))
    assert [kept.uid for kept in memory.deleted_pods.values()] == ["replaced"]
    states.pod_deleted(("default", "digits"), replace(pod("of attempt 2"), attempt=2, place=1))
    assert [kept.uid for kept in memory.deleted_pods.values()] == ["of attempt 2"]
