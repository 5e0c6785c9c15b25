"""Detects a stalled job: its ranks report, and make no step.

The operator and the local run update the `StepTracker` of a rank with each of its reports; `find` returns a finding if
the trackers of a job prove one. Three rules protect a healthy job:

- **Silence proves nothing.** Idle time is counted from report to report ("phase train, step 41"), and restarts after
  any gap in receiving. So an operator that was away, a network that was cut and a clock that jumped can only delay a
  finding.
- **The group stalls, not a rank.** The ranks of a DDP job step together: if one makes steps, all do. A rank that never
  reports a step does not hang if the script calls `progress()` on rank 0 only.
- **The first long pause only warns.** With `stall.timeoutSeconds`, that is the limit. Otherwise the expected time is
  learned from the job's own steps, and there is a second, longer limit, because a hang never ends. If the group makes a
  step before that limit, the pause is learned, and the next limit is three times as long.

Pure: no clock, no I/O. Times are the receiver's.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ddpjob_core import stall_limits
from ddpjob_core.stall_limits import Learned, Limit
from ddpjob_operator.job import api
from ddpjob_operator.job.wording import duration
from ddpjob_operator.observed.reports import Phase, Report

REPORT_SECONDS = 5.0  # seconds between two reports of a rank (build.Reporting)
# Seconds. If a report is lost, the next one arrives 20 s after the previous one, because of time-out and back-off.
SILENT_SECONDS = 30.0
RANKS_NAMED = 8
RECENT_SECONDS = 300.0


@dataclass(frozen=True)
class StepTracker:
    """The steps of a rank in an attempt, by its reports."""

    attempt: int
    node_rank: int
    step: int
    phase: Phase
    advanced_at: dt.datetime
    """Since when all reports of the rank have had the same step and phase, without a gap."""
    heard_at: dt.datetime
    """Time of the rank's last report."""
    measured: bool = False
    """False if receiving began at `advanced_at`, in the middle of a step."""
    learned: Learned = field(default_factory=Learned)

    @property
    def idle_seconds(self) -> float:
        """Seconds that have certainly passed without a step: until the rank's last report, not until now."""
        return (self.heard_at - self.advanced_at).total_seconds()

    def is_heard(self, now: dt.datetime) -> bool:
        """True if reports of the rank are arriving now."""
        return abs((now - self.heard_at).total_seconds()) <= SILENT_SECONDS


@dataclass(frozen=True)
class StallFinding:
    """A suspected or proven stall. A warning only sends an Event; a stall restarts the group."""

    kind: Literal["warning", "stall"]
    rank: int
    """The reporting rank with the lowest step."""
    node_rank: int
    step: int
    phase: Phase
    since: dt.datetime
    until: dt.datetime
    """If the group makes no step before this time, it has stalled."""
    idle_seconds: float
    limit: Limit
    steps: dict[int, int]
    """Last step of each rank that has reported in this attempt."""
    silent: frozenset[int] = frozenset()
    """Ranks in `steps` that have stopped reporting."""

    def sentence(self) -> str:
        """Return who stalled, since when, and the limit. The text of a warning stays the same while it lasts.

        A rank is named only if it is behind all others. Otherwise it may be waiting for one of them."""
        is_behind = len(self.steps) > 1 and sum(step <= self.step for step in self.steps.values()) == 1
        return f"rank {self.rank} (node {self.node_rank}) {self.what()}" if is_behind else f"the job {self.what()}"

    def what(self) -> str:
        """Return the text of `sentence` without `rank N (node N)` at its beginning."""
        proven = f" for {duration(self.idle_seconds)} ({self._where()}; limit {duration(self.limit.allowed)})"
        duration_text = proven if self.kind == "stall" else self._suspected()
        last = f"; last steps: {self._last_steps()}" if len(self.steps) > 1 else ""
        return stall_limits.DOES_NOT[self.phase] + duration_text + last

    def _suspected(self) -> str:
        fix = "Declare long pauses with ddpjob.pause(), or set" if self.phase == "train" else "The limit is"
        return (
            f" since {self.since:%Y-%m-%dT%H:%M:%SZ} ({self._where()}), "
            f"longer than the {duration(self.limit.expected)} expected; "
            f"if that lasts until {self.until:%Y-%m-%dT%H:%M:%SZ}, the group restarts. {fix} spec.stall.timeoutSeconds"
        )

    def _where(self) -> str:
        return f"last step {self.step}" if self.step else "before the first step"

    def _last_steps(self) -> str:
        lowest = sorted(self.steps, key=lambda rank: (self.steps[rank], rank))[:RANKS_NAMED]
        named = (f"rank {r}: {self.steps[r]}{' (silent now)' * (r in self.silent)}" for r in sorted(lowest))
        others = len(self.steps) - len(lowest)
        return ", ".join(named) + (f" and {others} others, up to {max(self.steps.values())}" if others else "")


