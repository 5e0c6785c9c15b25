"""A scraper of /metrics always gets its answer, even if other clients misbehave."""

import asyncio
import datetime as dt
import time
from collections.abc import Awaitable, Callable

import aiohttp
import pytest

from ddpjob_operator.kube.ports import bounded_server, exposition
from ddpjob_operator.kube.ports.exposition import Exposition, Scrape
from ddpjob_operator.metrics.meter import Meter, Moment

NOW = dt.datetime(2031, 3, 5, 7, 11, 13, tzinfo=dt.timezone.utc)
OPENMETRICS = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"}


def jobs(count: int) -> list[dict[str, object]]:
    status = {"state": "Running", "stateTime": "2031-03-05T07:00:00Z"}
    return [{"metadata": {"namespace": "team", "name": f"j{n}", "uid": str(n)}, "status": status} for n in range(count)]


def served(
    story: Callable[[Exposition, list[int]], Awaitable[None]],
    count: int = 1,
    meter: Meter | None = None,
) -> None:
    """Run a story with a server of metrics for `count` jobs. The story's list grows with each snapshot taken."""

    async def run() -> None:
        asked: list[int] = []

        def snapshot() -> Scrape:
            asked.append(1)
            return Scrape(Moment(NOW, None, "0.1.0", True, "ddpjob"), jobs(count))

        server = Exposition(meter or Meter(), snapshot)
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


def test_prometheus_gets_openmetrics_and_other_clients_the_older_text_format() -> None:
    async def story(server: Exposition, _: list[int]) -> None:
        status, kind, text = await get(server.port, **OPENMETRICS)
        assert (status, kind) == (200, "application/openmetrics-text")
        assert text.endswith("# EOF\n")
        status, kind, text = await get(server.port)
        assert (status, kind) == (200, "text/plain")
        assert "# EOF" not in text
        assert (await get(server.port, "/healthz"))[0] == 404

    served(story)


class Large(Meter):
    """Meter whose answer is larger than the kernel buffers for a client that does not read."""

    def text(self, moment: Moment, *, openmetrics: bool) -> tuple[bytes, str]:
        return b"#" * (16 << 20), "text/plain"


def test_an_answer_is_held_in_memory_once_however_many_clients_do_not_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer must be in memory once, however many clients do not read it: 60 copies would need 450 MB."""
    # With a shorter limit the server would close the connection before the test sees it waiting.
    monkeypatch.setattr(bounded_server, "REQUEST_SECONDS", 60.0)

    async def story(server: Exposition, _: list[int]) -> None:
        silent = []
        for _number in range(3):
            _reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1)
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            silent.append(writer)
        status, _kind, text = await get(server.port)
        assert (status, len(text)) == (200, 16 << 20), "who reads has all of it"
        waiting: list[int] = []
        async with asyncio.timeout(30):
            while len(waiting) < len(silent):
                await asyncio.sleep(0.01)
                sizes = [c.transport.get_write_buffer_size() for c in server.connections if c.transport]
                waiting = [size for size in sizes if size]
        assert max(waiting) < 1 << 20
        for writer in silent:
            writer.transport.abort()

    served(story, meter=Large())


def test_simultaneous_requests_share_one_answer() -> None:
    """Simultaneous requests must share one answer, because a client that asks in a loop must not use up the CPU."""

    async def story(server: Exposition, asked: list[int]) -> None:
        began = time.monotonic()
        answers = await asyncio.gather(*(get(server.port) for _ in range(20)))
        assert {status for status, _, _ in answers} == {200}
        assert len(asked) <= 2 + (time.monotonic() - began) / exposition.SAME_ANSWER_SECONDS

    served(story, count=50)


def test_reconciles_continue_while_a_large_answer_is_written() -> None:
    """Reconciles must continue while a large answer is prepared: a thread does this work, not the event loop."""

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
