"""A model of Kueue: one queue with quota for so many nodes, which admits Workloads by priority and preempts lower ones.

What it does was seen of Kueue 0.14.8 (docs/gangs.md): an evicted Workload keeps its quota until its owner has taken the
admission out of the status; one that is finished or gone has none. One with minCount is admitted in part where neither
free quota nor preemption is enough for all of it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from model_api import Change, Kind, ModelApi, Raw, stamp
from virtual_time import VirtualLoop

SERVED = "kueue.x-k8s.io/v1beta1"
QUEUE = "main"
FLAVOR = "any-node"
PRIORITIES = {"low": 0, "high": 100}
LOOKS_WITHIN_SECONDS = (0.05, 0.5)


class Kueue:
    """The manager of Kueue. `evicted` is called with each Workload that it evicts."""

    def __init__(self, loop: VirtualLoop, api: ModelApi, seed: int, quota: int) -> None:
        self.quota = quota
        self.is_down = False
        self.partly = 0
        """How often it has admitted fewer pods than a Workload asks for."""
        self.evicted: Callable[[Raw], None] = lambda workload: None
        self._loop, self._api = loop, api
        self._random = random.Random(f"{seed} kueue")
        self._is_to_look = False
        api.served.add(SERVED)
        api.objects["resourceflavors"]["", FLAVOR] = {"metadata": {"name": FLAVOR}, "spec": {}}
        for name, value in PRIORITIES.items():
            api.objects["workloadpriorityclasses"]["", name] = {"metadata": {"name": name}, "value": value}
        api.listeners.append(self._hear)

    def goes(self) -> None:
        """It is down: its webhook refuses what is written, and nothing is admitted."""
        self.is_down = True
        self._api.webhooks_down.add("workloads")

    def comes_back(self) -> None:
        """It works again, and knows all that it knew."""
        self.is_down = False
        self._api.webhooks_down.clear()
        self._look_soon()

    def holders(self) -> list[Raw]:
        """The Workloads that have quota."""
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
            if workload["spec"].get("active") is False and holds_quota(workload) and not is_true(workload, "Evicted"):
                self._evict(workload, "Deactivated", "the workload is deactivated")
        for workload in sorted(workloads, key=lambda w: (-_priority(w), int(w["metadata"]["uid"][-12:]))):
            waits = not holds_quota(workload) and not is_true(workload, "Finished") and _asks(workload)
            if waits and self._consider(workload):
                # Who preempts stays at the head of its queue (RequeueReasonPendingPreemption): what comes back is not
                # given to those behind it.
                return

    def _consider(self, workload: Raw) -> bool:
        """Whether it waits for quota that others are to give back to it."""
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
        if _condition(workload, "Evicted"):
            news["Evicted"] = ("False", "QuotaReserved", "")
        self._say(workload, admission, **news)

    def _evict(self, workload: Raw, reason: str, text: str) -> None:
        self._say(workload, Evicted=("True", reason, text))
        self.evicted(workload)

    def _say(self, workload: Raw, admission: Raw | None = None, **news: tuple[str, str, str]) -> None:
        """Writes conditions: status, reason, message."""
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
    """Return the number of pods that it requests."""
    return int(workload["spec"]["podSets"][0]["count"])


def least(workload: Raw) -> int:
    """With how many pods it may be admitted."""
    podset = workload["spec"]["podSets"][0]
    return int(podset.get("minCount", podset["count"]))


def held(workload: Raw) -> int:
    """For how many pods it has quota."""
    admission = (workload.get("status") or {}).get("admission")
    return int(admission["podSetAssignments"][0]["count"]) if admission else count(workload)


def holds_quota(workload: Raw) -> bool:
    """Whether the queue counts it."""
    return is_true(workload, "QuotaReserved") and not is_true(workload, "Finished")


def is_true(workload: Raw, kind: str) -> bool:
    """Whether it has this condition."""
    return _condition(workload, kind).get("status") == "True"


def _asks(workload: Raw) -> bool:
    """Whether it is to be admitted. One that was evicted asks again by Requeued, or once it is active again."""
    return workload["spec"].get("active") is not False


def _priority(workload: Raw) -> int:
    return int(workload["spec"].get("priority", 0))


def _condition(workload: Raw, kind: str) -> dict[str, Any]:
    listed = (workload.get("status") or {}).get("conditions") or ()
    return next((c for c in listed if c["type"] == kind), {})
