"""The APIs of the enabled gang schedulers and queues: the served version, and our copy of their objects.

The version is discovered at the start; jobs that need the API wait for it. An API that is missing or was removed is
tried again from time to time. Nothing is requested for disabled adapters.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ddpjob_operator.gangs import choice
from ddpjob_operator.gangs.adapter import Adapter
from ddpjob_operator.job import api
from ddpjob_operator.kube.api.client import ApiError, Client, group_collection
from ddpjob_operator.kube.api.runtime import Runtime
from ddpjob_operator.kube.watch import observe, triggers
from ddpjob_operator.kube.watch.queue_places import QueuePlaces
from ddpjob_operator.kube.watch.reflector import Reflector
from ddpjob_operator.kube.watch.store import Key, Store
from ddpjob_operator.metrics.meter import Meter
from ddpjob_operator.observed.groups import GangApi, ObservedGroup, of_place
from ddpjob_operator.pods import naming

# Seconds before an API that is not served, or whose watch fails, is tried again.
AGAIN_SECONDS = 60.0
NO_ANSWER_SECONDS = 2.0
# After this many server errors in a row, for example of a failing conversion webhook, a queue's API is unavailable.
ERRORS_MAX = 5
ERROR_SECONDS = 10.0


class GangWatch:
    """Watches the API of one gang scheduler or queue: its served version and its objects."""

    def __init__(
        self,
        adapter: Adapter,
        client: Client,
        namespaces: Sequence[str],
        key_of: Callable[[Mapping[str, Any]], Key],
        changed: Callable[[Key, float], None],
        found: Callable[[], None],
        runtime: Runtime,
        meter: Meter | None = None,
        asks_places: bool = False,
    ) -> None:
        """namespaces: the watched ones, "" for all. changed: called for a job whose objects changed, with the seconds
        that it can wait. found: called when the served version changed. asks_places: read positions in the queue.
        """

        def told(key: Key, _old: ObservedGroup | None, new: ObservedGroup | None) -> None:
            changed(key, triggers.group_changed(adapter.admits_first, new))

        self.adapter, self._what = adapter, f"{adapter.plural}.{adapter.group}"
        self.api = GangApi(why_not=f"the API server has not yet answered whether it serves {adapter.plural}")
        self._refused: dict[str, GangApi] = {}
        """Namespaces whose objects may not be listed. A deleted namespace, for example, has no Role any more."""
        self.store: Store[ObservedGroup] = Store(observe.group(adapter), key_of, told)
        self.reflectors: list[Reflector] = []
        self._client, self._namespaces, self._found, self._runtime = client, namespaces, found, runtime
        self._meter = meter
        self._is_known = False
        self._errors = 0
        self.places: QueuePlaces | None = (
            QueuePlaces(client, self._waiting, lambda key: changed((key[0], adapter.job_name(key[1])), 0.0), runtime)
            if asks_places and adapter.admits_first
            else None
        )

    def api_in(self, namespace: str) -> GangApi:
        """Return the API for a namespace's jobs, with version "" if its objects may not be listed there."""
        return self._refused.get(namespace, self.api)

    def is_ready(self, namespace: str) -> bool:
        """True if the version and the objects of a namespace are known."""
        synced = (r.synced.is_set() for r in self.reflectors if r.namespace in ("", namespace))
        return self._is_known and all(synced)

    def of(self, job: api.DDPJob, place: int) -> ObservedGroup | None:
        """Return the object whose quota the pod at a place uses; None if the job has none."""
        found = self.store.of((job.metadata.namespace, job.metadata.name))
        return of_place((group for group in found if group.owner_uid == job.metadata.uid), place)

    def groups(self, key: Key) -> list[ObservedGroup]:
        """Return a job's objects, with its position in the queue if known."""
        found, places = self.store.of(key), self.places
        if places is None:
            return found
        return [
            replace(group, admission=replace(group.admission, place=places.of((key[0], group.name))))
            if _waits(group)
            else group
            for group in found
        ]

    def _waiting(self) -> Iterator[tuple[Key, str]]:
        """Yield the waiting objects (namespace and name) and their queues."""
        for key in self.store.jobs():
            yield from (((key[0], group.name), group.queue) for group in self.store.each(key) if _waits(group))

    def path(self, namespace: str) -> str:
        """Return the path of the collection. Raise ApiError if no version is served."""
        served = self.api_in(namespace)
        if not served.api_version:
            raise ApiError(404, "NotFound", served.why_not)
        return group_collection(served.api_version, self.adapter.plural, namespace)

    async def run(self) -> None:
        """Discover and watch until cancelled, or until one of the watches ends."""
        watching: list[asyncio.Task[None]] = []
        this = asyncio.current_task()
        assert this is not None, "a coroutine runs in a task"

        def ended(_: object) -> None:
            this.cancel()

        def drop() -> None:
            for task in watching:
                task.remove_done_callback(ended)
                task.cancel()

        try:
            while True:
                before = self.api, self._refused
                answered = await self._discover()
                if answered and (not self._is_known or (self.api, self._refused) != before):
                    drop()
                    watching = self._watch()
                    for task in watching:
                        task.add_done_callback(ended)
                    self._is_known = True
                    self._found()
                again = AGAIN_SECONDS if answered else NO_ANSWER_SECONDS
                await self._client.availability.wait(ERROR_SECONDS if self._errors >= ERRORS_MAX else again)
                while self.api.api_version and not self._refused and not any(r.fails for r in self.reflectors):
                    await self._client.availability.wait(AGAIN_SECONDS)
        finally:
            drop()

    def _watch(self) -> list[asyncio.Task[None]]:
        if not self.api.api_version:
            self._runtime.log.warning("spec.gang: %s cannot be used: %s", self.adapter.name, self.api.why_not)
            self.reflectors = []
            return []
        self._runtime.log.info("spec.gang: %s is served by %s", self.adapter.name, self.api.api_version)
        for namespace, refused in self._refused.items():
            text = "spec.gang: %s cannot be used in the namespace %s: %s"
            self._runtime.log.warning(text, self.adapter.name, namespace, refused.why_not)
        self.reflectors = [
            Reflector(
                self._client,
                self.adapter.plural,
                namespace,
                naming.LABEL_JOB,
                self.store,
                path=self.path(namespace),
                runtime=self._runtime,
                meter=self._meter,
            )
            for namespace in self._namespaces
            if namespace not in self._refused
        ]
        return [asyncio.create_task(reflector.run(), name=reflector.what) for reflector in self.reflectors]

    async def _discover(self) -> bool:
        """Set `api` from the API server's answer. Return True if the server answered."""
        adapter = self.adapter
        try:
            for version in adapter.versions:
                if await self._serves(version):
                    api = GangApi(f"{adapter.group}/{version}")
                    refused = {name: no for name in self._namespaces if (no := await self._refusal(api, name))}
                    all_refuse = len(refused) == len(self._namespaces)
                    self.api = refused[self._namespaces[0]] if all_refuse else api
                    self._refused, self._errors = {} if all_refuse else refused, 0
                    return True
        except ApiError as error:
            if error.status not in (401, 403):
                return self._failed(error)
            self.api, self._refused, self._errors = self._may_not_list(error), {}, 0
            return True
        self._refused, self._errors, tried = {}, 0, ", ".join(adapter.versions)
        self.api = GangApi(why_not=f"the API server does not serve {self._what} ({tried})")
        return True

    async def _refusal(self, api: GangApi, namespace: str) -> GangApi | None:
        """Return the reason if the objects may not be listed in a namespace."""
        try:
            await self._client.get(group_collection(api.api_version, self.adapter.plural, namespace), {"limit": "1"})
        except ApiError as error:
            if error.status not in (401, 403):
                raise
            return self._may_not_list(error)
        return None

    def _may_not_list(self, error: ApiError) -> GangApi:
        return GangApi(why_not=f"the operator may not list {self._what}: {error.message}")

    def _failed(self, error: ApiError) -> bool:
        """Count a server error. Return True if the API is now unavailable: running jobs continue, others wait."""
        if error.status < 500:
            return False
        self._errors += 1
        if self._errors != ERRORS_MAX:  # keep the first error text: each new text would rewrite the status of many jobs
            return False
        why = f"the API server cannot list {self._what}: {error.message}"
        if self.adapter.admits_first:
            self.api, self._refused = GangApi(why_not=why), {}
            return True
        # Jobs wait until the gang's API is known. Otherwise, with spec.gang auto, some of their pods could start alone.
        if not self._is_known:
            self._runtime.log.warning("spec.gang: jobs that may need %s wait: %s", self.adapter.name, why)
        return False

    async def _serves(self, version: str) -> bool:
        try:
            listed = await self._client.get(f"/apis/{self.adapter.group}/{version}")
        except ApiError as error:
            if error.status == 404:
                return False
            raise
        return any(found.get("name") == self.adapter.plural for found in listed.get("resources") or ())


def waits_for(job: api.DDPJob, gangs: Mapping[str, GangWatch]) -> bool:
    """True if the objects of the job's gang, or of the gang it would choose, are not known yet. Unknown APIs count as
    served: otherwise the job would start in parts, or outside its queue.
    """
    namespace = job.metadata.namespace
    unknown = {name for name, gang in gangs.items() if not gang.is_ready(namespace)}
    if not unknown:
        return False
    apis = {name: GangApi("not known") if name in unknown else gang.api_in(namespace) for name, gang in gangs.items()}
    has = job.status.gang.kind if job.status.gang is not None else "none"
    return not unknown.isdisjoint({has, choice.choose(job, apis)[0]})


def _waits(group: ObservedGroup) -> bool:
    return group.admission.state == "waiting" and not group.is_over and not group.deletion_requested
