"""The drawings of a run's report: a curve, a timeline and a bar, as inline SVG. Pure.

Every drawing says in words what it shows, and its colours are those of the page, light or dark.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ddpjob_cli.describe import figures
from ddpjob_cli.local.kept.series import Point
from ddpjob_operator.job.wording import duration

WIDTH = 940
"""Of what is as wide as the page; one unit is about a pixel, so that all text has one size."""
CURVE_WIDTH, CURVE_HEIGHT = 460, 180
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 10, 28
LABEL = 170
ROW = 24


class Markup(str):
    """Text that is markup already, and is not escaped again."""

    __slots__ = ()


def element(name: str, *children: str, **attributes: object) -> Markup:
    """An element; whatever is not Markup is escaped. A trailing _ of an attribute's name goes, other _ become -."""
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    head = "".join(f' {key}="{html.escape(str(value))}"' for key, value in given.items())
    return Markup(f"<{name}{head}>{joined(children)}</{name}>")


def joined(children: Iterable[str]) -> Markup:
    """Children one after another; whatever is not Markup is escaped."""
    return Markup("".join(c if isinstance(c, Markup) else html.escape(_printable(c)) for c in children))


@dataclass(frozen=True)
class Segment:
    """Something that lasted. begin, end: seconds since the run began; kind: the class of its colour."""

    begin: float
    end: float
    kind: str
    text: str


def curve(name: str, points: Sequence[Point]) -> Markup:
    """Values over steps: the mean as a line, the lowest and the highest as a band; a restart begins a new line."""
    steps = (min(p.step for p in points), max(p.step for p in points))
    low, high = min(p.low for p in points), max(p.high for p in points)

    def x(step: int) -> float:
        return LEFT + (CURVE_WIDTH - LEFT - RIGHT) * (step - steps[0]) / max(1, steps[1] - steps[0])

    def y(value: float) -> float:
        # Each divided by itself first: the difference of two huge values has no number.
        share = 0.5 if high == low else (value / 2 - low / 2) / (high / 2 - low / 2)
        return CURVE_HEIGHT - BOTTOM - (CURVE_HEIGHT - TOP - BOTTOM) * share

    parts = [_grid(steps, low, high)]
    for run in _ascending(points):
        if any(p.count > 1 for p in run):
            outline = [*((x(p.step), y(p.high)) for p in run), *((x(p.step), y(p.low)) for p in reversed(run))]
            parts.append(element("polygon", points=_coordinates(outline), class_="band"))
        parts.append(element("polyline", points=_coordinates([(x(p.step), y(p.mean)) for p in run]), class_="line"))
        if run[0] is not points[0]:
            at = f"{x(run[0].step):.1f}"
            parts.append(element("line", x1=at, x2=at, y1=TOP, y2=CURVE_HEIGHT - BOTTOM, class_="restart"))
    said = f"from {figures.number(points[0].mean)} to {figures.number(points[-1].mean)}, steps {steps[0]} to {steps[1]}"
    return _image(CURVE_WIDTH, CURVE_HEIGHT, f"{name}: {said}", parts)


def timeline(rows: Sequence[tuple[str, Sequence[Segment]]], seconds: float) -> Markup:
    """A row for each life of the ranks, over the seconds of the run."""
    height = ROW * len(rows) + BOTTOM

    def x(at: float) -> float:
        return LABEL + (WIDTH - LABEL - RIGHT) * min(1.0, max(0.0, at / max(1.0, seconds)))

    parts = []
    for i, (label, segments) in enumerate(rows):
        parts.append(element("text", label, x=0, y=ROW * i + 16))
        for s in segments:
            width = max(1.0, x(s.end) - x(s.begin))
            where = {"x": f"{x(s.begin):.1f}", "y": ROW * i + 3, "width": f"{width:.1f}", "height": ROW - 6}
            said = f"{s.text}, {duration(s.end - s.begin)}"
            parts.append(element("rect", element("title", said), class_=s.kind, **where))
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        at = f"{x(share * seconds):.1f}"
        parts.append(element("text", duration(share * seconds), x=at, y=height - 8, text_anchor=anchor, class_="tick"))
    return _image(
        WIDTH, height, f"Timeline of {len(rows)} rows over {duration(seconds)}; the table below has it", parts
    )


def bar(shares: Sequence[tuple[str, str, float]]) -> Markup:
    """Shares of a whole side by side: (class, name, amount)."""
    total = sum(amount for _, _, amount in shares) or 1.0
    parts, at = [], 0.0
    for kind, name, amount in shares:
        width = WIDTH * amount / total
        said = element("title", f"{name}, {amount / total:.0%}")
        parts.append(element("rect", said, x=f"{at:.1f}", y=0, width=f"{width:.1f}", height=ROW, class_=kind))
        at += width
    return _image(WIDTH, ROW, "; ".join(f"{name} {amount / total:.0%}" for _, name, amount in shares), parts)


def _grid(steps: tuple[int, int], low: float, high: float) -> Markup:
    parts = []
    for share in (0.0, 0.5, 1.0):
        value, y = low + (high / 2 - low / 2) * 2 * share, CURVE_HEIGHT - BOTTOM - (CURVE_HEIGHT - TOP - BOTTOM) * share
        if high > low or share == 0.5:
            parts.append(element("line", x1=LEFT, x2=CURVE_WIDTH - RIGHT, y1=f"{y:.1f}", y2=f"{y:.1f}", class_="grid"))
            label = figures.number(value)
            parts.append(element("text", label, x=LEFT - 6, y=f"{y + 4:.1f}", text_anchor="end", class_="tick"))
        step = round(steps[0] + (steps[1] - steps[0]) * share)
        x, anchor = LEFT + (CURVE_WIDTH - LEFT - RIGHT) * share, {0.0: "start", 1.0: "end"}.get(share, "middle")
        parts.append(element("text", f"{step:,}", x=f"{x:.1f}", y=CURVE_HEIGHT - 8, text_anchor=anchor, class_="tick"))
    return joined(parts)


def _image(width: int, height: int, said: str, parts: Iterable[str]) -> Markup:
    inner = (element("title", said), *parts)
    return element("svg", *inner, viewBox=f"0 0 {width} {height}", role="img", aria_label=_printable(said))


def _ascending(points: Sequence[Point]) -> list[list[Point]]:
    runs: list[list[Point]] = []
    for point in points:
        if not runs or point.step < runs[-1][-1].step:
            runs.append([])
        runs[-1].append(point)
    return runs


def _coordinates(points: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _printable(text: str) -> str:
    """Without what HTML cannot hold: control characters, and halves of surrogate pairs."""
    return "".join(c for c in text if c in "\n\t" or (c.isprintable() and not 0xD800 <= ord(c) <= 0xDFFF))
