"""Turns a decision into a status and events: conditions, printer columns, redacted texts, throttled progress."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator
from dataclasses import replace as replaced
from typing import Literal

from msgspec.structs import replace

from ddpjob_operator.failures import sentences
from ddpjob_operator.failures.log_lines import TAIL_MAX
from ddpjob_operator.failures.redaction import clean, mask, shown, shown_pair
from ddpjob_operator.failures.root_cause import EXCEPTION_MAX, WORD_MAX
from ddpjob_operator.gangs import choice
from ddpjob_operator.job import api, bounds, budgets, launcher, podspec, reasons, variables
from ddpjob_operator.job.launch import shells
from ddpjob_operator.job.reasons import Reason
from ddpjob_operator.job.status import TERMINAL, apart_from_progress, find_condition, is_of_this_attempt
from ddpjob_operator.job.times import earliest, is_past
from ddpjob_operator.job.wording import duration
from ddpjob_operator.observed.reports import METRIC_LENGTH_MAX
from ddpjob_operator.plan import invalid_job, pending, restart
from ddpjob_operator.plan.actions import Decision, Event, Plan, Settings
from ddpjob_operator.plan.record import newest_agent
from ddpjob_operator.plan.transitions import MESSAGE_MAX
from ddpjob_operator.plan.view import View
from ddpjob_operator.pods import naming

# The condition that is True in each state. A status lists a condition from the first time that it is True.
# Complete, Failed, Suspended and FailureTarget mean the same as in batch/v1 Job, as `kubectl wait` expects.
_CONDITION_OF = {
    "Running": {"Running"},
    "Suspended": {"Suspended"},
    "Failing": {"FailureTarget"},
    "Failed": {"FailureTarget", "Failed"},
    "Succeeded": {"Complete"},
}
# The one condition whose message is status.message. Other conditions would only repeat this message.
_HAS_MESSAGE = {"Suspended": "Suspended", "Failing": "FailureTarget", "Failed": "Failed", "Succeeded": "Complete"}
_ALWAYS_SHOWN = ("Accepted", "Running")
_CONDITIONS = (*_ALWAYS_SHOWN, "Suspended", "FailureTarget", "Complete", "Failed", "SaveFailed", "Suspicious")
_BREAKS_THE_GROUP = "the kubelet's own restarts would break the group"
# Reasons without an Event, because the restart before them and the running job after them have Events.
_ON_THE_WAY = (reasons.CREATING_PODS.name, reasons.STARTING_TRAINERS.name, reasons.WAITING_FOR_OLD_PODS.name)
# Reasons of a Suspended job whose pods have not ended yet, also while it resumes or is evicted from its queue.
_STILL_STOPPING = tuple(
    r.name for r in (reasons.SUSPENDING, reasons.EVICTED, reasons.WAITING_FOR_OLD_PODS, reasons.WAITS_LONG)
)
# Characters of a condition's message.
CONDITION_MAX = 1024
# Jobs longer than this always get an Event at their end. For short jobs two more requests per job are too much load.
SHORT_JOB = dt.timedelta(minutes=10)


def finish(view: View, decision: Decision) -> Plan:
    """Return the plan. Its status is None if the new status equals the stored status."""
    # `recorded` lacks the remark about an invalid spec, so compare with the stored message, which may contain it.
    old = replace(view.recorded, message=view.stored.message)
    status = invalid_job.with_remark(decision.status, view.problems)
    status, long_wait_at = pending.with_long_wait(view, status)
    silent = is_past(pending.report_old_at(pending.last_report_at(status, view.seen)), view.now)
    new = _document(view, old, status, silent=silent)
    if new != view.stored:
        new = redacted(new, view.stored)
    new, write_at = throttle(old, new, view.settings, view.now)
    return Plan(
        actions=decision.actions,
        status=None if new == view.stored else new,
        events=redacted_events(_events(view, old, new, decision.status.message)),
        requeue_at=earliest(decision.requeue_at, write_at, long_wait_at),
    )


def throttle(
    old: api.Status, new: api.Status, settings: Settings, now: dt.datetime
) -> tuple[api.Status, dt.datetime | None]:
    """Return the status to write, and when to write progress that is held back (every progress_write_seconds)."""
    if old.progress is None or new.progress is None or old.progress == new.progress:
        return new, None
    due = old.progress.updated + dt.timedelta(seconds=settings.progress_write_seconds)
    if now >= due or apart_from_progress(old) != apart_from_progress(new):
        return new, None
    return old, due


def _document(view: View, old: api.Status, status: api.Status, *, silent: bool) -> api.Status:
    """Return the status with the fields of every status, such as conditions. silent: rank 0's ETA is out of date."""
    job = view.job
    new = replace(
        status,
        observed_generation=job.metadata.generation,
        selector=naming.selector(job),
        restarts=status.restarts or api.Restarts(),
        nodes=status.nodes or api.Nodes(total=view.spec.nodes),
    )
    conditions = _conditions(old, new, invalid_job.sentence(view.problems), view.now)
    return replace(new, display=_display(new, silent=silent), conditions=conditions)


