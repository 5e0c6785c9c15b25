"""A proxy in front of a real API server that injects faults and counts requests.

It listens on loopback without TLS. Requests with the token `cluster` get the identity of KUBECONFIG; any other token is
passed on unchanged.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web
from patient import answered

from ddpjob_operator.kube.api.client import login

OWN_TOKEN = "cluster"
NOT_COUNTED = "X-By-The-Test"
_HOP = {"host", "authorization", "content-length", "transfer-encoding", "connection", NOT_COUNTED.lower()}


@dataclass(frozen=True)
class Seen:
    """A request of the operator."""

    verb: str
    resource: str
    """The resource as RBAC names it: pods, ddpjobs/status."""
    namespace: str
    name: str
    at: float
    token: str = ""

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}"

    @property
    def writes(self) -> bool:
        return self.verb in ("create", "update", "patch", "delete")


@dataclass
class Fault:
    """A fault for the next `times` requests with `str(seen) == what`; an empty `what` matches any request. `status`,
    `body`, `headers`: answer without the server. `text`: send this text, such as a proxy's HTML. `lost`: the server
    executes the request, but its answer is lost. `cut`: only a part of the answer arrives. `seconds`: delay of the
    request."""

    what: str
    status: int = 0
    message: str = "made by the test"
    reason: str = "Test"
    headers: dict[str, str] = field(default_factory=dict)
    body: dict[str, Any] | None = None
    text: str = ""
    lost: bool = False
    cut: bool = False
    seconds: float = 0.0
    times: float = 1
    where: Callable[[Seen], bool] = lambda _seen: True
    happened: int = 0


@dataclass
class LostEvent:
    """A watch event that is dropped. All later events arrive."""

    resource: str
    kind: str
    where: Callable[[Any], bool]
    """True for the object of the event to drop."""
    happened: int = 0

    def takes(self, resource: str, line: bytes) -> bool:
        """True if this line is the event to drop."""
        if self.happened or resource != self.resource or not line.strip():
            return False
        event = json.loads(line)
        if event["type"] != self.kind or not self.where(event["object"]):
            return False
        self.happened += 1
        return True


class FaultyApi:
    """A proxy, used as a context manager. The test may call its methods from its own thread."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.faults: list[Fault] = []
        self.lost: list[LostEvent] = []
        self.url = ""
        self.watch_seconds: float | None = None
        """Seconds after which a watch ends; None: when the API server ends it."""
        self._watches: dict[web.StreamResponse, tuple[Seen, asyncio.Event]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> FaultyApi:
        self._thread.start()
        self._run(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    # ---------------------------------------------------------------- faults

    def break_(self, what: str, status: int = 0, **more: Any) -> Fault:
        """Break the next requests that match `what`. more: other fields of the Fault."""
        fault = Fault(what, status, **more)
        self.faults.append(fault)
        return fault

    def lose_event(self, resource: str, kind: str, where: Callable[[Any], bool] = lambda _: True) -> LostEvent:
        """Drop one watch event of this resource that `where` accepts. kind: ADDED, MODIFIED or DELETED."""
        lost = LostEvent(resource, kind, where)
        self.lost.append(lost)
        return lost

    def mend(self) -> None:
        """Remove all faults and lost events."""
        self.faults.clear()
        self.lost.clear()

    def close_watches(self, resource: str = "", *, gone: bool = False) -> int:
        """End the watches of a resource, or all. gone: with an ERROR event of 410. Return how many were ended."""
        return self._run(self._close_watches(resource, gone))

    def requests(self, *, since: float = 0.0) -> collections.Counter[str]:
        """Count the requests by verb and resource."""
        return collections.Counter(str(s) for s in self.seen if s.at >= since)

    def writes(self, *, since: float = 0.0) -> list[str]:
        """Return all requests that change something."""
        return [f"{s} {s.namespace}/{s.name}" for s in self.seen if s.writes and s.at >= since]

    # ---------------------------------------------------------------- requests of the test

    def call(
        self,
        method: str,
        path: str,
        body: object = None,
        kind: str = "application/json",
        *,
        accept: str = "application/json",
    ) -> Any:
        """Send a request with the identity of KUBECONFIG. It is not counted. Raise HTTPError. body: bytes are sent
        unchanged, and their answer is not parsed."""
        headers = {"Authorization": f"Bearer {OWN_TOKEN}", NOT_COUNTED: "1", "Content-Type": kind, "Accept": accept}
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        answer = answered(request, 30)
        return None if isinstance(body, bytes) else json.loads(answer)

    def find(self, path: str) -> Any:
        """Return an object, or None if it does not exist."""
        try:
            return self.call("GET", path)
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise

    # ---------------------------------------------------------------- the proxy

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _start(self) -> None:
        self._info = login()
        connector = aiohttp.TCPConnector(limit=0, ssl=self._info.as_ssl_context())
        self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False)
        app = web.Application(client_max_size=2**24)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _stop(self) -> None:
        await self._close_watches("", gone=False)
        await self._runner.cleanup()
        await self._session.close()

    async def _close_watches(self, resource: str, gone: bool) -> int:
        count = 0
        for response, (seen, closed) in list(self._watches.items()):
            if resource in ("", seen.resource):
                if gone:
                    status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
                    await response.write(json.dumps({"type": "ERROR", "object": status}).encode() + b"\n")
                closed.set()
                count += 1
        return count

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        seen = read(request.method, request.path, dict(request.query), token)
        if NOT_COUNTED in request.headers:
            return await self._pass_on(request, seen)
        self.seen.append(seen)
        fault = next((f for f in self.faults if f.what in ("", str(seen)) and f.times > 0 and f.where(seen)), None)
        if fault is None:
            return await self._pass_on(request, seen)
        fault.times -= 1
        fault.happened += 1
        if fault.seconds:
            await asyncio.sleep(fault.seconds)
            return await self._pass_on(request, seen)
        if fault.lost:
            await self._pass_on(request, seen)
            request.transport.abort()
        if fault.cut:
            return await self._cut(request)
        if fault.text:
            return web.Response(text=fault.text, status=fault.status or 200, content_type="text/html")
        body = fault.body or {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "code": fault.status,
            "reason": fault.reason,
            "message": fault.message,
        }
        return web.json_response(body, status=fault.status or 200, headers=fault.headers)

    async def _cut(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b'{"kind": "List", "items": [')
        request.transport.abort()
        return response

    async def _pass_on(self, request: web.Request, seen: Seen) -> web.StreamResponse:
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP}
        own = seen.token == OWN_TOKEN
        headers |= self._info.as_http_headers() if own else {"Authorization": f"Bearer {seen.token}"}
        url = self._info.server.rstrip("/") + request.raw_path
        async with self._session.request(
            request.method, url, data=await request.read() or None, headers=headers
        ) as answer:
            if seen.verb == "watch" and answer.status == 200:
                return await self._stream(request, seen, answer)
            kept = {k: v for k, v in answer.headers.items() if k.lower() in ("content-type", "retry-after")}
            if "Content-Encoding" in answer.headers:
                kept["Content-Encoding"] = answer.headers["Content-Encoding"]
            return web.Response(status=answer.status, body=await answer.read(), headers=kept)

    async def _stream(self, request: web.Request, seen: Seen, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        closed = asyncio.Event()
        self._watches[response] = (seen, closed)
        copying = asyncio.ensure_future(self._copy(seen, answer, response))
        closing = asyncio.ensure_future(closed.wait())
        try:
            await asyncio.wait({copying, closing}, timeout=self.watch_seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._watches[response]
            for task in (copying, closing):
                task.cancel()
            await asyncio.gather(copying, closing, return_exceptions=True)
        with contextlib.suppress(ConnectionError):
            await response.write_eof()
        return response

    async def _copy(self, seen: Seen, answer: aiohttp.ClientResponse, response: web.StreamResponse) -> None:
        with contextlib.suppress(ConnectionError, aiohttp.ClientError):
            rest = b""
            async for chunk in answer.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if not any(lost.takes(seen.resource, line) for lost in self.lost):
                        await response.write(line + b"\n")


def read(method: str, path: str, query: dict[str, str], token: str = "") -> Seen:
    """Return verb, resource, namespace and name of a request, as a Seen."""
    parts = [p for p in path.split("/") if p]
    parts = parts[2:] if parts[:1] == ["api"] else parts[3:] if parts[:1] == ["apis"] else []
    namespace = ""
    if len(parts) > 2 and parts[0] == "namespaces":
        namespace, parts = parts[1], parts[2:]
    resource, name = [*parts, "", ""][:2]
    if len(parts) > 2:
        resource += f"/{parts[2]}"
    verb = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}.get(method, "get")
    if verb == "get" and resource and not name:
        verb = "watch" if query.get("watch") == "true" else "list"
    return Seen(verb, resource or path, namespace, name, time.monotonic(), token)


@contextlib.contextmanager
def faulty_api() -> Iterator[FaultyApi]:
    """Yield a proxy and stop it at the end."""
    with FaultyApi() as api:
        yield api
