"""Which faults happen at which points. Each fault can be left out alone, which is how a failing seed shrinks. A *point*
is a place that the program passes repeatedly ("write", "watch.pods"); its n-th pass is "write#n". A fault depends only
on the seed, the point and n, so leaving out one fault does not move the others."""

from __future__ import annotations

import collections
import random
from collections.abc import Iterable, Mapping

# Possible faults by point. crash: the operator's process ends, and is restarted later.
POINTS: dict[str, tuple[str, ...]] = {
    "write": ("crash before", "crash after", "lost answer", "not carried out", "error", "throttled", "touched", "slow",
              "slow answer"),
    "read": ("crash before", "not carried out", "error", "slow"),
    "list": ("stale",),
    "watch.pods": ("late", "broken", "error", "gone", "twice"),
    "watch.services": ("late", "broken", "error", "gone", "twice"),
    "watch.ddpjobs": ("late", "broken", "error", "gone", "twice"),
    "watch.nodes": ("late", "broken", "error", "gone", "twice"),
    "watch.podgroups": ("late", "broken", "error", "gone", "twice"),
    "watch.workloads": ("late", "broken", "error", "gone", "twice"),
    "watch.leases": ("late", "broken", "error", "gone", "twice"),
    "kubelet": ("slow", "cannot start"),
    "exit": ("phase later",),
    "sigterm": ("ignored", "ends with 0", "resumable"),
    "scheduler": ("slow", "no room"),
    "collector": ("slow",),
    "peers": ("hang",),
    "post": ("lost", "late", "lost answer"),
    "ask": ("lost", "late"),
    "watchdog": ("blind",),
    "rescue": ("dies", "slow"),
}  # fmt: skip
# Fault points that each pod passes a few times. The others are passed with every message between two machines.
SELDOM = frozenset(("kubelet", "exit", "sigterm", "scheduler", "collector", "peers", "post", "watchdog", "rescue"))
# Points that occur only under ddprun, with gangs, with queues, or when ranks write their state into memory.
AGENTS = ("post", "watchdog")
ELASTIC_AGENTS = ("ask",)
GANGS = ("watch.podgroups",)
QUEUES = ("watch.workloads",)
MEMORY = ("rescue",)
Rates = Mapping[str, Mapping[str, float]]


class Faults:
    """The faults of one run. only: the faults that may happen, such as `taken` of another run."""

    def __init__(self, seed: int, rates: Rates, only: Mapping[str, str] | None = None) -> None:
        self.seed = seed
        self.stopped = False
        self.taken: dict[str, str] = {}
        self._only = only
        self._count: collections.Counter[str] = collections.Counter()
        self._tables = {point: _table(table) for point, table in rates.items() if table}
        self._streams = {point: random.Random(f"{seed} {point}") for point in self._tables}

    def at(self, point: str) -> str:
        """Return the fault at this pass of the point; "" if there is none."""
        number = self._count[point]
        self._count[point] = number + 1
        if self.stopped:
            return ""
        if self._only is not None:
            found = self._only.get(f"{point}#{number}", "")
        elif point in self._tables:
            drawn = self._streams[point].random()
            found = next((fault for fault, up_to in self._tables[point] if drawn < up_to), "")
        else:
            return ""
        if found:
            self.taken[f"{point}#{number}"] = found
        return found

    def happens(self, key: str, what: str) -> bool:
        """Return False if shrinking has left out this planned fault; otherwise True."""
        if self._only is not None and key not in self._only:
            return False
        self.taken[key] = what
        return True

    def passed(self, point: str) -> int:
        """Return how often a point was passed."""
        return self._count[point]

    def number(self, point: str, low: float, high: float) -> float:
        """Return a random number for the latest pass of a point."""
        return random.Random(f"{self.seed} {point}#{self._count[point]}").uniform(low, high)


def swarm(rng: random.Random) -> dict[str, dict[str, float]]:
    """Return a random subset of all faults at random rates. A few frequent kinds find what many rare ones miss."""
    return _some(rng, [point for point in POINTS if point not in (*AGENTS, *ELASTIC_AGENTS, *GANGS, *QUEUES, *MEMORY)])


def swarm_of_agents(rng: random.Random) -> dict[str, dict[str, float]]:
    """Return a random subset of the faults at points that only agents pass, at random rates."""
    return _some(rng, AGENTS)


def swarm_of_elastic_agents(rng: random.Random) -> dict[str, dict[str, float]]:
    """Return a random subset of the faults of requests for the leader, at random rates."""
    return _some(rng, ELASTIC_AGENTS)


def swarm_of_gangs(rng: random.Random) -> dict[str, dict[str, float]]:
    """Return a random subset of the faults of PodGroups, at random rates."""
    return _some(rng, GANGS)


def swarm_of_queues(rng: random.Random) -> dict[str, dict[str, float]]:
    """Return a random subset of the faults of Workloads, at random rates."""
    return _some(rng, QUEUES)


def swarm_of_memory(rng: random.Random) -> dict[str, dict[str, float]]:
    """Return a random subset of the faults while a state is written into memory, at random rates."""
    return _some(rng, MEMORY)


def _some(rng: random.Random, points: Iterable[str]) -> dict[str, dict[str, float]]:
    share = rng.choice((0.0, 0.1, 0.25, 0.5))
    return {p: {fault: _rate(rng, p) for fault in POINTS[p] if rng.random() < share} for p in points}


def _rate(rng: random.Random, point: str) -> float:
    return float(10 ** (rng.uniform(-1.2, -0.2) if point in SELDOM else rng.uniform(-2.5, -0.7)))


def _table(rates: Mapping[str, float]) -> list[tuple[str, float]]:
    table, total = [], 0.0
    for fault, rate in rates.items():
        total += rate
        table.append((fault, total))
    return table
