"""A group whose nodes come, go and fail at random, led by `LeaderState`, and rules that must hold whatever happens.

Nodes and time are modelled. `Walk.step` does something at random; after `Walk.calm_down` nothing fails.
"""

import random
from dataclasses import dataclass, field
from typing import Any

from ddpjob_core.budget import NO_PROGRESS_MAX, Budget
from ddpjob_core.failures import RESUMABLE_EXIT_CODE as RESUMABLE
from ddpjob_core.failures import Failure
from ddpjob_core.members import Members
from ddprun.core import leader_state

JOIN_SECONDS = 600.0
RESTARTS = 1000  # large, because these tests are not about budgets
BACK_OFF_SECONDS = 300.0
STABLE_SECONDS = 600.0


class Wrong(AssertionError):  # noqa: N818 - what a walk has found
    """A rule of the group was broken."""


@dataclass
class Node:
    linked_at: float | None = None
    pod: int = 0
    """Number of the node's pod."""
    generation: int = -1
    """The last generation of which the node had ranks."""
    has_ranks: bool = False
    finished: bool = False
    stopping: bool = False
    """True if the node was ordered to stop its ranks, and has not answered."""
    told: bool = False
    ready: bool = False
    """True if its ranks would start at once: it has imported torch."""
    failed: bool = False
    departures: list[float] = field(default_factory=list)

    @property
    def is_here(self) -> bool:
        return self.linked_at is not None

    def may_join_at(self, snooze: float) -> float:
        """Return when this node may interrupt the others. The delay doubles each time that the node leaves soon."""
        assert self.linked_at is not None
        since, count = self.linked_at, 0
        for at in reversed(self.departures):
            if since >= at + STABLE_SECONDS:
                break
            since, count = at, count + 1
        return self.linked_at + min(snooze * 2**count, STABLE_SECONDS)


