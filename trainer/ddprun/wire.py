"""The protocol between two agents: one JSON object per line, with proof that an agent of this job sent it.

    leader:  {"ddprun": 1, "nonce": "…"}
    node:    <mac> {"node": 3, "nonce": "…"}      and then both:      <mac> {…}

A mac is HMAC-SHA256 over direction, line number and text. Its key is derived from the job's key, both nonces and the
node. So repeated lines, and lines from another job, connection or position, are refused. The job's key is known to its
pods: DDPJOB_AGENT_KEY, else the run id, which contains the job's uid. It keeps out other machines and agents of other
jobs, but nobody who may read the job's pods through the API. Nothing is encrypted. An intruder can start and stop
ranks; no line contains a command or a path.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import socket
from collections.abc import Mapping
from typing import Any

LINE_BYTES_MAX = 1 << 16
GREETING_BYTES_MAX = 1024  # limit of a line before the sender is authenticated
VERSION = 1


class Refused(Exception):  # noqa: N818 - the end of the other agent is not an error
    """The other end has closed the connection, or is no agent of this job."""


def job_key(run_id: str, environ: Mapping[str, str]) -> bytes:
    """Return the key that the agents of this job share."""
    secret = environ.get("DDPJOB_AGENT_KEY") or f"{environ.get('DDPJOB_UID', '')}/{run_id}"
    return hashlib.sha256(b"ddprun/" + secret.encode()).digest()


class Link:
    """One end of a connection. Call `receive` when it is readable."""

    def __init__(
        self, connection: socket.socket, key: bytes, *, node: int | None, about: Mapping[str, Any] | None = None
    ) -> None:
        """node: number of this node; None on the leader. about: sent with the greeting."""
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection, self._key = connection, key
        self.node = node  # number of this node; on the leader, number of the node at the other end
        self._leads, self._about = node is None, about or {}
        self._nonce = os.urandom(16).hex()
        self._session: bytes | None = None
        self._sent = self._heard = 0
        self._unread, self._unsent = b"", b""
        if self._leads:
            self._queue(json.dumps({"ddprun": VERSION, "nonce": self._nonce}).encode())

    @property
    def known(self) -> bool:
        """True if the other end has proved that it belongs to the job."""
        return self._heard > 0

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message now, or later if the other end is slow to read. Raise Refused if it never reads."""
        text = json.dumps(message).encode()
        assert self._session is not None, "no message is sent before the greeting"
        assert len(text) < LINE_BYTES_MAX, "a line is short"
        self._queue(self._mac(self._leads, self._sent, text) + b" " + text)
        self._sent += 1

    def receive(self) -> list[dict[str, Any]]:
        """Return new messages. Raise Refused at the end, and for anything that no agent of this job sends."""
        try:
            data = self._connection.recv(LINE_BYTES_MAX)
        except BlockingIOError:
            return []
        except OSError as error:
            raise Refused(str(error)) from None
        if not data:
            raise Refused("closed")
        *lines, self._unread = (self._unread + data).split(b"\n")
        messages = [message for line in lines if (message := self._read(line)) is not None]
        if len(self._unread) > (LINE_BYTES_MAX if self.known else GREETING_BYTES_MAX):
            raise Refused("a line without end")
        return messages

    def _queue(self, line: bytes) -> None:
        """Add a line to the unsent data, and send as much as possible. Raise Refused if the other end has closed."""
        self._unsent += line + b"\n"
        try:
            while self._unsent:
                self._unsent = self._unsent[self._connection.send(self._unsent) :]
        except BlockingIOError:
            if len(self._unsent) > 16 * LINE_BYTES_MAX:
                raise Refused("it does not read") from None
        except OSError as error:
            raise Refused(str(error)) from None

    def close(self) -> None:
        self._connection.close()

    def shut(self) -> None:
        """Stop sending; what was sent still arrives."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def _read(self, line: bytes) -> dict[str, Any] | None:
        if self._session is None and not self._leads:
            greeting = _object(line)
            if greeting.get("ddprun") != VERSION or not isinstance(greeting.get("nonce"), str):
                raise Refused("no ddprun of this version answers")
            assert self.node is not None, "the node's own end knows which it is"
            self._begin(greeting["nonce"], self._nonce, self.node)
            self.send({**self._about, "node": self.node, "nonce": self._nonce})
            return None
        mac, _, text = line.partition(b" ")
        if self._session is None:
            if len(line) > GREETING_BYTES_MAX:
                raise Refused("a long greeting")
            answer = _object(text)
            node, nonce = answer.get("node"), answer.get("nonce")
            if type(node) is not int or not isinstance(nonce, str):
                raise Refused("no greeting")
            self._begin(self._nonce, nonce, node)
            self.node = node
        if not hmac.compare_digest(mac, self._mac(not self._leads, self._heard, text)):
            raise Refused("not an agent of this job: PET_RDZV_ID, DDPJOB_UID or DDPJOB_AGENT_KEY differ")
        self._heard += 1
        return _object(text)

    def _begin(self, leaders: str, nodes: str, node: int) -> None:
        # Before authentication a nonce may be any text: JSON allows half of a surrogate pair, but UTF-8 does not.
        both = f"{leaders}/{nodes}/{node}".encode(errors="surrogatepass")
        self._session = hmac.digest(self._key, both, "sha256")

    def _mac(self, from_leader: bool, number: int, text: bytes) -> bytes:
        assert self._session is not None, "the greeting made the key"
        sender = b"leader" if from_leader else b"node"
        return hmac.digest(self._session, b"%s/%d/%s" % (sender, number, text), "sha256").hex().encode()


def _object(text: bytes) -> dict[str, Any]:
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        raise Refused("not JSON") from None
    if not isinstance(read, dict):
        raise Refused("not an object")
    return read
