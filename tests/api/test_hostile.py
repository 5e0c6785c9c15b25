"""Forty hostile objects and seventeen hostile peers against a real API server: the operator and all other jobs go on.

Needs kubectl and KUBECONFIG of any cluster. Pods find no node; the test writes their status, both as a kubelet would
and as only an attacker would. If the operator failed, users would lose every job of the cluster, because each new
operator reads the same objects. With -s the test prints the figures of bench/results."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from clusters import MERGE, Namespace, Operator, job, until
from free_port import free_port

from ddpjob_operator.kube.ports.receive import PATH
from ddpjob_operator.pods import naming
from ddpjob_operator.pods.report_token import AUDIENCE

pytestmark = pytest.mark.timeout(600)

ORDINARY = 20
PEERS, CONNECTIONS_EACH = 17, 40
GROWTH_BYTES_MAX = 50 * 2**20
EVIL = "\x1b[2J\x1b[1;1H\x1b]0;owned\x07 State: Succeeded\u202e hf_abcdefghijklmnopqrstuvwxyz"
RUNNING = {"running": {"startedAt": "2031-03-05T07:11:13Z"}}


# ------------------------------------------------------------------------------------------------ ordinary jobs


@dataclass
class Ordinary:
    """Twenty small jobs, which the test plays from their creation to their end."""

    namespace: Namespace
    prefix: str
    port: int
    seconds: float = 0.0
    reports_taken: int = 0
    started: set[str] = field(default_factory=set)
    done: set[str] = field(default_factory=set)

    def run(self) -> Ordinary:
        began = time.monotonic()
        for n in range(ORDINARY):
            self.namespace.api.call("POST", self.namespace.jobs_path, job(f"{self.prefix}-{n}", nodes=1))
        until(self._all_ended, f"all {self.prefix} jobs end well", 180)
        self.seconds = time.monotonic() - began
        return self

    def _all_ended(self) -> bool:
        mine = [one for one in self.namespace.jobs() if one["metadata"]["name"].startswith(f"{self.prefix}-")]
        pods = set(self.namespace.pod_names())
        for one in mine:
            name, state = one["metadata"]["name"], one.get("status", {}).get("state")
            pod = f"{name}-1-0"
            if pod in pods and name not in self.started:
                self.started.add(name)
                self.namespace.set_pod(pod, "Running", RUNNING)
            if state == "Running" and name not in self.done:
                self.reports_taken += self._reports(pod)
                self.done.add(name)
                self.namespace.exits(pod)
        states = [one.get("status", {}).get("state") for one in mine]
        assert "Failed" not in states
        assert all(one["status"].get("attempt", 0) <= 1 for one in mine if "status" in one)
        return states == ["Succeeded"] * ORDINARY

    def _reports(self, pod: str) -> bool:
        """True if the operator accepts a report of this pod. Try three times, like the library."""
        return any(self._report(token_of(self.namespace, pod)) for _ in range(3))

    def _report(self, token: str) -> bool:
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        body = json.dumps({"step": 3, "rank": 0}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{PATH}", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return bool(answer.status == 204)
        except OSError:
            return False


def token_of(namespace: Namespace, pod: str) -> str:
    uid = namespace.uids()[pod]
    bound = {"kind": "Pod", "apiVersion": "v1", "name": pod, "uid": uid}
    body = {"spec": {"audiences": [AUDIENCE], "expirationSeconds": 600, "boundObjectRef": bound}}
    path = f"/api/v1/namespaces/{namespace.name}/serviceaccounts/default/token"
    return str(namespace.api.call("POST", path, body)["status"]["token"])


# ------------------------------------------------------------------------------------------------ hostile objects


class Hostile:
    """Creates hostile objects, and counts how many the API server has accepted and refused."""

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.taken: list[str] = []
        self.refused: list[str] = []

    def try_to(self, what: str, method: str, path: str, body: Any, kind: str = "application/json") -> bool:
        try:
            self.namespace.api.call(method, path, body, kind)
        except urllib.error.HTTPError as error:
            if error.code >= 500:
                raise
            self.refused.append(f"{what} ({error.code})")
            return False
        self.taken.append(what)
        return True

    def job(self, name: str, body: dict[str, Any] | bytes) -> bool:
        return self.try_to(f"job {name}", "POST", self.namespace.jobs_path, body)

    def status(self, name: str, status: dict[str, Any]) -> None:
        """Create a job with a status that the operator never writes."""
        self.job(name, job(name, nodes=1))
        until(lambda: self.namespace.status(name), f"{name} has a status")
        self.try_to(f"status {name}", "PATCH", f"{self.namespace.jobs_path}/{name}/status", {"status": status}, MERGE)

    def pod(self, name: str, *, status: dict[str, Any] | None = None, **metadata: Any) -> None:
        """Create a pod with the labels of an ordinary job; metadata may name that job as its owner."""
        labels = {naming.LABEL_JOB: "victim", naming.LABEL_ATTEMPT: "1", naming.LABEL_RANK: "0"}
        body = {
            "metadata": {"name": name, "labels": labels} | metadata,
            "spec": {
                "schedulerName": "nobody",
                "terminationGracePeriodSeconds": metadata.pop("grace", 30),
                "containers": [{"name": "trainer", "image": "busybox"}],
            },
        }
        body["metadata"].pop("grace", None)  # type: ignore[attr-defined]
        pods = f"/api/v1/namespaces/{self.namespace.name}/pods"
        if self.try_to(f"pod {name}", "POST", pods, body) and status is not None:
            self.try_to(f"pod status {name}", "PATCH", f"{pods}/{name}/status", {"status": status}, MERGE)


def nested(depth: int) -> str:
    """Return nested JSON, which json.dumps could not write at this depth."""
    return '{"a":' * depth + "1" + "}" * depth


def odd_jobs(hostile: Hostile) -> None:
    for depth in (70, 300, 900, 1100, 5000, 9900):
        body = json.dumps(job(f"deep-{depth}"))
        hostile.job(f"deep-{depth}", body.replace('"template": {', f'"template": {{"x": {nested(depth)}, ').encode())
    for name, filling in {"wide-objects": {}, "wide-texts": "", "wide-numbers": 1}.items():
        body = job(name)
        body["spec"]["template"]["metadata"] = {"x": [filling] * 30_000}
        hostile.job(name, body)
    for n in range(8):
        body = job(f"big-{n}")
        body["spec"]["template"]["spec"]["containers"][0]["args"] = ["x" * 1_000_000]
        hostile.job(f"big-{n}", body)
    for grace in (10**11, 2**62, 315_360_001):
        body = job(f"grace-{grace}")
        body["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = grace
        hostile.job(f"grace-{grace}", body)
    hostile.job("ranks", job("ranks", nprocPerNode=10**9))
    hostile.job("digits-digits", job("digits-digits", container={"command": ["torchrun", "--nnodes", "9" * 5000, "x"]}))
    hostile.job("escapes", job("escapes", container={"command": ["torchrun", f"--max-restarts={EVIL}", EVIL]}))
    hostile.job("window", job("window", nodes=1, backoffLimit=10**12, backoffWindowSeconds=60))


def odd_statuses(hostile: Hostile) -> None:
    spans = ",".join(f"{n}00000-{n}99998" for n in range(1, 400))
    for name, status in {
        "state": {"state": "Sleeping", "attempt": 1},
        "ranges": {"startedNodes": spans, "completedNodes": f"{spans},{'9' * 5000}"},
        "last-day": {"attemptTime": "9999-12-31T23:59:59Z", "startTime": "9999-12-31T23:59:59Z"},
        "first-day": {"attemptTime": "0001-01-01T00:00:00Z", "stateTime": "0001-01-01T00:00:00Z"},
        "attempts": {"attempt": 2**62},
        "nodes": {"attempt": 1, "state": "Running", "attemptNodes": 10**9},
        "negative": {"attempt": -5, "restarts": {"application": -1}},
        "long": {"message": "x" * 400_000},
        "many": {"failures": [{"attempt": 1, "message": "x", "time": "2031-03-05T07:11:13Z"}] * 4_000},
        "escapes": {"progress": {"step": 1, "updated": "2031-03-05T07:11:13Z", "metrics": {EVIL: EVIL}}},
    }.items():
        hostile.status(f"status-{name}", status)


def ended(**terminated: Any) -> dict[str, Any]:
    state = {"terminated": {"exitCode": 1, "reason": "Error", "finishedAt": "2031-03-05T07:11:13Z"} | terminated}
    container = {"name": "trainer", "image": "x", "imageID": "", "restartCount": 0, "ready": False, "state": state}
    return {"phase": "Failed", "containerStatuses": [container]}


def odd_pods(hostile: Hostile, owner: dict[str, Any]) -> None:
    reference = {"apiVersion": "training.ddpjob.io/v1alpha1", "kind": "DDPJob", "controller": True}
    forged = [reference | {"name": "victim", "uid": owner["uid"]}]
    digits = {naming.LABEL_JOB: "victim", naming.LABEL_ATTEMPT: "9" * 63, naming.LABEL_RANK: "9" * 63}
    hostile.pod("label-numbers", labels=digits)
    hostile.pod("label-arabic", labels=digits | {naming.LABEL_RANK: "x.y_z"})
    hostile.pod("future", labels=digits | {naming.LABEL_ATTEMPT: "999999999", naming.LABEL_RANK: "0"})
    hostile.pod("forged", ownerReferences=forged)
    for n in range(5):
        hostile.pod(f"huge-{n}", annotations={f"x{i}": "y" * 60_000 for i in range(4)})
    for grace in (10**11, 2**33, 2**62):
        name = f"poison-{grace}"
        hostile.pod(name, grace=grace, finalizers=["ddpjob.test/hold"])
        path = f"/api/v1/namespaces/{hostile.namespace.name}/pods/{name}"
        bind = {"target": {"kind": "Node", "name": "no-such-node"}, "metadata": {"name": name}}
        hostile.try_to(f"bind {name}", "POST", f"{path}/binding", bind)
        hostile.try_to(f"delete {name}", "DELETE", path, {"kind": "DeleteOptions", "apiVersion": "v1"})
    counts = json.dumps({"ddpjob": 1, "rank": 0, "exitCode": 1, "agent": {"restarts": {"application": 60_000_000}}})
    deep = '{"ddpjob":1,"agent":' + "[" * 10_000
    for name, status in {
        "counts": ended(message=counts),
        "deep-message": ended(message=deep),
        "long-message": ended(message=EVIL * 8000),
        "long-reason": ended(reason=EVIL * 1000),
        "last-day": ended(finishedAt="9999-12-31T23:59:59Z"),
        "first-day": ended(finishedAt="0001-01-01T00:00:00Z"),
        "code": ended(exitCode=2**31 - 1),
        "silent": {"phase": "Failed"},
        "evicted": {"phase": "Failed", "reason": EVIL, "message": EVIL * 3000},
        "conditions": {"conditions": [{"type": f"x{n}", "status": "True"} for n in range(500)]},
        "waiting": {
            "phase": "Pending",
            "initContainerStatuses": [
                {"name": EVIL, "image": "x", "imageID": "", "restartCount": 2**31 - 1, "ready": False}
                | {"state": {"waiting": {"reason": EVIL, "message": EVIL * 3000}}}
            ],
        },
    }.items():
        hostile.pod(f"odd-{name}", status=status, ownerReferences=forged)


def liar(hostile: Hostile) -> None:
    """Create a job whose pod claims 60,000,000 restarts in a message of 89 bytes."""
    ddprun = {"command": ["ddprun", "x"]}
    hostile.job("liar", job("liar", nodes=1, backoffLimit=3, backoffWindowSeconds=60, container=ddprun))
    hostile.namespace.has_pods("liar-1-0")
    message = {"ddpjob": 1, "rank": 0, "exitCode": 1, "agent": {"restarts": {"application": 60_000_000}}}
    hostile.namespace.exits("liar-1-0", 1, json.dumps(message))


# ------------------------------------------------------------------------------------------------ hostile peers


@contextlib.contextmanager
def hostile_peers(port: int) -> Iterator[None]:
    """Run peers that open connections, send half a request, and reconnect when the operator closes the connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    over = threading.Event()
    peers = [threading.Thread(target=_annoy, args=(port, f"127.0.0.{n + 2}", over)) for n in range(PEERS)]
    for peer in peers:
        peer.start()
    try:
        yield
    finally:
        over.set()
        for peer in peers:
            peer.join(30)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _annoy(port: int, address: str, over: threading.Event) -> None:
    words = (
        b"",
        b"POST /v1/pro",
        b"POST /v1/progress HTTP/1.1\r\nX: " + b"y" * 8000,
        b"\x16\x03\x01\x00",
        b"\x00" * 4000,
    )
    open_ones: list[socket.socket] = []
    turn = 0
    while not over.wait(0.02):
        turn += 1
        with contextlib.suppress(OSError):
            one = socket.create_connection(("127.0.0.1", port), 2, source_address=(address, 0))
            open_ones.append(one)
            one.sendall(words[turn % len(words)])
        while len(open_ones) > CONNECTIONS_EACH:
            open_ones.pop(0).close()
    for one in open_ones:
        one.close()


