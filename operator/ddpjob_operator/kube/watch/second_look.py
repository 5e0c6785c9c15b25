"""Finds changes that a watch has not shown, and reads those objects again.

A watch may lose an event: a proxy drops a line, an API server that was restored from a backup counts anew. Nothing else
would ever tell, and the job would wait for ever. So while this operator leads, it asks now and then for the names and
versions of all objects that it watches, without their contents. What our copy lacks in two looks in a row has been
lost: a watch may be late by seconds where a machine is overloaded, and to read all that again would add to the load.
Two lists in a row that are older than our copy was before show that the server counts anew.
bench/results says what that costs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ddpjob_operator.kube.api.client import ApiError, Client
from ddpjob_operator.kube.watch.store import Key, Listed, Raw, number

LOOK_SECONDS = 45.0


class Copy(Protocol):
    """What is compared with a list: a Store, or Nodes."""

    def listed(self, raw: Raw) -> Listed:
        """An object of a list, by its metadata alone. Raises LookupError or TypeError where it has none."""

    def newest(self, namespace: str) -> int:
        """The version of what is newest in it; 0: not known."""

    def begin_anew(self, namespace: str) -> None:
        """Whatever version comes is newer than what it has."""

    def missed(self, listed: Mapping[tuple[str, str], Listed], at: int, namespace: str) -> set[Listed]:
        """What the list of version `at` has and the copy lacks, or the reverse."""


@dataclass(frozen=True)
class Watched:
    """One collection that is watched."""

    plural: str
    namespace: str
    path: str
    selector: str
    copy: Copy
    read_again: Callable[[Key], Awaitable[None]]
    """Everything of one job (or node) into the copy. Raises ApiError."""

    def __str__(self) -> str:
        return f"{self.plural} in {self.namespace or 'all namespaces'}"


@dataclass(eq=False)
class SecondLook:
    """Runs until it is cancelled."""

    client: Client
    watched: Callable[[], Iterable[Watched]]
    """What is watched now: the version of a gang scheduler's API may change while this operator leads."""
    log: logging.Logger
    count: Callable[[str, int], None] = lambda _plural, _count: None
    """Called with the resource, and how many keys of it are read again."""
    _missed: dict[str, set[Listed]] = field(default_factory=dict)
    """In the last look, by collection."""
    _counts_anew: set[str] = field(default_factory=set)
    """The collections whose last list was older than our copy was before."""
    _logged: dict[str, str] = field(default_factory=dict)

    async def run(self) -> None:
        """A look every LOOK_SECONDS."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.look()

    async def look(self) -> None:
        """One collection after the other, so that no more than one list is held. Raises nothing."""
        for watched in self.watched():
            await self._try(watched)

    async def _try(self, watched: Watched) -> None:
        try:
            await self._look_at(watched)
            self._logged.pop(str(watched), None)
        except ApiError as error:
            self._report(watched, str(error))
        except Exception:
            # The end of this task would end the operator.
            self.log.exception("%s were not listed again", watched)

    async def _look_at(self, watched: Watched) -> None:
        listed: dict[tuple[str, str], Listed] = {}
        at, newest = 0, watched.copy.newest(watched.namespace)
        async for page in self.client.versions(watched.path, watched.selector):
            listed |= {one.place: one for one in map(watched.copy.listed, page.items)}
            at = number(page.version)
        self._compare(watched, at, newest)
        missed = watched.copy.missed(listed, at, watched.namespace)
        keys = sorted({one.key for one in missed & self._missed.get(str(watched), set())})
        self._missed[str(watched)] = missed
        if keys:
            self.count(watched.plural, len(keys))
            some = ", ".join("/".join(filter(None, key)) for key in keys[:3])
            more = f" and {len(keys) - 3} others" if len(keys) > 3 else ""
            self.log.warning("%s: the watch has not shown changes of %s%s; they are read again", watched, some, more)
        for key in keys:
            await watched.read_again(key)

    def _compare(self, watched: Watched, at: int, newest: int) -> None:
        """at: the version of a list, of which the API server promises that it is no older than what it has shown."""
        if not 0 < at < newest:
            self._counts_anew.discard(str(watched))
        elif str(watched) in self._counts_anew:
            text = "%s: the list is of version %d, and %d was seen before: a restored backup; all is read again"
            self.log.warning(text, watched, at, newest)
            watched.copy.begin_anew(watched.namespace)
        else:
            self._counts_anew.add(str(watched))

    def _report(self, watched: Watched, text: str) -> None:
        if self._logged.get(str(watched)) != text:
            self._logged[str(watched)] = text
            self.log.warning("%s were not listed again: %s", watched, text)
