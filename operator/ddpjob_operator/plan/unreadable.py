"""Jobs whose stored status cannot be read. Only a condition reports that, because a plan without the status would train
a finished job again. To fix it, edit the status, or run the version of the operator that wrote it."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import Any

from ddpjob_operator.job import api, reasons
from ddpjob_operator.plan.actions import Event

# Characters. A value from outside may have any length, but a condition's message has at most 32 kB.
_WHY_MAX = 300


def is_managed(raw: Mapping[str, Any]) -> bool:
    spec = raw.get("spec")
    by_another = isinstance(spec, Mapping) and bool(spec.get("managedBy"))
    return not by_another and not raw["metadata"].get("deletionTimestamp")


def is_reported(raw: Mapping[str, Any]) -> bool:
    status = raw.get("status")
    conditions = status.get("conditions") if isinstance(status, Mapping) else None
    accepted = [c for c in conditions if _is_accepted(c)] if isinstance(conditions, list) else []
    return any(c.get("reason") == reasons.UNREADABLE_STATUS.name for c in accepted)


def event(why: str) -> Event:
    return Event("Warning", reasons.UNREADABLE_STATUS.name, _sentence(why))


def with_condition(raw: Mapping[str, Any], why: str, now: dt.datetime) -> dict[str, Any] | None:
    """Return the status with the condition Accepted=False; None if it has this condition already or cannot hold one."""
    status = raw.get("status")
    conditions = status.get("conditions", []) if isinstance(status, Mapping) else None
    if not isinstance(conditions, list):
        return None
    before: Mapping[str, Any] = next((c for c in conditions if _is_accepted(c)), {})
    new = {"type": "Accepted", "status": "False", "reason": reasons.UNREADABLE_STATUS.name, "message": _sentence(why)}
    if new.items() <= before.items():
        return None
    since = before.get("lastTransitionTime") if before.get("status") == "False" else None
    new["lastTransitionTime"] = since or now.isoformat(timespec="seconds").replace("+00:00", "Z")
    return {**(status or {}), "conditions": [new, *(c for c in conditions if not _is_accepted(c))]}


def _is_accepted(condition: object) -> bool:
    return isinstance(condition, Mapping) and condition.get("type") == "Accepted"


def _sentence(why: str) -> str:
    return (
        f"{why[:_WHY_MAX]}. This operator cannot read it, so it does nothing for the job. Correct the field "
        f"(kubectl edit --subresource=status {api.KIND.lower()}), or run the version of the operator that wrote it."
    )
