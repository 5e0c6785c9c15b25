"""The environment of a pod's `ddprun` beside torchrun's variables: budgets, and what the user wants of restarts.

A pod's environment is written once, so it holds what was left when the pod was made (`ddpjob_core.budget`).
"""

from __future__ import annotations

import json

from ddpjob_core.budget import Grant
from ddpjob_operator.job import api, budgets, launcher

PREFLIGHT_FAILURES = 2  # one lost node is bad luck


def environment(job: api.DDPJob, replacement: int) -> dict[str, str]:
    """Nothing for other launchers."""
    if not launcher.facts(job.spec).restarts_in_place:
        return {}
    spec = job.spec
    rules = [{"action": r.action, "codes": sorted(r.codes), "notIn": r.inverted} for r in budgets.policy(spec)]
    variables = {
        "DDPJOB_REPLACEMENT": replacement,
        "DDPJOB_RESTARTS_LEFT": _grant(job).text(),
        "DDPJOB_FAILURE_POLICY": json.dumps(rules) if rules else None,
        "DDPJOB_STALL_TIMEOUT": spec.stall.timeout_seconds if spec.stall else None,
        # Only where it is set: in place a broken group has nothing to save, and every second of it is lost.
        "DDPJOB_RESTART_GRACE": spec.restart_grace_seconds,
        "DDPJOB_PREFLIGHT": 1 if wants_preflight(spec, job.status) else None,
        "DDPJOB_OUT_OF_MEMORY": 1 if was_out_of_memory(job.status) else None,
    }
    return {name: str(value) for name, value in variables.items() if value is not None}


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


def was_out_of_memory(status: api.Status) -> bool:
    """True if the kernel has killed a pod for its memory since the job was started or resumed, as far as the last
    failures show it.

    The state in memory counts against the limit, and is reserved when there is room for it: a training that needs that
    room later would be killed for it again and again. Who raises the limit suspends and resumes the job.
    """
    since = status.start_time
    killed = [line for line in status.failures if line.reason == "OOMKilled"]
    # By its attempt too, because the clock of its node may be behind: each start and each resume begins a new one.
    return any(line.attempt == status.attempt or since is None or line.time >= since for line in killed)


def wants_preflight(spec: api.Spec, status: api.Status) -> bool:
    """True if the nodes measure each other before their ranks start.

    OnRestart needs two nodes at least, because a node is slow only compared with another.
    """
    begun = status.attempt_time
    if any(node.lifted and (begun is None or node.until > begun) for node in status.avoided_nodes):
        return False  # it may find a bad node, and there is no other one: the job would never train
    if spec.preflight != "OnRestart":
        return spec.preflight == "Always"
    last = [failure.failure_class for failure in status.failures[-PREFLIGHT_FAILURES:]]
    return spec.nodes > 1 and last == ["infrastructure"] * PREFLIGHT_FAILURES
