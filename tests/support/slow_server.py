"""Runs the operator in virtual time with an API server whose delays the test chooses. There is no kubelet."""

import asyncio
import collections
from collections.abc import Callable, Coroutine
from typing import Any

from direct_client import DirectClient
from model_api import ModelApi, Raw, parse
from virtual_time import VirtualLoop
from worlds import manifest

from ddpjob_operator.job import api
from ddpjob_operator.kube.api.client import NO_ANSWER, ApiError
from ddpjob_operator.kube.api.runtime import Runtime
from ddpjob_operator.kube.operator import Operator
from ddpjob_operator.kube.settings import OperatorSettings


class SlowServer(DirectClient):
    """A model of an API server. `delay(verb, path)`: seconds of a request; above 30 it times out."""

    def __init__(self, delay: Callable[[str, str], float]) -> None:
        super().__init__(ModelApi())
        self.delay = delay
        self.under_way = 0
        self.done: list[tuple[float, str, str]] = []
        """Time, verb and path of each completed request. For a create the path ends with the name of the new object."""

    async def request(self, method: str, path: str, params: Any, body: Raw | None = None) -> Raw:
        verb = {"POST": "create", "PUT": "replace", "DELETE": "delete", "PATCH": "patch"}.get(method)
        at = f"{path}/{body['metadata']['name']}" if verb == "create" and body else path
        await self._wait(verb or ("get" if parse(path)[2] else "list"), at)
        return await super().request(method, path, params, body)

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
        old = self.server.api.find(api.PLURAL, name, namespace) or {"metadata": {"generation": 0}}
        raw = manifest(name, nodes=nodes, **spec)
        raw["metadata"] |= {"namespace": namespace, "uid": f"uid-{namespace}-{name}"}
        raw["metadata"]["generation"] = old["metadata"]["generation"] + 1
        raw["status"] = status or old.get("status") or {}
        self.operator.caches.jobs.put(self.server.api.put(api.PLURAL, raw))

    def run_pods(self, namespace: str) -> None:
        """Let the trainers of all pending pods of a namespace run. The watch shows it immediately."""
        trainer = {"name": "trainer", "ready": True, "state": {"running": {}}}
        status = {"phase": "Running", "containerStatuses": [trainer]}
        for raw in self._all("pods", namespace):
            if raw["status"]["phase"] == "Pending":
                spec = {**raw["spec"], "nodeName": "node-0"}
                self.operator.caches.pods.put(self.server.api.put("pods", {**raw, "spec": spec, "status": status}))

    def lose_pod(self, namespace: str, name: str) -> None:
        """Remove a pod. The watch shows it immediately."""
        raw = next(raw for raw in self._all("pods", namespace) if raw["metadata"]["name"] == name)
        self.server.api.remove("pods", raw, "node")
        self.operator.caches.pods.remove(namespace, name, raw["metadata"]["uid"])

    def _all(self, plural: str, namespace: str) -> list[Raw]:
        return [raw for (of, _), raw in self.server.api.objects[plural].items() if of == namespace]

    @property
    def seconds(self) -> float:
        """Virtual time in seconds."""
        return asyncio.get_running_loop().time()

    def states(self, namespace: str) -> collections.Counter[str]:
        """Count the jobs of a namespace by state."""
        return collections.Counter(raw["status"].get("state", "") for raw in self._all(api.PLURAL, namespace))

    def pods(self, namespace: str, name: str = "") -> int:
        """Count the pods of a job, or all pods of a namespace."""
        start = f"{name}-" if name else ""
        return sum(raw["metadata"]["name"].startswith(start) for raw in self._all("pods", namespace))

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
