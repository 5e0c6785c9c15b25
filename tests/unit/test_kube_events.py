"""Each Event is sent once, delays no pod, and cannot flood the API server."""

import asyncio
import datetime as dt
from typing import Any

import pytest
from cancelling import running, turns, until

from ddpjob_operator.job import api
from ddpjob_operator.kube.api.client import ApiError
from ddpjob_operator.kube.api.runtime import SYSTEM, Runtime
from ddpjob_operator.kube.work.events import (
    LATER_SECONDS,
    PASSING_LATER_SECONDS,
    PASSING_SECONDS,
    QUEUE_MAX,
    QUEUE_OF_JOB_MAX,
    REPEAT_SECONDS,
    Events,
    body,
)
from ddpjob_operator.plan.actions import Event

JOB = api.Metadata(name="digits", namespace="team", uid="u")
AT = dt.datetime(2031, 3, 5, 7, 11, 13, tzinfo=dt.timezone.utc)
CREATING, RUN = Event("Normal", "CreatingPods", "creating"), Event("Normal", "AllNodesRun", "2 of 2 nodes are running")


class Server:
    def __init__(self) -> None:
        self.now = 1000.5
        self.got: list[str] = []
        self.error: ApiError | None = None

    async def create(self, path: str, body: dict[str, Any]) -> None:
        if self.error is not None:
            raise self.error
        self.got.append(body["reason"])


def play(
    *steps: tuple[float, Event | None], error: ApiError | None = None, busy: bool = False, level: str = "All"
) -> list[str]:
    """Return the reasons of the Events that arrive. steps: seconds to wait, then an Event to send, or None."""

    async def run() -> list[str]:
        server = Server()
        server.error = error
        runtime = Runtime(clock=lambda: server.now)
        events = Events(server, runtime, level=level, busy=lambda _namespace: busy)  # type: ignore[arg-type]
        for seconds, event in steps:
            server.now += seconds
            if event is not None:
                events.send(JOB, (event,), AT)
            async with running(events.run()):
                await turns(5)
        return server.got

    return asyncio.run(run())


def test_events_of_one_second_are_listed_in_the_order_in_which_they_occurred() -> None:
    """`kubectl describe` must not show PermanentFailure before the RankFailed that caused it."""
    failed, over = Event("Warning", "RankFailed", "rank 1 ended"), Event("Warning", "PermanentFailure", "no retry")
    names: dict[str, str] = {}

    class Named:
        async def create(self, path: str, body: dict[str, Any]) -> None:
            names[body["metadata"]["name"]] = body["reason"]

    async def run() -> None:
        events = Events(Named(), Runtime(utc=lambda: AT))  # type: ignore[arg-type]
        events.send(JOB, (failed,), AT)
        events.send(JOB, (over,), AT)
        async with running(events.run()):
            await until(lambda: len(names) == 2)

    for _ in range(5):
        names.clear()
        asyncio.run(run())
        assert [names[name] for name in sorted(names)] == ["RankFailed", "PermanentFailure"]


def test_an_equal_event_about_the_same_job_is_sent_only_once_in_a_while() -> None:
    assert play((0, RUN), (1, RUN), (REPEAT_SECONDS - 2, RUN)) == ["AllNodesRun"]
    assert play((0, RUN), (REPEAT_SECONDS, RUN)) == ["AllNodesRun", "AllNodesRun"]


def test_a_state_has_an_event_only_if_it_lasts() -> None:
    assert play((0, CREATING), (1, RUN)) == ["AllNodesRun"]
    assert play((0, CREATING), (PASSING_SECONDS, None), (1, RUN)) == ["CreatingPods", "AllNodesRun"]


def test_only_warnings_are_sent_for_a_deleted_job() -> None:
    """A Normal Event must not appear 20 s after its job was deleted."""

    async def run() -> list[str]:
        server = Server()
        events = Events(server, Runtime(clock=lambda: server.now), busy=lambda _namespace: True)  # type: ignore[arg-type]
        events.send(JOB, (CREATING, RUN, Event("Warning", "RankFailed", "rank 1 failed")), AT)
        events.gone(JOB.uid)
        async with running(events.run()):
            await turns(5)
        assert len(events) == 0
        return server.got

    assert asyncio.run(run()) == ["RankFailed"]


ROUTINE = Event("Normal", "AllNodesRun", "2 of 2 nodes are running", is_routine=True)
DONE = Event("Normal", "AllNodesCompleted", "all 2 nodes completed", is_routine=True)


