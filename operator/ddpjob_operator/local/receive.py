"""The receiver of progress on loopback: what `ddpjob.progress()` in a local trainer posts to.

It speaks the same protocol as the operator's receiver in a cluster. Other users of the machine can reach loopback too,
so nothing is believed without the job's token, and a connection that sends slowly, too much or nothing is soon closed.

http.server's request handler, but not its HTTPServer: that one looks its host name up at the start (socket.getfqdn,
seconds where DNS is broken), wakes every half second to see whether it shall stop, and does not wait for its threads.
"""

from __future__ import annotations

import hmac
import io
import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import TracebackType
from typing import Any, cast

PATH = "/v1/progress"
BODY_BYTES_MAX = 8192  # a report with 16 metrics is below 1 kB
REQUEST_SECONDS = 5.0  # from a request's first byte to its last; one on loopback takes a millisecond
IDLE_SECONDS = 60.0  # between two reports on a connection that has shown the token; a trainer posts at most every 5 s
CONNECTIONS_MAX = 32  # rank 0 alone reports; the rest is for strangers and for leftovers of a former attempt
DISCARD_BYTES_MAX, DISCARD_SECONDS = 1 << 20, 1.0  # of a refused body, so that the client gets to read why

OnReport = Callable[[bytes], "str | None"]


class Receiver:
    """Listens on a free port of 127.0.0.1 from `start` to `stop`, or as a context manager.

    `on_report` gets the body of each authenticated report, in a thread of the receiver, one call at a time; it returns
    None, or the sentence why it refuses. `token_file` is written with mode 0600 and removed by `stop`.
    """

    def __init__(self, on_report: OnReport, token_file: Path) -> None:
        self.on_report = on_report
        self.token_file = token_file
        self.token = secrets.token_urlsafe(32)
        self.reporting = threading.Lock()
        self._listener: socket.socket | None = None
        self._accepting = threading.Thread(target=self._accept, name="progress receiver", daemon=True)
        self._stopping = threading.Event()
        self._connections: dict[socket.socket, threading.Thread] = {}  # kept by the accepting thread, then by stop()

    def start(self) -> None:
        """Write the token, listen and return. Raises OSError where the file cannot be written or no port is free."""
        write_private(self.token_file, self.token)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._accepting.start()

    @property
    def url(self) -> str:
        """Where trainers post, as http://127.0.0.1:40123/v1/progress."""
        assert self._listener is not None, "start() comes first"
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}{PATH}"

    def stop(self) -> None:
        """Close every connection, wait for the threads, remove the token. Waits only for a running `on_report`."""
        if self._listener is None:
            return
        self._stopping.set()
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept(); close() alone would leave it asleep on Linux
        self._accepting.join()
        self._listener.close()
        for connection, thread in self._connections.items():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            thread.join()
        self.token_file.unlink(missing_ok=True)
        self._listener = None

    def __enter__(self) -> Receiver:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def admits(self, authorization: str) -> bool:
        """Is this the header of one who has the token? Compared in constant time."""
        scheme, _, given = authorization.partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self.token.encode())

    def _accept(self) -> None:
        assert self._listener is not None
        while not self._stopping.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                self._stopping.wait(0.1)  # the end; or too many open files, where trying again at once would only spin
                continue
            self._connections = {known: thread for known, thread in self._connections.items() if thread.is_alive()}
            if len(self._connections) >= CONNECTIONS_MAX:
                connection.close()
                continue
            thread = threading.Thread(target=self._serve, args=(connection,), name="progress report", daemon=True)
            thread.start()
            self._connections[connection] = thread

    def _serve(self, connection: socket.socket) -> None:
        try:
            with suppress(OSError):  # a trainer that was killed while it spoke: the node's end is told elsewhere
                Handler(connection, self)
        finally:
            part(connection)


