"""The agent of every node that does not lead: keeps a connection to the leader, and carries out its orders."""

from __future__ import annotations

import errno
import json
import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ddpjob_core.budget import Grant
from ddpjob_core.failures import RESUMABLE_EXIT_CODE as RESUMABLE
from ddpjob_core.failures import Failure
from ddpjob_core.members import Members
from ddprun.asking import FOLLOWER_SECONDS, LEADERLESS_SECONDS
from ddprun.calls import ChildCall
from ddprun.core.leader_state import EndOrder
from ddprun.environment import Life
from ddprun.leader import HEARTBEAT_SECONDS, SILENT_SECONDS, clock_of, line_of
from ddprun.node import say
from ddprun.wire import Link, Refused, job_key

if TYPE_CHECKING:
    from ddprun.agent import Agent
    from ddprun.core.deadlock import Position
    from ddprun.core.stall_monitor import StallReport

POSITIONS_MAX = 64
WAITS_BYTES_MAX = 1 << 15  # half of a line's limit; a longer answer omits what ranks wait in, so no deadlock is found
FAILURES_MAX = 24
RETRY_SECONDS, RETRY_SECONDS_MAX = 0.05, 1.0
CONNECT_SECONDS, LOOKUP_SECONDS = 10.0, 60.0
LOG_WAIT_AFTER_SECONDS = 30.0  # pods start within seconds of each other, so shorter waits are normal


