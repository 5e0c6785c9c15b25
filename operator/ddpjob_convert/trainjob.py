"""Convert a TrainJob (trainer.kubeflow.org/v1alpha1, Kubeflow Trainer v2) with its runtime."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ddpjob_convert import address, common
from ddpjob_convert.fields import GANG, SET_IT, ConvertError, Fields
from ddpjob_convert.result import Converted, Path
from ddpjob_operator.job import podspec
from ddpjob_operator.job.wording import count, say

_STEP = "trainer.kubeflow.org/trainjob-ancestor-step"
_CONTAINER = "node"
_OWN_CONTROLLER = "trainer.kubeflow.org/trainjob-controller"
# By list: the key by which Kubernetes merges the list's items.
_MERGE_KEYS = dict.fromkeys(
    ("containers", "initContainers", "volumes", "env", "imagePullSecrets", "schedulingGates"), "name"
)
_MERGE_KEYS["volumeMounts"] = "mountPath"


def convert(document: Mapping[str, Any], runtimes: Sequence[Mapping[str, Any]]) -> Converted:
    """Convert a TrainJob. Paths that begin with "runtime" are in the runtime's document. Raise ConvertError."""
    result, spec = common.begin(document)
    runtime = result.runtime = _runtime(spec, runtimes, result)
    try:
        return _convert(spec, runtime, result)
    except ConvertError as error:
        raise ConvertError(error.path, str(error), runtime) from None


def _convert(spec: Fields, runtime: Mapping[str, Any], result: Converted) -> Converted:
    own = Fields(runtime.get("spec") or {}, ("runtime", "spec"))
    policy = own.fields("mlPolicy")
    torch, trainer = policy.fields("torch"), spec.fields("trainer")
    for other in policy.given.keys() - {"numNodes", "torch"}:
        raise ConvertError((*policy.path, other), f"mlPolicy.{other} is not PyTorch DDP: a DDPJob runs only DDP")
    template, nnodes = _template(own, spec, trainer, result)
    nodes = trainer.number("numNodes", 1) or policy.number("numNodes", 1) or 1
    result.set("nodes", nodes, "numNodes")
    nproc, path = trainer.take("numProcPerNode"), (*trainer.path, "numProcPerNode")
    of_runtime = torch.take("numProcPerNode")
    if nproc is None:
        nproc, path = of_runtime, (*torch.path, "numProcPerNode")
    # Without GPUs, Kubeflow Trainer starts a process per CPU of the pod: the request, else the limit, rounded up.
    resources = podspec.mapping(podspec.trainer_container(template) or {}, "resources")
    requested, limit = (podspec.mapping(resources, name).get("cpu") for name in ("requests", "limits"))
    cpus = math.ceil(podspec.quantity(requested) or podspec.quantity(limit))
    common.set_processes(nproc, path, template, result, cpus)
    elastic = torch.fields("elasticPolicy")
    _restarts(elastic, result)
    command, where = podspec.command_of(template), (*trainer.path, "numNodes")
    common.set_elastic(elastic, ("minNodes", "maxNodes"), nnodes, command, where, result)
    elastic.rest(result)
    common.set_own(spec, _OWN_CONTROLLER, result)
    group = own.fields("podGroupPolicy")
    if seconds := group.fields("coscheduling").number("scheduleTimeoutSeconds"):
        result.set("startDeadlineSeconds", seconds, "scheduleTimeoutSeconds: all nodes run by then, or are released")
    for name in group.given:
        result.remark((*group.path, name), GANG)
    for fields in (trainer, spec, torch, own):
        fields.rest(result)
    result.set("template", template)
    return result


def _runtime(spec: Fields, runtimes: Sequence[Mapping[str, Any]], result: Converted) -> Mapping[str, Any]:
    reference = spec.fields("runtimeRef")
    name, kind = reference.text("name"), reference.text("kind") or "ClusterTrainingRuntime"
    for runtime in runtimes:
        if runtime.get("kind") == kind and podspec.mapping(runtime, "metadata").get("name") == name:
            result.title = f"{result.title[:-1]}, with the {kind} {name}."
            return runtime
    raise ConvertError(
        (*reference.path, "name"),
        f"the {kind} {name} has the pod template, and is not among the files. "
        f"kubectl get {kind.lower()} {name} -o yaml > runtime.yaml, and give runtime.yaml too.",
    )


def _template(own: Fields, spec: Fields, trainer: Fields, result: Converted) -> tuple[dict[str, Any], str]:
    """Return the pod template of the runtime's trainer with the TrainJob's values, and its command's --nnodes."""
    of_job_set = own.fields("template")
    job_set = of_job_set.fields("spec")
    job = _trainer_job(job_set, result)
    of_job = job.fields("template")
    job_spec = of_job.fields("spec")
    failure = job_set.fields("failurePolicy")
    if (restarts := failure.number("maxRestarts")) is not None:
        result.set("backoffLimit", restarts, "the JobSet's failurePolicy.maxRestarts")
    if (seconds := job_set.number("ttlSecondsAfterFinished")) is not None:
        result.set("ttlSecondsAfterFinished", seconds)
    for fields in (failure, job_set):
        fields.rest(result)
    _say_around(of_job_set, job, of_job, result)
    path = (*job_spec.path, "template")
    template = copy.deepcopy(dict(job_spec.fields("template").given))
    for patch in _patches(spec, job.text("name"), result):
        template = merge(template, patch)
    if (restart := podspec.mapping(template, "spec").get("restartPolicy")) not in (None, "Never"):
        text = f"{say(restart)} restarts one container in its pod; a DDPJob restarts all nodes: set spec.backoffLimit"
        result.remark((*path, "spec", "restartPolicy"), text)
    container = common.name_trainer(template, _CONTAINER, path)
    for name in ("image", "command", "args"):
        if (value := trainer.take(name)) is not None:
            container[name] = copy.deepcopy(value)
    if (resources := trainer.take("resourcesPerNode")) is not None:
        container["resources"] = copy.deepcopy(resources)
    if (env := trainer.take("env")) is not None:
        container["env"] = merge({"env": container.get("env") or []}, {"env": env})["env"]
    own_command = "command" in trainer.given or "args" in trainer.given
    where = (*trainer.path, "command" if "command" in trainer.given else "args")
    nnodes = common.strip_launcher(container, where if own_command else (*path, "spec", "containers"), result)
    _address(template, trainer, job.text("name"), path, result)
    job_spec.rest(result)
    return template, nnodes


