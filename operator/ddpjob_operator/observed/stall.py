"""When a job stands still: it reports, and makes no step.

The shells fold each report into the `StepTracker` of its rank; `find` says what the trackers of a job prove. Three rules keep a
healthy job alive:

- **Silence proves nothing.** How long a rank has stood still is counted from report to report ("alive, step 41"), and
  anew after any gap in receiving, whoever's fault it was. So an operator that was away, a network that was cut and a
  clock that jumped can only make a finding late, never wrong.
- **The group stands still, not a rank.** The ranks of a DDP job step together, so as long as one of them gets on, all
  do; a rank that never says a step because the script calls `progress()` on rank 0 alone is none that hangs.
- **What was never seen before only warns at first.** With `stall.timeoutSeconds` that is the limit. Without it, what is
  expected is learned from the job's own steps. The first time that this is not enough a pause that nobody declared
  looks like a hang. A hang never ends, so there is a second, longer limit: a group that makes a step before it has
  taught us its pause, and the next limit is three times that; one that does not is found.

Pure: no clock, no I/O. Times are the receiver's.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ddpjob.core import stall_limits
from ddpjob.core.stall_limits import Learned, Limit
from ddpjob_operator.job import api
from ddpjob_operator.job.wording import duration
from ddpjob_operator.observed.reports import Phase, Report

REPORT_SECONDS = 5.0  # between two reports of a rank (build.Reporting)
# One report may get lost: with its time-out and the sender's back-off the next comes 20 s after the one before.
SILENT_SECONDS = 30.0
RANKS_NAMED = 8
RECENT_SECONDS = 300.0


@dataclass(frozen=True)
class StepTracker:
    """How a rank gets on in an attempt, by its reports."""

    attempt: int
    node_rank: int
    step: int
    phase: Phase
    advanced_at: dt.datetime
    """Since when it has said the same step and phase, at every report, without a gap between them."""
    heard_at: dt.datetime
    """When its last report came."""
    measured: bool = False
    """Whether it changed at `advanced_at`; else we only began to listen then, in the middle of a step."""
    learned: Learned = field(default_factory=Learned)

    @property
    def idle_seconds(self) -> float:
        """How long it has stood still for certain: up to its last report, not up to now."""
        return (self.heard_at - self.advanced_at).total_seconds()

    def is_heard(self, now: dt.datetime) -> bool:
        """Whether it reports at present."""
        return abs((now - self.heard_at).total_seconds()) <= SILENT_SECONDS


@dataclass(frozen=True)
class StallFinding:
    """What the reports of a job prove. kind: a warning is said once and costs nothing; a stall restarts the group."""

    kind: Literal["warning", "stall"]
    rank: int
    """Of those that report, the one with the lowest step."""
    node_rank: int
    step: int
    phase: Phase
    since: dt.datetime
    until: dt.datetime
    """A group that stands still until then has stalled."""
    idle_seconds: float
    limit: Limit
    steps: dict[int, int]
    """The last step of each rank that has reported in this attempt."""
    silent: frozenset[int] = frozenset()
    """Those of them that report no more."""

    @property
    def limit_seconds(self) -> float:
        """What was exceeded."""
        return self.limit.allowed if self.kind == "stall" else self.limit.expected

    def sentence(self) -> str:
        """Who, since when, how long is allowed. A warning has the same words as long as it stands."""
        return f"rank {self.rank} (node {self.node_rank}) {self.what()}"

    def what(self) -> str:
        """The sentence without its subject."""
        told = self._found() if self.kind == "stall" else self._suspected()
        last = f"; last steps: {self._last_steps()}" if len(self.steps) > 1 else ""
        return stall_limits.DOES_NOT[self.phase] + told + last

    def _found(self) -> str:
        return f" for {duration(self.idle_seconds)} ({self._where()}; limit {duration(self.limit.allowed)})"

    def _suspected(self) -> str:
        mend = "Declare long pauses with ddpjob.pause(), or set" if self.phase == "train" else "The limit is"
        return (
            f" since {_time(self.since)} ({self._where()}), longer than the {duration(self.limit.expected)} expected; "
            f"if that lasts until {_time(self.until)}, the group restarts. {mend} spec.stall.timeoutSeconds"
        )

    def _where(self) -> str:
        return f"last step {self.step}" if self.step else "before the first step"

    def _last_steps(self) -> str:
        lowest = sorted(self.steps, key=lambda rank: (self.steps[rank], rank))[:RANKS_NAMED]
        named = (f"rank {r}: {self.steps[r]}{' (silent now)' * (r in self.silent)}" for r in sorted(lowest))
        others = len(self.steps) - len(lowest)
        return ", ".join(named) + (f" and {others} others, up to {max(self.steps.values())}" if others else "")


def update(
    pace: StepTracker | None, report: Report, now: dt.datetime, receiving_since: dt.datetime | None = None
) -> StepTracker | None:
    """The pace of a rank after a report that came now; None as long as nothing can be said of it.

    receiving_since: from when on the shell is sure to receive what is sent; what was heard before does not count.
    """
    if report.phase is None or (pace is not None and 0 < report.attempt < pace.attempt):
        return pace
    # The library's first word comes from init(), so the first step is measured from its begin.
    begin = report.phase == "start"
    new = StepTracker(report.attempt, report.node_rank, report.step, report.phase, now, now, measured=begin)
    if pace is None or report.attempt > pace.attempt:
        return new
    heard = pace.is_heard(now) and (receiving_since is None or pace.heard_at >= receiving_since)
    # Any other step counts, a lower one too: a process that has started anew in its pod gets on.
    if heard and (pace.step, pace.phase) == (report.step, report.phase):
        return dataclasses.replace(pace, heard_at=now)
    # Ranks that have started anew have survived nothing: what was before them was a hang, perhaps, that agents ended.
    learned = _learn(pace, report, now) if heard and not begin and report.step >= pace.step else pace.learned
    return dataclasses.replace(new, attempt=pace.attempt, measured=heard, learned=learned)


def find(trackers: Mapping[int, StepTracker], stall: api.Stall | None, now: dt.datetime) -> StallFinding | None:
    """Whether the group stands still: none of the ranks that report at present has made a step for too long.

    trackers: of the present attempt alone, by rank. stall: as in the spec.
    """
    timeout = None if stall is None else stall.timeout_seconds
    ranks = {} if timeout == 0 else _that_count(trackers, now)
    limits = {}
    for rank, pace in ranks.items():
        limits[rank] = limit(pace, timeout)
        if pace.idle_seconds <= limits[rank].expected:
            return None
    if not ranks:
        return None
    rank = min(ranks, key=lambda r: (ranks[r].step, r))
    return StallFinding(
        kind="stall" if all(pace.idle_seconds > limits[r].allowed for r, pace in ranks.items()) else "warning",
        rank=rank,
        node_rank=ranks[rank].node_rank,
        step=ranks[rank].step,
        phase=ranks[rank].phase,
        since=ranks[rank].advanced_at,
        until=max(pace.advanced_at + dt.timedelta(seconds=limits[r].allowed) for r, pace in ranks.items()),
        idle_seconds=ranks[rank].idle_seconds,
        limit=limits[rank],
        steps={r: pace.step for r, pace in sorted(trackers.items())},
        silent=frozenset(r for r, pace in trackers.items() if not pace.is_heard(now)),
    )


def idle_since(trackers: Mapping[int, StepTracker], stall: api.Stall | None, now: dt.datetime) -> dt.datetime | None:
    """Since when no step has been made by a group that stands still; also where nobody wants it restarted for that."""
    finding = find(trackers, None if stall is not None and stall.timeout_seconds == 0 else stall, now)
    return None if finding is None else finding.since


def requeue_at(trackers: Mapping[int, StepTracker], stall: api.Stall | None, now: dt.datetime) -> dt.datetime | None:
    """When `find` may say something else although no rank says anything new; None: never."""
    timeout = None if stall is None else stall.timeout_seconds
    ranks = {} if timeout == 0 else _that_count(trackers, now)
    due = [pace.advanced_at + dt.timedelta(seconds=_next(pace, limit(pace, timeout))) for pace in ranks.values()]
    if not due:
        return None
    # Past its time a rank waits for the others: for their time, or until they fall silent.
    wait = REPORT_SECONDS if max(due) <= now else SILENT_SECONDS
    return min(due) if min(due) > now else now + dt.timedelta(seconds=wait)


def limit(pace: StepTracker, timeout: float | None) -> Limit:
    """How long a rank may stand still where it is now. timeout: stall.timeoutSeconds where it is set."""
    return stall_limits.limit(pace.phase, pace.step, pace.learned, timeout)


@dataclass(frozen=True)
class Silence:
    """Most jobs went silent at about the same time: it is more likely that we hear nothing than that all are gone."""

    silent: int
    jobs: int

    def sentence(self) -> str:
        """For the operator's log."""
        return (
            f"{self.silent} of the {self.jobs} jobs that report went silent together: their reports do not get here. "
            "Until they do, no job is restarted for standing still"
        )


