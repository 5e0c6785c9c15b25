"""Progress in a cluster: a report counts for the pod that its token proves, and no client can forge it or exhaust the
receiver."""

import asyncio
import http.client
import json
import logging
import socket
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from served import BOUND_SECONDS, Served

from ddpjob.reporting.progress import SAVED_POST_SECONDS, encode
from ddpjob.reporting.sender import ReportSender as Library
from ddpjob_core.members import LEADER_PATH
from ddpjob_operator.kube.api.runtime import Runtime
from ddpjob_operator.kube.api.tokens import BadTokenError, BoundPod, NoKeysError
from ddpjob_operator.kube.ports import bounded_server, receive
from ddpjob_operator.kube.ports.receive import PATH, Receiver, Sender
from ddpjob_operator.observed.reports import BadReportError, Report
from ddprun.asking import LEADER_SECONDS

POD = {rank: BoundPod("default", f"digits-3-{rank}", f"uid-{rank}") for rank in (0, 1)}
STRANGER = BoundPod("default", "web-7", "uid-web")
TOKENS = {"token-of-rank-0": POD[0], "token-of-rank-1": POD[1], "token-of-a-stranger": STRANGER}


BOUNDS = [(Receiver, "connections_max"), (bounded_server, "CONNECTIONS_PER_ADDRESS_MAX")]


class World(Served):
    """A receiver of reports with clients. `reports` has the reports that the receiver accepted."""

    def __init__(self) -> None:
        self.reports: list[tuple[Sender, Report]] = []
        self.now = 100_000.0
        self.keys = True
        self.broken = False
        self.leads = True
        self.leader: dict[str, Any] | None = None
        about: dict[str, Any] = {"runtime": Runtime(clock=lambda: self.now), "leads": lambda: self.leads}
        about["on_question"] = lambda sender: self.leader if sender.job == "digits" else None
        self.receiver = Receiver(self.verify, self.locate, self.on_report, **about)
        super().__init__(self.receiver)

    async def verify(self, token: str) -> BoundPod:
        if not self.keys:
            raise NoKeysError("The cluster hides its keys.")
        if token not in TOKENS:
            raise BadTokenError("the token's signature is wrong")
        return TOKENS[token]

    def locate(self, pod: BoundPod) -> Sender | None:
        rank = next((rank for rank, known in POD.items() if known == pod), None)
        return None if rank is None else Sender("default", "digits", rank, attempt=3)

    def on_report(self, sender: Sender, report: Report) -> None:
        if self.broken:
            raise RuntimeError("a mistake of ours")
        self.reports.append((sender, report))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.receiver.port}{PATH}"

    def client(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.receiver.port, timeout=BOUND_SECONDS)

    def post(self, body: object, token: str = "token-of-rank-0", **headers: str) -> tuple[int, str]:
        with closing(self.client()) as client:
            return self.post_on(client, body, token, **headers)

    def post_on(
        self, client: http.client.HTTPConnection, body: object, token: str = "token-of-rank-0", **headers: str
    ) -> tuple[int, str]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        client.request("POST", PATH, data, {"Authorization": f"Bearer {token}", **headers})
        answer = client.getresponse()
        return answer.status, answer.read().decode()

    def connections(self) -> int:
        return len(self.receiver.connections)

    def head(self, *lines: str) -> bytes:
        bearer = "Authorization: Bearer token-of-rank-0"
        return "\r\n".join([f"POST {PATH} HTTP/1.1", "Host: x", bearer, *lines, "", ""]).encode()


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    with world.serving():
        yield world


def kubeflow(metrics: dict[str, object] | None = None, **status: object) -> dict[str, object]:
    listed = [{"name": name, "value": str(value)} for name, value in (metrics or {}).items()]
    return {"trainerStatus": {"lastUpdatedTime": "2026-01-01T00:00:00Z", "metrics": listed, **status}}


def test_a_report_arrives_with_the_pod_and_node_of_its_sender(world: World) -> None:
    assert world.post({"step": 7, "totalSteps": 10}) == (204, "")
    ((sender, report),) = world.reports
    assert sender == Sender("default", "digits", 0, 3)
    assert (report.step, report.total_steps) == (7, 10)
    assert report.received_at is not None


