"""Search the logs of a succeeded job for signs of a failure, in the client because the operator may not read logs."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from msgspec import structs

from ddpjob_cli.client import jobs
from ddpjob_cli.client.connection import Cluster, Raw
from ddpjob_cli.client.errors import ClusterError
from ddpjob_cli.client.logs import state_of
from ddpjob_core.findings import FINDINGS_MAX
from ddpjob_operator.failures import termination_message
from ddpjob_operator.job import api
from ddpjob_operator.job.launch import exit_codes

PODS_MAX = 16
LINES_MAX = 200


def with_findings(cluster: Cluster, stored: jobs.Stored) -> jobs.Stored:
    """Return the job with findings from the last lines of its logs; unchanged if no log can be read."""
    status = stored.job.status
    if status.state != "Succeeded":
        return stored
    trusted = exit_codes.zero_proves_success(stored.job.spec.facts.command)
    found = list(status.findings)
    with contextlib.suppress(ClusterError):
        done = [pod for pod in jobs.pods(cluster, stored.job.metadata.name) if _has_completed(pod, stored)]
        for pod in done[:PODS_MAX]:
            pieces = cluster.pieces(jobs.log_path(pod), container=stored.trainer, tailLines=str(LINES_MAX))
            text = b"".join(pieces)[-termination_message.READ_MAX :].decode(errors="replace")
            of_log = termination_message.findings(text, trusted=trusted)
            found += [
                one for f in of_log if (one := api.StoredFinding(reason=f.reason, message=f.message)) not in found
            ]
    return replace(
        stored, job=structs.replace(stored.job, status=structs.replace(status, findings=found[:FINDINGS_MAX]))
    )


def _has_completed(pod: Raw, stored: jobs.Stored) -> bool:
    ended = state_of(pod, stored.trainer).get("terminated") or {}
    return jobs.attempt_of(pod) == stored.job.status.attempt and ended.get("exitCode") == 0
