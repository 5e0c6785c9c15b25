"""Whether the API server can be reached: who waits because it could not is woken by the first answer that anyone gets.

Each watch backs off for itself, up to 30 s. After an outage of 20 s the Lease was ours again 2 s after the API server
had come back, and pods and nodes were watched 40 s after it (measured on a two-node cluster): meanwhile the operator
led and saw nothing, and of two watches one knew what the other did not.
"""

from __future__ import annotations

import asyncio
import random

from ddpjob_operator.kube.api.limit import at_most
from ddpjob_operator.kube.api.runtime import SYSTEM, Runtime

OUTAGE_SECONDS = 3.0
"""A request without an answer may be lost alone."""
SPREAD_SECONDS = 1.0
"""Within which those that are woken together ask again, so that they do not all ask in the same moment."""


class Reach:
    """Of one API server; all clients of a process share it."""

    def __init__(self, runtime: Runtime = SYSTEM) -> None:
        self._runtime = runtime
        self._lost_at: float | None = None
        self._logged = False
        self._back = asyncio.Event()

    @property
    def lost(self) -> bool:
        """True while it does not answer."""
        return self._lost_at is not None

    def answered(self) -> None:
        """The server has answered, whatever it was."""
        if self._lost_at is None:
            return
        if self._logged:
            self._runtime.log.info("the API server answers again, after %.0f s", self._runtime.clock() - self._lost_at)
        self._lost_at, self._logged = None, False
        self._back.set()

    def failed(self) -> None:
        """It has not: no connection, or no answer in time. An outage is one line of the log, whoever notices it."""
        now = self._runtime.clock()
        if self._lost_at is None:
            self._lost_at = now
            self._back.clear()
        elif not self._logged and now - self._lost_at >= OUTAGE_SECONDS:
            self._logged = True
            self._runtime.log.warning("the API server has not answered for %.0f s, trying again", now - self._lost_at)

    async def wait(self, seconds: float) -> bool:
        """So long, or until the server answers again after it has not: True. A watch that is refused, or cut, while
        other requests are answered waits its full time."""
        if self._lost_at is None:
            await asyncio.sleep(seconds)
            return False
        try:
            async with at_most(seconds):
                await self._back.wait()
        except asyncio.TimeoutError:
            return False
        await asyncio.sleep(min(seconds, random.uniform(0, SPREAD_SECONDS)))  # noqa: S311
        return True
