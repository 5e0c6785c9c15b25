"""/metrics on a port of its own, because it names jobs and namespaces: a NetworkPolicy can open it to a scraper alone.

Whoever reaches the port can ask as often as he likes and read as slowly as he likes, so the answer is written in a
thread, one at a time, and serves all who ask within a second; it is sent piece by piece, so that it is held once for
all of them; and a peer that does not read, or sends no request, is cut off. An operator without a scraper pays nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from aiohttp import web

from ddpjob_operator.job import bounds, validation
from ddpjob_operator.kube.bounded_server import BoundedServer
from ddpjob_operator.metrics import meter as meters
from ddpjob_operator.metrics.meter import Meter, Moment

PATH = "/metrics"
# Prometheus' own limit for a scrape is 10 s by default.
ANSWER_SECONDS = 10.0
IDLE_SECONDS = 75.0
SAME_ANSWER_SECONDS = 1.0
PIECE = 1 << 16
"""Bytes of an answer that are handed to a connection at a time."""


class Snapshot(NamedTuple):
    """What the operator knows at a scrape; the jobs still raw, for reading them is the thread's work. None: it does not
    lead."""

    moment: Moment
    jobs: list[Mapping[str, Any]] | None


def read(snapshot: Snapshot) -> Moment:
    """With the statuses of the jobs."""
    jobs = None if snapshot.jobs is None else [job(raw) for raw in snapshot.jobs]
    return snapshot.moment._replace(jobs=jobs)


def job(raw: Mapping[str, Any]) -> meters.Job:
    """A stored job, as it is counted."""
    metadata = raw["metadata"]
    try:
        status = validation.stored_status(raw)
    except validation.UnreadableJobError:
        status = None
    created_at = bounds.time(metadata.get("creationTimestamp"))
    return meters.Job(metadata.get("namespace", ""), metadata["name"], metadata["uid"], status, created_at)


class Exposition:
    """Serves from `start` to `stop`."""

    def __init__(
        self, meter: Meter, snapshot: Callable[[], Snapshot], *, answer_seconds: float = ANSWER_SECONDS
    ) -> None:
        self._meter = meter
        self._snapshot = snapshot
        self._answer_seconds = answer_seconds
        self._lock = asyncio.Lock()
        self._written: dict[bool, tuple[float, bytes, str]] = {}
        """By format: when, what, and its content type."""
        self._server: BoundedServer | None = None

    async def start(self, host: str | None, port: int) -> None:
        """Listen; host None is every address of the pod, port 0 any free one (`port`). Raises OSError."""
        self._server = BoundedServer(self._answer, lingering_time=0.0)
        await self._server.listen(host, port, backlog=64)

    @property
    def port(self) -> int:
        """Where it listens."""
        assert self._server is not None, "start() comes first"
        return self._server.port

    async def stop(self) -> None:
        """All connections are closed."""
        if self._server is not None:
            await self._server.stop()
            self._server = None

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        assert self._server is not None
        # Cut at the end of this time, also in the middle of what a peer does not read.
        self._server.allow(request.protocol, self._answer_seconds, busy=True)
        if request.path != PATH or request.method not in ("GET", "HEAD"):
            return web.Response(status=404, text=f"only GET {PATH} is served here\n")
        body, content_type = await self._body(request.headers.get("Accept", ""))
        response = web.StreamResponse(headers={"Content-Type": content_type, "Content-Length": str(len(body))})
        with contextlib.suppress(ConnectionError):
            await response.prepare(request)
            for start in range(0, len(body) if request.method == "GET" else 0, PIECE):
                await response.write(memoryview(body)[start : start + PIECE])
            await response.write_eof()
            # aiohttp does not wait for the peer to read the last piece; the deadline above is for that.
            await request.writer.drain()
            self._server.allow(request.protocol, IDLE_SECONDS, busy=False)
        return response

    async def _body(self, accept: str) -> tuple[bytes, str]:
        openmetrics = "application/openmetrics-text" in accept
        async with self._lock:
            at, body, content_type = self._written.get(openmetrics, (float("-inf"), b"", ""))
            if time.monotonic() - at > SAME_ANSWER_SECONDS:
                snapshot = self._snapshot()
                body, content_type = await asyncio.to_thread(self._write, snapshot, openmetrics)
                now = time.monotonic()
                # The other format stays for as long as it is of use, so that two who ask in turn change nothing.
                fresh = {of: it for of, it in self._written.items() if now - it[0] <= SAME_ANSWER_SECONDS}
                self._written = {**fresh, openmetrics: (now, body, content_type)}
        return body, content_type

    def _write(self, snapshot: Snapshot, openmetrics: bool) -> tuple[bytes, str]:
        return self._meter.text(read(snapshot), openmetrics=openmetrics)
