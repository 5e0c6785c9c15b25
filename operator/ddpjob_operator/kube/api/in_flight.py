"""Limits on the requests that are in flight: in all, and in each namespace.

A webhook acts on a whole namespace: requests that wait for it take places of their namespace, and leave those of all
namespaces to the others after a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Callable


class Turn:
    """A place among a few, given back once: by `leave`, or by itself after so many seconds."""

    def __init__(self, give_back: Callable[[], None], seconds: float) -> None:
        self._give_back: Callable[[], None] | None = give_back
        self._timer = asyncio.get_running_loop().call_later(seconds, self.leave)

    def leave(self) -> None:
        """Give the place back, unless that was done before."""
        self._timer.cancel()
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()


class InFlight:
    """`async with in_flight.place(namespace)` around each request. Waiting requests are served in their order."""

    def __init__(self, total: int = 32, of_namespace: int = 16, quick_seconds: float = 1.0) -> None:
        """total: the API server's default share for one service account is some tens, so it refuses none of 32.
        quick_seconds: a request that takes longer waits for a webhook and does not count in `total`. Otherwise a few
        namespaces with slow webhooks would take all of it."""
        self._total = asyncio.Semaphore(total)
        self._of_namespace = of_namespace
        self._quick_seconds = quick_seconds
        self._semaphores: weakref.WeakValueDictionary[str, asyncio.Semaphore] = weakref.WeakValueDictionary()
        """Of each namespace, as long as a request of it is in flight or waits."""

    @contextlib.asynccontextmanager
    async def place(self, namespace: str, *, further: bool = False) -> AsyncIterator[None]:
        """Run the body once there is room. further: for one of a job's further pods. At most as many of these as there
        are places are in the same line as first pods and restarts, which otherwise would wait for all of them."""
        async with contextlib.AsyncExitStack() as places:
            if further:
                await places.enter_async_context(self._semaphore(f"{namespace} further"))
            await places.enter_async_context(self._semaphore(namespace))
            await self._total.acquire()
            places.callback(Turn(self._total.release, self._quick_seconds).leave)
            yield

    def is_full(self, namespace: str) -> bool:
        """True if the next request of a namespace has to wait."""
        semaphore = self._semaphores.get(namespace)
        return semaphore is not None and semaphore.locked()

    def _semaphore(self, name: str) -> asyncio.Semaphore:
        semaphore = self._semaphores.get(name) or asyncio.Semaphore(self._of_namespace)
        self._semaphores[name] = semaphore
        return semaphore
