"""How the local run passes reports to the rule that detects stalls."""

import datetime as dt
from collections.abc import Iterator
from pathlib import Path

import pytest
from worlds import START, job

from ddpjob_cli.local.processes.cluster import LocalCluster
from ddpjob_operator.observed.reports import Report
from ddpjob_operator.plan.actions import CreatePod
from ddpjob_operator.pods import build


@pytest.fixture
def world(tmp_path: Path) -> Iterator[LocalCluster]:
    """Return a local run in its second attempt, without any process."""
    made = LocalCluster(tmp_path, [], build.Reporting("http://127.0.0.1:1"), lambda _pod, _lines: None)
    made.body(job(), CreatePod(2, 0))
    yield made
    made.close()


def test_only_reports_of_the_current_attempt_are_used(world: LocalCluster) -> None:
    world.take(Report(step=41, rank=0, attempt=1, received_at=START), 0)
    assert world.observe().trackers == {}, "it is over, and what it did stops nothing"
    world.take(Report(step=1, rank=0, attempt=2, received_at=START), 0)
    world.take(Report(step=1, rank=1, attempt=2, received_at=START + dt.timedelta(seconds=0.5)), 1)
    assert {rank: pace.heard_at for rank, pace in world.observe().trackers.items()} == {
        0: START,
        1: START + dt.timedelta(seconds=0.5),
    }


def test_a_report_without_an_attempt_belongs_to_the_current_one(world: LocalCluster) -> None:
    world.take(Report(step=7, received_at=START), 0)
    assert world.observe().trackers[0].attempt == 2
    world.take(Report(step=8, phase=None, received_at=START), 0)
    assert world.observe().trackers[0].step == 7, "a sender that speaks only when it gets on proves nothing"
