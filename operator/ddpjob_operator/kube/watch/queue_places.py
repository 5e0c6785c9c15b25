"""Reads the positions of waiting jobs from their queues. No watch shows them, because other jobs change them.

Each queue with waiting jobs is read once a minute; jobs whose position changed are enqueued. If a queue does not
answer, the messages of its jobs show no position.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from ddpjob_operator.gangs import kueue
from ddpjob_operator.kube.api.client import ApiError, Client
from ddpjob_operator.kube.api.runtime import LogOnce, Runtime
from ddpjob_operator.kube.watch.store import Key

ASK_SECONDS = 60.0
# Seconds between checks for jobs that have begun to wait, so their first position is shown within this time.
LOOK_SECONDS = 5.0


class QueuePlaces:
    """Positions of the jobs of one adapter, as last read."""

    def __init__(
        self,
        client: Client,
        waiting: Callable[[], Iterable[tuple[Key, str]]],
        changed: Callable[[Key], None],
        runtime: Runtime,
    ) -> None:
        """waiting: yields Workloads (namespace, name) that wait, with their queues. changed: called with each of them
        whose position changed."""
        self._client, self._waiting, self._changed, self._runtime = client, waiting, changed, runtime
        self._places: dict[Key, int] = {}
        self._asked_at: dict[Key, float] = {}
        """When each queue, by namespace and name, was last read."""
        self._api_version = ""
        self._looked_at: float | None = None
        """When the served version was last discovered."""
        self._log_once = LogOnce(runtime.log.info)

    def of(self, key: Key) -> int | None:
        """Return the position of a Workload, by namespace and name, from 1; None if unknown."""
        return self._places.get(key)

    async def run(self) -> None:
        while True:
            try:
                await self.look()
            except Exception:
                # Do not raise: the end of this task would end the operator.
                self._runtime.log.exception("the positions of jobs in their queues were not read")
            await asyncio.sleep(LOOK_SECONDS)

    async def look(self) -> None:
        """Read the queues that have waiting jobs and were not read within the last minute."""
        queues: dict[Key, list[Key]] = {}
        for key, name in self._waiting():
            if name:
                queues.setdefault((key[0], name), []).append(key)
        waiting = {key for keys in queues.values() for key in keys}
        self._places = {key: place for key, place in self._places.items() if key in waiting}
        self._asked_at = {queue: at for queue, at in self._asked_at.items() if self._is_recent(at)}
        due = [queue for queue in queues if queue not in self._asked_at]
        if not due or not (api_version := await self._served()):
            return
        for queue in due:
            self._asked_at[queue] = self._runtime.clock()
            told = await self._ask(kueue.pending_path(api_version, *queue))
            for key in queues[queue]:
                before, now = self._places.pop(key, None), told.get(key[1])
                if now is not None:
                    self._places[key] = now
                if now != before:
                    self._changed(key)

    async def _ask(self, path: str) -> dict[str, int]:
        try:
            return kueue.read_places(await self._client.get(path))
        except ApiError as error:
            if error.status != 404:
                self._log_once(f"no queue positions from {path}: {error}")
            # Usually the queue does not exist, which the job's message reports. The API version may also be gone.
            self._api_version = "" if error.status == 404 else self._api_version
        except (AttributeError, LookupError, TypeError) as error:
            self._log_once(f"the queue positions from {path} cannot be read: {error!r}")
        return {}

    async def _served(self) -> str:
        """Return the served apiVersion, "" if none is known. Discovery is repeated after a minute."""
        if self._api_version or (self._looked_at is not None and self._is_recent(self._looked_at)):
            return self._api_version
        self._looked_at = self._runtime.clock()
        try:
            served = await self._client.get(f"/apis/{kueue.PLACES_GROUP}")
        except ApiError as error:
            self._log_once(f"no queue positions: the API {kueue.PLACES_GROUP} does not answer: {error}")
            return ""
        found = {version.get("groupVersion") for version in served.get("versions") or ()}
        wanted = (f"{kueue.PLACES_GROUP}/{version}" for version in kueue.PLACES_VERSIONS)
        self._api_version = next((version for version in wanted if version in found), "")
        if not self._api_version:
            self._log_once(f"no queue positions: {kueue.PLACES_GROUP} is served in none of the known versions")
        return self._api_version

    def _is_recent(self, at: float) -> bool:
        return self._runtime.clock() - at < ASK_SECONDS
