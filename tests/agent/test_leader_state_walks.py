"""Random walks of a whole group, in virtual time: whatever is lost or reported, in whatever order, the job gets to its
end."""

from __future__ import annotations

import random
from typing import Literal

import pytest
from leads import failure

from ddpjob_core.budget import Budget
from ddpjob_core.members import Members
from ddprun.core.leader_state import Ask, EndOrder, LeaderState, Leave, Over, StartOrder, Stop
from ddprun.core.stall_monitor import NOTHING
from ddprun.core.stall_rules import Position

NODES = 3
PLENTY = Budget(10**6, 10**6, 10**6, 10**6)
JOIN_SECONDS = 1e6
EVENTS = ("fail", "time_out", "answer", "finish", "settle", "settle", "kill", "tell", "come", "come", "wait")


class Pod:
    """One agent with its ranks, as its peers see it."""

    def __init__(self, replacement: int) -> None:
        self.replacement = replacement
        self.ranks: Literal["none", "running", "ending", "finished"] = "none"
        self.terminating = False
        self.generation = -1
        self.asked = False


class World:
    """A job with an operator; orders are obeyed at once, ranks end when they are settled."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now = 7.25
        self.pods: dict[int, Pod] = {}
        self.next_replacement = [0] * NODES
        self.lead: LeaderState | None = None
        self.succeeded = False
        self.story: list[str] = []

    def do(self, event: str, node: int) -> None:
        self.now += 0.1
        self.story.append(f"{event} {node}")
        getattr(self, event)(node, self.pods.get(node))
        self.obey()

    # ---- what happens -----------------------------------------------------------------------------------------

    def come(self, node: int, pod: Pod | None) -> None:
        """Let a new pod join, or sometimes the same one after a lost connection."""
        if pod is not None:
            return
        if node and self.next_replacement[node] and self.chance.random() < 0.3:
            self.next_replacement[node] -= 1
        self.pods[node] = Pod(self.next_replacement[node])
        self.next_replacement[node] += 1
        if node == 0:
            self.lead = LeaderState(Members(range(NODES)), PLENTY, JOIN_SECONDS, self.now, has_operator=True)
            for other in sorted(self.pods):
                self.join(other)
        elif self.lead is not None:
            self.join(node)

    def fail(self, node: int, pod: Pod | None) -> None:
        if pod is not None and self.lead is not None and pod.ranks == "running":
            pod.ranks = "ending"
            said = self.chance.choice(("", f"TypeError: {len(self.story)}"))
            self.lead.failed(node, [failure(node, 1, exception=said)], self.now)

    def time_out(self, node: int, pod: Pod | None) -> None:
        if pod is not None and self.lead is not None and pod.ranks == "running":
            pod.ranks = "ending"
            self.lead.failed(node, [failure(node, 1, symptom=True, waited_in=8)], self.now)

    def answer(self, node: int, pod: Pod | None) -> None:
        if pod is not None and self.lead is not None and pod.ranks == "running" and pod.asked and not pod.terminating:
            pod.asked = False
            self.lead.answered(node, NOTHING, [Position(node, 0, self.chance.choice((7, 8)))], self.now)

    def finish(self, node: int, pod: Pod | None) -> None:
        if pod is not None and self.lead is not None and pod.ranks == "running":
            pod.ranks = "finished"
            self.lead.finished(node, self.now)

    def settle(self, node: int, pod: Pod | None) -> None:
        """Let the ranks of this node that were to end do so."""
        if pod is None or (pod.ranks != "ending" and not pod.terminating):
            return
        ended, pod.ranks = pod.ranks == "ending", "none"
        if pod.terminating and node:
            self.part(node)
        elif ended and self.lead is not None:
            self.lead.stopped(node, [failure(node, 143 if pod.terminating else 75)], self.now)

    def kill(self, node: int, pod: Pod | None) -> None:
        if pod is not None:
            self.part(node)

    def tell(self, node: int, pod: Pod | None) -> None:
        if pod is None or pod.terminating:
            return
        pod.terminating = True
        if self.lead is not None:
            self.lead.termination_requested(node, self.now)
        if pod.ranks == "running":
            pod.ranks = "ending"
            if self.lead is not None:
                self.lead.failed(node, [failure(node, 143)], self.now)

    def wait(self, _node: int, _pod: Pod | None) -> None:
        if self.lead is not None:
            if self.lead.state == "pausing":
                self.now = max(self.now, self.lead.deadline or 0.0)
            self.lead.tick(self.now)

    # ---- what follows -----------------------------------------------------------------------------------------

    def join(self, node: int) -> None:
        """Let agents join without ranks: those that lost their leader have ended them first."""
        pod = self.pods[node]
        assert self.lead is not None
        if pod.ranks == "none" and not pod.terminating:
            pod.generation = max(pod.generation, self.lead.generation)
            self.lead.joined(node, self.now, pod.generation, pod.replacement)

    def part(self, node: int) -> None:
        """Let an agent go, killed or by itself."""
        del self.pods[node]
        if node == 0:
            self.lead = None
            for pod in self.pods.values():
                pod.ranks = "none"
        elif self.lead is not None:
            self.lead.lost(node, self.now)

    def obey(self) -> None:
        while self.lead is not None and self.lead.orders:
            order = self.lead.orders.pop(0)
            self.story.append(str(order))
            if isinstance(order, StartOrder):
                self.start(order)
            elif isinstance(order, Stop):
                self.stop(order)
            elif isinstance(order, Leave):
                assert self.pods[0].terminating, "nobody told it"
                assert self.pods[0].ranks in ("none", "finished"), "its ranks may still be saving"
                self.part(0)
            elif isinstance(order, Ask):
                for pod in self.pods.values():
                    pod.asked = pod.ranks == "running"
            elif not isinstance(order, Over):
                assert isinstance(order, EndOrder)
                assert order.code == 0, "there is budget, and an operator that replaces what is told"
                self.succeeded = True

    def start(self, order: StartOrder) -> None:
        assert order.generation > max(pod.generation for pod in self.pods.values()), "a number is used once"
        assert sorted(self.pods) == list(range(NODES))
        for pod in self.pods.values():
            assert not pod.terminating, "it is on its way out"
            assert pod.ranks in ("none", "finished"), "two generations would run at once"
            pod.ranks, pod.generation, pod.asked = "running", order.generation, False

    def stop(self, order: Stop) -> None:
        for node in order.nodes:
            pod = self.pods.get(node)
            if pod is not None and pod.ranks == "running":
                pod.ranks = "ending"
            elif pod is not None and pod.ranks in ("none", "finished") and self.lead is not None:
                pod.ranks = "none"
                self.lead.stopped(node, [], self.now)


@pytest.mark.parametrize("first", range(0, 1000, 250))
def test_once_nothing_more_is_lost_every_job_succeeds(first: int) -> None:
    for seed in range(first, first + 250):
        world = World(seed)
        for _ in range(world.chance.randrange(5, 120)):
            if world.succeeded:
                break
            world.do(world.chance.choice(EVENTS), world.chance.randrange(NODES))
        for _ in range(100):
            for event in ("settle", "come", "wait", "finish"):
                for node in range(NODES):
                    if not world.succeeded:
                        world.do(event, node)
        assert world.succeeded, f"seed {seed} hangs: {world.story[-40:]}"
