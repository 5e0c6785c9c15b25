"""Nobody waits for somebody else's job, whatever is slow about it. All in virtual time."""

from __future__ import annotations

import asyncio
import collections
import datetime as dt
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slow_server import SlowServer, Town, play
from virtual_time import START

from ddpjob_operator.kube.good_news import ALL_LATER_SECONDS
from ddpjob_operator.kube.progress_turns import ABSENT_SECONDS, ProgressTurns
from ddpjob_operator.kube.receive import Sender
from ddpjob_operator.kube.shares import TURNS, Bounds, Line, Shares
from ddpjob_operator.kube.store import Key
from ddpjob_operator.observed.reports import Report

# What one round trip takes; a small job needs four, one after the other.
QUICK = 0.01


def in_namespace(name: str, slow: dict[str, float]) -> SlowServer:
    """Requests of these verbs take so long in this namespace, and no time elsewhere."""
    return SlowServer(lambda verb, path: slow.get(verb, QUICK) if f"/namespaces/{name}/" in path else QUICK)


def of_the_big_job(slow: dict[str, float]) -> SlowServer:
    """Requests for the pods of the job `big`."""
    return SlowServer(lambda verb, path: slow.get(verb, QUICK) if "/pods/big-" in path else QUICK)


async def small_jobs_start(town: Town, *namespaces: str) -> float:
    """How long it takes until the last of ten jobs has its two pods."""
    for number in range(10):
        town.apply(namespaces[number % len(namespaces)], f"small-{number}", 2)
    places = [(namespaces[number % len(namespaces)], f"small-{number}") for number in range(10)]
    return await town.until(lambda: all(town.pods(*place) == 2 for place in places), 60)


def test_small_jobs_start_at_once_beside_a_job_of_a_thousand_pods() -> None:
    """The pod of a small job waited for half a minute until somebody else's thousand had been created."""

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
        ({"create": 10.0}, 1, 1000),
        ({"create": 10.0}, 60, 20),
        ({"create": 31.0}, 400, 1),
        ({"replace": 10.0}, 400, 1),
        ({"replace": 31.0}, 60, 20),
        ({"list": 10.0}, 200, 1),
        ({"create": 25.0, "replace": 25.0, "get": 25.0}, 60, 20),
    ],
    ids=str,
)
def test_a_namespace_with_a_slow_webhook_slows_nobody_else_and_the_operator_is_not_stuck(
    slow: dict[str, float], jobs: int, nodes: int
) -> None:
    """All reconciles waited for one namespace's webhook; after ten minutes the probe had the operator killed."""

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


def test_jobs_of_the_same_namespace_start_beside_many_big_ones() -> None:
    async def story() -> None:
        town = Town(SlowServer(lambda verb, path: 0.5 if "/pods/big-" in path else QUICK))
        for number in range(40):
            town.apply("team", f"big-{number}", 100)
        await asyncio.sleep(2)
        assert await small_jobs_start(town, "team") < 6

    play(story)


def test_a_job_of_one_pod_has_it_within_a_second_amid_a_hundred_jobs_of_eight() -> None:
    """It waited until fifty jobs that were applied before it had begun, and then for two turns behind all of them."""

    async def story() -> None:
        town = Town(SlowServer(lambda _verb, _path: 0.1))
        for number in range(100):
            town.apply("team", f"job-{number}", 8)
            if number == 50:
                town.apply("team", "probe", 1)
        assert await town.until(lambda: town.pods("team", "probe") == 1, 60) < 1
        await town.until(lambda: town.pods("team") == 801, 7)

    play(story)


# On a real API server a status costs twice what a pod does (bench/results).
STORM = {"create": 0.08, "delete": 0.08, "get": 0.08, "list": 0.08, "replace": 0.16}


