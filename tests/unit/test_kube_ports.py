"""The three ports of an operator under every corner case of HTTP/1.1. Any pod of the cluster can reach them. Without
limits, a pod could exhaust both operators' memory or block their liveness probe. The ports run on uvloop, as in the
operator."""

import datetime as dt
import re
import socket
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress

import pytest
from aiohttp.http_parser import DeflateBuffer
from served import Served, until_closed

from ddpjob_operator.kube.api.tokens import BoundPod
from ddpjob_operator.kube.ports import bounded_server
from ddpjob_operator.kube.ports.bounded_server import BoundedServer, Health
from ddpjob_operator.kube.ports.exposition import Exposition, Scrape
from ddpjob_operator.kube.ports.receive import Receiver, Sender
from ddpjob_operator.metrics.meter import Meter, Moment

REPORT = b'{"step": 1}'
NOW = dt.datetime(2031, 3, 5, 7, 11, 13, tzinfo=dt.timezone.utc)


def health() -> BoundedServer:
    return Health(str)


class Large(Meter):
    """Metrics of thousands of jobs, which are larger than the kernel's buffers."""

    def text(self, moment: Moment, *, openmetrics: bool) -> tuple[bytes, str]:
        return b"#" * (1 << 20), "text/plain"


def metrics() -> BoundedServer:
    return Exposition(Large(), lambda: Scrape(Moment(NOW, None, "0.1.0"), []))


def progress() -> BoundedServer:
    async def verify(token: str) -> BoundPod:
        return BoundPod("default", f"digits-1-{token}", token)

    return Receiver(verify, lambda pod: Sender("default", "digits", 0, 1), lambda sender, report: None)


# Port → its factory, the request line without the version, and the status of a good answer.
PORTS: dict[str, tuple[Callable[[], BoundedServer], bytes, int]] = {
    "health": (health, b"GET /healthz", 200),
    "metrics": (metrics, b"GET /metrics", 200),
    "progress": (progress, b"POST /v1/progress", 204),
}


class Port(Served):
    """Sends requests to one of the operator's ports."""

    def __init__(self, name: str) -> None:
        make, self.line, self.good = PORTS[name]
        super().__init__(make())
        self.name, self.pods = name, 0

    def head(self, *lines: bytes, line: bytes | None = None) -> bytes:
        """Return the head of a request, each from another pod, because the rate of reports is limited per pod."""
        self.pods += 1
        token = b"Authorization: Bearer %d" % self.pods
        return b"\r\n".join([line or self.line + b" HTTP/1.1", b"Host: x", token, *lines, b"", b""])

    def good_request(self, *lines: bytes) -> bytes:
        if self.name != "progress":
            return self.head(*lines)
        return self.head(b"Content-Length: %d" % len(REPORT), *lines) + REPORT

    def ask(self, request: bytes) -> tuple[list[int], bytes]:
        """Send a request. Return the statuses of all answers until the port closes the connection, and all bytes."""
        answer = self.raw(request)
        return [int(status) for status in re.findall(rb"(?:^|[\n#])HTTP/1\.[01] (\d{3}) ", answer)], answer

    def serves(self) -> bool:
        """True if the port still answers a good request."""
        return self.ask(self.good_request(b"Connection: close"))[0] == [self.good]


@pytest.fixture(params=PORTS)
def port(request: pytest.FixtureRequest) -> Iterator[Port]:
    yield from serving(request.param)


@pytest.fixture
def progress_port() -> Iterator[Port]:
    yield from serving("progress")


def serving(name: str) -> Iterator[Port]:
    port = Port(name)
    with port.serving():
        yield port


def sized(body: bytes, *lines: bytes) -> Callable[[Port], bytes]:
    return lambda port: port.head(b"Content-Length: %d" % len(body), b"Connection: close", *lines) + body


def chunked(body: bytes, *lines: bytes) -> Callable[[Port], bytes]:
    return lambda port: port.head(b"Transfer-Encoding: chunked", b"Connection: close", *lines) + body


def line(what: bytes) -> Callable[[Port], bytes]:
    return lambda port: port.head(line=what.replace(b"LINE", port.line))


def with_lines(*lines: bytes) -> Callable[[Port], bytes]:
    return lambda port: port.good_request(b"Connection: close", *lines)


def raw(what: bytes) -> Callable[[Port], bytes]:
    return lambda _: what


