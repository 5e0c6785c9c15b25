"""Whether the API server can be reached: who waits because it could not is woken by the first answer that anyone gets.

Each watch backs off for itself, up to 30 s. After an outage of 20 s the Lease was ours again 2 s after the API server
had come back, and pods and nodes were watched 40 s after it (measured on a two-node cluster): meanwhile the operator
led and saw nothing, and of two watches one knew what the other did not.
"""

from __future__ import annotations

import asyncio
import random

from ddpjob_operator.kube.limit import at_most

SPREAD_SECONDS = 1.0
"""Within which those that are woken together ask again, so that they do not all ask in the same moment."""


class Reach:
    """Of one API server; all clients of a process share it."""

    def __init__(self) -> None:
        self._lost = False
        self._back = asyncio.Event()

    def answered(self) -> None:
        """The server has answered, whatever it was."""
        if self._lost:
            self._lost = False
            self._back.set()

    def failed(self) -> None:
        """It has not: no connection, or no answer in time."""
        self._lost = True
        self._back.clear()

    async def wait(self, seconds: float) -> bool:
        """So long, or until the server answers again after it has not: True. A watch that is refused, or cut, while
        other requests are answered waits its full time."""
        if not self._lost:
            await asyncio.sleep(seconds)
            return False
        try:
            async with at_most(seconds):
                await self._back.wait()
        except asyncio.TimeoutError:
            return False
        await asyncio.sleep(min(seconds, random.uniform(0, SPREAD_SECONDS)))  # noqa: S311
        return True
