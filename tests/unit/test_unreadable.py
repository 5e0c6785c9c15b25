"""An unreadable status does not count as empty: the job is left alone, and a condition says why."""

import asyncio
import copy
import datetime as dt
from typing import Any

import msgspec
import pytest
from direct_client import DirectClient
from model_api import ModelApi, Raw
from reconciling import caches, reconciler
from worlds import START, digits, manifest

from ddpjob_operator.job import api, validation
from ddpjob_operator.kube.api.client import ApiError
from ddpjob_operator.kube.api.runtime import Runtime
from ddpjob_operator.kube.work.queue import RetryError

KEY = ("default", "digits")
FINISHED: dict[str, Any] = {
    "state": "Succeeded",
    "reason": "AllNodesCompleted",
    "attempt": 1,
    "completedNodes": "0-1",
    "restarts": {"application": 2, "total": 2},
    "conditions": [
        {"type": "Accepted", "status": "True", "reason": "Valid", "lastTransitionTime": "2031-03-05T07:00:00Z"},
        {
            "type": "Complete",
            "status": "True",
            "reason": "AllNodesCompleted",
            "lastTransitionTime": "2031-03-05T07:00:00Z",
        },
    ],
}


def broken(**status: Any) -> dict[str, Any]:
    """Return a stored job that has finished, with these fields changed in its status."""
    return {**manifest(), "status": {**copy.deepcopy(FINISHED), **status}}


class Cluster(DirectClient):
    """API server with one job, and an operator that observes it."""

    def __init__(self, raw: Raw, refuses: ApiError | None = None) -> None:
        super().__init__(ModelApi())
        self.requests: list[str] = []
        self.events: list[tuple[str, str]] = []
        self.refuses = refuses
        copies = caches()
        self.jobs, self.clock = copies.jobs, 0.0
        self.edit(raw)
        self.reconciler = reconciler(self, copies, Runtime(utc=lambda: START, clock=lambda: self.clock))

    def edit(self, raw: Raw) -> None:
        """Let somebody change the job."""
        self.jobs.put(self.api.put(api.PLURAL, raw))

    @property
    def job(self) -> Raw:
        return dict(self.jobs.get(KEY) or {})

    def reconciles(self) -> float | None:
        return asyncio.run(self.reconciler.reconcile(KEY))

    async def request(self, method: str, path: str, params: Any, body: Raw | None = None) -> Raw:
        if method != "GET":
            self.requests.append(f"{method} {path}")
            if self.refuses is not None:
                raise self.refuses
        return await super().request(method, path, params, body)

    def send(self, _: Any, events: Any, now: dt.datetime) -> None:
        self.events += [(e.reason, e.message) for e in events]


UNREADABLE: dict[str, tuple[dict[str, Any], str]] = {
    "a state of a newer operator": ({"state": "Resizing"}, "status.state"),
    "a negative count": ({"goodput": {"lostSteps": -1}}, "status.goodput.lostSteps"),
    "a step that is not a number": ({"furthestStep": "12k"}, "status.furthestStep"),
    "a time that is none": ({"startTime": "yesterday"}, "status.startTime"),
    "a time without a zone": ({"startTime": "2031-03-05T07:00:00"}, "status.startTime"),
    "a rank that is negative": (
        {"lastFailure": {"attempt": 1, "nodeRank": 0, "rank": -1, "time": "2031-03-05T07:00:00Z"}},
        "status.lastFailure.rank",
    ),
    "a failure without its time": ({"failures": [{"attempt": 1, "message": "x"}]}, "status.failures[0]"),
    "a condition's word": (
        {"conditions": [*FINISHED["conditions"][:1], {**FINISHED["conditions"][1], "status": "Maybe"}]},
        "status.conditions[1].status",
    ),
}


@pytest.mark.parametrize(("status", "where"), UNREADABLE.values(), ids=UNREADABLE)
def test_a_finished_job_with_an_unreadable_status_is_never_restarted(status: dict[str, Any], where: str) -> None:
    """A finished job with an unreadable status must never restart, because it would overwrite its checkpoints."""
    cluster = Cluster(broken(**status))
    before = cluster.job["status"]
    cluster.reconciles()
    cluster.reconciles()
    assert [r for r in cluster.requests if r.startswith("POST")] == []
    after = cluster.job["status"]
    accepted, *others = after["conditions"]
    assert (accepted["type"], accepted["status"], accepted["reason"]) == ("Accepted", "False", "UnreadableStatus")
    assert accepted["message"].startswith(f"{where}: ")
    assert {**after, "conditions": others} == {**before, "conditions": before["conditions"][1:]}, "something was lost"
    assert [(reason, text.partition(":")[0]) for reason, text in cluster.events] == [("UnreadableStatus", where)]


