"""What a plan consists of: the status to write, the events to send, and the actions that a shell does for it."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass, field

from ddpjob_operator.gangs import ADAPTERS
from ddpjob_operator.gangs.adapter import Adapter
from ddpjob_operator.job import api, podspec
from ddpjob_operator.observed.groups import Tell


@dataclass(frozen=True)
class CreateService:
    """Create the job's headless Service."""


@dataclass(frozen=True)
class CreatePod:
    """Create the pod of a place. Its body follows from the job alone: pods are known by identity, never by content."""

    attempt: int
    place: int
    avoid: tuple[str, ...] = ()
    """Cluster nodes that it must not run on."""
    replacement: int = 0
    """Which pod of this place in this attempt it is."""


@dataclass(frozen=True)
class CreateGroup:
    """Create what stands for the pods of an attempt at a gang scheduler or a queue."""

    adapter: str
    attempt: int


@dataclass(frozen=True)
class DeleteGroup:
    """Delete it; the name is that of the object."""

    adapter: str
    name: str
    uid: str


@dataclass(frozen=True)
class TellGroup:
    """Tell a queue how the job is: its quota is for others when that is told."""

    adapter: str
    name: str
    uid: str
    what: Tell
    message: str


@dataclass(frozen=True)
class DeletePod:
    """Stop and delete a pod. grace_seconds: None is the pod's own terminationGracePeriodSeconds; 0 does not wait."""

    name: str
    uid: str
    grace_seconds: int | None = None


@dataclass(frozen=True)
class EndPod:
    """Stop a pod with its own terminationGracePeriodSeconds, and keep its object, with its log."""

    name: str
    uid: str
    grace_seconds: int | None = None
    """What a shell gives it that keeps logs elsewhere. None: the pod's own."""


@dataclass(frozen=True)
class DeleteJob:
    """Delete the job itself, with all that it owns."""

    uid: str


Action = CreateService | CreateGroup | CreatePod | DeletePod | EndPod | DeleteGroup | TellGroup | DeleteJob


@dataclass(frozen=True)
class Settings:
    """What the shell, not the user, decides."""

    progress_write_seconds: float = 10.0
    """Progress alone writes the status at most this often; with more than a hundred jobs less often, for all of them
    together may write 10 times a second (kube/work/reports.py)."""
    lost_node_seconds: float = 30.0
    """A node that is not ready for so long is lost; the cluster itself takes 10 to 50 s to call it not ready."""
    config_error_seconds: float = 600.0
    """A container whose ConfigMap or Secret is missing for so long never starts."""
    avoid_node_seconds: float = 3600.0
    """How long a node that failed the job twice is avoided, and how far back failures count for it."""
    avoid_unless_unschedulable_seconds: float = 60.0
    """For how long pods may find no other node until they may go to one that is avoided."""
    resume_hint: str = "set spec.suspend to false to go on"
    """What a user does with a suspended job."""
    keeps_files: bool = False
    """Whether what a pod writes beside its volumes is there for the next one: a pod on this machine is a process."""
    failed_before: api.JobFailure | None = None
    """The failure of the attempt before, if the same exception at the same line is enough to end the job: on the
    machine of whoever writes the script. None in a cluster, where it takes the same mistake on all nodes."""
    keep_log_tail: bool = True
    """Whether the end of the log goes into the status."""
    adapters: Mapping[str, Adapter] = field(default_factory=lambda: ADAPTERS)
    """How each gang scheduler and queue is used, by its name."""


@dataclass(frozen=True)
class Decision:
    """What one rule decides: the status that is true now, and what follows from it."""

    status: api.Status
    actions: tuple[Action, ...] = ()
    requeue_at: dt.datetime | None = None
    goes_on: bool = False
    """Whether the rules after this one go on with this status, so that the pods are made in the same reconcile."""


@dataclass(frozen=True)
class Event:
    """What `kubectl describe` shows under Events."""

    type: str
    reason: str
    message: str
    is_routine: bool = False
    """Whether it only repeats what the conditions of a job say for which nothing else has happened."""


@dataclass(frozen=True)
class Plan:
    """status: None where nothing is to be written. requeue_at: when time alone may change the plan."""

    actions: tuple[Action, ...] = ()
    status: api.Status | None = None
    events: tuple[Event, ...] = ()
    requeue_at: dt.datetime | None = None


def restart_grace_seconds(spec: api.Spec) -> int:
    """After a failure the group is broken: nothing can be saved together, so the full grace would only cost time."""
    grace = podspec.grace_seconds(spec.template)
    return max(1, min(10, grace) if spec.restart_grace_seconds is None else spec.restart_grace_seconds)
