"""A model of the API server: only what its clients can notice. tests/api/test_model.py compares it with a real one.

Objects are raw dicts that nobody changes in place. Each write makes a new dict, so that a watch, a cache and a stale
list can share them."""

from __future__ import annotations

import asyncio
import bisect
import datetime as dt
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from virtual_time import START

from ddpjob_operator.job import api

Raw = dict[str, Any]
Answer = tuple[int, Raw]
ObjectKey = tuple[str, str]
"""Namespace and name."""


@dataclass(frozen=True)
class Kind:
    """A resource of the API."""

    plural: str
    kind: str
    api_version: str
    status_apart: bool = False
    """True if the status is a subresource: a PUT of the object does not change it, and a PUT of the status only it."""
    generation: bool = False

    def named(self, name: str) -> str:
        """Return an object's name as in error messages."""
        group = self.api_version.rpartition("/")[0]
        return f'{self.plural}.{group} "{name}"' if group else f'{self.plural} "{name}"'


KINDS = {
    kind.plural: kind
    for kind in (
        Kind("pods", "Pod", "v1", status_apart=True),
        Kind("services", "Service", "v1", status_apart=True),
        Kind("nodes", "Node", "v1", status_apart=True),
        Kind("leases", "Lease", "coordination.k8s.io/v1"),
        Kind("events", "Event", "v1"),
        Kind("podgroups", "PodGroup", "scheduling.k8s.io/v1alpha2", status_apart=True),
        Kind("workloads", "Workload", "kueue.x-k8s.io/v1beta1", status_apart=True),
        Kind("resourceflavors", "ResourceFlavor", "kueue.x-k8s.io/v1beta1"),
        Kind("workloadpriorityclasses", "WorkloadPriorityClass", "kueue.x-k8s.io/v1beta1"),
        Kind(api.PLURAL, api.KIND, api.API_VERSION, status_apart=True, generation=True),
    )
}

# API groups that are served only if something has installed them.
ADDED_GROUPS = ("scheduling.k8s.io", "kueue.x-k8s.io")


@dataclass(frozen=True)
class Change:
    """An entry of the log from which watches read."""

    version: int
    at: float
    old: Raw | None
    new: Raw | None
    actor: str = ""

    @property
    def object(self) -> Raw:
        """The object after the change, or before it if it was deleted."""
        return self.new or self.old or {}


