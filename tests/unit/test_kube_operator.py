"""The operator's settings, the pods whose reports it accepts, and the wait after a refused create."""

import asyncio
import datetime as dt
from typing import Any

import kopf
import pytest
from worlds import START, UID, manifest

from ddpjob_operator.job import validation
from ddpjob_operator.kube.api.client import ApiError, Client, LoginError
from ddpjob_operator.kube.api.runtime import SYSTEM, Runtime
from ddpjob_operator.kube.api.tokens import BoundPod
from ddpjob_operator.kube.lease import Durations, Election
from ddpjob_operator.kube.operator import BROKEN_END_SECONDS, Operator
from ddpjob_operator.kube.ports.receive import Sender
from ddpjob_operator.kube.settings import OperatorSettings
from ddpjob_operator.kube.work.executor import is_refusal
from ddpjob_operator.kube.work.job_state import REFUSED_SECONDS, JobState
from ddpjob_operator.kube.work.lookup import is_absent
from ddpjob_operator.observed.reports import Report


def test_namespaces_are_separated_by_commas_and_none_means_all() -> None:
    assert OperatorSettings.read({}).namespaces == ()
    assert OperatorSettings.read({"DDPJOB_WATCH_NAMESPACES": " a, b,,a "}).namespaces == ("a", "b")


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("DDPJOB_HEALTH_PORT", "http", "a port"),
        ("DDPJOB_STATUS_PORT", "70000", "a port"),
        ("DDPJOB_LOG_LEVEL", "loud", "DEBUG, INFO"),
        ("DDPJOB_EVENTS", "warnings", "Brief, All or Warning"),
        ("DDPJOB_QUEUE_PLACES", "yes", "true or false"),
        ("DDPJOB_LEASE_SECONDS", "long", "seconds"),
        ("DDPJOB_LEASE_SECONDS", "nan", "seconds"),
        ("DDPJOB_LEASE_RETRY_SECONDS", "0", "seconds above 0"),
        pytest.param("DDPJOB_LEASE_SECONDS", "15.5", "whole seconds", id="a fraction, which a Lease cannot hold"),
        pytest.param("DDPJOB_LEASE_SECONDS", "10", "less than DDPJOB_LEASE_SECONDS", id="a holder stops too late"),
        pytest.param("DDPJOB_LEASE_RETRY_SECONDS", "5", "more than twice DDPJOB_LEASE_RETRY_SECONDS", id="one try"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(name: str, value: str, why: str) -> None:
    with pytest.raises(ValueError, match=rf'DDPJOB_\w+: must be .*{why}.*"{value}"'):
        OperatorSettings.read({name: value})


REFUSALS = {
    "a quota": (ApiError(403, "Forbidden", "exceeded quota"), True),
    "a bad field": (ApiError(422, "Invalid", "spec.containers[0].image: Required value"), True),
    "an unknown field": (ApiError(400, "BadRequest", 'unknown field "spec.x"'), True),
    "a webhook that is down": (ApiError(500, "InternalError", 'failed calling webhook "x"'), True),
    "a server in trouble": (ApiError(500, "InternalError", "etcdserver: request timed out"), False),
    "a server that is busy": (ApiError(429, "TooManyRequests", "slow down"), False),
    "a server that is away": (ApiError(0, "NoAnswer", "connection refused"), False),
    "a quota that changes under our hands": (ApiError(409, "Conflict", "the object has been modified"), False),
}


@pytest.mark.parametrize(("error", "refused"), REFUSALS.values(), ids=REFUSALS)
def test_only_errors_that_users_can_fix_are_shown_as_refused(error: ApiError, refused: bool) -> None:
    assert is_refusal(error) is refused


def test_a_refused_create_waits_longer_each_time_until_one_succeeds() -> None:
    memory, now, waits = JobState("u"), START, []
    for _ in range(len(REFUSED_SECONDS) + 1):
        memory.refusals.add("Pod", "digits-1-0", "no", now)
        waits.append(round((memory.refusals.known["Pod", "digits-1-0"].retry_at - now).total_seconds()))
        now = memory.refusals.known["Pod", "digits-1-0"].retry_at
    assert waits == [1, 2, 4, 8, 15, 30, 60, 120, 300, 300]
    memory.refusals.created("Pod", "digits-1-0")
    for rank in range(8):
        memory.refusals.add("Pod", f"digits-1-{rank}", "no", START)
    retry_at = {r.retry_at for r in memory.refusals.known.values()}
    assert retry_at == {START + dt.timedelta(seconds=1)}, "a create that succeeded starts from the shortest, all alike"


def pod(rank: int, owner: str = UID, version: int = 1, **status: Any) -> dict[str, Any]:
    name = f"digits-1-{rank}"
    labels = {
        "training.ddpjob.io/job": "digits",
        "training.ddpjob.io/attempt": "1",
        "training.ddpjob.io/rank": str(rank),
    }
    return {
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": f"uid-{name}",
            "resourceVersion": str(version),
            "labels": labels,
            "ownerReferences": [{"kind": "DDPJob", "name": "digits", "uid": owner, "controller": True}],
        },
        "spec": {"containers": [{"name": "trainer"}]},
        "status": status,
    }