def test_jobs_of_one_pod_and_of_eight_have_their_first_within_a_second_amid_five_hundred() -> None:
    """It came after 12.6 s: until 128 jobs that were applied before had all of theirs, no other was looked at."""

    async def story() -> None:
        town = Town(SlowServer(lambda verb, _path: STORM[verb]))
        began, took = town.seconds, {}
        for number in range(500):
            town.apply("team", f"job-{number}", 8)
            if number == 250:
                town.apply("team", "one", 1)
                town.apply("team", "eight", 8)
            await asyncio.sleep(0.02)
            took |= {of: town.seconds - began for of in ("one", "eight") if of not in took and town.pods("team", of)}
        assert 5 < min(took.values()) <= max(took.values()) < 6, f"they were applied after 5 s: {took}"
        await town.until(lambda: town.pods("team") == 4009, 60)
        assert town.seconds - began < 24, "4,511 creates, 16 at a time, with and without the rule"

    play(story)


def test_a_job_of_one_pod_has_it_within_a_second_where_five_hundred_are_applied_at_once() -> None:
    async def story() -> None:
        town = Town(SlowServer(lambda verb, _path: STORM[verb]))
        for number in range(500):
            town.apply("team", f"job-{number}", 8)
        await asyncio.sleep(2)
        town.apply("team", "one", 1)
        await town.until(lambda: town.pods("team", "one") == 1, 1)

    play(story)


def test_a_job_that_restarts_does_not_wait_behind_a_flood_of_new_ones() -> None:
    """All of its ranks stand still meanwhile."""

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


def test_a_large_job_gets_on_however_many_new_ones_there_are() -> None:
    """Where first pods alone counted, an endless stream of small jobs would keep it from ever being whole."""

    async def story() -> None:
        town = Town(SlowServer(lambda verb, _path: STORM[verb]))
        town.apply("team", "big", 100)
        for number in range(500):
            if town.pods("team", "big") == 100:
                return
            town.apply("team", f"small-{number}", 1)
            await asyncio.sleep(0.01)  # their Services and pods would take all that may be under way
        raise AssertionError(f"after 5 s it has {town.pods('team', 'big')} of its 100 pods")

    play(story)


def test_a_job_that_waits_until_it_may_go_on_stops_as_soon_as_it_is_suspended() -> None:
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


@pytest.mark.parametrize("neighbours", [0, 1, 3])
def test_lines_take_turns_whatever_waits_in_the_others_and_in_other_namespaces(neighbours: int) -> None:
    """With one turn for all namespaces, two of them got each second one: in one the largest jobs never had theirs."""
    served: collections.defaultdict[str, list[Line]] = collections.defaultdict(list)

    async def story() -> None:
        shares = Shares(Bounds(total=1))

        async def call(namespace: str, number: int, line: Line) -> None:
            async with shares.turn((namespace, f"{line.name}-{number}"), line, number):
                served[namespace].append(line)
                await asyncio.sleep(1)

        calls = [(f"team-{n}", i, line) for n in range(neighbours + 1) for i in range(20) for line in Line]
        await asyncio.gather(*(call(*one) for one in calls))

    play(story)
    for lines in served.values():
        # The first is served before the others are there.
        rounds = [lines[at : at + len(TURNS)] for at in range(1, 36, len(TURNS))]
        assert all(collections.Counter(one) == collections.Counter(line for line, _ in TURNS) for one in rounds)


def test_a_namespace_whose_jobs_wait_to_go_on_is_busy_unless_all_that_is_under_way_is_slow() -> None:
    """Between two of them none is under way for a moment, and all good news that was put off would be told in it."""
    quiet: list[str] = []

    async def story() -> None:
        shares = Shares(Bounds(of_namespace=1, quick_seconds=1.0))
        shares.quiet = quiet.append
        shares.more_to_come = lambda namespace: namespace == "team"
        for namespace in ("team", "other"):
            async with shares.turn((namespace, "job")):
                await asyncio.sleep(0.5)
        assert quiet == ["other"]
        async with shares.turn(("team", "job")):
            await asyncio.sleep(0.5)
            assert shares.busy("team")
            await asyncio.sleep(1)
            assert not shares.busy("team"), "it hangs in a webhook"

    play(story)


