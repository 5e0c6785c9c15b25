"""The receiver of progress in a cluster: what `ddpjob.progress()` in a pod posts to, on a port of its own.

It speaks the same protocol as the local run's receiver, and Kubeflow Trainer's. Every pod of the cluster can reach the
port, so nothing is accepted without a token that proves the pod, and a peer that sends slowly, too much or too often
is cut off. A report that is refused or lost is lost: no job is ever harmed by it. Started by `operator.py`.
"""

from __future__ import annotations

import asyncio
import collections
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import msgspec
from aiohttp import web

from ddpjob_operator.kube.forward import NoLeaderError
from ddpjob_operator.kube.runtime import SYSTEM, Runtime
from ddpjob_operator.kube.tokens import BadTokenError, BoundPod, NoKeysError
from ddpjob_operator.observed import kubeflow
from ddpjob_operator.observed.reports import BadReportError, Report

PATH = "/v1/progress"
BODY_BYTES_MAX = 8192  # a report with 16 metrics is below 1 kB
HEADER_SECONDS = 5.0  # from a connection's first byte to the end of its first headers
REQUEST_SECONDS = 10.0  # from there to the answer; the cluster's keys may have to be fetched in between
IDLE_SECONDS = 60.0  # between two accepted reports on a connection; a trainer posts at most every 5 s
CONNECTIONS_MAX = 1000  # one costs about 20 kB; our own sender closes after each report
CONNECTIONS_PER_ADDRESS_MAX = 64  # hostNetwork pods share the address of their node
# Per pod: a report every 5 s is the default; the burst is for several processes of one pod and the final report.
REPORTS_PER_SECOND, REPORTS_BURST = 1.0, 5.0
PODS_REMEMBERED = 10_000


class Sender(NamedTuple):
    """Which node of which job a pod is; attempt 0: unknown."""

    namespace: str
    job: str
    node_rank: int
    attempt: int = 0


@dataclass
class Account:
    """What is kept about a pod between its reports."""

    allowance: float
    updated: float
    total_steps: int | None = None
    """From an earlier report in Kubeflow's protocol."""


