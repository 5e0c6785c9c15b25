"""How long kopf waits before it asks the API server, or logs in, again.

kopf 1.45 ends the process once its backoffs are used up (54 s by default), so an API server that is away for a minute
would restart the operator; and it calls the login handler again at once where the API server refuses the credentials.
Can go when kopf takes an endless backoff from its settings, and waits between logins.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterator


class ErrorBackoffs:
    """kopf's waits between failing requests, without an end.

    A class, because kopf iterates over it again for each request, and a generator is used up by the first (kopf 1.45,
    clients/api.py).
    """

    def __iter__(self) -> Iterator[float]:
        """1, 2, 4 … 30 s, and 30 s from then on."""
        yield from (1.0, 2.0, 4.0, 8.0, 16.0)
        yield from itertools.repeat(30.0)


async def paced(seconds: float) -> AsyncIterator[None]:
    """Yields at most once per `seconds`."""
    last = float("-inf")
    while True:
        await asyncio.sleep(max(0.0, last + seconds - time.monotonic()))
        last = time.monotonic()
        yield
