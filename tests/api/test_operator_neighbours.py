"""A slow job must not delay other jobs, and two Helm releases of the operator must not disturb each other, with a real
API server. Needs kubectl and KUBECONFIG of any cluster without another operator. Leases are short, to save time."""

from __future__ import annotations

import contextlib
import time
import urllib.request
from collections.abc import Callable, Iterator

import pytest
from clusters import Namespace, Operator, job, until
from faulty_api import FaultyApi
from free_port import free_port

from ddpjob_operator.kube.other_releases import MARK

LEASE_SECONDS, RENEW_SECONDS, RETRY_SECONDS = 4, 2.5, 0.4


@pytest.mark.alone
def test_ten_small_jobs_start_at_once_next_to_a_job_of_a_thousand_pods(namespace, operators, api):
    """The small jobs must not wait half a minute for the thousand pods of another user."""
    operators(namespace.name).watches()
    api.break_("create pods", seconds=0.5, times=float("inf"))
    namespace.apply(job("big", nodes=1000))
    until(lambda: len(namespace.pods()) > 8, "the big one's pods are being created")
    for number in range(10):
        api.call("POST", namespace.jobs_path, job(f"small-{number}", nodes=1))
    began = time.monotonic()
    wanted = {f"small-{number}-1-0" for number in range(10)}
    until(lambda: wanted <= set(namespace.pod_names()), "all small jobs have their pod", 60)
    took = time.monotonic() - began
    big = sum(name.startswith("big-") for name in namespace.pod_names())
    print(f"the last of ten small jobs had its pod after {took:.2f} s and {big} of the big one's; a create takes 0.5 s")
    assert big < 200, "of 1,000; how long it takes depends on the machine"


class Release:
    """An operator of its own release, with its own proxy to the API server."""

    def __init__(self, ends: contextlib.ExitStack, home: Namespace, name: str, *watched: str) -> None:
        self.name, self.api, self.health_port = name, ends.enter_context(FaultyApi()), free_port()
        variables = {
            "DDPJOB_LEASE_NAMESPACE": home.name,
            "DDPJOB_LEASE_NAME": name,
            "DDPJOB_LEASE_SECONDS": str(LEASE_SECONDS),
            "DDPJOB_LEASE_RENEW_SECONDS": str(RENEW_SECONDS),
            "DDPJOB_LEASE_RETRY_SECONDS": str(RETRY_SECONDS),
            "DDPJOB_HEALTH_PORT": str(self.health_port),
        }
        self.operator = ends.enter_context(Operator(self.api, *watched, **variables))

    def writes(self) -> int:
        own = ("leases", "selfsubjectaccessreviews", "selfsubjectrulesreviews")
        return sum(seen.writes and seen.resource not in own for seen in list(self.api.seen))

    def looks(self) -> int:
        return self.api.requests()["get leases"]

    def leads(self) -> Release:
        until(lambda: "this operator leads" in self.operator.log, f"{self.name} leads in its release", 60)
        return self

    def health(self) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.health_port}/healthz", timeout=5) as answer:
            assert answer.status == 200, "standing by is no reason for a restart"
            return str(answer.read().decode())


@pytest.fixture
def releases(namespace: Namespace) -> Iterator[Callable[..., Release]]:
    """Yield a function that starts releases, and stop them at the end. None of them may have logged a traceback."""
    with contextlib.ExitStack() as ends:
        started: list[Release] = []

        def start(name: str, *watched: str) -> Release:
            started.append(Release(ends, namespace, name, *watched))
            return started[-1]

        yield start
        for release in started:
            if release.operator.process.poll() is None:
                release.operator.stop()
            print(f"--- {release.name}\n{release.operator.log}")
            assert "Traceback" not in release.operator.log


@pytest.mark.alone
def test_a_release_for_all_namespaces_leaves_a_namespace_to_the_release_that_watches_it(namespace, releases):
    """A release for all namespaces must leave a namespace to its own release, or both act on its jobs."""
    everywhere = releases("everywhere").leads()
    namespace.apply(job("one", nodes=1))
    namespace.has_pods("one-1-0")
    marks = f"/api/v1/namespaces/{namespace.name}/configmaps"
    namespace.api.call("POST", marks, {"metadata": {"name": MARK}, "data": {"release": "ops/own"}})
    own = releases("own", namespace.name).leads()
    until(
        lambda: f"release ops/own manages the jobs of the namespace {namespace.name} " in everywhere.operator.log,
        "it has seen it",
    )
    assert "the release ops/own manages" in everywhere.health()
    assert own.health() == "ok\n"
    wrote = everywhere.writes()
    namespace.apply(job("two", nodes=1))
    namespace.has_pods("one-1-0", "two-1-0")
    assert (everywhere.writes(), own.writes() > 0) == (wrote, True)
    assert own.operator.stop() == 0
    namespace.api.call("DELETE", f"{marks}/{MARK}")
    namespace.apply(job("three", nodes=1))
    namespace.has_pods("one-1-0", "two-1-0", "three-1-0")
    assert everywhere.writes() > wrote
    until(lambda: everywhere.health() == "ok\n", "nobody is beside it")


@pytest.fixture
def another(api: FaultyApi) -> Iterator[Namespace]:
    """Yield a second namespace, and remove it afterwards."""
    made = Namespace(api)
    try:
        yield made.make()
    finally:
        made.remove()


def test_two_releases_with_their_own_namespaces_share_the_work_but_not_the_outages(namespace, another, releases):
    """With a release per team (sharding, docs/scaling.md), an outage of one release must not affect the other teams."""
    ours, theirs = releases("ours", namespace.name).leads(), releases("theirs", another.name).leads()
    for space in (namespace, another):
        space.apply(job("one", nodes=2))
        space.has_pods("one-1-0", "one-1-1")
    for release, own, foreign in ((ours, namespace, another), (theirs, another, namespace)):
        seen = {one.namespace for one in list(release.api.seen) if one.resource != "leases"}
        assert own.name in seen
        assert foreign.name not in seen
        assert release.health() == "ok\n"
    theirs.operator.kill()
    namespace.apply(job("two", nodes=1))
    namespace.has_pods("two-1-0")
    another.apply(job("two", nodes=1))
    looks = ours.looks()
    until(lambda: ours.looks() > looks + 10, "ours has renewed its Lease ten times more")
    assert another.pod_names() == ["one-1-0", "one-1-1"], "nobody takes over what nobody was given"
    assert another.name not in {one.namespace for one in list(ours.api.seen) if one.resource != "leases"}
