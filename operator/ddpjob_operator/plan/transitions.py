"""Functions that return the next status. They are idempotent: no recorded fact is counted twice."""

from __future__ import annotations

import datetime as dt

from msgspec.structs import replace

from ddpjob_core.failures import BRIEF_MAX, abridged
from ddpjob_operator.failures import root_cause, sentences
from ddpjob_operator.job import api, bounds
from ddpjob_operator.job.reasons import Reason
from ddpjob_operator.observed.reports import Report

FAILURES_MAX = 10
MESSAGE_MAX = 4096


def enter(status: api.Status, state: api.State, reason: Reason, message: str, now: dt.datetime) -> api.Status:
    """Return the status in `state`. If the state changes, the time in the previous one is added to the goodput."""
    if status.state != state:
        status = replace(status, state=state, state_time=now, goodput=goodput(status, now))
    return replace(status, reason=reason.name, message=message[:MESSAGE_MAX])


def new_attempt(status: api.Status, at: dt.datetime) -> api.Status:
    """Return the status of a new attempt that begins at `at` or later: no node has started or completed in it."""
    return replace(
        with_new_ranks(status, at),
        attempt=status.attempt + 1,
        attempt_nodes=None,
        starting_since=None,
        unconfigured_since=None,
        started_nodes="",
        completed_nodes="",
        replacements={},
        in_place=None,
        leader=None,
        findings=[],
        not_kept="",
        save_failed="",
    )


def with_new_ranks(status: api.Status, at: dt.datetime) -> api.Status:
    """Return the status for restarted ranks, in new pods or in place, at `at`: no step made, no state loaded."""
    return replace(
        status,
        attempt_time=at,
        running_time=None,
        first_step_time=None,
        resumed_step=None,
        resumed_from="",
        furthest_step=status.furthest,
    )


def goodput(status: api.Status, now: dt.datetime) -> api.Goodput:
    """Return the goodput (how the time was spent), including the state that ends now."""
    before = status.goodput or api.Goodput()
    after = replace(before, idle_since=None, counted_until=None)
    since = max((t for t in (status.state_time, before.counted_until) if t is not None), default=now)
    elapsed = max(0, round((now - since).total_seconds()))
    if status.state == "Running":
        after, elapsed = _running(after, status, since, elapsed)
    if status.state == "Restarting" or (status.state == "Running" and status.is_restarted):
        after = replace(after, restarting_seconds=after.restarting_seconds + elapsed)
    elif status.state in ("Pending", "Starting", "Running"):
        after = replace(after, starting_seconds=after.starting_seconds + elapsed)
    return replace(after, ratio=_ratio(after))


def with_goodput(status: api.Status, now: dt.datetime) -> api.Status:
    """Return the status with the goodput until now, in the middle of a state."""
    return replace(status, goodput=replace(goodput(status, now), counted_until=now))


def _running(before: api.Goodput, status: api.Status, since: dt.datetime, elapsed: int) -> tuple[api.Goodput, int]:
    """Return the goodput plus the seconds in which all nodes ran, and how many of these preceded the first step."""
    if status.first_step_time is None:
        # Imports, rendezvous and loading are no training, but only reported steps would distinguish them from it.
        unreported = elapsed if status.furthest_step is None else 0
        return replace(before, unreported_seconds=before.unreported_seconds + unreported), elapsed - unreported
    idle_since = status.goodput.idle_since if status.goodput is not None else None
    first = min(elapsed, max(0, round((status.first_step_time - since).total_seconds())))
    last = elapsed if idle_since is None else min(elapsed, max(first, round((idle_since - since).total_seconds())))
    counted = replace(
        before,
        productive_seconds=before.productive_seconds + last - first,
        idle_seconds=before.idle_seconds + elapsed - last,
    )
    return counted, first


def _ratio(spent: api.Goodput) -> float | None:
    """Return the share of productive time; None if no step was ever reported, because a running script may hang."""
    if spent.unreported_seconds and not spent.productive_seconds:
        return None
    trained = spent.productive_seconds + spent.unreported_seconds
    total = trained + spent.idle_seconds + spent.starting_seconds + spent.restarting_seconds
    return round(spent.productive_seconds / total, 3) if total else 0.0


def with_idle(status: api.Status, since: dt.datetime | None) -> api.Status:
    """Return the status of a job that is idle (makes no step) from `since` on. Idle time is not productive time."""
    before = status.goodput or api.Goodput()
    if since is None or status.state != "Running" or status.first_step_time is None or before.idle_since is not None:
        return status
    return replace(status, goodput=replace(before, idle_since=since))


