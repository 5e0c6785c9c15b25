"""The report of a run: one HTML file that needs no server and loads nothing. Pure."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass

from ddpjob_cli.describe import figures
from ddpjob_cli.local.kept.history import SAMPLES, STEP_SECONDS, Facts, History, StatusChange
from ddpjob_cli.local.kept.report_svg import Markup, Segment, bar, curve, element, joined, timeline
from ddpjob_operator.job import api
from ddpjob_operator.job.wording import count, duration

ROWS_MAX = 40
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
CSS = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --page: #fff; --edge: #d1d9e0; --line: #0969da;
  --productive: #1a7f37; --starting: #9a6700; --restarting: #bc4c00; --idle: #8250df;
  --failed: #cf222e; --other: #6e7781 }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9198a1; --page: #0d1117; --edge: #3d444d;
  --line: #4493f8; --productive: #3fb950; --starting: #d29922; --restarting: #f0883e; --idle: #ab7df8;
  --failed: #f85149; --other: #9198a1 } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 960px;
  margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem; margin: 0 } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
h3 { font-size: 1rem; margin: .5rem 0 0 }
.soft, .tick { color: var(--soft); fill: var(--soft) }
.mono, pre { font-family: ui-monospace, monospace; font-size: .85rem }
.state { padding: 0 .5rem; border: 1px solid; border-radius: 1rem } .state.Succeeded { color: var(--productive) }
.state.Failed, .state.Killed { color: var(--failed) }
table { border-collapse: collapse; width: 100% } caption { text-align: left }
th, td { text-align: left; vertical-align: top; padding: .25rem .75rem .25rem 0; border-bottom: 1px solid var(--edge) }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums }
.wide { overflow-x: auto } .wide svg { min-width: 640px } td { overflow-wrap: break-word; max-width: 40rem }
pre { overflow-x: auto; padding: .75rem; border: 1px solid var(--edge); border-radius: 6px; white-space: pre-wrap }
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 1rem }
svg { width: 100%; height: auto; display: block } svg text { font-size: 12px; fill: var(--ink) }
svg .tick { fill: var(--soft) }
.grid { stroke: var(--edge) } .line { fill: none; stroke: var(--line); stroke-width: 1.5 }
.band { fill: var(--line); opacity: .2 } .restart { stroke: var(--restarting); stroke-dasharray: 4 3 }
.productive { fill: var(--productive) } .starting { fill: var(--starting) } .restarting { fill: var(--restarting) }
.idle { fill: var(--idle) } .failed { fill: var(--failed) } .other { fill: var(--other) }
.key { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px; margin-right: .4rem }
.key.productive { background: var(--productive) } .key.starting { background: var(--starting) }
.key.restarting { background: var(--restarting) } .key.idle { background: var(--idle) }
.key.failed { background: var(--failed) } .key.other { background: var(--other) }
a { color: var(--line) }
"""


@dataclass(frozen=True)
class ReportPage:
    """What a report tells. logs: (name, address) of each log; state: as `ddpjob list` shows it."""

    facts: Facts
    status: api.Status
    state: str
    history: History
    ended: dt.datetime
    logs: Sequence[tuple[str, str]] = ()

    @property
    def seconds(self) -> float:
        """How long it took."""
        return max(0.0, (self.ended - self.facts.started).total_seconds())


