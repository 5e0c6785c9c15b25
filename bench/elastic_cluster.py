"""Change the size of one job in a cluster: pods killed, deleted and scaled away, nodes without power or network.

Started by `elastic.py --cluster`, in a cluster with the operator whose nodes run on this machine: the pods' folder is a
folder of this machine, and pods are killed by their processes here. DDPJOB_TEST_NODE breaks nodes, as in tests/cluster;
without it no node is broken. Each event is two changes: fewer nodes train, and all of them train again.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import os
import random
import shlex
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
from clusters import kubectl, until
from elastic import NODES, NPROC, Note, Training, summary
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
        known = self._space.pods(NAME).items()
        pods = {name: pod["spec"]["nodeName"] for name, pod in known if pod["status"]["phase"] == "Running"}
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
    names = {f"{NAME}-{place(pod)}" for pod in pods}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("HOSTNAME") in names:
                process.kill()


def on_node(*words: str) -> None:
    subprocess.run([*shlex.split(os.environ["DDPJOB_TEST_NODE"]), *words], check=True, capture_output=True, timeout=120)


def changes_of(notes: list[Note], events: list[tuple[float, str]]) -> list[dict[str, Any]]:
    """Return each change of the group: its event, its sizes and its cost. A planned one costs what rank 0 waits for;
    after a loss the cost beyond detection begins when the first survivor has seen it."""
    ranks: dict[int, set[int]] = collections.defaultdict(set)
    for n in notes:
        if n.what == "step":
            ranks[n.life].add(n.rank)
    found = []
    for before, after in itertools.pairwise(n for n in notes if n.what == "step" and n.rank == 0):
        if before.life < after.life:
            sizes, event = (len(ranks[before.life]), len(ranks[after.life])), [e for at, e in events if at < after.at]
            kind = "come" if sizes[0] < sizes[1] else event[-1] if event else "start"
            told = [n.at for n in notes if n.what == "told" and before.at < n.at < after.at and not n.step]
            seconds = {"cost": after.at - before.at, "beyond detection": after.at - min(told, default=before.at)}
            found.append({"kind": kind, **seconds})
    return found


def run(launcher: str, changes: int, given: Any, folder: Path) -> None:
    """Let a job in the cluster change its size, and print what its changes cost."""
    space, width = Space("ddpjob-bench"), given.megabytes * 2**20 // (4 * 65)
    kubectl("label", "namespace", space.name, "--overwrite", "pod-security.kubernetes.io/enforce=privileged")
    pods, draw = Pods(space, folder, given.snooze, given.pause, width), random.Random(given.seed)
    whats = [event for event in EVENTS if event not in ("power", "cut") or os.environ.get("DDPJOB_TEST_NODE")]
    events: list[tuple[float, str]] = []
    undo: list[str] = []
    end, total = "hung", 0
    try:
        pods.trains(NPROC * NODES)
        while len(changes_of(notes := pods.notes(), events)) < changes:
            what, last = whats[len(events) % len(whats)], max(n.life for n in notes)
            began = time.monotonic()
            left, leader, undo = pods.strike(what, draw)
            events.append((began, what + leader))
            until(lambda last=last: any(n.life > last for n in pods.notes()), f"{what} has an effect", pods.patience)
            if what == "scale":
                pods.trains(NPROC * left)
            pods.undo(what, undo)
            undo = []
            pods.trains(NPROC * NODES)
            print(f"{what}{leader}: {NODES - left} nodes, {time.monotonic() - began:.0f} s until all train", flush=True)
        (folder / "total").write_text(str(step := pods.trains(NPROC * NODES) + 100))
        end, total = pods.finish(), step
    except TimeoutError as error:
        print(error, space.kubectl("get", "ddp,pods", "-o", "wide", check=False), sep="\n")
    finally:
        if undo:
            on_node(*undo)
        space.leaves_nothing()
        space.remove()
    notes = pods.notes()
    summary(launcher, changes_of(notes, events), notes, end, folder, total, width)
