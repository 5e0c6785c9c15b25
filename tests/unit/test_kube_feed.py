"""The feed decides which events of DDPJobs kopf gets, and which go directly into our copy."""

import asyncio
import json
from typing import Any

import pytest
from lists import taken

from ddpjob_operator.job import storage
from ddpjob_operator.kube.kopf_workarounds.reflected_session import Feed
from ddpjob_operator.kube.watch.store import Jobs

KEY = ("team", "digits")


def job(version: int, uid: str = "u1") -> dict[str, Any]:
    return {"metadata": {"namespace": "team", "name": "digits", "uid": uid, "resourceVersion": str(version)}}


def told(feed: Feed) -> list[tuple[str, str]]:
    """Return (change, uid) of the events that kopf has not read yet."""

    async def read() -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        lines = feed.lines()
        while True:
            try:
                line = await asyncio.wait_for(anext(lines), 0.01)
            except asyncio.TimeoutError:
                return found
            event = json.loads(line)
            assert event["type"] == "DELETED", "kopf forgets the object, else it keeps a kilobyte of each"
            found.append((event["object"]["change"], event["object"]["metadata"]["uid"]))

    return asyncio.run(read())


def test_kopf_gets_the_beginning_and_the_end_of_jobs_and_our_copy_gets_everything() -> None:
    """Each edit must reach either our copy or kopf. If it reaches none, it is lost; if both, it costs twice."""
    changed: list[tuple[str, str]] = []
    jobs = Jobs(changed.append)
    feed = Feed(jobs)
    feed.put(job(4))
    assert changed == []  # kopf's handler will add the job to our copy
    feed.put(job(5))
    assert (jobs.get(KEY), changed) == (job(5), [KEY])
    feed.remove(*KEY, "u1")
    assert jobs.get(KEY) == job(5)  # the old job, until kopf's handler has run
    feed.put(job(7, "u2"))
    assert jobs.get(KEY) == job(7, "u2")
    assert told(feed) == [("ADDED", "u1"), ("DELETED", "u1"), ("ADDED", "u2")]


def nested(levels: int) -> Any:
    return [nested(levels - 1)] if levels else "x"


@pytest.mark.parametrize("template", ["x" * 100_000, nested(900)], ids=["large", "deep"])
def test_kopf_gets_only_the_name_of_a_job(template: Any) -> None:
    """kopf must get only the name of a job: 2,000 new jobs of 280 kB in its queue would fill the memory, and its JSON
    parser fails at 1,000 levels."""
    feed = Feed(Jobs(lambda _key: None))
    feed.put(job(4) | {"spec": {"template": template}})

    async def line() -> bytes:
        return await anext(feed.lines())

    assert len(asyncio.run(line())) < 300


def test_a_list_updates_our_copy_and_removes_what_it_lacks() -> None:
    """A list must remove objects that it lacks. Otherwise a job whose deletion was missed would restart for ever."""
    jobs = Jobs(lambda _key: None)
    feed = Feed(jobs)
    taken(feed, [job(4)], 4)
    assert jobs.get(KEY) == job(4)
    taken(feed, [], 9)
    assert jobs.get(KEY) is None
    assert told(feed) == []


def test_a_list_causes_no_reconcile_of_a_job_that_is_only_partly_kept() -> None:
    """A list must cause no reconcile of ended jobs that are partly kept, because each would be read again."""
    changed: list[tuple[str, str]] = []
    jobs = Jobs(changed.append, limits=storage.StoredLimits(0, 0, 0, 0, 0))
    feed = Feed(jobs)
    ended = job(4) | {"spec": {"template": "x" * 5000}, "status": {"state": "Succeeded", "attempt": 1}}
    for _ in range(2):
        taken(feed, [ended], 4)
    assert storage.is_cut(jobs.get(KEY) or {})
    assert changed == [KEY]
