"""/healthz, which the kubelet asks. Not kopf's own probe: that one answers only after kopf's startup
handlers, so a pod that waits for the CRD would be killed for waiting (kopf 1.45)."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from ddpjob_operator.kube.ports.bounded_server import BoundedServer, not_served

PATH = "/healthz"


class Health(BoundedServer):
    """Answers 503 with the reason while `unhealthy` gives one, else 200; with the remark in both."""

    def __init__(self, unhealthy: Callable[[], str], remark: Callable[[], str] = str) -> None:
        super().__init__()
        self._unhealthy = unhealthy
        self._remark = remark

    async def answer(self, request: web.BaseRequest) -> web.Response:
        """The kubelet connects again for each probe, so the server may close the connection at any time after it."""
        if (refusal := not_served(request, PATH)) is not None:
            return refusal
        why, more = self._unhealthy(), self._remark()
        return web.Response(status=503 if why else 200, text=f"{why or 'ok'}{more and f'; {more}'}\n")
