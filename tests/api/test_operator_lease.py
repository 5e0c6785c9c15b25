"""Two operators before a real API server: one acts, and when it ends, hangs or is cut off the other carries on.

Needs kubectl and KUBECONFIG; any cluster will do. Each operator has a proxy of its own, which records what it writes
and breaks what a test wants broken. The Lease is short here, so that a test is.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from clusters import Namespace, Operator, job, until
from faulty_api import FaultyApi, Seen
from free_port import free_port

from ddpjob_operator.kube.ports.receive import PATH
from ddpjob_operator.pods.report_token import AUDIENCE

LEASE_SECONDS, RENEW_SECONDS, RETRY_SECONDS = 4, 2.5, 0.4
# What looks at the Lease may take on a busy machine.
SLACK_SECONDS = 5.0
LEASES = "/apis/coordination.k8s.io/v1/namespaces/{}/leases"
PODS = ["digits-1-0", "digits-1-1"]


@dataclass
class Replica:
    """One of several operators, with its own way to the API server."""

    name: str
    api: FaultyApi
    operator: Operator
    port: int

    def writes(self, *, since: float = 0.0) -> list[Seen]:
        """What it has written or tried to write, for jobs."""
        own = ("leases", "selfsubjectaccessreviews", "selfsubjectrulesreviews")
        return [seen for seen in list(self.api.seen) if seen.writes and seen.at >= since and seen.resource not in own]

    def renewals(self) -> list[float]:
        """When it wrote the Lease by which one of them leads; claims are written by all."""
        seen = [s for s in list(self.api.seen) if str(s) == "update leases" and s.name == "ddpjob-operator"]
        return [s.at for s in seen]

    def lists(self) -> int:
        counts = self.api.requests()
        return counts["list pods"] + counts["list services"] + counts["list ddpjobs"]


@pytest.fixture
def replicas(namespace: Namespace) -> Iterator[Callable[[str], Replica]]:
    """Starts operators of one namespace that share a Lease. None may have told a bug of its own."""
    with contextlib.ExitStack() as ends:
        started: list[Replica] = []

        def start(name: str) -> Replica:
            api = ends.enter_context(FaultyApi())
            port = free_port()
            variables = {
                "DDPJOB_LEASE_NAMESPACE": namespace.name,
                "DDPJOB_LEASE_SECONDS": str(LEASE_SECONDS),
                "DDPJOB_LEASE_RENEW_SECONDS": str(RENEW_SECONDS),
                "DDPJOB_LEASE_RETRY_SECONDS": str(RETRY_SECONDS),
                "DDPJOB_POD_NAME": name,
                "DDPJOB_POD_IP": "127.0.0.1",
                "DDPJOB_STATUS_PORT": str(port),
                "DDPJOB_STATUS_URL": f"http://127.0.0.1:{port}{PATH}",
            }
            operator = ends.enter_context(Operator(api, namespace.name, **variables))
            started.append(Replica(name, api, operator, port))
            return started[-1]

        yield start
        for replica in started:
            replica.api.mend()
            with contextlib.suppress(ProcessLookupError):
                replica.operator.process.send_signal(signal.SIGCONT)
            if replica.operator.process.poll() is None:
                replica.operator.stop()
            print(f"--- {replica.name}\n{replica.operator.log}")
            assert "Traceback" not in replica.operator.log


@pytest.fixture
def two(namespace: Namespace, replicas: Callable[[str], Replica]) -> tuple[Replica, Replica]:
    """A leader and one that stands by, both with full caches; the Lease is there as the chart makes it."""
    namespace.api.call("POST", LEASES.format(namespace.name), {"metadata": {"name": "ddpjob-operator"}})
    leader = replicas("a")
    leader.operator.watches()
    leads(namespace, "a")
    standby = replicas("b")
    standby.operator.watches()
    until(lambda: "this operator stands by" in standby.operator.log, "the second one stands by")
    return leader, standby


def holder(namespace: Namespace) -> str:
    lease = namespace.api.find(f"{LEASES.format(namespace.name)}/ddpjob-operator") or {}
    return str((lease.get("spec") or {}).get("holderIdentity", "")).partition("_")[0]


def leads(namespace: Namespace, name: str, seconds: float = 30.0) -> float:
    """Waits until the Lease names this operator; how long that took."""
    began = time.monotonic()
    until(lambda: holder(namespace) == name, f"{name} leads", seconds)
    return time.monotonic() - began


def jobs_come(namespace: Namespace, until_true: Callable[[], bool], seconds: float = 60.0) -> list[str]:
    """New jobs all the time, so that whoever may write has something to write. Their names."""
    names: list[str] = []

    def one_more() -> bool:
        names.append(f"job-{len(names)}")
        namespace.api.call("POST", namespace.jobs_path, job(names[-1], nodes=1))
        time.sleep(0.1)
        return until_true()

    until(one_more, "it has happened while jobs came", seconds)
    return names


def ends_well(namespace: Namespace, uids: dict[str, str]) -> None:
    for pod in PODS:
        namespace.exits(pod)
    namespace.reaches("Succeeded")
    assert namespace.uids().items() >= uids.items(), "no pod was made twice"
    assert set(namespace.pod_names()) & {"digits-2-0", "digits-2-1"} == set()


def test_one_of_two_operators_acts_and_the_other_writes_nothing(
    namespace: Namespace, two: tuple[Replica, Replica]
) -> None:
    leader, standby = two
    ends_well(namespace, namespace.start())
    assert leader.writes()
    assert standby.writes() == []
    assert standby.renewals() == []


def test_when_the_leader_is_told_to_end_the_other_acts_within_two_retries_and_lists_nothing_anew(
    namespace: Namespace, two: tuple[Replica, Replica]
) -> None:
    leader, standby = two
    uids = namespace.start()
    lists = standby.lists()
    told = time.monotonic()
    assert leader.operator.stop() == 0
    leads(namespace, "b")
    released = leader.renewals()[-1]
    waited = standby.renewals()[0] - released
    print(f"the other leads {waited:.2f} s after the release, which came {released - told:.2f} s after the signal")
    # Two retries take 1 s here, and what a busy machine takes; without the release it would wait until the end.
    assert waited < LEASE_SECONDS - 1.2 * RETRY_SECONDS
    ends_well(namespace, uids)
    assert standby.lists() == lists
    assert all(seen.at < released for seen in leader.writes()), "it writes nothing once the Lease is released"


def test_when_the_leader_is_killed_the_other_acts_once_the_lease_has_run_out(
    namespace: Namespace, two: tuple[Replica, Replica]
) -> None:
    leader, standby = two
    uids = namespace.start()
    leader.operator.kill()
    # It ends while nobody acts, and is not lost.
    namespace.exits(PODS[0])
    leads(namespace, "b")
    renewed = leader.renewals()[-1]
    waited = standby.renewals()[0] - renewed
    print(f"the other leads {waited:.2f} s after the first renewed its Lease for the last time")
    assert LEASE_SECONDS - 1.2 * RETRY_SECONDS - 0.1 <= waited < LEASE_SECONDS + 2 * RETRY_SECONDS + SLACK_SECONDS
    ends_well(namespace, uids)
    assert standby.writes()


def test_a_leader_that_cannot_renew_stops_before_the_other_starts_though_it_could_still_write(
    namespace: Namespace, two: tuple[Replica, Replica]
) -> None:
    leader, standby = two
    refused = False

    def the_other_writes() -> bool:
        nonlocal refused
        if leader.writes() and not refused:  # it is in the middle of its work
            refused = True
            for verb in ("get", "update", "create"):
                leader.api.break_(f"{verb} leases", 503, times=float("inf"))
        return len(standby.writes()) > 20

    names = jobs_come(namespace, the_other_writes)
    last, first = max(seen.at for seen in leader.writes()), min(seen.at for seen in standby.writes())
    print(f"{first - last:.2f} s between the last write of the one and the first of the other")
    assert first - last > (LEASE_SECONDS - RENEW_SECONDS) / 2, "the leader has stopped in good time"
    until(lambda: "is lost: this operator stands by" in leader.operator.log, "it says so")
    leader.api.mend()
    namespace.has_pods(*(f"{name}-1-0" for name in names))
    assert len(namespace.pods()) == len(names), "each pod was made once"
    assert max(seen.at for seen in leader.writes()) == last, "and it writes nothing when it is back"
    assert leader.operator.process.poll() is None, "nor was it started anew"
    # Its copy is warm: when the other one goes it acts again.
    lists = leader.lists()
    assert standby.operator.stop() == 0
    leads(namespace, "a")
    ends_well(namespace, namespace.start())
    assert leader.lists() == lists


def test_a_leader_that_was_frozen_writes_nothing_when_it_wakes_up(
    namespace: Namespace, two: tuple[Replica, Replica]
) -> None:
    leader, standby = two
    names = jobs_come(namespace, lambda: len(leader.writes()) > 20)
    leader.operator.process.send_signal(signal.SIGSTOP)  # in the middle of its work
    names = [f"job-{i}" for i in range(len(names))]
    leads(namespace, "b")
    namespace.has_pods(*(f"{name}-1-0" for name in names))
    began = time.monotonic()
    leader.operator.process.send_signal(signal.SIGCONT)
    until(lambda: "is held by b" in leader.operator.log, "it has seen who leads now")
    assert len(leader.writes(since=began)) <= 1, "at most what was on its way when it froze"
    assert len(namespace.pods()) == len(names)
    assert standby.writes()


def test_a_lease_that_is_not_there_is_made_after_a_wait(
    namespace: Namespace, replicas: Callable[[str], Replica]
) -> None:
    replica = replicas("a")
    began = time.monotonic()
    leads(namespace, "a")
    assert time.monotonic() - began >= LEASE_SECONDS
    ends_well(namespace, namespace.start())
    assert replica.writes()


def test_a_report_to_the_operator_that_stands_by_arrives(namespace: Namespace, two: tuple[Replica, Replica]) -> None:
    leader, standby = two
    uids = namespace.start()
    token = namespace.kubectl(
        "create",
        "token",
        "default",
        f"--audience={AUDIENCE}",
        "--bound-object-kind=Pod",
        f"--bound-object-name={PODS[0]}",
        f"--bound-object-uid={uids[PODS[0]]}",
    ).strip()
    assert post(standby, token, {"step": 7, "totalSteps": 10, "rank": 0}) == 204
    until(lambda: (namespace.status().get("progress") or {}).get("step") == 7, "the status shows the step")
    assert standby.writes() == []
    assert post(standby, "forged", {"step": 9}) == 401
    leader.operator.kill()
    refused = until(lambda: (code := post(standby, token, {"step": 8, "rank": 0})) != 429 and code, "it is answered")
    assert refused == 503, "nobody leads"
    leads(namespace, "b")
    steps = itertools.count(9)

    def goes_on() -> bool:
        post(standby, token, {"step": next(steps), "totalSteps": 10_000, "rank": 0})
        return bool((namespace.status().get("progress") or {}).get("step", 0) >= 9)

    until(goes_on, "the new leader takes it itself")
    assert not any(token in replica.operator.log for replica in two)


def post(replica: Replica, token: str, report: dict[str, object]) -> int:
    """The status code of the answer."""
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(
        f"http://127.0.0.1:{replica.port}{PATH}", json.dumps(report).encode(), headers, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
