"""When the nodes of a job measure each other before they train (ddpjob/preflight does it, in the pods)."""

from __future__ import annotations

from ddpjob_operator.job import api

FAILURES = 2  # one lost node is bad luck


def wants_preflight(spec: api.Spec, status: api.Status) -> bool:
    """Whether the next pods shall check themselves before their ranks start.

    OnRestart needs two nodes at least: alone there is nothing that a node is slow compared with.
    """
    if spec.preflight != "OnRestart":
        return spec.preflight == "Always"
    last = [failure.failure_class for failure in status.failures[-FAILURES:]]
    return spec.nodes > 1 and last == ["infrastructure"] * FAILURES
