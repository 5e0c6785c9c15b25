"""The HTML report of a run is one file, for any run and for any output of its script."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_pages import FACTS, HOSTILE, Parsed, at, report, shown
from worlds import START

from ddpjob_cli.local.run_files.history import History
from ddpjob_cli.local.run_files.report import page
from ddpjob_cli.local.run_files.runs import Run
from ddpjob_cli.local.run_files.series import POINTS_MAX, Series
from ddpjob_operator.job import api


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("run")
    (made / "digits-1-0.log").touch()
    return made


def test_the_report_has_the_curves_the_time_the_attempts_the_failures_and_the_logs(folder: Path) -> None:
    """The report, which a colleague gets as a single file, must have the curves, the failures and the logs."""
    parsed = Parsed(shown(folder))
    for said in (
        "digits: Succeeded",
        "2 nodes × 1 process · gloo",
        "Goodput 77%: the share of the time in which steps were made.",
        "training1m40s77%",
        "Steps repeated after restarts10",
        "attempt 1",
        "attempt 2",
        "rank 1 failed",
        "the end of the log",
        "digits-1-0.log",
    ):
        assert said in parsed.text, said
    images = [a["aria-label"] or "" for tag, a in parsed.elements if tag == "svg"]
    assert "loss: from 1 to 0.0198, steps 1 to 100" in images
    assert any(label.startswith("samples/s: ") for label in images)
    assert sum(a.get("class") == "restart" for tag, a in parsed.elements if tag == "line") == 3, "one in each curve"
    assert ("a", {"href": (folder / "digits-1-0.log").as_uri()}) in parsed.elements


def test_the_drawings_are_well_formed_and_each_has_a_text_description(folder: Path) -> None:
    """Each drawing needs a description for screen readers, and must be well-formed XML for strict viewers."""
    for drawing in re.findall(r"<svg.*?</svg>", shown(folder), re.S):
        root = ET.fromstring(drawing)
        assert root.get("role") == "img"
        assert root.get("aria-label")
        assert root.find("title") is not None


def test_the_report_loads_nothing_and_runs_nothing(folder: Path) -> None:
    """A report that a colleague opens must not load anything, nor run what a script has printed."""
    parsed = Parsed(shown(folder, HOSTILE, HOSTILE))
    assert not {"script", "img", "link", "iframe", "object"} & {tag for tag, _ in parsed.elements}
    addresses = [a[name] for _, a in parsed.elements for name in ("src", "href", "xlink:href") if name in a]
    assert addresses == [(folder / "digits-1-0.log").as_uri()]
    policy = next(a["content"] for _, a in parsed.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"


TEXTS = st.one_of(st.just(HOSTILE), st.text(max_size=40))


@settings(max_examples=40, deadline=None)
@given(TEXTS, TEXTS, st.dictionaries(TEXTS, st.one_of(TEXTS, st.floats().map(repr)), max_size=3))
def test_any_output_of_a_script_stays_text(folder: Path, message: str, log: str, metrics: dict[str, str]) -> None:
    """Any output of a script must stay text: markup in an exception must not change the page."""
    plain = Parsed(shown(folder, "x", "x"))
    run, history = report(folder, message or "x", log or "x")
    for step in (98, 99):
        progress = api.Progress(step=step, attempt=2, metrics=metrics, updated=at(200 + step))
        history.take(api.Status(state="Running", attempt=2, progress=progress), START, at(200 + step))
    parsed = Parsed(page(run, history, at(300)))
    for tag in ("script", "img", "main", "style", "a", "pre"):
        assert parsed.count(tag) == plain.count(tag), tag


def test_an_empty_run_has_a_report_too(folder: Path) -> None:
    """A run that failed before its first step must not cause a traceback."""
    empty = Run(folder, FACTS, api.Status(), running=False)
    assert "reported no metrics" in Parsed(page(empty, History(), START)).text


def test_a_series_stays_small_and_keeps_the_spikes() -> None:
    """A series of ten million steps must be reduced, but keep a single step with a high loss."""
    series = Series()
    for step in range(200_000):
        series.add(step, step / 10, 1000.0 if step == 123_457 else 1.0)
    assert POINTS_MAX // 2 <= len(series.points) <= POINTS_MAX
    assert max(point.high for point in series.points) == 1000.0
    assert sum(point.count for point in series.points) == 200_000
    assert series.points[-1].step == 199_999


def test_the_report_of_a_long_run_with_many_metrics_is_below_a_megabyte(folder: Path) -> None:
    history = History()
    for i in range(5_000):
        values = {f"metric {n}": repr(0.1234567890123 * i * n) for n in range(16)}
        progress = api.Progress(step=500 * (i + 1), attempt=1, samples_per_second=1e5, metrics=values, updated=at(i))
        history.take(api.Status(state="Running", attempt=1, progress=progress), START, at(i))
    for attempt in range(2, 2000):
        history.take(api.Status(state="Running", attempt=attempt, message="x" * 300), START, at(5_000 + attempt))
    assert len(history.changes) < 1000
    whole = page(Run(folder, FACTS, api.Status(state="Succeeded"), running=False), history, at(10_000))
    assert len(whole.encode()) <= 1_000_000
