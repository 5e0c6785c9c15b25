"""What the operator must be allowed to do. Asked for at the start, so that a missing right is one clear line.

The table is also the source of the RBAC table in docs/ and of the rights that the chart gives.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from ddpjob_operator.job import api
from ddpjob_operator.kube.client import ApiError, Client

_LOGGER = logging.getLogger(__name__)
WAIT_SECONDS = (1, 2, 5, 10, 15, 30)


@dataclass(frozen=True)
class Right:
    """Verbs on a resource, and what they are for."""

    group: str
    resource: str
    verbs: tuple[str, ...]
    why: str
    cluster_wide: bool = False
    """Whether only a ClusterRole can give it: it is not asked for where namespaces are named."""

    def __str__(self) -> str:
        return f"{self.resource}.{self.group}" if self.group else self.resource


RIGHTS = (
    Right(api.GROUP, api.PLURAL, ("get", "list", "watch"), "to see the jobs"),
    Right(api.GROUP, f"{api.PLURAL}/status", ("update",), "to say how they are"),
    Right(api.GROUP, api.PLURAL, ("delete",), "for ttlSecondsAfterFinished"),
    Right("", "pods", ("get", "list", "watch", "create", "patch", "delete"), "the nodes of a job"),
    Right("", "services", ("get", "list", "watch", "create"), "the DNS names of a job; deleted with it by its owner"),
    Right("", "events", ("create",), "what kubectl describe shows"),
    Right("", "nodes", ("list", "watch"), "to see which are lost", cluster_wide=True),
)
# In the operator's own namespace alone, get and update for its one Lease. Not asked for at the start: the task that
# keeps the Lease says what is missing.
LEASE_RIGHT = Right("coordination.k8s.io", "leases", ("get", "create", "update"), "which of several operators acts")

# In each watched namespace, or in one of them all, for one name; list, where all namespaces are watched, for the other.
CLAIM_RIGHT = Right(
    "coordination.k8s.io", "leases", ("get", "create", "update", "list"), "which of several releases acts"
)


async def wait_for_jobs(client: Client, namespaces: Sequence[str]) -> None:
    """Until the DDPJobs of any of the namespaces can be listed: the CRD is there, and we may. Says what is missing.

    Of any: a namespace that we have no right to must not hold up the others.
    """
    said: set[str] = set()
    tries = 0
    while True:
        missing = [text for namespace in namespaces if (text := await _cannot_list(client, namespace))]
        for text in dict.fromkeys(missing):
            if text not in said:
                _LOGGER.warning("%s; trying again", text)
        if len(missing) < len(namespaces):
            if said:
                _LOGGER.info("DDPJobs can be listed now")
            return
        said |= set(missing)
        await asyncio.sleep(WAIT_SECONDS[min(tries, len(WAIT_SECONDS) - 1)])
        tries += 1


async def missing_rights(client: Client, namespaces: Sequence[str]) -> list[str]:
    """A line for each verb that we need and do not have. Raises ApiError."""
    wanted = [
        (right, verb, namespace)
        for namespace in namespaces
        for right in RIGHTS
        for verb in right.verbs
        if not (right.cluster_wide and namespace)
    ]
    allowed = await asyncio.gather(*(_may(client, *one) for one in wanted))
    return [
        f"the operator may not {verb} {right} in {namespace or 'all namespaces'} ({right.why}); "
        f"its ClusterRole or Role needs the verb {verb} on {right}"
        for (right, verb, namespace), yes in zip(wanted, allowed, strict=True)
        if not yes
    ]


async def _cannot_list(client: Client, namespace: str) -> str:
    where = f"namespaces/{namespace}/" if namespace else ""
    try:
        await client.get(f"/apis/{api.GROUP}/{api.VERSION}/{where}{api.PLURAL}", {"limit": "1"})
    except ApiError as error:
        if error.status == 404:
            return f"the CRD {api.PLURAL}.{api.GROUP} is not installed: kubectl apply -f charts/ddpjob-operator/crds"
        return f"DDPJobs in {namespace or 'all namespaces'} cannot be listed: {error}"
    return ""


async def _may(client: Client, right: Right, verb: str, namespace: str) -> bool:
    resource, _, subresource = right.resource.partition("/")
    attributes = {
        "group": right.group,
        "resource": resource,
        "subresource": subresource,
        "verb": verb,
        "namespace": namespace,
    }
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    answer = await client.create("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review)
    return bool((answer.get("status") or {}).get("allowed"))
