"""The Kubeflow Trainer's progress protocol, read as our own report.

Hugging Face's Trainer and Kubeflow's SDK use it wherever KUBEFLOW_TRAINER_SERVER_URL is set, so they report without a
changed line. A body is {"trainerStatus": {progressPercentage, estimatedRemainingSeconds, metrics: [{name, value}],
lastUpdatedTime}}, every field optional; steps, where there are any, are the metrics current_step and total_steps.
Called by the receivers of progress.
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
    """A value with a name, both text."""

    name: str
    value: str


class TrainerStatus(msgspec.Struct, rename="camel", frozen=True):
    """What world rank 0 knows; lastUpdatedTime is left out, as the sender's clock is not trusted."""

    progress_percentage: Percent | None = None
    estimated_remaining_seconds: Seconds | None = None
    metrics: list[TrainerMetric] = []


class _Body(msgspec.Struct, rename="camel", frozen=True):
    trainer_status: TrainerStatus | None = None


def speaks(body: bytes) -> bool:
    """True if a request body is in this protocol; a body that is no JSON object is in none."""
    try:
        return "trainerStatus" in msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except NOT_READABLE:
        return False


def read_body(
    body: bytes, received_at: dt.datetime, total_steps_before: int | None
) -> tuple[Report | None, int | None]:
    """The report in a request body of either protocol, None where it says nothing; and the steps of the whole training,
    which a later body of the same sender may leave out. Raises BadReportError."""
    if not speaks(body):
        return read_report(body, received_at), total_steps_before
    status = read_status(body)
    if status is None:
        return None, total_steps_before
    total = total_steps(status) or total_steps_before
    return report(status, received_at, total), total


def read_status(body: bytes) -> TrainerStatus | None:
    """The status in a body; None for an empty one, which the protocol allows. Raises BadReportError."""
    try:
        return msgspec.json.decode(body, type=_Body).trainer_status
    except NOT_READABLE as error:
        raise BadReportError(str(error)) from None


def report(status: TrainerStatus, received_at: dt.datetime, total_steps_before: int | None = None) -> Report | None:
    """The status as a report of rank 0; None where it has neither a step nor a percentage.

    total_steps_before: of an earlier status of the same process, because the Trainer's last report is 100 % without
    any step. A loop that knows no steps at all counts percents: step 42 of 100.
    """
    values = {metric.name: metric.value for metric in status.metrics}
    step, total = _count(values.get(STEP)), total_steps(status) or total_steps_before
    if step is None:
        if status.progress_percentage is None:
            return None
        total = total or 100
        step = status.progress_percentage * total // 100
    # The first 16, cut to length: the protocol allows 256, and a long one is no reason to refuse the step.
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
    """The steps of the whole training, where the status has them."""
    return next((_count(metric.value) for metric in status.metrics if metric.name == TOTAL_STEPS), None)


def _short(value: str) -> str:
    """A fraction with six digits, as our own reports have it: transformers writes 0.48397613525390626."""
    return f"{float(value):.6g}" if _FRACTION.fullmatch(value) else value


def _count(text: str | None) -> int | None:
    """A whole number of steps; "-1", which the Trainer writes for unknown, and all else count as missing."""
    return int(text) if text is not None and text.isascii() and text.isdecimal() and len(text) < 16 else None
