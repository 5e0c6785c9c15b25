"""Format numbers for people: metrics, bytes, the time of a step, a curve in one line, and columns."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

_BLOCKS = "▁▂▃▄▅▆▇█"
_UNITS = ("B", "KB", "MB", "GB", "TB")


def metric(text: str) -> str:
    """Return a shorter number: 0.484 for 0.48397613525390626. A text without a fraction is returned unchanged."""
    if "." not in text:
        return text
    try:
        value = float(text)
    except ValueError:
        return text
    return number(value) if math.isfinite(value) else text


def number(value: float) -> str:
    """Return three significant digits, or more if three would round to a whole number, as for 0.9996."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    for digits in (3, 4, 5, 6):
        text = f"{value:.{digits}g}"
        if float(text) != round(float(text)):
            return text
    return text


def size(count: float) -> str:
    """Return a size with a unit, for example 1.2 GB or 350 MB. Units are powers of 1000."""
    unit = 0
    while count >= 1000 and unit < len(_UNITS) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:.1f} {_UNITS[unit]}" if count < 10 and unit else f"{count:.0f} {_UNITS[unit]}"


def step_time(seconds: float) -> str:
    """Return the time of a step, for example 4 ms/step or 2.1 s/step."""
    return f"{1000 * seconds:.3g} ms/step" if seconds < 1 else f"{seconds:.3g} s/step"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows with aligned cells, three spaces apart as in kubectl."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["   ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def spark(values: Sequence[float], width: int) -> str:
    """Return a curve of at most `width` block characters, scaled from lowest to highest; "" for under two values."""
    if len(values) < 2 or width < 2:
        return ""
    count = min(width, len(values))
    bounds = [round(i * len(values) / count) for i in range(count + 1)]
    means = [math.fsum(values[a:b]) / (b - a) for a, b in itertools.pairwise(bounds)]
    low, high = min(means), max(means)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((value - low) * scale)] for value in means)
