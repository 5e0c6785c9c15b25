"""Requests to the API server: one aiohttp session, raw dicts, bounded waits.

Objects are dicts, because typed models drop or reject fields of a newer Kubernetes, and cost ten times as much.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import aiohttp
import kopf
import orjson

from ddpjob_operator.job import api, requests
from ddpjob_operator.kube.api import bounded_json
from ddpjob_operator.kube.api.api_error import NO_ANSWER as NO_ANSWER
from ddpjob_operator.kube.api.api_error import ApiError as ApiError
from ddpjob_operator.kube.api.api_error import TooLargeError, bad_answer, no_answer, of_answer, of_status
from ddpjob_operator.kube.api.availability import Availability

T = TypeVar("T")
Raw = dict[str, Any]
Headers = dict[str, str]
_LOGGER = logging.getLogger(__name__)
_JSON = {
    "Content-Type": "application/json",
    # The cluster's public keys are served as jwk-set+json only; a request for plain JSON gets a 406.
    "Accept": "application/json, application/jwk-set+json",
    "User-Agent": "ddpjob-operator",
}
# Request only metadata, because the answer to a create otherwise repeats the whole object. Some servers ignore this.
_METADATA_ALONE: Headers = {"Accept": "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1, application/json"}
READ_AT_ONCE = 65_536
"""Longer JSON is parsed in a thread, off the event loop."""
_REVIEWS = "authorization.k8s.io"
_METADATA_IS_ENOUGH = frozenset({"pods", "services", "events"})


class LoginError(Exception):
    """No usable credentials were found; the message lists the places that were tried."""


def login() -> kopf.ConnectionInfo:
    """Read the credentials: from KUBECONFIG if it is set, else the pod's service account, else ~/.kube/config. Raise
    LoginError.

    Each call reads the credentials again, because the kubelet rotates bound tokens in their file.
    """
    settings = kopf.OperatorSettings()
    named = bool(os.environ.get("KUBECONFIG"))
    try:
        info: Any = None if named else kopf.login_with_service_account(settings=settings)
        info = info or kopf.login_with_kubeconfig(settings=settings)
        if info and not (info.token or info.username or info.certificate_path or info.certificate_data):
            # A plugin provides the credentials (exec, OIDC), and only the full client runs plugins.
            info = kopf.login_via_client(settings=settings, logger=_LOGGER)
    except (OSError, KeyError, TypeError, AttributeError, ValueError, kopf.LoginError) as error:
        raise LoginError(f"the kubeconfig cannot be used: {error!r}") from None
    if info is None or not info.server:
        raise LoginError("neither KUBECONFIG, nor a service account's token, nor ~/.kube/config exists")
    return info  # type: ignore[no-any-return]


def collection(plural: str, namespace: str = "") -> str:
    """Return the path of DDPJobs, or of core objects such as pods; namespace "": in all."""
    return _path(f"apis/{api.API_VERSION}" if plural == api.PLURAL else "api/v1", plural, namespace)


def group_collection(api_version: str, plural: str, namespace: str) -> str:
    """Return the path of the objects of an API group."""
    return _path(f"apis/{api_version}", plural, namespace)


def _path(group: str, plural: str, namespace: str) -> str:
    return f"/{group}/namespaces/{namespace}/{plural}" if namespace else f"/{group}/{plural}"


def _is_of_resources(path: str, asked: requests.ApiRequest) -> bool:
    """True for a request about API objects; False for the API server's own data, such as keys, versions or schema."""
    return path.startswith(("/api/", "/apis/")) and bool(asked.plural)


class _Request(NamedTuple):
    """One request. An answer longer than bytes_max is not read."""

    method: str
    path: str
    body: Raw | None = None
    params: Mapping[str, str] | None = None
    bytes_max: int | None = None


class Page(NamedTuple):
    """One page of a list, and the resource version of the whole list."""

    items: list[Raw]
    version: str


