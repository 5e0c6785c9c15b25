"""A model of what runs a cluster besides the API server: scheduler, kubelets, node controller, garbage collector. As in
reality, containers continue when their node is cut off, and when their pod's object is deleted."""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from faults import Faults
from model_api import Change, Kind, ModelApi, Raw, owner_uid, stamp
from model_training import FORCED, LATE, RESUMABLE, Process, Training, terminated
from virtual_time import VirtualLoop

from ddpjob_operator.job import api as types

NOT_READY_SECONDS = 40.0
EVICTION_SECONDS = 300.0
ORPHAN_SECONDS = 40.0
CLOCKS_OFF_SECONDS = 10
# Possible exit codes of a trainer after SIGTERM; many scripts save and end with 0.
ENDED_BY_KUBELET = (0, 137, 143)
# torchrun prints its line about SIGTERM at once, however long its ranks take (elastic/agent/server/api.py, torch 2.13).
DEATH_SIGNAL = "W1121 16:00:00.000 torch/distributed/elastic/agent/server/api.py] Received 15 death signal"
# Kinds that are deleted together with the job that owns them.
OWNED = ("pods", "services", "podgroups", "workloads")
# Longest durations of a stop in seconds; ranks save at different speeds.
STOPS_WITHIN_SECONDS = (3, 3, 9)


class Node:
    """A machine: its kubelet, and the containers on it."""

    def __init__(self, name: str, slots: int) -> None:
        self.name, self.slots = name, slots
        self.neighbours = 0
        """How many neighbours have taken a whole node here."""
        self.reachable = True
        """True if the API server hears the node's kubelet."""
        self.side = ""
        """Name of the group of nodes that were cut off together, and reach each other."""
        self.powered = True
        self.silent_since: float | None = None
        self.losses = 0
        self.accepted: dict[str, str] = {}
        self.processes: dict[str, Process] = {}
        self.skew = dt.timedelta()
        """The offset of the node's clock."""


