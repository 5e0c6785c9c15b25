"""A fair share of the API server's time for each job: no job's slow requests hold up another's.

Those that wait are served namespace by namespace. Within one, first pods, restarts, and all further pods are lines of
their own that take turns, and in each line the jobs do: so a new job has its first pod soon amid hundreds that have
begun, a restart does not wait behind a flood of new jobs, and no line waits for ever.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial

from ddpjob_operator.kube.store import Key


class Line(Enum):
    """What a request is for."""

    FIRST = auto()
    """The first pod of a new job: its Service, its group, the pod."""
    AGAIN = auto()
    """A pod of a job that had others before."""
    MORE = auto()
    """All else."""


# The lines of a namespace in turn; those that nobody waits in are left out. Two of four for first pods, as each takes
# two, and further ones in between: where nothing else holds back half of a group, jobs must also become whole.
# Every second first pod is of the smallest job, so that one of a single pod does not wait until hundreds of larger ones
# have begun; all others are of the job that has waited longest.
TURNS = ((Line.FIRST, True), (Line.AGAIN, False), (Line.FIRST, False), (Line.MORE, False))


@dataclass(frozen=True)
class Bounds:
    """How many requests may be under way at a time."""

    total: int = 32
    """Of all jobs, those that are slow not counted: the API server refuses none for so many, as its default share
    for one service account is some tens."""
    of_namespace: int = 16
    """Slow ones too. A webhook acts on a whole namespace: what slows one job down slows down its neighbours."""
    of_job: int = 8
    """Enough for a job of eight nodes in one round trip."""
    quick_seconds: float = 1.0
    """What has been under way for longer waits for a webhook and not for the API server: it leaves its place among
    `total` to the others, else a few namespaces with slow webhooks would take all of it."""


class Turn:
    """A turn among a few, given back once: when it is left, or by itself when it was held for long."""

    def __init__(self, give_back: Callable[[], None], seconds: float) -> None:
        self._give_back: Callable[[], None] | None = give_back
        self._timer = asyncio.get_running_loop().call_later(seconds, self.leave)

    def leave(self) -> None:
        """Nothing where it was given back already."""
        self._timer.cancel()
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()


@dataclass(eq=False)
class _Job:
    """The requests of a job in one line."""

    size: int = 0
    turns: collections.deque[asyncio.Future[None]] = field(default_factory=collections.deque)


class _Waiting:
    """The requests of a namespace that wait."""

    def __init__(self) -> None:
        self.lines: dict[Line, dict[Key, _Job]] = {}
        """The order of the jobs in a line is the line."""
        self._turn = 0

    def next(self, may: Callable[[Key], bool]) -> tuple[Line, Key] | None:
        """Whose turn it is among those that may have one."""
        for turn in range(self._turn, self._turn + len(TURNS)):
            line, smallest = TURNS[turn % len(TURNS)]
            jobs = self.lines.get(line, {})
            those = filter(may, jobs)
            key = _smallest(those, jobs) if smallest else next(those, None)
            if key is not None:
                self._turn = turn + 1
                return line, key
        return None

    def first(self, line: Line, key: Key) -> asyncio.Future[None]:
        """The first request of a job."""
        return self.lines[line][key].turns[0]

    def add(self, line: Line, key: Key, size: int, turn: asyncio.Future[None]) -> None:
        """At the end of the line, or behind the others of its job."""
        job = self.lines.setdefault(line, {}).setdefault(key, _Job())
        job.size = size
        job.turns.append(turn)

    def serve(self, line: Line, key: Key) -> None:
        """Its first request has its turn: the others go to the end of the line."""
        self.lines[line][key].turns.popleft()
        job = self.lines[line].pop(key)
        if job.turns:
            self.lines[line][key] = job
        self._tidy(line)

    def forget(self, line: Line, key: Key, turn: asyncio.Future[None]) -> None:
        """It waits no more."""
        job = self.lines.get(line, {}).get(key)
        if job is None or turn not in job.turns:
            return
        job.turns.remove(turn)
        if not job.turns:
            del self.lines[line][key]
        self._tidy(line)

    def _tidy(self, line: Line) -> None:
        if not self.lines[line]:
            del self.lines[line]


def _smallest(those: Iterator[Key], jobs: Mapping[Key, _Job]) -> Key | None:
    return min(those, key=lambda key: jobs[key].size, default=None)


class Shares:
    """`async with shares.turn(key)` around each request for a job."""

    def __init__(self, bounds: Bounds = Bounds()) -> None:
        self.bounds = bounds
        self._waiting: dict[str, _Waiting] = {}
        """By namespace; the one that was served last is at the end."""
        self._under_way: collections.Counter[str | Key] = collections.Counter()
        """By namespace, and by job."""
        self._quick = 0
        self._quick_in: collections.Counter[str] = collections.Counter()
        """By namespace."""
        self.quiet: Callable[[str], None] = lambda _namespace: None
        """Called with a namespace that is no longer busy."""
        self.more_to_come: Callable[[str], bool] = lambda _namespace: False
        """Whether jobs of a namespace ask for turns as soon as others are done; each is planned before that."""

    def busy(self, namespace: str) -> bool:
        """Whether requests for its jobs are under way, or come as soon as there is room; slow ones do not count, for
        they wait for a webhook."""
        if namespace in self._quick_in:
            return True
        return self._under_way[namespace] < self.bounds.of_namespace and self.more_to_come(namespace)

    @contextlib.asynccontextmanager
    async def turn(self, key: Key, line: Line = Line.MORE, size: int = 0) -> AsyncIterator[None]:
        """Its body runs when it is this job's turn. size: how many pods the job has to make, for those in FIRST."""
        await self._wait(key, line, size)
        place = Turn(partial(self._leave, key[0]), self.bounds.quick_seconds)
        try:
            yield
        finally:
            self._give_back(key)
            place.leave()

    async def _wait(self, key: Key, line: Line, size: int) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key[0], _Waiting()).add(line, key, size, turn)
        self._hand_out()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give_back(key)
                self._leave(key[0])
            elif key[0] in self._waiting:
                self._waiting[key[0]].forget(line, key, turn)
                self._tidy(key[0])
            raise

    def _hand_out(self) -> None:
        while self._quick < self.bounds.total and (found := self._next()) is not None:
            namespace, line, key = found
            waiting = self._waiting[namespace]
            turn = waiting.first(line, key)
            if turn.done():  # cancelled, and its task has not run since, so it takes no place
                waiting.forget(line, key, turn)
                self._tidy(namespace)
                continue
            waiting.serve(line, key)
            self._waiting[namespace] = self._waiting.pop(namespace)
            self._tidy(namespace)
            self._quick += 1
            self._quick_in[namespace] += 1
            self._under_way[namespace] += 1
            self._under_way[key] += 1
            turn.set_result(None)

    def _next(self) -> tuple[str, Line, Key] | None:
        for namespace, waiting in self._waiting.items():
            if self._under_way[namespace] < self.bounds.of_namespace and (found := waiting.next(self._may)):
                return namespace, *found
        return None

    def _may(self, key: Key) -> bool:
        return self._under_way[key] < self.bounds.of_job

    def _tidy(self, namespace: str) -> None:
        if not self._waiting[namespace].lines:
            del self._waiting[namespace]

    def _give_back(self, key: Key) -> None:
        for of in (key[0], key):
            self._under_way[of] -= 1
            if not self._under_way[of]:
                del self._under_way[of]
        self._hand_out()

    def _leave(self, namespace: str) -> None:
        self._quick -= 1
        self._quick_in[namespace] -= 1
        if not self._quick_in[namespace]:
            del self._quick_in[namespace]
        self._hand_out()
        if not self.busy(namespace):
            self.quiet(namespace)
