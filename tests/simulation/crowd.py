"""Several jobs in one cluster: gangs if there is room for one of them, or a queue with quota for one.

More must hold than for each job alone. The queue's quota is never used twice. A job keeps its quota over every restart,
and gives it back only when the pods that used it have ended. A job that is preempted saves once."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from faults import swarm_of_gangs, swarm_of_queues
from judge import TERMINAL
from model_api import Change, Kind, Raw, owner_uid
from model_elastic import Rendezvous
from model_kueue import Kueue, held, holds_quota, is_true
from model_training import COMPLAINS, ENDS_EARLY, HANGS, Group, Process
from scenario import FAULTS_SECONDS, RECEIVER_SHARE, Deed, Scenario, elastic_scenario, scenario
from simulation import Outcome, Simulation

from ddpjob_operator.gangs import kueue
from ddpjob_operator.job import api

# Faults and actions after which every job can still end.
CALM = (
    *("crash", "restart", "api server away", "operator cut off"),
    *("pod deleted", "drained", "evicted", "node cut", "touch"),
)
ELASTIC_SHARE = 0.3
OF_QUEUES = ("kueue down", "kueue down", "workload deleted", "workload inactive")
EVERY_SO_MANY_NEWEST = 8


def crowd_scenario(seed: int) -> Scenario:
    """Return two or three jobs: in a queue of Kueue if the seed is odd, otherwise as gangs."""
    rng = random.Random(f"{seed} crowd")
    jobs = [_member(rng, seed, number) for number in range(rng.choice((2, 2, 3)))]
    most = max(one.spec["nodes"] for one in jobs)
    least = max(one.spec.get("minNodes", one.spec["nodes"]) for one in jobs)
    all_nodes = sum(one.spec["nodes"] for one in jobs)
    in_queue = seed % 2 == 1
    newest = seed % EVERY_SO_MANY_NEWEST == 1
    of_queues = (*OF_QUEUES, "queue stopped") if newest else OF_QUEUES
    kinds = [*CALM, *(of_queues if in_queue else ("group deleted", "neighbour")), "suspend", "delete and apply"]
    times = sorted(rng.uniform(0, 0.7 * FAULTS_SECONDS) for _ in range(rng.choice((0, 1, 2, 4))))
    deeds = [Deed(at, rng.choice(kinds), rng.randrange(6), 10 ** rng.uniform(0, 2)) for at in times]
    scales = random.Random(f"{seed} scales")
    scalings = scales.choice((0, 1, 3)) if any("minNodes" in one.spec for one in jobs) else 0
    deeds += [Deed(scales.uniform(0, 0.7 * FAULTS_SECONDS), "scaled", scales.randrange(60)) for _ in range(scalings)]
    return replace(
        jobs[0],
        # One more node for a queue: a job avoids a node after two failures, and might otherwise find no node.
        cluster_nodes=all_nodes + 1 if in_queue else min(most + 1, all_nodes),
        slots=1,
        clusterwide=rng.random() < 0.5,
        operators=2 if rng.random() < 0.12 else 1,
        rates={**jobs[0].rates, **(swarm_of_queues(rng) if in_queue else swarm_of_gangs(rng))},
        deeds=tuple(sorted(deeds, key=lambda deed: deed.at)),
        gang=not in_queue,
        quota=rng.randrange(least, all_nodes) if in_queue else 0,
        kueue="v1beta2" if newest else "v1beta1",
        more=tuple(jobs[1:]),
    )


def growing_scenario(seed: int) -> Scenario:
    """Return two elastic jobs under ddprun in one queue, which change their size when others leave room or need it."""
    rng = random.Random(f"{seed} growing")
    jobs = []
    for number in range(2):
        ddprun = (other for other in itertools.count(seed + 10_000_019 * number) if is_ddprun(elastic_scenario(other)))
        found, priority = elastic_scenario(next(ddprun)), "high" if rng.random() < 0.5 else "low"
        labels = {kueue.QUEUE_LABEL: "main", kueue.PRIORITY_LABEL: priority}
        spec = {name: value for name, value in found.spec.items() if name not in ("ttlSecondsAfterFinished", "gang")}
        found = replace(found, name=f"job-{number}", spec=spec, labels=labels, reports=False, failures={})
        jobs.append(replace(found, starts_at=number * rng.choice((0.0, 30.0, 60.0))))
    nodes = sum(one.spec["nodes"] + one.spec.get("spares", 0) for one in jobs)
    # A job with spares is admitted whole.
    least = max(o.spec["nodes"] + o.spec["spares"] if "spares" in o.spec else o.spec["minNodes"] for o in jobs)
    kinds = (*CALM, *OF_QUEUES, "suspend", *["scaled"] * 6)
    times = sorted(rng.uniform(0, 0.7 * FAULTS_SECONDS) for _ in range(rng.choice((1, 2, 4, 8))))
    return replace(
        jobs[0],
        cluster_nodes=nodes + 1,
        slots=1,
        rates={**jobs[0].rates, **swarm_of_queues(rng)},
        deeds=tuple(Deed(at, rng.choice(kinds), rng.randrange(6), 10 ** rng.uniform(0, 2)) for at in times),
        quota=rng.randrange(least, nodes),
        kueue=rng.choice(("v1beta1", "v1beta2")),
        more=tuple(jobs[1:]),
    )


def is_ddprun(found: Scenario) -> bool:
    return found.launcher == "ddprun"


def is_further(workload: Raw) -> bool:
    """True for a Workload that asks for more nodes for a job that runs."""
    return "." in workload["metadata"]["name"]


def _member(rng: random.Random, seed: int, number: int) -> Scenario:
    """Return a job of the crowd, derived from the single job of another seed."""
    found = scenario(seed + 10_000_019 * number)
    spec = {**found.spec, "nodes": rng.choice((2, 2, 3, 4))}
    for name in ("ttlSecondsAfterFinished", "stall"):
        spec.pop(name, None)
    # Later jobs mostly have a higher priority, so that they preempt earlier ones.
    priority = "high" if rng.random() < (0.7 if number else 0.2) else "low"
    failures = {
        life: failure
        for life, failure in found.failures.items()
        if failure.rank < spec["nodes"] and failure.code != HANGS and life < 9
    }
    elastic = random.Random(f"{seed} elastic {number}")
    if (seed % 2 == 1 or found.launcher == "ddprun") and elastic.random() < ELASTIC_SHARE:
        spec["minNodes"] = elastic.randrange(1, spec["nodes"])
        failures = {life: one for life, one in failures.items() if one.code not in (COMPLAINS, ENDS_EARLY)}
    return replace(
        found,
        seed=seed,
        name=f"job-{number}",
        spec=spec,
        labels={kueue.QUEUE_LABEL: "main", kueue.PRIORITY_LABEL: priority},
        starts_at=number * rng.choice((0.0, 1.0, 10.0, 30.0)),
        failures=failures,
        reports=False,
        receiver=elastic.random() < RECEIVER_SHARE,
    )


class Crowd(Simulation):
    """A run of several jobs."""

    def __init__(self, what: Scenario, only: Mapping[str, str] | None = None) -> None:
        super().__init__(what, only)
        self.saves: Counter[str] = Counter()
        """How often the job of this uid has saved because it was told to stop, since its last eviction."""
        self.preemptions = self.smaller = 0
        self._to_save: dict[str, tuple[int, int]] = {}
        """Evicted jobs that trained undisturbed and must save once. By uid: the attempt, and the job's failures until
        then."""
        self._told: set[tuple[Group | Rendezvous, int]] = set()
        self._without_workload: set[str] = set()
        """Jobs whose Workload somebody has deleted: the queue gives their quota to others immediately."""
        self.queue = Kueue(self.loop, self.api, what.seed, what.quota, what.kueue) if what.quota else None
        if self.queue is not None:
            self.queue.evicted = self._is_evicted
            self.api.listeners.append(self._workload_changed)
            started = self.cluster.started

            def also(process: Process) -> None:
                started(process)
                self._check_quota()

            self.cluster.started = also
        self.cluster.told = self._is_told

    def run(self) -> Outcome:
        """Run like Simulation.run, and count events of several jobs."""
        outcome = super().run()
        outcome.counted = {
            "preemptions": self.preemptions,
            "admissions in part": self.queue.partly if self.queue is not None else 0,
            "parts of a quota given back": self.smaller,
        }
        return outcome

    # ---------------------------------------------------------------- quota

    def _users(self) -> dict[str, Raw]:
        """Return the jobs with running processes, by uid, except processes that no operator can end (`excused`)."""
        uids = {p.job_uid for p in self.cluster.processes() if not p.excused and self.cluster.nodes[p.node].powered}
        return {uid: job for uid, job in self._jobs().items() if uid in uids}

    def _jobs(self) -> dict[str, Raw]:
        return {job["metadata"]["uid"]: job for job in self.api.all(api.PLURAL)}

    def _check_quota(self) -> None:
        assert self.queue is not None
        users = {uid: job for uid, job in self._users().items() if uid not in self._without_workload}
        quotas: Counter[str] = Counter()
        for workload in self.queue.holders():
            quotas[owner_uid(workload)] += held(workload)
        nodes = sum(quotas[uid] or job["spec"]["nodes"] for uid, job in users.items())
        for uid in users.keys() & quotas.keys():
            places = {p.rank for p in self.cluster.processes() if p.job_uid == uid and not p.excused}
            if len(places) > quotas[uid]:
                name = users[uid]["metadata"]["name"]
                self.judge.wrong.append(f"{name} has {len(places)} pods, and quota for {quotas[uid]}")
        if nodes > self.queue.quota:
            names = sorted(job["metadata"]["name"] for job in users.values())
            self.judge.wrong.append(f"{' and '.join(names)} use {nodes} nodes, and the quota is {self.queue.quota}")

    def _workload_changed(self, kind: Kind, change: Change) -> None:
        if kind.plural != "workloads":
            return
        name, uid = change.object["metadata"]["name"], owner_uid(change.object)
        by_operator = change.actor.startswith("operator")
        before, after = change.old, change.new
        reserves = after is not None and is_true(after, "QuotaReserved")
        if after is not None and reserves and not (after.get("status") or {}).get("admission"):
            self.judge.wrong.append(f"the Workload {name} reserves quota without an admission: Kueue 0.19 refuses it")
        if before is None:
            others = [w for w in self.api.all("workloads") if owner_uid(w) == uid]
            if len(others) > 1 and not is_further(change.object):
                self.judge.wrong.append(f"{name} has {len(others)} Workloads: it would hold its quota twice")
            return
        gives_back = holds_quota(before) and (after is None or not holds_quota(after))
        if (gives_back and is_further(before)) or (after is not None and held(after) < held(before)):
            self.smaller += 1
            self._check_quota()
            return
        if not gives_back:
            if after is not None and holds_quota(after) and not (holds_quota(before) or is_further(after)):
                self._without_workload.discard(uid)
                self._tell_workload(change, "admitted")
            return
        self._tell_workload(change, "gives its quota back")
        if by_operator:
            self._given_back(name, uid, before, after)
        elif uid in self._jobs():
            self._without_workload.add(uid)

    def _tell_workload(self, change: Change, what: str) -> None:
        self.tell(change.actor, f"workload {change.object['metadata']['name']} {what}")

    def _given_back(self, name: str, uid: str, before: Raw, after: Raw | None) -> None:
        job = self._jobs().get(uid)
        status = (job or {}).get("status") or {}
        if job is None:
            return
        if uid in self._users():
            self.judge.wrong.append(f"the quota of {name} is given back, and its pods still run: others start beside")
        is_over = status.get("state") in TERMINAL
        is_stopped = is_true(before, "Evicted") or job["spec"].get("suspend") or status.get("state") == "Suspended"
        is_stopped |= not status.get("attempt")  # scaled before its first attempt: it asks for another number
        if not is_over and not is_stopped:
            self.judge.wrong.append(f"{name} has lost its quota in state {status.get('state')}: it has to queue again")
        if after is not None and not is_over:
            self._check_saved(name, uid)

    def _check_saved(self, name: str, uid: str) -> None:
        attempt, failures = self._to_save.pop(uid, (None, 0))
        saves = self.saves.pop(uid, 0)
        untouched = (uid, attempt) not in self.judge.disturbed and self._failures(uid) == failures
        completed = any(found[:2] == (uid, attempt) for found in self.training.completed)
        if attempt is not None and untouched and not completed and saves != 1:
            self.judge.wrong.append(f"{name} was preempted in attempt {attempt}, and saved {saves} times")

    # ---------------------------------------------------------------- evictions

    def _is_evicted(self, workload: Raw) -> None:
        uid = owner_uid(workload)
        self.preemptions += 1
        self.tell("kueue", f"evicts {workload['metadata']['name']}")
        job = self._jobs().get(uid)
        if job is None or is_further(workload):
            return
        self.saves.pop(uid, None)
        whole = next((g for g in self.training.groups.values() if self._trains(g, uid)), None)
        elastic = next((g for g in self.training.elastic.groups.values() if self._trains_elastically(g, uid)), None)
        training = whole.present if whole else elastic.training if elastic else []
        # Ranks that are stopping for the start deadline or a suspension have saved already.
        if training and not any(process.told for process in training):
            self._to_save[uid] = training[0].attempt, self._failures(uid)

    def _failures(self, uid: str) -> int:
        """Return how often the application of a job has failed by itself."""
        return sum(of == uid for of, _ in self.training.failed)

    def _trains(self, group: Group, uid: str) -> bool:
        ranks = group.present
        return bool(ranks) and ranks[0].job_uid == uid and not group.broken and all(p.alive for p in ranks)

    @staticmethod
    def _trains_elastically(group: Rendezvous, uid: str) -> bool:
        ranks = group.training
        return bool(ranks) and ranks[0].job_uid == uid and not group.closed and all(p.alive for p in ranks)

    def _is_told(self, process: Process, grace_seconds: int) -> None:
        """Send SIGTERM to a process. Ranks that are all training agree on a step, save and end."""
        if process.is_elastic:
            return self._is_told_elastically(process, grace_seconds)
        group = self.training.groups.get(process.run)
        full = int(process.pod["spec"]["terminationGracePeriodSeconds"])
        whole = group is not None and self._trains(group, process.job_uid) and group.stuck_at is None
        if group is None or not whole or (group, 0) in self._told:
            return None
        self._told.add((group, 0))
        if grace_seconds < full:
            return None  # ranks are killed before they have agreed on a step
        if self.training.saves(group.present[0], self.training._step(group)):
            self.saves[process.job_uid] += 1
        return None

    def _is_told_elastically(self, process: Process, grace_seconds: int) -> None:
        """Send SIGTERM to a process of an elastic job. Nodes that wait to join have nothing to save."""
        group = self.training.elastic.groups.get(process.run)
        full = int(process.pod["spec"]["terminationGracePeriodSeconds"])
        if group is None or process not in group.training or not self._trains_elastically(group, process.job_uid):
            return
        if (group, group.generation) in self._told:
            return
        self._told.add((group, group.generation))
        step = self.training.elastic._step(group)
        if grace_seconds >= full and self.training.saves(group.training[0], step):
            self.saves[process.job_uid] += 1

    # ---------------------------------------------------------------- actions and the end

    def _user(self, deed: Deed) -> None:
        name = self._aim(deed)
        if deed.what == "kueue down" and self.queue is not None:
            self.queue.goes()
            self.loop.call_later(deed.seconds, self.queue.comes_back)
        elif deed.what == "workload deleted":
            found = self.api.find("workloads", name)
            if found is not None:
                self.api.remove("workloads", found, "user")
        elif deed.what == "workload inactive":
            self._activate(name, False)
            self.loop.call_later(deed.seconds, self._activate, name, True)
        elif deed.what == "queue stopped" and self.queue is not None:
            self.queue.stops(True)
            self.loop.call_later(deed.seconds, self.queue.stops, False)
        else:
            super()._user(deed)

    def _activate(self, name: str, yes: bool) -> None:
        found = self.api.find("workloads", name)
        if found is not None:
            self.api.change("workloads", found, "user", spec={**found["spec"], "active": yes})

    def _stop_faults(self) -> None:
        super()._stop_faults()
        if self.queue is not None:
            self.queue.comes_back()
            self.queue.stops(False)
        for name in self.jobs:
            self._activate(name, True)

    def _check_end(self) -> None:
        super()._check_end()
        states: dict[str, Any] = {name: self._end_state(name) for name in self.jobs}
        for name, state in states.items():
            if state not in (*TERMINAL, "Gone"):
                self.judge.wrong.append(f"{name} has not ended: {state}")
        for workload in self.queue.holders() if self.queue is not None else ():
            name = workload["metadata"]["name"]
            self.judge.wrong.append(f"{name} is {states.get(name)} and holds quota for {held(workload)} nodes")


def simulate_crowd(what: Scenario, only: Mapping[str, str] | None = None) -> Outcome:
    """Run a scenario with several jobs. See Simulation.run."""
    return Crowd(what, only).run()
