"""A slow job delays no other job, and an overloaded API server is not made worse. All tests are in virtual time."""

import asyncio
import collections
import contextlib
import datetime as dt
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slow_server import SlowServer, Town, play
from virtual_time import START

from ddpjob_operator.job import api
from ddpjob_operator.kube.api.client import ApiError
from ddpjob_operator.kube.api.in_flight import InFlight
from ddpjob_operator.kube.ports.receive import Sender
from ddpjob_operator.kube.work.job_state import JobState
from ddpjob_operator.observed.reports import Report
from ddpjob_operator.plan.actions import Plan

# Seconds of one round trip; a small job needs four of them in sequence until it is running.
QUICK = 0.01


def in_namespace(name: str, slow: dict[str, float]) -> SlowServer:
    """Return a server where these verbs take `seconds` in this namespace, and all other requests QUICK."""
    return SlowServer(lambda verb, path: slow.get(verb, QUICK) if f"/namespaces/{name}/" in path else QUICK)


def of_the_big_job(slow: dict[str, float]) -> SlowServer:
    """Return a server where these verbs take `seconds` for pods of the job `big`, and all other requests QUICK."""
    return SlowServer(lambda verb, path: slow.get(verb, QUICK) if "/pods/big-" in path else QUICK)


async def small_jobs_start(town: Town, *namespaces: str) -> float:
    """Apply ten jobs of two nodes; return the seconds until the last of them has its pods."""
    for number in range(10):
        town.apply(namespaces[number % len(namespaces)], f"small-{number}", 2)
    places = [(namespaces[number % len(namespaces)], f"small-{number}") for number in range(10)]
    return await town.until(lambda: all(town.pods(*place) == 2 for place in places), 60)


def test_small_jobs_start_at_once_next_to_a_job_of_a_thousand_pods() -> None:
    """A small job must start at once, and not wait half a minute for the thousand pods of another job."""

    async def story() -> None:
        town = Town(of_the_big_job({"create": 0.5}))
        town.apply("team", "big", 1000)
        await asyncio.sleep(3)
        assert await small_jobs_start(town, "team", "other") < 2
        await town.until(lambda: town.pods("team", "big") == 1000, 90)

    play(story)


@pytest.mark.parametrize(
    ("slow", "jobs", "nodes"),
    [
        ({"create": 10.0}, 60, 20),
        ({"replace": 31.0}, 60, 20),
        ({"create": 25.0, "replace": 25.0, "get": 25.0}, 60, 20),
    ],
    ids=str,
)
def test_a_slow_webhook_in_one_namespace_delays_no_other_namespace(slow, jobs, nodes):
    """A slow webhook in one namespace must delay no other namespace, nor make the liveness probe restart the
    operator."""

    async def story() -> None:
        town = Town(in_namespace("slow", slow))
        for number in range(jobs):
            town.apply("slow", f"job-{number}", nodes)
        await asyncio.sleep(2)
        assert await small_jobs_start(town, "team") < 2
        for _ in range(3):
            await asyncio.sleep(240)
            assert town.why_unhealthy() == ""
        if all(seconds < 30 for seconds in slow.values()):
            assert town.pods("slow"), "it goes on meanwhile"

    play(story)


# On a real API server a write of the status takes twice as long as a create of a pod (bench/results).
STORM = {"create": 0.08, "delete": 0.08, "get": 0.08, "list": 0.08, "replace": 0.16}


def test_a_job_of_one_pod_gets_it_within_a_second_if_five_hundred_are_applied_at_once() -> None:
    async def story() -> None:
        town = Town(SlowServer(lambda verb, _path: STORM[verb]))
        for number in range(500):
            town.apply("team", f"job-{number}", 8)
        await asyncio.sleep(2)
        town.apply("team", "one", 1)
        await town.until(lambda: town.pods("team", "one") == 1, 1)

    play(story)


