"""Groups at gang schedulers and queues, as plan() reads them: is the job admitted, and if not, why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Tell = Literal["ready", "unready", "smaller", "quota returned", "succeeded", "failed"]
"""States of the job that are reported to a queue. ready, unready: all nodes are running, or not any more. smaller: pods
of a smaller job have ended, so that others may have their quota. quota returned: all pods have ended after an eviction.
succeeded, failed: the job is over.
"""


@dataclass(frozen=True)
class Admission:
    """The admission state of a group: all that the rules know about a gang scheduler or queue."""

    state: Literal["admitted", "waiting", "evicted"]
    why: str = ""
    """waiting, evicted: the sentence of the scheduler or queue."""
    place: int | None = None
    """waiting: position in the queue, from 1; None if unknown."""
    holds_quota: bool = False
    """evicted: True if the queue waits until the pods have ended and the quota is returned."""
    stopped: bool = False
    """waiting: True if a user has stopped the job in the queue, and must let it continue."""


@dataclass(frozen=True)
class Placement:
    """A queue's decision: how many pods are admitted, and on which nodes."""

    count: int | None = None
    """Number of pods at most; None: as many as requested."""
    flavors: tuple[str, ...] = ()
    """Names of objects that describe the nodes of the quota."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    by_topology: bool = False
    """True if the queue chooses the nodes of each pod."""
    names_nodes: bool = False
    """True if the queue has chosen a node for each pod, and not only a rack."""


@dataclass(frozen=True)
class ObservedGroup:
    """An object that stands for the pods of a job: a scheduler's PodGroup, or a queue's Workload."""

    adapter: str
    """Adapter that the group belongs to, as in `gangs.ADAPTERS`."""
    name: str
    uid: str
    owner_uid: str
    """uid of the job that created it; "" if none."""
    attempt: int
    """Attempt of the group's pods; 0: all attempts."""
    number: int = 1
    """1: the group that admits the job. 2 and more: further groups in the queue, each for nodes that the job lacks."""
    admission: Admission = Admission("waiting")
    deletion_requested: bool = False
    placement: Placement = Placement()
    """admitted: number of pods, and their nodes."""
    nodes: int | None = None
    """Number of pods that the group requests; None if the group is never admitted in parts."""
    queue: str = ""
    """The queue that the group is in."""
    asked: tuple[str, ...] = ()
    """Requested queue, priority and topology, as the adapter writes them; empty without a queue."""
    is_ready: bool = False
    """True if the operator has reported to the queue that all pods are running."""
    is_over: bool = False
    """True if the operator has reported to the queue that the job is over."""


@dataclass(frozen=True)
class GangApi:
    """The API of an enabled gang scheduler or queue."""

    api_version: str = ""
    """For example scheduling.k8s.io/v1alpha2; "" if it is not served or not allowed."""
    why_not: str = ""
    """Reason if api_version is ""."""


def admitted(groups: Iterable[ObservedGroup]) -> list[ObservedGroup]:
    """Return a job's admitted groups by number, up to the first that is not admitted: its pods have the numbers after
    those of the earlier groups, so later groups are of no use without it."""
    found: list[ObservedGroup] = []
    for group in sorted(groups, key=lambda group: group.number):
        if group.number != len(found) + 1 or group.admission.state != "admitted" or group.deletion_requested:
            break
        found.append(group)
    return found


def of_place(groups: Iterable[ObservedGroup], place: int) -> ObservedGroup | None:
    """Return the group whose quota the pod at a place uses: of elastic jobs, the first one that reaches this far."""
    known = sorted(groups, key=lambda group: group.number)
    found = admitted(known)
    enough = (group for count, group in enumerate(found, 1) if size(found[:count]) > place)
    return next(enough, known[0] if known else None)


def size(groups: Iterable[ObservedGroup]) -> int:
    """Return the number of pods that these groups admit."""
    return sum(group.placement.count or 0 for group in groups)
