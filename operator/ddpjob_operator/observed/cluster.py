"""What is observed now, as plan() reads it. Each shell fills these: from the API server, or from processes."""

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

if TYPE_CHECKING:  # it is made from reports
    from ddpjob_operator.observed.stall import StepTracker


class Container(msgspec.Struct, frozen=True):
    """The trainer container of a pod. This and Pod are msgspec's, because each event of a pod makes some of them: made
    and changed in a tenth of the time that a dataclass takes."""

    state: Literal["waiting", "running", "ended"]
    reason: str = ""
    """waiting and ended: the kubelet's reason, ImagePullBackOff or OOMKilled."""
    message: str = ""
    """waiting: the kubelet's sentence. ended: the termination message, which is the end of the log."""
    ready: bool = False
    exit_code: int | None = None
    """128 + n where signal n ended it, as everywhere in Kubernetes."""
    ended_at: dt.datetime | None = None
    ran: bool = True
    """ended: whether anything shows that it ever ran; of one that was never made the kubelet writes 137, too."""
    init: str = ""
    """ended: the init container whose end this is; the trainer itself never ran."""
    started_at: dt.datetime | None = None
    """ended: when it had started."""

    @property
    def hides_a_failure(self) -> bool:
        """True if it ended with 0 although its termination message proves that the training failed."""
        is_zero = self.state == "ended" and self.exit_code == 0
        return is_zero and bool(self.message) and hidden_failure.is_recorded(self.message)

    @property
    def is_lost(self) -> bool:
        """True if the kubelet reports no more of its end than that it cannot find it."""
        return self.reason in rules.LOST_CONTAINER


THIS_MACHINE = "this machine"
"""The node of a local run's pods. It is no valid name of a node in a cluster."""


class Pod(msgspec.Struct, frozen=True):
    """A pod, cut to what decisions read."""

    name: str
    uid: str
    owner_uid: str
    """uid of the controller that made it; empty: there is none."""
    attempt: int
    place: int
    """Its number in the job, as in its name. Which ranks it has `topology.members` says."""
    replacement: int = 0
    """Which pod of its place in its attempt it is: one that is replaced alone gets a new pod, the first is 0."""
    job: str = ""
    """The name of the job in its label."""
    node: str = ""
    phase: str = "Pending"
    reason: str = ""
    """The pod's own reason: Evicted, NodeLost."""
    message: str = ""
    """The pod's own sentence, with its reason."""
    disruption: str = ""
    """Why Kubernetes ends it (its condition DisruptionTarget): PreemptionByScheduler, EvictionByEvictionAPI."""
    scheduled_at: dt.datetime | None = None
    """When it got its node, by the cluster's clock: comparable with the same time of other pods."""
    bound_since: dt.datetime | None = None
    """When it got its node, by our clock: comparable with now. Not later than when we first saw that it has one."""
    accepted_at: dt.datetime | None = None
    """When its kubelet accepted it (status.startTime), by the clock of its node, as the times of its trainer."""
    silent_since: dt.datetime | None = None
    """Since when the node controller calls it not ready although its trainer was: the kubelet no longer reports."""
    was_silent: bool = False
    """True if that was ever seen: the network of its node failed, or its machine, also where both work again."""
    unschedulable: str = ""
    """The scheduler's sentence while it finds no node."""
    unschedulable_since: dt.datetime | None = None
    """Since when it says so; None while the pod is kept from the scheduler."""
    deletion_requested_at: dt.datetime | None = None
    """When its deletion was requested (deletionTimestamp less the grace period)."""
    deletion_deadline: dt.datetime | None = None
    """When its grace ends (deletionTimestamp)."""
    trainer: Container = Container("waiting")
    deadline_set: bool = False
    """True if its activeDeadlineSeconds were set to end it: its kubelet stops it, and the object stays."""
    sidecars_run: bool = False
    """True if a container beside the trainer has not ended."""
    done_since: dt.datetime | None = None
    """Since when its trainer is known to have ended with 0 while a sidecar runs, by the clock of the shell."""
    outlived: bool = False
    """True if a sidecar has outlived the trainer for longer than anybody who ends the pod would have let it."""
    overcome: bool = False
    """True if a failure that its termination message records may have been overcome by another launcher since."""
    completed: bool = False
    """True if it was ever seen to have completed; what ends the pod after that changes nothing."""
    ended_first: bool = False
    """True if its trainer was seen to have ended before its deletion was seen to be requested."""
    first_seen: int = 0
    """In which observation (facts.py counts them) the pod itself was first seen."""
    ended_seen: int = 0
    """In which one its end was first seen; 0: when the pod was."""
    deletion_seen: int = 0
    """In which one it was first seen that its deletion was requested; 0: when the pod was."""

    @property
    def ended(self) -> bool:
        """True if its trainer has ended; a sidecar that still runs does not count."""
        return self.trainer.state == "ended" or self.phase in ("Succeeded", "Failed")

    @property
    def deleted_first(self) -> bool:
        """True if it ended (or will) after its deletion was requested. Where both were first seen at once it counts as
        after: a success too few costs a restart, one too many costs a wrong result."""
        return self.deletion_requested_at is not None and not self.ended_first

    @property
    def has_completed(self) -> bool:
        """Ended with 0 by itself, and no message proves a failure. Exit 0 after a SIGTERM is no success, whether a
        delete sent it or the kubelet, which evicts, shuts down its node, or enforces the pod's own
        activeDeadlineSeconds."""
        if self.completed:
            return True
        ended_from_outside = self.deleted_first or self.reason or self.disruption or self._is_undecided
        done = self.trainer.state == "ended" and self.trainer.exit_code == 0
        return done and not ended_from_outside and (self.overcome or not self.trainer.hides_a_failure)

    @property
    def has_failed(self) -> bool:
        """Ended in any other way."""
        return self.ended and not self.has_completed and not self._is_undecided

    @property
    def _is_undecided(self) -> bool:
        """Exit 0 of its own accord, as it seems, and the pod's phase is still to come."""
        return self._awaits_its_phase and not self.deleted_first and not self.disruption

    @property
    def _awaits_its_phase(self) -> bool:
        """Exit 0: the kubelet reports the end of a container before it reports (by phase Failed, a reason and
        DisruptionTarget at once) that it ended the pod itself (mergePodStatus), which it does when all containers have
        ended. A sidecar that goes on after that has no phase to wait for."""
        done = self.trainer.state == "ended" and self.trainer.exit_code == 0
        return done and self.phase not in ("Succeeded", "Failed") and not (self.sidecars_run and self.outlived)

    @property
    def done_beside_sidecars(self) -> bool:
        """True if its trainer has ended with 0 and another container has not ended at all."""
        return self.trainer.state == "ended" and self.trainer.exit_code == 0 and self.sidecars_run

    @property
    def live(self) -> bool:
        """True if something of it may still run.

        Not by the phase alone: the kubelet often reports that the only container has ended while the phase is still
        Running, and a pod that ended by itself must not be deleted with its log.
        """
        if self.phase in ("Succeeded", "Failed"):
            return False
        return self.trainer.state != "ended" or self.sidecars_run or self._awaits_its_phase


