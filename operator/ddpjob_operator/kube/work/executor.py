"""Carries out a plan: the status and its Events first, then deletes, then creates, then groups, then the job itself.

In: a Plan of the Reconciler. Out: requests to the API server; each answer goes into our copy of the cluster. A create
that the server refuses is stored in the JobState, and the next plan reports it to the user.

The status is written with the resourceVersion for which it was planned, so the write fails if the job has changed. A
crash after the write loses no decision, because the next operator plans from the recorded status.

A large job takes many reconciles (slow start), because no reconcile starts a request after RECONCILE_SECONDS.
"""

from __future__ import annotations

import asyncio
import collections
import datetime as dt
import logging
from collections.abc import Awaitable, Callable, Sequence, Set
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial

import msgspec

from ddpjob_operator.gangs import kueue
from ddpjob_operator.job import api
from ddpjob_operator.kube.api.client import ApiError, Client, Raw, collection
from ddpjob_operator.kube.api.in_flight import InFlight
from ddpjob_operator.kube.api.runtime import Runtime
from ddpjob_operator.kube.watch import observe
from ddpjob_operator.kube.watch.store import Key
from ddpjob_operator.kube.work import decisions
from ddpjob_operator.kube.work.events import Events
from ddpjob_operator.kube.work.job_state import UNDELETABLE_SECONDS, JobState
from ddpjob_operator.kube.work.lookup import Caches, Lookup, is_absent
from ddpjob_operator.metrics.meter import Meter
from ddpjob_operator.plan.actions import (
    Action,
    CreateGroup,
    CreatePod,
    CreateService,
    DeleteGroup,
    DeleteJob,
    DeletePod,
    EndPod,
    Event,
    Plan,
    TellGroup,
)
from ddpjob_operator.plan.finish import redacted_events
from ddpjob_operator.pods import build, naming

# Strict makes a typo in the template an error that the user sees (KEP-2885). By default unknown fields are dropped.
STRICT = {"fieldValidation": "Strict", "fieldManager": "ddpjob-operator"}
STATUS = {"fieldManager": "ddpjob-operator"}
# Seconds after which a reconcile starts no request for a pod; the next reconcile continues.
# Without this limit, a job of a thousand pods behind a slow webhook would react to a suspend only after minutes.
RECONCILE_SECONDS = 5.0
# Stop reading lost pods by name after this many answers 404: the remaining pods are usually gone, too.
GONE_MAX = 8
# Requests of one job at a time. Eight nodes start in one round trip, and half of the namespace's limit stays free.
OF_JOB_MAX = 8
# Pods that the second reconcile of a new job creates; each later reconcile creates twice as many.
# With 2 pods, most of many jobs started at once would get only some of their pods (docs/dev/decisions.md).
SECOND_BATCH = 8


class ConflictError(Exception):
    """The job, or the node of a pod, has changed after the plan was made. The caller must observe both again."""


