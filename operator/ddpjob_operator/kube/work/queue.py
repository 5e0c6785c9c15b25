"""Which job is reconciled next. One reconcile at a time per job; many requests become one; failures back off.

A request is a time and a priority. When the time has come the key is due, and waits for its turn:

- Namespaces take turns, so that the 500 jobs of one hold up none of another.
- In a namespace kinds of keys take turns (`kind`): jobs that have begun, and new jobs by their size. So a restart waits
  for no new jobs, and a job of one pod for none of a thousand.
- Behind all of these come jobs that go on to create their pods, and behind them what only says that all goes well
  (`Priority`). Each of the two has one turn in TURNS at least, so that a large job becomes whole however many new ones
  there are.

A reconcile that takes long leaves its place to others, up to a limit for each namespace.

`Schedule` decides and has no clock; `Queue` runs it with one. Of two requests for a key the earlier one wins, and of
those that are due the one with the higher priority.
"""

from __future__ import annotations

import asyncio
import collections
import heapq
import itertools
from collections.abc import Awaitable, Callable, Hashable, Mapping
from enum import IntEnum
from typing import Generic, TypeVar

from ddpjob_operator.kube.api.in_flight import Turn
from ddpjob_operator.kube.api.limit import at_most
from ddpjob_operator.kube.api.runtime import Runtime

K = TypeVar("K", bound=Hashable)
BACK_OFF_SECONDS_FIRST, BACK_OFF_SECONDS_MAX = 0.5, 60.0
# At a time, slow ones too: twice as many as may have a create in flight (in_flight.py), because others write a status
# meanwhile. With more of them an event would wait behind too many others.
OF_NAMESPACE_MAX = 32
# A reconcile that takes longer waits for one request, and the others need not wait with it.
QUICK_SECONDS = 0.1
# Of so many turns of a namespace each priority has one, however many keys of the higher ones are due. With fewer the
# further pods of others would delay a job's first one.
TURNS = 8
# Of so many times that no longer hold none is dropped before its own time.
OUTDATED_MIN = 64


class Priority(IntEnum):
    """What a reconcile is for; the lower number goes first."""

    EVENT = 0
    """A new job, a failure, an edit: whatever is not one of the others."""
    FURTHER_PODS = 1
    """The job has more pods to create, or more to do."""
    NEWS = 2
    """Pods run, or training makes progress: a status is written, which costs the API server as much as two pods."""


_Request = tuple[float, int, K, Priority]
"""When, a number that breaks ties, the key, and what for."""


class Watcher:
    """What a queue tells of itself; this one takes no notice."""

    def added(self) -> None:
        """A key was requested."""

    def waited(self, seconds: float) -> None:
        """A key has its turn, so long after it was due."""

    def worked(self, seconds: float, result: str) -> None:
        """The work on a key is over: success, requeue (at once), requeue_after (a time) or error."""


class _Due(Generic[K]):
    """What is due in one namespace."""

    def __init__(self) -> None:
        self.kinds: dict[int, list[_Request[K]]] = {}
        """A heap of each kind; the kind that was served last is at the end. Priorities other than EVENT have one kind
        each, their negative number."""
        self._turns = 0

    def push(self, kind: int, request: _Request[K]) -> None:
        heapq.heappush(self.kinds.setdefault(kind, []), request)

    def in_turn(self) -> list[int]:
        """The kinds, that whose turn it is first."""
        kinds = [kind for kind in self.kinds if kind >= 0]
        kinds += [kind for kind in (-Priority.FURTHER_PODS, -Priority.NEWS) if kind in self.kinds]
        turn = -(self._turns % TURNS)
        return sorted(kinds, key=lambda kind: kind != turn) if turn < 0 else kinds

    def served(self, kind: int) -> None:
        """Move a kind to the end."""
        self.kinds[kind] = self.kinds.pop(kind)
        self._turns += 1


