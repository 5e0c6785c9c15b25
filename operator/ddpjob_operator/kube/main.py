"""What `ddpjob-operator` runs (program.py starts it): settings, log, and kopf around the Operator.

In a cluster it uses the pod's service account, elsewhere KUBECONFIG.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import uuid
from importlib import metadata

import kopf
import uvloop

from ddpjob_operator.failures.redaction import clean, mask
from ddpjob_operator.kube.claims import Claims, namespace_of
from ddpjob_operator.kube.client import Client, RequestLimits
from ddpjob_operator.kube.handlers import handlers
from ddpjob_operator.kube.kopf_workarounds.log_retries import RetriesNowAndThen
from ddpjob_operator.kube.kopf_workarounds.log_stacks import without_kopfs_stack
from ddpjob_operator.kube.lease import Leader
from ddpjob_operator.kube.operator import Operator
from ddpjob_operator.kube.settings import OperatorSettings

_LOGGER = logging.getLogger("ddpjob_operator")


def main() -> None:
    """Runs until SIGTERM or SIGINT."""
    try:
        settings = OperatorSettings.read(os.environ)
    except ValueError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    _set_up_log(settings.log_level)
    _LOGGER.info("ddpjob-operator %s %s", metadata.version("ddpjob"), settings.summary())
    sys.exit(uvloop.run(_serve(settings)))


async def _serve(settings: OperatorSettings) -> int:
    """The exit code."""
    operator = _operator(settings)
    try:
        await kopf.operator(
            registry=handlers(operator),
            standalone=True,
            clusterwide=not settings.namespaces,
            namespaces=settings.namespaces,
            stop_flag=operator.stop_flag,
        )
    except Exception as error:
        # kopf gives up where it can no longer watch, as when the CRD is removed. The next start waits for the CRD.
        _LOGGER.error("kopf has ended, so the operator ends: %s", error)
        return 1
    return 1 if operator.broken else 0


def _operator(settings: OperatorSettings) -> Operator:
    if not settings.lease_namespace:
        return Operator(settings, Client())
    leader, claims = _leader(settings), _claims(settings)
    client = Client(may_write=lambda path: leader.holds() and claims.hold(namespace_of(path)))
    return Operator(settings, client, leader, claims)


def _leader(settings: OperatorSettings) -> Leader:
    # A new identity for each process: after a restart it does not know which writes of the last one are under way.
    identity = f"{settings.pod_name or socket.gethostname()}_{uuid.uuid4().hex[:8]}"
    place = settings.lease_namespace, settings.lease_name
    return Leader(_client_for_leases(settings), *place, identity, settings.lease, settings.status_address)


def _claims(settings: OperatorSettings) -> Claims:
    release = f"{settings.lease_namespace}/{settings.lease_name}"
    where = settings.namespaces, settings.claim_namespace
    return Claims(_client_for_leases(settings), *where, release, settings.lease)


def _client_for_leases(settings: OperatorSettings) -> Client:
    seconds = settings.lease.try_seconds
    return Client(limits=RequestLimits(connect_seconds=seconds, request_seconds=seconds, tries=2))


def _set_up_log(level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter("%(asctime)s %(levelname)-7s %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
    if level != "DEBUG":
        for noisy in ("kopf", "asyncio", "aiohttp.access"):
            logging.getLogger(noisy).setLevel(logging.WARNING)
        handler.addFilter(without_kopfs_stack)
        handler.addFilter(RetriesNowAndThen())


class _Formatter(logging.Formatter):
    """The log quotes what users and servers have written, and is read on terminals."""

    def format(self, record: logging.LogRecord) -> str:
        """One record without control characters and credentials."""
        return mask(clean(super().format(record)))
