"""CPU of the operator for progress reports, and how often it writes a status, without a cluster.

    python bench/reports.py --jobs 2000 --seconds 60

All jobs are running, and the first rank of each node reports a step every 5 s as the library does: over one connection
that stays open, with a token whose signature the operator verifies. Operator and trainers are separate processes, and
the API server is a model (tests/support/model_server.py). The clock starts after each job's first report, because that
one always causes a status write. --nodes is the number of pods of each job. Prints one JSON document.
"""

from __future__ import annotations

import asyncio
import collections
import json
import multiprocessing
import time
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Event
from typing import Any

import aiohttp
import common
from aiohttp import web
from clusters import Operator, until
from free_port import free_port
from model_server import ModelServer
from pod_tokens import ISSUER, published, token
from size import MANAGED_FIELDS, manifest

from ddpjob.reporting.progress import encode
from ddpjob_operator.job import api as types
from ddpjob_operator.kube.api import tokens
from ddpjob_operator.kube.ports import receive

Raw = dict[str, Any]
INTERVAL_SECONDS = 5.0
POST_SECONDS = 5.0  # time-out of a post, as in the library
WAIT_SECONDS = 900.0


class Publishing(ModelServer):
    """An API server that publishes the keys of the tokens and records when statuses are written."""

    def __init__(self) -> None:
        super().__init__()
        self._documents = {tokens.ISSUER_PATH: {"issuer": ISSUER}, tokens.KEYS_PATH: {"keys": [published()]}}
        self.written: list[float] = []

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path in self._documents:
            return web.json_response(self._documents[request.path])
        if request.method == "PUT" and f"/{types.PLURAL}/" in request.path:
            self.written.append(time.monotonic())
        return await super()._answer(request)

    def tokens(self) -> list[str]:
        """Return a token for each pod, as its kubelet gets it."""
        pods = (raw["metadata"] for raw in self._call(self._api.all, "pods"))
        return [token(pod=tokens.BoundPod(pod["namespace"], pod["name"], pod["uid"])) for pod in pods]

    def all_have_progress(self) -> bool:
        """True if the status of each job has a step."""
        return all("progress" in raw.get("status", {}) for raw in self._call(self._api.all, types.PLURAL))


class Trainers:
    """Posts reports for all pods, in a process of its own, until the event is set."""

    def __init__(self, port: int, texts: list[str]) -> None:
        self._url, self._texts = f"http://127.0.0.1:{port}{receive.PATH}", texts
        self.codes: collections.Counter[str] = collections.Counter()
        self.slowest = 0.0

    async def run(self, end: Event) -> Raw:
        posting = [asyncio.create_task(self._train(number)) for number in range(len(self._texts))]
        await asyncio.to_thread(end.wait)
        for task in posting:
            task.cancel()
        await asyncio.gather(*posting, return_exceptions=True)
        return {"answers": dict(self.codes), "secondsOfTheSlowestAnswer": round(self.slowest, 2)}

    async def _train(self, number: int) -> None:
        node = number // 20  # twenty pods share an address, because the receiver accepts 64 connections from each
        address = f"127.1.{node // 250}.{node % 250 + 1}", 0
        headers = {"Authorization": f"Bearer {self._texts[number]}", "Content-Type": "application/json"}
        loop, step = asyncio.get_running_loop(), 0
        due = loop.time() + INTERVAL_SECONDS * number / len(self._texts)
        connector = aiohttp.TCPConnector(limit=1, local_addr=address, keepalive_timeout=2 * INTERVAL_SECONDS)
        async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
            while True:
                await asyncio.sleep(max(0.0, due - loop.time()))
                step += 50
                began = loop.time()
                try:
                    async with asyncio.timeout(POST_SECONDS), session.post(self._url, data=_report(step)) as answer:
                        self.codes[str(answer.status)] += 1
                except (OSError, TimeoutError, aiohttp.ClientError) as error:
                    self.codes[type(error).__name__] += 1
                self.slowest = max(self.slowest, loop.time() - began)
                due += INTERVAL_SECONDS


def _report(step: int) -> bytes:
    paced = {"totalSteps": 1_000_000, "etaSeconds": (1_000_000 - step) // 10, "samplesPerSecond": 5210.4}
    about = {"attempt": 1, "rank": 0, "nodeRank": 0, "worldSize": 8, "generation": 0}
    return encode({**about, "step": step, **paced, "metrics": {"loss": f"{1 / step:.6g}", "lr": "0.001"}})


def post(port: int, texts: list[str], end: Event, answers: SimpleQueue[Raw]) -> None:
    answers.put(asyncio.run(Trainers(port, texts).run(end)))


def measure(jobs: int, nodes: int, seconds: float) -> Raw:
    """Return CPU use and number of status writes of an operator whose jobs all report."""
    port = free_port()
    settings = {"DDPJOB_STATUS_PORT": str(port), "DDPJOB_STATUS_URL": f"http://127.0.0.1:{port}{receive.PATH}"}
    with Publishing() as server, Operator(server, anew=True, **settings) as operator:  # type: ignore[arg-type]
        server.managed_fields = MANAGED_FIELDS
        for number in range(jobs):
            server.apply(manifest(f"job-{number}", nodes))
        until(lambda: len(server.pods()) == jobs * nodes, "all pods are created", WAIT_SECONDS, 0.5)
        server.runs(*server.pods())
        until(lambda: server.states()["Running"] == jobs, "all jobs run", WAIT_SECONDS, 0.5)
        before = _at_rest(operator)
        spawn = multiprocessing.get_context("spawn")
        end, answers = spawn.Event(), spawn.SimpleQueue()
        spawn.Process(target=post, args=(port, server.tokens(), end, answers), daemon=True).start()
        until(server.all_have_progress, "each job shows a step", WAIT_SECONDS, 0.5)
        time.sleep(INTERVAL_SECONDS)
        began, cpu, written = time.monotonic(), operator.cpu_seconds, len(server.written)
        time.sleep(seconds)
        lasted, spent = time.monotonic() - began, operator.cpu_seconds - cpu
        writes = server.written[written:]
        end.set()
        return {
            "jobs": jobs,
            "reportsPerSecond": round(jobs * nodes / INTERVAL_SECONDS, 1),
            "percentOfACore": round(100 * spent / lasted, 1),
            "percentOfACoreWithoutReports": round(100 * before, 1),
            "statusWritesPerSecond": round(len(writes) / lasted, 2),
            "statusWritesInTheBusiestSecond": max((sum(at <= w < at + 1 for w in writes) for at in writes), default=0),
            "memoryMiB": operator.memory_bytes >> 20,
            **answers.get(),
        }


def _at_rest(operator: Operator) -> float:
    """Return the share of a core that the operator uses without reports, after its last Events."""
    while True:
        cpu, began = operator.cpu_seconds, time.monotonic()
        time.sleep(2)
        if (share := (operator.cpu_seconds - cpu) / (time.monotonic() - began)) < 0.1:
            return share


if __name__ == "__main__":
    options = common.options(__doc__, jobs=2_000, nodes=1, seconds=60.0)
    print(json.dumps({"machine": common.machine(), **measure(options.jobs, options.nodes, options.seconds)}, indent=2))
