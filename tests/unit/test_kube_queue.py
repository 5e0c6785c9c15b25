"""The schedule of reconciles: one at a time for a job, the earliest request counts, and the wait grows with each
failure."""

import asyncio

import pytest
from cancelling import running, turns, until
from slow_server import play

from ddpjob_operator.kube.api.runtime import Runtime
from ddpjob_operator.kube.work.queue import (
    BACK_OFF_SECONDS_MAX,
    QUICK_SECONDS,
    TURNS,
    Priority,
    Queue,
    RetryError,
    Schedule,
)

START = 10_000.25  # an arbitrary start value of the clock


def schedule(*requests: tuple[str, float]) -> Schedule[str]:
    made: Schedule[str] = Schedule()
    for key, at in requests:
        made.add(key, START + at)
    return made


def test_many_requests_for_one_job_cause_one_reconcile() -> None:
    jobs = schedule(("a", 0), ("a", 0), ("a", 5), ("a", 0))
    assert jobs.pop(START) == "a"
    jobs.done("a", START)
    assert jobs.pop(START + 100) is None


def test_the_earlier_of_two_requests_wins_in_either_order() -> None:
    for jobs in (schedule(("a", 60), ("a", 5)), schedule(("a", 5), ("a", 60))):
        assert jobs.next_at() == START + 5
        assert jobs.pop(START + 4.9) is None
        assert jobs.pop(START + 5) == "a"


def test_jobs_are_reconciled_in_the_order_in_which_they_are_due() -> None:
    jobs = schedule(("late", 3), ("first", 1), ("second", 1))
    assert [jobs.pop(START + 3) for _ in range(4)] == ["first", "second", "late", None]


def test_a_job_is_never_reconciled_twice_at_once() -> None:
    jobs = schedule(("a", 0))
    assert jobs.pop(START) == "a"
    jobs.add("a", START + 1)
    assert jobs.pop(START + 2) is None
    jobs.done("a", START + 2)
    assert jobs.pop(START + 2) == "a", "what was requested in the meantime is due now"


def test_a_request_during_a_reconcile_is_not_lost_when_the_reconcile_fails() -> None:
    jobs = schedule(("a", 0))
    jobs.pop(START)
    jobs.add("a", START)
    jobs.pop(START)
    wait = jobs.failed("a", START)
    assert jobs.pop(START + wait) == "a"


def test_a_reconcile_may_request_the_next_one() -> None:
    jobs = schedule(("a", 0))
    jobs.pop(START)
    jobs.done("a", START, again_at=START + 30)
    assert jobs.pop(START + 29) is None
    assert jobs.pop(START + 30) == "a"


def test_the_wait_after_failures_doubles_up_to_the_limit() -> None:
    jobs, now, waits = schedule(("a", 0)), START, []
    for _ in range(12):
        assert jobs.pop(now) == "a"
        waits.append(jobs.failed("a", now))
        now += waits[-1]
    assert waits[:4] == [0.5, 1.0, 2.0, 4.0]
    assert waits[-1] == BACK_OFF_SECONDS_MAX


@pytest.mark.parametrize(("asked", "waits"), [(7.0, 7.0), (3600.0, BACK_OFF_SECONDS_MAX)])
def test_a_failing_job_waits_as_long_as_the_server_demands_within_the_limit_despite_events(asked, waits):
    """A job must wait as long as the server demands, but at most to the limit: a proxy may say Retry-After: 3600."""
    jobs = schedule(("a", 0))
    jobs.pop(START)
    assert jobs.failed("a", START, at_least=asked) == waits
    jobs.add("a", START + 1)
    assert jobs.pop(START + waits - 0.1) is None
    assert jobs.pop(START + waits) == "a"


def test_a_success_ends_the_back_off() -> None:
    jobs = schedule(("a", 0))
    for _ in range(3):
        now = jobs.next_at() or START
        jobs.pop(now)
        jobs.failed("a", now)
    now = jobs.next_at() or START
    jobs.pop(now)
    jobs.done("a", now)
    jobs.add("a", now)
    assert jobs.pop(now) == "a"
    assert jobs.failed("a", now) == 0.5


