"""The token with which a trainer reports progress, as a file in its pod.

It is valid for one audience and bound to the pod: only the operator's receiver accepts it, and only while the pod
exists. The kubelet requests it, so neither a Secret nor a right of the operator is needed.
"""

from __future__ import annotations

from typing import Any

from ddpjob_operator.job import api

AUDIENCE = api.GROUP
NAME = "ddpjob-token"
MOUNT = f"/var/run/secrets/{api.GROUP}"
TOKEN_FILE = f"{MOUNT}/token"
# Seconds; the minimum allowed is 600. The kubelet renews the token in place at 80 %, and senders read the file again.
EXPIRATION_SECONDS = 3600


def add_token(spec: dict[str, Any], trainer: dict[str, Any]) -> None:
    """Mount the token into the trainer of a pod spec, unless the user mounts something there."""
    mounts = trainer.get("volumeMounts") or []
    volumes = spec.get("volumes") or []
    taken = any(str(mount.get("mountPath", "")).rstrip("/") == MOUNT for mount in mounts)
    if taken or any(volume.get("name") == NAME for volume in volumes):
        return
    token = {"audience": AUDIENCE, "expirationSeconds": EXPIRATION_SECONDS, "path": "token"}
    spec["volumes"] = [*volumes, {"name": NAME, "projected": {"sources": [{"serviceAccountToken": token}]}}]
    trainer["volumeMounts"] = [*mounts, {"name": NAME, "mountPath": MOUNT, "readOnly": True}]


def environment(url: str, token_file: str = TOKEN_FILE) -> dict[str, str]:
    """Return the variables with which the trainer library and Hugging Face's Trainer find the receiver.

    KUBEFLOW_TRAINER_SERVER_CA_CERT is not set: the receiver speaks plain HTTP.
    """
    return {
        "DDPJOB_STATUS_URL": url,
        "DDPJOB_STATUS_TOKEN_FILE": token_file,
        "KUBEFLOW_TRAINER_SERVER_URL": url,
        "KUBEFLOW_TRAINER_SERVER_TOKEN": token_file,
    }
