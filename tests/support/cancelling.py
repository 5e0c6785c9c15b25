"""A cancellation at the same moment as the awaited event."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


async def ends_although(work: Coroutine[Any, Any, None], comes: Callable[[], object]) -> None:
    """Cancel `work` in the iteration of the event loop in which `comes` completes its wait; it must end."""
    running = asyncio.create_task(work)
    for _ in range(10):  # `work` is waiting now
        await asyncio.sleep(0)
    comes()
    running.cancel()
    ended, _ = await asyncio.wait({running}, timeout=5)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert ended, "it goes on as if nobody had cancelled it"