def test_one_failing_job_delays_no_other() -> None:
    jobs = schedule(("a", 0), ("b", 0))
    jobs.pop(START)
    jobs.failed("a", START)
    assert jobs.pop(START) == "b"


def test_the_longest_reconcile_is_recorded() -> None:
    jobs = schedule(("a", 0), ("b", 0))
    jobs.pop(START)
    jobs.pop(START + 5)
    assert jobs.stuck_seconds(START + 9) == 9
    assert jobs.unfinished_seconds(START + 9) == 9 + 4
    jobs.waits("a")  # it waits for its turn, so a restart of the operator would not help
    assert jobs.stuck_seconds(START + 9) == 4
    jobs.observed("a", START + 9)
    assert jobs.stuck_seconds(START + 12) == 7
    jobs.done("a", START + 12)
    assert jobs.stuck_seconds(START + 12) == 7


def test_namespaces_take_turns_however_many_jobs_are_due_in_one() -> None:
    """Namespaces must take turns, so that a job need not wait for all 5,000 jobs of another namespace."""
    jobs: Schedule[tuple[str, str]] = Schedule()
    for number in range(5000):
        jobs.add(("crowded", str(number)), START)
    jobs.add(("quiet", "job"), START + 1)
    assert ("quiet", "job") in [jobs.pop(START + 1) for _ in range(2)]


def test_kinds_of_jobs_in_a_namespace_take_turns_and_jobs_of_one_kind_wait_in_order() -> None:
    """Kinds of jobs in a namespace must take turns: a restart must not wait for hundreds of new jobs."""
    jobs: Schedule[tuple[str, str]] = Schedule(kind=lambda key: {"restarts": 0, "small": 1}.get(key[1], 4))
    for number in range(500):
        jobs.add(("team", str(number)), START)
    for name in ("small", "restarts"):
        jobs.add(("team", name), START + 1)
    assert jobs.next_at() == START
    assert [jobs.pop(START + 1) for _ in range(4)] == [("team", name) for name in ("0", "small", "restarts", "1")]


def test_further_pods_wait_behind_events_and_news_with_a_guaranteed_turn_in_eight() -> None:
    """Further pods of a large job must get one turn in eight, or a stream of new jobs would stop them."""
    jobs: Schedule[tuple[str, str]] = Schedule()
    for number in range(100):
        for priority in Priority:
            jobs.add(("team", f"{priority.name}-{number}"), START, priority)
    names = [str(jobs.pop(START)[1]).partition("-")[0] for _ in range(3 * TURNS)]  # type: ignore[index]
    assert all(names.count(priority.name) >= 3 for priority in Priority)
    assert names.count("EVENT") == 3 * (TURNS - 2)


@pytest.mark.parametrize("first", [Priority.NEWS, Priority.FURTHER_PODS])
def test_a_failure_does_not_wait_behind_earlier_news_of_its_job(first: Priority) -> None:
    jobs: Schedule[tuple[str, str]] = Schedule()
    for number in range(TURNS):
        jobs.add(("team", str(number)), START, first)
    jobs.add(("team", "7"), START + 1)
    assert jobs.pop(START + 1) == ("team", "7")
    assert ("team", "7") not in [jobs.pop(START + 1) for _ in range(TURNS)], "it was one reconcile"


def test_changes_that_a_reconcile_has_seen_itself_cause_no_further_reconcile() -> None:
    """Changes that a reconcile has made itself must cause no other one, or each restart writes its status twice."""
    jobs = schedule(("a", 0))
    assert jobs.pop(START) == "a"
    jobs.add("a", START + 1)
    assert jobs.pop(START + 1) is None
    jobs.add("a", START + 2)
    jobs.observed("a", START + 2)
    jobs.add("a", START + 9)
    jobs.done("a", START + 3)
    assert jobs.pop(START + 8) is None
    assert jobs.pop(START + 9) == "a"