class Schedule(Generic[K]):
    """Times in seconds of any one clock."""

    def __init__(self, *, of_namespace: int = OF_NAMESPACE_MAX, kind: Callable[[K], int] = lambda _key: 0) -> None:
        """kind: not negative."""
        self._of_namespace = of_namespace
        self._kind = kind
        self._requests: dict[Priority, dict[K, float]] = {priority: {} for priority in Priority}
        """When a key was requested for. A request is dropped if one of a higher or equal priority is as early."""
        self._later: list[_Request[K]] = []
        """A heap of what is not due, some of it out of date: an earlier request has taken its place."""
        self._due: dict[Hashable, _Due[K]] = {}
        """By namespace; the one that was served last is at the end."""
        self._order = itertools.count()
        self._busy: dict[K, float] = {}
        self._busy_in: collections.Counter[Hashable] = collections.Counter()
        self._again: dict[K, Priority] = {}
        """The keys that have become due while they were busy."""
        self._failures: dict[K, int] = {}
        self._not_before: dict[K, float] = {}
        self.waited = 0.0
        """How long the key that was popped last has been due."""

    def add(self, key: K, at: float, priority: Priority = Priority.EVENT) -> None:
        """Reconcile `key` at `at`, or earlier if that was requested before; never before its back-off ends."""
        at = max(at, self._not_before.get(key, at))
        for other, requests in self._requests.items():
            known = requests.get(key)
            if known is not None and other <= priority and known <= at:
                return
            if known is not None and other >= priority and known >= at:
                del requests[key]
        self._requests[priority][key] = at
        heapq.heappush(self._later, (at, next(self._order), key, priority))
        if len(self._later) > 2 * len(self) + OUTDATED_MIN:
            # A job whose deadline is in a week leaves one behind at each reconcile, of which it has 8,000 a day.
            self._later = [request for request in self._later if self._holds(request)]
            heapq.heapify(self._later)

    def pop(self, now: float) -> K | None:
        """The key whose turn it is, which is busy from now on; None: no key may be reconciled now."""
        self._take_due(now)
        for namespace in list(self._due):
            if self._busy_in[namespace] < self._of_namespace:
                for kind in self._due[namespace].in_turn():
                    if (key := self._pop_of(namespace, kind, now)) is not None:
                        return key
        return None

    def _take_due(self, now: float) -> None:
        """Only namespaces in which something is due are looked at in turn: there may be a thousand others."""
        while (top := self._top(self._later)) is not None and top[0] <= now:
            heapq.heappop(self._later)
            _, _, key, priority = top
            due = self._due.setdefault(_namespace(key), _Due())
            due.push(-priority or self._kind(key), top)

    def _pop_of(self, namespace: Hashable, kind: int, now: float) -> K | None:
        due = self._due[namespace]
        heap = due.kinds[kind]
        while (top := self._top(heap)) is not None:
            heapq.heappop(heap)
            at, _, key, priority = top
            for requests in self._requests.values():
                requests.pop(key, None)
            if key in self._busy:
                self._again[key] = min(priority, self._again.get(key, priority))
                continue
            self.waited = now - at
            self._busy[key] = now
            self._busy_in[namespace] += 1
            due.served(kind)
            self._due[namespace] = self._due.pop(namespace)
            return key
        del due.kinds[kind]
        if not due.kinds:
            del self._due[namespace]
        return None

    def progressed(self, key: K, now: float) -> None:
        """The reconcile of `key` has got an answer: it is not stuck, however long it takes."""
        if key in self._busy:
            self._busy[key] = now

    def observed(self, key: K, now: float) -> None:
        """The reconcile of `key` reads the state of now: what was requested until now needs no other one."""
        self._again.pop(key, None)
        for requests in self._requests.values():
            if requests.get(key, float("inf")) <= now:
                del requests[key]

    def done(self, key: K, now: float, again_at: float | None = None) -> None:
        """The reconcile has succeeded. What was requested meanwhile is due now. again_at: not later than now: it has
        more to do, with the priority FURTHER_PODS."""
        self._failures.pop(key, None)
        self._not_before.pop(key, None)
        self._release(key, now, again_at)

    def failed(self, key: K, now: float, at_least: float = 0.0) -> float:
        """The reconcile has failed; the seconds until the next. at_least: what the server asked for, or a proxy before
        it: an hour of maintenance may be over in a minute."""
        count = self._failures[key] = self._failures.get(key, 0) + 1
        wait = min(BACK_OFF_SECONDS_MAX, max(at_least, back_off(count)))
        self._not_before[key] = now + wait
        self._release(key, now, now + wait)
        return wait

    def failures(self, key: K) -> int:
        """How often in a row `key` has failed."""
        return self._failures.get(key, 0)

    def next_at(self) -> float | None:
        """When the next key that may be reconciled is due; None: none is waiting."""
        free = (due for name, due in self._due.items() if self._busy_in[name] < self._of_namespace)
        heaps = (self._later, *(heap for due in free for heap in due.kinds.values()))
        tops = [top for heap in heaps if (top := self._top(heap))]
        return min(tops)[0] if tops else None

    def stuck_seconds(self, now: float) -> float:
        """How long the longest reconcile has been waiting for an answer."""
        return max((now - since for since in self._busy.values()), default=0.0)

    def unfinished_seconds(self, now: float) -> float:
        """How long all reconciles that are under way have been waiting for an answer, together."""
        return sum(now - since for since in self._busy.values())

    def due(self, now: float) -> tuple[int, float]:
        """How many keys are due and wait for their turn, and for how long the oldest of them has been due."""
        times = {key: at for requests in self._requests.values() for key, at in requests.items() if at <= now}
        return len(times), max((now - at for at in times.values()), default=0.0)

    @property
    def working(self) -> int:
        """How many keys are busy."""
        return len(self._busy)

    def __len__(self) -> int:
        return sum(map(len, self._requests.values()))

    def _holds(self, request: _Request[K]) -> bool:
        """False: an earlier request has taken its place, or the key has had its turn."""
        at, _, key, priority = request
        return self._requests[priority].get(key) == at

    def _top(self, heap: list[_Request[K]]) -> _Request[K] | None:
        while heap and not self._holds(heap[0]):
            heapq.heappop(heap)
        return heap[0] if heap else None

    def _release(self, key: K, now: float, again_at: float | None) -> None:
        if self._busy.pop(key, None) is not None:
            namespace = _namespace(key)
            self._busy_in[namespace] -= 1
            if not self._busy_in[namespace]:
                del self._busy_in[namespace]
        if (priority := self._again.pop(key, None)) is not None:
            self.add(key, now, priority)
        if again_at is not None:
            self.add(key, again_at, Priority.FURTHER_PODS if again_at <= now else Priority.EVENT)


