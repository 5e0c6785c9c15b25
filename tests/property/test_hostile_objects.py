"""The operator reads any object that the API server stores, or reports which object it cannot read. It must never exit:
anybody who may create a pod in a watched namespace could end each new operator."""

import asyncio
import contextlib
import dataclasses
import datetime as dt
import json
import resource
from collections.abc import AsyncIterator
from typing import Any, cast

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from worlds import START, UID, manifest

from ddpjob_operator.job import api, bounds, ranges, validation
from ddpjob_operator.kube.api import bounded_json
from ddpjob_operator.kube.api.availability import Availability
from ddpjob_operator.kube.api.client import Client, Page
from ddpjob_operator.kube.api.runtime import SYSTEM
from ddpjob_operator.kube.operator import Operator
from ddpjob_operator.kube.settings import OperatorSettings
from ddpjob_operator.kube.watch import observe
from ddpjob_operator.kube.watch.listing import Careful, Sink
from ddpjob_operator.kube.watch.reflector import Reflector
from ddpjob_operator.kube.watch.store import Store
from ddpjob_operator.observed.cluster import Pod
from ddpjob_operator.plan.plan import plan
from ddpjob_operator.pods import naming

NUMBERS = st.integers() | st.sampled_from([0, -1, 2**31, 2**53, 2**63 - 1, 10**11, 10**400])
DATES = st.sampled_from(
    "2031-03-05T07:11:13Z 9999-12-31T23:59:59Z 0001-01-01T00:00:00Z 12272-12-29T18:23:49Z 2031-03-05 x".split()
)
TEXTS = (
    st.text(max_size=30)
    | DATES
    | st.sampled_from(["Failed", "Running", "True", "False", "DDPJob", "trainer", "9" * 5000])
)
SCALARS = st.none() | st.booleans() | NUMBERS | st.floats() | TEXTS
NAMES = st.sampled_from(
    "phase reason message conditions type status containerStatuses initContainerStatuses name state terminated waiting "
    "running exitCode finishedAt lastTransitionTime labels ownerReferences controller uid kind deletionTimestamp "
    "deletionGracePeriodSeconds spec containers nodeName generation training.ddpjob.io/attempt training.ddpjob.io/rank "
    "training.ddpjob.io/replacement training.ddpjob.io/job".split()
)
ANY: Any = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=8), max_leaves=30
)
POISON = {
    "metadata": {
        "name": "poison-1-0",
        "uid": "u",
        "deletionTimestamp": "2272-12-29T18:23:49Z",
        "deletionGracePeriodSeconds": 100_000_000_000,
    }
}


def beyond(year: str, grace: int) -> dict[str, Any]:
    metadata = {"deletionTimestamp": f"{year}-12-31T23:59:59Z", "deletionGracePeriodSeconds": grace}
    return {"metadata": {"name": "p", "uid": "u"} | metadata}


def read_or_refused(raw: Any) -> object:
    try:
        return observe.pod(raw)
    except bounds.UnreadableError as error:
        return str(error)


@given(st.fixed_dictionaries({"metadata": ANY, "spec": ANY, "status": ANY}) | ANY)
@example({"metadata": None, "spec": {"containers": None}, "status": {}})
@example({"metadata": {"name": "a", "uid": "u"}, "spec": {"containers": [{"name": 1}, None]}})
def test_a_partly_decoded_pod_equals_the_fully_decoded_pod(raw: Any) -> None:
    """A pod must have the same fields after partial decoding. If a field were missing, its rank could seem lost."""
    if not isinstance(raw, dict):
        return
    try:
        line = msgspec.json.encode({"type": "MODIFIED", "object": raw})
    except (UnicodeEncodeError, OverflowError, ValueError):
        return
    try:
        whole = bounded_json.event(line)["object"]
    except bounded_json.BadJsonError:
        return
    assert read_or_refused(bounded_json.event(line, "pods")["object"]) == read_or_refused(whole)


@given(st.fixed_dictionaries({}, optional={"metadata": ANY, "spec": ANY, "status": ANY}) | ANY)
@example(POISON)
@example(beyond("9999", 2**63 - 1))
@example(beyond("0001", 30))
@example(beyond("123456789", -1))
@example({"metadata": {"name": "p", "uid": "u", "labels": {naming.LABEL_ATTEMPT: "9" * 63}}})
def test_any_json_is_read_as_pod_service_and_node_or_gives_an_error(raw: Any) -> None:
    for read in (observe.service, observe.is_ready):
        with contextlib.suppress(bounds.UnreadableError):
            read(raw)
    with contextlib.suppress(bounds.UnreadableError):
        found = observe.pod(raw)
        msgspec.convert(msgspec.to_builtins(found), Pod, strict=True)
        assert found.attempt <= bounds.TURNS_MAX
        assert found.place <= bounds.NODES_MAX


