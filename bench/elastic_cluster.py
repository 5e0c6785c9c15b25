"""Change the size of one job in a cluster: pods killed, deleted and scaled away, nodes without power or network.

Started by `elastic.py --cluster`, in a cluster with the operator whose nodes run on this machine: the pods' folder is a
folder of this machine, and pods are killed by their processes here. DDPJOB_TEST_NODE breaks nodes, as in tests/cluster;
without it no node is broken. Each event is two changes: fewer nodes train, and all of them train again.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from elastic import NODES, NPROC, Training, measured, summary

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))

from clusters import kubectl
from pods import Space, job, spread, trainer

NAME, EVENTS = "elastic", ("kill", "delete", "scale", "power", "kill", "cut", "delete", "kill", "scale", "kill")


class Pods(Training):
    """A job of four pods with two ranks each. Any of them may be lost, also the leader's."""

    patience = 400.0

    def __init__(self, space: Space, folder: Path, snooze: float, *script: object) -> None:
        super().__init__(folder)
        self._space = space
        body = spread(job(NAME, nodes=NODES, minNodes=1, backoffLimit=1000))
        conf = f"--rdzv-conf=last_call_timeout=60,snooze={snooze:g}"
        trainer(body).update(
            command=["ddprun", conf, f"--nproc-per-node={NPROC}", "train.py", *map(str, script)],
            workingDir=str(folder),
            env=[{"name": "OMP_NUM_THREADS", "value": "1"}],
            resources={"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": "2Gi"}},
            securityContext={"runAsUser": 0},
            volumeMounts=[{"name": "notes", "mountPath": str(folder)}],
        )
        pod = body["spec"]["template"]["spec"]
        pod.update(securityContext={}, volumes=[{"name": "notes", "hostPath": {"path": str(folder)}}])
        space.apply(body)

    def ended(self) -> str:
        status = self._space.status(NAME)
        return json.dumps(status, indent=1) if status.get("state") in ("Succeeded", "Failed") else ""

    def strike(self, event: str, draw: random.Random) -> tuple[int, str, list[str]]:
        """Let something happen. Return how many nodes are left, whether the leader was lost, and how to undo it."""
        pods = {name: pod["spec"]["nodeName"] for name, pod in self._space.pods(NAME).items()}
        leader = self._space.status(NAME).get("leader", {}).get("place", 0)
        chosen = draw.sample(sorted(pods), draw.randint(1, NODES - 1))
        undo: list[str] = []
        if event == "scale":
            chosen = sorted(pods)[draw.randint(1, NODES - 1) :]
            self._scale(NODES - len(chosen))
        elif event == "delete":
            self._space.kubectl("delete", "pod", "--wait=false", *chosen)
        elif event == "kill":
            kill(chosen)
        else:
            # A leader without network goes on for 30 s with the nodes on its side, as the documents say.
            its = next(node for name, node in pods.items() if place(name) == leader)
            node = draw.choice(sorted({node for node in pods.values() if event == "power" or node != its}))
            chosen = [name for name, its in pods.items() if its == node]
            on_node("kill" if event == "power" else "cut", node)
            undo = ["start" if event == "power" else "join", node]
        return NODES - len(chosen), " of the leader" if leader in map(place, chosen) else "", undo

    def _scale(self, nodes: int) -> None:
        self._space.kubectl("scale", "ddpjob", NAME, f"--replicas={nodes}")

    def undo(self, event: str, undo: list[str]) -> None:
        if event == "scale":
            self._scale(NODES)
        if undo:
            on_node(*undo)

    def finish(self) -> str:
        """Wait for the end. Return what the status and the pods show."""
        status = self._space.ends(NAME)
        restarts = sum(p["status"]["containerStatuses"][0]["restartCount"] for p in self._space.pods(NAME).values())
        counts = {name: status["restarts"][name] for name in ("application", "infrastructure", "stall")}
        return f"{status['state']}, attempt {status['attempt']}, charged {counts}, {restarts} containers restarted"


def place(pod: str) -> int:
    return int(pod.split("-")[2])


def kill(pods: list[str]) -> None:
    """Send SIGKILL to all processes of these pods."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("HOSTNAME") in pods:
                process.kill()


def on_node(*words: str) -> None:
    subprocess.run([*shlex.split(os.environ["DDPJOB_TEST_NODE"]), *words], check=True, capture_output=True, timeout=120)


def run(launcher: str, changes: int, given: Any, folder: Path) -> list[dict[str, Any]]:
    """Let a job in the cluster change its size; print and return its changes."""
    space, width = Space("ddpjob-bench"), given.megabytes * 2**20 // (4 * 65)
    kubectl("label", "namespace", space.name, "--overwrite", "pod-security.kubernetes.io/enforce=privileged")
    events = [event for event in EVENTS if event not in ("power", "cut") or os.environ.get("DDPJOB_TEST_NODE")]
    pods, draw, most = Pods(space, folder, given.snooze, given.pause, width), random.Random(given.seed), NPROC * NODES
    found: list[dict[str, Any]] = []
    undo: list[str] = []
    end, total = "hung", 0
    try:
        pods.trains(most)
        for number in range(changes // 2):
            event, moments = events[number % len(events)], [time.monotonic()]
            left, leader, undo = pods.strike(event, draw)
            pods.trains(NPROC * left)
            moments.append(time.monotonic())
            pods.undo(event, undo)
            undo = []
            pods.trains(most)
            moments.append(time.monotonic())
            for kind, sizes in ((event + leader, (most, NPROC * left)), ("come", (NPROC * left, most))):
                one = {"launcher": launcher, "number": len(found), "kind": kind, "from": sizes[0], "to": sizes[1]}
                found.append(one | {"at": moments[len(found) % 2], "settled": moments[len(found) % 2 + 1]})
            print(f"{event}{leader}: {most}, {NPROC * left}, {most} ranks", flush=True)
        (folder / "total").write_text(str(last := pods.trains(most) + 100))
        end, total = pods.finish(), last
    except TimeoutError as error:
        print(error, space.kubectl("get", "ddp,pods", "-o", "wide", check=False), sep="\n")
    finally:
        if undo:
            on_node(*undo)
        space.leaves_nothing()
        space.remove()
    notes = pods.notes()
    found = [measured(one, notes, []) for one in found]
    summary(launcher, found, notes, end, folder, total, width)
    return found
