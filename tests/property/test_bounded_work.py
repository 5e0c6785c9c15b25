"""Each uninterrupted step of the operator takes a bounded number of calls, whatever a tenant writes into a DDPJob."""

import asyncio
import random
import threading
import tracemalloc
from collections.abc import AsyncIterator
from functools import partial

import pytest
from hostile_specs import PUTS, SHELL, STATUSES, calls, job, steps, warm
from worlds import START, manifest

from ddpjob_operator.job import ranges, storage, validation
from ddpjob_operator.job.launch import command
from ddpjob_operator.job.launch.command import SCRIPT_READ_MAX
from ddpjob_operator.kube.api.client import READ_AT_ONCE, Page, read_json
from ddpjob_operator.kube.watch import listing
from ddpjob_operator.kube.watch.store import Jobs
from ddpjob_operator.observed.cluster import Observed
from ddpjob_operator.plan.plan import plan

LONG = pytest.mark.long  # more examples of the same test
SCRIPT_CALLS_MAX = 250_000  # about 35 ms for a script of 1,000 lines
CALLS_MAX = 150_000
"""Calls in about 20 ms. Without bounds, a job of 900 volumes takes 400 million."""


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=LONG) for seed in range(8, 80))])
def test_no_job_accepted_by_an_api_server_blocks_the_operator_for_others(seed: int) -> None:
    """No job may block the operator for others: without limits, one job of 205 kB stops both operators of a cluster."""
    what, raw = job(random.Random(seed))
    with warm():
        for name, work in steps(raw):
            assert calls(work) < CALLS_MAX, f"{name}: {what}"


@pytest.mark.parametrize("name", sorted(PUTS))
@pytest.mark.parametrize("count", [500, pytest.param(2_400, marks=LONG), pytest.param(9_000, marks=LONG)])
def test_a_long_list_of_one_kind_is_read_in_linear_time(name: str, count: int) -> None:
    """A long list must be read in linear time: comparing each item with each other one is quadratic."""
    raw = manifest()
    PUTS[name](raw, count, random.Random(count))
    with warm():
        for step, work in steps(raw):
            assert calls(work) < CALLS_MAX, f"{step}: {count} {name}"


@pytest.mark.parametrize("piece", SHELL)
def test_a_script_without_line_breaks_is_read_in_bounded_work(piece: str) -> None:
    """A script without line breaks must be read once: 20 kB of backquotes are not 10,000 commands."""
    script = (piece * 20_000)[:SCRIPT_READ_MAX]
    with warm():
        for step, work in steps(manifest(container={"command": ["bash", "-c", script]})):
            assert calls(work) < SCRIPT_CALLS_MAX, step


@pytest.mark.parametrize("name", sorted(STATUSES))
def test_a_manually_written_status_is_read_in_bounded_work(name: str) -> None:
    """300 kB of `0-9999,0-9999,…` in startedNodes must not become 400 million numbers."""
    for count in (10, 1_000, 9_000):
        raw = manifest() | {"status": {"state": "Running", "attempt": 1, name: STATUSES[name](count)}}
        with warm():
            for step, work in steps(raw):
                assert calls(work) < CALLS_MAX, f"{step}: {count} in {name}"


def test_ranges_hold_no_more_numbers_than_a_job_has_nodes() -> None:
    assert len(ranges.parse("0-9999," * 9_000)) <= 10_001
    assert calls(lambda: ranges.parse("0-9999," * 8_000)) < CALLS_MAX


def test_a_plan_takes_linear_time_in_the_nodes_of_the_job() -> None:
    """A plan must take linear time in the nodes: counting all nodes for each would take 5 s for 10,000 nodes."""
    taken = []
    for nodes in (500, 5_000):
        raw = manifest(nodes=nodes) | {"status": {"state": "Running", "attempt": 1, "startedNodes": f"0-{nodes - 1}"}}
        parsed, _ = validation.parse(raw)
        taken.append(calls(partial(plan, parsed, Observed(service=True), START)))
    assert taken[1] < 12 * taken[0]


def test_the_command_of_a_job_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job's command must be searched once: reading 9,000 words several times blocks the event loop for 250 ms."""
    read = 0
    search = command.of_container

    def counted(words: list[str]) -> command.Command:
        nonlocal read
        read += 1
        return search(words)

    monkeypatch.setattr(command, "of_container", counted)
    parsed, problems = validation.parse(manifest(container={"command": ["torchrun", *(["x"] * 9_000)]}), hints=False)
    plan(parsed, Observed(), START, problems=problems)
    assert read == 1


def test_launchers_that_start_each_other_are_followed_only_up_to_a_limit() -> None:
    """Launchers that start each other must be followed up to a limit: 300 of them copy 2,500 words 300 times."""
    assert command.read(["srun", "mpirun", "python", "train.py"]).script == "train.py"
    assert command.read([*["mpirun"] * 300, "python", "train.py"]) == command.Command()


def test_long_json_is_parsed_outside_the_event_loop() -> None:
    """Long JSON must be parsed in a thread: to cut the nesting of 1.5 MB takes 0.3 s."""
    threads: list[int] = []

    def read(content: bytes) -> int:
        threads.append(threading.get_ident())
        return len(content)

    async def both() -> None:
        assert await read_json(read, b"x" * READ_AT_ONCE) == READ_AT_ONCE
        assert await read_json(read, b"x" * (READ_AT_ONCE + 1)) == READ_AT_ONCE + 1

    asyncio.run(both())
    assert threads[0] == threading.get_ident() != threads[1]


def test_other_tasks_run_while_the_objects_of_a_page_are_stored() -> None:
    """Other tasks must run while the up to 200 objects of a page are stored, each of which may take 10 ms."""
    turns, jobs = 0, Jobs(lambda _key: None)

    async def pages() -> AsyncIterator[Page]:
        made = [manifest(f"j{i}") for i in range(40)]
        for number, raw in enumerate(made):
            raw["metadata"] |= {"uid": f"u{number}", "resourceVersion": "1"}
        yield Page(made, "1")

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def both() -> None:
        other = asyncio.create_task(count())
        await listing.take(pages(), jobs, jobs.put)
        other.cancel()

    asyncio.run(both())
    assert len(jobs) == 40
    assert turns >= 40 // listing.PUT_AT_ONCE


def test_a_list_takes_no_more_memory_however_many_jobs_do_not_fit() -> None:
    """A list must take no more memory, however many jobs do not fit: a user may create 200,000 small jobs."""
    limits = storage.StoredLimits(0, 0, 0, 0, 0, cut=100 * storage.OF_A_JOB, cut_in_namespace=100 * storage.OF_A_JOB)

    def peak_bytes(count: int) -> int:
        jobs = Jobs(lambda _key: None, limits=limits)

        async def pages() -> AsyncIterator[Page]:
            for first in range(0, count, 200):
                names = (f"j{number}" for number in range(first, first + 200))
                items = [manifest(name) for name in names]
                for raw in items:
                    raw["metadata"] |= {"uid": raw["metadata"]["name"], "resourceVersion": "1"}
                yield Page(items, "1")

        tracemalloc.start()
        try:
            asyncio.run(listing.take(pages(), jobs, jobs.put))
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak_bytes(200)  # fills caches, and imports modules
    assert peak_bytes(10_000) < 1.2 * peak_bytes(1_000)
