"""Lines of the operator's log about plans: at INFO one per change, at DEBUG one per plan that does anything. Events of
a job expire after an hour; these lines stay as long as the cluster keeps logs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

from ddpjob_operator.failures.redaction import shown
from ddpjob_operator.job import api, reasons
from ddpjob_operator.job.status import apart_from_progress
from ddpjob_operator.plan.actions import Action, CreatePod, CreateService, DeleteJob, DeletePod, EndPod, Plan
from ddpjob_operator.pods import naming

MESSAGE_MAX = 500
PODS_MAX = 8
# Reasons that are not logged, because the states before and after them are logged.
# The second set is for the state Restarting only.
_PASSING = frozenset({reasons.STARTING_TRAINERS.name})
_AFTER_RESTART = frozenset({reasons.CREATING_PODS.name, reasons.WAITING_FOR_OLD_PODS.name})


class Line(NamedTuple):
    """One line of the log, and the job, attempt and pod that it is about."""

    text: str
    job: str
    """namespace/name."""
    attempt: int
    pod: str = ""
    """The pod that failed, or the only one that is created or stopped; "" if the line is about no single pod."""

    def fields(self) -> dict[str, object]:
        """Fields for JSON logs; always the same keys."""
        return {"job": self.job, "attempt": self.attempt, "pod": self.pod}


def of_pod(job: api.Metadata, attempt: int, pod: str) -> Line:
    """Return a Line whose text is empty, because a log record about one pod needs only its fields."""
    return Line("", _where(job), attempt, pod)


def lines(job: api.DDPJob, todo: Plan) -> Iterator[Line]:
    """Yield a line per change: job, attempt, what, and why. job: with the status before the plan."""
    old, new = job.status, todo.status or job.status
    where = _where(job.metadata)
    pod = _failed_pod(old, new)
    same = (old.state, old.reason, old.attempt) == (new.state, new.reason, new.attempt)
    passing = new.reason in _PASSING or (new.state == "Restarting" and new.reason in _AFTER_RESTART)
    if not same and not passing:
        text = f"{where} {_attempt(old, new)}: {_state(old, new)}: {shown(new.message, MESSAGE_MAX)}"
        yield Line(text, where, new.attempt, pod)
    for event in todo.events:
        if event.reason != new.reason:  # a change of state has its own line
            text = f"{where} attempt {new.attempt}: {event.reason}: {shown(event.message, MESSAGE_MAX)}"
            yield Line(text, where, new.attempt, pod)
    if any(isinstance(action, DeleteJob) for action in todo.actions):
        yield Line(f"{where}: deleted with its pods, because ttlSecondsAfterFinished is over", where, new.attempt)


def decision(job: api.DDPJob, todo: Plan) -> Line | None:
    """Return the plan in one line; None if the plan only records progress."""
    old, new = job.status, todo.status or job.status
    if not todo.actions and apart_from_progress(old) == apart_from_progress(new):
        return None
    done = [*(["the status is written"] if todo.status is not None else []), *_actions(job, todo.actions)]
    pods = _pods(job, todo.actions)
    where, pod = _where(job.metadata), pods[0] if len(pods) == 1 else _failed_pod(old, new)
    text = f"{where} {_attempt(old, new)}: decided in state {_state(old, new)}: {', '.join(done)}"
    return Line(shown(text, 2 * MESSAGE_MAX), where, new.attempt, pod)


def about(key: tuple[str, str], raw: Mapping[str, Any] | None) -> dict[str, object]:
    """Return the fields of a line about a job without a plan. raw: as stored; its status may be anything."""
    status = (raw or {}).get("status")
    attempt = status.get("attempt") if isinstance(status, Mapping) else None
    return Line("", "/".join(key), attempt if isinstance(attempt, int) else 0).fields()


def _actions(job: api.DDPJob, actions: Sequence[Action]) -> Iterator[str]:
    words = {CreateService: "create the Service", DeleteJob: "delete the job"}
    yield from (words[type(action)] for action in actions if type(action) in words)
    for kind, verb in ((CreatePod, "create"), (EndPod, "end"), (DeletePod, "delete")):
        if those := [action for action in actions if isinstance(action, kind)]:
            more = f" and {len(those) - PODS_MAX} more" if len(those) > PODS_MAX else ""
            yield f"{verb} {' '.join(_pods(job, those))}{more}"


def _pods(job: api.DDPJob, actions: Sequence[Action]) -> list[str]:
    """Return the names of the first PODS_MAX pods."""
    made = (naming.pod_name(job, a.attempt, a.place, a.replacement) for a in actions if isinstance(a, CreatePod))
    return list(islice(chain(made, (a.name for a in actions if isinstance(a, (DeletePod, EndPod)))), PODS_MAX))


def _failed_pod(old: api.Status, new: api.Status) -> str:
    """Return the pod of a failure that is new, or from which the job has not recovered."""
    failure = new.last_failure
    is_about = failure != old.last_failure or new.state in ("Restarting", "Failing", "Failed")
    return failure.pod if failure is not None and is_about else ""


def _where(job: api.Metadata) -> str:
    return f"{job.namespace}/{job.name}"


def _attempt(old: api.Status, new: api.Status) -> str:
    return f"attempt {new.attempt}" if old.attempt in (0, new.attempt) else f"attempt {old.attempt} → {new.attempt}"


def _state(old: api.Status, new: api.Status) -> str:
    state = new.state if old.state in (None, "", new.state) else f"{old.state} → {new.state}"
    return f"{state}, {new.reason}"