def _display(status: api.Status, *, silent: bool) -> api.Display:
    """Return the printer columns. Completed nodes are shown as ready."""
    nodes, progress, over = status.nodes or api.Nodes(), status.progress, status.state in TERMINAL
    counts_down = status.state == "Running" and not silent
    completed = len(status.completed) if over or status.state == "Running" else 0
    ready = completed if over else min(nodes.total, nodes.ready + completed)
    shown = api.Display(nodes=f"{ready}/{nodes.total}", restarts=budgets.by_class(status.restarts or api.Restarts()))
    if progress is None or not (over or is_of_this_attempt(status, progress)):
        return shown
    return replace(
        shown,
        step=f"{progress.step}/{progress.total_steps}" if progress.total_steps else str(progress.step),
        progress="" if progress.percent is None else f"{progress.percent}%",
        eta="" if progress.eta_seconds is None or not counts_down else duration(progress.eta_seconds),
    )


def _conditions(old: api.Status, new: api.Status, invalid: str, now: dt.datetime) -> list[api.Condition]:
    true = _CONDITION_OF.get(new.state or "", set()) | (set() if invalid else {"Accepted"})
    true = true | ({"SaveFailed"} if new.save_failed else set())
    true = true | ({"Suspicious"} if new.findings else set())
    if new.reason in _STILL_STOPPING:
        true = true - {"Suspended"}  # its pods still use GPUs and volumes that a user may wait for
    before = {c.type: c for c in old.conditions}
    kinds = [k for k in _CONDITIONS if k in _ALWAYS_SHOWN or k in true or k in before or k == new.state]
    return [_condition(kind, kind in true, before.get(kind), new, invalid, now) for kind in kinds]


def _condition(
    kind: str, true: bool, before: api.Condition | None, new: api.Status, invalid: str, now: dt.datetime
) -> api.Condition:
    reason = new.reason or "Unknown"
    message = new.message if kind == _HAS_MESSAGE.get(new.state or "", "Running") else ""
    if kind == "Suspicious" and true:
        reason, message = new.findings[0].reason, "; ".join(one.message for one in new.findings)
    elif kind == "Accepted":
        reason, message = (reasons.INVALID_SPEC.name, invalid) if invalid else ("Valid", "")
    elif kind == "SaveFailed" and true:
        reason, message = reasons.SAVE_FAILED.name, new.save_failed
    elif kind != "Running" and not true and kind != new.state:
        reason, message = f"Not{kind}", ""
    value: Literal["True", "False"] = "True" if true else "False"
    return api.Condition(
        type=kind,
        status=value,
        reason=reason,
        message=message[:CONDITION_MAX],
        last_transition_time=now if before is None or before.status != value else before.last_transition_time,
        observed_generation=new.observed_generation,
    )


