"""What the `ddprun` in a pod is told beside torchrun's variables: its budgets, and what the user wants of restarts.

A pod's environment is written once, so it says what was left when the pod was made; what its agent spends of it the
operator hears from the agent (in_place.py).
"""

from __future__ import annotations

import json

from ddpjob import rules
from ddpjob_operator import api, launcher, restart
from ddpjob_operator import status as statuses
from ddpjob_operator.preflight import wants_preflight


def environment(job: api.DDPJob, replacement: int) -> dict[str, str]:
    """Nothing for other launchers."""
    if not launcher.restarts_in_place(job.spec):
        return {}
    return {
        "DDPJOB_REPLACEMENT": str(replacement),
        "DDPJOB_RESTARTS_LEFT": json.dumps(_left(job)),
        **_failure_policy(job.spec),
        **_stall(job.spec),
        **({"DDPJOB_PREFLIGHT": "1"} if wants_preflight(job.spec, job.status) else {}),
    }


def _left(job: api.DDPJob) -> dict[str, int]:
    history, limits = statuses.history(job.status), restart.limits(job.spec)
    at = job.status.attempt_time
    counted = history.application if at is None else rules.counted(history, limits, at)
    return {
        "application": max(0, limits.backoff_limit - counted),
        "infrastructure": max(0, rules.INFRASTRUCTURE_IN_A_ROW_MAX - history.in_a_row),
        "stall": max(0, rules.STALLS_MAX - history.stall),
        "inARow": history.in_a_row,
        "chargedInARow": history.charged_in_a_row,
    }


def _failure_policy(spec: api.Spec) -> dict[str, str]:
    wanted = [{"action": r.action, "codes": sorted(r.codes), "notIn": r.inverted} for r in restart.policy(spec)]
    return {"DDPJOB_FAILURE_POLICY": json.dumps(wanted)} if wanted else {}


def _stall(spec: api.Spec) -> dict[str, str]:
    seconds = spec.stall.timeout_seconds if spec.stall else None
    return {} if seconds is None else {"DDPJOB_STALL_TIMEOUT": str(seconds)}
