"""Tracks whether the API server answers. The first answer after an outage ends the back-offs of all watches.

Otherwise each watch would finish its own back-off of up to 30 s. After an outage of 20 s, the operator led again within
2 s, but watched pods and nodes only after 40 s. In between it did not see changes.
"""

from __future__ import annotations

import asyncio

from ddpjob_operator.kube.api.limit import at_most
from ddpjob_operator.kube.api.runtime import SYSTEM, Runtime

OUTAGE_SECONDS = 3.0
"""Shorter failures are not logged: a single request may be lost."""
SPREAD_SECONDS = 1.0
"""Jitter after an outage, so that the watches do not all send requests at the same moment."""


class Availability:
    """State of one API server, shared by all clients of a process."""

    def __init__(self, runtime: Runtime = SYSTEM) -> None:
        self._runtime = runtime
        self._lost_at: float | None = None
        self._logged = False
        self._back = asyncio.Event()

    @property
    def lost(self) -> bool:
        """True while the API server does not answer."""
        return self._lost_at is not None

    def answered(self) -> None:
        """Record an answer of any status, and wake those that wait."""
        if self._lost_at is None:
            return
        if self._logged:
            self._runtime.log.info("the API server answers again, after %.0f s", self._runtime.clock() - self._lost_at)
        self._lost_at, self._logged = None, False
        self._back.set()

    def failed(self) -> None:
        """Record a missing connection or answer. An outage is logged once."""
        now = self._runtime.clock()
        if self._lost_at is None:
            self._lost_at = now
            self._back.clear()
        elif not self._logged and now - self._lost_at >= OUTAGE_SECONDS:
            self._logged = True
            self._runtime.log.warning("the API server has not answered for %.0f s, trying again", now - self._lost_at)

    async def wait(self, seconds: float) -> bool:
        """Wait for `seconds`. If an outage ends meanwhile, return True early.

        Without an outage wait the full time, because the server may refuse a watch and answer other requests.
        """
        if self._lost_at is None:
            await asyncio.sleep(seconds)
            return False
        try:
            async with at_most(seconds):
                await self._back.wait()
        except asyncio.TimeoutError:
            return False
        await asyncio.sleep(min(seconds, self._runtime.random.uniform(0, SPREAD_SECONDS)))
        return True