def test_a_request_during_a_reconcile_is_not_delayed_by_a_later_one() -> None:
    """A request during a reconcile must be due at once, even if a later request may wait for 3 s."""
    jobs = schedule(("a", 0))
    assert jobs.pop(START) == "a"
    jobs.add("a", START)
    assert jobs.pop(START) is None
    jobs.add("a", START + 3)
    jobs.done("a", START + 1)
    assert jobs.pop(START + 1) == "a"


def test_a_namespace_has_a_limited_number_of_reconciles_at_a_time() -> None:
    jobs: Schedule[tuple[str, str]] = Schedule(of_namespace=2)
    for number in range(3):
        jobs.add(("slow", str(number)), START)
    assert [jobs.pop(START) for _ in range(3)] == [("slow", "0"), ("slow", "1"), None]
    assert jobs.next_at() is None, "nothing to wake up for"
    jobs.add(("quick", "job"), START)
    assert jobs.next_at() == START
    assert jobs.pop(START) == ("quick", "job")
    jobs.failed(("slow", "0"), START)
    assert jobs.pop(START) == ("slow", "2")


class Reconciles:
    """Fake reconciles, each of which runs until the test ends it."""

    def __init__(self) -> None:
        self.now = START
        self.seen: list[str] = []
        self.under_way = 0
        self.most = 0
        self.go = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self, key: str) -> float | None:
        self.seen.append(key)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await self.go.wait()
        self.under_way -= 1
        if self.error is not None:
            raise self.error
        return None


def test_a_job_whose_reconcile_alone_was_cancelled_is_reconciled_again() -> None:
    """If only a job's reconcile is cancelled, the job must not stay busy, or its events would have no effect."""
    tries: list[str] = []

    async def reconcile(key: str) -> None:
        tries.append(key)
        task = asyncio.current_task()
        if len(tries) == 1:
            task.cancel()
            await asyncio.sleep(0)

    async def run() -> None:
        queue: Queue[str] = Queue(Runtime())
        queue.add("digits")
        async with running(queue.run(reconcile)), asyncio.timeout(10):
            while len(tries) < 2:
                await asyncio.sleep(0.01)

    asyncio.run(run())


def test_the_number_of_simultaneous_reconciles_is_limited() -> None:
    async def run() -> Reconciles:
        reconciles = Reconciles()
        queue: Queue[str] = Queue(Runtime(clock=lambda: reconciles.now), at_a_time=3)
        for i in range(10):
            queue.add(f"job-{i}")
        async with running(queue.run(reconciles)):
            await turns(100)  # after 100 iterations every reconcile that can start has started
            reconciles.go.set()
            await until(lambda: len(reconciles.seen) == 10)
        return reconciles

    reconciles = asyncio.run(run())
    assert reconciles.most == 3
    assert sorted(reconciles.seen) == sorted(f"job-{i}" for i in range(10))


def test_a_slow_reconcile_leaves_its_place_to_others() -> None:
    async def run() -> None:
        reconciles = Reconciles()
        queue: Queue[str] = Queue(Runtime(clock=asyncio.get_running_loop().time), at_a_time=2)
        for name in ("slow", "slow too", "another"):
            queue.add(name)
        async with running(queue.run(reconciles)):
            await asyncio.sleep(QUICK_SECONDS / 2)
            assert reconciles.seen == ["slow", "slow too"]
            await asyncio.sleep(QUICK_SECONDS)
            assert reconciles.seen == ["slow", "slow too", "another"]
            reconciles.go.set()
            await asyncio.sleep(QUICK_SECONDS)
            assert queue._free == 2, "each place is given back once"

    play(run)


@pytest.mark.parametrize("error", [RetryError("the API server is away"), KeyError("a bug")])
def test_a_reconcile_that_fails_does_not_end_the_queue(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> Reconciles:
        reconciles = Reconciles()
        reconciles.error = error
        reconciles.go.set()
        queue: Queue[str] = Queue(Runtime(clock=lambda: reconciles.now))
        queue.add("a")
        queue.add("b")
        async with running(queue.run(reconciles)):
            await until(lambda: len(reconciles.seen) == 2)
        return reconciles

    assert sorted(asyncio.run(run()).seen) == ["a", "b"]
    assert ("Traceback" in caplog.text) == isinstance(error, KeyError), "only a bug of ours has a stack"
