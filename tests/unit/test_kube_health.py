"""What the probes of the operator's pod are answered, over HTTP."""

from __future__ import annotations

import asyncio

import aiohttp
from free_port import free_port

from ddpjob_operator.kube.client import Client
from ddpjob_operator.kube.health import serve_health
from ddpjob_operator.kube.operator import Operator
from ddpjob_operator.kube.settings import OperatorSettings


def test_healthz_is_200_until_a_part_has_ended_and_then_503_with_the_reason() -> None:
    async def run() -> None:
        made, port = Operator(OperatorSettings(), Client()), free_port()
        runner = await serve_health(port, made.unhealthy)
        assert runner is not None
        try:
            async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:

                async def asked(path: str = "/healthz") -> tuple[int, str]:
                    async with session.get(path) as answer:
                        return answer.status, (await answer.text()).strip()

                assert await asked() == (200, "ok")
                assert (await asked("/metrics"))[0] == 404, "it has a port of its own"
                assert (await asked("/"))[0] == 404, "nothing else is served"
                await asyncio.gather(made.run("queue", asyncio.sleep(0)))
                assert await asked() == (503, "queue has ended")
        finally:
            await runner.cleanup()

    asyncio.run(run())


def test_port_0_listens_nowhere() -> None:
    assert asyncio.run(serve_health(0, str)) is None
