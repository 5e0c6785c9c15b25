"""/metrics: what a dashboard and an alert are made of."""

from __future__ import annotations

import re
from typing import Any

import pytest
from slow_server import SlowServer, Town, play

from ddpjob_operator.kube import metrics


def values(*jobs: dict[str, Any], leads: bool = True) -> dict[str, float]:
    """By name and labels."""
    said = metrics.text(jobs, leads=leads, oldest_reconcile_seconds=0.25, version="0.1.0")
    return {name: float(value) for name, value in re.findall(r"^([a-z][^ ]*) (\S+)$", said, re.M)}


def job(**status: Any) -> dict[str, Any]:
    return {"metadata": {"name": "digits"}, "status": status}


def test_jobs_are_counted_by_their_state_and_a_state_that_no_job_has_is_zero() -> None:
    """An alert on a series that is missing never fires."""
    found = values(job(state="Running"), job(state="Running"), job(state="Failed"), job())
    assert found['ddpjob_jobs{state="Running"}'] == 2
    assert found['ddpjob_jobs{state="Failed"}'] == 1
    assert found['ddpjob_jobs{state="None"}'] == 1
    assert found['ddpjob_jobs{state="Pending"}'] == 0


def test_restarts_and_seconds_are_sums_over_all_jobs() -> None:
    one = job(restarts={"application": 1, "stall": 2, "total": 3}, goodput={"productiveSeconds": 60})
    two = job(restarts={"application": 4}, goodput={"productiveSeconds": 6, "restartingSeconds": 7})
    found = values(one, two)
    assert found['ddpjob_restarts{charged_to="application"}'] == 5
    assert found['ddpjob_restarts{charged_to="stall"}'] == 2
    assert found['ddpjob_seconds{spent="productive"}'] == 66
    assert found['ddpjob_seconds{spent="restarting"}'] == 7


def test_a_standby_counts_no_jobs_so_that_a_sum_over_all_pods_counts_each_once() -> None:
    found = values(job(state="Running"), leads=False)
    assert found["ddpjob_operator_leads"] == 0
    assert not any(name.startswith(("ddpjob_jobs", "ddpjob_restarts", "ddpjob_seconds")) for name in found)


@pytest.mark.parametrize(
    "status", [None, "Running", [], {"state": 5, "restarts": "many", "goodput": {"idleSeconds": "x"}}]
)
def test_a_status_that_somebody_has_edited_takes_the_metrics_of_no_other_job(status: object) -> None:
    found = values({"metadata": {"name": "digits"}, "status": status}, job(state="Running"))
    assert (found['ddpjob_jobs{state="None"}'], found['ddpjob_jobs{state="Running"}']) == (1, 1)


def test_each_metric_is_explained_once_before_its_values() -> None:
    said = metrics.text([job()], leads=True, oldest_reconcile_seconds=0, version="0.1.0").splitlines()
    names = [line.split("{")[0].split(" ")[0] for line in said if not line.startswith("#")]
    explained = [line.split(" ")[2] for line in said if line.startswith("# HELP")]
    assert list(dict.fromkeys(names)) == explained


def test_the_operator_answers_for_the_jobs_that_it_has_seen() -> None:
    async def story() -> None:
        town = Town(SlowServer(lambda _verb, _path: 0.01))
        town.apply("team", "digits", 1, status={"state": "Succeeded"})
        said = town.operator.measured()
        assert 'ddpjob_jobs{state="Succeeded"} 1' in said
        assert "digits" not in said
        assert "team" not in said

    play(story)
