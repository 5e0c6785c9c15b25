"""The session by which kopf watches the DDPJobs: our own reflectors answer it, and kopf itself sends no request.

kopf 1.45 ends a watch for good if the API server answers it with 410, with a code that is no error of a server, or with
an event that `json.loads` cannot read (clients/watching.py, clients/api.py); its backoffs end after a minute; and after
a broken watch it does not report what the new list lacks. Users would see an operator that is running and does nothing
(seen with 410), or one that restarts whenever the API server is away. Handing in a session (kopf.AiohttpSession) is
kopf's own way to change how it reaches the API server. Our reflectors list and watch again whatever is answered.
Can go when kopf lists and watches again after any answer, and reports what is missing from a new list.
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
# kopf waits until it has seen the kind Namespace, although we name the namespaces.
_NAMESPACES: Raw = {"name": "namespaces", "singularName": "", "kind": "Namespace", "namespaced": False, "verbs": []}
_DISCOVERY: dict[str, Raw] = {
    "/api": {"versions": ["v1"]},
    "/api/v1": {"resources": [_NAMESPACES]},
    "/apis": {"groups": [{"name": api.GROUP, "versions": [_VERSION], "preferredVersion": _VERSION}]},
    f"/apis/{api.GROUP}/{api.VERSION}": {"resources": [_WATCHED]},
}


class Feed:
    """The sink of a reflector of DDPJobs: all goes straight into our copy, and kopf is told which jobs begin or end. Of
    a change of a job that we have it is not told, because it needs as much CPU for an event as we do for five pods;
    and of none more than its name, because its queue has no limit, and thousands of jobs may be created at once."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs
        self._lists = False
        self._events: asyncio.Queue[Raw] = asyncio.Queue()

    def put(self, raw: Raw) -> None:
        """A job as it was at its resourceVersion."""
        if self._lists:
            if not self._jobs.has(raw):  # else each list would be news of all jobs of which a part is kept
                self._jobs.put(raw)
        elif not self._jobs.take(raw):
            self._jobs.put_quietly(raw)  # kopf's handler tells
            metadata = raw["metadata"]
            self._tell("ADDED", metadata.get("namespace", ""), metadata["name"], metadata["uid"])

    def remove(self, namespace: str, name: str, uid: str) -> None:
        """The job with this uid is gone."""
        self._tell("DELETED", namespace, name, uid)

    def _tell(self, what: str, namespace: str, name: str, uid: str) -> None:
        metadata = {"namespace": namespace, "name": name, "uid": uid}
        body = {"apiVersion": api.API_VERSION, "kind": api.KIND, "metadata": metadata}
        self._events.put_nowait({"type": what, "object": body})

    def has(self, raw: Raw) -> bool:
        """True if a job is known as it was at its resourceVersion, or later."""
        return self._jobs.has(raw)

    def begin_anew(self, namespace: str) -> None:
        """The cluster was restored from a backup."""
        self._jobs.begin_anew(namespace)

    @contextmanager
    def one_observation(self, namespace: str = "", key: Key | None = None) -> Iterator[None]:
        """While the pages of a list come."""
        with self._jobs.one_observation(namespace, key):
            self._lists = True
            try:
                yield
            finally:
                self._lists = False

    def retain(self, named: Set[ObjectKey], list_version: int, namespace: str = "") -> None:
        """The end of a list: a job that it did not name is gone."""
        self._jobs.retain(named, list_version, namespace)

    async def lines(self) -> AsyncIterator[bytes]:
        """The events, as the API server writes them; without an end."""
        while True:
            yield orjson.dumps(await self._events.get()) + b"\n"


def session(feeds: Mapping[str, Feed], opened: Callable[[str], None]) -> kopf.AiohttpSession:
    """What a login handler returns. feeds: by the path of the watch; opened: called with it when the watch begins."""
    return kopf.AiohttpSession(server="", aiohttp_session=_Session(feeds, opened))  # type: ignore[arg-type]


class _Session:
    """What kopf uses of an aiohttp.ClientSession."""

    closed = False

    def __init__(self, feeds: Mapping[str, Feed], opened: Callable[[str], None]) -> None:
        self.headers: dict[str, str] = {}
        self._feeds = feeds
        self._opened = opened

    async def request(self, *, method: str, url: str, **_: Any) -> _Answer:
        """kopf asks which kinds are served, and then watches."""
        path = urlsplit(url).path
        if method.upper() == "GET" and (feed := self._feeds.get(path)) is not None:
            self._opened(path)
            return _Answer({}, feed)
        return _Answer(_DISCOVERY[path])

    async def close(self) -> None:
        """Nothing is open."""


class _Answer:
    """What kopf uses of an aiohttp.ClientResponse."""

    status = 200

    def __init__(self, body: Raw, feed: Feed | None = None) -> None:
        self._body = body
        self._feed = feed

    async def __aenter__(self) -> _Answer:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing is open."""

    async def json(self) -> Raw:
        """The whole answer."""
        return self._body

    @property
    def content(self) -> _Answer:
        """Where a watch is read from."""
        return self

    def iter_chunked(self, _: int) -> AsyncIterator[bytes]:
        """How kopf reads a watch. It ends with the task that reads it."""
        assert self._feed is not None, "only a watch is read in pieces"
        return self._feed.lines()

    def close(self) -> None:
        """Nothing is open."""
