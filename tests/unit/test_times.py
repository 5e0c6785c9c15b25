"""If the clock of the operator or of its successor jumps, no job may wait longer because of this."""

import datetime as dt

import pytest
from lists import taken
from msgspec.structs import replace
from worlds import START, digits, job

from ddpjob_operator.job import api
from ddpjob_operator.job.times import START_BACK_OFF_SECONDS, start_back_off_seconds
from ddpjob_operator.kube.watch.nodes import NodeCache
from ddpjob_operator.kube.work.job_state import JobState
from ddpjob_operator.observed.cluster import ConflictingObject, Node
from ddpjob_operator.plan.actions import Settings

JUMPS = (-1, -10, -3600, -86_400 * 30)
UID = job().metadata.uid


@pytest.mark.parametrize("seconds", JUMPS)
@pytest.mark.parametrize("failures", [1, 2, 4])
def test_a_restart_waits_no_longer_than_its_back_off_when_the_clock_is_set_back(seconds: float, failures: int) -> None:
    """A restart must wait no longer than its back-off when the clock is set back, for example by an hour."""
    world = digits(backoffLimit=9).running()
    for _ in range(failures):
        world.exits(0, 3).settle().stops_all().settle()
        world.after(300).settle().runs(0, 1).settle()
    world.exits(0, 3).settle().stops_all().settle()
    back_off = 2 ** (failures - 1)
    again = world.after(seconds).settle().plan().requeue_at
    assert (again - world.now).total_seconds() <= back_off
    world.after(back_off).settle()
    assert f"digits-{failures + 2}-0" in world.names()


def test_a_report_keeps_its_time_if_the_job_is_reconciled_in_the_same_second() -> None:
    """A reconcile has whole seconds. A report of the same second must not be dated a minute earlier."""
    world = digits().running().reports_step(40)
    received = world.now + dt.timedelta(microseconds=700_000)
    world.reports[0] = replace(world.reports[0], received_at=received)
    world.settle().after(1).settle()
    assert world.status.progress.updated == received


@pytest.mark.parametrize("seconds", JUMPS)
def test_a_retried_start_waits_no_longer_than_its_back_off(seconds: float) -> None:
    world = digits(startDeadlineSeconds=10).started().after(10).settle().stops_all()
    world.pods.clear()
    world.settle().after(seconds).settle()
    assert (world.status.attempt_time - world.now).total_seconds() <= start_back_off_seconds(UID, 1)
    assert start_back_off_seconds(UID, 1) <= START_BACK_OFF_SECONDS[0]


@pytest.mark.parametrize("seconds", JUMPS)
def test_no_recorded_time_is_ahead_of_the_clock_for_more_than_one_reconcile(seconds: float) -> None:
    """If a clock is set back, recorded times must be corrected. Future times would prolong deadlines and back-offs."""
    world = digits(activeDeadlineSeconds=100, backoffWindowSeconds=60, ttlSecondsAfterFinished=5).running()
    world.exits(0, 3).settle().stops_all().settle().runs(0, 1).settle()
    avoided = api.AvoidedNode(node="gpu-7", until=world.now + dt.timedelta(hours=1))
    world.job = replace(world.job, status=replace(world.status, avoided_nodes=[avoided]))
    status, now = world.after(seconds).settle().status, world.now
    happened = [status.start_time, status.state_time, status.running_time, *status.restarts.charged_at]
    assert all(at is None or at <= now for at in happened)
    limit = now + dt.timedelta(seconds=Settings().avoid_node_seconds)
    assert all(a.until <= limit for a in status.avoided_nodes)
    world.after(100).settle()
    assert world.status.reason == "DeadlineExceeded"


@pytest.mark.parametrize("seconds", JUMPS)
def test_repeated_steps_are_counted_once_after_the_clock_was_set_back(seconds: float) -> None:
    """Repeated steps must be counted once, even if a clock that was set back makes old records seem newer."""
    world = digits().running().reports_step(100).settle().after(seconds)
    world.reports_step(91, resumed_step=90, generation=1).settle()
    for _ in range(3):
        world.after(1).settle()
    assert (world.status.progress.step, world.status.goodput.lost_steps) == (91, 10)


def test_a_correct_clock_changes_no_recorded_time() -> None:
    world = digits(backoffLimit=9).running().exits(0, 3).settle().stops_all().settle().runs(0, 1).settle()
    assert world.plan().status is None
    assert world.after(5000).plan().status is None


@pytest.mark.parametrize("seconds", JUMPS)
def test_a_refused_request_is_retried_in_time(seconds: float) -> None:
    state, now = JobState("u"), START
    state.adjust_clock(now)
    for _ in range(20):
        state.refusals.add("Pod", "digits-1-0", "exceeded quota", now)
        now = state.refusals.known["Pod", "digits-1-0"].retry_at
        state.adjust_clock(now)
    state.refusals.add("Pod", "digits-1-0", "exceeded quota", now)
    state.add_conflict(ConflictingObject("Pod", "digits-1-0"), now)
    now += dt.timedelta(seconds=seconds)
    state.adjust_clock(now)
    assert state.refusals.known["Pod", "digits-1-0"].retry_at - now == dt.timedelta(seconds=300)
    assert state.conflicts["Pod", "digits-1-0"].check_at - now <= dt.timedelta(seconds=30)


@pytest.mark.parametrize("seconds", JUMPS)
def test_a_node_is_lost_as_soon_as_without_the_clock_jump(seconds: float) -> None:
    now = START
    nodes = NodeCache(lambda _: None, lambda: now)
    raws = [{"metadata": {"name": "a"}}, {"metadata": {"name": "b"}}]
    taken(nodes, raws, 1)
    nodes.put({"metadata": {"name": "a"}, "status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}})
    nodes.seen()
    now += dt.timedelta(seconds=20)
    nodes.seen()
    now += dt.timedelta(seconds=seconds)
    assert nodes.seen() == {"a": Node(False, now - dt.timedelta(seconds=20))}
