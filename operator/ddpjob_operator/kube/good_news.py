"""Puts off what only says that all goes well while pods of the same namespace are being created.

In a storm of jobs the API server is the bottleneck, and a write of a status costs it as much as two pods
(bench/results): each job that says that it runs would make the pods of the others later. What is wrong, and what
somebody else waits for, never comes here.
"""

from __future__ import annotations

from collections.abc import Callable

from ddpjob_operator.kube.shares import Shares
from ddpjob_operator.kube.store import Key

# So much later at most where pods are being created all the time: that all pods of a job run, and that some of them do.
ALL_LATER_SECONDS, SOME_LATER_SECONDS = 5.0, 15.0


class GoodNews:
    """Enqueues jobs for which there is good news: after the seconds that it may wait, or once no pod is being created,
    whichever is later."""

    def __init__(self, enqueue: Callable[[Key, float], None], creates: Shares, clock: Callable[[], float]) -> None:
        """creates: those of pods; it tells when a namespace has none under way any more."""
        self._enqueue, self._creates, self._clock = enqueue, creates, clock
        self._put_off: dict[str, dict[Key, tuple[float, float]]] = {}
        """By namespace, the jobs that wait: when each wants its turn, and when it gets one at the latest."""
        creates.quiet = self._quiet

    def add(self, key: Key, in_seconds: float, *, all_run: bool) -> None:
        """in_seconds: how long the news may wait anyway, for more of it."""
        if not self._creates.busy(key[0]):
            self._enqueue(key, in_seconds)
            return
        now, waiting = self._clock(), self._put_off.setdefault(key[0], {})
        while waiting and next(iter(waiting.values()))[1] <= now:
            del waiting[next(iter(waiting))]  # it had its turn, and a namespace may be busy for hours
        latest = now + (ALL_LATER_SECONDS if all_run else SOME_LATER_SECONDS)
        if key in waiting and waiting[key][1] > now:  # else it had its turn, and this is news since then
            latest = min(latest, waiting[key][1])
        # The newest news says how long more of it is to be waited for: of a job that was in the midst of its start when
        # the others were done, a status would be written that is out of date at once.
        waiting[key] = now + in_seconds, latest
        self._enqueue(key, latest - now)  # again, because it may have had an earlier turn for something else

    def goes_on(self, key: Key) -> None:
        """Enqueues a job that makes the rest of its pods now, and looks at all of them afterwards: what was to be told
        of the first one is no reason to tell of the others sooner."""
        self._put_off.get(key[0], {}).pop(key, None)
        self._enqueue(key, 0.0)

    def _quiet(self, namespace: str) -> None:
        now = self._clock()
        for key, (wanted, latest) in self._put_off.pop(namespace, {}).items():
            if now < latest:
                self._enqueue(key, max(0.0, wanted - now))
