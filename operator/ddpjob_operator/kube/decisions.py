"""What the operator's log says of a plan: a line for each decision, and none where nothing is new. Events of a job are
gone after an hour; these lines stay as long as the cluster keeps logs."""

from __future__ import annotations

from collections.abc import Iterator

from ddpjob_operator.failures.redaction import shown
from ddpjob_operator.job import api, reasons
from ddpjob_operator.plan.actions import DeleteJob, Plan

MESSAGE_MAX = 500
# Between the creation of the pods and what they come to, which has a line; and after a restart, which has one.
_PASSING = frozenset({reasons.STARTING_TRAINERS.name})
_AFTER_RESTART = frozenset({reasons.CREATING_PODS.name, reasons.WAITING_FOR_OLD_PODS.name})


def lines(job: api.DDPJob, todo: Plan) -> Iterator[str]:
    """Job, attempt, what, and why. job: with the status before the plan."""
    old, new = job.status, todo.status or job.status
    where = f"{job.metadata.namespace}/{job.metadata.name}"
    if _is_news(old, new):
        yield f"{where} {_attempt(old, new)}: {_state(old, new)}: {shown(new.message, MESSAGE_MAX)}"
    for event in todo.events:
        if event.reason != new.reason:  # a change of state has its line
            yield f"{where} attempt {new.attempt}: {event.reason}: {shown(event.message, MESSAGE_MAX)}"
    if any(isinstance(action, DeleteJob) for action in todo.actions):
        yield f"{where}: deleted with its pods, because ttlSecondsAfterFinished is over"


def _is_news(old: api.Status, new: api.Status) -> bool:
    same = (old.state, old.reason, old.attempt) == (new.state, new.reason, new.attempt)
    passing = new.reason in _PASSING or (new.state == "Restarting" and new.reason in _AFTER_RESTART)
    return not same and not passing


def _attempt(old: api.Status, new: api.Status) -> str:
    return f"attempt {new.attempt}" if old.attempt in (0, new.attempt) else f"attempt {old.attempt} → {new.attempt}"


def _state(old: api.Status, new: api.Status) -> str:
    state = new.state if old.state in (None, "", new.state) else f"{old.state} → {new.state}"
    return f"{state}, {new.reason}"
