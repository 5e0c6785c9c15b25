"""Serves /healthz for the kubelet's probes.

kopf's own probe (1.45) answers only after the startup handlers. A pod that waits there for the CRD would be killed.
"""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from ddpjob_operator.kube.ports.bounded_server import BoundedServer, not_served

PATH = "/healthz"


class Health(BoundedServer):
    """Answers 503 with the reason if `unhealthy` returns one, else 200. `remark` is added to both."""

    def __init__(self, unhealthy: Callable[[], str], remark: Callable[[], str] = str) -> None:
        super().__init__()
        self._unhealthy = unhealthy
        self._remark = remark

    async def answer(self, request: web.BaseRequest) -> web.Response:
        """Answer a probe. The kubelet opens a connection per probe, so closing it afterwards is harmless."""
        if (refusal := not_served(request, PATH)) is not None:
            return refusal
        why, more = self._unhealthy(), self._remark()
        return web.Response(status=503 if why else 200, text=f"{why or 'ok'}{more and f'; {more}'}\n")
