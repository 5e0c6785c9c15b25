"""A PyTorchJob (kubeflow.org/v1, Kubeflow Training Operator v1) as a DDPJob.

The fields of the first pytorch-operator (v1alpha1 to v1) are read as well: those of runPolicy stood in spec, and
v1alpha1 had a list of replicas.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ddpjob_convert import address, common
from ddpjob_convert.fields import ConvertError, Fields
from ddpjob_convert.result import Converted, Path
from ddpjob_operator.job import launcher
from ddpjob_operator.job.podspec import TRAINER, containers, mapping
from ddpjob_operator.job.validation import dotted

RESUMABLE = 75  # what a rank that has saved ends with: no failure, so no rule is for it
_CONTAINER = "pytorch"
_PORT = "pytorchjob-port"
_DIFFERENCES_MAX = 10

_ELASTIC = {
    "metrics": common.NO_SCALER,
    **dict.fromkeys(("rdzvBackend", "rdzvHost", "rdzvPort", "rdzvId", "rdzvConf", "standalone"), common.SET_BY_THE_JOB),
}
_SCHEDULING = {
    "minAvailable": common.GANG,
    "minResources": common.GANG,
    "queue": "a DDPJob has no queue; " + common.GANG,
}
_KINDS = ("Master", "Worker")
# Fields of runPolicy, which stood in spec before there was a runPolicy.
_RUN_POLICY = (
    "activeDeadlineSeconds backoffLimit cleanPodPolicy managedBy schedulingPolicy suspend ttlSecondsAfterFinished"
).split()
_SPEC = {
    "backend": "not taken over: auto is nccl with GPUs and gloo without; set spec.backend for another",
    "masterPort": common.SET_BY_THE_JOB,
    "pytorchImage": "set image in the template",
    "runtimeId": "is of the object in the cluster; dropped",
    "schedulerName": "set it in the template's spec",
    "terminationPolicy": "a DDPJob succeeds when the trainers of all its nodes have ended with 0",
}


class _Replicas(Fields):
    """One group of replicas; `kind` is Master or Worker."""

    def __init__(self, value: Any, path: Path, kind: str) -> None:
        super().__init__(value, path)
        self.kind = kind


def convert(document: Mapping[str, Any]) -> Converted:
    """The DDPJob. Raises ConvertError."""
    result, spec = common.begin(document)
    groups = _groups(spec)
    _nodes(groups, result)
    nproc = spec.take("nprocPerNode")
    # The Training Operator multiplies WORLD_SIZE by a number of processes, and by nothing for auto, cpu and gpu.
    counts_ranks = str(nproc).isdecimal() and int(nproc) > 1
    template, nnodes = _template(groups, "DDPJOB_WORLD_SIZE" if counts_ranks else "NNODES", result)
    policy, elastic = _policy(spec), spec.fields("elasticPolicy")
    _elastic(elastic, groups, nnodes, launcher.command_of(template), result)
    where = (*spec.path, "nprocPerNode")
    if nproc is None and (nproc := elastic.take("nProcPerNode")) is not None:
        where = (*elastic.path, "nProcPerNode")
    common.set_processes(nproc, where, template, result)
    _restarts(groups, policy, elastic, result)
    _run_policy(policy, template, result)
    elastic.rest(result, _ELASTIC)
    policy.rest(result)
    spec.rest(result, _SPEC)
    result.set("template", template)
    return result


def _groups(spec: Fields) -> list[_Replicas]:
    """The groups of replicas, the Master first. Raises ConvertError."""
    if "replicaSpecs" in spec.given:  # v1alpha1
        listed = list(spec.mappings("replicaSpecs"))
        found = [_Replicas(one.given, one.path, _kind_in_list(one)) for one in listed]
    else:
        replicas = spec.fields("pytorchReplicaSpecs")
        given = {name: replicas.take(name) for name in replicas.given}
        found = [
            _Replicas(one, (*replicas.path, name), _kind(name, (*replicas.path, name)))
            for name, one in given.items()
            if one is not None
        ]
    if not found:
        path = (*spec.path, "replicaSpecs" if "replicaSpecs" in spec.given else "pytorchReplicaSpecs")
        raise ConvertError(path, "is empty: there is neither a Master nor a Worker")
    for second, group in enumerate(found):
        if group.kind in [one.kind for one in found[:second]]:
            raise ConvertError(group.path, f"is a second group of the kind {group.kind}")
    return sorted(found, key=lambda group: _KINDS.index(group.kind))


def _kind_in_list(one: Fields) -> str:
    """Of an item of v1alpha1's list, whose examples say replicaType and whose types say pytorchReplicaType."""
    names = [name for name in one.given if str(name).lower().endswith("replicatype")]
    return _kind(one.text(names[0]), (*one.path, names[0])) if names else "Master"


