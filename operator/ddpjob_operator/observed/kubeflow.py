"""Read the Kubeflow Trainer's progress protocol as our own report.

Hugging Face's Trainer and Kubeflow's SDK use it if KUBEFLOW_TRAINER_SERVER_URL is set, so they report without changes.
A body is {"trainerStatus": {progressPercentage, estimatedRemainingSeconds, metrics: [{name, value}], lastUpdatedTime}};
all fields are optional. Steps are the metrics current_step and total_steps.
"""

from __future__ import annotations

import datetime as dt
import re
from typing import Annotated

import msgspec

from ddpjob_operator.job.bounds import NOT_READABLE
from ddpjob_operator.observed.reports import METRIC_LENGTH_MAX, METRICS_MAX, BadReportError, Report, read_report

STEP, TOTAL_STEPS = "current_step", "total_steps"

_FRACTION = re.compile(r"-?[0-9]{1,20}\.[0-9]{1,40}(e-?[0-9]{1,3})?")

Percent = Annotated[int, msgspec.Meta(ge=0, le=100)]
Seconds = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class TrainerMetric(msgspec.Struct, frozen=True):
    """A metric; name and value are text."""

    name: str
    value: str


class TrainerStatus(msgspec.Struct, rename="camel", frozen=True):
    """What world rank 0 reports, without lastUpdatedTime: the sender's clock is not trusted."""

    progress_percentage: Percent | None = None
    estimated_remaining_seconds: Seconds | None = None
    metrics: list[TrainerMetric] = []


class _Body(msgspec.Struct, rename="camel", frozen=True):
    trainer_status: TrainerStatus | None = None


def speaks(body: bytes) -> bool:
    """True if a request body is in this protocol."""
    try:
        return "trainerStatus" in msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except NOT_READABLE:
        return False


def read_body(
    body: bytes, received_at: dt.datetime, total_steps_before: int | None
) -> tuple[Report | None, int | None]:
    """Read a body in either protocol. Return the report, or None if there is none, and the total steps, which later
    bodies of the sender may omit. Raise BadReportError.
    """
    if not speaks(body):
        return read_report(body, received_at), total_steps_before
    status = read_status(body)
    if status is None:
        return None, total_steps_before
    total = total_steps(status) or total_steps_before
    return report(status, received_at, total), total


def read_status(body: bytes) -> TrainerStatus | None:
    """Read the status of a body; None if it is empty, which the protocol allows. Raise BadReportError."""
    try:
        return msgspec.json.decode(body, type=_Body).trainer_status
    except NOT_READABLE as error:
        raise BadReportError(str(error)) from None


def report(status: TrainerStatus, received_at: dt.datetime, total_steps_before: int | None = None) -> Report | None:
    """Convert the status to a report of rank 0; None if it has neither step nor percentage.

    total_steps_before: from an earlier status of the process, because the Trainer's last report is 100 % without a
    step. A loop without steps counts percents: step 42 of 100.
    """
    values = {metric.name: metric.value for metric in status.metrics}
    step, total = _count(values.get(STEP)), total_steps(status) or total_steps_before
    if step is None:
        if status.progress_percentage is None:
            return None
        total = total or 100
        step = status.progress_percentage * total // 100
    # The first 16, shortened: the protocol allows 256, and too many are no reason to refuse the step.
    others = [(name, value) for name, value in values.items() if name not in (STEP, TOTAL_STEPS)]
    return Report(
        step=step,
        total_steps=total,
        eta_seconds=status.estimated_remaining_seconds,
        metrics={name[:METRIC_LENGTH_MAX]: _short(value)[:METRIC_LENGTH_MAX] for name, value in others[:METRICS_MAX]},
        phase=None,
        final=status.progress_percentage == 100,
        received_at=received_at,
    )


def total_steps(status: TrainerStatus) -> int | None:
    """Return the total steps if the status has them."""
    return next((_count(metric.value) for metric in status.metrics if metric.name == TOTAL_STEPS), None)


def _short(value: str) -> str:
    """Shorten a fraction to six digits, as in our own reports: transformers writes 0.48397613525390626."""
    return f"{float(value):.6g}" if _FRACTION.fullmatch(value) else value


def _count(text: str | None) -> int | None:
    """Parse a number of steps; None for "-1", the Trainer's "unknown", and for anything else."""
    return int(text) if text is not None and text.isascii() and text.isdecimal() and len(text) < 16 else None
