"""bench/restart_matrix.py with a system that it does not know: an adapter in a file, and a model of kubectl."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

BENCH = Path(__file__).parents[2] / "bench/restart_matrix.py"
PEER = """
from restart_matrix import Adapter

class Peer(Adapter):
    name, kind, agents = "peer", "trainings.example.com", ("peer-operator",)

    def manifest(self, name, nodes, pod):
        spec = {"replicas": nodes, "template": pod}
        return {"apiVersion": "example.com/v1", "kind": "Training", "metadata": {"name": name}, "spec": spec}

    def selector(self, name):
        return f"example.com/training={name}"

ADAPTERS = [Peer()]
"""
# Pods that are hit are replaced at once. The first ones have made 30 steps, and each other one goes on from the 20th.
KUBECTL = f"""#!{sys.executable}
import datetime, json, os, sys, time
words, file, log = sys.argv[1:], os.environ["MODEL"], os.environ["AUDIT"]
state = json.load(open(file)) if os.path.exists(file) else {{"made": 0, "pods": {{}}, "begun": {{}}}}

def make(name):
    state["made"] += 1
    state["pods"][name] = str(state["made"])
    state["begun"][name] = time.time()

def pod(name, uid):
    status = {{"phase": "Running", "containerStatuses": [{{"imageID": "sha256:1"}}]}}
    return {{"metadata": {{"name": name, "uid": uid}}, "status": status}}

def hit(name):
    make(name)
    now = datetime.datetime.now(datetime.timezone.utc).isoformat().replace("+00:00", "Z")
    ref = {{"namespace": state["namespace"]}}
    lines = [("peer-operator/1", "create"), ("peer-operator/1", "watch"), ("kubectl/1.36", "delete")]
    with open(log, "a") as audit:
        for agent, verb in lines:
            told = {{"userAgent": agent, "verb": verb, "objectRef": ref, "requestReceivedTimestamp": now}}
            audit.write(json.dumps(told) + "\\n")

verb = words[0]
if words[:2] == ["create", "namespace"]:
    state["namespace"] = words[2]
elif verb == "apply":
    for number in range(json.load(sys.stdin)["spec"]["replicas"]):
        make(f"pod-{{number}}")
    state["first"] = state["made"]
elif words[:2] == ["get", "pods"]:
    print(json.dumps({{"items": [pod(*one) for one in state["pods"].items()]}}))
elif verb == "get":
    print("{{}}")
elif verb == "logs":
    is_first = int(state["pods"][words[-1]]) <= state["first"]
    begun = state["begun"][words[-1]]
    print("BEGIN", begun, 0 if is_first else 30)
    for step in range(1, 31) if is_first else range(21, 25):
        print("STEP", step, begun + 0.05)
elif verb == "exec":
    hit(words[3])
elif words[:2] == ["delete", "pod"]:
    hit(words[2])
elif words[:2] == ["create", "--raw"]:
    hit(json.load(sys.stdin)["metadata"]["name"])
elif verb == "delete":
    state["pods"] = {{}}
json.dump(state, open(file, "w"))
"""


def matrix(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "peer.py").write_text(PEER)
    kubectl = folder / "kubectl"
    kubectl.write_text(KUBECTL)
    kubectl.chmod(0o755)
    (folder / "audit.log").touch()
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
    environment |= {"MODEL": str(folder / "model.json"), "AUDIT": str(folder / "audit.log")}
    command = [sys.executable, str(BENCH), "--adapter", str(folder / "peer.py"), *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_a_peer_is_measured_with_an_adapter_of_twenty_lines(tmp_path: Path) -> None:
    """Whoever compares operators must be able to run it on theirs, and read what it prints."""
    options = ["--systems", "peer", "--nodes", "3", "--runs", "1", "--settle", "0"]
    done = matrix(tmp_path, *options, "--audit-log", str(tmp_path / "audit.log"))
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)["peer"]
    assert list(found) == [f"{cause}, {scope}" for cause in ("fail", "delete", "evict") for scope in ("pod", "all")]
    for case, cells in found.items():
        hit = 3 if case.endswith("all") else 1
        assert cells["stepsLost"] == 10, "30 were made, and the 21st comes again"
        assert cells["seconds"] < 20
        assert cells["requests"] >= hit, "its own writes"
    assert len(PEER.strip().splitlines()) <= 20


def test_a_system_without_an_adapter_is_named_with_those_that_there_are(tmp_path: Path) -> None:
    done = matrix(tmp_path, "--systems", "nobody")
    assert done.returncode == 2
    assert "no adapter is named nobody; known: ddpjob, ddprun, job, peer" in done.stderr
