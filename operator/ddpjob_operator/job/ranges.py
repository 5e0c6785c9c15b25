"""Sets of numbers as text, 0-5,8: as batch/v1 Job writes its completedIndexes."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from ddpjob_operator.job import bounds

_KEPT_LENGTH_MAX = 16


def text(numbers: Iterable[int]) -> str:
    """0-5,8: as batch/v1 Job writes its completedIndexes."""
    spans: list[list[int]] = []
    for n in sorted(set(numbers)):
        if spans and spans[-1][1] == n - 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def parse(written: str) -> frozenset[int]:
    """The inverse of `text`; a damaged part counts as nothing, for a status may come from anywhere. So does what
    follows more numbers than there are nodes: 0-9999,0-9999, …"""
    return _of_short(written) if len(written) <= _KEPT_LENGTH_MAX else _of_long(written)


def _parsed(written: str) -> frozenset[int]:
    numbers: set[int] = set()
    left = bounds.NODES_MAX + 1
    for part in written[: bounds.RANGES_LENGTH_MAX].split(","):
        first, _, last = part.partition("-")
        span = bounds.number(first, bounds.NODES_MAX), bounds.number(last or first, bounds.NODES_MAX)
        left -= max(0, span[1] - span[0]) + 1
        if left < 0:
            break
        if -1 not in span:
            numbers.update(range(span[0], span[1] + 1))
    return frozenset(numbers)


# Kept, because each plan asks for the same two or three many times. A short text may be one span of many nodes, and a
# set of 10,000 numbers has 0.7 MB, so only a few are kept.
_of_short = functools.lru_cache(maxsize=64)(_parsed)
_of_long = functools.lru_cache(maxsize=4)(_parsed)


def for_people(node_ranks: Sequence[int]) -> str:
    """`1, 4-7` for messages."""
    return text(node_ranks).replace(",", ", ")
