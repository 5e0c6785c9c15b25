"""Counters of a job's history: each restart counts once, by what was restarted, with its duration."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace
from worlds import World, digits

from ddpjob_core.failures import Failure
from ddpjob_operator.metrics import names
from ddpjob_operator.metrics.of_change import Restart, of_change
from ddpjob_operator.observed.reports import AgentCounts, AgentReport

DDPRUN = {"container": {"command": ["ddprun", "train.py"]}}


class Counted:
    """A world that counts each written status as the operator and the local run do."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.counts: Counter[str] = Counter()
        self.observed: dict[str, list[float]] = {}
        self._restart: Restart | None = None

    def settle(self) -> Counted:
        """Plan, act and count until nothing changes."""
        for _ in range(10):
            old = self.world.status
            todo = self.world.step()
            if todo.status is not None:
                self._count(old, todo.status)
            if todo.status is None and not todo.actions:
                return self
        raise AssertionError("still busy")

    def _count(self, old: Any, new: Any) -> None:
        change = of_change(old, new, self.world.now, self._restart, self.world.agent)
        self._restart = change.restart
        for seen in change.seen:
            name = " ".join([seen.metric.name, *seen.labels])
            if seen.metric.kind == "counter":
                self.counts[name] += int(seen.value)
            else:
                self.observed.setdefault(name, []).append(seen.value)

    def runs(self, seconds: float = 5) -> Counted:
        """Let all trainers be running after this many seconds."""
        self.settle().world.after(seconds).runs(*range(self.world.job.spec.nodes))
        return self.settle()

    def steps(self, step: int, seconds: float = 1) -> Counted:
        """Let rank 0 report a step."""
        self.world.after(seconds).reports_step(step)
        return self.settle()


def test_a_job_that_starts_trains_and_ends_is_counted_once() -> None:
    """Each event of a job must be counted once, although its status is written many times."""
    counted = Counted(digits()).runs(5).steps(1, 2).steps(40, 30)
    counted.world.exits(0, 0).exits(1, 0)
    counted.settle().settle()
    assert counted.counts == {
        "ddpjob_attempts": 1,
        "ddpjob_steps": 40,
        "ddpjob_jobs_finished Succeeded AllNodesCompleted": 1,
    }
    assert counted.observed == {"ddpjob_start_seconds running": [5.0], "ddpjob_start_seconds first_step": [7.0]}


def test_a_failed_rank_is_a_group_restart_that_lasts_until_the_next_first_step() -> None:
    counted = Counted(digits()).runs().steps(10)
    counted.world.exits(1, 3).after(2)
    counted.settle().world.after(3).stops_all()
    counted.runs(10).steps(8, 4)
    assert counted.counts["ddpjob_restarts application group"] == 1
    assert counted.counts["ddpjob_attempts"] == 2
    assert counted.counts["ddpjob_lost_steps"] == 3, "steps 8 to 10 are made twice"
    assert counted.observed["ddpjob_failure_detection_seconds group"] == [2.0]
    assert counted.observed["ddpjob_restart_seconds group running"] == [15.0]
    assert counted.observed["ddpjob_restart_seconds group first_step"] == [19.0]


def test_a_second_failure_before_new_training_is_timed_separately() -> None:
    counted = Counted(digits()).runs().steps(10)
    for _ in range(2):
        counted.world.exits(1, 3).after(2)
        counted.settle().world.stops_all()
        counted.settle().world.after(30)  # the second restart waits for its back-off
        counted.runs(10)
    counted.steps(11, 1)
    assert counted.counts["ddpjob_restarts application group"] == 2
    assert counted.observed["ddpjob_failure_detection_seconds group"] == [2.0, 2.0]
    assert counted.observed["ddpjob_restart_seconds group first_step"] == [43.0], "the first never trained again"


