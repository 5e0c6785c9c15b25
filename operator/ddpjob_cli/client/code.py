"""Code in a job without an image of one's own: a ConfigMap with the archive, which an init container unpacks.

Pure. A ConfigMap's files are flat and read-only; a program has folders, and scripts that write beside themselves.
"""

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
_RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def config_map(archive: Archive) -> Raw:
    """The ConfigMap of an archive; its name follows from its content, so two jobs with the same code share it."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{NAME}-{archive.digest}", "labels": {"app.kubernetes.io/managed-by": "ddpjob"}},
        "immutable": True,
        "binaryData": {ARCHIVE: base64.b64encode(archive.data).decode()},
    }


def into(job: Raw, archive: Archive) -> Raw:
    """A copy of a job whose trainer works in a folder with the code: its workingDir, else /code.

    Raises InputError where the template mounts something else there.
    """
    job = copy.deepcopy(job)
    template = job["spec"]["template"]
    pod, trainer = template["spec"], trainer_container(template)
    assert trainer is not None, "the job was validated"
    folder = trainer["workingDir"] = trainer.get("workingDir") or FOLDER
    mounted = [str(m.get("mountPath")).rstrip("/") for m in mappings(trainer, "volumeMounts")]
    if folder.rstrip("/") in mounted or any(v.get("name") == NAME for v in mappings(pod, "volumes")):
        raise InputError(
            f"--code: the job mounts a volume at {folder} already; leave --code away, or set another workingDir"
        )
    pod["volumes"] = [
        *(pod.get("volumes") or ()),
        {"name": NAME, "emptyDir": {}},
        {"name": ARCHIVE_VOLUME, "configMap": {"name": config_map(archive)["metadata"]["name"]}},
    ]
    trainer["volumeMounts"] = [*(trainer.get("volumeMounts") or ()), {"name": NAME, "mountPath": folder}]
    pod["initContainers"] = [_unpacker(trainer, folder), *(pod.get("initContainers") or ())]
    return job


def owned(body: Raw, owner: Raw) -> Raw:
    """A copy of an object that is deleted with its owner."""
    return {**body, "metadata": {**body["metadata"], "ownerReferences": [reference(owner)]}}


def reference(owner: Raw) -> Raw:
    """An ownerReference to an object that is there."""
    metadata = owner["metadata"]
    return {"apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": metadata["name"], "uid": metadata["uid"]}


def _unpacker(trainer: Raw, folder: str) -> Raw:
    """The trainer's image, which the node has to pull anyway, with the trainer's own limits but GPUs."""
    container = {
        "name": NAME,
        "image": trainer.get("image"),
        "command": ["tar", "-xzf", f"{ARCHIVE_FOLDER}/{ARCHIVE}", "-C", folder],
        "resources": _without_devices(trainer.get("resources") or {}),
        "securityContext": trainer.get("securityContext") or _RESTRICTED,
        "volumeMounts": [
            {"name": NAME, "mountPath": folder},
            {"name": ARCHIVE_VOLUME, "mountPath": ARCHIVE_FOLDER, "readOnly": True},
        ],
    }
    if "imagePullPolicy" in trainer:
        container["imagePullPolicy"] = trainer["imagePullPolicy"]
    return container


def _without_devices(resources: Raw) -> Raw:
    return {
        kind: {name: value for name, value in given.items() if "/" not in name}
        for kind, given in resources.items()
        if kind in ("limits", "requests") and isinstance(given, dict)
    }
