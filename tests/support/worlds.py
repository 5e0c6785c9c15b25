"""Situations of a job, as sentences: `digits().running()`, `.exits(rank=1, code=3)`.

A World plays the API server and the kubelets in the simplest way: it carries out a plan, and lets pods do what a test
says. Time is virtual and starts at an odd moment, to detect code that reads the real clock."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace as replaced
from typing import Any, Literal

from msgspec.structs import replace

from ddpjob_operator.gangs import kueue
from ddpjob_operator.job import api, validation
from ddpjob_operator.observed import facts
from ddpjob_operator.observed.cluster import ConflictingObject, Container, Node, Observed, Pod, Refusal
from ddpjob_operator.observed.groups import Admission, GangApi, ObservedGroup, Placement
from ddpjob_operator.observed.reports import AgentReport, Report
from ddpjob_operator.observed.stall import StepTracker, update
from ddpjob_operator.plan.actions import (
    Action,
    CreateGroup,
    CreatePod,
    CreateService,
    DeleteGroup,
    DeleteJob,
    DeletePod,
    EndPod,
    Event,
    Plan,
    Settings,
    TellGroup,
)
from ddpjob_operator.plan.plan import plan

START = dt.datetime(2031, 3, 5, 7, 11, 13, tzinfo=dt.timezone.utc)
UID = "7d0c6f1e-0000-4000-8000-000000000001"


def manifest(name: str = "digits", *, container: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    """Return a DDPJob as it is read from YAML."""
    trainer = {"name": "trainer", "image": "ddpjob-trainer", "command": ["torchrun", "train.py"]} | (container or {})
    return {
        "apiVersion": api.API_VERSION,
        "kind": api.KIND,
        "metadata": {"name": name, "namespace": "default", "uid": UID, "generation": 1},
        "spec": {"nodes": 2, "template": {"spec": {"containers": [trainer]}}} | spec,
    }


def job(name: str = "digits", *, container: dict[str, Any] | None = None, **spec: Any) -> api.DDPJob:
    """Return a valid DDPJob."""
    parsed, problems = validation.parse(manifest(name, container=container, **spec))
    assert not problems, problems
    return parsed


class World:
    """A job, its pods and a virtual clock."""

    def __init__(self, what: api.DDPJob) -> None:
        self.job = what
        self.now = START
        self.service = False
        self.pods: dict[str, Pod] = {}
        self.deleted_pods: list[Pod] = []
        self.conflicting_pods: list[Pod] = []
        self.conflicts: list[ConflictingObject] = []
        self.refusals: list[Refusal] = []
        self.reports: dict[int, Report] = {}
        self.trackers: dict[int, StepTracker] = {}
        self.agent: AgentReport | None = None
        self.agents_ask = True
        self.listening_since: dt.datetime | None = None
        self.nodes: dict[str, Node] | None = {}
        self.problems: list[validation.Problem] = []
        self.gang_apis: dict[str, GangApi] = {}
        self.groups: dict[str, ObservedGroup] = {}
        self.neighbours: dict[str, int] = {}
        self.no_room = ""
        self.told: list[str] = []
        self.settings = Settings()
        self.events: list[Event] = []
        self.of_deleted_job = False
        self._made = self._observations = 0

    # ---------------------------------------------------------------- planning and acting

    @property
    def seen(self) -> Observed:
        """Return the observations that plan() gets."""
        return Observed(
            service=self.service,
            pods=(*self.conflicting_pods, *self.pods.values()),
            deleted_pods=tuple(self.deleted_pods),
            conflicts=tuple(self.conflicts),
            refusals=tuple(self.refusals),
            reports=dict(self.reports),
            trackers=dict(self.trackers),
            agent=self.agent,
            agents_ask=self.agents_ask,
            listening_since=self.listening_since,
            nodes=self.nodes,
            gang_apis=self.gang_apis,
            groups=tuple(self.groups.values()),
            neighbours=self.neighbours,
            no_room=self.no_room,
        )

    def plan(self) -> Plan:
        """Return what plan() decides now. Nothing is carried out."""
        return plan(self.job, self.seen, self.now, problems=self.problems, settings=self.settings)

    def step(self) -> Plan:
        """Plan once and carry it out: the status first, then the actions."""
        todo = self.plan()
        if todo.status is not None:
            if todo.status.attempt != self.job.status.attempt:
                self.agent = None  # as in the real operator: an agent's reports belong to one attempt
            self.job = replace(self.job, status=todo.status)
        for action in todo.actions:
            self.act(action)
        self.events += todo.events
        return todo

    def settle(self, limit: int = 10) -> World:
        """Plan and carry out until there is nothing left to do."""
        for _ in range(limit):
            todo = self.step()
            if todo.status is None and not todo.actions:
                return self
        raise AssertionError(f"still busy after {limit} plans: {todo}")

    def act(self, action: Action) -> None:
        """Carry out one action, as the API server does."""
        if isinstance(action, CreateService):
            assert not self.service, "the Service is there already"
            self.service = True
        elif isinstance(action, CreateGroup):
            self._make_group(action)
        elif isinstance(action, TellGroup):
            assert self.groups[action.name].uid == action.uid, "what is told carries the uid that was seen"
            self._hears(action)
        elif isinstance(action, DeleteGroup):
            assert self.groups.pop(action.name).uid == action.uid, "a delete carries the uid that was seen"
        elif isinstance(action, CreatePod):
            name = f"{self.job.metadata.name}-{action.attempt}-{action.place}"
            name += f"-r{action.replacement}" if action.replacement else ""
            assert name not in self.pods, f"{name} is there already"
            self._made += 1
            pod = Pod(
                name=name,
                uid=f"pod-{self._made}",
                owner_uid=self.job.metadata.uid,
                attempt=action.attempt,
                place=action.place,
                replacement=action.replacement,
                job=self.job.metadata.name,
            )
            self._see(pod)
        elif isinstance(action, DeletePod):
            pod = self.pods[action.name]
            assert pod.uid == action.uid, "a delete carries the uid that was seen"
            if pod.live and action.grace_seconds != 0:
                grace = 30 if action.grace_seconds is None else action.grace_seconds
                self._see(
                    replace(
                        pod, deletion_requested_at=self.now, deletion_deadline=self.now + dt.timedelta(seconds=grace)
                    )
                )
            else:
                del self.pods[action.name]
        elif isinstance(action, EndPod):
            assert self.pods[action.name].uid == action.uid, "the uid that was seen"
            self.pods[action.name] = replace(self.pods[action.name], deadline_set=True)
        elif isinstance(action, DeleteJob):
            self.of_deleted_job = True
            self.job = replace(self.job, metadata=replace(self.job.metadata, deletion_timestamp=self.now))

    # ---------------------------------------------------------------- what happens to the job

    @property
    def status(self) -> api.Status:
        """Return the status that a user sees."""
        return self.job.status

    def is_true(self, kind: str) -> bool:
        """True if this condition is True."""
        return any(c.type == kind and c.status == "True" for c in self.status.conditions)

    def names(self) -> list[str]:
        """Return the names of all existing pods."""
        return sorted(self.pods)

    def started(self) -> World:
        """Let all pods be created."""
        return self.settle()

    def running(self) -> World:
        """Let all trainers run."""
        self.settle()
        return self.runs(*range(self.job.spec.pods)).settle()

    def runs(self, *places: int) -> World:
        """Let these trainers start."""
        for place in places:
            running = Container("running", ready=True)
            self._change(
                place,
                node=f"node-{place}",
                phase="Running",
                trainer=running,
                scheduled_at=self.now,
                accepted_at=self.now,
            )
        return self

    def waits(self, place: int, reason: str, message: str = "") -> World:
        """Report that a kubelet cannot start a trainer."""
        waiting = Container("waiting", reason, message)
        return self._change(place, node=f"node-{place}", scheduled_at=self.now, accepted_at=self.now, trainer=waiting)

    def unschedulable(self, place: int, why: str) -> World:
        """Report that the scheduler finds no node for a pod."""
        since = self._pod(place).unschedulable_since or self.now
        return self._change(place, unschedulable=why, unschedulable_since=since)

    def exits(self, place: int, code: int = 0, *, message: str = "", reason: str = "", phase: str = "") -> World:
        """Let a trainer end by itself."""
        ended = Container("ended", reason or ("Completed" if code == 0 else "Error"), message, False, code, self.now)
        if phase == "Running":  # a sidecar continues to run
            return self._change(place, phase=phase, trainer=ended, sidecars_run=True)
        return self._change(place, phase=phase or ("Succeeded" if code == 0 else "Failed"), trainer=ended)

    def evicted(self, place: int, reason: str) -> World:
        """Let a kubelet evict a pod."""
        return self._change(place, phase="Failed", reason=reason)

    def stops(self, place: int, code: int = 143) -> World:
        """End a pod whose deletion was requested, and remove the pod object."""
        pod = self._pod(place)
        assert pod.deletion_requested_at is not None, "nobody requested its deletion"
        del self.pods[pod.name]
        return self

    def stops_all(self) -> World:
        """End and remove all pods whose deletion was requested. End pods with a set deadline, which stay."""
        self.pods = {n: p for n, p in self.pods.items() if p.deletion_requested_at is None}
        for name, pod in self.pods.items():
            if pod.deadline_set and pod.live:
                end = Container("ended", "Error", exit_code=143, ended_at=self.now)
                self.pods[name] = replace(pod, phase="Failed", reason="DeadlineExceeded", trainer=end)
        return self

    def restarted(self) -> World:
        """End all pods that must end, until the next attempt exists."""
        return self.settle().stops_all().settle()

    def node_lost(self, place: int) -> World:
        """Mark a pod's node as not ready."""
        assert self.nodes is not None, "this world cannot read nodes"
        self.nodes[self._pod(place).node] = Node(ready=False, since=self.now)
        return self

    def node_deleted(self, place: int) -> World:
        """Delete the Node of a pod. As in the operator, the node has been not ready since it was lost."""
        assert self.nodes is not None, "this world cannot read nodes"
        name = self._pod(place).node
        known = self.nodes.get(name)
        self.nodes[name] = Node(ready=False, since=known.since if known else self.now, gone=True)
        return self

    def vanishes(self, place: int) -> World:
        """Remove a pod's object, so that nothing is known about its end."""
        del self.pods[self._pod(place).name]
        return self

    def deleted_first(self, place: int) -> World:
        """Let somebody else delete a pod."""
        return self._change(
            place, deletion_requested_at=self.now, deletion_deadline=self.now + dt.timedelta(seconds=30)
        )

    def after(self, seconds: float) -> World:
        """Let time pass."""
        self.now += dt.timedelta(seconds=seconds)
        return self

    def change(self, **spec: Any) -> World:
        """Edit the spec as a user does."""
        generation = (self.job.metadata.generation or 0) + 1
        metadata = replace(self.job.metadata, generation=generation)
        self.job = replace(self.job, spec=replace(self.job.spec, **spec), metadata=metadata)
        return self

    def reports_step(self, step: int, **more: Any) -> World:
        """Report the progress of a rank; the default is rank 0."""
        attempt, rank = self.job.status.attempt, more.get("rank", 0)
        self.reports[rank] = Report(step=step, attempt=attempt, received_at=self.now, **more)
        pace = update(self.trackers.get(rank), self.reports[rank], self.now)
        assert pace is not None
        self.trackers[rank] = pace
        return self

    def agent_reports(self, report: AgentReport | None) -> World:
        """Let the leading agent report its restarts in place."""
        self.agent = report
        return self

    def serves(self, adapter: str = "native", api_version: str = "scheduling.k8s.io/v1alpha2") -> World:
        """Switch an API for groups on, and serve it."""
        self.gang_apis[adapter] = GangApi(api_version)
        return self

    def admits(
        self, state: Literal["admitted", "waiting", "evicted"] = "admitted", why: str = "", **more: Any
    ) -> World:
        """Let the scheduler or the queue decide about all groups; by default they are admitted."""
        admission = Admission(state, why, **more)
        self.groups = {name: replaced(group, admission=admission) for name, group in self.groups.items()}
        return self

    def admits_part(self, name: str, pods: int) -> World:
        """Let the queue admit this many pods of a group."""
        placement = Placement(count=pods)
        self.groups[name] = replaced(self.groups[name], admission=Admission("admitted"), placement=placement)
        return self

    def conflicting_pod(self, name: str, *, label: str = "", owner: str = "") -> World:
        """Add a pod of another owner."""
        self.conflicting_pods.append(Pod(name=name, uid=f"uid-{name}", owner_uid=owner, attempt=1, place=0, job=label))
        return self

    def _make_group(self, action: CreateGroup) -> None:
        adapter = self.settings.adapters[action.adapter]
        name = adapter.group_name(self.job, action.attempt, action.number)
        attempt = adapter.attempt_of(action.attempt)
        assert name not in self.groups, f"{name} is there already"
        self._made += 1
        uid = f"group-{self._made}"
        owner = self.job.metadata.uid
        found = ObservedGroup(action.adapter, name, uid, owner, attempt, action.number)
        if adapter.admits_first:
            found = replaced(found, nodes=action.nodes or self.job.spec.pods, asked=kueue.asks(self.job))
        self.groups[name] = found

    def _hears(self, action: TellGroup) -> None:
        """React to an action like a queue that reads the job."""
        self.told.append(action.what)
        group = self.groups[action.name]
        if action.what == "quota returned":
            assert group.admission.holds_quota, "it has no quota to return"
            assert not any(pod.live for pod in self.pods.values()), "its pods still use the quota"
            group = replaced(group, admission=Admission("waiting", group.admission.why), is_ready=False)
        elif action.what in ("succeeded", "failed"):
            assert not any(pod.live for pod in self.pods.values()), "its pods still use the quota"
            group = replaced(group, is_over=True, admission=Admission("evicted", "finished"))
        elif action.what == "smaller":
            assert action.pods < (group.placement.count or 0), "its quota is smaller already"
            group = replaced(group, placement=Placement(count=action.pods))
        else:
            group = replaced(group, is_ready=action.what == "ready")
        self.groups[action.name] = group

    def _pod(self, place: int) -> Pod:
        found = [p for p in self.pods.values() if p.place == place]
        return max(found, key=lambda p: (p.attempt, p.replacement))

    def _change(self, place: int, **fields: Any) -> World:
        pod = self._pod(place)
        self._see(replace(pod, **fields))
        return self

    def _see(self, pod: Pod) -> None:
        """Merge a new observation with the earlier ones, as the operator does."""
        self._observations += 1
        self.pods[pod.name] = facts.merge(self.pods.get(pod.name), pod, self._observations)


def digits(**spec: Any) -> World:
    """Return the World of a job of two nodes."""
    return World(job(**spec))
