"""A reflector's copy stays correct whatever API servers do to watches. All tests are in virtual time."""

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Sequence, Set
from typing import Any

import pytest
from cancelling import running
from slow_server import play

from ddpjob_operator.kube.api.api_error import bad_answer
from ddpjob_operator.kube.api.availability import Availability
from ddpjob_operator.kube.api.client import ApiError, Page
from ddpjob_operator.kube.api.runtime import Runtime
from ddpjob_operator.kube.watch import observe
from ddpjob_operator.kube.watch.listing import take
from ddpjob_operator.kube.watch.reflector import STALE_LISTS_MAX, Reflector
from ddpjob_operator.kube.watch.store import ObjectKey, Store
from ddpjob_operator.metrics.meter import Meter


def event(kind: str, name: str, version: int) -> dict[str, Any]:
    metadata = {"namespace": "team", "name": name, "uid": name, "resourceVersion": str(version)}
    return {"type": kind, "object": {"metadata": metadata}}


class Server:
    """API server with prepared answers or errors for lists and watches. The last watch stays open for ever."""

    def __init__(self, lists: list[Any], watches: list[Any]) -> None:
        self.lists, self.watches = lists, watches
        self.asked: list[str] = []
        self.idle, self.availability = asyncio.Event(), Availability()

    async def pages(self, path: str, selector: str) -> AsyncIterator[Page]:
        self.asked.append("list")
        answer = self.lists.pop(0) if len(self.lists) > 1 else self.lists[0]
        if isinstance(answer, ApiError):
            raise answer
        yield Page([event("", name, 1)["object"] for name in answer[0]], str(answer[1]))

    async def watch(self, path: str, version: str, selector: str) -> AsyncIterator[Any]:
        self.asked.append(f"watch {version}")
        if not self.watches:
            self.idle.set()
            await asyncio.Event().wait()
        for item in self.watches.pop(0):
            if isinstance(item, ApiError):
                raise item
            yield item