def _events(view: View, old: api.Status, new: api.Status, message: str) -> Iterator[Event]:
    """Yield Events for changes, and for facts that no state shows. message: without the remark about the spec."""
    yield from _of_state(view, old, new, message)
    yield from _of_acceptance(view, old, new)
    yield from _of_agent_restarts(view, old, new)
    for found in new.findings if new.findings != old.findings else ():
        if found not in old.findings:
            yield _event(replaced(reasons.named(found.reason), warning=True), found.message)
    if new.not_kept and new.not_kept != old.not_kept:
        yield _event(reasons.NOT_KEPT_IN_MEMORY, f"the state is not kept in memory: {new.not_kept}")
    if new.save_failed and not old.save_failed:
        yield _event(reasons.SAVE_FAILED, new.save_failed)
    if new.attempt and not old.attempt:
        yield from _advisories(view.job)
        if text := choice.unserved_queue(view.job, view.seen.gang_apis):
            yield _event(reasons.QUEUE_NOT_SERVED, text)


def _of_state(view: View, old: api.Status, new: api.Status, message: str) -> Iterator[Event]:
    is_on_the_way = new.state == "Restarting" and new.reason in _ON_THE_WAY
    if not is_on_the_way and _is_news(old, new) and new.reason in reasons.ALL:
        reason = reasons.ALL[new.reason]
        # If no pod was left to stop, this is the failure's first Event.
        is_first = new.state == "Restarting" != old.state
        event = _event(replaced(reason, warning=True) if is_first else reason, message)
        yield replaced(event, is_routine=_is_routine(view, old, new))


def _is_routine(view: View, old: api.Status, new: api.Status) -> bool:
    """True if the job only started or completed normally. False with a TTL, after which only Events show the end."""
    if new.attempt != 1 or new.restarts not in (None, api.Restarts()):
        return False
    if new.reason == reasons.ALL_NODES_RUN.name:
        return old.state != "Running"
    is_short = new.start_time is not None and view.now - new.start_time < SHORT_JOB
    is_kept = view.job.spec.ttl_seconds_after_finished is None
    return new.reason == reasons.ALL_NODES_COMPLETED.name and is_short and is_kept


def _of_acceptance(view: View, old: api.Status, new: api.Status) -> Iterator[Event]:
    before, after = find_condition(old, "Accepted"), find_condition(new, "Accepted")
    if after is None or (before is not None and (before.status, before.message) == (after.status, after.message)):
        return
    if after.status == "False" and not invalid_job.is_explained(new):
        yield _event(reasons.INVALID_SPEC, invalid_job.remark(view.problems, goes_on=new.state != "Suspended"))
    elif after.status == "True" and before is not None and not _is_news(old, new):
        what = "status can be read" if before.reason == reasons.UNREADABLE_STATUS.name else "spec is valid"
        yield _event(reasons.ACCEPTED, f"the {what} now")


def _is_news(old: api.Status, new: api.Status) -> bool:
    is_told = old.state == "Failing" and new.state == "Failed"  # this Event was sent when the pods began to stop
    return (old.state, old.reason) != (new.state, new.reason) and not (is_told and old.reason == new.reason)


def _of_agent_restarts(view: View, old: api.Status, new: api.Status) -> Iterator[Event]:
    """Yield an Event for new restarts in place. No state shows them, because they are over when they are reported."""
    failure, count = new.last_failure, new.restarted_in_place
    if count > old.restarted_in_place and old.attempt == new.attempt and failure is not None:
        # While a later failure is being classified, lastFailure is that one, not the one that agents recovered from.
        settling = old.is_broken or new.is_broken
        free = "" if failure.charged_to in ("", "application") else " (not charged to backoffLimit)"
        what = "" if settling else f"{sentences.sentence(failure)}{free}; "
        text = f"{what}restarted all ranks in place (restart {count})"
        agent = newest_agent(view)
        step = 0 if agent is None else agent.step_in_memory
        text += f"; step {step} is in memory" if step else restart.from_step(new, kept=True)
        yield _event(reasons.RESTARTED_IN_PLACE, text)


