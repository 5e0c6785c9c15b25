"""How long a restart takes: from a fault until all ranks train again, and where that time goes.

    KUBECONFIG=… python bench/restart_times.py cluster --faults kill delete      in a cluster with the operator
    KUBECONFIG=… DDPJOB_TEST_NODE=… python bench/restart_times.py cluster --faults node
    KUBECONFIG=… python bench/restart_times.py in-place --runs 10                the same in pods that stay: ddprun

Two kinds of training: `torch` (torchrun, gloo; the parts are told by the script itself) and `bare` (a script that
imports nothing: what is left is the operator, Kubernetes and its DNS). The times are those at which a watch of
`kubectl` shows a change; they and the clocks of the pods are compared, so all must be of one machine, or well set.
Prints one JSON document on stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests/support"))

from clusters import kubectl, until  # noqa: E402
from pods import Space, job, trainer  # noqa: E402

# Told in the second attempt: when the interpreter ran, when the imports were done, when the group had met.
TORCH = """
import time; began = time.time()
import ddpjob, torch, os, signal
imported = time.time()
with ddpjob.init() as world:
    met = time.time()
    ddpjob.progress(1)
    print("TIMES", began, imported, met, time.time(), flush=True)
    step = torch.ones(1)
    for number in range(2, 100_000):
        torch.distributed.all_reduce(step)
        ddpjob.progress(number)
        if ddpjob.should_stop(number):
            raise ddpjob.Stopped(number)
        time.sleep(0.05)
"""
BARE = """
import time; began = time.time()
import os, socket
import ddpjob
host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
imported = time.time()
if os.environ["RANK"] == "0":
    peer = socket.create_server(("", port)).accept()[0]
else:
    while True:
        try:
            peer = socket.create_connection((host, port), 1)
            break
        except OSError:
            time.sleep(0.02)
met = time.time()
ddpjob.progress(1)
print("TIMES", began, imported, met, time.time(), flush=True)
for number in range(2, 100_000):
    ddpjob.progress(number)
    time.sleep(0.05)
"""


# Under ddprun: two steps of each generation are told, the pods' log is the witness.
IN_PLACE = """
import time; began = time.time()
import ddpjob, torch, os
life, step = os.environ["TORCHELASTIC_RESTART_COUNT"], torch.ones(1)
with ddpjob.init():
    for number in range(1, 100_000):
        torch.distributed.all_reduce(step)
        ddpjob.progress(number)
        if number <= 2:
            print("STEP", life, number, os.getpid(), began, time.time(), flush=True)
        if ddpjob.should_stop(number):
            raise ddpjob.Stopped(number)
        time.sleep(0.05)
