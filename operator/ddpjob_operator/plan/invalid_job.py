"""Jobs whose spec is invalid, and jobs whose stored status cannot be read.

A spec becomes invalid while its job is running by an edit, or because a newer operator checks more. An invalid spec
starts no job, but a running job continues, restarts included. No copy of the last valid spec is kept: a newer version
might not be able to read that either. It is not needed, because the fields that pods are made from (`nodes`,
`nprocPerNode`, `template`) cannot change while pods are running (crd.py). A wrong field therefore counts as unset, a
number out of bounds as the nearest allowed one (validation.py), and `nodes` comes from the status.

An unreadable status is only reported, in a condition, because a plan without the status would train a finished job
again. To fix it, edit the status, or run the version of the operator that wrote it.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from ddpjob_operator.job import api, reasons
from ddpjob_operator.job.status import TERMINAL
from ddpjob_operator.job.validation import Path, Problem
from ddpjob_operator.plan.actions import Event
from ddpjob_operator.plan.transitions import MESSAGE_MAX

_SENTENCE_MAX = 1000
_PROBLEMS_MAX = 50  # a tenant's template may have thousands; a condition has room for about 20
_REMARK = re.compile(r"; the spec is invalid \(.*\)(?:; the job goes on as it was)?\Z", re.DOTALL)
# Fields that decide the ranks: with another value the next attempt would have other ranks than the last one.
_RANKS = frozenset((("spec", "nodes"), ("spec", "nprocPerNode")))
# Paths of a problem that makes the whole spec unreadable: it is missing, no mapping, or larger than the operator keeps.
_WHOLE: frozenset[Path] = frozenset(((), ("spec",)))
# Characters. A value from outside may have any length, but a condition's message has at most 32 kB.
_WHY_MAX = 300


def sentence(problems: Sequence[Problem]) -> str:
    return "; ".join(str(p)[:_SENTENCE_MAX] for p in problems[:_PROBLEMS_MAX])


def as_it_was(job: api.DDPJob, problems: Sequence[Problem]) -> api.DDPJob:
    status = replace(job.status, message=_REMARK.sub("", job.status.message))
    nodes = status.nodes.total if status.nodes is not None and status.attempt else 0
    wrong = nodes > 0 and any(p.path in _WHOLE or p.path[:2] == ("spec", "nodes") for p in problems)
    return replace(job, status=status, spec=job.spec.with_nodes(nodes) if wrong else job.spec)


def keeps_pods_from_being_made(problems: Sequence[Problem]) -> bool:
    return any(p.unreadable or p.path in _WHOLE or p.path[:2] in _RANKS for p in problems)


def remark(problems: Sequence[Problem], *, goes_on: bool = True) -> str:
    text = sentence(problems)
    cut = text if len(text) <= _SENTENCE_MAX else text[:_SENTENCE_MAX] + "…"
    return f"the spec is invalid ({cut})" + ("; the job goes on as it was" if goes_on else "")


def with_remark(status: api.Status, problems: Sequence[Problem]) -> api.Status:
    if not problems or is_explained(status):
        return status
    text = remark(problems, goes_on=status.state != "Suspended")
    return replace(status, message=f"{status.message[: MESSAGE_MAX - len(text) - 2]}; {text}")


def is_explained(status: api.Status) -> bool:
    """True if the status already has the reason InvalidSpec, or if the job has ended: its spec then has no effect."""
    return status.state in TERMINAL or status.reason == reasons.INVALID_SPEC.name


def is_managed(raw: Mapping[str, Any]) -> bool:
    spec = raw.get("spec")
    by_another = isinstance(spec, Mapping) and bool(spec.get("managedBy"))
    return not by_another and not raw["metadata"].get("deletionTimestamp")


def is_reported_unreadable(raw: Mapping[str, Any]) -> bool:
    status = raw.get("status")
    conditions = status.get("conditions") if isinstance(status, Mapping) else None
    accepted = [c for c in conditions if _is_accepted(c)] if isinstance(conditions, list) else []
    return any(c.get("reason") == reasons.UNREADABLE_STATUS.name for c in accepted)


def unreadable_event(why: str) -> Event:
    return Event("Warning", reasons.UNREADABLE_STATUS.name, _unreadable(why))


def unreadable_status(raw: Mapping[str, Any], why: str, now: dt.datetime) -> dict[str, Any] | None:
    """Return the status with the condition Accepted=False; None if it has this condition already or cannot hold one."""
    status = raw.get("status")
    conditions = status.get("conditions", []) if isinstance(status, Mapping) else None
    if not isinstance(conditions, list):
        return None
    before: Mapping[str, Any] = next((c for c in conditions if _is_accepted(c)), {})
    new = {"type": "Accepted", "status": "False", "reason": reasons.UNREADABLE_STATUS.name, "message": _unreadable(why)}
    if new.items() <= before.items():
        return None
    since = before.get("lastTransitionTime") if before.get("status") == "False" else None
    new["lastTransitionTime"] = since or now.isoformat(timespec="seconds").replace("+00:00", "Z")
    return {**(status or {}), "conditions": [new, *(c for c in conditions if not _is_accepted(c))]}


def _is_accepted(condition: object) -> bool:
    return isinstance(condition, Mapping) and condition.get("type") == "Accepted"


def _unreadable(why: str) -> str:
    return (
        f"{why[:_WHY_MAX]}. This operator cannot read it, so it does nothing for the job. Correct the field "
        f"(kubectl edit --subresource=status {api.KIND.lower()}), or run the version of the operator that wrote it."
    )