@dataclass(eq=False)
class Executor:
    """Carries out plans by requests to the API server."""

    client: Client
    caches: Caches
    lookup: Lookup
    events: Events
    runtime: Runtime
    build_pod: Callable[..., Raw] = build.pod
    """build.pod with the operator's settings."""
    progressed: Callable[[Key], None] = lambda _key: None
    """Called when a request is sent and when it is answered, so that the queue sees the job is not stuck."""
    meter: Meter = field(default_factory=Meter)
    # Two limits, so that creates behind a slow webhook do not delay deletes.
    creates: InFlight = field(default_factory=InFlight)
    deletes: InFlight = field(default_factory=InFlight)

    async def execute(self, job: api.DDPJob, todo: Plan, state: JobState) -> bool:
        """Carry out as much of a plan as RECONCILE_SECONDS and slow start allow. Return True if nothing is left to do.

        Raise ConflictError if the job or a node has changed, ApiError if the server cannot do it now.
        """
        before = job
        if todo.status is not None:
            await self._replace_status(job.metadata, msgspec.to_builtins(todo.status))
            # Pods get their remaining restart budgets from the new status, which may count more restarts in place.
            job = msgspec.structs.replace(job, status=todo.status)
        self._report(before, todo, state)
        # Events report what the status records. They come before the other requests, which may fail.
        self.events.send(job.metadata, todo.events, self.runtime.now())
        deletes = [partial(self._delete, job, a, state) for a in todo.actions if isinstance(a, DeletePod)]
        deletes += [partial(self._end, job, a, state) for a in todo.actions if isinstance(a, EndPod)]
        place = partial(self.deletes.place, job.metadata.namespace)
        is_complete = await self._some_at_a_time(place, job, deletes)
        is_complete &= await self._create_all(job, todo.actions, state)
        for action in todo.actions:
            if isinstance(action, DeleteGroup):
                await self._delete_group(job, action)
            elif isinstance(action, TellGroup):
                await self._tell_group(job, action, state)
        for action in todo.actions:
            if isinstance(action, DeleteJob):
                await self._delete_job(job, action)
        return is_complete

    def _report(self, job: api.DDPJob, todo: Plan, state: JobState) -> None:
        """Log and count a plan whose status was written. job: with the status before it."""
        log = self.runtime.log
        for line in decisions.lines(job, todo):
            log.info("%s", line.text, extra=line.fields())
        if log.isEnabledFor(logging.DEBUG) and (decision := decisions.decision(job, todo)) is not None:
            log.debug("%s", decision.text, extra=decision.fields())
        if todo.status is not None:
            agent = state.agent.agent if state.agent is not None else None
            state.restart = self.meter.changed(job.status, todo.status, self.runtime.now(), state.restart, agent)

    async def take_back(self, job: api.DDPJob, names: Set[str], state: JobState) -> bool:
        """Read these pods, which no list shows, by name. Restore the job's label on pods that exist.

        Return False if the time of the reconcile ended too early. `state.confirmed_gone` gets pods that do not exist.
        """
        back, gone = set[str](), set[str]()

        async def look_for(name: str) -> None:
            if await self.lookup.take_back(job.metadata, name):
                back.add(name)
            else:
                gone.add(name)

        looks = [partial(look_for, name) for name in sorted(names)]
        place = partial(self.deletes.place, job.metadata.namespace)
        done = await self._some_at_a_time(place, job, looks, lambda: len(gone) >= GONE_MAX)
        state.confirmed_gone |= names - back if done else gone
        return done

    def send_event(self, job: api.Metadata, event: Event) -> None:
        """Send an Event that no plan contains."""
        self.events.send(job, redacted_events((event,)), self.runtime.now())

    async def report_unreadable(self, metadata: Raw, status: Raw | None, event: Event) -> str:
        """Write the condition and send the Event of a job that cannot be read. Raise as `execute`.

        status: with the condition added. The server refuses it if another stored field breaks the schema; then only the
        Event is sent. Return why it was refused, "" if it was written.
        """
        refused = ""
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
            refused = f"its condition was not written: {error}"
        self.send_event(job, event)
        return refused

    async def _replace_status(self, metadata: api.Metadata, status: Raw) -> None:
        path = f"{collection(api.PLURAL, metadata.namespace)}/{metadata.name}/status"
        # Replace, not patch, so that unset fields disappear. The status subresource ignores the rest of the body.
        # The resourceVersion makes the server refuse the write if the job has changed.
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
            with self.caches.jobs.writing((metadata.namespace, metadata.name), status):
                self.caches.jobs.put_quietly(await self.client.replace(path, body, STATUS))
        except ApiError as error:
            if error.status not in (404, 409):
                raise
            await self.lookup.read_job((metadata.namespace, metadata.name))
            raise ConflictError from None

    async def _delete(self, job: api.DDPJob, action: DeletePod, state: JobState) -> None:
        namespace, options = job.metadata.namespace, await self._delete_options(job, action)
        try:
            answer = await self.client.delete(f"{collection('pods', namespace)}/{action.name}", options)
        except ApiError as error:
            if error.status != 409 and not is_absent(error, action.name):
                if action.grace_seconds != 0 or not is_refusal(error):
                    raise
                return self._not_deleted(job, action, state, str(error))
            if error.status == 409 and await self.lookup.has_changed(namespace, action.name, action.uid):
                raise ConflictError from None
            self.caches.pods.remove(namespace, action.name, action.uid)
            return None
        metadata = answer.get("metadata") or {}
        leaves_later = metadata.get("finalizers") or metadata.get("deletionGracePeriodSeconds")
        is_pod = answer.get("kind") == "Pod" and metadata.get("uid") == action.uid
        if is_pod:
            # Store even an object that is gone now: it may show how the pod ended, and its later events are ignored.
            self.caches.pods.put(answer)
        if not (is_pod and metadata.get("deletionTimestamp") and leaves_later):
            self.caches.pods.remove(namespace, action.name, action.uid)
        elif action.grace_seconds == 0:
            self._not_deleted(job, action, state, f"finalizers {', '.join(metadata.get('finalizers') or ['?'])}")
        return None

    async def _delete_options(self, job: api.DDPJob, action: DeletePod) -> Raw:
        """Return the DeleteOptions. Raise ConflictError if the container could keep running next to its successor."""
        namespace = job.metadata.namespace
        # Name the uid, because a new pod may have the same name by now.
        preconditions = {"uid": action.uid}
        if action.grace_seconds == 0:
            # Delete the pod only at the resourceVersion that was known before the node was read.
            # If the kubelet comes back before the deletion, it updates the pod, and the server refuses the delete.
            known = self.caches.pods.entry(namespace, action.name)
            preconditions |= {"resourceVersion": str(known.version)} if known is not None and known.version else {}
            if await self.lookup.may_run_on_ready_node(namespace, action.name):
                raise ConflictError
        options: Raw = {"preconditions": preconditions}
        if action.grace_seconds is not None:
            options["gracePeriodSeconds"] = action.grace_seconds
        return options

    def _not_deleted(self, job: api.DDPJob, action: DeletePod, state: JobState, why: str) -> None:
        """Log that an unneeded pod could not be deleted. The job continues."""
        state.undeletable[action.uid] = self.runtime.now() + dt.timedelta(seconds=UNDELETABLE_SECONDS)
        about = decisions.of_pod(job.metadata, job.status.attempt, action.name)
        text = "%s: the pod %s, which the job no longer needs, is not deleted: %s"
        self.runtime.log.warning(text, about.job, action.name, why, extra=about.fields())

    async def _delete_group(self, job: api.DDPJob, action: DeleteGroup) -> None:
        gang = self.caches.gangs[action.adapter]
        namespace = job.metadata.namespace
        try:
            await self.client.delete(f"{gang.path(namespace)}/{action.name}", {"preconditions": {"uid": action.uid}})
        except ApiError as error:
            if error.status not in (404, 409):
                raise
            if error.status == 404 and not is_absent(error, action.name):
                return  # the API is not served now; if it returns, the object may still exist
        gang.store.remove(namespace, action.name, action.uid)

    async def _tell_group(self, job: api.DDPJob, action: TellGroup, state: JobState) -> None:
        """Report the job's state to a queue. The object is read first: a newer admission must not be overwritten."""
        gang, namespace = self.caches.gangs[action.adapter], job.metadata.namespace
        path = f"{gang.path(namespace)}/{action.name}"
        try:
            raw = await self.client.get(path)
            is_same = raw["metadata"]["uid"] == action.uid
            now = self.runtime.now()
            status = kueue.tell(raw, action.what, action.message, now, action.pods) if is_same else None
            if status is not None:
                raw = await self.client.replace(f"{path}/status", {**raw, "status": status}, STATUS)
            gang.store.put(raw)
        except ApiError as error:
            if error.status == 404:
                gang.store.remove(namespace, action.name, action.uid)
            elif is_refusal(error):
                state.refusals.add(gang.adapter.resource, action.name, error.message, self.runtime.now())
            elif error.status != 409:  # 409: the group has changed; the next round reads it again
                raise
            return
        if (gang.adapter.resource, action.name) in state.refusals.known:
            state.refusals.created(gang.adapter.resource, action.name)

    async def _end(self, job: api.DDPJob, action: EndPod, state: JobState) -> None:
        path = f"{collection('pods', job.metadata.namespace)}/{action.name}"
        body = {"metadata": {"uid": action.uid}, "spec": {"activeDeadlineSeconds": observe.END_NOW_SECONDS}}
        try:
            self.caches.pods.put(await self.client.patch(path, body))
        except ApiError as error:
            if not error.refuses_patch:
                raise
            about = decisions.of_pod(job.metadata, job.status.attempt, action.name)
            text = "%s: the pod %s is deleted, with its log, because it cannot be ended otherwise: %s"
            self.runtime.log.info(text, about.job, action.name, error, extra=about.fields())
            await self._delete(job, DeletePod(action.name, action.uid, action.grace_seconds), state)

    async def _delete_job(self, job: api.DDPJob, action: DeleteJob) -> None:
        path = f"{collection(api.PLURAL, job.metadata.namespace)}/{job.metadata.name}"
        try:
            await self.client.delete(path, {"preconditions": {"uid": action.uid}, "propagationPolicy": "Background"})
        except ApiError as error:
            if error.status not in (404, 409):
                raise
        await self.lookup.read_job((job.metadata.namespace, job.metadata.name))

    async def _create_all(self, job: api.DDPJob, actions: Sequence[Action], state: JobState) -> bool:
        """Create the Service, the group, and pods by slow start. Return False if there are more pods to create.

        After a refused pod the others are not tried, because the server would usually refuse them, too; that counts as
        complete. A new job gets 1, 8, 16, 32 … pods. Each batch has a separate reconcile, so that a large job does not
        delay the others. Kubernetes does the same (slowStartBatch, pkg/controller/job/job_controller.go). A restart
        gets all of its pods at once: its ranks wait for the last one, and the server has accepted such pods before.
        """
        first: list[Callable[[], Awaitable[bool]]] = []
        if CreateService() in actions:
            first.append(partial(self._create, "Service", build.service(job), job, state))
        first += [partial(self._create_group, job, a, state) for a in actions if isinstance(a, CreateGroup)]
        to_make = [a for a in actions if isinstance(a, CreatePod)]
        pods = [partial(self._create_pod, job, a, state) for a in to_make]
        if pods and not await self._read_flavors(job, to_make, state):
            return True
        known, state.next_batch = state.next_batch, 0
        left = pods if known else pods[1:]
        if not await self._one_by_one(job, first if known else [*first, *pods[:1]]):
            return True
        again = job.status.attempt > 1 or any(action.replacement for action in to_make)
        batch = len(left) if again else known
        before = state.refusals.in_a_row
        place = partial(self.creates.place, job.metadata.namespace, further=not again)
        done = await self._some_at_a_time(place, job, left[:batch], lambda: state.refusals.in_a_row > before)
        refused = state.refusals.in_a_row > before
        if not refused and (not done or len(left) > batch):
            state.next_batch = 2 * batch if known else SECOND_BATCH
        return not state.next_batch

    async def _one_by_one(self, job: api.DDPJob, creates: Sequence[Callable[[], Awaitable[bool]]]) -> bool:
        """Send the creates in order. Return False after the first object that still does not exist; send no more."""
        key = job.metadata.namespace, job.metadata.name
        for create in creates:
            async with self.creates.place(key[0]):
                self.progressed(key)
                there = await create()
            self.progressed(key)
            if not there:
                return False
        return True

    async def _some_at_a_time(
        self,
        place: Callable[[], AbstractAsyncContextManager[None]],
        job: api.DDPJob,
        calls: Sequence[Callable[[], Awaitable[object]]],
        given_up: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Make the calls, OF_JOB_MAX at a time. Return False if the time ended before all had begun."""
        key = (job.metadata.namespace, job.metadata.name)
        ends = self.runtime.clock() + RECONCILE_SECONDS
        left = collections.deque(calls)

        async def work() -> None:
            # Do not check the time again after waiting for the limit. Otherwise waiting requests would never be sent.
            while left and self.runtime.clock() < ends and not given_up():
                call = left.popleft()
                async with place():
                    self.progressed(key)
                    if not given_up():
                        await call()
                self.progressed(key)

        workers = (work() for _ in range(min(len(calls), OF_JOB_MAX)))
        # Wait for all workers before raising, so that no worker sends requests after the reconcile has failed.
        for error in await asyncio.gather(*workers, return_exceptions=True):
            if error is not None:
                raise error
        return given_up() or not left

    async def _create_pod(self, job: api.DDPJob, action: CreatePod, state: JobState) -> bool:
        more = {"avoid": action.avoid, "replacement": action.replacement}
        body = self.build_pod(job, action.attempt, action.place, **more)
        if job.status.gang is not None and (gang := self.caches.gangs.get(job.status.gang.kind)) is not None:
            gang.adapter.pod(body, job, action.attempt)
            if gang.adapter.admits_first and (group := gang.of(job, action.place)) is not None:
                kueue.place(body, group, state.flavors.get(group.name, ()))
        return await self._create("Pod", body, job, state)

    async def _create_group(self, job: api.DDPJob, action: CreateGroup, state: JobState) -> bool:
        gang = self.caches.gangs[action.adapter]
        body = gang.adapter.body(job, action.attempt, gang.api.api_version)
        if action.number > 1:
            kueue.further(body, gang.adapter.group_name(job, action.attempt, action.number), action.nodes)
        if gang.adapter.admits_first:
            paths = kueue.reads_for_group(job, gang.api.api_version)
            found = await self._read(paths, (gang.adapter.resource, body["metadata"]["name"]), state)
            if found is None:
                return False
            kueue.complete(body, found)
        return await self._create(gang.adapter.resource, body, job, state)

    async def _read_flavors(self, job: api.DDPJob, pods: Sequence[CreatePod], state: JobState) -> bool:
        """Read the queue's resource flavors, which name the nodes for the pods. Return False if one cannot be read."""
        gang = self.caches.gangs.get(job.status.gang.kind) if job.status.gang is not None else None
        state.flavors = {}
        if gang is None or not gang.adapter.admits_first:
            return True
        for pod in pods:
            group = gang.of(job, pod.place)
            if group is None or group.name in state.flavors:
                continue
            paths = kueue.reads_for_pods(group.placement, gang.api.api_version)
            name = naming.pod_name(job, pod.attempt, pod.place, pod.replacement)
            if (found := await self._read(paths, ("Pod", name), state)) is None:
                return False
            state.flavors[group.name] = found
        return True

    async def _read(self, paths: Sequence[str], of: tuple[str, str], state: JobState) -> list[Raw] | None:
        """Return the objects at `paths`. None if one cannot be read: `of`, which needs it, is recorded as refused."""
        try:
            return [await self.client.get(path) for path in paths]
        except ApiError as error:
            if error.status not in (403, 404):
                raise
            state.refusals.add(*of, error.message, self.runtime.now())
            return None

    async def _create(self, kind: str, body: Raw, job: api.DDPJob, state: JobState) -> bool:
        """Create an object. Return True if it exists and is ours. Raise ApiError if a later try may succeed."""
        namespace, name = job.metadata.namespace, body["metadata"]["name"]
        try:
            raw = await self.client.create(self.caches.path(kind, namespace), body, STRICT)
        except ApiError as error:
            if error.reason == "AlreadyExists":
                return await self.lookup.is_own(kind, name, job, state)
            if not is_refusal(error):
                raise
            message = build.in_users_words(error.message, body, job) if kind == "Pod" else error.message
            state.refusals.add(kind, name, message, self.runtime.now())
            return False
        state.refusals.created(kind, name)
        self.caches.of_kind(kind).put(raw, is_whole=False)
        return True


def is_refusal(error: ApiError) -> bool:
    """True if a create can succeed only after a user has changed something, or has waited. Quota, PodSecurity and
    admission answer 403, a bad field 400 or 422, a webhook that is down 500.
    """
    return error.status in (400, 403, 404, 405, 413, 422) or (error.status == 500 and "webhook" in error.message)
