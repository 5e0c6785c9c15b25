"""Keeps a copy of one collection up to date with LIST and then WATCH, like client-go's Reflector.

In: pages and watch events from the client. Out: calls of a Sink (watch/listing.py), usually a Store. Each Reflector
runs in one task that ends only when it is cancelled. kopf's watch costs 25 times as much CPU per pod and stops for good
after some answers (kopf_workarounds/reflected_session.py).

A watch can lose events: a proxy drops a line, or an API server restored from a backup starts from an older version. So
the collection is listed again about every 10 minutes, while the watch goes on, and the list wins. client-go lists again
only after an error, which costs less.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from ddpjob_operator.kube.api.client import NO_ANSWER, ApiError, Client, collection
from ddpjob_operator.kube.api.runtime import SYSTEM, Runtime
from ddpjob_operator.kube.watch.listing import Careful, Sink, take
from ddpjob_operator.kube.watch.store import number
from ddpjob_operator.metrics import names
from ddpjob_operator.metrics.meter import Meter

BACK_OFF_SECONDS_FIRST, BACK_OFF_SECONDS_MAX = 0.5, 30.0
LOG_AGAIN_SECONDS = 300.0
# Failures shorter than these seconds are not logged: a broken connection or a starting API server needs no user action.
QUIET_SECONDS = 5.0
# A watch that was open for these seconds has worked: its end is the server's time-out and causes no back-off.
HEALTHY_SECONDS = 10.0
# An outdated list usually comes from an API server that lags behind and catches up in seconds.
# After this many outdated lists in a row, the cluster was probably restored from a backup, so the list is accepted.
STALE_LISTS_MAX = 5
# If a watch ends at least this many seconds after the last list, list again.
# Watches end after a random 4 to 8 minutes (client.py), so collections and operators do not list at the same time.
LIST_AGAIN_SECONDS = 400.0


class Reflector:
    """Follows one collection, such as DDPJobs or pods, in one namespace or in all (namespace "")."""

    def __init__(
        self,
        client: Client,
        plural: str,
        namespace: str,
        selector: str,
        sink: Sink,
        *,
        path: str = "",
        runtime: Runtime = SYSTEM,
        meter: Meter | None = None,
    ) -> None:
        self.what = f"{plural} in {namespace or 'all namespaces'}"
        self.namespace = namespace
        self.synced = asyncio.Event()
        self.tried_at = runtime.clock()
        """When the reflector last sent or received something, or began a back-off. The liveness probe finds a hung
        watch by this time; an API server that is away causes no restart.
        """
        self.waits = True
        """True during a back-off."""
        self._client = client
        self._path = path or collection(plural, namespace)
        self._selector = selector
        self._sink = sink
        self._runtime = runtime
        self._plural, self._meter = plural, meter or Meter()
        self._version = self._newest = ""
        self._failures = 0
        self._failing_since: float | None = None
        self._asked_for = 0.0
        """Seconds from the last Retry-After."""
        self._stale_lists = 0
        self._list_at = 0.0
        self._listing: asyncio.Task[None] | None = None
        """The last list that was started while the watch was running."""
        self._logged = ("", 0.0)
        self._careful = Careful(sink, self.what, runtime.log)

    @property
    def fails(self) -> bool:
        """True while a logged failure lasts."""
        return bool(self._logged[0])

    async def run(self) -> None:
        """List and watch until cancelled."""
        try:
            await self._follow()
        finally:
            if self._listing is not None:
                self._listing.cancel()

    async def _follow(self) -> None:
        while True:
            started, cause = self._runtime.clock(), "error"
            self.tried_at, self._asked_for, self.waits = started, 0.0, False
            try:
                if not self._version:
                    await self._list()
                elif started >= self._list_at and (self._listing is None or self._listing.done()):
                    # List during the watch, not before it: many or large objects take minutes.
                    self._listing = asyncio.create_task(self._list_quietly())
                await self._watch()
                cause = "end"
            except ApiError as error:
                self._handle(error)
            except Exception:
                # Do not raise: that would end the operator, and the next operator would fail at the same object.
                self._runtime.log.exception("%s: the watch failed, and starts again with a list", self.what)
                self._version = ""
            self.tried_at, self.waits = self._runtime.clock(), True
            healthy = self.tried_at - started >= HEALTHY_SECONDS
            self._meter.count(names.WATCH_RESTARTS, self._plural, cause if healthy else "error")
            if healthy:
                self._begin_anew()
                continue
            # Back off even without an error: a server or proxy may close every watch at once.
            self._failures += 1
            wait = min(BACK_OFF_SECONDS_MAX, BACK_OFF_SECONDS_FIRST * 2.0 ** min(self._failures - 1, 10))
            if await self._client.availability.wait(
                max(wait * self._runtime.random.uniform(0.8, 1.2), self._asked_for)
            ):
                # The server is back after an outage, and refuses watches for some seconds while it starts.
                # Reset the back-off, which the outage has made long: otherwise we would see no changes for up to 30 s.
                self._begin_anew()

    async def _list_quietly(self) -> None:
        """List once. A failure neither ends the watch nor delays the next list."""
        try:
            await self._list()
        except ApiError as error:
            if not error.needs_list:
                self._handle(error)
        except Exception:
            self._runtime.log.exception("%s: the list failed", self.what)

    def _begin_anew(self) -> None:
        self._failures, self._failing_since = 0, None

    async def _list(self) -> None:
        # Set before the list, so that the list is not repeated at once if a busy server refuses it.
        self._list_at = self._runtime.clock() + LIST_AGAIN_SECONDS
        missed: list[str] = []

        def put(raw: Any) -> None:
            # Changes that are newer than the last watch event are not counted: the watch may still deliver them.
            if self._careful.put(raw, number(self._newest)):
                missed.append(raw["metadata"]["name"])

        pages = self._client.pages(self._path, self._selector)
        seen = number(self._newest)
        at = await take(pages, self._sink, put, partial(self._check, seen), namespace=self.namespace)
        if missed:
            self._meter.count(names.MISSED, self._plural, by=len(missed))
            text = "%s: the watch missed %d changes, among them one of %s; a list showed them"
            self._runtime.log.warning(text, self.what, len(missed), missed[0])
        self._stale_lists = 0
        if number(at) >= number(self._newest):
            self._version = self._newest = at  # unless the watch is ahead of the list
        self.synced.set()

    def _check(self, seen: int, version: int) -> None:
        """Raise ApiError if a page is older than what was seen before the list."""
        self.tried_at = self._runtime.clock()
        if not 0 < version < seen:
            return
        text = f"the list has version {version}, older than the known version {seen}"
        if self._stale_lists < STALE_LISTS_MAX:
            self._stale_lists, self._version = self._stale_lists + 1, ""
            raise ApiError(0, "StaleList", text)
        self._runtime.log.warning(
            "%s: %s, as after a restored backup; all objects are taken from the list", self.what, text
        )
        self._newest = ""
        self._sink.begin_anew(self.namespace)

    async def _watch(self) -> None:
        async for event in self._client.watch(self._path, self._version, self._selector):
            self.tried_at = self._runtime.clock()
            self._begin_anew()
            if self._logged[0]:
                # Log this after an event, not after a list: without the right to watch, each list would log it.
                self._runtime.log.info("%s are watched again", self.what)
                self._logged = ("", 0.0)
            raw = event["object"]
            if event["type"] in ("ADDED", "MODIFIED"):
                self._careful.put(raw)
            elif event["type"] == "DELETED":
                self._careful.remove(raw)
            self._version = self._newest = raw["metadata"]["resourceVersion"]

    def _handle(self, error: ApiError) -> None:
        if error.needs_list:
            self._version = ""  # causes a list before the next watch
        if error.status == 410:  # the version is too old to continue from
            return
        self._asked_for = min(BACK_OFF_SECONDS_MAX, error.retry_after_seconds or 0.0)
        text, at = str(error), self._runtime.clock()
        self._failing_since = at if self._failing_since is None else self._failing_since
        passes = error.status not in (401, 403, 404) and at - self._failing_since < QUIET_SECONDS
        if passes or (error.status == NO_ANSWER and self._client.availability.lost):  # Availability logs an outage
            return
        if text != self._logged[0] or at - self._logged[1] >= LOG_AGAIN_SECONDS:
            self._logged = (text, at)
            self._runtime.log.warning("%s cannot be watched, trying again: %s", self.what, error)
