"""Wires the operator: copies of the cluster's objects, and a queue of jobs to reconcile. A change only enqueues its
job.

Our own reflectors watch all objects; kopf only sees DDPJobs that appear or disappear (handlers.py). Every operator
keeps its copies up to date; only the one that holds the Lease runs the queue.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Set, Sized
from functools import partial
from importlib import metadata
from typing import Any

from ddpjob_operator.job import api, storage
from ddpjob_operator.kube.api import access, bounded_json, served_crd
from ddpjob_operator.kube.api.client import Client, collection
from ddpjob_operator.kube.api.in_flight import InFlight
from ddpjob_operator.kube.api.runtime import SYSTEM, Runtime
from ddpjob_operator.kube.api.tokens import BoundPod, Verifier
from ddpjob_operator.kube.kopf_workarounds.reflected_session import Feed
from ddpjob_operator.kube.leader_label import LeaderLabel
from ddpjob_operator.kube.lease import Election
from ddpjob_operator.kube.other_releases import OtherReleases
from ddpjob_operator.kube.ports import exposition
from ddpjob_operator.kube.ports.bounded_server import BoundedServer, Health
from ddpjob_operator.kube.ports.receive import Receiver, Sender
from ddpjob_operator.kube.settings import OperatorSettings
from ddpjob_operator.kube.watch import observe, triggers
from ddpjob_operator.kube.watch.gangs import GangWatch, waits_for
from ddpjob_operator.kube.watch.nodes import NodeCache
from ddpjob_operator.kube.watch.reflector import Reflector
from ddpjob_operator.kube.watch.store import Jobs, Key, Store
from ddpjob_operator.kube.work import decisions
from ddpjob_operator.kube.work.events import Events
from ddpjob_operator.kube.work.executor import Executor
from ddpjob_operator.kube.work.job_state import JobStates
from ddpjob_operator.kube.work.lookup import Caches, Lookup
from ddpjob_operator.kube.work.queue import Priority, Queue
from ddpjob_operator.kube.work.reconcile import Reconciler
from ddpjob_operator.kube.work.reports import Reports
from ddpjob_operator.metrics import names
from ddpjob_operator.metrics.meter import Meter, Moment
from ddpjob_operator.observed import facts
from ddpjob_operator.observed.cluster import Pod
from ddpjob_operator.observed.reports import Report
from ddpjob_operator.plan import leadership
from ddpjob_operator.pods import build, naming

UNSYNCED_SECONDS = 0.2
# Seconds without an answer after which a reconcile or watch hangs. No bounded request takes so long, even with retries.
STUCK_SECONDS = 600.0
# Seconds without a new try after which a watch in back-off hangs, because its back-off is shorter.
IDLE_SECONDS = 60.0
# The process is killed this many seconds after a signal, or after a failure, even if tasks are still running.
END_SECONDS, BROKEN_END_SECONDS = 8.0, 4.0


class Tasks:
    """Tasks that the operator cannot work without: if one ends, the process ends, so that Kubernetes restarts it."""

    def __init__(self, log: logging.Logger, end_within: Callable[[float], object]) -> None:
        self._log, self._end_within = log, end_within
        self._tasks: list[asyncio.Task[None]] = []
        self._ending = False
        self.broken_by = ""  # the failure that ends the process; "" if there is none
        self.stop_flag = asyncio.Event()

    @property
    def exit_code(self) -> int:
        return 1 if self.broken_by else 0

    def run(self, name: str, work: Coroutine[Any, Any, None], *, ends: bool = False) -> asyncio.Task[None]:
        """Start a task. ends: True if it ends when its work is done."""
        task = asyncio.create_task(work, name=name)
        self._tasks.append(task)
        if not ends:
            self.needs(task)
        return task

    def needs(self, task: asyncio.Task[Any]) -> None:
        """End the operator when this task ends. Otherwise jobs would be neglected."""
        task.add_done_callback(self._task_ended)

    def end(self, why: str = "", error: BaseException | None = None) -> None:
        """End the process, because of the failure `why` if there is one. A second call does nothing."""
        if self._ending:
            return
        self._ending, self.broken_by = True, why
        if why:
            self._log.error("%s, so the operator ends", why, exc_info=error)
        self._end_within(BROKEN_END_SECONDS if why else END_SECONDS)
        self.stop_flag.set()

    def cancel(self) -> list[asyncio.Task[None]]:
        """Cancel all tasks, without the end of the process. Return them."""
        for task in self._tasks:
            task.remove_done_callback(self._task_ended)
            task.cancel()
        return self._tasks

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        name = task.get_name().partition(" of <")[0]  # kopf puts object addresses into some task names
        self.end(f"{name} has ended", None if task.cancelled() else task.exception())


class Operator:
    """All parts of the operator, connected. It runs from `start` to `stop`."""

    def __init__(
        self,
        settings: OperatorSettings,
        client: Client,
        leader: Election | None = None,
        others: OtherReleases | None = None,
        runtime: Runtime = SYSTEM,
        meter: Meter | None = None,
        end_within: Callable[[float], object] = lambda _seconds: None,
    ) -> None:
        """`client` writes only while `leader` holds its Lease; without a leader, this operator is the only one.

        others: finds the namespaces that another release manages. meter: counts the requests of `client`. end_within:
        kill the process if it has not ended by itself after this many seconds.
        """
        self.settings, self._client, self._leader = settings, client, leader
        self._others = others or OtherReleases(client, are_known=True)
        self._runtime, self.meter = runtime, meter or Meter()
        self.leads = leader is None
        self.tasks = Tasks(runtime.log, end_within)
        self.caches = Caches(
            Jobs(self._enqueue, bounded_json.job, self._count_job, settings.room),
            Store(observe.pod, _job_of, self._pod_changed, facts.merge),
            Store(observe.service, _job_of, self._service_changed),
            NodeCache(self._nodes_changed, runtime.now),
            {
                name: GangWatch(
                    settings.rules.adapters[name],
                    client,
                    settings.watched,
                    _job_of,
                    self._enqueue,
                    self._enqueue_all,
                    runtime,
                    self.meter,
                    asks_places=settings.queue_places,
                )
                for name in settings.gangs
            },
        )
        self._set_up_work()
        reflector = partial(Reflector, client, runtime=runtime, meter=self.meter)
        self.reflectors = [
            reflector(plural, namespace, naming.LABEL_JOB, sink)
            for namespace in settings.watched
            for plural, sink in (("pods", self.caches.pods), ("services", self.caches.services))
        ]
        self._all_reflectors = [*self.reflectors]
        if not settings.namespaces:
            # Only a ClusterRole can grant access to nodes. Without one, only the pods show that a node is lost.
            self._all_reflectors.append(reflector("nodes", "", "", self.caches.nodes))
        self.feeds = {collection(api.PLURAL, namespace): Feed(self.caches.jobs) for namespace in settings.watched}
        self._of_jobs = [
            reflector(api.PLURAL, namespace, "", feed)
            for namespace, feed in zip(settings.watched, self.feeds.values(), strict=True)
        ]
        verifier = Verifier(client.get, partial(runtime.log.warning, "progress is off: %s"), clock=runtime.clock)
        leads = leader.holds if leader else lambda: True
        self._ports: list[tuple[int, BoundedServer]] = [
            (settings.health_port, Health(self.unhealthy, self.standing_by)),
            (settings.metrics_port, exposition.Exposition(self.meter, self.snapshot)),
            (
                settings.status_port,
                Receiver(verifier.pod, self.locate, self.report, self.leader_of, runtime=runtime, leads=leads),
            ),
        ]

    def _set_up_work(self) -> None:
        settings, runtime, caches, job = self.settings, self._runtime, self.caches, self.caches.jobs.get
        self.states = JobStates(caches.jobs, settings.room)
        self.queue: Queue[Key] = Queue(
            runtime,
            meter=self.meter,
            about=lambda key: decisions.about(key, job(key)),
            kind=lambda key: triggers.kind(job(key)),
        )
        lookup, creates = Lookup(self._client, caches, runtime), InFlight()
        self._events = Events(
            self._client,
            runtime,
            instance=settings.host_name,
            meter=self.meter,
            level=settings.events,
            busy=creates.is_full,
        )
        build_pod = partial(
            build.pod,
            reporting=build.Reporting(settings.status_url) if settings.status_url else None,
            keep_from_autoscalers=settings.keep_from_autoscalers,
            mount_api_token=settings.mount_api_token,
        )
        executor = Executor(
            self._client,
            caches,
            lookup,
            self._events,
            runtime,
            build_pod,
            self.queue.progressed,
            meter=self.meter,
            creates=creates,
        )
        self.reports = Reports(caches.jobs, self.states, runtime, settings.rules.progress_write_seconds)
        self.reconciler = Reconciler(
            caches,
            self.states,
            self.reports,
            lookup,
            executor,
            runtime,
            settings.rules,
            self._ready_in,
            self.queue.observed,
            self.queue.waits,
        )

    async def start(self) -> None:
        """Start all tasks. Return when the DDPJobs can be watched, which needs the CRD and the right to list them."""
        for port, server in self._ports:
            if port:
                await server.start(None, port)
        for reflector in self._all_reflectors:
            self.tasks.run(reflector.what, reflector.run())
        for name, gang in self.caches.gangs.items():
            self.tasks.run(f"gang {name}", gang.run())
        if self._leader is None:
            self.lead()
        self.tasks.run("first lists", self._after_first_lists(), ends=True)
        await access.wait_for_jobs(self._client, self.settings.watched, self._runtime.log)
        await access.report_missing_rights(self._client, self.settings.watched, self._runtime.log, self.settings.gangs)
        await served_crd.report_old_crd(self._client, self._runtime.log)
        if self._leader is not None:
            # Begin only after these checks: without the right to list jobs, this operator must not take the Lease.
            if not self._others.are_known:
                self.tasks.run("other releases", self._others.run(self._others_changed))
            self.tasks.run("lease", self._leader.run())
            self.tasks.run("leadership", self._lead_until_lost(self._leader))

    def watch_jobs(self) -> None:
        """Start the watches of DDPJobs, which also feed kopf."""
        self._all_reflectors += self._of_jobs
        for reflector in self._of_jobs:
            self.tasks.run(reflector.what, reflector.run())

    async def stop(self) -> None:
        """Cancel all tasks and release the Lease. Nothing is written afterwards."""
        await asyncio.gather(*self.tasks.cancel(), return_exceptions=True)
        if self._leader is not None:
            if self._leader.holds():
                await self._leader.release()
            await self._leader.close()
        for _, server in reversed(self._ports):
            await server.stop()
        await self._client.close()

    def job_told(self, kind: str | None, metadata: Mapping[str, Any]) -> None:
        """Handle kopf's event: remove a deleted job from our copy, and enqueue a new job."""
        key = (metadata["namespace"], metadata["name"])
        if kind == "DELETED":
            self.caches.jobs.remove(*key, metadata["uid"])
        else:
            self._enqueue(key)

    def locate(self, bound: BoundPod) -> Sender | None:
        """Return the job and node rank of a pod; None for a pod that does not belong to a known job."""
        entry = self.caches.pods.entry(bound.namespace, bound.name)
        if entry is None or entry.uid != bound.uid:
            return None
        job = self.caches.jobs.get(entry.key)
        if job is None or job["metadata"]["uid"] != entry.value.owner_uid:
            return None
        spec, place = self.states.spec(entry.key), entry.value.place
        if spec is None:
            return Sender(*entry.key, node_rank=0)  # reports of unreadable jobs are dropped
        members = spec.members
        if place not in members:
            return None
        return Sender(*entry.key, members.node_rank(place), entry.value.attempt, entry.value.replacement)

    def report(self, sender: Sender, report: Report) -> None:
        key = (sender.namespace, sender.job)
        if (in_seconds := self.reports.take(key, report)) is not None:
            self._enqueue(key, in_seconds, Priority.NEWS)

    def leader_of(self, sender: Sender) -> dict[str, Any] | None:
        """Return the stored leader of the sender's job; None if its pod is not running."""
        key = (sender.namespace, sender.job)
        if (job := self.states.job(key)) is None:
            return None
        state = self.states.of(key, job.metadata.uid)
        if not state.agents_ask:
            state.agents_ask = True
            self._enqueue(key, priority=Priority.NEWS)  # to record that they ask before an operator is lost
        entry = self.caches.pods.entry(key[0], leadership.pod_name(job))
        port = naming.port(job.metadata.uid, job.status.attempt)
        return leadership.answer(job, None if entry is None else entry.value, port)

    def unhealthy(self) -> str:
        """Return why a restart would help, or "". An unreachable API server is not a reason."""
        if self.tasks.broken_by:
            return self.tasks.broken_by
        if (stuck := self.queue.stuck_seconds()) > STUCK_SECONDS:
            return f"the reconcile of a job has got no answer for {stuck:.0f} s"
        now = self._runtime.clock()
        for reflector in self.watches():
            silent = now - reflector.tried_at
            if silent > (IDLE_SECONDS if reflector.waits else STUCK_SECONDS):
                return f"the watch of {reflector.what} has done nothing for {silent:.0f} s"
        return ""

    def watches(self) -> list[Reflector]:
        return [*self._all_reflectors, *(r for gang in self.caches.gangs.values() for r in gang.reflectors)]

    def standing_by(self) -> str:
        """Return a remark for /healthz about namespaces that other releases manage. A restart would not change that."""
        return "; ".join(self._others.sentences())

    def snapshot(self) -> exposition.Scrape:
        """Return what /metrics shows: the jobs that this release manages, and only while this operator leads."""
        caches = self.caches
        there = [(self._others.of(key[0]), raw) for key in caches.jobs if (raw := caches.jobs.get(key))]
        copies: dict[str, Sized] = {api.PLURAL: caches.jobs, "pods": caches.pods, "services": caches.services}
        copies |= {"nodes": caches.nodes, **{gang.adapter.plural: gang.store for gang in caches.gangs.values()}}
        moment = Moment(
            now=self._runtime.now(),
            jobs=None,
            version=metadata.version("ddpjob"),
            leads=self.leads,
            lease=self.settings.lease_name,
            queues=[self.queue.measured(), self._events.queue.measured()],
            cached=[(name, len(copies[name]) if name in copies else 0) for name in names.CACHES],
            of_jobs=self.settings.metrics_of_jobs,
            away=[raw["metadata"]["uid"] for other, raw in there if other],
        )
        return exposition.Scrape(moment, [raw for other, raw in there if not other] if self.leads else None)

    def lead(self) -> None:
        """Start to reconcile all jobs."""
        self.leads = True
        self.meter.leads(self._runtime.now())
        self.tasks.run("events", self._events.run())
        self.tasks.run("queue", self.queue.run(self.reconciler.reconcile))
        self.tasks.run("silence", self.reports.run())
        for name, gang in self.caches.gangs.items():
            if gang.places is not None:
                self.tasks.run(f"places {name}", gang.places.run())
        self._enqueue_all()

    async def _lead_until_lost(self, leader: Election) -> None:
        label = LeaderLabel(leader.client, self.settings.lease_namespace, self.settings.pod_name, self._runtime)
        self.tasks.run("label", label.run())
        former = await leader.gained()
        self.lead()
        label.take_from(former.partition("_")[0])
        await leader.lost()
        self.leads = False
        self.tasks.end()  # exit code 0, so that the restart does not count as a crash
        await asyncio.Event().wait()

    async def _after_first_lists(self) -> None:
        for reflector in self.reflectors:
            await reflector.synced.wait()
        pods, services = len(self.caches.pods), len(self.caches.services)
        self._runtime.log.info("%d pods and %d services are known", pods, services)
        self._runtime.freeze_heap()

    def _enqueue(self, key: Key, in_seconds: float = 0.0, priority: Priority = Priority.EVENT) -> None:
        # A follower does not enqueue, because nothing takes jobs out of its queue.
        if self.leads:
            self.queue.add(key, in_seconds, priority)
        elif (raw := self.caches.jobs.get(key)) is None or storage.is_cut(raw):
            self.states.forget([key])  # `locate` parses specs on a follower, too

    def _count_job(self, old: Mapping[str, Any] | None, new: Mapping[str, Any] | None) -> None:
        raw = new or old
        if not self.leads or raw is None:
            return
        if self._others.of(raw["metadata"].get("namespace", "")):
            self.meter.left_to_others(raw["metadata"]["uid"])
            return
        now = self._runtime.now()
        if old is not None and (new is None or new["metadata"]["uid"] != old["metadata"]["uid"]):
            self.meter.gone(exposition.job(old), now)
            self._events.gone(old["metadata"]["uid"])
        if new is not None:
            self.meter.spends(exposition.job(new), now)

    def _enqueue_all(self) -> None:
        for key in self.caches.jobs:
            self._enqueue(key)

    def _ready_in(self, key: Key) -> float | None:
        """Return the seconds until the job may be reconciled, 0 for now; None if another release manages it."""
        if self._others.of(key[0]):
            return None
        if not self._others.are_known:
            return UNSYNCED_SECONDS
        # Before the first lists are complete, a pod that is missing from our copy would look deleted.
        lists = (r.synced.is_set() for r in self.reflectors if r.namespace in ("", key[0]))
        return 0.0 if all(lists) and not self._waits_for_gang(key) else UNSYNCED_SECONDS

    def _waits_for_gang(self, key: Key) -> bool:
        """True if the job needs a gang API whose first list is missing. Jobs without a gang API do not wait."""
        gangs = self.caches.gangs
        if all(gang.is_ready(key[0]) for gang in gangs.values()) or (job := self.states.job(key)) is None:
            return False
        return waits_for(job, gangs)

    def _others_changed(self, namespaces: Set[str]) -> None:
        # Forget reports of another release's jobs: they would look like a stall if this release handles the job again.
        self.states.forget([key for key, _ in self.states if self._others.of(key[0])])
        for key in self.caches.jobs:
            if key[0] in namespaces:
                self._enqueue(key)

    def _pod_changed(self, key: Key, old: Pod | None, new: Pod | None) -> None:
        if new is None and old is not None:
            self.states.pod_deleted(key, old)
        nodes = ((self.caches.jobs.get(key) or {}).get("spec") or {}).get("nodes", 1)
        in_seconds = triggers.pod_changed(old, new, self.caches.pods.each(key), nodes)
        if in_seconds is not None and self.leads:
            is_news = new is not None and triggers.is_good_news(new, in_seconds)
            self._enqueue(key, in_seconds, Priority.NEWS if is_news else Priority.EVENT)

    def _service_changed(self, key: Key, old: observe.Service | None, new: observe.Service | None) -> None:
        job = self.caches.jobs.get(key)
        if old is not None or new is None or job is None or new.owner_uid != job["metadata"]["uid"]:
            self._enqueue(key)  # not for a new Service of this job, because no decision depends on one

    def _nodes_changed(self, names: Set[str]) -> None:
        for key in self.caches.pods.jobs():
            if triggers.uses_node(names, self.caches.pods.each(key)):
                self._enqueue(key)


def _job_of(raw: Mapping[str, Any]) -> Key:
    metadata = raw["metadata"]
    owner = observe.controller(raw)
    name = observe.job_name(raw) or (owner.get("name", "") if owner.get("kind") == api.KIND else "")
    return metadata.get("namespace", ""), name
