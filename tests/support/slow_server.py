"""Runs the operator in virtual time with an API server whose delays the test chooses. There is no kubelet."""

import asyncio
import collections
import copy
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from virtual_time import VirtualLoop
from worlds import manifest

from ddpjob_operator.kube.api.client import NO_ANSWER, ApiError, Page, RequestLimits
from ddpjob_operator.kube.api.reach import Reach
from ddpjob_operator.kube.api.runtime import Runtime
from ddpjob_operator.kube.operator import Operator
from ddpjob_operator.kube.settings import OperatorSettings

Raw = dict[str, Any]


class SlowServer:
    """The methods of kube.client.Client. `delay(verb, path)`: seconds of a request; above 30 it times out."""

    def __init__(self, delay: Callable[[str, str], float]) -> None:
        self.limits = RequestLimits()
        self.reach = Reach()
        self.delay = delay
        self.version = 100
        self.under_way = 0
        self.done: list[tuple[float, str, str]] = []
        """Time, verb and path of each completed request. For a create the path ends with the name of the new object."""
        self.objects: dict[str, Raw] = {}

    async def get(self, path: str, params: Any = None) -> Raw:
        await self._wait("get", path)
        if path not in self.objects:
            raise ApiError(404, "NotFound", f'"{path.rpartition("/")[2]}" not found')
        return copy.deepcopy(self.objects[path])

    async def pages(self, path: str, selector: str = "") -> AsyncIterator[Page]:
        await self._wait("list", path)
        name = selector.partition("=")[2]
        found = [raw for at, raw in self.objects.items() if at.startswith(f"{path}/") and _job(raw) == name]
        yield Page(copy.deepcopy(found), str(self.version))

    async def create(self, path: str, body: Raw, params: Any = None) -> Raw:
        at = f"{path}/{body['metadata']['name']}"
        await self._wait("create", at)
        if not path.endswith("/events"):
            self.objects[at] = self._changed({**body, "status": {"phase": "Pending"}})
            self.objects[at]["metadata"]["uid"] = f"uid-{self.version}"
            return copy.deepcopy(self.objects[at])
        return body

    async def replace(self, path: str, body: Raw, params: Any = None) -> Raw:
        await self._wait("replace", path)
        at = path.removesuffix("/status")
        self.objects[at] = self._changed({**self.objects[at], "status": body["status"]})
        return copy.deepcopy(self.objects[at])

    async def delete(self, path: str, options: Raw) -> Raw:
        await self._wait("delete", path)
        self.objects.pop(path, None)
        return {"kind": "Status"}

    async def versions(self, path: str, selector: str = "") -> AsyncIterator[Page]:
        """Return no versions, because this server has no watches that could miss a change."""
        yield Page([], "0")

    async def close(self) -> None:
        pass

    def _changed(self, raw: Raw) -> Raw:
        self.version += 1
        return {**raw, "metadata": {**raw["metadata"], "resourceVersion": str(self.version)}}

    async def _wait(self, verb: str, path: str) -> None:
        seconds = self.delay(verb, path)
        self.under_way += 1
        try:
            await asyncio.sleep(min(seconds, self.limits.request_seconds))
        finally:
            self.under_way -= 1
        if seconds > self.limits.request_seconds:
            raise ApiError(NO_ANSWER, "NoAnswer", f"{verb} {path}: the API server did not answer in time")
        self.done.append((asyncio.get_running_loop().time(), verb, path))


class Town:
    """A leading operator in virtual time, and its jobs."""

    def __init__(self, server: SlowServer) -> None:
        self.server = server
        loop = asyncio.get_running_loop()
        runtime = Runtime(clock=loop.time, utc=loop.now)
        self.operator = Operator(OperatorSettings(health_port=0), server, runtime=runtime)  # type: ignore[arg-type]
        for reflector in self.operator.reflectors:
            reflector.synced.set()
        self.operator.lead()

    def apply(self, namespace: str, name: str, nodes: int, status: Raw | None = None, **spec: Any) -> None:
        """Create a job, or edit the spec of an existing job. The watch shows it immediately."""
        at = f"/apis/training.ddpjob.io/v1alpha1/namespaces/{namespace}/ddpjobs/{name}"
        raw = manifest(name, nodes=nodes, **spec)
        old = self.server.objects.get(at) or {}
        raw["metadata"] |= {"namespace": namespace, "uid": f"uid-{namespace}-{name}"}
        raw["metadata"]["generation"] = (old.get("metadata") or {}).get("generation", 0) + 1
        raw["status"] = status or old.get("status") or {}
        self.server.objects[at] = raw = self.server._changed(raw)
        self.operator.caches.jobs.put(copy.deepcopy(raw))

    def run_pods(self, namespace: str) -> None:
        """Let the trainers of all pending pods of a namespace run. The watch shows it immediately."""
        for at, raw in self.server.objects.items():
            if at.startswith(f"/api/v1/namespaces/{namespace}/pods/") and raw["status"]["phase"] == "Pending":
                trainer = {"name": "trainer", "ready": True, "state": {"running": {}}}
                status = {"phase": "Running", "containerStatuses": [trainer]}
                raw = self.server._changed({**raw, "spec": {**raw["spec"], "nodeName": "node-0"}, "status": status})
                self.server.objects[at] = raw
                self.operator.caches.pods.put(copy.deepcopy(raw))

    def lose_pod(self, namespace: str, name: str) -> None:
        """Remove a pod. The watch shows it immediately."""
        raw = self.server.objects.pop(f"/api/v1/namespaces/{namespace}/pods/{name}")
        self.operator.caches.pods.remove(namespace, name, raw["metadata"]["uid"])

    @property
    def seconds(self) -> float:
        """Virtual time in seconds."""
        return asyncio.get_running_loop().time()

    def states(self, namespace: str) -> collections.Counter[str]:
        """Count the jobs of a namespace by state."""
        start = f"/apis/training.ddpjob.io/v1alpha1/namespaces/{namespace}/ddpjobs/"
        jobs = (raw for at, raw in self.server.objects.items() if at.startswith(start))
        return collections.Counter(raw["status"].get("state", "") for raw in jobs)

    def pods(self, namespace: str, name: str = "") -> int:
        """Count the pods of a job, or all pods of a namespace."""
        start = f"/api/v1/namespaces/{namespace}/pods/{name}"
        return sum(at.startswith(f"{start}-" if name else start) for at in self.server.objects)

    def why_unhealthy(self) -> str:
        """Return the answer of the health probe. Mark all watches as healthy first, because this server has none."""
        for reflector in self.operator.watches():
            reflector.tried_at = asyncio.get_running_loop().time()
        return self.operator.unhealthy()

    async def until(self, true: Callable[[], bool], seconds: float) -> float:
        """Wait at most this many seconds, and check continuously that the operator is healthy. Return the seconds
        waited."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while not true():
            assert loop.time() - began <= seconds, f"not within {seconds} s"
            assert self.why_unhealthy() == "", "the probe would have it killed"
            await asyncio.sleep(0.05)
        return loop.time() - began


def play(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run this coroutine in virtual time."""
    loop = VirtualLoop()
    running = loop.create_task(story())
    try:
        loop.run_until_complete(running)
    finally:
        loop.run_until_complete(_end_all())
        loop.close()


async def _end_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _job(raw: Raw) -> str:
    return str((raw["metadata"].get("labels") or {}).get("training.ddpjob.io/job"))
