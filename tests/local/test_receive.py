"""Progress reports arrive from the job's own trainers, and no other user of the machine can forge or block them."""

import http.client
import json
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from shell import eventually

from ddpjob.reporting.sender import ReportSender
from ddpjob_cli.local.processes import receive
from ddpjob_cli.local.processes.receive import BODY_BYTES_MAX, CONNECTIONS_MAX, PATH, LocalReceiver
from ddpjob_core.members import LEADER_PATH

BOUND_SECONDS = 10.0


@contextmanager
def serving(receiver: LocalReceiver) -> Iterator[LocalReceiver]:
    receiver.start()
    try:
        yield receiver
    finally:
        receiver.stop()


class World:
    """A receiver of reports, the reports that it has accepted, and its clients."""

    def __init__(self, folder: Path) -> None:
        self.reports: list[bytes] = []
        self.says: Callable[[bytes], str | None] = lambda body: None
        self.receiver = LocalReceiver(self.on_report, folder / "token")

    def on_report(self, body: bytes) -> str | None:
        self.reports.append(body)
        return self.says(body)

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.receiver.url)
        assert parts.hostname is not None
        assert parts.port is not None
        return parts.hostname, parts.port

    def socket(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=BOUND_SECONDS)

    def post(self, body: bytes, **headers: str) -> tuple[int, str]:
        with closing(http.client.HTTPConnection(*self.address, timeout=BOUND_SECONDS)) as client:
            client.request("POST", PATH, body, {"Authorization": f"Bearer {self.receiver.token}", **headers})
            answer = client.getresponse()
            return answer.status, answer.read().decode()

    def raw(self, request: bytes) -> bytes:
        """Send these bytes, and return everything that the receiver answers before it closes."""
        with closing(self.socket()) as connection:
            connection.sendall(request)
            return until_closed(connection)

    def head(self, *lines: str, path: str = PATH) -> bytes:
        bearer = f"Authorization: Bearer {self.receiver.token}"
        return "\r\n".join([f"POST {path} HTTP/1.1", "Host: x", bearer, *lines, "", ""]).encode("latin-1")