@dataclasses.dataclass(frozen=True)
class RequestLimits:
    connect_seconds: float = 5.0
    request_seconds: float = 30.0
    tries: int = 3
    """For requests that the server certainly did not carry out: 429, and 503 with Retry-After."""
    retry_after_seconds_max: float = 10.0
    """The caller handles longer waits, because a wait in the client would occupy a place of InFlight."""
    silence_seconds: float = 90.0
    """A watch that is silent for longer is dead: the server sends a bookmark about every 60 s."""
    renew_seconds: float = 300.0
    """Credentials are read again after this time. The kubelet rotates a token at 80 % of its hour."""
    page: int = 200
    """Objects per page of a list."""
    page_bytes: int = 4 << 20
    """A longer page is requested in parts. A pod has about 10 kB, but its creator may put a megabyte into it."""


class Client:
    """A client for one API server and one identity. Close it, or use it as an async context manager."""

    def __init__(
        self,
        log_in: Callable[[], kopf.ConnectionInfo] = login,
        limits: RequestLimits = RequestLimits(),
        may_write: Callable[[], bool] = lambda: True,
        answered: Callable[..., None] = lambda *_, **__: None,
        availability: Availability | None = None,
    ) -> None:
        """may_write: called right before each try of a write; False: the write is not sent. answered: called for each
        answer (Meter.answered). availability: tracks outages, shared by several clients.
        """
        self.availability = availability or Availability()
        self.limits = limits
        self._may_write = may_write
        self._told = answered
        self._log_in = log_in
        self._lock = asyncio.Lock()
        self._info: kopf.ConnectionInfo | None = None
        self._sessions: list[aiohttp.ClientSession] = []
        self._headers: dict[str, str] = {}
        self._renew_at = 0.0

    async def __aenter__(self) -> Client:
        """Send nothing: the first request logs in."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, e: BaseException | None, t: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        for session in self._sessions:
            await session.close()
        self._sessions.clear()

    async def get(self, path: str, params: Mapping[str, str] | None = None) -> Raw:
        """Return an object, or the items of a list. Raise ApiError."""
        asked = requests.read("GET", path)
        is_list = asked.verb == "list" and _is_of_resources(path, asked)
        return await self._request(
            _Request("GET", path, params=params), bounded_json.listed if is_list else bounded_json.obj
        )

    async def create(self, path: str, body: Raw, params: Mapping[str, str] | None = None) -> Raw:
        """Return the created object. Raise ApiError.

        Of pods, Services and events only the metadata comes from the server. The rest is `body`, without the changes of
        admission webhooks; those arrive with the watch.
        """
        made = await self._request(_Request("POST", path, body, params), bounded_json.made)
        return {**body, "metadata": made["metadata"]} if made.get("kind") == bounded_json.METADATA_ALONE else made

    async def replace(self, path: str, body: Raw, params: Mapping[str, str] | None = None) -> Raw:
        """Replace the object and return it. The body's resourceVersion guards against lost updates. Raise ApiError."""
        return await self._request(_Request("PUT", path, body, params))

    async def patch(self, path: str, body: Raw) -> Raw:
        """Apply a JSON merge patch and return the object. A uid or resourceVersion in the body is a precondition. Raise
        ApiError.
        """
        return await self._request(_Request("PATCH", path, body))

    async def delete(self, path: str, options: Raw) -> Raw:
        """Return the object that is being deleted, or a Status if the object is gone. Raise ApiError."""
        body = {"apiVersion": "v1", "kind": "DeleteOptions", **options}
        return await self._request(_Request("DELETE", path, body))

    async def pages(self, path: str, selector: str = "", field_selector: str = "") -> AsyncIterator[Page]:
        """Yield the objects of a collection, page by page. Each page is dropped before the next one is read.

        An empty list has one empty page. Raise ApiError; 410 means: start again.
        """
        params = {"labelSelector": selector} if selector else {}
        params |= {"fieldSelector": field_selector} if field_selector else {}
        limit = self.limits.page
        while True:
            # No limit for a single object: etcd bounds its size.
            bytes_max = self.limits.page_bytes if limit > 1 else None
            try:
                listing = _Request("GET", path, params=params | {"limit": str(limit)}, bytes_max=bytes_max)
                content = await self._request_bytes(listing)
            except TooLargeError:
                limit = max(1, limit // 8)
                continue
            try:
                listed = await read_json(partial(bounded_json.page, plural=_plural(path)), content)
            except bounded_json.BadJsonError as error:
                raise bad_answer("GET", path, error) from None
            # Compute the next limit from the size per object: with doubling, every fourth page would be too large.
            of_each = len(content) // max(1, len(listed.items)) + 1
            limit = min(self.limits.page, max(1, self.limits.page_bytes // 2 // of_each))
            del content
            token, page = listed.token, Page(listed.items, listed.version)
            del listed
            yield page
            del page
            if not token:
                return
            params["continue"] = token

    async def watch(self, path: str, resource_version: str, selector: str = "") -> AsyncIterator[Raw]:
        """Yield events after `resource_version`, bookmarks too, until the server ends the stream. Raise ApiError."""
        params = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            # Random, so that not all watches reconnect to a restarted API server in the same second.
            "timeoutSeconds": str(random.randint(240, 480)),  # noqa: S311
        }
        if selector:
            params["labelSelector"] = selector
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=self.limits.connect_seconds, sock_read=self.limits.silence_seconds
        )
        session, info = await self._session()
        url, plural = info.server.rstrip("/") + path, _plural(path)
        began, code = time.monotonic(), NO_ANSWER
        try:
            async with session.get(url, params=params, headers=self._headers, timeout=timeout) as response:
                code = response.status
                self._answered("GET", path, code, began, watch=True)
                if response.status >= 400:
                    self._renew_after(response.status, info)
                    raise of_answer(response.status, await response.read(), response.headers)
                async for line in bounded_json.lines(response.content):
                    event = await read_json(partial(bounded_json.event, plural=plural), line)
                    if event["type"] == "ERROR":
                        raise of_status(event["object"])
                    yield event
        except bounded_json.BadJsonError as error:
            raise bad_answer("GET", path, error) from None
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            if code == NO_ANSWER:
                self._answered("GET", path, code, began, watch=True)
            raise no_answer("GET", path, error) from None

    def _answered(self, method: str, path: str, code: int, began: float, *, watch: bool = False) -> None:
        """Count a request by the code of its answer; NO_ANSWER if there was none."""
        (self.availability.failed if code == NO_ANSWER else self.availability.answered)()
        self._told(method, path, code, time.monotonic() - began, watch=watch)

    async def _request(self, request: _Request, read: Callable[[bytes], Raw] = bounded_json.obj) -> Raw:
        method, path = request.method, request.path
        content, asked = await self._request_bytes(request), requests.read(method, path)
        try:
            answer = await read_json(read, content)
            is_object = _is_of_resources(path, asked) and asked.verb not in ("list", "delete")
            # Require metadata, because JSON from a proxy would otherwise look like an object without a state.
            if is_object and asked.group != _REVIEWS and not isinstance(answer.get("metadata"), dict):
                raise bounded_json.BadJsonError("the answer has no metadata")
        except bounded_json.BadJsonError as error:
            raise bad_answer(method, path, error) from None
        return answer

    async def _request_bytes(self, request: _Request) -> bytes:
        for attempt in range(1, self.limits.tries + 1):
            session, info = await self._session()
            try:
                return await self._once(session, info, request)
            except ApiError as error:
                wait = self._wait_before_next_try(error, attempt)
                if wait is None:
                    raise
                self._renew_after(error.status, info)
            await asyncio.sleep(wait)
        raise AssertionError("the last try returns or raises")

    async def _once(self, session: aiohttp.ClientSession, info: kopf.ConnectionInfo, request: _Request) -> bytes:
        method, path = request.method, request.path
        # Access reviews are sent by POST but change nothing.
        changes_something = method != "GET" and not path.startswith(f"/apis/{_REVIEWS}/")
        if changes_something and not self._may_write():
            raise ApiError(NO_ANSWER, "NotLeading", f"{method} {path}: not sent, because another operator may lead now")
        url = info.server.rstrip("/") + path
        try:
            data = None if request.body is None else orjson.dumps(request.body)
        except TypeError as error:  # invalid Unicode, or a number of more than 64 bits
            raise ApiError(400, "BadRequest", f"{method} {path}: cannot be written as JSON: {error}") from None
        began, code = time.monotonic(), NO_ANSWER
        try:
            headers = self._headers | _headers(method, path)
            async with session.request(method, url, params=request.params, data=data, headers=headers) as response:
                code = response.status
                content = await _read(response, request.bytes_max)
                if response.status >= 400:
                    raise of_answer(response.status, content, response.headers)
                return content
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            raise no_answer(method, path, error) from None
        finally:
            self._answered(method, path, code, began)

    def _wait_before_next_try(self, error: ApiError, attempt: int) -> float | None:
        """Return the seconds until the next try; None if the error is final."""
        if attempt >= self.limits.tries:
            return None
        if error.status == 401 and attempt == 1:
            return 0.0
        turned_away = error.status == 429 or (error.status == 503 and error.retry_after_seconds is not None)
        wait = 1.0 if error.retry_after_seconds is None else error.retry_after_seconds
        if not turned_away or wait > self.limits.retry_after_seconds_max:
            return None
        return wait * random.uniform(1.0, 1.25)  # noqa: S311 - spreads clients that were refused together

    def _renew_after(self, status: int, info: kopf.ConnectionInfo) -> None:
        """Renew the credentials before the next request if the server refused those in use."""
        if status == 401 and self._info is info:
            self._renew_at = 0.0

    async def _session(self) -> tuple[aiohttp.ClientSession, kopf.ConnectionInfo]:
        """Return a session that is logged in, with credentials not older than renew_seconds."""
        if self._info is None or time.monotonic() >= self._renew_at:
            async with self._lock:
                if self._info is None or time.monotonic() >= self._renew_at:
                    await self._renew()
        assert self._info is not None
        return self._sessions[-1], self._info

    async def _renew(self) -> None:
        try:
            info = await asyncio.to_thread(self._log_in)
        except LoginError as error:
            if self._info is None:
                raise ApiError(401, "Unauthorized", str(error)) from None
            _LOGGER.warning("credentials were not renewed, going on with the old ones: %s", error)
            info = self._info
        if self._info is None or _endpoint(info) != _endpoint(self._info):
            timeout = aiohttp.ClientTimeout(total=self.limits.request_seconds, sock_connect=self.limits.connect_seconds)
            # The old session is not closed yet: requests may be in flight in it.
            self._sessions.append(
                aiohttp.ClientSession(
                    connector=aiohttp.TCPConnector(limit=0, ssl=info.as_ssl_context()),
                    timeout=timeout,
                    cookie_jar=aiohttp.DummyCookieJar(),  # a real cookie jar would be searched for each request
                    proxy=info.proxy_url,
                )
            )
        self._headers = _JSON | info.as_http_headers()
        self._renew_at = time.monotonic() + self.limits.renew_seconds
        self._info = info


def _plural(path: str) -> str:
    """Return the last part of a collection's path."""
    return path.rpartition("/")[2]


def _headers(method: str, path: str) -> Headers:
    """Return the headers that only this request needs."""
    if method == "PATCH":
        return {"Content-Type": "application/merge-patch+json"}
    return _METADATA_ALONE if method == "POST" and _plural(path) in _METADATA_IS_ENOUGH else {}


def _endpoint(info: kopf.ConnectionInfo) -> kopf.ConnectionInfo:
    """Return the parts of the connection that need a new session if they change. All other parts are headers."""
    return dataclasses.replace(info, token=None, username=None, password=None, scheme=None, expiration=None)


async def read_json(read: Callable[[bytes], T], content: bytes) -> T:
    """Parse short JSON on the event loop, long JSON in a thread: 1.5 MB of brackets take 0.3 s. Raise BadJsonError."""
    return read(content) if len(content) <= READ_AT_ONCE else await asyncio.to_thread(read, content)


async def _read(response: aiohttp.ClientResponse, bytes_max: int | None) -> bytes:
    """Return the body. Raise TooLargeError as soon as more than `bytes_max` bytes arrived."""
    if bytes_max is None:
        return await response.read()
    parts, length = [], 0
    async for part in response.content.iter_any():
        parts.append(part)
        length += len(part)
        if length > bytes_max:
            response.close()
            raise TooLargeError(NO_ANSWER, "TooLarge", f"GET {response.url.path}: more than {bytes_max} bytes")
    return b"".join(parts)
