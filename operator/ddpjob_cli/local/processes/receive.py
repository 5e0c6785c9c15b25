"""Receive progress on loopback, with the protocol of the operator's receiver. Other users of this machine can connect
too, so a report needs the job's token, and the number of connections is limited."""

from __future__ import annotations

import datetime as dt
import hmac
import json
import os
import secrets
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any

from ddpjob_core.members import LEADER_PATH
from ddpjob_operator.job import api
from ddpjob_operator.observed import kubeflow
from ddpjob_operator.observed.reports import BadReportError, Report, check_rank

PATH = "/v1/progress"
BODY_BYTES_MAX = 8192  # a report with 16 metrics is below 1 kB
READ_BYTES_MAX = 1 << 20  # read the whole body: closing with unread data resets the connection and loses the answer
SILENT_SECONDS = 5.0  # a client that is silent for longer is disconnected
CONNECTIONS_MAX = 32  # maximum: one per rank that reports, plus some for other users of the machine


class LocalReceiver(ThreadingTCPServer):
    """Listens on a free port of 127.0.0.1. `on_report` gets the body of each authenticated report, in a thread, one
    call at a time. It returns None, or why it refuses. `token_file` has mode 0600 and is removed by `stop`."""

    daemon_threads = False  # stop() does not wait for threads, because the runner accepts no report after stop()
    request_queue_size = 128

    def __init__(self, on_report: Callable[[bytes], str | None], token_file: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}{PATH}"
        self.on_report = on_report
        self.leader: Mapping[str, Any] | None = None
        """Answer for agents that ask who leads."""
        self.token_file = token_file
        self.token = secrets.token_urlsafe(32)
        self.reporting = threading.Lock()
        self._connections: dict[Any, None] = {}  # a dict, because it keeps the order of arrival
        self._serving = threading.Thread(target=self.serve_forever, daemon=True)

    def start(self) -> None:
        """Write the token, and begin to serve in a thread. Raise OSError if the file cannot be written."""
        self.token_file.unlink(missing_ok=True)
        descriptor = os.open(self.token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(self.token)
        self._serving.start()

    def stop(self) -> None:
        """Close every connection, wait for running calls of `on_report`, remove the token."""
        if not self._serving.is_alive():
            return
        _disconnect(self.socket)  # wakes serve_forever, which would otherwise end only at its next poll
        self.shutdown()
        for connection in list(self._connections):
            _disconnect(connection)
        self.server_close()
        self.token_file.unlink(missing_ok=True)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread. Beyond the limit close the oldest one: a report takes milliseconds."""
        if len(self._connections) >= CONNECTIONS_MAX:
            oldest = next(iter(list(self._connections)))
            self._connections.pop(oldest, None)
            _disconnect(oldest)
        self._connections[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """Ignore a broken connection. Raise any other error, because it is a bug in our code."""
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, OSError):
            raise error


class Inbox:
    """Passes reports from the receiver's threads to the thread of the run, and wakes it."""

    def __init__(self, spec: api.Spec, token_file: Path, names: Callable[[str], str]) -> None:
        """Begin to receive. names: as in `RunOptions`. Raise OSError if the token cannot be written."""
        self._spec, self._names = spec, names
        self._received: deque[Report] = deque()
        self._total_steps: int | None = None
        self.descriptor, self.wake_descriptor = os.pipe()
        for end in (self.descriptor, self.wake_descriptor):
            os.set_blocking(end, False)
        self.receiver = LocalReceiver(self._receive, token_file)
        self.receiver.start()

    def wake(self) -> None:
        """Wake the run's thread from another thread."""
        with suppress(BlockingIOError, OSError):
            os.write(self.wake_descriptor, b"r")

    def take(self) -> Iterator[Report]:
        """Yield the reports that have arrived."""
        with suppress(BlockingIOError):
            os.read(self.descriptor, 4096)
        while self._received:
            yield self._received.popleft()

    def close(self) -> None:
        self.receiver.stop()
        os.close(self.descriptor)
        os.close(self.wake_descriptor)

    def _receive(self, body: bytes) -> str | None:
        """Queue a report; return why it is refused, or None. Called in the receiver's threads."""
        try:
            now = dt.datetime.now(dt.timezone.utc)
            named = self._names(body.decode(errors="surrogateescape")).encode(errors="surrogateescape")
            report, self._total_steps = kubeflow.read_body(named, now, self._total_steps)
            if report is None:
                return None
            check_rank(self._spec, report.rank)
        except BadReportError as error:
            return str(error)
        self._received.append(report)
        self.wake()
        return None


class Handler(BaseHTTPRequestHandler):
    """Handles one report. The connection is closed after the answer, as in HTTP/1.0."""

    timeout = SILENT_SECONDS
    server: LocalReceiver

    def do_POST(self) -> None:
        """Handle a report, or answer why it is refused."""
        text = self.headers.get("Content-Length", "")
        length = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0
        body = self.rfile.read(min(length, READ_BYTES_MAX))
        if (refusal := self.refusal(text)) is not None:
            self.answer(*refusal)
        elif len(body) == length:  # the body is shorter if the trainer was killed while sending
            self.hand_over(body)

    def do_GET(self) -> None:
        """Tell an agent who leads."""
        refusal = self.refusal("0", LEADER_PATH)
        if refusal is not None or self.server.leader is None:
            self.answer(*(refusal or (HTTPStatus.NO_CONTENT, None)))
        else:
            self.answer(HTTPStatus.OK, self.server.leader)

    def refusal(self, length: str, path: str = PATH) -> tuple[HTTPStatus, str] | None:
        """Return why the body is not a report. length: the header Content-Length."""
        if self.path != path:
            return HTTPStatus.NOT_FOUND, f"{self.path[:80]}: is not served; reports go to {PATH}"
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(token.strip().encode(), self.server.token.encode()):
            return HTTPStatus.UNAUTHORIZED, "Authorization: must be Bearer and this job's token"
        if not (length.isascii() and length.isdecimal()):
            return HTTPStatus.LENGTH_REQUIRED, "Content-Length: must be a whole number; chunks are not read"
        if len(length) > 9 or int(length) > BODY_BYTES_MAX:
            return HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"Content-Length: must be at most {BODY_BYTES_MAX}"
        return None

    def hand_over(self, body: bytes) -> None:
        """Answer as `on_report` decides. If it raises, answer the trainer first, then raise RuntimeError."""
        try:
            with self.server.reporting:
                sentence = self.server.on_report(body)
        except Exception as error:
            self.answer(HTTPStatus.INTERNAL_SERVER_ERROR, "the receiver failed; the report is not the cause")
            raise RuntimeError("on_report must return its refusal, not raise") from error
        self.answer(HTTPStatus.NO_CONTENT if sentence is None else HTTPStatus.BAD_REQUEST, sentence)

    def answer(self, status: HTTPStatus, said: str | Mapping[str, Any] | None = None) -> None:
        """Send an answer. said: the reason of a refusal, or the body."""
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        if said is not None:
            self.wfile.write(json.dumps({"error": said} if isinstance(said, str) else said).encode())

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
        """Print nothing, because stderr belongs to the screen."""


def _disconnect(connection: socket.socket) -> None:
    """Shut the connection down, which wakes a thread that reads from it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
