"""Carries out a plan: the status and its events first, then deletes, then creates. Every answer goes into our copy."""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from ddpjob_operator.job import api
from ddpjob_operator.kube import observe
from ddpjob_operator.kube.client import ApiError, Client, Raw
from ddpjob_operator.kube.events import Events
from ddpjob_operator.kube.job_state import JobState
from ddpjob_operator.kube.listing import take
from ddpjob_operator.kube.nodes import Nodes
from ddpjob_operator.kube.shares import Shares
from ddpjob_operator.kube.store import Jobs, Key, Store
from ddpjob_operator.observed.cluster import Pod
from ddpjob_operator.plan import redacted
from ddpjob_operator.plan.actions import (
    Action,
    CreatePod,
    CreateService,
    DeleteJob,
    DeletePod,
    EndPod,
    Event,
    Plan,
    restart_grace_seconds,
)
from ddpjob_operator.pods import build, naming

_LOGGER = logging.getLogger(__name__)
JOBS_PATH = f"/apis/{api.GROUP}/{api.VERSION}/namespaces/{{}}/{api.PLURAL}"
# Strict: a typo in the template is an error that the user sees, and is not dropped.
STRICT = {"fieldValidation": "Strict", "fieldManager": "ddpjob-operator"}
# A look begins no further create or delete after this time, and the next one goes on: a job of a thousand pods in a
# namespace with a slow webhook obeys a suspend, an edit or its deletion in time.
LOOK_SECONDS = 5.0


class ConflictError(Exception):
    """The job has changed since we looked: look again."""


@dataclass
class Caches:
    """Our copy of the cluster."""

    jobs: Jobs
    pods: Store[Pod]
    services: Store[observe.Service]
    nodes: Nodes


