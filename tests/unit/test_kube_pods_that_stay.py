"""Pods that still exist after their deletion, and pods that a watch reports as gone although they exist."""

import asyncio
import datetime as dt
import logging
from typing import Any

import pytest
from direct_client import DirectClient
from model_api import ModelApi, Raw, parse, stamp
from reconciling import caches, reconciler
from worlds import START, World, digits, manifest

from ddpjob_operator.job import api, validation
from ddpjob_operator.kube.api.client import ApiError
from ddpjob_operator.kube.api.runtime import Runtime
from ddpjob_operator.kube.operator import _job_of
from ddpjob_operator.kube.watch import observe
from ddpjob_operator.kube.watch.nodes import NodeCache
from ddpjob_operator.kube.watch.store import Store
from ddpjob_operator.kube.work.executor import GONE_MAX, RECONCILE_SECONDS
from ddpjob_operator.kube.work.job_state import UNDELETABLE_SECONDS
from ddpjob_operator.observed import facts
from ddpjob_operator.observed.cluster import Container, Pod
from ddpjob_operator.pods import build, naming

KEY = ("default", "digits")
RUNNING = {"phase": "Running", "containerStatuses": [{"name": "trainer", "ready": True, "state": {"running": {}}}]}
ENDED = {
    "phase": "Failed",
    "containerStatuses": [{"name": "trainer", "state": {"terminated": {"exitCode": 1, "reason": "Error"}}}],
}


class Cluster(DirectClient):
    """API server with one job and its pods, and a reconciler that observes them."""

    def __init__(self, attempt: int, nodes: int = 2, **status: Any) -> None:
        self.now, self.clock, self.answers_in = START, 0.0, 0.0
        super().__init__(ModelApi(lambda: self.clock, lambda: self.now))
        self.requests: list[str] = []
        self.looked_for: list[str] = []
        self.again_in: float | None = None
        self.refuses_deletes = False
        self.caches = caches(nodes=NodeCache(lambda _: None, lambda: self.now))
        self.caches.pods = Store(observe.pod, _job_of, self._pod_changed, facts.merge)
        time = stamp(START)
        status = {"attempt": attempt, "attemptTime": time, "startTime": time, "stateTime": time, **status}
        raw = self.api.put(api.PLURAL, {**manifest(nodes=nodes), "status": status})
        self.caches.jobs.put(raw)
        self.job, _ = validation.parse(raw)
        service = build.service(self.job)
        service["metadata"] |= {"uid": "service"}
        self.caches.services.put(self.api.put("services", service))
        self.reconciler = reconciler(self, self.caches, Runtime(clock=lambda: self.clock, utc=lambda: self.now))
        self.states = self.reconciler.states

    def _pod_changed(self, key: Any, old: Pod | None, new: Pod | None) -> None:
        if old is not None and new is None:
            self.states.pod_deleted(key, old)

    def has(self, attempt: int, place: int, status: Raw, **metadata: Any) -> str:
        """Add a pod of the job to the API server, and return its name."""
        raw = build.pod(self.job, attempt, place)
        raw["spec"]["nodeName"] = f"node-{place}"
        raw["metadata"] |= {"uid": f"uid-{raw['metadata']['name']}", **metadata}
        self.caches.pods.put(self.api.put("pods", {**raw, "status": status}))
        return str(raw["metadata"]["name"])

    def pod(self, name: str) -> Raw:
        found = self.api.find("pods", name)
        assert found is not None, name
        return found

    def vanishes(self, name: str) -> None:
        """Let the watch report the pod as gone."""
        self.caches.pods.remove("default", name, self.pod(name)["metadata"]["uid"])

    def loses_label(self, name: str) -> None:
        raw = self.pod(name)
        labels = {k: v for k, v in raw["metadata"]["labels"].items() if k != naming.LABEL_JOB}
        self.api.change("pods", raw, "user", metadata={"labels": labels})
        self.vanishes(name)

    def is_removed(self, name: str) -> None:
        self.api.remove("pods", self.pod(name), "user")

    def reconciles(self, times: int = 1, seconds: float = 1.0) -> list[str]:
        """Reconcile this many times; return the writes that were sent."""
        self.requests.clear()
        for _ in range(times):
            self.again_in = asyncio.run(self.reconciler.reconcile(KEY))
            self.now += dt.timedelta(seconds=seconds)
        return self.requests

    @property
    def status(self) -> Raw:
        raw = self.caches.jobs.get(KEY)
        return dict(raw["status"])

    async def request(self, method: str, path: str, params: Any, body: Raw | None = None) -> Raw:
        plural, _, name, _ = parse(path)
        if plural == "pods" and method == "GET" and name:
            self.looked_for.append(name)
            self.clock += self.answers_in
        elif method not in ("GET", "PUT"):
            self.requests.append(f"{method} {name or (body or {})['metadata']['name']}")
        if method == "DELETE" and self.refuses_deletes:
            raise ApiError(403, "Forbidden", 'admission webhook "protect.example.com" denied the request')
        return await super().request(method, path, params, body)


