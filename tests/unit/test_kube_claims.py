"""Two releases over one namespace: one acts, the other says so and takes over when the first is gone. Virtual time."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_server import play
from wire import GOOD, Fate, Wire

from ddpjob_operator.kube.api.client import NO_ANSWER, ApiError
from ddpjob_operator.kube.api.runtime import Runtime
from ddpjob_operator.kube.claims import ALL_CLAIM, NAMESPACE_CLAIM, Claims, namespace_of
from ddpjob_operator.kube.lease import Durations

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
        self.asked: Callable[[str], None] = lambda _verb: None

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

        self.asked(verb)
        answer: Raw = await self.send(unless_broken)
        return answer


class Release:
    """A pod of a release, from now on."""

    def __init__(
        self,
        server: Leases,
        name: str,
        *namespaces: str,
        leads: bool = True,
        clock: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        """clock: what it is ahead of ours, and how fast it runs."""
        loop = asyncio.get_running_loop()
        runtime = Runtime(clock=lambda: self.clock[0] + self.clock[1] * loop.time())
        self.wire = Client(server, name)
        client: Any = self.wire
        self.name = name
        self.changes = 0
        self.leads = leads
        self.clock = clock
        where = namespaces, "kube-system"
        self.claims = Claims(client, *where, name, DURATIONS, leads=lambda: self.leads, runtime=runtime)
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
            " until 15 s have passed without a renewal"
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


@pytest.mark.parametrize("namespaces", [(), ("team",)], ids=["all namespaces", "a list"])
@pytest.mark.parametrize("fastest", [1.4, 2.9, 3.0])
def test_a_release_of_two_pods_goes_on_acting_with_three_seconds_for_every_answer(
    namespaces: tuple[str, ...], fastest: float
) -> None:
    """Both wrote the same claim and took each other's resourceVersion, so the leader acted half of the time."""
    chance = random.Random(1)

    def fate() -> Fate:
        seconds, share = chance.uniform(fastest, 3.0), chance.random()
        return Fate(there=seconds * share, back=seconds * (1 - share))

    async def story(server: Leases) -> None:
        leader, standby = (Release(server, "ddpjob/slow", *namespaces, leads=leads) for leads in (True, False))
        leader.wire.fates = standby.wire.fates = fate
        await leader.until_it_acts("team")
        for _ in range(3000):
            await asyncio.sleep(0.1)
            assert leader.acts("team")
        leader.ends()
        standby.leads = True
        assert await standby.until_it_acts("team") < 4 * 3 + DURATIONS.lease_seconds

    in_virtual_time(story)


def test_a_pod_that_does_not_lead_writes_nothing_while_the_leader_renews() -> None:
    async def story(server: Leases) -> None:
        leader, standby = (Release(server, "ddpjob/ddpjob", leads=leads) for leads in (True, False))
        writes: list[str] = []
        await asyncio.sleep(10)
        for pod in (leader, standby):
            pod.wire.asked = lambda verb, pod=pod: writes.append(f"{verb} {pod.leads}")
        await asyncio.sleep(60)
        assert {"update True", "get False"} <= set(writes)
        assert not {"update False", "get True"} & set(writes), "the leader knows what it has written"
        for _ in range(300):
            await asyncio.sleep(0.1)
            assert leader.acts("team")
            assert standby.acts("team")

    in_virtual_time(story)


def test_a_leader_whose_claim_another_pod_has_written_goes_on_acting() -> None:
    """Its write is refused with 409, and it reads and writes again at once."""

    async def story(server: Leases) -> None:
        leader = Release(server, "ddpjob/ddpjob", "team")
        await leader.until_it_acts("team")
        at = next(iter(server.objects))
        for _ in range(600):
            await asyncio.sleep(0.1)
            server.put(at, server.objects[at])
            assert leader.acts("team")

    in_virtual_time(story)


def test_a_claim_on_a_namespace_that_is_not_there_costs_a_read_and_a_create_in_each_round() -> None:
    """Whoever lists a namespace before it is made would ask the API server twice as often, for as long as it takes."""

    async def story(server: Leases) -> None:
        missing = ApiError(404, "NotFound", 'namespaces "team" not found')
        server.broken = lambda _who, verb: missing if verb == "create" else None
        asked: list[str] = []
        Release(server, "ddpjob/ddpjob", "team").wire.asked = asked.append
        await asyncio.sleep(5 * DURATIONS.retry_seconds)
        assert asked == ["get", "create"] * 5

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
PODS = [f"{name} {pod}" for name in sorted(NAMES) for pod in (0, 1)]
LATE_SECONDS = 20.0
FATES = st.one_of(
    st.just(GOOD),
    st.just(Fate(there=1e6, lost=True)),
    st.builds(
        Fate,
        there=st.sampled_from([0.0, 0.02, 1.0, 1.5, 2.9, 9.0, 16.0, LATE_SECONDS]),
        back=st.sampled_from([0.0, 0.02, 1.0, 1.5, 2.9]),
        lost=st.booleans(),
    ),
)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["start", "start", "end", "fate", "fate", "lead", "delete"]),
        st.sampled_from(PODS),
        st.floats(0.05, 40),
        FATES,
    ),
    min_size=1,
    max_size=16,
)
CLOCKS = st.lists(st.tuples(st.floats(-1e5, 1e5), st.floats(0.87, 1.13)), min_size=len(PODS), max_size=len(PODS))


