"""Shared parts of the converters: metadata, the trainer's container, processes per node, elastic jobs."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from ddpjob_convert.fields import SET_BY_THE_JOB, ConvertError, Fields, walk
from ddpjob_convert.result import Converted, Path
from ddpjob_operator.job import api, bounds
from ddpjob_operator.job.launch.command import by_torchrun, options_begin, split_options
from ddpjob_operator.job.podspec import TRAINER, command_of, containers, gpus, mapping

NO_ELASTIC = "an elastic job needs torchrun or ddprun in the command: this one always has spec.nodes nodes"
KUEUE = "the job waits in this queue if the operator has gang.kueue.enabled; otherwise it starts at once"
SUSPENDED_BY_KUEUE = "Kueue sets and removes it by itself; with it a DDPJob would wait for ever; dropped"
_QUEUE = "kueue.x-k8s.io/queue-name"

_KEPT = ("name", "namespace", "labels", "annotations")
_OF_THE_SERVER = "kubectl.kubernetes.io/last-applied-configuration"
# Options of torchrun that identify the machine. They are removed, because the job sets them for each node.
IDENTITY = {
    "nnodes", "node_rank", "master_addr", "master_port", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf",
    "standalone", "local_addr",
}  # fmt: skip


def begin(document: Mapping[str, Any]) -> tuple[Converted, Fields]:
    """Return a DDPJob with only the metadata of the converted job, and the spec of the converted job."""
    source = Fields(document, ())
    of_object = source.fields("metadata")
    given = of_object.given
    metadata = {name: copy.deepcopy(given[name]) for name in _KEPT if given.get(name)}
    annotations = metadata.get("annotations")
    if isinstance(annotations, dict) and annotations.pop(_OF_THE_SERVER, None) and not annotations:
        del metadata["annotations"]
    generated = source.fields("metadata").text("generateName") if "name" not in metadata else ""
    if generated:
        metadata = {"name": generated.rstrip("-"), **metadata}
    kind, name = document.get("kind"), metadata.get("name", "-")
    result = Converted(f"Converted from the {kind} {name} by `ddpjob convert`.", metadata)
    if generated:
        result.remark(
            ("metadata", "generateName"), f"a name is needed: {name} is a placeholder; change it for each job"
        )
    for known in (*_KEPT, *api.SET_BY_THE_SERVER, "generateName"):
        of_object.take(known)
    of_object.rest(result)
    labels = metadata.get("labels")
    if isinstance(labels, dict) and _QUEUE in labels:
        result.remark(("metadata", "labels", _QUEUE), KUEUE)
    return result, source.fields("spec")


def set_own(fields: Fields, controller: str, result: Converted) -> None:
    """Set fields that mean the same in a DDPJob, except `suspend` if a queue sets it, and our own managedBy."""
    suspend, manager = fields.take("suspend"), fields.text("managedBy")
    if suspend is True and _QUEUE in mapping(result.metadata, "labels"):
        result.remark((*fields.path, "suspend"), SUSPENDED_BY_KUEUE)
    elif suspend is not None:
        result.set("suspend", suspend)
    if manager and manager != controller:
        result.set("managedBy", manager)
    for name, least in (("activeDeadlineSeconds", 1), ("ttlSecondsAfterFinished", 0)):
        if (seconds := fields.number(name, least)) is not None:
            result.set(name, seconds)


def name_trainer(template: dict[str, Any], usual: str, path: Path) -> dict[str, Any]:
    """Rename and return the trainer's container. usual: its name in the source. Raise ConvertError if there is none."""
    listed = containers(template)
    if not listed:
        raise ConvertError((*path, "spec", "containers"), "is missing: the trainer's container")
    trainer = next((c for c in listed if c.get("name") in (usual, TRAINER)), listed[0])
    pod = template["spec"]
    of_pods = mapping(template, "metadata")
    if of_pods.pop("creationTimestamp", "") is None and not of_pods:  # the API server writes null into each template
        del template["metadata"]
    # Rename references too (resourceFieldRef), because with the old name the pod would not start.
    for _, value in walk(pod):
        if isinstance(value, dict) and value.get("containerName") == str(trainer.get("name")):
            value["containerName"] = TRAINER
    trainer["name"] = TRAINER
    if pod.get("restartPolicy") is not None:
        pod.pop("restartPolicy")  # a DDPJob sets Never; converters remark on the source's own restartPolicy
    return trainer


