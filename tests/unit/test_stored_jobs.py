"""What the operator keeps of idle jobs, when it reads them again, and which jobs wait for memory."""

import asyncio
import copy
import datetime as dt
from typing import Any

import orjson
import pytest
from direct_client import DirectClient
from model_api import ModelApi, Raw, parse
from reconciling import caches, reconciler
from worlds import START, digits, manifest

from ddpjob_operator.job import api, storage
from ddpjob_operator.kube.api import bounded_json
from ddpjob_operator.kube.api.api_error import ApiError
from ddpjob_operator.kube.api.runtime import Runtime
from ddpjob_operator.kube.watch.store import Jobs, Key
from ddpjob_operator.kube.work.queue import RetryError

LARGE = 120_000


def stored(name: str = "digits", namespace: str = "default", text: int = LARGE, **spec: Any) -> Raw:
    """Return a new job, as the API server has it."""
    raw = manifest(**spec)
    env = [{"name": f"V{number}", "value": "x" * 1_000} for number in range(text // 1_020)]
    raw["spec"]["template"]["spec"]["containers"][0]["env"] = env
    raw["metadata"] |= {"name": name, "namespace": namespace, "uid": f"uid of {name}", "generation": 1}
    raw["metadata"] |= {"resourceVersion": "1", "annotations": {"note": "y" * 5_000}}
    return raw


class Cluster(DirectClient):
    """API server with DDPJobs, and the leading operator. Pods are created but not run."""

    def __init__(self, limits: storage.StoredLimits = storage.DEFAULT) -> None:
        self.now = START
        super().__init__(ModelApi(now=lambda: self.now))
        self.stored = self.api.objects[api.PLURAL]
        self.requests: list[str] = []
        self.fails: ApiError | None = None
        self.changed: list[Key] = []
        self.jobs = Jobs(self.changed.append, bounded_json.job, limits=limits)
        copies = caches(self.jobs)
        self.reconciler = reconciler(self, copies, Runtime(utc=lambda: self.now))
        self.pods, self.states = copies.pods, self.reconciler.states

    def user_puts(self, raw: Raw) -> Key:
        """Let a user create or change a job, and let the watch report the change."""
        self.jobs.put(bounded_json.stored_job(orjson.dumps(self.api.put(api.PLURAL, raw))))
        return raw["metadata"]["namespace"], raw["metadata"]["name"]

    def user_changes(self, key: Key, **spec: Any) -> None:
        raw = copy.deepcopy(self.stored[key])
        raw["spec"] |= spec
        raw["metadata"]["generation"] += 1
        self.user_puts(raw)

    def lists(self) -> None:
        """Let the operator list all jobs again."""
        for raw in self.stored.values():
            if not self.jobs.has(raw):
                self.jobs.put(bounded_json.stored_job(orjson.dumps(raw)))

    def user_deletes(self, key: Key) -> None:
        raw = self.stored.pop(key)
        self.jobs.remove(*key, raw["metadata"]["uid"])

    def reconciles(self, key: Key) -> list[str]:
        """Reconcile the job; return the requests that were sent."""
        self.requests.clear()
        self.changed.clear()
        self.again_in = asyncio.run(self._until_done(key))
        return list(self.requests)

    async def _until_done(self, key: Key) -> float | None:
        while (again_in := await self.reconciler.reconcile(key)) == 0.0:
            """The queue would reconcile the job again at once, to create further pods."""
        return again_in

    def status(self, key: Key) -> Raw:
        return dict(self.stored[key].get("status") or {})

    async def request(self, method: str, path: str, params: Any, body: Raw | None = None) -> Raw:
        plural, _, name, _ = parse(path)
        if name or method == "POST":
            self.requests.append(f"{method} {name or plural}")
        if self.fails is not None:
            raise self.fails
        return await super().request(method, path, params, body)


def kept(cluster: Cluster, key: Key) -> int:
    """Return the bytes that the operator keeps of a job."""
    return len(orjson.dumps(cluster.jobs.get(key)))


def test_only_a_thousandth_of_a_large_suspended_job_is_kept() -> None:
    """The operator must drop most of a suspended job: 600 complete jobs of 280 kB would fill its memory."""
    cluster = Cluster()
    key = cluster.user_puts(stored(suspend=True))
    cluster.reconciles(key)
    assert cluster.status(key)["state"] == "Suspended"
    assert kept(cluster, key) < 1_000 < LARGE
    assert cluster.jobs.begun.used == 0


def test_a_new_leader_sends_no_request_for_large_suspended_jobs() -> None:
    """A new leader must not read large suspended jobs: 2,000 of them are 560 MB."""
    before = Cluster()
    key = before.user_puts(stored(suspend=True))
    before.reconciles(key)
    cluster = Cluster()
    cluster.user_puts(before.stored[key])
    assert (cluster.reconciles(key), cluster.again_in) == ([], None)
    assert list(cluster.states) == []


def test_a_large_resumed_job_is_read_again_and_its_pods_are_created_from_the_complete_object() -> None:
    cluster = Cluster()
    key = cluster.user_puts(stored(suspend=True))
    cluster.reconciles(key)
    cluster.user_changes(key, suspend=False)
    assert kept(cluster, key) < 1_000
    asked = cluster.reconciles(key)
    assert asked[0] == "GET digits"
    assert asked.count("POST pods") == 2
    assert cluster.status(key)["attempt"] == 1
    assert kept(cluster, key) > LARGE / 2, "a job that has begun is kept"
    assert "GET digits" not in cluster.reconciles(key)


def test_a_large_finished_job_is_read_again_only_when_it_is_due_for_deletion() -> None:
    cluster = Cluster()
    raw = stored(ttlSecondsAfterFinished=100)
    time = START.isoformat().replace("+00:00", "Z")
    raw["status"] = {"state": "Failed", "attempt": 1, "completionTime": time, "observedGeneration": 1}
    key = cluster.user_puts(raw)
    assert (cluster.reconciles(key), cluster.again_in) == ([], 100.0)
    cluster.now += dt.timedelta(seconds=101)
    assert cluster.reconciles(key)[0] == "GET digits"
    assert "DELETE digits" in cluster.requests


@pytest.mark.parametrize("what", [{"managedBy": "somebody"}, {"deletionTimestamp": "2031-03-05T07:00:00Z"}])
def test_a_job_that_others_manage_or_that_is_being_deleted_is_never_read(what: Raw) -> None:
    cluster = Cluster()
    raw = stored()
    (raw["spec"] if "managedBy" in what else raw["metadata"]).update(what)
    key = cluster.user_puts(raw)
    assert kept(cluster, key) < 1_000
    assert cluster.reconciles(key) == []


def test_a_large_job_that_cannot_be_read_now_is_retried() -> None:
    cluster = Cluster()
    key = cluster.user_puts(stored())
    cluster.fails = ApiError(503, "ServiceUnavailable", "away")
    with pytest.raises(RetryError):
        cluster.reconciles(key)
    cluster.fails = None
    assert cluster.reconciles(key).count("POST pods") == 2


def test_small_jobs_are_kept_completely_while_there_is_room() -> None:
    """Small jobs must be kept completely while there is room: reading them again is a fifth more load."""
    cluster = Cluster()
    key = cluster.user_puts(stored(text=0, suspend=True))
    assert "GET digits" not in cluster.reconciles(key)
    many = Cluster(storage.StoredLimits(0, 1 << 26, 1 << 25, 100_000, 100_000))
    keys = [many.user_puts(stored(f"j{n}", text=0, suspend=True)) for n in range(50)]
    whole = [key for key in keys if kept(many, key) > 5_000]
    assert 0 < len(whole) < 20


def room_for(count: float) -> storage.StoredLimits:
    """Return limits with room for `count` jobs in a namespace, and for twice as many in all namespaces."""
    need = storage.size(bounded_json.job(stored())) + 1
    return storage.StoredLimits(0, int(2 * count * need), int(count * need), 0, 0)


def test_beyond_the_budget_of_its_namespace_a_job_waits_and_other_namespaces_continue() -> None:
    cluster = Cluster(room_for(2))
    first, second, third = (cluster.user_puts(stored(f"j{n}")) for n in range(3))
    other = cluster.user_puts(stored("other", "team-b"))
    for key in (first, second, third, other):
        cluster.reconciles(key)
    assert [cluster.status(key).get("attempt") for key in (first, second, third, other)] == [1, 1, None, 1]
    status = cluster.status(third)
    assert (status["state"], status["reason"]) == ("Pending", "WaitingForRoom")
    assert "the started jobs of namespace default fill the memory that the operator has for one" in status["message"]
    running = next(c for c in status["conditions"] if c["type"] == "Running")
    assert (running["status"], running["reason"]) == ("False", "WaitingForRoom")
    assert cluster.reconciles(third) == [], "nothing is read for one that waits"
    assert kept(cluster, third) < 1_000


@pytest.mark.parametrize("how", ["suspended", "deleted", "ended"])
def test_a_waiting_job_starts_by_itself_when_there_is_room(how: str) -> None:
    cluster = Cluster(room_for(1))
    first, second = (cluster.user_puts(stored(f"j{n}")) for n in range(2))
    cluster.reconciles(first)
    cluster.reconciles(second)
    assert cluster.status(second)["reason"] == "WaitingForRoom"
    cluster.changed.clear()
    if how == "deleted":
        cluster.user_deletes(first)
    else:
        raw = copy.deepcopy(cluster.stored[first])
        raw["status"]["state"] = "Suspended" if how == "suspended" else "Succeeded"
        cluster.user_puts(raw)
    assert second in cluster.changed
    assert cluster.reconciles(second).count("POST pods") == 2


def test_a_job_that_has_started_is_never_dropped_for_a_budget() -> None:
    """A job that has started must never be dropped for a budget, even if a new leader has less memory."""
    before = Cluster()
    keys = [before.user_puts(stored(f"j{n}")) for n in range(5)]
    for key in keys:
        before.reconciles(key)
    cluster = Cluster(room_for(1))
    for key in keys:
        cluster.user_puts(before.stored[key])
    assert sum(kept(cluster, key) > 2_000 for key in keys) == 1
    for key in keys:
        asked = cluster.reconciles(key)
        assert cluster.status(key)["reason"] != "WaitingForRoom"
        assert asked.count("POST pods") == 2, "its pods are missing here"
    assert sum(kept(cluster, key) > 2_000 for key in keys) == 1


def test_a_resumed_job_waits_for_room_like_a_new_one_and_a_running_job_does_not() -> None:
    world = digits().started().runs(0, 1).settle()
    world.no_room = "there is none"
    world.settle()
    assert world.status.state == "Running"
    world.change(suspend=True).settle()
    world.stops_all().settle()
    assert world.status.state == "Suspended"
    world.change(suspend=False).settle()
    assert (world.status.state, world.status.reason) == ("Suspended", "WaitingForRoom")
    assert world.status.start_time is None, "its deadline does not run"
    world.no_room = ""
    world.settle()
    assert world.status.attempt == 2


def test_a_list_brings_the_complete_object_of_a_large_started_job() -> None:
    raw = stored() | {"status": {"state": "Running", "attempt": 1}}
    assert not storage.is_cut(bounded_json.stored_job(orjson.dumps(raw)))


def test_the_kept_part_is_short_whoever_wrote_the_object() -> None:
    raw = stored(suspend=True)
    raw["metadata"] |= {"labels": {f"l{n}": "x" * 60 for n in range(5_000)}, "finalizers": ["x" * 5_000]}
    raw["status"] = {"state": "Suspended", "reason": "x" * 100_000, "restarts": {"chargedAt": ["x"] * 10_000}}
    for one in (bounded_json.stored_job(orjson.dumps(raw)), storage.cut(raw, 1)):
        assert len(orjson.dumps(one)) < 1_000


def crowded(of: str, count: int = 6) -> tuple[Cluster, list[Key]]:
    """Return `count` suspended large jobs, in a namespace with memory for parts of a few of them."""
    room = 2 * storage.OF_A_JOB
    cluster = Cluster(storage.StoredLimits(0, 1 << 27, 1 << 26, 0, 0, 4 * room, room))
    keys = [cluster.user_puts(stored(f"{of}{number}", suspend=True)) for number in range(count)]
    for key in keys:
        cluster.reconciles(key)
        cluster.lists()
    return cluster, keys


def test_jobs_that_find_no_room_at_all_are_served_by_later_lists() -> None:
    """Jobs that find no room must be served by later lists, for example after an hour without an operator."""
    cluster, _ = crowded("old", 2)
    keys = [cluster.user_puts(stored(f"new{number}")) for number in range(5)]
    for _ in range(5):
        for key in keys:
            cluster.reconciles(key)
        cluster.lists()
    assert [cluster.status(key).get("attempt") for key in keys] == [1] * 5


def test_a_job_that_is_not_kept_but_has_pods_is_read_for_its_reconcile() -> None:
    cluster, keys = crowded("j")
    (left_out,) = [key for key in keys if cluster.jobs.get(key) is None][:1]
    assert cluster.reconciles(left_out) == []
    cluster.pods.put({"metadata": {"namespace": left_out[0], "name": "p", "uid": "p", "resourceVersion": "1",
                                   "labels": {"training.ddpjob.io/job": left_out[1]}}})  # fmt: skip
    assert f"GET {left_out[1]}" in cluster.reconciles(left_out)
    assert cluster.jobs.get(left_out) is None
    assert list(cluster.states) == []
    assert cluster.changed == [], "it would be read again and again"


def test_large_jobs_are_planned_one_at_a_time_with_pauses_and_namespaces_take_turns(monkeypatch):
    """With 32 threads that plan, each turn of the event loop would take 150 ms longer, and a restart has many turns."""
    planned: list[str] = []
    planning: set[str] = set()
    pauses: list[float] = []
    seconds, sleep = 0.0, asyncio.sleep

    async def in_thread(plan: Any, job: Any, *seen: Any, **more: Any) -> Any:
        nonlocal seconds
        assert not planning
        planning.add(job.metadata.name)
        planned.append(job.metadata.namespace)
        await sleep(0)
        seconds += 0.1
        planning.clear()
        return plan(job, *seen, **more)

    async def pause(length: float) -> None:
        pauses.append(length)
        await sleep(0)

    cluster = Cluster()
    cluster.reconciler.runtime = Runtime(utc=lambda: START, clock=lambda: seconds)
    keys = [cluster.user_puts(stored(f"j{n}", f"team-{n // 3}", text=100, nodes=257)) for n in range(9)]

    async def all_at_once() -> None:
        await asyncio.gather(*(cluster.reconciler.reconcile(key) for key in keys))

    monkeypatch.setattr(asyncio, "to_thread", in_thread)
    monkeypatch.setattr(asyncio, "sleep", pause)
    asyncio.run(all_at_once())
    assert sorted(planned[:3]) == ["team-0", "team-1", "team-2"]
    assert max(pauses) == pytest.approx(0.3)