class ModelApi:
    """All objects, and the log of their changes. `clock`: seconds for the log. `now`: time for timestamps."""

    def __init__(
        self, clock: Callable[[], float] = lambda: 0.0, now: Callable[[], dt.datetime] = lambda: START
    ) -> None:
        self._clock, self._now = clock, now
        self.first_version = 1000
        self._version, self._uids = self.first_version, 0
        self.objects: dict[str, dict[ObjectKey, Raw]] = {plural: {} for plural in KINDS}
        self.log: dict[str, list[Change]] = {plural: [] for plural in KINDS}
        self.listeners: list[Callable[[Kind, Change], None]] = []
        """Called after each change, before the request is answered."""
        self.late: set[str] = set()
        """uids of objects that a request created after its sender had died."""
        self.waiting: dict[str, list[asyncio.Future[bool]]] = {plural: [] for plural in KINDS}
        """By resource, the clients that wait for its next change."""
        self.served: set[str] = set()
        """The apiVersions of PodGroups and Workloads."""
        self.kinds = dict(KINDS)
        self.webhooks_down: set[str] = set()
        """Resources whose webhook does not answer, so that none of them is created or changed."""
        self.refuses: Callable[[str, Raw], str] = lambda plural, body: ""
        """Returns why admission refuses to create an object; "" if it is accepted."""

    @property
    def version(self) -> int:
        """Return the newest resourceVersion."""
        return self._version

    def request(
        self, method: str, path: str, params: Mapping[str, str] | None = None, body: Raw | None = None, actor: str = ""
    ) -> Answer:
        """Return code and body of the answer. `actor`: the sender's name in the log."""
        if path.endswith("/selfsubjectaccessreviews"):
            return 201, {**(body or {}), "status": {"allowed": True}}
        if path.endswith("/selfsubjectrulesreviews"):
            everything = {"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}
            return 201, {**(body or {}), "status": {"resourceRules": [everything], "incomplete": False}}
        if path.removeprefix("/apis/") in self.served:
            found = [{"name": kind.plural} for kind in self.kinds.values() if path.endswith(f"/{kind.api_version}")]
            return 200, {"kind": "APIResourceList", "resources": found}
        plural, namespace, name, subresource = parse(path)
        if not self.serves(plural):
            return _no(404, "NotFound", "the server could not find the requested resource")
        kind = self.kinds[plural]
        if method in ("POST", "PUT") and plural in self.webhooks_down:
            return _no(500, "InternalError", f'Internal error occurred: failed calling webhook "m{plural}.model"')
        if method == "GET":
            return self._get(kind, namespace, name, params or {})
        if method == "POST":
            return self._create(kind, namespace, body or {}, actor)
        if method == "PUT":
            return self._replace(kind, (namespace, name), subresource, body or {}, actor)
        if method == "PATCH":
            return self._patch(kind, (namespace, name), body or {}, actor)
        assert method == "DELETE", method
        return self._delete(kind, (namespace, name), body or {}, actor)

    def serves(self, plural: str) -> bool:
        """True if this resource is served now."""
        kind = self.kinds.get(plural)
        return kind is not None and (not kind.api_version.startswith(ADDED_GROUPS) or kind.api_version in self.served)

    def serve(self, api_version: str) -> None:
        """Serve the kinds of this API group, only in this version."""
        group = api_version.partition("/")[0]
        self.served = {one for one in self.served if not one.startswith(f"{group}/")} | {api_version}
        for plural, kind in self.kinds.items():
            if kind.api_version.startswith(f"{group}/"):
                self.kinds[plural] = replace(kind, api_version=api_version)

    # ---------------------------------------------------------------- for other parts of the model, without faults

    def find(self, plural: str, name: str, namespace: str = "default") -> Raw | None:
        """Return the present object, or None."""
        return self.objects[plural].get((namespace, name))

    def all(self, plural: str) -> list[Raw]:
        """Return all present objects."""
        return list(self.objects[plural].values())

    def put(self, plural: str, raw: Raw, actor: str = "user") -> Raw:
        """Store an object as it is, with a new resourceVersion."""
        return self._store(self.kinds[plural], _place(raw), self.objects[plural].get(_place(raw)), raw, actor)

    def change(self, plural: str, raw: Raw, actor: str, **fields: Any) -> Raw | None:
        """Change top-level fields of an object that still exists, and return it. `metadata` is merged."""
        place = _place(raw)
        old = self.objects[plural].get(place)
        if old is None or old["metadata"]["uid"] != raw["metadata"]["uid"]:
            return None
        metadata = {**old["metadata"], **fields.pop("metadata", {})}
        return self._store(self.kinds[plural], place, old, {**old, **fields, "metadata": metadata}, actor)

    def remove(self, plural: str, raw: Raw, actor: str) -> None:
        """Remove the object immediately, whatever its grace period and finalizers."""
        place = _place(raw)
        old = self.objects[plural].get(place)
        if old is not None and old["metadata"]["uid"] == raw["metadata"]["uid"]:
            self._drop(self.kinds[plural], place, old, actor)

    def at_version(self, plural: str, version: int) -> list[Raw]:
        """Return the objects at an earlier version, as a server that lags behind would list them."""
        then: dict[ObjectKey, Raw] = {}
        for change in self.log[plural]:
            if change.version > version:
                break
            if change.new is None:
                then.pop(_place(change.object), None)
            else:
                then[_place(change.object)] = change.new
        return list(then.values())

    def after(self, plural: str, version: int) -> Change | None:
        """Return the first change after a version."""
        log = self.log[plural]
        index = bisect.bisect_right(log, version, key=lambda change: change.version)
        return log[index] if index < len(log) else None

    # ---------------------------------------------------------------- verbs

    def _get(self, kind: Kind, namespace: str, name: str, params: Mapping[str, str]) -> Answer:
        if name:
            found = self.objects[kind.plural].get((namespace, name))
            return (200, found) if found else _not_found(kind, name)
        matches = matching(params.get("labelSelector", ""), namespace)
        items = [raw for raw in self.objects[kind.plural].values() if matches(raw)]
        return 200, list_of(kind, items, self._version)

    def _create(self, kind: Kind, namespace: str, body: Raw, actor: str) -> Answer:
        name = body["metadata"]["name"]
        place = (namespace, name)
        if place in self.objects[kind.plural]:
            return _no(409, "AlreadyExists", f"{kind.named(name)} already exists")
        if refusal := self.refuses(kind.plural, body):
            return _no(403, "Forbidden", f"{kind.named(name)} is forbidden: {refusal}")
        self._uids += 1
        metadata = {
            **body["metadata"],
            "namespace": namespace,
            "uid": f"00000000-0000-4000-8000-{self._uids:012d}",
            "creationTimestamp": stamp(self._now()),
        }
        raw = {**body, "metadata": metadata}
        if kind.generation:
            metadata["generation"] = 1
        if kind.status_apart:
            raw.pop("status", None)
        if kind.plural == "pods":
            raw["spec"] = {"terminationGracePeriodSeconds": 30, **body["spec"]}
            raw["status"] = {"phase": "Pending"}
        return 201, self._store(kind, place, None, raw, actor)

    def _replace(self, kind: Kind, place: ObjectKey, subresource: str, body: Raw, actor: str) -> Answer:
        old = self.objects[kind.plural].get(place)
        if old is None:
            return _not_found(kind, place[1])
        metadata = body.get("metadata") or {}
        given = metadata.get("resourceVersion")
        if kind.plural in (api.PLURAL, "leases") and not given:
            text = f"{kind.named(place[1])} is invalid: metadata.resourceVersion: must be specified for an update"
            return _no(422, "Invalid", text)
        if metadata.get("uid", old["metadata"]["uid"]) != old["metadata"]["uid"]:
            return _conflict(kind, place[1], "Precondition failed: the UID differs")
        if given and given != old["metadata"]["resourceVersion"]:
            return _conflict(kind, place[1], "the object has been modified")
        if subresource == "status":
            new = {**old, "status": body.get("status") or {}}
        else:
            new = self._with_spec(kind, old, body)
        if new == old:
            return 200, old  # as with etcd, nothing is written, and the version stays
        stored = self._store(kind, place, old, new, actor)
        return 200, self._drop_if_released(kind, place, stored, actor)

    def _patch(self, kind: Kind, place: ObjectKey, body: Raw, actor: str) -> Answer:
        """Merge fields of the spec and labels, the only fields that are ever patched."""
        old = self.objects[kind.plural].get(place)
        if old is None:
            return _not_found(kind, place[1])
        if body["metadata"]["uid"] != old["metadata"]["uid"]:
            return _conflict(kind, place[1], "Precondition failed: the UID differs")
        labels = {**(old["metadata"].get("labels") or {}), **body["metadata"].get("labels", {})}
        spec, metadata = {**old["spec"], **body.get("spec", {})}, {**old["metadata"], "labels": labels}
        return 200, self._store(kind, place, old, {**old, "spec": spec, "metadata": metadata}, actor)

    def _with_spec(self, kind: Kind, old: Raw, body: Raw) -> Raw:
        kept = {k: old["metadata"][k] for k in _SERVERS_OWN if k in old["metadata"]}
        given = {k: v for k, v in body["metadata"].items() if k not in _SERVERS_OWN}
        new = {**body, "metadata": {**given, **kept}}
        if kind.status_apart:
            new.pop("status", None)
            if "status" in old:
                new["status"] = old["status"]
        if kind.generation and new.get("spec") != old.get("spec"):
            new["metadata"]["generation"] = old["metadata"]["generation"] + 1
        return new

    def _delete(self, kind: Kind, place: ObjectKey, options: Raw, actor: str) -> Answer:
        old = self.objects[kind.plural].get(place)
        if old is None:
            return _not_found(kind, place[1])
        uid = (options.get("preconditions") or {}).get("uid")
        if uid not in (None, old["metadata"]["uid"]):
            return _conflict(kind, place[1], "Precondition failed: the UID differs")
        version = (options.get("preconditions") or {}).get("resourceVersion")
        if version not in (None, old["metadata"]["resourceVersion"]):
            return _conflict(kind, place[1], "Precondition failed: the ResourceVersion differs")
        seconds = _grace_seconds(old, options.get("gracePeriodSeconds")) if kind.plural == "pods" else 0
        if kind.plural == "pods" and seconds:
            return 200, self._ask_to_stop(kind, place, old, seconds, actor)
        if old["metadata"].get("finalizers"):
            if "deletionTimestamp" in old["metadata"]:
                return 200, old
            asked = {**old["metadata"], "deletionTimestamp": stamp(self._now()), "deletionGracePeriodSeconds": 0}
            return 200, self._store(kind, place, old, {**old, "metadata": asked}, actor)
        if kind.plural == "pods" and "deletionTimestamp" not in old["metadata"]:
            at_once = {"deletionTimestamp": stamp(self._now()), "deletionGracePeriodSeconds": 0}
            old = {**old, "metadata": {**old["metadata"], **at_once}}
        gone = self._drop(kind, place, old, actor)
        return 200, gone if kind.plural == "pods" else {"kind": "Status", "apiVersion": "v1", "status": "Success"}

    def _ask_to_stop(self, kind: Kind, place: ObjectKey, old: Raw, seconds: int, actor: str) -> Raw:
        before = old["metadata"].get("deletionGracePeriodSeconds")
        if before is not None and before <= seconds:
            return old
        end = self._now() + dt.timedelta(seconds=seconds)
        asked = {**old["metadata"], "deletionTimestamp": stamp(end), "deletionGracePeriodSeconds": seconds}
        return self._store(kind, place, old, {**old, "metadata": asked}, actor)

    # ---------------------------------------------------------------- storing

    def _store(self, kind: Kind, place: ObjectKey, old: Raw | None, new: Raw, actor: str) -> Raw:
        self._version += 1
        new = {**new, "metadata": {**new["metadata"], "resourceVersion": str(self._version)}}
        self.objects[kind.plural][place] = new
        self._tell(kind, Change(self._version, self._clock(), old, new, actor))
        return new

    def _drop(self, kind: Kind, place: ObjectKey, old: Raw, actor: str) -> Raw:
        self._version += 1
        last = {**old, "metadata": {**old["metadata"], "resourceVersion": str(self._version)}}
        del self.objects[kind.plural][place]
        self._tell(kind, Change(self._version, self._clock(), last, None, actor))
        return last

    def _drop_if_released(self, kind: Kind, place: ObjectKey, raw: Raw, actor: str) -> Raw:
        metadata = raw["metadata"]
        waits = metadata.get("finalizers") or metadata.get("deletionGracePeriodSeconds", 0)
        return self._drop(kind, place, raw, actor) if "deletionTimestamp" in metadata and not waits else raw

    def _tell(self, kind: Kind, change: Change) -> None:
        self.log[kind.plural].append(change)
        waiting, self.waiting[kind.plural] = self.waiting[kind.plural], []
        for future in waiting:
            if not future.done():
                future.set_result(True)
        for listener in self.listeners:
            listener(kind, change)


_SERVERS_OWN = frozenset(
    "uid creationTimestamp namespace name generation deletionTimestamp deletionGracePeriodSeconds".split()
)


def parse(path: str) -> tuple[str, str, str, str]:
    """Return plural, namespace, name and subresource of a request."""
    parts = path.strip("/").split("/")
    parts = parts[2:] if parts[0] == "api" else parts[3:]
    namespace = ""
    if len(parts) > 2 and parts[0] == "namespaces":
        namespace, parts = parts[1], parts[2:]
    plural, name, subresource = [*parts, "", "", ""][:3]
    return plural, namespace, name, subresource


def matching(labels: str, namespace: str) -> Callable[[Raw], bool]:
    """Return a predicate: the object is in the namespace ("": any) and has these labels: `key` or `key=value`."""
    wanted = [pair.partition("=") for pair in labels.split(",") if pair]

    def matches(raw: Raw) -> bool:
        metadata = raw["metadata"]
        if namespace and metadata.get("namespace") != namespace:
            return False
        has = metadata.get("labels") or {}
        return all(key in has and (not equals or has[key] == value) for key, equals, value in wanted)

    return matches


def event_of(change: Change, matches: Callable[[Raw], bool]) -> Raw | None:
    """Return the event for a watch that sees what `matches`; None if this watch sees no change."""
    was = change.old is not None and matches(change.old)
    if change.new is None or not matches(change.new):
        return {"type": "DELETED", "object": change.object} if was else None
    return {"type": "MODIFIED" if was else "ADDED", "object": change.new}


def list_of(kind: Kind, items: list[Raw], version: int) -> Raw:
    """Return a List object."""
    metadata = {"resourceVersion": str(version)}
    return {"kind": f"{kind.kind}List", "apiVersion": kind.api_version, "metadata": metadata, "items": items}


def owner_uid(raw: Raw) -> str:
    """Return the uid of the controller, or ""."""
    owners = raw["metadata"].get("ownerReferences") or ()
    return next((str(o["uid"]) for o in owners if o.get("controller")), "")


def stamp(at: dt.datetime) -> str:
    """Return a time as the API server writes it."""
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")


def _place(raw: Raw) -> ObjectKey:
    return raw["metadata"].get("namespace", ""), raw["metadata"]["name"]


def _grace_seconds(pod: Raw, asked: int | None) -> int:
    """Return the grace period. A pod that has ended or has no node needs none (podStrategy.CheckGracefulDelete)."""
    if not pod["spec"].get("nodeName") or pod["status"].get("phase") in ("Succeeded", "Failed"):
        return 0
    return int(pod["spec"]["terminationGracePeriodSeconds"]) if asked is None else asked


def _no(code: int, reason: str, message: str) -> Answer:
    return code, {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "code": code,
        "reason": reason,
        "message": message,
    }


def _not_found(kind: Kind, name: str) -> Answer:
    return _no(404, "NotFound", f"{kind.named(name)} not found")


def _conflict(kind: Kind, name: str, why: str) -> Answer:
    return _no(409, "Conflict", f"Operation cannot be fulfilled on {kind.named(name)}: {why}")
