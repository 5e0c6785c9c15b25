"""A copy of a collection, kept by LIST and then WATCH. kopf's own costs 25 times as much per pod.

A watch may lose an event: a proxy drops a line, or an API server that was restored from a backup counts from an older
version again. So the collection is listed again from time to time, and the list wins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from ddpjob_operator.kube.api.client import NO_ANSWER, ApiError, Client, collection
from ddpjob_operator.kube.api.runtime import SYSTEM, Runtime
from ddpjob_operator.kube.watch.listing import Careful, Sink, take
from ddpjob_operator.kube.watch.store import number

BACK_OFF_SECONDS_FIRST, BACK_OFF_SECONDS_MAX = 0.5, 30.0
LOG_AGAIN_SECONDS = 300.0
# A connection that breaks, or a server that starts, is no news to an administrator.
QUIET_SECONDS = 5.0
# A watch that was open for so long has worked: what ends it then is the server's time-out, no error.
HEALTHY_SECONDS = 10.0
# A list older than what we saw comes from an API server that lags. It catches up in seconds, unless the whole
# cluster was restored from a backup: then the old numbers are the truth.
STALE_LISTS_MAX = 5
# The first watch that ends so long after a list is followed by a list. Watches end after 4 to 8 minutes (client.py), so
# that is every 10 minutes on average, and for each collection and operator at another time.
LIST_AGAIN_SECONDS = 400.0


class Watcher:
    """Measures watches; this one measures nothing."""

    def restarted(self, plural: str, cause: str) -> None:
        """A watch has ended. cause: `end` or `error`."""

    def missed(self, plural: str, count: int) -> None:
        """A list has shown so many objects whose newest change the watch had left out."""


UNMEASURED = Watcher()


class Reflector:
    """One collection, such as DDPJobs or pods, of one namespace or of all (namespace "")."""

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
        sleep: Callable[[float], Any] = asyncio.sleep,
        away: Callable[[], bool] = lambda: False,
        watcher: Watcher = UNMEASURED,
    ) -> None:
        """sleep: True if it was cut short because the server answers again (Reach.wait).
        away: True while the server answers nobody, which is logged elsewhere (Reach)."""
        self.what = f"{plural} in {namespace or 'all namespaces'}"
        self.namespace = namespace
        self.synced = asyncio.Event()
        self.tried_at = runtime.clock()
        """When it last tried or received something, or began to wait: an API server that is away is no reason for a
        restart."""
        self.waits = True
        """False while it has asked for something, and the answer has not ended."""
        self._client = client
        self._path = path or collection(plural, namespace)
        self._selector = selector
        self._sink = sink
        self._runtime = runtime
        self._sleep = sleep
        self._away = away
        self._plural, self._watcher = plural, watcher
        self._version = self._newest = ""
        self._failures = 0
        self._failing_since: float | None = None
        self._asked_for = 0.0
        """Seconds that the server wants us to wait."""
        self._stale_lists = 0
        self._list_at = 0.0
        """When to list next."""
        self._logged = ("", 0.0)
        self._careful = Careful(sink, self.what, runtime.log)

    @property
    def fails(self) -> bool:
        """Whether what it asked for last was refused."""
        return bool(self._logged[0])

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            started, cause = self._runtime.clock(), "error"
            self.tried_at, self._asked_for, self.waits = started, 0.0, False
            try:
                if not self._version or started >= self._list_at:
                    await self._list()
                await self._watch()
                cause = "end"
            except ApiError as error:
                self._handle(error)
            except Exception:
                # The end of this task would end the operator, and the next one would fail at the same object.
                self._runtime.log.exception("%s: the watch failed, and starts again with a list", self.what)
                self._version = ""
            self.tried_at, self.waits = self._runtime.clock(), True
            healthy = self.tried_at - started >= HEALTHY_SECONDS
            self._watcher.restarted(self._plural, cause if healthy else "error")
            if healthy:
                self._begin_anew()
                continue
            # Also after a stream that ended without an error at once: a server or a proxy that closes every watch
            # must not make us ask in a tight loop.
            self._failures += 1
            wait = min(BACK_OFF_SECONDS_MAX, BACK_OFF_SECONDS_FIRST * 2.0 ** min(self._failures - 1, 10))
            if await self._sleep(max(wait * self._runtime.random.uniform(0.8, 1.2), self._asked_for)):
                # The server is back after an outage. While it starts it refuses watches for some seconds, and the next
                # wait must not be as long as those of the outage.
                self._begin_anew()

    def _begin_anew(self) -> None:
        self._failures, self._failing_since = 0, None

    async def _list(self) -> None:
        # Also if this list is refused: a watch goes on without it, and a busy server is not asked again at once.
        self._list_at = self._runtime.clock() + LIST_AGAIN_SECONDS
        missed: list[str] = []

        def put(raw: Any) -> None:
            # What is later than the watch has come may still be on its way, and is not counted.
            if self._careful.put(raw, number(self._newest)):
                missed.append(raw["metadata"]["name"])

        pages = self._client.pages(self._path, self._selector)
        at = await take(pages, self._sink, put, self._check, namespace=self.namespace)
        if missed:
            self._watcher.missed(self._plural, len(missed))
            text = "%s: the watch has not shown %d changes, among them one of %s; a list did"
            self._runtime.log.warning(text, self.what, len(missed), missed[0])
        self._stale_lists = 0
        self._version = self._newest = at
        self.synced.set()

    def _check(self, version: int) -> None:
        """At each page. Raises ApiError where the list is older than what was seen."""
        self.tried_at = self._runtime.clock()
        seen = number(self._newest)
        if not 0 < version < seen:
            return
        text = f"the list is of version {version}, and {seen} was seen before"
        if self._stale_lists < STALE_LISTS_MAX:
            self._stale_lists, self._version = self._stale_lists + 1, ""
            raise ApiError(0, "StaleList", text)
        self._runtime.log.warning("%s: %s: a restored backup; all is taken from the list", self.what, text)
        self._newest = ""
        self._sink.begin_anew(self.namespace)

    async def _watch(self) -> None:
        async for event in self._client.watch(self._path, self._version, self._selector):
            self.tried_at = self._runtime.clock()
            self._begin_anew()
            if self._logged[0]:
                # Not when a list has worked: where only the right to watch is missing, that would be logged each time.
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
            self._version = ""  # the next round lists
        if error.gone:
            return
        self._asked_for = min(BACK_OFF_SECONDS_MAX, error.retry_after_seconds or 0.0)
        text, at = str(error), self._runtime.clock()
        self._failing_since = at if self._failing_since is None else self._failing_since
        passes = error.status not in (401, 403, 404) and at - self._failing_since < QUIET_SECONDS
        if passes or (error.status == NO_ANSWER and self._away()):
            return
        if text != self._logged[0] or at - self._logged[1] >= LOG_AGAIN_SECONDS:
            self._logged = (text, at)
            self._runtime.log.warning("%s cannot be watched, trying again: %s", self.what, error)