def test_the_token_and_not_the_body_decides_which_pod_reported(world: World) -> None:
    world.post({"step": 7, "attempt": 9, "nodeRank": 0}, "token-of-rank-1")
    ((sender, report),) = world.reports
    assert (sender.node_rank, report.node_rank, report.attempt) == (1, 1, 3)


def test_reports_of_the_trainer_library_are_accepted(world: World, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("token-of-rank-0\n")
    environment = {"DDPJOB_STATUS_TOKEN_FILE": str(tmp_path / "token")}
    body = encode({"step": 3, "rank": 0, "worldSize": 2, "metrics": {"loss": "0.5"}, "final": True})
    assert Library(world.url, environment).send(body) is None
    assert world.reports[0][1].metrics == {"loss": "0.5"}


def test_a_pod_of_the_job_is_told_who_leads_and_no_stranger_is(world: World, tmp_path: Path) -> None:
    def ask(token: str) -> bytes:
        (tmp_path / "token").write_text(token)
        url = world.url.replace(PATH, LEADER_PATH)
        return Library(url, {"DDPJOB_STATUS_TOKEN_FILE": str(tmp_path / "token")}).ask()

    assert ask("token-of-rank-0") == b"", "the leader's pod is not running"
    world.leader = {"term": 2, "place": 1, "host": "10.0.0.1", "port": 29400, "left": None}
    assert json.loads(ask("token-of-rank-1")) == world.leader
    assert (ask("token-of-a-stranger"), ask("no token")) == (b"", b"")
    world.leads = False
    assert ask("token-of-rank-1") == b"", "an operator that does not lead may know an older status"


def test_reports_of_the_library_share_a_connection_and_a_closed_one_loses_no_report(world, tmp_path, monkeypatch):
    """The library must keep its connection, because a new one costs the operator more than a report."""
    (tmp_path / "token").write_text("token-of-rank-0\n")
    with closing(Library(world.url, {"DDPJOB_STATUS_TOKEN_FILE": str(tmp_path / "token")})) as library:
        assert [library.send(b'{"step": 1}'), library.send(b'{"step": 2}')] == [None, None]
        assert world.connections() == 1
        monkeypatch.setattr(bounded_server, "IDLE_SECONDS", 0.01)
        assert library.send(b'{"step": 3}') is None
        world.run(world.few())
        assert library.send(b'{"step": 4}') is None
    assert [report.step for _, report in world.reports] == [1, 2, 3, 4]


@pytest.mark.parametrize("bound", BOUNDS)
def test_a_connection_beyond_the_limit_is_closed_with_its_answer(world, monkeypatch, bound):
    monkeypatch.setattr(*bound, 2)  # so one connection is kept open: three quarters of the limit
    with closing(world.client()) as first, closing(world.client()) as second:
        assert [world.post_on(client, {"step": 1})[0] for client in (first, second)] == [204, 204]
        assert (first.sock is None, second.sock is None) == (False, True)
        assert world.post_on(first, {"step": 2}, "token-of-rank-1")[0] == 204


def test_reports_of_the_hugging_face_trainer_are_accepted_and_answered_with_200(world: World) -> None:
    data = json.dumps(kubeflow({"current_step": 120, "total_steps": 400}, progressPercentage=30)).encode()
    headers = {"Authorization": "Bearer token-of-rank-0", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(world.url, data, headers), timeout=BOUND_SECONDS) as answer:
        assert answer.status == 200
    report = world.reports[0][1]
    assert (report.step, report.total_steps, report.rank, report.attempt) == (120, 400, 0, 3)


def test_the_last_report_of_the_hugging_face_trainer_ends_at_the_last_step_of_its_own_pod(world: World) -> None:
    world.post(kubeflow({"total_steps": 400}, progressPercentage=0))
    world.post(kubeflow(progressPercentage=100))
    world.post(kubeflow(progressPercentage=50), "token-of-rank-1")
    assert [(report.step, report.total_steps) for _, report in world.reports] == [(0, 400), (400, 400), (50, 100)]


def test_an_empty_kubeflow_status_is_accepted_and_changes_nothing(world: World) -> None:
    assert world.post({"trainerStatus": None})[0] == 200
    assert world.post(kubeflow({"loss": 1}))[0] == 200
    assert world.reports == []


REFUSED: dict[str, tuple[int, str, Callable[[World], tuple[int, str]]]] = {
    "the token is another's": (401, "signature", lambda w: w.post({"step": 1}, "of-nobody")),
    "there is no token": (401, "Authorization", lambda w: w.post({"step": 1}, "")),
    "the scheme is another": (401, "Authorization", lambda w: w.post({"step": 1}, Authorization="Basic eDp5")),
    "the pod is not a trainer": (403, "not a trainer", lambda w: w.post({"step": 1}, "token-of-a-stranger")),
    "the body is garbage": (400, "malformed", lambda w: w.post(b"garbage")),
    "the body is empty": (400, "truncated", lambda w: w.post(b"")),
    "the step is missing": (400, "step", lambda w: w.post({"loss": 1})),
    "the step is negative": (400, "at `$.step`", lambda w: w.post({"step": -1})),
    "the text is no UTF-8": (400, "utf-8", lambda w: w.post(b'{"step": 1, "metrics": {"a": "\xff"}}')),
    "brackets are thousands deep": (400, "", lambda w: w.post(b'{"step": 1, "x": ' + b"[" * 8000)),
    "the percentage is too high": (400, "100", lambda w: w.post(kubeflow(progressPercentage=150))),
    "the body is too long": (413, "8192", lambda w: w.post(b"x" * 8193)),
}


@pytest.mark.parametrize("case", REFUSED, ids=REFUSED.keys())
def test_an_invalid_report_is_refused_with_the_reason(world: World, case: str) -> None:
    status, why, send = REFUSED[case]
    answered, text = send(world)
    assert (answered, world.reports) == (status, [])
    assert why in json.loads(text)["error"]


def test_the_bytes_after_a_refused_request_are_not_read_as_another_request(world: World) -> None:
    smuggled = world.head("Content-Length: 11") + b'{"step": 1}'
    refused = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(smuggled)}\r\n\r\n".encode()
    assert world.raw(refused + smuggled).count(b"HTTP/1.1") == 1
    assert world.reports == []