def test_an_old_pod_that_cannot_be_deleted_blocks_no_attempt(caplog: pytest.LogCaptureFixture) -> None:
    """An old pod that cannot be deleted, because a webhook refuses it, must not block the fourth attempt."""
    cluster = Cluster(4, state="Restarting", reason="Restarting")
    cluster.has(1, 0, ENDED)
    cluster.refuses_deletes = True
    with caplog.at_level(logging.WARNING):
        asked = cluster.reconciles()
    assert asked == ["DELETE digits-1-0", "POST digits-4-0", "POST digits-4-1"]
    assert "digits-1-0, which the job no longer needs, is not deleted: 403" in caplog.text


@pytest.mark.parametrize("refused", [True, False], ids=["refused", "held by a finalizer"])
def test_a_pod_that_stays_is_deleted_only_once_a_minute(refused: bool) -> None:
    """A pod that cannot be deleted must not cost six requests per second until its job is deleted."""
    cluster = Cluster(4, state="Running", reason="AllNodesRun", startedNodes="0-1")
    cluster.has(1, 0, ENDED, finalizers=["example.com/hold"])
    for place in range(2):
        cluster.has(4, place, RUNNING)
    cluster.refuses_deletes = refused
    for _ in range(3):
        assert cluster.reconciles(int(UNDELETABLE_SECONDS)) == ["DELETE digits-1-0"]


def test_a_pod_that_lost_the_label_of_the_job_gets_it_back_and_training_continues() -> None:
    """A pod without its job's label must get the label back. A restart would start a second group next to it."""
    cluster = Cluster(1, state="Running", reason="AllNodesRun", startedNodes="0-1")
    for place in range(2):
        cluster.has(1, place, RUNNING)
    cluster.reconciles()
    cluster.loses_label("digits-1-0")
    assert cluster.reconciles(3) == ["PATCH digits-1-0"]
    assert cluster.pod("digits-1-0")["metadata"]["labels"][naming.LABEL_JOB] == "digits"
    assert (cluster.status["state"], cluster.status["attempt"]) == ("Running", 1)
    assert {pod.name for pod in cluster.caches.pods.of(KEY)} == {"digits-1-0", "digits-1-1"}


def test_thousands_of_pods_that_lost_the_label_get_it_back_in_several_reconciles() -> None:
    """Thousands of pods without the label must get it back in several reconciles, not by 2,000 requests at once."""
    nodes = 40
    cluster = Cluster(1, nodes, state="Running", reason="AllNodesRun", startedNodes=f"0-{nodes - 1}")
    pods = [cluster.has(1, place, RUNNING) for place in range(nodes)]
    cluster.reconciles()
    for pod in pods:
        cluster.loses_label(pod)
    cluster.is_removed("digits-1-0")
    cluster.answers_in = RECONCILE_SECONDS / 10
    asked = cluster.reconciles()
    assert 0 < len(asked) < nodes / 2
    assert all(request.startswith("PATCH ") for request in asked), "nothing is decided before all are looked for"
    assert cluster.again_in == 0.0
    for _ in range(nodes):
        if cluster.status["state"] == "Running":
            cluster.reconciles(seconds=0)
    assert cluster.looked_for.count("digits-1-0") == 1
    assert all(pod["metadata"]["labels"][naming.LABEL_JOB] == "digits" for pod in cluster.api.all("pods"))
    assert cluster.status["state"] == "Restarting"


