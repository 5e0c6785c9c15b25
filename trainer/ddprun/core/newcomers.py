"""Decide when nodes that connect while a generation is running may join it, which stops all ranks once.

A node joins after a snooze. The snooze doubles each time that the node leaves within ten minutes, up to ten minutes. So
a node that comes and goes interrupts the training less and less often.
"""

from __future__ import annotations

from collections.abc import Iterable

STABLE_SECONDS = 600.0  # a node that stays so long may join, however often it has left before


class Newcomers:
    """When each place connected, and how often it has left."""

    def __init__(self, snooze_seconds: float) -> None:
        self._snooze_seconds = snooze_seconds
        self._joins_at: dict[int, float] = {}
        self._left: dict[int, tuple[float, int]] = {}  # by place: last time, and times in a row

    def came(self, place: int, now: float) -> None:
        """Take a node that connected."""
        snooze = self._snooze_seconds * 2 ** self._departures(place, now)
        self._joins_at[place] = now + min(snooze, STABLE_SECONDS)

    def left(self, place: int, now: float) -> None:
        """Take a node that is lost or leaves."""
        self._left[place] = now, self._departures(place, now) + 1

    def due_at(self, places: Iterable[int]) -> float | None:
        """Return when the first of these connected nodes may join; None if there is none."""
        return min((self._joins_at[place] for place in places), default=None)

    def _departures(self, place: int, now: float) -> int:
        """Return how often in a row this place has left."""
        at, times = self._left.get(place, (0.0, 0))
        return times if now < at + STABLE_SECONDS else 0
