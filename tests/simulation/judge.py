"""Rules that must hold at every moment, whatever fails. They are checked when an object changes or a trainer starts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

from model_api import Change, Kind, Raw, owner_uid
from model_kubelet import Cluster
from model_training import Process, Training

from ddpjob_operator.job import api, ranges
from ddpjob_operator.observed.reports import AgentReport
from ddpjob_operator.pods import naming

BACKOFF_LIMIT = api.Spec().backoff_limit
TERMINAL = ("Succeeded", "Failed")
STOPS = (*TERMINAL, "Failing", "Suspended", "Restarting")
BUDGETS = ("application", "infrastructure", "stall")
COUNTED_WITHIN_SECONDS = 120.0
"""Seconds until an agent's report must be in the status, however slow the operator's requests are."""


class Judge:
    """Collects violations of the rules. The sentence for each violation says what a user would lose."""

    def __init__(self, cluster: Cluster, training: Training, jobs: Callable[[], list[Raw]]) -> None:
        self.wrong: list[str] = training.wrong
        self.statuses: dict[str, Raw] = {}
        """The newest status of every job, deleted ones included, by uid."""
        self.live_at_once = 0
        self.words: dict[str, dict[tuple[str, int, int], tuple[int, float, object]]] = {}
        """Reports of agents that each operator received, by job uid, attempt and replacement, with time and
        leadership."""
        self.leadership: Callable[[str], object] = lambda _: None
        """Returns the leadership of an operator, because a new leadership begins without reports, which agents
        repeat."""
        self.disturbed: set[tuple[str, int]] = set()
        """(job uid, attempt) of attempts touched from outside, whose first failure therefore depends on timing."""
        self.ends_seen: dict[str, set[tuple[str, int, int]]] = {}
        """By operator, (job uid, attempt, rank) of pods that it saw after their end."""
        self.silence_seen: dict[str, set[tuple[str, int]]] = {}
        """By operator, (job uid, attempt) of pods that it saw while their node did not report."""
        self.placed: set[tuple[str, int, int]] = set()
        """(job uid, attempt, place) of pods that have got a node."""
        self.also: list[Callable[[str, Raw], None]] = []
        """Further checks, called with the uid and each new status of a job."""
        self._spent_twice: Counter[str] = Counter()
        """By job uid, charges to the application that an operator did not know of when it made its own."""
        self.unseen_cuts: Counter[str] = Counter()
        """By job uid, how often the application paid for a network cut that nothing showed."""
        self._cluster, self._training, self._jobs = cluster, training, jobs
        cluster.started = self.started

    def started(self, process: Process) -> None:
        """Check when a trainer starts that no process of its rank or of another attempt is alive."""
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
        self._check_gang(process)
        self.live_at_once = max(self.live_at_once, len(others) + 1)

    def _check_gang(self, process: Process) -> None:
        job = next((j for j in self._jobs() if j["metadata"]["uid"] == process.job_uid), None)
        gang = self.statuses.get(process.job_uid, {}).get("gang") or {}
        if job is None or gang.get("kind") != "native" or gang.get("attempt", 0) != process.attempt:
            return
        needed = job["spec"].get("minNodes") or job["spec"]["nodes"]
        has = sum(found[:2] == (process.job_uid, process.attempt) for found in self.placed)
        if has < needed and not process.excused:
            self.wrong.append(
                f"{process} starts, and {has} of {needed} pods have nodes: two such jobs block each other"
            )

    def _group_deleted(self, raw: Raw) -> None:
        uid, attempt = owner_uid(raw), _attempt(raw)
        live = [p for p in self._cluster.processes() if (p.job_uid, p.attempt) == (uid, attempt) and not p.excused]
        reached = [p for p in live if self._cluster.reachable(p)]
        if reached:
            self.wrong.append(
                f"group {raw['metadata']['name']} was deleted while {reached[0]} lives: it joins no group"
            )

    def changed(self, kind: Kind, change: Change) -> None:
        """Check the rules that a change of this object may break."""
        by_operator = change.actor.startswith("operator")
        if kind.plural == "pods" and change.new is not None and change.new["spec"].get("nodeName"):
            self.placed.add((owner_uid(change.new), _attempt(change.new), _rank(change.new)))
        if kind.plural == api.PLURAL:
            self._job_changed(change)
        elif by_operator and kind.plural == "podgroups" and change.new is None:
            self._group_deleted(change.object)
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
        gang = status.get("gang") or {}
        group = (raw["spec"].get("schedulingGroup") or {}).get("podGroupName")
        own = f"{raw['metadata']['labels'][naming.LABEL_JOB]}-{attempt}-{uid[-5:]}"
        if gang.get("kind") == "native" and group != own:
            self.wrong.append(f"pod {raw['metadata']['name']} is outside of its group: it takes a node by itself")
        name, place = raw["metadata"]["name"], (status.get("attempt", 0), _replacement_of(status, _rank(raw)))
        if place < (attempt, _replacement(raw)):
            self.wrong.append(
                f"pod {name} was made before its attempt or replacement was recorded: after a crash nobody knows what "
                "it belongs to"
            )
        self._check_budget(raw, status)

    def _check_budget(self, raw: Raw, status: Raw) -> None:
        """Check that a pod's agent gets no more restarts than the job has left, so that a failing script ends."""
        env = {e["name"]: e.get("value", "") for e in raw["spec"]["containers"][0].get("env", ())}
        job = next((j for j in self._jobs() if j["metadata"]["uid"] == owner_uid(raw)), None)
        if job is None or "DDPJOB_RESTARTS_LEFT" not in env or status.get("attempt", 0) != _attempt(raw):
            return
        left = json.loads(env["DDPJOB_RESTARTS_LEFT"])["application"]
        charged = (status.get("restarts") or {}).get("application", 0)
        limit = job["spec"].get("backoffLimit", BACKOFF_LIMIT)
        if left > max(0, limit - charged):
            self.wrong.append(
                f"the agent of {raw['metadata']['name']} may restart {left} times, and {charged} of {limit} are charged"
            )

    def _deleted(self, raw: Raw, status: Raw, change: Change) -> None:
        name, present = raw["metadata"]["name"], (status.get("attempt", 0), _replacement_of(status, _rank(raw)))
        if owner_uid(raw) not in {job["metadata"]["uid"] for job in self._jobs()}:
            return  # pods of a deleted job may be deleted in any state
        asked_now = change.old is not None and "deletionTimestamp" not in change.old["metadata"]
        is_present = (_attempt(raw), _replacement(raw)) == present
        if is_present and status.get("state") not in STOPS:
            self.wrong.append(
                f"pod {name} was deleted in state {status.get('state')} of its own attempt: nothing recorded says why"
            )
        if is_present and status.get("reason") == "Replacing" and not self._is_on_lost_node(raw):
            self.wrong.append(f"pod {name} was deleted while another is replaced: its agent was to wait, with all warm")
        if asked_now and raw["status"].get("phase") in ("Succeeded", "Failed"):
            self._evidence(raw, status)

    def _evidence(self, raw: Raw, status: Raw) -> None:
        """Check that the reason is recorded before a pod that failed by itself is deleted. (A completed rank does not
        matter if its attempt is broken or suspended.)"""
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
        (*pod, turn), (*before, turn_before) = _leader_of(new), _leader_of(old)
        is_same = new.get("attempt") != old.get("attempt") or pod == before or pod[0] >= new.get("attemptNodes", 1)
        if not is_same and turn <= turn_before:
            self.wrong.append(f"pod {pod} leads after {before}, both as number {turn}: their claims are not told apart")
        if not is_same and (alive := self._alive(uid, (new.get("attempt", 0), *before))) is not None:
            self.wrong.append(f"pod {pod} is to lead while {alive} is stopping: nobody reads its last report")
        if self._is_for_an_unseen_cut(uid, old, new, change.actor):
            self.unseen_cuts[uid] += 1
        self._check_restarts(uid, old, new, change.new["spec"])
        self._check_cause(uid, old, new, change.actor)
        self._check_in_place(uid, old, new, change.new["spec"])
        self._check_heard(uid, new, change.actor)
        for check in self.also:
            check(uid, new)

    def _alive(self, uid: str, place: tuple[int, ...]) -> Process | None:
        """Return the running process with this attempt, place and replacement, unless its node was ever lost."""
        found = (p for p in self._cluster.processes() if (p.job_uid, p.attempt, p.rank, p.replacement) == (uid, *place))
        return next((p for p in found if not (p.excused or self._cluster.nodes[p.node].losses)), None)

    def _check_ranks(self, uid: str, old: Raw, new: Raw) -> None:
        attempt = new.get("attempt", 0)
        completed = ranges.parse(new.get("completedNodes", ""))
        if attempt == old.get("attempt", 0):
            for name in ("completedNodes", "startedNodes"):
                lost = ranges.parse(old.get(name, "")) - ranges.parse(new.get(name, ""))
                lost -= {rank for rank in lost if _replacement_of(new, rank) > _replacement_of(old, rank)}
                lost -= self._training.agents.not_trained.get((uid, attempt), set())
                # Pods whose number is `attemptNodes` or higher were requested to leave, and the other pods continue.
                lost = {rank for rank in lost if rank < (new.get("attemptNodes") or rank + 1)}
                if name == "startedNodes" and new.get("attemptNodes") and len(completed) >= self._min_nodes(uid):
                    lost &= completed  # at its end an elastic group may lack nodes that did not complete
                if lost:
                    self.wrong.append(f"status.{name} has lost rank {sorted(lost)} in attempt {attempt}")
        untrue = [r for r in sorted(completed) if (uid, attempt, r) not in self._training.completed]
        if untrue:
            self.wrong.append(f"rank {untrue} of attempt {attempt} is said to have completed, and has not")
        if new.get("state") == "Succeeded" and old.get("state") != "Succeeded":
            nodes = (new.get("nodes") or {}).get("total", 0)
            if new.get("attemptNodes"):  # for an elastic job only the nodes that trained must complete
                nodes = max(len(ranges.parse(new.get("startedNodes", ""))), self._min_nodes(uid))
            if len(completed) < nodes:
                self.wrong.append(f"the job Succeeded with {len(completed)} of {nodes} nodes completed")

    def _min_nodes(self, uid: str) -> int:
        job = next((j for j in self._jobs() if j["metadata"]["uid"] == uid), None)
        return 0 if job is None else int(job["spec"].get("minNodes", 0))

    def _check_restarts(self, uid: str, old: Raw, new: Raw, spec: Raw) -> None:
        before, after = old.get("restarts") or {}, new.get("restarts") or {}
        for name in ("application", "infrastructure", "stall", "total"):
            if before.get(name, 0) > after.get(name, 0):
                self.wrong.append(f"status.restarts.{name} went back from {before[name]} to {after.get(name, 0)}")
        application, limit = after.get("application", 0), spec.get("backoffLimit", BACKOFF_LIMIT)
        # Until the operator learns of an agent's restarts, it may use the same restarts of the budget.
        if (own := _own_charges(old, new)["application"]) > 0:
            self._spent_twice[uid] += self._unknown_before(uid, old, ("application",))
            goes_on = spec.get("minNodes") or spec.get("spares")
            if goes_on and spec["template"]["spec"]["containers"][0]["command"][0] == "ddprun":
                self._spent_twice[uid] += own  # the other pods continue, and their agent learns this from the next pod
        if application > limit + self._spent_twice[uid]:
            self.wrong.append(f"{application} restarts are charged, backoffLimit is {limit}")
        truly = sum(1 for job, _ in self._training.failed if job == uid)
        if application > truly + self.unseen_cuts[uid]:
            self.wrong.append(f"{application} restarts are charged to the application, which failed {truly} times")
        hung = sum(1 for job, _ in self._training.hung if job == uid)
        if after.get("stall", 0) > hung:
            self.wrong.append(f"{after['stall']} restarts are charged to stalls, and it hung {hung} times")

    def _is_for_an_unseen_cut(self, uid: str, old: Raw, new: Raw, operator: str) -> bool:
        """True if a failure was charged to the application although the network was cut. The operator saw only lost
        peers, as after a mistake in the script (docs/dev/decisions.md)."""
        failure = new.get("lastFailure") or {}
        place = (uid, failure.get("attempt", 0))
        ends = new.get("state") == "Failed" != old.get("state") and failure.get("class") == "application"
        is_charged = failure.get("reason") == "PeerLost" and (ends or _own_charges(old, new)["application"] > 0)
        is_hidden = place in self._cluster.cut_off and place not in self.silence_seen.get(operator, ())
        is_first = (old.get("restarts") or {}).get("peersLost", 0) == 0
        return is_charged and is_hidden and not is_first

    def _check_cause(self, uid: str, old: Raw, new: Raw, operator: str) -> None:
        """Check that a rank that failed by itself is blamed and counted, if nobody has disturbed the attempt."""
        failure = new.get("lastFailure") or {}
        place = (uid, failure.get("attempt", 0))
        culprit = self._training.culprits.get(place)
        settled = failure.get("class") and failure != old.get("lastFailure")
        if not settled or culprit is None or place in self.disturbed or place in self._training.hung:
            return
        if place in self._training.early and culprit not in ranges.parse(old.get("completedNodes", "")):
            return  # the rank was stopped before its end was known, so its exit code 0 proves nothing
        if self._is_unknown(place, culprit, old.get("lastFailure") or {}, operator):
            return
        if failure["nodeRank"] != culprit or failure["class"] not in ("application", "outOfMemory"):
            self.wrong.append(
                f"rank {culprit} failed by itself in attempt {place[1]}, and rank {failure['nodeRank']} is blamed "
                f"({failure['class']}): {new.get('message', '')[:200]}"
            )

    def _is_unknown(self, place: tuple[str, int], rank: int, recorded: Raw, operator: str) -> bool:
        """True if no operator could record how the rank's pod ended: it was stopped because a peer complained first,
        and has disappeared."""
        is_recorded = (recorded.get("attempt"), recorded.get("nodeRank")) == (place[1], rank)
        is_seen = (*place, rank) in self.ends_seen.get(operator, ())
        is_there = any((owner_uid(p), _attempt(p), _rank(p)) == (*place, rank) for p in self._cluster.pods())
        return not (is_recorded or is_seen or is_there)

    def shown(self, operator: str, raw: Raw) -> None:
        """Record that an operator received an object in a list or a watch."""
        ends = [c["state"].get("terminated") for c in raw.get("status", {}).get("containerStatuses", ())]
        if any(ends):
            self.ends_seen.setdefault(operator, set()).add((owner_uid(raw), _attempt(raw), _rank(raw)))
        said = {c["type"]: (c["status"], c.get("reason", "")) for c in raw.get("status", {}).get("conditions", ())}
        if (said.get("Ready"), said.get("ContainersReady", ("",))[0]) == (("False", ""), "True"):
            self.silence_seen.setdefault(operator, set()).add((owner_uid(raw), _attempt(raw)))

    def forget(self, operator: str) -> None:
        """Forget what an operator knew, because it restarts."""
        self.words.pop(operator, None)
        self.ends_seen.pop(operator, None)
        self.silence_seen.pop(operator, None)

    def _check_in_place(self, uid: str, old: Raw, new: Raw, spec: Raw) -> None:
        """Check that each restart counts once: a restart in place as the agent charged it, and one per new pod or
        attempt."""
        agent = new.get("inPlace")
        if agent is not None:
            true = self._training.agents.charged.get((uid, new["attempt"], agent.get("replacement", 0)), {})
            more = [name for name in BUDGETS if agent.get(name, 0) > true.get(name, 0)]
            if more:
                self.wrong.append(f"{agent} are counted in place, and the agent has charged {true}")
        own = _own_charges(old, new)
        again = self._is_new_attempt(old, new)
        hidden = self._unknown_before(uid, old) if again else 0
        restarted = again or old.get("replacements", {}) != new.get("replacements", {})
        if min(own.values()) < 0 or sum(own.values()) > (1 if restarted else 0) + hidden:
            self.wrong.append(f"{own} restarts are charged at once, beside those in place: {summary(new)}")
        # A node that waits in vain for the start may not know that the job has ended.
        heard = again and new.get("reason") != "StartBackOff" and self._has_said_all(uid, old)
        if heard and sum(own.values()) < hidden:
            self.wrong.append(
                f"{hidden} restarts in place of attempt {old['attempt']} were never counted: {summary(new)}"
            )
        if new.get("state") in TERMINAL and old.get("state") not in TERMINAL and self._has_said_all(uid, new):
            missing = self._unknown_before(uid, new)
            # The operator counts at most one restart beyond the limit.
            if missing and new["restarts"].get("application", 0) <= spec.get("backoffLimit", BACKOFF_LIMIT):
                self.wrong.append(f"the job {new['state']}, and {missing} restarts in place were never counted")

    def _is_new_attempt(self, old: Raw, new: Raw) -> bool:
        return bool(old.get("attempt", 0) != new.get("attempt", 0))

    def _unknown_before(self, uid: str, status: Raw, budgets: tuple[str, ...] = BUDGETS) -> int:
        """Return the restarts that the last leader of this attempt has charged and the status does not count."""
        known = status.get("inPlace") or {}
        key = (uid, status.get("attempt", 0), _leader_of(status)[2])
        true = self._training.agents.charged.get(key, {})
        counted = known if known.get("replacement", 0) == key[2] else {}
        return sum(max(0, true.get(name, 0) - counted.get(name, 0)) for name in budgets)

    def _has_said_all(self, uid: str, status: Raw) -> bool:
        """True if the operator must have seen the pod that has the final report of the attempt's last leader."""
        for raw in self._cluster.pods():
            place = (owner_uid(raw), _attempt(raw), _rank(raw), _replacement(raw))
            if place == (uid, status.get("attempt", 0), *_leader_of(status)[:2]):
                ends = [c["state"].get("terminated") for c in raw["status"].get("containerStatuses", ())]
                return any(e and '"agent"' in e["message"] for e in ends) and not self._is_on_lost_node(raw)
        return False

    def _is_on_lost_node(self, raw: Raw) -> bool:
        """True if the pod's node was ever lost, so that the operator may have given it up."""
        node = self._cluster.nodes.get(raw["spec"].get("nodeName", ""))
        return node is None or node.losses > 0

    def heard(self, operator: str, process: Process, agent: AgentReport, at: float) -> None:
        """Record that a post of a leader has reached an operator."""
        place = process.job_uid, process.attempt, agent.replacement
        self.words.setdefault(operator, {})[place] = agent.restarts.total, at, self.leadership(operator)

    def told(self, process: Process, answer: Raw | None) -> None:
        """Check that agents hear only of leaders in the status: an operator that crashes forgets the others."""
        status = self.statuses.get(process.job_uid, {})
        stored = (status.get("leader") or {}).get("term", 1)
        if answer is not None and status.get("attempt") == process.attempt and answer["term"] > stored:
            self.wrong.append(
                f"{process} is told to follow the leader of term {answer['term']}, and {stored} is stored"
            )

    def _check_heard(self, uid: str, status: Raw, operator: str) -> None:
        known = status.get("inPlace") or {}
        counted = sum(known.get(name, 0) for name in BUDGETS)
        place = (uid, status.get("attempt", 0), known.get("replacement", 0))
        restarts, at, leadership = self.words.get(operator, {}).get(place, (0, 0.0, None))
        is_late = self._cluster.time() > at + COUNTED_WITHIN_SECONDS
        if restarts > counted and is_late and leadership is self.leadership(operator):
            self.wrong.append(f"{counted} restarts in place are counted, and {operator} has heard of {restarts}")