class Follower:
    """The connection to the leader."""

    leads = False

    def __init__(self, agent: Agent, generation: int = -1) -> None:
        """generation: the last generation in which this node took part."""
        self._agent, self._options = agent, agent.options
        self._link: Link | None = None
        self._welcome = False
        self._connecting: socket.socket | None = None  # a connection in progress
        self._lookup = ChildCall(agent, self._resolved)  # resolves the leader's name
        self._addresses: list[tuple[int, Any]] = []
        self._generation = generation
        self._checking = False  # True if the last generation is a pre-flight
        self._disconnected_since = time.monotonic()
        self._retry_at, self._pause = 0.0, RETRY_SECONDS
        self._connect_until = 0.0
        self._heard_at = self._heartbeat_at = 0.0
        self._done = False  # True if all our ranks have ended with 0
        self._is_spare = False  # True if the leader has said that this node is a spare
        self._wait_logged = False
        self._was_ready = False  # True if the leader knows that ranks could start here at once

    @property
    def ask_seconds(self) -> float:
        """Seconds between two requests to the operator for the leader's address; fewer while the leader is lost."""
        is_lost = self._link is None and (self._generation >= 0 or not self._agent.leader.term)
        return LEADERLESS_SECONDS if is_lost else FOLLOWER_SECONDS

    @property
    def deadline(self) -> float | None:
        """Time of the next call of `tick`; None if none is due."""
        if self._link is not None:
            return min(self._heartbeat_at, self._heard_at + SILENT_SECONDS)
        give_up = self._disconnected_since + self._options.join_seconds
        if not (self._agent.settled and self._agent.leader.term):
            return give_up
        if self._lookup.is_running:
            return min(give_up, self._lookup.until)
        return min(give_up, self._connect_until if self._connecting else self._retry_at)

    def begin(self, now: float) -> None:
        self._disconnected_since = now
        self.tick(now)

    def failed(self, failures: list[Failure], _now: float) -> None:
        self._send({**self._event("failed"), "failures": _encoded(failures), "clock": self._agent.node.clock})

    def stopped(self, failures: list[Failure], _now: float) -> None:
        node = self._agent.node
        about = {"ended": node.ended_well, "inMemory": node.step_in_memory, "lacksProgram": node.lacks_program}
        self._send({**self._event("stopped"), "failures": _encoded(failures), **about})

    def finished(self, _now: float) -> None:
        from ddprun.core import rank_ends

        self._done, node = not self._checking, self._agent.node
        left = {} if self._checking else rank_ends.as_message(node.end_of_ranks())
        self._send({**self._event("finished"), "ended": node.ended_well, "left": left})

    def stood(self, report: StallReport, _now: float) -> None:
        self._send({**self._event("stood"), "word": report})

    def answered(self, report: StallReport, positions: Sequence[Position], _now: float) -> None:
        """Send the positions of the ranks that are furthest behind, as many as fit into one line of the protocol."""
        behind = sorted(positions, key=lambda p: (p.sequence, p.step))[:POSITIONS_MAX]
        lines = [line_of(position) for position in behind]
        if len(json.dumps(lines)) > WAITS_BYTES_MAX:
            lines = [line_of(position._replace(waits=None)) for position in behind]
        self._send({**self._event("answered"), "word": report, "positions": lines})

    def termination_requested(self, _now: float) -> None:
        """Report a requested termination to the leader. This agent ends after its ranks."""
        self._send({"terminating": self._agent.termination_signal})
        if self._agent.settled:
            self._agent.end(self._agent.termination_code(), None)

    def granted(self, _grant: Grant) -> None:
        """Do nothing: only the leader restarts ranks."""

    def rerun(self, _now: float) -> None:
        """Do nothing: only the agent of node 0 gets RERUN_SIGNAL."""

    def tick(self, now: float) -> None:
        if self._link is None:
            if self._agent.settled and self._agent.is_appointed:
                self._agent.lead(self._generation, now)
            elif self._agent.code is None:
                self._reconnect(now)
        elif self._welcome and not self._was_ready and self._agent.node.can_start:
            self._was_ready = True
            self._send({"ready": 1})
        elif now > self._heard_at + SILENT_SECONDS:
            self._disconnect(f"it has been silent for {SILENT_SECONDS:g} s", now)
        elif now >= self._heartbeat_at:
            self._heartbeat_at = now + HEARTBEAT_SECONDS
            self._send({"heartbeat": 1})

    # ---- with a leader -------------------------------------------------------------------------------------

    def _receive(self) -> None:
        assert self._link is not None, "only a link is received from"
        self._heard_at = now = time.monotonic()
        try:
            for message in self._link.receive():
                if self._agent.code is None:
                    self._handle(message, now)
        except (Refused, KeyError, TypeError, ValueError, ArithmeticError, AssertionError) as error:
            self._disconnect(str(error), time.monotonic())

    def _handle(self, message: dict[str, Any], now: float) -> None:
        if "welcome" in message:
            self._welcomed(message)
        elif "start" in message:
            order = message["start"]
            members = Members.read(str(order["members"]))
            if self._options.place not in members:
                raise ValueError(f"this node is not among the members {members.text}")
            host, port = str(order["host"]), int(order["port"])
            checks, turn = order.get("preflight") is True, int(order["turn"])
            life = Life(int(order["generation"]), members, host, port, checks, turn)
            self._generation, self._checking, self._done = life.generation, life.preflight, False
            self._is_spare = False
            self._agent.start(life)
        elif "spare" in message:
            if not self._is_spare:
                say("the other nodes train; this one is a spare, and takes the place of one that is lost")
            self._is_spare = True
        elif "stop" in message:
            stop = message["stop"]
            if stop["generation"] == self._generation:
                self._done = False  # ranks that ended with 0 start again, too
                self._agent.stop(now, patient=stop["patient"] is True, furthest=clock_of(stop))
        elif "ask" in message or "over" in message:
            self._watch(message, now)
        elif "end" in message:
            self._end(message["end"])

    def _welcomed(self, message: dict[str, Any]) -> None:
        self._welcome, self._wait_logged, self._pause = True, False, RETRY_SECONDS
        if message.get("joins") is not None:
            say(f"the other nodes train; this one joins them in {max(1.0, float(message['joins'])):.0f} s")
        generation = int(message["generation"])
        if generation > self._generation:
            self._agent.members = Members()  # this node was not a member, so no failed rank is on this node
        # If this leader is lost before it starts ranks here, the next leader must still learn of its generation.
        self._generation = max(self._generation, generation)
        if self._agent.termination_signal:
            self._send({"terminating": self._agent.termination_signal})

    def _watch(self, message: dict[str, Any], now: float) -> None:
        (order, about), *_ = message.items()
        if about["generation"] != self._generation:
            return None
        watching = self._agent.watching
        return watching.ask(now, quiet=about.get("quiet") is True) if order == "ask" else watching.others_have_ended()

    def abandon(self) -> None:
        self._agent.end(RESUMABLE, None)

    def _end(self, said: dict[str, Any]) -> None:
        failure = said["failure"]
        order = EndOrder(int(said["code"]), None if failure is None else Failure.from_dict(failure), "")
        assert self._link is not None, "the leader said so"
        self._agent.unwatch(self._link.fileno())
        self._link.close()
        self._link = None
        self._agent.end(self._agent.own_code(order), order.failure, ended=True)

    def _event(self, name: str) -> dict[str, Any]:
        return {"event": name, "generation": self._generation, "step": self._agent.node.furthest_step}

    def _send(self, message: dict[str, Any]) -> None:
        if self._link is not None and self._welcome:  # before the welcome the leader is not authenticated
            try:
                self._link.send(message)
            except Refused as error:
                self._disconnect(str(error), time.monotonic())

    def _disconnect(self, why: str, now: float) -> None:
        """End the connection and all ranks: without a leader no rank may run, because the others may have restarted."""
        if self._link is None:
            return
        known = self._welcome
        self._agent.unwatch(self._link.fileno())
        self._link.close()
        self._link, self._welcome = None, False
        if known:
            say(f"node {self._agent.leader.place} is lost ({why}); waiting for it for {self._options.join_seconds:g} s")
            self._disconnected_since = now
        self._retry(now)
        self._agent.stop(now, patient=bool(self._agent.termination_signal) or self._agent.node.exit_code == RESUMABLE)

    # ---- without a leader ----------------------------------------------------------------------------------

    def _reconnect(self, now: float) -> None:
        if now >= self._disconnected_since + self._options.join_seconds:
            say(f"{self._leader()} was not reached for {self._options.join_seconds:g} s")
            self._agent.node.end()
            # ended=True: the other pods give up too, so a replacement of this pod alone would find no peers.
            # In an elastic job `ended` is False: perhaps only this node cannot reach node 0, and the others train on.
            return self._agent.end(0 if self._done else RESUMABLE, None, ended=not self._options.is_elastic)
        if not self._wait_logged and now >= self._disconnected_since + LOG_WAIT_AFTER_SECONDS:
            self._wait_logged = True
            say(f"waiting for {self._leader()}")
        self._lookup.tick(now)
        if self._connecting is not None:
            if now >= self._connect_until:
                self._cancel(now)
        elif self._agent.settled and self._agent.leader.term and now >= self._retry_at and not self._lookup.is_running:
            self._look_up(now)
        return None

    def _leader(self) -> str:
        leader = self._agent.leader
        if not leader.term:
            return "DDPJOB_STATUS_URL, which knows who leads,"
        return f"node {leader.place} at {leader.host}:{leader.port}"

    def leave(self) -> int:
        """Stop following this leader, because another agent was appointed. Return the last generation."""
        if self._link is not None:
            self._agent.unwatch(self._link.fileno())
            self._link.close()
            self._link = None
        self._addresses = []
        self._cancel(0.0)
        return self._generation

    def _look_up(self, now: float) -> None:
        """Resolve the name in a child process, because it may take half a minute and SIGTERM must not wait."""
        host, port = self._agent.leader.host, self._agent.leader.port

        def addresses() -> bytes:
            try:
                found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            except OSError:  # the name does not resolve yet
                return b""
            return json.dumps([(family, address) for family, _, _, _, address in found]).encode()

        try:
            self._lookup.begin(addresses, now, LOOKUP_SECONDS)
        except OSError:  # no process can be created now
            self._retry(now)

    def _resolved(self, said: bytes, now: float) -> None:
        try:
            self._addresses = [(family, tuple(address)) for family, address in json.loads(said)]
        except ValueError:  # there is no answer
            return self._retry(now)
        return self._connect(now)

    def _connect(self, now: float) -> None:
        """Connect to the next address."""
        if not self._addresses:
            return self._retry(now)
        family, address = self._addresses.pop(0)
        try:
            self._connecting = socket.socket(family, socket.SOCK_STREAM)
        except OSError:  # for example an IPv6 address on a machine without IPv6
            return self._connect(now)
        self._connecting.setblocking(False)
        self._connect_until = now + CONNECT_SECONDS
        if self._connecting.connect_ex(address) not in (0, errno.EINPROGRESS):
            return self._cancel(now)
        return self._agent.watch(self._connecting.fileno(), self._connected, write=True)

    def _connected(self) -> None:
        now = time.monotonic()
        assert self._connecting is not None, "a connection is being made"
        if self._connecting.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0:
            return self._cancel(now)
        connection, self._connecting = self._connecting, None
        self._agent.unwatch(connection.fileno())
        self._was_ready = self._agent.node.can_start
        about = {
            "ready": self._was_ready,
            "preflight": self._options.preflight and self._generation < 0,
            "nodes": self._options.nodes,
            "least": self._options.least,
            "nproc": self._options.nproc,
            "generation": self._generation,
            "term": self._agent.leader.term,
            "replacement": self._options.replacement,
            "left": self._agent.environ.get("DDPJOB_RESTARTS_LEFT", ""),
        }
        key = job_key(self._options.run_id, self._agent.environ)
        self._link = Link(connection, key, node=self._options.place, about=about)
        self._heard_at, self._heartbeat_at = now, now + HEARTBEAT_SECONDS
        return self._agent.watch(connection.fileno(), self._receive)

    def _cancel(self, now: float) -> None:
        self._lookup.abandon()
        if self._connecting is not None:
            self._agent.unwatch(self._connecting.fileno())
            self._connecting.close()
            self._connecting = None
            return self._connect(now)
        return self._retry(now)

    def _retry(self, now: float) -> None:
        self._retry_at = now + self._pause
        self._pause = min(2 * self._pause, RETRY_SECONDS_MAX)


def _encoded(failures: Sequence[Failure]) -> list[dict[str, Any]]:
    """Encode the first failures only, because the others usually have the same cause."""
    return [failure.brief().as_dict() for failure in failures[:FAILURES_MAX]]
