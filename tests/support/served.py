"""A port of the operator, served in a thread of its own, and clients that connect to it."""

import asyncio
import socket
import threading
from collections.abc import Coroutine, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import uvloop

from ddpjob_operator.kube.ports.bounded_server import BoundedServer

BOUND_SECONDS = 20.0


class Served:
    """Serves a BoundedServer on uvloop, as in the operator."""

    def __init__(self, server: BoundedServer) -> None:
        self.server = server
        self.loop = uvloop.new_event_loop()
        self.errors: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda _, context: self.errors.append(context))

    @contextmanager
    def serving(self) -> Iterator[None]:
        thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        thread.start()
        self.run(self.server.start("127.0.0.1", 0))
        yield
        self.run(self.server.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        thread.join(BOUND_SECONDS)
        self.loop.close()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(BOUND_SECONDS)

    def connect(self, address: str = "127.0.0.1") -> socket.socket:
        place = "127.0.0.1", self.server.port
        return socket.create_connection(place, timeout=BOUND_SECONDS, source_address=(address, 0))

    def raw(self, request: bytes) -> bytes:
        """Send these bytes, and return everything that the port answers before it closes."""
        with closing(self.connect()) as connection:
            with suppress(ConnectionError):
                connection.sendall(request)
            return until_closed(connection)

    async def few(self, connections: int = 0) -> bool:
        """Wait until at most this many connections are open: the loop notices a close a moment later."""
        while len(self.server.connections) > connections:
            await asyncio.sleep(0.001)
        return True


def until_closed(connection: socket.socket) -> bytes:
    answer = b""
    with suppress(ConnectionError):
        while data := connection.recv(1 << 16):
            answer += data
    return answer
