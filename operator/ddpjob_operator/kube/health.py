"""/healthz, which the kubelet asks. Not kopf's own probe: that one answers only after kopf's startup
handlers, so a pod that waits for the CRD would be killed for waiting (kopf 1.45)."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web


async def serve_health(
    port: int, unhealthy: Callable[[], str], remark: Callable[[], str] = str
) -> web.AppRunner | None:
    """/healthz: 503 with the reason while `unhealthy` gives one, else 200, with the remark in both. Port 0: nothing
    listens."""
    if port == 0:
        return None

    async def answer(_: web.Request) -> web.Response:
        why, more = unhealthy(), remark()
        return web.Response(status=503 if why else 200, text=f"{why or 'ok'}{more and f'; {more}'}\n")

    app = web.Application()
    app.router.add_get("/healthz", answer)
    # The kubelet connects again for each probe, so an idle connection is of no use to it.
    runner = web.AppRunner(app, access_log=None, keepalive_timeout=5.0)
    await runner.setup()
    await web.TCPSite(runner, port=port).start()
    return runner
