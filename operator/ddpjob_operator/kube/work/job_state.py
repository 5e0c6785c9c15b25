"""The operator's memory of facts about jobs that no watch shows: refusals, conflicts, reports, deleted pods."""

from __future__ import annotations

import contextlib
import datetime as dt
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from ddpjob_operator.job import api, storage, validation
from ddpjob_operator.job.times import Clock
from ddpjob_operator.kube.watch.store import Jobs, Key
from ddpjob_operator.metrics.of_change import Restart
from ddpjob_operator.observed import stall
from ddpjob_operator.observed.cluster import ConflictingObject, Pod, Refusal
from ddpjob_operator.observed.reports import Report
from ddpjob_operator.observed.stall import StepTracker

REFUSED_SECONDS = (1, 2, 4, 8, 15, 30, 60, 120, 300)
# The limit is larger than the number of ranks of any job. Each report needs a few hundred bytes.
REPORTERS_MAX = 100_000
# Bytes of a rank's report and StepTracker without texts; measured: 1,100 to 1,700.
OF_A_RANK = 1_536
CONFLICT_SECONDS = (2, 5, 10, 20, 30)
UNDELETABLE_SECONDS = 60


@dataclass
class Conflict:
    """Somebody else's object with a name that the job needs. No watch shows it, so it is read until it is deleted."""

    object: ConflictingObject
    check_at: dt.datetime
    checks: int = 0


class PutOff(NamedTuple):
    """A job that cannot be read, or whose condition was refused; retried with growing pauses."""

    why: str
    version: str
    """resourceVersion of the job that failed; any other is tried at once. "" if the job is not the cause."""
    until: float
    """Time of the next try, by the monotonic clock."""
    times: int
    """Failures in a row for this reason."""


@dataclass
class Refusals:
    """Creates that the API server has refused. They are retried with growing pauses."""

    known: dict[tuple[str, str], Refusal] = field(default_factory=dict)
    in_a_row: int = 0

    def add(self, kind: str, name: str, message: str, now: dt.datetime) -> None:
        """Record that a create was refused. All refusals of one reconcile are retried at the same time."""
        retry_at = max((r.retry_at for r in self.known.values()), default=now)
        if retry_at <= now:
            self.in_a_row += 1
            wait = REFUSED_SECONDS[min(self.in_a_row, len(REFUSED_SECONDS)) - 1]
            retry_at = now + dt.timedelta(seconds=wait)
        self.known[kind, name] = Refusal(kind, name, message, retry_at)

    def created(self, kind: str, name: str) -> None:
        """Record a create that succeeded. The next refusal waits for the shortest time again."""
        self.known.pop((kind, name), None)
        self.in_a_row = 0

    def postpone(self, by: dt.timedelta) -> None:
        self.known = {of: replace(r, retry_at=r.retry_at + by) for of, r in self.known.items()}


@dataclass
class RankReports:
    """The reports of a job's ranks, and their progress."""

    by_rank: dict[int, Report] = field(default_factory=dict)
    """Last reports. Of equal reports the first is kept, because its time shows since when nothing changed."""
    trackers: dict[int, StepTracker] = field(default_factory=dict)
    last_at: dt.datetime | None = None
    """Time of the last report of any rank; None before the first report and after a final one."""
    bytes: int = 0
    """Estimated memory of `by_rank` and `trackers`."""

    def make_room(self, report: Report, nproc: int | None) -> None:
        """Drop old reports so that, with this report, a job has no more reports than ranks. nproc: ranks per pod if
        rank numbers do not follow node numbers; each pod then keeps its last `nproc` reports."""
        if report.rank in self.by_rank:
            return
        if nproc is not None:
            of_pod = [rank for rank, known in self.by_rank.items() if known.node_rank == report.node_rank]
            for rank in of_pod[: len(of_pod) + 1 - nproc]:
                self._forget(rank)
        while len(self.by_rank) >= REPORTERS_MAX:
            self._forget(next(iter(self.by_rank)))

    def bytes_with(self, report: Report) -> int:
        """Return the value that `bytes` would have after `keep` of this report."""
        return self.bytes + _bytes_of(report) - _bytes_of(self.by_rank.get(report.rank))

    def keep(self, report: Report) -> None:
        self.bytes = self.bytes_with(report)
        self.by_rank[report.rank] = report

    def _forget(self, rank: int) -> None:
        self.bytes -= _bytes_of(self.by_rank.pop(rank, None))
        self.trackers.pop(rank, None)

    def track(self, report: Report, now: dt.datetime, receiving_since: dt.datetime | None) -> bool:
        """Update the rank's step tracker. Return True if the rank advanced, so that its stall timeout starts again."""
        before = self.trackers.get(report.rank)
        tracker = stall.update(before, report, now, receiving_since)
        if tracker is None:
            return False
        self.trackers[report.rank] = tracker
        self.last_at = None if report.final else now
        return before is None or tracker.advanced_at != before.advanced_at


