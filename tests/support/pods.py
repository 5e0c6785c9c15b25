"""Jobs on real pods: a namespace under PodSecurity "restricted", and small trainers that need no torch."""

import contextlib
import json
import os
import subprocess
import time
import urllib.error
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from clusters import JOBS, kubectl, read, until

ROOT = Path(__file__).parents[2]
OPERATOR_IMAGE = os.environ.get("DDPJOB_OPERATOR_IMAGE", "ddpjob-operator:0.1.0")
TRAINER_IMAGE = os.environ.get("DDPJOB_TRAINER_IMAGE", "ddpjob-trainer")
RELEASE = "ddpjob"
LABEL_JOB = "training.ddpjob.io/job"
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}


# Script that kills all processes that have a rank, except the one that runs this script.
_KILL = """
import glob, os
for path in glob.glob("/proc/[0-9]*/environ"):
    pid = int(path.split("/")[2])
    try:
        has_rank = b"\\0RANK=" in b"\\0" + open(path, "rb").read()
    except OSError:
        continue
    if has_rank and pid != os.getpid():
        os.kill(pid, 9)
"""


# Script: ranks connect to rank 0 like torch's rendezvous, but without torch. Needs `os`, `socket`, `time` and `rank`.
MEET = """
where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])

def meet():
    if rank == 0:
        return socket.create_server(("", where[1])).accept()[0]
    while True:
        try:
            return socket.create_connection(where, 1)
        except OSError:
            time.sleep(0.1)

peer = meet()
"""


