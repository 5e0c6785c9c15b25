"""The same rank is blamed whoever ends a pod, in whatever order events arrive, and whichever operator reads them.

Events are raw objects, as an API server and kubelets make them. Examples: a delete by the operator or by somebody else;
the end of a container by the clock of its node; the phase in the same write or a later one. The kubelet's last delete
(grace 0) sets deletionTimestamp again. The operator receives events late, and may restart between any two of them."""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from worlds import START, job

from ddpjob_operator.kube.watch import observe
from ddpjob_operator.kube.watch.store import Store
from ddpjob_operator.observed import facts
from ddpjob_operator.observed.cluster import Container, Observed, Pod
from ddpjob_operator.plan.actions import CreatePod, DeletePod
from ddpjob_operator.plan.plan import plan
from ddpjob_operator.pods import naming

PEER = "RuntimeError: [../gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:4242"
GRACE_SECONDS = 10
Raw = dict[str, Any]


def stamp(at: dt.datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")


def ended(code: int, reason: str = "", message: str = "") -> Raw:
    return {"exitCode": code, "reason": reason or ("Completed" if code == 0 else "Error"), "message": message}


class Story:
    """An attempt with running pods, until the operator records the next attempt or the job's end."""

    def __init__(self, nodes: int, skews: list[int], chance: random.Random) -> None:
        self.job = job(nodes=nodes, backoffLimit=1, restartGraceSeconds=GRACE_SECONDS)
        self.now = START
        self.skews, self.chance = skews, chance
        self.pods: dict[int, Raw] = {}
        self.log: list[tuple[str, Raw]] = []
        """Events of the watch, in order."""
        self.heard = self.looked = 0
        self.version = 100
        self.kubelets: list[Callable[[], None]] = []
        """The next actions of the kubelets, each at its own time."""
        self.on_told: Callable[[int], None] = lambda rank: self.stops(rank, ended(143))
        self.deleted_pods: list[Pod] = []
        self.store: Store[Pod]
        self.missed: set[int] = set()
        """Ranks whose pods disappeared while no operator was running, so that nobody can know how they ended."""
        self._begin()

    def _begin(self) -> None:
        """Start a new operator. It has only a list of the pods, and nothing that its predecessor remembered or received
        without a record."""
        self.deleted_pods = []
        self.missed |= {
            contract_rank(raw["metadata"]["name"]) for kind, raw in self.log[self.looked :] if kind == "DELETED"
        }
        gone = lambda _, old, new: self.deleted_pods.append(old) if new is None else None  # noqa: E731
        self.store = Store(observe.pod, lambda _: ("team", "digits"), gone, facts.merge)
        for raw in self.pods.values():
            self.store.put(raw)
        self.heard = self.looked = len(self.log)

    # ---------------------------------------------------------------- the API server

    def put(self, rank: int, status: Raw | None = None, **metadata: Any) -> None:
        old = self.pods[rank]
        self.version += 1
        new = {**old, "metadata": {**old["metadata"], **metadata, "resourceVersion": str(self.version)}}
        if status is not None:
            new["status"] = {**old["status"], **status}
        self.pods[rank] = new
        self.log.append(("MODIFIED", new))

    def create(self, action: CreatePod) -> None:
        if action.place in self.pods:
            return  # the API server answers AlreadyExists
        name = naming.pod_name(self.job, action.attempt, action.place)
        labels = {naming.LABEL_JOB: "digits", naming.LABEL_ATTEMPT: "1", naming.LABEL_RANK: str(action.place)}
        owner = {"kind": "DDPJob", "name": "digits", "uid": self.job.metadata.uid, "controller": True}
        metadata = {"name": name, "namespace": "team", "uid": f"uid-{name}", "labels": labels}
        self.version += 1
        metadata |= {"ownerReferences": [owner], "resourceVersion": str(self.version)}
        spec = {"nodeName": f"node-{action.place}", "containers": [{"name": "trainer"}]}
        self.pods[action.place] = {"metadata": metadata, "spec": spec, "status": {"phase": "Pending"}}
        self.log.append(("ADDED", self.pods[action.place]))

    def delete(self, rank: int, grace_seconds: int) -> None:
        """Delete a pod, for any client. A pod in a final phase disappears immediately."""
        if rank not in self.pods:
            return
        if self.pods[rank]["status"]["phase"] in ("Succeeded", "Failed") or grace_seconds == 0:
            self.log.append(("DELETED", self.pods.pop(rank)))
            return
        if "deletionTimestamp" not in self.pods[rank]["metadata"]:
            self.put(
                rank,
                deletionTimestamp=stamp(self.now + dt.timedelta(seconds=grace_seconds)),
                deletionGracePeriodSeconds=grace_seconds,
            )
            self.kubelets.append(lambda: self.on_told(rank))

    # ---------------------------------------------------------------- kubelets

    def state(self, rank: int, state: Raw, phase: str, **more: Any) -> None:
        if rank in self.pods:
            container = {"name": "trainer", "ready": "running" in state, "state": state}
            self.put(rank, {"phase": phase, "containerStatuses": [container], **more})

    def runs(self, rank: int) -> None:
        self.state(rank, {"running": {"startedAt": stamp(self.now)}}, "Running")

    def ends(self, rank: int, how: Raw, then: Callable[[], None] = lambda: None, **more: Any) -> None:
        """End a container that is running; the phase follows at once or later."""
        if rank not in self.pods or not self.is_running(rank):
            return then()
        at = stamp(self.now + dt.timedelta(seconds=self.skews[rank]))
        how = {"startedAt": stamp(START), "finishedAt": at, **how}
        phase = "Succeeded" if how["exitCode"] == 0 and not more else "Failed"

        def verdict() -> None:
            if more and "deletionTimestamp" in self.pods.get(rank, {}).get("metadata", {}):
                self.missed.add(rank)  # we deleted it before its kubelet reported the end
            self.state(rank, {"terminated": how}, phase, **more)
            self.kubelets.append(then)

        # A kubelet that ends a pod itself reports exit code and phase at once, unless it was restarted in between.
        # The restart is modeled for exit code 0, which must not count as a success before the phase is written.
        at_once = bool(more) and (how["exitCode"] != 0 or "deletionTimestamp" in self.pods[rank]["metadata"])
        if at_once or self.chance.random() < 0.5:
            return verdict()
        self.state(rank, {"terminated": how}, "Running")
        return self.kubelets.append(verdict)

    def stops(self, rank: int, how: Raw) -> None:
        self.ends(rank, how, lambda: self.confirm(rank))

    def confirm(self, rank: int) -> None:
        """Send the kubelet's last delete, with grace 0."""
        if rank not in self.pods or "deletionTimestamp" not in self.pods[rank]["metadata"]:
            return
        self.put(rank, deletionTimestamp=stamp(self.now), deletionGracePeriodSeconds=0)
        self.log.append(("DELETED", self.pods.pop(rank)))

    def is_running(self, rank: int) -> bool:
        statuses = self.pods[rank]["status"].get("containerStatuses") or [{"state": {}}]
        return "running" in statuses[0]["state"]

    # ---------------------------------------------------------------- the operator

    def hear(self) -> None:
        """Let the operator receive the next event of the watch."""
        kind, raw = self.log[self.heard]
        self.heard += 1
        metadata = raw["metadata"]
        if kind == "DELETED":
            self.store.remove(metadata["namespace"], metadata["name"], metadata["uid"])
        else:
            self.store.put(raw)

    def look(self) -> None:
        pods = tuple(self.store.of(("team", "digits")))
        seen = Observed(service=True, pods=pods, deleted_pods=tuple(self.deleted_pods), nodes={})
        todo = plan(self.job, seen, self.now)
        if todo.status is not None:
            self.job = replace(self.job, status=todo.status)
        self.looked = self.heard
        for action in todo.actions:
            if isinstance(action, DeletePod):
                self.delete(rank := contract_rank(action.name), action.grace_seconds or GRACE_SECONDS)
                self.read_answer(rank)
            elif isinstance(action, CreatePod) and action.attempt == 1:
                self.create(action)
                self.read_answer(action.place)

    def read_answer(self, rank: int) -> None:
        """Put the answer of a write into the cache before the watch shows earlier changes."""
        if rank in self.pods:
            self.store.put(self.pods[rank])

    def is_over(self) -> bool:
        return self.job.status.state in ("Failed", "Succeeded") or self.job.status.attempt > 1

    # ---------------------------------------------------------------- time

    def trains(self) -> Story:
        self.look()
        for rank in range(self.job.spec.nodes):
            self.runs(rank)
        self.calms_down()
        assert self.job.status.state == "Running"
        return self

    def calms_down(self) -> None:
        """Receive all events and execute all actions, until nothing more happens."""
        for _ in range(1000):
            if not self.step("hear kubelet look".split()) and self._is_idle():
                return
        raise AssertionError(f"it never ends: {self.job.status}")

    def _is_idle(self) -> bool:
        before = self.job.status
        self.look()
        return self.job.status == before and self.heard == len(self.log) and not self.kubelets

    def step(self, kinds: list[str]) -> bool:
        """Let one event of a random kind happen; return False if there is none."""
        self.now += dt.timedelta(seconds=self.chance.choice((0, 0, 1, 3)))
        kind = self.chance.choice(kinds)
        if kind == "hear" and self.heard < len(self.log):
            self.hear()
        elif kind == "kubelet" and self.kubelets:
            self.kubelets.pop(self.chance.randrange(len(self.kubelets)))()
        elif kind == "look":
            self.look()
        elif kind == "restart":
            self._begin()
        else:
            return False
        return True

    def goes_on(self) -> Story:
        """Let random events happen, until the cause is settled."""
        for _ in range(3000):
            if self.is_over():
                return self
            self.step("hear hear kubelet kubelet look look restart".split())
        raise AssertionError(f"it never ends: {self.job.status}")

    def verdict(self) -> tuple[int, str, str]:
        failure = self.job.status.last_failure
        assert failure is not None, self.job.status.message
        return failure.node_rank, failure.failure_class, failure.charged_to


def contract_rank(name: str) -> int:
    return int(name.rsplit("-", 1)[1])


def complain(story: Story, but: int) -> None:
    """Let some other ranks report a lost peer, each at its own time. The rest end only when they are stopped."""
    for rank in range(story.job.spec.nodes):
        if rank != but and story.chance.random() < 0.5:
            story.kubelets.append(lambda rank=rank: story.ends(rank, ended(1, message=PEER)))  # type: ignore[misc]


def fails(how: Raw) -> Callable[[Story, int], None]:
    def begin(story: Story, rank: int) -> None:
        story.ends(rank, how)

    return begin


def is_deleted(code: int) -> Callable[[Story, int], None]:
    """Delete the pod by hand or as in a drain. It ends slowly, and its peers lose their connection to it."""

    def begin(story: Story, rank: int) -> None:
        told = story.on_told
        story.on_told = lambda one: story.stops(one, ended(code)) if one == rank else told(one)
        if story.chance.random() < 0.5:
            target = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
            story.put(rank, {"conditions": [target]})
        story.delete(rank, 30)
        complain(story, rank)

    return begin


def is_ended_by_its_kubelet(reason: str, code: int) -> Callable[[Story, int], None]:
    def begin(story: Story, rank: int) -> None:
        target = {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}
        more = {"reason": reason, "message": "the kubelet's", "conditions": [target]}
        story.on_told = lambda one: story.stops(one, ended(143)) if one != rank else None
        story.kubelets.append(lambda: story.ends(rank, ended(code), lambda: story.confirm(rank), **more))
        complain(story, rank)

    return begin


# How one pod ends, and the expected class and budget, whatever its peers do when they are stopped.
ENDS: dict[str, tuple[Callable[[Story, int], None], str, str]] = {
    "exit code 1 without a word": (fails(ended(1)), "application", "application"),
    "exit code 3": (fails(ended(3)), "application", "application"),
    # OSError, because a ValueError before the first step is permanent on a single node: all nodes have raised it.
    "an exception": (fails(ended(1, message="OSError: no such shard")), "application", "application"),
    "a segmentation fault": (fails(ended(139)), "application", "application"),
    "out of memory": (fails(ended(137, "OOMKilled")), "outOfMemory", "application"),
    "a pod deleted by someone else, 143": (is_deleted(143), "infrastructure", "infrastructure"),
    "a pod deleted by someone else, 0": (is_deleted(0), "infrastructure", "infrastructure"),
    "a pod deleted by someone else, 137": (is_deleted(137), "infrastructure", "infrastructure"),
    "an eviction": (is_ended_by_its_kubelet("Evicted", 137), "infrastructure", "infrastructure"),
    "an eviction, 0": (is_ended_by_its_kubelet("Evicted", 0), "infrastructure", "infrastructure"),
    "a node that shuts down, 0": (is_ended_by_its_kubelet("Terminated", 0), "infrastructure", "infrastructure"),
}
seeds = st.integers(0, 2**32)


@pytest.mark.parametrize("name", ENDS)
@given(seeds, st.integers(1, 8), st.data())
@settings(max_examples=settings.default.max_examples // 3)  # a third of the examples, because each runs a whole attempt
def test_blame_and_charge_depend_on_no_clock_no_order_and_no_restart(name, seed, nodes, data):
    """A script that always fails must be charged, although a peer that we stopped may seem the cause. A drained node
    must not be charged."""
    skews = data.draw(st.lists(st.integers(-10, 10), min_size=nodes, max_size=nodes))
    rank = data.draw(st.integers(0, nodes - 1))
    code = data.draw(st.sampled_from([143, 0, 137, 75, 1]))
    begin, found, budget = ENDS[name]
    story = Story(nodes, skews, random.Random(seed)).trains()
    story.on_told = lambda one: story.stops(one, ended(code))
    begin(story, rank)
    story.goes_on()
    assert story.job.status.state != "Succeeded"
    assert story.verdict()[1:] == (found, budget), story.job.status.message
    assert story.verdict()[0] == rank or rank in story.missed, story.job.status.message


containers = st.builds(
    Container,
    st.sampled_from(["waiting", "running", "ended"]),
    reason=st.sampled_from(["", "Error", "ContainerStatusUnknown", "CreateContainerConfigError"]),
    ready=st.booleans(),
    exit_code=st.none() | st.sampled_from([0, 1, 137, 143]),
    ran=st.booleans(),
).map(lambda seen: seen if seen.state == "ended" else replace(seen, ran=True))
times = st.none() | st.integers(0, 60).map(lambda s: START + dt.timedelta(seconds=s))
pods = st.builds(
    Pod,
    name=st.just("digits-1-0"),
    uid=st.just("u"),
    owner_uid=st.just("job"),
    attempt=st.just(1),
    place=st.just(0),
    phase=st.sampled_from(["Pending", "Running", "Succeeded", "Failed"]),
    reason=st.sampled_from(["", "Evicted"]),
    disruption=st.sampled_from(["", "EvictionByEvictionAPI"]),
    deletion_requested_at=times,
    trainer=containers,
    sidecars_run=st.booleans(),
)


def told(story: list[Pod]) -> Pod:
    known = None
    for look, one in enumerate(story, start=1):
        known = facts.merge(known, one, look)
    assert known is not None
    return known


@given(st.lists(pods, min_size=1, max_size=6), st.lists(pods, max_size=4))
def test_observed_facts_of_a_pod_are_never_forgotten(before: list[Pod], after: list[Pod]) -> None:
    """Facts that were observed about a pod must never be forgotten: a later report of the kubelet may contain less."""
    known, more = told(before), told([*before, *after])
    assert known.deletion_requested_at is None or (more.deletion_requested_at or START) <= known.deletion_requested_at
    assert more.ended or not known.ended
    assert more.has_completed or not known.has_completed
    assert more.deleted_first == known.deleted_first or not known.ended
    if known.trainer.state == "ended" and known.trainer.exit_code is not None and not known.trainer.is_lost:
        assert more.trainer == known.trainer, "how it ended"
    assert not known.ended or more.ended_seen == known.ended_seen, "when it was first seen to have ended"
    assert known.deletion_requested_at is None or more.deletion_seen == known.deletion_seen


@given(st.lists(pods, min_size=1, max_size=6), st.data())
def test_observing_a_fact_twice_equals_observing_it_once(story: list[Pod], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(story) - 1))
    known = told(story[: place + 1])
    assert facts.merge(known, story[place], place + 1) == known
