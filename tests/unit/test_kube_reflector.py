"""How a copy of a collection survives what API servers do to watches; time does not pass here."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Set
from typing import Any

import pytest

from ddpjob_operator.kube.client import ApiError, Page
from ddpjob_operator.kube.listing import take
from ddpjob_operator.kube.reflector import STALE_LISTS_MAX, Reflector
from ddpjob_operator.kube.store import ObjectKey


def event(kind: str, name: str, version: int) -> dict[str, Any]:
    metadata = {"namespace": "team", "name": name, "uid": name, "resourceVersion": str(version)}
    return {"type": kind, "object": {"metadata": metadata}}


class Server:
    """Lists and watches in turn, each an answer or an error; at the end it holds the watch open for ever."""

    def __init__(self, lists: list[Any], watches: list[Any]) -> None:
        self.lists, self.watches = lists, watches
        self.asked: list[str] = []
        self.idle = asyncio.Event()

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
    """Records what the reflector tells."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def put(self, raw: Any) -> None:
        self.calls.append(f"put {raw['metadata']['name']}")

    def remove(self, namespace: str, name: str, uid: str) -> None:
        self.calls.append(f"remove {name}")

    def one_observation(self, namespace: str = "") -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def retain(self, named: Set[ObjectKey], list_version: int, namespace: str = "") -> None:
        self.calls.append(f"retain {sorted(name for _, name in named)}")


def follow(lists: list[Any], watches: list[Any]) -> tuple[Server, Copy, list[float]]:
    """Until all that was prepared has been played; the waits in between."""
    waits: list[float] = []

    async def run() -> tuple[Server, Copy]:
        async def sleep(seconds: float) -> None:
            waits.append(seconds)
            await asyncio.sleep(0)

        server, copy = Server(lists, watches), Copy()
        reflector = Reflector(server, "pods", "team", "a", copy, sleep=sleep)  # type: ignore[arg-type]
        running = asyncio.create_task(reflector.run())
        await asyncio.wait_for(server.idle.wait(), 10)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return server, copy

    server, copy = asyncio.run(run())
    return server, copy, waits


GONE = ApiError(410, "Expired", "too old")
AWAY = ApiError(0, "NoAnswer", "connection refused")


def test_it_lists_once_and_goes_on_from_the_last_event_when_a_watch_ends() -> None:
    watch = [event("ADDED", "b", 11), event("DELETED", "a", 12), event("BOOKMARK", "", 20)]
    server, copy, _ = follow([(["a"], 10)], [watch])
    assert server.asked == ["list", "watch 10", "watch 20"]
    assert copy.calls == ["put a", "retain ['a']", "put b", "remove a"]


def test_a_connection_that_breaks_costs_no_list() -> None:
    server, _, _ = follow([([], 10)], [[event("ADDED", "b", 11), AWAY], [AWAY]])
    assert server.asked == ["list", "watch 10", "watch 11", "watch 11"]


def test_after_410_it_lists_again() -> None:
    server, copy, _ = follow([(["a"], 10), (["b"], 30)], [[GONE]])
    assert server.asked == ["list", "watch 10", "list", "watch 30"]
    assert copy.calls == ["put a", "retain ['a']", "put b", "retain ['b']"]


def test_it_waits_longer_each_time_for_a_server_that_is_away_and_never_too_long() -> None:
    _, _, waits = follow([*[AWAY] * 12, ([], 10)], [])
    assert waits[:6] == sorted(waits[:6])
    assert 20 < waits[-1] < 40


@pytest.mark.parametrize("refused", [ApiError(429, "TooManyRequests", "slow down", s) for s in (5.0, 3600.0)], ids=str)
def test_a_watch_that_is_turned_away_waits_as_long_as_the_server_says_and_never_too_long(refused: ApiError) -> None:
    """An API server that sheds load for a minute was asked again after half a second."""
    server, _, waits = follow([([], 10)], [[refused], [refused], []])
    assert server.asked == ["list", *["watch 10"] * 4]
    assert all(5 <= wait <= 30 for wait in waits[:2]), waits
    assert waits[2] < 5, "only as long as the server says so"


def test_watches_that_end_at_once_are_opened_at_a_calm_pace() -> None:
    _, _, waits = follow([([], 10)], [[]] * 8)
    assert len(waits) == 8
    assert waits[-1] > 8


def test_a_list_older_than_what_was_seen_replaces_nothing() -> None:
    server, copy, _ = follow([(["a"], 100), ([], 90), (["a"], 110)], [[GONE]])
    assert copy.calls == ["put a", "retain ['a']"] * 2
    assert server.asked.count("list") == 3


def test_a_cluster_restored_from_a_backup_is_believed_in_the_end() -> None:
    _, copy, _ = follow([(["a"], 100), (["old"], 50)], [[GONE]])
    assert copy.calls[-1] == "retain ['old']"


def test_a_cluster_restored_from_a_backup_is_not_believed_too_soon() -> None:
    server, _, _ = follow([(["a"], 100), (["old"], 50)], [[GONE]])
    assert server.asked.count("list") == 1 + STALE_LISTS_MAX + 1


class Held(dict[str, Any]):
    """An object of which it can be asked whether somebody still has it."""


def test_an_object_of_a_list_is_held_no_longer_than_it_takes_to_put_it() -> None:
    """Ten thousand pods at once are more memory than the operator has: it would end at each of its starts."""
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
