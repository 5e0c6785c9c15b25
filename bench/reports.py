"""CPU of the operator for progress reports, and how often it writes a status, without a cluster.

    python bench/reports.py --jobs 2000 --seconds 60

All jobs are running, and the first rank of each node reports a step every 5 s as the library does: over one connection
that stays open, with a token whose signature the operator verifies. Operator and trainers are separate processes, and
the API server is a model (tests/support/model_server.py). The clock starts after each job's first report, because that
one always causes a status write. Prints one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jwt
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric import rsa
from jwt.algorithms import RSAAlgorithm

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests/support"), str(ROOT / "tests/simulation"), str(ROOT / "bench")]

from clusters import Operator, until  # noqa: E402
from free_port import free_port  # noqa: E402
from model_server import ModelServer  # noqa: E402
from size import MANAGED_FIELDS, manifest  # noqa: E402

from ddpjob.reporting.progress import encode  # noqa: E402
from ddpjob_operator.job import api as types  # noqa: E402
from ddpjob_operator.kube.api import tokens  # noqa: E402
from ddpjob_operator.kube.ports import receive  # noqa: E402
from ddpjob_operator.pods import report_token  # noqa: E402

Raw = dict[str, Any]
ISSUER, KEY_ID = "https://kubernetes.default.svc.cluster.local", "bench"
INTERVAL_SECONDS = 5.0
POST_SECONDS = 5.0  # time-out of a post, as in the library
WAIT_SECONDS = 900.0


class Publishing(ModelServer):
    """An API server that publishes the keys of the tokens and records when statuses are written."""

    def __init__(self, key: rsa.RSAPrivateKey) -> None:
        super().__init__()
        self._documents = _documents(key)
        self.written: list[float] = []

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path in self._documents:
            return web.json_response(self._documents[request.path])
        if request.method == "PUT" and f"/{types.PLURAL}/" in request.path:
            self.written.append(time.monotonic())
        return await super()._answer(request)

    def tokens(self, key: rsa.RSAPrivateKey) -> list[str]:
        """Return a token for each pod, as its kubelet gets it."""
        return [_token(key, raw["metadata"]) for raw in self._call(self._api.all, "pods")]

    def all_have_progress(self) -> bool:
        """True if the status of each job has a step."""
        return all("progress" in raw.get("status", {}) for raw in self._call(self._api.all, types.PLURAL))


def _documents(key: rsa.RSAPrivateKey) -> dict[str, Raw]:
    """Return the documents that an API server publishes, by path."""
    public = json.loads(RSAAlgorithm.to_jwk(key.public_key())) | {"kid": KEY_ID, "alg": "RS256", "use": "sig"}
    return {tokens.ISSUER_PATH: {"issuer": ISSUER}, tokens.KEYS_PATH: {"keys": [public]}}


def _token(key: rsa.RSAPrivateKey, pod: Raw) -> str:
    now = int(time.time())
    bound = {name: pod[name] for name in ("name", "uid")}
    account = {"name": "default", "uid": "00000000-0000-4000-8000-000000000000"}
    claims = {
        "aud": [report_token.AUDIENCE],
        "exp": now + 3600,
        "iat": now,
        "nbf": now,
        "iss": ISSUER,
        "sub": "system:serviceaccount:default:default",
        "kubernetes.io": {"namespace": pod["namespace"], "pod": bound, "serviceaccount": account},
    }
    return jwt.encode(claims, key, algorithm="RS256", headers={"kid": KEY_ID})


class Trainers:
    """Posts reports for all pods, in a process of its own, until stdin ends."""

    def __init__(self, port: int, texts: list[str]) -> None:
        self._port, self._texts = port, texts
        self.codes: collections.Counter[str] = collections.Counter()
        self.slowest = 0.0

    async def run(self) -> None:
        """Post reports until stdin ends."""
        posting = [asyncio.create_task(self._train(number)) for number in range(len(self._texts))]
        await asyncio.to_thread(sys.stdin.read)
        for task in posting:
            task.cancel()
        await asyncio.gather(*posting, return_exceptions=True)

    async def _train(self, number: int) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + INTERVAL_SECONDS * number / len(self._texts)
        step, connection = 0, _Connection(self._port, number)
        while True:
            await asyncio.sleep(max(0.0, due - loop.time()))
            step += 50
            began = loop.time()
            try:
                async with asyncio.timeout(POST_SECONDS):
                    self.codes[await connection.post(self._texts[number], step)] += 1
            except (OSError, TimeoutError, EOFError) as error:
                connection.close()
                self.codes[type(error).__name__] += 1
            self.slowest = max(self.slowest, loop.time() - began)
            due += INTERVAL_SECONDS


class _Connection:
    """A connection of one pod. It stays open and imitates `ddpjob.progress`, which uses http.client."""

    def __init__(self, port: int, number: int) -> None:
        # Twenty pods share an address, because the receiver accepts 64 connections from each.
        node = number // 20
        self._port, self._local = port, (f"127.1.{node // 250}.{node % 250 + 1}", 0)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, token: str, step: int) -> str:
        """Send one report and return the status code of the answer."""
        body = encode(_report(step))
        head = (
            f"POST {receive.PATH} HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\nAccept-Encoding: identity\r\n"
            f"Content-Length: {len(body)}\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {token}\r\n\r\n"
        )
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port, local_addr=self._local)
        reader, writer = self._streams
        writer.write(head.encode() + body)
        answer = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        code = answer.split()[1]
        if code != "204" or "connection: close" in answer:
            self.close()
        return code

    def close(self) -> None:
        """Close the connection; the next post opens another one."""
        if self._streams is not None:
            self._streams[1].close()
        self._streams = None


def _report(step: int) -> Raw:
    paced = {"totalSteps": 1_000_000, "etaSeconds": (1_000_000 - step) // 10, "samplesPerSecond": 5210.4}
    about = {"attempt": 1, "rank": 0, "nodeRank": 0, "worldSize": 8, "generation": 0}
    return {**about, "step": step, **paced, "metrics": {"loss": f"{1 / step:.6g}", "lr": "0.001"}}


def measure(jobs: int, nodes: int, seconds: float) -> Raw:
    """Return CPU use and number of status writes of an operator whose jobs all report."""
    key, port = rsa.generate_private_key(public_exponent=65537, key_size=2048), free_port()
    settings = {"DDPJOB_STATUS_PORT": str(port), "DDPJOB_STATUS_URL": f"http://127.0.0.1:{port}{receive.PATH}"}
    with Publishing(key) as server, Operator(server, **settings) as operator:  # type: ignore[arg-type]
        server.managed_fields = MANAGED_FIELDS
        for number in range(jobs):
            server.apply(manifest(f"job-{number}", nodes))
        until(lambda: len(server.pods()) == jobs * nodes, "all pods are created", WAIT_SECONDS, 0.5)
        server.runs(*server.pods())
        until(lambda: server.states()["Running"] == jobs, "all jobs run", WAIT_SECONDS, 0.5)
        before = _at_rest(operator)
        with _trainers(port, server.tokens(key)) as trainers:
            until(server.all_have_progress, "each job shows a step", WAIT_SECONDS, 0.5)
            time.sleep(INTERVAL_SECONDS)
            began, cpu, written = time.monotonic(), operator.cpu_seconds, len(server.written)
            time.sleep(seconds)
            lasted, spent = time.monotonic() - began, operator.cpu_seconds - cpu
            writes = server.written[written:]
            told = json.loads(trainers.communicate(timeout=60)[0])
        return {
            "jobs": jobs,
            "reportsPerSecond": round(jobs * nodes / INTERVAL_SECONDS, 1),
            "percentOfACore": round(100 * spent / lasted, 1),
            "percentOfACoreWithoutReports": round(100 * before, 1),
            "statusWritesPerSecond": round(len(writes) / lasted, 2),
            "statusWritesInTheBusiestSecond": max((sum(at <= w < at + 1 for w in writes) for at in writes), default=0),
            "memoryMiB": operator.memory_bytes >> 20,
            **told,
        }


def _at_rest(operator: Operator) -> float:
    """Return the share of a core that the operator uses without reports, after its last Events."""
    while True:
        cpu, began = operator.cpu_seconds, time.monotonic()
        time.sleep(2)
        if (share := (operator.cpu_seconds - cpu) / (time.monotonic() - began)) < 0.1:
            return share


@contextlib.contextmanager
def _trainers(port: int, texts: list[str]) -> Any:
    command = [sys.executable, __file__, "--post-to", str(port)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdin is not None
        process.stdin.write(json.dumps(texts) + "\n")
        process.stdin.flush()
        yield process
    finally:
        process.kill()
        process.wait()


def post(port: int) -> Raw:
    """Run the trainers in this process; the first line of stdin has the tokens."""
    trainers = Trainers(port, json.loads(sys.stdin.readline()))
    asyncio.run(trainers.run())
    return {"answers": dict(trainers.codes), "secondsOfTheSlowestAnswer": round(trainers.slowest, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2_000)
    parser.add_argument("--nodes", type=int, default=1, help="pods per job")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the measurement")
    parser.add_argument("--post-to", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.post_to:
        print(json.dumps(post(options.post_to)))
        return
    found = measure(options.jobs, options.nodes, options.seconds)
    print(json.dumps({"cores": os.cpu_count(), "load": os.getloadavg(), **found}, indent=2))


if __name__ == "__main__":
    main()