class Handler(BaseHTTPRequestHandler):
    """One connection. A refusal ends it: what follows a request that was not understood is never read as another."""

    protocol_version = "HTTP/1.1"  # keep-alive

    def __init__(self, connection: socket.socket, receiver: Receiver) -> None:
        self.receiver = receiver
        self.idle_seconds = REQUEST_SECONDS
        # The base class wants a server only to keep it for us.
        super().__init__(connection, ("127.0.0.1", 0), cast(Any, receiver))

    def setup(self) -> None:
        """Read by a clock: with a time-out for each recv, one byte every four seconds holds a connection for hours."""
        super().setup()
        self.rfile.close()
        self.clock = ClockedReader(self.connection)
        self.rfile = self.reader = io.BufferedReader(self.clock)

    def handle_one_request(self) -> None:
        """Wait for a request, then read and answer it within REQUEST_SECONDS."""
        self.close_connection = True
        self.clock.allow(self.idle_seconds)
        with suppress(TimeoutError):
            if self.reader.peek(1):
                self.clock.allow(REQUEST_SECONDS)
                super().handle_one_request()

    def do_POST(self) -> None:
        """A report; everything about it is judged before its body is read."""
        if (refusal := self.refusal()) is not None:
            self.answer(*refusal)
            return
        length = int(self.headers["Content-Length"])
        body = self.rfile.read(length)
        if len(body) < length:  # the trainer was killed while it sent
            self.close_connection = True
            return
        self.idle_seconds = IDLE_SECONDS
        sentence = self.hand_over(body)
        self.answer(HTTPStatus.NO_CONTENT if sentence is None else HTTPStatus.BAD_REQUEST, sentence)

    def refusal(self) -> tuple[HTTPStatus, str] | None:
        """Why the request is not worth its body."""
        if self.path != PATH:
            return HTTPStatus.NOT_FOUND, f"{self.path[:80]}: only {PATH} is here"
        if not self.receiver.admits(self.headers.get("Authorization", "")):
            return HTTPStatus.UNAUTHORIZED, "Authorization: must be Bearer and this job's token"
        lengths = self.headers.get_all("Content-Length", [])
        if not lengths or "Transfer-Encoding" in self.headers:
            return HTTPStatus.LENGTH_REQUIRED, "Content-Length: is required, chunks are not read"
        if len(lengths) > 1 or re.fullmatch(r"[0-9]+", lengths[0]) is None:
            return HTTPStatus.BAD_REQUEST, f"Content-Length: must be one whole number, is {', '.join(lengths)[:80]}"
        if len(lengths[0]) > 9 or int(lengths[0]) > BODY_BYTES_MAX:
            return HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"Content-Length: must be at most {BODY_BYTES_MAX}"
        return None

    def hand_over(self, body: bytes) -> str | None:
        """What `on_report` says to it. Raises RuntimeError for a mistake in there, after the trainer has its answer."""
        try:
            with self.receiver.reporting:
                return self.receiver.on_report(body)
        except Exception as error:
            self.answer(HTTPStatus.INTERNAL_SERVER_ERROR, "the receiver failed, which is no fault of the report")
            raise RuntimeError("on_report must answer, not raise") from error

    def answer(self, status: HTTPStatus, sentence: str | None = None) -> None:
        """Send the status, with the sentence as {"error": …}."""
        body = b"" if sentence is None else json.dumps({"error": sentence}).encode()
        self.send_response(status)
        if body:
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Connection", "close")  # the base class closes for it, too
        if status == HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002
        """What the base class does not understand is answered in our form; its own page repeats the request as HTML."""
        self.answer(HTTPStatus(code), message or HTTPStatus(code).phrase)

    def version_string(self) -> str:
        """The Server header, without the versions of Python and its library."""
        return "ddpjob"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
        """Say nothing: stderr is the live table's."""


class ClockedReader(io.RawIOBase):
    """A socket that is read until a deadline, however the bytes trickle in; then TimeoutError."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.deadline = 0.0

    def allow(self, seconds: float) -> None:
        """From now on this much time."""
        self.deadline = time.monotonic() + seconds

    def readable(self) -> bool:
        """True, as io.BufferedReader asks."""
        return True

    def readinto(self, buffer: Any) -> int:
        """At least one byte, 0 at the end."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self.connection.settimeout(left)
        return self.connection.recv_into(buffer)


def part(connection: socket.socket) -> None:
    """End a connection so that the answer arrives: closing on unread data resets it, and who still sends reads nothing.

    Bounded in bytes and time; a client that has closed its side costs neither.
    """
    with suppress(OSError):
        connection.shutdown(socket.SHUT_WR)
        unread = io.BufferedReader(reader := ClockedReader(connection))
        reader.allow(DISCARD_SECONDS)
        left = DISCARD_BYTES_MAX
        while left > 0 and (data := unread.read1()):
            left -= len(data)
    connection.close()


def write_private(path: Path, text: str) -> None:
    """Put `text` into a file that was never readable for others, in the place of an older one."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="ascii") as file:
        file.write(text)
    fresh.replace(path)
