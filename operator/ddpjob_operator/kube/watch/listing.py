"""Lists, taken page by page: a raw object is held no longer than its page, and one that fails does not end the list."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Set
from contextlib import AbstractContextManager
from typing import Any, Protocol

from ddpjob_operator.kube.api.client import Page
from ddpjob_operator.kube.watch.store import Key, ObjectKey, Store, Uids, number, version

# Objects of a list that are put before others may go on: a DDPJob takes up to 10 ms, if its owner wants it to.
PUT_AT_ONCE = 4


class Sink(Protocol):
    """Where a copy of a collection is kept."""

    def put(self, raw: Any) -> None:
        """An object as it was at its resourceVersion."""

    def remove(self, namespace: str, name: str, uid: str) -> None:
        """The object with this uid is gone."""

    def one_observation(self, namespace: str = "", key: Key | None = None) -> AbstractContextManager[None]:
        """While the pages of a list come. namespace, key: what is listed."""

    def has(self, raw: Any) -> bool:
        """True if the copy has this version of an object, or a later one."""

    def begin_anew(self, namespace: str) -> None:
        """Whatever comes of a namespace (empty: of any) is newer than what the copy has."""

    def retain(self, named: Set[ObjectKey], list_version: int, namespace: str = "") -> None:
        """The end of a list: all that it named was put."""


class Careful:
    """Puts objects into a sink; what it cannot take is logged once, and everything else goes on."""

    def __init__(self, sink: Sink, what: str, log: logging.Logger) -> None:
        self._sink = sink
        self._what = what
        self._log = log
        self._logged = Uids()

    def put(self, raw: Any, told: int = 0) -> bool:
        """Put an object. told: the version that a watch has come to. True if the watch should have brought this one."""
        try:
            lacked = 0 < version(raw["metadata"]) <= told and not self._sink.has(raw)
            self._sink.put(raw)
        except Exception:
            # A bug in reading one object must not end the watch of all the others.
            self._report(raw)
            return False
        return lacked

    def remove(self, raw: Any) -> None:
        """An object that is gone."""
        try:
            metadata = raw["metadata"]
            if isinstance(self._sink, Store):
                self._sink.put(raw)  # how a pod ended may come with its deletion, and not before
            self._sink.remove(metadata.get("namespace", ""), metadata["name"], metadata["uid"])
        except Exception:
            self._report(raw)

    def _report(self, raw: Any) -> None:
        metadata = raw.get("metadata") if isinstance(raw, dict) else None
        known = metadata if isinstance(metadata, dict) else {}
        uid = str(known.get("uid"))
        if uid not in self._logged:
            self._logged.add(uid)
            name = f"{known.get('namespace', '')}/{known.get('name')}"
            self._log.exception("%s: %s cannot be taken, and is left out", self._what, name)


async def take(
    pages: AsyncIterator[Page],
    sink: Sink,
    put: Callable[[Any], object],
    check: Callable[[int], None] = lambda _: None,
    **listed: Any,
) -> str:
    """Put all of a list and drop what it does not name; its version. check: asked before the first object is put.
    listed: what is listed, as `sink.retain` takes it. A list shows all its objects at once, in one observation."""
    named: set[ObjectKey] = set()
    at = ""
    with sink.one_observation(**listed):
        async for items, at in pages:
            check(number(at))
            named |= {place for raw in items if (place := place_of(raw)) is not None}
            for done in range(1, len(items) + 1):  # each is dropped before the next is read
                put(items.pop())
                if done % PUT_AT_ONCE == 0:
                    await asyncio.sleep(0)
    sink.retain(named, number(at), **listed)
    return at


def place_of(raw: Any) -> ObjectKey | None:
    """Namespace and name; None where it has none."""
    metadata = raw.get("metadata") if isinstance(raw, dict) else None
    if not isinstance(metadata, dict) or not isinstance(metadata.get("name"), str):
        return None
    return str(metadata.get("namespace", "")), metadata["name"]
