"""Checks that a release is installed and works: `helm test` runs this in a pod with the operator's image.

It checks what a first job needs: the CRD, operators that pass their probes, a leader, and an address that takes
reports. It needs the right to read one Deployment and one Lease.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import os
import sys
from collections.abc import Awaitable, Callable, Mapping

import aiohttp

from ddpjob_operator.job import api
from ddpjob_operator.kube.api.client import ApiError, Client
from ddpjob_operator.kube.api.runtime import SYSTEM
from ddpjob_operator.kube.api.served_crd import UPGRADE, dropped_fields, older

TRIES = 5
WAIT_SECONDS = 3.0


class BrokenError(Exception):
    """A check failed. The text names the problem and the next step."""


async def crd(client: Client) -> str:
    """Check that the API server serves our kind, version and fields. Raise BrokenError if not."""
    path = f"/apis/{api.GROUP}/{api.VERSION}"
    try:
        served = {resource["name"] for resource in (await client.get(path)).get("resources") or ()}
    except ApiError as error:
        if error.status != 404:
            raise
        raise BrokenError(f"{api.GROUP}/{api.VERSION} is not served: {UPGRADE}") from None
    if missing := {api.PLURAL, f"{api.PLURAL}/status", f"{api.PLURAL}/scale"} - served:
        raise BrokenError(f"the CRD has no {', '.join(sorted(missing))}: {UPGRADE}")
    if fields := await dropped_fields(client):
        raise BrokenError(older(fields))
    return f"the CRD {api.PLURAL}.{api.GROUP} is served with {api.VERSION}"


async def health(client: Client, namespace: str, name: str) -> str:
    """Check that an operator passes the kubelet's probes of /healthz. Raise BrokenError if none does."""
    status = (await client.get(f"/apis/apps/v1/namespaces/{namespace}/deployments/{name}")).get("status") or {}
    ready, wanted = status.get("readyReplicas") or 0, status.get("replicas") or 0
    if not ready:
        raise BrokenError(f"no operator answers its probes, 0 of {wanted}: kubectl -n {namespace} describe pods")
    return f"{ready} of {wanted} operators answer /healthz"


async def leadership(client: Client, namespace: str, name: str, now: dt.datetime) -> str:
    """Check that an operator leads. Raise BrokenError if none does."""
    spec = (await client.get(f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{name}")).get("spec") or {}
    holder, renewed = spec.get("holderIdentity"), spec.get("renewTime")
    look = f"kubectl -n {namespace} logs deployment/{name}"
    if not holder or not renewed:
        raise BrokenError(f"no operator holds the Lease {namespace}/{name}: {look}")
    age = (now - dt.datetime.fromisoformat(renewed.replace("Z", "+00:00"))).total_seconds()
    # Allow twice the duration of the Lease, because clocks of nodes differ.
    if age > 2 * (spec.get("leaseDurationSeconds") or 15):
        raise BrokenError(f"the Lease {namespace}/{name} was renewed {age:.0f} s ago by {holder}: {look}")
    return f"{holder} leads"


async def reports(url: str) -> str:
    """Check that the address for trainers' reports answers. Raise BrokenError if not."""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session,
            session.post(url, json={}) as answer,
        ):
            status = answer.status
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
        raise BrokenError(f"{url} does not answer ({error or type(error).__name__}): see docs/operations.md") from None
    if status != 401:
        raise BrokenError(f"{url} answers {status} to a report without a token, not 401: is it another server?")
    return f"{url} accepts reports from pods, with a token"


async def check(
    client: Client,
    environment: Mapping[str, str],
    *,
    tries: int = TRIES,
    utc: Callable[[], dt.datetime] = SYSTEM.utc,
) -> int:
    """Print a line for each check. Return the exit code: 1 if a check still fails after `tries` tries."""
    namespace, name = environment["DDPJOB_LEASE_NAMESPACE"], environment["DDPJOB_LEASE_NAME"]
    checks: list[Callable[[], Awaitable[str]]] = [
        lambda: crd(client),
        lambda: health(client, namespace, name),
        lambda: leadership(client, namespace, name, utc()),
    ]
    if url := environment.get("DDPJOB_STATUS_URL"):
        checks.append(lambda: reports(url))
    return max([await _tried(one, tries) for one in checks])


async def _tried(one: Callable[[], Awaitable[str]], tries: int) -> int:
    """Run a check and return its exit code. Retry, because an operator that has just started may not lead yet."""
    for left in reversed(range(tries)):
        try:
            print(f"ok    {await one()}")
            return 0
        except (BrokenError, ApiError) as error:
            if not left:
                print(f"FAIL  {error}")
        if left:
            await asyncio.sleep(WAIT_SECONDS)
    return 1


async def _main() -> int:
    async with Client() as client:
        return await check(client, os.environ)


if __name__ == "__main__":
    sys.exit(asyncio.run(_main()))
