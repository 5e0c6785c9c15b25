"""Values over the time of a run, in bounded memory: a job of ten million steps costs as much as one of a thousand.

Pure: a series merges neighbours once it is full, and keeps of those it has merged the mean, the lowest and the highest
value, so that a spike of one step still shows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

POINTS_MAX = 512


@dataclass
class Point:
    """Neighbouring values as one. time: seconds since the run began; step: the last of them."""

    step: int
    time: float
    mean: float
    low: float
    high: float
    count: int = 1

    def merged(self, later: Point) -> Point:
        """This one and the next as one."""
        count = self.count + later.count
        mean = self.mean + (later.mean - self.mean) * (later.count / count)
        return Point(later.step, later.time, mean, min(self.low, later.low), max(self.high, later.high), count)


@dataclass
class Series:
    """The values of one name, in the order in which they came; at most `POINTS_MAX` points."""

    points: list[Point] = field(default_factory=list)
    per_point: int = 1
    """How many values one point holds; it doubles whenever the series is full."""

    def add(self, step: int, time: float, value: float) -> None:
        """One more value; one that is no number (nan, inf) is left out."""
        if not math.isfinite(value):
            return
        new = Point(step, time, value, value, value)
        last = self.points[-1] if self.points else None
        # A lower step follows on a restart: a curve that merged the two would show a step that nobody made.
        if last is not None and last.count < self.per_point and step >= last.step:
            self.points[-1] = last.merged(new)
            return
        if len(self.points) == POINTS_MAX:
            pairs = zip(self.points[::2], self.points[1::2], strict=True)
            self.points = [first.merged(second) for first, second in pairs]
            self.per_point *= 2
        self.points.append(new)
