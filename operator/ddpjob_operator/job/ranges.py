"""Sets of numbers as text, 0-5,8: as batch/v1 Job writes its completedIndexes."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from ddpjob_operator.job import bounds

_KEPT_LENGTH_MAX = 16


def text(numbers: Iterable[int]) -> str:
    spans: list[list[int]] = []
    for n in sorted(set(numbers)):
        if spans and spans[-1][1] == n - 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def parse(written: str) -> frozenset[int]:
    """Return the numbers of a text. Skip invalid parts, and all parts after the first NODES_MAX + 1 numbers."""
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


# Cached, because each plan parses the same two or three texts many times.
# The cache is small, because a short text may stand for 10,000 nodes, whose set takes 0.7 MB.
_of_short = functools.lru_cache(maxsize=64)(_parsed)
_of_long = functools.lru_cache(maxsize=4)(_parsed)


def for_people(node_ranks: Sequence[int]) -> str:
    """Return numbers as text for messages, for example `1, 4-7`."""
    return text(node_ranks).replace(",", ", ")
