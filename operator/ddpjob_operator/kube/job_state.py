"""What the shell remembers of a job and no watch tells: refusals, strangers in its place, reports."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ddpjob_operator.job.times import Clock
from ddpjob_operator.observed.cluster import ConflictingObject, Pod, Refusal
from ddpjob_operator.observed.reports import Report
from ddpjob_operator.observed.stall import StepTracker

REFUSED_SECONDS = (1, 2, 4, 8, 15, 30, 60, 120, 300)
# No job has more ranks; each is some hundred bytes.
REPORTERS_MAX = 100_000
STRANGER_SECONDS = (2, 5, 10, 20, 30)


@dataclass
class Stranger:
    """An object in our place that no watch of ours shows. It is looked at again until it is gone."""

    conflicts: ConflictingObject
    check_at: dt.datetime
    checks: int = 0

    def seen_again(self, now: dt.datetime) -> None:
        """It is still there."""
        self.check_at = now + dt.timedelta(seconds=STRANGER_SECONDS[min(self.checks, len(STRANGER_SECONDS) - 1)])
        self.checks += 1


@dataclass
class JobState:
    """Of one job, by its uid: a job of the same name starts with nothing."""

    uid: str
    refusals: dict[str, Refusal] = field(default_factory=dict)
    refused_in_a_row: int = 0
    goes_on: bool = False
    """Whether the last look was out of time while the server created what it was asked for."""
    strangers: dict[tuple[str, str], Stranger] = field(default_factory=dict)
    agent: Report | None = None
    """The last word of node 0's agent."""
    reports: dict[int, Report] = field(default_factory=dict)
    """The first of each rank's reports that said what its last one says."""
    trackers: dict[int, StepTracker] = field(default_factory=dict)
    heard_at: dt.datetime | None = None
    """When one of its ranks was last heard; None: nobody has spoken yet, or they have said that they end."""
    deleted_pods: dict[str, Pod] = field(default_factory=dict)
    """Pods whose object has gone, as they were last seen: a whole life may pass between two looks."""
    first_seen: dict[tuple[str, str], dt.datetime] = field(default_factory=dict)
    """When a pod (by uid) was first seen to be silent, or stopping."""
    confirmed_gone: set[str] = field(default_factory=set)
    """Pods that are not in our copy, and that the API server has confirmed to be gone."""
    clock: Clock = field(default_factory=Clock)
    asked_before: tuple[int, int] = (1, 0)
    """The newest attempt and replacement before whose pod the API server was asked what older ones have left."""

    def keep_time(self, now: dt.datetime) -> None:
        """Our clock was perhaps set back: what we wait for comes no later for it."""
        by = self.clock.set_back(now)
        if not by:
            return
        self.refusals = {n: replace(r, retry_at=r.retry_at + by) for n, r in self.refusals.items()}
        self.first_seen = {key: at + by for key, at in self.first_seen.items()}
        for stranger in self.strangers.values():
            stranger.check_at += by

    def make_room(self, report: Report, nproc: int | None) -> None:
        """No more is kept than there are ranks. nproc: where their numbers follow no node, a pod speaks for so many,
        those that it spoke for last."""
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
        """The pods with the times that decide whether their node is lost, or nobody ends them, as we saw them: the API
        server's clock may be minutes off ours, and a healthy node would be given up at once."""
        seen = {(p.uid, "silent") for p in pods if p.silent_since} | {
            (p.uid, "stopping") for p in pods if p.deletion_deadline
        }
        seen |= {(p.uid, "done") for p in pods if p.done_beside_sidecars}
        self.first_seen = {key: self.first_seen.get(key, now) for key in seen}
        return [self._by_own_clock(p) for p in pods]

    def _by_own_clock(self, pod: Pod) -> Pod:
        stopping = self.first_seen.get((pod.uid, "stopping"))
        grace = (
            pod.deletion_deadline - pod.deletion_requested_at
            if pod.deletion_deadline and pod.deletion_requested_at
            else dt.timedelta()
        )
        return replace(
            pod,
            silent_since=self.first_seen.get((pod.uid, "silent")),
            deletion_deadline=None if stopping is None else stopping + grace,
            done_since=self.first_seen.get((pod.uid, "done")),
        )

    def refuse(self, name: str, message: str, now: dt.datetime) -> None:
        """The server would not create it. All refusals of one round wait for the same time."""
        retry_at = max((r.retry_at for r in self.refusals.values()), default=now)
        if retry_at <= now:
            self.refused_in_a_row += 1
            wait = REFUSED_SECONDS[min(self.refused_in_a_row, len(REFUSED_SECONDS)) - 1]
            retry_at = now + dt.timedelta(seconds=wait)
        self.refusals[name] = Refusal(name, message, retry_at)

    def created(self, name: str) -> None:
        """The server has created it. The next refusal is a new one."""
        self.refusals.pop(name, None)
        self.refused_in_a_row = 0

    def take(self, conflicts: ConflictingObject, now: dt.datetime) -> None:
        """A stranger has been found."""
        stranger = self.strangers.setdefault((conflicts.kind, conflicts.name), Stranger(conflicts, now))
        stranger.conflicts = conflicts
        stranger.seen_again(now)
