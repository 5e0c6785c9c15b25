"""Adapters: tables that describe how a scheduler or queue admits all pods of a job, or none. Pure. The rules in
plan/gang.py treat all adapters alike; kube/ creates, watches and deletes the objects. How to write an adapter:
docs/dev/gang-adapters.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ddpjob_operator.job import api
from ddpjob_operator.observed.groups import Admission

Raw = Mapping[str, Any]
Body = dict[str, Any]
UID_DIGITS = 5


@dataclass(frozen=True)
class Adapter:
    """Describes the scheduler or queue for one value of spec.gang (not auto or none)."""

    name: str
    """The name in spec.gang, in the chart's values, and in DDPJOB_GANGS."""
    group: str
    """The API group, such as scheduling.k8s.io."""
    versions: tuple[str, ...]
    """Versions of the API group, best first; the first one that is served is used."""
    plural: str
    kind: str
    per_attempt: bool
    """True: one group per attempt. False: one group for all attempts of the job."""
    body: Callable[[api.DDPJob, int, str], Body]
    """Returns the object to create, for a job, attempt and apiVersion."""
    pod: Callable[[Body, api.DDPJob, int], None]
    """Puts a pod into the group of its attempt: labels, annotations, fields."""
    read: Callable[[Raw], Admission]
    """Reads the admission from the object."""
    admits_first: bool = False
    """True for a queue (kueue.py): pods are created after the admission, and the queue gets the state of the job.
    False: the scheduler sees the pods, and binds all or none.
    """

    @property
    def resource(self) -> str:
        """The kind with its API group, as kubectl names it, because other API groups have PodGroups, too."""
        return f"{self.kind}.{self.group}"

    def group_name(self, job: api.DDPJob, attempt: int, number: int = 1) -> str:
        """Return the object's name. If each attempt has a group, the name has the attempt and the last five digits of
        the uid. So pods of an old attempt, or of a deleted job of the same name, do not count for the new group. A
        further group has its number after a dot, which no name of a job contains.
        """
        name = job.metadata.name if number == 1 else f"{job.metadata.name}.{number}"
        return f"{name}-{attempt}-{job.metadata.uid[-UID_DIGITS:]}" if self.per_attempt else name

    def job_name(self, group_name: str) -> str:
        """Return the name of the job of a group that belongs to all attempts."""
        return group_name.partition(".")[0]

    def attempt_of(self, attempt: int) -> int:
        """Return the attempt that a group belongs to; 0 if it belongs to all attempts."""
        return attempt if self.per_attempt else 0
