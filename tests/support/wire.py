"""Requests that are slow, late or lost, in virtual time."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ddpjob_operator.kube.api.client import ApiError


@dataclass(frozen=True)
class Fate:
    """What happens to one request."""

    there: float = 0.01
    """Seconds until it is carried out."""
    back: float = 0.01
    lost: bool = False
    """The answer never arrives."""


GOOD = Fate()


class Wire:
    """The connection of one process to the server. A request in flight arrives, even if nobody waits for its answer."""

    def __init__(self, fates: Callable[[], Fate] = lambda: GOOD) -> None:
        self.fates = fates
        self._under_way: set[asyncio.Task[Any]] = set()

    async def send(self, work: Callable[[], Any]) -> Any:
        """work: what the server then does. Raise its ApiError."""
        fate = self.fates()
        task = asyncio.ensure_future(self._arrive(work, fate.there))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        if fate.lost:
            await asyncio.sleep(1e6)
        answer = await asyncio.shield(task)
        await asyncio.sleep(fate.back)
        if isinstance(answer, ApiError):
            raise answer
        return answer

    async def _arrive(self, work: Callable[[], Any], seconds: float) -> Any:
        await asyncio.sleep(seconds)
        try:
            return copy.deepcopy(work())
        except ApiError as error:
            return error