def page(report: ReportPage) -> str:
    """The whole file. Everything that a script, a user or a program said is escaped."""
    title = f"{report.facts.job}: {report.state}"
    head = joined(
        [
            Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
            Markup(f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'),
            element("title", title),
            element("style", Markup(CSS)),
        ]
    )
    parts = (_head, _curves, _time, _timeline, _failures, _logs)
    body = element("main", *(part(report) for part in parts))
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>{body}</body></html>\n'


def _head(report: ReportPage) -> Markup:
    facts, status = report.facts, report.status
    shape = f"{count(facts.nodes, 'node')} × {count(facts.nproc_per_node, 'process')} · {facts.backend}"
    began = f"began {facts.started:%Y-%m-%d %H:%M:%S} UTC · took {duration(report.seconds)} · run {facts.run}"
    state = element("span", report.state, class_=f"state {report.state}")
    restarts = status.restarts.total if status.restarts else 0
    rows = [("Attempts", str(status.attempt)), ("Restarts", str(restarts))]
    if progress := status.progress:
        total = f" of {progress.total_steps:,}" if progress.total_steps else ""
        rows.append(("Steps", f"{progress.step:,}{total}"))
        rows += [(name, figures.metric(value)) for name, value in progress.metrics.items()]
    if status.goodput and status.goodput.lost_steps:
        rows.append(("Steps repeated after restarts", f"{status.goodput.lost_steps:,}"))
    if status.message and report.state not in ("Succeeded", "Stopped"):
        rows.append(("Message", status.message))
    return joined(
        [
            element("h1", f"{facts.job} ", state),
            element("p", shape, Markup("<br>"), began, class_="soft"),
            _table("How it ended", [], rows),
        ]
    )


def _curves(report: ReportPage) -> Markup:
    series = {name: s.points for name, s in report.history.series.items() if len(s.points) > 1}
    if not series:
        hint = "The script reported no metrics over its steps: ddpjob.progress(step, loss=…) reports them."
        return joined([element("h2", "Metrics"), element("p", hint, class_="soft")])
    order = sorted(series, key=lambda n: (n in (SAMPLES, STEP_SECONDS), "loss" not in n.lower(), n))
    images = [element("figure", element("h3", n), curve(n, series[n]), style="margin:0") for n in order]
    rows = [
        (
            name,
            *map(figures.number, (points[0].mean, points[-1].mean)),
            figures.number(min(p.low for p in points)),
            figures.number(max(p.high for p in points)),
        )
        for name, points in ((n, series[n]) for n in order)
    ]
    said = "Over the steps; a dashed line is a restart, a band holds the values between two points."
    table = _table("Metrics in numbers", ["metric", "first", "last", "lowest", "highest"], rows, numbers=True)
    return joined(
        [element("h2", "Metrics"), element("p", said, class_="soft"), element("div", *images, class_="curves"), table]
    )


def _time(report: ReportPage) -> Markup:
    spent = report.status.goodput
    if spent is None:
        return Markup("")
    kinds = [
        ("productive", "training", spent.productive_seconds),
        ("other", "running, no step reported", spent.unreported_seconds),
        ("idle", "idle, no step for longer than expected", spent.idle_seconds),
        ("starting", "starting, until the first step", spent.starting_seconds),
        ("restarting", "restarting after a failure", spent.restarting_seconds),
    ]
    shown = [(kind, name, float(seconds)) for kind, name, seconds in kinds if seconds]
    if not shown:
        return Markup("")
    total = sum(seconds for _, _, seconds in shown)
    rows = [(_keyed(kind, name), duration(s), f"{s / total:.0%}") for kind, name, s in shown]
    ratio = "" if spent.ratio is None else f"Goodput {spent.ratio:.0%}: the share of the time in which steps were made."
    table = _table("Where the time went, in numbers", ["", "time", "share"], rows, numbers=True)
    return joined([element("h2", "Where the time went"), element("p", ratio, class_="soft"), bar(shown), table])


def _timeline(report: ReportPage) -> Markup:
    changes = report.history.changes
    rows: dict[tuple[int, int], list[Segment]] = {}
    ends = [*(change.time for change in changes[1:]), max(report.ended, changes[-1].time)] if changes else []
    for change, end in zip(changes, ends, strict=True):
        begin = (change.time - report.facts.started).total_seconds()
        segment = Segment(begin, (end - report.facts.started).total_seconds(), _kind(change), _words(change))
        rows.setdefault((change.attempt, change.generation), []).append(segment)
    if not rows:
        return Markup("")
    lives = [(_life(attempt, generation), segments) for (attempt, generation), segments in rows.items()]
    left_out = max(0, len(lives) - ROWS_MAX)
    note = element("p", f"The last {ROWS_MAX} of {len(lives)} rows.", class_="soft") if left_out else Markup("")
    cells: list[tuple[str, ...]] = [
        (f"{c.time:%H:%M:%S}", _keyed(_kind(c), _words(c)), _life(c.attempt, c.generation), c.message) for c in changes
    ]
    if report.history.changes_left_out:
        cells.insert(len(cells) // 4, ("…", f"{report.history.changes_left_out:,} changes are left out", "", ""))
    table = _table("Every change of state", ["time (UTC)", "state", "of", "message"], cells)
    drawn = element("div", timeline(lives[left_out:], report.seconds), class_="wide")
    details = element("details", element("summary", f"{count(len(changes), 'change')} of state"), table)
    return joined([element("h2", "Timeline"), note, drawn, details])


def _failures(report: ReportPage) -> Markup:
    if not report.status.failures:
        return Markup("")
    rows = [(str(f.attempt), f"{f.time:%H:%M:%S}", f.message, f.failure_class, f.node) for f in report.status.failures]
    table = _table("The last failures", ["attempt", "time (UTC)", "who and what", "class", "node"], rows)
    return joined([element("h2", "Failures"), table, _last_failure(report.status.last_failure)])


def _last_failure(failure: api.JobFailure | None) -> Markup:
    if failure is None or not (failure.exception or failure.log_tail):
        return Markup("")
    who = f"node {failure.node_rank}" if failure.rank is None else f"rank {failure.rank} on node {failure.node_rank}"
    shown = element("p", failure.exception, class_="mono")
    tail = element("pre", failure.log_tail, tabindex=0) if failure.log_tail else Markup("")
    return joined([element("h3", f"The last one: {who}, attempt {failure.attempt}"), shown, tail])


def _logs(report: ReportPage) -> Markup:
    if not report.logs:
        return Markup("")
    items = (element("li", element("a", name, href=address)) for name, address in report.logs)
    return joined([element("h2", "Logs"), element("ul", *items, class_="mono")])


def _kind(change: StatusChange) -> str:
    if change.state == "Running":
        return "productive" if change.training else "starting"
    kinds = {"Succeeded": "productive", "Failed": "failed", "Failing": "failed", "Restarting": "restarting"}
    return kinds.get(change.state, "starting" if change.state in ("Pending", "Starting") else "other")


def _words(change: StatusChange) -> str:
    if change.state == "Running":
        return "training" if change.training else "running, no step yet"
    return change.state


def _life(attempt: int, generation: int) -> str:
    in_place = f", in place {generation}" if generation else ""
    return f"attempt {attempt}{in_place}" if attempt else "before it began"


def _keyed(kind: str, text: str) -> Markup:
    return joined([element("span", class_=f"key {kind}"), text])


def _table(caption: str, heads: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = False) -> Markup:
    """A table whose first column heads its rows; numbers: the others stand to the right."""
    kind = "number" if numbers else None
    top = [element("th", h, scope="col", class_=kind if i else None) for i, h in enumerate(heads)]
    lines = [
        element("tr", element("th", row[0], scope="row"), *(element("td", cell, class_=kind) for cell in row[1:]))
        for row in rows
    ]
    head = element("thead", element("tr", *top)) if heads else Markup("")
    whole = element("table", element("caption", caption, class_="soft"), head, element("tbody", *lines))
    return element("div", whole, class_="wide")
