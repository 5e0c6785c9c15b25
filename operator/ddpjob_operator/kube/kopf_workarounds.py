"""Everything that is here only because kopf 1.45 watches the DDPJobs. With a Reflector for DDPJobs, as pods and
Services have one, all of it could go; each part also says which change of kopf would do.

Three more are lines elsewhere. handlers.py sets the stop flag before it stops the operator, because kopf waits 5 s for
a task of its own that waits for that flag (kopf 1.45, reactor/running.py), and gives each login an expiration of its
own; health.py answers /healthz in place of kopf's probe.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import aiohttp
import kopf
import orjson

from ddpjob_operator.job import api
from ddpjob_operator.kube import reading
from ddpjob_operator.kube.client import ApiError, Client, collection
from ddpjob_operator.kube.listing import Careful, take
from ddpjob_operator.kube.runtime import Runtime
from ddpjob_operator.kube.store import Jobs

_LOGGER = logging.getLogger(__name__)
SWEEP_SECONDS = 600.0


# The session by which kopf reaches the API server: it reads DDPJobs within the bounds of our own client (reading.py).
# kopf 1.45 gives what it watches to `json.loads`, and ends the process when that fails: a DDPJob whose template is
# nested 1,000 levels deep would end every operator of the cluster, and each that is started after it (seen on
# Kubernetes 1.36). Handing in a session (kopf.AiohttpSession) is kopf's own way to change that. Can go when kopf leaves
# out an object that it cannot read and goes on.


def session(info: kopf.ConnectionInfo, **options: Any) -> kopf.AiohttpSession:
    """What a login handler returns. options: kopf's, such as `expiration`. Called in the event loop."""
    opened = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=info.as_ssl_context()),
        headers=info.as_http_headers(),
        proxy=info.proxy_url,
        trust_env=bool(info.trust_env),
        response_class=_Response,
    )
    return kopf.AiohttpSession(
        server=info.server, default_namespace=info.default_namespace, aiohttp_session=opened, **options
    )


class _Response(aiohttp.ClientResponse):
    """Lists and events of DDPJobs, cut as they arrive."""

    async def start(self, connection: Any) -> aiohttp.ClientResponse:
        """As aiohttp does it, with a stream that kopf can read."""
        await super().start(connection)
        self.content = _Stream(self.content)  # type: ignore[assignment]
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

    def __init__(self, stream: aiohttp.StreamReader) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def iter_chunked(self, _: int) -> AsyncIterator[bytes]:
        """How kopf reads a watch."""
        async for line in reading.lines(self._stream):
            try:
                event = reading.event(line)
                if event["type"] in ("ADDED", "MODIFIED", "DELETED"):
                    event["object"] = reading.job(event["object"])
                yield orjson.dumps(event) + b"\n"
            except reading.BadJsonError as error:
                _LOGGER.warning("an event of a DDPJob cannot be read, and is left out: %s", error)


# How long kopf waits before it asks the API server, or logs in, again.
# kopf 1.45 ends the process once its backoffs are used up (54 s by default), so an API server that is away for a minute
# would restart the operator; and it calls the login handler again at once where the API server refuses the credentials.
# Can go when kopf takes an endless backoff from its settings, and waits between logins.


class ErrorBackoffs:
    """kopf's waits between failing requests, without an end.

    A class, because kopf iterates over it again for each request, and a generator is used up by the first (kopf 1.45,
    clients/api.py).
    """

    def __iter__(self) -> Iterator[float]:
        """1, 2, 4 … 30 s, and 30 s from then on."""
        yield from (1.0, 2.0, 4.0, 8.0, 16.0)
        yield from itertools.repeat(30.0)


async def paced(seconds: float) -> AsyncIterator[None]:
    """Yields at most once per `seconds`."""
    last = float("-inf")
    while True:
        await asyncio.sleep(max(0.0, last + seconds - time.monotonic()))
        last = time.monotonic()
        yield


# Forgets jobs that were deleted while kopf's watch was broken: kopf 1.45 lists again then, and does not report what the
# new list lacks. Can go when kopf reports such deletions.


async def sweep(client: Client, jobs: Jobs, namespaces: Sequence[str], runtime: Runtime) -> None:
    """Until cancelled."""
    careful = Careful(jobs, "DDPJobs", runtime.log)
    while True:
        await asyncio.sleep(SWEEP_SECONDS)
        for namespace in namespaces:
            await _list(client, jobs, namespace, careful, runtime.log)


async def _list(client: Client, jobs: Jobs, namespace: str, careful: Careful, log: logging.Logger) -> None:
    try:
        await take(client.pages(collection(api.PLURAL, namespace)), jobs, careful.put, namespace=namespace)
    except ApiError as error:
        log.warning("the jobs were not listed again: %s", error)
    except Exception:
        log.exception("the jobs were not listed again")  # the end of the sweep would end the operator


# kopf 1.45 logs an answer of the API server with three stacks of its own code. Can go when it logs the sentence alone.


def without_kopfs_stack(record: logging.LogRecord) -> bool:
    """A filter of a log handler: errors of kopf and aiohttp lose their stack; a bug of ours keeps it."""
    error = record.exc_info[1] if record.exc_info else None
    if type(error).__module__.partition(".")[0] in ("kopf", "aiohttp"):
        record.exc_info = record.exc_text = None
    return True


# kopf 1.45 logs each try of a request that fails as an error; the watches of pods and Services have said already that
# the API server is away. Not left out altogether: an error of the DDPJobs' own watch is seen nowhere else. Can go when
# kopf has a setting for it.

RETRY_SECONDS = 60.0


class RetriesNowAndThen:
    """A filter of a log handler: one of kopf's records about a retry in RETRY_SECONDS."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = float("-inf")

    def __call__(self, record: logging.LogRecord) -> bool:
        """Whether the record is logged."""
        if not (record.name.startswith("kopf") and "; will retry: " in str(record.msg)):
            return True
        if self._clock() - self._last < RETRY_SECONDS:
            return False
        self._last = self._clock()
        return True
