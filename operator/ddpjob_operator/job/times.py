"""Corrects recorded times that are ahead of this clock, because clocks are set back and leaders change. In the
result no past event is later than now, and each remaining wait is at most as long as a full one."""

from __future__ import annotations

import datetime as dt
import hashlib

from msgspec.structs import replace

from ddpjob_core import budget
from ddpjob_operator.job import api

REPORT_SECONDS_MAX = 60.0


def not_ahead(
    status: api.Status, now: dt.datetime, *, start_back_off_seconds: float, avoid_seconds: float
) -> api.Status:
    """Return the status without times after `now`, except ends of waits: these are at most the given seconds ahead."""
    restarts, progress = status.restarts, status.progress
    in_a_row = 0 if restarts is None else restarts.in_a_row
    wait = max(budget.back_off_seconds(in_a_row), start_back_off_seconds)
    until = now + dt.timedelta(seconds=avoid_seconds)
    # Date the progress before the next report. Otherwise, if a clock was set back, new reports would look outdated.
    reported_at = now - dt.timedelta(seconds=REPORT_SECONDS_MAX)
    is_ahead = progress is not None and progress.updated.replace(microsecond=0) > now  # `now` has whole seconds
    return replace(
        status,
        state_time=_at_most(status.state_time, now),
        start_time=_at_most(status.start_time, now),
        running_time=_at_most(status.running_time, now),
        starting_since=_at_most(status.starting_since, now),
        unconfigured_since=_at_most(status.unconfigured_since, now),
        first_step_time=_at_most(status.first_step_time, now),
        completion_time=_at_most(status.completion_time, now),
        attempt_time=_at_most(status.attempt_time, now + dt.timedelta(seconds=wait)),
        avoided_nodes=[replace(a, until=min(a.until, until)) for a in status.avoided_nodes],
        restarts=restarts and replace(restarts, charged_at=[min(at, now) for at in restarts.charged_at]),
        progress=replace(progress, updated=reported_at) if progress and is_ahead else progress,
    )


def _at_most(at: dt.datetime | None, limit: dt.datetime) -> dt.datetime | None:
    return None if at is None else min(at, limit)


START_BACK_OFF_SECONDS = (60, 120, 240, 480, 960, 1800)


def start_back_off_seconds(uid: str, retries: int) -> int:
    """Return seconds: 1, 2, 4 ... 30 min, less up to a fifth that depends on the job, so that jobs that block each
    other do not retry together."""
    base = START_BACK_OFF_SECONDS[min(retries, len(START_BACK_OFF_SECONDS)) - 1]
    share = int.from_bytes(hashlib.sha256(f"{uid}/{retries}".encode()).digest()[:2], "big") / 2**16
    return round(base * (1 - share / 5))


def after(start: dt.datetime | None, seconds: float | None) -> dt.datetime | None:
    return None if start is None or seconds is None else start + dt.timedelta(seconds=seconds)


def earliest(*times: dt.datetime | None) -> dt.datetime | None:
    return min((t for t in times if t is not None), default=None)


def is_past(time: dt.datetime | None, now: dt.datetime) -> bool:
    return time is not None and now >= time


class Clock:
    """Measures by how much a clock was set back, so that remembered times can be moved with it."""

    def __init__(self) -> None:
        self._latest: dt.datetime | None = None

    def set_back(self, now: dt.datetime) -> dt.timedelta:
        """Return how far the clock was set back after the last call, as a negative difference; else zero."""
        before, self._latest = self._latest, now
        return min(dt.timedelta(), now - before) if before is not None else dt.timedelta()
