"""Which jobs make their further pods now: so many of a namespace at a time.

The others wait without a reconcile, for each of those takes up one of the namespace's (queue.py): a job that is applied
amid hundreds would wait until one of them had all of its pods, before it is even looked at.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass, field

from ddpjob_operator.kube.shares import Line
from ddpjob_operator.kube.store import Key

# Of a namespace in each line: with one request each they take all that it may have under way (shares.py), and as many
# again may begin their next reconcile meanwhile.
AT_A_TIME = 16


@dataclass(eq=False)
class _Jobs:
    """Of one line of a namespace."""

    going: set[Key] = field(default_factory=set)
    waiting: dict[Key, int] = field(default_factory=dict)
    """How many pods each has to make; in the order in which they came."""
    smallest_next: bool = True


class GoingOn:
    """A reconcile asks before it makes a job's further pods, and says when it is over."""

    def __init__(self, enqueue: Callable[[Key], None], at_a_time: int = AT_A_TIME) -> None:
        """enqueue: called for a job that was told to wait, when it may go on."""
        self._enqueue = enqueue
        self._at_a_time = at_a_time
        self._jobs: collections.defaultdict[tuple[str, Line], _Jobs] = collections.defaultdict(_Jobs)
        self._going_in: dict[Key, Line] = {}
        self._waits_in: dict[Key, Line] = {}

    def may(self, key: Key, line: Line, pods: int) -> bool:
        """Whether the reconcile of a job may make so many pods more; False: the job is enqueued when it may."""
        if key in self._going_in:
            return True
        if self._waits_in.get(key, line) is not line:  # a restart meanwhile
            self._stop_waiting(key)
        jobs = self._jobs[key[0], line]
        if len(jobs.going) < self._at_a_time:
            self._go(key, line)
            return True
        jobs.waiting[key] = pods
        self._waits_in[key] = line
        return False

    def others_wait(self, key: Key) -> bool:
        """Whether another job may go on as soon as the reconcile of this one, which goes on, is over."""
        return bool(self._jobs[key[0], self._going_in[key]].waiting)

    def any_waits(self, namespace: str) -> bool:
        """Whether a job of the namespace waits until it may go on."""
        return any(jobs.waiting for line in Line if (jobs := self._jobs.get((namespace, line))))

    def over(self, key: Key) -> None:
        """The reconcile of a job is over, whether it made any pods or not: the next one may go on in its place."""
        line = self._going_in.pop(key, None)
        if line is None:
            return
        jobs = self._jobs[key[0], line]
        jobs.going.remove(key)
        if jobs.waiting:
            # The smallest and the one that has waited longest, in turn, as with the first pods of jobs.
            smallest = jobs.smallest_next
            after = min(jobs.waiting, key=jobs.waiting.__getitem__) if smallest else next(iter(jobs.waiting))
            jobs.smallest_next = not smallest
            self._stop_waiting(after)
            self._go(after, line)
            self._enqueue(after)
        elif not jobs.going:
            del self._jobs[key[0], line]

    def _go(self, key: Key, line: Line) -> None:
        self._jobs[key[0], line].going.add(key)
        self._going_in[key] = line

    def _stop_waiting(self, key: Key) -> None:
        del self._jobs[key[0], self._waits_in.pop(key)].waiting[key]
