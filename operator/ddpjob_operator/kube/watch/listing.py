"""Stores lists page by page. A raw object is kept no longer than its page, and a bad object does not end the list."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Set
from contextlib import AbstractContextManager
from typing import Any, Protocol

from ddpjob_operator.job.newest import Newest
from ddpjob_operator.kube.api.client import Page
from ddpjob_operator.kube.watch.store import UIDS_MAX, Key, ObjectKey, Store, number, version

# Objects stored before the event loop gets a turn. Storing a hostile DDPJob takes up to 10 ms.
PUT_AT_ONCE = 4


class Sink(Protocol):
    """Receiver of a collection: a Store, the NodeCache, or a Feed for DDPJobs."""

    def put(self, raw: Any) -> None:
        """Store an object as it was at its resourceVersion."""

    def remove(self, namespace: str, name: str, uid: str) -> None:
        """Remove the object with this UID."""

    def one_observation(self, namespace: str = "", key: Key | None = None) -> AbstractContextManager[set[ObjectKey]]:
        """Enter while the pages of a list arrive. namespace, key: what is listed ("" and None: all).

        Return the names of all stored objects that the list should contain.
        """

    def has(self, raw: Any) -> bool:
        """True if this version of an object, or a newer one, is known."""

    def begin_anew(self, namespace: str) -> None:
        """Accept any version from now on, in a namespace ("": all), because the cluster was restored from a backup."""

    def drop(self, unlisted: Set[ObjectKey], list_version: int) -> None:
        """Remove the objects that a complete list did not contain, except those that are newer than the list."""


class Careful:
    """Stores objects in a sink. An object that makes the sink fail is logged once, and the others are still stored."""

    def __init__(self, sink: Sink, what: str, log: logging.Logger) -> None:
        self._sink = sink
        self._what = what
        self._log = log
        self._logged: Newest[str, None] = Newest(UIDS_MAX)

    def put(self, raw: Any, told: int = 0) -> bool:
        """Store an object. Return True if the watch missed it. told: version of the last watch event."""
        try:
            lacked = 0 < version(raw["metadata"]) <= told and not self._sink.has(raw)
            self._sink.put(raw)
        except Exception:
            # A bug in reading one object must not end the watch of all objects.
            self._report(raw)
            return False
        return lacked

    def remove(self, raw: Any) -> None:
        """Remove an object, from its DELETED event."""
        try:
            metadata = raw["metadata"]
            if isinstance(self._sink, Store):
                self._sink.put(raw)  # a DELETED event may be the first to show how a pod ended
            self._sink.remove(metadata.get("namespace", ""), metadata["name"], metadata["uid"])
        except Exception:
            self._report(raw)

    def _report(self, raw: Any) -> None:
        metadata = raw.get("metadata") if isinstance(raw, dict) else None
        known = metadata if isinstance(metadata, dict) else {}
        uid = str(known.get("uid"))
        if uid not in self._logged:
            self._logged[uid] = None
            name = f"{known.get('namespace', '')}/{known.get('name')}"
            self._log.exception("%s: %s cannot be read, and is left out", self._what, name)


async def take(
    pages: AsyncIterator[Page],
    sink: Sink,
    put: Callable[[Any], object],
    check: Callable[[int], None] = lambda _: None,
    **listed: Any,
) -> str:
    """Store a whole list, and remove stored objects that are not in it. Return its resourceVersion.

    check: called with the version before the objects of a page are stored. listed: as for `Sink.one_observation`. The
    memory depends on the number of stored objects, not on the length of the list, which any user can extend.
    """
    at = ""
    with sink.one_observation(**listed) as unlisted:
        async for items, at in pages:
            check(number(at))
            unlisted.difference_update(place for raw in items if (place := place_of(raw)) is not None)
            for done in range(1, len(items) + 1):  # pop frees each raw object before the next is stored
                put(items.pop())
                if done % PUT_AT_ONCE == 0:
                    await asyncio.sleep(0)
    sink.drop(unlisted, number(at))
    return at


def place_of(raw: Any) -> ObjectKey | None:
    """Return namespace and name of an object; None for an object without a name."""
    metadata = raw.get("metadata") if isinstance(raw, dict) else None
    if not isinstance(metadata, dict) or not isinstance(metadata.get("name"), str):
        return None
    return str(metadata.get("namespace", "")), metadata["name"]