def test_every_second_first_pod_is_of_the_smallest_job_and_every_other_of_the_one_that_has_waited_longest() -> None:
    order: list[int] = []

    async def story() -> None:
        shares = Shares(Bounds(total=1))

        async def call(size: int) -> None:
            async with shares.turn(("team", f"job-{size}"), Line.FIRST, size):
                order.append(size)
                await asyncio.sleep(1)

        await asyncio.gather(*(call(size) for size in (9, 8, 7, 3, 2, 1)))

    play(story)
    assert order == [9, 1, 8, 2, 7, 3]


def test_that_jobs_run_is_told_after_the_pods_of_the_others_are_made() -> None:
    """Each of a hundred jobs wrote that it ran while the others waited for their pods: a status costs the API server as
    much as two pods, and an event as much as one."""

    async def story() -> None:
        server = SlowServer(lambda _verb, _path: 0.1)
        town = Town(server)
        for number in range(60):
            town.apply("team", f"job-{number}", 8)
        while town.pods("team") < 480:
            await asyncio.sleep(0.02)
            town.run_pods("team")
        made = [
            f"{verb} {'event' if '/events' in path else 'job' if '/ddpjobs/' in path else ''}"
            for _, verb, path in server.done
        ]
        assert collections.Counter(made) == {"create ": 480 + 60, "replace job": 60}, "those that come before pods"
        await town.until(lambda: town.states("team") == {"Running": 60}, 1)

    play(story)


def test_that_a_job_runs_is_told_in_time_where_pods_of_others_are_always_being_made() -> None:
    async def story() -> None:
        server = SlowServer(lambda verb, _path: 0.4 if verb == "create" else QUICK)
        town = Town(server)
        town.apply("team", "small", 1)
        await town.until(lambda: town.pods("team") == 1, 2)
        town.apply("team", "big", 1000)
        await asyncio.sleep(7)  # what follows on the creation of its pod is over
        town.run_pods("team")
        took = await town.until(lambda: town.states("team")["Running"] == 1, 60)
        assert ALL_LATER_SECONDS - 1 < took < ALL_LATER_SECONDS + 1
        assert town.pods("team") < 400, "the others were not made yet"

    play(story)


def test_that_a_job_runs_is_told_at_once_beside_creates_that_hang_in_a_webhook() -> None:
    """What hangs is not waited for, and other namespaces never are."""

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


def test_the_slow_deletes_of_one_job_hold_up_no_other() -> None:
    """A thousand deletes were sent at once: the API server turns others away for so many."""

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


def test_a_job_that_is_suspended_while_its_pods_are_created_slowly_stops_soon() -> None:
    """A reconcile went on for as long as there were pods to create: ten minutes and more with a slow webhook."""

    async def story() -> None:
        town = Town(in_namespace("slow", {"create": 10.0}))
        town.apply("slow", "big", 1000)
        await asyncio.sleep(60)
        made = town.pods("slow", "big")
        assert made >= 25, "eight at a time, after the Service and the first one"
        town.apply("slow", "big", 1000, suspend=True)
        await town.until(lambda: town.pods("slow", "big") == 0, 40)

    play(story)


def test_progress_of_many_jobs_is_written_ten_times_a_second_and_nothing_waits_behind_it() -> None:
    """With 300 jobs that report, 30 writes a second stood in the way of a job that was to start, and of any failure."""

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

        all_report(2)  # the first report of an attempt says more than progress: how long the start took
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


