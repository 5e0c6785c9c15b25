"""Add code to a job, without I/O: a ConfigMap with an archive, which an init container unpacks. A mounted ConfigMap
would have no subfolders, and programs could not write files next to their scripts."""

from __future__ import annotations

import base64
import copy
from typing import Any

from ddpjob_cli.client.pack import Archive
from ddpjob_cli.manifest.yamlfile import InputError
from ddpjob_operator.job.podspec import mappings, trainer_container

Raw = dict[str, Any]

FOLDER = "/code"
ARCHIVE_FOLDER, ARCHIVE = "/ddpjob-code", "code.tar.gz"
NAME = "ddpjob-code"
ARCHIVE_VOLUME = f"{NAME}-archive"
_RESTRICTED = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
IMAGE = "ddpjob-trainer"
PLACEHOLDER = "my-image"  # written by `ddpjob init`, to be replaced


def for_cluster(job: Raw, script: str, below: str) -> None:
    """Adapt a job made for a script to clusters that enforce PodSecurity "restricted". Fields that are set stay."""
    pod, trainer = job["spec"]["template"]["spec"], _trainer(job)
    if trainer.get("image") == PLACEHOLDER:
        trainer["image"] = IMAGE
    # For an image without a tag the default is Always, which fails if the image is on the nodes but in no registry.
    trainer.setdefault("imagePullPolicy", "IfNotPresent")
    trainer["command"] = [below if word == script else word for word in trainer.get("command") or ()]
    pod.setdefault("securityContext", {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}})
    trainer.setdefault("securityContext", _RESTRICTED)
    if all(mount.get("mountPath") != "/tmp" for mount in mappings(trainer, "volumeMounts")):  # noqa: S108
        # The root file system is read-only, and torchrun writes its logs to /tmp.
        _mount(pod, trainer, "/tmp", {"name": "tmp", "emptyDir": {}})  # noqa: S108


def config_map(archive: Archive) -> Raw:
    """Return the ConfigMap of an archive, named by its content: two jobs with the same code share it."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{NAME}-{archive.digest}", "labels": {"app.kubernetes.io/managed-by": "ddpjob"}},
        "immutable": True,
        "binaryData": {ARCHIVE: base64.b64encode(archive.data).decode()},
    }


def into(job: Raw, archive: Archive) -> Raw:
    """Return a copy of a job whose trainer works in a folder with the code. Raise InputError if that is a volume."""
    job = copy.deepcopy(job)
    pod, trainer = job["spec"]["template"]["spec"], _trainer(job)
    folder = trainer["workingDir"] = trainer.get("workingDir") or FOLDER
    mounted = [str(m.get("mountPath")).rstrip("/") for m in mappings(trainer, "volumeMounts")]
    if folder.rstrip("/") in mounted or any(v.get("name") == NAME for v in mappings(pod, "volumes")):
        raise InputError(f"--code: the job mounts a volume at {folder} already; omit --code, or set another workingDir")
    _mount(pod, trainer, folder, {"name": NAME, "emptyDir": {}})
    pod["volumes"] += [{"name": ARCHIVE_VOLUME, "configMap": {"name": config_map(archive)["metadata"]["name"]}}]
    pod["initContainers"] = [_unpacker(trainer, folder), *(pod.get("initContainers") or ())]
    return job


def reference(owner: Raw) -> Raw:
    metadata = owner["metadata"]
    return {"apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": metadata["name"], "uid": metadata["uid"]}


def _trainer(job: Raw) -> Raw:
    trainer = trainer_container(job["spec"]["template"])
    assert trainer is not None, "the job was validated"
    return trainer


def _mount(pod: Raw, container: Raw, path: str, volume: Raw) -> None:
    pod["volumes"] = [*(pod.get("volumes") or ()), volume]
    container["volumeMounts"] = [
        *(container.get("volumeMounts") or ()), {"name": volume["name"], "mountPath": path}
    ]  # fmt: skip


def _unpacker(trainer: Raw, folder: str) -> Raw:
    """Return the init container: the trainer's image, which the node pulls anyway, and its limits except GPUs."""
    resources = {
        kind: {name: value for name, value in given.items() if "/" not in name}
        for kind, given in (trainer.get("resources") or {}).items()
        if kind in ("limits", "requests") and isinstance(given, dict)
    }
    container = {
        "name": NAME,
        "image": trainer.get("image"),
        "command": ["tar", "-xzf", f"{ARCHIVE_FOLDER}/{ARCHIVE}", "-C", folder],
        "resources": resources,
        "securityContext": trainer.get("securityContext") or _RESTRICTED,
        "volumeMounts": [
            {"name": NAME, "mountPath": folder},
            {"name": ARCHIVE_VOLUME, "mountPath": ARCHIVE_FOLDER, "readOnly": True},
        ],
    }
    if "imagePullPolicy" in trainer:
        container["imagePullPolicy"] = trainer["imagePullPolicy"]
    return container