class Receiver:
    """Listens from `start` to `stop`.

    verify     the pod that a token is bound to (`tokens.Verifier.pod`). Raises BadTokenError or NoKeysError.
    locate     the node of a job that a pod is; None for any other pod.
    on_report  takes a report that is proven to come from that node; its nodeRank and attempt are the pod's own. Raises
               BadReportError where it is for a rank that is not the pod's.
    forward    gives another operator's answer where that one leads, else None (`forward.Forwarder.forward`).
    """

    def __init__(
        self,
        verify: Callable[[str], Awaitable[BoundPod]],
        locate: Callable[[BoundPod], Sender | None],
        on_report: Callable[[Sender, Report], None],
        runtime: Runtime = SYSTEM,
        forward: Callable[[web.BaseRequest, bytes], Awaitable[web.Response | None]] | None = None,
    ) -> None:
        self._verify = verify
        self._locate = locate
        self._on_report = on_report
        self._runtime = runtime
        self._forward = forward
        self._accounts: dict[BoundPod, Account] = {}
        self._server: _Server | None = None
        self._runner: web.ServerRunner | None = None

    async def start(self, host: str | None, port: int) -> None:
        """Listen; host None is every address of the pod, port 0 any free one. Raises OSError where that is taken."""
        no_log = logging.getLogger(f"{__name__}.http")
        no_log.disabled = True  # aiohttp logs requests that it cannot read, token included
        self._server = _Server(
            self._answer, access_log=None, logger=no_log, auto_decompress=False, lingering_time=1.0, tcp_keepalive=False
        )
        self._runner = web.ServerRunner(self._server, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port, backlog=256).start()

    @property
    def port(self) -> int:
        """The port that it listens on."""
        assert self._runner is not None, "start() comes first"
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Close the port and every connection; a request that is being answered gets a second."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = self._server = None

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        assert self._server is not None
        self._server.allow(request.protocol, REQUEST_SECONDS, busy=True)
        try:
            answer = await self._take(request)
        except _RefusedError as refused:
            answer = refused.answer()
        except Exception:
            # A bug. The traceback holds neither headers nor body: aiohttp's request shows method and path.
            self._runtime.log.exception("a progress report was lost")
            answer = _RefusedError(500, "the receiver failed, which is no fault of the report").answer()
        self._server.allow(request.protocol, IDLE_SECONDS, busy=False)
        return answer

    async def _take(self, request: web.BaseRequest) -> web.Response:
        """A report; everything about it is judged before its body is read."""
        _check_request(request)
        pod = await self._prove(request)
        sender = self._locate(pod)
        if sender is None:
            raise _RefusedError(403, "the token's pod is no trainer of a running job")
        assert self._server is not None
        self._server.prove(request.protocol)
        account = self._charge(pod)
        body = await _read_body(request)
        if (answer := await self._forward_to_leader(request, body)) is not None:
            return answer
        kubeflows = kubeflow.speaks(body)
        report = self._read(body, account)
        if report is not None:
            # The token proves the pod, so the node comes from there, whatever the body claims.
            attempt = sender.attempt or report.attempt
            try:
                self._on_report(sender, msgspec.structs.replace(report, node_rank=sender.node_rank, attempt=attempt))
            except BadReportError as error:
                raise _RefusedError(403, str(error)) from None
        return web.json_response({}) if kubeflows else web.Response(status=204)  # Kubeflow's SDK warns at all but 200

    def _read(self, body: bytes, account: Account) -> Report | None:
        """None: the body reports nothing, which Kubeflow's protocol allows."""
        try:
            report, account.total_steps = kubeflow.read_body(body, self._runtime.utc(), account.total_steps)
        except (BadReportError, UnicodeDecodeError, RecursionError) as error:
            raise _RefusedError(400, str(error)[:200]) from None
        return report

    async def _forward_to_leader(self, request: web.BaseRequest, body: bytes) -> web.Response | None:
        if self._forward is None:
            return None
        try:
            return await self._forward(request, body)
        except NoLeaderError as error:
            raise _RefusedError(503, str(error), retry_seconds=5) from None

    async def _prove(self, request: web.BaseRequest) -> BoundPod:
        """The pod that sends, by its token."""
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise _RefusedError(401, "Authorization: must be Bearer and the pod's projected token")
        try:
            return await self._verify(token.strip())
        except BadTokenError as error:
            raise _RefusedError(401, str(error)) from None
        except NoKeysError as error:
            raise _RefusedError(503, str(error), retry_seconds=60) from None

    def _charge(self, pod: BoundPod) -> Account:
        """The pod's account, charged with a report. Raises when it reports too often."""
        now = self._runtime.clock()
        account = self._accounts.get(pod)
        if account is None:
            if len(self._accounts) >= PODS_REMEMBERED:
                self._forget_ended()
            account = self._accounts[pod] = Account(REPORTS_BURST, now)
        refilled = account.allowance + (now - account.updated) * REPORTS_PER_SECOND
        account.allowance, account.updated = min(REPORTS_BURST, refilled), now
        if account.allowance < 1:
            raise _RefusedError(429, f"a pod may report {REPORTS_PER_SECOND:g} times a second", retry_seconds=1)
        account.allowance -= 1
        return account

    def _forget_ended(self) -> None:
        """Drop the accounts of pods that the caller no longer knows."""
        self._accounts = {pod: account for pod, account in self._accounts.items() if self._locate(pod) is not None}


@dataclass(eq=False)
class _Connection:
    transport: asyncio.Transport
    address: str
    deadline: asyncio.TimerHandle
    proven: bool = False
    """Whether it has shown a pod's token."""
    busy: bool = True
    """Whether a request on it is not answered yet, or has not come whole."""