@given(ANY, ANY)
@example({"containerStatuses": [{"name": "trainer", "state": {"terminated": {"exitCode": 2**31 - 1}}}]}, {})
@example({}, {"deletionTimestamp": "9999-12-31T23:59:59Z", "deletionGracePeriodSeconds": 30})
def test_a_job_is_planned_whatever_its_pod_reports(status: Any, metadata: Any) -> None:
    """A pod's report may fail its own job, but must not stop the operator."""
    known = {"name": "digits-1-0", "namespace": "default", "uid": "u", "labels": {naming.LABEL_ATTEMPT: "1"}}
    known["labels"] |= {naming.LABEL_RANK: "0", naming.LABEL_JOB: "digits"}
    known["ownerReferences"] = [{"uid": UID, "kind": "DDPJob", "controller": True}]
    given_metadata = metadata if isinstance(metadata, dict) else {}
    raw = {"metadata": given_metadata | known, "spec": {"containers": [{"name": "trainer"}]}, "status": status}
    try:
        pod = observe.pod(raw)
    except bounds.UnreadableError:
        return
    job, _ = validation.parse(manifest())
    running = api.Status(state="Running", attempt=1, attempt_time=START, started_nodes="0-1")
    seen = dataclasses.replace(_nothing(), pods=(pod,))
    todo = plan(msgspec.structs.replace(job, status=running), seen, START)
    msgspec.json.encode(todo.status)


@pytest.mark.parametrize(
    "status",
    [{"attemptNodes": 10**9}, {"nodes": {"total": 10**9, "ready": 0}}, {"leader": {"term": 1, "place": 10**9}}],
)
def test_a_status_cannot_claim_more_nodes_than_a_job_may_have(status: Any) -> None:
    """A status with 10^9 nodes must be refused: their numbers would take 40 GB, and end each operator that plans."""
    with pytest.raises(validation.UnreadableJobError, match="<= 10000"):
        validation.stored_status({"status": status})
    job, problems = validation.parse(manifest(nodes="x") | {"status": status | {"attempt": 1, "state": "Running"}})
    plan(job, _nothing(), START, problems=problems)