def back_off(times: int) -> float:
    """Seconds to wait after so many failures in a row."""
    # The exponent is bounded as well: 2.0 ** 1025 is an error.
    return min(BACK_OFF_SECONDS_MAX, BACK_OFF_SECONDS_FIRST * 2.0 ** min(times - 1, 10))


class RetryError(Exception):
    """Reconcile again after a back-off. The text is logged, once in a row of equal ones."""

    def __init__(self, message: str, at_least_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.at_least_seconds = at_least_seconds


class Queue(Generic[K]):
    """Runs `reconcile(key)` for keys that are due; it returns the seconds until the next time, or None."""

    def __init__(
        self,
        reconcile: Callable[[K], Awaitable[float | None]],
        runtime: Runtime,
        *,
        at_a_time: int = 32,
        of_namespace: int = OF_NAMESPACE_MAX,
        watcher: Watcher | None = None,
        about: Callable[[K], Mapping[str, object]] | None = None,
        kind: Callable[[K], int] = lambda _key: 0,
    ) -> None:
        """about: what a line of the log about a key has beside its text. kind: keys of one kind wait behind each other,
        and take turns with those of other kinds."""
        self._about = about or (lambda key: {"job": _name(key)})
        self._watcher = watcher or Watcher()
        self.schedule: Schedule[K] = Schedule(of_namespace=of_namespace, kind=kind)
        self._reconcile = reconcile
        self._clock = runtime.clock
        self._log = runtime.log
        self._free = at_a_time
        self._wake = asyncio.Event()
        self._sleeps_until = float("inf")
        """What is requested for later than this need not wake it."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._logged: dict[K, str] = {}

    def add(self, key: K, in_seconds: float = 0.0, priority: Priority = Priority.EVENT) -> None:
        """Reconcile `key` after `in_seconds`, or earlier if that was requested before."""
        self._watcher.added()
        at = self._clock() + in_seconds
        self.schedule.add(key, at, priority)
        if at < self._sleeps_until:  # a storm of pods requests the same jobs again and again
            self._wake.set()

    def stuck_seconds(self) -> float:
        """How long the longest reconcile has been waiting for an answer."""
        return self.schedule.stuck_seconds(self._clock())

    def unfinished_seconds(self) -> float:
        """How long all reconciles that are under way have been waiting for an answer, together."""
        return self.schedule.unfinished_seconds(self._clock())

    def due(self) -> tuple[int, float]:
        """How many keys wait for their turn, and for how many seconds the oldest has been due."""
        return self.schedule.due(self._clock())

    @property
    def working(self) -> int:
        """How many keys are being worked on."""
        return self.schedule.working

    def progressed(self, key: K) -> None:
        """The reconcile of `key` has got an answer."""
        self.schedule.progressed(key, self._clock())

    def observed(self, key: K) -> None:
        """The reconcile of `key` reads the state of now: what was requested until now needs no other one."""
        self.schedule.observed(key, self._clock())

    async def run(self) -> None:
        """Until cancelled; then those under way are cancelled too."""
        try:
            while True:
                self._wake.clear()
                self._start_what_is_due()
                await self._sleep()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start_what_is_due(self) -> None:
        while self._free and (key := self.schedule.pop(self._clock())) is not None:
            self._free -= 1
            self._watcher.waited(self.schedule.waited)
            task = asyncio.create_task(self._one(key))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _sleep(self) -> None:
        at = self.schedule.next_at() if self._free else None
        self._sleeps_until = float("inf") if at is None else at
        wait = None if at is None else max(0.0, at - self._clock())
        try:
            async with at_most(wait):
                await self._wake.wait()
        except asyncio.TimeoutError:
            return

    async def _one(self, key: K) -> None:
        place = Turn(self._leave, QUICK_SECONDS)
        began, result = self._clock(), "error"
        try:
            again_in = await self._reconcile(key)
        except RetryError as error:
            wait = self.schedule.failed(key, self._clock(), error.at_least_seconds)
            self._report(key, str(error), wait)
        except asyncio.CancelledError:
            self.schedule.failed(key, self._clock())  # else the key would count as busy for ever
            raise
        except Exception:
            # A bug in one reconcile must not end the others; it is logged with its stack, and backs off.
            wait = self.schedule.failed(key, self._clock())
            about = self._about(key)
            self._log.exception("%s: the reconcile failed, again in %.1f s", _name(key), wait, extra=about)
        else:
            now = self._clock()
            result = "success" if again_in is None else "requeue_after" if again_in else "requeue"
            self._logged.pop(key, None)
            self.schedule.done(key, now, None if again_in is None else now + again_in)
        finally:
            self._watcher.worked(self._clock() - began, result)
            place.leave()
            self._wake.set()

    def _leave(self) -> None:
        self._free += 1
        self._wake.set()

    def _report(self, key: K, text: str, wait: float) -> None:
        if self._logged.get(key) != text:
            self._logged[key] = text
            self._log.warning("%s: %s; again in %.1f s", _name(key), text, wait, extra=self._about(key))


def _namespace(key: Hashable) -> Hashable:
    return key[0] if isinstance(key, tuple) else ""


def _name(key: Hashable) -> str:
    """As kubectl writes it: namespace/name."""
    return "/".join(map(str, key)) if isinstance(key, tuple) else str(key)
