"""What the operator remembers of each job and no watch shows: refusals, conflicting objects, reports, deleted pods."""

from __future__ import annotations

import contextlib
import datetime as dt
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec

from ddpjob_operator.job import api, storage, validation
from ddpjob_operator.job.times import Clock
from ddpjob_operator.kube.watch.store import Jobs, Key
from ddpjob_operator.kube.work.queue import back_off
from ddpjob_operator.metrics.of_change import Restart
from ddpjob_operator.observed.cluster import ConflictingObject, Pod, Refusal
from ddpjob_operator.observed.reports import Report
from ddpjob_operator.observed.stall import StepTracker

REFUSED_SECONDS = (1, 2, 4, 8, 15, 30, 60, 120, 300)
# No job has more ranks; each is some hundred bytes.
REPORTERS_MAX = 100_000
CONFLICT_SECONDS = (2, 5, 10, 20, 30)
UNDELETABLE_SECONDS = 60


@dataclass
class Conflict:
    """A conflicting object, which no watch of ours shows: it is read again until it is gone."""

    object: ConflictingObject
    check_at: dt.datetime
    checks: int = 0


class PutOff(NamedTuple):
    """A job that cannot be read, or whose condition was refused: it is tried again after growing pauses."""

    why: str
    version: str
    """The resourceVersion of the job that was tried: another one is tried at once. Empty: it is not the job's own."""
    until: float
    """By the clock that nobody sets."""
    times: int
    """How often in a row it was put off for this reason."""