def test_a_restarting_job_does_not_wait_behind_many_new_jobs() -> None:
    """A restart must come before new jobs, because its ranks are idle until their pods are created."""

    async def story(others: int) -> None:
        town = Town(SlowServer(lambda verb, _path: STORM[verb]))
        town.apply("team", "trains", 8)
        await town.until(lambda: town.pods("team", "trains") == 8, 3)
        town.run_pods("team")
        await town.until(lambda: town.states("team")["Running"] == 1, 3)
        for number in range(others):
            town.apply("team", f"job-{number}", 8)
        await asyncio.sleep(2)
        town.lose_pod("team", "trains-1-3")
        took.append(await town.until(lambda: town.pods("team", "trains-2") == 8, 20))

    took: list[float] = []
    play(partial(story, 0))
    play(partial(story, 200))
    alone, amid = took
    assert amid < alone + 1


def test_a_waiting_job_stops_as_soon_as_it_is_suspended() -> None:
    async def story() -> None:
        town = Town(SlowServer(lambda verb, _path: STORM[verb]))
        for number in range(100):
            town.apply("team", f"job-{number}", 40)
        await town.until(lambda: town.pods("team", "job-99") == 1, 5)
        await asyncio.sleep(1)
        assert town.pods("team", "job-99") == 1, "the others are many"
        town.apply("team", "job-99", 40, suspend=True)
        await town.until(lambda: town.pods("team", "job-99") == 0, 1)

    play(story)


def test_writing_the_running_status_does_not_delay_the_pods_of_other_jobs() -> None:
    """A status write must wait for pods of other jobs, because it costs the API server as much as two creates."""
    took: list[float] = []

    async def story(*, pods_run: bool) -> None:
        town = Town(SlowServer(lambda _verb, _path: 0.1))
        began = town.seconds
        for number in range(60):
            town.apply("team", f"job-{number}", 8)
        while town.pods("team") < 480:
            await asyncio.sleep(0.02)
            if pods_run:
                town.run_pods("team")
        took.append(town.seconds - began)
        if pods_run:
            town.run_pods("team")
            await town.until(lambda: town.states("team") == {"Running": 60}, 1)

    play(partial(story, pods_run=False))
    play(partial(story, pods_run=True))
    alone, telling = took
    assert telling < 1.05 * alone


@pytest.mark.parametrize("nodes", [8, 100])
def test_a_new_job_gets_its_pods_in_batches_and_a_restart_all_at_once(nodes: int) -> None:
    """A new job must get its pods in batches, so that other jobs get theirs. A restart gets all pods at once."""

    async def story() -> None:
        town = Town(SlowServer(lambda _verb, _path: QUICK))
        turns: list[int] = []
        execute = town.operator.reconciler.executor.execute

        async def counted(job: api.DDPJob, todo: Plan, state: JobState) -> bool:
            before = town.pods("team")
            is_complete = await execute(job, todo, state)
            if made := town.pods("team") - before:
                turns.append(made)
            return is_complete

        town.operator.reconciler.executor.execute = counted  # type: ignore[method-assign]
        town.apply("team", "trains", nodes)
        await town.until(lambda: town.pods("team") == nodes, 5)
        await asyncio.sleep(1)
        assert turns == {8: [1, 7], 100: [1, 8, 16, 32, 43]}[nodes]
        town.run_pods("team")
        await town.until(lambda: town.states("team")["Running"] == 1, 5)
        turns.clear()
        town.lose_pod("team", "trains-1-3")
        await town.until(lambda: town.pods("team", "trains-2") == nodes, 5)
        await asyncio.sleep(1)
        assert [made for made in turns if made > 0] == [nodes]

    play(story)


