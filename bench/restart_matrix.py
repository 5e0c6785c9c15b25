"""How long a job takes to run again, and what that costs: cause × scope → seconds, steps lost, requests.

    KUBECONFIG=… python bench/restart_matrix.py --systems ddpjob job --nodes 8 --audit-log audit.log
    KUBECONFIG=… python bench/restart_matrix.py --systems ddprun ddpjob job --nodes 2 --image ddpjob-trainer

Causes: a rank that fails (kubectl exec; on nodes that kwok plays, the status a kubelet would write), a pod that is
deleted, one that is evicted. Scopes: one pod, or all of the job. The script of the pods needs Python alone: it counts
steps of 50 ms and saves every 20th of them in `--volume`, a folder for each job. The seconds run from the cause until
each pod that starts again has printed a step, by its own clock; on played nodes until all pods of the job run again.
The steps lost are those that any pod had made when the first one began again, and that are made again (none are known
of played nodes); the requests are those of the system's own controllers in the audit log of the API server, if one is
given. `ddprun` needs nodes that run pods.

Another system is an adapter of some 20 lines (`Job` below), given as `--adapter FILE`: a module with ADAPTERS, a list.
Prints one JSON document. The operator or controllers of a system must run already.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Raw = dict[str, Any]
SCRIPT = """
import glob, os, sys, time
folder = os.environ["SAVES"]
os.makedirs(folder, exist_ok=True)
path, fail = os.path.join(folder, "step"), "/tmp/fail"
if os.path.exists(fail):
    os.remove(fail)
made = os.open(f"{path}.made.{os.environ['HOSTNAME']}", os.O_RDWR | os.O_CREAT)
print("BEGIN", time.time(), max(int(open(name).read() or 0) for name in glob.glob(path + ".made.*")), flush=True)
step = int(open(path).read()) if os.path.exists(path) else 0
while not os.path.exists(fail):
    step += 1
    print("STEP", step, time.time(), flush=True)
    os.pwrite(made, f"{step:12}".encode(), 0)
    if step % 20 == 0:
        new = f"{path}.{os.environ['HOSTNAME']}"
        with open(new, "w") as file:
            file.write(str(step))
        os.replace(new, path)
    time.sleep(0.05)
