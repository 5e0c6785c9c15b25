"""Answers to the probes of the operator's pod, over HTTP."""

from __future__ import annotations

import asyncio

import aiohttp

from ddpjob_operator.kube.api.client import Client
from ddpjob_operator.kube.operator import Operator
from ddpjob_operator.kube.ports.bounded_server import Health
from ddpjob_operator.kube.settings import OperatorSettings


def test_healthz_is_200_until_a_part_has_ended_and_then_503_with_the_reason() -> None:
    async def run() -> None:
        made = Operator(OperatorSettings(), Client())
        health = Health(made.unhealthy)
        await health.start("127.0.0.1", 0)
        try:
            async with aiohttp.ClientSession(f"http://127.0.0.1:{health.port}") as session:

                async def asked(path: str = "/healthz") -> tuple[int, str]:
                    async with session.get(path) as answer:
                        return answer.status, (await answer.text()).strip()

                assert await asked() == (200, "ok")
                assert (await asked("/metrics"))[0] == 404, "it has a port of its own"
                assert (await asked("/"))[0] == 404, "nothing else is served"
                await asyncio.gather(made.run("queue", asyncio.sleep(0)))
                assert await asked() == (503, "queue has ended")
        finally:
            await health.stop()

    asyncio.run(run())
