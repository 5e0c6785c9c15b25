"""The HTTP server behind each port of the operator: /healthz, /metrics and the reports of trainers.

In: TCP connections from any pod of the cluster, most of them not authenticated. Out: calls of `answer`, which the
subclasses implement. Connections, bytes per request and time per request are bounded, bodies are not decompressed, and
nothing is read after a refusal. A Connection is aiohttp's RequestHandler; `BoundedServer` counts connections and picks
the one to close.

The bounds are ours because aiohttp's server (3.14) has none for connections, and queues up to 32 requests of 128
headers per connection (web_protocol.py: MAX_MSG_QUEUE_SIZE, max_headers, max_field_size). The price: Connection
overrides methods of an aiohttp class, so a new aiohttp needs tests/unit/test_kube_ports.py to pass.
"""

from __future__ import annotations

import abc
import asyncio
import collections
import contextlib
import logging
import socket
from collections.abc import Callable
from typing import cast

from aiohttp import web

HEADER_SECONDS = 5.0  # seconds from the opening of a connection to the end of its first headers
REQUEST_SECONDS = 10.0  # seconds from the headers to the end of the answer; Prometheus' own limit for a scrape is 10 s
IDLE_SECONDS = 75.0  # between two requests: Prometheus scrapes every minute or more often, trainers report every 5 s
REQUEST_BYTES_MAX = 24 << 10  # bytes: a token of 8 kB, a report of 8 kB, and the other headers
CONNECTIONS_PER_ADDRESS_MAX = 64  # hostNetwork pods share the address of their node, and so does the kubelet
PIECE_BYTES = 1 << 16  # answers are written in pieces of this size
# Kernel socket buffers count towards the container's memory limit, and can grow to 10 MB if their size is not set.
RECEIVE_BUFFER_BYTES, SEND_BUFFER_BYTES = 8 << 10, 64 << 10
BACKLOG = 1024

# Disabled, because aiohttp logs requests that it cannot parse, tokens included.
_NO_LOG = logging.getLogger(f"{__name__}.http")
_NO_LOG.disabled = True


