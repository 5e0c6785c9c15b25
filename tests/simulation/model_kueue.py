"""A model of Kueue: one queue with quota for some nodes, which admits Workloads by priority and preempts lower ones.

v1beta1 behaves as observed with Kueue 0.14.8 (docs/gangs.md). An evicted Workload keeps its quota until its owner has
removed the admission from the status. A Workload that is finished or deleted has no quota. One with minCount is
admitted in part if neither free quota nor preemption is enough for all its pods.

v1beta2 follows the types, the webhook and the workload controller of Kueue 0.19.2. It differs only in the names for a
priority class. A Workload whose condition Requeued is False is not considered. Kueue sets the condition to True again
only for the exact reasons of REQUEUED."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

from model_api import Change, Kind, ModelApi, Raw, stamp
from virtual_time import VirtualLoop

CLASS_FIELDS = {"v1beta1": {"priorityClassName", "priorityClassSource"}, "v1beta2": {"priorityClassRef"}}
FIELDS = {"queueName", "podSets", "priority", "active"}
REQUEUED = {"Deactivated": "Reactivated", "ClusterQueueStopped": "ClusterQueueRestarted"}
DEACTIVATED = ("DeactivatedDueToRequeuingLimitExceeded", "Deactivated")
QUEUE = "main"
FLAVOR = "any-node"
PRIORITIES = {"low": 0, "high": 100}
LOOKS_WITHIN_SECONDS = (0.05, 0.5)


class Kueue:
    """Kueue's controller and webhook. `evicted` is called with each Workload that it evicts."""

    def __init__(self, loop: VirtualLoop, api: ModelApi, seed: int, quota: int, version: str) -> None:
        self.quota, self.version = quota, version
        self.is_down = self.is_stopped = False
        self.partly = 0
        """How often Kueue has admitted fewer pods than a Workload requests."""
        self.evicted: Callable[[Raw], None] = lambda workload: None
        self._loop, self._api = loop, api
        self._random = random.Random(f"{seed} kueue")
        self._is_to_look = False
        self._deactivated = itertools.cycle(DEACTIVATED)
        api.serve(f"kueue.x-k8s.io/{version}")
        refuses = api.refuses
        api.refuses = lambda plural, body: self._refusal(plural, body) or refuses(plural, body)
        api.objects["resourceflavors"]["", FLAVOR] = {"metadata": {"name": FLAVOR}, "spec": {}}
        for name, value in PRIORITIES.items():
            api.objects["workloadpriorityclasses"]["", name] = {"metadata": {"name": name}, "value": value}
        api.listeners.append(self._hear)

    def goes(self) -> None:
        """Stop Kueue: its webhook refuses all writes, and it admits nothing."""
        self.is_down = True
        self._api.webhooks_down.add("workloads")

    def comes_back(self) -> None:
        """Start Kueue again. It still knows all Workloads."""
        self.is_down = False
        self._api.webhooks_down.clear()
        self._look_soon()

    def stops(self, is_stopped: bool) -> None:
        """Set the stopPolicy of the ClusterQueue to HoldAndDrain, or remove it."""
        self.is_stopped = is_stopped
        self._look_soon()

    def _refusal(self, plural: str, workload: Raw) -> str:
        """Return the reason why the schema or the webhook refuses a new Workload; "" if they accept it."""
        if plural != "workloads":
            return ""
        spec, of_class = workload["spec"], CLASS_FIELDS[self.version]
        unknown = spec.keys() - FIELDS - of_class
        if unknown:
            return f"unknown fields in {self.version}: {', '.join(sorted(unknown))}"
        is_complete = "priority" in spec or not of_class & spec.keys()
        return "" if is_complete else "priority should not be nil when a priority class is set"

    def holders(self) -> list[Raw]:
        """Return the Workloads that have quota."""
        return [w for w in self._api.all("workloads") if holds_quota(w)]

    def _hear(self, kind: Kind, change: Change) -> None:
        if kind.plural == "workloads" and change.actor != "kueue":
            self._look_soon()

    def _look_soon(self) -> None:
        if not self._is_to_look and not self.is_down:
            self._is_to_look = True
            self._loop.call_later(self._random.uniform(*LOOKS_WITHIN_SECONDS), self._look)

    def _look(self) -> None:
        self._is_to_look = False
        if self.is_down:
            return
        workloads = self._api.all("workloads")
        for workload in workloads:
            self._deactivate_or_requeue(workload)
        for workload in sorted(workloads, key=lambda w: (-_priority(w), int(w["metadata"]["uid"][-12:]))):
            waits = not holds_quota(workload) and not is_true(workload, "Finished") and _asks(workload)
            if waits and not self.is_stopped and self._consider(workload):
                # A Workload that preempts stays at the head of its queue (RequeueReasonPendingPreemption).
                # So released quota does not go to Workloads behind the head.
                return

    def _deactivate_or_requeue(self, workload: Raw) -> None:
        is_active, requeued = workload["spec"].get("active") is not False, _condition(workload, "Requeued")
        if holds_quota(workload):
            if is_true(workload, "Evicted"):
                return
            if not is_active:
                self._evict(workload, next(self._deactivated), "the workload is deactivated")
            elif self.is_stopped:
                self._evict(workload, "ClusterQueueStopped", "The ClusterQueue is stopped")
        elif requeued.get("status") == "False" and is_active and not self.is_stopped and requeued["reason"] in REQUEUED:
            self._say(workload, Requeued=("True", REQUEUED[requeued["reason"]], ""))
            self._look_soon()

    def _consider(self, workload: Raw) -> bool:
        """Admit a Workload, or preempt others for it. Return True if it waits until others release their quota."""
        if (queue := workload["spec"]["queueName"]) != QUEUE:
            self._say(workload, QuotaReserved=("False", "Inadmissible", f"LocalQueue {queue} doesn't exist"))
            return False
        free = self.quota - sum(map(held, self.holders()))
        if count(workload) <= free:
            self._admit(workload, count(workload))
            return False
        returning = sum(held(w) for w in self.holders() if is_true(w, "Evicted"))
        lower = [w for w in self.holders() if _priority(w) < _priority(workload) and not is_true(w, "Evicted")]
        preempts = count(workload) <= free + returning + sum(map(held, lower))
        if preempts:
            for victim in lower:
                if count(workload) > free + returning:
                    returning += held(victim)
                    self._evict(victim, "Preempted", "Preempted to accommodate a workload with higher priority")
        elif least(workload) <= free:
            self.partly += 1
            self._admit(workload, free)
            return False
        more = count(workload) - free
        text = f"insufficient unused quota for cpu in flavor {FLAVOR}, {more} more needed"
        self._say(workload, QuotaReserved=("False", "Pending", text))
        return preempts

    def _admit(self, workload: Raw, pods: int) -> None:
        assigned = {
            "name": workload["spec"]["podSets"][0]["name"],
            "count": pods,
            "flavors": {"cpu": FLAVOR},
        }
        admission = {"clusterQueue": "main", "podSetAssignments": [assigned]}
        news = {"QuotaReserved": ("True", "QuotaReserved", ""), "Admitted": ("True", "Admitted", "")}
        for ended in ("Evicted", "Preempted"):
            if _condition(workload, ended):
                news[ended] = ("False", "QuotaReserved", "")
        self._say(workload, admission, **news)

    def _evict(self, workload: Raw, reason: str, text: str) -> None:
        news = {"Preempted": ("True", "InClusterQueue", text)} if reason == "Preempted" else {}
        self._say(workload, Evicted=("True", reason, text), **news)
        self.evicted(workload)

    def _say(self, workload: Raw, admission: Raw | None = None, **news: tuple[str, str, str]) -> None:
        """Write conditions: (status, reason, message) by type."""
        now = self._api.find("workloads", workload["metadata"]["name"])
        if now is None or now["metadata"]["uid"] != workload["metadata"]["uid"]:
            return
        status, at = now.get("status") or {}, stamp(self._loop.now())
        kept = [c for c in status.get("conditions") or () if c["type"] not in news]
        said = [
            {"type": kind, "status": value, "reason": reason, "message": text, "lastTransitionTime": at}
            for kind, (value, reason, text) in news.items()
            if (_condition(now, kind).get("status"), _condition(now, kind).get("message")) != (value, text)
        ]
        if said:
            new = {**status, "conditions": [*kept, *said], **({"admission": admission} if admission else {})}
            self._api.change("workloads", now, "kueue", status=new)


