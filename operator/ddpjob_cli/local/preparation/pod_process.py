"""Translate a pod into a process on this machine, and name the fields that a local process cannot have. All nodes are
checked before any is started, so that a run never fails halfway because of a field."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddpjob_cli.local.preparation import suggestions
from ddpjob_operator.job.launch import command
from ddpjob_operator.job.podspec import is_gpu, limits, trainer_container, trainer_path
from ddpjob_operator.job.validation import Path as FieldPath
from ddpjob_operator.job.validation import Problem
from ddpjob_operator.pods.environment import user_environment

Body = Mapping[str, Any]

LOOPBACK = "127.0.0.1"

# Fields that change the training and have no local counterpart: refused without --allow-unsupported.
_UNSUPPORTED_POD = {
    "initContainers": "init containers do not run locally",
    "hostAliases": "host names are resolved by this machine",
    "dnsConfig": "host names are resolved by this machine",
    "resourceClaims": "no scheduler allocates devices locally",
}
_UNSUPPORTED_CONTAINER = {
    "envFrom": "there are no Secrets or ConfigMaps locally",
    "lifecycle": "hooks do not run locally",
    "volumeDevices": "there are no block volumes locally",
}
# Fields that choose a pod's machine, user or rights. They have no effect locally, which is reported once.
_IGNORED_POD = (
    "affinity automountServiceAccountToken dnsPolicy hostIPC hostNetwork hostPID imagePullSecrets nodeName "
    "nodeSelector priorityClassName runtimeClassName schedulerName securityContext serviceAccountName tolerations "
    "topologySpreadConstraints"
).split()
_IGNORED_CONTAINER = "image livenessProbe ports readinessProbe resources securityContext startupProbe".split()

# If `ddpjob run` is called inside a training, the outer job's variables must not reach the ranks.
_NOT_INHERITED = re.compile(
    r"^(MASTER_ADDR|MASTER_PORT|NNODES|NODE_RANK|NPROC_PER_NODE|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK"
    r"|GROUP_WORLD_SIZE|ROLE_\w+|PET_\w+|TORCHELASTIC_\w+|DDPJOB_\w+|KUBEFLOW_TRAINER_\w+)$"
)
_REFERENCE = re.compile(r"\$\$|\$\(([-._a-zA-Z][-._a-zA-Z0-9]*)\)")


_INSTALL = {
    **dict.fromkeys(
        ["torchrun", "ddprun"],
        ": install PyTorch (pip install 'ddpjob[trainer]'), or activate the environment that has it",
    ),
    **dict.fromkeys(
        ["mpirun", "mpiexec"], ": install MPI, or leave it out and set spec.nprocPerNode with torchrun or ddprun"
    ),
}


@dataclass(frozen=True)
class Terminal:
    """The rank that a debugger runs in, and its terminal."""

    rank: int
    device: str
    """Path such as /dev/pts/3."""


@dataclass(frozen=True)
class Slot:
    """Where a node's process runs: working folder, folder for emptyDir volumes, environment, GPUs."""

    cwd: Path
    volumes: Path
    environment: Mapping[str, str]
    gpus: tuple[str, ...] | None = None
    """The GPUs of this node; None keeps the caller's CUDA_VISIBLE_DEVICES."""
    file_folder: Path | None = None
    """The folder of the YAML, if the script was searched there before."""
    terminal: Terminal | None = None


@dataclass
class ProcessSpec:
    argv: list[str]
    env: dict[str, str]
    cwd: str
    folders: list[Path] = field(default_factory=list)


def process(pod: Body, slot: Slot) -> ProcessSpec:
    """Return the process for a pod. The caller has checked `problems`, unless --allow-unsupported is given."""
    spec = pod["spec"]
    trainer = trainer_container(pod) or {}
    own = _environment(pod, trainer)
    mounts = _mounts(spec, trainer, slot, own)
    own = {name: _mounted(value, mounts) for name, value in own.items()}
    inherited = {k: v for k, v in slot.environment.items() if not _NOT_INHERITED.match(k)}
    env = {**inherited, **own}
    env["PATH"] = search_path(env.get("PATH", os.defpath))
    if slot.gpus is not None:
        env["CUDA_VISIBLE_DEVICES"] = own.get("CUDA_VISIBLE_DEVICES", ",".join(slot.gpus))
    words = [*(trainer.get("command") or ()), *(trainer.get("args") or ())]
    argv = [_mounted(expand(str(word), own), mounts) for word in words]
    cwd = _mounted(str(trainer.get("workingDir") or slot.cwd), mounts)
    folders = [folder for _, folder, create in mounts if create]
    folder_here = slot.cwd / cwd
    # A container runtime creates a missing working directory. A local run does so only inside the job's own folders.
    folders += [folder_here] if any(folder_here.is_relative_to(folder) for folder in folders) else []
    return ProcessSpec(argv, env, str(folder_here), folders)


