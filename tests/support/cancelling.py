"""Run work during a part of a test, and cancel it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any


@contextlib.asynccontextmanager
async def running(work: Coroutine[Any, Any, Any]) -> AsyncIterator[asyncio.Task[Any]]:
    """Run `work` as a task during the body, and cancel it at the end."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def turns(count: int) -> None:
    """Let the event loop run this many iterations."""
    for _ in range(count):
        await asyncio.sleep(0)


async def until(true: Callable[[], object], seconds: float = 10.0) -> None:
    """Wait at most this many seconds until `true()` holds. Check it in each iteration of the event loop."""
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0)


async def ends_although(work: Coroutine[Any, Any, None], comes: Callable[[], object]) -> None:
    """Cancel `work` in the iteration of the event loop in which `comes` ends its wait. Fail if `work` goes on."""
    running = asyncio.create_task(work)
    await turns(10)  # `work` is waiting now
    comes()
    running.cancel()
    ended, _ = await asyncio.wait({running}, timeout=5)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert ended, "it goes on as if nobody had cancelled it"
