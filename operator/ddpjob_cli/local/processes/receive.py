"""The receiver of progress on loopback: what `ddpjob.progress()` in a local trainer posts to.

It speaks the same protocol as the operator's receiver in a cluster. Other users of the machine can reach loopback too,
so a report needs the job's token, and a client that sends slowly, too much or nothing is disconnected.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any

PATH = "/v1/progress"
BODY_BYTES_MAX = 8192  # a report with 16 metrics is below 1 kB
REQUEST_SECONDS = 5.0  # for a connection without a valid report; a request on loopback takes a millisecond
IDLE_SECONDS = 60.0  # for a connection after a report; a trainer posts at most every 5 s
CONNECTIONS_MAX = 32  # beside the ranks there may be another user's, and some left over from the previous attempt
KEPT_MAX = 16  # one beyond them is closed with its answer, so that others find room
DISCARD_BYTES_MAX = 1 << 20  # of a refused body, because closing on unread data resets the connection with the answer
CHECK_SECONDS = 0.5  # between two checks of the time limits


class LocalReceiver(ThreadingHTTPServer):
    """Listens on a free port of 127.0.0.1; serves from `start` to `stop`.

    `on_report` gets the body of each authenticated report, in a thread of the receiver, one call at a time; it returns
    None, or the sentence why it refuses. `token_file` is written with mode 0600 and removed by `stop`.
    """

    daemon_threads = False  # so that stop() waits for them: the runner takes no report after it
    request_queue_size = 128

    def __init__(self, on_report: Callable[[bytes], str | None], token_file: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}{PATH}"
        self.on_report = on_report
        self.token_file = token_file
        self.token = secrets.token_urlsafe(32)
        self.reporting = threading.Lock()
        self.deadlines: dict[Any, float] = {}
        """When each connection is closed, on the monotonic clock."""
        self._serving = threading.Thread(target=self.serve_forever, args=(CHECK_SECONDS,), daemon=True)

    def start(self) -> None:
        """Write the token, serve and return. Raises OSError where the file cannot be written."""
        self.token_file.unlink(missing_ok=True)
        descriptor = os.open(self.token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(self.token)
        self._serving.start()

    def stop(self) -> None:
        """Close every connection, wait for the threads, remove the token. Waits only for a running `on_report`."""
        if not self._serving.is_alive():
            return
        disconnect(self.socket)  # wakes serve_forever, which otherwise ends at the next check
        self.shutdown()
        for connection in list(self.deadlines):
            disconnect(connection)
        self.server_close()
        self.token_file.unlink(missing_ok=True)

    def server_bind(self) -> None:
        """Without HTTPServer's look-up of the host name, which takes seconds where DNS is broken."""
        TCPServer.server_bind(self)

    def verify_request(self, request: Any, client_address: Any) -> bool:  # noqa: ARG002
        """True: there is room, made by closing the connection whose time ends first. One with a report has a minute, so
        another user who opens connections without end closes his own."""
        if len(self.deadlines) >= CONNECTIONS_MAX:
            oldest = min(list(self.deadlines.items()), key=lambda item: item[1])[0]
            self.deadlines.pop(oldest, None)
            disconnect(oldest)
        return True

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in its own thread."""
        self.deadlines[request] = time.monotonic() + REQUEST_SECONDS
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """The end of a connection, in its own thread."""
        self.deadlines.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Close the connections whose time is over: a time-out of each recv would not end a client that trickles."""
        now = time.monotonic()
        for connection, deadline in list(self.deadlines.items()):
            if now >= deadline:
                disconnect(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """A connection that broke off is nothing to tell; a mistake of ours is raised in its thread."""
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, OSError):
            raise error


class Handler(BaseHTTPRequestHandler):
    """One connection. A refusal ends it, so that what follows a bad request is never read as another."""

    protocol_version = "HTTP/1.1"  # keep-alive
    server: LocalReceiver

    def do_POST(self) -> None:
        """A report; its headers are judged before its body is read."""
        if (refusal := self.refusal()) is not None:
            self.answer(*refusal)
            return
        length = int(self.headers["Content-Length"])
        body = self.rfile.read(length)
        if len(body) < length:  # the trainer was killed while it sent, or it was too slow
            self.close_connection = True
            return
        self.server.deadlines[self.connection] = time.monotonic() + IDLE_SECONDS
        self.hand_over(body)

    def refusal(self) -> tuple[HTTPStatus, str] | None:
        """Why the body is not read."""
        if self.path != PATH:
            return HTTPStatus.NOT_FOUND, f"{self.path[:80]}: is not served; reports go to {PATH}"
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(token.strip().encode(), self.server.token.encode()):
            return HTTPStatus.UNAUTHORIZED, "Authorization: must be Bearer and this job's token"
        lengths = self.headers.get_all("Content-Length", [])
        if not lengths or "Transfer-Encoding" in self.headers:
            return HTTPStatus.LENGTH_REQUIRED, "Content-Length: is required; chunks are not read"
        if len(lengths) > 1 or not (lengths[0].isascii() and lengths[0].isdecimal()):
            return HTTPStatus.BAD_REQUEST, f"Content-Length: must be one whole number, is {', '.join(lengths)[:80]}"
        if len(lengths[0]) > 9 or int(lengths[0]) > BODY_BYTES_MAX:
            return HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"Content-Length: must be at most {BODY_BYTES_MAX}"
        return None

    def hand_over(self, body: bytes) -> None:
        """Answer as `on_report` does. Raises RuntimeError where it fails, after the trainer has its answer."""
        try:
            with self.server.reporting:
                sentence = self.server.on_report(body)
        except Exception as error:
            self.answer(HTTPStatus.INTERNAL_SERVER_ERROR, "the receiver failed; the report is not the cause")
            raise RuntimeError("on_report must return its refusal, not raise") from error
        self.answer(HTTPStatus.NO_CONTENT if sentence is None else HTTPStatus.BAD_REQUEST, sentence)

    def answer(self, status: HTTPStatus, sentence: str | None = None) -> None:
        """Send the status, with the sentence as {"error": …}."""
        body = b"" if sentence is None else json.dumps({"error": sentence}).encode()
        self.send_response(status)
        if body:
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
        if body or len(self.server.deadlines) > KEPT_MAX:
            self.send_header("Connection", "close")  # the base class closes for it, too
        if status == HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002
        """An error of the base class as JSON; its own page repeats the request as HTML."""
        self.answer(HTTPStatus(code), message or HTTPStatus(code).phrase)

    def version_string(self) -> str:
        """The Server header, without the versions of Python and its library."""
        return "ddpjob"

    def finish(self) -> None:
        """Let the client read the answer: closing on unread data would reset the connection."""
        super().finish()
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            left = DISCARD_BYTES_MAX
            while left > 0 and (data := self.connection.recv(65536)):
                left -= len(data)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
        """Nothing: stderr belongs to the screen."""


def disconnect(connection: socket.socket) -> None:
    """Wake whoever waits on it, with the end of the stream."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
