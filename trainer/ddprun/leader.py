"""The leader's side of the group: passes events of all nodes to `LeaderState`, and sends its orders to all nodes."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from ddpjob_core.budget import Budget, Grant
from ddpjob_core.failures import RESUMABLE_EXIT_CODE as RESUMABLE
from ddpjob_core.failures import Failure
from ddpjob_core.findings import NamedFinding
from ddprun import ports
from ddprun.asking import LEADER_SECONDS
from ddprun.core import deadlock
from ddprun.core.deadlock import Position
from ddprun.core.generation import Ended
from ddprun.core.leader_state import STANDS, Ask, EndOrder, LeaderState, Over, Stand, StartOrder, Stop
from ddprun.core.stall_monitor import StallReport
from ddprun.environment import Life
from ddprun.node import say
from ddprun.posting import Posting

if TYPE_CHECKING:
    from ddprun.agent import Agent
    from ddprun.core.rank_ends import NodeEnd
    from ddprun.wire import Link

HEARTBEAT_SECONDS = 5.0
RECALL_SECONDS = 5.0  # how long an appointed leader waits for nodes of the last generation; later ones stop all ranks
SILENT_SECONDS = 30.0  # after six missed heartbeats an agent counts as lost
GREETING_SECONDS = 5.0
UNAUTHENTICATED_MAX = 64
DRAIN_SECONDS = 2.0


class Leader:
    """The connections to all other nodes, and the decisions of `LeaderState`."""

    leads = True
    ask_seconds = LEADER_SECONDS

    def __init__(self, agent: Agent, generation: int = -1) -> None:
        """generation: the last generation in which this node took part under another leader."""
        options, grant = agent.options, agent.leader.grant
        self._agent, self._options = agent, options
        self._generation = generation
        self._lead = LeaderState(
            options.places,
            options.budget if grant is None else Budget.of(grant, options.budget.max_restarts),
            options.join_seconds,
            time.monotonic(),
            nproc=options.nproc,
            least=options.least,
            spares=options.spares,
            last_call_seconds=RECALL_SECONDS if agent.leader.term > 1 else options.last_call_seconds,
            snooze_seconds=options.snooze_seconds,
            policy=options.policy,
            has_operator=options.has_operator,
            preflight=options.preflight,
            furthest_step=0 if grant is None else grant.step,
            dev=options.dev,
            local=options.local,
            leader=options.place,
            turn=agent.turn,
            survivors=agent.leader.survivors(agent.members, has_spares=options.spares > 0),
        )
        self._posting = Posting(agent)
        self._listener: socket.socket | None = None
        self._links: dict[int, Link] = {}  # by node
        self._unauthenticated: dict[Link, float] = {}  # connections not yet authenticated, and when each was opened
        self._refused: set[str] = set()  # refusals already logged, because a refused agent tries again every second
        self._heard_at: dict[int, float] = {}
        self._heartbeat_at = 0.0
        self._held: socket.socket | None = None  # reserves the port of this generation's ranks
        self._late_start: Life | None = None  # start order that was not sent to the other nodes yet
        self._step_in_memory = 0  # step of the complete state that stopped ranks left in memory; 0: none
        self._furthest = 0  # highest CLOCK (ddpjob_core/memory.py) of nodes with a failed rank, in this generation
        self._started_from = 0  # step of the state in memory from which the last generation started
        self._left: dict[int, NodeEnd] = {}  # by node: results of nodes whose ranks have all ended with 0

    @property
    def deadline(self) -> float | None:
        """Time of the next call of `tick`; None if none is due."""
        heartbeat_at = self._heartbeat_at if self._links or self._unauthenticated else None
        times = [at for at in (self._lead.deadline, self._posting.deadline, heartbeat_at) if at]
        return min(times) if times else None

    def begin(self, now: float) -> None:
        if self._options.nodes > 1:
            port = self._agent.leader.port
            assert port is not None, "several nodes have a port to meet at"
            try:
                self._listener = ports.listen(port)
            except OSError as error:
                say(f"cannot listen on port {port} for the other nodes: {error.strerror}")
                # The next attempt gets another port. If this agent was appointed, another agent is appointed.
                return self._agent.end(RESUMABLE, None, ended=self._agent.leader.term <= 1)
            self._agent.watch(self._listener.fileno(), self._accept)
        own, grant = self._options, self._agent.leader.grant
        self._lead.joined(own.place, now, self._generation, own.replacement, grant=grant)
        return self.tick(now)

    def failed(self, failures: list[Failure], now: float) -> None:
        self._reached()
        self._furthest = max(self._furthest, self._agent.node.clock)
        self._lead.failed(self._options.place, failures, now)

    def stopped(self, failures: list[Failure], now: float) -> None:
        self._reached()
        self._step_in_memory = max(self._step_in_memory, self._agent.node.step_in_memory)
        node = self._agent.node
        self._lead.stopped(self._options.place, failures, now, node.ended_well, lacks_program=node.lacks_program)

    def _reached(self, step: int = 0) -> None:
        node = self._agent.node
        self._lead.reached(max(step, node.furthest_step), node.saved_step)

    def finished(self, now: float) -> None:
        self._left[self._options.place] = self._agent.node.end_of_ranks()
        self._lead.finished(self._options.place, now, self._agent.node.ended_well)

    def stood(self, report: StallReport, now: float) -> None:
        self._lead.stood(self._options.place, report, now)

    def answered(self, report: StallReport, positions: Sequence[Position], now: float) -> None:
        self._lead.answered(self._options.place, report, positions, now)

    def termination_requested(self, now: float) -> None:
        self._lead.termination_requested(self._options.place, now)

    def rerun(self, now: float) -> None:
        self._lead.rerun(now)

    def tick(self, now: float) -> None:
        """Carry out the orders of `LeaderState`, and send due heartbeats and reports."""
        self._lead.tick(now)
        if self._links or self._unauthenticated:
            self._send_heartbeats(now)
        self._start_others()
        while self._lead.orders and self._agent.code is None:
            order = self._lead.orders.pop(0)
            if isinstance(order, StartOrder):
                self._start(order)
            elif isinstance(order, Stop):
                self._stop(order, now)
            elif isinstance(order, Ask):
                self._ask(order, now)
            elif isinstance(order, Over):
                self._send(self._lead.members, {"over": {"generation": order.generation}})
                self._agent.watching.others_have_ended()
            elif isinstance(order, EndOrder):
                self._end(order)
            elif isinstance(order, Stand):
                self._stand(order)
            else:
                say(order.why)
                self._go(self._agent.termination_code())
            self._start_others()
        if self._agent.code is None:
            self._posting.tick(now, self._post())

    # ---- orders --------------------------------------------------------------------------------------------

    def _start(self, order: StartOrder) -> None:
        if order.preflight:
            say("pre-flight: the nodes measure each other first")
        elif order.generation > 0:
            why = f": {self._lead.said}" if self._lead.said else ""
            say(f"restart {order.generation}{self._which_nodes(order)}{why}{self._from_where()}")
        elif self._lead.said:
            say(self._lead.said)
        elif (which := self._which_nodes(order)) and not self._lead.is_full:
            say(f"start{which}; the others have not connected")
        try:
            port = self._new_port(order.generation)
        except OSError as error:
            say(f"no port for rank 0: {error}; this node is given up")
            return self.abandon()
        host, turn = self._agent.leader.host, self._agent.turn
        life = Life(order.generation, order.members, host, port, order.preflight, turn)
        self._furthest = 0
        self._left.clear()
        self._late_start = life
        self._start_others()
        return self._agent.start(life)

    def _which_nodes(self, order: StartOrder) -> str:
        """Return for example ` of nodes 0-1,3`, for the log; "" if all nodes take part."""
        return f" of nodes {order.members.text}" if len(order.members) < len(self._lead.nodes.places) else ""

    def _start_others(self) -> None:
        """Send the start order once this node's ranks can begin, or before any later order.

        Otherwise ranks on other nodes look for rank 0's store while node 0 still imports torch. torch then waits up to
        a second before it tries again, so all ranks meet a second later than necessary.
        """
        if (life := self._late_start) is not None and (self._lead.orders or self._agent.node.can_start):
            self._late_start = None
            self._send(life.members, {"start": {**life._asdict(), "members": life.members.text}})
            if self._lead.is_full:  # if not full, nodes that connected meanwhile join later
                self._send(set(self._links) - set(life.members), {"spare": 1})

    def _from_where(self) -> str:
        """Return the expected resume step, as text for the log. The ranks choose later, and report their choice."""
        step, self._step_in_memory = self._step_in_memory, 0
        self._started_from = step
        saved = self._agent.node.saved_step
        if step:
            return f"; step {step} is in memory"
        return f", from step {saved}" if saved else ""

    def _stop(self, order: Stop, now: float) -> None:
        stop = {"generation": order.generation, "patient": order.patient, "clock": self._furthest}
        self._send(order.nodes, {"stop": stop})
        if self._options.place in order.nodes:
            self._agent.stop(now, patient=order.patient, furthest=self._furthest)

    def _ask(self, order: Ask, now: float) -> None:
        timed_out = order.timed_out
        why = "no rank makes progress" if timed_out is None else f"rank {timed_out} waited until its timeout"
        if not order.quiet:
            say(f"{why}: each rank is asked for its position")
        self._send(self._lead.members, {"ask": {"generation": order.generation, "quiet": order.quiet}})
        self._agent.watching.ask(now, quiet=order.quiet)

    def _end(self, order: EndOrder) -> None:
        if order.code != 0:
            say(order.why)
        failure = None if order.failure is None else order.failure.brief().as_dict()
        self._send(list(self._links), {"end": {"code": order.code, "failure": failure}})
        self._drain()
        account = self._account() if order.code != 0 or self._lead.charges.restarts else None
        if order.code == 0 and self._options.is_elastic:  # the members tell the operator to wait for no other node
            account = {**self._account(), "members": self._lead.members.text}
        findings = self._findings() if order.code == 0 else []
        for finding in findings:
            say(finding.message)
        self._agent.end(self._agent.own_code(order), order.failure, ended=True, account=account, findings=findings)
        self._posting.finish(self._post())

    def _stand(self, order: Stand) -> None:
        for finding in self._findings() if order.succeeded else ():
            say(finding.message)
        say(STANDS + order.why)

    def _findings(self) -> list[NamedFinding]:
        from ddprun.core import rank_ends

        return rank_ends.findings(self._left.values(), self._lead.members.world_size(self._options.nproc))

    def abandon(self) -> None:
        self._go(RESUMABLE)

    def granted(self, grant: Grant) -> None:
        self._lead.granted(grant)

    def leave(self) -> int:
        """Stop leading, because another agent was appointed. Return the last generation."""
        for link in list(self._links.values()) + list(self._unauthenticated):
            self._agent.unwatch(link.fileno())
            link.close()
        if self._listener is not None:
            self._agent.unwatch(self._listener.fileno())
            self._listener.close()
        if self._held is not None:
            self._held.close()
        self._posting.abandon()
        return self._lead.generation

    def _go(self, code: int) -> None:
        for link in self._links.values():
            link.shut()
        self._agent.end(code, None, account=self._account() if self._lead.charges.restarts else None)
        self._posting.finish(self._post())

    def _account(self) -> dict[str, Any]:
        """Return the restarts that this agent has charged."""
        step = self._step_in_memory or self._started_from
        return {
            "replacement": self._agent.turn,
            "generation": max(0, self._lead.generation),
            **({"stepInMemory": step} if step else {}),
            "restarts": self._lead.charges.counts,
        }

    def _post(self) -> dict[str, Any] | None:
        """Return the counts of charged restarts for the status receiver, with the failures; None without any."""
        if not self._lead.charges.failures:
            return None
        self._reached()
        failures = list(map(reported, self._lead.charges.failures))
        return {"step": self._lead.charges.furthest_step, "agent": {**self._account(), "failures": failures}}

    def _new_port(self, generation: int) -> int:
        # On a single node the agent needs no port, so rank 0's store gets the requested port first, as with torchrun.
        asked = self._options.port if self._options.nodes == 1 and generation == 0 else None
        if asked is not None:
            return asked
        before, self._held = self._held, ports.hold()  # while the old port is held, the kernel returns another one
        if before is not None:
            before.close()
        return ports.number(self._held)

    def _send(self, nodes: Collection[int], message: dict[str, Any]) -> None:
        for node in nodes:
            link = self._links.get(node)
            if link is not None:
                self._guard(link, lambda link=link: link.send(message))  # type: ignore[misc]

    def _drain(self) -> None:
        """Wait until every agent has read the end order: closing a socket with unread input discards sent data."""
        deadline = time.monotonic() + DRAIN_SECONDS
        for link in self._links.values():
            link.shut()
        while self._links and time.monotonic() < deadline:
            for link in list(self._links.values()):
                self._guard(link, link.receive)
            time.sleep(0.002)

    # ---- events --------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        from ddprun.wire import Link, Refused, job_key

        assert self._listener is not None, "only a listener accepts"
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the client has closed the connection
            return
        if len(self._unauthenticated) >= UNAUTHENTICATED_MAX:
            # Drop a random connection: otherwise a client that opens many would keep the job's agents out.
            self._drop(list(self._unauthenticated)[os.urandom(1)[0] % UNAUTHENTICATED_MAX])
        try:
            link = Link(connection, job_key(self._options.run_id, self._agent.environ), node=None)
        except Refused:
            connection.close()
            return
        self._unauthenticated[link] = time.monotonic()
        self._heartbeat_at = min(self._heartbeat_at or time.monotonic(), time.monotonic() + GREETING_SECONDS)
        self._agent.watch(link.fileno(), lambda: self._receive(link))

    def _receive(self, link: Link) -> None:
        now = time.monotonic()
        for message in self._guard(link, link.receive) or []:
            if link in self._unauthenticated:
                self._guard(link, lambda message=message: self._welcome(link, message, now))  # type: ignore[misc]
            elif self._links.get(link.node or 0) is link:
                self._heard_at[link.node or 0] = now
                self._guard(link, lambda message=message: self._handle(link.node or 0, message, now))  # type: ignore[misc]

    def _welcome(self, link: Link, message: dict[str, Any], now: float) -> None:
        from ddprun.wire import Refused

        if int(message["term"]) > self._agent.leader.term:
            self._agent.asking.ask_soon()
            raise Refused("another agent leads in a later term")
        node, own = link.node, (self._options.least, self._options.nproc)
        nodes, other = int(message["nodes"]), (message.get("least"), message.get("nproc"))
        if node is None or node == self._options.place or not 0 <= node < nodes:
            raise Refused(f"node {node} of {nodes}")
        if other != own:
            say(f"node {node} has --nnodes, --nproc-per-node {other}, but this node {own}: it cannot join")
            raise Refused("another size")
        generation, replacement = int(message["generation"]), int(message.get("replacement", 0))
        grant = Grant.read(message["left"]) if message.get("left") else None
        if self._lead.is_outdated(node, replacement):
            raise Refused(f"pod {replacement} of node {node} is outdated: a newer pod of this node has connected")
        del self._unauthenticated[link]
        if node in self._links:
            self._drop(self._links[node])
        self._start_others()  # pending orders are not for the node that joins now
        self._links[node], self._heard_at[node] = link, now
        present = self._lead.generation
        has_imports, wants_preflight = message.get("ready") is not False, message.get("preflight") is True
        self._lead.joined(
            node,
            now,
            generation,
            replacement,
            nodes=nodes,
            preflight=wants_preflight,
            grant=grant,
            is_ready=has_imports,
        )
        link.send({"welcome": node, "generation": present, "joins": self._lead.joins_in(node, now)})
        if self._lead.state == "running" and self._lead.is_full and node not in self._lead.members:
            link.send({"spare": 1})

    def _handle(self, node: int, message: dict[str, Any], now: float) -> None:
        if "terminating" in message:
            self._lead.termination_requested(node, now)
        if "ready" in message:
            self._lead.ready(node, now)
        if message.get("generation") != self._lead.generation:
            return  # a heartbeat, or a delayed event of an earlier generation
        failures = [of_rank(failure) for failure in message.get("failures", [])][: self._options.nproc]
        event = message.get("event")
        self._reached(int(message.get("step", 0)))
        if event == "failed":
            self._furthest = max(self._furthest, clock_of(message))
            self._lead.failed(node, failures, now)
        elif event == "stopped":
            self._step_in_memory = max(self._step_in_memory, int(message.get("inMemory", 0)))
            lacks = message.get("lacksProgram") is True
            self._lead.stopped(node, failures, now, self._ended(node, message), lacks_program=lacks)
        elif event == "finished":
            from ddprun.core import rank_ends

            self._left[node] = rank_ends.of_message(message.get("left"))
            self._lead.finished(node, now, self._ended(node, message))
        elif event == "stood":
            self._lead.stood(node, stall_report_of(message["word"]), now)
        elif event == "answered":
            positions = [position_of(position) for position in message["positions"]][: self._options.nproc]
            self._lead.answered(node, stall_report_of(message["word"]), positions, now)

    def _ended(self, node: int, message: dict[str, Any]) -> Ended | None:
        """Parse which rank ended with exit code 0, and its step; None if no rank did. Raise TypeError or ValueError."""
        if message.get("ended") is None:
            return None
        rank, step = map(int, message["ended"])
        if self._lead.members.place_of_rank(rank, self._options.nproc) != node or not 0 <= step < 1 << 53:
            raise ValueError(f"rank {rank} of node {node} at step {step}")
        return rank, step

    def _send_heartbeats(self, now: float) -> None:
        if now < self._heartbeat_at:
            return
        self._heartbeat_at = now + HEARTBEAT_SECONDS
        for link, since in list(self._unauthenticated.items()):
            if now > since + GREETING_SECONDS:
                self._drop(link)
        for node, link in list(self._links.items()):
            if now > self._heard_at[node] + SILENT_SECONDS:
                say(f"node {node} has been silent for {SILENT_SECONDS:g} s")
                self._drop(link)
        self._send(list(self._links), {"heartbeat": 1})

    def _guard(self, link: Link, work: Callable[[], Any]) -> Any:
        """Run `work`. An error in `work` closes this connection and affects no other connection."""
        from ddprun.wire import Refused

        try:
            return work()
        except (Refused, KeyError, TypeError, ValueError, ArithmeticError) as error:  # 1e999 overflows int()
            if link in self._unauthenticated and link.node is not None and str(error) not in self._refused:
                self._refused.add(str(error))
                say(f"a connection was refused: {error}")
            self._drop(link)
            return None

    def _drop(self, link: Link) -> None:
        if link.fileno() < 0:
            return
        self._agent.unwatch(link.fileno())
        link.close()
        self._unauthenticated.pop(link, None)
        if link.node is not None and self._links.get(link.node) is link:
            del self._links[link.node]
            self._lead.lost(link.node, time.monotonic())


def reported(failure: Failure) -> dict[str, Any]:
    """Convert a failure for a report. Rank -1 stands for a node whose connection was lost."""
    return {"rank": -1, **failure.brief().as_dict(), "nodeRank": failure.node_rank}


def clock_of(message: dict[str, Any]) -> int:
    """Return the highest CLOCK (ddpjob_core/memory.py) of the sender's ranks.

    Return 0 for an invalid CLOCK: scripts choose their step numbers, and the message's failure must count anyway.
    """
    clock = message.get("clock")
    return clock if type(clock) is int and 0 <= clock < 1 << 53 else 0


def of_rank(written: Any) -> Failure:
    """Parse the failure of a rank on another node. Raise ValueError."""
    failure = Failure.from_dict(written)
    if failure.rank is None or failure.exit_code is None or failure.exit_code <= 0:
        raise ValueError("a failure has a rank and an exitCode")
    return failure


def stall_report_of(written: Any) -> StallReport:
    """Parse the stall report of another node. Raise TypeError or ValueError."""
    level, stalled, seconds, phase, still = written
    return StallReport(int(level), stalled is True, float(seconds), str(phase)[:16], still is True)  # type: ignore[arg-type]  # shown, no more


def position_of(said: Any) -> Position:
    """Parse the position of a rank on another node. Raise KeyError, TypeError or ValueError."""
    rank, step, sequence, op, done, where, answers, idle, apart, shape, waits, ended_after = said
    flags = (answers is True, idle is True, apart is True)
    waits_in = deadlock.waits_of(waits), int(ended_after)
    return Position(
        int(rank), int(step), int(sequence), str(op), done is True, str(where), *flags, str(shape), *waits_in
    )


def line_of(position: Position) -> list[Any]:
    """Convert a position to JSON, the inverse of `position_of`."""
    return [*position._replace(waits=None)[:-2], deadlock.written(position.waits), position.ended_after]
