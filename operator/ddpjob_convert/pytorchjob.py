"""Convert a PyTorchJob (kubeflow.org/v1, Kubeflow Training Operator v1). Fields of runPolicy are also read from spec,
where the first pytorch-operator had them."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ddpjob_convert import address, common
from ddpjob_convert.fields import ConvertError, Fields
from ddpjob_convert.result import Converted, Path
from ddpjob_operator.job.podspec import TRAINER, command_of, containers, mappings

RESUMABLE = 75  # exit code of a rank that was stopped and has saved; podFailurePolicy must not match it
_CONTAINER = "pytorch"
_PORT = "pytorchjob-port"
_DIFFERENCES_MAX = 10

_KINDS = ("Master", "Worker")
# Fields of runPolicy that the first pytorch-operator had in spec.
_RUN_POLICY = (
    "activeDeadlineSeconds backoffLimit cleanPodPolicy managedBy schedulingPolicy suspend ttlSecondsAfterFinished"
).split()


def convert(document: Mapping[str, Any]) -> Converted:
    """Convert a PyTorchJob. Raise ConvertError."""
    result, spec = common.begin(document)
    groups = _groups(spec)
    counts = [1 if (count := group.number("replicas")) is None else count for _, group in groups]
    if sum(counts) < 1:
        raise ConvertError((*groups[0][1].path, "replicas"), "no replicas: a DDPJob has at least one node")
    names = " + ".join(f"{count} {kind}" for count, (kind, _) in zip(counts, groups, strict=True))
    first = "the Master" if groups[0][0] == "Master" else "the first of them"
    result.set("nodes", sum(counts), f"{names}; {first} is node 0")
    template, nnodes = _template(groups, result)
    policy, elastic = _policy(spec), spec.fields("elasticPolicy")
    where = (*groups[-1][1].path, "replicas")
    command = command_of(template)
    common.set_elastic(elastic, ("minReplicas", "maxReplicas"), nnodes, command, where, result)
    nproc, where = spec.take("nprocPerNode"), (*spec.path, "nprocPerNode")
    if nproc is None and (nproc := elastic.take("nProcPerNode")) is not None:
        where = (*elastic.path, "nProcPerNode")
    common.set_processes(nproc, where, template, result)
    _restarts([group for _, group in groups], policy, elastic, result)
    _run_policy(policy, template, result)
    elastic.rest(result)
    policy.rest(result)
    spec.rest(result)
    result.set("template", template)
    return result


def _groups(spec: Fields) -> list[tuple[str, Fields]]:
    """Return (kind, replica group) for each kind, the Master first. Raise ConvertError."""
    replicas = spec.fields("pytorchReplicaSpecs")
    found: dict[str, Fields] = {}
    for name in replicas.given:
        kind, path = str(name).capitalize(), (*replicas.path, name)
        if kind not in _KINDS or kind in found:
            raise ConvertError(path, "a PyTorchJob has the replicas Master and Worker, each once")
        if (one := replicas.take(name)) is not None:
            found[kind] = Fields(one, path)
    if not found:
        raise ConvertError(replicas.path, "is empty: there is neither a Master nor a Worker")
    return sorted(found.items(), key=lambda group: _KINDS.index(group[0]))


def _policy(spec: Fields) -> Fields:
    policy = spec.fields("runPolicy")
    flat = {name: spec.take(name) for name in _RUN_POLICY if spec.given.get(name) is not None}
    return Fields({**flat, **policy.given}, policy.path) if policy.given or not flat else Fields(flat, spec.path)


def _template(groups: list[tuple[str, Fields]], result: Converted) -> tuple[dict[str, Any], str]:
    (kind, first), *others = groups
    given = [copy.deepcopy(dict(group.fields("template").given)) for _, group in groups]
    path = (*first.path, "template")
    _remove_port([group for _, group in groups], given, result)
    for (_, group), other in zip(others, given[1:], strict=True):
        differences = _differences(given[0], other, (*group.path, "template"))
        for where in itertools.islice(differences, _DIFFERENCES_MAX):
            result.remark(where, f"differs from {kind}, whose value all nodes get: a DDPJob has one template")
    template = given[0]
    trainer = common.name_trainer(template, _CONTAINER, path)
    nnodes = common.strip_launcher(trainer, (*path, "spec", "containers"), result)
    # The Training Operator creates a Service for each pod, mnist-master-0, and gives its name to all pods.
    name = str(result.metadata.get("name", ""))
    any_of = rf"{re.escape(name)}-(?:master|worker)-\d+"
    address.move(template, f"{name}-{kind.lower()}-0", any_of, path, result)
    if not trainer.get("command") and not trainer.get("args"):
        result.remark((*path, "spec", "containers"), f"{TRAINER} has no command: the image's own entrypoint is run")
    return template, nnodes


def _remove_port(groups: list[Fields], templates: list[dict[str, Any]], result: Converted) -> None:
    """Remove the port of the Master's Service from all templates, because a DDPJob has another port in each attempt."""
    found = []
    for group, template in zip(groups, templates, strict=True):
        for i, container in enumerate(containers(template)):
            own = [port for port in mappings(container, "ports") if port.get("name") == _PORT]
            if own:
                found.append((*group.path, "template", "spec", "containers", i, "ports"))
                container["ports"] = [port for port in container["ports"] if port not in own]
            if own and not container["ports"]:
                del container["ports"]
    if found:
        result.remark(found[0], f"{_PORT}: not needed: the job sets MASTER_PORT, another one in each attempt; removed")


def _differences(first: Any, other: Any, path: Path) -> Iterator[Path]:
    """Yield the differences of two templates, as deep as possible: mappings by key, lists of equal length by item."""
    if isinstance(first, dict) and isinstance(other, dict):
        for name in dict.fromkeys((*first, *other)):
            yield from _differences(first.get(name), other.get(name), (*path, name))
    elif isinstance(first, list) and isinstance(other, list) and len(first) == len(other):
        for i, (one, two) in enumerate(zip(first, other, strict=True)):
            yield from _differences(one, two, (*path, i))
    elif first != other and path[-1] != "restartPolicy":
        yield path


def _restarts(groups: list[Fields], policy: Fields, elastic: Fields, result: Converted) -> None:
    words = [group.text("restartPolicy") or "OnFailure" for group in groups]
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
        comment = f"restartPolicy: ExitCode. {RESUMABLE} is missing: a rank that saved and stopped exits with it"
        result.set("failurePolicy", {"rules": [rule]}, comment)


def _run_policy(policy: Fields, template: dict[str, Any], result: Converted) -> None:
    if clean := policy.text("cleanPodPolicy"):
        result.set("cleanPodPolicy", clean)
    common.set_own(policy, "kubeflow.org/training-operator", result)
    scheduling = policy.fields("schedulingPolicy")
    if priority := scheduling.text("priorityClass"):
        template["spec"].setdefault("priorityClassName", priority)
    if seconds := scheduling.number("scheduleTimeoutSeconds"):
        comment = "schedulingPolicy.scheduleTimeoutSeconds: all nodes run by then, else all pods are released"
        result.set("startDeadlineSeconds", seconds, comment)
    scheduling.rest(result)
