"""The status document: what the user reads, and what plan() remembers between two looks.

Everything here is a function from one status to the next; nothing is counted twice when it is called twice.
"""

from __future__ import annotations

import datetime as dt
from typing import Literal

from msgspec.structs import replace

from ddpjob_operator.failures import root_cause
from ddpjob_operator.job import api, budgets, ranges, reasons
from ddpjob_operator.job.reasons import Reason
from ddpjob_operator.job.wording import duration
from ddpjob_operator.observed.reports import Report
from ddpjob_operator.pods import naming

TERMINAL = ("Succeeded", "Failed")
FAILURES_MAX = 10
MESSAGE_MAX = 4096
# The condition that is True in each state. Complete, Failed, Suspended and FailureTarget mean what they mean in
# batch/v1 Job, so that `kubectl wait --for=condition=Complete` works; they appear once they have been true.
_CONDITION_OF = {
    "Running": {"Running"},
    "Suspended": {"Suspended"},
    "Failing": {"FailureTarget"},
    "Failed": {"FailureTarget", "Failed"},
    "Succeeded": {"Complete"},
}
_ALWAYS_SHOWN = ("Accepted", "Running")
_CONDITIONS = (*_ALWAYS_SHOWN, "Suspended", "FailureTarget", "Complete", "Failed")


def enter(status: api.Status, state: api.State, reason: Reason, message: str, now: dt.datetime) -> api.Status:
    """The status in `state`; the time in the state before is booked when the state changes."""
    message = message[:MESSAGE_MAX]
    if status.state == state:
        return replace(status, reason=reason.name, message=message)
    return replace(
        status, state=state, reason=reason.name, message=message, state_time=now, goodput=goodput(status, now)
    )


def goodput(status: api.Status, now: dt.datetime) -> api.Goodput:
    """Where the time went, the state that ends now included."""
    before = status.goodput or api.Goodput()
    after = replace(before, idle_since=None, counted_until=None)
    since = max((t for t in (status.state_time, before.counted_until) if t is not None), default=now)
    elapsed = max(0, round((now - since).total_seconds()))
    if status.state == "Running":
        after, elapsed = _running(after, status, since, elapsed)
    if status.state == "Restarting" or (status.state == "Running" and is_restarted(status)):
        after = replace(after, restarting_seconds=after.restarting_seconds + elapsed)
    elif status.state in ("Pending", "Starting", "Running"):
        after = replace(after, starting_seconds=after.starting_seconds + elapsed)
    return replace(after, ratio=_ratio(after))


def _running(booked: api.Goodput, status: api.Status, since: dt.datetime, elapsed: int) -> tuple[api.Goodput, int]:
    """With what is known of the seconds in which all nodes ran; how many of them went before the first step."""
    if status.first_step_time is None:
        # Imports, rendezvous and loading are not training; a job that reports no steps cannot tell them apart.
        unreported = elapsed if status.furthest_step is None else 0
        return replace(booked, unreported_seconds=booked.unreported_seconds + unreported), elapsed - unreported
    idle_since = status.goodput.idle_since if status.goodput is not None else None
    first = min(elapsed, max(0, round((status.first_step_time - since).total_seconds())))
    last = elapsed if idle_since is None else min(elapsed, max(first, round((idle_since - since).total_seconds())))
    counted = replace(
        booked,
        productive_seconds=booked.productive_seconds + last - first,
        idle_seconds=booked.idle_seconds + elapsed - last,
    )
    return counted, first


def _ratio(spent: api.Goodput) -> float | None:
    """None where no step was ever reported: running is not training, and a script that hangs runs as well."""
    if spent.unreported_seconds and not spent.productive_seconds:
        return None
    total = (
        spent.productive_seconds
        + spent.unreported_seconds
        + spent.idle_seconds
        + spent.starting_seconds
        + spent.restarting_seconds
    )
    return round(spent.productive_seconds / total, 3) if total else 0.0


def with_idle(status: api.Status, since: dt.datetime | None) -> api.Status:
    """The status in which no step has been made since then: until the next one that time is not productive."""
    booked = status.goodput or api.Goodput()
    if since is None or status.state != "Running" or status.first_step_time is None or booked.idle_since is not None:
        return status
    return replace(status, goodput=replace(booked, idle_since=since))


def _stepping_again(status: api.Status, at: dt.datetime) -> api.Status:
    """The status once a step has followed on a time without any."""
    if status.goodput is None or status.goodput.idle_since is None:
        return status
    return replace(status, goodput=replace(goodput(status, at), counted_until=at))


def is_restarted(status: api.Status) -> bool:
    """Whether a failure came before: the present attempt was started by it, or a pod in it is replaced for it."""
    failure = status.last_failure
    return failure is not None and (failure.attempt == status.attempt - 1 or bool(status.replacements))


def is_broken(status: api.Status) -> bool:
    """Whether the present attempt has failed, and its pods (or the one that is to be replaced) are being stopped."""
    failure = status.last_failure
    if status.state != "Restarting" or failure is None:
        return False
    return failure.attempt == status.attempt and not failure.failure_class


def finish(
    old: api.Status, new: api.Status, job: api.DDPJob, accepted: str, now: dt.datetime, *, silent: bool = False
) -> api.Status:
    """The status to write: conditions, texts and generation follow from the rest.

    accepted: "" or what is wrong. silent: whether rank 0 has not been heard for so long that its figures are old.
    """
    new = replace(
        new,
        observed_generation=job.metadata.generation,
        selector=naming.selector(job),
        restarts=new.restarts or api.Restarts(),
        nodes=new.nodes or api.Nodes(total=job.spec.nodes),
    )
    return replace(new, display=display(new, silent=silent), conditions=_conditions(old, new, accepted, now))