class Walk:
    """A job whose nodes come, go and fail at random."""

    def __init__(self, seed: int, module: Any = leader_state) -> None:
        """module: the module of LeaderState, or a copy of it with a deliberate bug."""
        self.random = random.Random(seed)
        self.story: list[str] = []
        self.module = module
        self.nodes = [Node() for _ in range(self.random.randint(1, 6))]
        self.spares = self.random.choice([0, self.random.randrange(len(self.nodes))])
        self.size = len(self.nodes) - self.spares
        self.least = self.random.randint(1, self.size)
        self.snooze, self.last_call = self.random.choice([0.0, 30.0]), self.random.choice([0.0, 30.0])
        self.has_operator = self.random.random() < 0.7
        self.now = 1000.0
        self.over = False
        self.members: dict[int, Members] = {}
        """Members by generation."""
        self.shrinks = self.growths = 0
        self._step = self._failures = 0
        self._stop_has_reason = False
        self._charged_before: Any = None
        """The counts when ranks were stopped for nodes that join; None if they were stopped for something else."""
        self._infrastructure, self._may_be_charged = 0, True
        self._idle_since = self.now
        self.lead = module.LeaderState(
            Members(range(len(self.nodes))),
            Budget(RESTARTS, RESTARTS, RESTARTS, RESTARTS),
            JOIN_SECONDS,
            self.now,
            least=self.least,
            spares=self.spares,
            last_call_seconds=self.last_call,
            snooze_seconds=self.snooze,
            has_operator=self.has_operator,
        )
        self._come(0)

    # ---- what happens ----------------------------------------------------------------------------------------

    def step(self) -> None:
        """Let one random event happen: a node comes, fails, leaves or answers."""
        here = [place for place, node in enumerate(self.nodes) if node.is_here and place]
        training = [p for p, node in enumerate(self.nodes) if node.has_ranks and not (node.stopping or node.finished)]
        answering = self._stopping()
        choices: list[tuple[float, Any, list[int]]] = [
            (4, self._come, self._away()),
            (2, self._import, [place for place in here if not self.nodes[place].ready]),
            (1.5, self._lose, here),
            (0.2, self._tell, [place for place in here if not self.nodes[place].told]),
            (0.3, self._fail, training if self.lead.state == "running" else []),
            (0.3, self._finish, training if self.lead.state == "running" else []),
            (1, self._finish, [p for p in answering if not (self.nodes[p].finished or self.nodes[p].failed)]),
            (1, self._lose, [place for place in here if self.nodes[place].told and not self.nodes[place].has_ranks]),
            (6, self._answer, answering),
            (3, self._progress, training if self.lead.state == "running" else []),
            (4, self._wait, [0]),
        ]
        possible = [choice for choice in choices if choice[2]]
        _, what, places = self.random.choices(possible, [weight for weight, *_ in possible])[0]
        self._do(what, self.random.choice(places))

    def calm_down(self) -> None:
        """Let all nodes come, answer and stay; the group must then train with all of them but the spares."""
        until = self.now + 3 * STABLE_SECONDS  # the longest snooze, and events before it
        while (self.now < until or self._stopping()) and not self.over:
            slow = [place for place, node in enumerate(self.nodes) if node.is_here and not node.ready]
            for what, places in ((self._answer, self._stopping()), (self._come, self._away()), (self._import, slow)):
                for place in places:
                    self._do(what, place)
            self._do(self._wait, 0)
        if self.over:
            return
        ends = any(node.finished for node in self.nodes)  # once a node has finished, no other node joins
        if self.lead.state != "running" or not (ends or len(self.lead.members) == self.size):
            raise Wrong(f"all {len(self.nodes)} nodes stay, and {self.lead.state} with {self.lead.members}")
        for place in self.lead.members:
            if not self.nodes[place].finished:
                self._do(self._finish, place)
        if not self.over:
            raise Wrong("all ranks have ended, and the job has not")

    def _away(self) -> list[int]:
        return [place for place, node in enumerate(self.nodes) if not node.is_here]

    def _ready(self) -> int:
        return sum(node.is_here and not node.told for node in self.nodes)

    def _stopping(self) -> list[int]:
        return [place for place, node in enumerate(self.nodes) if node.stopping]

    def _do(self, what: Any, place: int) -> None:
        if not self.over:
            what(place)
            self._turn()

    def _come(self, place: int) -> None:
        node = self.nodes[place]
        is_same_pod = self.random.random() < 0.5 and not node.told
        node.pod += not is_same_pod and bool(node.departures)
        node.linked_at, node.told, node.failed, node.has_ranks, node.finished = self.now, False, False, False, False
        node.ready = place == 0 or self.random.random() < 0.6
        self._tell_story(f"node {place} comes as pod {node.pod}{'' if node.ready else ' and imports torch'}")
        self._may_be_charged |= bool(node.departures) and self.lead.state != "running"
        self.lead.joined(place, self.now, node.generation, node.pod, is_ready=node.ready)

    def _import(self, place: int) -> None:
        self._tell_story(f"node {place} has imported torch")
        self.nodes[place].ready = True
        self.lead.ready(place, self.now)

    def _lose(self, place: int) -> None:
        node = self.nodes[place]
        self._tell_story(f"node {place} is lost")
        self._stop_has_reason |= node.has_ranks
        node.linked_at, node.has_ranks, node.stopping = None, False, False
        node.departures.append(self.now)
        self._may_be_charged |= self._ready() < self.least
        self.lead.lost(place, self.now)

    def _tell(self, place: int) -> None:
        """Send SIGTERM to a node: its ranks end soon, and then its agent."""
        node = self.nodes[place]
        self._tell_story(f"node {place} is told to stop")
        node.told = True
        self._stop_has_reason |= node.has_ranks
        self._may_be_charged |= self._ready() < self.least
        self.lead.termination_requested(place, self.now)
        if self.over:
            return
        self._turn()
        if node.has_ranks and self.lead.state == "running":
            self._fail(place)

    def _fail(self, place: int) -> None:
        node = self.nodes[place]
        self._tell_story(f"a rank of node {place} fails")
        node.failed, self._stop_has_reason, self._may_be_charged = True, True, True
        self._failures += not node.told
        self.lead.failed(place, [self._failure(place)], self.now)

    def _failure(self, place: int) -> Failure:
        code = RESUMABLE if self.nodes[place].told else 1
        return Failure(self.lead.members.node_rank(place), exit_code=code, resumable=code == RESUMABLE)

    def _finish(self, place: int) -> None:
        self._tell_story(f"node {place} finishes")
        self.nodes[place].finished = True
        self.lead.finished(place, self.now)

    def _answer(self, place: int) -> None:
        node = self.nodes[place]
        if node.told and place:
            return self._lose(place)  # the node's agent ends with its ranks
        self._tell_story(f"the ranks of node {place} have ended")
        node.has_ranks = node.stopping = False
        return self.lead.stopped(place, [self._failure(place)] if node.failed else [], self.now)

    def _progress(self, _: int) -> None:
        self._step += 1
        self.lead.reached(self._step)

    def _wait(self, _: int) -> None:
        for place, node in enumerate(self.nodes):
            if place and node.is_here and node.told and not node.has_ranks:
                self._do(self._lose, place)  # the node's agent ends at once
        until = self.now + self.random.choice([0.1, 1, 5, 20, 40, 100, 400])
        for _ in range(100):
            if self.over or self.lead.deadline is None or self.lead.deadline > until:
                break
            self.now = max(self.now, self.lead.deadline)
            self._turn()
        else:
            raise Wrong("it has something to do again and again, and does nothing")
        self.now = until

    # ---- what it orders --------------------------------------------------------------------------------------

    def _turn(self) -> None:
        if self.over:
            return
        self.lead.tick(self.now)
        orders, self.lead.orders[:] = list(self.lead.orders), []
        for order in orders:
            if self.over:
                raise Wrong(f"{order} after the end")
            self._obey(order)
        self._check_that_it_goes_on()

    def _obey(self, order: Any) -> None:
        self._tell_story(f"    {order}")
        names = {"StartOrder": self._start, "Stop": self._stop, "EndOrder": self._end, "Leave": self._end}
        names.get(type(order).__name__, lambda _: None)(order)

    def _start(self, order: Any) -> None:
        members = order.members
        here = {place for place, node in enumerate(self.nodes) if node.is_here}
        present = {place for place in here if not self.nodes[place].told}
        if order.generation in self.members or order.generation != max(self.members, default=-1) + 1:
            raise Wrong(f"generation {order.generation} after {sorted(self.members)}")
        if len(members) < self.least:
            raise Wrong(f"{members} start, and at least {self.least} train")
        able = {place for place in present if self.nodes[place].ready or not self.members}
        wanted = min(self.size, max(len(able), self.least))
        if not set(members) <= present or len(members) != wanted or 0 not in members:
            raise Wrong(f"{members} start, and {sorted(present)} are here, {self.spares} of them as spares")
        if not (able <= set(members) or set(members) <= able):
            raise Wrong(f"{members} start, and wait for imports, although {able} have imported torch")
        if displaced := able.intersection(self.members.get(order.generation - 1, ())) - set(members):
            raise Wrong(f"{members} start, and nodes {displaced} of the last generation became spares")
        if [rank for place in members for rank in members.ranks(place, 2)] != list(range(members.world_size(2))):
            raise Wrong(f"the ranks of {members} have gaps")
        if busy := [place for place in members if self.nodes[place].has_ranks]:
            raise Wrong(f"{members} start, and old ranks of {busy} are running")
        self._check_charges()
        before = self.members.get(order.generation - 1, members)
        self.shrinks, self.growths = (
            self.shrinks + (len(members) < len(before)),
            self.growths + (len(members) > len(before)),
        )
        self.members[order.generation] = members
        for place in members:
            node = self.nodes[place]
            node.has_ranks, node.finished, node.failed, node.generation = True, False, False, order.generation
            node.ready = True
        self._stop_has_reason = self._may_be_charged = False

    def _check_charges(self) -> None:
        counts = self.lead.charges.counts
        if self._charged_before not in (None, counts):
            raise Wrong(f"a node that joined was charged: {self._charged_before}, {counts}")
        if counts["application"] + counts["stall"] > self._failures:
            raise Wrong(f"{self._failures} ranks have failed, and {counts} are charged")
        if counts["infrastructure"] > self._infrastructure and not self._may_be_charged:
            raise Wrong("a node was lost, the others went on at once, and it was charged")
        self._charged_before, self._infrastructure = None, counts["infrastructure"]

    def _stop(self, order: Any) -> None:
        running = {place for place, node in enumerate(self.nodes) if node.has_ranks and node.is_here}
        if not set(order.nodes) <= running:
            raise Wrong(f"{order}, and ranks run on {sorted(running)}")
        if not self._stop_has_reason:
            self._check_growth(order)
        for place in order.nodes:
            self.nodes[place].stopping = True

    def _check_growth(self, order: Any) -> None:
        waiting = [node for place, node in enumerate(self.nodes) if node.is_here and place not in self.lead.members]
        if len(self.lead.members) == self.size:
            raise Wrong(f"{order}, and nobody is missing")
        if not any(node.may_join_at(self.snooze) <= self.now for node in waiting):
            raise Wrong(f"{order} at {self.now}, and nobody may join yet")
        if not order.patient:
            raise Wrong("ranks are stopped for a node that joins, and cannot save")
        self._charged_before = self.lead.charges.counts

    def _end(self, order: Any) -> None:
        self.over = True
        told = [place for place, node in enumerate(self.nodes) if node.told]
        here = sum(node.is_here for node in self.nodes)
        if getattr(order, "code", None) == 0:
            if not all(self.nodes[place].finished for place in self.lead.members):
                raise Wrong("the job has succeeded, and not all ranks have ended with 0")
        elif "did not connect" in order.why:
            if here - len(told) >= self.least:
                raise Wrong(f"{order.why}, and {here} of {self.least} are here")
        elif "not restarted" in order.why:
            if self._failures < NO_PROGRESS_MAX:
                raise Wrong(f"{order.why}, and {self._failures} ranks have failed")
        elif not told or self.has_operator or self.least < len(self.nodes):
            raise Wrong(f"it ends without a reason: {order.why}")

    def _check_that_it_goes_on(self) -> None:
        """Check that the group trains again after a while, if enough nodes are connected and no rank has to end."""
        ready = self._ready()
        if not self.over and self.lead.state == "gathering" and ready >= self.size:
            raise Wrong(f"{ready} nodes are here, {self.size} train, and they wait")
        if self.over or self.lead.state == "running" or ready < self.least or any(node.stopping for node in self.nodes):
            self._idle_since = self.now
        elif self.members and not self._may_be_charged:
            raise Wrong("all ranks have ended, enough nodes are here, nothing is charged, and they do not go on")
        elif self.now > self._idle_since + BACK_OFF_SECONDS + (1 + len(self.nodes)) * self.last_call:
            raise Wrong(
                f"{ready} nodes are here, {self.least} are enough, and {self.lead.state} since {self._idle_since}"
            )

    def _tell_story(self, what: str) -> None:
        self.story.append(f"{self.now:8.1f} {what}")


def walk(seed: int, module: Any = leader_state, steps: int = 120) -> Walk:
    """Let things happen at random, and everything go well at the end. Raise Wrong."""
    found = Walk(seed, module)
    try:
        for _ in range(steps):
            if not found.over:
                found.step()
        found.calm_down()
    except Exception as error:
        raise Wrong("\n".join([f"seed {seed}, {found.least}:{len(found.nodes)}", *found.story, repr(error)])) from error
    return found