def update(
    tracker: StepTracker | None, report: Report, now: dt.datetime, receiving_since: dt.datetime | None = None
) -> StepTracker | None:
    """Return the tracker of a rank after a report; None while no report could be tracked.

    receiving_since: the time from which all reports certainly arrive; earlier reports do not count.
    """
    if report.phase is None or (tracker is not None and 0 < report.attempt < tracker.attempt):
        return tracker
    # The library sends its first report from init(), so the first step is measured from that report on.
    is_first = report.phase == "start"
    new = StepTracker(report.attempt, report.node_rank, report.step, report.phase, now, now, measured=is_first)
    if tracker is None or report.attempt > tracker.attempt:
        return new
    heard = tracker.is_heard(now) and (receiving_since is None or tracker.heard_at >= receiving_since)
    # A lower step is a change, too: it comes from a process that was restarted in its pod.
    if heard and (tracker.step, tracker.phase) == (report.step, report.phase):
        return dataclasses.replace(tracker, heard_at=now)
    # Do not learn from restarted ranks: the time before may have been a hang that the agents ended.
    made, learned = report.step - tracker.step, tracker.learned
    if heard and not is_first and made >= 0:
        seconds = max(0.0, (now - tracker.advanced_at).total_seconds())
        learned = stall_limits.learn(learned, tracker.phase, tracker.step, made, seconds, measured=tracker.measured)
    return dataclasses.replace(new, attempt=tracker.attempt, measured=heard, learned=learned)


def find(trackers: Mapping[int, StepTracker], stall: api.Stall | None, now: dt.datetime) -> StallFinding | None:
    """Return a finding if none of the reporting ranks has made a step for too long.

    trackers: of the current attempt, by rank. stall: as in the spec.
    """
    timeout = None if stall is None else stall.timeout_seconds
    ranks = {} if timeout == 0 else _counted(trackers, now)
    limits = {}
    for rank, tracker in ranks.items():
        limits[rank] = limit(tracker, timeout)
        if tracker.idle_seconds <= limits[rank].expected:
            return None
    if not ranks:
        return None
    rank = min(ranks, key=lambda r: (ranks[r].step, r))
    return StallFinding(
        kind="stall" if all(tracker.idle_seconds > limits[r].allowed for r, tracker in ranks.items()) else "warning",
        rank=rank,
        node_rank=ranks[rank].node_rank,
        step=ranks[rank].step,
        phase=ranks[rank].phase,
        since=ranks[rank].advanced_at,
        until=max(tracker.advanced_at + dt.timedelta(seconds=limits[r].allowed) for r, tracker in ranks.items()),
        idle_seconds=ranks[rank].idle_seconds,
        limit=limits[rank],
        steps={r: tracker.step for r, tracker in sorted(trackers.items())},
        silent=frozenset(r for r, tracker in trackers.items() if not tracker.is_heard(now)),
    )


def idle_since(trackers: Mapping[int, StepTracker], stall: api.Stall | None, now: dt.datetime) -> dt.datetime | None:
    """Return the time since which a stalled group has made no step, even if the spec disables restarts for stalls."""
    finding = find(trackers, None if stall is not None and stall.timeout_seconds == 0 else stall, now)
    return None if finding is None else finding.since


def requeue_at(trackers: Mapping[int, StepTracker], stall: api.Stall | None, now: dt.datetime) -> dt.datetime | None:
    """Return when `find` may change its result without new reports; None: never."""
    timeout = None if stall is None else stall.timeout_seconds
    ranks = {} if timeout == 0 else _counted(trackers, now)
    due = []
    for tracker in ranks.values():
        limits = limit(tracker, timeout)
        seconds = limits.expected if tracker.idle_seconds <= limits.expected else limits.allowed
        due.append(tracker.advanced_at + dt.timedelta(seconds=seconds))
    if not due:
        return None
    # After a rank's own limit, wait until the other ranks have reached their limits or are silent.
    wait = REPORT_SECONDS if max(due) <= now else SILENT_SECONDS
    return min(due) if min(due) > now else now + dt.timedelta(seconds=wait)


def limit(tracker: StepTracker, timeout: float | None) -> Limit:
    """Return for how many seconds a rank may make no step. timeout: stall.timeoutSeconds if set."""
    return stall_limits.limit(tracker.phase, tracker.step, tracker.learned, timeout)


@dataclass(frozen=True)
class Silence:
    """Counts of jobs, if most of them went silent at about the same time: their reports are probably lost."""

    silent: int
    jobs: int

    def sentence(self) -> str:
        return (
            f"{self.silent} of the {self.jobs} jobs that report went silent together: their reports do not arrive. "
            "Until they do, no job is restarted for a stall"
        )


def silence(heard: Iterable[dt.datetime], now: dt.datetime) -> Silence | None:
    """Return a Silence if more than half of the reporting jobs have gone silent. heard: last report of each.

    Jobs that went silent long before do not count. A single silent job may have its own reason.
    """
    times = list(heard)
    newest = max(times, default=now)
    recent = [t for t in times if (newest - t).total_seconds() <= RECENT_SECONDS]
    silent = sum((now - t).total_seconds() > SILENT_SECONDS for t in recent)
    return Silence(silent, len(recent)) if silent > 1 and 2 * silent > len(recent) else None


def _counted(trackers: Mapping[int, StepTracker], now: dt.datetime) -> dict[int, StepTracker]:
    """Return the ranks that are reporting. Ranks that have never reported a step count only if no rank has."""
    heard = {rank: tracker for rank, tracker in trackers.items() if tracker.is_heard(now)}
    return {rank: tracker for rank, tracker in heard.items() if tracker.step} or heard
