"""A job that was made for a script, as a cluster that enforces PodSecurity "restricted" takes it."""

from __future__ import annotations

from typing import Any

from ddpjob_operator.job.podspec import mappings, trainer_container

IMAGE = "ddpjob-trainer"
PLACEHOLDER = "my-image"  # what `ddpjob init` writes for people to replace
_SECURITY = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
_TMP = "tmp"


def for_cluster(job: dict[str, Any], script: str, below: str) -> None:
    """Change a job in place: its script as it is named below the folder of the code, an image, no privileges.

    What is set stays.
    """
    pod = job["spec"]["template"]["spec"]
    trainer = trainer_container(job["spec"]["template"])
    assert trainer is not None, "the job was validated"
    if trainer.get("image") == PLACEHOLDER:
        trainer["image"] = IMAGE
    # Without a tag the default is Always, and an image that was loaded onto the nodes is in no registry.
    trainer.setdefault("imagePullPolicy", "IfNotPresent")
    trainer["command"] = [below if word == script else word for word in trainer.get("command") or ()]
    pod.setdefault("securityContext", {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}})
    trainer.setdefault("securityContext", _SECURITY)
    if all(mount.get("mountPath") != "/tmp" for mount in mappings(trainer, "volumeMounts")):  # noqa: S108
        # The root is read-only, and torchrun keeps its logs there.
        trainer["volumeMounts"] = [*(trainer.get("volumeMounts") or ()), {"name": _TMP, "mountPath": "/tmp"}]  # noqa: S108
        pod["volumes"] = [*(pod.get("volumes") or ()), {"name": _TMP, "emptyDir": {}}]