"""


class Seen:
    """When a watch first showed something of a kind of object."""

    def __init__(self, space: Space, what: str, note: Callable[[dict[str, Any]], str]) -> None:
        self.first: dict[str, float] = {}
        self._note = note
        command = ["kubectl", "-n", space.name, "get", what, "--watch", "-o", "json"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        lines: list[str] = []
        assert self._process.stdout is not None
        for line in self._process.stdout:
            lines.append(line)
            if line == "}\n":  # kubectl indents all but the ends of an object
                told = self._note(json.loads("".join(lines)))
                self.first.setdefault(told, time.time())
                lines.clear()

    def at(self, told: str, seconds: float = 180) -> float:
        """Waits for it."""
        until(lambda: told in self.first, f"{told} in {sorted(self.first)}", seconds)
        return self.first[told]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._thread.join()


def of_job(raw: dict[str, Any]) -> str:
    """`attempt 1`, `steps in 1`, `breaks in 1`, `attempt 2`, `steps in 2`."""
    status = raw.get("status") or {}
    attempt, progress = status.get("attempt", 0), status.get("progress") or {}
    if attempt and (status.get("lastFailure") or {}).get("attempt") == attempt:
        return f"breaks in {attempt}"
    steps = progress.get("attempt") == attempt and progress.get("step")
    return f"steps in {attempt}" if steps else f"attempt {attempt}"


def of_pod(raw: dict[str, Any]) -> str:
    """`digits-2-0 runs`."""
    containers = (raw.get("status") or {}).get("containerStatuses") or []
    runs = any("running" in c["state"] for c in containers)
    return f"{raw['metadata']['name']} {'runs' if runs else 'is there'}"


def body(name: str, kind: str) -> dict[str, Any]:
    made = job(name, TORCH if kind == "torch" else BARE)
    if kind == "torch":
        trainer(made)["command"] = ["torchrun", "--no-python", "python", "-u", "-c", TORCH]
        trainer(made)["resources"] = {"requests": {"cpu": "500m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}}
    else:
        made["spec"]["template"]["spec"]["shareProcessNamespace"] = True
    trainer(made)["env"] = [{"name": "DDPJOB_STATUS_INTERVAL", "value": "1"}]
    made["spec"]["template"]["spec"]["topologySpreadConstraints"] = [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": {"training.ddpjob.io/job": name}},
        }
    ]
    return made


def strike(space: Space, name: str, fault: str, node: str) -> float:
    """When it struck."""
    victim = f"{name}-1-1"
    if fault == "kill":
        return space.kill(victim)
    began = time.time()
    if fault == "delete":
        space.kubectl("delete", "pod", victim, "--wait=false")
    else:
        subprocess.run([*shlex.split(os.environ["DDPJOB_TEST_NODE"]), "kill", node], check=True, capture_output=True)
    return began


def in_cluster(space: Space, name: str, fault: str) -> dict[str, float]:
    """Seconds of each part of one restart."""
    jobs, pods = Seen(space, f"ddp/{name}", of_job), Seen(space, "pods", of_pod)
    node = ""
    try:
        jobs.at("steps in 1")
        node = space.node_of(f"{name}-1-1")
        began = strike(space, name, fault, node)
        known, ended = jobs.at("breaks in 1"), jobs.at("attempt 2")
        running = max(pods.at(f"{name}-2-{rank} runs") for rank in (0, 1))
        stepped = jobs.at("steps in 2")
        told = [times(space.kubectl("logs", f"{name}-2-{rank}")) for rank in (0, 1)]
        return {
            "detection": known - began,
            "cleanUp": ended - known,
            "podStart": running - ended,
            "untilTheScriptRuns": max(t[0] for t in told) - running,
            "imports": max(t[1] - t[0] for t in told),
            "rendezvous": max(t[2] for t in told) - max(t[1] for t in told),
            "untilTheStatusSaysSo": stepped - max(t[3] for t in told),
            "sum": stepped - began,
        }
    finally:
        jobs.close()
        pods.close()
        if fault == "node" and node:
            subprocess.run([*shlex.split(os.environ["DDPJOB_TEST_NODE"]), "start", node], check=True)
            kubectl("wait", "--for=condition=Ready", f"node/{node}", "--timeout=60s")


def times(log: str) -> list[float]:
    line = next(line for line in log.splitlines() if "TIMES " in line)
    return [float(word) for word in line[line.index("TIMES ") :].split()[1:]]


def cluster(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    space = Space("ddpjob-bench")
    try:
        for fault in options.faults:
            for kind in options.kinds:
                runs = []
                for number in range(options.runs):
                    name = f"{kind}-{fault}-{number}"
                    space.apply(body(name, kind))
                    runs.append(in_cluster(space, name, fault))
                    space.kubectl("delete", "ddp", name)
                found[f"{kind}, {fault}"] = medians(runs)
        return found
    finally:
        space.leaves_nothing()
        space.remove()


def in_place(options: argparse.Namespace) -> dict[str, Any]:
    """kill -9 of the rank of node 1 in a job of ddprun, with a fork server and without."""
    found: dict[str, Any] = {}
    space = Space("ddpjob-bench")
    try:
        head = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "script"}}
        space.apply({**head, "data": {"train.py": IN_PLACE}})
        for words in ([], ["--no-preload"]):
            runs = []
            for number in range(options.runs):
                name = f"{'fresh' if words else 'warm'}-{number}"
                space.apply(body_of_ddprun(name, words))
                runs.append(_restart_in_place(space, [f"{name}-1-{rank}" for rank in (0, 1)]))
                space.kubectl("delete", "ddp", name)
            found[" ".join(["ddprun", *words])] = medians(runs)
        return found
    finally:
        space.leaves_nothing()
        space.remove()


def body_of_ddprun(name: str, words: list[str]) -> dict[str, Any]:
    """The script is a file, as with users: only then it is forked from a process that has torch."""
    made = body(name, "torch")
    trainer(made)["command"] = ["ddprun", *words, "/script/train.py"]
    trainer(made)["volumeMounts"] = [{"name": "script", "mountPath": "/script"}]
    made["spec"]["template"]["spec"]["volumes"] = [{"name": "script", "configMap": {"name": "script"}}]
    return made


def _restart_in_place(space: Space, pods: list[str]) -> dict[str, float]:
    def stepped(life: int) -> list[list[str]]:
        """Of each rank, what it printed when it had made two steps in that generation."""
        logs = [space.kubectl("logs", pod, check=False) for pod in pods]
        lines = [line.split() for log in logs for line in log.splitlines() if f"STEP {life} 2 " in line]
        return lines if len(lines) == len(pods) else []

    until(lambda: stepped(0), f"two steps of {pods}", 180)
    pid = stepped(0)[1][-3]
    kill = f"import os, time; print(time.time()); os.kill({pid}, 9)"
    began = float(space.kubectl("exec", pods[1], "--", "python", "-c", kill))
    until(lambda: stepped(1), f"two more steps of {pods}", 180)
    again = [[float(word) for word in line[-2:]] for line in stepped(1)]
    return {
        "untilTheScriptRuns": max(script for script, _ in again) - began,
        "sum": max(done for _, done in again) - began,
    }


def medians(runs: list[dict[str, float]]) -> dict[str, Any]:
    parts = {part: round(statistics.median(run[part] for run in runs), 2) for part in runs[0]}
    return parts | {"runs": len(runs), "slowest": round(max(run["sum"] for run in runs), 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description="How long a restart takes; see the head of this file.")
    parser.add_argument("what", choices=["cluster", "in-place"])
    parser.add_argument("--faults", nargs="+", choices=["kill", "delete", "node"], default=["kill", "delete"])
    parser.add_argument("--kinds", nargs="+", choices=["torch", "bare"], default=["torch", "bare"])
    parser.add_argument("--runs", type=int, default=3, help="of each; the median is told (%(default)s)")
    options = parser.parse_args()
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg()}
    found = (cluster if options.what == "cluster" else in_place)(options)
    print(json.dumps({"machine": machine, options.what: found}, indent=2))


if __name__ == "__main__":
    main()
