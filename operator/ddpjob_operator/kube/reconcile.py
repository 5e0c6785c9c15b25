"""One look at one job: read our copy, plan, do it, look once more."""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from ddpjob_operator.job import api, ranges, reasons, topology, validation
from ddpjob_operator.job.status import apart_from_progress
from ddpjob_operator.kube.client import ApiError
from ddpjob_operator.kube.executor import LOOK_SECONDS, Caches, ConflictError, Executor
from ddpjob_operator.kube.job_state import JobState
from ddpjob_operator.kube.progress_turns import ProgressTurns
from ddpjob_operator.kube.queue import RetryError
from ddpjob_operator.kube.store import Key
from ddpjob_operator.observed import stall
from ddpjob_operator.observed.cluster import ConflictingObject, Observed, Pod
from ddpjob_operator.observed.reports import BadReportError, Report
from ddpjob_operator.plan import agent_restarts, unreadable
from ddpjob_operator.plan.actions import CreatePod, CreateService, Event, Plan, Settings
from ddpjob_operator.plan.plan import plan
from ddpjob_operator.pods import naming

_LOGGER = logging.getLogger(__name__)
# A plan needs two looks for most things (record, then act) and never more than a few.
LOOKS_MAX = 6
CREATED_SECONDS = 5.0
LISTEN_SECONDS = 10.0
FIRST_REPORT_SECONDS = 0.1
_SETTINGS = Settings()