def operator(runtime: Runtime = SYSTEM) -> Operator:
    """Return an operator that knows a job of two nodes and its pods."""
    made = Operator(OperatorSettings(), Client(), runtime=runtime)
    body = manifest()
    body["metadata"]["resourceVersion"] = "1"
    made.caches.jobs.put(body)
    for rank in (0, 1):
        made.caches.pods.put(pod(rank))
    return made


def test_only_reports_of_a_pod_of_the_current_job_are_accepted() -> None:
    async def run() -> None:
        made = operator()
        found = made.locate(BoundPod("default", "digits-1-1", "uid-digits-1-1"))
        assert (found.namespace, found.job, found.node_rank, found.attempt) == ("default", "digits", 1, 1)
        assert made.locate(BoundPod("default", "digits-1-1", "another uid")) is None
        assert made.locate(BoundPod("other", "digits-1-1", "uid-digits-1-1")) is None
        made.caches.pods.put(pod(1, owner="the uid of a deleted job", version=2))
        assert made.locate(BoundPod("default", "digits-1-1", "uid-digits-1-1")) is None
        made.report(found, Report(step=1))  # ignored, because this job was not reconciled yet

    asyncio.run(run())


def test_the_first_question_of_an_agent_is_recorded_at_once() -> None:
    """The status must say that agents ask before this operator is lost: the next one may see no question in time."""

    async def run() -> None:
        made = operator()
        made.leader_of(Sender("default", "digits", 1))
        assert len(made.queue.schedule) == 1

    asyncio.run(run())