sys.exit(3)
"""
SCRIPT_PATH = "/script/train.py"
WAIT_SECONDS = 120.0


class Adapter:
    """What the matrix must know of a system."""

    name = ""
    kind = ""
    """For kubectl: `kind.group`, or a short name."""
    agents: tuple[str, ...] = ()
    """How the User-Agents of its controllers begin."""

    def manifest(self, name: str, nodes: int, pod: Raw) -> Raw:
        """A job of so many pods, each with this PodTemplate (metadata, spec)."""
        raise NotImplementedError

    def selector(self, name: str) -> str:
        """Labels that all pods of the job have."""
        raise NotImplementedError

    def runs_again(self, _job: Raw, struck: set[str], running: list[Raw], nodes: int) -> bool:
        """Whether the job trains again. struck: uids of the pods that were hit; running: pods that run and stay, with
        `begunAgain` where one has started its script since then, and made a step."""
        return len(running) == nodes and not any(pod["metadata"]["uid"] in struck for pod in running)


class DDPJob(Adapter):
    """One group: all pods start again."""

    name, kind, agents = "ddpjob", "ddpjobs.training.ddpjob.io", ("ddpjob-operator",)

    def manifest(self, name: str, nodes: int, pod: Raw) -> Raw:
        return {
            "apiVersion": "training.ddpjob.io/v1alpha1",
            "kind": "DDPJob",
            "metadata": {"name": name},
            "spec": {"nodes": nodes, "backoffLimit": 10, "onePodPerNode": False, "template": pod},
        }

    def selector(self, name: str) -> str:
        return f"training.ddpjob.io/job={name}"

    def runs_again(self, _job: Raw, struck: set[str], running: list[Raw], nodes: int) -> bool:
        status = _job.get("status") or {}
        again = status.get("attempt", 0) > 1 and status.get("state") == "Running"
        return again and super().runs_again(_job, struck, running, nodes)


class DDPRun(DDPJob):
    """A DDPJob whose agents restart the ranks in their pods, and replace pods one by one."""

    name = "ddprun"

    def manifest(self, name: str, nodes: int, pod: Raw) -> Raw:
        [container] = pod["spec"]["containers"]
        command = ["ddprun", "--nproc-per-node=1", SCRIPT_PATH]
        spec = {**pod["spec"], "containers": [{**container, "command": command}]}
        return super().manifest(name, nodes, {**pod, "spec": spec})

    def runs_again(self, _job: Raw, _struck: set[str], running: list[Raw], nodes: int) -> bool:
        return len(running) == nodes and all(pod.get("begunAgain") for pod in running)


class Job(Adapter):
    """batch/v1, Indexed: each pod is replaced alone, so the others train on without it, or wait for it."""

    name, kind, agents = "job", "jobs.batch", ("kube-controller-manager",)

    def manifest(self, name: str, nodes: int, pod: Raw) -> Raw:
        spec = {"completions": nodes, "parallelism": nodes, "completionMode": "Indexed", "backoffLimit": 100}
        spec["template"] = {**pod, "spec": {**pod["spec"], "restartPolicy": "Never"}}
        return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec}

    def selector(self, name: str) -> str:
        return f"batch.kubernetes.io/job-name={name}"


def kubectl(*words: str, stdin: object = None) -> str:
    """stdout. Raises CalledProcessError with kubectl's own words on stderr."""
    text = None if stdin is None else json.dumps(stdin)
    return subprocess.run(["kubectl", *words], input=text, stdout=subprocess.PIPE, text=True, check=True).stdout


def listed(*words: str) -> list[Raw]:
    found: list[Raw] = json.loads(kubectl("get", *words, "-o", "json"))["items"]
    return found


