"""The HTTP server of every port of the operator: /healthz, /metrics and the reports of trainers.

Every pod of the cluster can connect to these ports. Therefore connections, the bytes of a request and the time for it
are bounded, no body is decompressed, and nothing is read after a refusal.
"""

from __future__ import annotations

import abc
import asyncio
import collections
import contextlib
import logging
import socket
from typing import cast

from aiohttp import web

HEADER_SECONDS = 5.0  # from a connection's first byte to the end of its first headers
REQUEST_SECONDS = 10.0  # from the headers to the end of the answer; Prometheus' own limit for a scrape is 10 s
IDLE_SECONDS = 75.0  # between two requests: Prometheus scrapes every minute or more often, trainers report every 5 s
REQUEST_BYTES_MAX = 24 << 10  # a token of 8 kB, a report of 8 kB, and the rest of the headers
CONNECTIONS_PER_ADDRESS_MAX = 64  # hostNetwork pods share the address of their node, and so does the kubelet
PIECE_BYTES = 1 << 16  # of an answer that are handed to a connection at a time
# The kernel's buffers of a connection count for the container's limit of memory, and grow to 10 MB by themselves.
RECEIVE_BUFFER_BYTES, SEND_BUFFER_BYTES = 8 << 10, 64 << 10
BACKLOG = 1024

# aiohttp logs requests that it cannot read, token included. A peer that sends no HTTP needs no action.
_NO_LOG = logging.getLogger(f"{__name__}.http")
_NO_LOG.disabled = True


