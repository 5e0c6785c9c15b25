"""Reads the Kubeflow Trainer's progress protocol as our own report.

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
    """A metric. Name and value are text."""

    name: str
    value: str


class TrainerStatus(msgspec.Struct, rename="camel", frozen=True):
    """A status. lastUpdatedTime is left out, because the sender's clock is not trusted."""

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
    """Return the report in a body of either protocol (None without a report), and the total steps. Later bodies of the
    sender may omit the total steps. Raise BadReportError."""
    if not speaks(body):
        return read_report(body, received_at), total_steps_before
    try:
        status = msgspec.json.decode(body, type=_Body).trainer_status
    except NOT_READABLE as error:
        raise BadReportError(str(error)) from None
    if status is None:
        return None, total_steps_before
    values = {metric.name: metric.value for metric in status.metrics}
    step, known_total = _count(values.pop(STEP, None)), _count(values.pop(TOTAL_STEPS, None)) or total_steps_before
    total = known_total
    if step is None:
        if status.progress_percentage is None:
            return None, known_total
        # The Trainer's last report is 100 % without a step. A loop without steps counts percents: step 42 of 100.
        total = total or 100
        step = status.progress_percentage * total // 100
    # Keep only the first 16 metrics. The protocol allows 256, so reports with more than 16 must not be refused.
    others = list(values.items())[:METRICS_MAX]
    report = Report(
        step=step,
        total_steps=total,
        eta_seconds=status.estimated_remaining_seconds,
        metrics={name[:METRIC_LENGTH_MAX]: _short(value)[:METRIC_LENGTH_MAX] for name, value in others},
        phase=None,
        final=status.progress_percentage == 100,
        received_at=received_at,
    )
    return report, known_total


def _short(value: str) -> str:
    """Shorten a fraction to six digits, as in our own reports: transformers writes 0.48397613525390626."""
    return f"{float(value):.6g}" if _FRACTION.fullmatch(value) else value


def _count(text: str | None) -> int | None:
    """Parse a number of steps; None for "-1", the Trainer's "unknown", and for anything else."""
    return int(text) if text is not None and text.isascii() and text.isdecimal() and len(text) < 16 else None