def test_a_job_that_just_trains_has_no_events_and_a_job_with_any_event_has_all() -> None:
    assert play((0, CREATING), (1, ROUTINE), (30, DONE), level="Brief") == []
    started_late = play((0, CREATING), (PASSING_SECONDS, None), (1, ROUTINE), (30, DONE), level="Brief")
    assert started_late == ["CreatingPods", "AllNodesRun", "AllNodesCompleted"]
    advised = play((0, Event("Normal", "GraceRaised", "1 s")), (0, ROUTINE), level="Brief")
    assert advised == ["GraceRaised", "AllNodesRun"]
    assert play((0, RUN), level="Brief") == ["AllNodesRun"], "as after a restart"


@pytest.mark.parametrize(("level", "arrive"), [("All", ["RankFailed", "AllNodesRun"]), ("Warning", ["RankFailed"])])
def test_an_administrator_may_choose_all_events_or_only_warnings(level: str, arrive: list[str]) -> None:
    assert play((0, Event("Warning", "RankFailed", "rank 3")), (0, ROUTINE), (0, None), level=level) == arrive


def test_normal_events_wait_while_pods_are_created_but_not_for_ever() -> None:
    """Normal Events must wait while pods are created, because they would delay other jobs' pods, but not for ever."""
    assert play((0, RUN), (LATER_SECONDS - 1, None), busy=True) == []
    assert play((0, RUN), (LATER_SECONDS, None), busy=True) == ["AllNodesRun"]
    assert play((0, CREATING), (PASSING_SECONDS + 5, RUN), busy=True) == []
    assert play((0, CREATING), (PASSING_LATER_SECONDS - LATER_SECONDS, None), busy=True) == [], "most create pods"
    assert play((0, CREATING), (PASSING_LATER_SECONDS + LATER_SECONDS, None), busy=True) == ["CreatingPods"]
    assert play((0, CREATING), (PASSING_SECONDS + 5, RUN), (LATER_SECONDS, None), busy=True) == ["AllNodesRun"]
    warned = play((0, RUN), (0, Event("Warning", "RankFailed", "rank 3")), (0, None), busy=True)
    assert warned == ["AllNodesRun", "RankFailed"], "a warning makes way for nothing"


def test_a_server_that_refuses_events_blocks_nothing() -> None:
    assert play((0, RUN), (1, CREATING), (9, None), error=ApiError(403, "Forbidden", "no")) == []


def test_waiting_events_are_bounded_and_no_job_takes_all_the_room() -> None:
    """Waiting Events must be limited per job: thousands of one namespace must leave room for Warnings of others."""
    events = Events(Server(), SYSTEM)  # type: ignore[arg-type]
    for number in range(QUEUE_MAX // QUEUE_OF_JOB_MAX + 5):
        job = api.Metadata(name=f"loud-{number}", namespace="loud", uid=f"loud-{number}")
        for i in range(QUEUE_OF_JOB_MAX + 50):
            events.send(job, (Event("Normal", "AllNodesRun", str(i)),), AT)
    assert len(events) == QUEUE_MAX
    events.send(JOB, (RUN,), AT)
    assert len(events) == QUEUE_MAX
    assert len(events._waiting[JOB.uid]) == 1, "another namespace's newest has made room"


def test_slow_events_in_one_namespace_do_not_delay_other_namespaces() -> None:
    """A webhook that takes 10 s in one namespace must not delay all other Warnings for hours."""

    class Hanging(Server):
        async def create(self, path: str, body: dict[str, Any]) -> None:
            if "/namespaces/loud/" in path:
                await asyncio.get_running_loop().create_future()
            await super().create(path, body)

    async def run() -> list[str]:
        server = Hanging()
        events = Events(server, Runtime(clock=lambda: server.now))  # type: ignore[arg-type]
        for number in range(40):
            events.send(api.Metadata(name=f"loud-{number}", namespace="loud", uid=f"{number}"), (RUN,), AT)
        events.send(JOB, (RUN, Event("Warning", "RankFailed", "rank 3")), AT)
        async with running(events.run()):
            await turns(50)
        return server.got

    assert asyncio.run(run()) == ["AllNodesRun", "RankFailed"], "in their order"


def test_an_event_has_the_fields_that_kubectl_describe_searches_for() -> None:
    made = body(JOB, Event("Warning", "RankFailed", "x" * 5000), AT, "", "1")
    assert made["involvedObject"] | {"resourceVersion": ""} == {
        "apiVersion": "training.ddpjob.io/v1alpha1",
        "kind": "DDPJob",
        "name": "digits",
        "namespace": "team",
        "uid": "u",
        "resourceVersion": "",
    }
    assert len(made["message"]) == 1024
    assert made["lastTimestamp"] == "2031-03-05T07:11:13Z"