def test_while_the_keys_of_the_cluster_are_unavailable_the_answer_is_to_retry_later(world: World) -> None:
    world.keys = False
    status, text = world.post({"step": 1})
    assert (status, json.loads(text)) == (503, {"error": "The cluster hides its keys."})


def test_an_operator_that_does_not_lead_refuses_a_report_and_closes_the_connection(world: World) -> None:
    """An operator that does not lead must refuse a report, so that the trainer connects to the leader."""
    with closing(http.client.HTTPConnection("127.0.0.1", world.receiver.port)) as kept:
        for leads, status, closes in ((True, 204, False), (False, 503, True)):
            world.leads = leads
            kept.request("POST", PATH, b'{"step": 1}', {"Authorization": "Bearer token-of-rank-0"})
            answer = kept.getresponse()
            assert (answer.status, answer.will_close) == (status, closes)
            answer.read()
    assert len(world.reports) == 1
    assert world.post({"step": 1}, "forged")[0] == 401


def test_an_internal_error_is_answered_and_the_next_report_is_accepted(world, caplog):
    world.broken = True
    assert world.post({"step": 1})[0] == 500
    assert "a progress report was lost" in caplog.text
    world.broken = False
    assert world.post({"step": 2})[0] == 204


def test_a_pod_that_reports_too_often_is_throttled_and_the_others_are_not(world: World) -> None:
    assert [world.post({"step": step})[0] for step in range(12)] == [204] * 10 + [429] * 2
    assert world.post({"step": 1}, "token-of-rank-1")[0] == 204
    world.now += 1
    assert [world.post({"step": step})[0] for step in (7, 8)] == [204, 429]


