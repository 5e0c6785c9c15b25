"""The position of a job in its queue: the requests it needs, how often they are sent, and the text that users read. The
answers follow Kueue's documentation of visibility.kueue.x-k8s.io."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Mapping
from typing import Any, cast

import pytest
from slow_server import play
from virtual_time import VirtualLoop
from worlds import World, job

from ddpjob_operator.kube.api.availability import Availability
from ddpjob_operator.kube.api.client import ApiError, Client
from ddpjob_operator.kube.api.runtime import Runtime
from ddpjob_operator.kube.operator import Operator
from ddpjob_operator.kube.settings import OperatorSettings
from ddpjob_operator.kube.watch.queue_places import ASK_SECONDS, QueuePlaces
from ddpjob_operator.kube.watch.store import Key

API = "/apis/visibility.kueue.x-k8s.io"
MAIN = f"{API}/v1beta1/namespaces/team/localqueues/main/pendingworkloads"


def item(name: str, before: int, before_in_local_queue: int = 0) -> dict[str, Any]:
    """Return a PendingWorkload of Kueue."""
    return {
        "metadata": {"name": name, "namespace": "team", "creationTimestamp": "2031-03-05T07:11:13Z"},
        "priority": 0,
        "localQueueName": "main",
        "positionInClusterQueue": before,
        "positionInLocalQueue": before_in_local_queue,
    }


class Kueue:
    """API server with answers under visibility.kueue.x-k8s.io, for queues in which `jobs` wait."""

    def __init__(self, *versions: str) -> None:
        served = [{"groupVersion": f"visibility.kueue.x-k8s.io/{v}", "version": v} for v in versions]
        self.answers: dict[str, Any] = {API: {"kind": "APIGroup", "versions": served}} if versions else {}
        self.asked: list[str] = []
        self.seconds = 0.0
        self.availability = Availability()
        self.jobs: list[tuple[Key, str]] = [(("team", "digits"), "main")]
        self.told: list[Key] = []
        log = logging.getLogger("test_kube_queue_places")
        runtime = Runtime(clock=lambda: self.seconds, log=log)
        client = cast(Client, self)
        self.places = QueuePlaces(client, lambda: list(self.jobs), self.told.append, runtime)

    async def get(self, path: str, params: Mapping[str, str] | None = None) -> Any:
        self.asked.append(path)
        answer = self.answers.get(path, ApiError(404, "NotFound", "the server could not find the requested resource"))
        if isinstance(answer, ApiError):
            raise answer
        return answer

    def look(self, after: float = 0.0) -> Kueue:
        self.seconds += after
        asyncio.run(self.places.look())
        return self

    def of(self, name: str = "digits") -> int | None:
        return self.places.of(("team", name))


def test_a_job_learns_how_many_jobs_are_ahead_of_it_in_the_cluster_queue() -> None:
    """The position must be that in the ClusterQueue, because jobs of other LocalQueues wait for its quota, too."""
    queue = Kueue("v1beta1")
    queue.answers[MAIN] = {"items": [item("first", 0), item("digits", 4, 1)]}
    queue.look()
    assert (queue.of(), queue.told) == (5, [("team", "digits")])


def test_a_queue_is_queried_once_a_minute_however_many_jobs_wait() -> None:
    """A queue must be queried once a minute, however many jobs wait in it."""
    queue = Kueue("v1beta1")
    queue.jobs = [(("team", f"job-{number}"), "main") for number in range(1000)]
    queue.answers[MAIN] = {"items": [item(f"job-{number}", number) for number in range(1000)]}
    for _ in range(24):
        queue.look(after=5)
    assert queue.asked == [API, MAIN, MAIN]
    assert (queue.of("job-999"), len(queue.told)) == (1000, 1000), "told once: no place has changed"


def test_nothing_is_queried_while_no_job_waits() -> None:
    queue = Kueue("v1beta1")
    queue.jobs = []
    assert queue.look().look(after=ASK_SECONDS).asked == []


def test_each_queue_is_queried_and_a_new_one_at_once() -> None:
    queue = Kueue("v1beta1")
    other = MAIN.replace("/team/", "/other/").replace("/main/", "/low%2Fhigh/")
    queue.answers |= {MAIN: {"items": [item("digits", 0)]}, other: {"items": [item("digits", 8)]}}
    queue.look()
    queue.jobs.append((("other", "digits"), "low/high"))
    queue.look(after=5)
    assert queue.asked == [API, MAIN, other]
    assert queue.places.of(("other", "digits")) == 9


def test_only_the_job_whose_position_changed_is_notified_and_an_admitted_job_has_none() -> None:
    """An admitted job must lose its position, because a later eviction would show the old one."""
    queue = Kueue("v1beta1")
    queue.jobs.append((("team", "second"), "main"))
    queue.answers[MAIN] = {"items": [item("digits", 0), item("second", 2)]}
    queue.look()
    queue.told.clear()
    queue.answers[MAIN] = {"items": [item("digits", 0), item("second", 1)]}
    queue.look(after=ASK_SECONDS)
    assert (queue.of("second"), queue.told) == (2, [("team", "second")])
    queue.jobs = []
    assert queue.look(after=5).of() is None


@pytest.mark.parametrize("versions", [(), ("v1alpha1",)], ids=["without the API", "in an older version"])
def test_a_cluster_without_the_visibility_api_is_queried_once_a_minute(versions: Any) -> None:
    queue = Kueue(*versions)
    for _ in range(13):
        queue.look(after=5)
    assert (queue.asked, queue.of()) == ([API, API], None)


def test_the_tested_version_is_used_and_the_newer_one_if_it_is_gone() -> None:
    """The tested version v1beta1 must be preferred if the server has two, as Kueue 0.15 does."""
    both, newer = Kueue("v1beta2", "v1beta1"), Kueue("v1beta2")
    assert both.look().asked == [API, MAIN]
    assert newer.look().asked == [API, MAIN.replace("v1beta1", "v1beta2")]
    both.look(after=ASK_SECONDS)  # 404 means that the queue is gone, or this version of the API
    both.answers |= newer.answers
    assert both.look(after=ASK_SECONDS).asked[-1] == MAIN.replace("v1beta1", "v1beta2")


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (ApiError(404, "NotFound", "localqueues.visibility.kueue.x-k8s.io main not found"), ""),
        (ApiError(403, "Forbidden", "cannot get localqueues/pendingworkloads"), "cannot get localqueues"),
        (ApiError(503, "ServiceUnavailable", "the server is currently unable to handle the request"), "unable to"),
        ({"items": [{"positionInClusterQueue": 1}]}, "cannot be read"),
        ({"items": [item("digits", "1")]}, ""),  # type: ignore[arg-type]
        ({"items": None}, ""),
        ([], "cannot be read"),
    ],
    ids=["no such queue", "no right", "away", "no name", "no number", "nobody waits", "no object"],
)
def test_an_answer_without_a_position_is_logged_once_and_the_job_keeps_waiting(
    answer: Any, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    queue = Kueue("v1beta1")
    queue.answers[MAIN] = answer
    for _ in range(3):
        queue.look(after=ASK_SECONDS)
    assert (queue.of(), queue.told) == (None, [])
    assert [says in record.message for record in caplog.records] == ([True] if says else [])


def test_the_message_of_a_waiting_job_has_its_position_which_is_approximate_far_from_the_front() -> None:
    """Far from the front the position must be rounded, or each start would change the status of every waiting job."""
    plain = job(gang="kueue")
    world = World(plain).serves("kueue", "kueue.x-k8s.io/v1beta1").settle()
    texts = []
    for place in (1, 10, 11, 19, 143, 1999):
        world.admits("waiting", "insufficient unused quota", place=place).settle()
        texts.append(world.status.message.removeprefix("waiting in the queue: "))
    rest = ": insufficient unused quota"
    assert texts == [
        *(f"position 1{rest}", f"position 10{rest}"),
        *(f"position {least} or later{rest}" for least in (10, 10, 100, 1000)),
    ]


def test_the_operator_shows_the_position_of_a_waiting_job_only_if_this_is_switched_on() -> None:
    """If positions are on, the operator requests them for the jobs that wait according to its list of Workloads."""
    settings = OperatorSettings(health_port=0, gangs=("kueue",))
    places, asked = [], []

    class Server(Kueue):
        async def get(self, path: str, params: Mapping[str, str] | None = None) -> Any:
            asked.append(path)
            return self.answers.get(path) or {}

        async def close(self) -> None:
            pass

    async def story() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        for on in (True, False):
            asked.clear()
            server = Server("v1beta1")
            server.answers[MAIN] = {"items": [item("digits", 2)]}
            runtime = Runtime(clock=loop.time, utc=loop.now)
            operator = Operator(dataclasses.replace(settings, queue_places=on), cast(Client, server), runtime=runtime)
            gang = operator.caches.gangs["kueue"]
            labels = {"training.ddpjob.io/job": "digits"}
            metadata = {"name": "digits", "namespace": "team", "uid": "w", "resourceVersion": "5", "labels": labels}
            gang.store.put({"metadata": metadata, "spec": {"queueName": "main"}, "status": {}})
            operator.lead()
            await asyncio.sleep(1)
            places.extend(group.admission.place for group in gang.groups(("team", "digits")))
            assert [path for path in asked if path.startswith(API)] == ([API, MAIN] if on else [])
            await operator.stop()

    play(story)
    assert places == [3, None]


def test_queue_positions_are_off_by_default() -> None:
    on = OperatorSettings.read({"DDPJOB_QUEUE_PLACES": "true"})
    assert (on.queue_places, OperatorSettings.read({}).queue_places) == (True, False)
    assert "DDPJOB_QUEUE_PLACES=true" in on.summary()
