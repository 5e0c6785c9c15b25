"""Decides which job is reconciled next, and runs the reconciles.

In: requests (`add`: key, time, priority) from watches, timers and reports. Out: calls of `reconcile(key)`, at most one
at a time per key. Many requests for a key become one reconcile, and failures back off, as in client-go's workqueue.

A key that is due waits for its turn:

- Namespaces take turns, so that 500 jobs in one namespace do not delay the jobs of another.
- Within a namespace, kinds of keys take turns (`kind`): jobs that have begun, and new jobs by size. So a restart does
  not wait for new jobs, and a job of one pod does not wait for jobs of a thousand pods.
- Jobs with more pods to create come after these, and status updates without bad news come last (`Priority`). Each of
  these two gets at least one of TURNS turns. Otherwise a large job would stay incomplete while new jobs arrive.

A slow reconcile gives its place to others after QUICK_SECONDS, up to a limit per namespace.

`Schedule` decides, takes times as arguments and has no clock. `Queue` runs it with one task per reconcile. client-go's
workqueue is one FIFO; fairness costs a heap per namespace and kind here.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import heapq
import itertools
from collections.abc import Awaitable, Callable, Hashable, Mapping
from enum import IntEnum
from typing import Generic, TypeVar

from ddpjob_operator.kube.api.in_flight import Turn
from ddpjob_operator.kube.api.limit import at_most
from ddpjob_operator.kube.api.runtime import Runtime
from ddpjob_operator.metrics import names
from ddpjob_operator.metrics.meter import Meter, QueueWaits

K = TypeVar("K", bound=Hashable)
BACK_OFF_SECONDS_FIRST, BACK_OFF_SECONDS_MAX = 0.5, 60.0
# Limit of concurrent reconciles per namespace. With a higher limit, a new event would wait for more reconciles.
# The limit is twice that of pod creates (api/in_flight.py), because some reconciles only write a status.
OF_NAMESPACE_MAX = 32
# Seconds. A longer reconcile is waiting for a request, and no longer counts against the limit of running reconciles.
QUICK_SECONDS = 0.1
# Every TURNS-th turn goes to a lower priority.
# If TURNS were lower, later pods of other jobs would delay the first pod of a new job.
TURNS = 8
# Outdated requests that may stay in the heap, because their removal rebuilds the heap.
OUTDATED_MIN = 64


class Priority(IntEnum):
    """Why a key was requested; the lower number goes first."""

    EVENT = 0
    """A new job, a failure, an edit, and everything else that is not one of the two below."""
    FURTHER_PODS = 1
    """The job has more pods to create, or its last reconcile ran out of time."""
    NEWS = 2
    """Pods are running, or training makes progress. Only a status is written, which costs as much as two pods."""


_Request = tuple[float, int, K, Priority]
"""Time, a number that breaks ties, key, priority."""


class _Due(Generic[K]):
    """The due keys of one namespace."""

    def __init__(self) -> None:
        self.kinds: dict[int, list[_Request[K]]] = {}
        """One heap per kind, the kind served last at the end. The kind of FURTHER_PODS and NEWS is -priority."""
        self._turns = 0

    def push(self, kind: int, request: _Request[K]) -> None:
        heapq.heappush(self.kinds.setdefault(kind, []), request)

    def in_turn(self) -> list[int]:
        """Return the kinds in order; the next one to be served is first."""
        kinds = [kind for kind in self.kinds if kind >= 0]
        kinds += [kind for kind in (-Priority.FURTHER_PODS, -Priority.NEWS) if kind in self.kinds]
        turn = -(self._turns % TURNS)
        return sorted(kinds, key=lambda kind: kind != turn) if turn < 0 else kinds

    def served(self, kind: int) -> None:
        """Move a kind to the end, because it has had its turn."""
        self.kinds[kind] = self.kinds.pop(kind)
        self._turns += 1


class Schedule(Generic[K]):
    """Decides which key is next. Times are seconds of one clock."""

    def __init__(self, *, of_namespace: int = OF_NAMESPACE_MAX, kind: Callable[[K], int] = lambda _key: 0) -> None:
        """kind: a number that is not negative; keys of different kinds take turns."""
        self._of_namespace = of_namespace
        self._kind = kind
        self._requests: dict[Priority, dict[K, float]] = {priority: {} for priority in Priority}
        """Time per key. A request is dropped if one of the same or a higher priority is as early."""
        self._later: list[_Request[K]] = []
        """Heap of requests that are not due. Some are outdated: an earlier request replaced them."""
        self._due: dict[Hashable, _Due[K]] = {}
        """By namespace; the one served last is at the end."""
        self._order = itertools.count()
        self._busy: dict[K, float] = {}
        self._waiting: set[K] = set()
        """Busy keys that wait for their turn."""
        self._busy_in: collections.Counter[Hashable] = collections.Counter()
        self._again: dict[K, Priority] = {}
        """Keys that became due while they were being reconciled."""
        self._failures: dict[K, int] = {}
        self._not_before: dict[K, float] = {}
        self.waited = 0.0
        """Seconds that the key popped last had been due."""

    def add(self, key: K, at: float, priority: Priority = Priority.EVENT) -> None:
        """Request a reconcile at `at`. An earlier request stays, and a back-off is never shortened."""
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
            # A job with a deadline in a week leaves one outdated request per reconcile, about 8,000 a day.
            self._later = [request for request in self._later if self._holds(request)]
            heapq.heapify(self._later)

    def pop(self, now: float) -> K | None:
        """Return the next key and mark it busy; None if no key may be reconciled now."""
        while (top := self._top(self._later)) is not None and top[0] <= now:
            heapq.heappop(self._later)
            _, _, one, priority = top
            self._due.setdefault(_namespace(one), _Due()).push(-priority or self._kind(one), top)
        for namespace in list(self._due):
            if self._busy_in[namespace] < self._of_namespace:
                for kind in self._due[namespace].in_turn():
                    if (key := self._pop_of(namespace, kind, now)) is not None:
                        return key
        return None

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
        """Record that the reconcile got an answer: it does not count as stuck, however long it takes."""
        self._waiting.discard(key)
        if key in self._busy:
            self._busy[key] = now

    def waits(self, key: K) -> None:
        """Record that the reconcile waits for its turn: it does not count as stuck until it reads the job or ends."""
        self._waiting.add(key)

    def observed(self, key: K, now: float) -> None:
        """Drop the requests up to now, because the reconcile is about to read the current state."""
        self.progressed(key, now)
        self._again.pop(key, None)
        for requests in self._requests.values():
            if requests.get(key, float("inf")) <= now:
                del requests[key]

    def done(self, key: K, now: float, again_at: float | None = None) -> None:
        """End a reconcile that succeeded. A key that became due meanwhile is due now.

        again_at: time of the next reconcile. If it is not after `now`, the job has more to do (FURTHER_PODS).
        """
        self._failures.pop(key, None)
        self._not_before.pop(key, None)
        self._release(key, now, again_at)

    def failed(self, key: K, now: float, at_least: float = 0.0) -> float:
        """End a reconcile that failed. Return the seconds until the next one, at most BACK_OFF_SECONDS_MAX.

        at_least: from a Retry-After. It is bounded, because a proxy may send an hour for an outage of a minute.
        """
        count = self._failures[key] = self._failures.get(key, 0) + 1
        wait = min(BACK_OFF_SECONDS_MAX, max(at_least, back_off(count)))
        self._not_before[key] = now + wait
        self._release(key, now, now + wait)
        return wait

    def next_at(self) -> float | None:
        """Return when `pop` may next return a key; None: not before another request."""
        free = (due for name, due in self._due.items() if self._busy_in[name] < self._of_namespace)
        heaps = (self._later, *(heap for due in free for heap in due.kinds.values()))
        tops = [top for heap in heaps if (top := self._top(heap))]
        return min(tops)[0] if tops else None

    def stuck_seconds(self, now: float) -> float:
        """Return the seconds since the last answer of the reconcile that has waited longest."""
        return max((now - since for key, since in self._busy.items() if key not in self._waiting), default=0.0)

    def unfinished_seconds(self, now: float) -> float:
        """Return the seconds since the last answer, summed over all running reconciles."""
        return sum(now - since for since in self._busy.values())

    def due(self, now: float) -> tuple[int, float]:
        """Return the number of due keys, and for how many seconds the oldest has been due."""
        times = {key: at for requests in self._requests.values() for key, at in requests.items() if at <= now}
        return len(times), max((now - at for at in times.values()), default=0.0)

    @property
    def working(self) -> int:
        """Number of running reconciles."""
        return len(self._busy)

    def __len__(self) -> int:
        return sum(map(len, self._requests.values()))

    def _holds(self, request: _Request[K]) -> bool:
        """False if the request is outdated: an earlier one replaced it, or the key had its turn."""
        at, _, key, priority = request
        return self._requests[priority].get(key) == at

    def _top(self, heap: list[_Request[K]]) -> _Request[K] | None:
        while heap and not self._holds(heap[0]):
            heapq.heappop(heap)
        return heap[0] if heap else None

    def _release(self, key: K, now: float, again_at: float | None) -> None:
        self._waiting.discard(key)
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
    """Return the seconds to wait after this many failures in a row."""
    # Bound the exponent, because 2.0 ** 1025 raises OverflowError.
    return min(BACK_OFF_SECONDS_MAX, BACK_OFF_SECONDS_FIRST * 2.0 ** min(times - 1, 10))


class RetryError(Exception):
    """Requests another reconcile after a back-off. The message is logged if it differs from the key's last one."""

    def __init__(self, message: str, at_least_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.at_least_seconds = at_least_seconds


class Queue(Generic[K]):
    """Runs `reconcile(key)` for due keys. `reconcile` returns the seconds until the next one, or None."""

    def __init__(
        self,
        runtime: Runtime,
        *,
        name: str = names.QUEUES[0],
        meter: Meter | None = None,
        at_a_time: int = 32,
        of_namespace: int = OF_NAMESPACE_MAX,
        about: Callable[[K], Mapping[str, object]] = lambda key: {"job": _name(key)},
        kind: Callable[[K], int] = lambda _key: 0,
    ) -> None:
        """name: the queue's label in metrics. about: extra fields of a log record. kind: see `Schedule`."""
        self._about = about
        self._name, self._meter = name, meter or Meter()
        self.schedule: Schedule[K] = Schedule(of_namespace=of_namespace, kind=kind)
        self._clock = runtime.clock
        self._log = runtime.log
        self._free = at_a_time
        self._wake = asyncio.Event()
        self._sleeps_until = float("inf")
        """Time at which the loop wakes. A later request does not wake it."""
        self._tasks: dict[asyncio.Task[None], None] = {}  # in the order of their starts, in which `run` cancels them
        self._logged: dict[K, str] = {}

    def add(self, key: K, in_seconds: float = 0.0, priority: Priority = Priority.EVENT) -> None:
        """Request a reconcile. An earlier request stays."""
        self._meter.count(names.QUEUE_ADDS, self._name)
        at = self._clock() + in_seconds
        self.schedule.add(key, at, priority)
        if at < self._sleeps_until:  # otherwise every event of a storm of pods would wake the loop
            self._wake.set()

    def stuck_seconds(self) -> float:
        return self.schedule.stuck_seconds(self._clock())

    def measured(self) -> QueueWaits:
        """Return the queue's current state, for metrics."""
        now = self._clock()
        depth, oldest = self.schedule.due(now)
        stuck, unfinished = self.schedule.stuck_seconds(now), self.schedule.unfinished_seconds(now)
        return QueueWaits(self._name, depth, oldest, stuck, self.schedule.working, unfinished)

    def progressed(self, key: K) -> None:
        self.schedule.progressed(key, self._clock())

    def observed(self, key: K) -> None:
        self.schedule.observed(key, self._clock())

    def waits(self, key: K) -> None:
        self.schedule.waits(key)

    async def run(self, reconcile: Callable[[K], Awaitable[float | None]]) -> None:
        """Run until cancelled, then cancel the running reconciles and wait for them."""
        try:
            while True:
                self._wake.clear()
                while self._free and (key := self.schedule.pop(self._clock())) is not None:
                    self._free -= 1
                    self._meter.observe(names.QUEUE_SECONDS, self.schedule.waited, self._name)
                    task = asyncio.create_task(self._one(key, reconcile))
                    self._tasks[task] = None
                    task.add_done_callback(self._tasks.pop)
                await self._sleep()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _sleep(self) -> None:
        at = self.schedule.next_at() if self._free else None
        self._sleeps_until = float("inf") if at is None else at
        with contextlib.suppress(asyncio.TimeoutError):
            async with at_most(None if at is None else max(0.0, at - self._clock())):
                await self._wake.wait()

    async def _one(self, key: K, reconcile: Callable[[K], Awaitable[float | None]]) -> None:
        place = Turn(self._leave, QUICK_SECONDS)
        began, result = self._clock(), "error"
        try:
            again_in = await reconcile(key)
        except RetryError as error:
            wait = self.schedule.failed(key, self._clock(), error.at_least_seconds)
            if self._logged.get(key) != str(error):
                self._logged[key] = str(error)
                self._log.warning("%s: %s; again in %.1f s", _name(key), error, wait, extra=self._about(key))
        except asyncio.CancelledError:
            self.schedule.failed(key, self._clock())  # otherwise the key would stay busy forever
            raise
        except Exception:
            # A bug in the reconcile of one job must not end the others.
            wait = self.schedule.failed(key, self._clock())
            text = "%s: the reconcile failed, again in %.1f s"
            self._log.exception(text, _name(key), wait, extra=self._about(key))
        else:
            now = self._clock()
            result = "success" if again_in is None else "requeue_after" if again_in else "requeue"
            self._logged.pop(key, None)
            self.schedule.done(key, now, None if again_in is None else now + again_in)
        finally:
            self._count(self._clock() - began, result)
            place.leave()
            self._wake.set()

    def _leave(self) -> None:
        self._free += 1
        self._wake.set()

    def _count(self, seconds: float, result: str) -> None:
        """Count the end of a reconcile. result: one of names.RESULTS."""
        meter, name = self._meter, self._name
        meter.observe(names.WORK_SECONDS, seconds, name)
        if result == "error":
            meter.count(names.QUEUE_RETRIES, name)
        if name == names.QUEUES[0]:  # the queue of jobs, which controller-runtime's dashboards show
            meter.observe(names.RECONCILE_SECONDS, seconds, name)
            meter.count(names.RECONCILES, name, result)
            if result == "error":
                meter.count(names.RECONCILE_ERRORS, name)


def _namespace(key: Hashable) -> Hashable:
    return key[0] if isinstance(key, tuple) else ""


def _name(key: Hashable) -> str:
    """Return namespace/name, as kubectl writes it."""
    return "/".join(map(str, key)) if isinstance(key, tuple) else str(key)