def test_a_repaired_status_is_acted_upon_again() -> None:
    """After its status was repaired, a job must continue without a restart of the operator."""
    cluster = Cluster(broken(furthestStep="12k"))
    cluster.reconciles()
    status = {k: v for k, v in cluster.job["status"].items() if k != "furthestStep"}
    cluster.edit({**cluster.job, "status": status})
    cluster.reconciles()
    accepted = next(c for c in cluster.job["status"]["conditions"] if c["type"] == "Accepted")
    assert (accepted["status"], cluster.job["status"]["state"]) == ("True", "Succeeded")
    assert cluster.job["status"]["restarts"]["application"] == 2
    assert cluster.events[-1] == ("Accepted", "the status can be read now")


def test_only_the_event_reports_it_if_the_server_refuses_the_condition() -> None:
    cluster = Cluster(broken(state="Resizing"), ApiError(422, "Invalid", "status.x: Invalid value"))
    cluster.reconciles()
    assert [reason for reason, _ in cluster.events] == ["UnreadableStatus"]
    assert cluster.job["status"] == broken(state="Resizing")["status"]


def test_an_unavailable_server_is_asked_again() -> None:
    cluster = Cluster(broken(state="Resizing"), ApiError(0, "NoAnswer", "connection refused"))
    with pytest.raises(RetryError):
        cluster.reconciles()


@pytest.mark.parametrize("of", ["another controller", "a job that is being deleted"])
def test_an_unreadable_status_of_a_foreign_job_is_not_reported(of: str) -> None:
    raw = broken(state="Resizing")
    if of == "another controller":
        raw["spec"]["managedBy"] = "kueue.x-k8s.io/multikueue"
    else:
        raw["metadata"]["deletionTimestamp"] = "2031-03-05T07:00:00Z"
    cluster = Cluster(raw)
    cluster.reconciles()
    assert (cluster.requests, cluster.events) == ([], [])


TABLE = """============================================================
train.py FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2031-03-05_07:11:13
  host      : x
  rank      : {rank} (local_rank: 0)
  exitcode  : 1 (pid: 7)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================"""


@pytest.mark.parametrize("rank", ["-1", "-7", "-999999999"])
def test_an_invalid_rank_in_a_log_does_not_make_the_status_unreadable(rank: str) -> None:
    """An invalid rank must be dropped. It would make the status unreadable, and the job would restart for ever."""
    world = digits(nodes=1, backoffLimit=0).running().exits(0, code=1, message=TABLE.format(rank=rank)).settle()
    assert world.status.last_failure.rank in (None, 0)
    assert validation.stored_status({"status": msgspec.to_builtins(world.status)}) == world.status
    assert world.status.state == "Failed"


def test_a_refused_condition_is_retried_with_growing_pauses_and_logged_once(caplog):
    """A refused condition must not cause a request and a line in the operator's log at each event of a pod."""
    cluster = Cluster(broken(attempt=-1), ApiError(422, "Invalid", "status.x: Invalid value"))
    pauses = []
    for _ in range(9):
        before = len(cluster.requests)
        pauses.append(cluster.reconciles() or 0.0)
        assert cluster.reconciles() == pauses[-1], "a pod's event changes nothing"
        assert len(cluster.requests) == before + 1
        cluster.clock += pauses[-1]
    assert pauses == [0.5, 1, 2, 4, 8, 16, 32, 60, 60]
    assert len([record for record in caplog.records if "422" in record.getMessage()]) == 1
    cluster.refuses = None
    cluster.edit(broken(attempt=2))
    cluster.reconciles()
    assert cluster.job["status"]["attempt"] == 2, "a job that was fixed waits for no pause"
    assert {c["type"]: c["status"] for c in cluster.job["status"]["conditions"]}["Accepted"] == "True"


def test_a_status_that_stays_unreadable_is_read_ever_more_rarely_and_written_once() -> None:
    cluster = Cluster(broken(attempt=-1))
    for pause in (0.5, 1, 2, 4, 8, 16):
        assert cluster.reconciles() == pause
        cluster.clock += pause
    assert len(cluster.requests) == 1