@dataclass
class JobState:
    """Of one job, by its uid: another job of the same name starts with nothing."""

    uid: str
    refusals: dict[tuple[str, str], Refusal] = field(default_factory=dict)
    refused_in_a_row: int = 0
    unfinished: bool = False
    """True if the last reconcile left pods to be created though the server creates them: slow start, or its time was
    over."""
    next_batch: int = 0
    """How many pods the next reconcile of an unfinished job creates."""
    progress_at: float | None = None
    """When (of the clock that nobody sets) progress alone may be written; None: nothing is waiting to be written."""
    conflicts: dict[tuple[str, str], Conflict] = field(default_factory=dict)
    """By kind and name."""
    agent: Report | None = None
    """The last report of node 0's agent."""
    reports: dict[int, Report] = field(default_factory=dict)
    """By rank. Of equal reports the first is kept, so that its time is since when nothing is new."""
    trackers: dict[int, StepTracker] = field(default_factory=dict)
    last_report_at: dt.datetime | None = None
    """Of any rank; None: none has reported yet, or one has sent its final report."""
    deleted_pods: dict[str, Pod] = field(default_factory=dict)
    """As they were last seen, because a pod may start and end between two reconciles."""
    first_seen: dict[tuple[str, str], dt.datetime] = field(default_factory=dict)
    """When a pod (by uid) was first seen to be silent, stopping, done, or bound after now."""
    undeletable: dict[str, dt.datetime] = field(default_factory=dict)
    """Until when a pod (by uid) is not deleted again that was deleted without grace, and is still there."""
    confirmed_gone: set[str] = field(default_factory=set)
    """Pods that are not in our copy, and that the API server does not have either."""
    clock: Clock = field(default_factory=Clock)
    flavors: list[dict[str, Any]] = field(default_factory=list)
    """What a queue says of the nodes of the pods that are made now."""
    restart: Restart | None = None
    """A failure whose restart is being timed."""
    listed_for: tuple[int, int] = (1, 0)
    """The newest attempt and replacement for whose first pod the API server has listed what older ones have left."""
    is_read: bool = False
    """Whether the job's status was written, or read from the API server, since this operator leads."""
    written_at: float = float("-inf")
    """When (of the clock that nobody sets) the job's status was written last."""
    put_off: PutOff | None = None
    listed_to_free: set[tuple[str, int]] = field(default_factory=set)
    """Groups (by uid, and the attempt that is recorded) that may be given up by what the API server has listed."""

    def adjust_clock(self, now: dt.datetime) -> None:
        """Where our wall clock was set back, move all times as far, so that nothing is waited for longer."""
        by = self.clock.set_back(now)
        if not by:
            return
        self.refusals = {of: replace(r, retry_at=r.retry_at + by) for of, r in self.refusals.items()}
        self.first_seen = {key: at + by for key, at in self.first_seen.items()}
        self.undeletable = {uid: at + by for uid, at in self.undeletable.items()}
        for conflict in self.conflicts.values():
            conflict.check_at += by

    def make_room(self, report: Report, nproc: int | None) -> None:
        """Keep no more reports than there are ranks. nproc: where ranks follow no node, a pod has so many reports, its
        last ones."""
        if report.rank in self.reports:
            return
        if nproc is not None:
            of_pod = [rank for rank, known in self.reports.items() if known.node_rank == report.node_rank]
            for rank in of_pod[: len(of_pod) + 1 - nproc]:
                self._forget(rank)
        while len(self.reports) >= REPORTERS_MAX:
            self._forget(next(iter(self.reports)))

    def _forget(self, rank: int) -> None:
        self.reports.pop(rank, None)
        self.trackers.pop(rank, None)

    def by_own_clock(self, pods: Sequence[Pod], now: dt.datetime) -> list[Pod]:
        """The pods with the times that show a lost node as we saw them: the API server's clock may be minutes off ours,
        and a healthy node would be given up at once."""
        seen = {(p.uid, "silent") for p in pods if p.silent_since}
        seen |= {(p.uid, "stopping") for p in pods if p.deletion_deadline}
        seen |= {(p.uid, "done") for p in pods if p.done_beside_sidecars}
        # It stays so when our clock has come to that time: a lost node would have its patience once more.
        ahead = {(p.uid, "bound") for p in pods if p.scheduled_at and p.scheduled_at > now}
        seen |= ahead | {(p.uid, "bound") for p in pods if (p.uid, "bound") in self.first_seen}
        # Its kubelet is back, which has its time from now on: it did not hear before that the pod is to stop.
        back = {(uid, "stopping") for uid, what in self.first_seen.keys() - seen if what == "silent"}
        self.first_seen = {key: now if key in back else self.first_seen.get(key, now) for key in seen}
        return [self._by_own_clock(p) for p in pods]

    def _by_own_clock(self, pod: Pod) -> Pod:
        is_timed = pod.done_beside_sidecars or (pod.uid, "bound") in self.first_seen
        if pod.silent_since is pod.deletion_deadline is pod.done_since is None and not is_timed:
            return pod  # most are so, and a job may have thousands
        stopping = self.first_seen.get((pod.uid, "stopping"))
        grace = dt.timedelta()
        if pod.deletion_deadline and pod.deletion_requested_at:
            grace = pod.deletion_deadline - pod.deletion_requested_at
        return msgspec.structs.replace(
            pod,
            bound_since=self.first_seen.get((pod.uid, "bound"), pod.scheduled_at),
            silent_since=self.first_seen.get((pod.uid, "silent")),
            deletion_deadline=None if stopping is None else stopping + grace,
            done_since=self.first_seen.get((pod.uid, "done")),
        )

    def not_deleted(self, uid: str, now: dt.datetime) -> None:
        """A pod is still there, although its deletion without grace was requested."""
        self.undeletable[uid] = now + dt.timedelta(seconds=UNDELETABLE_SECONDS)

    def refuse(self, kind: str, name: str, message: str, now: dt.datetime) -> None:
        """The server has refused to create it. All refusals of one reconcile wait until the same time."""
        retry_at = max((r.retry_at for r in self.refusals.values()), default=now)
        if retry_at <= now:
            self.refused_in_a_row += 1
            wait = REFUSED_SECONDS[min(self.refused_in_a_row, len(REFUSED_SECONDS)) - 1]
            retry_at = now + dt.timedelta(seconds=wait)
        self.refusals[kind, name] = Refusal(kind, name, message, retry_at)

    def waits(self, version: str, clock: float) -> float:
        """Seconds until this version of the job is tried again; 0: now."""
        off = self.put_off
        return max(0.0, off.until - clock) if off is not None and version and off.version == version else 0.0

    def put_it_off(self, why: str, version: str, clock: float) -> float:
        """Seconds until the next try; `put_off.times` is 1 where the reason is a new one."""
        times = self.put_off.times + 1 if self.put_off is not None and self.put_off.why == why else 1
        pause = back_off(times)
        self.put_off = PutOff(why, version, clock + pause, times)
        return pause

    def created(self, kind: str, name: str) -> None:
        """The server has created it, so the next refusal waits for the shortest time."""
        self.refusals.pop((kind, name), None)
        self.refused_in_a_row = 0

    def add_conflict(self, found: ConflictingObject, now: dt.datetime) -> None:
        """A conflicting object is there, or there still."""
        conflict = self.conflicts.setdefault((found.kind, found.name), Conflict(found, now))
        conflict.object = found
        wait = CONFLICT_SECONDS[min(conflict.checks, len(CONFLICT_SECONDS) - 1)]
        conflict.check_at, conflict.checks = now + dt.timedelta(seconds=wait), conflict.checks + 1


