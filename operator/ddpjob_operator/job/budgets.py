"""What the spec allows of restarts, and what of it the status has recorded as spent."""

from __future__ import annotations

from ddpjob.core import rules
from ddpjob_operator.job import api


def history(status: api.Status) -> rules.History:
    """What restarts have cost so far, as the rules read it."""
    r = status.restarts or api.Restarts()
    return rules.History(
        application=r.application,
        infrastructure=r.infrastructure,
        stall=r.stall,
        in_a_row=r.in_a_row,
        charged_in_a_row=r.charged_in_a_row,
        charged_at=tuple(r.charged_at),
        uncharged_in_a_row=r.uncharged_in_a_row,
        peers_lost=r.peers_lost,
    )


def restarts(history: rules.History, *, windowed: bool) -> api.Restarts:
    """The inverse. windowed: whether the times are needed again."""
    return api.Restarts(
        application=history.application,
        infrastructure=history.infrastructure,
        stall=history.stall,
        total=history.total,
        in_a_row=history.in_a_row,
        charged_in_a_row=history.charged_in_a_row,
        charged_at=list(history.charged_at) if windowed else [],
        uncharged_in_a_row=history.uncharged_in_a_row,
        peers_lost=history.peers_lost,
    )


def limits(spec: api.Spec) -> rules.Limits:
    """What the user allows."""
    return rules.Limits(spec.backoff_limit, spec.backoff_window_seconds)


def policy(spec: api.Spec) -> list[rules.PolicyRule]:
    """The user's own rules."""
    listed = spec.failure_policy.rules if spec.failure_policy else []
    return [
        rules.PolicyRule(r.action, frozenset(r.on_exit_codes.values), r.on_exit_codes.operator == "NotIn")
        for r in listed
    ]


def furthest(status: api.Status) -> int | None:
    """The furthest step of all attempts, the present one included."""
    now = status.progress.step if status.progress is not None and status.progress.step else None
    return max((n for n in (now, status.furthest_step) if n is not None), default=None)
