"""Requests to an API server as RBAC names them (verb, resource), for metrics and for messages about refusals."""

from __future__ import annotations

from dataclasses import dataclass

_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


@dataclass(frozen=True)
class ApiRequest:
    verb: str
    plural: str
    """pods, ddpjobs; "" for a path without a resource."""
    subresource: str = ""
    group: str = ""
    namespace: str = ""
    name: str = ""

    @property
    def resource(self) -> str:
        """The resource as RBAC names it: pods, pods/log, ddpjobs.training.ddpjob.io."""
        full = f"{self.plural}.{self.group}" if self.group else self.plural
        return f"{full}/{self.subresource}" if self.subresource else full

    def __str__(self) -> str:
        name = f" {self.name}" if self.name else ""
        where = f" in namespace {self.namespace}" if self.namespace else ""
        return f"{self.verb} {self.resource}{name}{where}"


def read(method: str, path: str, *, watch: bool = False) -> ApiRequest:
    """Return the verb, resource, namespace and name of a request. Methods that do not write count as reads."""
    parts = path.partition("?")[0].strip("/").split("/")
    group = parts[1] if parts[0] == "apis" and len(parts) > 2 else ""
    parts = parts[3:] if group else parts[2:]
    namespace = ""
    if len(parts) > 2 and parts[0] == "namespaces":
        namespace, parts = parts[1], parts[2:]
    plural, name, subresource = [*parts, "", "", ""][:3]
    reads = "watch" if watch else "get" if name else "list"
    return ApiRequest(_VERBS.get(method, reads), plural, subresource, group, namespace, name)
