"""The session by which kopf reaches the API server: it reads DDPJobs within the bounds of our own client (reading.py).

kopf 1.45 gives what it watches to `json.loads`, and ends the process when that fails. A DDPJob whose template is nested
1,000 levels deep would end every operator of the cluster, and each that is started after it (seen on Kubernetes 1.36):
no job would start any more. Handing in a session (kopf.AiohttpSession) is kopf's own way to change that.
Can go when kopf leaves out an object that it cannot read and goes on.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import kopf
import orjson

from ddpjob_operator.kube import reading

_LOGGER = logging.getLogger(__name__)


def session(
    info: kopf.ConnectionInfo,
    answered: Callable[..., None] = lambda *_, **__: None,
    take: Callable[[str, reading.Raw], bool] = lambda _kind, _raw: False,
    **options: Any,
) -> kopf.AiohttpSession:
    """What a login handler returns. answered: told of each answer (measuring.OfKopf). options: kopf's, such as
    `expiration`. Called in the event loop.

    take: puts the object of an event into our copy, by the event's type; False: it is left to kopf. kopf, for which
    an event costs as much as five pods do, gets a bookmark where it was taken. It misses nothing: our handler does with
    its events what `take` does, and kopf itself keeps nothing of a job.
    """
    opened = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=info.as_ssl_context()),
        headers=info.as_http_headers(),
        proxy=info.proxy_url,
        trust_env=bool(info.trust_env),
        response_class=type("_Counted", (_Response,), {"answered": staticmethod(answered), "take": staticmethod(take)}),
    )
    return kopf.AiohttpSession(
        server=info.server, default_namespace=info.default_namespace, aiohttp_session=opened, **options
    )


class _Response(aiohttp.ClientResponse):
    """Lists and events of DDPJobs, cut as they arrive."""

    answered: Callable[..., None]
    take: Callable[[str, reading.Raw], bool]

    async def start(self, connection: Any) -> aiohttp.ClientResponse:
        """As aiohttp does it, with a stream that kopf can read."""
        began = time.monotonic()
        await super().start(connection)
        took, watch = time.monotonic() - began, "watch" in self.url.query
        self.answered(self.method, self.url.path, self.status, took, watch=watch)
        self.content = _Stream(self.content, self.take)  # type: ignore[assignment]
        return self

    async def json(self, **_: Any) -> Any:
        """What is asked for at once: a list of jobs, or an error of the API server."""
        content = await self.read()
        try:
            return reading.jobs(content)
        except reading.BadJsonError as error:
            if self.status >= 400:
                raise json.JSONDecodeError(str(error), "", 0) from None  # kopf then logs the text
            raise aiohttp.ClientPayloadError(str(error)) from None  # kopf then asks again


class _Stream:
    """A stream of watch events: each line is read, cut and written again."""

    def __init__(self, stream: aiohttp.StreamReader, take: Callable[[str, reading.Raw], bool]) -> None:
        self._stream = stream
        self._take = take

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def iter_chunked(self, _: int) -> AsyncIterator[bytes]:
        """How kopf reads a watch."""
        async for line in reading.lines(self._stream):
            try:
                event = reading.event(line)
                if self._take(event["type"], event["object"]):
                    at = event["object"]["metadata"]["resourceVersion"]
                    event = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": at}}}
                if event["type"] in ("ADDED", "MODIFIED", "DELETED"):
                    event["object"] = reading.job(event["object"])
                yield orjson.dumps(event) + b"\n"
            except reading.BadJsonError as error:
                _LOGGER.warning("an event of a DDPJob cannot be read, and is left out: %s", error)