class World:
    """Pods of several releases, of which two never act on one namespace."""

    def __init__(self, server: Leases, clocks: list[tuple[float, float]], pods: list[str] = PODS) -> None:
        self.pods: dict[str, Release] = {}
        self._server, self._clocks = server, dict(zip(pods, clocks, strict=True))

    async def step(self, what: str, pod: str, fate: Fate) -> None:
        """Something happens to a pod."""
        name = pod.split()[0]
        if what == "start" and pod not in self.pods:
            self.pods[pod] = Release(self._server, name, *NAMES[name], clock=self._clocks[pod])
        elif what == "delete":
            await self._delete_all()
        elif pod in self.pods and what == "end":
            self.pods.pop(pod).ends()
        elif pod in self.pods and what == "fate":
            self.pods[pod].wire.fates = lambda: fate
        elif pod in self.pods and what == "lead":
            # Whoever they take for the leader: also none, or both.
            self.pods[pod].leads = not self.pods[pod].leads

    async def _delete_all(self) -> None:
        # A pod that starts right then, or that knew nothing of it, may act at once: that is not promised.
        self.all_is_well()
        await self.goes_on(LATE_SECONDS + 10)
        self._server.objects.clear()
        await self.goes_on(30)

    def all_is_well(self) -> None:
        """From now on, with one pod of each release that leads."""
        leaders = {name: pod for pod, name in ((pod, pod.split()[0]) for pod in sorted(self.pods, reverse=True))}
        for pod, release in self.pods.items():
            release.wire.fates = lambda: GOOD
            release.leads = pod in leaders.values()

    async def goes_on(self, seconds: float) -> None:
        """All the time at most one release acts on a namespace."""
        ends = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < ends:
            for namespace in "abc":
                acting = {pod.name for pod in self.pods.values() if pod.acts(namespace)}
                assert len(acting) <= 1, f"{sorted(acting)} act on {namespace}"
            await asyncio.sleep(0.1)


@settings(deadline=None, max_examples=60)
@given(STEPS, CLOCKS)
def test_never_do_two_releases_act_on_one_namespace_and_in_the_end_one_does(
    steps: list[tuple[str, str, float, Fate]], clocks: list[tuple[float, float]]
) -> None:
    """Whatever starts, ends, is cut off or slow for a while: two that act would train two groups into one
    checkpoint."""

    async def story(server: Leases) -> None:
        world = World(server, clocks)
        for what, pod, seconds, fate in steps:
            await world.step(what, pod, fate)
            await world.goes_on(seconds)
        world.all_is_well()
        await world.goes_on(LATE_SECONDS + 70)
        for namespace in "abc":
            watching = [pod for pod in world.pods.values() if not NAMES[pod.name] or namespace in NAMES[pod.name]]
            assert any(pod.acts(namespace) for pod in watching) or not watching

    in_virtual_time(story)


DUELS = [("ddpjob/all", "other/all"), ("ddpjob/all", "a/own"), ("a/own", "ab/own")]
# Trouble lasts: one lost request is nothing. And between two troubles there may be a moment in which all is well.
SPELLS = st.tuples(st.one_of(st.floats(0.5, 4), st.floats(4, 20)), FATES, st.booleans())
LIVES = st.fixed_dictionaries(
    {
        "starts": st.floats(0, 20),
        "clock": st.tuples(st.floats(-1e5, 1e5), st.floats(0.87, 1.13)),
        "spells": st.lists(SPELLS, min_size=4, max_size=14),
        "is killed": st.booleans(),
    }
)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(DUELS), st.lists(LIVES, min_size=4, max_size=4))
def test_of_two_releases_with_two_pods_each_one_acts_however_late_their_requests_are(
    duel: tuple[str, str], lives: list[dict[str, Any]]
) -> None:
    """A pod counts the renewals of others of its release as its own. It learns of them late, and of their end."""

    async def live(world: World, pod: str, life: dict[str, Any]) -> None:
        await asyncio.sleep(life["starts"])
        await world.step("start", pod, GOOD)
        for seconds, fate, leads in life["spells"]:
            await world.step("fate", pod, fate)
            world.pods[pod].leads = leads
            await asyncio.sleep(seconds)
        if life["is killed"]:
            await world.step("end", pod, GOOD)

    async def story(server: Leases) -> None:
        pods = [f"{name} {pod}" for name in duel for pod in (0, 1)]
        world = World(server, [life["clock"] for life in lives], pods)
        living = asyncio.gather(*(live(world, pod, life) for pod, life in zip(pods, lives, strict=True)))
        while not living.done():
            await world.goes_on(0.25)
        await living

    in_virtual_time(story)
