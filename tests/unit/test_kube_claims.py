"""Two releases over one namespace: one acts, the other says so and takes over when the first is gone. Virtual time."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_server import play
from wire import GOOD, Fate, Wire

from ddpjob_operator.kube.claims import ALL_CLAIM, NAMESPACE_CLAIM, Claims, namespace_of
from ddpjob_operator.kube.client import NO_ANSWER, ApiError
from ddpjob_operator.kube.lease import Durations
from ddpjob_operator.kube.runtime import Runtime

Raw = dict[str, Any]
DURATIONS = Durations()
# Silent for 15 s, seen at the next round, and for one namespace another 15 s in which others learn of it.
TAKES_OVER_SECONDS = DURATIONS.lease_seconds + 4 * DURATIONS.retry_seconds


class Leases:
    """The API server, as far as Leases go. `broken` says which requests of whom fail, and how."""

    def __init__(self) -> None:
        self.objects: dict[str, Raw] = {}
        self.version = 0
        self.seconds = 0.01
        """How long it takes to carry out a request, and as long until the answer has come."""
        self.broken: Callable[[str, str], ApiError | None] = lambda _who, _what: None

    def put(self, path: str, body: Raw) -> Raw:
        self.version += 1
        namespace = namespace_of(path)
        metadata = {**body["metadata"], "namespace": namespace, "resourceVersion": str(self.version)}
        self.objects[path] = {**body, "metadata": metadata}
        return copy.deepcopy(self.objects[path])


class Client(Wire):
    """The methods of kube.client.Client, of one pod of a release."""

    def __init__(self, server: Leases, release: str) -> None:
        super().__init__(lambda: Fate(there=server.seconds, back=server.seconds))
        self._server, self._release = server, release

    async def get(self, path: str, params: Any = None) -> Raw:
        if params is None:
            return await self._ask("get", lambda: self._there(path))
        name = params["fieldSelector"].removeprefix("metadata.name=")
        objects = self._server.objects
        return await self._ask("list", lambda: {"items": [o for at, o in objects.items() if at.endswith(f"/{name}")]})

    async def create(self, path: str, body: Raw, params: Any = None) -> Raw:
        at = f"{path}/{body['metadata']['name']}"

        def carry_out() -> Raw:
            if at in self._server.objects:
                raise ApiError(409, "AlreadyExists", "exists")
            return self._server.put(at, body)

        return await self._ask("create", carry_out)

    async def replace(self, path: str, body: Raw, params: Any = None) -> Raw:
        def carry_out() -> Raw:
            if self._there(path)["metadata"]["resourceVersion"] != body["metadata"].get("resourceVersion"):
                raise ApiError(409, "Conflict", "changed")
            return self._server.put(path, body)

        return await self._ask("update", carry_out)

    async def close(self) -> None:
        """Nothing is open."""

    def _there(self, path: str) -> Raw:
        if path not in self._server.objects:
            raise ApiError(404, "NotFound", f'"{path}" not found')
        return self._server.objects[path]

    async def _ask(self, verb: str, work: Callable[[], Raw]) -> Raw:
        def unless_broken() -> Raw:
            if error := self._server.broken(self._release, verb):
                raise error
            return work()

        answer: Raw = await self.send(unless_broken)
        return answer


class Release:
    """The leading pod of a release, from now on."""

    def __init__(self, server: Leases, name: str, *namespaces: str) -> None:
        runtime = Runtime(clock=asyncio.get_running_loop().time)
        self.wire = Client(server, name)
        client: Any = self.wire
        self.name = name
        self.changes = 0
        self.claims = Claims(client, namespaces, "kube-system", name, DURATIONS, runtime=runtime)
        self._task = asyncio.create_task(self.claims.run(self._changed))

    def _changed(self) -> None:
        self.changes += 1

    def acts(self, namespace: str) -> bool:
        return not self._task.done() and self.claims.hold(namespace)

    def ends(self) -> None:
        self._task.cancel()

    async def until_it_acts(self, namespace: str, beside: Iterable[Release] = ()) -> float:
        """How long that takes; whoever acts beside it meanwhile is a failure once it does."""
        began = asyncio.get_running_loop().time()
        while not self.acts(namespace):
            assert asyncio.get_running_loop().time() - began < 120, f"{self.name} never acts"
            await asyncio.sleep(0.05)
        assert not any(other.acts(namespace) for other in beside)
        return asyncio.get_running_loop().time() - began


def in_virtual_time(story: Callable[[Leases], Coroutine[Any, Any, None]]) -> None:
    play(lambda: story(Leases()))


def test_of_two_releases_for_all_namespaces_one_acts_and_the_other_takes_over_when_it_is_gone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Both restarted the same jobs and deleted each other's pods, and neither log had a word of it."""

    async def story(server: Leases) -> None:
        first = Release(server, "ddpjob/ddpjob")
        assert await first.until_it_acts("team") < 1, "a cluster's only release does not wait"
        second = Release(server, "other/second")
        await asyncio.sleep(120)
        assert first.acts("team")
        assert not second.acts("team")
        where = f"kube-system/{ALL_CLAIM}"
        sentence = (
            f"the jobs of all namespaces are the release ddpjob/ddpjob's (Lease {where}); this one leaves them alone"
        )
        assert second.claims.standing_by() == [sentence]
        assert caplog.messages.count(sentence) == 1, "in the log, once"
        assert first.claims.standing_by() == []
        first.ends()
        assert await second.until_it_acts("team", [first]) < TAKES_OVER_SECONDS
        assert second.claims.standing_by() == []

    in_virtual_time(story)