# ------------------------------------------------------------------------------------------------ the test


@pytest.fixture
def theirs(namespace: Namespace) -> Iterator[Namespace]:
    """Yield the namespace of an attacker."""
    made = Namespace(namespace.api)
    try:
        yield made.make()
    finally:
        for name in [pod["metadata"]["name"] for pod in made.pods() if pod["metadata"].get("finalizers")]:
            made.release(name)
        made.remove()


def mib(count: int) -> str:
    return f"{count / 2**20:.0f}"


def peak_bytes(operator: Operator) -> int:
    """Return the operator's peak memory (resident set) in bytes."""
    text = Path(f"/proc/{operator.process.pid}/status").read_text()
    line = next(line for line in text.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def test_hostile_objects_and_peers_do_not_affect_other_jobs(namespace, theirs, operators):
    port = free_port()
    reporting = {"DDPJOB_STATUS_PORT": str(port), "DDPJOB_STATUS_URL": f"http://127.0.0.1:{port}{PATH}"}
    operator = operators(namespace.name, theirs.name, anew=True, **reporting).watches(2)
    without = Ordinary(namespace, "calm", port).run()
    before, before_peak = operator.memory_bytes, peak_bytes(operator)

    theirs.api.call("POST", theirs.jobs_path, job("victim", nodes=1))
    theirs.has_pods("victim-1-0")
    victim = theirs.job("victim") or {}
    hostile = Hostile(theirs)
    odd_jobs(hostile)
    odd_statuses(hostile)
    odd_pods(hostile, victim["metadata"])
    liar(hostile)
    with hostile_peers(port):
        beside = Ordinary(namespace, "storm", port).run()
    after, after_peak = operator.memory_bytes, peak_bytes(operator)

    print(f"hostile: {len(hostile.taken)} taken, {len(hostile.refused)} refused: {hostile.refused}")
    print(f"20 ordinary jobs: {without.seconds:.1f} s without, {beside.seconds:.1f} s beside them")
    print(f"reports taken: {without.reports_taken} and {beside.reports_taken} of {ORDINARY}")
    print(f"memory, MiB: {mib(before)} -> {mib(after)}, peak {mib(before_peak)} -> {mib(after_peak)}")
    assert len(hostile.taken) >= 40
    assert operator.process.poll() is None, "it has not ended"
    assert after_peak - before_peak < GROWTH_BYTES_MAX
    assert beside.reports_taken == ORDINARY
    assert beside.seconds < 2 * without.seconds + 10
    told_right(theirs)

    # Each new operator and each standby gets the same objects in its first lists.
    other = operators(namespace.name, theirs.name, anew=True).watches(2)
    time.sleep(5)
    print(f"memory of a new operator, MiB: {mib(other.memory_bytes)}, peak {mib(peak_bytes(other))}")
    assert other.process.poll() is None
    assert peak_bytes(other) - before_peak < GROWTH_BYTES_MAX


def told_right(theirs: Namespace) -> None:
    """Check that each faulty object's author gets a message, without control characters or credentials."""
    for name, why in {"deep-5000": "is nested deeper than 64 levels", "wide-objects": "spec: h"}.items():
        until(lambda name=name, why=why: why in theirs.shown(".status.message", name), f"{name} is told: {why}")
    assert theirs.status("liar").get("restarts", {}).get("application", 0) <= 4
    events = theirs.api.call("GET", f"/api/v1/namespaces/{theirs.name}/events")["items"]
    told = "".join(e["message"] for e in events if e["source"].get("component") == "ddpjob-operator")
    told += theirs.kubectl("get", "ddp", "-o", "jsonpath={.items[*].status.message}")
    assert "\x1b" not in told
    assert "\u202e" not in told
    assert "hf_abcdef" not in told
