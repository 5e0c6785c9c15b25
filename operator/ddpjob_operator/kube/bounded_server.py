"""An HTTP server for a port that every pod of the cluster can reach: bounded connections, and a deadline for each.

The receiver of reports and /metrics listen with it.
"""

from __future__ import annotations

import asyncio
import collections
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, cast

from aiohttp import web

HEADER_SECONDS = 5.0  # from a connection's first byte to the end of its first headers
CONNECTIONS_MAX = 4000  # one costs about 20 kB
CONNECTIONS_PER_ADDRESS_MAX = 64  # hostNetwork pods share the address of their node
# As many wait for their client's next request at most. The others are closed with their answer, so that new ones find
# room, and nobody's is closed for them.
KEPT_MAX, KEPT_PER_ADDRESS_MAX = 3000, 48


@dataclass(eq=False)
class _Connection:
    transport: asyncio.Transport
    address: str
    deadline: asyncio.TimerHandle
    proven: bool = False
    """Whether it has shown a pod's token."""
    busy: bool = True
    """Whether a request on it is not answered yet, or has not come whole."""


class BoundedServer(web.Server):
    """aiohttp's server with bounds of its own: it counts no connections, and a slow sender of headers keeps one.

    A client that opens connections and sends nothing, from however many addresses, closes its own older ones, because
    one that has shown a token is never closed for one that has not.
    """

    def __init__(self, handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], **settings: Any) -> None:
        no_log = logging.getLogger(f"{__name__}.http")
        # aiohttp logs requests that it cannot read, token included; and a peer that sends no HTTP is nothing to act on.
        no_log.disabled = True
        settings = {"access_log": None, "logger": no_log, **settings}
        super().__init__(handler, **settings)
        self._settings = settings
        self._runner = web.ServerRunner(self, shutdown_timeout=1.0)
        self._open: dict[web.RequestHandler, _Connection] = {}
        """In the order in which they were opened."""
        self._addresses: dict[str, dict[web.RequestHandler, _Connection]] = {}
        """The same by address."""
        self._unproven: collections.Counter[str] = collections.Counter()
        """How many of an address have shown no token."""

    async def listen(self, host: str | None, port: int, *, backlog: int) -> None:
        """host None is every address of the pod, port 0 any free one. Raises OSError where that is taken."""
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port, backlog=backlog).start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Close the port and every connection; a request that is being answered gets a second."""
        await self._runner.cleanup()

    def __call__(self) -> web.RequestHandler:
        """The handler of a connection that is about to be made."""
        return _Handler(self, loop=asyncio.get_running_loop(), **self._settings)

    def admits(self, transport: asyncio.Transport) -> bool:
        """Whether there is room for a connection, made by closing one without a token, or an idle one, if need be."""
        address = _address(transport)
        if self._count(address) >= CONNECTIONS_PER_ADDRESS_MAX and not self._drop(self._addresses[address]):
            return False
        return len(self._open) < CONNECTIONS_MAX or self._drop(self._busiest())

    def keeps(self, handler: web.RequestHandler) -> bool:
        """Whether its connection may stay open after the answer."""
        connection = self._open.get(handler)
        if connection is None:
            return False
        return len(self._open) <= KEPT_MAX and self._count(connection.address) <= KEPT_PER_ADDRESS_MAX

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        """Count it."""
        super().connection_made(handler, transport)
        address = _address(transport)
        deadline = asyncio.get_running_loop().call_later(HEADER_SECONDS, transport.abort)
        self._open[handler] = connection = _Connection(transport, address, deadline)
        self._addresses.setdefault(address, {})[handler] = connection
        self._unproven[address] += 1

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        """Forget it."""
        self._forget(handler)
        super().connection_lost(handler, exc)

    def allow(self, handler: web.RequestHandler, seconds: float, *, busy: bool) -> None:
        """From now on this much time until the connection is cut."""
        if (connection := self._open.get(handler)) is not None:
            connection.busy = busy
            connection.deadline.cancel()
            connection.deadline = asyncio.get_running_loop().call_later(seconds, connection.transport.abort)

    def prove(self, handler: web.RequestHandler) -> None:
        """It has shown a pod's token."""
        connection = self._open.get(handler)
        if connection is not None and not connection.proven:
            connection.proven = True
            self._is_proven(connection.address)

    def _count(self, address: str) -> int:
        return len(self._addresses.get(address, ()))

    def _busiest(self) -> dict[web.RequestHandler, _Connection]:
        """The connections of the address with the most that have shown no token; all: each has."""
        return self._addresses[max(self._unproven, key=self._unproven.__getitem__)] if self._unproven else self._open

    def _drop(self, connections: dict[web.RequestHandler, _Connection]) -> bool:
        """Close the oldest of these that has shown no token, else one that waits for its next report (a sender opens
        another); whether there was one."""
        oldest = next((h for h, c in connections.items() if not c.proven), None)
        oldest = oldest or next((h for h, c in connections.items() if not c.busy), None)
        if oldest is None:
            return False
        self._open[oldest].transport.abort()
        self._forget(oldest)
        return True

    def _forget(self, handler: web.RequestHandler) -> None:
        if (connection := self._open.pop(handler, None)) is None:
            return
        connection.deadline.cancel()
        if not connection.proven:
            self._is_proven(connection.address)
        of_address = self._addresses[connection.address]
        del of_address[handler]
        if not of_address:
            del self._addresses[connection.address]

    def _is_proven(self, address: str) -> None:
        """One connection less of that address that has shown no token."""
        self._unproven[address] -= 1
        if not self._unproven[address]:
            del self._unproven[address]


class _Handler(web.RequestHandler):
    """A connection. One that there is no room for is closed before aiohttp knows of it: closed a moment later, the task
    that it has made for it would end with an AssertionError that nobody retrieves (aiohttp 3.14, web_protocol.start).
    """

    __slots__ = ("_refused",)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take it, or cut it."""
        server = cast(BoundedServer, self._manager)
        self._refused = not server.admits(cast(asyncio.Transport, transport))
        if self._refused:
            cast(asyncio.Transport, transport).abort()
        else:
            super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        """It has gone."""
        if not self._refused:
            super().connection_lost(exc)


def _address(transport: asyncio.Transport) -> str:
    return str((transport.get_extra_info("peername") or ("",))[0])
