"""Two operators never act at the same time, whatever happens to requests and clocks. After a failure one of them acts
again soon."""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
from direct_client import DirectClient
from hypothesis import given, settings
from hypothesis import strategies as st
from model_api import ModelApi
from slow_server import play
from wire import GOOD, Fate, Wire

from ddpjob_operator.kube.api.client import ApiError
from ddpjob_operator.kube.api.runtime import Runtime
from ddpjob_operator.kube.lease import Candidate, Durations, Election, Lease
from ddpjob_operator.kube.settings import OperatorSettings

START = 70_000.25  # an arbitrary start value of the clock
DURATIONS = Durations()  # lease 15 s, renewal deadline 10 s, retry period 2 s
OURS, THEIRS = "a", "b"


# ------------------------------------------------------------------------------------------------ one operator


def candidate() -> Candidate:
    return Candidate(OURS, DURATIONS)


def lease(version: int, holder: str = THEIRS, seconds: float = 15.0) -> Lease:
    return Lease(str(version), holder, seconds)


@pytest.mark.parametrize("holder", ["", OURS])
def test_a_free_or_own_lease_is_taken_at_once(holder: str) -> None:
    one = candidate()
    one.saw(lease(1, holder), START)
    assert one.may_take(START)
    assert one.leader(START) == ""


WAITS: dict[str, tuple[list[tuple[float, Lease | None]], float]] = {
    "its holder is silent": ([(0, lease(1)), (14.9, lease(1))], 15),
    "its holder renews it": ([(10 * version, lease(version)) for version in range(10)], 90 + 15),
    "its holder has promised another duration": ([(0, lease(1, seconds=60))], 60),
    "somebody has deleted it, and its holder may not know": ([(0, lease(1)), (20, None)], 35),
    "there is none in a new cluster": ([(look, None) for look in range(0, 16, 3)], 15),
}


@pytest.mark.parametrize(("seen", "free_at"), WAITS.values(), ids=WAITS)
def test_a_lease_is_taken_only_after_it_did_not_change_for_its_whole_duration(seen, free_at):
    one = candidate()
    assert not one.may_take(START + 1000), "nothing was seen"
    for at, there in seen:
        one.saw(there, START + at)
        assert one.may_take(START + at) == (at >= free_at)
    assert not one.may_take(START + free_at - 0.1)
    assert one.may_take(START + free_at)


def test_an_absent_lease_is_not_trusted_if_it_was_not_read_for_a_while() -> None:
    """An operator that was cut off must wait before it takes an absent Lease: another one may have created it."""
    one, other = candidate(), Candidate(THEIRS, DURATIONS)
    one.saw(None, START)
    other.took(lease(1), START + 50, START + 51)
    one.saw(None, START + 52)
    assert not one.may_take(START + 52)
    for look in range(2, 15, 2):
        one.saw(None, START + 52 + look)
        assert not one.may_take(START + 52 + look)
    assert other.held_until < START + 67
    assert one.may_take(START + 67)


def test_the_time_of_the_holder_counts_from_its_request_and_not_from_the_answer() -> None:
    one = candidate()
    one.took(lease(2, OURS), asked_at=START, now=START + 3)
    assert one.held_until == START + 10


@pytest.mark.parametrize("now_there", [lease(3, THEIRS), lease(3, ""), None])
def test_a_holder_that_sees_another_holder_stops_at_once(now_there: Lease | None) -> None:
    one = candidate()
    one.took(lease(2, OURS), START, START)
    one.saw(now_there, START + 1)
    assert one.held_until < START


def test_a_change_in_our_name_counts_from_the_request_of_the_previous_state() -> None:
    one = candidate()
    one.saw(lease(1, OURS), START + 1, asked_at=START)
    assert one.held_until < START, "it may be as old as can be"
    one.saw(lease(1, OURS), START + 4, asked_at=START + 3)
    assert one.held_until < START, "nothing has changed"
    one.saw(lease(2, OURS), START + 7, asked_at=START + 6)
    assert one.held_until == START + 3 + 10
    one.saw(lease(3, THEIRS), START + 9, asked_at=START + 8)
    assert one.held_until < START
    one.saw(lease(4, OURS), START + 31, asked_at=START + 30)
    assert one.held_until < START + 31, "long ago"


def test_the_leader_is_known_until_it_has_been_silent_for_too_long() -> None:
    one = candidate()
    one.saw(lease(1), START)
    assert [one.leader(START + seconds) for seconds in (14.9, 15)] == [THEIRS, ""]


def test_lease_durations_default_to_those_of_client_go() -> None:
    assert OperatorSettings.read({}).lease == Durations(15, 10.0, 2.0)
    short = {"DDPJOB_LEASE_SECONDS": "4", "DDPJOB_LEASE_RENEW_SECONDS": "2.5", "DDPJOB_LEASE_RETRY_SECONDS": "0.4"}
    assert OperatorSettings.read(short).lease == Durations(4, 2.5, 0.4)


