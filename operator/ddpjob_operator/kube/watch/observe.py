"""Reduces raw objects of the API server to the fields that decisions read. Pure functions, called for every event."""

from __future__ import annotations

import datetime as dt
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from msgspec.structs import replace

from ddpjob_core import rules
from ddpjob_operator.gangs import kueue
from ddpjob_operator.gangs.adapter import Adapter
from ddpjob_operator.job import api, bounds
from ddpjob_operator.job.bounds import UnreadableError, seconds, text, time
from ddpjob_operator.job.podspec import trainer_container
from ddpjob_operator.observed.cluster import ConflictingObject, Container, Pod
from ddpjob_operator.observed.groups import ObservedGroup
from ddpjob_operator.pods import naming

Raw = Mapping[str, Any]
T = TypeVar("T")
# The activeDeadlineSeconds of pods that must end but whose log must stay; Kubernetes allows no smaller value.
END_NOW_SECONDS = 1
# A container that waits for one of these reasons is starting normally.
_IN_TURN = ("", "PodInitializing", "ContainerCreating")


@dataclass(frozen=True)
class Service:
    name: str
    uid: str
    owner_uid: str
    """uid of the object's controller; "" if none."""
    owner_job: str
    """Name of the DDPJob that controls the object; "" if none."""


def _total(read: Callable[[Raw], T]) -> Callable[[Raw], T]:
    """Make a reader raise UnreadableError, and nothing else, for JSON that it cannot read."""

    @functools.wraps(read)
    def total(raw: Raw) -> T:
        try:
            return read(raw)
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            why = f"{type(error).__name__}: {error}"[:200]
            raise UnreadableError(f"the {read.__name__} cannot be read ({why})") from None

    return total


@_total
def pod(raw: Raw) -> Pod:
    """Return a raw pod as the plan sees it. Raise UnreadableError."""
    metadata, status = raw["metadata"], raw.get("status") or {}
    labels = metadata.get("labels") or {}
    owner = controller(raw)
    phase = text(status.get("phase")) or "Pending"
    trainer_state = trainer(raw, phase)
    disrupted, unscheduled = condition(raw, "DisruptionTarget", "True"), condition(raw, "PodScheduled", "False")
    why = text(unscheduled.get("message")) or text(unscheduled.get("reason"))
    tried = unscheduled.get("reason") == "Unschedulable" or None
    return Pod(
        name=_word(metadata, "name"),
        uid=_word(metadata, "uid"),
        owner_uid=text(owner.get("uid")),
        attempt=bounds.number(labels.get(naming.LABEL_ATTEMPT), bounds.TURNS_MAX),
        place=bounds.number(labels.get(naming.LABEL_RANK), bounds.NODES_MAX),
        replacement=max(0, bounds.number(labels.get(naming.LABEL_REPLACEMENT, "0"), bounds.TURNS_MAX)),
        job=job_name(raw),
        node=text((raw.get("spec") or {}).get("nodeName")),
        phase=phase,
        reason=text(status.get("reason")) if phase == "Failed" else "",
        message=text(status.get("message")) if phase == "Failed" else "",
        disruption=(text(disrupted.get("reason")) or "DisruptionTarget") if disrupted else "",
        scheduled_at=time(condition(raw, "PodScheduled", "True").get("lastTransitionTime")),
        accepted_at=time(status.get("startTime")),
        silent_since=_silent_since(raw, trainer_state),
        unschedulable=(kueue.queued_alone(raw) or why) if why else "",
        # None for a pod with scheduling gates (reason SchedulingGated), because the scheduler has not tried it yet.
        unschedulable_since=tried and time(unscheduled.get("lastTransitionTime")),
        deletion_requested_at=deletion_requested_at(metadata),
        deletion_deadline=time(metadata.get("deletionTimestamp")),
        address=text(status.get("podIP")) if trainer_state.state == "running" else "",
        trainer=trainer_state,
        deadline_set=(raw.get("spec") or {}).get("activeDeadlineSeconds") == END_NOW_SECONDS,
        sidecars_run=_sidecars_run(raw),
    )


@_total
def service(raw: Raw) -> Service:
    """Return a raw Service as the plan sees it. Raise UnreadableError."""
    owner = controller(raw)
    return Service(
        name=_word(raw["metadata"], "name"),
        uid=_word(raw["metadata"], "uid"),
        owner_uid=text(owner.get("uid")),
        owner_job=text(owner.get("name")) if owner.get("kind") == api.KIND else "",
    )


def group(adapter: Adapter) -> Callable[[Raw], ObservedGroup]:
    """Return a reader of an adapter's objects, which raises UnreadableError."""

    @_total
    def group(raw: Raw) -> ObservedGroup:
        labels = raw["metadata"].get("labels") or {}
        return ObservedGroup(
            adapter=adapter.name,
            name=_word(raw["metadata"], "name"),
            uid=_word(raw["metadata"], "uid"),
            owner_uid=text(controller(raw).get("uid")),
            attempt=max(0, bounds.number(labels.get(naming.LABEL_ATTEMPT, "0"), bounds.TURNS_MAX)),
            admission=adapter.read(raw),
            deletion_requested="deletionTimestamp" in raw["metadata"],
            **(kueue.observed(raw) if adapter.admits_first else {}),
        )

    return group


@_total
def is_ready(node: Raw) -> bool:
    """True if the condition Ready is true, or missing because the node has just joined. Raise UnreadableError."""
    return bool(condition(node, "Ready").get("status", "True") == "True")


