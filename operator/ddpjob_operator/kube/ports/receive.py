"""Receives the reports that `ddpjob.progress()` posts from pods, on a port of its own.

The protocol is the same as in the local run's receiver and in Kubeflow Trainer. Every pod of the cluster can reach the
port. So nothing is accepted without a token that proves the pod, and slow, large or frequent senders are cut off.
Losing a report never harms a job.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
from aiohttp import HttpVersion11, web

from ddpjob_core.members import LEADER_PATH
from ddpjob_operator.kube.api.runtime import SYSTEM, Runtime
from ddpjob_operator.kube.api.tokens import BadTokenError, BoundPod, NoKeysError
from ddpjob_operator.kube.ports.bounded_server import BoundedServer
from ddpjob_operator.observed import kubeflow
from ddpjob_operator.observed.reports import BadReportError, Report

PATH = "/v1/progress"
PATHS = {PATH: "POST", LEADER_PATH: "GET"}
BODY_BYTES_MAX = 8192  # bytes; a report with 16 metrics has less than 1 kB
# Limits per pod. By default a rank reports every 5 s. The burst allows a restart in place within a second.
# At a restart the old ranks and the agent send last reports, and the new ranks report start, load, first step, save.
REPORTS_PER_SECOND, REPORTS_BURST = 1.0, 10.0
PODS_REMEMBERED = 10_000


class Sender(NamedTuple):
    """Job and node of a pod; attempt 0 if unknown."""

    namespace: str
    job: str
    node_rank: int
    attempt: int = 0
    replacement: int = 0


@dataclass
class Account:
    """What the receiver remembers of a pod between its reports: rate limit and total steps."""

    allowance: float
    updated: float
    total_steps: int | None = None
    """Number of steps, from an earlier report in Kubeflow's protocol."""


class Receiver(BoundedServer):
    """The HTTP server that takes reports of trainers.

    - verify: returns the pod that a token is bound to (`tokens.Verifier.pod`). Raises BadTokenError or NoKeysError.
    - locate: returns the job and node of a pod; None for other pods.
    - on_question: returns the leader of a pod's job; None if it is not known, or the job's agents need not ask.
    - on_report: takes a report whose node and attempt were proven. Raises BadReportError for a rank of another pod.
    - leads: if it returns False, a report on an old connection is refused, and the sender's next one finds the leader.
    """

    connections_max = 4000

    def __init__(
        self,
        verify: Callable[[str], Awaitable[BoundPod]],
        locate: Callable[[BoundPod], Sender | None],
        on_report: Callable[[Sender, Report], None],
        on_question: Callable[[Sender], dict[str, Any] | None] = lambda _: None,
        runtime: Runtime = SYSTEM,
        leads: Callable[[], bool] = lambda: True,
    ) -> None:
        super().__init__()
        self._verify, self._locate, self._on_report, self._on_question = verify, locate, on_report, on_question
        self._runtime, self._leads = runtime, leads
        self._accounts: dict[BoundPod, Account] = {}
        self._were_live = 0
        """Number of accounts of existing pods at the last cleanup."""

    async def answer(self, request: web.BaseRequest) -> web.Response:
        try:
            return await self._take(request)
        except _RefusedError as refused:
            return refused.answer()
        except Exception:
            # This is a bug in our code. The traceback contains no token: aiohttp's request prints only method and path.
            self._runtime.log.exception("a progress report was lost")
            return _RefusedError(500, "the receiver failed; the report is not the cause").answer()

    async def _take(self, request: web.BaseRequest) -> web.Response:
        """Check a report before its body is read, then hand it on, and return the answer."""
        _check_request(request)
        pod = await self._prove(request)
        sender = self._locate(pod)
        if sender is None:
            raise _RefusedError(403, "the token's pod is not a trainer of a running job")
        self.prove(request)
        account = self._charge(pod)
        body = await _read_body(request)
        if not self._leads():
            raise _RefusedError(503, "this operator does not lead", retry_seconds=5)
        if request.path == LEADER_PATH:
            found = self._on_question(sender)
            return web.Response(status=204) if found is None else web.json_response(found)
        try:
            report, account.total_steps = kubeflow.read_body(body, self._runtime.utc(), account.total_steps)
        except (BadReportError, UnicodeDecodeError, RecursionError) as error:
            raise _RefusedError(400, str(error)[:200]) from None
        if report is not None:
            # The token proves which pod sends, so take the node from the token and not from the body.
            proven = {"node_rank": sender.node_rank, "replacement": sender.replacement}
            attempt = sender.attempt or report.attempt
            try:
                self._on_report(sender, msgspec.structs.replace(report, attempt=attempt, **proven))
            except BadReportError as error:
                raise _RefusedError(403, str(error)) from None
        # Kubeflow's SDK logs a warning if the status is not 200.
        return web.json_response({}) if kubeflow.speaks(body) else web.Response(status=204)

    async def _prove(self, request: web.BaseRequest) -> BoundPod:
        """Return the pod to which the request's token is bound."""
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
        """Count the report against the pod's rate limit. Raise if the pod reports too often."""
        now = self._runtime.clock()
        account = self._accounts.get(pod)
        if account is None:
            if len(self._accounts) >= max(PODS_REMEMBERED, 2 * self._were_live):
                # Drop the rate limits of pods that do not exist any more.
                self._accounts = {one: kept for one, kept in self._accounts.items() if self._locate(one) is not None}
                self._were_live = len(self._accounts)
            account = self._accounts[pod] = Account(REPORTS_BURST, now)
        refilled = account.allowance + (now - account.updated) * REPORTS_PER_SECOND
        account.allowance, account.updated = min(REPORTS_BURST, refilled), now
        if account.allowance < 1:
            raise _RefusedError(429, f"a pod may report {REPORTS_PER_SECOND:g} times a second", retry_seconds=1)
        account.allowance -= 1
        return account


class _RefusedError(Exception):
    """A report is refused. The connection is closed, so that the rest is never read as another request."""

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
    method = PATHS.get(request.path)
    if method is None:
        raise _RefusedError(404, f"{request.path[:80]}: only {PATH} is served")
    if request.method != method:
        raise _RefusedError(405, f"{request.method[:20]}: only {method} is accepted")
    if (request.content_length or 0) > BODY_BYTES_MAX:
        raise _too_large()


async def _read_body(request: web.BaseRequest) -> bytes:
    """Return the body, with or without Content-Length. Never keep more than its limit in memory."""
    body = bytearray()
    try:
        if request.version == HttpVersion11 and request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while data := await request.content.readany():
            body += data
            if len(body) > BODY_BYTES_MAX:
                raise _too_large()
    except (ConnectionError, web.RequestPayloadError) as error:
        # The trainer was killed while sending, was too slow, or sent invalid chunks.
        raise _RefusedError(400, f"the body did not arrive: {type(error).__name__}") from None
    return bytes(body)


def _too_large() -> _RefusedError:
    return _RefusedError(413, f"a report has at most {BODY_BYTES_MAX} bytes")
