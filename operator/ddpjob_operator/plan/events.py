"""What `kubectl describe` shows of a change: one event for each change of state or reason, and what no state shows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from ddpjob_operator.failures import root_cause
from ddpjob_operator.job import api, launcher, podspec, reasons
from ddpjob_operator.job.reasons import Reason
from ddpjob_operator.job.status import find_condition, is_broken
from ddpjob_operator.plan import agent_restarts, invalid_spec
from ddpjob_operator.plan.actions import Event
from ddpjob_operator.plan.view import View
from ddpjob_operator.pods import environment

_BREAKS_THE_GROUP = "the kubelet's own restarts would break the group"
# Steps on the way back have no event, because there is one when the job restarts and one when it runs again.
_ON_THE_WAY = frozenset(
    r.name for r in (reasons.CREATING_PODS, reasons.STARTING_TRAINERS, reasons.WAITING_FOR_OLD_PODS)
)
# [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553]
_BUILD_PATH = re.compile(r"\[(?:[\w.-]*/){2,40}[\w.-]+:\d{1,6}\] ?")
_PICTURES = re.compile(r"(?: ?GLHF!)? ?[\U0001f000-\U0001ffff\u2600-\u27bf\ufe0f\u200d]+")
_SPACES = re.compile(r" {2,}")


def of_plan(view: View, old: api.Status, new: api.Status, message: str) -> Iterator[Event]:
    """All events of a reconcile. message: of the status, without the remark on an invalid spec."""
    yield from _of_state(old, new, message)
    yield from _of_acceptance(view, old, new)
    yield from _of_agent_restarts(old, new)
    if new.attempt and not old.attempt:
        yield from _advisories(view.job)


def _of_state(old: api.Status, new: api.Status, message: str) -> Iterator[Event]:
    if new.state == "Restarting" and new.reason in _ON_THE_WAY:
        return
    if _is_news(old, new) and new.reason in reasons.ALL:
        reason = reasons.ALL[new.reason]
        # Where nothing was left to stop, this is the first event of the failure.
        is_first = new.state == "Restarting" != old.state
        yield _event(replace(reason, warning=True) if is_first else reason, message)


def _of_acceptance(view: View, old: api.Status, new: api.Status) -> Iterator[Event]:
    """That the spec of a job has become invalid, or valid, where no change of its state shows it."""
    before, after = find_condition(old, "Accepted"), find_condition(new, "Accepted")
    if after is None or (before is not None and (before.status, before.message) == (after.status, after.message)):
        return
    if after.status == "False" and not invalid_spec.is_explained(new):
        yield _event(reasons.INVALID_SPEC, invalid_spec.remark(view.problems, goes_on=new.state != "Suspended"))
    elif after.status == "True" and before is not None and not _is_news(old, new):
        what = "status can be read" if before.reason == reasons.UNREADABLE_STATUS.name else "spec is valid"
        yield Event("Normal", "Accepted", f"the {what} now")


def _is_news(old: api.Status, new: api.Status) -> bool:
    return (old.state, old.reason) != (new.state, new.reason)


def _of_agent_restarts(old: api.Status, new: api.Status) -> Iterator[Event]:
    """What an agent has restarted since the last reconcile: no state shows it, since it is over when it is reported."""
    failure, count = new.last_failure, agent_restarts.count(new)
    if count > agent_restarts.count(old) and old.attempt == new.attempt and failure is not None:
        # While another failure is being settled, that one is the last failure, and not what the agents have overcome.
        settling = is_broken(old) or is_broken(new)
        free = "" if failure.charged_to in ("", "application") else " (not charged to backoffLimit)"
        what = "" if settling else f"{root_cause.sentence(failure)}{free}; "
        text = f"{what}all ranks have started again in their pods (restart {count} in place)"
        yield _event(reasons.RESTARTED_IN_PLACE, text)


def _advisories(job: api.DDPJob) -> Iterator[Event]:
    """What the user set and the job changes, or what may keep the ranks apart; sent once, with the first attempt."""
    policy = job.spec.template["spec"].get("restartPolicy", "Never")
    if policy != "Never":
        text = f"restartPolicy: {policy} becomes Never: {_BREAKS_THE_GROUP}"
        yield _event(reasons.RESTART_POLICY_CHANGED, text)
    for container, field in podspec.restarts_of_the_kubelet(job.spec.template):
        text = f"{field} of container {container.get('name')} is left out: {_BREAKS_THE_GROUP}"
        yield _event(reasons.RESTART_POLICY_CHANGED, text)
    if podspec.grace_seconds(job.spec.template) == 0:
        text = "terminationGracePeriodSeconds: 0 becomes 1: with 0 a pod is forgotten before its processes have ended"
        yield _event(reasons.GRACE_RAISED, text)
    names = ", ".join(environment.overridden(job))
    if names:
        text = f"{names}: your value and not the job's; the ranks meet only if it is right on every node"
        yield _event(reasons.RENDEZVOUS_OVERRIDDEN, text)
    for text in launcher.warnings(job.spec):
        yield _event(reasons.LAUNCHER_OPTION, text)


def _event(reason: Reason, message: str) -> Event:
    return Event("Warning" if reason.warning else "Normal", reason.name, shortened(message))


def shortened(text: str) -> str:
    """For a line of `kubectl describe`: without paths of gloo's sources and emojis, which the status keeps."""
    return _SPACES.sub(" ", _PICTURES.sub("", _BUILD_PATH.sub("", text))).strip()