@dataclass
class JobState:
    """State of one job, identified by uid: another job of the same name starts empty."""

    uid: str
    refusals: Refusals = field(default_factory=Refusals)
    next_batch: int = 0
    """If the last reconcile left pods to create (slow start, or out of time): how many the next one creates."""
    progress_at: float | None = None
    """When (monotonic clock) a write of progress alone is allowed; None: none is waiting."""
    conflicts: dict[tuple[str, str], Conflict] = field(default_factory=dict)
    """Conflicting objects by kind and name."""
    agent: Report | None = None
    """Last report of a leader's agent."""
    agents_ask: bool = False
    """True if an agent has asked who leads."""
    reports: RankReports = field(default_factory=RankReports)
    deleted_pods: dict[int, Pod] = field(default_factory=dict)
    """Last state of the newest deleted pod by place, because a pod may start and end between two reconciles."""
    first_seen: dict[tuple[str, str], dt.datetime] = field(default_factory=dict)
    """When a pod (by uid) was first seen silent, stopping, done, or bound at a future time."""
    undeletable: dict[str, dt.datetime] = field(default_factory=dict)
    """By uid: pods that still exist after a deletion without grace are not deleted again until this time."""
    confirmed_gone: set[str] = field(default_factory=set)
    clock: Clock = field(default_factory=Clock)
    flavors: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """The queue's resource flavors for the pods that are created now, by the group whose quota they use."""
    restart: Restart | None = None
    listed_for: tuple[int, int] = (1, 0)
    """Newest (attempt, replacement) for which the pods were listed before its first pod was created."""
    is_read: bool = False
    """True if this operator has written the status, or read it from the API server."""
    written_at: float = float("-inf")
    """When (monotonic clock) the status was last written."""
    put_off: PutOff | None = None
    listed_to_free: set[tuple[str, int]] = field(default_factory=set)
    """Groups (uid, recorded attempt) for which the pods were listed before the group gave up its place."""

    def adjust_clock(self, now: dt.datetime) -> None:
        """Move all times if our wall clock was set back; otherwise waits would get longer."""
        by = self.clock.set_back(now)
        if not by:
            return
        self.refusals.postpone(by)
        self.first_seen = {key: at + by for key, at in self.first_seen.items()}
        self.undeletable = {uid: at + by for uid, at in self.undeletable.items()}
        for conflict in self.conflicts.values():
            conflict.check_at += by

    def by_own_clock(self, pods: Sequence[Pod], now: dt.datetime) -> list[Pod]:
        """Replace the times that decide whether a node is lost by times of our own clock. The API server's clock may be
        minutes off, and healthy nodes would then count as lost at once.
        """
        seen = {(p.uid, "silent") for p in pods if p.silent_since}
        seen |= {(p.uid, "stopping") for p in pods if p.deletion_deadline}
        seen |= {(p.uid, "done") for p in pods if p.done_beside_sidecars}
        # Keep the time of a binding by our clock even when it has passed, so that the wait for a lost node goes on.
        ahead = {(p.uid, "bound") for p in pods if p.scheduled_at and p.scheduled_at > now}
        seen |= ahead | {(p.uid, "bound") for p in pods if (p.uid, "bound") in self.first_seen}
        # The kubelet is back and learns only now that the pod must stop, so the grace period starts now.
        back = {(uid, "stopping") for uid, what in self.first_seen.keys() - seen if what == "silent"}
        self.first_seen = {key: now if key in back else self.first_seen.get(key, now) for key in seen}
        return [self._by_own_clock(p) for p in pods]

    def _by_own_clock(self, pod: Pod) -> Pod:
        is_timed = pod.done_beside_sidecars or (pod.uid, "bound") in self.first_seen
        if pod.silent_since is pod.deletion_deadline is pod.done_since is None and not is_timed:
            return pod  # the usual case, and a job may have thousands of pods
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

    def add_conflict(self, found: ConflictingObject, now: dt.datetime) -> None:
        conflict = self.conflicts.setdefault((found.kind, found.name), Conflict(found, now))
        conflict.object = found
        wait = CONFLICT_SECONDS[min(conflict.checks, len(CONFLICT_SECONDS) - 1)]
        conflict.check_at, conflict.checks = now + dt.timedelta(seconds=wait), conflict.checks + 1