GOOD, BAD = -1, 400
NOT_SERVED = -2  # 404 or 405
BOMB = zlib.compress(b"\0" * (8 << 20), 9)
# Request → allowed statuses; None: no answer. A GET may have a body, which the port ignores.
CORNERS: dict[str, tuple[Callable[[Port], bytes], set[int | None]]] = {
    **{
        f"a body of 8 MB in {encoding}": (sized(BOMB, b"Content-Encoding: " + encoding.encode()), {GOOD, BAD})
        for encoding in ("deflate", "gzip", "br", "zstd", "gzip, deflate")
    },
    "chunks": (chunked(b"6\r\n" + REPORT[:6] + b"\r\n5\r\n" + REPORT[6:] + b"\r\n0\r\n\r\n"), {GOOD}),
    "chunks of one byte without end": (chunked(b"1\r\nx\r\n" * 100_000), {GOOD, 413, None}),
    "a chunk with an extension": (chunked(b"b;a=b;c\r\n" + REPORT + b"\r\n0\r\n\r\n"), {GOOD}),
    "a chunk of 16 EiB": (chunked(b"ffffffffffffffff\r\nx"), {GOOD, BAD, 413, None}),
    "a chunk of negative size": (chunked(b"-1\r\nx\r\n"), {GOOD, BAD}),
    "trailers without end": (chunked(b"1\r\nx\r\n0\r\n" + b"A: b\r\n" * 100_000), {GOOD, BAD, None}),
    "a chunk that is longer than it says": (chunked(b"1\r\n" + REPORT + b"\r\n0\r\n\r\n"), {GOOD, BAD}),
    "a length and chunks": (
        lambda port: port.head(b"Content-Length: 5", b"Transfer-Encoding: chunked") + b"0\r\n\r\n",
        {BAD},
    ),
    "two lengths": (lambda port: port.head(b"Content-Length: 5", b"Content-Length: 6") + b"123456", {BAD}),
    "a length of 2^64 - 1": (lambda port: port.head(b"Content-Length: 18446744073709551615"), {GOOD, BAD, 413, None}),
    "a length of a megabyte": (lambda port: port.head(b"Content-Length: 1048576") + b"x" * 1048576, {GOOD, 413, None}),
    "a negative length": (lambda port: port.head(b"Content-Length: -1"), {BAD}),
    "an upgrade to a websocket": (
        with_lines(b"Connection: upgrade", b"Upgrade: websocket", b"Sec-WebSocket-Key: x"),
        {GOOD, BAD},
    ),
    "HTTP/2 at once": (raw(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0" * 64), {BAD, None}),
    "HTTP/1.0": (lambda port: port.good_request().replace(b"HTTP/1.1", b"HTTP/1.0"), {GOOD}),
    "TLS": (raw(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x99" * 500), {BAD}),
    "empty lines without end": (raw(b"\r\n" * 1_000_000), {BAD, None}),
    "a request line without end": (raw(b"GET /" + b"a" * 1_000_000), {BAD, None}),
    "a header without end": (lambda port: port.head()[:-2] + b"X: " + b"a" * 1_000_000, {BAD, None}),
    "a header of 16 kB": (with_lines(b"X: " + b"a" * 16_000), {BAD}),
    "headers without end": (lambda port: port.head()[:-2] + b"A: b\r\n" * 200_000, {BAD, None}),
    "a header with a zero": (with_lines(b"X: a\0b"), {BAD}),
    "lines that end with LF alone": (lambda port: port.good_request().replace(b"\r\n", b"\n"), {BAD}),
    "CONNECT with what follows": (
        lambda port: port.head(line=b"CONNECT 10.0.0.1:443 HTTP/1.1") + b"x" * 1_000_000,
        {BAD, NOT_SERVED, None},
    ),
    "TRACE": (line(b"TRACE / HTTP/1.1"), {NOT_SERVED}),
    "another path": (line(b"GET /../../etc/passwd HTTP/1.1"), {NOT_SERVED}),
    "an address of 8 kB": (line(b"GET /" + b"a" * 8000 + b" HTTP/1.1"), {NOT_SERVED}),
}


# All ports share the parser and the limits. Only the port for reports also reads bodies.
@pytest.mark.parametrize("corner", CORNERS)
def test_each_corner_case_of_http_is_answered_once_or_cut_and_the_port_continues(
    progress_port: Port, corner: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (request, expected), port = CORNERS[corner], progress_port
    expanded: list[object] = []
    monkeypatch.setattr(DeflateBuffer, "feed_data", lambda *what: expanded.append(what))
    with monkeypatch.context() as hurried:
        if None in expected:
            for name in ("HEADER_SECONDS", "REQUEST_SECONDS", "IDLE_SECONDS"):
                hurried.setattr(bounded_server, name, 0.3)
        statuses, answer = port.ask(request(port))
    allowed = {port.good if status == GOOD else status for status in expected}
    allowed |= {404, 405} if NOT_SERVED in expected else set()
    assert len(statuses) <= 1, answer[:2000]
    assert (statuses[0] if statuses else None) in allowed
    port.run(port.few())
    assert port.serves()
    assert (expanded, port.errors, caplog.text) == ([], [], "")


def test_a_probe_gets_503_with_the_reason_if_a_restart_would_help(monkeypatch: pytest.MonkeyPatch) -> None:
    why = [""]
    monkeypatch.setitem(PORTS, "health", (lambda: Health(lambda: why[0], lambda: "a remark"), b"GET /healthz", 200))
    for port in serving("health"):
        assert port.ask(port.good_request(b"Connection: close"))[1].endswith(b"\r\n\r\nok; a remark\n")
        why[0] = "queue has ended"
        statuses, answer = port.ask(port.good_request())
        assert (statuses, answer.endswith(b"queue has ended; a remark\n")) == ([503], True)


@pytest.mark.parametrize("method", [b"HEAD", b"GET"])
def test_head_has_the_headers_of_get_and_no_body(port: Port, method: bytes) -> None:
    statuses, answer = port.ask(port.good_request(b"Connection: close").replace(b"GET", method, 1))
    assert statuses == [port.good]
    assert bool(answer.partition(b"\r\n\r\n")[2]) == (port.good == 200 and method == b"GET")


def test_a_sender_that_expects_100_continue_gets_it_or_the_answer_at_once(port: Port) -> None:
    """A client that expects 100 Continue, like curl and Go's, must get it or the answer, because some wait for ever."""
    with closing(port.connect()) as connection:
        connection.sendall(port.head(b"Expect: 100-continue", b"Content-Length: %d" % len(REPORT)))
        if port.name == "progress":
            assert connection.recv(1024) == b"HTTP/1.1 100 Continue\r\n\r\n"
            connection.sendall(REPORT)
        assert connection.recv(1024).startswith(b"HTTP/1.1 %d " % port.good)


def test_requests_on_one_connection_are_answered_in_order(port: Port) -> None:
    """Pipelined requests, which some proxies send, must be answered in order."""
    both = port.good_request() + port.good_request(b"Connection: close")
    assert port.ask(both)[0] == [port.good, port.good]


def test_pipelined_requests_take_no_more_memory_than_one(port: Port) -> None:
    """If 30 connections of a pod each send 32 requests with 128 headers of 8 kB, memory must not grow to 1.3 GB."""
    large = port.head(*[b"X-%d: %s" % (number, b"a" * 8000) for number in range(100)]) * 10
    with ExitStack() as stack:
        before = resident_bytes()
        for _ in range(30):
            connection = stack.enter_context(closing(port.connect()))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connection.settimeout(0.05)
            with suppress(OSError):
                connection.sendall(port.good_request() + large)
        assert port.serves()
        assert resident_bytes() - before < 50 << 20


@pytest.mark.parametrize("slow", ["nothing", "a head", "a body", "a second head", "no reading"])
def test_a_slow_client_is_disconnected(port: Port, slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEADER_SECONDS", "REQUEST_SECONDS", "IDLE_SECONDS"):
        monkeypatch.setattr(bounded_server, name, 0.3)
    sent = {
        "nothing": b"",
        "a head": port.head()[:20],
        "a body": port.head(b"Content-Length: 11") + b"{",
        "a second head": port.good_request() + port.head()[:20],
        "no reading": port.good_request() * 2,
    }
    with closing(port.connect()) as connection:
        connection.sendall(sent[slow])
        if slow != "no reading":
            until_closed(connection)
        port.run(port.few())


@pytest.mark.parametrize("attacker", ["127.0.0.1", "127.0.0.9"])
def test_a_client_that_opens_endless_connections_locks_out_nobody(port: Port, attacker: str) -> None:
    """A client that opens connections endlessly must not lock out the kubelet, which would restart the operator."""
    with ExitStack() as stack:
        for number in range(400):
            connection = stack.enter_context(closing(port.connect(attacker)))
            with suppress(ConnectionError):  # the port has closed this connection to accept a newer one
                connection.sendall([b"", b"GET", port.head()[:-2]][number % 3])
            if number % 100 == 99:
                assert port.serves()
        assert len(port.server.connections) <= bounded_server.CONNECTIONS_PER_ADDRESS_MAX + 1


def test_all_addresses_together_have_a_limit_and_the_probe_still_connects(port, monkeypatch):
    monkeypatch.setattr(type(port.server), "connections_max", 100)
    with ExitStack() as stack:
        for number in range(600):
            stack.enter_context(closing(port.connect(f"127.0.1.{number % 30 + 1}")))
            if number % 100 == 99:
                assert port.serves()
        assert len(port.server.connections) <= 100


def test_a_peer_that_disconnects_in_the_middle_leaves_nothing(port: Port, caplog: pytest.LogCaptureFixture) -> None:
    for sent in (b"", b"GET", port.head(b"Content-Length: 11") + b"{", port.good_request()):
        with closing(port.connect()) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # close() sends a reset
            connection.sendall(sent)
    port.run(port.few())
    assert port.serves()
    assert (port.errors, caplog.text) == ([], "")


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096