class Copy:
    """Store that records each call of the reflector."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.stored: set[ObjectKey] = set()

    def put(self, raw: Any) -> None:
        self.stored.add((raw["metadata"]["namespace"], raw["metadata"]["name"]))
        self.calls.append(f"put {raw['metadata']['name']}")

    def remove(self, namespace: str, name: str, uid: str) -> None:
        self.calls.append(f"remove {name}")

    def has(self, raw: Any) -> bool:
        return f"put {raw['metadata']['name']}" in self.calls

    def begin_anew(self, namespace: str) -> None:
        self.calls.append(f"begin anew in {namespace}")

    def one_observation(self, namespace: str = "") -> contextlib.AbstractContextManager[set[ObjectKey]]:
        return contextlib.nullcontext(set(self.stored))

    def drop(self, unlisted: Set[ObjectKey], list_version: int) -> None:
        self.calls.append(f"drop {sorted(name for _, name in unlisted)}")


def follow(lists: list[Any], watches: list[Any], woken: Sequence[bool] = ()) -> tuple[Server, Copy, list[float]]:
    """Run until all prepared answers were given; return the waits between them. woken[i]: True if the end of an outage
    ends wait i early."""
    waits: list[float] = []

    async def run() -> tuple[Server, Copy]:
        async def sleep(seconds: float) -> bool:
            waits.append(seconds)
            await asyncio.sleep(0)
            return woken[len(waits) - 1] if woken else False

        server, copy = Server(lists, watches), Copy()
        server.availability.wait = sleep  # type: ignore[method-assign]
        reflector = Reflector(server, "pods", "team", "a", copy)  # type: ignore[arg-type]
        async with running(reflector.run()):
            await asyncio.wait_for(server.idle.wait(), 10)
        return server, copy

    server, copy = asyncio.run(run())
    return server, copy, waits


GONE = ApiError(410, "Expired", "too old")
AWAY = ApiError(0, "NoAnswer", "connection refused")


def test_a_reflector_lists_once_and_resumes_from_the_last_event_when_a_watch_ends() -> None:
    watch = [event("ADDED", "b", 11), event("DELETED", "a", 12), event("BOOKMARK", "", 20)]
    server, copy, _ = follow([(["a"], 10)], [watch])
    assert server.asked == ["list", "watch 10", "watch 20"]
    assert copy.calls == ["put a", "drop []", "put b", "remove a"]


def test_a_broken_connection_causes_no_new_list() -> None:
    server, _, _ = follow([([], 10)], [[event("ADDED", "b", 11), AWAY], [AWAY]])
    assert server.asked == ["list", "watch 10", "watch 11", "watch 11"]


NEEDS_A_LIST = {
    "410": GONE,
    "400": ApiError(400, "BadRequest", "invalid resource version"),
    "500": ApiError(500, "InternalError", "etcd: event received with PrevKv=nil"),
    "HTML, or an event that is cut": bad_answer("GET", "/api/v1/pods", ValueError("invalid literal")),
}


@pytest.mark.parametrize("error", NEEDS_A_LIST.values(), ids=NEEDS_A_LIST)
def test_a_watch_that_cannot_be_resumed_causes_a_new_list_within_seconds(error: ApiError) -> None:
    """A watch that cannot be resumed must cause a new list within seconds, whether the answer or an event says so."""
    server, copy, waits = follow([(["a"], 10), (["b"], 30)], [[error]])
    assert server.asked == ["list", "watch 10", "list", "watch 30"]
    assert copy.calls == ["put a", "drop []", "put b", "drop ['a']"]
    assert sum(waits) < 2


def test_a_server_that_refuses_while_it_starts_is_asked_again_within_seconds() -> None:
    """A server that answers 429 or 403 while it starts must be asked again within seconds, not after the long waits of
    an outage."""
    starting = ApiError(429, "TooManyRequests", "storage is (re)initializing")
    woken = [False] * 7 + [True] + [False] * 9
    _, _, waits = follow([*[AWAY] * 8, starting, starting, ([], 10)], [], woken)
    assert max(waits) > 20
    assert sum(waits[8:]) < 5


def test_a_briefly_failing_watch_is_logged_only_after_seconds_and_a_missing_right_at_once(caplog):
    """A watch that fails briefly must be logged only after seconds, so that the line about a missing right is seen."""
    busy, forbidden = ApiError(429, "TooManyRequests", "busy"), ApiError(403, "Forbidden", "no right")
    follow([([], 10)], [[busy], [busy]])
    assert caplog.messages == []
    follow([([], 10)], [[forbidden]])
    assert caplog.messages == ["pods in team cannot be watched, trying again: 403 Forbidden: no right"]


def test_waits_for_an_unavailable_server_grow_up_to_a_limit() -> None:
    _, _, waits = follow([*[AWAY] * 12, ([], 10)], [])
    assert waits[:6] == sorted(waits[:6])
    assert 20 < waits[-1] < 40


@pytest.mark.parametrize("refused", [ApiError(429, "TooManyRequests", "slow down", s) for s in (5.0, 3600.0)], ids=str)
def test_a_rejected_watch_waits_as_long_as_the_server_demands_up_to_a_limit(refused: ApiError) -> None:
    """An API server that sheds load for a minute must not be asked again after half a second."""
    server, _, waits = follow([([], 10)], [[refused], [refused], []])
    assert server.asked == ["list", *["watch 10"] * 4]
    assert all(5 <= wait <= 30 for wait in waits[:2]), waits
    assert waits[2] < 5, "only as long as the server says so"


def test_a_list_older_than_the_known_version_replaces_nothing() -> None:
    server, copy, _ = follow([(["a"], 100), ([], 90), (["a"], 110)], [[GONE]])
    assert copy.calls == ["put a", "drop []"] * 2
    assert server.asked.count("list") == 3


def test_a_cluster_restored_from_a_backup_is_accepted_after_a_while() -> None:
    """Restored objects, whose versions are older than known ones, must be accepted after a while, not after a day."""
    server, copy, _ = follow([(["a"], 100), (["old"], 50)], [[GONE]])
    assert copy.calls[-3:] == ["begin anew in team", "put old", "drop ['a']"]
    assert server.asked.count("list") == 1 + STALE_LISTS_MAX + 1


class Held(dict[str, Any]):
    """A dict that supports weak references, which show if the dict is still in use."""


def test_an_object_of_a_list_is_freed_as_soon_as_it_is_stored() -> None:
    """An object of a list must be freed when it is stored: ten thousand pods at once need too much memory."""
    listed: list[weakref.ref[Held]] = []
    held: list[int] = []

    async def pages() -> AsyncIterator[Page]:
        for number in range(3):
            items = [Held(event("", f"pod-{number}-{i}", 1)["object"]) for i in range(4)]
            listed.extend(map(weakref.ref, items))
            page = Page(items, "1")
            del items
            yield page
            del page

    def put(_: Any) -> None:
        held.append(sum(raw() is not None for raw in listed))

    asyncio.run(take(pages(), Copy(), put))
    assert held == [4, 3, 2, 1] * 3


class Lossy:
    """API server whose watches last five minutes and deliver only bookmarks, so each change is lost."""

    def __init__(self) -> None:
        self.availability = Availability()
        self.there: dict[str, int] = {}
        self.at = self.asked = 0
        self.meanwhile: dict[str, int] = {}
        """Objects created between the end of a watch and the list."""
        self.error: ApiError | None = None

    async def pages(self, path: str, selector: str) -> AsyncIterator[Page]:
        self.asked += 1
        if self.error:
            raise self.error
        self.there |= self.meanwhile
        self.at = max(self.at, *self.there.values(), 1)
        yield Page([event("", name, at)["object"] for name, at in self.there.items()], str(self.at))

    async def watch(self, path: str, version: str, selector: str) -> AsyncIterator[Any]:
        await asyncio.sleep(299)
        yield event("BOOKMARK", "", self.at)
        await asyncio.sleep(1)


class Neglected:
    """A copy of a Lossy server, and the changes that it reported."""

    def __init__(self) -> None:
        self.server, self.meter = Lossy(), Meter()
        self.changes: list[str] = []
        self.copy: Store[Any] = Store(
            observe.service, lambda _: ("team", "digits"), lambda *_: self.changes.append("x")
        )

    def runs(self, lose: Any, seconds: float = 900) -> None:
        """Follow the server for so long. lose: called after the first list, to change objects unseen."""

        async def story() -> None:
            loop = asyncio.get_running_loop()
            about = {"runtime": Runtime(clock=loop.time), "meter": self.meter}
            reflector = Reflector(self.server, "services", "team", "", self.copy, **about)  # type: ignore[arg-type]
            running = asyncio.create_task(reflector.run())
            await reflector.synced.wait()
            lose()
            await asyncio.sleep(seconds)
            running.cancel()

        play(story)

    def names(self) -> list[str]:
        return sorted(place for place in self.server.there if self.copy.entry("team", place))

    def missed(self) -> float | None:
        return self.meter.registry.get_sample_value("ddpjob_watch_missed_total", {"resource": "services"})


@pytest.fixture
def neglected() -> Neglected:
    made = Neglected()
    made.server.there = {"a": 7, "b": 8}
    return made


def test_a_change_missed_by_the_watch_is_found_named_and_counted(neglected, caplog):
    """A change that the watch missed must be found by a list: otherwise a job whose pods have ended runs for ever."""
    assert neglected.missed() == 0

    def lose() -> None:
        neglected.server.there |= {"b": 9, "c": 10}
        neglected.server.at = 11

    neglected.runs(lose)
    assert neglected.names() == ["a", "b", "c"]
    assert neglected.missed() == 2
    assert "services in team: the watch missed 2 changes, among them one of c" in caplog.text


def test_a_deletion_missed_by_the_watch_is_found(neglected: Neglected) -> None:
    """The copy must lose an object whose deletion it missed: a deleted job must not get pods."""
    neglected.runs(lambda: neglected.server.there.pop("b"))
    assert len(neglected.copy) == 1


def test_a_change_between_a_watch_and_the_list_is_not_counted_as_missed(neglected: Neglected) -> None:
    """A change between a watch and the list must not count as missed, or the alert fires in every busy cluster."""
    neglected.runs(lambda: neglected.server.meanwhile.update(new=20))
    assert neglected.names() == ["a", "b", "new"]
    assert neglected.missed() == 0


def test_a_list_of_known_objects_causes_no_reconcile(neglected: Neglected) -> None:
    """If a list has only known objects, it must not cause a reconcile of every job."""
    neglected.runs(neglected.changes.clear, seconds=3000)
    assert 4 <= neglected.server.asked <= 7, "about every ten minutes"
    assert neglected.changes == []


def test_a_refused_list_does_not_end_the_watch(neglected: Neglected) -> None:
    """The watch must continue, so that changes are seen while a busy server refuses lists."""

    def lose() -> None:
        neglected.server.error = ApiError(429, "TooManyRequests", "busy")

    neglected.runs(lose, seconds=1500)
    assert neglected.server.asked == 3
    assert neglected.server.at == 8


class SlowToList(Lossy):
    """A list takes two minutes, and ten seconds after a watch has begun an object is created."""

    watches = 0

    async def pages(self, path: str, selector: str) -> AsyncIterator[Page]:
        await asyncio.sleep(120)
        async for page in super().pages(path, selector):
            yield page

    async def watch(self, path: str, version: str, selector: str) -> AsyncIterator[Any]:
        self.watches += 1
        await asyncio.sleep(10)
        self.at += 1
        self.there[f"new-{self.watches}"] = self.at
        yield event("ADDED", f"new-{self.watches}", self.at)
        await asyncio.sleep(290)


def test_a_change_is_seen_while_a_long_list_arrives(neglected: Neglected) -> None:
    """A change must be seen while a long list arrives, which takes minutes with thousands of large jobs."""
    neglected.server = SlowToList()
    neglected.server.there = {"a": 7}
    neglected.runs(lambda: None, seconds=315)
    assert (neglected.server.asked, neglected.server.watches) == (1, 2), "the second list is on its way"
    assert "new-2" in neglected.names()
    assert neglected.missed() == 0
