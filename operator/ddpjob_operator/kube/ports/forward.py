"""Reports of progress that reach an operator which does not lead: forwarded to the one that does.

The Service of the receiver leads to every operator, and only the leader has a use for a report. Called by `receive.py`
for reports that are proven to come from a trainer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import aiohttp
from aiohttp import web

FORWARD_SECONDS = 3.0  # the trainer's own time-out is 5 s
ANSWER_BYTES_MAX = 8192
# All of them come from our one address, and the leader takes 64 connections of one.
CONNECTIONS_MAX = 32
FORWARDED = "X-DDPJob-Forwarded"
_PASSED_ON = ("Authorization", "Content-Type")


class NoLeaderError(Exception):
    """No operator can take the report now."""


class Forwarder:
    """leader_address  host:port where the leader takes reports; empty: none is known; None: this operator leads."""

    def __init__(self, leader_address: Callable[[], str | None]) -> None:
        self._leader_address = leader_address
        self._session: aiohttp.ClientSession | None = None

    async def forward(self, request: web.BaseRequest, body: bytes) -> web.Response | None:
        """The leader's answer; None where the report is for us. Raises NoLeaderError."""
        address = self._leader_address()
        if address is None:
            return None
        # Forwarded once, otherwise two that take each other for the leader forward without end.
        if not address or FORWARDED in request.headers:
            raise NoLeaderError("no operator leads just now")
        headers = {name: request.headers[name] for name in _PASSED_ON if name in request.headers} | {FORWARDED: "1"}
        url = f"http://{address}{request.path}"
        try:
            async with self._open().post(url, data=body, headers=headers, allow_redirects=False) as answer:
                return web.Response(
                    status=answer.status,
                    body=await answer.content.read(ANSWER_BYTES_MAX),
                    content_type=answer.content_type,
                    headers={name: answer.headers[name] for name in ("Retry-After",) if name in answer.headers},
                )
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
            raise NoLeaderError("the operator that leads does not answer") from None

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=CONNECTIONS_MAX)
            timeout = aiohttp.ClientTimeout(total=FORWARD_SECONDS)
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        return self._session