def test_of_two_releases_with_lists_one_acts_where_they_overlap_and_each_where_it_is_alone() -> None:
    async def story(server: Leases) -> None:
        first = Release(server, "ddpjob/first", "a", "shared")
        await first.until_it_acts("shared")
        second = Release(server, "ddpjob/second", "shared", "b")
        await second.until_it_acts("b")
        await asyncio.sleep(120)
        assert (first.acts("a"), first.acts("shared"), first.acts("b")) == (True, True, False)
        assert (second.acts("a"), second.acts("shared"), second.acts("b")) == (False, False, True)
        assert f"shared/{NAMESPACE_CLAIM}" in second.claims.standing_by()[0]
        first.ends()
        assert await second.until_it_acts("shared", [first]) < TAKES_OVER_SECONDS + DURATIONS.lease_seconds

    in_virtual_time(story)


def test_a_release_for_all_namespaces_leaves_alone_the_one_that_another_watches() -> None:
    async def story(server: Leases) -> None:
        everywhere = Release(server, "ddpjob/all")
        await everywhere.until_it_acts("team")
        changes = everywhere.changes
        team = Release(server, "team/own", "team")
        assert await team.until_it_acts("team", [everywhere]) >= DURATIONS.lease_seconds
        assert everywhere.acts("elsewhere")
        assert everywhere.changes == changes + 1, "its jobs are reconciled again"
        assert "the jobs of the namespace team are the release team/own's" in everywhere.claims.standing_by()[0]
        team.ends()
        assert await everywhere.until_it_acts("team", [team]) < TAKES_OVER_SECONDS

    in_virtual_time(story)


def test_a_pod_that_stood_by_goes_on_at_once() -> None:
    """A hand-over within a release costs no wait of its own: the claim is the release's, and all its pods renew it."""

    async def story(server: Leases) -> None:
        for namespaces in ((), ("team",)):
            leader, standby = (Release(server, f"ddpjob/{len(namespaces)}", *namespaces) for _ in range(2))
            await leader.until_it_acts("team", beside=())
            await asyncio.sleep(60)
            assert standby.acts("team"), "as far as claims go: the Lease of the release says which of them does"
            leader.ends()
            for _ in range(200):
                await asyncio.sleep(0.1)
                assert standby.acts("team")
            standby.ends()
            await asyncio.sleep(60)

    in_virtual_time(story)


