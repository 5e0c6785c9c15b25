"""Requests that are slow, late or lost, in virtual time."""

import asyncio
import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ddpjob_operator.kube.api.client import ApiError


@dataclass(frozen=True)
class Fate:
    """What happens to one request: its delays, and if its answer is lost."""

    there: float = 0.01
    """Seconds until the request is carried out."""
    back: float = 0.01
    lost: bool = False
    """True if the answer never arrives."""


GOOD = Fate()


class Wire:
    """Connection of a process to the server. A sent request arrives, even if its sender has stopped waiting."""

    def __init__(self, fates: Callable[[], Fate] = lambda: GOOD) -> None:
        self.fates = fates
        self._under_way: set[asyncio.Task[Any]] = set()

    async def send(self, work: Callable[[], Any]) -> Any:
        """Send a request, and return the answer. work: what the server does. Raise the server's ApiError."""
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