def _kind(text: str, path: Path) -> str:
    """Master or Worker: the first operator took the names in any case. Raises ConvertError."""
    if (kind := str(text).capitalize()) not in _KINDS:
        raise ConvertError(path, "a PyTorchJob has the replicas Master and Worker")
    return kind


def _policy(spec: Fields) -> Fields:
    """runPolicy, or its fields where they stand in spec itself."""
    policy = spec.fields("runPolicy")
    flat = {name: spec.take(name) for name in _RUN_POLICY if spec.given.get(name) is not None}
    return Fields({**flat, **policy.given}, policy.path) if policy.given or not flat else Fields(flat, spec.path)


def _nodes(groups: list[_Replicas], result: Converted) -> None:
    counts = []
    for group in groups:
        count = group.number("replicas")
        counts.append(1 if count is None else count)
    if sum(counts) < 1:
        raise ConvertError((*groups[0].path, "replicas"), "there is no replica: a DDPJob has at least one node")
    names = " + ".join(f"{count} {group.kind}" for count, group in zip(counts, groups, strict=True))
    first = "the Master" if groups[0].kind == "Master" else "the first of them"
    result.set("nodes", sum(counts), f"{names}; {first} is node 0")


def _elastic(elastic: Fields, groups: list[_Replicas], nnodes: str, command: list[str], result: Converted) -> None:
    """minNodes and nodes. nnodes: an option of the command, which counts before the elasticPolicy.

    Kubeflow gives minReplicas:maxReplicas to torchrun in all pods, so the Master counts among them; `replicas` are the
    number to begin with.
    """
    least, most = elastic.number("minReplicas", 1), elastic.number("maxReplicas", 1)
    path: Path = (*elastic.path, "maxReplicas" if least is None else "minReplicas")
    where = (*elastic.path, "maxReplicas" if most else "minReplicas")
    if in_command := common.range_of(nnodes):
        (least, most), path = in_command, (*groups[0].path, "template", "spec", "containers")
        where = (*groups[-1].path, "replicas")
    if (least is None and most is None) or common.is_fixed(nnodes, elastic, result):
        return
    replicas = result.spec["nodes"]
    if not common.set_range(least, most, path, command, result):
        return
    nodes = result.spec["nodes"]
    if nodes > replicas:
        then = "and trains with those that run" if "minNodes" in result.spec else "and waits for all"
        text = f"the job asks for {nodes} pods at once, not for {replicas}, {then}; set spec.nodes for fewer"
        result.remark(where, text)
    elif nodes < replicas:
        result.remark(where, f"torchrun takes in {nodes} of the {replicas} replicas, so the job has {nodes} nodes")


def _template(groups: list[_Replicas], world_size: str, result: Converted) -> tuple[dict[str, Any], str]:
    """The first group's template, with a remark on what the other has otherwise, and the --nnodes of its command."""
    first, *others = groups
    given = [copy.deepcopy(dict(group.fields("template").given)) for group in groups]
    path = (*first.path, "template")
    _remove_port(groups, given, result)
    for group, other in zip(others, given[1:], strict=True):
        for where in _differences(given[0], other, (*group.path, "template")):
            result.remark(where, f"differs from {first.kind}, whose value all nodes get: a DDPJob has one template")
    template = given[0]
    trainer = common.name_trainer(template, _CONTAINER, path)
    nnodes = common.strip_launcher(trainer, (*path, "spec", "containers"), result, world_size)
    # The Training Operator makes a Service for each pod, mnist-master-0, and gives its name to all of them.
    name, of_rank0 = str(result.metadata.get("name", "")), first.kind.lower()
    names = address.Names(
        f"{name}-{of_rank0}-0", rf"{re.escape(name)}-(?:master|worker)-\d+", str(result.metadata.get("namespace", ""))
    )
    address.move(template, names, path, result)
    if not trainer.get("command") and not trainer.get("args"):
        result.remark((*path, "spec", "containers"), f"{TRAINER} has no command: the image's own entrypoint is run")
    return template, nnodes


