"""Goodput counts only seconds in which steps were made, because users who pay for the GPUs rely on it."""

import datetime as dt

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import World, digits

from ddpjob_cli.describe.job import describe
from ddpjob_core.failures import Failure
from ddpjob_operator.job import api, bounds, validation
from ddpjob_operator.observed.reports import AgentCounts, AgentReport

DDPRUN = {"command": ["ddprun", "train.py"]}


def spent(world: World) -> api.Goodput:
    assert world.status.goodput is not None
    return world.status.goodput


def trains(world: World, *steps: int, seconds: float = 10) -> World:
    """Let rank 0 report these steps, one every `seconds`."""
    for step in steps:
        world.reports_step(step).settle().after(seconds)
    return world


def hangs(world: World, step: int, seconds: int) -> World:
    """Let rank 0 report every ten seconds without making a step."""
    for _ in range(seconds // 10):
        world.reports_step(step).settle().after(10)
    return world


def total(goodput: api.Goodput) -> int:
    return (
        goodput.productive_seconds
        + goodput.idle_seconds
        + goodput.unreported_seconds
        + goodput.starting_seconds
        + goodput.restarting_seconds
    )


def test_a_job_that_hung_until_its_deadline_does_not_count_as_training() -> None:
    """A job that hung until its deadline must not have a ratio of 1.0, because it wasted its GPUs."""
    world = trains(digits(activeDeadlineSeconds=1500).running(), *range(1, 11))
    hangs(world, 10, 1500).settle()
    assert world.status.state in ("Failing", "Failed")
    assert (spent(world).productive_seconds, spent(world).ratio) == (90, 0.06)
    assert spent(world).idle_seconds == 1410


def test_describe_counts_the_time_until_now() -> None:
    """A job that has trained for minutes must not be shown with the few seconds of its start."""
    world = trains(digits().running(), *range(1, 11))
    assert "Goodput:    100%: 1m40s training" in describe(world.job, None, world.now)


def test_a_hang_counts_as_idle_even_if_the_user_disabled_the_restart() -> None:
    world = trains(digits(stall={"timeoutSeconds": 0}).running(), *range(1, 11))
    hangs(world, 10, 2000).exits(0).exits(1).settle()
    assert world.status.state == "Succeeded"
    assert spent(world).productive_seconds == 90


def test_a_stall_that_restarts_the_group_is_idle_from_its_last_step() -> None:
    world = trains(digits(stall={"timeoutSeconds": 60}).running(), *range(1, 11))
    hangs(world, 10, 70).settle()
    assert (world.status.state, world.status.reason) == ("Restarting", "Stalled")
    assert (spent(world).productive_seconds, spent(world).idle_seconds) == (90, 70)


def test_a_pause_that_ends_by_itself_is_idle_and_the_steps_after_it_count_again() -> None:
    world = trains(digits().running(), *range(1, 11))
    hangs(world, 10, 900)
    assert spent(world).idle_since is not None
    trains(world, *range(11, 21)).exits(0).exits(1).settle()
    assert (spent(world).productive_seconds, spent(world).idle_seconds) == (190, 910)
    assert (spent(world).idle_since, spent(world).counted_until) == (None, None)


def test_a_step_that_takes_as_long_as_the_others_is_not_idle() -> None:
    """A step that takes four minutes like the others must not count as idle, although most reconciles see none."""
    world = trains(digits().running(), *range(1, 21), seconds=240).exits(0).exits(1).settle()
    assert (spent(world).productive_seconds, spent(world).idle_seconds, spent(world).ratio) == (4800, 0, 1.0)


@pytest.mark.parametrize("kind", ["stall", "application"])
def test_time_from_the_last_step_to_the_first_after_a_restart_in_place_is_idle(kind: str) -> None:
    """Time without steps around a restart in place must count as idle, although the state stays Running."""
    world = trains(digits(container=DDPRUN, stall={"timeoutSeconds": 60}).running(), *range(1, 11))
    hangs(world, 10, 60)
    failure = Failure(rank=1, node_rank=1, failure_class=kind, charged_to=kind, step=10)  # type: ignore[arg-type]
    world.agent = AgentReport(generation=1, restarts=AgentCounts(**{kind: 1}), failures=[failure])
    world.settle().after(20)
    trains(world, *range(9, 19)).exits(0).exits(1).settle()
    assert (spent(world).productive_seconds, spent(world).idle_seconds) == (190, 90)


def test_waiting_for_a_lost_node_of_an_elastic_job_is_not_training() -> None:
    """The ranks that stay must count as idle from the last step to the next one, also if the job stays Running."""
    world = trains(digits(container=DDPRUN, minNodes=1).running(), *range(1, 11), seconds=5).after(4)
    world.node_lost(0).settle().after(30).settle()
    assert (world.status.state, world.status.leader) == ("Running", api.JobLeader(term=2, place=1))
    trains(world.after(20), *range(11, 21)).exits(1).settle()
    assert (world.status.state, spent(world).starting_seconds) == ("Succeeded", 0)
    assert (spent(world).productive_seconds, spent(world).idle_seconds) == (145, 59)


@pytest.mark.parametrize("deleted", [False, True], ids=["not ready", "its object is deleted"])
def test_waiting_for_a_lost_node_is_not_training(deleted: bool) -> None:
    """The seconds until Kubernetes gives up a lost node (40 s) must not count as training."""
    world = trains(digits().running(), *range(1, 11), seconds=5).after(4)
    (world.node_deleted(1) if deleted else world.node_lost(1)).settle()
    world.after(30).settle()
    assert world.status.reason == "NodeLost"
    assert (spent(world).productive_seconds, spent(world).idle_seconds) == (45, 39)


def test_a_node_that_only_stopped_reporting_trains_until_its_last_step() -> None:
    """A node that only stopped reporting must count as training until its last step: its containers continue."""
    world = trains(digits().running(), *range(1, 11), seconds=5).node_lost(1).settle()
    trains(world, *range(11, 17), seconds=5).settle()
    assert world.status.reason == "NodeLost"
    assert (spent(world).productive_seconds, spent(world).idle_seconds) == (75, 5)


def test_a_long_step_that_a_lost_node_interrupts_is_training_until_the_node_may_have_failed() -> None:
    world = trains(digits().running(), 1, 2, 3, seconds=300).node_lost(1).settle().after(30).settle()
    assert world.status.reason == "NodeLost"
    assert (spent(world).productive_seconds, spent(world).idle_seconds) == (840, 90)


def test_lost_steps_are_counted_once_if_the_ranks_restart_within_a_second() -> None:
    """Times of reports are whole seconds. Progress of equal age must be recorded, or each plan adds the steps again."""
    world = digits(container=DDPRUN).running().reports_step(20).settle()
    world.reports_step(16, generation=1).settle()
    assert (spent(world).lost_steps, world.status.progress.step) == (5, 16)


def test_a_job_that_never_reports_a_step_has_no_ratio() -> None:
    """A job that reports no steps must have no goodput ratio, because nobody knows if it trains."""
    world = digits().started().after(20).runs(0, 1).settle().after(80).exits(0).exits(1).settle()
    assert (spent(world).starting_seconds, spent(world).unreported_seconds) == (20, 80)
    assert (spent(world).productive_seconds, spent(world).ratio) == (0, None)


@given(
    st.lists(
        st.tuples(st.sampled_from(["step", "alive", "fail", "in place", "suspend"]), st.integers(1, 900)), max_size=25
    )
)
def test_no_second_is_counted_twice_or_lost(events: list[tuple[str, int]]) -> None:
    world, step, count, paused = digits(container=DDPRUN, backoffLimit=100).running(), 0, 0, dt.timedelta()
    begin = world.now
    for what, seconds in events:
        if what == "step":
            step += 1
            world.reports_step(step)
        elif what == "alive" and step:
            world.reports_step(step)
        elif what == "in place":
            count += 1
            failure = Failure(rank=1, node_rank=1, failure_class="application", charged_to="application")
            world.agent = AgentReport(generation=count, restarts=AgentCounts(application=count), failures=[failure])
        elif what == "fail":
            count = 0
            world.exits(0, code=3).exits(1, code=3).settle().after(400).settle().runs(0, 1)
        elif what == "suspend":
            count = 0
            world.change(suspend=True).settle().stops_all().settle()
            since = world.now
            world.after(100).change(suspend=False).settle().runs(0, 1)
            paused += world.now - since
        if world.settle().status.state in ("Failed", "Succeeded"):
            break
        world.after(seconds)
    if world.status.state == "Running":
        world.exits(0).exits(1).settle()
    seen = round((world.status.state_time - begin - paused).total_seconds())
    assert total(spent(world)) == pytest.approx(seen, abs=2 * len(events) + 1)


def test_a_script_that_reports_huge_step_numbers_leaves_a_readable_status() -> None:
    """Lost steps must not exceed what a status may hold: the operator could not read its own status."""
    world = digits().running()
    for _ in range(2):
        world.reports_step(bounds.COUNT_MAX).settle().exits(0, code=75).restarted().after(400).running()
        world.reports_step(1).settle()
    status = validation.stored_status({"status": msgspec.to_builtins(world.status)})
    assert status.goodput.lost_steps == bounds.COUNT_MAX


@pytest.mark.parametrize("in_place", [True, False])
def test_the_first_step_after_a_restart_is_written_at_once(in_place: bool) -> None:
    """The first step after a restart must be written at once, so that `kubectl get` is not empty for 12 s."""
    world = trains(digits(container=DDPRUN).running(), 100, 110, seconds=11).after(1).reports_step(111).settle()
    if in_place:
        failure = Failure(rank=1, node_rank=1, failure_class="application", charged_to="application", step=111)
        world.agent = AgentReport(generation=1, restarts=AgentCounts(application=1), failures=[failure])
        world.settle()
    else:
        world.exits(1, 3).exits(0, 75).settle().after(30).running()
    shown = world.status.display
    assert (None if shown is None else shown.step) == ("111" if in_place else "")
    shown = world.after(1).reports_step(101, generation=int(in_place), resumed_step=100).settle().status.display
    assert shown.step == "101"