def test_progress_of_all_jobs_together_is_written_ten_times_a_second_and_holds_up_no_start() -> None:
    """Five hundred jobs that train wrote fifty times a second, each write in the way of what is urgent."""
    turns, now, written = ProgressTurns(), 50.25, collections.Counter[int]()
    line = {("team", f"job-{n}"): START + dt.timedelta(seconds=n % 7) for n in range(500)}
    order: list[dt.datetime] = []
    due = dict.fromkeys(line, now)
    while line:
        now = min(due.values())
        key = next(k for k in due if due[k] == now)
        if wait := turns.ask(key, line[key], now):
            due[key] = now + wait
            continue
        written[int(now * 10)] += 1
        order.append(line.pop(key))
        del due[key]
    assert len(order) == 500
    assert max(written.values()) <= 2
    assert now - 50.25 < 500 / 10 + 1
    assert order[1:] == sorted(order[1:]), "the oldest first; the first of all asked when nobody was there"


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9), st.integers(0, 40)), max_size=200))
def test_never_more_than_ten_progress_writes_in_any_second(asks: list[tuple[int, int, int]]) -> None:
    turns, now = ProgressTurns(), 7.5
    went: list[float] = []
    for job, written, tenths in asks:
        now += tenths / 100
        if turns.ask(("team", str(job)), START + dt.timedelta(seconds=written), now) == 0:
            went.append(now)
    assert all(sum(at <= other < at + 1 - 1e-9 for other in went) <= 10 for at in went)


def test_a_job_that_never_comes_back_for_its_turn_holds_up_nobody() -> None:
    turns = ProgressTurns()
    assert turns.ask(("team", "a"), START, 10.0) == 0
    assert turns.ask(("team", "gone"), START - dt.timedelta(seconds=9), 10.0) > 0
    assert turns.ask(("team", "b"), START, 10.2) > 0, "it is behind the one that waits longer"
    assert turns.ask(("team", "b"), START, 10.2 + ABSENT_SECONDS) == 0


def test_jobs_that_come_late_for_their_turns_hold_up_nobody_elses_progress() -> None:
    """Twenty jobs of a namespace with a slow webhook came 5 s late each time, and all others waited 2 s for each of
    them: the progress of fifty was written every 30 s and not every 10."""
    turns, written = ProgressTurns(), {("team", f"job-{n}"): 0.0 for n in range(50)}
    written |= {("slow", f"job-{n}"): 0.0 for n in range(20)}
    due = {key: 10 + number / 7 for number, key in enumerate(written)}
    oldest = 0.0
    while (now := min(due.values())) < 300:
        key = next(k for k in due if due[k] == now)
        wait = turns.ask(key, START + dt.timedelta(seconds=int(written[key])), now)
        if not wait:
            oldest = max(oldest, now - written[key]) if key[0] == "team" and now > 30 else oldest
            written[key] = now
        due[key] = now + (wait or 10.0) + (5.0 if key[0] == "slow" else 0.005)
    assert oldest < 18


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 4), st.floats(0.01, 20)), max_size=120),
    st.lists(st.integers(0, 119), max_size=20),
)
def test_shares_keep_their_bounds_and_serve_everybody_also_where_some_give_up(
    calls: list[tuple[str, int, float]], cancelled: list[int]
) -> None:
    bounds = Bounds(total=6, of_namespace=4, of_job=2)
    served: list[int] = []

    async def story() -> None:
        shares = Shares(bounds)
        told, begun = set(), set()
        shares.quiet = told.add
        under_way: collections.Counter[object] = collections.Counter()

        async def call(number: int, key: Key, seconds: float) -> None:
            async with shares.turn(key, list(Line)[number % 3], number % 5):
                under_way.update((key, key[0]))
                begun.add(key[0])
                assert under_way[key] <= bounds.of_job
                assert under_way[key[0]] <= bounds.of_namespace
                try:
                    await asyncio.sleep(seconds)
                finally:
                    under_way.subtract((key, key[0]))
            served.append(number)

        tasks = [asyncio.create_task(call(i, (n, f"job-{j}"), s)) for i, (n, j, s) in enumerate(calls)]
        await asyncio.sleep(0.005)
        for number in cancelled:
            if number < len(tasks):
                tasks[number].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert all(t.cancelled() or t.exception() is None for t in tasks)
        assert (shares._quick, +shares._under_way, shares._waiting) == (0, collections.Counter(), {})
        assert begun <= told, "who waits until a namespace is quiet goes on"
        assert not any(map(shares.busy, "abc"))

    play(story)
    assert set(served) >= set(range(len(calls))) - set(cancelled)
