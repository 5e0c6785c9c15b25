"""Keep the values of a whole run in bounded memory. A full series merges neighbours and keeps their mean, lowest and
highest value, so that a spike of one step is still visible. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

POINTS_MAX = 512


@dataclass
class Point:
    """One value, or several merged ones. step, time: of the last value; time in seconds since the run's start."""

    step: int
    time: float
    mean: float
    low: float
    high: float
    count: int = 1

    def merged(self, later: Point) -> Point:
        count = self.count + later.count
        mean = self.mean + (later.mean - self.mean) * (later.count / count)
        return Point(later.step, later.time, mean, min(self.low, later.low), max(self.high, later.high), count)


@dataclass
class Series:
    """The values of one name, in order of arrival; at most `POINTS_MAX` points."""

    points: list[Point] = field(default_factory=list)
    per_point: int = 1
    """Values per point; doubles whenever the series is full."""

    def add(self, step: int, time: float, value: float) -> None:
        if not math.isfinite(value):
            return
        new = Point(step, time, value, value, value)
        last = self.points[-1] if self.points else None
        # A lower step means a restart. Values before and after it are not merged, because their steps overlap.
        if last is not None and last.count < self.per_point and step >= last.step:
            self.points[-1] = last.merged(new)
            return
        if len(self.points) == POINTS_MAX:
            pairs = zip(self.points[::2], self.points[1::2], strict=True)
            self.points = [first.merged(second) for first, second in pairs]
            self.per_point *= 2
        self.points.append(new)
