"""The gang watch finds the API version that the server has, requests it, and keeps a copy of its objects."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, cast

import pytest
from cancelling import running, until
from msgspec.structs import replace
from slow_server import play
from virtual_time import VirtualLoop
from worlds import UID, job, manifest

from ddpjob_operator.gangs import kueue, native
from ddpjob_operator.gangs.adapter import Adapter
from ddpjob_operator.job import api
from ddpjob_operator.kube.api.availability import Availability
from ddpjob_operator.kube.api.client import ApiError, Client, Page
from ddpjob_operator.kube.api.runtime import SYSTEM, Runtime
from ddpjob_operator.kube.operator import UNSYNCED_SECONDS, Operator
from ddpjob_operator.kube.settings import OperatorSettings
from ddpjob_operator.kube.watch.gangs import ERROR_SECONDS, ERRORS_MAX, NO_ANSWER_SECONDS, GangWatch, waits_for
from ddpjob_operator.kube.watch.store import Key
from ddpjob_operator.observed.groups import Admission, GangApi

GROUP = "/apis/scheduling.k8s.io"
ADMITTED = {
    "metadata": {
        "name": "digits",
        "namespace": "default",
        "uid": "admitted",
        "resourceVersion": "7",
        "labels": {"training.ddpjob.io/job": "digits"},
    },
    "status": {"conditions": [{"type": kind, "status": "True"} for kind in ("QuotaReserved", "Admitted")]},
}


class Server:
    """API server that serves some versions of PodGroups. `answers` maps paths to errors."""

    def __init__(self, *versions: str) -> None:
        self.served = versions
        self.availability = Availability()
        self.errors: dict[str, ApiError] = {}
        self.items: list[dict[str, Any]] = []
        self.asked: list[str] = []

    async def get(self, path: str, params: Mapping[str, str] | None = None) -> dict[str, Any]:
        self.asked.append(path)
        if path in self.errors:
            raise self.errors[path]
        version = path.split("/")[3]
        if version not in self.served:
            raise ApiError(404, "NotFound", "the server could not find the requested resource")
        return {"resources": [{"name": "workloads"}, {"name": "podgroups"}], "items": []}

    async def pages(self, path: str, selector: str = "") -> AsyncIterator[Page]:
        self.asked.append(path)
        yield Page(list(self.items), "7")

    async def watch(self, path: str, version: str, selector: str = "") -> AsyncIterator[Any]:
        await asyncio.sleep(300)
        for nothing in ():
            yield nothing


def gang_of(
    server: Server,
    *namespaces: str,
    found: Callable[[], None] = lambda: None,
    adapter: Adapter = native.ADAPTER,
) -> GangWatch:
    def key_of(raw: Mapping[str, Any]) -> Key:
        return raw["metadata"]["namespace"], "digits"

    where = namespaces or ("",)
    return GangWatch(adapter, cast(Client, server), where, key_of, lambda key, seconds: None, found, SYSTEM)


def found(server: Server, *namespaces: str, adapter: Adapter = native.ADAPTER) -> GangWatch:
    """Return the API that is found on this server."""
    told: list[str] = []
    gang = gang_of(server, *namespaces, found=lambda: told.append("found"), adapter=adapter)
    runs(gang, lambda: told and gang.is_ready(""))
    return gang


def runs(gang: GangWatch, true: Callable[[], object]) -> None:
    """Run the gang watch until `true()` holds."""

    async def run() -> None:
        async with running(gang.run()):
            await until(true)

    asyncio.run(run())


def test_a_gang_watch_ends_when_the_first_of_its_watches_ends() -> None:
    """The gang watch must end when one of its watches ends, so that the operator notices and no job waits for ever."""

    async def run() -> None:
        told: list[str] = []
        gang = gang_of(Server("v1alpha2"), "team", found=lambda: told.append("found"))
        async with running(gang.run()) as task, asyncio.timeout(10):
            await until(lambda: told and gang.is_ready("team"))
            (watch,) = (one for one in asyncio.all_tasks() if one.get_name() == gang.reflectors[0].what)
            watch.cancel()
            await asyncio.wait([task])
        assert task.cancelled()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("adapter", "served", "taken"),
    [
        pytest.param(native.ADAPTER, ("v1alpha2",), "v1alpha2", id="1.36"),
        pytest.param(native.ADAPTER, ("v1alpha3", "v1beta1"), "v1beta1", id="1.37"),
        pytest.param(native.ADAPTER, ("v1alpha3",), "v1alpha3", id="1.37 without the beta"),
        pytest.param(kueue.ADAPTER, ("v1beta1",), "v1beta1", id="Kueue 0.14"),
        pytest.param(kueue.ADAPTER, ("v1beta1", "v1beta2"), "v1beta1", id="Kueue 0.15 converts"),
        pytest.param(kueue.ADAPTER, ("v1beta2",), "v1beta2", id="Kueue without the old version"),
    ],
)
def test_the_best_served_version_is_used(adapter: Adapter, served: tuple[str, ...], taken: str) -> None:
    """The best served version must be used: for Kueue the tested one, for others one that the upgrade keeps."""
    gang = found(Server(*served), adapter=adapter)
    assert gang.api.api_version == f"{adapter.group}/{taken}"
    assert gang.path("team") == f"/apis/{adapter.group}/{taken}/namespaces/team/{adapter.plural}"


def test_nothing_is_listed_outside_the_configured_namespaces() -> None:
    """The watch must not list all namespaces, because a Role grants nothing outside its own namespace."""
    server = Server("v1alpha2")
    found(server, "team-a", "team-b")
    asked = [path for path in server.asked if path.endswith("podgroups")]
    assert set(asked) == {f"{GROUP}/v1alpha2/namespaces/{team}/podgroups" for team in ("team-a", "team-b")}


def test_an_unserved_api_is_logged_and_a_job_does_not_wait_for_it() -> None:
    gang = found(Server())
    assert gang.api.why_not == "the API server does not serve podgroups.scheduling.k8s.io (v1beta1, v1alpha3, v1alpha2)"
    with pytest.raises(ApiError, match="does not serve"):
        gang.path("team")


def test_a_missing_right_is_logged_and_nothing_is_created() -> None:
    server = Server("v1alpha2")
    server.errors[f"{GROUP}/v1alpha2/podgroups"] = ApiError(403, "Forbidden", "cannot list podgroups")
    assert found(server).api.why_not == ("the operator may not list podgroups.scheduling.k8s.io: cannot list podgroups")


def test_an_unavailable_api_server_is_asked_again_and_does_not_count_as_lacking_the_api() -> None:
    """An unavailable API server must be asked again. It must not count as lacking the API: no gang would be used."""
    server = Server("v1alpha2")
    server.errors[f"{GROUP}/v1beta1"] = ApiError(0, "NoAnswer", "away")

    waits: list[float] = []

    async def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            server.errors.clear()
        await asyncio.sleep(0)

    server.availability.wait = wait  # type: ignore[method-assign,assignment]
    gang = gang_of(server)
    runs(gang, lambda: gang.is_ready(""))
    assert (gang.api.api_version, waits[:3]) == ("scheduling.k8s.io/v1alpha2", [NO_ANSWER_SECONDS] * 3)


def test_a_namespace_where_listing_is_forbidden_does_not_disable_the_queue_elsewhere(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """If the first watched namespace is deleted with its Role, jobs of all other namespaces must not wait for ever."""
    server, workloads = Server("v1beta1"), "/apis/kueue.x-k8s.io/v1beta1/namespaces/gone/workloads"
    server.errors[workloads] = ApiError(403, "Forbidden", "cannot list workloads in gone")
    waits = list[float]()

    async def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            assert gang.is_ready("team")
            assert gang.is_ready("gone"), "its jobs say why they wait"
            assert gang.path("team") == "/apis/kueue.x-k8s.io/v1beta1/namespaces/team/workloads"
            assert gang.api_in("gone").why_not == (
                "the operator may not list workloads.kueue.x-k8s.io: cannot list workloads in gone"
            )
            with pytest.raises(ApiError, match="may not list"):
                gang.path("gone")
            server.errors.clear()  # the namespace is created again, with its Role
        await asyncio.sleep(0)

    server.availability.wait = wait  # type: ignore[method-assign,assignment]
    gang = gang_of(server, "gone", "team", adapter=kueue.ADAPTER)
    runs(gang, lambda: len(waits) > 3 and gang.api_in("gone").api_version and gang.is_ready("gone"))
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        "spec.gang: kueue cannot be used in the namespace gone: the operator may not list workloads.kueue.x-k8s.io: "
        "cannot list workloads in gone"
    ]


CONVERSION = ApiError(
    500, "InternalError", "conversion webhook for kueue.x-k8s.io/v1beta2 failed: no endpoints available"
)
WORKLOADS = "/apis/kueue.x-k8s.io/v1beta1/workloads"


def test_a_queue_api_that_answers_with_errors_counts_as_unavailable_until_it_works_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A queue API that answers with errors, as when Kueue's webhook is down, must count as unavailable until it works.
    Other jobs must be reconciled."""
    server, waits = Server("v1beta1"), list[float]()
    server.errors[WORKLOADS] = CONVERSION

    async def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 8:
            assert gang.is_ready("default")
            assert gang.api == GangApi(why_not=f"{said}: {CONVERSION.message}")
            server.errors.clear()
        await asyncio.sleep(0)

    said = "the API server cannot list workloads.kueue.x-k8s.io"
    server.availability.wait = wait  # type: ignore[method-assign,assignment]
    gang = gang_of(server, adapter=kueue.ADAPTER)
    runs(gang, lambda: gang.api.api_version and gang.is_ready(""))
    assert gang.api == GangApi("kueue.x-k8s.io/v1beta1")
    assert waits[:8] == [NO_ANSWER_SECONDS] * (ERRORS_MAX - 1) + [ERROR_SECONDS] * 4
    assert sum(said in record.getMessage() for record in caplog.records) == 1


