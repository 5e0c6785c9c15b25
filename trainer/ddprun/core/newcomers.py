"""Decide when nodes that connect while a generation is running may join it, which stops all ranks once.

A node joins after a snooze. The snooze doubles each time that the node leaves within ten minutes, up to ten minutes. So
a node that comes and goes interrupts the training less and less often.
"""

from __future__ import annotations

from collections.abc import Iterable

STABLE_SECONDS = 600.0  # seconds after which a departure is forgotten; also the longest snooze
IMPORT_SECONDS = 10.0  # nodes that came together import torch for seconds, and should stop the others only once


class Newcomers:
    """The time when each node may join, by place (number of a node), and how often the node has left."""

    def __init__(self, snooze_seconds: float) -> None:
        self._snooze_seconds = snooze_seconds
        self._snoozes: dict[int, float] = {}
        self._joins_at: dict[int, float] = {}
        self._left: dict[int, tuple[float, int]] = {}  # by place: time of the last departure, departures in a row

    def came(self, place: int, now: float, *, is_ready: bool) -> None:
        """Set the snooze of a node that connected. is_ready: its ranks would start at once; then the snooze begins."""
        self._snoozes[place] = min(self._snooze_seconds * 2 ** self._departures(place, now), STABLE_SECONDS)
        self._joins_at.pop(place, None)
        if is_ready:
            self.ready(place, now)

    def ready(self, place: int, now: float) -> None:
        """Begin the snooze. Until then the node imports what its ranks need, and all ranks would wait for that."""
        self._joins_at.setdefault(place, now + self._snoozes[place])

    def is_ready(self, place: int) -> bool:
        """True if the ranks of this connected node would start at once."""
        return place in self._joins_at

    def left(self, place: int, now: float) -> None:
        """Record that a node is lost or leaves, so its next snooze is longer."""
        self._left[place] = now, self._departures(place, now) + 1

    def due_at(self, places: Iterable[int]) -> float | None:
        """Return when the first of these connected nodes may join; None if none is ready.

        All connected nodes start together, so the first ones wait IMPORT_SECONDS for nodes that are not ready.
        """
        times = [self._joins_at.get(place) for place in places]
        first = min((at for at in times if at is not None), default=None)
        return first + IMPORT_SECONDS if first is not None and None in times else first

    def joins_in(self, place: int, now: float) -> float:
        """Return how many seconds this connected node must be ready before it may join."""
        return self._joins_at.get(place, now + self._snoozes[place]) - now

    def _departures(self, place: int, now: float) -> int:
        """Return how often this node has left, each time within ten minutes of the time before."""
        at, times = self._left.get(place, (0.0, 0))
        return times if now < at + STABLE_SECONDS else 0