class BoundedServer(abc.ABC):
    """An HTTP server with limits. It listens from `start` to `stop`.

    If there is no room for a new connection, the server closes one without a token: the oldest from the address that
    has the most. So a client that opens many connections closes its own, and the kubelet's probe gets through. A
    connection that has shown a token is closed only while it waits for its next request.
    """

    connections_max = 256
    """Each connection takes about 20 kB of memory, and up to 80 kB while a request arrives."""

    def __init__(self) -> None:
        self._manager: web.Server | None = None
        self._listener: asyncio.Server | None = None
        self.connections: dict[Connection, None] = {}
        """Open connections, oldest first."""
        self._addresses: dict[str, dict[Connection, None]] = {}
        """Open connections by address of the peer."""

    @abc.abstractmethod
    async def answer(self, request: web.BaseRequest) -> web.Response:
        """Return the answer to a request. A status of 400 or more closes the connection."""

    async def start(self, host: str | None, port: int) -> None:
        """Listen. host None: all addresses of the pod; port 0: any free port. Raise OSError if the port is taken."""
        self._manager = manager = web.Server(self._serve)
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(lambda: Connection(self, manager), host, port, backlog=BACKLOG)
        for each in self._listener.sockets:
            # Accepted connections inherit the buffer sizes of the listening socket.
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)

    @property
    def port(self) -> int:
        assert self._listener is not None, "start() comes first"
        return int(self._listener.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Close the port and all connections. A request that is being answered has one more second."""
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
            # Write views of one body, so that a peer that does not read holds no copy of the body.
            for start in range(0, len(body) if request.method != "HEAD" else 0, PIECE_BYTES):
                await response.write(memoryview(body)[start : start + PIECE_BYTES])
            await response.write_eof()
            # write_eof returns before the peer has read the last piece. So wait here, within the deadline.
            await request.writer.drain()
            if response.keep_alive:
                connection.allow(IDLE_SECONDS, busy=False)
        return response

    def _keeps(self, connection: Connection) -> bool:
        """True if a connection may stay open after an answer.

        A quarter of the connections stays free, so that the server rarely closes an idle connection for a new one.
        """
        few = len(self.connections) <= self.connections_max * 3 // 4
        few_of_address = self._count(connection.address) <= CONNECTIONS_PER_ADDRESS_MAX * 3 // 4
        return few and few_of_address and connection in self.connections and connection.in_bounds

    def admit(self, connection: Connection) -> bool:
        """Admit a new connection, closing another one if necessary. Return False if there is no room."""
        address = connection.address
        if self._count(address) >= CONNECTIONS_PER_ADDRESS_MAX and not self._drop(self._addresses[address]):
            return False
        if len(self.connections) >= self.connections_max:
            unproven = collections.Counter(c.address for c in self.connections if not c.proven)
            busiest = self._addresses[max(unproven, key=unproven.__getitem__)] if unproven else self.connections
            if not self._drop(busiest):
                return False
        self.connections[connection] = None
        self._addresses.setdefault(address, {})[connection] = None
        return True

    def prove(self, request: web.BaseRequest) -> None:
        """Mark the connection of a request with a verified token. The server then closes it only while it is idle."""
        cast(Connection, request.protocol).proven = True

    def forget(self, connection: Connection) -> None:
        """Stop counting a connection."""
        if connection in self.connections:
            del self.connections[connection]
            of_address = self._addresses[connection.address]
            del of_address[connection]
            if not of_address:
                del self._addresses[connection.address]

    def _count(self, address: str) -> int:
        return len(self._addresses.get(address, ()))

    def _drop(self, connections: dict[Connection, None]) -> bool:
        """Close the oldest connection without a token, else the oldest idle one. Return False if neither exists.

        Closing an idle connection is harmless: a trainer opens a new connection for its next report.
        """
        oldest = next((c for c in connections if not c.proven), None)
        oldest = oldest or next((c for c in connections if not c.busy), None)
        if oldest is None:
            return False
        oldest.cut()
        return True


def not_served(request: web.BaseRequest, path: str) -> web.Response | None:
    """Return the refusal of any request other than GET and HEAD of `path`."""
    if request.path == path and request.method in ("GET", "HEAD"):
        return None
    return web.Response(status=404, text=f"only GET {path} is served here\n")


class Health(BoundedServer):
    """Serves /healthz: 503 with the reason if `unhealthy` returns one, else 200. `remark` is added to both.

    kopf's own probe (1.45) answers only after the startup handlers. A pod that waits there for the CRD would be killed.
    """

    def __init__(self, unhealthy: Callable[[], str], remark: Callable[[], str] = str) -> None:
        super().__init__()
        self._unhealthy, self._remark = unhealthy, remark

    async def answer(self, request: web.BaseRequest) -> web.Response:
        """Answer a probe. The kubelet opens a connection per probe, so closing it afterwards is harmless."""
        if (refusal := not_served(request, "/healthz")) is not None:
            return refusal
        why, more = self._unhealthy(), self._remark()
        return web.Response(status=503 if why else 200, text=f"{why or 'ok'}{more and f'; {more}'}\n")


class Connection(web.RequestHandler):
    """A connection of a BoundedServer. aiohttp parses its requests."""

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
        """None before opening and after closing. aiohttp's own field is None already while an answer is buffered."""
        self.address = ""
        self.proven = False
        """True after a valid token."""
        self.busy = True
        """True until the first request is answered, and while a later one is being answered."""

    @property
    def in_bounds(self) -> bool:
        """True if the peer has sent at most REQUEST_BYTES_MAX bytes for the current request."""
        return self._room >= 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Admit the connection, or abort it before aiohttp starts a task for it.

        After a later abort, connection_lost could come before that task runs. The task's `assert manager is not None`
        (aiohttp 3.14.5, web_protocol.py, RequestHandler.start) would then fail unseen.
        """
        self.address = str((transport.get_extra_info("peername") or ("",))[0])
        made = cast(asyncio.Transport, transport)
        if not self._server.admit(self):
            made.abort()
            return
        self._socket = made
        super().connection_made(made)
        self.allow(HEADER_SECONDS, busy=True)

    def data_received(self, data: bytes) -> None:
        """Parse at most REQUEST_BYTES_MAX bytes per request, and stop reading after that.

        Otherwise aiohttp (3.14) queues 32 requests of 128 headers of 8 kB: 30 connections of one pod took 1.3 GB.
        """
        room = max(self._room, 0)
        self._room -= len(data)
        super().data_received(data[:room])
        if not self.in_bounds and self._socket is not None and self._socket.is_reading():
            self._socket.pause_reading()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Stop counting the connection, unless it was never admitted."""
        if self._socket is not None:
            self._end()
            self._socket = None
            super().connection_lost(exc)

    def allow(self, seconds: float, *, busy: bool) -> None:
        """Restart the deadline: abort the connection in `seconds`."""
        if self._socket is not None:
            self._end_deadline()
            self._deadline = asyncio.get_running_loop().call_later(seconds, self._socket.abort)
        self.busy = busy
        if not busy and self.in_bounds:
            self._room = REQUEST_BYTES_MAX

    def cut(self) -> None:
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