def _advisories(job: api.DDPJob) -> Iterator[Event]:
    """Yield warnings about fields that the job overrides, and options that may keep ranks apart, for attempt 1."""
    policy = job.spec.template["spec"].get("restartPolicy", "Never")
    if policy != "Never":
        yield _event(reasons.RESTART_POLICY_CHANGED, f"restartPolicy: {policy} becomes Never: {_BREAKS_THE_GROUP}")
    for container, field in podspec.restarts_of_the_kubelet(job.spec.template):
        text = f"{field} of container {container.get('name')} is left out: {_BREAKS_THE_GROUP}"
        yield _event(reasons.RESTART_POLICY_CHANGED, text)
    if job.spec.facts.grace_seconds == 0:
        text = "terminationGracePeriodSeconds: 0 becomes 1: with 0 a pod is forgotten before its processes have ended"
        yield _event(reasons.GRACE_RAISED, text)
    if text := variables.remark(job.spec.template):
        yield _event(reasons.RENDEZVOUS_OVERRIDDEN, text)
    if unset := _not_counted(job.spec):
        text = f"devices of a resourceClaim are not counted as GPUs, so {unset}: set these fields to match the claim"
        yield _event(reasons.DEVICES_NOT_COUNTED, text)
    for text in launcher.warnings(job.spec):
        yield _event(reasons.LAUNCHER_OPTION, text)
    for text in shells.lost_exit_codes(job.spec.facts.command):
        yield _event(reasons.EXIT_CODE_LOST, text)


def _not_counted(spec: api.Spec) -> str:
    """Return the "auto" settings that are too small because claimed devices are not counted; "" if none are."""
    if not podspec.claims_devices(spec.template) or spec.facts.gpus:
        return ""
    given = {
        "backend is gloo": spec.backend,
        "nprocPerNode is 1": spec.nproc_per_node if spec.facts.nproc_of_command is None else 1,
        "onePodPerNode is false": spec.one_pod_per_node,
    }
    return ", ".join(f"spec.{what}" for what, value in given.items() if value == "auto")


def _event(reason: Reason, message: str) -> Event:
    return Event("Warning" if reason.warning else "Normal", reason.name, sentences.shortened(message))


def redacted(new: api.Status, old: api.Status) -> api.Status:
    """Return the status with all text for people cleaned and masked; names that machines read stay unchanged. Entries
    that `old` contains are not masked again, to save up to 20 ms."""
    return replace(
        new,
        message=shown(new.message, MESSAGE_MAX),
        resumed_from=shown(new.resumed_from, bounds.SENTENCE_MAX),
        not_kept=shown(new.not_kept, bounds.ADVICE_MAX),
        save_failed=shown(new.save_failed, bounds.SENTENCE_MAX),
        progress=_redacted_progress(new.progress, old.progress),
        last_failure=new.last_failure if new.last_failure == old.last_failure else _redacted_failure(new.last_failure),
        failures=[line if line in old.failures else _redacted_line(line) for line in new.failures],
        findings=[replace(one, message=shown(one.message, EXCEPTION_MAX)) for one in new.findings],
        avoided_nodes=[
            node if node in old.avoided_nodes else replace(node, message=shown(node.message, EXCEPTION_MAX))
            for node in new.avoided_nodes
        ],
        conditions=[replace(one, message=shown(one.message, CONDITION_MAX)) for one in new.conditions],
    )


def redacted_events(new: Iterable[Event]) -> tuple[Event, ...]:
    return tuple(replaced(event, message=shown(event.message, MESSAGE_MAX)) for event in new)


def _redacted_progress(progress: api.Progress | None, old: api.Progress | None) -> api.Progress | None:
    if progress is None or not progress.metrics or (old is not None and progress.metrics == old.metrics):
        return progress
    pairs = progress.metrics.items()
    return replace(progress, metrics=dict(shown_pair(name, value, METRIC_LENGTH_MAX) for name, value in pairs))


def _redacted_line(line: api.FailureLine) -> api.FailureLine:
    return replace(line, message=shown(line.message, EXCEPTION_MAX), reason=shown(line.reason, WORD_MAX))


def _redacted_failure(failure: api.JobFailure | None) -> api.JobFailure | None:
    if failure is None:
        return None
    return replace(
        failure,
        reason=shown(failure.reason, WORD_MAX),
        signal=shown(failure.signal, WORD_MAX),
        exception=shown(failure.exception, EXCEPTION_MAX),
        log_tail=mask(clean(failure.log_tail))[:TAIL_MAX],
    )