def test_the_answer_to_an_agent_costs_little_whatever_the_job_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job must be read once for all requests of its agents: 65,000 annotations take 6 ms, and 200 pods send requests.
    An unreadable job must not put a traceback into the log for each request."""

    async def run() -> None:
        made, reads = operator(), list[Any]()
        begun = manifest() | {"status": {"attempt": 1, "state": "Running"}}
        begun["metadata"]["resourceVersion"] = "2"
        made.caches.jobs.put(begun)
        read = validation.stored_metadata
        monkeypatch.setattr(validation, "stored_metadata", lambda raw: reads.append(raw) or read(raw))
        made.caches.pods.put(
            pod(0, version=2, phase="Running", podIP="10.0.0.1", containerStatuses=[_state(running={})])
        )
        asker = Sender("default", "digits", 1)
        assert [(made.leader_of(asker) or {}).get("host") for _ in range(9)] == ["10.0.0.1"] * 9
        assert len(reads) == 1
        broken = manifest() | {"status": {"attempt": -1}}
        broken["metadata"] |= {"resourceVersion": "3", "generation": 2}
        made.caches.jobs.put(broken)
        assert [made.leader_of(asker) for _ in range(9)] == [None] * 9
        assert len(reads) == 2
        assert made.states.spec(("default", "digits")) is not None, "its ranks may report"

    asyncio.run(run())


def test_hundreds_of_jobs_deleted_at_once_leave_nothing_and_cost_no_request() -> None:
    """Hundreds of jobs deleted at once, as with their namespace, must leave nothing in memory and cost no request."""

    def refused() -> kopf.ConnectionInfo:
        raise LoginError("nothing is asked for")

    async def run() -> Operator:
        made = Operator(OperatorSettings(), Client(refused))
        for reflector in made.reflectors:
            reflector.synced.set()
        made.lead()
        bodies = [manifest(f"job-{number}") for number in range(500)]
        for number, body in enumerate(bodies):
            body["metadata"] |= {"uid": f"uid-{number}", "resourceVersion": "1"}
            made.caches.jobs.put(body)
            key = (body["metadata"]["namespace"], body["metadata"]["name"])
            made.states.parse(key, body)
            made.states.of(key, f"uid-{number}")
        for body in bodies:
            made.job_told("DELETED", body["metadata"])
        while len(made.queue.schedule) or made.queue.schedule.working:
            await asyncio.sleep(0)
        await made.stop()
        return made

    made = asyncio.run(run())
    assert (len(made.caches.jobs), list(made.states)) == (0, [])


def test_a_failure_is_reconciled_at_once_and_good_news_after_a_while() -> None:
    """A failure must cause a reconcile at once, good news a later one. test_kube_triggers.py tests all rules."""

    def due_in() -> float:
        at = made.queue.schedule.next_at()
        return float("inf") if at is None else round(at - 1000.0, 1)

    async def run() -> Operator:
        return operator(Runtime(clock=lambda: 1000.0))

    made = asyncio.run(run())
    made_quiet(made)
    made.caches.pods.put(pod(0, version=2, phase="Running", containerStatuses=[_state(running={})]))
    assert due_in() == 3.0, "one of two runs"
    ended = _state(terminated={"exitCode": 1})
    made.caches.pods.put(pod(0, version=4, phase="Failed", containerStatuses=[ended]))
    assert due_in() == 0.0, "one has failed"
    made_quiet(made)
    made.caches.pods.remove("default", "digits-1-1", "uid-digits-1-1")
    assert due_in() == 0.0, "one is gone"


def made_quiet(made: Operator) -> None:
    """Empty the schedule: pop each key, whenever it is due, and count its reconcile as done."""
    schedule = made.queue.schedule
    while (at := schedule.next_at()) is not None:
        key = schedule.pop(at)
        assert key is not None
        schedule.done(key, at)


def _state(**state: Any) -> dict[str, Any]:
    return {"name": "trainer", "ready": "running" in state, "state": state}


def test_only_a_404_that_names_the_object_means_that_it_was_deleted() -> None:
    assert is_absent(ApiError(404, "NotFound", 'ddpjobs.training.ddpjob.io "digits" not found'), "digits")
    assert not is_absent(ApiError(404, "NotFound", "the server could not find the requested resource"), "digits")
    assert not is_absent(ApiError(404, "Unknown", "404 page not found"), "digits")


@pytest.mark.parametrize("reads_nodes", [False, True])
def test_the_time_a_pod_is_in_a_state_is_counted_by_our_clock(reads_nodes: bool) -> None:
    """The time since a container's end must be counted by our clock. A node's clock may be wrong, and an evicted pod
    could then count as completed."""
    done = {"exitCode": 0, "reason": "Completed", "finishedAt": f"{START - dt.timedelta(minutes=1):%Y-%m-%dT%H:%M:%SZ}"}
    beside = [_state(terminated=done), {"name": "proxy", "state": {"running": {}}}]

    async def run() -> None:
        made = operator(Runtime(utc=lambda: START))
        made.caches.pods.put(pod(0, version=2, phase="Running", containerStatuses=beside))
        if reads_nodes:
            made.caches.nodes.drop(set(), 1)
        key, (job, _) = ("default", "digits"), validation.parse(manifest())
        seen = await made.reconciler._observe(key, job, made.states.of(key, UID))
        assert (seen.nodes is not None) == reads_nodes
        assert [p.done_since for p in seen.pods] == [START, None]

    asyncio.run(run())


def test_the_probe_names_an_idle_watch_and_a_task_that_has_ended() -> None:
    async def broken() -> None:
        raise RuntimeError("a bug of ours")

    async def run() -> None:
        made = Operator(OperatorSettings(namespaces=("team",)), Client())
        assert made.unhealthy() == ""
        watch = made.watches()[1]
        watch.tried_at -= 61
        assert made.unhealthy() == "the watch of services in team has done nothing for 61 s"
        watch.waits = False
        assert made.unhealthy() == "", "an open watch may be silent for as long, for example at night"
        made.reflectors[0].tried_at -= 3600
        assert made.unhealthy() == "the watch of pods in team has done nothing for 3600 s"
        await asyncio.gather(made.tasks.run("lease", broken()), return_exceptions=True)
        assert made.unhealthy() == "lease has ended"
        assert made.tasks.exit_code == 1
        assert made.tasks.stop_flag.is_set(), "and then the process ends"

    asyncio.run(run())


def test_an_operator_that_is_stopped_ends_in_time_and_for_one_reason() -> None:
    """An operator that is stopped must end in time, because kopf may wait for ever for a task that has ended."""
    limits: list[float] = []

    async def run() -> Operator:
        made = Operator(OperatorSettings(), Client(), end_within=limits.append)
        tasks = [made.tasks.run("first", asyncio.sleep(0)), made.tasks.run("second", asyncio.sleep(0))]
        await asyncio.gather(*tasks)  # let the operator's callbacks run before those of gather
        made.tasks.end()
        return made

    made = asyncio.run(run())
    assert limits == [BROKEN_END_SECONDS]
    assert (made.tasks.exit_code, made.unhealthy()) == (1, "first has ended")


def test_a_standby_knows_the_pods_of_a_recreated_job_and_forgets_deleted_jobs() -> None:
    """A standby operator must accept reports for nodes that an earlier job of the same name did not have, and must drop
    the specs of deleted jobs."""

    async def run() -> None:
        made = Operator(OperatorSettings(), Client(), Election(Client(), "ops", "op", "a", Durations()))
        before, after = manifest(nodes=1), manifest(nodes=2)
        before["metadata"] |= {"uid": "another uid", "resourceVersion": "1", "generation": 1}
        after["metadata"] |= {"resourceVersion": "9", "generation": 1}
        made.caches.jobs.put(before)
        assert made.states.spec(("default", "digits")) is not None
        made.caches.jobs.put(after)
        made.caches.pods.put(pod(1))
        found = made.locate(BoundPod("default", "digits-1-1", "uid-digits-1-1"))
        assert found.node_rank == 1
        made.job_told("DELETED", after["metadata"])
        assert made.states._parsed == {}

    asyncio.run(run())


def test_a_standby_queues_nothing_and_the_leader_reconciles_every_job() -> None:
    async def run() -> None:
        made = Operator(OperatorSettings(), Client(), Election(Client(), "ops", "op", "a", Durations()))
        body = manifest()
        body["metadata"]["resourceVersion"] = "1"
        made.caches.jobs.put(body)
        made.caches.pods.put(pod(0))
        assert len(made.queue.schedule) == 0, "it would grow by every job that ever was"
        made.lead()
        assert len(made.queue.schedule) == 1
        await asyncio.sleep(0)
        assert made.unhealthy() == ""

    asyncio.run(run())


def test_an_operator_that_loses_its_lease_exits_as_if_it_had_been_stopped(caplog: pytest.LogCaptureFixture) -> None:
    """An operator that loses its Lease must exit as after SIGTERM: another exit code looks like a crash."""

    class Brief(Election):
        async def gained(self) -> str:
            return "b"

        async def lost(self) -> None:
            await asyncio.sleep(0)

    async def run() -> Operator:
        leader = Brief(Client(), "ops", "op", "a", Durations())
        made = Operator(OperatorSettings(), Client(), leader)
        made.tasks.run("leadership", made._lead_until_lost(leader))
        await asyncio.wait_for(made.tasks.stop_flag.wait(), 10)
        await made.stop()
        return made

    made = asyncio.run(run())
    assert (made.tasks.exit_code, made.leads, made.unhealthy()) == (0, False, "")
    assert "ERROR" not in caplog.text
