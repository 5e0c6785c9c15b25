"""The environment of a pod's `ddprun` beside torchrun's variables: budgets, and what the user wants of restarts.

A pod's environment is written once, so it holds what was left when the pod was made (`ddpjob.core.budget`).
"""

from __future__ import annotations

import json

from ddpjob.core.budget import Grant
from ddpjob_operator.job import api, budgets, launcher

PREFLIGHT_FAILURES = 2  # one lost node is bad luck


def environment(job: api.DDPJob, replacement: int) -> dict[str, str]:
    """Nothing for other launchers."""
    if not launcher.restarts_in_place(job.spec):
        return {}
    return {
        "DDPJOB_REPLACEMENT": str(replacement),
        "DDPJOB_RESTARTS_LEFT": _grant(job).text(),
        **_failure_policy(job.spec),
        **_stall(job.spec),
        **_restart_grace(job.spec),
        **({"DDPJOB_PREFLIGHT": "1"} if wants_preflight(job.spec, job.status) else {}),
    }


def _grant(job: api.DDPJob) -> Grant:
    status = job.status
    return Grant.of(
        budgets.history(status),
        budgets.limits(job.spec),
        status.attempt_time,
        step=budgets.furthest(status) or 0,
        replaced=sum(status.replacements.values()),
        known=budgets.known(status),
    )


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
