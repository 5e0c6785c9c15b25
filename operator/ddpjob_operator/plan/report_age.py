"""When the last report of rank 0 came: the figures of a job that no longer reports must not look new."""

from __future__ import annotations

import datetime as dt

from ddpjob_operator.job import api
from ddpjob_operator.job.times import after
from ddpjob_operator.observed import stall
from ddpjob_operator.observed.cluster import Observed

MISSED_SECONDS = 60.0


def last_report_at(status: api.Status, seen: Observed) -> dt.datetime | None:
    """When rank 0 reported last in this attempt; None where no report is expected.

    A rank that has ended or sent its final report sends none, and with Kubeflow's protocol a rank reports only when it
    makes a step. A shell that has only begun to listen has missed nothing yet.
    """
    progress, report, tracker = status.progress, seen.reports.get(0), seen.trackers.get(0)
    if progress is None or progress.attempt != status.attempt or 0 in status.completed:
        return None
    if report is not None and (report.final or report.phase is None):
        return None
    known = tracker is not None and tracker.attempt in (0, status.attempt)
    heard = tracker.heard_at if tracker is not None and known else progress.updated
    return max(heard, progress.updated, seen.listening_since or progress.updated)


def old_at(last_report: dt.datetime | None) -> dt.datetime | None:
    """When the time left is no longer shown: it would stay the same while time goes on."""
    return after(last_report, stall.SILENT_SECONDS)


def missed_at(last_report: dt.datetime | None) -> dt.datetime | None:
    """When the message names the time of the last report."""
    return after(last_report, MISSED_SECONDS)