def test_replacing_a_single_pod_counts_as_a_pod_restart() -> None:
    counted = Counted(digits(nodes=3, **DDPRUN)).runs().steps(10)
    counted.world.exits(1, 137).after(1)
    counted.settle().world.stops_all()
    counted.settle().world.after(6).runs(1)
    counted.settle().steps(11, 2)
    restarts = {name: count for name, count in counted.counts.items() if name.startswith("ddpjob_restarts")}
    assert [name.split()[-1] for name in restarts] == ["pod"], restarts
    assert counted.counts["ddpjob_attempts"] == 1
    assert counted.observed["ddpjob_restart_seconds pod running"] == [7.0]
    assert counted.observed["ddpjob_restart_seconds pod first_step"] == [9.0]


@pytest.mark.parametrize("kind", ["application", "infrastructure", "stall"])
def test_ranks_restarted_by_an_agent_are_timed_from_the_failure_that_it_saw(kind: str) -> None:
    counted = Counted(digits(**DDPRUN)).runs().steps(10)
    world = counted.world
    failed_at = world.now.timestamp()
    failure = Failure(rank=1, node_rank=1, exit_code=3, failure_class=kind, charged_to=kind, time=failed_at)
    world.after(2).agent = AgentReport(generation=1, restarts=AgentCounts(**{kind: 1}), failures=[failure])
    counted.settle().steps(11, 1)
    assert counted.counts[f"ddpjob_restarts {kind} rank"] == 1
    assert counted.observed["ddpjob_failure_detection_seconds rank"] == [2.0]
    assert counted.observed["ddpjob_restart_seconds rank first_step"] == [3.0]
    assert "ddpjob_restart_seconds rank running" not in counted.observed, "their pods have run all the time"


def test_a_failure_that_ends_the_job_has_a_detection_time_and_is_no_restart() -> None:
    counted = Counted(digits(backoffLimit=0)).runs().steps(10)
    counted.world.exits(1, 3).after(2)
    counted.settle().world.stops_all()
    counted.settle().settle()
    assert counted.counts["ddpjob_jobs_finished Failed BackoffLimitExceeded"] == 1
    assert counted.observed["ddpjob_failure_detection_seconds group"] == [2.0]
    assert not any(name.startswith("ddpjob_restart") for name in (*counted.counts, *counted.observed))


@pytest.mark.parametrize("ahead", [600, -86_400])
def test_a_wrong_node_clock_makes_no_duration_negative_or_huge(ahead: float) -> None:
    counted = Counted(digits()).runs().steps(10)
    world = counted.world
    world.after(ahead).exits(1, 3)
    world.after(-ahead)
    counted.settle().world.after(3).stops_all()
    counted.runs(10).steps(11)
    times = [value for values in counted.observed.values() for value in values]
    assert all(0 <= value < 3600 for value in times), counted.observed


def test_a_restart_during_which_the_clock_is_set_back_is_not_timed_but_the_next_one_is() -> None:
    counted = Counted(digits()).runs().steps(10)
    counted.world.exits(1, 3).after(2)
    counted.settle().world.after(3).stops_all()
    counted.settle().world.after(-3600)
    counted.runs(10).steps(11, 4)
    assert counted.counts["ddpjob_restarts application group"] == 1
    assert not any(name.startswith("ddpjob_restart_seconds") for name in counted.observed)
    counted.world.exits(1, 3).after(2)
    counted.settle().world.after(3).stops_all()
    counted.runs(10).steps(12, 4)
    assert counted.observed["ddpjob_restart_seconds group running"] == [15.0]
    assert counted.observed["ddpjob_restart_seconds group first_step"] == [19.0]


def test_an_unknown_reason_is_no_new_label() -> None:
    world = digits().running()
    old = world.status
    new = world.exits(0).exits(1).settle().status
    change = of_change(old, replace(new, reason="x" * 10_000), world.now)
    assert [seen.labels for seen in change.seen if seen.metric is names.FINISHED] == [("Succeeded", "other")]
