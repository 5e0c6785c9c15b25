"""CPU of the operator for progress reports, and how often it writes a status, without a cluster.

    python bench/reports.py --jobs 2000 --seconds 60

All jobs are running, and the first rank of each node reports a step every 5 s as the library does: over one connection
that stays open, with a token whose signature the operator verifies. Operator and trainers are separate processes, and
the API server is a model (tests/support/model_server.py). The clock starts after each job's first report, because that
one always causes a status write. --nodes is the number of pods of each job. Prints one JSON document.
"""

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
PUBLIC = {tokens.ISSUER_PATH: {"issuer": ISSUER}, tokens.KEYS_PATH: {"keys": [published()]}}
POST_SECONDS = 5.0  # time-out of a post, as in the library
WAIT_SECONDS = 900.0


class Publishing(ModelServer):
    """An API server that publishes the keys of the tokens."""

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        found = PUBLIC.get(request.path)
        return await super()._answer(request) if found is None else web.json_response(found)

    def tokens(self) -> list[str]:
        """Return a token for each pod, as its kubelet gets it."""
        pods = (raw["metadata"] for raw in self._call(self._api.all, "pods"))
        return [token(pod=tokens.BoundPod(pod["namespace"], pod["name"], pod["uid"])) for pod in pods]

    def all_have_progress(self) -> bool:
        """True if the status of each job has a step."""
        return all("progress" in raw.get("status", {}) for raw in self._call(self._api.all, types.PLURAL))


async def trainers(port: int, texts: list[str], end: Event) -> Raw:
    """Post reports for all pods until the event is set. texts: their tokens. Return the answers."""
    codes, waited = collections.Counter[str](), [0.0]

    async def train(number: int) -> None:
        node = number // 20  # twenty pods share an address, because the receiver accepts 64 connections from each
        address = f"127.1.{node // 250}.{node % 250 + 1}", 0
        headers = {"Authorization": f"Bearer {texts[number]}", "Content-Type": "application/json"}
        loop, step = asyncio.get_running_loop(), 0
        due = loop.time() + INTERVAL_SECONDS * number / len(texts)
        connector = aiohttp.TCPConnector(limit=1, local_addr=address, keepalive_timeout=2 * INTERVAL_SECONDS)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", connector=connector, headers=headers) as session:
            while True:
                await asyncio.sleep(max(0.0, due - loop.time()))
                step += 50
                began = loop.time()
                try:
                    async with asyncio.timeout(POST_SECONDS), session.post(receive.PATH, data=_report(step)) as answer:
                        codes[str(answer.status)] += 1
                except (OSError, TimeoutError, aiohttp.ClientError) as error:
                    codes[type(error).__name__] += 1
                waited.append(loop.time() - began)
                due += INTERVAL_SECONDS

    posting = [asyncio.create_task(train(number)) for number in range(len(texts))]
    await asyncio.to_thread(end.wait)
    for task in posting:
        task.cancel()
    await asyncio.gather(*posting, return_exceptions=True)
    return {"answers": dict(codes), "secondsOfTheSlowestAnswer": round(max(waited), 2)}


def _report(step: int) -> bytes:
    paced = {"totalSteps": 1_000_000, "etaSeconds": (1_000_000 - step) // 10, "samplesPerSecond": 5210.4}
    about = {"attempt": 1, "rank": 0, "nodeRank": 0, "worldSize": 8, "generation": 0}
    return encode({**about, "step": step, **paced, "metrics": {"loss": f"{1 / step:.6g}", "lr": "0.001"}})


def post(port: int, texts: list[str], end: Event, answers: SimpleQueue[Raw]) -> None:
    answers.put(asyncio.run(trainers(port, texts, end)))


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
        until(lambda: share(operator, 2) < 0.1, "the operator rests after its last Events", WAIT_SECONDS)
        spawn = multiprocessing.get_context("spawn")
        end, answers = spawn.Event(), spawn.SimpleQueue()
        spawn.Process(target=post, args=(port, server.tokens(), end, answers), daemon=True).start()
        until(server.all_have_progress, "each job shows a step", WAIT_SECONDS, 0.5)
        time.sleep(INTERVAL_SECONDS)
        written, used = server.seen["PUT ddpjobs"], share(operator, seconds)
        written = server.seen["PUT ddpjobs"] - written
        end.set()
        return {
            "jobs": jobs,
            "reportsPerSecond": round(jobs * nodes / INTERVAL_SECONDS, 1),
            "percentOfACore": round(100 * used, 1),
            "statusWritesPerSecond": round(written / seconds, 2),
            "memoryMiB": operator.memory_bytes >> 20,
            **answers.get(),
        }


def share(operator: Operator, seconds: float) -> float:
    """Return the share of a core that the operator uses for this long."""
    cpu = operator.cpu_seconds
    time.sleep(seconds)
    return (operator.cpu_seconds - cpu) / seconds


if __name__ == "__main__":
    options = common.options(__doc__, jobs=2_000, nodes=1, seconds=60.0)
    print(json.dumps({"machine": common.machine(), **measure(options.jobs, options.nodes, options.seconds)}, indent=2))
