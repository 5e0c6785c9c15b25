"""The status document: what the user reads, and what plan() remembers between two looks.

Everything here is a function from one status to the next; nothing is counted twice when it is called twice.
"""

from __future__ import annotations

import datetime as dt
from typing import Literal

from msgspec.structs import replace

from ddpjob_operator import api, contract, reasons
from ddpjob_operator.observed import Report
from ddpjob_operator.reasons import Reason

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
    elapsed = max(0, round((now - status.state_time).total_seconds())) if status.state_time else 0
    bucket = {
        "Running": "productive_seconds",
        "Pending": "starting_seconds",
        "Starting": "starting_seconds",
        "Restarting": "restarting_seconds",
    }.get(status.state or "")
    after = replace(before, **{bucket: getattr(before, bucket) + elapsed}) if bucket else before
    total = after.productive_seconds + after.starting_seconds + after.restarting_seconds
    return replace(after, ratio=round(after.productive_seconds / total, 3) if total else 0.0)


def finish(old: api.Status, new: api.Status, job: api.DDPJob, accepted: str, now: dt.datetime) -> api.Status:
    """The status to write: conditions, texts and generation follow from the rest. accepted: "" or what is wrong."""
    new = replace(
        new,
        observed_generation=job.metadata.generation,
        selector=contract.selector(job),
        restarts=new.restarts or api.Restarts(),
        nodes=new.nodes or api.Nodes(total=job.spec.nodes),
    )
    return replace(new, display=display(new), conditions=_conditions(old, new, accepted, now))


def with_progress(status: api.Status, report: Report | None) -> api.Status:
    """The status with what rank 0 reports; a report of an older attempt changes nothing."""
    if report is None or report.received_at is None or report.attempt not in (0, status.attempt):
        return status
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
    return replace(status, progress=progress)


def with_failure(status: api.Status, failure: api.Failure, message: str) -> api.Status:
    """The status with a failure, once: an attempt has one cause."""
    line = api.FailureLine(attempt=failure.attempt, message=message[:300], time=failure.time)
    earlier = [f for f in status.failures if f.attempt != failure.attempt]
    return replace(status, last_failure=failure, failures=[*earlier, line][-FAILURES_MAX:])


def display(status: api.Status) -> api.Display:
    """The texts of the printer columns."""
    nodes, progress = status.nodes or api.Nodes(), status.progress
    if progress is None:
        return api.Display(nodes=f"{nodes.ready}/{nodes.total}")
    done = status.state in TERMINAL
    return api.Display(
        nodes=f"{nodes.ready}/{nodes.total}",
        step=f"{progress.step}/{progress.total_steps}" if progress.total_steps else str(progress.step),
        progress="" if progress.percent is None else f"{progress.percent}%",
        eta="" if progress.eta_seconds is None or done else duration(progress.eta_seconds),
    )


def duration(seconds: float) -> str:
    """24s, 12m5s, 3h10m, 2d4h: as kubectl writes ages."""
    whole = max(0, round(seconds))
    for big, small, names in ((86400, 3600, "dh"), (3600, 60, "hm"), (60, 1, "ms")):
        if whole >= big:
            rest = whole % big // small
            return f"{whole // big}{names[0]}" + (f"{rest}{names[1]}" if rest else "")
    return f"{whole}s"


def apart_from_progress(status: api.Status) -> api.Status:
    """The status without what changes with every step: whether the rest is worth a write of its own."""
    shown = status.display or api.Display()
    return replace(status, progress=None, display=replace(shown, step="", progress="", eta=""))


def condition(status: api.Status, kind: str) -> bool:
    """Whether a condition is True."""
    return any(c.type == kind and c.status == "True" for c in status.conditions)


def _conditions(old: api.Status, new: api.Status, accepted: str, now: dt.datetime) -> list[api.Condition]:
    holds = _CONDITION_OF.get(new.state or "", set()) | (set() if accepted else {"Accepted"})
    before = {c.type: c for c in old.conditions}
    kinds = [k for k in _CONDITIONS if k in _ALWAYS_SHOWN or k in holds or k in before]
    return [_condition(kind, kind in holds, before.get(kind), new, accepted, now) for kind in kinds]


def _condition(
    kind: str, holds: bool, before: api.Condition | None, new: api.Status, accepted: str, now: dt.datetime
) -> api.Condition:
    reason, message = new.reason or "Unknown", new.message
    if kind == "Accepted":
        reason, message = (reasons.INVALID_SPEC.name, accepted) if accepted else ("Valid", "")
    elif kind != "Running" and not holds:
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
