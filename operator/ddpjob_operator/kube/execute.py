"""Carries out a plan: the status first, then deletes, then creates, then events. Every answer goes into our copy."""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ddpjob_operator import api, build, contract, showing
from ddpjob_operator.kube import observe
from ddpjob_operator.kube.client import ApiError, Client, Raw
from ddpjob_operator.kube.events import Events
from ddpjob_operator.kube.listing import take
from ddpjob_operator.kube.memory import Memory
from ddpjob_operator.kube.nodes import Nodes
from ddpjob_operator.kube.store import Jobs, Key, Store
from ddpjob_operator.observed import Pod
from ddpjob_operator.plan import Action, CreatePod, CreateService, DeleteJob, DeletePod, Event, Plan

_LOGGER = logging.getLogger(__name__)
JOBS_PATH = f"/apis/{api.GROUP}/{api.VERSION}/namespaces/{{}}/{api.PLURAL}"
# Strict: a typo in the template is an error that the user sees, and is not dropped.
STRICT = {"fieldValidation": "Strict", "fieldManager": "ddpjob-operator"}
# Creates under way at a time, of all jobs: enough for eight pods in one round trip, and 200 jobs do not make the
# API server turn everyone away (its default share for one service account is some tens).
CREATES_MAX = 16


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
        reporting: build.Reporting | None = None,
        creates_max: int = CREATES_MAX,
    ) -> None:
        self._client = client
        self._caches = caches
        self._events = events
        self._now = now
        self._reporting = reporting
        self._slots = asyncio.Semaphore(creates_max)

    async def execute(self, job: api.DDPJob, todo: Plan, memory: Memory) -> None:
        """All of a plan. Raises ConflictError where the job has changed, ApiError where the server cannot do it now.

        What the server will not create is no error: it is in `memory` then, for the next look to say.
        """
        if todo.status is not None:
            await self._record(job, todo.status)
            # A pod is told what is left of the budgets, and this may be the look that has counted a restart in place.
            job = msgspec.structs.replace(job, status=todo.status)
        await _all(self._delete(job, a) for a in todo.actions if isinstance(a, DeletePod))
        await self._create_all(job, todo.actions, memory)
        for action in todo.actions:
            if isinstance(action, DeleteJob):
                await self._delete_job(job, action)
        self._events.send(job.metadata, todo.events, self._now())

    def say(self, job: api.Metadata, event: Event) -> None:
        """An event that is no part of a plan."""
        self._events.send(job, showing.events((event,)), self._now())

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
        pages = self._client.pages(path, f"{contract.LABEL_JOB}={key[1]}")
        await take(pages, pods.put, lambda named, version: pods.retain(named, version, key[0], key))

    async def check_stranger(self, kind: str, name: str, job: api.DDPJob, memory: Memory) -> None:
        """Whether an object in our place is still there. Raises ApiError."""
        raw = await self._find(kind, job.metadata.namespace, name)
        if raw is None:
            memory.strangers.pop((kind, name), None)
        else:
            self._meet(kind, raw, job, memory)

    async def _record(self, job: api.DDPJob, status: api.Status) -> None:
        metadata = job.metadata
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
            "status": msgspec.to_builtins(status),
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

    async def _create_all(self, job: api.DDPJob, actions: Sequence[Action], memory: Memory) -> None:
        """The Service, then one pod, then the others at a time.

        What the server refuses for one pod it refuses for all, most often, so the others are not tried.
        """
        if any(isinstance(a, CreateService) for a in actions) and not await self._create_service(job, memory):
            return
        pods = [a for a in actions if isinstance(a, CreatePod)]
        if pods and await self._create_pod(job, pods[0], memory):
            refused_before = memory.refused_in_a_row
            await _all(
                self._create_pod(job, a, memory, lambda: memory.refused_in_a_row > refused_before) for a in pods[1:]
            )

    async def _create_service(self, job: api.DDPJob, memory: Memory) -> bool:
        return await self._create("Service", build.service(job), job, memory)

    async def _create_pod(
        self, job: api.DDPJob, action: CreatePod, memory: Memory, given_up: Callable[[], bool] = lambda: False
    ) -> bool:
        async with self._slots:
            if given_up():
                return False
            body = build.pod(
                job,
                action.attempt,
                action.rank,
                reporting=self._reporting,
                avoid=action.avoid,
                replacement=action.replacement,
            )
            return await self._create("Pod", body, job, memory)

    async def _create(self, kind: str, body: Raw, job: api.DDPJob, memory: Memory) -> bool:
        """Whether it is there now and ours. Raises ApiError where the server may do it later."""
        namespace, name = job.metadata.namespace, body["metadata"]["name"]
        try:
            raw = await self._client.create(_collection(kind, namespace), body, STRICT)
        except ApiError as error:
            if error.reason == "AlreadyExists":
                return await self._exists(kind, name, job, memory)
            if not is_refusal(error):
                raise
            memory.refuse(name, error.message, self._now())
            return False
        memory.created(name)
        self._store(kind).put(raw)
        return True

    async def _exists(self, kind: str, name: str, job: api.DDPJob, memory: Memory) -> bool:
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

    def _meet(self, kind: str, raw: Raw, job: api.DDPJob, memory: Memory) -> bool:
        name = raw["metadata"]["name"]
        ours = observe.controller(raw).get("uid") == job.metadata.uid
        if ours or observe.job_name(raw) == job.metadata.name:
            # The watch shows it too, and tells when it goes.
            memory.strangers.pop((kind, name), None)
            memory.created(name)
            self._store(kind).put(raw)
        else:
            memory.take(observe.foreign(kind, raw, job.metadata), self._now())
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
