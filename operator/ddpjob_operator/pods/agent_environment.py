"""What the `ddprun` in a pod is told beside torchrun's variables: its budgets, and what the user wants of restarts.

A pod's environment is written once, so it says what was left when the pod was made, and how much of what node 0's agent
spends was known then (agent_restarts.py). So a pod that is made later tells that agent what was charged meanwhile.
"""

from __future__ import annotations

import json
from typing import Any

from ddpjob.core import rules
from ddpjob_operator.job import api, budgets, launcher

PREFLIGHT_FAILURES = 2  # one lost node is bad luck


def environment(job: api.DDPJob, replacement: int) -> dict[str, str]:
    """Nothing for other launchers."""
    if not launcher.restarts_in_place(job.spec):
        return {}
    return {
        "DDPJOB_REPLACEMENT": str(replacement),
        "DDPJOB_RESTARTS_LEFT": json.dumps(_left(job)),
        **_failure_policy(job.spec),
        **_stall(job.spec),
        **_restart_grace(job.spec),
        **({"DDPJOB_PREFLIGHT": "1"} if wants_preflight(job.spec, job.status) else {}),
    }


def _left(job: api.DDPJob) -> dict[str, Any]:
    history, limits = budgets.history(job.status), budgets.limits(job.spec)
    at = job.status.attempt_time
    counted = history.application if at is None else rules.counted(history, limits, at)
    return {
        "application": max(0, limits.backoff_limit - counted),
        "infrastructure": max(0, rules.INFRASTRUCTURE_IN_A_ROW_MAX - history.uncharged_in_a_row),
        "stall": max(0, rules.STALLS_MAX - history.stall),
        "inARow": history.in_a_row,
        "chargedInARow": history.charged_in_a_row,
        "peersLost": history.peers_lost,
        "step": budgets.furthest(job.status) or 0,
        **_as_of(job.status),
    }


def _as_of(status: api.Status) -> dict[str, Any]:
    """How late this is, by the pods replaced so far, and what node 0's agent was known to have charged by then."""
    known = status.in_place
    counts = ("replacement", "application", "infrastructure", "stall")
    return {
        "replaced": sum(status.replacements.values()),
        **({"known": {name: getattr(known, name) for name in counts}} if known is not None else {}),
    }


def _failure_policy(spec: api.Spec) -> dict[str, str]:
    wanted = [{"action": r.action, "codes": sorted(r.codes), "notIn": r.inverted} for r in budgets.policy(spec)]
    return {"DDPJOB_FAILURE_POLICY": json.dumps(wanted)} if wanted else {}


def _restart_grace(spec: api.Spec) -> dict[str, str]:
    """Only where it is set: in place a broken group has nothing to save, and every second of it is lost."""
    seconds = spec.restart_grace_seconds
    return {} if seconds is None else {"DDPJOB_RESTART_GRACE": str(seconds)}


def _stall(spec: api.Spec) -> dict[str, str]:
    seconds = spec.stall.timeout_seconds if spec.stall else None
    return {} if seconds is None else {"DDPJOB_STALL_TIMEOUT": str(seconds)}


def wants_preflight(spec: api.Spec, status: api.Status) -> bool:
    """Whether the nodes measure each other before their ranks start.

    OnRestart needs two nodes at least, because a node is slow only compared with another.
    """
    if spec.preflight != "OnRestart":
        return spec.preflight == "Always"
    last = [failure.failure_class for failure in status.failures[-PREFLIGHT_FAILURES:]]
    return spec.nodes > 1 and last == ["infrastructure"] * PREFLIGHT_FAILURES
