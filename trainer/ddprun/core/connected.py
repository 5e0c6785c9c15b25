"""The connected nodes of a job: how many may train, when enough of them are here, and which ones the next generation
gets."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ddpjob_core.members import Members
from ddprun.core.newcomers import Newcomers


class Connected:
    """The nodes whose agents are connected to the leader, by place (number of a node)."""

    def __init__(
        self,
        places: Members,
        now: float,
        *,
        least: int | None,
        spares: int,
        last_call_seconds: float,
        snooze_seconds: float,
        survivors: Collection[int],
    ) -> None:
        """Arguments: see `LeaderState`."""
        self.places = places
        self.here: set[int] = set()
        self.replacements: dict[int, int] = {}  # by node: DDPJOB_REPLACEMENT of the pod that connected last
        self.newcomers = Newcomers(snooze_seconds)
        self._spares = spares
        self.least = self.size if least is None else least
        self._sized_by = 0  # `replaced` of the grant of the pod that knows `places`; later pods know better
        self._survivors = frozenset(survivors)
        self._last_call_seconds = last_call_seconds
        self._calls = True  # True if the next start waits for more nodes than the smallest number
        self._most, self._most_since = 0, now  # highest number of connected nodes before this start, and its time

    @property
    def size(self) -> int:
        """Largest number of nodes that train."""
        return len(self.places) - self._spares

    def came(self, node: int, now: float, replacement: int, *, nodes: int, made: int, is_ready: bool) -> None:
        """Add a node. nodes: how many may take part, by its agent; 0: unknown. made: number of pods that were replaced
        before its pod was created."""
        if nodes and (made, nodes) > (self._sized_by, len(self.places)):
            self._sized_by, self.places = made, Members(range(nodes))
        self.here.add(node)
        self.replacements[node] = replacement
        self.newcomers.came(node, now, is_ready=is_ready)

    def left(self, node: int, now: float) -> None:
        """Remove a node until it connects again."""
        self.here.discard(node)
        self.newcomers.left(node, now)

    def begin_wait(self) -> None:
        """Wait for the nodes of the next start."""
        self._most = 0

    def waits_until(self, now: float, latest: float) -> float | None:
        """Return when the wait for more nodes ends; None if enough are here. latest: the end if too few are here."""
        here = len(self.here)
        if here > self._most:  # reconnects do not prolong the wait
            self._most, self._most_since = here, now
        if here < self.least:
            self._calls = True
            return latest
        if here >= self.size or not self._calls or self.here >= self._survivors > frozenset():
            return None
        return self._most_since + self._last_call_seconds

    def choose(self, leader: int, members: Iterable[int], now: float, *, is_first: bool) -> Members:
        """Return the nodes of the next generation. members: those of the last one. is_first: all import torch now;
        otherwise nodes that still import it join later, if enough others can go on at once.

        A member that connected again precedes spares that are as ready: if its pod is the same, it has its ranks' state
        in memory. A new pod that still imports torch does not displace a spare."""
        first = dict.fromkeys((leader, *members, *sorted(self.here)))  # a spare displaces no member
        chosen = [place for place in first if place in self.here]
        if not is_first:
            ready = [place for place in chosen if self.newcomers.is_ready(place)]
            rest = [place for place in chosen if place not in ready]
            chosen = ready + rest[: max(0, self.least - len(ready))]
        found = Members(sorted(chosen[: self.size], key=lambda place: (place != leader, place)))
        for place in found:
            self.newcomers.ready(place, now)
        self._calls = False
        return found
