"""Reports in Kubeflow's progress protocol are accepted as ours. Hugging Face's Trainer and Kubeflow's SDK send them."""

import datetime as dt
import json
from typing import Any

import pytest

from ddpjob_operator.observed import kubeflow
from ddpjob_operator.observed.reports import BadReportError, Report

NOW = dt.datetime(2031, 3, 5, 7, 11, 13, tzinfo=dt.timezone.utc)


def body(metrics: dict[str, object] | None = None, **status: Any) -> bytes:
    """Return a report as both clients send it: metrics are a list of names and values, all of them strings."""
    if metrics:
        status["metrics"] = [{"name": name, "value": str(value)} for name, value in metrics.items()]
    return json.dumps({"trainerStatus": {"lastUpdatedTime": "2026-01-01T00:00:00+00:00"} | status}).encode()


def read(text: bytes, total_steps_before: int | None = None) -> Report | None:
    return kubeflow.read_body(text, NOW, total_steps_before)[0]


def test_steps_and_metrics_of_the_trainer_are_read() -> None:
    sent = body(
        {"loss": 0.25, "current_step": 120, "total_steps": 400, "current_epoch": 1.5},
        progressPercentage=30,
        estimatedRemainingSeconds=56,
    )
    assert read(sent) == Report(
        step=120,
        total_steps=400,
        eta_seconds=56,
        metrics={"loss": "0.25", "current_epoch": "1.5"},
        phase=None,
        received_at=NOW,
    )


def test_a_fraction_has_six_digits_as_in_our_own_reports() -> None:
    """A fraction must have six digits, because `loss 0.48397613525390626` takes half of a terminal's line."""
    given = {"loss": "0.48397613525390626", "learning_rate": "1.220703125e-06", "epoch": "5.0", "n": "12345678901",
             "digest": "1.5e99x", "nothing": "nan"}  # fmt: skip
    report = read(body({"current_step": 1} | given))
    assert report.metrics == {
        "loss": "0.483976", "learning_rate": "1.2207e-06", "epoch": "5", "n": "12345678901", "digest": "1.5e99x",
        "nothing": "nan",
    }  # fmt: skip


def test_the_last_report_of_the_trainer_has_no_step_and_still_ends_at_the_last_one() -> None:
    report = read(body({"loss": 0.1}, progressPercentage=100, estimatedRemainingSeconds=0), total_steps_before=400)
    assert (report.step, report.total_steps, report.final) == (400, 400, True)


def test_a_report_without_steps_is_read_as_percent() -> None:
    report = read(body(progressPercentage=42))
    assert (report.step, report.total_steps, report.final) == (42, 100, False)


def test_a_status_without_step_and_percentage_is_no_report() -> None:
    assert read(body({"loss": 0.1})) is None


@pytest.mark.parametrize("odd", ["-1", "none", "1e3", "²", "9" * 30, ""])
def test_a_step_that_is_not_a_number_counts_as_missing(odd: str) -> None:
    report = read(body({"current_step": odd, "total_steps": odd}, progressPercentage=7))
    assert (report.step, report.total_steps) == (7, 100)


def test_only_the_first_16_of_256_metrics_are_kept_and_cut_to_length() -> None:
    report = read(body({f"{n}-{'x' * 99}": "y" * 99 for n in range(256)}, progressPercentage=1))
    assert len(report.metrics) == 16
    assert {len(text) for pair in report.metrics.items() for text in pair} == {64}


def test_our_own_protocol_and_garbage_are_not_read_as_kubeflow_reports() -> None:
    others = [b'{"step": 1}', b"[]", b"", b"\xff", b'"trainerStatus"', b'{"x":' + b"[" * 8000]
    assert not any(kubeflow.speaks(other) for other in others)
    assert kubeflow.speaks(body())


@pytest.mark.parametrize(
    "bad",
    [
        body(progressPercentage=150),
        body(progressPercentage="half"),
        body(estimatedRemainingSeconds=-1),
        b'{"trainerStatus": []}',
        b'{"trainerStatus": {"metrics": [{"name": "loss"}]}}',
        b'{"trainerStatus": {"metrics": [{"name": "\xff", "value": "1"}]}}',
    ],
    ids=["more than 100 %", "text", "negative", "list", "without a value", "no UTF-8"],
)
def test_numbers_out_of_range_are_refused_and_not_clamped(bad: bytes) -> None:
    with pytest.raises(BadReportError):
        read(bad)


def test_an_empty_update_is_accepted_and_changes_nothing() -> None:
    assert kubeflow.read_body(b'{"trainerStatus": null}', NOW, 400) == (None, 400)