def _remove_port(groups: list[_Replicas], templates: list[dict[str, Any]], result: Converted) -> None:
    """The port of the Master's Service, from all templates: that of a DDPJob is another one in each attempt."""
    found = []
    for group, template in zip(groups, templates, strict=True):
        for i, container in enumerate(containers(template)):
            ports = container.get("ports")
            kept = [p for p in ports if not _is_own_port(p)] if isinstance(ports, list) else ports
            if kept != ports:
                found.append((*group.path, "template", "spec", "containers", i, "ports"))
                container["ports"] = kept
            if kept == [] and ports:
                del container["ports"]
    if found:
        result.remark(found[0], f"{_PORT}: not needed: the job sets MASTER_PORT, another one in each attempt; removed")


def _is_own_port(port: Any) -> bool:
    return isinstance(port, dict) and port.get("name") == _PORT


def _differences(first: Any, other: Any, path: Path) -> Iterator[Path]:
    """Where two templates differ: the deepest mappings and lists of the same shape are compared one by one."""
    found = list(_walk(first, other, path))
    yield from found[:_DIFFERENCES_MAX]


def _walk(first: Any, other: Any, path: Path) -> Iterator[Path]:
    if isinstance(first, dict) and isinstance(other, dict):
        for name in dict.fromkeys((*first, *other)):
            yield from _walk(first.get(name), other.get(name), (*path, name))
    elif isinstance(first, list) and isinstance(other, list) and len(first) == len(other):
        for i, (one, two) in enumerate(zip(first, other, strict=True)):
            yield from _walk(one, two, (*path, i))
    elif first != other and dotted(path).rsplit(".", 1)[-1] != "restartPolicy":
        yield path


def _restarts(groups: list[_Replicas], policy: Fields, elastic: Fields, result: Converted) -> None:
    words = [_restart_policy(group) for group in groups]
    path = (*groups[0].path, "restartPolicy")
    if len(set(words)) > 1:
        result.remark((*groups[1].path, "restartPolicy"), f"the whole group restarts: {words[0]} counts for all nodes")
    limit, restarts = policy.number("backoffLimit"), elastic.number("maxRestarts")
    if words[0] == "Never":
        result.set("backoffLimit", 0, "restartPolicy: Never")
    elif limit is not None:
        result.set("backoffLimit", limit, "restarts of the whole group; lost nodes and evictions are not charged")
    elif restarts is not None:
        result.set("backoffLimit", restarts, "elasticPolicy.maxRestarts")
    elif words[0] in ("OnFailure", "Always", "ExitCode"):
        result.remark(path, f"{words[0]} restarts one pod, without limit; a DDPJob restarts all nodes, backoffLimit: 3")
    if words[0] == "ExitCode":
        codes = [code for code in range(1, 128) if code != RESUMABLE]
        rule = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": codes}}
        comment = f"restartPolicy: ExitCode. {RESUMABLE} is missing: a rank that has saved in order ends with it"
        result.set("failurePolicy", {"rules": [rule]}, comment)


def _restart_policy(group: _Replicas) -> str:
    """That of the replicas; v1alpha1 had only the pods' own, which a later operator overwrites."""
    in_list = isinstance(group.path[-1], int)
    of_pod = mapping(mapping(group.given, "template"), "spec").get("restartPolicy") if in_list else None
    return group.text("restartPolicy") or (of_pod if isinstance(of_pod, str) else "") or "OnFailure"


def _run_policy(policy: Fields, template: dict[str, Any], result: Converted) -> None:
    if clean := policy.text("cleanPodPolicy"):
        result.set("cleanPodPolicy", clean)
    if (seconds := policy.number("activeDeadlineSeconds", 1)) is not None:
        result.set("activeDeadlineSeconds", seconds)
    if (seconds := policy.number("ttlSecondsAfterFinished")) is not None:
        result.set("ttlSecondsAfterFinished", seconds)
    common.set_suspend(policy, result)
    manager = policy.text("managedBy")
    if manager and manager != "kubeflow.org/training-operator":
        result.set("managedBy", manager)
    scheduling = policy.fields("schedulingPolicy")
    if priority := scheduling.text("priorityClass"):
        template["spec"].setdefault("priorityClassName", priority)
    if seconds := scheduling.number("scheduleTimeoutSeconds"):
        comment = "schedulingPolicy.scheduleTimeoutSeconds: all nodes run by then, else all pods are released"
        result.set("startDeadlineSeconds", seconds, comment)
    scheduling.rest(result, _SCHEDULING)