def with_progress(status: api.Status, report: Report | None, not_kept: str = "") -> api.Status:
    """Return the status with rank 0's report of this attempt. not_kept: why the state is not kept in memory."""
    if report is None or report.received_at is None or not _is_of_these_ranks(report, report.received_at, status):
        return status
    # The phase "start" only means that the library is initialized; earlier steps still count.
    is_start = report.phase == "start"
    if not (is_start and report.resumed_step is None):
        status = replace(status, resumed_step=report.resumed_step, resumed_from=report.resumed_from)
    if is_start:
        return replace(status, save_failed=report.save_failed or status.save_failed)
    status = replace(status, not_kept=not_kept, save_failed=report.save_failed)
    before, progress = status.progress, _progress(report, status.attempt, report.received_at)
    is_idle = status.goodput is not None and status.goodput.idle_since is not None
    if is_idle and before is not None and before.step != report.step:  # the first step after an idle time
        status = with_goodput(status, report.received_at)
    status = _with_steps_of_new_ranks(status, report, report.received_at)
    if before is not None and replace(progress, updated=before.updated) == before:
        return status  # many ranks repeat an equal report every few seconds
    return replace(status, progress=progress)


def _with_steps_of_new_ranks(status: api.Status, report: Report, at: dt.datetime) -> api.Status:
    before = status.attempt_progress
    if report.step and status.first_step_time is None:
        return replace(_with_lost_steps(status, report), first_step_time=at)
    if before is None or not report.step:
        return status
    if report.step < before.step:
        return replace(_with_lost_steps(status, report), furthest_step=status.furthest)
    return _with_lost_steps(status, report) if before.generation < report.generation else status


def _is_of_these_ranks(report: Report, received_at: dt.datetime, status: api.Status) -> bool:
    if not status.attempt or report.attempt not in (0, status.attempt):
        return False
    # Ranks that ran before a pod was replaced sent this report.
    if status.attempt_time is not None and received_at < status.attempt_time:
        return False
    known = status.attempt_progress
    if known is None or not known.step or status.first_step_time is not None:
        return True
    # After a pod was replaced, earlier ranks have a lower generation and may run for a while.
    # Some senders report no generation: their report is of new ranks if its step differs.
    if report.generation == known.generation and report.resumed_step is None:
        return report.step != known.step
    return report.generation > known.generation


def _progress(report: Report, attempt: int, received_at: dt.datetime) -> api.Progress:
    percent = min(100, 100 * report.step // report.total_steps) if report.total_steps else None
    return api.Progress(
        step=report.step,
        total_steps=report.total_steps,
        percent=percent,
        eta_seconds=report.eta_seconds,
        samples_per_second=report.samples_per_second,
        world_size=report.world_size,
        saved_step=report.saved_step,
        metrics=dict(sorted(report.metrics.items())),
        attempt=attempt,
        generation=report.generation,
        updated=received_at,
    )


def _with_lost_steps(status: api.Status, report: Report) -> api.Status:
    """Count the steps made twice: from the resumed step (else the one before the first report) to the furthest."""
    before, failure = status.progress, status.last_failure
    if before is None:
        return status
    # Steps are reported every few seconds, so the failure of a rank may contain a later step.
    furthest = max(before.step, _step_of(failure, before))
    resumed = report.step - 1 if report.resumed_step is None else min(report.step - 1, report.resumed_step)
    goodput = status.goodput or api.Goodput()
    # A script may report any number as its step, and a status beyond the bounds of its type could never be read again.
    lost = min(bounds.COUNT_MAX, goodput.lost_steps + max(0, furthest - resumed))
    return replace(status, goodput=replace(goodput, lost_steps=lost))


def _step_of(failure: api.JobFailure | None, progress: api.Progress) -> int:
    """Return the step that the ranks of this progress had reached when they failed; 0 if unknown. The generation
    excludes failures of earlier ranks, whose steps are already counted. The time of a failure is not enough: it comes
    from a node's clock, or is the time of the agent's report."""
    if failure is None or failure.attempt != progress.attempt or failure.time < progress.updated:
        return 0
    is_earlier = failure.generation is not None and failure.generation < progress.generation
    return 0 if is_earlier else failure.step or 0


def with_failure(status: api.Status, failure: api.JobFailure) -> api.Status:
    """Return the status with a failure. It replaces a failure of the same attempt whose cause is not final."""
    line = api.FailureLine(
        attempt=failure.attempt,
        message=abridged(sentences.sentence(failure), BRIEF_MAX),
        reason="" if failure.init_container else failure.reason,
        time=failure.time,
        failure_class=failure.failure_class,
        node=failure.node if root_cause.blames_node(failure) else "",
    )
    earlier = [f for f in status.failures if f.attempt != failure.attempt or f.failure_class]
    return replace(status, last_failure=failure, failures=[*earlier, line][-FAILURES_MAX:])