def until_closed(connection: socket.socket) -> bytes:
    answer = b""
    try:
        while data := connection.recv(65536):
            answer += data
    except ConnectionResetError:
        answer += b"(reset)"
    return answer


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    before = threading.active_count()
    with serving(world.receiver):
        yield world
    assert threading.active_count() == before, "a thread outlived the receiver"


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a shorter limit, which a report that is sent at once does not reach, however busy the machine is."""
    monkeypatch.setattr(receive.Handler, "timeout", 0.5)


def test_a_report_with_the_token_is_passed_on_unchanged(world: World) -> None:
    body = b'{"step": 3, "raw": "\xff"}'
    assert world.post(body) == (204, "")
    assert world.reports == [body]


def test_the_trainer_gets_the_reason_for_a_refused_report(world: World) -> None:
    world.says = lambda body: "progress.step: must be a number, is “three”"
    status, answer = world.post(b"{}")
    assert status == 400
    assert json.loads(answer) == {"error": "progress.step: must be a number, is “three”"}


def test_reports_are_passed_on_one_at_a_time(world: World) -> None:
    inside, together = [0], [0]

    def says(body: bytes) -> None:
        inside[0] += 1
        together[0] = max(together[0], inside[0])
        time.sleep(0.01)  # long enough for a second report to arrive, if it could
        inside[0] -= 1

    world.says = says
    threads = [threading.Thread(target=world.post, args=(b"x",)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(world.reports), together[0]) == (8, 1)


@pytest.mark.parametrize(
    "authorization",
    ["", "Bearer", "Bearer ", "Bearer wrong", "Basic {token}", "{token}", "Bearer {token}x", "Bearer \xe4\xff"],
)
def test_without_the_token_no_report_is_accepted(world: World, authorization: str) -> None:
    status, answer = world.post(b"{}", Authorization=authorization.format(token=world.receiver.token))
    assert (status, "token" in json.loads(answer)["error"]) == (401, True)
    assert world.reports == []


def test_the_token_file_is_private_and_removed_with_the_receiver(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("of a former run, readable for all")
    path.chmod(0o644)
    with serving(LocalReceiver(lambda _body: None, path)) as receiver:
        assert path.read_text() == receiver.token
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert [entry.name for entry in tmp_path.iterdir()] == ["token"]
    assert not path.exists()


def test_an_agent_with_the_token_is_told_who_leads(world: World, tmp_path: Path) -> None:
    url = world.receiver.url.replace(PATH, LEADER_PATH)
    own = ReportSender(url, {"DDPJOB_STATUS_TOKEN_FILE": str(world.receiver.token_file)})
    assert own.ask() == b"", "no leader is known yet"
    world.receiver.leader = {"term": 2, "place": 1}
    assert json.loads(own.ask()) == {"term": 2, "place": 1}
    assert ReportSender(url, {}).ask() == b""


@pytest.mark.parametrize(
    ("lines", "path", "status"),
    [
        (["Content-Length: 0"], "/", 404),
        ([], PATH, 411),
        (["Transfer-Encoding: chunked"], PATH, 411),
        (["Content-Length: " + "9" * 6000], PATH, 413),
        (["Content-Length: -1"], PATH, 411),
        (["Content-Length: \xb2"], PATH, 411),
    ],
)
def test_a_request_that_is_not_a_report_is_refused_and_its_connection_closed(world, lines, path, status):
    answer = world.raw(world.head(*lines, path=path) + b"{}")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 %d " % status)
    assert json.loads(body)["error"]
    assert world.reports == []


def test_the_largest_body_is_accepted_and_a_much_larger_one_gets_the_reason(world: World) -> None:
    assert world.post(b"x" * BODY_BYTES_MAX)[0] == 204
    status, answer = world.post(b"x" * 500_000)
    assert (status, json.loads(answer)["error"]) == (413, "Content-Length: must be at most 8192")


@pytest.mark.parametrize(
    "garbage",
    [
        b"\0\xff\x16\x03\x01 TLS?\r\n\r\n",
        b"GET /v1/progress HTTP/1.1\r\n\r\n",
        b"POST\r\n\r\n",
        b"POST " + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n",
        b"POST /v1/progress HTTP/9.9\r\n\r\n",
        b"POST /v1/progress HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n",
    ],
    ids=["bytes", "GET", "no path", "a long line", "version 9", "many headers"],
)
def test_a_connection_with_garbage_is_closed_and_forgotten(world: World, garbage: bytes) -> None:
    world.raw(garbage)
    assert world.post(b"still here")[0] == 204


@pytest.mark.parametrize("sent", [0, 20, 10_000], ids=["nothing", "half a head", "half a body"])
def test_a_client_that_stops_sending_is_disconnected_and_not_reported(world: World, hasty: None, sent: int) -> None:
    request = (world.head("Content-Length: 100") + b"half")[:sent]
    assert world.raw(request) == b""
    assert world.reports == []


def test_a_partial_report_of_a_dying_trainer_is_ignored(world: World) -> None:
    with closing(world.socket()) as connection:
        connection.sendall(world.head("Content-Length: 100") + b"half")
        connection.shutdown(socket.SHUT_WR)
        assert until_closed(connection) == b""
    assert world.reports == []


def test_a_hundred_foreign_connections_do_not_take_a_hundred_threads(world: World, hasty: None) -> None:
    before = threading.active_count()
    with ExitStack() as stack:
        strangers = [stack.enter_context(closing(world.socket())) for _ in range(100)]
        assert until_closed(strangers[-1]) in (b"", b"(reset)")
        assert threading.active_count() <= before + CONNECTIONS_MAX
        for stranger in strangers:
            assert until_closed(stranger) in (b"", b"(reset)")
    eventually(lambda: threading.active_count() <= before, BOUND_SECONDS)  # no thread stays with a stranger
    assert world.post(b"room again")[0] == 204


def test_foreign_clients_that_hold_all_connections_do_not_block_a_report(world: World) -> None:
    with ExitStack() as stack:
        for _ in range(3 * CONNECTIONS_MAX):
            stack.enter_context(closing(world.socket()))
        assert world.post(b"2")[0] == 204
    assert world.reports == [b"2"]


def test_stopping_waits_for_no_client(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.receiver.start()
    with closing(world.socket()) as silent:
        assert world.post(b"1")[0] == 204
        began = time.monotonic()
        world.receiver.stop()
        assert time.monotonic() - began < receive.SILENT_SECONDS / 2
        assert until_closed(silent) == b""
    world.receiver.stop()


def test_an_error_in_the_handler_is_logged_answered_as_ours_and_the_next_report_is_accepted(world, monkeypatch):
    told: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", told.append)

    def broken(body: bytes) -> None:
        raise OSError("disk full")

    world.says = broken
    assert world.post(b"1")[0] == 500
    world.says = lambda body: None
    assert world.post(b"2")[0] == 204
    world.receiver.stop()
    assert [str(args.exc_value) for args in told] == ["on_report must return its refusal, not raise"]
