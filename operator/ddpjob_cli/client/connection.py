"""A connection to a cluster: kubeconfig, requests with a time limit, and errors in one sentence."""

from __future__ import annotations

import json
import os
import re
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any, TypeVar

import urllib3

from ddpjob_cli.client import errors, kubeconfig
from ddpjob_cli.client.errors import ClusterError, CutOffError, NoAnswerError
from ddpjob_cli.manifest.yamlfile import InputError
from ddpjob_operator.job import requests

Raw = dict[str, Any]
USER_AGENT = "ddpjob"
T = TypeVar("T")

REQUEST_SECONDS = 10.0
SILENT_SECONDS = 120.0  # seconds; load balancers silently drop an idle connection after 4 to 10 minutes
_OF_NETWORK = (urllib3.exceptions.HTTPError, OSError)
MERGE = "application/merge-patch+json"

_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


class Cluster:
    """Requests to one API server, in one namespace. Each method raises ClusterError."""

    def __init__(
        self, access: kubeconfig.Access, namespace: str, seconds: float, silent: float, kubectl: Sequence[str]
    ) -> None:
        self._access = access
        self.kubectl = kubectl  # kubectl's options for the same cluster
        self.context = f"{access.context} ({access.server})"
        self.namespace = namespace
        self._seconds, self._silent_seconds = seconds, silent

    def get(self, path: str, **params: str) -> Raw:
        return self._json("GET", path, params)

    def create(self, path: str, body: Raw, **params: str) -> Raw:
        return self._json("POST", path, params, body)

    def patch(self, path: str, body: Raw | list[Raw], kind: str = MERGE) -> Raw:
        return self._json("PATCH", path, {}, body, kind)

    def delete(self, path: str, **params: str) -> Raw:
        return self._json("DELETE", path, params)

    def pieces(self, path: str, **params: str) -> Iterator[bytes]:
        """Yield an answer that is not JSON, such as a log, piece by piece as it arrives."""
        answer = self._send("GET", path, params, stream=True)
        try:
            yield from answer.stream(2**16, decode_content=True)
        except _OF_NETWORK as error:
            raise CutOffError(f"{self.context} does not answer{_why(error, self._silent_seconds)}") from None
        finally:
            answer.close()

    def lines(self, path: str, **params: str) -> Iterator[str]:
        """Yield the lines of an endless answer. A line that a broken connection cuts off is dropped, because the
        next request returns the whole line. Bytes that are not UTF-8 are kept (surrogateescape)."""
        rest = b""
        for piece in self.pieces(path, **params):
            *whole, rest = (rest + piece).split(b"\n")
            yield from (line.decode(errors="surrogateescape") for line in whole)
        if rest:
            yield rest.decode(errors="surrogateescape")

    def _json(
        self, method: str, path: str, params: Mapping[str, str], body: Raw | list[Raw] | None = None, kind: str = ""
    ) -> Raw:
        answer = self._send(method, path, params, body, kind)
        try:
            found = json.loads(answer.data)
        except ValueError:
            raise ClusterError(f"{self.context} does not answer as a Kubernetes API server does") from None
        return found if isinstance(found, dict) else {}

    def _send(
        self,
        method: str,
        path: str,
        params: Mapping[str, str],
        body: Raw | list[Raw] | None = None,
        kind: str = "",
        *,
        stream: bool = False,
    ) -> Any:
        # The API server records the User-Agent as the manager of written fields.
        headers = {"Accept": "application/json, */*", "User-Agent": USER_AGENT}
        if body is not None:
            headers["Content-Type"] = kind or "application/json"
        # Get the credentials before the request's time limit starts, because a plugin may prompt the user.
        if authorization := self._access.credentials.header():
            headers["Authorization"] = authorization
        query = f"?{urllib.parse.urlencode(params)}" if params else ""
        url = self._access.server + path + query
        data = None if body is None else json.dumps(body).encode()

        def send() -> Any:
            read_seconds = self._silent_seconds if stream else self._seconds
            return self._access.pool.request(
                method, url, body=data, headers=headers, preload_content=not stream, retries=False,
                timeout=urllib3.Timeout(connect=self._seconds, read=read_seconds),
            )  # fmt: skip

        try:
            # Use a thread, because socket timeouts limit neither DNS nor an answer that arrives slowly.
            answer = in_background(send).result(self._seconds)
        except (*_OF_NETWORK, futures.TimeoutError) as error:
            raise NoAnswerError(f"{self.context} does not answer{_why(error, self._seconds)}") from None
        if not 200 <= answer.status < 300:
            raise errors.of_answer(requests.read(method, path), answer.status, answer.data or b"", self.context)
        return answer


def connect(
    context: str | None = None,
    namespace: str | None = None,
    seconds: float = REQUEST_SECONDS,
    file: str | None = None,
    silent: float = SILENT_SECONDS,
) -> Cluster:
    """Return the cluster named by options and kubeconfig, or without these the cluster of the pod that we run in.
    Raise InputError, ClusterError. silent: seconds until an endless answer without a byte counts as dead."""
    if context is None and file is None and not has_kubeconfig():
        access = kubeconfig.of_pod()
    else:
        access = kubeconfig.of_files(file or os.environ.get("KUBECONFIG") or "~/.kube/config", context)
    namespace = namespace or access.namespace
    if not _NAMESPACE.fullmatch(namespace):  # any other text could lead to another path of the API
        raise InputError(f"{namespace!r} is not the name of a namespace: lower-case letters, digits and -")
    chosen = (("--namespace", namespace), ("--context", context), ("--kubeconfig", file))
    kubectl = [word for option, value in chosen if value for word in (option, value)]
    return Cluster(access, namespace, seconds, silent, kubectl)


def has_kubeconfig() -> bool:
    """True if the user has a kubeconfig, valid or not."""
    return bool(os.environ.get("KUBECONFIG")) or os.path.exists(os.path.expanduser("~/.kube/config"))


def in_background(do: Callable[[], T]) -> futures.Future[T]:
    """Call `do` in a thread that does not delay the program's exit. Return a future with its result or error."""
    answer: futures.Future[T] = futures.Future()

    def run() -> None:
        try:
            answer.set_result(do())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return answer


def _why(error: BaseException, seconds: float) -> str:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return f": {cause.strerror}"
        if isinstance(cause, ConnectionError) and str(cause):  # http.client raises RemoteDisconnected without an errno
            return f": {cause}"
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, (TimeoutError, futures.TimeoutError, urllib3.exceptions.TimeoutError)):
        return f" within {seconds:g} s"
    return f": {kubeconfig.short(error)}"