def _bytes_of(report: Report | None) -> int:
    texts = () if report is None else (report.resumed_from, report.not_kept, report.save_failed)
    return OF_A_RANK * bool(texts) + sum(map(sys.getsizeof, texts))


class _Parsed(NamedTuple):
    """A stored job as last parsed."""

    raw: Mapping[str, Any] | None
    job: api.DDPJob
    problems: list[validation.Problem]
    why: str = ""
    """Why `raw` cannot be read; `job` is then an earlier state. "" if it can."""


_NOT_PARSED = _Parsed(None, api.DDPJob(), [])


class JobStates:
    """Keeps a JobState and the parsed job for each job."""

    def __init__(self, jobs: Jobs, limits: storage.StoredLimits = storage.DEFAULT) -> None:
        self._jobs = jobs
        self._states: dict[Key, JobState] = {}
        self._parsed: dict[Key, _Parsed] = {}
        self._reported = storage.Room(limits.reports, limits.reports_in_namespace)

    def __iter__(self) -> Iterator[tuple[Key, JobState]]:
        return iter(self._states.items())

    def of(self, key: Key, uid: str) -> JobState:
        """Return the state of the job with this uid, a new one if there is none."""
        state = self._states.get(key)
        if state is None or state.uid != uid:
            state = self._states[key] = JobState(uid)
            self._reported.leave(key)
        return state

    def forget(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self._states.pop(key, None)
            self._parsed.pop(key, None)
            self._reported.leave(key)

    def forget_spec(self, key: Key) -> None:
        self._parsed.pop(key, None)

    def pod_deleted(self, key: Key, pod: Pod) -> None:
        """Keep the last observation of a deleted pod, which may show how the pod ended."""
        state = self._states.get(key)
        if state is None or state.uid != pod.owner_uid:
            return
        kept = state.deleted_pods
        if pod.attempt > max((p.attempt for p in islice(kept.values(), 1)), default=0):
            kept.clear()
        known = kept.get(pod.place)
        if known is None or (known.attempt, known.replacement) <= (pod.attempt, pod.replacement):
            kept[pod.place] = pod

    def has_room(self, key: Key, state: JobState, report: Report) -> bool:
        """Reserve memory for a report. Rank 0's is kept without room, because the status shows it."""
        return self._reported.grow(key, state.reports.bytes_with(report)) or report.rank == 0

    def spec(self, key: Key) -> api.Spec | None:
        """Return the spec.

        None if it was never readable, was too large to keep (job/storage.py), or there is no job. A spec that has
        become unreadable stays as last parsed.
        """
        if (job := self.job(key)) is not None:
            return job.spec
        raw, known = self._jobs.get(key), self._parsed.get(key)
        if raw is None or known is None or known.job.metadata.uid != raw["metadata"]["uid"]:
            return None
        return known.job.spec

    def job(self, key: Key) -> api.DDPJob | None:
        """Return the stored job; None if it is gone, was too large to keep, or is unreadable (a reconcile tells)."""
        raw = self._jobs.get(key)
        if raw is not None and not storage.is_cut(raw):
            with contextlib.suppress(validation.UnreadableJobError):
                return self.parse(key, raw)[0]
        return None

    def parse(self, key: Key, raw: Mapping[str, Any]) -> tuple[api.DDPJob, list[validation.Problem]]:
        """Parse a stored job once, and its spec once per generation. Raise UnreadableJobError."""
        known = self._parsed.get(key, _NOT_PARSED)
        if known.raw is not raw:
            known = self._parsed[key] = _parsed(raw, known)
        if known.why:
            raise validation.UnreadableJobError(known.why)
        return known.job, known.problems


def _parsed(raw: Mapping[str, Any], known: _Parsed) -> _Parsed:
    try:
        metadata, status = validation.stored_metadata(raw), validation.stored_status(raw)
    except validation.UnreadableJobError as error:
        return known._replace(raw=raw, why=str(error))
    before = known.job.metadata
    if known.raw is None or (before.uid, before.generation) != (metadata.uid, metadata.generation):
        return _Parsed(raw, *validation.parse(raw, hints=False))
    return _Parsed(raw, msgspec.structs.replace(known.job, metadata=metadata, status=status), known.problems)
