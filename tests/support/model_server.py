"""The simulation's model of an API server behind HTTP, in real time, for tests of the operator's process that need no
cluster. The test plays the kubelet."""

from __future__ import annotations

import asyncio
import collections
import datetime as dt
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import orjson
from aiohttp import web
from model_api import KINDS, ModelApi, Raw, event_of, matching, parse, stamp

from ddpjob_operator.job import api

T = TypeVar("T")
NODE = "node-0"
DDPJOBS = f"/apis/{api.GROUP}/{api.VERSION}"


class ModelServer:
    """An API server on loopback, used as a context manager. All methods may be called from the test's thread."""

    def __init__(self) -> None:
        self.url = ""
        self.refused: Callable[[str, str], int] = lambda _method, _path: 0
        """Returns the HTTP code with which a request is refused; 0 if it is executed."""
        self.silent = False
        """True if no request is answered."""
        self.seen: collections.Counter[str] = collections.Counter()
        """Number of requests by method and resource, with `WATCH` for watches."""
        self.managed_fields: list[Raw] = []
        """metadata.managedFields of each new pod, to give the watch's events a certain length."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._api = ModelApi(time.monotonic, lambda: dt.datetime.now(dt.timezone.utc))
        self._api.request("POST", "/api/v1/nodes", None, {"metadata": {"name": NODE}}, "kubelet")

    def __enter__(self) -> ModelServer:
        self._thread.start()
        self._run(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    # ---------------------------------------------------------------- what a test does

    def apply(self, manifest: Raw) -> None:
        """Create a job."""
        body = {**manifest, "metadata": {"name": manifest["metadata"]["name"]}}
        namespace = manifest["metadata"].get("namespace", "default")
        self._call(self._api.request, "POST", f"{DDPJOBS}/namespaces/{namespace}/ddpjobs", None, body, "user")

    def status(self, name: str) -> Raw:
        """Return the status of a job."""
        return dict((self._call(self._api.find, api.PLURAL, name) or {}).get("status") or {})

    def pods(self) -> list[str]:
        """Return the names of all pods."""
        return [raw["metadata"]["name"] for raw in self._call(self._api.all, "pods")]

    def runs(self, *names: str) -> None:
        """Let the trainers of these pods run."""
        self._set(names, "Running", {"running": {"startedAt": _now()}})

    def exits(self, *names: str, code: int) -> None:
        """Let the trainers of these pods end by themselves."""
        ended = {"exitCode": code, "reason": "Error" if code else "Completed", "finishedAt": _now()}
        self._set(names, "Failed" if code else "Succeeded", {"terminated": ended})

    def delete_job(self, name: str) -> None:
        """Delete a job together with its pods and Service, as the garbage collector does."""
        for plural, mine in ((api.PLURAL, name), ("services", name), ("pods", f"{name}-")):
            for raw in self._call(self._api.all, plural):
                if raw["metadata"]["name"].startswith(mine):
                    self._call(self._api.remove, plural, raw, "user")

    def states(self) -> collections.Counter[str]:
        """Count the jobs by state."""
        jobs = self._call(self._api.all, api.PLURAL)
        return collections.Counter((raw.get("status") or {}).get("state", "") for raw in jobs)

    def _set(self, names: Sequence[str], phase: str, state: Raw) -> None:
        trainer = {"name": "trainer", "state": state, "ready": "running" in state, "restartCount": 0}
        status = {
            "phase": phase,
            "containerStatuses": [trainer],
            "conditions": [{"type": "Ready", "status": "True" if "running" in state else "False"}],
        }

        def set_all() -> None:
            for name in names:
                raw = self._api.find("pods", name)
                assert raw is not None, name
                self._api.change("pods", raw, "kubelet", spec={**raw["spec"], "nodeName": NODE}, status=status)

        self._call(set_all)

    # ---------------------------------------------------------------- HTTP

    async def _start(self) -> None:
        self._runner = web.ServerRunner(web.Server(self._answer, access_log=None), shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self._kubelet = self._loop.create_task(self._kubelets_stop_pods())

    async def _stop(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._runner.cleanup()

    async def _kubelets_stop_pods(self) -> None:
        """Remove pods a moment after a request to delete them."""
        while True:
            for raw in self._api.all("pods"):
                if "deletionTimestamp" in raw["metadata"]:
                    self._api.remove("pods", raw, "kubelet")
            await asyncio.sleep(0.1)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if self.silent:
            await asyncio.sleep(3600)
        if code := self.refused(request.method, request.path):
            status = {"kind": "Status", "status": "Failure", "code": code, "message": "made by the test"}
            return web.json_response(status, status=code)
        if request.path in _DISCOVERY:
            return web.json_response(_DISCOVERY[request.path])
        plural = parse(request.path)[0]
        if "watch" in request.query:
            self.seen[f"WATCH {plural}"] += 1
            return await self._watch(request)
        self.seen[f"{request.method} {plural}"] += 1
        text = await request.read()
        body = orjson.loads(text) if text else None
        if self.managed_fields and (request.method, plural) == ("POST", "pods"):
            body["metadata"]["managedFields"] = self.managed_fields
        code, answer = self._api.request(request.method, request.path, dict(request.query), body, "operator")
        if "as=PartialObjectMetadata;" in request.headers.get("Accept", "") and code < 300:
            answer = {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": answer["metadata"]}
        return web.Response(body=orjson.dumps(answer), status=code, content_type="application/json")

    async def _watch(self, request: web.BaseRequest) -> web.StreamResponse:
        plural, namespace, _, _ = parse(request.path)
        matches = matching(request.query.get("labelSelector", ""), namespace)
        version = int(request.query.get("resourceVersion") or self._api.version)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        while True:
            change = self._api.after(KINDS[plural].plural, version)
            if change is None:
                waits: asyncio.Future[bool] = self._loop.create_future()
                self._api.waiting[plural].append(waits)
                await waits
                continue
            version = change.version
            if (event := event_of(change, matches)) is not None:
                await response.write(orjson.dumps(event) + b"\n")

    # ---------------------------------------------------------------- threads

    def _call(self, function: Callable[..., T], *arguments: Any, **more: Any) -> T:
        async def call() -> T:
            return function(*arguments, **more)

        return self._run(call())

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)


_VERSION = {"groupVersion": f"{api.GROUP}/{api.VERSION}", "version": api.VERSION}
_VERBS = ["get", "list", "watch", "create", "update", "patch", "delete"]
_RESOURCE = {"name": api.PLURAL, "singularName": "ddpjob", "kind": api.KIND, "namespaced": True, "verbs": _VERBS}
_NAMESPACES = {"name": "namespaces", "singularName": "", "kind": "Namespace", "namespaced": False, "verbs": _VERBS}
# Answers that kopf needs before it watches.
_DISCOVERY: dict[str, Raw] = {
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": [_NAMESPACES]},
    "/apis": {
        "kind": "APIGroupList",
        "groups": [{"name": api.GROUP, "versions": [_VERSION], "preferredVersion": _VERSION}],
    },
    DDPJOBS: {"kind": "APIResourceList", "groupVersion": f"{api.GROUP}/{api.VERSION}", "resources": [_RESOURCE]},
}


def _now() -> str:
    return stamp(dt.datetime.now(dt.timezone.utc))
