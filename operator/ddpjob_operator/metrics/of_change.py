"""Metrics counted when a status changes: attempts, restarts, and how long recovery from a failure took.

One status records a failure, a later one charges it to a limit, and a third shows the recovery; `Restart` connects
them. A new leader that has not seen the first status counts no time for the failure.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import NamedTuple

from ddpjob_operator.job import api, reasons
from ddpjob_operator.job.status import TERMINAL, present_progress
from ddpjob_operator.metrics import names
from ddpjob_operator.observed.reports import AgentReport

# Clocks of nodes may differ by minutes; a failure that seems older than these seconds is ignored.
FAILED_AGO_SECONDS_MAX = 3600.0


class SeenStatus(NamedTuple):
    """An increment of a counter, or an observation of a histogram."""

    metric: names.Metric
    value: float = 1.0
    labels: tuple[str, ...] = ()


class Restart(NamedTuple):
    """A failure from which the job has not recovered yet."""

    failed_at: dt.datetime
    recorded_at: dt.datetime
    scope: str = ""
    """rank, pod or group; "" if not decided yet."""
    runs: bool = False


class Change(NamedTuple):
    """The metrics of a status change, and the `Restart` to keep until the next one."""

    seen: list[SeenStatus]
    restart: Restart | None


def of_change(
    old: api.Status, new: api.Status, now: dt.datetime, restart: Restart | None = None, agent: AgentReport | None = None
) -> Change:
    """Return the metrics of a status change. restart: kept from the previous one. agent: report of node 0's agent."""
    if restart is not None and max(restart.failed_at, restart.recorded_at) > now:
        restart = None  # the clock was set back: the time of the failure is unknown
    seen = [*_counts(old, new), *_start(old, new, now)]
    if new.state in (*TERMINAL, "Failing", "Suspended"):
        return Change([*seen, *_given_up(restart, new)], None)
    broken = new.unsettled_failure
    if broken is not None and (restart is None or restart.scope):
        restart = Restart(_at_most(broken.time, now), now)
    charged = _charged(old, new)
    if any(charged.values()):
        seen += [SeenStatus(names.RESTARTS, count, key) for key, count in charged.items() if count]
        scope = next(scope for (_, scope), count in reversed(charged.items()) if count)
        restart = _decided(restart, scope, new, now, agent)
        seen.append(SeenStatus(names.DETECTION, _seconds(restart.failed_at, restart.recorded_at), (scope,)))
    if restart is not None and restart.scope:
        past, restart = _trained_past(restart, new, now)
        seen += past
    return Change(seen, restart)


def _counts(old: api.Status, new: api.Status) -> Iterator[SeenStatus]:
    if new.attempt > old.attempt:
        yield SeenStatus(names.ATTEMPTS, new.attempt - old.attempt)
    if new.state in TERMINAL and old.state not in TERMINAL:
        reason = new.reason if new.reason in reasons.ALL else names.OTHER
        yield SeenStatus(names.FINISHED, 1.0, (new.state, reason))
    before, after = old.progress, new.progress
    if after is not None and after.step > (made := before.step if before is not None else 0):
        yield SeenStatus(names.STEPS, after.step - made)
    lost = (new.goodput or api.Goodput()).lost_steps - (old.goodput or api.Goodput()).lost_steps
    if lost > 0:
        yield SeenStatus(names.LOST_STEPS, lost)


def _start(old: api.Status, new: api.Status, now: dt.datetime) -> Iterator[SeenStatus]:
    if new.start_time is None or new.is_restarted:
        return
    if new.running_time is not None and old.running_time is None:
        yield SeenStatus(names.START_SECONDS, _seconds(new.start_time, now), ("running",))
    if new.first_step_time is not None and old.first_step_time is None:
        yield SeenStatus(names.START_SECONDS, _seconds(new.start_time, new.first_step_time), ("first_step",))


def _charged(old: api.Status, new: api.Status) -> dict[tuple[str, str], int]:
    """Return the new restarts by class and scope; restarts of ranks come first."""
    before, after = old.restarts or api.Restarts(), new.restarts or api.Restarts()
    replaced = new.attempt == old.attempt and sum(new.replacements.values()) > sum(old.replacements.values())
    in_place = {name: _in_place(old, new, name) for name in names.CLASSES}
    rest = {name: getattr(after, name) - getattr(before, name) - in_place[name] for name in names.CLASSES}
    scope = "pod" if replaced else "group"
    counted = {(name, "rank"): in_place[name] for name in names.CLASSES}
    return {key: max(0, n) for key, n in (counted | {(name, scope): rest[name] for name in names.CLASSES}).items()}


def _in_place(old: api.Status, new: api.Status, name: str) -> int:
    """Return the number of new restarts in place."""
    before, after = old.in_place, new.in_place
    if after is None or new.attempt != old.attempt:
        return 0
    same = before is not None and before.replacement == after.replacement
    counted: int = getattr(before, name) if same else 0
    return max(0, int(getattr(after, name)) - counted)


def _decided(
    restart: Restart | None, scope: str, new: api.Status, now: dt.datetime, agent: AgentReport | None
) -> Restart:
    """Return the restart with the fields that are known once its failure counts against a limit. An agent restarts
    ranks before the operator knows of the failure; its report has the failure's time."""
    if scope == "rank":
        at = agent.failures[-1].time if agent is not None and agent.failures else 0.0
        failed_at = dt.datetime.fromtimestamp(at, dt.timezone.utc) if 0 < at < now.timestamp() else now
        return Restart(_at_most(failed_at, now), now, scope)
    if restart is None or restart.scope:
        failure = new.last_failure
        restart = Restart(_at_most(failure.time if failure is not None else now, now), now)
    return restart._replace(scope=scope)


def _given_up(restart: Restart | None, new: api.Status) -> Iterator[SeenStatus]:
    """Yield the time until the detection of a failure that ends the job."""
    failure = new.last_failure
    if restart is not None and not restart.scope and failure is not None and new.state in ("Failing", "Failed"):
        yield SeenStatus(names.DETECTION, _seconds(restart.failed_at, restart.recorded_at), ("group",))


def _trained_past(restart: Restart, new: api.Status, now: dt.datetime) -> tuple[list[SeenStatus], Restart | None]:
    seen: list[SeenStatus] = []
    if new.state == "Running" and not restart.runs:
        if restart.scope != "rank":
            seen.append(SeenStatus(names.RESTART_SECONDS, _seconds(restart.failed_at, now), (restart.scope, "running")))
        restart = restart._replace(runs=True)
    progress = present_progress(new)
    if not restart.runs or progress is None or progress.updated <= restart.failed_at:
        return seen, restart
    seen.append(
        SeenStatus(names.RESTART_SECONDS, _seconds(restart.failed_at, progress.updated), (restart.scope, "first_step"))
    )
    return seen, None


def _at_most(at: dt.datetime, now: dt.datetime) -> dt.datetime:
    return now if at > now or _seconds(at, now) > FAILED_AGO_SECONDS_MAX else at


def _seconds(since: dt.datetime, until: dt.datetime) -> float:
    """Return seconds, never negative: clocks of nodes may be ahead of ours."""
    return max(0.0, (until - since).total_seconds())
