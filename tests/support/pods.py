"""Jobs on real pods: a namespace under PodSecurity "restricted", and small trainers that need no torch."""

from __future__ import annotations

import json
import os
import subprocess
import uuid
from pathlib import Path
from typing import Any

from clusters import kubectl, until

ROOT = Path(__file__).parents[2]
OPERATOR_IMAGE = os.environ.get("DDPJOB_OPERATOR_IMAGE", "ddpjob-operator:0.1.0")
TRAINER_IMAGE = os.environ.get("DDPJOB_TRAINER_IMAGE", "ddpjob-trainer")
RELEASE = "ddpjob"
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}


def helm(*arguments: str) -> str:
    done = subprocess.run(["helm", *arguments], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, f"helm {' '.join(arguments)}: {done.stderr}"
    return done.stdout


class Space:
    """A namespace under PodSecurity "restricted"."""

    def __init__(self, prefix: str) -> None:
        self.name = f"{prefix}-{uuid.uuid4().hex[:6]}"
        labels = {"metadata": {"name": self.name, "labels": RESTRICTED}}
        kubectl("create", "-f", "-", stdin={"apiVersion": "v1", "kind": "Namespace", **labels})

    def kubectl(self, *arguments: str, stdin: object = None, check: bool = True) -> str:
        return kubectl("-n", self.name, *arguments, stdin=stdin, check=check)

    def get(self, *what: str) -> Any:
        return json.loads(self.kubectl("get", *what, "-o", "json"))

    def status(self, name: str) -> dict[str, Any]:
        found = self.kubectl("get", "ddp", name, "--ignore-not-found", "-o", "json")
        return json.loads(found).get("status") or {} if found.strip() else {}

    def reaches(self, name: str, state: str, seconds: float = 90) -> dict[str, Any]:
        until(lambda: self.status(name).get("state") == state, f"{name} is {state}, is {self.status(name)}", seconds)
        return self.status(name)

    def pods(self, name: str) -> dict[str, dict[str, Any]]:
        found = self.get("pods", "-l", f"training.ddpjob.io/job={name}")["items"]
        return {pod["metadata"]["name"]: pod for pod in found}

    def remove(self) -> None:
        kubectl("delete", "namespace", self.name, "--wait=false", "--ignore-not-found", check=False)


def job(name: str, script: str = "", *, resources: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    """A job of two nodes whose trainer runs a Python script that need not import torch."""
    trainer = {
        "name": "trainer",
        "image": TRAINER_IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "-u", "-c", script],
        "resources": resources or {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "128Mi"}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    pod = {
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "terminationGracePeriodSeconds": 5,
        "containers": [trainer],
    }
    return {
        "apiVersion": "training.ddpjob.io/v1alpha1",
        "kind": "DDPJob",
        "metadata": {"name": name},
        "spec": {"nodes": 2, "template": {"spec": pod}} | spec,
    }