def server() -> ModelApi:
    """Return an API server with a Lease that nobody holds."""
    api = ModelApi()
    api.put("leases", {"metadata": {"namespace": "ops", "name": "op", "uid": "u1"}, "spec": {}})
    return api


def holder(api: ModelApi) -> str:
    return str(api.all("leases")[0]["spec"]["holderIdentity"])


class Way(Wire, DirectClient):
    """The connection of one operator to the server."""

    def __init__(self, api: ModelApi, fates: Callable[[], Fate] = lambda: GOOD) -> None:
        Wire.__init__(self, fates)
        DirectClient.__init__(self, api)

    async def request(self, *words: Any) -> Any:
        return await self.send(lambda: self.answer(*words))


class Process:
    """Operator with its Leader and its own clock."""

    def __init__(self, way: Way, name: str, *, offset: float = 0.0, rate: float = 1.0) -> None:
        loop = asyncio.get_running_loop()
        client: Any = way
        runtime = Runtime(clock=lambda: offset + rate * loop.time())
        self.leader = Election(client, "ops", "op", name, DURATIONS, runtime=runtime)
        self.task = asyncio.ensure_future(self.leader.run())

    async def end(self) -> None:
        """End the operator as SIGKILL does."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        # A process that has ended holds no Lease.
        self.leader._candidate.held_until = float("-inf")


@contextlib.asynccontextmanager
async def two() -> Any:
    """Return two operators. `a` is the leader."""
    api = server()
    ways = Way(api), Way(api)
    a = Process(ways[0], "a", offset=START)
    await asyncio.wait_for(a.leader.gained(), 1)
    b = Process(ways[1], "b", offset=-START)
    await asyncio.sleep(1)
    try:
        yield api, ways, a, b
    finally:
        await a.end()
        await b.end()


def never() -> Fate:
    return Fate(lost=True)


def cut() -> Fate:
    return Fate(there=1e6, lost=True)


def seconds() -> float:
    return asyncio.get_running_loop().time()


# ------------------------------------------------------------------------------------------------ two operators


def test_one_of_two_operators_leads_and_stays_leader() -> None:
    async def story() -> None:
        async with two() as (api, _, a, b):
            for _ in range(100):
                await asyncio.sleep(1)
                assert (a.leader.holds(), b.leader.holds()) == (True, False)
            writes = [change.object["spec"] for change in api.log["leases"][1:]]
            assert {spec["holderIdentity"] for spec in writes} == {"a"}, "who stands by writes nothing"
            assert writes[-1]["leaseTransitions"] == 1

    play(story)


def test_after_a_lease_release_the_other_operator_leads_within_two_retries() -> None:
    async def story() -> None:
        async with two() as (api, _, a, b):
            a.task.cancel()
            await a.leader.release()
            assert holder(api) == ""
            assert await asyncio.wait_for(b.leader.gained(), 2 * DURATIONS.retry_seconds) == "", "it has let go"

    play(story)


def test_a_lease_is_released_even_if_a_renewal_arrives_meanwhile() -> None:
    """The Lease must be released even if a renewal arrives meanwhile and changes the version in the release."""

    async def story() -> None:
        async with two() as (api, _, a, b):
            a.task.cancel()
            asyncio.get_running_loop().call_later(GOOD.there * 1.5, api.put, "leases", api.all("leases")[0])
            await a.leader.release()
            assert holder(api) == ""
            await asyncio.wait_for(b.leader.gained(), 2 * DURATIONS.retry_seconds)

    play(story)


def test_a_leader_that_is_cut_off_stops_before_the_other_starts() -> None:
    async def story() -> None:
        async with two() as (_, ways, a, b):
            ways[0].fates = cut
            began = seconds()
            await a.leader.lost()
            stopped = seconds()
            assert stopped - began <= 10
            await b.leader.gained()
            assert seconds() - stopped >= 3
            ways[0].fates = lambda: GOOD
            await asyncio.sleep(60)
            assert (a.leader.holds(), b.leader.holds()) == (False, True)

    play(story)


def test_answers_that_always_take_too_long_lose_the_lease_in_time() -> None:
    async def story() -> None:
        async with two() as (_, ways, a, _b):
            ways[0].fates = lambda: Fate(back=DURATIONS.try_seconds)
            began = seconds()
            await a.leader.lost()
            assert seconds() - began <= 10

    play(story)


def test_a_hanging_renewal_is_followed_by_another_in_time() -> None:
    async def story() -> None:
        for hangs in ([never()], [GOOD, never()]):
            async with two() as (_, ways, a, _b):
                fates = iter(hangs)
                ways[0].fates = lambda fates=fates: next(fates, GOOD)
                for _ in range(300):
                    await asyncio.sleep(0.1)
                    assert a.leader.holds()

    play(story)


def test_the_reason_why_the_lease_cannot_be_taken_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    class Forbidden(Way):
        async def get(self, path: str, params: Any = None) -> dict[str, Any]:
            raise ApiError(403, "Forbidden", 'leases "op" is forbidden')

    async def story() -> None:
        process = Process(Forbidden(server()), "a")
        await asyncio.sleep(60)
        assert not process.leader.holds()
        await process.end()

    with caplog.at_level(logging.WARNING):
        play(story)
    assert [record.getMessage() for record in caplog.records] == [
        'the Lease ops/op cannot be read or renewed, trying again: 403 Forbidden: leases "op" is forbidden'
    ]


def test_a_release_without_an_answer_does_not_delay_the_exit() -> None:
    async def story() -> None:
        async with two() as (_, ways, a, b):
            a.task.cancel()
            ways[0].fates = cut
            began = seconds()
            await a.leader.release()
            assert seconds() - began <= DURATIONS.try_seconds + 0.1
            assert not a.leader.holds()
            await asyncio.wait_for(b.leader.gained(), 20)

    play(story)


# ------------------------------------------------------------------------------------------------ any interleaving

TROUBLE_SECONDS, QUIET_SECONDS = 120.0, 60.0
fates = st.one_of(
    st.just(GOOD),
    st.just(Fate(there=40.0, lost=True)),
    st.builds(
        Fate,
        there=st.sampled_from([0.0, 0.02, 1.0, 2.9, 9.0, 16.0, 40.0]),
        back=st.sampled_from([0.0, 0.02, 1.0, 2.9]),
        lost=st.booleans(),
    ),
)
# Each fault lasts for seconds, because the loss of one request never costs the Lease.
weather = st.lists(st.tuples(st.floats(0.5, 15.0), fates), min_size=10, max_size=16)
# Clocks run up to 15 % too fast or too slow. DURATIONS allow for that: 15 s against 10 s.
operators = st.fixed_dictionaries(
    {
        "starts": st.floats(0, 30),
        "offset": st.floats(-1e5, 1e5),
        "rate": st.floats(0.85, 1.15),
        "weather": weather,
        "ends": st.sampled_from(["", "", "killed", "released"]),
        "lives": st.floats(0, TROUBLE_SECONDS),
    }
)


@settings(max_examples=60)
@given(
    lives=st.lists(operators, min_size=2, max_size=3), deleted_at=st.one_of(st.none(), st.floats(0, TROUBLE_SECONDS))
)
def test_two_operators_never_hold_the_lease_at_once_and_one_holds_it_after_the_faults_end(lives, deleted_at):
    async def story() -> None:
        api = server()
        alive: dict[str, Process] = {}
        tasks = [asyncio.ensure_future(_live(api, alive, f"op-{i}", life)) for i, life in enumerate(lives)]
        if deleted_at is not None:
            asyncio.get_running_loop().call_later(deleted_at, api.objects["leases"].clear)
        await asyncio.sleep(TROUBLE_SECONDS)
        # A delayed request may arrive up to 40 s later; from then on there are no faults.
        await asyncio.sleep(40 + QUIET_SECONDS)
        for task in tasks:
            assert not task.done() or task.exception() is None, task.exception()
        assert sum(process.leader.holds() for process in alive.values()) == min(1, len(alive)), "one leads in the end"
        for task in (*tasks, *(process.task for process in alive.values())):
            task.cancel()
        await asyncio.gather(*tasks, *(p.task for p in alive.values()), return_exceptions=True)

    play(story)


async def _live(api: ModelApi, alive: dict[str, Process], name: str, life: dict[str, Any]) -> None:
    await asyncio.sleep(life["starts"])
    ends = list(itertools.accumulate(length for length, _ in life["weather"]))

    def fate() -> Fate:
        found = (fate for end, (_, fate) in zip(ends, life["weather"], strict=True) if seconds() < end)
        return next(found, GOOD) if seconds() < TROUBLE_SECONDS else GOOD

    process = alive[name] = Process(Way(api, fate), name, offset=life["offset"], rate=life["rate"])
    watching = asyncio.ensure_future(_watch(alive, name))
    try:
        if not life["ends"]:
            await watching
        await asyncio.wait({watching}, timeout=life["lives"])
        if watching.done():
            watching.result()
        process.task.cancel()
        await asyncio.gather(process.task, return_exceptions=True)
        if life["ends"] == "released":
            await process.leader.release()
        await process.end()
        del alive[name]
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _watch(alive: dict[str, Process], name: str) -> None:
    """Fail if this operator begins to hold the Lease while another one holds it."""
    while True:
        await alive[name].leader.gained()
        holders = [other for other, process in alive.items() if process.leader.holds()]
        assert holders == [name], f"{holders} act at the same time: two groups of pods would train into one checkpoint"
        await alive[name].leader.lost()