def test_only_jobs_that_need_an_api_wait_until_it_has_answered() -> None:
    """Only jobs that need an API may wait for its first answer; jobs without a queue must start."""
    gangs = {"kueue": gang_of(Server(), adapter=kueue.ADAPTER), "native": gang_of(Server())}
    one = job()
    in_queue = replace(one, metadata=replace(one.metadata, labels={kueue.QUEUE_LABEL: "main"}))
    left = replace(job(nodes=1), status=api.Status(gang=api.Gang(kind="kueue")))
    assert [waits_for(one, gangs) for one in (in_queue, left, job(), job(gang="none"), job(nodes=1))] == [
        *(True, True, True),
        *(False, False),
    ]
    gangs["native"] = found(Server())
    assert [waits_for(one, gangs) for one in (in_queue, left, job())] == [True, True, False]


def test_jobs_without_a_queue_are_reconciled_while_the_queue_api_does_not_answer() -> None:
    """Jobs without a queue must start and restart even if the queue API does not answer."""
    settings = dataclasses.replace(OperatorSettings(health_port=0), gangs=("kueue",))
    operator = Operator(settings, cast(Client, Server()))
    for reflector in operator.reflectors:
        reflector.synced.set()
    for name, labels in (("queued", {kueue.QUEUE_LABEL: "main"}), ("free", {})):
        raw = manifest(name)
        raw["metadata"] |= {"labels": labels, "resourceVersion": "1"}
        operator.caches.jobs.put(raw)
    assert operator.reconciler.ready_in(("default", "free")) == 0.0
    assert operator.reconciler.ready_in(("default", "queued")) == UNSYNCED_SECONDS
    assert operator.reconciler.ready_in(("default", "gone")) == 0.0


