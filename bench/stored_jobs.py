"""Memory of the operator with jobs that do nothing, on a model of an API server.

    python bench/stored_jobs.py 100 1000 2000
    python bench/stored_jobs.py --listed --fields 0 400000     # small jobs, only listed

Suspended jobs of 280 kB are created in one namespace while an operator is running. When each job has its status, a
second operator is started, which lists them all, like a new leader. Prints a JSON document for each number: resident
memory of both operators at their peak and at the end, in MiB; the chart's limit is 512.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import string
import sys
import time
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests/support"), str(ROOT / "tests/simulation"), str(ROOT / "bench")]

from clusters import Operator, until  # noqa: E402
from model_api import parse  # noqa: E402
from model_server import ModelServer  # noqa: E402

from ddpjob_operator.job import api  # noqa: E402

NAMESPACE = "team-a"
SPECS = 8
QUIET_SECONDS, SECONDS_MAX = 5.0, 900.0


def spec_of(seed: int, fields: int) -> bytes:
    """Return the JSON of a spec with this number of fields of 76 characters each; 3,250 are just below the limits."""
    draw = random.Random(seed)

    def word(length: int) -> str:
        return "".join(draw.choices(string.ascii_letters, k=length))

    pod = {"zz": {word(36): word(40) for _ in range(fields)}, "containers": [{"name": "t", "image": "i"}]}
    return orjson.dumps({"nodes": 1, "suspend": True, "template": {"spec": pod}})


class StoredJobs(ModelServer):
    """Serves DDPJobs as bytes, in pages; the model serves all other kinds."""

    def __init__(self, fields: int) -> None:
        super().__init__()
        self._specs = [spec_of(seed, fields) for seed in range(SPECS)]
        self._statuses: list[bytes] = []
        self._versions: list[int] = []
        self._log: list[int] = []
        """The job of each change; its index is the resource version minus one."""
        self._more = asyncio.Condition()

    def add(self, count: int) -> None:
        """Create `count` jobs, as fast as an operator reads them."""

        async def add() -> None:
            for _ in range(count):
                self._statuses.append(b"null")
                self._versions.append(0)
                await self._changed(len(self._statuses) - 1)

        self._run(add())

    @property
    def told(self) -> int:
        """Number of jobs that have a status."""
        return sum(status != b"null" for status in self._statuses)

    async def _changed(self, number: int) -> None:
        async with self._more:
            self._log.append(number)
            self._versions[number] = len(self._log)
            self._more.notify_all()

    def _metadata(self, number: int) -> bytes:
        metadata = {
            "name": f"m{number}",
            "namespace": NAMESPACE,
            "uid": f"00000000-0000-4000-8000-{number:012}",
            "generation": 1,
            "resourceVersion": str(self._versions[number]),
            "creationTimestamp": "2026-11-28T00:00:00Z",
        }
        return orjson.dumps(metadata)

    def _job(self, number: int) -> bytes:
        kind = b'"apiVersion":"%s","kind":"%s"' % (api.API_VERSION.encode(), api.KIND.encode())
        spec, status = self._specs[number % SPECS], self._statuses[number]
        return b'{%s,"metadata":%s,"spec":%s,"status":%s}' % (kind, self._metadata(number), spec, status)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        plural, _, name, subresource = parse(request.path)
        if plural != api.PLURAL or request.path.count("/") < 4:
            return await super()._answer(request)
        if "watch" in request.query:
            return await self._watch_jobs(request)
        if not name:
            return self._page(request)
        number = int(name[1:])
        if request.method == "PUT" and subresource == "status":
            self._statuses[number] = orjson.dumps(orjson.loads(await request.read())["status"])
            await self._changed(number)
        return web.Response(body=self._job(number), content_type="application/json")

    def _page(self, request: web.BaseRequest) -> web.Response:
        if "as=PartialObjectMetadata" in request.headers.get("Accept", ""):
            items = [b'{"metadata":%s}' % self._metadata(number) for number in range(len(self._statuses))]
            return web.Response(body=self._list(items, ""), content_type="application/json")
        first, limit = int(request.query.get("continue", "0")), int(request.query.get("limit", "500"))
        after = min(first + limit, len(self._statuses))
        token = str(after) if after < len(self._statuses) else ""
        items = [self._job(number) for number in range(first, after)]
        return web.Response(body=self._list(items, token), content_type="application/json")

    def _list(self, items: list[bytes], token: str) -> bytes:
        head = orjson.dumps({"resourceVersion": str(len(self._log) + 1), "continue": token})
        return b'{"apiVersion":"v1","kind":"List","metadata":%s,"items":[%s]}' % (head, b",".join(items))

    async def _watch_jobs(self, request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        self.seen["WATCH ddpjobs"] += 1  # counted here, because a client starts to watch when its list is complete
        version, seen = int(request.query.get("resourceVersion") or 0) - 1, set[int]()
        while True:
            async with self._more:
                await self._more.wait_for(lambda at=version: len(self._log) > at)
            number, version = self._log[version], version + 1
            if version < self._versions[number]:
                continue  # a watch cache sends only the latest version
            kind = b"MODIFIED" if number in seen else b"ADDED"
            seen.add(number)
            await response.write(b'{"type":"%s","object":%s}\n' % (kind, self._job(number)))


def peak_mib(pid: int) -> int:
    """Return the peak of the resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) >> 10


def is_quiet(operator: Any) -> bool:
    """True if the operator uses no CPU."""
    before = operator.cpu_seconds
    time.sleep(QUIET_SECONDS)
    return bool(operator.cpu_seconds - before < 0.1)


def found_of(operator: Any) -> dict[str, Any]:
    """Return memory and CPU of the operator when it is idle."""
    until(lambda: is_quiet(operator), "the operator has nothing to do", SECONDS_MAX)
    memory, peak = operator.memory_bytes >> 20, peak_mib(operator.process.pid)
    return {"memoryMiB": memory, "memoryMiBPeak": peak, "cpuSeconds": round(operator.cpu_seconds, 1)}


def measure(jobs: int, fields: int, *, listed_only: bool) -> dict[str, Any]:
    """Measure an operator that sees the jobs being created, and one that lists them."""
    with StoredJobs(fields) as server:
        with Operator(server) as operator:  # type: ignore[arg-type]
            until(lambda: server.seen["WATCH pods"] > 0, "the operator watches", SECONDS_MAX, 0.5)
            time.sleep(2)
            idle = operator.memory_bytes >> 20
            if not listed_only:
                server.add(jobs)
                until(lambda: server.told == jobs, "all jobs have a status", SECONDS_MAX, 0.5)
            created = found_of(operator)
        if listed_only:
            server.add(jobs)
        watches = server.seen["WATCH ddpjobs"]
        with Operator(server) as operator:  # type: ignore[arg-type]
            until(lambda: server.seen["WATCH ddpjobs"] > watches, "all jobs are listed", SECONDS_MAX, 0.5)
            listed = found_of(operator)
    return {"jobs": jobs, "memoryMiBWithout": idle, "created": created, "listed": listed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("jobs", type=int, nargs="*", default=[100, 1_000, 2_000])
    parser.add_argument("--fields", type=int, default=3_250, help="fields of a job")
    parser.add_argument("--listed", action="store_true", help="create the jobs before an operator runs")
    options = parser.parse_args()
    for jobs in options.jobs:
        found = measure(jobs, options.fields, listed_only=options.listed)
        print(json.dumps({"cores": os.cpu_count(), "load": os.getloadavg(), **found}), flush=True)


if __name__ == "__main__":
    main()
