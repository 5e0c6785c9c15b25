"""The observations that plan() reads. The operator gets them from the API server, the local run from processes."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import msgspec

from ddpjob_core import rules
from ddpjob_operator.observed import hidden_failure
from ddpjob_operator.observed.groups import GangApi, ObservedGroup
from ddpjob_operator.observed.reports import AgentReport, Report

if TYPE_CHECKING:  # stall.py imports reports.py: avoid a cycle
    from ddpjob_operator.observed.stall import StepTracker


class Container(msgspec.Struct, frozen=True):
    """The trainer container of a pod. A msgspec.Struct, as Pod, because each event of a pod creates one, and a
    dataclass takes ten times as long.
    """

    state: Literal["waiting", "running", "ended"]
    reason: str = ""
    """waiting, ended: the kubelet's reason, such as ImagePullBackOff or OOMKilled."""
    message: str = ""
    """waiting: the kubelet's sentence. ended: the termination message, which is the end of the log."""
    ready: bool = False
    exit_code: int | None = None
    """128 + n if signal n ended the process, as everywhere in Kubernetes."""
    ended_at: dt.datetime | None = None
    ran: bool = True
    """ended: False if nothing shows that the container ever ran. The kubelet reports 137 even then."""
    init: str = ""
    """ended: the init container that ended; the trainer itself never ran."""
    started_at: dt.datetime | None = None
    """ended: start of the container."""

    @property
    def hides_a_failure(self) -> bool:
        """True if the container ended with 0 although its termination message proves that the training failed."""
        is_zero = self.state == "ended" and self.exit_code == 0
        return is_zero and bool(self.message) and hidden_failure.is_recorded(self.message)

    @property
    def is_lost(self) -> bool:
        """True if the kubelet reports only that it cannot find the container."""
        return self.reason in rules.LOST_CONTAINER


THIS_MACHINE = "this machine"
"""Node of a local run's pods; not a valid name of a node in a cluster."""


class Pod(msgspec.Struct, frozen=True):
    """The parts of a pod that decisions read."""

    name: str
    uid: str
    owner_uid: str
    """uid of the pod's controller; "" if none."""
    attempt: int
    place: int
    """Number of the pod in the job, as in its name; `Spec.members` maps it to ranks."""
    replacement: int = 0
    """Number of the pod at this place in this attempt; the first is 0, and each single replacement adds one."""
    job: str = ""
    """Name of the job in its label."""
    node: str = ""
    address: str = ""
    """The pod's IP address, once its trainer is running."""
    phase: str = "Pending"
    reason: str = ""
    """The pod's own reason, such as Evicted or NodeLost."""
    message: str = ""
    """The sentence of the pod's reason."""
    disruption: str = ""
    """Reason of the pod's condition DisruptionTarget, such as PreemptionByScheduler or EvictionByEvictionAPI."""
    scheduled_at: dt.datetime | None = None
    """When the pod was bound to its node, by the cluster's clock: comparable with that of other pods."""
    bound_since: dt.datetime | None = None
    """When the pod was bound, if that is ahead of our clock: when we first saw it bound. Read `bound_at`."""
    accepted_at: dt.datetime | None = None
    """When the kubelet accepted the pod (status.startTime), by the node's clock, as are the trainer's times."""
    silent_since: dt.datetime | None = None
    """When the node controller marked the pod not ready because the kubelet does not report."""
    was_silent: bool = False
    """True if the pod was ever seen silent, even if its node works again."""
    unschedulable: str = ""
    """The scheduler's sentence while no node is found for the pod."""
    unschedulable_since: dt.datetime | None = None
    """None while scheduling gates hold the pod."""
    deletion_requested_at: dt.datetime | None = None
    """When the pod's deletion was requested (deletionTimestamp minus the grace period)."""
    deletion_deadline: dt.datetime | None = None
    """When the pod's grace ends (deletionTimestamp)."""
    trainer: Container = Container("waiting")
    deadline_set: bool = False
    """True if activeDeadlineSeconds was set to end the pod: the kubelet stops it, and the object stays."""
    sidecars_run: bool = False
    """True if a container other than the trainer has not ended."""
    done_since: dt.datetime | None = None
    """When the trainer was seen ended with 0 while a sidecar was running, by the caller's clock."""
    outlived: bool = False
    """True if a sidecar has outlived the trainer for longer than an eviction or deletion would have allowed."""
    overcome: bool = False
    """True if a later launcher in the container may have succeeded after the failure in the termination message."""
    completed: bool = False
    """True if the pod was ever seen completed; later observations do not change that."""
    ended_first: bool = False
    """True if the trainer was seen ended before the deletion was requested."""
    first_seen: int = 0
    """Number of the observation (facts.py) in which the pod was first seen."""
    ended_seen: int = 0
    """The observation in which the pod's end was first seen; 0: the first one."""
    deletion_seen: int = 0
    """The observation in which the pod's deletion was first seen requested; 0: the first one."""

    @property
    def bound_at(self) -> dt.datetime | None:
        """When the pod was bound, comparable with now: not later than when we first saw it bound."""
        return self.bound_since or self.scheduled_at

    @property
    def ended(self) -> bool:
        """True if the pod's trainer has ended; sidecars do not count."""
        return self.trainer.state == "ended" or self.phase in ("Succeeded", "Failed")

    @property
    def deleted_first(self) -> bool:
        """True if the pod ended (or will end) after its deletion was requested, or if end and request were observed
        together. A missed success only costs a restart, but a false success would be a wrong result."""
        return self.deletion_requested_at is not None and not self.ended_first

    @property
    def has_completed(self) -> bool:
        """True if the pod ended with 0 by itself, and no message proves a failure.

        Exit 0 after a SIGTERM is not a success: a deletion, an eviction, a node's shutdown or a deadline sent it.
        """
        if self.completed:
            return True
        ended_from_outside = self.deleted_first or self.reason or self.disruption or self._is_undecided
        done = self.trainer.state == "ended" and self.trainer.exit_code == 0
        return done and not ended_from_outside and (self.overcome or not self.trainer.hides_a_failure)

    @property
    def has_failed(self) -> bool:
        """True if the pod ended without completing, and its phase is known."""
        return self.ended and not self.has_completed and not self._is_undecided

    @property
    def _is_undecided(self) -> bool:
        """True if the pod seems to have ended with 0 by itself, but its phase is not known yet."""
        return self._awaits_its_phase and not self.deleted_first and not self.disruption

    @property
    def _awaits_its_phase(self) -> bool:
        """True if the trainer ended with 0 and the phase is still to come.

        The kubelet first reports the end of a container. If it ended the pod itself, it reports phase Failed, reason
        and DisruptionTarget only when all containers have ended (mergePodStatus). Do not wait for a sidecar that keeps
        running.
        """
        done = self.trainer.state == "ended" and self.trainer.exit_code == 0
        return done and self.phase not in ("Succeeded", "Failed") and not (self.sidecars_run and self.outlived)

    @property
    def _awaits_its_log(self) -> bool:
        """True if the pod was ended by the deadline that keeps its log, but the end of its container is not reported
        yet. A kubelet may report the new phase together with an older status of the containers.
        """
        return self.deadline_set and self.reason == "DeadlineExceeded" and self.trainer.exit_code is None

    @property
    def done_beside_sidecars(self) -> bool:
        """True if the pod's trainer has ended with 0 and another container is still running."""
        return self.trainer.state == "ended" and self.trainer.exit_code == 0 and self.sidecars_run

    @property
    def live(self) -> bool:
        """True if a process of the pod may still be running.

        The phase alone is not enough: the kubelet often reports the end of the only container while the phase is
        Running. Deleting a pod that ended by itself would lose its log.
        """
        if self.phase in ("Succeeded", "Failed"):
            return self._awaits_its_log
        return self.trainer.state != "ended" or self.sidecars_run or self._awaits_its_phase


