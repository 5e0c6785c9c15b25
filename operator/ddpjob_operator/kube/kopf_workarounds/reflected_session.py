"""The session through which kopf watches DDPJobs. Our reflectors answer it; kopf itself sends no request.

In: DDPJobs from a Reflector, which uses a Feed as its sink; one Feed per watched namespace. Out: full jobs into our
copy (Jobs), and small events to kopf, only for jobs that are new or deleted. kopf gets the session from the login
handler (handlers.py), its documented way to use another transport.

kopf 1.45 (seen with 1.45.2; files in kopf/_cogs) has these limits:

- A watch ends for good after an answer of 410 or most other 4xx codes, because clients/watching.py, line 89, catches
  only 429. It also ends after an event that `json.loads` cannot read (clients/api.py, line 278).
- Retries end after 54 s (`error_backoffs`, configs/configuration.py, line 546).
- After a broken watch it does not report which objects are missing from the new list.

Without this session, users would see an operator that is running and does nothing (seen with 410), or one that restarts
whenever the API server is away.

The price: `_Session` and `_Answer` imitate the parts of aiohttp that kopf uses, so a new kopf may need more of them.

Remove this when kopf lists and watches again after any answer, and reports the objects that a new list lacks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import kopf
import orjson

from ddpjob_operator.job import api
from ddpjob_operator.kube.watch.store import Jobs, Key, ObjectKey

Raw = dict[str, Any]
_VERSION = {"groupVersion": f"{api.GROUP}/{api.VERSION}", "version": api.VERSION}
_WATCHED: Raw = {
    "name": api.PLURAL,
    "singularName": "ddpjob",
    "kind": api.KIND,
    "namespaced": True,
    "verbs": ["list", "watch"],
}
# kopf waits for the kind Namespace although we name namespaces (1.45.2, kopf/_core/reactor/observation.py, line 46).
_NAMESPACES: Raw = {"name": "namespaces", "singularName": "", "kind": "Namespace", "namespaced": False, "verbs": []}
_DISCOVERY: dict[str, Raw] = {
    "/api": {"versions": ["v1"]},
    "/api/v1": {"resources": [_NAMESPACES]},
    "/apis": {"groups": [{"name": api.GROUP, "versions": [_VERSION], "preferredVersion": _VERSION}]},
    f"/apis/{api.GROUP}/{api.VERSION}": {"resources": [_WATCHED]},
}


class Feed:
    """The sink of a reflector of DDPJobs. Jobs go into our copy; kopf gets an event only if a job is new or deleted.

    An event costs kopf as much CPU as five pods cost us, so a change of a known job sends kopf no event. An event has
    only the name, because kopf's queue has no limit. Its type is DELETED also for a new job, because kopf keeps a
    kilobyte of each object until that event (kopf/_core/reactor/processing.py, line 62).
    """

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs
        self._lists = False
        self._events: asyncio.Queue[Raw] = asyncio.Queue()

    def put(self, raw: Raw) -> None:
        if self._lists:
            if not self._jobs.has(raw):  # otherwise each list would enqueue every job that is kept only in part
                self._jobs.put(raw)
        elif not self._jobs.take(raw):
            self._jobs.put_quietly(raw)  # kopf's handler enqueues the job
            metadata = raw["metadata"]
            namespace, name = metadata.get("namespace", ""), metadata["name"]
            if self._jobs.entry(namespace, name) is not None:
                self._tell("ADDED", namespace, name, metadata["uid"])

    def remove(self, namespace: str, name: str, uid: str) -> None:
        """Send kopf the deletion. Its handler then removes the job from our copy."""
        self._tell("DELETED", namespace, name, uid)

    def _tell(self, what: str, namespace: str, name: str, uid: str) -> None:
        metadata = {"namespace": namespace, "name": name, "uid": uid}
        body = {"apiVersion": api.API_VERSION, "kind": api.KIND, "metadata": metadata, "change": what}
        self._events.put_nowait({"type": "DELETED", "object": body})

    def has(self, raw: Raw) -> bool:
        """True if the job is known, or if it may be missing only because there was no room for it."""
        return self._jobs.has(raw) or self._jobs.leaves_out(raw["metadata"].get("namespace", ""))

    def begin_anew(self, namespace: str) -> None:
        self._jobs.begin_anew(namespace)

    @contextmanager
    def one_observation(self, namespace: str = "", key: Key | None = None) -> Iterator[set[ObjectKey]]:
        """Keep `put` from sending events to kopf while a list arrives."""
        with self._jobs.one_observation(namespace, key) as places:
            self._lists = True
            try:
                yield places
            finally:
                self._lists = False

    def drop(self, unlisted: Set[ObjectKey], list_version: int) -> None:
        self._jobs.drop(unlisted, list_version)

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield the events for kopf as lines of JSON, forever."""
        while True:
            yield orjson.dumps(await self._events.get()) + b"\n"


def session(feeds: Mapping[str, Feed], opened: Callable[[str], None]) -> kopf.AiohttpSession:
    """Return the session for the login handler. feeds: by path. opened: called with the path of each new watch."""
    return kopf.AiohttpSession(server="", aiohttp_session=_Session(feeds, opened))  # type: ignore[arg-type]


class _Session:
    """The part of aiohttp.ClientSession that kopf 1.45 uses."""

    closed = False

    def __init__(self, feeds: Mapping[str, Feed], opened: Callable[[str], None]) -> None:
        self.headers: dict[str, str] = {}
        self._feeds = feeds
        self._opened = opened

    async def request(self, *, method: str, url: str, **_: Any) -> _Answer:
        """Answer kopf's requests: discovery of kinds, and watches."""
        path = urlsplit(url).path
        if method.upper() == "GET" and (feed := self._feeds.get(path)) is not None:
            self._opened(path)
            return _Answer({}, feed)
        return _Answer(_DISCOVERY[path])

    async def close(self) -> None:
        """Do nothing, because no connection is open."""


class _Answer:
    """The part of aiohttp.ClientResponse, and of its content, that kopf 1.45 uses."""

    status = 200

    def __init__(self, body: Raw, feed: Feed | None = None) -> None:
        self._body = body
        self._feed = feed

    async def __aenter__(self) -> _Answer:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Do nothing, because no connection is open."""

    async def json(self) -> Raw:
        return self._body

    @property
    def content(self) -> _Answer:
        return self

    def iter_chunked(self, _: int) -> AsyncIterator[bytes]:
        """Iterate over the events of a watch, as kopf/_cogs/clients/api.py does."""
        assert self._feed is not None, "only a watch is read in pieces"
        return self._feed.lines()

    def close(self) -> None:
        """Do nothing, because no connection is open."""
