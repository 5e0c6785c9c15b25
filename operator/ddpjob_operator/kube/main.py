"""Runs the operator: reads settings, sets up the log, and runs kopf around the Operator. program.py calls it."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import threading
import uuid
from collections.abc import Callable
from importlib import metadata

import kopf
import prometheus_client
import uvloop

from ddpjob_operator.kube.api.availability import Availability
from ddpjob_operator.kube.api.client import Client, RequestLimits
from ddpjob_operator.kube.api.runtime import allow_open_files
from ddpjob_operator.kube.handlers import handlers
from ddpjob_operator.kube.lease import Election
from ddpjob_operator.kube.log import set_up_log
from ddpjob_operator.kube.operator import Operator
from ddpjob_operator.kube.other_releases import OtherReleases
from ddpjob_operator.kube.settings import OperatorSettings
from ddpjob_operator.metrics.meter import Meter

OPEN_FILES = 16_384  # 4,000 connections of trainers, 256 on each other port (bounded_server.py), and the watches
_LOGGER = logging.getLogger("ddpjob_operator")


def main(log_format: str | None = None) -> None:
    """Run until SIGTERM or SIGINT. log_format: None means DDPJOB_LOG_FORMAT."""
    try:
        settings = OperatorSettings.read(os.environ)
    except ValueError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    set_up_log(settings.log_level, log_format or settings.log_format)
    _LOGGER.info("ddpjob-operator %s %s", metadata.version("ddpjob"), settings.summary())
    allow_open_files(OPEN_FILES)
    sys.exit(uvloop.run(_serve(settings)))


async def _serve(settings: OperatorSettings) -> int:
    loop = asyncio.get_running_loop()
    operator = _operator(settings, lambda seconds: loop.call_later(seconds, _end_now))
    why = "kopf has ended"
    try:
        await kopf.operator(
            registry=handlers(operator),
            standalone=True,
            clusterwide=not settings.namespaces,
            namespaces=settings.namespaces,
            stop_flag=operator.tasks.stop_flag,
        )
    except asyncio.CancelledError:
        why = "the main task was cancelled"
    except Exception as error:
        why = f"kopf has failed ({error})"
    operator.tasks.end(why)
    return operator.tasks.exit_code


def _end_now() -> None:
    """End the process, because kopf may wait forever for a task that itself waits for a task that has died."""
    _LOGGER.error("the operator has not ended in time, so its process is ended")
    os._exit(1)


def _operator(settings: OperatorSettings, end_within: Callable[[float], object]) -> Operator:
    meter, availability = Meter(threading.Lock()), Availability()
    prometheus_client.ProcessCollector(registry=meter.registry)
    if not settings.lease_namespace:
        return Operator(
            settings, Client(answered=meter.answered, availability=availability), meter=meter, end_within=end_within
        )
    seconds = settings.lease.try_seconds
    limits = RequestLimits(connect_seconds=seconds, request_seconds=seconds, tries=2)
    for_lease = Client(limits=limits, answered=meter.answered, availability=availability)
    # Use the unique pod name. A restarted container then does not wait for its own Lease to expire.
    identity = settings.pod_name or f"{socket.gethostname()}_{uuid.uuid4().hex[:8]}"
    leader = Election(for_lease, settings.lease_namespace, settings.lease_name, identity, settings.lease)
    client = Client(may_write=leader.holds, answered=meter.answered, availability=availability)
    others = None if settings.namespaces else OtherReleases(client)
    return Operator(settings, client, leader, others, meter=meter, end_within=end_within)