class JobStates:
    """The JobState of each job, and its spec as it was last parsed."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs
        self._states: dict[Key, JobState] = {}
        self._parsed: dict[Key, tuple[str, int | None, api.DDPJob, list[validation.Problem]]] = {}

    def __iter__(self) -> Iterator[tuple[Key, JobState]]:
        return iter(self._states.items())

    def of(self, key: Key, uid: str) -> JobState:
        """That of the job with this uid, new where there is none."""
        state = self._states.get(key)
        if state is None or state.uid != uid:
            state = self._states[key] = JobState(uid)
        return state

    def forget(self, keys: Iterable[Key]) -> None:
        """All of these jobs."""
        for key in keys:
            self._states.pop(key, None)
            self._parsed.pop(key, None)

    def forget_spec(self, key: Key) -> None:
        """It is parsed anew when it is needed."""
        self._parsed.pop(key, None)

    def pod_deleted(self, key: Key, pod: Pod) -> None:
        """A pod's object is gone; `pod` is how it was last seen."""
        state = self._states.get(key)
        if state is not None and state.uid == pod.owner_uid:
            state.deleted_pods = {n: p for n, p in state.deleted_pods.items() if p.attempt >= pod.attempt}
            state.deleted_pods[pod.name] = pod

    def spec(self, key: Key) -> api.Spec | None:
        """Parsed once per generation, because reports come far more often than it changes, also to an operator that
        stands by and reconciles nothing. One that cannot be read any more is as it was; None: it never could, it is not
        kept (job/storage.py), or no job."""
        known, raw = self._parsed.get(key), self._jobs.get(key)
        if raw is None:
            return None
        uid, generation = raw["metadata"]["uid"], raw["metadata"].get("generation")
        if (known is None or known[:2] != (uid, generation)) and not storage.is_cut(raw):
            with contextlib.suppress(validation.UnreadableJobError):  # the reconcile reports it
                return self.parse(key, raw)[0].spec
        return None if known is None or known[0] != uid else known[2].spec

    def parse(self, key: Key, raw: Mapping[str, Any]) -> tuple[api.DDPJob, list[validation.Problem]]:
        """The spec is parsed once per generation: mostly the status alone is new. Raises UnreadableJobError."""
        metadata, status = validation.stored_metadata(raw), validation.stored_status(raw)
        known = self._parsed.get(key)
        if known is None or known[:2] != (metadata.uid, metadata.generation):
            job, problems = validation.parse(raw, hints=False)
            self._parsed[key] = (metadata.uid, metadata.generation, job, problems)
            return job, problems
        _, _, job, problems = known
        return msgspec.structs.replace(job, metadata=metadata, status=status), problems