def test_an_operator_without_the_right_to_claim_acts_and_says_what_it_cannot_see(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The image of this version with the roles of the chart before it: no job may be left alone for that."""

    async def story(server: Leases) -> None:
        server.broken = lambda _who, verb: ApiError(403, "Forbidden", f"cannot {verb} resource leases")
        assert await Release(server, "ddpjob/ddpjob").until_it_acts("team") < 1
        assert await Release(server, "ddpjob/own", "team").until_it_acts("team") < 1
        await asyncio.sleep(60)

    in_virtual_time(story)
    assert sum("cannot see whether another one does" in line for line in caplog.messages) == 2
    assert sum("cannot be seen" in line for line in caplog.messages) == 1


def test_who_cannot_renew_its_claim_stops_before_anybody_takes_it() -> None:
    async def story(server: Leases) -> None:
        first = Release(server, "ddpjob/first")
        await first.until_it_acts("team")
        second = Release(server, "ddpjob/second")
        await asyncio.sleep(5)
        away = ApiError(NO_ANSWER, "NoAnswer", "away")
        server.broken = lambda who, _what: away if who == "ddpjob/first" else None
        await second.until_it_acts("team", [first])
        server.broken = lambda _who, _what: None
        await asyncio.sleep(60)
        assert not first.acts("team"), "and it stands by when it is back"

    in_virtual_time(story)


@pytest.mark.parametrize("namespaces", [(), ("team",)], ids=["all namespaces", "a list"])
def test_a_release_goes_on_acting_with_three_seconds_for_every_answer(namespaces: tuple[str, ...]) -> None:
    """Its claim lapsed before it was renewed, with more than 1.5 s for each answer for good."""

    async def story(server: Leases) -> None:
        server.seconds = 1.5
        release = Release(server, "ddpjob/slow", *namespaces)
        await release.until_it_acts("team")
        for _ in range(1000):
            await asyncio.sleep(0.1)
            assert release.acts("team")

    in_virtual_time(story)


@pytest.mark.parametrize("phase", [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5])
def test_a_claim_that_was_renewed_late_is_not_taken_for_one_that_has_expired(phase: float) -> None:
    """A release for all namespaces that had last asked right before that renewal, and got no answer since, acted in the
    namespace once 15 s had passed since the renewal before."""

    async def story(server: Leases) -> None:
        team = Release(server, "team/own", "team")
        await asyncio.sleep(phase)
        everywhere = Release(server, "ddpjob/all")
        await team.until_it_acts("team", [everywhere])
        at = f"/apis/coordination.k8s.io/v1/namespaces/team/leases/{NAMESPACE_CLAIM}"
        before = server.objects[at]["metadata"]["resourceVersion"]
        while server.objects[at]["metadata"]["resourceVersion"] == before:
            await asyncio.sleep(0.01)
        team.wire.fates = lambda: Fate(there=1e6, lost=True)
        await asyncio.sleep(7)
        team.wire.fates = lambda: GOOD
        await asyncio.sleep(0.9)
        everywhere.wire.fates = lambda: Fate(there=1e6, lost=True)
        for _ in range(150):
            await asyncio.sleep(0.1)
            assert not (team.acts("team") and everywhere.acts("team"))
        assert team.acts("team")

    in_virtual_time(story)


def test_a_claim_on_a_namespace_that_somebody_deletes_is_not_taken_under_its_holder() -> None:
    async def story(server: Leases) -> None:
        team, everywhere = Release(server, "team/own", "team"), Release(server, "ddpjob/all")
        await team.until_it_acts("team", [everywhere])
        await asyncio.sleep(30)
        for at in [at for at in server.objects if at.endswith(f"/{NAMESPACE_CLAIM}")]:
            del server.objects[at]
        for _ in range(2000):
            await asyncio.sleep(0.05)
            assert not (team.acts("team") and everywhere.acts("team"))
        assert team.acts("team")

    in_virtual_time(story)


def test_where_no_other_release_acts_a_job_that_was_refused_is_asked_for_again() -> None:
    """A stall that was due while the API server answered no list was never found: the job was left to a release that
    did not exist, and nobody was told when this one could act again."""

    async def story(server: Leases) -> None:
        everywhere = Release(server, "ddpjob/all")
        await everywhere.until_it_acts("team")
        busy = ApiError(429, "TooManyRequests", "slow down")
        server.broken = lambda _who, verb: busy if verb == "list" else None
        while everywhere.acts("team"):
            await asyncio.sleep(0.05)
        assert not everywhere.claims.another_acts("team"), "so it is looked at again soon"
        await asyncio.sleep(DURATIONS.retry_seconds + 1)
        changes = everywhere.changes
        server.broken = lambda _who, _verb: None
        await everywhere.until_it_acts("team")
        await asyncio.sleep(0.05)
        assert everywhere.changes == changes + 1, "and at the latest now"

    in_virtual_time(story)


def test_who_acts_where_this_release_may_not_is_known() -> None:
    async def story(server: Leases) -> None:
        everywhere, team = Release(server, "ddpjob/all"), Release(server, "team/own", "team")
        await team.until_it_acts("team", [everywhere])
        other = Release(server, "team/other", "team")
        await asyncio.sleep(5)
        assert everywhere.claims.another_acts("team")
        assert other.claims.another_acts("team")
        assert not everywhere.claims.another_acts("elsewhere")
        assert not team.claims.another_acts("team")

    in_virtual_time(story)


def test_a_claim_that_somebody_deletes_is_not_taken_under_its_holder() -> None:
    async def story(server: Leases) -> None:
        first, second = Release(server, "ddpjob/first"), Release(server, "ddpjob/second")
        await asyncio.sleep(30)
        server.objects.clear()
        for _ in range(2000):
            await asyncio.sleep(0.05)
            assert not (first.acts("x") and second.acts("x"))
        assert first.acts("x") or second.acts("x")

    in_virtual_time(story)


NAMES = {"ddpjob/all": (), "other/all": (), "a/own": ("a",), "ab/own": ("a", "b")}
STEPS = st.lists(
    st.tuples(st.sampled_from(["start", "end", "cut", "delete"]), st.sampled_from(sorted(NAMES)), st.floats(0.05, 40)),
    min_size=1,
    max_size=12,
)


@settings(deadline=None, max_examples=60)
@given(STEPS)
def test_never_do_two_releases_act_on_one_namespace_and_in_the_end_one_does(
    steps: list[tuple[str, str, float]],
) -> None:
    """Whatever starts, ends, is cut off for a while: two that act would train two groups into one checkpoint."""

    async def story(server: Leases) -> None:
        live: dict[str, Release] = {}
        cut: set[str] = set()
        server.broken = lambda who, _what: ApiError(NO_ANSWER, "NoAnswer", "cut off") if who in cut else None

        async def goes_on(seconds: float) -> None:
            ends = asyncio.get_running_loop().time() + seconds
            while asyncio.get_running_loop().time() < ends:
                for namespace in "abc":
                    acting = [r.name for r in live.values() if r.acts(namespace)]
                    assert len(acting) <= 1, f"{acting} act on {namespace}"
                await asyncio.sleep(0.1)

        for what, name, seconds in steps:
            if what == "start" and name not in live:
                live[name] = Release(server, name, *NAMES[name])
            elif what == "end" and name in live:
                live.pop(name).ends()
            elif what == "cut":
                cut ^= {name}
            await goes_on(seconds)
        cut.clear()
        await goes_on(70)
        for namespace in "abc":
            watched = [r for r in live.values() if not NAMES[r.name] or namespace in NAMES[r.name]]
            assert any(r.acts(namespace) for r in watched) or not watched

    in_virtual_time(story)
