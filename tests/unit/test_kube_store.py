"""Our copy of the cluster: newer objects win, deleted ones stay gone, and only real differences are reported."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from lists import taken

from ddpjob_operator.job.bounds import UnreadableError
from ddpjob_operator.kube.api.client import Page
from ddpjob_operator.kube.watch.listing import take
from ddpjob_operator.kube.watch.store import Jobs, Key, Store

KEY = ("team", "digits")


def raw(
    name: str = "digits-1-0", version: int = 5, uid: str = "u1", shown: str = "a", job: str = "digits"
) -> dict[str, Any]:
    metadata = {"namespace": "team", "name": name, "uid": uid, "resourceVersion": str(version)}
    return {"metadata": metadata, "shown": shown, "job": job}


@pytest.fixture
def changes() -> list[tuple[Key, str | None, str | None]]:
    return []


@pytest.fixture
def store(changes: list[tuple[Key, str | None, str | None]]) -> Store[str]:
    return Store(lambda r: str(r["shown"]), lambda r: ("team", str(r["job"])), lambda *change: changes.append(change))


def test_a_difference_is_reported_once_with_the_old_and_new_object(store: Store[str], changes: list[Any]) -> None:
    store.put(raw(version=5))
    store.put(raw(version=6))
    store.put(raw(version=7, shown="b"))
    store.remove("team", "digits-1-0", "u1")
    assert changes == [(KEY, None, "a"), (KEY, "a", "b"), (KEY, "b", None)]
    assert store.of(KEY) == []


def test_the_order_of_changes_does_not_depend_on_the_hashes_of_names(store: Store[str], changes: list[Any]) -> None:
    names = [f"job-{number}" for number in range(20)]
    for name in sorted(names):
        store.put(raw(name, uid=name, shown=name, job=name))
    assert list(store.jobs()) == [("team", name) for name in sorted(names)]
    changes.clear()
    store.drop({("team", name) for name in names}, 5)
    assert [key for key, _, _ in changes] == [("team", name) for name in sorted(names)]


@pytest.mark.parametrize("version", [3, 5])
def test_an_object_that_is_not_newer_changes_nothing(store: Store[str], version: int) -> None:
    store.put(raw(version=5))
    store.put(raw(version=version, shown="old"))
    assert store.of(KEY) == ["a"]


def test_fields_added_by_an_admission_webhook_come_from_the_watch(store: Store[str]) -> None:
    """Fields that a webhook adds must come from the watch. The answer to our create lacks them, such as the gate by
    which Kueue holds a pod back."""
    store.put(raw(shown="as it was sent"), is_whole=False)
    store.put(raw(shown="with a gate"))
    assert store.of(KEY) == ["with a gate"]
    store.put(raw(shown="as it was sent"), is_whole=False)
    assert store.of(KEY) == ["with a gate"], "the watch may be sooner than the answer"


def test_all_objects_of_a_list_count_as_seen_at_once_and_events_of_other_jobs_keep_their_order() -> None:
    """All pods of one list must count as seen at the same time, and pods of other jobs must keep their order: a later
    failure must not look like the cause."""
    seen: dict[str, int] = {}

    def noted(_: str | None, name: str, number: int) -> str:
        seen[name] = number
        return name

    store = Store(lambda r: str(r["metadata"]["name"]), lambda r: ("team", str(r["job"])), lambda *_: None, noted)

    def put(job: str, page: int) -> dict[str, Any]:
        return raw(f"{job}-{page}", uid=f"{job}-{page}", job=job)

    async def listed(job: str, pages: int) -> None:
        async def come() -> AsyncIterator[Page]:
            for page in range(pages):
                await asyncio.sleep(0)
                yield Page([put(job, 2 * page), put(job, 2 * page + 1)], "1")

        await take(come(), store, store.put, namespace="team", key=("team", job))

    async def watch() -> None:
        for number in range(4):
            await asyncio.sleep(0)
            store.put(put("watched", number))

    async def run() -> None:
        await asyncio.gather(listed("short", 1), listed("long", 3), watch())

    asyncio.run(run())
    assert seen["short-0"] == seen["short-1"]
    assert len({seen[f"long-{number}"] for number in range(6)}) == 1
    in_order = [seen[f"watched-{number}"] for number in range(4)]
    assert in_order == sorted(set(in_order))


def test_a_job_continues_when_its_object_becomes_readable_again_unchanged(store, changes):
    """A job must be reconciled when its object is readable again, even if it is the same as before the mistake."""
    store.put(raw(version=5))
    unreadable, store._cut = store._cut, refuses
    store.put(raw(version=6))
    store._cut = unreadable
    assert store.unreadable(KEY)
    changes.clear()
    store.put(raw(version=7))
    assert not store.unreadable(KEY)
    assert changes == [(KEY, None, None)]


def refuses(_: Any) -> str:
    raise UnreadableError("the attempt is not a number")


def test_a_late_answer_does_not_restore_a_deleted_object(store: Store[str]) -> None:
    store.put(raw(version=5))
    store.remove("team", "digits-1-0", "u1")
    store.put(raw(version=6))
    assert store.of(KEY) == []


def test_the_deletion_of_an_old_object_does_not_delete_the_new_one_of_its_name(store: Store[str]) -> None:
    store.put(raw(uid="old", version=5))
    store.put(raw(uid="new", version=9, shown="b"))
    store.remove("team", "digits-1-0", "old")
    assert store.of(KEY) == ["b"]


def test_an_object_missing_in_a_list_is_deleted_unless_it_is_newer_than_the_list(store: Store[str]) -> None:
    store.put(raw("gone", version=5, uid="u1"))
    store.put(raw("answer-to-a-create", version=12, uid="u2", shown="new"))
    taken(store, [raw("stays", version=6, uid="u3", shown="stays")], 10)
    assert sorted(store.of(KEY)) == ["new", "stays"]


@pytest.mark.parametrize("listed", [("other",), ("team", ("team", "other"))], ids=str)
def test_a_list_of_one_namespace_or_job_deletes_nothing_of_another(store: Store[str], listed: tuple[Any, ...]) -> None:
    store.put(raw())
    taken(store, [], 10, *listed)
    assert store.of(KEY) == ["a"]


def test_an_object_whose_label_changes_moves_to_another_job(store: Store[str], changes: list[Any]) -> None:
    store.put(raw())
    store.put(raw(version=6, job="other"))
    assert store.of(KEY) == []
    assert store.of(("team", "other")) == ["a"]
    assert changes[1:] == [(KEY, "a", None), (("team", "other"), None, "a")]


def test_a_job_is_reported_when_it_is_new_newer_or_gone() -> None:
    changes: list[Key] = []
    jobs = Jobs(changes.append)
    jobs.put(raw("digits", version=5))
    jobs.put(raw("digits", version=5))
    jobs.put(raw("digits", version=4))
    assert changes == [KEY]
    jobs.put(raw("digits", version=6))
    jobs.remove(*KEY, "another uid")
    assert changes == [KEY, KEY]
    jobs.remove(*KEY, "u1")
    assert changes == [KEY, KEY, KEY]
    assert jobs.get(KEY) is None


def job(version: int, uid: str = "u1", name: str = "digits") -> dict[str, Any]:
    return {"metadata": {"namespace": "team", "name": name, "uid": uid, "resourceVersion": str(version)}}


def test_changes_of_a_job_in_our_copy_are_taken_and_those_of_unknown_jobs_are_not() -> None:
    """Each edit must reach either our copy or kopf. If it reaches none, it is lost; if both, it costs twice."""
    changed: list[Key] = []
    jobs = Jobs(changed.append)
    assert not jobs.take(job(4)), "kopf is told of it first"
    jobs.put(job(5))
    assert jobs.take(job(6))
    assert jobs.take(job(6)), "the answer to our own write came first"
    assert not jobs.take(job(7, uid="of another job of this name"))
    assert jobs.get(KEY) == job(6)
    assert changed == [KEY, KEY]


def test_the_answer_to_our_own_write_causes_no_reconcile() -> None:
    """The answer to our own write must cause no reconcile, because the writer knows the result already."""
    changed: list[Key] = []
    jobs = Jobs(changed.append)
    jobs.put(job(5))
    jobs.put_quietly(job(6) | {"status": {"state": "Running"}})
    assert len(changed) == 1
    assert jobs.get(KEY) == job(6) | {"status": {"state": "Running"}}
    jobs.put(job(7))
    assert len(changed) == 2


def test_the_event_of_our_own_write_causes_no_reconcile_even_if_it_precedes_the_answer() -> None:
    """The event of our own write must cause no reconcile, even if it arrives before the answer."""
    changed: list[Key] = []
    jobs = Jobs(changed.append)
    jobs.put(job(5) | {"spec": {"nodes": 2}})
    with jobs.writing(KEY, {"state": "Running"}):
        assert jobs.take(job(6) | {"spec": {"nodes": 2}, "status": {"state": "Running"}})
        assert len(changed) == 1
        assert jobs.take(job(7) | {"spec": {"nodes": 2, "suspend": True}, "status": {"state": "Running"}})
        assert len(changed) == 2, "an edit at the same time is news"
        deleted = job(8) | {"spec": {"nodes": 2, "suspend": True}, "status": {"state": "Running"}}
        deleted["metadata"]["deletionTimestamp"] = "2031-03-05T07:00:00Z"
        assert jobs.take(deleted)
        assert len(changed) == 3, "and so is a deletion"
    assert jobs.take(job(9) | {"spec": {"nodes": 2}, "status": {"state": "edited"}})
    assert len(changed) == 4