def conflicts(kind: str, raw: Raw, job: api.Metadata) -> ConflictingObject:
    """Return the description of an object whose name the job needs."""
    owner = controller(raw)
    namesake = owner.get("kind") == api.KIND and owner.get("name") == job.name and owner.get("uid") != job.uid
    return ConflictingObject(kind, raw["metadata"]["name"], of_deleted_job=namesake)


def controller(raw: Raw) -> Raw:
    """Return the controlling ownerReference, or {}."""
    references = raw["metadata"].get("ownerReferences") or ()
    return next((r for r in references if r.get("controller")), {})


def job_name(raw: Raw) -> str:
    """Return the job in an object's label, or ""."""
    return text((raw["metadata"].get("labels") or {}).get(naming.LABEL_JOB))


def deletion_requested_at(metadata: Raw) -> dt.datetime | None:
    """Return deletionTimestamp minus the grace period."""
    end = time(metadata.get("deletionTimestamp"))
    return None if end is None else end - dt.timedelta(seconds=seconds(metadata.get("deletionGracePeriodSeconds")))


def trainer(raw: Raw, phase: str) -> Container:
    """Return the state of the trainer, or of the init container that keeps it from starting."""
    status = raw.get("status") or {}
    name = _trainers_name(raw)
    found = [s for s in status.get("containerStatuses") or () if s.get("name") == name]
    seen = _container(found[0]) if found else Container("waiting")
    if seen.state == "ended":
        return seen
    if phase == "Failed":
        return _never_ran(raw, seen)
    if phase == "Succeeded" and seen.state == "waiting":
        return Container("ended", "Completed", exit_code=0)
    if seen.state == "waiting" and seen.reason in _IN_TURN:
        # Return an init container that cannot start, because the trainer's own status only shows PodInitializing.
        for init_name, init in _init_containers(status):
            if init.state == "waiting" and init.reason not in _IN_TURN:
                return Container("waiting", init.reason, f"init container {init_name}: {init.message}")
    return seen


def _trainers_name(raw: Raw) -> object:
    """Name of the trainer in the job's template. A webhook may have put its own container first."""
    container = trainer_container({"spec": raw.get("spec") or {}}) or {}
    return (raw["metadata"].get("labels") or {}).get(naming.LABEL_TRAINER) or container.get("name")


def _sidecars_run(raw: Raw) -> bool:
    name = _trainers_name(raw)
    others = [s for s in (raw.get("status") or {}).get("containerStatuses") or () if s.get("name") != name]
    return any("terminated" not in (s.get("state") or {}) for s in others)


def _container(status: Raw) -> Container:
    state = status.get("state") or {}
    if ended := state.get("terminated"):
        made = ended.get("startedAt") or ended.get("containerID") or status.get("containerID")
        return Container(
            "ended",
            text(ended.get("reason")),
            text(ended.get("message")),
            exit_code=bounds.integer(ended.get("exitCode"), -(2**31), 2**31 - 1),
            started_at=time(ended.get("startedAt")),
            ended_at=time(ended.get("finishedAt")),
            ran=bool(made) or ended.get("reason") not in rules.LOST_CONTAINER,
        )
    if "running" in state:
        return Container("running", ready=bool(status.get("ready")))
    waiting = state.get("waiting") or {}
    return Container("waiting", text(waiting.get("reason")), text(waiting.get("message")))


def _never_ran(raw: Raw, seen: Container) -> Container:
    """Return the end of a trainer that has no status: its pod was evicted or lost, or an init container failed."""
    status = raw.get("status") or {}
    listed = (raw.get("spec") or {}).get("initContainers") or ()
    # A failed sidecar never fails its pod, because the kubelet ends it together with the pod.
    sidecars = {c.get("name") for c in listed if c.get("restartPolicy") == "Always"}
    failed = [(n, c) for n, c in _init_containers(status) if c.state == "ended" and c.exit_code and n not in sidecars]
    if failed and not status.get("reason"):
        name, ended = failed[0]
        return replace(ended, init=name)
    message = text(status.get("message")) or seen.message
    return Container("ended", text(status.get("reason")) or seen.reason, message)


def _init_containers(status: Raw) -> Iterator[tuple[str, Container]]:
    for one in status.get("initContainerStatuses") or ():
        yield text(one.get("name")), _container(one)


def condition(raw: Raw, kind: str, holds: str | None = None) -> Raw:
    """Return a condition of a pod or node if its status is `holds`, else {}."""
    listed = (raw.get("status") or {}).get("conditions") or ()
    return next((c for c in listed if c.get("type") == kind and holds in (None, c.get("status"))), {})


def _silent_since(raw: Raw, trainer_state: Container) -> dt.datetime | None:
    """Return the time since which the pod's node has been silent; None if the node is not silent.

    The node controller marks the pods of a silent node not ready without a reason, and leaves the rest of their status
    (pkg/controller/nodelifecycle). A kubelet gives a reason, or marks the containers not ready too.
    """
    unready = condition(raw, "Ready", "False")
    if trainer_state.state == "running" and not unready.get("reason") and condition(raw, "ContainersReady", "True"):
        return time(unready.get("lastTransitionTime"))
    return None


def _word(metadata: Raw, name: str) -> str:
    """Return a text that the metadata of every object contains. Raise ValueError or LookupError without it."""
    if not isinstance(metadata[name], str) or not metadata[name]:
        raise ValueError(f"metadata.{name} is not a text")
    return str(metadata[name])