def _own_charges(old: Raw, new: Raw) -> dict[str, int]:
    """Return the restarts that a change of the status adds, without the restarts that an agent reported."""
    before, after = old.get("restarts") or {}, new.get("restarts") or {}
    known, told = old.get("inPlace") or {}, new.get("inPlace") or {}
    same = old.get("attempt", 0) == new.get("attempt", 0) and known.get("replacement", 0) == told.get("replacement", 0)
    return {
        name: after.get(name, 0) - before.get(name, 0) - (told.get(name, 0) - (known.get(name, 0) if same else 0))
        for name in BUDGETS
    }


def _leader_of(status: Raw) -> tuple[int, int, int]:
    """Return the place of the leader, the number of its pod, and its number among the leaders of the attempt."""
    leader = status.get("leader") or {"term": 1}
    number = _replacement_of(status, leader.get("place", 0))
    return leader.get("place", 0), number, leader["term"] if leader["term"] > 1 else number


def _replacement_of(status: Raw, rank: int) -> int:
    return int((status.get("replacements") or {}).get(str(rank), 0))


def _replacement(raw: Raw) -> int:
    return int((raw["metadata"].get("labels") or {}).get(naming.LABEL_REPLACEMENT, 0))


def _rank(raw: Raw) -> int:
    return int((raw["metadata"].get("labels") or {}).get(naming.LABEL_RANK, -1))


def _attempt(raw: Raw) -> int:
    return int((raw["metadata"].get("labels") or {}).get(naming.LABEL_ATTEMPT, -1))


def summary(status: Raw) -> str:
    """Return a status as one line of a run's story."""
    words: list[Any] = [status.get("state"), status.get("reason"), f"attempt {status.get('attempt', 0)}"]
    if status.get("completedNodes"):
        words.append(f"completed {status['completedNodes']}")
    return " ".join(map(str, words)) + f": {status.get('message', '')[:160]}"