def test_only_some_of_many_disappeared_pods_are_queried() -> None:
    """Only some of many disappeared pods may be queried in a reconcile: thousands of requests delay the restart."""
    nodes = 3 * GONE_MAX
    cluster = Cluster(1, nodes, state="Running", reason="AllNodesRun", startedNodes=f"0-{nodes - 1}")
    for place in range(nodes):
        cluster.vanishes(pod := cluster.has(1, place, RUNNING))
        cluster.is_removed(pod)
    cluster.reconciles()
    assert len([name for name in cluster.looked_for if name.startswith("digits-1-")]) < 2 * GONE_MAX


def test_a_disappeared_pod_is_queried_once_and_restarts_the_group() -> None:
    """A disappeared pod must cost only one request, because deletions are common."""
    cluster = Cluster(1, state="Running", reason="AllNodesRun", startedNodes="0-1")
    gone, _ = (cluster.has(1, place, RUNNING) for place in range(2))
    cluster.reconciles()
    cluster.vanishes(gone)
    cluster.is_removed(gone)
    assert cluster.reconciles() == ["DELETE digits-1-1", "POST digits-2-0", "POST digits-2-1"]


def test_pods_left_by_a_job_deleted_with_cascade_orphan_block_the_new_job_until_they_have_ended() -> None:
    """The message must name the pods and the Service that `--cascade=orphan` has left. If users delete the Service
    alone, two groups train into one checkpoint."""
    world: World = digits()
    orphan = Pod(
        "digits-3-0", "o", "", 3, 0, job="digits", node="n", phase="Running", trainer=Container("running", ready=True)
    )
    world.conflicting_pods.append(orphan)
    world.settle()
    assert (world.status.reason, world.names()) == ("NameTaken", [])
    assert world.status.message.startswith("a Pod named digits-3-0 is not this job's")
    world.conflicting_pods[:] = []
    world.settle()
    assert world.names() == ["digits-1-0", "digits-1-1"]


def test_our_labels_in_a_template_copied_from_a_pod_change_nothing() -> None:
    """A label that is copied from a pod must be ignored: it would stop the job, or make it wait for ever."""
    raw = manifest()
    ours = {naming.LABEL_REPLACEMENT: "1", naming.LABEL_TRAINER: "other", naming.LABEL_ATTEMPT: "7", "team": "vision"}
    raw["spec"]["template"]["metadata"] = {"labels": ours}
    job, _ = validation.parse(raw)
    assert build.pod(job, 1, 0)["metadata"]["labels"] == {
        "team": "vision", naming.LABEL_JOB: "digits", naming.LABEL_ATTEMPT: "1", naming.LABEL_RANK: "0",
    }  # fmt: skip


def test_our_volume_in_a_template_copied_from_a_pod_occurs_once() -> None:
    """A volume of ours in a template copied from a pod must not be added again: a pod cannot have it twice."""
    raw = manifest()
    raw["spec"]["template"]["spec"]["volumes"] = [{"name": "ddpjob-shm", "emptyDir": {}}]
    job, _ = validation.parse(raw)
    assert [volume["name"] for volume in build.pod(job, 1, 0)["spec"]["volumes"]].count("ddpjob-shm") == 1


def test_a_pod_that_is_already_gone_when_deleted_is_forgotten() -> None:
    """A pod that is already gone must be forgotten, or the operator would try to delete it every minute."""
    cluster = Cluster(4, state="Running", reason="AllNodesRun", startedNodes="0-1")
    cluster.has(1, 0, ENDED)
    for place in range(2):
        cluster.has(4, place, RUNNING)
    cluster.is_removed("digits-1-0")
    assert cluster.reconciles(3, seconds=UNDELETABLE_SECONDS) == ["DELETE digits-1-0"]
