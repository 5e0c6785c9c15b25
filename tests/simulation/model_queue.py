"""A queue with quota and preemption, and jobs of one namespace in it: only the rules, in random walks. The queue acts
as Kueue was seen to do (docs/gangs.md): it admits by priority what fits, evicts lower priorities, and counts the quota
of an evicted job until the job returns it."""

from __future__ import annotations

import datetime as dt
import random
from collections import Counter
from dataclasses import replace as replaced

from msgspec.structs import replace
from worlds import World, job

from ddpjob_operator.gangs import kueue
from ddpjob_operator.job.status import TERMINAL
from ddpjob_operator.observed.cluster import Refusal
from ddpjob_operator.observed.groups import Admission, ObservedGroup
from ddpjob_operator.plan.actions import CreateGroup, DeletePod

QUEUE, NO_QUEUE = "main", "mian"
QUOTA = 4
JOBS = (2, 3, 2)
EVENTS = 120
REST_ROUNDS = 400
WRONG_MAX = 3


class Walk:
    """Three jobs that do not fit together, and events."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.wrong: list[str] = []
        self.worlds = [self._world(nodes) for nodes in JOBS]
        self.evictions = 0
        self._stops: Counter[tuple[int, str]] = Counter()
        self._excused: set[int] = set()
        """Jobs whose Workload somebody deleted while their pods were running: the queue gives their quota to others."""

    def _world(self, nodes: int) -> World:
        plain = job(nodes=nodes, backoffLimit=self.random.choice((0, 3, 20)))
        world = World(plain).serves("kueue", "kueue.x-k8s.io/v1beta1")
        self._label(world, QUEUE)
        return world

    @staticmethod
    def _label(world: World, queue: str) -> None:
        """Let the user choose this queue."""
        metadata = replace(world.job.metadata, labels={kueue.QUEUE_LABEL: queue})
        world.job = replace(world.job, metadata=metadata)

    def run(self) -> list[str]:
        """Return what is wrong; "" for nothing."""
        for _ in range(EVENTS):
            self._something_happens()
            self._check()
        for world in self.worlds:
            world.refusals = []
            self._label(world, QUEUE)
        for _ in range(REST_ROUNDS):
            self._goes_well()
            self._check()
            if all(world.status.state in TERMINAL for world in self.worlds) and not self.used():
                return self.wrong
        states = [(world.status.state, world.status.reason, world.status.message) for world in self.worlds]
        return [*self.wrong, f"not all have ended, or {self.used()} of the quota is held: {states}"][-WRONG_MAX:]

    # ---------------------------------------------------------------- the queue

    def used(self) -> int:
        """Return the used quota, as the queue counts it."""
        return sum(JOBS[n] for n in range(len(JOBS)) if self._holds(n))

    def _holds(self, number: int) -> bool:
        group = self._group(number)
        admission = group.admission if group is not None else Admission("waiting")
        return group is not None and not group.is_over and (admission.state == "admitted" or admission.holds_quota)

    def _group(self, number: int) -> ObservedGroup | None:
        groups = list(self.worlds[number].groups.values())
        if len(groups) > 1:
            self._found(number, "has two Workloads: it would hold its quota twice")
        return groups[0] if groups else None

    def _say(self, number: int, admission: Admission) -> None:
        world = self.worlds[number]
        world.groups = {name: replaced(group, admission=admission) for name, group in world.groups.items()}

    def _queue_works(self) -> None:
        """Let the queue admit and evict. Later jobs have higher priorities."""
        for number in reversed(range(len(JOBS))):
            group = self._group(number)
            if group is None or group.is_over or group.admission.state != "waiting" or group.asked[0] != QUEUE:
                continue
            if self.used() + JOBS[number] <= QUOTA:
                self._excused.discard(number)
                self._say(number, Admission("admitted"))
            else:
                lower = [other for other in range(number) if self._is_admitted(other)]
                for other in lower[:1]:
                    self._evict(other)
            return

    def _is_admitted(self, number: int) -> bool:
        group = self._group(number)
        return group is not None and not group.is_over and group.admission.state == "admitted"

    def _evict(self, number: int) -> None:
        self.evictions += 1
        self._stops = Counter({key: count for key, count in self._stops.items() if key[0] != number})
        self._say(number, Admission("evicted", "preempted by another job", holds_quota=True))

    # ---------------------------------------------------------------- events

    def _something_happens(self) -> None:
        number = self.random.randrange(len(JOBS))
        world, chance = self.worlds[number], self.random.random()
        if chance < 0.45:
            self._operator(number, crashes=self.random.random() < 0.2)
        elif chance < 0.55:
            self._queue_works()
        elif chance < 0.85:
            self._pod_event(world)
        elif chance < 0.90:
            for each in self.worlds:
                each.after(self.random.choice((1, 30, 400)))
        elif chance < 0.93 and world.status.state not in TERMINAL:
            world.change(suspend=not world.job.spec.suspend)
        elif chance < 0.95 and self._is_admitted(number):
            self._evict(number)
        elif chance < 0.97:
            world.groups.clear()
            self._excused.add(number)
        elif chance < 0.98:
            self._label(world, self.random.choice((QUEUE, NO_QUEUE)))
        else:
            later = world.now + dt.timedelta(seconds=20)
            world.refusals = [Refusal(kueue.ADAPTER.resource, world.job.metadata.name, "failed calling webhook", later)]

    def _operator(self, number: int, *, crashes: bool = False) -> None:
        """Let the operator plan once and act, or crash after some of the actions."""
        world = self.worlds[number]
        todo = world.plan()
        if todo.status is not None:
            world.job = replace(world.job, status=todo.status)
        refused = {r.name for r in world.refusals if r.retry_at > world.now}
        done = self.random.randrange(len(todo.actions) + 1) if crashes else len(todo.actions)
        for action in todo.actions[:done]:
            if isinstance(action, CreateGroup) and world.job.metadata.name in refused:
                continue
            if isinstance(action, DeletePod) and world.status.reason == "Evicted" and world.pods[action.name].live:
                self._stopped(number, action)
            try:
                world.act(action)
            except AssertionError as wrong:
                self._found(number, str(wrong))
                return

    def _stopped(self, number: int, stop: DeletePod) -> None:
        self._stops[number, stop.uid] += 1
        if self._stops[number, stop.uid] > 1 or stop.grace_seconds is not None:
            self._found(number, f"{stop.name} is stopped twice, or without its full grace: its save is lost")

    def _pod_event(self, world: World) -> None:
        live = [pod for pod in world.pods.values() if pod.live]
        if not live:
            return
        pod = self.random.choice(live)
        if pod.deletion_requested_at is not None:
            del world.pods[pod.name]
        elif pod.trainer.state == "waiting":
            world.runs(pod.place)
        elif self.random.random() < 0.3:
            world.exits(pod.place, self.random.choice((0, 0, 1)))
        elif self.random.random() < 0.1:
            world.deleted_first(pod.place)

    def _goes_well(self) -> None:
        self._queue_works()
        for number, world in enumerate(self.worlds):
            if world.job.spec.suspend and world.status.state not in TERMINAL:
                world.change(suspend=False)
            self._operator(number)
            for pod in list(world.pods.values()):
                if pod.live and pod.deletion_requested_at is not None:
                    del world.pods[pod.name]
                elif pod.live and pod.trainer.state == "waiting" and self._is_present(world, pod.attempt):
                    world.runs(pod.place)
                elif pod.live and world.status.state == "Running":
                    world.exits(pod.place, 0)
            world.after(60)

    @staticmethod
    def _is_present(world: World, attempt: int) -> bool:
        return world.status.attempt == attempt

    # ---------------------------------------------------------------- what must hold

    def _check(self) -> None:
        for number, world in enumerate(self.worlds):
            live = [pod.name for pod in world.pods.values() if pod.live]
            if not live:
                self._excused.discard(number)
            elif not self._holds(number) and number not in self._excused:
                self._found(number, f"{live[0]} lives, and the queue may give its quota to others")
        using = [n for n, world in enumerate(self.worlds) if any(p.live for p in world.pods.values())]
        nodes = sum(JOBS[n] for n in using if n not in self._excused)
        if nodes > QUOTA:
            self.wrong.append(f"jobs {using} use {nodes} nodes, and the quota is {QUOTA}")

    def _found(self, number: int, what: str) -> None:
        self.wrong.append(f"job {number} ({self.worlds[number].status.reason}): {what}")