def test_after_a_refused_first_pod_no_other_is_tried_and_the_next_reconcile_starts_with_one() -> None:
    """After a refused pod no other may be tried: without quota, a job of 1,000 pods would send 1,000 requests."""

    async def story() -> None:
        tried: list[int] = []

        class Full(SlowServer):
            async def create(self, path: str, body: dict[str, Any], params: Any = None) -> dict[str, Any]:
                if path.endswith("/pods"):
                    tried.append(len(town.server.done))
                    raise ApiError(403, "Forbidden", "exceeded quota")
                return await super().create(path, body, params)

        town = Town(Full(lambda _verb, _path: QUICK))
        town.apply("team", "big", 1000)
        await asyncio.sleep(20)
        assert 2 <= len(tried) <= 6, "after 1, 2, 4 and 8 s"

    play(story)


def test_running_is_reported_in_time_while_pods_of_other_jobs_are_always_being_created() -> None:
    async def story() -> None:
        server = SlowServer(lambda verb, _path: 0.4 if verb == "create" else QUICK)
        town = Town(server)
        town.apply("team", "small", 1)
        await town.until(lambda: town.pods("team") == 1, 2)
        town.apply("team", "big", 1000)
        await asyncio.sleep(7)  # after 7 s the writes that follow the first pod are done
        town.run_pods("team")
        took = await town.until(lambda: town.states("team")["Running"] == 1, 60)
        assert took < 1, "it has its turn between two batches of the others"
        assert town.pods("team") < 400, "the others were not made yet"

    play(story)


def test_running_is_reported_at_once_while_creates_hang_in_a_webhook() -> None:
    """While a create hangs in a webhook, status writes must continue in its namespace and in others."""

    async def story() -> None:
        town = Town(of_the_big_job({"create": 25.0}))
        town.apply("team", "big", 1000)
        town.apply("team", "small", 1)
        town.apply("other", "small", 1)
        await asyncio.sleep(3)
        town.run_pods("team")
        town.run_pods("other")
        for namespace in ("team", "other"):
            await town.until(lambda of=namespace: town.states(of)["Running"] == 1, 0.2)  # type: ignore[misc]

    play(story)


def test_slow_deletes_of_one_job_delay_no_other() -> None:
    """Slow deletes of one job must delay no other job: the API server throttles a client with a thousand deletes."""

    async def story() -> None:
        server = of_the_big_job({"delete": 0.5})
        town = Town(server)
        town.apply("team", "big", 1000)
        await town.until(lambda: town.pods("team", "big") == 1000, 30)
        town.apply("team", "big", 1000, suspend=True)
        await asyncio.sleep(1)
        assert server.under_way <= 10
        assert await small_jobs_start(town, "team") < 2
        await town.until(lambda: town.pods("team", "big") == 0, 90)

    play(story)


def test_a_job_that_is_suspended_during_slow_pod_creation_stops_soon() -> None:
    """A suspended job must stop soon, and not when all its pods are created: a webhook may take ten minutes."""

    async def story() -> None:
        town = Town(in_namespace("slow", {"create": 10.0}))
        town.apply("slow", "big", 1000)
        await asyncio.sleep(60)
        made = town.pods("slow", "big")
        assert made >= 25, "eight at a time, after the Service and the first one"
        town.apply("slow", "big", 1000, suspend=True)
        await town.until(lambda: town.pods("slow", "big") == 0, 40)

    play(story)


