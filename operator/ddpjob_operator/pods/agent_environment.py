"""Environment of a pod's `ddprun` in addition to torchrun's variables. The environment is set once, so it contains the
restart budget at the pod's creation (`ddpjob_core.budget`)."""

from __future__ import annotations

import json

from ddpjob_core.budget import Grant
from ddpjob_operator.job import api, budgets

PREFLIGHT_FAILURES = 2  # infrastructure failures in a row before a preflight; a single lost node may be chance


def environment(job: api.DDPJob, replacement: int) -> dict[str, str]:
    """Return the variables; {} for other launchers."""
    if not job.spec.facts.restarts_in_place:
        return {}
    spec = job.spec
    rules = [{"action": r.action, "codes": sorted(r.codes), "notIn": r.inverted} for r in budgets.policy(spec)]
    variables = {
        "DDPJOB_REPLACEMENT": replacement,
        "DDPJOB_LEADER_APPOINTED": 1 if job.status.leader and job.status.leader.term > 1 else None,
        "DDPJOB_SPARES": spec.spares or None,
        "DDPJOB_RESTARTS_LEFT": grant(job).text(),
        "DDPJOB_FAILURE_POLICY": json.dumps(rules) if rules else None,
        "DDPJOB_STALL_TIMEOUT": spec.stall.timeout_seconds if spec.stall else None,
        # Set only if the job sets a grace. By default the agent kills ranks at once: a broken group cannot save.
        "DDPJOB_RESTART_GRACE": spec.restart_grace_seconds,
        "DDPJOB_PREFLIGHT": 1 if wants_preflight(spec, job.status) else None,
        "DDPJOB_OUT_OF_MEMORY": 1 if was_out_of_memory(job.status) else None,
    }
    return {name: str(value) for name, value in variables.items() if value is not None}


def grant(job: api.DDPJob) -> Grant:
    """Return the restarts that are left now."""
    status, made = job.status, job.status.attempt_progress
    return Grant.of(
        budgets.history(status),
        budgets.limits(job.spec),
        status.attempt_time,
        step=status.furthest or 0,
        replaced=sum(status.replacements.values()),
        generations=0 if made is None else made.generation + 1,
        known=budgets.known(status),
    )


def was_out_of_memory(status: api.Status) -> bool:
    """True if a recent failure is an out-of-memory kill of a pod since the job was started or resumed.

    The job then keeps no state in memory: the state counts against the pod's memory limit, and the training would be
    killed repeatedly. To raise the limit, users suspend and resume the job.
    """
    since = status.start_time
    killed = [line for line in status.failures if line.reason == "OOMKilled"]
    # Compare the attempt too, because the node's clock may be behind. Each start and resume begins a new attempt.
    return any(line.attempt == status.attempt or since is None or line.time >= since for line in killed)


def wants_preflight(spec: api.Spec, status: api.Status) -> bool:
    """True if the nodes measure each other before their ranks start. OnRestart needs two nodes, because a node is slow
    only in comparison with another. It does nothing while other nodes train, because they would have to stop for it.
    """
    begun = status.attempt_time
    if any(node.lifted and (begun is None or node.until > begun) for node in status.avoided_nodes):
        return False  # pods fit on no other node, so a bad node cannot be replaced and the job would never train
    if spec.preflight != "OnRestart":
        return spec.preflight == "Always"
    last = [failure.failure_class for failure in status.failures[-PREFLIGHT_FAILURES:]]
    others_train = spec.facts.min_nodes is not None and status.state == "Running"
    return spec.nodes > 1 and not others_train and last == ["infrastructure"] * PREFLIGHT_FAILURES
