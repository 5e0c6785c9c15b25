"""The handlers that kopf calls: login, startup, cleanup, and events of DDPJobs."""

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
    """Return the handlers. Only `on.event` is used: with it kopf never writes annotations, finalizers or patches."""
    registry = kopf.OperatorRegistry()

    @kopf.on.startup(registry=registry)
    async def start(settings: kopf.OperatorSettings, **_: Any) -> None:
        settings.posting.enabled = False
        settings.peering.standalone = True
        # Do not scan: the kind and the namespaces are known, and scanning needs the right to watch CRDs and namespaces.
        settings.scanning.disabled = True
        # kopf must not list, or end a silent watch: our reflectors do both (kopf_workarounds/reflected_session.py).
        settings.watching.initial_streaming = True
        settings.watching.inactivity_timeout = NEVER_SECONDS
        # Kill the process in time if a signal arrives before our own signal handlers are set.
        settings.process.ultimate_exiting_timeout = END_SECONDS
        try:
            await operator.start()
        except asyncio.CancelledError:
            operator.tasks.end()  # a signal came before our own signal handlers were set
            raise
        operator.watch_jobs()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            # Replace kopf's signal handler. It would end kopf's tasks first, which the operator treats as a failure.
            loop.add_signal_handler(number, operator.tasks.end)

    @kopf.on.cleanup(registry=registry)
    async def stop(**_: Any) -> None:
        operator.tasks.stop_flag.set()  # otherwise kopf waits 5 s for its own task that waits for this flag
        await operator.stop()

    opened: set[str] = set()

    def watch_begins(path: str) -> None:
        opened.add(path)
        if opened == set(operator.feeds):  # all of kopf's tasks are running now
            for task in of_kopf():
                operator.tasks.needs(task)

    @kopf.on.login(registry=registry)
    async def log_in(**_: Any) -> kopf.AiohttpSession:
        return session(operator.feeds, watch_begins)

    @kopf.on.event(api.GROUP, api.VERSION, api.PLURAL, registry=registry)
    async def job_changed(event: Mapping[str, Any], **_: Any) -> None:
        operator.job_told(event["object"]["change"], event["object"]["metadata"])

    return registry
