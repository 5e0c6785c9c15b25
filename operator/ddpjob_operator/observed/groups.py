"""What a gang scheduler or a queue has of a job, as plan() reads it: is it admitted, and if not, why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Tell = Literal["ready", "unready", "quota returned", "succeeded", "failed"]
"""What a queue is told of the job: all its nodes run, or do not any more; its pods have ended after an eviction, so
that others may have the quota; it is over."""


@dataclass(frozen=True)
class Admission:
    """What a group's owner is told. The rules know no more of any scheduler or queue."""

    state: Literal["admitted", "waiting", "evicted"]
    why: str = ""
    """waiting, evicted: the sentence of the scheduler or the queue."""
    place: int | None = None
    """waiting: how many are before it in the queue, and itself; None where the queue does not tell it."""
    holds_quota: bool = False
    """evicted: whether the queue waits until the pods have ended and the quota is given back."""
    stopped: bool = False
    """waiting: whether somebody has stopped it in the queue, and only they let it go on."""


@dataclass(frozen=True)
class Placement:
    """What a queue has decided about the pods that it admits."""

    count: int | None = None
    """How many pods at most; None: as many as were asked for."""
    flavors: tuple[str, ...] = ()
    """Objects that say on which nodes the quota is, by name."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    by_topology: bool = False
    """True if the queue itself chooses the nodes of each pod."""
    names_nodes: bool = False
    """True if it has chosen one node for each, and not only a rack."""


@dataclass(frozen=True)
class ObservedGroup:
    """An object that stands for the pods of a job: a PodGroup of the scheduler, a Workload of a queue."""

    adapter: str
    """Whose it is, as in `gangs.ADAPTERS`."""
    name: str
    uid: str
    owner_uid: str
    """uid of the job that made it; empty: none did."""
    attempt: int
    """For whose pods it is; 0: for those of all attempts."""
    admission: Admission = Admission("waiting")
    deletion_requested: bool = False
    placement: Placement = Placement()
    """admitted: how."""
    nodes: int | None = None
    """For how many pods it asks; None: that of a group which is never admitted in parts."""
    queue: str = ""
    """In which queue it is."""
    asked: tuple[str, ...] = ()
    """For which queue, priority and topology it asks, as its adapter writes them; empty: it is in no queue."""
    is_ready: bool = False
    """True if the queue was told that all pods run."""
    is_over: bool = False
    """True if the queue was told that the job is over."""


@dataclass(frozen=True)
class GangApi:
    """An API for groups that this operator has switched on."""

    api_version: str = ""
    """scheduling.k8s.io/v1alpha2; empty: the API server does not serve it, or does not let us use it."""
    why_not: str = ""
    """Why it is empty."""