def helm(*arguments: str) -> str:
    done = subprocess.run(["helm", *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"helm {' '.join(arguments)}: {done.stderr}"
    return done.stdout


class Space:
    """A namespace under PodSecurity "restricted"."""

    def __init__(self, prefix: str) -> None:
        self.name = f"{prefix}-{uuid.uuid4().hex[:6]}"
        labels = {"metadata": {"name": self.name, "labels": RESTRICTED}}
        kubectl("create", "-f", "-", stdin={"apiVersion": "v1", "kind": "Namespace", **labels})
        # Pods are refused until the controller has created the service account; they are then created late.
        until(lambda: self.kubectl("get", "serviceaccount", "default", "--ignore-not-found"), "a service account")

    def kubectl(self, *arguments: str, stdin: object = None, check: bool = True) -> str:
        return kubectl("-n", self.name, *arguments, stdin=stdin, check=check)

    def get(self, *what: str) -> Any:
        return json.loads(self.kubectl("get", *what, "-o", "json"))

    def status(self, name: str) -> dict[str, Any]:
        found = read(f"{JOBS.format(self.name)}/{name}")
        return json.loads(found).get("status") or {} if found else {}

    def reaches(self, name: str, state: str, seconds: float = 120) -> dict[str, Any]:
        return self.waits(name, lambda s: s.get("state") == state, f"{name} is {state}", seconds)

    def ends(self, name: str, seconds: float = 240) -> dict[str, Any]:
        """Return the status of a job when it has ended, successfully or not."""
        return self.waits(name, lambda s: s.get("state") in ("Succeeded", "Failed"), f"{name} ends", seconds)

    def waits(self, name: str, true: Callable[[dict[str, Any]], bool], what: str, seconds: float) -> dict[str, Any]:
        """Return the status of a job as soon as the predicate is true. On a time-out fail with the last status."""
        end = time.monotonic() + seconds
        while not true(status := self.status(name)):
            if time.monotonic() > end:
                pytest.fail(f"not within {seconds:g} s: {what}, but {json.dumps(status, indent=1)}")
            time.sleep(0.1)
        return status

    def apply(self, *bodies: dict[str, Any]) -> None:
        self.kubectl("apply", "-f", "-", stdin={"apiVersion": "v1", "kind": "List", "items": [*bodies]})

    def events(self, name: str) -> list[tuple[str, str, str]]:
        """Return (type, reason, message) of each event of a job, in order."""
        found = self.get("events", f"--field-selector=involvedObject.name={name}")["items"]
        ordered = sorted(found, key=lambda e: int(e["metadata"]["resourceVersion"]))
        return [(e["type"], e["reason"], e["message"]) for e in ordered]

    def pods(self, name: str) -> dict[str, dict[str, Any]]:
        found = json.loads(read(f"/api/v1/namespaces/{self.name}/pods?labelSelector={LABEL_JOB}%3D{name}") or "{}")[
            "items"
        ]
        return {pod["metadata"]["name"]: pod for pod in found}

    def node_of(self, pod: str) -> str:
        """Return the node of a pod, or ""."""
        return str(self.get("pod", pod)["spec"].get("nodeName", ""))

    def keeps(self, name: str, *pods: str) -> None:
        """Wait until a job has exactly these pods. The next attempt begins when the old containers have ended, but
        their pods are gone a moment later."""
        until(lambda: sorted(self.pods(name)) == sorted(pods), f"{', '.join(pods)} are the pods of {name}", 60)

    def kill(self, pod: str) -> None:
        """Send SIGKILL to the processes of a rank. The kernel protects the first process of a pod, so the rank must be
        below torchrun, or below the pod's pause container with shareProcessNamespace."""
        # The output may be lost: the runtime may end this process with the killed container.
        said = self.kubectl("exec", pod, "--", "python", "-c", _KILL, check=False)
        assert "Error from server" not in said, said

    @contextlib.contextmanager
    def following(self, pod: str) -> Iterator[Callable[[], str]]:
        """Yield a function that returns all output of a pod, even if the pod is deleted soon."""
        command = ["kubectl", "-n", self.name, "logs", "--follow", pod]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            try:
                yield lambda: process.communicate(timeout=30)[0]
            finally:
                process.kill()

    def leaves_nothing(self) -> None:
        """Delete the jobs, and check that no object stays."""
        self.kubectl("delete", "ddp", "--all", "--wait=false", check=False)
        left = "pods,services,ddpjobs"
        until(lambda: "No resources found" in self.kubectl("get", left), f"{self.name} is empty", 90)

    def remove(self) -> None:
        kubectl("delete", "namespace", self.name, "--wait=false", "--ignore-not-found", check=False)


def trainer(body: dict[str, Any]) -> dict[str, Any]:
    """Return the trainer's container of a job."""
    found: dict[str, Any] = body["spec"]["template"]["spec"]["containers"][0]
    return found


def job(name: str, script: str = "", *, resources: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    """Return a job of two nodes whose trainer runs a Python script that need not import torch."""
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


def result(space: Space, pod: str) -> dict[str, Any]:
    """Return the last line of an example: its accuracy and the hash of all parameters."""
    log = space.kubectl("logs", pod)
    line = next(line for line in log.splitlines() if '"event": "done"' in line)
    found: dict[str, Any] = json.loads(line[line.index("{") :])
    return found


def charged(status: dict[str, Any]) -> tuple[int, int, int]:
    """Return the restarts counted against the budgets for application, infrastructure and stall."""
    restarts = status["restarts"]
    return (restarts["application"], restarts["infrastructure"], restarts["stall"])


def says(space: Space, pod: str, word: str) -> None:
    """Wait until the log of a pod contains `word`."""

    def said() -> bool:
        try:
            return word.encode() in (read(f"/api/v1/namespaces/{space.name}/pods/{pod}/log") or b"")
        except urllib.error.HTTPError:
            return False  # the container does not exist yet

    until(said, f"{pod} says {word}", 60, every=0.2)


def uids(space: Space, name: str) -> dict[str, str]:
    """Return the uids of a job's pods, by name."""
    return {n: p["metadata"]["uid"] for n, p in space.pods(name).items()}


class Gate:
    """Decides when new pods of a job find a node: only while the gate is open."""

    def __init__(self, space: Space, nodes: list[str]) -> None:
        self._space, self._nodes, self._key = space, nodes, f"ddpjob-test/{space.name}"

    def set(self, value: str) -> None:
        """value: "open" or "closed"."""
        self._space.kubectl("label", "nodes", *self._nodes, f"{self._key}={value}", "--overwrite")

    def remove(self) -> None:
        self._space.kubectl("label", "nodes", *self._nodes, f"{self._key}-", check=False)

    def before(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the job with pods that wait before the gate."""
        body["spec"]["template"]["spec"]["nodeSelector"] = {self._key: "open"}
        return body


def spread(body: dict[str, Any]) -> dict[str, Any]:
    """Put the pods of a job on different nodes, if there are at least two."""
    body["spec"]["template"]["spec"]["topologySpreadConstraints"] = [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": {"training.ddpjob.io/job": body["metadata"]["name"]}},
        }
    ]
    return body
