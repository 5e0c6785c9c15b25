"""A connection to a cluster: kubeconfig, requests with a bound on their time, and errors in one sentence."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import re
import threading
import urllib.parse
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ddpjob_cli.client import errors
from ddpjob_cli.client.errors import ClusterError, CutOffError, NoAnswerError
from ddpjob_cli.manifest.yamlfile import InputError
from ddpjob_operator.job import requests
from ddpjob_operator.job.typos import suggestion

Raw = dict[str, Any]
USER_AGENT = "ddpjob"
T = TypeVar("T")

REQUEST_SECONDS = 10.0
SILENT_SECONDS = 120.0  # load balancers drop a silent connection after 4 to 10 minutes, without a word to its ends
MERGE = "application/merge-patch+json"
IN_POD = Path("/var/run/secrets/kubernetes.io/serviceaccount")
NO_CLIENT = "commands for a cluster need the Kubernetes client: pip install 'ddpjob[client]', from a clone '.[client]'"

_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


@dataclass(frozen=True)
class Target:
    """Which cluster and namespace, as the options say; None: what the kubeconfig says."""

    context: str | None = None
    namespace: str | None = None
    request_seconds: float = REQUEST_SECONDS
    kubeconfig: str | None = None
    """A file in place of those that KUBECONFIG names."""
    silent_seconds: float = SILENT_SECONDS
    """Without a byte for so long, the connection of an answer without an end is taken for a dead one."""


class Cluster:
    """Requests to one API server, in one namespace. Each method raises ClusterError."""

    def __init__(self, client: Any, context: str, namespace: str, seconds: float, silent: float) -> None:
        self._client = client
        self.context = context
        """The words for it in messages: context kind-test (https://127.0.0.1:6443)."""
        self.namespace = namespace
        self._seconds, self._silent_seconds = seconds, silent

    def get(self, path: str, **params: str) -> Raw:
        """An object, or a list."""
        return self._json("GET", path, params)

    def create(self, path: str, body: Raw, **params: str) -> Raw:
        """Create an object; the one that the server has made."""
        return self._json("POST", path, params, body)

    def patch(self, path: str, body: Raw | list[Raw], kind: str = MERGE) -> Raw:
        """Change an object, by a merge patch or the given kind; the object afterwards."""
        return self._json("PATCH", path, {}, body, kind)

    def delete(self, path: str, **params: str) -> Raw:
        """Delete an object, and in the background what it owns."""
        return self._json("DELETE", path, params)

    def pieces(self, path: str, **params: str) -> Iterator[bytes]:
        """An answer of any length that is no JSON, as it comes: a log."""
        answer = self._send("GET", path, params, stream=True)
        try:
            yield from answer.stream(2**16, decode_content=True)
        except Exception as error:
            if _is_network(error):
                raise CutOffError(f"{self.context} does not answer{_why(error, self._silent_seconds)}") from None
            raise
        finally:
            answer.close()

    def lines(self, path: str, **params: str) -> Iterator[str]:
        """The lines of an answer without an end, such as a log that is followed. One that is cut by the end of the
        connection is left out: whoever asks again gets it whole. Bytes that are no UTF-8 are kept (surrogateescape)."""
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
        # The API server names the manager of the fields that are written by it.
        headers = {"Accept": "application/json, */*", "User-Agent": USER_AGENT}
        if body is not None:
            headers["Content-Type"] = kind or "application/json"
        # A token of a plugin that has expired is renewed here, which may ask the user to log in: not bounded.
        self._client.update_params_for_auth(headers, [], ["BearerToken"], path, method, body)
        query = f"?{urllib.parse.urlencode(params)}" if params else ""
        url = self._client.configuration.host.rstrip("/") + path + query
        data = None if body is None else json.dumps(body).encode()

        def send() -> Any:
            return self._client.rest_client.pool_manager.request(
                method, url, body=data, headers=headers, preload_content=not stream, retries=False,
                timeout=_timeout(self._seconds, self._silent_seconds if stream else self._seconds),
            )  # fmt: skip

        try:
            answer = _within(self._seconds, send)
        except Exception as error:
            if _is_network(error):
                raise NoAnswerError(f"{self.context} does not answer{_why(error, self._seconds)}") from None
            raise
        if not 200 <= answer.status < 300:
            raise errors.of_answer(requests.read(method, path), answer.status, answer.data or b"", self.context)
        return answer


def connect(target: Target) -> Cluster:
    """The cluster that the options and the kubeconfig name, or that of the pod. Raises InputError, ClusterError."""
    try:
        import kubernetes.client
        import kubernetes.config
    except ImportError:
        raise InputError(NO_CLIENT) from None
    warnings.filterwarnings("ignore", message=".*Unverified HTTPS request.*")  # the kubeconfig has asked for it
    settings = kubernetes.client.Configuration()
    if target.context is None and target.kubeconfig is None and not has_kubeconfig():
        name, namespace = _of_pod(kubernetes.config, settings)
    else:
        name, namespace = _of_kubeconfig(kubernetes.config, settings, target)
    namespace = target.namespace or namespace
    if not _NAMESPACE.fullmatch(namespace):  # it would be another path of the API
        raise InputError(f"{namespace!r} is not the name of a namespace: lower-case letters, digits and -")
    where = f"{name} ({settings.host})"
    client = kubernetes.client.ApiClient(settings)
    return Cluster(client, where, namespace, target.request_seconds, target.silent_seconds)


def has_kubeconfig() -> bool:
    """Whether the user has one, which may still be wrong in any way."""
    return bool(os.environ.get("KUBECONFIG")) or os.path.exists(os.path.expanduser("~/.kube/config"))


def _of_pod(config: Any, settings: Any) -> tuple[str, str]:
    try:
        config.load_incluster_config(client_configuration=settings)
        return "this pod's cluster", (IN_POD / "namespace").read_text().strip()
    except (config.ConfigException, OSError):
        text = "no cluster is known: KUBECONFIG is not set, and there is no ~/.kube/config. "
        raise InputError(f"{text}On this machine alone: ddpjob run") from None


def _of_kubeconfig(config: Any, settings: Any, target: Target) -> tuple[str, str]:
    """The name for messages, and the namespace of the context."""
    wanted = target.context
    named = target.kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"
    try:
        active: Any = None
        if wanted:
            # All contexts; the package's own list needs a current one, which some leave out on purpose.
            merged = config.kube_config.KubeConfigMerger(named).config
            contexts = [context.value for context in merged["contexts"]] if merged else []
        else:
            contexts, active = config.list_kube_config_contexts(named)
        names = [str(c["name"]) for c in contexts]
        if wanted is not None and wanted not in names:
            there = ", ".join(names) or "none"
            raise InputError(f"--context {wanted}: not in {named}{suggestion(wanted, names)} (there: {there})")
        chosen = active if wanted is None else next(c for c in contexts if c["name"] == wanted)
        with _complaints() as said:
            config.load_kube_config(named, context=wanted, client_configuration=settings)
        if said:
            raise InputError(f"{named}: no credentials for context {chosen['name']}: {'; '.join(said)[:300]}")
        return f"context {chosen['name']}", str((chosen.get("context") or {}).get("namespace") or "default")
    except InputError:
        raise
    except Exception as error:  # a file of any content: the package raises what it happens to meet
        raise InputError(f"{named}: the kubeconfig cannot be used: {_short(error)}") from None


@contextlib.contextmanager
def _complaints() -> Iterator[list[str]]:
    """What the package logs: that a plugin for credentials failed. It then goes on without any."""
    said: list[str] = []
    listener = logging.Handler(logging.ERROR)
    listener.emit = lambda record: said.append(" ".join(record.getMessage().split()))  # type: ignore[method-assign]
    logging.getLogger().addHandler(listener)
    try:
        yield said
    finally:
        logging.getLogger().removeHandler(listener)


def _within(seconds: float, do: Callable[[], T]) -> T:
    """What `do` gives, or TimeoutError: timeouts of sockets bound neither DNS nor an answer that comes in drops."""
    answer: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(1)

    def run() -> None:
        try:
            answer.put((do(), None))
        except BaseException as error:
            answer.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        result, error = answer.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def _timeout(connect_seconds: float, read_seconds: float | None) -> Any:
    import urllib3

    return urllib3.Timeout(connect=connect_seconds, read=read_seconds)


def _is_network(error: BaseException) -> bool:
    import urllib3

    return isinstance(error, (urllib3.exceptions.HTTPError, OSError))


def _why(error: BaseException, seconds: float) -> str:
    """What has failed of a connection, in the system's words."""
    import urllib3

    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return f": {cause.strerror}"
        if isinstance(cause, ConnectionError) and str(cause):  # of http.client: they have no number
            return f": {cause}"
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, (TimeoutError, urllib3.exceptions.TimeoutError)):
        return f" within {seconds:g} s"
    return f": {_short(error)}"


def _short(error: BaseException) -> str:
    """The end of an exception's text: urllib3 puts the objects concerned before the reason."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text.rsplit(">: ", 1)[-1].rsplit("): ", 1)[-1][:200] if "object at 0x" in text else text[:200]
