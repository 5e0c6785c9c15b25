"""The restarts that a spec allows, and the restarts that a status counts."""

from __future__ import annotations

from ddpjob_core import budget
from ddpjob_core.budget import Known, Limits, RestartHistory, Spent
from ddpjob_core.failure_policy import PolicyRule
from ddpjob_operator.job import api, validation


def history(status: api.Status) -> RestartHistory:
    """Return the operator's counts of restarts. The shared rules (`budget.py`) compare these counts with the limits."""
    r = status.restarts or api.Restarts()
    return RestartHistory(
        application=r.application,
        infrastructure=r.infrastructure,
        stall=r.stall,
        in_a_row=r.in_a_row,
        charged_in_a_row=r.charged_in_a_row,
        charged_at=tuple(r.charged_at),
        uncharged_in_a_row=r.uncharged_in_a_row,
        peers_lost=r.peers_lost,
    )


def restarts(history: RestartHistory) -> api.Restarts:
    return api.Restarts(**{**history._asdict(), "total": history.total, "charged_at": list(history.charged_at)})


def by_class(restarts: api.Restarts) -> str:
    """Return the restarts by cause, for example `2 application, 1 infrastructure`; "" without restarts."""
    by = [(restarts.application, "application"), (restarts.infrastructure, "infrastructure"), (restarts.stall, "stall")]
    return ", ".join(f"{number} {name}" for number, name in by if number)


def known(status: api.Status) -> Known:
    """Return the counts of node 0's agent from its last report in this attempt."""
    k = status.in_place
    return Known() if k is None else Known(k.replacement, Spent(k.application, k.infrastructure, k.stall))


def limits(spec: api.Spec) -> Limits:
    """Return the limits of the spec. With backoffWindowSeconds the status keeps the time of each restart."""
    if spec.backoff_window_seconds is None:
        return Limits(spec.backoff_limit)
    return Limits(min(spec.backoff_limit, validation.WINDOWED_LIMIT_MAX), spec.backoff_window_seconds)


def application_left(spec: api.Spec, status: api.Status) -> int:
    """Return how many more application failures may cause a restart. New pods get this number as their budget."""
    allowed = limits(spec)
    return max(0, allowed.backoff_limit - budget.counted(history(status), allowed, status.attempt_time))


def policy(spec: api.Spec) -> list[PolicyRule]:
    listed = spec.failure_policy.rules if spec.failure_policy else []
    return [
        PolicyRule(r.action, frozenset(r.on_exit_codes.values), r.on_exit_codes.operator == "NotIn") for r in listed
    ]
