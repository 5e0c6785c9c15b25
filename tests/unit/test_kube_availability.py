"""All watches of an API server learn together that it answers again."""

import asyncio

import pytest
from aiohttp import web
from free_port import free_port
from kopf import ConnectionInfo

from ddpjob_operator.kube.api.availability import SPREAD_SECONDS, Availability
from ddpjob_operator.kube.api.client import ApiError, Client
from ddpjob_operator.kube.api.runtime import Runtime

LONG = 3600.0


def test_the_first_answer_of_the_server_wakes_everyone_who_waits_for_it() -> None:
    """The first answer of the server must wake all watches, so that a leader does not use old objects for 30 s."""

    async def run() -> None:
        availability = Availability()
        availability.failed()
        waiting = [asyncio.create_task(availability.wait(LONG)) for _ in range(3)]
        await asyncio.sleep(0)
        availability.answered()
        await asyncio.wait_for(asyncio.gather(*waiting), 5 * SPREAD_SECONDS)

    asyncio.run(run())


def test_a_watch_that_is_refused_while_other_requests_succeed_waits_its_full_time() -> None:
    """A watch that is refused must wait its full time, although other requests, such as for the Lease, succeed."""

    async def run() -> None:
        availability = Availability()
        availability.failed()
        availability.answered()
        waiting = asyncio.create_task(availability.wait(LONG))
        for _ in range(5):
            availability.answered()
            await asyncio.sleep(0)
        assert not waiting.done()
        waiting.cancel()
        availability.failed()
        await asyncio.wait_for(availability.wait(0.01), 5)  # the wait ends although the server stays away

    asyncio.run(run())


def test_an_outage_is_one_line_of_the_log_and_its_end_another(caplog: pytest.LogCaptureFixture) -> None:
    """An outage of half a minute must not give a dozen lines in the log, one for each watch and error."""
    now = [100.0]

    async def run() -> None:
        availability = Availability(Runtime(clock=lambda: now[0]))
        availability.failed()
        availability.answered()
        assert caplog.messages == [], "a single request that is lost"
        for _ in range(30):
            availability.failed()
            now[0] += 1
        availability.answered()
        availability.answered()

    caplog.set_level("INFO")
    asyncio.run(run())
    assert caplog.messages == [
        "the API server has not answered for 3 s, trying again",
        "the API server answers again, after 30 s",
    ]


def test_the_client_reports_the_beginning_and_the_end_of_an_outage() -> None:
    """Two clients, such as those of the Lease and of the watches, must share the state of an outage."""

    async def run() -> None:
        availability, port = Availability(), free_port()

        def log_in() -> ConnectionInfo:
            return ConnectionInfo(server=f"http://127.0.0.1:{port}")

        async def answer(_: web.Request) -> web.Response:
            return web.json_response({"kind": "LeaseList", "metadata": {"resourceVersion": "1"}, "items": []})

        async with (
            Client(log_in, availability=availability) as watching,
            Client(log_in, availability=availability) as of_lease,
        ):
            with pytest.raises(ApiError, match="NoAnswer"):
                await watching.get("/api/v1/pods")
            waiting = asyncio.create_task(watching.availability.wait(LONG))
            await asyncio.sleep(0)
            app = web.Application()
            app.router.add_get("/{path:.*}", answer)
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", port).start()
            try:
                await of_lease.get("/apis/coordination.k8s.io/v1/leases")
                await asyncio.wait_for(waiting, 5 * SPREAD_SECONDS)
            finally:
                await runner.cleanup()

    asyncio.run(run())
