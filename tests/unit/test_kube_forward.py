"""Reports that reach an operator which does not lead: the leader answers them, and none goes round in circles."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import pytest

from ddpjob_operator.kube.api.tokens import BadTokenError, BoundPod
from ddpjob_operator.kube.ports import forward
from ddpjob_operator.kube.ports.forward import Forwarder
from ddpjob_operator.kube.ports.receive import PATH, Receiver, Sender
from ddpjob_operator.observed.reports import Report

POD = BoundPod("default", "digits-1-0", "uid-0")
TOKEN = "token-of-rank-0"


@dataclass
class One:
    """An operator's receiver."""

    reports: list[Report] = field(default_factory=list)
    leader: str | None = None
    """What it takes for the leader's address; None: itself."""
    address: str = ""


@asynccontextmanager
async def receiving(one: One) -> AsyncIterator[None]:
    async def verify(token: str) -> BoundPod:
        if token != TOKEN:
            raise BadTokenError("the token's signature is wrong")
        return POD

    def locate(_: BoundPod) -> Sender:
        return Sender("default", "digits", 0, attempt=1)

    forwarder = Forwarder(lambda: one.leader)
    receiver = Receiver(verify, locate, lambda _, report: one.reports.append(report), forward=forwarder.forward)
    await receiver.start("127.0.0.1", 0)
    one.address = f"127.0.0.1:{receiver.port}"
    try:
        yield
    finally:
        await receiver.stop()
        await forwarder.close()


async def post(one: One, step: int, token: str = TOKEN, body: str = "") -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {token}"}
    url, data = f"http://{one.address}{PATH}", body or f'{{"step": {step}}}'
    async with aiohttp.ClientSession() as session, session.post(url, data=data, headers=headers) as answer:
        return answer.status, answer.headers.get("Retry-After", "")


def with_two(story: Callable[[One, One], Awaitable[None]]) -> None:
    """A leader, and one that stands by."""

    async def run() -> None:
        leader, standby = One(), One()
        async with receiving(leader), receiving(standby):
            standby.leader = leader.address
            await story(leader, standby)

    asyncio.run(run())


def test_a_report_reaches_the_leader_through_any_operator() -> None:
    async def story(leader: One, standby: One) -> None:
        assert await post(standby, 7) == (204, "")
        assert await post(leader, 8) == (204, "")
        assert [report.step for report in leader.reports] == [7, 8]
        assert standby.reports == []

    with_two(story)


def test_the_leaders_refusal_is_the_answer() -> None:
    async def story(leader: One, standby: One) -> None:
        assert (await post(standby, 0, body="no JSON"))[0] == 400

    with_two(story)


def test_a_forged_report_is_refused_where_it_arrives() -> None:
    async def story(leader: One, standby: One) -> None:
        standby.leader = "127.0.0.1:1"  # it would not even be reached
        assert (await post(standby, 7, token="forged"))[0] == 401

    with_two(story)


def test_while_nobody_leads_the_trainer_is_asked_to_try_again() -> None:
    async def story(leader: One, standby: One) -> None:
        standby.leader = ""
        assert await post(standby, 7) == (503, "5")
        standby.leader = None
        assert await post(standby, 8) == (204, "")
        assert [report.step for report in standby.reports] == [8]

    with_two(story)


def test_two_that_take_each_other_for_the_leader_do_not_hand_a_report_round() -> None:
    async def story(leader: One, standby: One) -> None:
        leader.leader = standby.address
        assert await post(standby, 7) == (503, "5")
        assert leader.reports == standby.reports == []

    with_two(story)


def test_a_leader_that_is_gone_or_hangs_costs_the_trainer_a_bounded_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "FORWARD_SECONDS", 0.3)

    async def story(leader: One, standby: One) -> None:
        standby.leader = "127.0.0.1:1"
        assert await post(standby, 7) == (503, "5")
        hangs = await asyncio.start_server(lambda _reader, _writer: asyncio.sleep(0), "127.0.0.1", 0)
        standby.leader = f"127.0.0.1:{hangs.sockets[0].getsockname()[1]}"
        began = time.monotonic()
        assert await post(standby, 8) == (503, "5")
        assert time.monotonic() - began < 20, "it would hang for ever"
        hangs.close()

    with_two(story)


def test_no_token_is_ever_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def story(leader: One, standby: One) -> None:
        await post(standby, 7)
        standby.leader = "127.0.0.1:1"
        await post(standby, 8)

    with caplog.at_level(logging.DEBUG):
        with_two(story)
    assert TOKEN not in caplog.text
