"""When rank 0 was heard last: figures of a training that nobody hears any more are old, and must not look new."""

from __future__ import annotations

import datetime as dt

from ddpjob_operator.job import api, ranges
from ddpjob_operator.observed import stall
from ddpjob_operator.observed.cluster import Observed

MISSED_SECONDS = 60.0


def heard_at(status: api.Status, seen: Observed) -> dt.datetime | None:
    """When rank 0 was heard last in this attempt; None where nothing is expected of it.

    A rank that has ended or said its last word reports no more, and Kubeflow's protocol speaks only when training goes
    on. Whoever has only begun to listen has missed nothing yet.
    """
    progress, report, pace = status.progress, seen.reports.get(0), seen.trackers.get(0)
    if progress is None or progress.attempt != status.attempt or 0 in ranges.parse(status.completed_nodes):
        return None
    if report is not None and (report.final or report.phase is None):
        return None
    heard = pace.heard_at if pace is not None and pace.attempt in (0, status.attempt) else progress.updated
    return max(heard, progress.updated, seen.listening_since or progress.updated)


def old_at(heard: dt.datetime | None) -> dt.datetime | None:
    """When the time left is no longer shown: it would stay the same while time goes on."""
    return None if heard is None else heard + dt.timedelta(seconds=stall.SILENT_SECONDS)


def missed_at(heard: dt.datetime | None) -> dt.datetime | None:
    """When the message says since when nothing was heard."""
    return None if heard is None else heard + dt.timedelta(seconds=MISSED_SECONDS)
