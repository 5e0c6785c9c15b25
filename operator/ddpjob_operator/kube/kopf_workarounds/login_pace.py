"""How often kopf may log in.

kopf 1.45 calls the login handler again at once where the API server refuses the credentials. An operator whose token is
no longer valid would send requests without a pause to an API server that refuses them.
Can go when kopf waits between logins.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator


async def paced(seconds: float) -> AsyncIterator[None]:
    """Yields at most once per `seconds`."""
    last = float("-inf")
    while True:
        await asyncio.sleep(max(0.0, last + seconds - time.monotonic()))
        last = time.monotonic()
        yield
