"""The operator as a user installs it: by Helm, from its image, in a cluster that really runs pods.

Any cluster with two nodes will do. It must have the images, or be able to pull them:

    DDPJOB_OPERATOR_IMAGE   default ddpjob-operator:0.1.0
    DDPJOB_TRAINER_IMAGE    default ddpjob-trainer
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clusters import CRD, kubectl, skip_without_cluster, until

ROOT = Path(__file__).parents[2]
OPERATOR_IMAGE = os.environ.get("DDPJOB_OPERATOR_IMAGE", "ddpjob-operator:0.1.0")
TRAINER_IMAGE = os.environ.get("DDPJOB_TRAINER_IMAGE", "ddpjob-trainer")
RELEASE = "ddpjob"
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One operator serves them all, so they run in one process."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("cluster"))


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


@pytest.fixture(scope="session")
def nodes() -> list[str]:
    """The nodes that run pods; fake ones do not."""
    skip_without_cluster()
    if not shutil.which("helm"):
        pytest.skip("helm is not on the PATH")
    items = json.loads(kubectl("get", "nodes", "-o", "json"))["items"]
    real = [n["metadata"]["name"] for n in items if "kwok.x-k8s.io/node" not in n["metadata"].get("annotations", {})]
    if len(real) < 2:
        pytest.skip(f"these tests want two nodes that run pods, the cluster has {len(real)}")
    return real


@pytest.fixture(scope="session")
def operator(nodes: list[str]) -> Iterator[str]:
    """The operator, installed by Helm; its namespace."""
    had_crd = "NotFound" not in kubectl("get", "-f", str(CRD), check=False)
    space = Space("ddpjob-system")
    repository, _, tag = OPERATOR_IMAGE.rpartition(":")
    image = ["--set", f"image.repository={repository}", "--set-string", f"image.tag={tag}"]
    try:
        chart = str(ROOT / "charts/ddpjob-operator")
        helm("install", RELEASE, chart, "--namespace", space.name, "--wait", "--timeout", "120s", *image)
        yield space.name
        print(space.kubectl("logs", "-l", "app.kubernetes.io/name=ddpjob-operator", "--tail=200", check=False))
    finally:
        helm("uninstall", RELEASE, "--namespace", space.name, "--ignore-not-found")
        space.remove()
        if not had_crd:
            kubectl("delete", "-f", str(CRD), "--ignore-not-found", check=False)


@pytest.fixture
def space(operator: str) -> Iterator[Space]:
    """A namespace for the jobs of a test, removed afterwards."""
    made = Space("ddpjob-jobs")
    try:
        yield made
    finally:
        made.kubectl("delete", "ddp", "--all", "--wait=false", check=False)
        made.remove()
