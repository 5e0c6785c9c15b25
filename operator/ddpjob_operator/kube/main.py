"""What `ddpjob-operator` runs (program.py starts it): settings, log, and kopf around the Operator.

In a cluster it uses the pod's service account, elsewhere KUBECONFIG.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import threading
import uuid
from collections.abc import Callable
from functools import partial
from importlib import metadata

import kopf
import prometheus_client
import uvloop

from ddpjob_operator.kube.api.client import Client, RequestLimits
from ddpjob_operator.kube.api.reach import Reach
from ddpjob_operator.kube.api.runtime import allow_open_files
from ddpjob_operator.kube.claims import Claims, namespace_of
from ddpjob_operator.kube.handlers import handlers
from ddpjob_operator.kube.lease import Leader
from ddpjob_operator.kube.log import set_up_log
from ddpjob_operator.kube.operator import Operator
from ddpjob_operator.kube.settings import OperatorSettings
from ddpjob_operator.kube.work.measuring import Requests
from ddpjob_operator.metrics.meter import Meter

OPEN_FILES = 16_384  # 4,000 connections of trainers, 256 on each other port (bounded_server.py), and the watches
_LOGGER = logging.getLogger("ddpjob_operator")


def main(log_format: str | None = None) -> None:
    """Runs until SIGTERM or SIGINT. log_format: None is that of the environment."""
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
    """The exit code."""
    loop = asyncio.get_running_loop()
    operator = _operator(settings, lambda seconds: loop.call_later(seconds, _end_now))
    why = "kopf has ended"
    try:
        await kopf.operator(
            registry=handlers(operator),
            standalone=True,
            clusterwide=not settings.namespaces,
            namespaces=settings.namespaces,
            stop_flag=operator.stop_flag,
        )
    except asyncio.CancelledError:
        why = "the main task was cancelled"
    except Exception as error:
        why = f"kopf has failed ({error})"
    operator.end(why)  # no news if it was told to end
    return operator.exit_code


def _end_now() -> None:
    """kopf waits without a limit for the end of its tasks, and one of them may wait for another that is dead."""
    _LOGGER.error("the operator has not ended in time, so its process is ended")
    os._exit(1)


def _operator(settings: OperatorSettings, end_within: Callable[[float], object]) -> Operator:
    meter = Meter(threading.Lock())
    prometheus_client.ProcessCollector(registry=meter.registry)
    answered, reach = Requests(meter), Reach()
    if not settings.lease_namespace:
        return Operator(settings, Client(answered=answered, reach=reach), meter=meter, end_within=end_within)
    clients = partial(_client_for_leases, settings, answered, reach)
    leader = _leader(settings, clients())
    claims = _claims(settings, clients(), leader)
    may_write = partial(_may_write, leader, claims)
    client = Client(may_write=may_write, answered=answered, reach=reach)
    return Operator(settings, client, leader, claims, meter=meter, end_within=end_within)


def _may_write(leader: Leader, claims: Claims, path: str) -> bool:
    return leader.holds() and claims.hold(namespace_of(path))


def _leader(settings: OperatorSettings, client: Client) -> Leader:
    # A new identity for each process: after a restart it does not know which writes of the last one are under way.
    identity = f"{settings.pod_name or socket.gethostname()}_{uuid.uuid4().hex[:8]}"
    place = settings.lease_namespace, settings.lease_name
    return Leader(client, *place, identity, settings.lease, settings.status_address)


def _claims(settings: OperatorSettings, client: Client, leader: Leader) -> Claims:
    release = f"{settings.lease_namespace}/{settings.lease_name}"
    where = settings.namespaces, settings.claim_namespace
    return Claims(client, *where, release, settings.lease, leads=leader.holds)


def _client_for_leases(settings: OperatorSettings, answered: Requests, reach: Reach) -> Client:
    seconds = settings.lease.try_seconds
    limits = RequestLimits(connect_seconds=seconds, request_seconds=seconds, tries=2)
    return Client(limits=limits, answered=answered, reach=reach)