class _Server(web.Server):
    """aiohttp's server with bounds of its own: it counts no connections, and a slow sender of headers keeps one.

    A client that opens connections and sends nothing, from however many addresses, closes its own older ones, because
    one that has shown a token is never closed for one that has not.
    """

    def __init__(self, handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], **settings: Any) -> None:
        super().__init__(handler, **settings)
        self._settings = settings
        self._open: dict[web.RequestHandler, _Connection] = {}
        """In the order in which they were opened."""
        self._addresses: collections.Counter[str] = collections.Counter()

    def __call__(self) -> web.RequestHandler:
        """The handler of a connection that is about to be made."""
        return _Handler(self, loop=asyncio.get_running_loop(), **self._settings)

    def admits(self, transport: asyncio.Transport) -> bool:
        """Whether there is room for a connection, made by closing one without a token, or an idle one, if need be."""
        address = _address(transport)
        if self._addresses[address] >= CONNECTIONS_PER_ADDRESS_MAX and not self._drop(address):
            return False
        return len(self._open) < CONNECTIONS_MAX or self._drop(self._busiest())

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        """Count it."""
        super().connection_made(handler, transport)
        address = _address(transport)
        self._addresses[address] += 1
        deadline = asyncio.get_running_loop().call_later(HEADER_SECONDS, transport.abort)
        self._open[handler] = _Connection(transport, address, deadline)

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        """Forget it."""
        self._forget(handler)
        super().connection_lost(handler, exc)

    def allow(self, handler: web.RequestHandler, seconds: float, *, busy: bool) -> None:
        """From now on this much time until the connection is cut."""
        if (connection := self._open.get(handler)) is not None:
            connection.busy = busy
            connection.deadline.cancel()
            connection.deadline = asyncio.get_running_loop().call_later(seconds, connection.transport.abort)

    def prove(self, handler: web.RequestHandler) -> None:
        """It has shown a pod's token."""
        if (connection := self._open.get(handler)) is not None:
            connection.proven = True

    def _busiest(self) -> str:
        """The address with the most connections that have shown no token; empty: all have."""
        unproven = collections.Counter(c.address for c in self._open.values() if not c.proven)
        return unproven.most_common(1)[0][0] if unproven else ""

    def _drop(self, address: str) -> bool:
        """Close the oldest connection of an address that has shown no token, else one that waits for its next report
        (a sender opens another); whether there was one."""
        of_address = [(h, c) for h, c in self._open.items() if address in ("", c.address)]
        oldest = next((h for h, c in of_address if not c.proven), None)
        oldest = oldest or next((h for h, c in of_address if not c.busy), None)
        if oldest is None:
            return False
        self._open[oldest].transport.abort()
        self._forget(oldest)
        return True

    def _forget(self, handler: web.RequestHandler) -> None:
        if (connection := self._open.pop(handler, None)) is not None:
            connection.deadline.cancel()
            self._addresses[connection.address] -= 1
            if not self._addresses[connection.address]:
                del self._addresses[connection.address]


class _Handler(web.RequestHandler):
    """A connection. One that there is no room for is closed before aiohttp knows of it: closed a moment later, the task
    that it has made for it would end with an AssertionError that nobody retrieves (aiohttp 3.14, web_protocol.start).
    """

    __slots__ = ("_refused",)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take it, or cut it."""
        server = cast(_Server, self._manager)
        self._refused = not server.admits(cast(asyncio.Transport, transport))
        if self._refused:
            cast(asyncio.Transport, transport).abort()
        else:
            super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        """It has gone."""
        if not self._refused:
            super().connection_lost(exc)


def _address(transport: asyncio.Transport) -> str:
    return str((transport.get_extra_info("peername") or ("",))[0])


class _RefusedError(Exception):
    """Why a report is not taken. It ends the connection: what follows is never read as another request."""

    def __init__(self, status: int, sentence: str, retry_seconds: int | None = None) -> None:
        super().__init__(sentence)
        self.status = status
        self.retry_seconds = retry_seconds

    def answer(self) -> web.Response:
        headers = {"Connection": "close"}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.retry_seconds is not None:
            headers["Retry-After"] = str(self.retry_seconds)
        answer = web.json_response({"error": str(self)}, status=self.status, headers=headers)
        answer.force_close()
        return answer


def _check_request(request: web.BaseRequest) -> None:
    if request.path != PATH:
        raise _RefusedError(404, f"{request.path[:80]}: only {PATH} is served")
    if request.method != "POST":
        raise _RefusedError(405, f"{request.method[:20]}: only POST is taken")
    if (request.content_length or 0) > BODY_BYTES_MAX:
        raise _too_large()


async def _read_body(request: web.BaseRequest) -> bytes:
    """The body, with or without a Content-Length; never more than its bound is held."""
    body = bytearray()
    try:
        while data := await request.content.readany():
            body += data
            if len(body) > BODY_BYTES_MAX:
                raise _too_large()
    except (ConnectionError, web.RequestPayloadError) as error:
        # The trainer was killed while it sent, or was too slow, or its chunks are none.
        raise _RefusedError(400, f"the body did not arrive: {type(error).__name__}") from None
    return bytes(body)


def _too_large() -> _RefusedError:
    return _RefusedError(413, f"a report has at most {BODY_BYTES_MAX} bytes")