def until(is_true: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not is_true():
        if time.monotonic() > end:
            sys.exit(f"not within {WAIT_SECONDS:.0f} s: {what}")
        time.sleep(0.05)


@dataclass
class Run:
    """One start of the script in a pod."""

    begun: float
    """By the clock of its node, as `first`: of its first step, 0.0 where there is none."""
    made: int
    """The last step that any pod of the job had made then, as far as it knows."""
    first: float = 0.0
    steps: list[int] = field(default_factory=list)


class Case:
    """One job of a system in a namespace."""

    def __init__(self, system: Adapter, options: argparse.Namespace, namespace: str) -> None:
        self.system, self.options, self.namespace = system, options, namespace
        self.name = f"m-{uuid.uuid4().hex[:6]}"

    def pods(self) -> list[Raw]:
        return listed("pods", "-n", self.namespace, "-l", self.system.selector(self.name))

    def running(self, since: float = 0.0) -> list[Raw]:
        """since: with `begunAgain`, since then."""
        found = [p for p in self.pods() if p["status"].get("phase") == "Running" and not _leaves(p)]
        for pod in found if since else ():
            pod["begunAgain"] = any(run.begun > since and run.steps for run in self.runs_of(pod))
        return found

    def start(self) -> None:
        container: Raw = {"name": "trainer", "image": self.options.image, "command": ["python3", "-u", SCRIPT_PATH]}
        container |= {"imagePullPolicy": "IfNotPresent", "env": [{"name": "SAVES", "value": f"/saves/{self.name}"}]}
        places = {"saves": "/saves", "script": SCRIPT_PATH.rpartition("/")[0]}
        container["volumeMounts"] = [{"name": volume, "mountPath": place} for volume, place in places.items()]
        volumes = [
            {"name": "saves", **json.loads(self.options.volume)},
            {"name": "script", "configMap": {"name": "script"}},
        ]
        spec = {"containers": [container], "volumes": volumes, "terminationGracePeriodSeconds": 1}
        pod = {"metadata": {}, "spec": spec}
        kubectl(
            "apply", "-n", self.namespace, "-f", "-", stdin=self.system.manifest(self.name, self.options.nodes, pod)
        )
        until(lambda: len(self.running()) == self.options.nodes, f"{self.system.name}: all pods of {self.name} run")

    def strike(self, cause: str, scope: str) -> Raw:
        """Seconds, steps lost and requests of one restart."""
        time.sleep(self.options.settle)
        known = sorted(self.running(), key=lambda pod: str(pod["metadata"]["name"]))
        hit = known[-1:] if scope == "pod" else known
        before = self.last_step()
        began = time.time()
        for pod in hit:
            CAUSES[cause](self.namespace, pod)
        struck = {pod["metadata"]["uid"] for pod in hit}
        again = self.system.runs_again
        until(lambda: again(self.job(), struck, self.running(began), self.options.nodes), f"{self.name} again")
        seconds, old = time.time() - began, {pod["metadata"]["uid"] for pod in known}
        until(
            lambda: all(
                _is_played(p) or p["begunAgain"] for p in self.running(began) if p["metadata"]["uid"] not in old
            ),
            f"all new pods of {self.name} make steps",
        )
        runs = [run for pod in self.running() for run in self.runs_of(pod) if run.begun > began and run.steps]
        time.sleep(self.options.settle)
        found: Raw = {"seconds": max((run.first for run in runs), default=began + seconds) - began, "stepsLost": None}
        if runs:
            made = max(before, min(runs, key=lambda run: run.begun).made)
            found["stepsLost"] = max(0, made - min(run.steps[0] for run in runs) + 1)
        return {**found, "requests": requests(self.options.audit_log, self.system, self.namespace, began)}

    def job(self) -> Raw:
        found: Raw = json.loads(kubectl("get", self.system.kind, self.name, "-n", self.namespace, "-o", "json"))
        return found

    def last_step(self) -> int:
        """The last that any pod has printed; 0: none, as on nodes that are only played."""
        return max((step for pod in self.running() for run in self.runs_of(pod) for step in run.steps), default=0)

    def runs_of(self, pod: Raw) -> list[Run]:
        """What the script has printed there."""
        runs: list[Run] = []
        if _is_played(pod):
            return runs
        for line in kubectl("logs", "-n", self.namespace, pod["metadata"]["name"]).splitlines():
            words = line.split()
            if words[:1] == ["BEGIN"]:
                runs.append(Run(float(words[1]), int(words[2])))
            elif words[:1] == ["STEP"]:
                runs[-1].steps.append(int(words[1]))
                runs[-1].first = runs[-1].first or float(words[2])
        return runs

    def delete(self) -> None:
        kubectl("delete", self.system.kind, self.name, "-n", self.namespace, "--wait=false")
        until(lambda: not self.pods(), "its pods are gone")


def _leaves(pod: Raw) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def _is_played(pod: Raw) -> bool:
    """Whether nothing runs in it: kwok leaves the image's ID empty."""
    return not any(one.get("imageID") for one in pod["status"].get("containerStatuses") or ())


def fail(namespace: str, pod: Raw) -> None:
    """The trainer ends with an exit code of its own."""
    name = pod["metadata"]["name"]
    if not _is_played(pod):
        kubectl("exec", "-n", namespace, name, "--", "touch", "/tmp/fail")
        return
    statuses = [one | {"ready": False, "state": {"terminated": _ended()}} for one in pod["status"]["containerStatuses"]]
    status = {"phase": "Failed", "containerStatuses": statuses}
    kubectl("patch", "pod", name, "-n", namespace, "--subresource=status", "-p", json.dumps({"status": status}))


def _ended() -> Raw:
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"exitCode": 3, "reason": "Error", "startedAt": at, "finishedAt": at}


def delete(namespace: str, pod: Raw) -> None:
    kubectl("delete", "pod", pod["metadata"]["name"], "-n", namespace, "--wait=false")


