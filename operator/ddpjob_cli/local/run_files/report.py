"""The report of a run: an HTML file that loads no other files. Every drawing has a text with the same information."""

from __future__ import annotations

import datetime as dt
import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ddpjob_cli.describe import figures
from ddpjob_cli.local.run_files import runs
from ddpjob_cli.local.run_files.history import SAMPLES, STEP_SECONDS, History, StatusChange
from ddpjob_cli.local.run_files.series import Point
from ddpjob_operator.job import api
from ddpjob_operator.job.wording import count, duration

LOGS_MAX = 200
ROWS_MAX = 40
WIDTH = 940  # pixels of full-width drawings; with one unit per pixel all texts have the same size
CURVE_WIDTH, CURVE_HEIGHT = 460, 180
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 10, 28
LABEL = 170
ROW = 24
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
h3 { font-size: 1rem; margin: .5rem 0 0 } figure { margin: 0 } a { color: var(--line) }
.soft, .tick { color: var(--soft); fill: var(--soft) }
.mono, pre { font-family: ui-monospace, monospace; font-size: .85rem }
table { border-collapse: collapse; width: 100% } caption { text-align: left }
th, td { text-align: left; vertical-align: top; padding: .25rem .75rem .25rem 0; border-bottom: 1px solid var(--edge) }
.wide { overflow-x: auto } .wide svg { min-width: 640px } td { overflow-wrap: break-word; max-width: 40rem }
pre { overflow-x: auto; padding: .75rem; border: 1px solid var(--edge); border-radius: 6px; white-space: pre-wrap }
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 1rem }
svg { width: 100%; height: auto; display: block } svg text { font-size: 12px; fill: var(--ink) }
svg .tick { fill: var(--soft) }
.grid { stroke: var(--edge) } .line { fill: none; stroke: var(--line); stroke-width: 1.5 }
.band { fill: var(--line); opacity: .2 } .restart { stroke: var(--restarting); stroke-dasharray: 4 3 }
.key { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px; margin-right: .4rem }
"""


def page(run: runs.Run, history: History, now: dt.datetime) -> str:
    """Return the whole HTML file. All text from scripts, users and programs is escaped."""
    took = runs.took(run, now)
    last = history.changes[-1].time if history.changes else run.facts.started
    seconds = max(0.0, (last - run.facts.started).total_seconds()) if took is None else took
    head = _joined(
        [
            Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
            Markup(f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'),
            _element("title", f"{run.facts.job}: {run.state}"),
            _element("style", Markup(CSS)),
        ]
    )
    parts = (_head(run, seconds), _curves(history), _time(run.status.goodput), _timeline(run, history, seconds))
    body = _element("main", *parts, _failures(run.status), _logs(run))
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>{body}</body></html>\n'


class Markup(str):
    """Text that is markup already and is not escaped again."""

    __slots__ = ()


def _element(name: str, *children: str, **attributes: object) -> Markup:
    """Return an element. Children that are not Markup are escaped. Attributes: class_ for class, x_y for x-y."""
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    head = "".join(f' {key}="{html.escape(str(value))}"' for key, value in given.items())
    return Markup(f"<{name}{head}>{_joined(children)}</{name}>")


def _joined(children: Iterable[str]) -> Markup:
    """Join children. Text that is not Markup is escaped."""
    return Markup("".join(c if isinstance(c, Markup) else html.escape(_printable(c)) for c in children))


@dataclass(frozen=True)
class Segment:
    """A period. begin, end: seconds since the start of the run; kind: the name of its color."""

    begin: float
    end: float
    kind: str
    text: str


def _curve(name: str, points: Sequence[Point]) -> Markup:
    """Draw values over steps: the mean as a line, lowest and highest as a band. A restart begins a new line."""
    steps = (min(p.step for p in points), max(p.step for p in points))
    low, high = min(p.low for p in points), max(p.high for p in points)

    def x(step: int) -> float:
        return LEFT + (CURVE_WIDTH - LEFT - RIGHT) * (step - steps[0]) / max(1, steps[1] - steps[0])

    def y(value: float) -> float:
        # Halve the values first, because the difference of two huge values overflows.
        share = 0.5 if high == low else (value / 2 - low / 2) / (high / 2 - low / 2)
        return CURVE_HEIGHT - BOTTOM - (CURVE_HEIGHT - TOP - BOTTOM) * share

    parts = [_grid(steps, low, high)]
    for run in _ascending(points):
        if any(p.count > 1 for p in run):
            outline = [*((x(p.step), y(p.high)) for p in run), *((x(p.step), y(p.low)) for p in reversed(run))]
            parts.append(_element("polygon", points=_points(outline), class_="band"))
        parts.append(_element("polyline", points=_points([(x(p.step), y(p.mean)) for p in run]), class_="line"))
        if run[0] is not points[0]:
            at = f"{x(run[0].step):.1f}"
            parts.append(_element("line", x1=at, x2=at, y1=TOP, y2=CURVE_HEIGHT - BOTTOM, class_="restart"))
    said = f"from {figures.number(points[0].mean)} to {figures.number(points[-1].mean)}, steps {steps[0]} to {steps[1]}"
    return _image(CURVE_WIDTH, CURVE_HEIGHT, f"{name}: {said}", parts)


def _lives(rows: Sequence[tuple[str, Sequence[Segment]]], seconds: float) -> Markup:
    height = ROW * len(rows) + BOTTOM

    def x(at: float) -> float:
        return LABEL + (WIDTH - LABEL - RIGHT) * min(1.0, max(0.0, at / max(1.0, seconds)))

    parts = []
    for i, (label, segments) in enumerate(rows):
        parts.append(_element("text", label, x=0, y=ROW * i + 16))
        for s in segments:
            width = max(1.0, x(s.end) - x(s.begin))
            where = {"x": f"{x(s.begin):.1f}", "y": ROW * i + 3, "width": f"{width:.1f}", "height": ROW - 6}
            said = f"{s.text}, {duration(s.end - s.begin)}"
            parts.append(_element("rect", _element("title", said), style=f"fill: var(--{s.kind})", **where))
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        at = f"{x(share * seconds):.1f}"
        parts.append(_element("text", duration(share * seconds), x=at, y=height - 8, text_anchor=anchor, class_="tick"))
    return _image(WIDTH, height, f"Timeline of {len(rows)} rows over {duration(seconds)}", parts)


def _head(run: runs.Run, seconds: float) -> Markup:
    facts, status = run.facts, run.status
    processes = "processes of the script" if facts.spawns else count(facts.nproc_per_node, "process")
    shape = f"{count(facts.nodes, 'node')} × {processes} · {facts.backend}"
    began = f"began {facts.started:%Y-%m-%d %H:%M:%S} UTC · took {duration(seconds)} · run {facts.run}"
    restarts = status.restarts.total if status.restarts else 0
    rows = [("Attempts", str(status.attempt)), ("Restarts", str(restarts))]
    if progress := status.progress:
        total = f" of {progress.total_steps:,}" if progress.total_steps else ""
        rows.append(("Steps", f"{progress.step:,}{total}"))
        rows += [(name, figures.metric(value)) for name, value in progress.metrics.items()]
    if status.goodput and status.goodput.lost_steps:
        rows.append(("Steps repeated after restarts", f"{status.goodput.lost_steps:,}"))
    if status.message and run.state not in ("Succeeded", "Stopped"):
        rows.append(("Message", status.message))
    return _joined(
        [
            _element("h1", f"{facts.job}: {run.state}"),
            _element("p", shape, Markup("<br>"), began, class_="soft"),
            _table("How it ended", [], rows),
        ]
    )


def _curves(history: History) -> Markup:
    series = {name: s.points for name, s in history.series.items() if len(s.points) > 1}
    if not series:
        hint = "The script reported no metrics over its steps: ddpjob.progress(step, loss=…) reports them."
        return _section("Metrics", _element("p", hint, class_="soft"))
    order = sorted(series, key=lambda n: (n in (SAMPLES, STEP_SECONDS), "loss" not in n.lower(), n))
    images = [_element("figure", _element("h3", name), _curve(name, series[name])) for name in order]
    said = "Over the steps; a dashed line is a restart, a band holds the values between two points."
    return _section("Metrics", _element("p", said, class_="soft"), _element("div", *images, class_="curves"))


def _time(spent: api.Goodput | None) -> Markup:
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
    keys = {kind: _element("span", class_="key", style=f"background: var(--{kind})") for kind, _, _ in shown}
    rows = [(_joined([keys[kind], name]), duration(s), f"{s / total:.0%}") for kind, name, s in shown]
    ratio = "" if spent.ratio is None else f"Goodput {spent.ratio:.0%}: the share of the time in which steps were made."
    table = _table("By what the ranks did", ["", "time", "share"], rows)
    return _section("Where the time went", _element("p", ratio, class_="soft"), table)


def _timeline(run: runs.Run, history: History, seconds: float) -> Markup:
    rows: dict[str, list[Segment]] = {}
    begins = [(change.time - run.facts.started).total_seconds() for change in history.changes]
    for change, begin, end in zip(history.changes, begins, [*begins[1:], seconds], strict=False):
        in_place = f", in place {change.generation}" if change.generation else ""
        life = f"attempt {change.attempt}{in_place}" if change.attempt else "before it began"
        rows.setdefault(life, []).append(Segment(begin, max(begin, end), *_kind(change)))
    if not rows:
        return Markup("")
    shown = list(rows.items())[-ROWS_MAX:]
    note = [_element("p", f"The last {ROWS_MAX} of {len(rows)} rows.", class_="soft")] * (len(shown) < len(rows))
    return _section("Timeline", *note, _element("div", _lives(shown, seconds), class_="wide"))


def _failures(status: api.Status) -> Markup:
    if not status.failures:
        return Markup("")
    rows = [(str(f.attempt), f"{f.time:%H:%M:%S}", f.message, f.failure_class, f.node) for f in status.failures]
    parts = [_table("The last failures", ["attempt", "time (UTC)", "who and what", "class", "node"], rows)]
    if (last := status.last_failure) is not None and (last.exception or last.log_tail):
        who = f"node {last.node_rank}" if last.rank is None else f"rank {last.rank} on node {last.node_rank}"
        parts.append(_element("h3", f"The last one: {who}, attempt {last.attempt}"))
        parts.append(_element("p", last.exception, class_="mono"))
        parts.append(_element("pre", last.log_tail, tabindex=0))
    return _section("Failures", *parts)


def _logs(run: runs.Run) -> Markup:
    paths = [path for nodes in run.logs().values() for of_node in nodes.values() for path in of_node]
    links = [_element("a", path.name, href=path.absolute().as_uri()) for path in paths[-LOGS_MAX:]]
    items = [_element("li", link) for link in links]
    return _section("Logs", _element("ul", *items, class_="mono")) if items else Markup("")


def _kind(change: StatusChange) -> tuple[str, str]:
    if change.state == "Running":
        return ("productive", "training") if change.training else ("starting", "running, no step yet")
    kinds = {"Succeeded": "productive", "Failed": "failed", "Failing": "failed", "Restarting": "restarting"}
    kinds |= {"Pending": "starting", "Starting": "starting"}
    return kinds.get(change.state, "other"), change.state


def _table(caption: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    top = [_element("tr", *(_element("th", head, scope="col") for head in heads))] * bool(heads)
    lines = [
        _element("tr", _element("th", row[0], scope="row"), *(_element("td", cell) for cell in row[1:])) for row in rows
    ]
    return _element("div", _element("table", _element("caption", caption, class_="soft"), *top, *lines), class_="wide")


def _section(title: str, *parts: Markup) -> Markup:
    return _joined([_element("h2", title), *parts])


def _grid(steps: tuple[int, int], low: float, high: float) -> Markup:
    parts = []
    for share in (0.0, 0.5, 1.0):
        value, y = low + (high / 2 - low / 2) * 2 * share, CURVE_HEIGHT - BOTTOM - (CURVE_HEIGHT - TOP - BOTTOM) * share
        if high > low or share == 0.5:
            parts.append(_element("line", x1=LEFT, x2=CURVE_WIDTH - RIGHT, y1=f"{y:.1f}", y2=f"{y:.1f}", class_="grid"))
            label = figures.number(value)
            parts.append(_element("text", label, x=LEFT - 6, y=f"{y + 4:.1f}", text_anchor="end", class_="tick"))
        step = round(steps[0] + (steps[1] - steps[0]) * share)
        x, anchor = LEFT + (CURVE_WIDTH - LEFT - RIGHT) * share, {0.0: "start", 1.0: "end"}.get(share, "middle")
        parts.append(_element("text", f"{step:,}", x=f"{x:.1f}", y=CURVE_HEIGHT - 8, text_anchor=anchor, class_="tick"))
    return _joined(parts)


def _image(width: int, height: int, said: str, parts: Iterable[str]) -> Markup:
    inner = (_element("title", said), *parts)
    return _element("svg", *inner, viewBox=f"0 0 {width} {height}", role="img", aria_label=_printable(said))


def _ascending(points: Sequence[Point]) -> list[list[Point]]:
    runs: list[list[Point]] = []
    for point in points:
        if not runs or point.step < runs[-1][-1].step:
            runs.append([])
        runs[-1].append(point)
    return runs


def _points(points: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _printable(text: str) -> str:
    """Return text without characters that HTML cannot contain: control characters and surrogate halves."""
    return "".join(c for c in text if c in "\n\t" or (c.isprintable() and not 0xD800 <= ord(c) <= 0xDFFF))