def count(workload: Raw) -> int:
    """Return the number of pods that a Workload requests."""
    return int(workload["spec"]["podSets"][0]["count"])


def least(workload: Raw) -> int:
    """Return the smallest number of pods with which a Workload may be admitted."""
    podset = workload["spec"]["podSets"][0]
    return int(podset.get("minCount", podset["count"]))


def held(workload: Raw) -> int:
    """Return the number of pods for which a Workload has quota."""
    status = workload.get("status") or {}
    left = count(workload) - sum(freed["count"] for freed in status.get("reclaimablePods") or ())
    admission = status.get("admission")
    return min(left, int(admission["podSetAssignments"][0]["count"])) if admission else left


def holds_quota(workload: Raw) -> bool:
    """True if the queue counts the Workload's quota."""
    return is_true(workload, "QuotaReserved") and not is_true(workload, "Finished")


def is_true(workload: Raw, kind: str) -> bool:
    """True if the Workload has this condition."""
    return _condition(workload, kind).get("status") == "True"


def _asks(workload: Raw) -> bool:
    """True if Kueue considers the Workload for admission."""
    return workload["spec"].get("active") is not False and _condition(workload, "Requeued").get("status") != "False"


def _priority(workload: Raw) -> int:
    return int(workload["spec"].get("priority", 0))


def _condition(workload: Raw, kind: str) -> dict[str, Any]:
    listed = (workload.get("status") or {}).get("conditions") or ()
    return next((c for c in listed if c["type"] == kind), {})
