"""A fair share of the API server's time for each job: no job's slow requests hold up another's.

Those that wait are served namespace by namespace. Within one every second turn goes to the job that has the fewest
requests left, so that a job of one pod does not wait until a hundred larger ones have begun, and every other to the one
that has waited longest, so that none waits for ever.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial

from ddpjob_operator.kube.store import Key


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


class Shares:
    """`async with shares.turn(key)` around each request for a job."""

    def __init__(self, bounds: Bounds = Bounds()) -> None:
        self.bounds = bounds
        self._waiting: dict[str, dict[Key, collections.deque[asyncio.Future[None]]]] = {}
        self._under_way: collections.Counter[str | Key] = collections.Counter()
        """By namespace, and by job."""
        self._quick = 0
        self._quick_in: collections.Counter[str] = collections.Counter()
        """By namespace."""
        self.quiet: Callable[[str], None] = lambda _namespace: None
        """Called with a namespace that is no longer busy."""
        self._left: dict[Key, int] = {}
        """How many requests each job that waits has left."""
        self._smallest_next = True

    def busy(self, namespace: str) -> bool:
        """Whether requests for its jobs are under way; slow ones do not count, for they wait for a webhook."""
        return namespace in self._quick_in

    @contextlib.asynccontextmanager
    async def turn(self, key: Key, left: int = 0) -> AsyncIterator[None]:
        """Its body runs when it is this job's turn. left: how many requests the job has left, this one included."""
        self._left[key] = left
        await self._wait(key)
        place = Turn(partial(self._leave, key[0]), self.bounds.quick_seconds)
        try:
            yield
        finally:
            place.leave()
            self._give_back(key)

    async def _wait(self, key: Key) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key[0], {}).setdefault(key, collections.deque()).append(turn)
        self._hand_out()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave(key[0])
                self._give_back(key)
            else:
                self._forget(key, turn)
            raise

    def _hand_out(self) -> None:
        while self._quick < self.bounds.total and (key := self._next()) is not None:
            turn = self._waiting[key[0]][key][0]
            if turn.done():  # cancelled, and its task has not run since, so it takes no place
                self._forget(key, turn)
                continue
            self._waiting[key[0]][key].popleft()
            self._behind_the_others(key)
            self._quick += 1
            self._quick_in[key[0]] += 1
            self._under_way[key[0]] += 1
            self._under_way[key] += 1
            turn.set_result(None)

    def _next(self) -> Key | None:
        for namespace, jobs in self._waiting.items():
            if self._under_way[namespace] < self.bounds.of_namespace:
                may = (key for key in jobs if self._under_way[key] < self.bounds.of_job)
                key = min(may, key=self._left.__getitem__, default=None) if self._smallest_next else next(may, None)
                if key is not None:
                    self._smallest_next = not self._smallest_next
                    return key
        return None

    def _behind_the_others(self, key: Key) -> None:
        """The order of the dicts is the line: a job that was served goes to its end."""
        jobs = self._waiting.pop(key[0])
        turns = jobs.pop(key)
        if turns:
            jobs[key] = turns
        else:
            del self._left[key]
        if jobs:
            self._waiting[key[0]] = jobs

    def _forget(self, key: Key, turn: asyncio.Future[None]) -> None:
        jobs = self._waiting.get(key[0], {})
        if turn not in jobs.get(key, ()):
            return
        jobs[key].remove(turn)
        if not jobs[key]:
            del jobs[key], self._left[key]
        if not jobs:
            del self._waiting[key[0]]

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
