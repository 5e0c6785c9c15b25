"""/metrics over HTTP: a scraper gets its answer whatever other peers do."""

from __future__ import annotations

import asyncio
import datetime as dt
import socket
from collections.abc import Awaitable, Callable

import aiohttp
import pytest

from ddpjob_operator.job import api
from ddpjob_operator.kube import exposition
from ddpjob_operator.kube.exposition import Exposition, Snapshot
from ddpjob_operator.metrics.meter import Meter, Moment

NOW = dt.datetime(2031, 3, 5, 7, 11, 13, tzinfo=dt.timezone.utc)
OPENMETRICS = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"}


def jobs(count: int) -> list[dict[str, object]]:
    status = {"state": "Running", "stateTime": "2031-03-05T07:00:00Z"}
    return [{"metadata": {"namespace": "team", "name": f"j{n}", "uid": str(n)}, "status": status} for n in range(count)]


def served(story: Callable[[Exposition, list[int]], Awaitable[None]], count: int = 1, seconds: float = 10.0) -> None:
    """Plays a story with a server of so many jobs, and how often it was asked for a snapshot."""

    async def run() -> None:
        asked: list[int] = []

        def snapshot() -> Snapshot:
            asked.append(1)
            return Snapshot(Moment(NOW, None, "0.1.0", True, "ddpjob"), jobs(count))

        server = Exposition(Meter(), snapshot, answer_seconds=seconds)
        await server.start("127.0.0.1", 0)
        try:
            await story(server, asked)
        finally:
            await server.stop()

    asyncio.run(run())


async def get(port: int, path: str = "/metrics", **headers: str) -> tuple[int, str, str]:
    async with (
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
        session.get(path, headers=headers) as answer,
    ):
        return answer.status, answer.content_type, await answer.text()


def test_prometheus_gets_openmetrics_and_others_the_older_text() -> None:
    async def story(server: Exposition, _: list[int]) -> None:
        status, kind, text = await get(server.port, **OPENMETRICS)
        assert (status, kind) == (200, "application/openmetrics-text")
        assert text.endswith("# EOF\n")
        status, kind, text = await get(server.port)
        assert (status, kind) == (200, "text/plain")
        assert "# EOF" not in text
        assert (await get(server.port, "/healthz"))[0] == 404

    served(story)


def test_scrapers_that_never_read_are_cut_off_and_cost_the_others_nothing() -> None:
    """Each would hold its answer of megabytes for ever."""

    async def story(server: Exposition, _: list[int]) -> None:
        silent = []
        for _number in range(4):
            small = socket.socket()
            small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            small.connect(("127.0.0.1", server.port))
            reader, writer = await asyncio.open_connection(sock=small, limit=1)
            # One after the other: the kernel's buffers take the first answers whole.
            writer.write(10 * b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            silent.append((reader, writer))
        assert (await get(server.port))[0] == 200
        assert server._server is not None
        async with asyncio.timeout(30):
            while server._server._open:
                await asyncio.sleep(0.05)
        for _reader, writer in silent:
            writer.transport.abort()

    served(story, count=1000, seconds=5.0)


def test_many_who_ask_at_once_get_one_answer() -> None:
    """Writing it is the cost: a client in a loop must not take the operator's CPU."""

    async def story(server: Exposition, asked: list[int]) -> None:
        answers = await asyncio.gather(*(get(server.port) for _ in range(20)))
        assert {status for status, _, _ in answers} == {200}
        assert len(asked) <= 2

    served(story, count=50)


def test_reconciles_go_on_while_a_large_answer_is_written() -> None:
    """It is written in a thread: the loop waits for no more than Python's switch between threads."""

    async def story(server: Exposition, _: list[int]) -> None:
        loop, waits = asyncio.get_running_loop(), []
        scrape = asyncio.create_task(get(server.port))
        while not scrape.done():
            began = loop.time()
            await asyncio.sleep(0)
            waits.append(loop.time() - began)
        assert (await scrape)[0] == 200
        assert len(waits) > 10, "the loop has turned meanwhile"

    served(story, count=1000)


@pytest.mark.parametrize("status", [{"state": "x" * 10_000}, {"state": 7}, None])
def test_a_job_that_cannot_be_read_is_counted_and_has_no_series(status: object) -> None:
    raw = {"metadata": {"namespace": "team", "name": "digits", "uid": "1"}, "status": status}
    moment = exposition.read(Snapshot(Moment(NOW, None, "0.1.0"), [raw]))
    assert moment.jobs is not None
    assert [job.status for job in moment.jobs] in ([None], [api.Status()])
