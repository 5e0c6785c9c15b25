"""Serves /metrics, which names jobs and namespaces. A NetworkPolicy can restrict this separate port to a scraper.

The answer is built in a thread, one at a time, and reused for a second, so that frequent requests cost little.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from aiohttp import web

from ddpjob_operator.job import bounds, validation
from ddpjob_operator.kube.ports.bounded_server import BoundedServer, not_served
from ddpjob_operator.metrics import meter as meters
from ddpjob_operator.metrics.meter import Meter, Moment

PATH = "/metrics"
SAME_ANSWER_SECONDS = 1.0


class Scrape(NamedTuple):
    """State of the operator at a scrape. jobs: raw, because the thread parses them; None without leadership."""

    moment: Moment
    jobs: list[Mapping[str, Any]] | None


def read(snapshot: Scrape) -> Moment:
    jobs = None if snapshot.jobs is None else [job(raw) for raw in snapshot.jobs]
    return snapshot.moment._replace(jobs=jobs)


def job(raw: Mapping[str, Any]) -> meters.MeteredJob:
    """Return the fields of a stored job that the metrics need."""
    metadata = raw["metadata"]
    try:
        status = validation.stored_status(raw)
    except validation.UnreadableJobError:
        status = None
    created_at = bounds.time(metadata.get("creationTimestamp"))
    return meters.MeteredJob(metadata.get("namespace", ""), metadata["name"], metadata["uid"], status, created_at)


class Exposition(BoundedServer):
    """The HTTP server of /metrics; `snapshot` returns the state at a scrape."""

    def __init__(self, meter: Meter, snapshot: Callable[[], Scrape]) -> None:
        super().__init__()
        self._meter = meter
        self._snapshot = snapshot
        self._lock = asyncio.Lock()
        self._written: dict[bool, tuple[float, bytes, str]] = {}
        """By format: time, body, and content type."""

    async def answer(self, request: web.BaseRequest) -> web.Response:
        """Return the metrics in the format that the scraper accepts."""
        if (refusal := not_served(request, PATH)) is not None:
            return refusal
        openmetrics = "application/openmetrics-text" in request.headers.get("Accept", "")
        async with self._lock:
            at, body, content_type = self._written.get(openmetrics, (float("-inf"), b"", ""))
            if time.monotonic() - at > SAME_ANSWER_SECONDS:
                snapshot = self._snapshot()
                body, content_type = await asyncio.to_thread(
                    lambda: self._meter.text(read(snapshot), openmetrics=openmetrics)
                )
                now = time.monotonic()
                # Keep a fresh answer in the other format, so that scrapers with different formats share the cache.
                fresh = {of: it for of, it in self._written.items() if now - it[0] <= SAME_ANSWER_SECONDS}
                self._written = {**fresh, openmetrics: (now, body, content_type)}
        return web.Response(body=body, headers={"Content-Type": content_type})