@dataclass(frozen=True)
class Node:
    """A node of the cluster, if the operator may read nodes."""

    ready: bool
    since: dt.datetime | None = None
    """Since when the node has been ready, or not ready."""
    with_most: bool = False
    """Not ready: True if most nodes became not ready together. The control plane then probably misses heartbeats."""
    gone: bool = False
    """Not ready: True if the node's object was deleted, as clouds do when a machine is removed."""


@dataclass(frozen=True)
class ConflictingObject:
    """An object of somebody else that has a name the job needs."""

    kind: str
    name: str
    of_deleted_job: bool = False
    """True if a deleted job of the same name left the object, which will be removed."""


@dataclass(frozen=True)
class Refusal:
    """A create that the API server refused: quota, PodSecurity, admission, a typo in the template."""

    kind: str
    """Pod, Service, or an adapter's kind: Service and Workload both have the job's name."""
    name: str
    """The object to create."""
    message: str
    """The API server's own sentence."""
    retry_at: dt.datetime
    """When to retry; the caller doubles the wait with each refusal in a row."""


@dataclass(frozen=True)
class Observed:
    """Everything that plan() knows besides the job and the time."""

    service: bool = False
    """True if the job's own Service exists."""
    pods: tuple[Pod, ...] = ()
    """Pods with the job's label or with a name that the job needs, of any owner, in any order."""
    deleted_pods: tuple[Pod, ...] = ()
    """Deleted pods of the job as last seen; the caller may have kept none."""
    conflicts: tuple[ConflictingObject, ...] = ()
    """Other objects (a Service) with a name that the job needs."""
    refusals: tuple[Refusal, ...] = ()
    """Creates that were refused and not yet retried."""
    reports: dict[int, Report] = field(default_factory=dict)
    """Last report of each rank."""
    trackers: dict[int, StepTracker] = field(default_factory=dict)
    """Steps of each rank that reports in the current attempt."""
    undeletable: Set[str] = frozenset()
    """uids of pods that still exist some time after a deletion without grace."""
    listening_since: dt.datetime | None = None
    """When the caller began to receive reports; None if it always has."""
    agent: AgentReport | None = None
    """Last report of node 0's agent in the current attempt; None without ddprun."""
    agents_ask: bool = False
    """True if an agent of the job has asked who leads, so another one can be appointed."""
    group_size: int | None = None
    """WORLD_SIZE of the ranks, if the caller sees it and it is the same on all nodes."""
    nodes: dict[str, Node] | None = None
    """Nodes that are not ready or deleted, by name; None if nodes may not be read."""
    gang_apis: Mapping[str, GangApi] = field(default_factory=dict)
    """The enabled APIs of gang schedulers and queues, by adapter."""
    groups: tuple[ObservedGroup, ...] = ()
    """The job's groups in gang schedulers and queues, in any order."""
    no_room: str = ""
    """Why the operator has no memory for one more running job; "" if it has, or the job has begun."""
    neighbours: Mapping[str, int] = field(default_factory=dict)
    """Other jobs of the namespace whose pods have nodes, with their number; filled if this job's pods wait for nodes.
    """
    master_addr: str | None = None
    """host:port of the rendezvous if the caller does not use the cluster's DNS; "" while unknown."""
