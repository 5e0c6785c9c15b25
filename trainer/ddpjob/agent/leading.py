"""Node 0's side of the group: carries the events of all nodes to the `Lead`, and its orders to all nodes."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from . import ports
from .environment import Life
from .lead import RESUMABLE, End, Failure, Lead, Start, Stop
from .node import say

if TYPE_CHECKING:
    from .agent import Agent
    from .wire import Link

BEAT_SECONDS = 5.0
SILENT_SECONDS = 30.0  # an agent does nothing but answer: one that is silent for six beats is gone, or its node is
GREETING_SECONDS = 5.0
STRANGERS_MAX = 64
FAREWELL_SECONDS = 2.0
_TEXTS = {"signal": 16, "exception": 500}


class Leading:
    """The group as node 0 has it."""

    def __init__(self, agent: Agent) -> None:
        options = agent.options
        self._agent, self._options = agent, options
        self._lead = Lead(options.nodes, options.budget, options.join_seconds, time.monotonic())
        self._listener: socket.socket | None = None
        self._links: dict[int, Link] = {}  # by node
        self._strangers: dict[Link, float] = {}  # connections that have not shown who they are, and since when
        self._heard_at: dict[int, float] = {}
        self._beat_at = 0.0
        self._held: socket.socket | None = None  # the port of this generation

    @property
    def deadline(self) -> float | None:
        """When `turn` has something to do."""
        times = [at for at in (self._lead.deadline, self._beat_at if self._links or self._strangers else None) if at]
        return min(times) if times else None

    def begin(self, now: float) -> None:
        """Wait for the others."""
        if self._options.nodes > 1:
            assert self._options.port is not None, "several nodes have a port to meet at"
            try:
                self._listener = ports.listen(self._options.port)
            except OSError as error:
                say(f"port {self._options.port}, where the other nodes look for this one: {error.strerror}")
                return self._agent.end(RESUMABLE, None)  # another attempt has another port
            self._agent.watch(self._listener.fileno(), self._accept)
        self._lead.joined(0, now)
        return self.turn(now)

    def failed(self, failures: list[Failure], now: float) -> None:
        """A rank of node 0 has failed."""
        self._lead.failed(0, failures, now)

    def stopped(self, failures: list[Failure], now: float) -> None:
        """No rank of node 0 runs any more."""
        self._lead.stopped(0, failures, now)

    def finished(self, now: float) -> None:
        """All ranks of node 0 have ended with 0."""
        self._lead.finished(0, now)

    def told(self, now: float) -> None:
        """Node 0 was told to end."""
        self._lead.told(now)

    def turn(self, now: float) -> None:
        """Do what the lead orders, and what time asks for."""
        self._lead.tick(now)
        if self._links or self._strangers:
            self._beat(now)
        while self._lead.orders and self._agent.code is None:
            order = self._lead.orders.pop(0)
            if isinstance(order, Start):
                self._start(order)
            elif isinstance(order, Stop):
                self._stop(order, now)
            else:
                self._end(order)

    # ---- orders --------------------------------------------------------------------------------------------

    def _start(self, order: Start) -> None:
        if order.generation > 0:
            say(f"restart {self._lead.restarts}: {self._lead.said}")
        life = Life(order.generation, self._new_port(order.generation))
        self._tell(range(1, self._options.nodes), {"start": {"generation": life.generation, "port": life.port}})
        self._agent.start(life)

    def _stop(self, order: Stop, now: float) -> None:
        self._tell(order.nodes, {"stop": {"generation": order.generation, "patient": order.patient}})
        if 0 in order.nodes:
            self._agent.stop(now, patient=order.patient)

    def _end(self, order: End) -> None:
        if order.code != 0:
            say(order.why)
        self._tell(list(self._links), {"end": {"code": order.code, "failure": order.failure}})
        self._say_farewell()
        self._agent.end(self._agent.own_code(order), order.failure)

    def _new_port(self, generation: int) -> int:
        if self._held is not None:
            self._held.close()
        # A job of one node has nobody to meet: its ranks first get the port that was asked for, as from torchrun.
        asked = self._options.port if self._options.nodes == 1 and generation == 0 else None
        if asked is not None:
            return asked
        self._held = ports.hold()
        return ports.number(self._held)

    def _tell(self, nodes: Collection[int], message: dict[str, Any]) -> None:
        for node in nodes:
            link = self._links.get(node)
            if link is not None:
                self._guard(link, lambda link=link: link.send(message))  # type: ignore[misc]

    def _say_farewell(self) -> None:
        """Until every agent has read the end: closing a socket with unread lines in it takes back what was sent."""
        deadline = time.monotonic() + FAREWELL_SECONDS
        for link in self._links.values():
            link.shut()
        while self._links and time.monotonic() < deadline:
            for link in list(self._links.values()):
                self._guard(link, link.receive)
            time.sleep(0.002)

    # ---- events --------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        from .wire import Link, Refused, job_key

        assert self._listener is not None, "only a listener accepts"
        try:
            connection, _ = self._listener.accept()
        except OSError:  # gone again
            return
        if len(self._strangers) >= STRANGERS_MAX:
            connection.close()
            return
        try:
            link = Link(connection, job_key(self._options.run_id, self._agent.environ), node=None)
        except Refused:
            connection.close()
            return
        self._strangers[link] = time.monotonic()
        self._beat_at = min(self._beat_at or time.monotonic(), time.monotonic() + GREETING_SECONDS)
        self._agent.watch(link.fileno(), lambda: self._hear(link))

    def _hear(self, link: Link) -> None:
        now = time.monotonic()
        for message in self._guard(link, link.receive) or []:
            if link in self._strangers:
                self._guard(link, lambda message=message: self._welcome(link, message, now))  # type: ignore[misc]
            elif self._links.get(link.node or 0) is link:
                self._heard_at[link.node or 0] = now
                self._guard(link, lambda message=message: self._obey(link.node or 0, message, now))  # type: ignore[misc]

    def _welcome(self, link: Link, message: dict[str, Any], now: float) -> None:
        from .wire import Refused

        node, mine = link.node, (self._options.nodes, self._options.nproc)
        theirs = (message.get("nodes"), message.get("nproc"))
        if node is None or not 0 < node < self._options.nodes:
            raise Refused(f"node {node} of {self._options.nodes}")
        if theirs != mine:
            say(f"node {node} has --nnodes, --nproc-per-node {theirs}, node 0 {mine}: it cannot join")
            raise Refused("another size")
        generation = int(message["generation"])
        del self._strangers[link]
        if node in self._links:
            self._drop(self._links[node])
        self._links[node], self._heard_at[node] = link, now
        link.send({"welcome": node})
        self._lead.joined(node, now, generation)

    def _obey(self, node: int, message: dict[str, Any], now: float) -> None:
        if "told" in message:
            self._lead.told(now)
        if message.get("generation") != self._lead.generation:
            return  # a beat, or late news of a generation that is no more
        failures = [checked(failure) for failure in message.get("failures", [])][: self._options.nproc]
        said = message.get("said")
        if said == "failed":
            self._lead.failed(node, failures, now)
        elif said == "stopped":
            self._lead.stopped(node, failures, now)
        elif said == "finished":
            self._lead.finished(node, now)

    def _beat(self, now: float) -> None:
        if now < self._beat_at:
            return
        self._beat_at = now + BEAT_SECONDS
        for link, since in list(self._strangers.items()):
            if now > since + GREETING_SECONDS:
                self._drop(link)
        for node, link in list(self._links.items()):
            if now > self._heard_at[node] + SILENT_SECONDS:
                say(f"node {node} has been silent for {SILENT_SECONDS:g} s")
                self._drop(link)
        self._tell(list(self._links), {"beat": 1})

    def _guard(self, link: Link, work: Callable[[], Any]) -> Any:
        """Whatever goes wrong with a connection ends it, and nothing else."""
        from .wire import Refused

        try:
            return work()
        except (Refused, KeyError, TypeError, ValueError) as error:
            if link in self._strangers and link.node is not None:
                say(f"a connection was refused: {error}")
            self._drop(link)
            return None

    def _drop(self, link: Link) -> None:
        if link.fileno() < 0:
            return
        self._agent.unwatch(link.fileno())
        link.close()
        self._strangers.pop(link, None)
        if link.node is not None and self._links.get(link.node) is link:
            del self._links[link.node]
            self._lead.lost(link.node, time.monotonic())


def checked(failure: Any) -> Failure:
    """A failure as another node tells it, with what is known of its fields. Raises KeyError, TypeError, ValueError."""
    if not (type(failure["rank"]) is int and type(failure["exitCode"]) is int and 0 < failure["exitCode"] < 256):
        raise ValueError("rank and exitCode are numbers")
    texts = {name: str(failure.get(name, ""))[:length] for name, length in _TEXTS.items()}
    flags = {name: failure.get(name) is True for name in ("symptom", "resumable")}
    return {**{k: failure[k] for k in ("rank", "exitCode")}, **texts, **flags, "time": float(failure.get("time", 0.0))}
