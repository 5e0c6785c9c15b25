"""Facts about a status. plan/transitions.py has the functions that return a new one."""

from __future__ import annotations

import datetime as dt

from msgspec.structs import replace

from ddpjob_operator.job import api

TERMINAL = ("Succeeded", "Failed")


def is_of_this_attempt(status: api.Status, progress: api.Progress) -> bool:
    """True if the current ranks reported this progress, and not the ranks before a restart."""
    since = status.attempt_time
    return progress.attempt == status.attempt and (since is None or progress.updated >= since)


def ranks_since(status: api.Status) -> dt.datetime | None:
    """Return when the current ranks were started: at the start of the attempt, or at its last failure."""
    times = [status.attempt_time, *(f.time for f in status.failures if f.attempt == status.attempt)]
    return max((time for time in times if time is not None), default=None)


def present_progress(status: api.Status) -> api.Progress | None:
    """Return the progress of the current ranks; None before their first step, or if no rank is training."""
    progress, since = status.attempt_progress, ranks_since(status)
    if progress is None or not progress.step or status.state not in ("Running", *TERMINAL):
        return None
    return None if since is not None and progress.updated < since else progress


def saved_step(status: api.Status) -> int | None:
    """Return the step from which ranks would restart; None if no checkpoint was reported."""
    known = status.resumed_step if status.progress is None else status.progress.saved_step
    return known or None


def apart_from_progress(status: api.Status) -> api.Status:
    shown = status.display or api.Display()
    return replace(status, progress=None, display=replace(shown, step="", progress="", eta=""))


def find_condition(status: api.Status, kind: str) -> api.Condition | None:
    return next((c for c in status.conditions if c.type == kind), None)
