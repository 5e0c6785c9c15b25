"""A namespace in a real cluster, an operator process that watches it, and kubectl to see what users see.

Any cluster will do. The pods of these tests never get a node, because they request one that does not exist. The test
writes their status as a kubelet would."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest
import warm
from faulty_api import OWN_TOKEN, FaultyApi
from patient import answered
from shared import made_once

from ddpjob_operator.job import api as types
from ddpjob_operator.kube.api.client import login

CRD = Path(__file__).parents[2] / "charts/ddpjob-operator/crds/ddpjobs.training.ddpjob.io.yaml"
JOBS = f"/apis/{types.GROUP}/{types.VERSION}/namespaces/{{}}/{types.PLURAL}"
# Longer than 30 s, within which the cluster's garbage collector detects a new CRD.
WAIT_SECONDS = 60.0
ANSWERS_WITHIN_SECONDS = 30.0
MERGE = "application/merge-patch+json"
APPLY = "application/apply-patch+yaml"
METADATA = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
IMPORTS = "from ddpjob_operator.kube.main import main; import ddpjob_operator.kube.watch.reflector as reflector"
T = TypeVar("T")


def until(look: Callable[[], T | None], what: str, seconds: float = WAIT_SECONDS, every: float = 0.05) -> T:
    """Return what `look` returns once it is true. Fail with `what` after `seconds`. every: seconds between calls."""
    end = time.monotonic() + seconds
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > end:
            pytest.fail(f"not within {seconds:g} s: {what}")
        time.sleep(every)


def kubectl(*arguments: str, stdin: object = None, check: bool = True) -> str:
    """Run kubectl; return stdout and stderr as one text. If `check`, assert that it succeeds."""
    done = subprocess.run(
        ["kubectl", "--request-timeout=20s", *arguments],
        input=None if stdin is None else json.dumps(stdin),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0 or not check, (
        f"kubectl {' '.join(arguments)}: exit code {done.returncode}: {done.stdout}"
    )
    return done.stdout


def read(path: str) -> bytes | None:
    """Return the object at a path of the API server; None if there is none. For frequent reads: kubectl takes 0.2 s of
    CPU."""
    server, headers, context = _access(os.environ["KUBECONFIG"])
    try:
        return answered(urllib.request.Request(server + path, headers=headers), 20, context)
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise


@functools.cache
def _access(_kubeconfig: str) -> tuple[str, dict[str, str], Any]:
    info = login()
    return info.server.rstrip("/"), dict(info.as_http_headers()), info.as_ssl_context()


def skip_without_cluster() -> None:
    """Skip the test if KUBECONFIG is not set. If it is set, wait for the cluster; otherwise hundreds of tests would be
    skipped silently while the cluster is away."""
    if not os.environ.get("KUBECONFIG"):
        pytest.skip("KUBECONFIG is not set; these tests never use a cluster that was not named for them")
    if not shutil.which("kubectl"):
        pytest.skip("kubectl is not on the PATH")
    until(
        lambda: kubectl("get", "--raw", "/readyz", check=False).strip() == "ok",
        f"the cluster in KUBECONFIG={os.environ['KUBECONFIG']} answers",
        ANSWERS_WITHIN_SECONDS,
        every=0.5,
    )


@contextlib.contextmanager
def installed_crd() -> Iterator[None]:
    """Install the CRD; remove it afterwards if it was not there before."""

    def install() -> dict[str, object]:
        was_there = "NotFound" not in kubectl("get", "-f", str(CRD), check=False)
        kubectl("apply", "-f", str(CRD))
        # `kubectl wait` ends with an error if the CRD has no conditions yet, and so does kubectl with this path.
        shown = ["get", "-f", str(CRD), "-o", "jsonpath={.status.conditions[?(@.type=='Established')].status}"]
        until(lambda: kubectl(*shown, check=False) == "True", "the CRD is established", 20)
        return {"was there": was_there}

    def remove(made: dict[str, object]) -> None:
        if not made["was there"]:
            kubectl("delete", "-f", str(CRD), "--ignore-not-found", check=False)

    with made_once("crd", install, remove):
        yield


def job(name: str = "digits", *, container: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    """Return a job whose pods find no node."""
    trainer = {"name": "trainer", "image": "busybox", "command": ["torchrun", "train.py"]} | (container or {})
    pod = {"containers": [trainer], "nodeSelector": {"ddpjob.test/no-such-node": "true"}}
    return {
        "apiVersion": types.API_VERSION,
        "kind": types.KIND,
        "metadata": {"name": name},
        "spec": {"nodes": 2, "template": {"spec": pod}} | copy.deepcopy(spec),
    }


class Namespace:
    """A test's own namespace, in which it acts as a kubelet and as a user."""

    def __init__(self, api: FaultyApi, name: str = "") -> None:
        self.api = api
        self.name = name or f"ddpjob-test-{uuid.uuid4().hex[:8]}"
        self.jobs_path = JOBS.format(self.name)

    def make(self, **labels: str) -> Namespace:
        self.api.call("POST", "/api/v1/namespaces", {"metadata": {"name": self.name, "labels": labels}})
        # The API server refuses pods until a controller has created the namespace's ServiceAccount.
        path = f"/api/v1/namespaces/{self.name}/serviceaccounts/default"
        until(lambda: self.api.find(path), "the namespace has its default service account")
        return self

    def remove(self) -> None:
        """Remove the namespace. Release the pods first that a test keeps by finalizers."""
        with contextlib.suppress(Exception):
            for pod in self.pods():
                if pod["metadata"].get("finalizers"):
                    self.release(pod["metadata"]["name"])
        with contextlib.suppress(urllib.error.HTTPError):
            self.api.call("DELETE", f"/api/v1/namespaces/{self.name}")

    def kubectl(self, *arguments: str, stdin: object = None, check: bool = True) -> str:
        return kubectl(f"--namespace={self.name}", *arguments, stdin=stdin, check=check)

    def apply(self, body: dict[str, Any]) -> None:
        """Apply a job like `kubectl apply --server-side`, without the 0.2 s of CPU for starting kubectl."""
        path = f"{self.jobs_path}/{body['metadata']['name']}?fieldManager=test&force=true&fieldValidation=Strict"
        self.api.call("PATCH", path, body, APPLY)

    def create(self, kind: str, body: dict[str, Any]) -> Any:
        """Create a core object; kind: pods, services or resourcequotas."""
        return self.api.call("POST", f"/api/v1/namespaces/{self.name}/{kind}", body)

    # ---------------------------------------------------------------- reading

    def pods(self, *, accept: str = "application/json") -> list[dict[str, Any]]:
        found = self.api.call("GET", f"/api/v1/namespaces/{self.name}/pods", accept=accept)["items"] or []
        return sorted(found, key=lambda p: str(p["metadata"]["name"]))

    def pod_names(self) -> list[str]:
        return list(self.uids())

    def uids(self) -> dict[str, str]:
        return {p["metadata"]["name"]: p["metadata"]["uid"] for p in self.pods(accept=METADATA)}

    def job(self, name: str = "digits") -> dict[str, Any] | None:
        found: dict[str, Any] | None = self.api.find(f"{self.jobs_path}/{name}")
        return found

    def status(self, name: str = "digits") -> dict[str, Any]:
        return (self.job(name) or {}).get("status") or {}

    def jobs(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.api.call("GET", self.jobs_path)["items"]
        return found

    def shown(self, path: str, name: str = "digits") -> str:
        """Return what kubectl shows for a JSONPath in the job."""
        return self.kubectl("get", "ddp", name, "-o", f"jsonpath={{{path}}}")

    def events(self, name: str = "digits") -> list[str]:
        """Return the reasons of the job's events, in order."""
        found = self.api.call("GET", f"/api/v1/namespaces/{self.name}/events")["items"]
        ours = [e for e in found if e["involvedObject"]["name"] == name and e["involvedObject"]["kind"] == types.KIND]
        return [e["reason"] for e in sorted(ours, key=lambda e: int(e["metadata"]["resourceVersion"]))]

    def reaches(self, state: str, reason: str = "", name: str = "digits", seconds: float = WAIT_SECONDS) -> str:
        """Wait for a state, and for a reason if one is given; return the message."""
        status: dict[str, Any] = {}

        def there() -> bool:
            nonlocal status
            status = self.status(name)
            return status.get("state") == state and reason in ("", status.get("reason"))

        try:
            until(there, f"{name} is {state} {reason}", seconds)
        except pytest.fail.Exception:
            pytest.fail(f"{name} is not {state} {reason} after {seconds:g} s, but: {status}")
        return str(status.get("message", ""))

    # ---------------------------------------------------------------- acting as a kubelet or a user

    def set_pod(self, name: str, phase: str, state: dict[str, Any]) -> None:
        container = {"name": "trainer", "image": "busybox", "imageID": "", "restartCount": 0}
        container |= {"ready": "running" in state, "started": "running" in state, "state": state}
        status = {"phase": phase, "containerStatuses": [container]}
        path = f"/api/v1/namespaces/{self.name}/pods/{name}/status"
        self.api.call("PATCH", path, {"status": status}, MERGE)

    def runs(self, *names: str) -> None:
        """Let the trainers of these pods run."""
        for name in names:
            self.set_pod(name, "Running", {"running": {"startedAt": _now()}})

    def exits(self, name: str, code: int = 0, message: str = "") -> None:
        """Let the trainer of this pod exit with this code."""
        ended = {"exitCode": code, "reason": "Error" if code else "Completed", "finishedAt": _now(), "message": message}
        self.set_pod(name, "Failed" if code else "Succeeded", {"terminated": ended})

    def hold(self, *names: str) -> None:
        """Keep these pods after their deletion until release(), as if they stopped slowly."""
        for name in names:
            self._finalizers(name, ["ddpjob.test/hold"])

    def bind(self, *names: str) -> None:
        """Give these pods a node: the garbage collector marks deleted pods without one as failed, every 20 s."""
        for name in names:
            target = {"kind": "Node", "name": "ddpjob-test"}
            body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
            self.api.call("POST", f"/api/v1/namespaces/{self.name}/pods/{name}/binding", body)

    def release(self, *names: str) -> None:
        """Let these pods end. For a pod with a node, report this like a kubelet: by a delete without grace period."""
        for name in names:
            self._finalizers(name, [])
            path = f"/api/v1/namespaces/{self.name}/pods/{name}"
            found = self.api.find(path)
            if found is not None and found["metadata"].get("deletionTimestamp"):
                with contextlib.suppress(urllib.error.HTTPError):  # already deleted
                    self.api.call("DELETE", path, {"gracePeriodSeconds": 0})

    def has_pods(self, *names: str, seconds: float = WAIT_SECONDS) -> None:
        until(lambda: set(names) <= set(self.pod_names()), f"{', '.join(names)} are created", seconds)

    def start(self, name: str = "digits", **spec: Any) -> dict[str, str]:
        """Create a job and let it run; return the uids of its pods."""
        self.apply(job(name, **spec))
        names = [f"{name}-1-{rank}" for rank in range(spec.get("nodes", 2))]
        self.has_pods(*names)
        self.runs(*names)
        self.reaches("Running", name=name)
        return {k: v for k, v in self.uids().items() if k in names}

    def _finalizers(self, name: str, names: list[str]) -> None:
        path = f"/api/v1/namespaces/{self.name}/pods/{name}"
        self.api.call("PATCH", path, {"metadata": {"finalizers": names}}, MERGE)


class Operator:
    """An operator process that connects to the API server through the proxy."""

    def __init__(
        self,
        api: FaultyApi,
        *namespaces: str,
        token: str = OWN_TOKEN,
        kubeconfig: str = "",
        constants: Mapping[str, float] | None = None,
        anew: bool = False,
        **variables: str,
    ) -> None:
        """constants: values for reflector.py, whose period is too long for a test. anew: start a new Python, whose
        memory can be measured, and not a fork of this process. variables: the environment."""
        self._api = api
        self._folder = tempfile.TemporaryDirectory()
        self.log_file = Path(self._folder.name, "operator.log")
        self.kubeconfig = Path(self._folder.name, "kubeconfig")
        self.log_in_as(token)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("DDPJOB_")}
        environment |= {
            "KUBECONFIG": kubeconfig or str(self.kubeconfig),
            "DDPJOB_WATCH_NAMESPACES": ",".join(namespaces),
            "DDPJOB_HEALTH_PORT": "0",
            "PYTHONUNBUFFERED": "1",
            **variables,
        }
        self._started = time.monotonic()
        with self.log_file.open("wb") as log:
            if constants or anew:
                change = f"{IMPORTS}; vars(reflector).update({dict(constants or {})}); main()"
                command = [sys.executable, *(["-c", change] if constants else ["-m", "ddpjob_operator"])]
                self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
            else:
                self.process = warm.start_operator(environment, log)

    def log_in_as(self, token: str) -> None:
        """Write this token into the kubeconfig, as a token rotation does."""
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": self._api.url}}],
            "users": [{"name": "test", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        }
        self.kubeconfig.write_text(json.dumps(config))

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    @property
    def cpu_seconds(self) -> float:
        """Seconds of CPU that the operator has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def memory_bytes(self) -> int:
        """Resident memory of the operator."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def watches(self, jobs: int = 1) -> Operator:
        """Wait until the operator watches pods, services and jobs, in this many namespaces."""

        def there() -> bool:
            assert self.process.poll() is None, f"the operator has ended: {self.log}"
            seen = self._api.requests(since=self._started)
            return all(seen[f"watch {what}"] >= jobs for what in ("pods", "services", "ddpjobs"))

        until(there, f"the operator watches; its log: {self.log}")
        return self

    def stop(self) -> int:
        """Send SIGTERM and return the exit code."""
        self.process.terminate()
        try:
            return self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(5)
            raise

    def kill(self) -> None:
        """Send SIGKILL."""
        self.process.kill()
        self.process.wait(5)

    def __enter__(self) -> Operator:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.stop()
        self._folder.cleanup()


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
