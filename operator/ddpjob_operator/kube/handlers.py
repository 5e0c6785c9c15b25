"""What kopf calls: login, start, stop, and each change of a DDPJob."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Mapping
from typing import Any

import kopf

from ddpjob_operator.job import api
from ddpjob_operator.kube.kopf_workarounds.error_backoffs import ErrorBackoffs
from ddpjob_operator.kube.kopf_workarounds.login_pace import paced
from ddpjob_operator.kube.kopf_workarounds.reading_session import session
from ddpjob_operator.kube.login import login
from ddpjob_operator.kube.operator import Operator

# kopf holds a page of jobs at a time; somebody may have put a megabyte into each.
JOBS_PAGE = 10


def handlers(operator: Operator) -> kopf.OperatorRegistry:
    """`on.event` alone: kopf then never writes an annotation, a finalizer or a patch."""
    registry = kopf.OperatorRegistry()

    @kopf.on.startup(registry=registry)
    async def start(settings: kopf.OperatorSettings, **_: Any) -> None:
        _configure(settings)
        await operator.start()

    @kopf.on.cleanup(registry=registry)
    async def stop(**_: Any) -> None:
        operator.stop_flag.set()  # else kopf waits 5 s for its own task that waits for it: kopf_workarounds
        await operator.stop()

    logins = paced(5.0)

    @kopf.on.login(registry=registry, backoff=5.0)
    async def log_in(**_: Any) -> kopf.AiohttpSession:
        await logins.__anext__()
        info = await asyncio.to_thread(login)
        # Read again before a rotated token expires (the kubelet rotates at 80 % of an hour). A time of its own also
        # makes each login differ: kopf never takes back credentials that are equal to refused ones, and would end.
        expiration = dt.datetime.now(dt.timezone.utc) + dt.timedelta(minutes=10)
        return session(info, operator.kopf_answered, operator.caches.jobs.take, expiration=expiration)

    @kopf.on.event(api.GROUP, api.VERSION, api.PLURAL, registry=registry)
    async def job_changed(event: Mapping[str, Any], **_: Any) -> None:
        operator.job_seen(event["type"], event["object"])

    return registry


def _configure(settings: kopf.OperatorSettings) -> None:
    settings.posting.enabled = False
    settings.peering.standalone = True
    # No right to watch CRDs and namespaces is needed, because the kind and the namespaces are known.
    settings.scanning.disabled = True
    settings.networking.error_backoffs = ErrorBackoffs()
    settings.networking.request_timeout = 60.0
    settings.networking.connect_timeout = 5.0
    settings.watching.inactivity_timeout = 90.0
    settings.watching.chunk_size = JOBS_PAGE  # without it kopf lists all jobs in one answer
