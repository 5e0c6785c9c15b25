"""The protocol between agents rejects foreign processes, whatever they send."""

import json
import random
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from ddprun.wire import LINE_BYTES_MAX, Link, Refused, job_key

KEY = job_key("uid-1", {"DDPJOB_UID": "uid"})


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


def met(pair: Any, theirs: bytes = KEY) -> tuple[Link, Link]:
    leader, node = Link(pair[0], KEY, node=None), Link(pair[1], theirs, node=3, about={"nproc": 2})
    assert node.receive() == []
    return leader, node


def test_both_ends_receive_messages_in_order(pair: Any) -> None:
    leader, node = met(pair)
    (hello,) = leader.receive()
    assert (hello["node"], hello["nproc"], leader.node) == (3, 2, 3)
    leader.send({"start": 1})
    leader.send({"stop": 1})
    assert node.receive() == [{"start": 1}, {"stop": 1}]
    node.send({"said": "stopped"})
    assert leader.receive() == [{"said": "stopped"}]


@pytest.mark.parametrize(
    "other",
    [job_key("uid-2", {"DDPJOB_UID": "uid"}), job_key("uid-1", {}), job_key("uid-1", {"DDPJOB_AGENT_KEY": "secret"})],
    ids=["another attempt", "another job", "another secret"],
)
def test_an_agent_with_another_key_is_refused(pair: Any, other: bytes) -> None:
    leader, _ = met(pair, other)
    with pytest.raises(Refused, match="not an agent of this job"):
        leader.receive()


def test_a_leader_with_another_key_is_ignored(pair: Any) -> None:
    """A leader with another key, for example at node 0's old address, must not be able to start ranks."""
    leader, node = met(pair, job_key("uid-2", {}))
    leader._session = b"guessed"
    leader.send({"start": {"generation": 1, "port": 1}})
    with pytest.raises(Refused):
        node.receive()


@pytest.mark.parametrize("change", ["repeat", "swap", "alter", "reflect"])
def test_a_modified_line_ends_the_connection(pair: Any, change: str) -> None:
    leader, node = met(pair)
    leader.receive()
    leader.send({"stop": 1})
    leader.send({"stop": 2})
    one, two, _ = pair[1].recv(4096).split(b"\n")
    sent = {"repeat": [one, one], "swap": [two, one], "alter": [one.replace(b": 1", b": 9")], "reflect": [one]}[change]
    victim, through = (leader, pair[1]) if change == "reflect" else (node, pair[0])
    through.sendall(b"\n".join(sent) + b"\n")
    with pytest.raises(Refused):
        victim.receive()


def test_garbage_is_refused_without_another_error(pair: Any) -> None:
    chance = random.Random(7)
    texts = [
        b"",
        b"GET / HTTP/1.1\r",
        b"[]",
        b"x " + b"[" * 500,
        b"a {}",
        b"\x16\x03\x01",
        b'a {"node": 1}',
        b"\xff" * 600,
    ]
    texts += [b'a {"node": true, "nonce": ""}', b'a {"node": 1, "nonce": "x"}']
    for text in [*texts, *(chance.randbytes(300) for _ in range(200))]:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            leader = Link(ours, KEY, node=None)
            theirs.sendall(text + b"\n")
            with pytest.raises(Refused):
                leader.receive()
            assert not leader.known


def test_a_foreign_client_cannot_make_the_agent_store_a_long_line(pair: Any) -> None:
    leader = Link(pair[0], KEY, node=None)
    pair[1].sendall(b"x" * 1100)
    with pytest.raises(Refused, match="without end"):
        leader.receive()


def test_an_agent_cannot_make_another_store_a_long_line(pair: Any) -> None:
    leader, _ = met(pair)
    leader.receive()
    pair[1].setblocking(True)
    pair[1].sendall(b"x" * (LINE_BYTES_MAX // 2))
    leader.receive()
    pair[1].sendall(b"x" * LINE_BYTES_MAX)
    with pytest.raises(Refused, match="without end"):
        leader.receive()


def test_the_end_of_the_connection_is_reported(pair: Any) -> None:
    leader, _ = met(pair)
    leader.receive()
    pair[1].close()
    with pytest.raises(Refused):
        leader.receive()


def test_no_message_shows_the_key(pair: Any) -> None:
    Link(pair[0], KEY, node=None)
    greeting = json.loads(pair[1].recv(4096))
    assert set(greeting) == {"ddprun", "nonce"}
    assert KEY.hex() not in str(greeting)
