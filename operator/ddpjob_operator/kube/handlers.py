"""What kopf calls: login, start, stop, and each change of a DDPJob."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping
from typing import Any

import kopf

from ddpjob_operator.job import api
from ddpjob_operator.kube.kopf_workarounds.own_tasks import of_kopf
from ddpjob_operator.kube.kopf_workarounds.reflected_session import session
from ddpjob_operator.kube.operator import END_SECONDS, Operator

NEVER_SECONDS = 1e9


def handlers(operator: Operator) -> kopf.OperatorRegistry:
    """`on.event` alone: kopf then never writes an annotation, a finalizer or a patch."""
    registry = kopf.OperatorRegistry()

    @kopf.on.startup(registry=registry)
    async def start(settings: kopf.OperatorSettings, **_: Any) -> None:
        _configure(settings)
        try:
            await operator.start()
        except asyncio.CancelledError:
            operator.end()  # by a signal: our own handler of signals is not there yet
            raise
        operator.watch_jobs()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            # In place of kopf's handler: a task of kopf that ends before the operator is told to end is a failure.
            loop.add_signal_handler(number, operator.end)

    @kopf.on.cleanup(registry=registry)
    async def stop(**_: Any) -> None:
        operator.stop_flag.set()  # else kopf waits 5 s for its own task that waits for it: kopf_workarounds
        await operator.stop()

    opened: set[str] = set()

    def watch_begins(path: str) -> None:
        opened.add(path)
        if opened == set(operator.feeds):  # all that kopf starts is there
            for task in of_kopf():
                operator.needs(task)

    @kopf.on.login(registry=registry)
    async def log_in(**_: Any) -> kopf.AiohttpSession:
        return session(operator.feeds, watch_begins)

    @kopf.on.event(api.GROUP, api.VERSION, api.PLURAL, registry=registry)
    async def job_changed(event: Mapping[str, Any], **_: Any) -> None:
        operator.job_told(event["type"], event["object"]["metadata"])

    return registry


def _configure(settings: kopf.OperatorSettings) -> None:
    settings.posting.enabled = False
    settings.peering.standalone = True
    # No right to watch CRDs and namespaces is needed, because the kind and the namespaces are known.
    settings.scanning.disabled = True
    # Our reflectors list, and notice a watch that has gone silent: kopf_workarounds/reflected_session.py.
    settings.watching.initial_streaming = True
    settings.watching.inactivity_timeout = NEVER_SECONDS
    # For a signal that comes before our own handler of signals is there.
    settings.process.ultimate_exiting_timeout = END_SECONDS