def with_progress(status: api.Status, report: Report | None) -> api.Status:
    """The status with what rank 0 reports; a report of an older attempt changes nothing."""
    if report is None or report.received_at is None or report.attempt not in (0, status.attempt):
        return status
    if status.attempt_time is not None and report.received_at < status.attempt_time:
        return status  # of ranks before a pod was replaced
    if report.phase == "start":
        return status  # the library says that it is there; the steps made before still stand
    percent = None
    if report.total_steps:
        percent = min(100, 100 * report.step // report.total_steps)
    progress = api.Progress(
        step=report.step,
        total_steps=report.total_steps,
        percent=percent,
        eta_seconds=report.eta_seconds,
        samples_per_second=report.samples_per_second,
        world_size=report.world_size,
        metrics=dict(sorted(report.metrics.items())),
        attempt=status.attempt,
        updated=report.received_at,
    )
    before = status.progress
    if before is not None and before.step != report.step:
        status = _stepping_again(status, report.received_at)
    if report.step and status.first_step_time is None:
        status = replace(_with_lost_steps(status, report.step), first_step_time=report.received_at)
    elif before is not None and before.attempt == status.attempt and 0 < report.step < before.step:
        # The same pods, and the ranks in them are new ones.
        status = replace(_with_lost_steps(status, report.step), furthest_step=budgets.furthest(status))
    if before is not None and replace(progress, updated=before.updated) == before:
        return status  # "alive, step 41" once more: hundreds of ranks say that every few seconds
    return replace(status, progress=progress)


def _with_lost_steps(status: api.Status, first_step: int) -> api.Status:
    """The steps from where the ranks went on to where those before them had come are made twice."""
    before = status.progress
    if before is None:
        return status
    goodput = status.goodput or api.Goodput()
    lost = max(0, before.step - (first_step - 1))
    return replace(status, goodput=replace(goodput, lost_steps=goodput.lost_steps + lost))


def with_failure(status: api.Status, failure: api.Failure, message: str) -> api.Status:
    """The status with a failure, once: what is not settled yet has one cause, whatever it first looked like."""
    line = api.FailureLine(
        attempt=failure.attempt,
        message=message[:300],
        time=failure.time,
        failure_class=failure.failure_class,
        node=failure.node if root_cause.blames_node(failure) else "",
    )
    earlier = [f for f in status.failures if f.attempt != failure.attempt or f.failure_class]
    return replace(status, last_failure=failure, failures=[*earlier, line][-FAILURES_MAX:])


def display(status: api.Status, *, silent: bool = False) -> api.Display:
    """The texts of the printer columns. Of a job that is over its nodes are those that completed."""
    nodes, progress, done = status.nodes or api.Nodes(), status.progress, status.state in TERMINAL
    counts_down = status.state == "Running" and not silent
    there = len(ranges.parse(status.completed_nodes)) if done else nodes.ready
    if progress is None or not (done or is_of_this_attempt(status, progress)):
        return api.Display(nodes=f"{there}/{nodes.total}")
    return api.Display(
        nodes=f"{there}/{nodes.total}",
        step=f"{progress.step}/{progress.total_steps}" if progress.total_steps else str(progress.step),
        progress="" if progress.percent is None else f"{progress.percent}%",
        eta="" if progress.eta_seconds is None or not counts_down else duration(progress.eta_seconds),
    )


def is_of_this_attempt(status: api.Status, progress: api.Progress) -> bool:
    """Whether the ranks that train now have said it, and not those before a restart."""
    since = status.attempt_time
    return progress.attempt == status.attempt and (since is None or progress.updated >= since)


def apart_from_progress(status: api.Status) -> api.Status:
    """The status without what changes with every step: whether the rest is worth a write of its own."""
    shown = status.display or api.Display()
    return replace(status, progress=None, display=replace(shown, step="", progress="", eta=""))


def condition(status: api.Status, kind: str) -> bool:
    """Whether a condition is True."""
    found = find_condition(status, kind)
    return found is not None and found.status == "True"


def find_condition(status: api.Status, kind: str) -> api.Condition | None:
    """A condition; None where it has never been shown."""
    return next((c for c in status.conditions if c.type == kind), None)


def _conditions(old: api.Status, new: api.Status, accepted: str, now: dt.datetime) -> list[api.Condition]:
    holds = _CONDITION_OF.get(new.state or "", set()) | (set() if accepted else {"Accepted"})
    if new.reason == reasons.SUSPENDING.name:
        holds = holds - {"Suspended"}  # whoever waits for it wants the GPUs, or the volume
    before = {c.type: c for c in old.conditions}
    kinds = [k for k in _CONDITIONS if k in _ALWAYS_SHOWN or k in holds or k in before or k == new.state]
    return [_condition(kind, kind in holds, before.get(kind), new, accepted, now) for kind in kinds]


def _condition(
    kind: str, holds: bool, before: api.Condition | None, new: api.Status, accepted: str, now: dt.datetime
) -> api.Condition:
    reason, message = new.reason or "Unknown", new.message
    if kind == "Accepted":
        reason, message = (reasons.INVALID_SPEC.name, accepted) if accepted else ("Valid", "")
    elif kind != "Running" and not holds and kind != new.state:
        reason, message = f"Not{kind}", ""
    value: Literal["True", "False"] = "True" if holds else "False"
    return api.Condition(
        type=kind,
        status=value,
        reason=reason,
        message=message[:1024],
        last_transition_time=now if before is None or before.status != value else before.last_transition_time,
        observed_generation=new.observed_generation,
    )
