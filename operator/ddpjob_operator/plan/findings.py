"""What makes the success of an attempt suspicious: kept in the status, because it outlives the pods that tell it."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from ddpjob_core.findings import FINDINGS_MAX
from ddpjob_operator.failures import termination_message
from ddpjob_operator.job import api
from ddpjob_operator.plan.view import View


def with_findings(status: api.Status, view: View) -> api.Status:
    """The status with what the completed pods of the present attempt tell, each fact once."""
    if not status.attempt:
        return status
    found = list(dict.fromkeys((*status.findings, *_of_pods(view))))[:FINDINGS_MAX]
    return replace(status, findings=found) if found != status.findings else status


def _of_pods(view: View) -> Iterator[api.Finding]:
    for _, pod in sorted(view.known_pods.items()):
        if pod.has_completed and pod.trainer.message:
            for found in termination_message.findings(pod.trainer.message, trusted=view.hands_over_exit_code):
                yield api.Finding(reason=found.reason, message=found.message)