def silence(heard: Iterable[dt.datetime], now: dt.datetime) -> Silence | None:
    """Whether more than half of the jobs that report have gone silent. heard: when each was heard last.

    Jobs that fell silent long before the others count no more. One job alone may have its own reason.
    """
    times = list(heard)
    newest = max(times, default=now)
    recent = [t for t in times if (newest - t).total_seconds() <= RECENT_SECONDS]
    silent = sum((now - t).total_seconds() > SILENT_SECONDS for t in recent)
    return Silence(silent, len(recent)) if silent > 1 and 2 * silent > len(recent) else None


def _that_count(trackers: Mapping[int, StepTracker], now: dt.datetime) -> dict[int, StepTracker]:
    """The ranks that report at present. One that has never said a step does not count where others have."""
    heard = {rank: pace for rank, pace in trackers.items() if pace.is_heard(now)}
    return {rank: pace for rank, pace in heard.items() if pace.step} or heard


def _learn(pace: StepTracker, report: Report, now: dt.datetime) -> Learned:
    """What the end of a time without a step teaches."""
    seconds = max(0.0, (now - pace.advanced_at).total_seconds())
    made = report.step - pace.step
    return stall_limits.learn(pace.learned, pace.phase, pace.step, made, seconds, measured=pace.measured)


def _next(pace: StepTracker, limits: Limit) -> float:
    return limits.expected if pace.idle_seconds <= limits.expected else limits.allowed


def _time(at: dt.datetime) -> str:
    return f"{at:%Y-%m-%dT%H:%M:%SZ}"
