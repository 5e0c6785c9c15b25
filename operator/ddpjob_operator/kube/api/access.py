"""The rights that the operator needs, checked at the start: a missing right becomes one clear line of the log. The RBAC
table in docs/ and the rights in the chart come from this table.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddpjob_operator.job import api
from ddpjob_operator.kube.api.client import ApiError, Client, collection

WAIT_SECONDS = (1, 2, 5, 10, 15, 30)


@dataclass(frozen=True)
class Right:
    """A right that the operator needs: verbs on a resource, and the purpose."""

    group: str
    resource: str
    verbs: tuple[str, ...]
    why: str
    cluster_wide: bool = False
    """True if only a ClusterRole can grant it. It is not checked in namespaced mode."""

    def __str__(self) -> str:
        return f"{self.resource}.{self.group}" if self.group else self.resource


RIGHTS = (
    Right(api.GROUP, api.PLURAL, ("get", "list", "watch"), "to see the jobs"),
    Right(api.GROUP, f"{api.PLURAL}/status", ("update",), "to write their status"),
    Right(api.GROUP, api.PLURAL, ("delete",), "for ttlSecondsAfterFinished"),
    Right("", "pods", ("get", "list", "watch", "create", "patch", "delete"), "the pods of a job"),
    Right("", "services", ("get", "list", "watch", "create"), "the DNS names of a job; deleted with it by its owner"),
    Right("", "events", ("create",), "the Events that `kubectl describe` shows"),
    Right("", "nodes", ("list", "watch"), "to detect lost nodes", cluster_wide=True),
)

_KUEUE = "kueue.x-k8s.io"
# By gang adapter (gangs/); checked only if the adapter is enabled.
GANG_RIGHTS = {
    "native": (
        Right(
            "scheduling.k8s.io",
            "podgroups",
            ("get", "list", "watch", "create", "delete"),
            "all pods of an attempt or none (spec.gang: native), if gang.native.enabled is set",
        ),
    ),
    "kueue": (
        Right(
            _KUEUE,
            "workloads",
            ("get", "list", "watch", "create", "delete"),
            "the place of a job in its queue (spec.gang: kueue), if gang.kueue.enabled is set",
        ),
        Right(_KUEUE, "workloads/status", ("update",), "to give quota back, and to say that pods run or have ended"),
        Right(_KUEUE, "resourceflavors", ("get",), "the nodes of the quota", cluster_wide=True),
        Right(_KUEUE, "workloadpriorityclasses", ("get",), "the priority in the queue", cluster_wide=True),
        Right("scheduling.k8s.io", "priorityclasses", ("get",), "the priority in the queue", cluster_wide=True),
    ),
}
# Not checked at the start: without this right messages only lack the queue position, and queue_places.py logs that.
PLACES_RIGHT = Right(
    "visibility.kueue.x-k8s.io",
    "localqueues/pendingworkloads",
    ("get",),
    "the position of a waiting job, if gang.kueue.places.enabled is set",
)


async def wait_for_jobs(client: Client, namespaces: Sequence[str], log: logging.Logger) -> None:
    """Return when the CRD exists and the DDPJobs of at least one namespace can be listed. Log what is missing. A
    namespace without rights must not delay the other namespaces."""
    logged: set[str] = set()
    tries = 0
    while True:
        missing = [text for namespace in namespaces if (text := await _cannot_list(client, namespace))]
        for text in dict.fromkeys(missing):
            if text not in logged:
                log.warning("%s; trying again", text)
        if len(missing) < len(namespaces):
            if logged:
                log.info("DDPJobs can be listed now")
            return
        logged |= set(missing)
        await asyncio.sleep(WAIT_SECONDS[min(tries, len(WAIT_SECONDS) - 1)])
        tries += 1


async def report_missing_rights(
    client: Client, namespaces: Sequence[str], log: logging.Logger, gangs: Sequence[str] = ()
) -> None:
    """Log a line for each verb that is needed and not granted. gangs: the enabled adapters."""
    try:
        for namespace in namespaces:
            for line in await missing_rights(client, namespace, gangs):
                log.warning("%s", line)
    except ApiError as error:
        log.info("the operator's own rights were not checked: %s", error)


async def missing_rights(client: Client, namespace: str, gangs: Sequence[str] = ()) -> list[str]:
    """Return a line for each verb that is needed in a namespace ("": in all) and not granted. Raise ApiError.

    One SelfSubjectRulesReview lists what RBAC grants in a namespace, which is usually all. The rest is checked verb by
    verb: another authorizer, such as a webhook, may grant rights that it cannot list (status.incomplete).
    """
    rights = (*RIGHTS, *(right for gang in gangs for right in GANG_RIGHTS[gang]))
    needed = [(right, verb) for right in rights if not (right.cluster_wide and namespace) for verb in right.verbs]
    review = await _review(client, "SelfSubjectRulesReview", {"namespace": namespace}) if namespace else {}
    rules = review.get("resourceRules") or ()
    unlisted = [(right, verb) for right, verb in needed if not any(_grants(rule, right, verb) for rule in rules)]
    allowed = await asyncio.gather(*(_may(client, right, verb, namespace) for right, verb in unlisted))
    return [
        f"the operator may not {verb} {right} in {namespace or 'all namespaces'} ({right.why}); "
        f"its ClusterRole or Role needs the verb {verb} on {right}"
        for (right, verb), yes in zip(unlisted, allowed, strict=True)
        if not yes
    ]


async def _review(client: Client, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    """Return the status of a review of our own rights."""
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": kind, "spec": spec}
    answer = await client.create(f"/apis/authorization.k8s.io/v1/{kind.lower()}s", review)
    return answer.get("status") or {}


def _grants(rule: Mapping[str, Any], right: Right, verb: str) -> bool:
    """True if a rule grants the verb for objects of any name."""

    def lists(field: str, wanted: str) -> bool:
        return any(value in ("*", wanted) for value in rule.get(field) or ())

    named = rule.get("resourceNames")
    return not named and lists("verbs", verb) and lists("apiGroups", right.group) and lists("resources", right.resource)


async def _cannot_list(client: Client, namespace: str) -> str:
    try:
        await client.get(collection(api.PLURAL, namespace), {"limit": "1"})
    except ApiError as error:
        if error.status == 404:
            return f"the CRD {api.PLURAL}.{api.GROUP} is not installed: kubectl apply -f charts/ddpjob-operator/crds"
        return f"DDPJobs in {namespace or 'all namespaces'} cannot be listed: {error}"
    return ""


async def _may(client: Client, right: Right, verb: str, namespace: str) -> bool:
    resource, _, subresource = right.resource.partition("/")
    attributes = {"group": right.group, "resource": resource, "subresource": subresource}
    attributes |= {"verb": verb, "namespace": namespace}
    review = await _review(client, "SelfSubjectAccessReview", {"resourceAttributes": attributes})
    return bool(review.get("allowed"))
