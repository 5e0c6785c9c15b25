"""No write is sent by an operator that may not write any more, not even one that waits for its connection."""

from __future__ import annotations

from collections.abc import Callable

import aiohttp
from aiohttp.abc import AbstractStreamWriter

from ddpjob_operator.kube.api.api_error import NO_ANSWER, ApiError


class WriteGuard:
    """Asks `may_write` whether the write that `what` names may be sent at this moment."""

    def __init__(self, what: str, may_write: Callable[[], bool]) -> None:
        self.refused: ApiError | None = None
        """Why the write was not sent."""
        self._what, self._may_write = what, may_write

    def check(self) -> None:
        """Raises ApiError where it may not be sent."""
        if not self._may_write():
            why = f"{self._what}: not sent, for another operator may lead by now"
            self.refused = ApiError(NO_ANSWER, "NotLeading", why)
            raise self.refused


class GuardedBody(aiohttp.BytesPayload):
    """A body that asks the guard before its first byte, with which aiohttp sends the headers.

    Before that a connection is opened and tasks take turns. An operator that was frozen with requests in that
    state sent them all when it woke up, though another one led by then.
    """

    def __init__(self, content: bytes, guard: WriteGuard) -> None:
        super().__init__(content)
        self._guard = guard

    async def write(self, writer: AbstractStreamWriter) -> None:
        """What aiohttp calls before its release 3.12."""
        self._guard.check()
        await super().write(writer)

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        """What aiohttp calls from 3.12 on."""
        self._guard.check()
        await super().write_with_length(writer, content_length)
