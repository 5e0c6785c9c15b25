"""The receiver of progress in a cluster: what `ddpjob.progress()` in a pod posts to, on a port of its own.

It speaks the same protocol as the local run's receiver, and Kubeflow Trainer's. Every pod of the cluster can reach the
port, so nothing is accepted without a token that proves the pod, and a peer that sends slowly, too much or too often
is cut off. A report that is refused or lost is lost: no job is ever harmed by it. Started by `operator.py`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from aiohttp import HttpVersion11, web

from ddpjob_operator.kube.api.runtime import SYSTEM, Runtime
from ddpjob_operator.kube.api.tokens import BadTokenError, BoundPod, NoKeysError
from ddpjob_operator.kube.ports.bounded_server import BoundedServer
from ddpjob_operator.kube.ports.forward import NoLeaderError
from ddpjob_operator.observed import kubeflow
from ddpjob_operator.observed.reports import BadReportError, Report

PATH = "/v1/progress"
BODY_BYTES_MAX = 8192  # a report with 16 metrics is below 1 kB
# Per pod: a report every 5 s is the default; the burst is for a restart in place, within a second: the last report of
# the old ranks, the agent's, and start, load, first step and save of the new ones.
REPORTS_PER_SECOND, REPORTS_BURST = 1.0, 10.0
PODS_REMEMBERED = 10_000


class Sender(NamedTuple):
    """Which node of which job a pod is; attempt 0: unknown."""

    namespace: str
    job: str
    node_rank: int
    attempt: int = 0
    replacement: int = 0


@dataclass
class Account:
    """What is kept about a pod between its reports."""

    allowance: float
    updated: float
    total_steps: int | None = None
    """From an earlier report in Kubeflow's protocol."""


class Receiver(BoundedServer):
    """Takes reports.

    verify     the pod that a token is bound to (`tokens.Verifier.pod`). Raises BadTokenError or NoKeysError.
    locate     the node of a job that a pod is; None for any other pod.
    on_report  takes a report that is proven to come from that node; its nodeRank and attempt are the pod's own. Raises
               BadReportError where it is for a rank that is not the pod's.
    forward    gives another operator's answer where that one leads, else None (`forward.Forwarder.forward`).
    """

    connections_max = 4000

    def __init__(
        self,
        verify: Callable[[str], Awaitable[BoundPod]],
        locate: Callable[[BoundPod], Sender | None],
        on_report: Callable[[Sender, Report], None],
        runtime: Runtime = SYSTEM,
        forward: Callable[[web.BaseRequest, bytes], Awaitable[web.Response | None]] | None = None,
    ) -> None:
        super().__init__()
        self._verify = verify
        self._locate = locate
        self._on_report = on_report
        self._runtime = runtime
        self._forward = forward
        self._accounts: dict[BoundPod, Account] = {}
        self._were_live = 0
        """How many of these were of pods that are there, when they were last looked through."""

    async def answer(self, request: web.BaseRequest) -> web.Response:
        """Of a report."""
        try:
            return await self._take(request)
        except _RefusedError as refused:
            return refused.answer()
        except Exception:
            # A bug. The traceback holds neither headers nor body: aiohttp's request shows method and path.
            self._runtime.log.exception("a progress report was lost")
            return _RefusedError(500, "the receiver failed, which is no fault of the report").answer()

    async def _take(self, request: web.BaseRequest) -> web.Response:
        """A report; everything about it is judged before its body is read."""
        _check_request(request)
        pod = await self._prove(request)
        sender = self._locate(pod)
        if sender is None:
            raise _RefusedError(403, "the token's pod is no trainer of a running job")
        self.prove(request)
        account = self._charge(pod)
        body = await _read_body(request)
        if (answer := await self._forward_to_leader(request, body)) is not None:
            return answer
        kubeflows = kubeflow.speaks(body)
        report = self._read(body, account)
        if report is not None:
            # The token proves the pod, so the node comes from there, whatever the body claims.
            proven = {"node_rank": sender.node_rank, "replacement": sender.replacement}
            attempt = sender.attempt or report.attempt
            try:
                self._on_report(sender, msgspec.structs.replace(report, attempt=attempt, **proven))
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
            if len(self._accounts) >= max(PODS_REMEMBERED, 2 * self._were_live):
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
        self._were_live = len(self._accounts)


class _RefusedError(Exception):
    """Why a report is not taken. It ends the connection: what follows is never read as another request."""

    def __init__(self, status: int, sentence: str, retry_seconds: int | None = None) -> None:
        super().__init__(sentence)
        self.status = status
        self.retry_seconds = retry_seconds

    def answer(self) -> web.Response:
        headers = {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.retry_seconds is not None:
            headers["Retry-After"] = str(self.retry_seconds)
        return web.json_response({"error": str(self)}, status=self.status, headers=headers)


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
        if request.version == HttpVersion11 and request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
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
