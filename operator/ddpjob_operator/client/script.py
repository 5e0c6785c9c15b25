"""A script as a DDPJob for a cluster that enforces PodSecurity "restricted"."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from ddpjob_operator.job import api

IMAGE = "ddpjob-trainer"


def document(
    script: str, words: Sequence[str], *, nodes: int = 1, nproc: int | None = None, gpus: int = 0, image: str = IMAGE
) -> dict[str, Any]:
    """The job that starts a script by torchrun. script: its path below the folder of the code; gpus: on each node."""
    trainer: dict[str, Any] = {
        "name": "trainer",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["torchrun", script, *words],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],  # noqa: S108 - where torchrun keeps its logs
    }
    if gpus:
        trainer["resources"] = {"limits": {"nvidia.com/gpu": gpus}}
    pod = {
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [trainer],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }
    spec: dict[str, Any] = {"nodes": nodes, "template": {"spec": pod}}
    if nproc is not None:
        spec["nprocPerNode"] = nproc
    return {"apiVersion": api.API_VERSION, "kind": api.KIND, "metadata": {"name": name_of(script)}, "spec": spec}


def name_of(script: str) -> str:
    """train_lm.py → train-lm: a name that a job may have."""
    name = re.sub(r"[^a-z0-9]+", "-", PurePosixPath(script).stem.lower()).strip("-")
    return (name if name[:1].isalpha() else f"job-{name}".rstrip("-"))[: api.NAME_LENGTH_MAX].rstrip("-")
