"""The HTML report of a run is one file, for any run and for any output of its script."""

import datetime as dt
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import browser
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import START, UID

from ddpjob_cli.local.run_files.history import Facts, History
from ddpjob_cli.local.run_files.report import page
from ddpjob_cli.local.run_files.runs import Run
from ddpjob_cli.local.run_files.series import POINTS_MAX, Series
from ddpjob_operator.job import api

FACTS = Facts(job="digits", run=UID, started=START, nodes=2, nproc_per_node=1, ranks_follow_nodes=True, backend="gloo")
HOSTILE = "</script></style></title><script>alert(1)</script>\"'><img src=x onerror=alert(1)>&amp;\x1b[31m\0"
VOID = {"meta", "br"}


def at(seconds: float) -> dt.datetime:
    return START + dt.timedelta(seconds=seconds)


def failure(attempt: int, message: str = "rank 1 (node 1) was killed by SIGKILL at step 40") -> api.FailureLine:
    return api.FailureLine(attempt=attempt, message=message, time=at(60), failure_class="application", node="vm")


def status(seconds: float, step: int, attempt: int, state: Any = "Running", **others: Any) -> api.Status:
    progress = api.Progress(
        step=step,
        total_steps=100,
        attempt=attempt,
        samples_per_second=512.5,
        metrics={"loss": f"{2 / (1 + step):.5f}", "params": "fa68aa27"},
        updated=at(seconds),
    )
    return api.Status(state=state, attempt=attempt, progress=progress, **others)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("run")
    (made / "digits-1-0.log").touch()
    return made


def report(folder: Path, message: str = "rank 1 failed", log: str = "the end of the log") -> tuple[Run, History]:
    """Return a run of 100 steps with its history: the run failed once at step 40 and resumed at step 31."""
    history = History()
    for step in range(1, 41):
        history.take(status(10 + step, step, 1), START, at(10 + step))
    history.take(status(50, 40, 1, "Restarting", message=message), START, at(60))
    again = {"attempt_time": at(61), "failures": [failure(1, message)]}
    history.take(api.Status(state="Running", attempt=2, **again), START, at(62))
    for step in range(31, 101):
        history.take(status(40 + step, step, 2, **again), START, at(40 + step))
    last = api.JobFailure(attempt=1, rank=1, node_rank=1, time=at(60), exception=message, log_tail=log)
    spent = api.Goodput(productive_seconds=100, starting_seconds=20, restarting_seconds=10, lost_steps=10, ratio=0.769)
    done = {"goodput": spent, "restarts": api.Restarts(application=1, total=1), "last_failure": last}
    ended = status(140, 100, 2, "Succeeded", **again, **done)
    history.take(ended, START, at(141))
    return Run(folder, FACTS, ended, running=False), history


def shown(folder: Path, message: str = "rank 1 failed", log: str = "the end of the log") -> str:
    return page(*report(folder, message, log), at(141))


class Parsed(HTMLParser):
    """The elements of a page with their attributes, and its text. Fails if elements are not closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] != "style":
            self.text += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)


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


def test_a_browser_shows_the_report_without_an_error(folder: Path, tmp_path: Path) -> None:
    """A browser must show the report: a valid page is blank if its security policy forbids its own style."""
    (tmp_path / "run.html").write_text(shown(folder, HOSTILE))
    drawn = Parsed(browser.drawn((tmp_path / "run.html").as_uri(), tmp_path / "profile"))
    assert drawn.count("svg") == Parsed(shown(folder)).count("svg")
    assert drawn.count("script") == 0