@pytest.mark.parametrize("seconds", [10**11, 2**63 - 1, 315_360_001, -1])
def test_a_grace_period_beyond_ten_years_is_refused_with_its_value(seconds: int) -> None:
    body = manifest()
    body["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = seconds
    (problem,) = validation.parse(body)[1]
    assert f"terminationGracePeriodSeconds: must be a whole number of at most 315360000, is {seconds}" in str(problem)


# ------------------------------------------------------------------------------------------------ depth and size


def nested(depth: int, around: str = '{"a":', end: str = "}") -> bytes:
    deep = around * depth + "1" + end * depth
    template = f'{{"spec": {{"containers": [{{"name": "trainer"}}]}}, "metadata": {{"x": {deep}}}}}'
    head = '"metadata": {"name": "deep", "namespace": "team", "uid": "u", "resourceVersion": "5"}'
    return f'{{{head}, "spec": {{"template": {template}}}, "status": {{"attempt": 3}}}}'.encode()


@pytest.mark.parametrize("depth", [70, 250, 500, 1000, 1100, 9900])
@pytest.mark.parametrize(("around", "end"), [('{"a":', "}"), ("[", "]"), ('[{"]}":', "}]")])
def test_a_job_nested_too_deep_is_refused_alone_and_the_rest_of_its_list_is_read(depth, around, end):
    """A job nested too deep must be refused alone. kopf and Python's json fail at 1,000 levels, the server at 9,900."""
    other = b'{"metadata": {"name": "other", "namespace": "team", "uid": "v", "resourceVersion": "6"}}'
    content = b'{"metadata": {"resourceVersion": "9"}, "items": [' + nested(depth, around, end) + b", " + other + b"]}"
    deep, fine = map(bounded_json.job, bounded_json.page(content).items)
    assert fine["metadata"]["name"] == "other"
    assert (deep["metadata"]["uid"], deep["status"]) == ("u", {"attempt": 3})
    json.loads(json.dumps(deep))
    event = bounded_json.event(b'{"type": "ADDED", "object": ' + nested(depth, around, end) + b"}")
    _, problems = validation.parse(manifest() | {"spec": bounded_json.job(event["object"])["spec"]})
    assert [str(p) for p in problems] == [
        "spec: is nested deeper than 64 levels. A pod template is nested about 15 levels deep."
    ]


@pytest.mark.parametrize("filling", ["{}", '""', '{"a": 1}', "[]"])
def test_a_job_of_a_megabyte_is_refused_alone_and_never_becomes_a_million_objects(filling: str) -> None:
    raw = ('{"metadata": {"name": "big"}, "spec": {"x": [' + ",".join([filling] * 300_000) + "]}}").encode()
    job = bounded_json.job(bounded_json.obj(raw))
    assert len(json.dumps(job)) < 500
    (problem,) = validation.parse(manifest() | {"spec": job["spec"]})[1]
    assert "spec: " in str(problem)


def levels(depth: int) -> Any:
    """Return lists nested to this depth."""
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


BORDERS = [
    *(levels(depth) for depth in (62, 63, 64, 65, 300)),
    *([[0] * count] for count in (4_999, 5_001, 9_997, 10_001)),
    *("x" * length for length in (9_990, 262_144, 262_145)),
    {bounds.TOO_LARGE: "has 5 bytes"},
    {"a": {bounds.TOO_LARGE: "has 5 bytes"}},
    None,
    {},
]


@pytest.mark.parametrize("number", range(len(BORDERS)))
def test_a_job_near_the_size_limit_is_judged_as_by_a_full_check(number: int) -> None:
    """A job near the size limit must be judged as by a full check, although most are accepted by their length alone."""
    value = BORDERS[number]
    why = bounds.refused(value)
    read = bounded_json.job({"spec": value, "status": value})
    assert read["spec"] == (bounds.too_large(why) if why else value)
    assert read["status"] == ({"state": bounds.too_large(why)} if why else value)


@pytest.mark.parametrize(
    "date", ["9999-12-31T23:59:59Z", "0001-01-01T00:00:00Z", "٩٩٩٩-12-31T23:59:59Z", "2026-11-23T"]
)
def test_a_date_is_checked_wherever_it_is_in_a_status(date: str) -> None:
    at = bounds.time(date)
    expected = at.isoformat() if at is not None and not date.startswith("20") else date
    status = {"conditions": [{"type": "Running", "at": date}], "stateTime": date}
    assert bounded_json.job({"status": status})["status"] == {
        "conditions": [{"type": "Running", "at": expected}],
        "stateTime": expected,
    }


@pytest.mark.parametrize("sign", ["x", r"\"", "[", r"\\"])
def test_cutting_deep_nesting_costs_no_more_than_a_copy(sign: str) -> None:
    long = ",".join(f'"{sign * 200_000}"' for _ in range(4))
    content = ('{"items": [' + '{"a":' * 2000 + "1" + "}" * 2000 + f", [{long}]]}}").encode()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = bounded_json.shallow(content)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert json.loads(found)["items"][1] == json.loads(f"[{long}]")
    assert grown < 4 * len(content) + 4 * 2**20


def test_a_status_that_is_too_large_does_not_count_as_empty() -> None:
    raw = bounded_json.job({"metadata": {}, "status": {"message": "x" * 300_000, "state": "Succeeded"}})
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(raw["status"], api.Status, strict=False)


def test_ranks_in_a_status_that_somebody_else_wrote_do_not_fill_the_memory() -> None:
    spans = ",".join(f"{n}00000-{n}99998" for n in range(1, 3000))
    assert ranges.parse(f"{spans},0-3,7,{'9' * 5000},٣-٤") == {0, 1, 2, 3, 7}


# ------------------------------------------------------------------------------------------------ the tasks go on


def pod(name: str, version: int, **metadata: Any) -> dict[str, Any]:
    labels = {naming.LABEL_JOB: "digits", naming.LABEL_ATTEMPT: "1", naming.LABEL_RANK: "0"}
    known = {"namespace": "team", "name": name, "uid": f"uid-{name}", "resourceVersion": str(version), "labels": labels}
    return {"metadata": known | metadata}


class Odd:
    """An API server that returns an unreadable second pod, both in its list and in its watch."""

    def __init__(self) -> None:
        self.idle, self.availability = asyncio.Event(), Availability()
        self.live: list[int] = []

    async def pages(self, path: str, selector: str) -> AsyncIterator[Page]:
        yield Page([pod("a", 1), pod("odd", 2, ownerReferences=7), pod("b", 3), {"metadata": None}], "10")  # type: ignore[list-item]

    async def watch(self, path: str, version: str, selector: str) -> AsyncIterator[Any]:
        yield {"type": "MODIFIED", "object": pod("odd", 11, ownerReferences="x")}
        yield {"type": "ADDED", "object": pod("c", 12)}
        yield {"type": "DELETED", "object": {"metadata": {"resourceVersion": "13"}}}
        yield {"type": "ADDED", "object": pod("d", 14)}
        self.idle.set()
        await asyncio.Event().wait()


def test_an_unreadable_pod_ends_no_watch_and_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    changed: list[Any] = []
    key = ("team", "digits")
    store = Store(observe.pod, lambda raw: key, lambda *change: changed.append(change))

    async def run() -> None:
        server = Odd()
        watching = asyncio.create_task(Reflector(server, "pods", "", "", store).run())  # type: ignore[arg-type]
        await asyncio.wait_for(server.idle.wait(), 10)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    asyncio.run(run())
    assert sorted(p.name for p in store.of(key)) == ["a", "b", "c", "d"]
    assert store.unreadable(key).startswith("odd: the pod cannot be read")
    assert [r.getMessage() for r in caplog.records if "team/odd" in r.getMessage()] == [
        "team/odd: the pod cannot be read (TypeError: 'int' object is not iterable); it is ignored, "
        "and everything else continues"
    ]
    store.remove("team", "odd", "uid-odd")
    assert store.unreadable(key) == ""
    assert changed[-1] == (key, None, None), "its job is looked at again"


def test_a_job_with_an_unreadable_pod_reports_it_and_its_other_pods_are_left_alone() -> None:
    """A job with an unreadable pod must report it and leave its other pods: the pod's rank is not lost."""
    operator = Operator(OperatorSettings(), Client(log_in=lambda: None))  # type: ignore[arg-type,return-value]
    body = manifest() | {"status": {"state": "Running", "attempt": 1, "startedNodes": "0-1"}}
    body["metadata"]["resourceVersion"] = "5"
    operator.caches.jobs.put(body)
    raw = pod("digits-1-0", 7, ownerReferences=7)
    raw["metadata"]["namespace"] = "default"
    operator.caches.pods = Store(observe.pod, lambda _: ("default", "digits"), operator._pod_changed)
    for reflector in operator.reflectors:
        reflector.synced.set()
    operator.caches.pods.put(raw)
    assert asyncio.run(operator.reconciler.reconcile(("default", "digits"))) == 0.5, "it is tried again, ever later"
    assert asyncio.run(operator.reconciler.reconcile(("default", "digits"))) == 1.0
    ((waiting,),) = operator._events._waiting.values()
    assert (waiting.event.type, waiting.event.reason) == ("Warning", "Unreadable")
    assert "digits-1-0: the pod cannot be read" in waiting.event.message


def test_a_list_of_ten_thousand_pods_is_never_held_as_raw_objects(caplog: pytest.LogCaptureFixture) -> None:
    """A list of ten thousand pods must never be in memory as raw objects, which take 317 MB."""

    class Raw(dict[str, Any]):
        live = most = 0

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            Raw.live += 1
            Raw.most = max(Raw.most, Raw.live)

        def __del__(self) -> None:
            Raw.live -= 1

    class Server(Odd):
        async def pages(self, path: str, selector: str) -> AsyncIterator[Page]:
            for first in range(0, 10_000, 200):
                items: list[Any] = [Raw(pod(f"p-{n}", n + 1)) for n in range(first, first + 200)]
                page = Page(items, "20000")
                del items
                yield page
                del page

    store = Store(observe.pod, lambda raw: ("team", "digits"), lambda *_: None)

    async def run() -> None:
        server = Server()
        watching = asyncio.create_task(Reflector(server, "pods", "", "", store).run())  # type: ignore[arg-type]
        await asyncio.wait_for(server.idle.wait(), 60)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    asyncio.run(run())
    assert len(store) == 10_002
    assert Raw.most <= 201
    assert Raw.live == 0


def test_an_error_of_ours_in_a_sink_is_reported_once_per_object(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def put(self, raw: Any) -> None:
            raise RuntimeError("a mistake of ours")

    careful = Careful(cast(Sink, Broken()), "pods in team", SYSTEM.log)
    for _ in range(3):
        careful.put(pod("a", 1))
    careful.put("no object at all")
    assert len(caplog.records) == 2


def _nothing() -> Any:
    from ddpjob_operator.observed.cluster import Observed

    return Observed(service=True, nodes={})


def test_dates_beyond_the_calendar_are_moved_into_its_range() -> None:
    status = bounded_json.job({"status": {"attemptTime": "9999-12-31T23:59:59Z", "stateTime": "0001-01-01T00:00:00Z"}})[
        "status"
    ]
    read = msgspec.convert(status, api.Status, strict=False)
    assert read.attempt_time is not None
    assert read.state_time is not None
    ten_years = dt.timedelta(seconds=bounds.SECONDS_MAX)
    assert read.attempt_time + ten_years > read.state_time - ten_years
