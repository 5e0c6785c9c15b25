"""Reads a pod template: its trainer, GPUs, CPUs and volumes. Templates stay raw mappings, because a typed model would
drop or refuse the pod fields of a newer Kubernetes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

TRAINER = "trainer"

# Volumes that belong to one pod.
# Other volumes may be the same folder on all nodes, even a hostPath if a network file system is mounted there.
_OWN_VOLUMES = {"emptyDir", "ephemeral", "configMap", "secret", "projected", "downwardAPI", "image"}
_FOR_SCRATCH = ("/dev/shm", "/tmp")  # noqa: S108 - of pods
_EMPTIED = {"emptyDir", "ephemeral"}  # writable, and deleted with the pod

_SUFFIXES = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_SUFFIXES |= {f"{letter}i": 1024.0**power for power, letter in enumerate("KMGTPE", start=1)}


def containers(template: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the template's containers; none if it is malformed."""
    pod = template.get("spec")
    return mappings(pod, "containers") if isinstance(pod, (dict, Mapping)) else []


def trainer_container(template: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the container named `trainer`, else the first; None if there is none."""
    listed = containers(template)
    for container in listed:  # a loop, because each plan calls this dozens of times
        if container.get("name") == TRAINER:
            return container
    return listed[0] if listed else None


def trainer_path(template: Mapping[str, Any]) -> tuple[str | int, ...]:
    trainer = trainer_container(template)
    index = next((i for i, c in enumerate(template["spec"]["containers"]) if c is trainer), 0)
    return ("spec", "template", "spec", "containers", index)


def mounts(template: Mapping[str, Any]) -> dict[str, bool]:
    """Return {mountPath: True if all nodes may see the same files there} for the trainer's mounts."""
    return {path: kind not in _OWN_VOLUMES for path, kind in _mounted(template).items()}


def files_outlive_a_pod(template: Mapping[str, Any], *, elsewhere: bool) -> bool:
    """True if the trainer's files outlive its pod. elsewhere: also files outside of volumes, as for a local process."""
    # /tmp is lost with any pod.
    # An emptyDir at /tmp is needed for a read-only root, and does not mean that checkpoints are lost.
    kinds = [kind for path, kind in _mounted(template).items() if path not in _FOR_SCRATCH]
    return not _EMPTIED.intersection(kinds) and (elsewhere or not _OWN_VOLUMES.issuperset(kinds))


def _mounted(template: Mapping[str, Any]) -> dict[str, str]:
    pod, trainer = mapping(template, "spec"), trainer_container(template) or {}
    kinds = {v.get("name"): next((k for k in v if k != "name"), "emptyDir") for v in mappings(pod, "volumes")}
    paths = ((str(m.get("mountPath", "")).rstrip("/"), m.get("name")) for m in mappings(trainer, "volumeMounts"))
    return {path: kinds.get(name, "emptyDir") for path, name in paths}


def mapping(source: Mapping[str, Any], name: str) -> dict[str, Any]:
    given = source.get(name)
    return given if isinstance(given, dict) else {}


def mappings(source: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    given = source.get(name)
    return [item for item in given if isinstance(item, dict)] if isinstance(given, list) else []


def restarts_of_the_kubelet(template: Mapping[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Return the fields that make the kubelet restart the trainer in its pod although restartPolicy is Never. These
    are the container's own policy and rules that restart all containers (Kubernetes 1.34, KEP-5307 and KEP-5532)."""
    pod, own = template.get("spec") or {}, trainer_container(template) or {}
    others = mappings(pod, "initContainers") if isinstance(pod, Mapping) else []
    of_all = (
        c
        for c in (*containers(template), *others)
        if c is not own and any(r.get("action") == "RestartAllContainers" for r in mappings(c, "restartPolicyRules"))
    )
    names = [name for name in ("restartPolicy", "restartPolicyRules") if own.get(name) not in (None, "Never")]
    return [*((own, name) for name in names), *((c, "restartPolicyRules") for c in of_all)]


def gpus(template: Mapping[str, Any]) -> int:
    """Return GPUs in the trainer's limits: any resource `*/gpu`, also shared, and MIG slices (nvidia.com/mig-…)."""
    return sum(int(quantity(value)) for name, value in limits(template).items() if is_gpu(name))


def claims_devices(template: Mapping[str, Any]) -> bool:
    """True if the trainer gets devices by a ResourceClaim. Only the claim shows how many, and of which kind."""
    return bool(mappings(mapping(trainer_container(template) or {}, "resources"), "claims"))


def is_gpu(resource: str) -> bool:
    """True for nvidia.com/gpu, amd.com/gpu, nvidia.com/mig-1g.10gb and, with time-slicing, nvidia.com/gpu.shared."""
    domain, _, kind = resource.partition("/")
    return bool(domain) and (kind in ("gpu", "gpu.shared") or kind.startswith("mig-"))


def cpus(template: Mapping[str, Any]) -> int | None:
    """Return whole CPUs in the trainer's limits, at least 1; None without a CPU limit."""
    limit = limits(template).get("cpu")
    return None if limit is None else max(1, math.floor(quantity(limit)))


def limits(template: Mapping[str, Any]) -> dict[str, Any]:
    resources = (trainer_container(template) or {}).get("resources")
    given = resources.get("limits") if isinstance(resources, Mapping) else None
    return dict(given) if isinstance(given, Mapping) else {}


def quantity(value: object) -> float:
    """Return a Kubernetes quantity as a number: 8, "500m", "2Gi", "1e3"; 0 for text that the API server refuses."""
    text = str(value).strip()
    for suffix in sorted(_SUFFIXES, key=len, reverse=True):
        if text.endswith(suffix):
            try:
                number = float(text.removesuffix(suffix) if suffix else text) * _SUFFIXES[suffix]
            except ValueError:
                continue
            return number if math.isfinite(number) else 0.0
    return 0.0


def command_of(template: dict[str, Any]) -> list[str]:
    trainer = trainer_container(template) or {}
    parts = [p for name in ("command", "args") if isinstance(listed := trainer.get(name), list) for p in listed]
    return [part for part in parts if isinstance(part, str)]
