"""Reads from the API server if our copy may be behind, or if no watch shows an object. Answers go into the copy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ddpjob_operator.job import api
from ddpjob_operator.kube.api.client import ApiError, Client, Raw, collection
from ddpjob_operator.kube.api.runtime import Runtime
from ddpjob_operator.kube.watch import observe
from ddpjob_operator.kube.watch.gangs import GangWatch
from ddpjob_operator.kube.watch.listing import take
from ddpjob_operator.kube.watch.nodes import NodeCache
from ddpjob_operator.kube.watch.store import Jobs, Key, Store
from ddpjob_operator.kube.work import decisions
from ddpjob_operator.kube.work.job_state import JobState
from ddpjob_operator.observed.cluster import Pod
from ddpjob_operator.pods import naming


@dataclass
class Caches:
    """The stores that hold our copy of the cluster's objects."""

    jobs: Jobs
    pods: Store[Pod]
    services: Store[observe.Service]
    nodes: NodeCache
    gangs: Mapping[str, GangWatch] = field(default_factory=dict)
    """Watches of gangs by adapter."""

    def of_kind(self, kind: str) -> Store[Any]:
        """Return the store for a kind: Pod, Service, or the kind of an adapter's objects."""
        gang = self._gang(kind)
        return gang.store if gang is not None else self.pods if kind == "Pod" else self.services

    def path(self, kind: str, namespace: str) -> str:
        """Return the path of a collection. Raise ApiError if the API server does not serve the kind."""
        gang = self._gang(kind)
        return gang.path(namespace) if gang is not None else collection(f"{kind.lower()}s", namespace)

    def _gang(self, kind: str) -> GangWatch | None:
        return next((gang for gang in self.gangs.values() if gang.adapter.resource == kind), None)


@dataclass(eq=False)
class Lookup:
    """Reads from the API server. All methods that send requests raise ApiError."""

    client: Client
    caches: Caches
    runtime: Runtime

    async def list_pods(self, key: Key) -> None:
        pages = self.client.pages(collection("pods", key[0]), f"{naming.LABEL_JOB}={key[1]}")
        await take(pages, self.caches.pods, self.caches.pods.put, namespace=key[0], key=key)

    async def read_job(self, key: Key, *, quietly: bool = False) -> None:
        """Read and store a whole job, or remove it from our copy.

        quietly: do not enqueue the job, because the caller continues with the answer.
        """
        jobs, known = self.caches.jobs, self.caches.jobs.entry(*key)
        raw = await self._got(f"{collection(api.PLURAL, key[0])}/{key[1]}", key[1])
        if known is not None and (raw is None or raw["metadata"]["uid"] != known.uid):
            jobs.remove(*key, known.uid)
        if raw is not None:
            (jobs.put_quietly if quietly else jobs.put)(raw)

    async def read_node(self, name: str) -> None:
        """Read and store a node, or mark it as gone."""
        nodes = await self._node(name)
        for raw in nodes:
            self.caches.nodes.put(raw)
        if not nodes:
            self.caches.nodes.is_gone(name)

    async def _node(self, name: str) -> list[Raw]:
        # List one object by name, because the role allows list and not get.
        listed = await self.client.get("/api/v1/nodes", {"fieldSelector": f"metadata.name={name}"})
        return [raw for raw in listed["items"] if raw["metadata"]["name"] == name]

    async def may_run_on_ready_node(self, namespace: str, name: str) -> bool:
        """True if a live pod is on a node that is ready now. The node is read, because its watch may lag.

        False if nodes are not watched, as in namespaced mode.
        """
        entry = self.caches.pods.entry(namespace, name)
        node = entry.value.node if entry is not None and entry.value.live else ""
        if not node or self.caches.nodes.seen() is None:
            return False
        ready = [raw for raw in await self._node(node) if observe.is_ready(raw)]
        for raw in ready:
            self.caches.nodes.put(raw)
        return bool(ready)

    async def has_changed(self, namespace: str, name: str, uid: str) -> bool:
        """Read a pod. If it still has this UID, store it and return True."""
        raw = await self._find("Pod", namespace, name)
        if raw is None or raw["metadata"]["uid"] != uid:
            return False
        self.caches.pods.put(raw)
        return True

    async def take_back(self, job: api.Metadata, name: str) -> bool:
        """Read a pod that no list shows. If the pod is the job's, restore its label and return True.

        Somebody may have removed the label, for example to debug the pod. The pod's processes keep training, so the
        next attempt would write into the same checkpoint.
        """
        raw = await self._find("Pod", job.namespace, name)
        if raw is None or observe.controller(raw).get("uid") != job.uid or raw["metadata"].get("deletionTimestamp"):
            return False
        body = {"metadata": {"uid": raw["metadata"]["uid"], "labels": {naming.LABEL_JOB: job.name}}}
        try:
            raw = await self.client.patch(f"{collection('pods', job.namespace)}/{name}", body)
        except ApiError as error:
            if not error.refuses_patch:
                raise
            return False
        about = decisions.of_pod(job, 0, name)
        text = "%s: the pod %s had lost the job's label; it has it again"
        self.runtime.log.warning(text, about.job, name, extra=about.fields())
        self.caches.pods.put_again(raw)
        return True

    async def is_own(self, kind: str, name: str, job: api.DDPJob, state: JobState) -> bool:
        """Read an object. Return True if it exists and the job owns it.

        If somebody else owns it, `state` keeps the conflict until the object is gone.
        """
        raw = await self._find(kind, job.metadata.namespace, name)
        if raw is None:
            state.conflicts.pop((kind, name), None)
            return False
        own = bool(observe.controller(raw).get("uid") == job.metadata.uid)
        if own or observe.job_name(raw) == job.metadata.name:
            # The object has the job's label, so the watch reports its deletion, and the conflict needs no polling.
            state.conflicts.pop((kind, name), None)
            state.refusals.created(kind, name)
            self.caches.of_kind(kind).put(raw)
        else:
            state.add_conflict(observe.conflicts(kind, raw, job.metadata), self.runtime.now())
        return own

    async def _find(self, kind: str, namespace: str, name: str) -> Raw | None:
        return await self._got(f"{self.caches.path(kind, namespace)}/{name}", name)

    async def _got(self, path: str, name: str) -> Raw | None:
        try:
            return await self.client.get(path)
        except ApiError as error:
            if is_absent(error, name):
                return None
            raise


def is_absent(error: ApiError, name: str) -> bool:
    """True if the object does not exist. A 404 for an unknown kind or path does not contain the name in quotes."""
    return error.status == 404 and f'"{name}"' in error.message