@dataclass(frozen=True)
class Node:
    """A node of the cluster, where the operator may read nodes."""

    ready: bool
    since: dt.datetime | None = None
    """Since when."""
    with_most: bool = False
    """Not ready: whether most nodes became so together. Then the control plane does not get their heartbeats."""
    gone: bool = False
    """Not ready: whether its object was deleted, as a cloud does it with that of a machine that is no more."""


@dataclass(frozen=True)
class ConflictingObject:
    """An object that carries a name the job needs, and is not the job's."""

    kind: str
    name: str
    of_deleted_job: bool = False
    """True if a deleted job of the same name left it: it goes away by itself."""


@dataclass(frozen=True)
class Refusal:
    """A create that the API server refused: quota, PodSecurity, admission, a typo in the template."""

    kind: str
    """Pod, Service, or as an adapter names its own: the Service and the Workload have the job's name."""
    name: str
    """The object that was to be created."""
    message: str
    """The API server's own sentence."""
    retry_at: dt.datetime
    """When it is worth another try; each refusal in a row doubles the wait (the shell keeps count)."""


@dataclass(frozen=True)
class Observed:
    """All that plan() may know besides the job itself and the time."""

    service: bool = False
    """True if the job's own Service is there."""
    pods: tuple[Pod, ...] = ()
    """Pods with the job's label or with a name that the job needs, of whatever owner, in any order."""
    deleted_pods: tuple[Pod, ...] = ()
    """Pods of the job that are gone, as they were last seen: what the shell has kept, perhaps nothing."""
    conflicts: tuple[ConflictingObject, ...] = ()
    """Other objects (a Service) that carry a name the job needs."""
    refusals: tuple[Refusal, ...] = ()
    """Creates that were refused and not tried again since."""
    reports: dict[int, Report] = field(default_factory=dict)
    """The newest report of each rank that reports."""
    trackers: dict[int, StepTracker] = field(default_factory=dict)
    """The steps of each rank that reports in the present attempt."""
    undeletable: Set[str] = frozenset()
    """uids of pods that are still there a moment after they were deleted without grace: that was refused, or somebody's
    finalizer holds them."""
    listening_since: dt.datetime | None = None
    """Since when the shell receives reports, where it has not received them all the time."""
    agent: AgentReport | None = None
    """The last report of the agent of node 0 in the present attempt, where ddprun runs there."""
    nodes: dict[str, Node] | None = None
    """The cluster's nodes that are not ready or gone, by name; None where nodes may not be read."""
    gang_apis: Mapping[str, GangApi] = field(default_factory=dict)
    """The APIs of gang schedulers and queues that are switched on, by adapter."""
    groups: tuple[ObservedGroup, ...] = ()
    """What gang schedulers and queues have of the job, in any order."""
    no_room: str = ""
    """Why the shell has no room for one more job that has begun; empty: it has, or the job has begun."""
    neighbours: Mapping[str, int] = field(default_factory=dict)
    """Other jobs of the namespace whose pods have nodes, with how many; where the job's own wait for nodes."""
    master_addr: str | None = None
    """host:port of the rendezvous, where the shell knows better than the cluster's DNS; "" while not known."""
