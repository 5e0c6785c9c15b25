"""Detects a CRD in the cluster that is older than this operator.

Helm never upgrades CRDs. The API server then silently drops unknown status fields, so the operator loses them, for
example `startingSince`, from which startDeadlineSeconds counts.

The operator compares its fields with the published schemas, which every service account may read (ClusterRole
system:discovery). Reading the CRD itself would need a right on all CRDs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from ddpjob_operator.job import api, crd
from ddpjob_operator.kube.api.client import ApiError, Client
from ddpjob_operator.kube.api.limit import at_most

OPENAPI = f"/openapi/v3/apis/{api.GROUP}/{api.VERSION}"
UPGRADE = "kubectl apply --server-side --force-conflicts -f charts/ddpjob-operator/crds"
_NAMED = 3
_KIND = {"group": api.GROUP, "version": api.VERSION, "kind": api.KIND}


async def report_old_crd(client: Client, log: logging.Logger, *, seconds: float = 5.0) -> None:
    """Log a line if the CRD lacks fields. The operator's start waits for this, for at most `seconds`."""
    try:
        async with at_most(seconds):
            fields = await dropped_fields(client)
    except (ApiError, asyncio.TimeoutError) as error:
        log.info("the CRD was not compared with this operator: %s", str(error) or "no answer in time")
        return
    if fields:
        log.warning("%s", older(fields))


def older(fields: list[str]) -> str:
    """Return a line for the log: the CRD drops these fields until it is upgraded, and how to upgrade it."""
    more = len(fields) - _NAMED
    named = ", ".join(fields[:_NAMED]) + (f" and {more} more field{'s' if more > 1 else ''}" if more > 0 else "")
    return (
        f"the CRD {api.PLURAL}.{api.GROUP} is older than this operator: the API server drops or refuses {named}; "
        f"Helm never upgrades a CRD: {UPGRADE}"
    )


async def dropped_fields(client: Client) -> list[str]:
    """Return the sorted paths of the fields that the CRD lacks; for a missing object, only its path. Raise ApiError.

    Empty if the server publishes no schema of the kind.
    """
    schemas = ((await client.get(OPENAPI)).get("components") or {}).get("schemas") or {}
    known = crd.crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for served in schemas.values():
        if served and _KIND in (served.get("x-kubernetes-group-version-kind") or ()):
            return sorted(_missing(known, served, ""))
    return []


def _missing(known: Mapping[str, Any], served: Mapping[str, Any], path: str) -> Iterator[str]:
    # The served schema keeps unknown fields of this object, so no field is missing.
    if served.get("x-kubernetes-preserve-unknown-fields"):
        return
    for inner in ("items", "additionalProperties"):
        if isinstance(known.get(inner), dict) and isinstance(served.get(inner), dict):
            yield from _missing(known[inner], served[inner], path)
    there = served.get("properties") or {}
    for name, schema in (known.get("properties") or {}).items():
        below = f"{path}.{name}".removeprefix(".")
        if name not in there:
            yield below
        elif below != "metadata":
            yield from _missing(schema, there[name], below)
