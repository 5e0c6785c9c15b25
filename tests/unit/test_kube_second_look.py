"""What a watch has not shown is found within a minute or two; what it is only about to show costs nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from slow_server import play

from ddpjob_operator.kube.api.client import ApiError, Page
from ddpjob_operator.kube.watch import observe
from ddpjob_operator.kube.watch.second_look import LOOK_SECONDS, SecondLook, Watched
from ddpjob_operator.kube.watch.store import Key, Store
from ddpjob_operator.kube.work import measuring
from ddpjob_operator.metrics.meter import Meter

JOB = {"training.ddpjob.io/job": "digits"}


def service(name: str, version: int, uid: str = "") -> dict[str, Any]:
    metadata = {"name": name, "namespace": "team", "uid": uid or name, "resourceVersion": str(version), "labels": JOB}
    return {"metadata": metadata}


class World:
    """A server's objects, our copy of them, and what is read again."""

    def __init__(self) -> None:
        self.copy: Store[Any] = Store(observe.service, lambda _: ("team", "digits"), lambda *_: None)
        self.there: list[dict[str, Any]] = []
        self.at = 100
        self.error: Exception | None = None
        self.asked = 0
        self.read: list[Key] = []
        self.meter = Meter()
        self.meanwhile: Callable[[], None] = lambda: None
        """What the watch brings after the list."""

    async def versions(self, path: str, selector: str) -> AsyncIterator[Page]:
        self.asked += 1
        if self.error:
            raise self.error
        yield Page(self.there, str(self.at))
        asyncio.get_running_loop().call_later(LOOK_SECONDS / 2, self.meanwhile)

    async def read_again(self, key: Key) -> None:
        self.read.append(key)
        self.there = []
        self.copy.retain(set(), self.at)

    def look(self, times: int = 2) -> list[Key]:
        watched = Watched("services", "team", "/api/v1/namespaces/team/services", "", self.copy, self.read_again)
        count = measuring.changes_missed(self.meter)
        look = SecondLook(self, lambda: [watched], logging.getLogger("test"), count)  # type: ignore[arg-type]

        async def run() -> None:
            running = asyncio.create_task(look.run())
            await asyncio.sleep(times * LOOK_SECONDS + 1)
            running.cancel()

        play(run)
        return self.read


@pytest.fixture
def world() -> World:
    made = World()
    made.there = [service("a", 7)]
    made.copy.put(service("a", 7))
    return made


def test_nothing_is_read_again_while_the_copy_is_right(world: World) -> None:
    assert world.look() == []


def test_an_object_that_is_not_in_the_copy_is_read(world: World) -> None:
    """A pod that came up unseen would be made a second time."""
    world.there.append(service("b", 8))
    assert world.look() == [("team", "digits")]


def test_an_object_whose_change_was_not_shown_is_read(world: World) -> None:
    """The last event of a job's last pod: the job would run for ever."""
    world.there = [service("a", 9)]
    assert world.look() == [("team", "digits")]


def test_an_object_whose_deletion_was_not_shown_is_read(world: World) -> None:
    world.there = []
    assert world.look() == [("team", "digits")]


def test_what_the_watch_brings_later_is_not_read(world: World) -> None:
    """Something always changes during a list, and a watch is late where a machine is overloaded: each of those would
    cost a request, when there are too many already."""
    world.there.append(service("b", 8))
    world.meanwhile = lambda: world.copy.put(service("b", 8))
    assert world.look() == []


def test_what_changes_all_the_time_and_is_late_each_time_is_not_read(world: World) -> None:
    world.there = [service("a", 9)]
    world.meanwhile = lambda: world.there.__setitem__(0, service("a", 10))
    assert world.look() == []


def test_what_has_come_or_gone_since_the_list_is_not_read(world: World) -> None:
    world.there.append(service("gone", 9))
    world.copy.put(service("gone", 9))
    world.copy.remove("team", "gone", "gone")
    world.meanwhile = lambda: world.copy.put(service("new", 101))
    assert world.look() == []


def test_a_cluster_that_was_restored_from_a_backup_is_seen_as_it_is(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """It counts anew, so everything in it looked older than what was known: for a day a job of the present did not
    start, and one that was gone was still there."""
    world.copy.put(service("of another time", 800))
    world.copy.put(service("a", 900))
    world.copy.put(service("b", 700))
    world.copy.put(service("deleted since", 750))
    world.copy.remove("team", "deleted since", "deleted since")
    world.there = [service("a", 7), service("b", 8)]
    assert world.look(times=2) == []
    assert world.copy.newest("team") == 0, "whatever comes now is taken"
    world.copy.put(service("deleted since", 6))
    assert world.copy.entry("team", "deleted since") is not None
    assert world.look(times=3) == [("team", "digits")]
    assert "services in team: the list is of version 100, and 900 was seen before" in caplog.text


def test_one_list_that_is_late_is_no_backup(world: World) -> None:
    world.copy.put(service("a", 900))
    world.there = [service("a", 900)]
    world.meanwhile = lambda: setattr(world, "at", 1000)
    assert world.look(times=4) == []
    assert world.copy.newest("team") == 900


def test_an_object_of_another_namespace_is_not_missed(world: World) -> None:
    other = service("x", 5)
    other["metadata"]["namespace"] = "other"
    world.copy.put(other)
    assert world.look() == []


def test_an_object_that_cannot_be_read_is_not_read_each_minute(world: World) -> None:
    bad = service("a", 9)
    bad["metadata"]["ownerReferences"] = 7
    world.copy.put(bad)
    world.there = [service("a", 9)]
    assert world.look() == []


@pytest.mark.parametrize("error", [ApiError(503, "Unavailable", "no"), RuntimeError("a bug")])
def test_a_look_that_fails_is_told_and_the_next_one_comes(
    world: World, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """The end of this task would end the operator."""
    world.error = error
    assert world.look(times=3) == []
    assert world.asked == 3
    assert "services in team were not listed again" in caplog.text


def test_what_was_missed_is_named_for_the_administrator(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.there = []
    world.look()
    assert "services in team: the watch has not shown changes of team/digits; they are read again" in caplog.text


def test_what_was_missed_is_counted_by_resource_from_zero_on(world: World) -> None:
    """A proxy that drops lines of watches makes every job late by a minute: that is worth an alert of one's own."""

    def counted() -> float | None:
        return world.meter.registry.get_sample_value("ddpjob_watch_missed_total", {"resource": "services"})

    assert counted() == 0
    world.there = []
    world.look()
    assert counted() == 1