class BoundedServer(abc.ABC):
    """Listens from `start` to `stop`.

    A new connection is never refused while an older one can be closed for it. A client that opens many connections
    closes its own: the oldest one of the address that has most. One that has shown a token is never closed for one
    that has not. The kubelet's probe therefore gets through while others hold thousands of connections.
    """

    connections_max = 256
    """One costs about 20 kB, and up to 80 kB while a request arrives."""

    def __init__(self) -> None:
        self._manager: web.Server | None = None
        self._listener: asyncio.Server | None = None
        self.connections: dict[Connection, None] = {}
        """In the order in which they were opened."""
        self._addresses: dict[str, dict[Connection, None]] = {}
        """The same by address."""
        self._unproven: collections.Counter[str] = collections.Counter()
        """Number of connections of an address that have shown no token."""

    @abc.abstractmethod
    async def answer(self, request: web.BaseRequest) -> web.Response:
        """The answer to a request. An answer of 400 and above ends the connection."""

    async def start(self, host: str | None, port: int) -> None:
        """Listen; host None is every address of the pod, port 0 any free one. Raises OSError where that is taken."""
        self._manager = manager = web.Server(self._serve)
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(lambda: Connection(self, manager), host, port, backlog=BACKLOG)
        for each in self._listener.sockets:
            # Connections inherit them.
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)

    @property
    def port(self) -> int:
        """Where it listens."""
        assert self._listener is not None, "start() comes first"
        return int(self._listener.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Close the port and every connection; a request that is being answered gets a second."""
        if self._listener is None or self._manager is None:
            return
        self._listener.close()
        self._manager.pre_shutdown()
        await self._manager.shutdown(1.0)
        self._listener = None

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = cast(Connection, request.protocol)
        connection.allow(REQUEST_SECONDS, busy=True)
        answer = await self.answer(request)
        response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=answer.headers)
        if answer.status >= 400 or not self._keeps(connection):
            response.force_close()
        body = answer.body if isinstance(answer.body, bytes) else b""
        if answer.status != 204:
            response.content_length = len(body)
        with contextlib.suppress(ConnectionError):
            await response.prepare(request)
            # In pieces of one body, so that it is held once however many peers do not read it.
            for start in range(0, len(body) if request.method != "HEAD" else 0, PIECE_BYTES):
                await response.write(memoryview(body)[start : start + PIECE_BYTES])
            await response.write_eof()
            # aiohttp does not wait for the peer to read the last piece, and the deadline is for that, too.
            await request.writer.drain()
            if response.keep_alive:
                connection.allow(IDLE_SECONDS, busy=False)
        return response

    def _keeps(self, connection: Connection) -> bool:
        """True if it may stay open after the answer. A quarter of the room is left for others: no connection that waits
        for its next request has to be closed for a new one."""
        few = len(self.connections) <= self.connections_max * 3 // 4
        few_of_address = self._count(connection.address) <= CONNECTIONS_PER_ADDRESS_MAX * 3 // 4
        return few and few_of_address and connection in self.connections and connection.in_bounds

    def admit(self, connection: Connection) -> bool:
        """Count it if there is room, made by closing one without a token, or an idle one, if need be."""
        address = connection.address
        if self._count(address) >= CONNECTIONS_PER_ADDRESS_MAX and not self._drop(self._addresses[address]):
            return False
        if len(self.connections) >= self.connections_max and not self._drop(self._busiest()):
            return False
        self.connections[connection] = None
        self._addresses.setdefault(address, {})[connection] = None
        self._unproven[address] += 1
        return True

    def prove(self, request: web.BaseRequest) -> None:
        """Its connection has shown a pod's token."""
        connection = cast(Connection, request.protocol)
        if connection in self.connections and not connection.proven:
            connection.proven = True
            self._is_proven(connection.address)

    def forget(self, connection: Connection) -> None:
        """It is closed."""
        if connection not in self.connections:
            return
        del self.connections[connection]
        if not connection.proven:
            self._is_proven(connection.address)
        of_address = self._addresses[connection.address]
        del of_address[connection]
        if not of_address:
            del self._addresses[connection.address]

    def _count(self, address: str) -> int:
        return len(self._addresses.get(address, ()))

    def _busiest(self) -> dict[Connection, None]:
        """The connections of the address with the most that have shown no token; all: each has."""
        return (
            self._addresses[max(self._unproven, key=self._unproven.__getitem__)] if self._unproven else self.connections
        )

    def _drop(self, connections: dict[Connection, None]) -> bool:
        """Close the oldest of these that has shown no token, else one that waits for its next report (a sender opens
        another); whether there was one."""
        oldest = next((c for c in connections if not c.proven), None)
        oldest = oldest or next((c for c in connections if not c.busy), None)
        if oldest is None:
            return False
        oldest.cut()
        return True

    def _is_proven(self, address: str) -> None:
        """One connection less of that address that has shown no token."""
        self._unproven[address] -= 1
        if not self._unproven[address]:
            del self._unproven[address]


def not_served(request: web.BaseRequest, path: str) -> web.Response | None:
    """The refusal of all but GET and HEAD of this path; None: it is served."""
    if request.path == path and request.method in ("GET", "HEAD"):
        return None
    return web.Response(status=404, text=f"only GET {path} is served here\n")


class Connection(web.RequestHandler):
    """One of a bounded server, as aiohttp parses and serves it."""

    __slots__ = ("_deadline", "_room", "_server", "_socket", "address", "busy", "proven")

    def __init__(self, server: BoundedServer, manager: web.Server) -> None:
        super().__init__(
            manager,
            loop=asyncio.get_running_loop(),
            auto_decompress=False,
            lingering_time=0.0,  # a refused body is not read
            tcp_keepalive=False,  # the deadlines end a dead connection sooner
            access_log=None,  # type: ignore[arg-type]
            logger=_NO_LOG,
        )
        self._server = server
        self._deadline: asyncio.TimerHandle | None = None
        self._room = REQUEST_BYTES_MAX
        self._socket: asyncio.Transport | None = None
        """None before and after; aiohttp's own is None already while an answer is still in its buffer."""
        self.address = ""
        self.proven = False
        """True once it has shown a pod's token."""
        self.busy = True
        """True until its first request is answered, and while a later one is being answered."""

    @property
    def in_bounds(self) -> bool:
        """True if its peer has sent no more than a request may have."""
        return self._room >= 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take it, or cut it before aiohttp knows of it. If it were cut a moment later, the task that aiohttp makes for
        it would end with an AssertionError that nobody retrieves (aiohttp 3.14, web_protocol.start)."""
        self.address = str((transport.get_extra_info("peername") or ("",))[0])
        made = cast(asyncio.Transport, transport)
        if not self._server.admit(self):
            made.abort()
            return
        self._socket = made
        super().connection_made(made)
        self.allow(HEADER_SECONDS, busy=True)

    def data_received(self, data: bytes) -> None:
        """Parse as many bytes as one request may have; the rest is not read. Otherwise aiohttp queues 32 requests with
        128 headers of 8 kB each for a connection: 30 connections of a pod took 1.3 GB."""
        room = max(self._room, 0)
        self._room -= len(data)
        super().data_received(data[:room])
        if not self.in_bounds and self._socket is not None and self._socket.is_reading():
            self._socket.pause_reading()

    def connection_lost(self, exc: BaseException | None) -> None:
        """It is closed."""
        if self._socket is not None:
            self._end()
            self._socket = None
            super().connection_lost(exc)

    def allow(self, seconds: float, *, busy: bool) -> None:
        """From now on this much time until the connection is cut."""
        if self._socket is not None:
            self._end_deadline()
            self._deadline = asyncio.get_running_loop().call_later(seconds, self._socket.abort)
        self.busy = busy
        if not busy and self.in_bounds:
            self._room = REQUEST_BYTES_MAX

    def cut(self) -> None:
        """Close it at once."""
        if self._socket is not None:
            self._socket.abort()
        self._end()

    def _end(self) -> None:
        self._end_deadline()
        self._server.forget(self)

    def _end_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