def test_the_copy_has_the_state_of_a_group_and_its_owner() -> None:
    server = Server("v1alpha2")
    body = native.body(job(), 3, "scheduling.k8s.io/v1alpha2")
    body["metadata"] |= {"uid": "group", "resourceVersion": "5"}
    body["status"] = {"conditions": [{"type": "PodGroupScheduled", "status": "False", "message": "no room"}]}
    server.items = [body]
    (group,) = found(server).store.of(("default", "digits"))
    assert (group.name, group.attempt, group.owner_uid) == ("digits-3-00001", 3, UID)
    assert group.admission == Admission("waiting", "no room")


def test_an_unreadable_group_does_not_end_the_watch_of_the_others() -> None:
    server = Server("v1alpha2")
    body = native.body(job(), 3, "v")
    server.items = [
        {**body, "metadata": {**body["metadata"], "uid": "a", "resourceVersion": "5"}, "status": {"conditions": 7}},
        {**body, "metadata": {**body["metadata"], "name": "digits-4", "uid": "b", "resourceVersion": "6"}},
    ]
    assert [group.name for group in found(server).store.of(("default", "digits"))] == ["digits-4"]


def test_an_operator_without_any_gang_api_switched_on_sends_no_request() -> None:
    operator = Operator(OperatorSettings(health_port=0), cast(Client, Server()))
    assert operator.caches.gangs == {}
    on = Operator(dataclasses.replace(OperatorSettings(health_port=0), gangs=("native",)), cast(Client, Server()))
    assert list(on.caches.gangs) == ["native"]


def test_an_admission_missed_by_the_watch_is_found_by_a_later_list() -> None:
    """A later list must find an admission that the watch missed: otherwise the job holds quota and waits for ever."""
    server, seen = Server("v1beta1"), []
    settings = OperatorSettings(health_port=0, gangs=("kueue",))

    async def story() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        operator = Operator(settings, cast(Client, server), runtime=Runtime(clock=loop.time, utc=loop.now))
        gang = operator.caches.gangs["kueue"]
        running = asyncio.create_task(gang.run())
        while not gang.is_ready(""):
            await asyncio.sleep(0.1)
        server.items = [ADMITTED]
        await asyncio.sleep(1000)
        seen.extend(group.admission for group in gang.store.of(("default", "digits")))
        running.cancel()

    play(story)
    assert seen == [Admission("admitted")]


def test_only_known_names_can_be_switched_on() -> None:
    assert OperatorSettings.read({"DDPJOB_GANGS": " native, native,"}).gangs == ("native",)
    assert "DDPJOB_GANGS=native" in OperatorSettings.read({"DDPJOB_GANGS": "native"}).summary()
    with pytest.raises(ValueError, match=r"DDPJOB_GANGS: must be names of native, .*volcano"):
        OperatorSettings.read({"DDPJOB_GANGS": "volcano"})
