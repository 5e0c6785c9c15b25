"""Run work during a part of a test, and cancel it."""

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
