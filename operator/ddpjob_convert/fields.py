"""Read a mapping field by field. `rest` then adds remarks on the fields that no converter has read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ddpjob_convert.result import Converted, Path
from ddpjob_operator.job.wording import say

SET_BY_THE_JOB = "not needed: the job sets the rendezvous of each node"
GANG = (
    "the gang of a DDPJob has all its nodes, or minNodes if it is elastic; set spec.gang: native if operator and API "
    "server have PodGroups, and startDeadlineSeconds to delete the pods if not all of them start"
)
SET_IT = "set it in metadata of the job, or of its template"
# Reasons why fields have no counterpart in a DDPJob. The keys are bare names: no two of these fields share a name.
_REASONS = {
    # metadata
    **dict.fromkeys(
        ("clusterName", "deletionGracePeriodSeconds", "deletionTimestamp", "finalizers", "ownerReferences"),
        "belongs to the object in the cluster; a new one gets its own; dropped",
    ),
    # PyTorchJob
    **dict.fromkeys(("rdzvBackend", "rdzvHost", "rdzvPort", "rdzvId", "rdzvConf", "standalone"), SET_BY_THE_JOB),
    "masterPort": SET_BY_THE_JOB,
    "minAvailable": GANG,
    "minResources": GANG,
    "queue": "a DDPJob has no queue; " + GANG,
    "backend": "not taken over: auto is nccl with GPUs and gloo without; set spec.backend for another",
    "pytorchImage": "set image in the template",
    "runtimeId": "belongs to the object in the cluster; dropped",
    "schedulerName": "set it in the template's spec",
    "terminationPolicy": "a DDPJob succeeds when the trainers of all its nodes have ended with 0",
    "metrics": "no HorizontalPodAutoscaler is created; your own may change spec.nodes of a running elastic job, with "
    "minReplicas of at least minNodes",
    # TrainJob
    "initializer": "no initializer Job is created: download in an init container, or mount a volume that has the data",
    "labels": "set them in metadata.labels of the template",
    "annotations": "set them in metadata.annotations of the template",
    "metadata": f"is not set on the pods of the source: {SET_IT}",
    # a TrainJob's runtime
    **dict.fromkeys(("parallelism", "completions", "replicas"), "the number of nodes is spec.nodes"),
    "backoffLimit": "restarts pods one by one; a DDPJob restarts all nodes: set spec.backoffLimit",
    "activeDeadlineSeconds": "limits one attempt in the source; spec.activeDeadlineSeconds limits all together",
    "podFailurePolicy": "write its rules for exit codes as spec.failurePolicy",
    "dependsOn": "a DDPJob waits for no other Job: an init container can wait, or do its work",
}


def walk(part: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield a part of a document, and all values below it, with their paths."""
    yield path, part
    for key, value in part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ():
        yield from walk(value, (*path, key))


class ConvertError(Exception):
    """Raised if a field cannot be converted. path: its path in the source; "runtime" begins paths in the runtime."""

    def __init__(self, path: Path, text: str, runtime: Mapping[str, Any] | None = None) -> None:
        super().__init__(text)
        self.path, self.runtime = path, runtime


class Fields:
    def __init__(self, value: Any, path: Path) -> None:
        if not isinstance(value, Mapping):
            raise ConvertError(path, f"must be a mapping, is {say(value)}")
        self.given, self.path = value, path
        self._taken: set[str] = set()

    def take(self, name: str) -> Any:
        self._taken.add(name)
        return self.given.get(name)

    def fields(self, name: str) -> Fields:
        value = self.take(name)
        return Fields({} if value is None else value, (*self.path, name))

    def number(self, name: str, least: int = 0) -> int | None:
        """Return a whole number of at least `least`; None if unset."""
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConvertError((*self.path, name), f"must be a whole number of at least {least}, is {say(value)}")
        return value

    def text(self, name: str) -> str:
        """Return a text; "" if unset."""
        value = self.take(name)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise ConvertError((*self.path, name), f"must be a text, is {say(value)}")
        return value

    def mappings(self, name: str) -> Iterator[Fields]:
        value = self.take(name)
        if value is None:
            return
        if not isinstance(value, list):
            raise ConvertError((*self.path, name), f"must be a list, is {say(value)}")
        yield from (Fields(item, (*self.path, name, i)) for i, item in enumerate(value))

    def rest(self, result: Converted) -> None:
        """Add a remark for each field that was not read."""
        for name, value in self.given.items():
            if name not in self._taken and value not in (None, {}, [], ""):
                result.remark((*self.path, name), _REASONS.get(name, "a DDPJob has no such field"))