def test_progress_of_many_jobs_is_written_ten_times_a_second_and_delays_nothing() -> None:
    """Progress must be written at most ten times a second, so that starts and failures need not wait."""

    async def story() -> None:
        server = SlowServer(lambda _verb, _path: QUICK)
        town = Town(server)
        written = START.isoformat().replace("+00:00", "Z")
        for number in range(300):
            progress = {"step": 1, "attempt": 1, "updated": written}
            status = {"state": "Running", "attempt": 1, "startTime": written, "attemptTime": written}
            town.apply("team", f"job-{number}", 1, status | {"progress": progress})
        await town.until(lambda: town.pods("team") == 300, 10)
        await asyncio.sleep(20)

        def all_report(step: int) -> None:
            now = START + dt.timedelta(seconds=int(asyncio.get_running_loop().time()))
            for number in range(300):
                sender = Sender("team", f"job-{number}", node_rank=0, attempt=1)
                town.operator.report(sender, Report(step=step, attempt=1, received_at=now))

        all_report(2)  # the first report of an attempt is written at once, because it shows the start-up time
        await asyncio.sleep(60)
        before = len(server.done)
        all_report(3)
        await asyncio.sleep(12)
        assert await small_jobs_start(town, "team") < 0.5
        await asyncio.sleep(40)
        writes = [at for at, verb, path in server.done[before:] if verb == "replace" and "/job-" in path]
        assert len(writes) == 300, "each once"
        assert all(sum(at <= other < at + 1 for other in writes) <= 11 for at in writes), "sent 0.1 s apart, at least"

    play(story)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.01, 20)), max_size=120),
    st.lists(st.integers(0, 119), max_size=20),
)
def test_the_limit_of_requests_in_flight_holds_even_if_some_are_cancelled(calls, cancelled):
    """A cancelled request must free its slot. Otherwise the limit would shrink until the operator restarts."""
    served: list[int] = []

    async def story() -> None:
        in_flight, under_way = InFlight(total=6, of_namespace=4, quick_seconds=1.0), collections.Counter[str]()
        quick: set[int] = set()

        async def call(number: int, namespace: str, seconds: float) -> None:
            async with in_flight.place(namespace):
                under_way[namespace] += 1
                quick.add(number)
                assert under_way[namespace] <= 4
                assert len(quick) <= 6
                try:
                    await asyncio.sleep(min(seconds, 0.99))
                    quick.remove(number)  # from now on the call counts as slow, or it has ended
                    await asyncio.sleep(max(0.0, seconds - 0.99))
                finally:
                    quick.discard(number)
                    under_way[namespace] -= 1
            served.append(number)

        tasks = [asyncio.create_task(call(number, *one)) for number, one in enumerate(calls)]
        await asyncio.sleep(0.005)
        for number in cancelled:
            if number < len(tasks):
                tasks[number].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert all(task.cancelled() or task.exception() is None for task in tasks)
        async with contextlib.AsyncExitStack() as all_places:
            for namespace in "abbccc":
                await all_places.enter_async_context(in_flight.place(namespace))

    play(story)
    assert set(served) >= set(range(len(calls))) - set(cancelled)


JOBS, NODES = 20, 8
AFTER_SECONDS = 5.0


def test_while_every_write_is_rejected_each_job_retries_as_rarely_as_the_server_demands() -> None:
    """While the server rejects every write, each of twenty jobs must retry only as often as the server allows."""

    async def story() -> None:
        turned_away: dict[str, list[float]] = collections.defaultdict(list)
        at_recovery = 0.0

        def delay(verb: str, path: str) -> float:
            now = asyncio.get_running_loop().time()
            if now < at_recovery and verb in ("create", "replace", "delete"):
                turned_away[path.rpartition("/namespaces/")[2]].append(now)
                raise ApiError(429, "TooManyRequests", "slow down", AFTER_SECONDS)
            return 0.01

        server = SlowServer(delay)
        town = Town(server)
        at_recovery = asyncio.get_running_loop().time() + 60
        for number in range(JOBS):
            town.apply("team", f"job-{number}", NODES)
        await asyncio.sleep(60)
        assert town.pods("team") == 0
        assert len(turned_away) == JOBS, "only the first write of each job is tried"
        waits = [later - earlier for times in turned_away.values() for earlier, later in pairwise(times)]
        assert len(waits) >= JOBS
        assert min(waits) >= AFTER_SECONDS
        began = len(server.done)
        await town.until(lambda: town.pods("team") == JOBS * NODES, 60)
        await asyncio.sleep(10)
        writes = collections.Counter(verb for _, verb, path in server.done[began:] if "/events/" not in path)
        assert writes["create"] == JOBS * (NODES + 1), "8 pods and a Service for each job, and no second try"
        assert writes["replace"] <= 3 * JOBS

    play(story)