def test_a_pod_that_saves_often_and_asks_who_leads_is_never_throttled() -> None:
    """A throttled rank reports its next step and checkpoint up to a minute later, and logs an error."""
    assert 1 / SAVED_POST_SECONDS + 1 / LEADER_SECONDS < receive.REPORTS_PER_SECOND


def test_rate_limits_of_ended_pods_are_forgotten(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receive, "PODS_REMEMBERED", 1)
    ended = BoundPod("default", "digits-2-0", "uid-of-an-ended-pod")
    world.receiver._accounts[ended] = receive.Account(5, 0)
    assert world.post({"step": 1})[0] == 204
    assert list(world.receiver._accounts) == [POD[0]]


@pytest.mark.parametrize("bound", BOUNDS)
def test_connections_beyond_the_limit_are_cut_while_all_others_are_being_answered(world, monkeypatch, bound):
    monkeypatch.setattr(*bound, 3)
    with ExitStack() as stack:
        sockets = [stack.enter_context(closing(world.connect())) for _ in range(3)]
        for each in sockets:
            each.sendall(world.head("Content-Length: 11"))
        world.run(proven(world, 3))
        assert b"HTTP" not in world.raw(world.head("Content-Length: 11") + b'{"step": 1}')
        sockets[0].close()
        assert world.run(world.few(2)), "a closed connection must make room"
        assert world.post({"step": 1})[0] == 204


@pytest.mark.parametrize("bound", BOUNDS)
def test_an_idle_connection_makes_room_for_one_with_a_report(world, monkeypatch, bound):
    with ExitStack() as stack:
        clients = [stack.enter_context(closing(world.client())) for _ in range(3)]
        assert [world.post_on(client, {"step": 1})[0] for client in clients] == [204] * 3
        monkeypatch.setattr(*bound, 3)
        assert world.post({"step": 1})[0] == 204
        assert clients[0].sock.recv(1) == b"", "the oldest of them"
        assert world.post_on(clients[2], {"step": 2}, "token-of-rank-1")[0] == 204


async def proven(world: World, connections: int) -> None:
    """Wait until this many connections have sent a valid token."""
    while sum(c.proven for c in world.receiver.connections) < connections:
        await asyncio.sleep(0)


def test_a_token_is_never_logged_whatever_is_wrong_with_the_request(world, caplog):
    caplog.set_level(logging.DEBUG)
    secret = "eyJhbGciOiJSUzI1NiJ9.secret"
    world.post({"step": 1}, secret)
    world.raw(world.head(f"X-Token: {secret}", f"Bad Header {secret}: {secret}"))
    world.raw(world.head(f"X-Long: {secret * 1000}"))
    world.raw(f"{secret} {secret}\r\n\r\n".encode())
    world.broken = True
    world.post({"step": 1})
    assert "secret" not in caplog.text
    assert "token-of-rank-0" not in caplog.text


def test_stopping_closes_the_port_and_every_connection(world: World) -> None:
    port = world.receiver.port
    with closing(world.client()) as client:
        world.post_on(client, {"step": 1})
        world.run(world.receiver.stop())
        assert client.sock.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=BOUND_SECONDS)


def test_a_port_in_use_is_reported_at_the_start(world: World) -> None:
    second = Receiver(world.verify, world.locate, world.on_report)
    with pytest.raises(OSError, match="in use"):
        world.run(second.start("127.0.0.1", world.receiver.port))
    world.run(second.stop())


def test_a_pod_that_reports_for_a_rank_of_another_pod_gets_an_error_that_names_the_rank(world: World) -> None:
    def refuse(sender: Sender, report: Report) -> None:
        raise BadReportError("rank: 7 is not on node 0, which has ranks 0 to 0 (nprocPerNode)")

    world.receiver._on_report = refuse
    status, said = world.post({"step": 1, "rank": 7})
    assert (status, json.loads(said)["error"]) == (
        403,
        "rank: 7 is not on node 0, which has ranks 0 to 0 (nprocPerNode)",
    )
