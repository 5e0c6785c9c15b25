"""Errors of a cluster, each with a one-sentence text. The command line then ends with exit code 1."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from typing import Any

from ddpjob_operator.job import api
from ddpjob_operator.job.requests import ApiRequest

JOBS = f"{api.PLURAL}.{api.GROUP}"
NO_OPERATOR = (
    f"the cluster has no {JOBS}: install the operator "
    "(helm install ddpjob-operator charts/ddpjob-operator --namespace ddpjob --create-namespace; docs/operations.md)"
)


class ClusterError(Exception):
    """A request that a cluster has not carried out; the text names the reason and the fix."""


class NoAnswerError(ClusterError):
    """The API server cannot be reached, or takes too long; the same request may succeed later."""


class CutOffError(NoAnswerError):
    """The connection ended in the middle of an answer."""


class NotFoundError(ClusterError):
    """The requested object does not exist."""


class ExistsError(ClusterError):
    """An object of this name exists already."""


def of_answer(asked: ApiRequest, code: int, body: bytes, context: str) -> ClusterError:
    status: Mapping[str, Any] = {}
    with contextlib.suppress(ValueError):
        found = json.loads(body)
        status = found if isinstance(found, dict) and found.get("kind") == "Status" else {}
    message = str(status.get("message") or body[:300].decode(errors="replace").strip() or f"HTTP {code}")
    if code == 401:
        return ClusterError(f"{context}: the credentials were rejected (401 Unauthorized); log in again")
    if code == 403 and (found := re.search(r'User "([^"]*)" cannot ', message)):
        where = f"namespace {asked.namespace}" if asked.namespace else "the cluster"
        role = f"; the ClusterRole ddpjob-{'view' if asked.verb in ('get', 'list') else 'edit'} allows it"
        return ClusterError(
            f"{found[1]} may not {asked.verb} {asked.resource} in {where} ({context})"
            f"{role if asked.resource == JOBS else ''}. Ask an administrator for this right."
        )
    if code == 404:
        return _not_found(asked, status, context)
    if code == 409 and status.get("reason") == "AlreadyExists":
        return ExistsError(f"{asked.resource} {asked.name} exists already in namespace {asked.namespace}")
    if code == 500 and asked.resource == "pods/log":  # the kubelet refused, or did not answer
        return NoAnswerError(f"{context} cannot read it (500): {message}")
    if code in (429, 500, 502, 503, 504):
        return NoAnswerError(f"{context} is overloaded or not ready ({code}): {message}")
    return ClusterError(f"{context} refuses to {asked}: {_causes(status) or message}")


def _not_found(asked: ApiRequest, status: Mapping[str, Any], context: str) -> ClusterError:
    details = _details(status)
    kind = details.get("kind")
    if asked.resource == JOBS and kind != api.PLURAL and kind != "namespaces":
        return ClusterError(f"{context}: {NO_OPERATOR}")
    if kind == "namespaces":
        return ClusterError(f"{context} has no namespace {details.get('name') or asked.namespace}")
    return NotFoundError(f"{asked.resource} {asked.name} is not in namespace {asked.namespace} ({context})")


def _details(status: Mapping[str, Any]) -> Mapping[str, Any]:
    details = status.get("details")
    return details if isinstance(details, Mapping) else {}


def _causes(status: Mapping[str, Any]) -> str:
    causes = [c for c in _details(status).get("causes") or () if isinstance(c, Mapping) and c.get("message")]
    return "; ".join(f"{c['field']}: {c['message']}" if c.get("field") else str(c["message"]) for c in causes)
