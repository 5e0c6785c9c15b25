"""The line that shows how a job ended, in a cluster or in a local run."""

from __future__ import annotations

from ddpjob_cli.describe import progress
from ddpjob_operator.job import api, wording


def succeeded(name: str, status: api.Status, took: float) -> str:
    """Return ✔ digits Succeeded in 38s   accuracy 0.978   1 restart, 20 steps repeated   resumed at step 300 from /ckpt

    If the success is suspicious, a second line shows why. took: seconds.
    """
    metrics = progress.metric_parts(status.progress) if status.progress else []
    how = [*progress.restart_parts(status), *progress.resumed_parts(status)]
    line = "   ".join([f"✔ {name} Succeeded in {wording.duration(took)}", *metrics, *how])
    doubts = suspicions(status)
    return f"{line}\n⚠ but suspicious: {doubts}" if doubts else line


def suspicions(status: api.Status) -> str:
    """Return the first finding for each reason, and the number of other findings; "" if there are none."""
    first = {found.reason: found.message for found in reversed(status.findings)}
    more = len(status.findings) - len(first)
    return "; ".join(reversed(first.values())) + (f" (and {more} more like it)" if more else "")


def failed(name: str, status: api.Status, took: float) -> str:
    """Return a line such as `✖ digits Failed after 38s: restarted 3 times …`. took: seconds."""
    return f"✖ {name} Failed after {wording.duration(took)}: {status.message}"


def of_job(job: api.DDPJob) -> str:
    """Return the line for a job in a cluster. If it has not ended, the line shows its state."""
    status, name = job.status, job.metadata.name
    took = seconds_taken(status)
    if status.state == "Succeeded":
        return succeeded(name, status, took)
    if status.state == "Failed":
        return failed(name, status, took)
    return f"{name} {status.state or 'Pending'}: {status.message or 'no operator has seen it yet'}"


def seconds_taken(status: api.Status) -> float:
    if status.start_time is None or status.completion_time is None:
        return 0.0
    return (status.completion_time - status.start_time).total_seconds()
