"""Posts to the receiver of progress, over one connection for as long as the receiver keeps it open.

A new connection for each report costs the operator more than the report (bench/results).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, urlsplit

if TYPE_CHECKING:
    from http.client import HTTPConnection

ANSWER_BYTES_MAX = 8192
TOKEN_BYTES_MAX = 8192
TIMEOUT_SECONDS = 5.0


class ReportSender:
    """Sends for one thread. environ: DDPJOB_STATUS_TOKEN_FILE and DDPJOB_STATUS_CA_FILE are read. It uses http.client,
    which follows no redirects (the token would follow too) and ignores proxies."""

    def __init__(self, url: str, environ: Mapping[str, str]) -> None:
        self._url = url
        self._environ = environ
        self._connection: HTTPConnection | None = None

    def send(self, body: bytes) -> str | None:
        """Post once. Return None for a 2xx answer, else the problem. Raise OSError, ValueError, HTTPException."""
        return self._request("POST", body)[0]

    def ask(self) -> bytes:
        """Send a GET request. Return the body of a 2xx answer, else b"". Raise OSError, ValueError, HTTPException."""
        problem, body = self._request("GET", None)
        return body if problem is None else b""

    def _request(self, method: str, body: bytes | None) -> tuple[str | None, bytes]:
        is_kept = self._connection is not None
        try:
            return self._request_once(method, body)
        except OSError as error:
            # The receiver has closed the connection: it waits a minute for the next post, or was replaced.
            # With TLS a closed connection raises SSLEOFError, which is no ConnectionError.
            if not is_kept or isinstance(error, TimeoutError):
                raise
            return self._request_once(method, body)

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _request_once(self, method: str, body: bytes | None) -> tuple[str | None, bytes]:
        target = urlsplit(self._url)
        path = (target.path or "/") + (f"?{target.query}" if target.query else "")
        headers = {"Content-Type": "application/json", **_authorization(self._environ)}
        connection = self._connection or _connection(target, self._environ)
        self._connection = None
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            read = answer.read(ANSWER_BYTES_MAX)
            if answer.isclosed() and not answer.will_close:
                self._connection = connection
            return None if 200 <= answer.status < 300 else f"answered {answer.status} {answer.reason}", read
        finally:
            if self._connection is None:
                connection.close()


def _connection(target: SplitResult, environ: Mapping[str, str]) -> HTTPConnection:
    import http.client  # takes 15 ms, so only a process with a receiver imports it, in this thread

    if target.hostname is None or target.scheme not in ("http", "https"):
        raise ValueError("DDPJOB_STATUS_URL is not an http:// or https:// address")
    if target.scheme == "http":
        return http.client.HTTPConnection(target.hostname, target.port, timeout=TIMEOUT_SECONDS)
    import ssl

    trust = ssl.create_default_context(cafile=environ.get("DDPJOB_STATUS_CA_FILE") or None)
    return http.client.HTTPSConnection(target.hostname, target.port, timeout=TIMEOUT_SECONDS, context=trust)


def _authorization(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the header. The token file is read for every post, because the kubelet renews a projected token in place
    at 80 % of its lifetime."""
    path = environ.get("DDPJOB_STATUS_TOKEN_FILE")
    if not path:
        return {}
    with open(path, encoding="ascii") as file:
        return {"Authorization": f"Bearer {file.read(TOKEN_BYTES_MAX).strip()}"}
