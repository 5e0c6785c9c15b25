"""The receiver of progress reports answers any request with a report or an error sentence."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from worlds import START

from ddpjob_operator.observed.reports import BadReportError, Report, read_report

values: Any = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=80)
fields = st.dictionaries(
    st.sampled_from(
        [
            "step",
            "totalSteps",
            "etaSeconds",
            "samplesPerSecond",
            "worldSize",
            "rank",
            "metrics",
            "resumedFrom",
            "limitNeeded",
            "x",
        ]
    ),
    values | st.dictionaries(st.text(max_size=70), values, max_size=20),
)


@given(st.binary(max_size=200) | fields.map(lambda f: json.dumps(f).encode()))
@example(b'{"step": 1, "metrics": {"a": "\xff"}}')
@example(b"[" * 8000)
@example(b'{"step": -1}')
@example(b'{"step": 1, "samplesPerSecond": 1e300}')
def test_any_body_gives_a_report_within_bounds_or_an_error_sentence(body: bytes) -> None:
    report: Report | None = None
    with contextlib.suppress(BadReportError):
        report = read_report(body, START)
    if report is None:
        return
    assert 0 <= report.step < 2**53
    assert len(report.metrics) <= 16
