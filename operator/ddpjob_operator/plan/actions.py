"""The parts of a plan: the status to write, the events to send, and the actions that the caller carries out."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ddpjob_operator.gangs import ADAPTERS
from ddpjob_operator.gangs.adapter import Adapter
from ddpjob_operator.job import api
from ddpjob_operator.observed.groups import Tell


@dataclass(frozen=True)
class CreateService:
    """Create the job's headless Service."""


@dataclass(frozen=True)
class CreatePod:
    """Create the pod of a place (the number in its name). Its body follows from the job and these fields."""

    attempt: int
    place: int
    avoid: tuple[str, ...] = ()
    replacement: int = 0
    """How many earlier pods of this place were replaced within this attempt."""


@dataclass(frozen=True)
class CreateGroup:
    """Create the object that represents an attempt's pods at a gang scheduler or a queue."""

    adapter: str
    attempt: int
    number: int = 1
    nodes: int = 0
    """Of a further group in a queue (number 2 and more): how many nodes it is for."""


@dataclass(frozen=True)
class DeleteGroup:
    """Delete the group object with this name."""

    adapter: str
    name: str
    uid: str


@dataclass(frozen=True)
class TellGroup:
    """Report the state of the job to its queue, which can then give the quota to others."""

    adapter: str
    name: str
    uid: str
    what: Tell
    message: str
    pods: int = 0
    """smaller: the number of pods that still use the group's quota."""


@dataclass(frozen=True)
class DeletePod:
    """Stop and delete a pod. grace_seconds: None is the pod's own terminationGracePeriodSeconds; 0 does not wait."""

    name: str
    uid: str
    grace_seconds: int | None = None


@dataclass(frozen=True)
class EndPod:
    """Stop a pod with its own terminationGracePeriodSeconds, but keep its object, and with it the log."""

    name: str
    uid: str
    grace_seconds: int | None = None
    """Grace for a caller that keeps logs elsewhere. None: the pod's own."""


@dataclass(frozen=True)
class DeleteJob:
    uid: str


Action = CreateService | CreateGroup | CreatePod | DeletePod | EndPod | DeleteGroup | TellGroup | DeleteJob


@dataclass(frozen=True)
class Settings:
    """Settings of the caller (operator, local run or simulation). They are the same for all jobs."""

    progress_write_seconds: float = 10.0
    """Minimum seconds between writes of progress alone; more with many jobs (kube/work/reports.py)."""
    lost_node_seconds: float = 30.0
    """Seconds until a node that is not ready counts as lost. The cluster takes another 10 to 50 s to mark it."""
    config_error_seconds: float = 600.0
    """Seconds until a container whose ConfigMap or Secret is missing counts as failed."""
    avoid_node_seconds: float = 3600.0
    """Seconds for which a node with two failures of this job is avoided, and within which its failures are counted."""
    avoid_unless_unschedulable_seconds: float = 60.0
    """Seconds after which unschedulable pods may use an avoided node."""
    resume_hint: str = "set spec.suspend to false to go on"
    limit_name: str = "backoffLimit:"
    """Name of the limit of restarts, in the user's words."""
    keeps_files: bool = False
    """True if files that a pod writes outside its volumes outlive it. In a local run a pod is a process."""
    failed_before: api.JobFailure | None = None
    """The previous failure, if its repetition ends the job. Only set in a local run, where the author is watching."""
    command: Sequence[str] = ()
    """The trainer's command with the text of its script file; empty if only the cluster has the file."""
    keep_log_tail: bool = True
    answers_agents: bool = True
    """True if agents can ask the caller which of them leads."""
    adapters: Mapping[str, Adapter] = field(default_factory=lambda: ADAPTERS)


@dataclass(frozen=True)
class Decision:
    """The result of one rule: the status that is true now, and what follows from it."""

    status: api.Status
    actions: tuple[Action, ...] = ()
    requeue_at: dt.datetime | None = None
    goes_on: bool = False
    """True if later rules continue with this status, so that the pods are created in the same reconcile."""


@dataclass(frozen=True)
class Event:
    """One Event, as `kubectl describe` shows it."""

    type: str
    reason: str
    message: str
    is_routine: bool = False
    """True if the Event only repeats the conditions of a job that went smoothly."""


@dataclass(frozen=True)
class Plan:
    """The result of plan(). status: None if nothing is to be written. requeue_at: when to plan again at the latest."""

    actions: tuple[Action, ...] = ()
    status: api.Status | None = None
    events: tuple[Event, ...] = ()
    requeue_at: dt.datetime | None = None