def problems(pod: Body) -> Iterator[Problem]:
    """Yield the fields of a pod that a local process cannot have."""
    spec = pod["spec"]
    base: FieldPath = ("spec", "template", "spec")
    trainer, at = trainer_container(pod) or {}, trainer_path(pod)
    for fields, path, unsupported in ((spec, base, _UNSUPPORTED_POD), (trainer, at, _UNSUPPORTED_CONTAINER)):
        for name, why in unsupported.items():
            if fields.get(name):
                yield Problem((*path, name), f"{why}. Remove it, or run with --allow-unsupported to ignore it.")
    for i, other in enumerate(spec["containers"]):
        if other is not trainer:
            text = f"the container {other.get('name')} does not run locally, only the trainer does"
            yield Problem((*base, "containers", i), f"{text}. Run with --allow-unsupported to ignore it.")
    yield from _unsupported_variables(trainer, at)
    for i, volume in enumerate(spec.get("volumes") or ()):
        kind = _kind_of(volume)
        if kind not in ("emptyDir", "hostPath"):
            text = f"{volume.get('name')}: a {kind} volume does not exist locally, only emptyDir and hostPath do"
            yield Problem((*base, "volumes", i), f"{text}. Run with --allow-unsupported to ignore it.")


def start_problems(pod: Body, slot: Slot) -> Iterator[Problem]:
    """Yield the problems that would prevent the process from starting, even with --allow-unsupported."""
    trainer, at = trainer_container(pod) or {}, trainer_path(pod)
    planned = process(pod, slot)
    if not trainer.get("command"):
        what = "args and no command" if trainer.get("args") else "no command"
        yield Problem(at, f"has {what}, and the image's command is not used locally. Set command.")
        return
    yield from _missing_folders(pod["spec"])
    yield from _wrong_mounts(pod["spec"], trainer, at, _environment(pod, trainer))
    made = any(Path(planned.cwd).is_relative_to(folder) for folder in planned.folders)
    if not made and not os.path.isdir(planned.cwd):  # Path.is_dir() raises for a name of 1,000 characters
        yield Problem((*at, "workingDir"), f"there is no folder {planned.cwd} on this machine")
        return
    program, script = planned.argv[0], command.script_of(planned.argv)
    if shutil.which(program, path=planned.env["PATH"]) is None and not _is_file(program, planned.cwd):
        hint = _INSTALL.get(program) or suggestions.program(program)
        if " " in program:
            hint = f": it is {len(program.split())} words. Write [{', '.join(program.split())}]"
        yield Problem((*at, "command"), f'"{program}" is not a program on this machine{hint}')
    elif script is not None and not made and not os.path.exists(os.path.join(planned.cwd, script)):
        hint = suggestions.file(script, planned.cwd)
        if os.path.isabs(script):
            hint = ". If the image has it, name this machine's: --set 'spec.template.spec.containers[0].command=[…]'"
        searched = dict.fromkeys(str(folder) for folder in (slot.file_folder, planned.cwd) if folder is not None)
        yield Problem((*at, "command"), f"there is no file {script} in {' or '.join(searched)}{hint}")


def ignored(pod: Body) -> list[str]:
    """Return fields that the user set and that have no effect locally."""
    trainer = trainer_container(pod) or {}
    names = [name for name in _IGNORED_POD if pod["spec"].get(name)]
    devices = [n for n in limits(pod) if n not in ("cpu", "memory") and not is_gpu(n)]
    return sorted({*names, *devices, *(name for name in _IGNORED_CONTAINER if trainer.get(name))})