class Executor:
    """Writes to the API server."""

    def __init__(
        self,
        client: Client,
        caches: Caches,
        events: Events,
        *,
        now: Callable[[], dt.datetime],
        clock: Callable[[], float] = time.monotonic,
        reporting: build.Reporting | None = None,
        progressed: Callable[[Key], None] = lambda _key: None,
    ) -> None:
        """progressed: called for a job whenever a request for it has its turn or its answer."""
        self._client = client
        self._caches = caches
        self._events = events
        self._now = now
        self._clock = clock
        self._reporting = reporting
        self._progressed = progressed
        # Apart, so that slow creates hold up no delete.
        self._creates, self._deletes = Shares(), Shares()

    async def execute(self, job: api.DDPJob, todo: Plan, memory: JobState) -> bool:
        """As much of a plan as LOOK_SECONDS allow; whether that was all.

        Raises ConflictError where the job has changed, ApiError where the server cannot do it now.

        What the server will not create is no error: it is in `memory` then, for the next look to say.
        """
        if todo.status is not None:
            await self._record(job, todo.status)
            # A pod is told what is left of the budgets, and this may be the look that has counted a restart in place.
            job = msgspec.structs.replace(job, status=todo.status)
        # They tell of what is recorded, so they wait for nothing that comes after it and may fail.
        self._events.send(job.metadata, todo.events, self._now())
        deletes = [partial(self._delete, job, a) for a in todo.actions if isinstance(a, DeletePod)]
        deletes += [partial(self._end, job, a) for a in todo.actions if isinstance(a, EndPod)]
        whole = await self._in_turn(self._deletes, job, deletes)
        whole = await self._create_all(job, todo.actions, memory) and whole
        for action in todo.actions:
            if isinstance(action, DeleteJob):
                await self._delete_job(job, action)
        return whole

    def say(self, job: api.Metadata, event: Event) -> None:
        """An event that is no part of a plan."""
        self._events.send(job, redacted.events((event,)), self._now())

    async def reread(self, metadata: api.Metadata) -> None:
        """The job as it is now. Raises ApiError."""
        path = f"{JOBS_PATH.format(metadata.namespace)}/{metadata.name}"
        key = (metadata.namespace, metadata.name)
        try:
            raw = await self._client.get(path)
        except ApiError as error:
            if not is_absent(error, metadata.name):
                raise
            self._caches.jobs.remove(key, metadata.uid)
            return
        if raw["metadata"]["uid"] != metadata.uid:
            self._caches.jobs.remove(key, metadata.uid)
        self._caches.jobs.put(raw)

    async def list_pods(self, key: Key) -> None:
        """The pods of one job as they are now. Raises ApiError."""
        path = f"/api/v1/namespaces/{key[0]}/pods"
        pods = self._caches.pods
        pages = self._client.pages(path, f"{naming.LABEL_JOB}={key[1]}")
        await take(
            pages, pods.put, lambda named, version: pods.retain(named, version, key[0], key), one_look=pods.one_look
        )

    async def check_stranger(self, kind: str, name: str, job: api.DDPJob, memory: JobState) -> None:
        """Whether an object in our place is still there. Raises ApiError."""
        raw = await self._find(kind, job.metadata.namespace, name)
        if raw is None:
            memory.strangers.pop((kind, name), None)
        else:
            self._meet(kind, raw, job, memory)

    async def tell(self, metadata: Raw, status: Raw | None, events: tuple[Event, ...]) -> None:
        """What is to be said of a job that cannot be read: `status` is the stored one but for a condition.

        Raises ConflictError and ApiError as `execute`. A server that refuses it (another field of it breaks the schema)
        leaves the events.
        """
        job = api.Metadata(
            name=metadata["name"],
            namespace=metadata.get("namespace", "default"),
            uid=metadata["uid"],
            resource_version=metadata.get("resourceVersion", ""),
        )
        try:
            if status is not None:
                await self._replace_status(job, status)
        except ApiError as error:
            if not is_refusal(error):
                raise
            _LOGGER.warning("%s/%s: its condition was not written: %s", job.namespace, job.name, error)
        self._events.send(job, redacted.events(events), self._now())

    async def _record(self, job: api.DDPJob, status: api.Status) -> None:
        await self._replace_status(job.metadata, msgspec.to_builtins(status))

    async def _replace_status(self, metadata: api.Metadata, status: Raw) -> None:
        path = f"{JOBS_PATH.format(metadata.namespace)}/{metadata.name}/status"
        # The whole status, not a patch: what is unset must go, as startTime does on suspend. The server takes nothing
        # but the status from this body, and refuses it if the job is not the one that we looked at.
        body = {
            "apiVersion": api.API_VERSION,
            "kind": api.KIND,
            "metadata": {
                "name": metadata.name,
                "namespace": metadata.namespace,
                "uid": metadata.uid,
                "resourceVersion": metadata.resource_version,
            },
            "status": status,
        }
        try:
            self._caches.jobs.put(await self._client.replace(path, body, {"fieldManager": "ddpjob-operator"}))
        except ApiError as error:
            if error.status not in (404, 409):
                raise
            await self.reread(metadata)
            raise ConflictError from None

    async def _delete(self, job: api.DDPJob, action: DeletePod) -> None:
        namespace = job.metadata.namespace
        # By uid: between our look and this call the name may have passed to another pod.
        options: Raw = {"preconditions": {"uid": action.uid}}
        if action.grace_seconds is not None:
            options["gracePeriodSeconds"] = action.grace_seconds
        try:
            answer = await self._client.delete(f"/api/v1/namespaces/{namespace}/pods/{action.name}", options)
        except ApiError as error:
            if error.status != 409 and not is_absent(error, action.name):
                raise
            self._caches.pods.remove(namespace, action.name, action.uid)
            return
        metadata = answer.get("metadata") or {}
        leaves_later = metadata.get("finalizers") or metadata.get("deletionGracePeriodSeconds")
        is_pod = answer.get("kind") == "Pod" and metadata.get("uid") == action.uid
        if is_pod:
            # Also of one that is gone now: it may have ended since our look, and no watch event is heard after this.
            self._caches.pods.put(answer)
        if not (is_pod and metadata.get("deletionTimestamp") and leaves_later):
            self._caches.pods.remove(namespace, action.name, action.uid)

    async def _end(self, job: api.DDPJob, action: EndPod) -> None:
        path = f"/api/v1/namespaces/{job.metadata.namespace}/pods/{action.name}"
        body = {"metadata": {"uid": action.uid}, "spec": {"activeDeadlineSeconds": observe.END_NOW_SECONDS}}
        try:
            self._caches.pods.put(await self._client.patch(path, body))
        except ApiError as error:
            if error.status not in (403, 404, 405, 409, 422):
                raise
            # A role of an older chart, or a pod that is no longer what it was: a delete knows what to do then.
            _LOGGER.info("%s is deleted, with its log, for it cannot be ended otherwise: %s", path, error)
            await self._delete(job, DeletePod(action.name, action.uid, restart_grace_seconds(job.spec)))

    async def _delete_job(self, job: api.DDPJob, action: DeleteJob) -> None:
        metadata = job.metadata
        path = f"{JOBS_PATH.format(metadata.namespace)}/{metadata.name}"
        options = {"preconditions": {"uid": action.uid}, "propagationPolicy": "Background"}
        try:
            await self._client.delete(path, options)
        except ApiError as error:
            if error.status not in (404, 409):
                raise
        await self.reread(metadata)

    async def _create_all(self, job: api.DDPJob, actions: Sequence[Action], memory: JobState) -> bool:
        """The Service, then one pod, then the others at a time; whether no more is to be tried in this look.

        What the server refuses for one pod it refuses for all, most often, so the others are not tried.
        """
        service = [partial(self._create_service, job, memory) for a in actions if isinstance(a, CreateService)]
        pods = [partial(self._create_pod, job, a, memory) for a in actions if isinstance(a, CreatePod)]
        known = memory.goes_on
        memory.goes_on = False
        if not await self._one_by_one(job, [*service, *([] if known else pods[:1])]):
            return True
        refused_before = memory.refused_in_a_row
        left = pods if known else pods[1:]
        memory.goes_on = not await self._in_turn(
            self._creates, job, left, lambda: memory.refused_in_a_row > refused_before
        )
        return not memory.goes_on

    async def _one_by_one(self, job: api.DDPJob, creates: Sequence[Callable[[], Awaitable[bool]]]) -> bool:
        """Whether all of them are there now."""
        key = (job.metadata.namespace, job.metadata.name)
        for create in creates:
            async with self._creates.turn(key):
                self._progressed(key)
                there = await create()
            self._progressed(key)
            if not there:
                return False
        return True

    async def _in_turn(
        self,
        shares: Shares,
        job: api.DDPJob,
        calls: Sequence[Callable[[], Awaitable[object]]],
        given_up: Callable[[], bool] = lambda: False,
    ) -> bool:
        """The calls in the job's share of requests; False: LOOK_SECONDS were over before all of them had begun."""
        key = (job.metadata.namespace, job.metadata.name)
        ends = self._clock() + LOOK_SECONDS
        left = iter(calls)

        async def work() -> None:
            # What has waited for its turn takes it, however long that was: else a long line would never get shorter.
            while self._clock() < ends and not given_up() and (call := next(left, None)) is not None:
                async with shares.turn(key):
                    self._progressed(key)
                    if not given_up():
                        await call()
                self._progressed(key)

        await _all(work() for _ in range(min(len(calls), shares.bounds.of_job)))
        return given_up() or next(left, None) is None

    async def _create_service(self, job: api.DDPJob, memory: JobState) -> bool:
        return await self._create("Service", build.service(job), job, memory)

    async def _create_pod(self, job: api.DDPJob, action: CreatePod, memory: JobState) -> bool:
        body = build.pod(
            job,
            action.attempt,
            action.rank,
            reporting=self._reporting,
            avoid=action.avoid,
            replacement=action.replacement,
        )
        return await self._create("Pod", body, job, memory)

    async def _create(self, kind: str, body: Raw, job: api.DDPJob, memory: JobState) -> bool:
        """Whether it is there now and ours. Raises ApiError where the server may do it later."""
        namespace, name = job.metadata.namespace, body["metadata"]["name"]
        try:
            raw = await self._client.create(_collection(kind, namespace), body, STRICT)
        except ApiError as error:
            if error.reason == "AlreadyExists":
                return await self._exists(kind, name, job, memory)
            if not is_refusal(error):
                raise
            said = build.in_users_words(error.message, body, job) if kind == "Pod" else error.message
            memory.refuse(name, said, self._now())
            return False
        memory.created(name)
        self._store(kind).put(raw)
        return True

    async def _exists(self, kind: str, name: str, job: api.DDPJob, memory: JobState) -> bool:
        """Ours, where an answer was lost or our copy is behind; else somebody's."""
        raw = await self._find(kind, job.metadata.namespace, name)
        return raw is not None and self._meet(kind, raw, job, memory)

    async def _find(self, kind: str, namespace: str, name: str) -> Raw | None:
        try:
            return await self._client.get(f"{_collection(kind, namespace)}/{name}")
        except ApiError as error:
            if is_absent(error, name):
                return None
            raise

    def _meet(self, kind: str, raw: Raw, job: api.DDPJob, memory: JobState) -> bool:
        name = raw["metadata"]["name"]
        ours = observe.controller(raw).get("uid") == job.metadata.uid
        if ours or observe.job_name(raw) == job.metadata.name:
            # The watch shows it too, and tells when it goes.
            memory.strangers.pop((kind, name), None)
            memory.created(name)
            self._store(kind).put(raw)
        else:
            memory.take(observe.conflicts(kind, raw, job.metadata), self._now())
        return ours

    def _store(self, kind: str) -> Store[Any]:
        return self._caches.pods if kind == "Pod" else self._caches.services


def is_refusal(error: ApiError) -> bool:
    """Whether the server understood the create and will not do it: the user must change something, or wait.

    Quota, PodSecurity and admission say 403, a bad field 400 or 422; a webhook that is down says 500.
    """
    if error.status in (400, 403, 404, 405, 413, 422):
        return True
    return error.status == 500 and "webhook" in error.message


def is_absent(error: ApiError, name: str) -> bool:
    """Whether the object is not there. A server that knows neither kind nor path says 404 as well, without the name."""
    return error.status == 404 and f'"{name}"' in error.message


def _collection(kind: str, namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/{'pods' if kind == 'Pod' else 'services'}"


async def _all(calls: Iterable[Awaitable[Any]]) -> None:
    """All of them to their end, then the first error: none is left running behind our back."""
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