def strip_launcher(trainer: dict[str, Any], path: Path, result: Converted) -> str:
    """Remove torchrun's options that identify the machine from the trainer's command and args. Return the command's
    --nnodes; "" if there is none."""
    command, args = (trainer.get(part) or [] for part in ("command", "args"))
    if not all(isinstance(words, list) and all(isinstance(w, str) for w in words) for words in (command, args)):
        return ""
    words = [*command, *args]
    found, begin = by_torchrun(words), options_begin(words)
    options, rest = split_options(words[begin:]) if begin is not None else ([], [])
    dropped = [word for name, group in options if name in IDENTITY for word in group]
    if dropped:
        kept = [*words[:begin], *(w for name, group in options if name not in IDENTITY for w in group), *rest]
        trainer |= {"command": kept} if command else {"args": kept}
        if command:
            trainer.pop("args", None)
        result.remark(path, f"{' '.join(dropped)}: {SET_BY_THE_JOB}; removed")
    return found.options.get("nnodes", "") if found else ""


def set_processes(
    value: Any, path: Path, template: dict[str, Any], result: Converted, on_cpus: int | None = None
) -> None:
    """Set nprocPerNode from auto, cpu, gpu or a number. on_cpus: for auto without GPUs; None: all CPUs."""
    command = command_of(template)
    found = by_torchrun(command)
    if value in (None, "auto"):
        # Without a launcher the converted job starts one process, which sees all GPUs of its pod.
        if command and found is None and gpus(template) > 1:
            result.set("nprocPerNode", 1, "no launcher starts more: RANK and WORLD_SIZE count nodes, as in the source")
        elif found and not gpus(template) and "nproc_per_node" not in found.options:
            if on_cpus is None:
                text = "without GPUs, auto means a process for each CPU in the source, but one in a DDPJob"
                result.remark(path, f"{text}: set spec.nprocPerNode")
            elif on_cpus > 1:
                result.set("nprocPerNode", on_cpus, "without GPUs, auto means a process for each CPU of the pod")
    elif value == "cpu":
        result.remark(path, "cpu means a process for each CPU: set spec.nprocPerNode to their number")
    elif str(value).isdecimal() and int(value) > 0:
        result.set("nprocPerNode", int(value))
    elif value != "gpu":
        raise ConvertError(path, f"must be auto, cpu, gpu or a number, is {value}")


def set_elastic(
    elastic: Fields, names: tuple[str, str], nnodes: str, command: list[str], where: Path, result: Converted
) -> None:
    """Set nodes and minNodes from torchrun's --nnodes, else from an elasticPolicy. names: the policy's two fields."""
    least, most = (elastic.number(name, 1) for name in names)
    path = (*elastic.path, names[0] if least is not None else names[1])
    if (least is not None or most is not None) and bounds.number(nnodes, bounds.COUNT_MAX) > 0:
        result.remark(path, f"--nnodes={nnodes} of the command takes precedence: the job is not elastic")
        return
    if in_command := range_of(nnodes):
        least, most = in_command
        path = where
    if least is not None or most is not None:
        set_range(least, most, path, command, result)


def set_range(least: int | None, most: int | None, path: Path, command: list[str], result: Converted) -> None:
    """Set nodes and minNodes from a range with one or both limits. Without torchrun or ddprun, only add a remark."""
    nodes = result.spec["nodes"]
    if by_torchrun(command) is None:
        result.remark(path, NO_ELASTIC)
        return
    if most is None:
        most = max(least or 1, nodes)
    if least is not None and least > most:
        raise ConvertError(path, f"must be at most {most}, the largest number of nodes, is {least}")
    if most != nodes:
        result.set("nodes", most, "the largest number of nodes of an elastic job")
        result.remark(path, f"the job requests {most} pods at once; the source began with {nodes}")
    if least is not None and least < most:
        result.set("minNodes", least, "elastic: trains with this many nodes to spec.nodes")


def range_of(nnodes: str) -> tuple[int, int] | None:
    least, most = (bounds.number(text, bounds.COUNT_MAX) for text in nnodes.partition(":")[::2])
    return (least, most) if least > 0 and most > 0 else None