def _address(template: dict[str, Any], trainer: Fields, job: str, path: Path, result: Converted) -> None:
    """Replace node 0's address, in a JobSet for example gpt-node-0-0.gpt. path: of the runtime's template."""
    name = str(result.metadata.get("name", ""))
    any_of = rf"{re.escape(name)}-{re.escape(job)}-0-\d+(?:\.{re.escape(name)})?"
    before = len(result.remarks)
    own = (*path, *podspec.trainer_path(template)[2:])
    address.move(template, f"{name}-{job}-0-0.{name}", any_of, path, result)
    for i, remark in enumerate(result.remarks[before:], before):
        part = remark.path[len(own)] if len(remark.path) > len(own) and remark.path[: len(own)] == own else ""
        if part in ("command", "args", "env") and part in trainer.given:
            result.remarks[i] = replace(remark, path=(*trainer.path, part))


def _say_around(of_job_set: Fields, job: Fields, of_job: Fields, result: Converted) -> None:
    for fields in (of_job_set, of_job):
        metadata = fields.fields("metadata")
        for name in ("labels", "annotations"):
            given = metadata.fields(name)
            if own := ", ".join(key for key in given.given if key != _STEP):
                result.remark(given.path, f"{own}: not set on the pods of the source: {SET_IT}")
        metadata.rest(result)
        fields.rest(result)
    for name in ("name", "groupName", *(("replicas",) if job.given.get("replicas") == 1 else ())):
        job.take(name)  # the API server writes groupName and replicas into each runtime
    job.rest(result)


def _trainer_job(job_set: Fields, result: Converted) -> Fields:
    jobs = list(job_set.mappings("replicatedJobs"))

    def step(job: Fields) -> Any:
        metadata = podspec.mapping(podspec.mapping(job.given, "template"), "metadata")
        return podspec.mapping(metadata, "labels").get(_STEP)

    by_name = [job for job in jobs if job.given.get("name") == "node"]
    found = next(iter([*(job for job in jobs if step(job) == "trainer"), *by_name]), None)
    if found is None:
        raise ConvertError((*job_set.path, "replicatedJobs"), f"no replicated Job has the label {_STEP}: trainer")
    for job in jobs:
        if job is not found:
            reason = f"the Job {job.given.get('name')} is not created: download in an init container, or mount a volume"
            result.remark(job.path, reason)
    return found


def _patches(spec: Fields, job: str, result: Converted) -> Iterator[Mapping[str, Any]]:
    """Yield the TrainJob's changes to the runtime's pod template, from the fields of all Kubeflow Trainer versions."""
    for patch in spec.mappings("runtimePatches"):
        own = patch.fields("trainingRuntimeSpec")
        template = own.fields("template")
        job_set = template.fields("spec")
        for replicated in job_set.mappings("replicatedJobs"):
            if replicated.text("name") == job:
                of_job = replicated.fields("template")
                yield of_job.fields("spec").fields("template").given
                of_job.rest(result)
            else:
                result.remark(replicated.path, f"is for another Job than {job}")
        for fields in (own, template, job_set):
            fields.rest(result)
    for name in ("podTemplateOverrides", "podSpecOverrides"):
        for override in spec.mappings(name):
            if job in [target.text("name") for target in override.mappings("targetJobs")]:
                given = {k: v for k, v in override.given.items() if k != "targetJobs"}
                # podSpecOverrides has the pod's fields directly, next to targetJobs, not in a spec.
                yield given if name == "podTemplateOverrides" else {"spec": given}
            else:
                result.remark(override.path, f"is for another Job than {job}")


def merge(base: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Merge a patch into `base` as Kubernetes does: mappings by key, lists by name; other values are replaced."""
    merged = dict(base)
    for name, new in patch.items():
        old, key = base.get(name), _MERGE_KEYS.get(name, "")
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            merged[name] = merge(old, new)
        elif name == "tolerations" and isinstance(old, list) and isinstance(new, list):
            merged[name] = [*old, *(item for item in new if item not in old)]
        elif key and all(_is_named(items, key) for items in (old, new)):
            by_key = {item[key]: item for item in base[name]}
            merged[name] = list((by_key | {item[key]: merge(by_key.get(item[key], {}), item) for item in new}).values())
        else:
            merged[name] = copy.deepcopy(new)
    return merged


def _is_named(items: Any, key: str) -> bool:
    return isinstance(items, list) and all(isinstance(i, Mapping) and isinstance(i.get(key), str) for i in items)


def _restarts(elastic: Fields, result: Converted) -> None:
    if (restarts := elastic.number("maxRestarts")) is not None:
        if "backoffLimit" in result.spec:
            path: Path = ("runtime", "spec", "template", "spec", "failurePolicy", "maxRestarts")
            restarts_of_set = count(result.spec["backoffLimit"], "restart")
            result.remark(path, f"{restarts_of_set} of the JobSet: elasticPolicy.maxRestarts takes precedence")
        result.set("backoffLimit", restarts, "elasticPolicy.maxRestarts")