class Reconciler:
    """Looks at jobs by their key."""

    def __init__(
        self,
        caches: Caches,
        executor: Executor,
        *,
        now: Callable[[], dt.datetime],
        clock: Callable[[], float] = time.monotonic,
        settings: Settings = _SETTINGS,
    ) -> None:
        self._caches = caches
        self._executor = executor
        self._now = now
        self._clock = clock
        self._progress_turns = ProgressTurns()
        self._settings = settings
        self._memory: dict[Key, JobState] = {}
        self._parsed: dict[Key, tuple[str, int | None, api.DDPJob, list[validation.Problem]]] = {}
        self._silence: stall.Silence | None = None
        self._receiving_since: dt.datetime | None = None
        self._listening_since = now()

    async def look(self, key: Key) -> float | None:
        """Plan and act until there is nothing to do; the seconds until time alone changes that. Raises RetryError."""
        ends = self._clock() + LOOK_SECONDS
        for _ in range(LOOKS_MAX):
            raw = self._caches.jobs.get(key)
            if raw is None:
                self._forget(key)
                return None
            readable = await self._readable(key, raw)
            if readable is None:
                return None
            job, problems = readable
            memory = self._memory_of(key, job.metadata.uid)
            try:
                todo = await self._plan(key, job, problems, memory)
                if todo.status is None and not todo.actions:
                    return self._again_in(todo, memory)
                if (wait := self._wait_for_turn(key, job, todo)) > 0:
                    return min(wait, self._again_in(todo, memory) or wait)
                whole = await self._executor.execute(job, todo, memory)
                if not whole or self._clock() > ends:
                    return 0.0  # the other jobs that are due come first
                if _only_created(todo) and not memory.refusals and not memory.strangers:
                    # The words just written say what is going on; the pods' own news comes soon enough.
                    return CREATED_SECONDS
            except ConflictError:
                continue
            except ApiError as error:
                raise RetryError(str(error), error.retry_after_seconds or 0.0) from None
        return 1.0

    def _forget(self, key: Key) -> None:
        self._progress_turns.forget(key)
        self._memory.pop(key, None)
        self._parsed.pop(key, None)

    async def _readable(self, key: Key, raw: Mapping[str, Any]) -> tuple[api.DDPJob, list[validation.Problem]] | None:
        """The job and what is wrong with its spec; None, and said, where it or one of its objects cannot be read: the
        next change of that is another look."""
        try:
            job, problems = self._parse(key, raw)
        except validation.UnreadableError as error:
            await self._tell_unreadable(raw, str(error))
            return None
        if why := self._caches.pods.unreadable(key) or self._caches.services.unreadable(key):
            # Without it a rank would seem to be lost, and a pod would be made beside it.
            self._executor.say(job.metadata, Event("Warning", reasons.UNREADABLE.name, why))
            return None
        return job, problems

    def report(self, key: Key, report: Report) -> float | None:
        """What a rank of the job says about its training; the seconds until a look at the job is worth it.

        None: it says nothing new, or of a job that is not there. When it says nothing new for too long is known
        beforehand, so the look that took its last news will come again by itself. Raises BadReportError where the pod
        speaks for a rank that is not its own: one pod could fill our memory with 100,000.
        """
        memory, spec = self._memory.get(key), self._spec_of(key)
        if memory is None or spec is None:
            return None
        if report.agent is not None:
            return self._hear_agent(memory, report)
        if why := topology.not_its_rank(spec, report.rank, report.node_rank):
            raise BadReportError(why)
        if report.rank:
            # What is shown of the training is rank 0's; of the others only their pace counts.
            report = msgspec.structs.replace(report, metrics={})
        memory.make_room(report, None if topology.ranks_follow_nodes(spec) else topology.nproc_per_node(spec))
        known = memory.reports.get(report.rank)
        if known is not None and report.attempt < known.attempt:
            return None
        begins = known is None or report.attempt > known.attempt or (report.step > 0 and not known.step)
        is_news = self._fold(memory, report)
        if known is None or msgspec.structs.replace(report, received_at=known.received_at) != known:
            memory.reports[report.rank] = report
            is_news = True
        if not is_news:
            return None
        # The status tells by rank 0's first step how long the start took, and which steps are made twice.
        return FIRST_REPORT_SECONDS if begins and report.rank == 0 else self._settings.progress_write_seconds

    def _hear_agent(self, memory: JobState, report: Report) -> float | None:
        """What node 0's agent has restarted in place; the seconds as of `report`."""
        known, memory.agent = memory.agent, agent_restarts.latest(memory.agent, report)
        is_news = memory.agent is report and (known is None or known.agent != report.agent)
        return FIRST_REPORT_SECONDS if is_news else None

    def deleted_pods(self, key: Key, pod: Pod) -> None:
        """A pod's object has gone; `pod` is how it was last seen."""
        memory = self._memory.get(key)
        if memory is not None and memory.uid == pod.owner_uid:
            memory.deleted_pods = {n: p for n, p in memory.deleted_pods.items() if p.attempt >= pod.attempt}
            memory.deleted_pods[pod.name] = pod

    def _fold(self, memory: JobState, report: Report) -> bool:
        """Whether the clock of the rank starts anew."""
        now = report.received_at or self._now()
        before = memory.trackers.get(report.rank)
        pace = stall.update(before, report, now, self._receiving_since)
        if pace is None:
            return False
        memory.trackers[report.rank] = pace
        memory.heard_at = None if report.final else now
        return before is None or pace.advanced_at != before.advanced_at

    def forget(self, whose: Callable[[Key], bool]) -> None:
        """Others act on these jobs now: what was heard of them until then must not look like a hang later."""
        for key in [key for key in self._memory if whose(key)]:
            del self._memory[key]

    def listen(self) -> None:
        """Whether reports get here at all, every LISTEN_SECONDS: where most jobs go silent together, all clocks of
        those that are still heard start anew."""
        found = stall.silence(self._heard(), self._now())
        if found is not None:
            self._receiving_since = self._now() + dt.timedelta(seconds=1)  # our clock has whole seconds
        if found is not None and self._silence is None:
            _LOGGER.warning("%s", found.sentence())
        elif found is None and self._silence is not None:
            _LOGGER.info("reports of most jobs get here again")
        self._silence = found

    def _heard(self) -> Iterator[dt.datetime]:
        """When each job that should report was last heard."""
        for key, memory in self._memory.items():
            status = (self._caches.jobs.get(key) or {}).get("status") or {}
            if memory.heard_at is not None and status.get("state") == "Running":
                yield memory.heard_at

    async def _plan(self, key: Key, job: api.DDPJob, problems: list[validation.Problem], memory: JobState) -> Plan:
        memory.keep_time(self._now())
        await self._check_strangers(job, memory)
        await self._confirm_gone(key, job, memory)
        todo = self._plan_now(key, job, problems, memory)
        # A copy that is behind (a new leader whose watch hangs, an answer that was lost) does not show what an older
        # attempt has left, and two groups would train at once. So the API server is asked, once for each attempt.
        creates = ((a.attempt, a.replacement) for a in todo.actions if isinstance(a, CreatePod))
        starts = max(creates, default=(0, 0))
        if starts > memory.asked_before:
            await self._executor.list_pods(key)
            memory.asked_before = starts
            todo = self._plan_now(key, job, problems, memory)
        return todo

    def _plan_now(self, key: Key, job: api.DDPJob, problems: list[validation.Problem], memory: JobState) -> Plan:
        return plan(job, self._observe(key, job, memory), self._now(), problems=problems, settings=self._settings)

    async def _check_strangers(self, job: api.DDPJob, memory: JobState) -> None:
        now = self._now()
        for (kind, name), stranger in list(memory.strangers.items()):
            if stranger.check_at <= now:
                await self._executor.check_stranger(kind, name, job, memory)

    async def _confirm_gone(self, key: Key, job: api.DDPJob, memory: JobState) -> None:
        """A pod that has run and is missing from our copy fails the job, so the API server is asked first.

        Our copy may be behind the job's status: after a restart of the operator, or while a watch hangs unnoticed.
        """
        status = job.status
        if job.metadata.deletion_timestamp is not None or status.state in ("Succeeded", "Failed", "Suspended"):
            return
        ran = ranges.parse(status.started_nodes) - ranges.parse(status.completed_nodes)
        names = {naming.present_pod_name(job, status, rank) for rank in ran}
        missing = names - {pod.name for pod in self._caches.pods.of(key)} - memory.confirmed_gone
        if missing:
            await self._executor.list_pods(key)
            memory.confirmed_gone |= missing

    def _observe(self, key: Key, job: api.DDPJob, memory: JobState) -> Observed:
        services = [s for s in self._caches.services.of(key) if s.name == job.metadata.name]
        own = [s for s in services if s.owner_uid == job.metadata.uid]
        others = tuple(
            ConflictingObject("Service", s.name, of_deleted_job=s.owner_job == job.metadata.name)
            for s in services
            if s not in own
        )
        nodes, pods = self._caches.nodes.seen(), self._caches.pods.of(key)
        if nodes is None:  # then what is to be read from the pods themselves counts
            pods = memory.by_own_clock(pods, self._now())
        return Observed(
            service=bool(own),
            pods=tuple(pods),
            conflicts=(*others, *(s.conflicts for s in memory.strangers.values())),
            refusals=tuple(memory.refusals.values()),
            reports=memory.reports,
            listening_since=self._listening_since,
            agent=memory.agent.agent if memory.agent and memory.agent.attempt == job.status.attempt else None,
            nodes=nodes,
            deleted_pods=tuple(p for p in memory.deleted_pods.values() if p.attempt == job.status.attempt),
            trackers={rank: pace for rank, pace in memory.trackers.items() if pace.attempt == job.status.attempt},
        )

    def _wait_for_turn(self, key: Key, job: api.DDPJob, todo: Plan) -> float:
        """The seconds that a write of progress alone has to wait for those of other jobs."""
        old, new = job.status, todo.status
        if not todo.actions and new is not None and old.progress is not None and _alike(old, new):
            return self._progress_turns.ask(key, old.progress.updated, self._clock())
        self._progress_turns.forget(key)
        return 0.0

    def _again_in(self, todo: Plan, memory: JobState) -> float | None:
        times = [s.check_at for s in memory.strangers.values()]
        if todo.requeue_at is not None:
            times.append(todo.requeue_at)
        return max(0.05, (min(times) - self._now()).total_seconds()) if times else None

    def _memory_of(self, key: Key, uid: str) -> JobState:
        memory = self._memory.get(key)
        if memory is None or memory.uid != uid:
            memory = self._memory[key] = JobState(uid)
        return memory

    async def _tell_unreadable(self, raw: Mapping[str, Any], why: str) -> None:
        """Nothing is planned on what cannot be read; a change of the job is looked at anew."""
        if not unreadable.is_managed(raw):
            return
        status = unreadable.with_condition(raw, why, self._now())
        if status is None and unreadable.is_reported(raw):
            return
        try:
            await self._executor.tell(raw["metadata"], status, (unreadable.event(why),))
        except ConflictError:
            return  # the job has changed: that is another look
        except ApiError as error:
            raise RetryError(str(error), error.retry_after_seconds or 0.0) from None

    def _spec_of(self, key: Key) -> api.Spec | None:
        """As it was when the job was last looked at; reports come far more often."""
        known, raw = self._parsed.get(key), self._caches.jobs.get(key)
        if known is None and raw is not None:
            with contextlib.suppress(validation.UnreadableError):  # a look says so
                self._parse(key, raw)
            known = self._parsed.get(key)
        return None if known is None else known[2].spec

    def _parse(self, key: Key, raw: Mapping[str, Any]) -> tuple[api.DDPJob, list[validation.Problem]]:
        """The spec is parsed once per generation: most looks see another status alone. Raises UnreadableError."""
        metadata, status = validation.stored_metadata(raw), validation.stored_status(raw)
        known = self._parsed.get(key)
        if known is None or known[:2] != (metadata.uid, metadata.generation):
            job, problems = validation.parse(raw)
            self._parsed[key] = (metadata.uid, metadata.generation, job, problems)
            return job, problems
        _, _, job, problems = known
        return msgspec.structs.replace(job, metadata=metadata, status=status), problems


def _alike(old: api.Status, new: api.Status) -> bool:
    return apart_from_progress(old) == apart_from_progress(new)


def _only_created(todo: Plan) -> bool:
    return bool(todo.actions) and all(isinstance(action, (CreateService, CreatePod)) for action in todo.actions)