class Cluster:
    """The whole cluster. Changes of objects drive it, and timers model delays."""

    def __init__(
        self, loop: VirtualLoop, api: ModelApi, faults: Faults, training: Training, nodes: int, slots: int = 2
    ) -> None:
        """slots: how many pods fit on each node."""
        self.nodes = {f"node-{i}": Node(f"node-{i}", slots) for i in range(nodes)}
        self.started: Callable[[Process], None] = lambda _: None
        """Called when a container has started."""
        self.told: Callable[[Process, int], None] = lambda process, grace_seconds: None
        """Called when a container is first told to stop."""
        self.force_deleted: list[tuple[Process, str]] = []
        """Processes whose pod was deleted while they were alive, with the actor."""
        self._loop, self._api, self._faults, self._training = loop, api, faults, training
        self._random = random.Random(f"{faults.seed} cluster")
        for node in self.nodes.values():
            node.skew = dt.timedelta(seconds=self._random.randint(-CLOCKS_OFF_SECONDS, CLOCKS_OFF_SECONDS))
        self.cut_off: set[tuple[str, int]] = set()
        """(job uid, attempt) of processes whose node was ever cut off."""
        self._names: dict[str, str] = {}
        training.ends = self.ends
        api.listeners.append(self._hear)
        for name in self.nodes:
            self._api.request("POST", "/api/v1/nodes", None, {"metadata": {"name": name}}, "kubelet")
            self._say_node(name, "True")

    # ---------------------------------------------------------------- the true state

    def processes(self) -> Iterator[Process]:
        """All running containers on all nodes."""
        for node in self.nodes.values():
            yield from (p for p in node.processes.values() if p.alive)

    def reachable(self, process: Process) -> bool:
        """True if the API server can reach the node of a process."""
        return self.nodes[process.node].reachable

    def pods(self) -> list[Raw]:
        return self._api.all("pods")

    def time(self) -> float:
        """Return the seconds since the start."""
        return self._loop.time()

    def connected(self, one: Process, other: Process) -> bool:
        """True if the nodes of the two processes can reach each other."""
        here, there = self.nodes[one.node], self.nodes[other.node]
        return here is there or (here.reachable and there.reachable) or (here.side == there.side != "")

    def has_name(self, process: Process) -> bool:
        """True if the DNS name of the rank resolves to this process: its pod exists and has not ended."""
        raw = self.pod_of(process.uid)
        return raw is not None and not _has_ended(raw)

    def pod_of(self, uid: str) -> Raw | None:
        """Return the pod with this uid, if its object exists."""
        raw = self._api.find("pods", self._names.get(uid, ""))
        return raw if raw is not None and raw["metadata"]["uid"] == uid else None

    # ---------------------------------------------------------------- faults and users

    def cut(self, name: str, side: str = "") -> None:
        """Cut off the node, together with the other nodes of its `side`; its containers continue."""
        node = self.nodes[name]
        if node.silent_since is None:
            node.reachable, node.silent_since, node.side = False, self._loop.time(), side
            node.losses += 1
            self.cut_off |= {(p.job_uid, p.attempt) for p in node.processes.values() if p.alive}
            self._training.agents.disconnected(name)
            self._loop.call_later(NOT_READY_SECONDS, self._not_ready, name, node.losses)

    def kill(self, name: str) -> None:
        """Cut the node's power, which ends everything on it."""
        self.cut(name)
        node = self.nodes[name]
        node.powered, node.side = False, ""
        for process in node.processes.values():
            if process.alive:
                self.ends(process, 255, "Unknown", "")

    def back(self, name: str) -> None:
        """Bring the node back."""
        node = self.nodes[name]
        if node.silent_since is None:
            return
        node.reachable, node.powered, node.silent_since, node.side = True, True, None, ""
        self._say_node(name, "True")
        for raw in self._api.all("pods"):
            if raw["spec"].get("nodeName") == name:
                self._later(0.5, 3, self._sync, node, raw["metadata"]["uid"])
        for uid in node.processes:
            self._later(0.5, 3, self._sync, node, uid)

    def remove_node(self, name: str, *, lives_on: bool = False) -> None:
        """Let the cloud remove a node: the machine and its object. lives_on: only the object is deleted; the kubelet
        goes on, and registers again when it is restarted (`back`)."""
        node = self.nodes[name]
        if not lives_on:
            self.kill(name)
        elif node.silent_since is None:
            node.losses, node.silent_since = node.losses + 1, self._loop.time()
        found = self._api.find("nodes", name, "")
        if found is not None:
            self._api.remove("nodes", found, "cloud")
            self._loop.call_later(ORPHAN_SECONDS, self._collect_orphans, name)

    def disrupt(self, pod: Raw, reason: str) -> None:
        """Evict through the API, preempt or drain: set a condition, then delete with the pod's own grace period."""
        self._condition(pod, "DisruptionTarget", "True", reason)
        self.delete_pod(pod, "cluster")

    def under_pressure(self, pod: Raw, reason: str) -> None:
        """Let a kubelet fail a pod: eviction (Evicted), shutdown (Terminated), or the pod's own activeDeadlineSeconds
        (DeadlineExceeded). The pod fails whatever its trainer's exit code, and its object stays."""
        node = self.nodes[pod["spec"]["nodeName"]]
        process = node.processes.get(pod["metadata"]["uid"])
        if process is None or not process.alive or not node.reachable:
            return
        process.told = True
        if reason == "DeadlineExceeded":
            self._training.application_failed(process)
        code = self._random.choice(ENDED_BY_KUBELET)
        self.ends(process, code, "Error" if code else "Completed", "", phase_reason=reason)

    def delete_pod(self, pod: Raw, actor: str, grace_seconds: int | None = None) -> None:
        """Let somebody delete a pod."""
        options: Raw = {"preconditions": {"uid": pod["metadata"]["uid"]}}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        path = f"/api/v1/namespaces/default/pods/{pod['metadata']['name']}"
        self._api.request("DELETE", path, None, options, actor)

    # ---------------------------------------------------------------- changes of objects

    def _hear(self, kind: Kind, change: Change) -> None:
        if kind.plural == types.PLURAL and change.new is None:
            for plural in OWNED:
                for raw in self._api.all(plural):
                    self._collect_later(plural, raw)
        elif kind.plural in OWNED and change.old is None:
            self._collect_later(kind.plural, change.object)
        if kind.plural == "pods":
            self._pod_changed(change)

    def _pod_changed(self, change: Change) -> None:
        raw = change.object
        uid = raw["metadata"]["uid"]
        self._names[uid] = raw["metadata"]["name"]
        place = raw["spec"].get("nodeName")
        if not place:
            if change.old is None:
                self._later(0.02, 0.3, self._schedule, uid)
            return
        node = self.nodes.get(place)
        if node is None:
            return
        self._excuse(node, change)
        if change.actor != place:
            self._later(0.02, 0.5, self._sync, node, uid)

    def _excuse(self, node: Node, change: Change) -> None:
        """Excuse a process that no operator can end: its node was lost, or a user has force-deleted its pod."""
        process = node.processes.get(change.object["metadata"]["uid"])
        if process is None or not process.alive:
            return
        gone = change.new is None
        if gone:
            self.force_deleted.append((process, change.actor))
        if gone or change.object["status"].get("phase") == "Failed":
            is_gone = self._api.find("nodes", node.name, "") is None
            if is_gone or not node.reachable or process.told_after != node.losses:
                process.excused = "its node was lost, and no kubelet has said since that it is back"
            elif change.actor == "user":
                process.excused = FORCED

    # ---------------------------------------------------------------- scheduler

    def _schedule(self, uid: str) -> None:
        raw = self.pod_of(uid)
        if raw is None or raw["spec"].get("nodeName"):
            return
        fault = self._faults.at("scheduler")
        if fault == "slow":
            self._loop.call_later(self._faults.number("scheduler", 1, 60), self._schedule, uid)
            return
        places = {} if fault == "no room" else self._places(raw)
        if uid not in places:
            self._condition(raw, "PodScheduled", "False", "Unschedulable", "0/3 nodes are available")
            self._later(2, 8, self._schedule, uid)
            return
        for member, node in places.items():
            self._bind(member, node)

    def _places(self, raw: Raw) -> dict[str, Node]:
        """Return nodes by pod uid, for this pod and its gang: for all pods that are needed, or for none."""
        group = (raw["spec"].get("schedulingGroup") or {}).get("podGroupName")
        if group is None:
            fitting = [n for n in self.nodes.values() if self._fits(raw, n)]
            return {raw["metadata"]["uid"]: self._random.choice(fitting)} if fitting else {}
        found = self._api.find("podgroups", group)
        if found is None:
            return {}
        members = [
            p for p in self._api.all("pods") if p["spec"].get("schedulingGroup", {}).get("podGroupName") == group
        ]
        places: dict[str, Node] = {}
        taken: list[tuple[Raw, Node]] = []
        for member in (
            m for m in members if not m["spec"].get("nodeName") and "deletionTimestamp" not in m["metadata"]
        ):
            fitting = [n for n in self.nodes.values() if self._fits(member, n, taken)]
            if fitting:
                node = self._random.choice(fitting)
                places[member["metadata"]["uid"]] = node
                taken.append((member, node))
        placed = sum(bool(m["spec"].get("nodeName")) for m in members)
        enough = placed + len(places) >= found["spec"]["schedulingPolicy"]["gang"]["minCount"]
        says = {
            "type": "PodGroupScheduled",
            "status": "True" if enough else "False",
            "message": "" if enough else "gang",
        }
        if (found.get("status") or {}).get("conditions") != [says]:
            self._api.change("podgroups", found, "scheduler", status={"conditions": [says]})
        return places if enough else {}

    def _bind(self, uid: str, node: Node) -> None:
        raw = self.pod_of(uid)
        assert raw is not None, "it was there in this instant"
        scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": stamp(self._loop.now())}
        status = {**raw["status"], "conditions": [scheduled]}
        self._api.change("pods", raw, "scheduler", spec={**raw["spec"], "nodeName": node.name}, status=status)

    def _fits(self, raw: Raw, node: Node, taken: Sequence[tuple[Raw, Node]] = ()) -> bool:
        found = self._api.find("nodes", node.name, "")
        if found is None or found["status"]["conditions"][0]["status"] != "True" or node.name in _avoided(raw):
            return False
        here = [p for p in self._api.all("pods") if p["spec"].get("nodeName") == node.name and not _has_ended(p)]
        here += [p for p, where in taken if where is node]
        apart = ((raw["spec"].get("affinity") or {}).get("podAntiAffinity") or {}) != {}
        labels = raw["metadata"].get("labels")
        return (
            not node.neighbours and len(here) < node.slots and not (apart and any(_same_job(p, labels) for p in here))
        )

    # ---------------------------------------------------------------- kubelets

    def _sync(self, node: Node, uid: str) -> None:
        if not node.reachable:
            return
        raw, process = self.pod_of(uid), _told_of(node, uid)
        alive = process is not None and process.alive
        if raw is None:
            if process is not None and alive:
                self._stop(node, process, int(process.pod["spec"]["terminationGracePeriodSeconds"]))
        elif "deletionTimestamp" in raw["metadata"]:
            if process is not None and alive:
                self._report(node, process)  # replaces the node controller's report, which is out of date
                self._stop(node, process, raw["metadata"]["deletionGracePeriodSeconds"])
            else:
                if process is None and not _has_ended(raw):
                    self._never_made(node, raw)
                self._let_go(node, raw, process)
        elif process is None:
            if raw["status"]["phase"] == "Pending":
                self._start(node, raw)
        elif alive and "activeDeadlineSeconds" in raw["spec"]:
            process.phase_reason = "DeadlineExceeded"
            self._stop(node, process, int(raw["spec"]["terminationGracePeriodSeconds"]))
        else:
            self._report(node, process)

    def _start(self, node: Node, raw: Raw, sure: bool = False) -> None:
        uid = raw["metadata"]["uid"]
        node.accepted.setdefault(uid, stamp(self._loop.now() + node.skew))
        fault = "" if sure else self._faults.at("kubelet")
        if fault:
            if fault == "cannot start":
                waiting = {"reason": "ImagePullBackOff", "message": "back-off pulling image"}
                self._status(node, raw, "Pending", {"waiting": waiting})
            self._loop.call_later(self._faults.number("kubelet", 2, 90), self._try_again, node, uid)
            return
        process = node.processes[uid] = Process.of(raw, node.name)
        process.started = stamp(self._loop.now() + node.skew)
        process.told_after = node.losses
        if uid in self._api.late:
            process.excused = LATE
        self._training.joins(process)
        self.started(process)
        self._later(0.05, 0.8, self._report, node, process)

    def _never_made(self, node: Node, raw: Raw) -> None:
        """Report, as a kubelet does, a container that was not created before its pod was deleted."""
        text = "The container could not be located when the pod was terminated"
        unknown = {"exitCode": 137, "reason": "ContainerStatusUnknown", "message": text, "startedAt": None}
        self._status(node, raw, "Failed", {"terminated": {**unknown, "finishedAt": None}})

    def _try_again(self, node: Node, uid: str) -> None:
        raw = self.pod_of(uid)
        if raw is None or "deletionTimestamp" in raw["metadata"] or uid in node.processes:
            return
        if node.reachable:
            self._start(node, raw, sure=True)

    def _stop(self, node: Node, process: Process, grace_seconds: int) -> None:
        """Send SIGTERM, and SIGKILL when the grace period is over."""
        self._loop.call_later(grace_seconds, self._kill, process)
        if process.told:
            return
        process.told = True
        self.told(process, grace_seconds)
        fault = self._faults.at("sigterm")
        if process.is_agent:
            self._training.agents.told(process, fault)
        elif fault != "ignored":
            code = {"ends with 0": 0, "resumable": RESUMABLE}.get(fault, 143)
            within = self._random.choice(STOPS_WITHIN_SECONDS)
            self._later(0.1, within, self.ends, process, code, "Completed" if code == 0 else "Error", "")

    def _kill(self, process: Process) -> None:
        self.ends(process, 137, "Error", "" if process.is_agent else DEATH_SIGNAL)

    def ends(self, process: Process, code: int, reason: str, message: str, phase_reason: str = "") -> None:
        """End a process, for any reason."""
        if not process.alive:
            return
        process.alive = False
        node = self.nodes[process.node]
        at = stamp(self._loop.now() + node.skew)
        process.terminated = terminated(code, reason, message, at, process.started)
        process.phase_reason = phase_reason or process.phase_reason
        self._training.left(process, code)
        # A kubelet that ends a pod itself reports all at once, except a success, whose phase may come later.
        at_once = phase_reason and code != 0
        if self._faults.at("exit") == "phase later" and not at_once:
            self._later(0.05, 0.5, self._report, node, process, True)
            self._later(1, 5, self._report, node, process)
        else:
            self._later(0.05, 0.8, self._report, node, process)

    def _report(self, node: Node, process: Process, phase_later: bool = False, again: bool = False) -> None:
        raw = self.pod_of(process.uid)
        if raw is None or not node.reachable or (_has_ended(raw) and not again):
            return
        if process.alive:
            self._status(node, raw, "Running", {"running": {}}, ready=True)
            return
        code = process.terminated["exitCode"]
        phase = "Succeeded" if code == 0 and not process.phase_reason else "Failed"
        why = "" if phase_later else process.phase_reason
        state = {"terminated": process.terminated}
        if why == "DeadlineExceeded" and raw["status"]["phase"] == "Running":
            # Container statuses are those from before the end (syncPod in pkg/kubelet, mergePodStatus).
            self._status(node, raw, phase, {"running": {}}, reason=why)
            self._loop.call_later(0.5, self._report, node, process, False, True)
            return
        self._status(node, raw, "Running" if phase_later else phase, state, reason=why)
        raw = self.pod_of(process.uid)
        if raw is not None and "deletionTimestamp" in raw["metadata"]:
            self._later(0.05, 1, self._let_go, node, raw, process)

    def _status(self, node: Node, raw: Raw, phase: str, state: Raw, *, ready: bool = False, reason: str = "") -> None:
        name = raw["spec"]["containers"][0]["name"]
        kept = [c for c in raw["status"].get("conditions") or () if c["type"] not in ("Ready", "ContainersReady")]
        word = "True" if ready else "False"
        status = {
            "phase": phase,
            "startTime": node.accepted.get(raw["metadata"]["uid"]),
            "podIP": raw["metadata"]["uid"],  # any text that no other pod has
            "conditions": [*kept, *({"type": kind, "status": word} for kind in ("Ready", "ContainersReady"))],
            "containerStatuses": [{"name": name, "ready": ready, "state": state}],
        }
        if reason:
            status["reason"] = reason
        if reason and reason != "DeadlineExceeded":
            # The kubelet sets DisruptionTarget only together with the phase (mergePodStatus in pkg/kubelet/status).
            target = {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}
            status["conditions"] = [*status["conditions"], target]
        if status != raw["status"]:
            self._api.change("pods", raw, node.name, status=status)

    def _let_go(self, node: Node, raw: Raw, process: Process | None) -> None:
        """Let the kubelet confirm that no process of a deleted pod is running."""
        if not node.reachable:
            return
        found = self.pod_of(raw["metadata"]["uid"])
        if found is None:
            return
        if process is not None and not _has_ended(found):
            self._report(node, process)
            return
        # The kubelet's last delete has a grace period of 0: the API server updates the time, and removes the object.
        last = {"deletionTimestamp": stamp(self._loop.now()), "deletionGracePeriodSeconds": 0}
        self._api.change("pods", found, node.name, metadata=last)
        self._api.remove("pods", found, node.name)

    # ---------------------------------------------------------------- controllers

    def _say_node(self, name: str, ready: str) -> None:
        raw = self._api.find("nodes", name, "")
        if raw is None:
            self._api.request("POST", "/api/v1/nodes", None, {"metadata": {"name": name}}, "kubelet")
            raw = self._api.find("nodes", name, "")
        assert raw is not None
        condition = {"type": "Ready", "status": ready, "lastTransitionTime": stamp(self._loop.now())}
        self._api.change("nodes", raw, "node controller", status={"conditions": [condition]})

    def _not_ready(self, name: str, loss: int) -> None:
        node = self.nodes[name]
        if node.silent_since is None or node.losses != loss:
            return
        if self._api.find("nodes", name, "") is not None:
            self._say_node(name, "Unknown")
        for raw in self._on(name):
            # As the node controller does: give no reason, and keep the containers' statuses.
            self._condition(raw, "Ready", "False", "")
        self._loop.call_later(EVICTION_SECONDS, self._evict_all, name, loss)

    def _evict_all(self, name: str, loss: int) -> None:
        node = self.nodes[name]
        if node.silent_since is not None and node.losses == loss:
            for raw in self._on(name):
                self.disrupt(raw, "DeletionByTaintManager")

    def _collect_orphans(self, name: str) -> None:
        """Fail and delete the pods of a removed node."""
        if self._api.find("nodes", name, "") is not None:
            return
        for raw in self._on(name):
            self._condition(raw, "DisruptionTarget", "True", "DeletionByPodGC", phase="Failed")
            found = self.pod_of(raw["metadata"]["uid"])
            if found is not None:
                self._api.remove("pods", found, "pod gc")

    def _on(self, name: str) -> list[Raw]:
        return [p for p in self._api.all("pods") if p["spec"].get("nodeName") == name and not _has_ended(p)]

    def _collect_later(self, plural: str, raw: Raw) -> None:
        if self._has_no_owner(raw):
            slow = self._faults.at("collector") == "slow"
            seconds = self._faults.number("collector", 5, 60) if slow else self._random.uniform(0.1, 2)
            self._loop.call_later(seconds, self._collect, plural, raw)

    def _has_no_owner(self, raw: Raw) -> bool:
        uid = owner_uid(raw)
        return bool(uid) and all(job["metadata"]["uid"] != uid for job in self._api.all(types.PLURAL))

    def _collect(self, plural: str, raw: Raw) -> None:
        found = self._api.find(plural, raw["metadata"]["name"])
        if found is None or found["metadata"]["uid"] != raw["metadata"]["uid"] or not self._has_no_owner(found):
            return
        if plural == "pods":
            self.delete_pod(found, "collector")
        else:
            self._api.remove(plural, found, "collector")

    def _condition(self, raw: Raw, kind: str, status: str, reason: str, message: str = "", phase: str = "") -> None:
        now = self.pod_of(raw["metadata"]["uid"])
        if now is None:
            return
        conditions = now["status"].get("conditions") or ()
        if any(c["type"] == kind and c["status"] == status for c in conditions):
            return
        new = {"type": kind, "status": status, "reason": reason, "lastTransitionTime": stamp(self._loop.now())}
        if message:
            new["message"] = message
        kept = [c for c in conditions if c["type"] != kind]
        said = {**now["status"], "conditions": [*kept, new], "phase": phase or now["status"]["phase"]}
        self._api.change("pods", now, "cluster", status=said)

    def _later(self, low: float, high: float, call: Callable[..., None], *arguments: Any) -> None:
        self._loop.call_later(self._random.uniform(low, high), call, *arguments)


def _told_of(node: Node, uid: str) -> Process | None:
    """Return a container, and note that its kubelet reports it now."""
    process = node.processes.get(uid)
    if process is not None:
        process.told_after = node.losses
    return process


def _has_ended(raw: Raw) -> bool:
    return raw["status"].get("phase") in ("Succeeded", "Failed")


def _same_job(raw: Raw, labels: Any) -> bool:
    return bool(labels) and (raw["metadata"].get("labels") or {}).get("training.ddpjob.io/job") == labels.get(
        "training.ddpjob.io/job"
    )


def _avoided(raw: Raw) -> set[str]:
    """Return the nodes that a pod's affinity excludes by name."""
    affinity = (raw["spec"].get("affinity") or {}).get("nodeAffinity") or {}
    terms = (affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}).get("nodeSelectorTerms") or ()
    fields = [f for term in terms for f in term.get("matchFields") or () if f["operator"] == "NotIn"]
    return {name for f in fields for name in f["values"]}
