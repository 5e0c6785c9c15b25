"""What an adapter is: a table that says how one scheduler or queue takes all pods of a job, or none. Pure.

The rules in plan/gang.py drive every adapter alike; the shell makes, watches and deletes what the table names. How to
write another one: docs/dev/gang-adapters.md.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddpjob_operator.job import api
from ddpjob_operator.observed.groups import Admission, ObservedGroup, Placement, Tell

Raw = Mapping[str, Any]
Body = dict[str, Any]


@dataclass(frozen=True)
class Places:
    """An API of its own by which a queue tells the places of those that wait."""

    group: str
    versions: tuple[str, ...]
    """The first that is served is taken."""
    path: Callable[[str, str, str], str]
    """What is read, by apiVersion, namespace and the queue's name."""
    read: Callable[[Raw], dict[str, int]]
    """The places, from 1, by the names of the objects that wait."""


@dataclass(frozen=True)
class Queue:
    """What is needed where pods are made only once the group is admitted, and the group is told how the job is."""

    reads_for_group: Callable[[api.DDPJob, str], tuple[str, ...]]
    """The paths of what the group's body is completed with, by job and apiVersion."""
    complete: Callable[[Body, Sequence[Raw]], None]
    """Puts into the group's body what was read."""
    placement: Callable[[Raw], Placement]
    """What the admitted object says of the pods."""
    nodes: Callable[[Raw], int | None]
    """For how many pods the object asks."""
    name: Callable[[Raw], str]
    """In which queue the object is."""
    asks: Callable[[api.DDPJob], tuple[str, ...]]
    """What of the object follows what may change of a job that waits: its queue, its priority, its topology."""
    asked: Callable[[Raw], tuple[str, ...]]
    """The same, as the object has it."""
    told: Callable[[Raw], tuple[bool, bool]]
    """Whether it was told that all pods run, and that the job is over."""
    reads_for_pods: Callable[[Placement, str], tuple[str, ...]]
    """The paths of what the pods are completed with, by apiVersion."""
    place: Callable[[Body, ObservedGroup, Sequence[Raw]], None]
    """Puts into a pod what the queue has decided, with what was read."""
    tell: Callable[[Raw, Tell, str, dt.datetime], Body | None]
    """The object's new status, by the object as it is now, a sentence and the time; None: nothing is to be told."""
    places: Places | None = None
    """None: it tells nobody's place."""


UID_DIGITS = 5


@dataclass(frozen=True)
class Adapter:
    """One for each value of spec.gang but auto and none."""

    name: str
    """As in spec.gang, in the chart's values, and in DDPJOB_GANGS."""
    group: str
    """The API group, such as scheduling.k8s.io."""
    versions: tuple[str, ...]
    """Of the API group, the first that is served is taken."""
    plural: str
    kind: str
    per_attempt: bool
    """Whether each attempt has a group of its own, which goes with it; else one group is for the life of the job."""
    body: Callable[[api.DDPJob, int, str], Body]
    """The object to create, by job, attempt and apiVersion."""
    pod: Callable[[Body, api.DDPJob, int], None]
    """Puts a pod of an attempt into its group: labels, annotations, fields."""
    read: Callable[[Raw], Admission]
    """What the object says."""
    queue: Queue | None = None
    """None: the scheduler sees the pods, and binds all or none."""

    @property
    def admits_first(self) -> bool:
        """Whether no pod is made before the group is admitted."""
        return self.queue is not None

    @property
    def resource(self) -> str:
        """As kubectl names the kind: PodGroup.scheduling.k8s.io; others have PodGroups as well."""
        return f"{self.kind}.{self.group}"

    def group_name(self, job: api.DDPJob, attempt: int) -> str:
        """The object's name: where each attempt has its own, used once, so that no pod of an old attempt counts for a
        new one, nor a pod of a deleted job for the one that was applied after it (the last five digits of the uid)."""
        name = job.metadata.name
        return f"{name}-{attempt}-{job.metadata.uid[-UID_DIGITS:]}" if self.per_attempt else name

    def attempt_of(self, attempt: int) -> int:
        """The attempt that a group is for; 0: all."""
        return attempt if self.per_attempt else 0
