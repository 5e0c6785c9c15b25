"""Reconciles one job: observe, plan, execute, and repeat until there is nothing to do.

In: a key from the queue, our copy of the cluster (`Caches`), and the operator's own memory of the job (`JobState`).
Out: requests of the Executor, and the seconds until the next reconcile. All decisions are in plan/, which is pure. This
module only decides whether our copy is recent enough to act on. The queue never runs two reconciles of a job at once,
so a JobState needs no lock.

Our copy may be behind: after a change of leader, or while a watch hangs. So we read the API server and plan the job
again before a step that cannot be undone: fail a job for a missing pod, start an attempt, free a job's resources.
This costs one list or read per attempt, and more code than a controller that trusts its informers.

A job that was cut to save memory (job/storage.py) is read for each reconcile and cut again at its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, TypeGuard

import msgspec

from ddpjob_operator.job import api, bounds, reasons, storage, validation
from ddpjob_operator.job.status import apart_from_progress
from ddpjob_operator.kube.api.client import ApiError
from ddpjob_operator.kube.api.in_flight import InFlight
from ddpjob_operator.kube.api.runtime import Runtime
from ddpjob_operator.kube.watch.store import Key, Store
from ddpjob_operator.kube.work import decisions
from ddpjob_operator.kube.work.executor import RECONCILE_SECONDS, ConflictError, Executor
from ddpjob_operator.kube.work.job_state import JobState, JobStates, PutOff
from ddpjob_operator.kube.work.lookup import Caches, Lookup
from ddpjob_operator.kube.work.queue import RetryError, back_off
from ddpjob_operator.kube.work.reports import Reports
from ddpjob_operator.observed.cluster import ConflictingObject, Observed, Pod
from ddpjob_operator.plan import invalid_job
from ddpjob_operator.plan.actions import (
    Action,
    CreateGroup,
    CreatePod,
    CreateService,
    DeleteGroup,
    Event,
    Plan,
    Settings,
    TellGroup,
)
from ddpjob_operator.plan.plan import plan
from ddpjob_operator.pods import naming

# Most changes take two rounds: write the status, then act on it. The limit stops a job that always finds more to do.
ROUNDS_MAX = 6
CREATED_SECONDS = 5.0
# Nodes or pods; a larger job is planned in a thread.
PLANNED_AT_ONCE = 256
# A plan in a thread delays each turn of the event loop. So threads pause after it for three times as long, at most 1 s.
PAUSE_AFTER_PLAN, PAUSE_SECONDS_MAX = 3.0, 1.0
REPORTS_AS_A_NODE = 16  # number of reports for which a plan takes as long as for one node
# Seconds between updates of the number of running pods in a status while pods of the job are being created.
UNFINISHED_SECONDS = 60.0

Requeue: TypeAlias = float | None
"""Seconds until the next reconcile; None: not before the next event of the job or one of its objects."""
AnotherRound: TypeAlias = Literal["another round"]
"""Result of a round that has changed the job: observe and plan the job again at once."""


@dataclass(eq=False)
class Reconciler:
    """Reconciles one job per call; the queue calls `reconcile`."""

    caches: Caches
    states: JobStates
    reports: Reports
    lookup: Lookup
    executor: Executor
    runtime: Runtime
    settings: Settings
    ready_in: Callable[[Key], float | None] = lambda _key: 0.0
    """Seconds until a job may be reconciled (0: now), or None: only when it is enqueued again."""
    observed: Callable[[Key], None] = lambda _key: None
    """Called before the state of a job is read: this reconcile covers the requests made until then."""
    waits: Callable[[Key], None] = lambda _key: None
    """Called when a reconcile waits for other reconciles. The wait ends at `observed`."""
    reads: InFlight = field(default_factory=lambda: InFlight(total=16, of_namespace=4, quick_seconds=600.0))
    """Limits how many jobs that are kept only in part are completely in memory at the same time, each up to 4 MiB."""
    plans: InFlight = field(default_factory=lambda: InFlight(total=1, of_namespace=1))
    """Large jobs are planned one at a time, and namespaces take turns: with n threads that plan, each turn of the event
    loop takes 5 ms x n longer, because Python switches threads every 5 ms."""
    _next_thread_at: float = field(default=float("-inf"), init=False)

    async def reconcile(self, key: Key) -> Requeue:
        """Reconcile the job. Return the seconds until the next reconcile. Raise RetryError."""
        try:
            return await self._reconcile(key)
        except ApiError as error:
            raise RetryError(str(error), error.retry_after_seconds or 0.0) from None
        finally:
            raw = self.caches.jobs.get(key)
            if raw is None or (storage.is_cut(raw) and storage.rests(raw)):
                self.states.forget([key])
            elif storage.is_cut(raw):
                self.states.forget_spec(key)

    async def _reconcile(self, key: Key) -> Requeue:
        if (wait := self.ready_in(key)) != 0.0:
            return wait
        raw = self.caches.jobs.get(key)
        is_left_out = raw is None and self.caches.jobs.leaves_out(key[0]) and self._has_objects(key)
        if not is_left_out and (raw is None or not storage.is_cut(raw)):
            with self.caches.jobs.held(key):
                return await self._rounds(key)
        if raw is not None and (until := self._rests_until(key, raw)) is not None:
            return None if until == bounds.TIME_LAST else max(0.05, (until - self.runtime.now()).total_seconds())
        async with self.reads.place(key[0]):
            with self.caches.jobs.held(key):
                await self.lookup.read_job(key, quietly=True)
                # Call `ready_in` again: only the complete job shows if it must wait for the first list of a gang API.
                return await self._rounds(key) if (wait := self.ready_in(key)) == 0.0 else wait

    def _rests_until(self, key: Key, raw: Mapping[str, Any]) -> dt.datetime | None:
        """Return until when a job that is kept only in part needs no reconcile; None: read it from the API server."""
        has_objects = self._has_objects(key)
        until = storage.rests_until(raw, self.runtime.now(), has_objects=has_objects)
        if until is not None:
            self.caches.jobs.begun.waits_no_more(key)
            self.states.forget([key])
        elif not has_objects and storage.waits_for_room(raw) and self.caches.jobs.begun.ask(key, storage.size(raw)):
            return bounds.TIME_LAST  # the job begins when memory is freed, at an unknown time
        return until

    def _has_objects(self, key: Key) -> bool:
        return any(copy.unreadable(key) or any(copy.each(key)) for copy in self._copies())

    def _copies(self) -> list[Store[Any]]:
        return [self.caches.pods, self.caches.services, *(gang.store for gang in self.caches.gangs.values())]

    async def _rounds(self, key: Key) -> Requeue:
        ends = self.runtime.clock() + RECONCILE_SECONDS
        for _ in range(ROUNDS_MAX):
            try:
                again_in = await self._round(key, ends)
            except ConflictError:
                continue
            if again_in != "another round":
                return again_in
        return 1.0

    async def _round(self, key: Key, ends: float) -> Requeue | AnotherRound:
        async with contextlib.AsyncExitStack() as places:
            if self._is_large(key):
                # Wait before the job is read: if it changed during the wait, its status could not be written.
                self.waits(key)
                await places.enter_async_context(self.plans.place(key[0]))
                await asyncio.sleep(self._next_thread_at - self.runtime.clock())
            self.observed(key)
            readable = await self._readable(key)
            if not isinstance(readable, tuple):
                return readable
            job, problems = readable
            state = self.states.of(key, job.metadata.uid)
            if not await self._confirm_gone(key, job, state):
                return 0.0  # go to the end of the queue, behind the other jobs that are due
            todo = await self._plan(key, job, await self._observe(key, job, state), problems)
        if todo.status is None and not todo.actions:
            return self._requeue_in(todo, state)
        if await self._has_read_job(key, todo, state) or await self._has_listed_pods(key, job, todo, state):
            return "another round"
        if (wait := self._wait_for_turn(job, todo, state)) > 0:
            return min(wait, self._requeue_in(todo, state) or wait)
        return await self._execute(job, todo, state, ends)

    def _is_large(self, key: Key) -> bool:
        """True if a plan of the job takes too long for the event loop."""
        if (job := self.states.job(key)) is None:
            return False
        state = self.states.of(key, job.metadata.uid)
        return is_large(job, len(self.caches.pods.of(key)) + len(state.deleted_pods), len(state.reports.by_rank))

    async def _plan(self, key: Key, job: api.DDPJob, seen: Observed, problems: list[validation.Problem]) -> Plan:
        """Plan the job; in a thread if it is large, because a blocked event loop could lose the Lease."""
        now = self.runtime.now()
        if not self._is_large(key):
            return plan(job, seen, now, problems=problems, settings=self.settings)
        # Copy what the event loop changes while the thread reads it. The changes go into the next plan.
        seen = replace(seen, reports=dict(seen.reports), nodes=None if seen.nodes is None else dict(seen.nodes))
        began = self.runtime.clock()
        try:
            return await asyncio.to_thread(plan, job, seen, now, problems=problems, settings=self.settings)
        finally:
            took = self.runtime.clock() - began
            self._next_thread_at = self.runtime.clock() + min(PAUSE_AFTER_PLAN * took, PAUSE_SECONDS_MAX)

    async def _execute(self, job: api.DDPJob, todo: Plan, state: JobState, ends: float) -> Requeue | AnotherRound:
        is_only_progress = _is_only_progress(job.status, todo)
        if self._tells_later(job.status, todo, state):
            todo = Plan(todo.actions, requeue_at=todo.requeue_at)
        is_complete = await self.executor.execute(job, todo, state)
        if todo.status is not None:
            state.is_read, state.written_at = True, self.runtime.clock()
        only_creates = all(isinstance(action, (CreateService, CreateGroup, CreatePod)) for action in todo.actions)
        if is_complete and todo.actions and only_creates and not state.refusals.known and not state.conflicts:
            # Plan no further round: the new pods' events will enqueue the job. Decide this before the check for `ends`.
            # If many jobs start at once, each job would otherwise write another status while its pods are starting.
            return min(CREATED_SECONDS, self._requeue_in(todo, state) or CREATED_SECONDS)
        if not is_complete or self.runtime.clock() > ends:
            return 0.0  # go to the end of the queue, behind the other jobs that are due
        return self._requeue_in(todo, state) if is_only_progress else "another round"

    def _tells_later(self, old: api.Status, todo: Plan, state: JobState) -> bool:
        """True if the status need not be written: more pods are created, and only the number of running ones is new.

        Otherwise each batch of a large job would write a status, which costs the API server as much as two pods.
        """
        new = todo.status
        if new is None or not state.next_batch or self.runtime.clock() - state.written_at > UNFINISHED_SECONDS:
            return False
        told = {c.type: c.status for c in old.conditions} == {c.type: c.status for c in new.conditions}
        same = {name: getattr(old, name) for name in ("nodes", "started_nodes", "display", "message", "conditions")}
        return told and bool(todo.actions) and msgspec.structs.replace(new, **same) == old

    async def _readable(self, key: Key) -> tuple[api.DDPJob, list[validation.Problem]] | Requeue:
        """Return the job and the problems of its spec; None if the job is gone or another controller manages it.

        If the job or one of its objects cannot be read, report that and return the seconds until the next try.
        """
        raw = self.caches.jobs.get(key)
        if raw is not None and storage.is_cut(raw):  # after an event, our copy may have only a part of the job
            await self.lookup.read_job(key, quietly=True)
            raw = self.caches.jobs.get(key)
        if raw is None:
            self.states.forget([key])
            return None
        version = str(raw["metadata"].get("resourceVersion") or "")
        state = self.states.of(key, raw["metadata"]["uid"])
        off = state.put_off
        if off is not None and version and off.version == version and (wait := off.until - self.runtime.clock()) > 0:
            return wait
        try:
            job, problems = self.states.parse(key, raw)
        except validation.UnreadableJobError as error:
            if not invalid_job.is_managed(raw):
                return None
            return self._put_off(key, state, version, await self._report_unreadable(raw, str(error)) or str(error))
        if why := next((why for copy in self._copies() if (why := copy.unreadable(key))), ""):
            # Do not plan without an unreadable pod: the plan would treat its rank as lost, and create a second pod.
            self.executor.send_event(job.metadata, Event("Warning", reasons.UNREADABLE.name, why))
            return self._put_off(key, state, "", why)
        state.put_off = None
        return job, problems

    def _put_off(self, key: Key, state: JobState, version: str, why: str) -> float:
        """Log why the job cannot be handled, if the reason is new. Return the seconds until the next try."""
        times = state.put_off.times + 1 if state.put_off is not None and state.put_off.why == why else 1
        pause = back_off(times)
        state.put_off = PutOff(why, version, self.runtime.clock() + pause, times)
        if times == 1:
            about = decisions.about(key, self.caches.jobs.get(key))
            text = "%s: %s; nothing is done for the job until that is fixed"
            self.runtime.log.warning(text, about["job"], why, extra=about)
        return pause

    async def _report_unreadable(self, raw: Mapping[str, Any], why: str) -> str:
        """Write a condition with the reason why the job is unreadable. Return why the server refused it, or ""."""
        status = invalid_job.unreadable_status(raw, why, self.runtime.now())
        if status is None and invalid_job.is_reported_unreadable(raw):
            return ""
        return await self.executor.report_unreadable(raw["metadata"], status, invalid_job.unreadable_event(why))

    async def _observe(self, key: Key, job: api.DDPJob, state: JobState) -> Observed:
        now = self.runtime.now()
        state.adjust_clock(now)
        for (kind, name), conflict in list(state.conflicts.items()):
            if conflict.check_at <= now:
                await self.lookup.is_own(kind, name, job, state)
        state.undeletable = {uid: until for uid, until in state.undeletable.items() if until > now}
        services = [s for s in self.caches.services.of(key) if s.name == job.metadata.name]
        own = [s for s in services if s.owner_uid == job.metadata.uid]
        others = tuple(
            ConflictingObject("Service", s.name, of_deleted_job=s.owner_job == job.metadata.name)
            for s in services
            if s not in own
        )
        pods = state.by_own_clock(self.caches.pods.of(key), self.runtime.now())
        # A pod whose node is gone counts as lost. Read the node first, because the watch of nodes may lag.
        for name in self.caches.nodes.unknown({pod.node for pod in pods if pod.live and pod.node}):
            await self.lookup.read_node(name)
        return Observed(
            service=bool(own),
            pods=tuple(pods),
            conflicts=(*others, *(conflict.object for conflict in state.conflicts.values())),
            refusals=tuple(state.refusals.known.values()),
            undeletable=frozenset(state.undeletable),
            reports=state.reports.by_rank,
            listening_since=self.reports.listening_since,
            agent=state.agent.agent if state.agent and state.agent.attempt == job.status.attempt else None,
            agents_ask=state.agents_ask,
            nodes=self.caches.nodes.seen(),
            deleted_pods=tuple(p for p in state.deleted_pods.values() if p.attempt == job.status.attempt),
            trackers={rank: t for rank, t in state.reports.trackers.items() if t.attempt == job.status.attempt},
            gang_apis={name: gang.api_in(key[0]) for name, gang in self.caches.gangs.items()},
            groups=tuple(group for gang in self.caches.gangs.values() for group in gang.groups(key)),
            no_room=self._no_room(key, job),
            neighbours=self._neighbours(key, pods) if job.status.gang is not None else {},
        )

    def _no_room(self, key: Key, job: api.DDPJob) -> str:
        """Return why there is no room in memory for a new job; "" if there is room, or if the job has begun."""
        raw, begun = self.caches.jobs.get(key), self.caches.jobs.begun
        if raw is not None and storage.would_begin(job):
            return begun.ask(key, storage.size(raw))
        begun.waits_no_more(key)
        return ""

    def _neighbours(self, key: Key, pods: Sequence[Pod]) -> dict[str, int]:
        """Return how many nodes each other job of the namespace uses; {} unless a pod of this job is unschedulable."""
        if not any(pod.unschedulable and not pod.node for pod in pods):
            return {}
        others = (other for other in self.caches.pods.jobs() if other[0] == key[0] and other != key and other[1])
        held = {name: sum(p.live and bool(p.node) for p in self.caches.pods.of((at, name))) for at, name in others}
        return {name: nodes for name, nodes in held.items() if nodes}

    async def _confirm_gone(self, key: Key, job: api.DDPJob, state: JobState) -> bool:
        """Read the pods that have run and that our copy lacks. Return False if the time was too short for all pods.

        A missing pod fails the job, but our copy may lag.
        """
        status = job.status
        if job.metadata.deletion_timestamp is not None or status.state in ("Succeeded", "Failed", "Suspended"):
            return True
        ran = status.started - status.completed
        names = {naming.present_pod_name(job, status, place) for place in ran}
        if not (missing := self._missing(key, names) - state.confirmed_gone):
            return True
        await self.lookup.list_pods(key)
        return await self.executor.take_back(job, self._missing(key, missing), state)

    def _missing(self, key: Key, names: Set[str]) -> Set[str]:
        """Return the pods that our copy lacks."""
        return names - {pod.name for pod in self.caches.pods.of(key)}

    async def _has_read_job(self, key: Key, todo: Plan, state: JobState) -> bool:
        """Read the job before a new leader creates pods for a status that another operator wrote. True: plan again.

        The first list may come from an API server that lags. The pods would then belong to an attempt that is over,
        with restart budgets that are already spent.
        """
        if state.is_read or todo.status is not None or not any(isinstance(a, CreatePod) for a in todo.actions):
            return False
        await self.lookup.read_job(key)
        state.is_read = True
        return True

    async def _has_listed_pods(self, key: Key, job: api.DDPJob, todo: Plan, state: JobState) -> bool:
        """List the pods before an attempt's first pod, and before others get the job's resources. True: plan again.

        A copy that is behind may lack running pods. Two groups would then train at once and write into the same
        checkpoint.
        """
        creates = ((a.attempt, a.replacement) for a in todo.actions if isinstance(a, CreatePod))
        newest = max(creates, default=(0, 0))
        # A job that succeeded needs no list: all of its pods were seen to end.
        status = job.status
        freed = {(a.uid, status.attempt) for a in todo.actions if _frees(a)} if status.state != "Succeeded" else set()
        if newest <= state.listed_for and freed <= state.listed_to_free:
            return False
        await self.lookup.list_pods(key)
        state.listed_for, state.listed_to_free = max(newest, state.listed_for), freed
        return True

    def _wait_for_turn(self, job: api.DDPJob, todo: Plan, state: JobState) -> float:
        """Return the seconds until progress alone may be written, because the writes of all jobs share a rate limit."""
        only_progress = job.status.progress is not None and _is_only_progress(job.status, todo)
        if only_progress and (wait := self.reports.wait_for_write(state)) > 0:
            return wait
        state.progress_at = None
        return 0.0

    def _requeue_in(self, todo: Plan, state: JobState) -> float | None:
        times = [*(conflict.check_at for conflict in state.conflicts.values()), *state.undeletable.values()]
        if todo.requeue_at is not None:
            times.append(todo.requeue_at)
        return max(0.05, (min(times) - self.runtime.now()).total_seconds()) if times else None


def is_large(job: api.DDPJob, pods: int = 0, reports: int = 0) -> bool:
    """True if a job has too many nodes, pods (also deleted ones) or reports to be planned on the event loop."""
    stated = job.status.attempt_nodes or 0, job.status.nodes.total if job.status.nodes is not None else 0
    return max(job.spec.nodes, *stated, pods, reports // REPORTS_AS_A_NODE) > PLANNED_AT_ONCE


def _frees(action: Action) -> TypeGuard[DeleteGroup | TellGroup]:
    """True if other jobs can use the resources of this job's pods after the action."""
    return isinstance(action, DeleteGroup) or (
        isinstance(action, TellGroup) and action.what not in ("ready", "unready")
    )


def _is_only_progress(old: api.Status, todo: Plan) -> bool:
    """True if a plan writes progress and nothing else. No rule depends on progress
    (tests/property/test_plan_properties.py), so no other round is needed. Each job that reports has such a plan every
    ten seconds.
    """
    new = todo.status
    return not todo.actions and new is not None and apart_from_progress(old) == apart_from_progress(new)
