"""Limits the requests in flight, in total and per namespace.

A slow webhook usually delays all requests of a namespace. After a second, a request gives back its place in the total,
so that other namespaces are not delayed. It keeps its place in the namespace's limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Callable


class Turn:
    """A place for one request within the limit, given back once: by `leave`, or after `seconds`."""

    def __init__(self, give_back: Callable[[], None], seconds: float) -> None:
        self._give_back: Callable[[], None] | None = give_back
        self._timer = asyncio.get_running_loop().call_later(seconds, self.leave)

    def leave(self) -> None:
        self._timer.cancel()
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()


class InFlight:
    """Use `async with in_flight.place(namespace)` around each request. Waiting requests are served in order."""

    def __init__(self, total: int = 32, of_namespace: int = 16, quick_seconds: float = 1.0) -> None:
        """total: 32 is within the share that an API server gives one service account by default. quick_seconds: a
        slower request no longer counts in `total`, because it probably waits for a webhook.
        """
        self._total = asyncio.Semaphore(total)
        self._of_namespace = of_namespace
        self._quick_seconds = quick_seconds
        self._semaphores: weakref.WeakValueDictionary[str, asyncio.Semaphore] = weakref.WeakValueDictionary()
        """By namespace; an entry disappears with the last request that uses it."""

    @contextlib.asynccontextmanager
    async def place(self, namespace: str, *, further: bool = False) -> AsyncIterator[None]:
        """Run the body as soon as fewer requests than the limits are in flight.

        further: True for a pod of a new job that already has pods. Such requests wait in a separate queue first, so
        that at most `of_namespace` of them are ahead of a job's first pod or a restart.
        """
        async with contextlib.AsyncExitStack() as places:
            if further:
                await places.enter_async_context(self._semaphore(f"{namespace} further"))
            await places.enter_async_context(self._semaphore(namespace))
            await self._total.acquire()
            places.callback(Turn(self._total.release, self._quick_seconds).leave)
            yield

    def is_full(self, namespace: str) -> bool:
        semaphore = self._semaphores.get(namespace)
        return semaphore is not None and semaphore.locked()

    def _semaphore(self, name: str) -> asyncio.Semaphore:
        semaphore = self._semaphores.get(name) or asyncio.Semaphore(self._of_namespace)
        self._semaphores[name] = semaphore
        return semaphore
