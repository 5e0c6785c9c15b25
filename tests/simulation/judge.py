"""What must hold at every moment, whatever goes wrong (DESIGN.md section 7). Told of every change and every start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from model_api import Change, Kind, Raw, owner_uid
from model_kubelet import Cluster
from model_training import Process, Training

from ddpjob_operator import api, contract

BACKOFF_LIMIT = api.Spec().backoff_limit
TERMINAL = ("Succeeded", "Failed")
STOPS = (*TERMINAL, "Failing", "Suspended", "Restarting")


class Judge:
    """Collects what is wrong. Each sentence says what a user would lose."""

    def __init__(self, cluster: Cluster, training: Training, jobs: Callable[[], list[Raw]]) -> None:
        self.wrong: list[str] = training.wrong
        self.statuses: dict[str, Raw] = {}
        """The newest status of every job that ever was, by uid."""
        self.live_at_once = 0
        self._cluster, self._training, self._jobs = cluster, training, jobs
        cluster.started = self.started

    def started(self, process: Process) -> None:
        """A trainer has started."""
        others = [p for p in self._cluster.processes() if p is not process and p.job == process.job]
        for other in others:
            if (other.job_uid, other.attempt) == (process.job_uid, process.attempt):
                if other.rank == process.rank and not (other.excused or process.excused):
                    self.wrong.append(f"rank {process.rank} lives twice in one attempt: {other} and {process}")
            elif not (other.excused or process.excused):
                self.wrong.append(
                    f"{process} started while {other} of another attempt lives: two groups would train into one "
                    "checkpoint"
                )
        self.live_at_once = max(self.live_at_once, len(others) + 1)

    def changed(self, kind: Kind, change: Change) -> None:
        """An object has changed."""
        by_operator = change.actor.startswith("operator")
        if kind.plural == api.PLURAL:
            self._job_changed(change)
        elif by_operator and kind.plural in ("pods", "services"):
            self._operator_changed(kind, change)

    def _operator_changed(self, kind: Kind, change: Change) -> None:
        raw = change.object
        name = raw["metadata"]["name"]
        if change.old is None:
            if kind.plural == "pods":
                self._created(raw)
            return
        owner = self.statuses.get(owner_uid(raw))
        if owner is None:
            self.wrong.append(f"the operator deleted {kind.kind} {name}, which is not a job's")
        elif kind.plural == "pods":
            self._deleted(raw, owner, change)

    def _created(self, raw: Raw) -> None:
        uid, attempt = owner_uid(raw), _attempt(raw)
        status = self.statuses.get(uid, {})
        if status.get("attempt", 0) < attempt:
            self.wrong.append(
                f"pod {raw['metadata']['name']} was made before attempt {attempt} was recorded: after a crash nobody "
                "knows what it belongs to"
            )

    def _deleted(self, raw: Raw, status: Raw, change: Change) -> None:
        attempt, name = _attempt(raw), raw["metadata"]["name"]
        if owner_uid(raw) not in {job["metadata"]["uid"] for job in self._jobs()}:
            return  # of a deleted job: it goes in any case
        asked_now = change.old is not None and "deletionTimestamp" not in change.old["metadata"]
        if status.get("attempt", 0) == attempt and status.get("state") not in STOPS:
            self.wrong.append(
                f"pod {name} was deleted in state {status.get('state')} of its own attempt: nothing recorded says why"
            )
        if asked_now and raw["status"].get("phase") in ("Succeeded", "Failed"):
            self._evidence(raw, status)

    def _evidence(self, raw: Raw, status: Raw) -> None:
        """A pod that has failed by itself is deleted: why must be recorded. (That its rank completed is worth nothing
        once its attempt is broken or suspended, and no other is stopped.)"""
        if status.get("attempt") != _attempt(raw) or status.get("state") == "Suspended":
            return
        if raw["status"]["phase"] == "Failed" and not status.get("lastFailure"):
            self.wrong.append(f"pod {raw['metadata']['name']} was deleted, and its failure is not recorded")

    def _job_changed(self, change: Change) -> None:
        uid = change.object["metadata"]["uid"]
        old, new = self.statuses.get(uid, {}), (change.new or {}).get("status") or {}
        if change.new is None:
            return
        self.statuses[uid] = new
        if old == new:
            return
        if new.get("attempt", 0) < old.get("attempt", 0):
            self.wrong.append(f"the attempt went back from {old['attempt']} to {new.get('attempt', 0)}")
        if old.get("state") in TERMINAL and new.get("state") != old["state"]:
            self.wrong.append(f"a job that was {old['state']} became {new.get('state')}")
        self._check_ranks(uid, old, new)
        self._check_restarts(uid, old, new, change.new["spec"])

    def _check_ranks(self, uid: str, old: Raw, new: Raw) -> None:
        attempt = new.get("attempt", 0)
        completed = contract.numbers(new.get("completedNodes", ""))
        if attempt == old.get("attempt", 0):
            for name in ("completedNodes", "startedNodes"):
                lost = contract.numbers(old.get(name, "")) - contract.numbers(new.get(name, ""))
                if lost:
                    self.wrong.append(f"status.{name} has lost rank {sorted(lost)} in attempt {attempt}")
        untrue = [r for r in sorted(completed) if (uid, attempt, r) not in self._training.completed]
        if untrue:
            self.wrong.append(f"rank {untrue} of attempt {attempt} is said to have completed, and has not")
        if new.get("state") == "Succeeded" and old.get("state") != "Succeeded":
            nodes = (new.get("nodes") or {}).get("total", 0)
            if len(completed) < nodes:
                self.wrong.append(f"the job Succeeded with {len(completed)} of {nodes} nodes completed")

    def _check_restarts(self, uid: str, old: Raw, new: Raw, spec: Raw) -> None:
        before, after = old.get("restarts") or {}, new.get("restarts") or {}
        for name in ("application", "infrastructure", "stall", "total"):
            if before.get(name, 0) > after.get(name, 0):
                self.wrong.append(f"status.restarts.{name} went back from {before[name]} to {after.get(name, 0)}")
        application = after.get("application", 0)
        if application > spec.get("backoffLimit", BACKOFF_LIMIT):
            self.wrong.append(f"{application} restarts are charged, backoffLimit is {spec.get('backoffLimit', 0)}")
        truly = sum(1 for job, _ in self._training.failed if job == uid)
        if application > truly:
            self.wrong.append(f"{application} restarts are charged to the application, which failed {truly} times")
        hung = sum(1 for job, _ in self._training.hung if job == uid)
        if after.get("stall", 0) > hung:
            self.wrong.append(f"{after['stall']} restarts are charged to stalls, and it hung {hung} times")
        charged = sum(after.get(name, 0) for name in ("application", "infrastructure", "stall"))
        if charged > max(0, new.get("attempt", 0) - 1):
            self.wrong.append(f"{charged} restarts are charged by attempt {new.get('attempt', 0)}")


def _attempt(raw: Raw) -> int:
    return int(raw["metadata"]["labels"].get(contract.LABEL_ATTEMPT, -1))


def said(status: Raw) -> str:
    """A status as one line of a story."""
    words: list[Any] = [status.get("state"), status.get("reason"), f"attempt {status.get('attempt', 0)}"]
    if status.get("completedNodes"):
        words.append(f"completed {status['completedNodes']}")
    return " ".join(map(str, words)) + f": {status.get('message', '')[:160]}"
