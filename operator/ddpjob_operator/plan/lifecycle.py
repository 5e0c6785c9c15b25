"""The rules of a job: how it starts, is suspended and resumed, runs, and ends."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from ddpjob_core.findings import FINDINGS_MAX
from ddpjob_operator.failures import root_cause
from ddpjob_operator.job import api, launcher, reasons, wording
from ddpjob_operator.job.reasons import Reason
from ddpjob_operator.job.status import TERMINAL
from ddpjob_operator.job.times import after, earliest, is_past
from ddpjob_operator.observed.cluster import Pod
from ddpjob_operator.plan import invalid_job, pending
from ddpjob_operator.plan.actions import Action, Decision, DeleteJob
from ddpjob_operator.plan.settlement import failure_of, stop_but_keep_log, with_log
from ddpjob_operator.plan.transitions import enter, new_attempt, with_failure
from ddpjob_operator.plan.view import View, name_pods, owned

STOPPING_ALL = "; stopping all nodes"


def finished(view: View, status: api.Status) -> Decision | None:
    """Clean up by cleanPodPolicy and ttlSecondsAfterFinished. A finished job never changes its state."""
    if view.recorded.state not in TERMINAL:
        return None
    actions: tuple[Action, ...] = view.stop(_unwanted(view), None)
    ends = after(view.recorded.completion_time, view.spec.ttl_seconds_after_finished)
    if is_past(ends, view.now):
        ends, actions = None, (DeleteJob(view.job.metadata.uid),)
    # In the status of a finished job only the number of remaining pods still changes.
    return Decision(replace(view.recorded, nodes=status.nodes), actions, ends)


def _unwanted(view: View) -> list[Pod]:
    if view.spec.clean_pod_policy == "All":
        garbage = {p.uid for p in view.garbage}
        return [p for p in owned(view.job, view.seen) if p.uid not in garbage]
    live = [p for p in view.pods.values() if p.live and view.spec.clean_pod_policy == "Running"]
    return [*live, *view.older]


def invalid(view: View, status: api.Status) -> Decision | None:
    """Start nothing for a spec that cannot run. A running job continues (invalid_job.py)."""
    if not view.problems or status.attempt:
        return None
    text = invalid_job.sentence(view.problems)
    return Decision(enter(status, "Pending", reasons.INVALID_SPEC, text, view.now))


def completed(view: View, status: api.Status) -> Decision | None:
    """Record success if all trainers ended with 0, including trainers whose pods are gone."""
    # After a stop (no startTime) spec.nodes may have changed, so the completed ranks belonged to another group.
    is_stopped = status.state == "Suspended" and status.start_time is None
    unfit = not status.attempt or status.state == "Failing" or is_stopped
    nodes = view.participants(status)
    if unfit or not view.is_enough(status.completed) or not status.completed >= nodes:
        return None
    text = f"all {len(nodes)} nodes completed" if view.spec.nodes > 1 else "the node completed"
    text = f"{len(nodes)} of {view.spec.nodes} nodes trained and completed" if len(nodes) < view.spec.nodes else text
    doubts = (api.StoredFinding(reason=reason.name, message=text) for reason, text in _doubts(view, status))
    status = replace(status, findings=[*status.findings, *doubts][-FINDINGS_MAX:])
    if status.findings:
        text = f"{text}, but suspicious: {'; '.join(found.message for found in status.findings)}"
    succeeded = enter(status, "Succeeded", reasons.ALL_NODES_COMPLETED, text, view.now)
    return Decision(replace(succeeded, completion_time=view.now))


def _doubts(view: View, status: api.Status) -> Iterator[tuple[Reason, str]]:
    """Yield reasons to doubt this success."""
    if status.save_failed:  # after os._exit the last save is missing; any other exit saves again, or fails
        yield reasons.SAVE_FAILED, status.save_failed
    spec, progress = view.spec, status.attempt_progress
    group = view.seen.group_size if progress is None else progress.world_size
    ranks, nproc = spec.world_size, spec.facts.nproc_per_node
    why = launcher.apart(spec) if group != ranks else []
    yield from ((reasons.LAUNCHER_OPTION, text) for text in why)
    if group == nproc < ranks and not (why or view.is_elastic):
        own = wording.count(nproc, "rank")
        text = f"rank 0 was in a group of {own}, but the job has {ranks}: each node trained a model of its own"
        yield reasons.NO_PROCESS_GROUP, text


def failing(view: View, status: api.Status) -> Decision | None:
    """Stop the pods of a job that will fail in any case. The pods get their full grace to save."""
    if view.recorded.state != "Failing":
        return None
    active = view.active_of_all_attempts
    if any(p.uid not in view.lost for p in active):
        actions, again_at = stop_but_keep_log(view, view.recorded.last_failure, active, None)
        return Decision(status, actions, again_at)
    status = _with_end_at_deadline(view, status)
    text = view.recorded.message.removesuffix(STOPPING_ALL)
    failed = enter(status, "Failed", reasons.named(view.recorded.reason), text, view.now)
    return Decision(replace(failed, completion_time=view.now))


def suspended(view: View, status: api.Status) -> Decision | None:
    """Stop the pods with their full grace. Deadlines start again on resume. An invalid spec is not resumed."""
    if not view.spec.suspend and not (view.problems and view.recorded.state == "Suspended"):
        return None
    reason, text = reasons.INVALID_SPEC, f"{invalid_job.sentence(view.problems)}; suspended until the spec is fixed"
    if active := view.active_of_all_attempts:
        reason, text = reasons.SUSPENDING, f"suspended; {name_pods(active)} still stopping"
    elif view.spec.suspend:
        reason, text = reasons.SUSPENDED, f"suspended; {view.settings.resume_hint}"
    return stop_all(view, status, reason, text)


def stop_all(view: View, status: api.Status, reason: Reason, text: str) -> Decision | None:
    """Suspend the job: record it, then stop its pods with full grace, so that all ranks save once. Before that, a
    recorded failure gets its cause and counts against its limit, as for a suspended batch/v1 Job."""
    if view.recorded.is_broken:
        return None
    status = replace(enter(status, "Suspended", reason, text, view.now), start_retries=0)
    if active := view.active_of_all_attempts:
        return Decision(status, view.stop(active, None) if view.recorded.state == "Suspended" else ())
    # Wait for the last pod: without a startTime the API server lets the template change (crd.py).
    return Decision(replace(status, start_time=None))


def waiting_for_room(view: View, status: api.Status) -> Decision | None:
    """Begin no attempt while the operator has no memory for the job (job/storage.py). No deadline runs."""
    if not view.seen.no_room or status.is_begun or view.active_of_all_attempts:
        return None
    state: api.State = "Suspended" if status.attempt else "Pending"
    text = f"waiting for room: {view.seen.no_room}. The job starts when other jobs have ended or are suspended"
    return Decision(replace(enter(status, state, reasons.WAITING_FOR_ROOM, text, view.now), start_time=None))


def beginning(view: View, status: api.Status) -> Decision | None:
    """Begin the first attempt, or when the job is resumed the next one. Wait for the last pod of the previous attempt:
    agents report some of their restarts only at their end, and reports count only for the recorded attempt."""
    if status.is_begun:
        return None
    ending = view.active_of_all_attempts  # pods on lost nodes too: they are deleted at once, before new ones start
    if ending:
        text = f"resumes when {name_pods(ending)} {'has' if len(ending) == 1 else 'have'} ended"
        return stop_all(view, status, reasons.WAITING_FOR_OLD_PODS, f"{text}{pending.unreachable_nodes(view)}")
    return Decision(replace(new_attempt(status, view.now), start_time=view.now), goes_on=True)


def past_deadline(view: View, status: api.Status) -> Decision | None:
    """Fail the job activeDeadlineSeconds after its last start, as for a batch/v1 Job, unless it is suspended."""
    if view.spec.suspend or not is_past(view.active_deadline(status), view.now):
        return None
    limit = view.spec.active_deadline_seconds
    text = f"not finished within activeDeadlineSeconds: {limit}{STOPPING_ALL}"
    status = _with_deadline(view, status)
    return Decision(enter(status, "Failing", reasons.DEADLINE_EXCEEDED, text, view.now))


def _with_deadline(view: View, status: api.Status) -> api.Status:
    """Record the rank furthest behind at the deadline. An unsettled failure is kept, as it explains more."""
    running = {p.place: p for p in view.active if p.trainer.state == "running"}
    if not running or view.recorded.is_broken:
        return status
    steps = {
        place: t.step for t in view.trackers.values() if (place := view.spec.members.place(t.node_rank)) in running
    }
    place = min(running, key=lambda p: (steps.get(p, max(steps.values(), default=0)), view.spec.members.node_rank(p)))
    return with_failure(status, failure_of(view, status, place, root_cause.DEADLINE))


def _with_end_at_deadline(view: View, status: api.Status) -> api.Status:
    """Add the end of the log to the failure that `_with_deadline` recorded, once its pod has ended."""
    failure = view.recorded.last_failure
    if failure is None or failure.reason != root_cause.DEADLINE or failure.failure_class:
        return status
    return with_failure(status, replace(with_log(view, failure), failure_class="permanent"))


def running(view: View, status: api.Status, missing: str = "") -> Decision:
    """Record that all trainers are running or have completed. missing: why an elastic job runs without some nodes."""
    last_report = pending.last_report_at(status, view.seen)
    reason, text = reasons.ALL_NODES_RUN, _how_many_run(view, status)
    if view.stopping:
        are = "is" if len(view.stopping) == 1 else "are"
        missing = "; ".join(filter(None, (missing, f"{name_pods(view.stopping)} {are} stopping")))
    if missing:
        reason, text = reasons.ENOUGH_NODES_RUN, f"{text}; {missing}"
    long_completed, again_at = pending.completed_long_ago(view, status)
    if long_completed:
        reason, text = reasons.OTHERS_COMPLETED, long_completed
    if finding := view.stall_finding:
        reason, text = reasons.STALL_SUSPECTED, finding.sentence()
    missed = after(last_report, pending.MISSED_SECONDS)
    silence = f"; no report since {wording.clock(last_report)}" if last_report and is_past(missed, view.now) else ""
    status = enter(status, "Running", reason, f"{text}{pending.unreachable_nodes(view)}{silence}", view.now)
    begun = status.running_time or view.now
    status = replace(status, start_retries=0, starting_since=None, running_time=begun)
    to_come = (t for t in (pending.report_old_at(last_report), missed) if t and t > view.now)
    return Decision(status, requeue_at=earliest(view.active_deadline(status), again_at, *to_come))


def _how_many_run(view: View, status: api.Status) -> str:
    count, nodes = len(status.completed), len(view.participants(status) - {p.place for p in view.stopping})
    done = f" and {count} completed" if count else ""
    restarts = status.restarted_in_place
    times = f", restarted in place {wording.count(restarts, 'time')}" if restarts else ""
    waiting = max(0, nodes - count - view.spec.nodes)
    spares = f" and {wording.count(waiting, 'spare')}" if waiting else ""
    running = wording.running(nodes - count - waiting, view.spec.nodes)
    return f"{running}{spares}{done}, attempt {status.attempt}{times}"