def evict(namespace: str, pod: Raw) -> None:
    """As a drain does it."""
    name = pod["metadata"]["name"]
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": namespace}}
    kubectl("create", "--raw", f"/api/v1/namespaces/{namespace}/pods/{name}/eviction", "-f", "-", stdin=body)


CAUSES: dict[str, Callable[[str, Raw], None]] = {"fail": fail, "delete": delete, "evict": evict}
SCOPES = ("pod", "all")


def requests(log: Path | None, system: Adapter, namespace: str, since: float) -> int | None:
    """Of the system's controllers for the namespace, watches apart."""
    if log is None:
        return None
    count = 0
    for line in log.read_text().splitlines():
        event = json.loads(line)
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(since))
        ours = str(event.get("userAgent", "")).startswith(system.agents) and event["verb"] != "watch"
        in_space = (event.get("objectRef") or {}).get("namespace") == namespace
        count += ours and in_space and event["requestReceivedTimestamp"] >= at
    return count


def adapters(files: list[Path]) -> dict[str, Adapter]:
    """By name."""
    found: list[Adapter] = [DDPJob(), DDPRun(), Job()]
    for file in files:
        spec = importlib.util.spec_from_file_location(file.stem, file)
        if spec is None or spec.loader is None:
            sys.exit(f"--adapter {file}: is no Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[file.stem] = module
        spec.loader.exec_module(module)
        found += module.ADAPTERS
    return {one.name: one for one in found}


def matrix(system: Adapter, options: argparse.Namespace, namespace: str) -> Raw:
    found: Raw = {}
    for cause in options.causes:
        for scope in options.scopes:
            runs = []
            for _ in range(options.runs):
                case = Case(system, options, namespace)
                case.start()
                runs.append(case.strike(cause, scope))
                case.delete()
            found[f"{cause}, {scope}"] = {what: _median([run[what] for run in runs]) for what in runs[0]}
    return found


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 2) if known else None


def main() -> None:
    parser = argparse.ArgumentParser(description="Restarts by cause and scope; see the head of this file.")
    parser.add_argument("--systems", nargs="+", default=["ddpjob", "job"], help="names of adapters (%(default)s)")
    parser.add_argument("--adapter", nargs="*", type=Path, default=[], help="files with ADAPTERS")
    parser.add_argument("--causes", nargs="+", choices=CAUSES, default=list(CAUSES))
    parser.add_argument("--scopes", nargs="+", choices=SCOPES, default=list(SCOPES))
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--runs", type=int, default=3, help="of each; medians are printed (%(default)s)")
    parser.add_argument("--image", default="python:3.13-alpine", help="has Python (%(default)s)")
    parser.add_argument("--volume", default='{"emptyDir": {}}', help="a volume of the pods, as JSON (%(default)s)")
    parser.add_argument("--settle", type=float, default=4.0, help="seconds before and after each cause (%(default)s)")
    parser.add_argument("--audit-log", type=Path, help="of the API server, JSON lines")
    options = parser.parse_args()
    known = adapters(options.adapter)
    if missing := [name for name in options.systems if name not in known]:
        parser.error(f"--systems: no adapter is named {', '.join(missing)}; known: {', '.join(sorted(known))}")
    namespace = f"ddpjob-matrix-{uuid.uuid4().hex[:6]}"
    kubectl("create", "namespace", namespace)
    script = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "script"}, "data": {"train.py": SCRIPT}}
    try:
        kubectl("create", "-n", namespace, "-f", "-", stdin=script)
        found = {name: matrix(known[name], options, namespace) for name in options.systems}
    finally:
        kubectl("delete", "namespace", namespace, "--wait=false")
    machine = {"cores": os.cpu_count(), "load": os.getloadavg(), "nodes": options.nodes, "runs": options.runs}
    print(json.dumps({"machine": machine, **found}, indent=2))


if __name__ == "__main__":
    main()