def not_kept(pod: Body) -> list[str]:
    """Return paths of emptyDir mounts, whose files are lost with the run, except /tmp and /dev/shm."""
    trainer, volumes = trainer_container(pod) or {}, {v.get("name"): v for v in pod["spec"].get("volumes") or ()}
    own = [m for m in trainer.get("volumeMounts") or () if _kind_of(volumes.get(m.get("name"), {})) == "emptyDir"]
    paths = [str(mount.get("mountPath", "")).rstrip("/") for mount in own]
    return [path for path in paths if path not in ("/dev/shm", "/tmp", "")]  # noqa: S108


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Expand $(VAR) as the kubelet does: $$ becomes $, and unknown names stay."""

    def replacement(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else variables.get(match[1], match[0])

    return _REFERENCE.sub(replacement, text)


def search_path(path: str) -> str:
    """Add the folder of this interpreter to PATH. It comes first if it has torchrun, as in an activated environment, so
    that `torchrun` and `python` are found there; else last."""
    own = os.path.dirname(sys.executable)
    parts = [p for p in path.split(os.pathsep) if p != own]
    has_torch = os.access(os.path.join(own, "torchrun"), os.X_OK)
    return os.pathsep.join([own, *parts] if has_torch else [*parts, own])


def _environment(pod: Body, trainer: Mapping[str, Any]) -> dict[str, str]:
    own: dict[str, str] = {}
    for entry in user_environment(dict(trainer)):
        value = entry.get("value")
        if value is None and "valueFrom" in entry:
            value = _from_field(pod, entry["valueFrom"])
            if value is None:
                continue
        own[str(entry["name"])] = expand("" if value is None else str(value), own)
    return own


def _from_field(pod: Body, source: Any) -> str | None:
    field = source.get("fieldRef") if isinstance(source, Mapping) else None
    path = str(field.get("fieldPath", "")) if isinstance(field, Mapping) else ""
    metadata = pod["metadata"]
    known = {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata["namespace"],
        "metadata.uid": metadata["name"],
        "spec.nodeName": os.uname().nodename,
        "status.podIP": LOOPBACK,
        "status.hostIP": LOOPBACK,
    }
    keyed = re.match(r"^metadata\.(labels|annotations)\['(.+)'\]$", path)
    if keyed:
        return str((metadata.get(keyed[1]) or {}).get(keyed[2], ""))
    return known.get(path)


def _unsupported_variables(trainer: Mapping[str, Any], at: FieldPath) -> Iterator[Problem]:
    for i, entry in enumerate(trainer.get("env") or ()):
        source = entry.get("valueFrom") if isinstance(entry, Mapping) else None
        if not source:
            continue
        kind = next(iter(source), "")
        optional = isinstance(source.get(kind), Mapping) and source[kind].get("optional")
        if kind != "fieldRef" and not optional:
            name = entry.get("name")
            text = f"{name} comes from a {kind}, which does not exist locally. Set it with --env {name}=…"
            yield Problem((*at, "env", i), text)


def _missing_folders(spec: Body) -> Iterator[Problem]:
    for i, volume in enumerate(spec.get("volumes") or ()):
        source = volume.get("hostPath")
        if isinstance(source, Mapping) and source.get("type") != "DirectoryOrCreate":
            path = str(source.get("path", ""))
            if not os.path.exists(path):
                text = f"{path} does not exist on this machine. Create it, or set type: DirectoryOrCreate."
                yield Problem(("spec", "template", "spec", "volumes", i, "hostPath"), text)


def _sub_path(mount: Mapping[str, Any], variables: Mapping[str, str]) -> str:
    return str(mount.get("subPath") or "") or expand(str(mount.get("subPathExpr") or ""), variables)


def _wrong_mounts(
    spec: Body, trainer: Mapping[str, Any], at: FieldPath, variables: Mapping[str, str]
) -> Iterator[Problem]:
    """Yield mounts that the API server or the kubelet would refuse, because they would lead out of our folders."""
    for i, volume in enumerate(spec.get("volumes") or ()):
        if "/" in str(volume.get("name")) or volume.get("name") in (None, "", ".", ".."):
            text = f"{volume.get('name')} is not a volume name: use lower-case letters, digits and -"
            yield Problem(("spec", "template", "spec", "volumes", i, "name"), text)
    for i, mount in enumerate(trainer.get("volumeMounts") or ()):
        path = _sub_path(mount, variables)
        if path.startswith("/") or ".." in path.split("/"):
            name = "subPath" if mount.get("subPath") else "subPathExpr"
            yield Problem((*at, "volumeMounts", i, name), f"{path} must be a path within the volume, without ..")


def _mounts(
    spec: Body, trainer: Mapping[str, Any], slot: Slot, variables: Mapping[str, str]
) -> list[tuple[str, Path, bool]]:
    """Return (path in the container, local folder, True to create the folder), the longest path first."""
    volumes = {v.get("name"): v for v in spec.get("volumes") or ()}
    mounts = []
    for mount in trainer.get("volumeMounts") or ():
        volume, path = volumes.get(mount.get("name"), {}), str(mount.get("mountPath", "")).rstrip("/")
        kind = _kind_of(volume)
        # Skip /dev/shm, which the machine has, and /tmp: paths of the caller's folders may be below it.
        if path in ("/dev/shm", "/tmp") or kind not in ("emptyDir", "hostPath") or not path:  # noqa: S108
            continue
        source = volume.get(kind) or {}
        folder = slot.volumes / str(volume["name"]) if kind == "emptyDir" else Path(str(source.get("path", path)))
        create = kind == "emptyDir" or source.get("type") == "DirectoryOrCreate"
        mounts.append((path, folder / _sub_path(mount, variables), create))
    return sorted(mounts, key=lambda m: -len(m[0]))


def _mounted(text: str, mounts: list[tuple[str, Path, bool]]) -> str:
    """Replace paths of mounts by local folders, in one pass, because a folder's path may contain a mount's path."""
    if not mounts:
        return text
    folders = {path: str(folder) for path, folder, _ in mounts}
    pattern = "|".join(re.escape(path) for path in folders)
    return re.sub(rf"(?:(?<![\w./-])|(?<=file://))({pattern})(?=$|[/:,;'\"\s])", lambda m: folders[m[1]], text)


def _kind_of(volume: Mapping[str, Any]) -> str:
    """Return the kind of a volume; emptyDir if it has none, as the API server assumes."""
    return next((k for k, source in volume.items() if k != "name" and source is not None), "emptyDir")


def _is_file(program: str, cwd: str) -> bool:
    path = os.path.join(cwd, program)
    return "/" in program and os.path.isfile(path) and os.access(path, os.X_OK)
