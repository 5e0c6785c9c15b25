"""What an adapter is: a table that says how one scheduler or queue takes all pods of a job, or none. Pure.

The rules in plan/gang.py drive every adapter alike; the shell makes, watches and deletes what the table names. How to
write another one: docs/dev/gang-adapters.md.
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
    """True if each attempt has a group of its own, which goes with it; else one group is for the life of the job."""
    body: Callable[[api.DDPJob, int, str], Body]
    """The object to create, by job, attempt and apiVersion."""
    pod: Callable[[Body, api.DDPJob, int], None]
    """Puts a pod of an attempt into its group: labels, annotations, fields."""
    read: Callable[[Raw], Admission]
    """What the object says."""
    admits_first: bool = False
    """True if it is a queue (kueue.py): no pod is made before the group is admitted, and the group is told how the job
    is. Else the scheduler sees the pods, and binds all or none."""

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
