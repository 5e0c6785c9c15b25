"""What is written and sent of a decision: conditions, columns, redacted texts, events; progress now and then."""

from __future__ import annotations

import datetime as dt
from typing import Literal

from msgspec.structs import replace

from ddpjob_operator.job import api, ranges, reasons
from ddpjob_operator.job.status import TERMINAL, apart_from_progress, is_of_this_attempt
from ddpjob_operator.job.times import earliest, is_past
from ddpjob_operator.job.wording import duration
from ddpjob_operator.plan import events, invalid_spec, pending, redacted, report_age
from ddpjob_operator.plan.actions import Decision, Plan, Settings
from ddpjob_operator.plan.view import View
from ddpjob_operator.pods import naming

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


def finish(view: View, decision: Decision) -> Plan:
    """The plan: of the status only what differs from the stored one."""
    # The remark on an invalid spec is not part of what is recorded, but it is of what is compared.
    old = replace(view.recorded, message=view.stored.message)
    status, long_wait_at = pending.with_long_wait(invalid_spec.with_remark(decision.status, view.problems), view.now)
    new = _document(view, old, status)
    if new != view.stored:
        new = redacted.status(new)
    new, write_at = throttle(old, new, view.settings, view.now)
    return Plan(
        actions=decision.actions,
        status=None if new == view.stored else new,
        events=redacted.events(events.of_plan(view, old, new, decision.status.message)),
        requeue_at=earliest(decision.requeue_at, write_at, long_wait_at),
    )


def throttle(
    old: api.Status, new: api.Status, settings: Settings, now: dt.datetime
) -> tuple[api.Status, dt.datetime | None]:
    """Progress alone is written now and then; with any other change it is written at once."""
    if old.progress is None or new.progress is None or old.progress.updated >= new.progress.updated:
        return new if old.progress is None or new.progress is None else replace(new, progress=old.progress), None
    due = old.progress.updated + dt.timedelta(seconds=settings.progress_write_seconds)
    if now >= due or apart_from_progress(old) != apart_from_progress(new):
        return new, None
    return old, due


def _document(view: View, old: api.Status, status: api.Status) -> api.Status:
    """With what follows from the rest: printer columns, conditions, generation."""
    job = view.job
    new = replace(
        status,
        observed_generation=job.metadata.generation,
        selector=naming.selector(job),
        restarts=status.restarts or api.Restarts(),
        nodes=status.nodes or api.Nodes(total=view.spec.nodes),
    )
    silent = is_past(report_age.old_at(report_age.last_report_at(new, view.seen)), view.now)
    conditions = _conditions(old, new, invalid_spec.sentence(view.problems), view.now)
    return replace(new, display=_display(new, silent=silent), conditions=conditions)


def _display(status: api.Status, *, silent: bool) -> api.Display:
    """The texts of the printer columns. Of a job that is over its nodes are those that completed.

    silent: whether rank 0 has not reported for so long that the time left is out of date.
    """
    nodes, progress, over = status.nodes or api.Nodes(), status.progress, status.state in TERMINAL
    counts_down = status.state == "Running" and not silent
    ready = len(ranges.parse(status.completed_nodes)) if over else nodes.ready
    if progress is None or not (over or is_of_this_attempt(status, progress)):
        return api.Display(nodes=f"{ready}/{nodes.total}")
    return api.Display(
        nodes=f"{ready}/{nodes.total}",
        step=f"{progress.step}/{progress.total_steps}" if progress.total_steps else str(progress.step),
        progress="" if progress.percent is None else f"{progress.percent}%",
        eta="" if progress.eta_seconds is None or not counts_down else duration(progress.eta_seconds),
    )


def _conditions(old: api.Status, new: api.Status, invalid: str, now: dt.datetime) -> list[api.Condition]:
    true = _CONDITION_OF.get(new.state or "", set()) | (set() if invalid else {"Accepted"})
    if new.reason == reasons.SUSPENDING.name:
        true = true - {"Suspended"}  # a user who waits for it needs the GPUs or the volume, which the pods still hold
    before = {c.type: c for c in old.conditions}
    kinds = [k for k in _CONDITIONS if k in _ALWAYS_SHOWN or k in true or k in before or k == new.state]
    return [_condition(kind, kind in true, before.get(kind), new, invalid, now) for kind in kinds]


def _condition(
    kind: str, true: bool, before: api.Condition | None, new: api.Status, invalid: str, now: dt.datetime
) -> api.Condition:
    reason, message = new.reason or "Unknown", new.message
    if kind == "Accepted":
        reason, message = (reasons.INVALID_SPEC.name, invalid) if invalid else ("Valid", "")
    elif kind != "Running" and not true and kind != new.state:
        reason, message = f"Not{kind}", ""
    value: Literal["True", "False"] = "True" if true else "False"
    return api.Condition(
        type=kind,
        status=value,
        reason=reason,
        message=message[:1024],
        last_transition_time=now if before is None or before.status != value else before.last_transition_time,
        observed_generation=new.observed_generation,
    )
