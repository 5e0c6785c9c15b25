"""The operator counts at most the restarts that it granted to a pod. Otherwise a forged count in a message of 89 bytes
could fill a gigabyte of memory: again for each new leader, because the pod's status keeps the message."""

import json
import time
import tracemalloc

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from worlds import START, World, job

from ddpjob_core import budget
from ddpjob_core.failures import Failure
from ddpjob_operator.job import api, bounds
from ddpjob_operator.observed.reports import AgentCounts, AgentReport, BadReportError, read_report

COUNTS = st.integers(0, bounds.IN_PLACE_MAX)
AGENTS = st.builds(
    AgentCounts, application=COUNTS, infrastructure=COUNTS, stall=COUNTS, in_a_row=COUNTS, charged_in_a_row=COUNTS
)
WINDOWED = {"backoffLimit": 3, "backoffWindowSeconds": 60}


def running(**spec: object) -> World:
    world = World(job(container={"command": ["ddprun", "train.py"]}, **spec)).settle()
    return world.running().settle()


@settings(max_examples=settings.default.max_examples // 2)
@given(st.lists(AGENTS, min_size=1, max_size=3), st.sampled_from([{}, WINDOWED, {"backoffLimit": 0}]))
@example([AgentCounts(application=bounds.IN_PLACE_MAX)], WINDOWED)
@example([AgentCounts(stall=bounds.IN_PLACE_MAX, in_a_row=bounds.IN_PLACE_MAX)], {})
def test_the_count_of_an_agent_is_believed_up_to_one_restart_beyond_its_budget(said, spec):
    world = running(**spec)
    for counts in said:
        world.agent = AgentReport(restarts=counts)
        world.settle()  # the operator learns these counts only once
        restarts = world.job.status.restarts or api.Restarts()
        limit = world.job.spec.backoff_limit
        assert restarts.application <= limit + 1
        assert restarts.stall <= budget.STALLS_MAX + 1
        assert len(restarts.charged_at) <= limit + 1
        assert restarts.in_a_row <= restarts.total
        api_status = json.loads(json.dumps(restarts.total))
        assert api_status <= 2 * bounds.IN_PLACE_MAX


def test_all_counts_of_an_honest_agent_are_counted() -> None:
    world = running(backoffLimit=3)
    world.agent = AgentReport(restarts=AgentCounts(application=3, infrastructure=40, stall=2, in_a_row=4))
    world.settle()
    restarts = world.job.status.restarts
    assert (restarts.application, restarts.infrastructure, restarts.stall, restarts.in_a_row) == (3, 40, 2, 4)


@pytest.mark.parametrize("count", [60_000_000, 2**53 - 1, 2**63, 10**400, -1])
@pytest.mark.parametrize("name", ["application", "infrastructure", "stall", "inARow", "chargedInARow"])
def test_an_impossibly_high_count_costs_no_memory_and_no_time(name: str, count: int) -> None:
    text = json.dumps({"ddpjob": 1, "rank": 0, "exitCode": 1, "agent": {"restarts": {name: count}}})
    with pytest.raises(BadReportError):
        read_report(json.dumps({"step": 0, "agent": {"restarts": {name: count}}}).encode(), START)
    world = running(**WINDOWED)
    tracemalloc.start()
    begun = time.process_time()
    world.exits(0, code=1, message=text)
    for _ in range(5):
        world.step()
    assert time.process_time() - begun < 2.0
    assert tracemalloc.get_traced_memory()[1] < 8_000_000
    tracemalloc.stop()
    assert (world.job.status.restarts or api.Restarts()).total <= 1


def test_a_rank_outside_the_job_is_not_named_for_the_failure_of_an_agent() -> None:
    world = running()
    failure = Failure(rank=2**31 - 1, node_rank=1, failure_class="application", charged_to="application")
    world.agent = AgentReport(restarts=AgentCounts(application=1), failures=[failure])
    world.settle()
    assert world.job.status.last_failure.rank is None
