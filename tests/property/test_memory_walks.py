"""Random walks of ranks, their nodes' memory and the folder, with kills between any two actions of any rank. The rules
are the real ones (`ddpjob_core.memory`). Modelled are ranks that step together, agents that order the rescue, and areas
that are written part by part. Unlike the ranks, the model knows to which history each state belongs."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Literal

import pytest

from ddpjob_core import memory
from ddpjob_core.memory import LOADS_ASSUMED_MAX, LOADS_MAX, FoundState, Held, Version, newest

PARTS = 3
"""Parts of an area; a writer may die between any two."""
TORN = -1
"""The state of a rank within its optimizer's step."""
Mistake = Literal[
    "", "a part is missing", "an old generation's memory", "a rescue while dirty", "a step that is behind",
    "two that write at once", "a step that the dead have made",
    "a step that the dead of another node have made",
]  # fmt: skip
MISTAKES: tuple[Mistake, ...] = (
    "a part is missing", "an old generation's memory", "a rescue while dirty", "a step that is behind",
    "two that write at once", "a step that the dead have made",
    "a step that the dead of another node have made",
)  # fmt: skip


@dataclass
class Node:
    """An agent's memory."""

    parts: list[int] = field(default_factory=lambda: [0] * PARTS)
    held: Held | None = None
    small: dict[int, list[Version]] = field(default_factory=dict)
    """By local rank, its small states of the last two boundaries."""


@dataclass(eq=False)
class Rank:
    """A process whose state is the number of a history."""

    node: Node
    local: int
    state: int
    step: int
    clock: int
    loads: int
    summed: bool = False
    """True if the gradients of the next step have reached it: then it needs no other rank until the next boundary."""
    alive: bool = True
    before: int = 0
    """The state before the optimizer's step that it is in."""
    part: int | None = None
    """The part that it writes while it has the writers' lock."""
    assumed: bool = False
    """True if it keeps what `load` was given, because it has not saved."""
    answer: int = memory.NONE
    patience: int = 50
    """How often this rank waited to finish its own step, because a dead rank was ahead."""


class Walk:
    """One job."""

    def __init__(self, seed: int, mistake: Mistake = "") -> None:
        self.chance = random.Random(seed)
        self.mistake = mistake
        self.nodes = [Node() for _ in range(self.chance.choice([1, 1, 2, 3]))]
        self.per_node = self.chance.choice([1, 2, 3])
        self.saves = self.chance.choice(["all", "all", "rank 0"])
        """Who calls `save`. What another rank assumes is less than what is saved."""
        self.histories: list[tuple[int, int, int]] = [(0, 0, 0)]
        """By number: the history before it, generation, step; 0 is that of a starting job."""
        self.numbers: dict[tuple[int, int, int], int] = {}
        self.folder: list[tuple[Version, int]] = []
        self.generation = 0
        self.ranks = [
            Rank(node, local, 0, 0, 0, 0, assumed=True) for node in self.nodes for local in range(self.per_node)
        ]
        self.survivor = 0
        """The furthest step of a rank that survived its group and got the time to write."""
        self.furthest = 0
        """The step that agents of nodes with a dead rank tell the others."""
        self.delivers = True
        """True if a rank's messages reach the others after its death."""
        self.stories = {"memory": 0, "folder": 0, "begin": 0, "rescued": 0}

    def run(self) -> None:
        """Run some generations; raise AssertionError if one begins with a wrong state."""
        for _ in range(self.chance.randrange(2, 11)):
            self.train()
            self.fail()
            self.rescue()
            self.restart()

    # ---- training ------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Let ranks act in any order, until the group breaks at any point."""
        for _ in range(self.chance.randrange(0, 14 * len(self.ranks))):
            self.advance(self.chance.choice(self.ranks))

    def advance(self, rank: Rank) -> None:
        """Do one action of one rank: backward, the beginning of the optimizer's step, its end, a save."""
        if not rank.alive:
            return
        if memory.is_clean(rank.clock) or rank.clock == 0:
            if not rank.summed:
                # The gradients are summed over all: nobody has them before all have come here.
                rank.summed = all(self.has_sent(other, rank.step) for other in self.ranks)
            else:
                rank.clock |= 1
                rank.state, rank.before = TORN, rank.state
        else:
            rank.step += 1
            rank.state = self.after(rank.before, rank.step)
            rank.clock, rank.summed, rank.loads = 2 * rank.step, False, 0
            self.note(rank)
            if rank is self.ranks[0] and self.chance.random() < 0.15:
                self.folder.append((Version(1, self.generation, rank.step), rank.state))
                for other in self.ranks if self.saves == "all" else [rank]:
                    other.assumed = False

    def has_sent(self, other: Rank, step: int) -> bool:
        """True if a rank at this step gets what it waits for from that one."""
        if other.alive:
            return other.step >= step
        return (other.step == step and other.summed) or (other.step > step and self.delivers)

    def note(self, rank: Rank) -> None:
        """Write small states into the older of two slots: random states, learning rates."""
        slots = rank.node.small.setdefault(rank.local, [])
        slots.append(Version(1, self.generation, rank.step))
        if len(slots) > 2:
            slots.remove(min(slots))

    def after(self, before: int, step: int) -> int:
        """Return the number of the history that continues like this, equal for all ranks of a generation."""
        key = (before, self.generation, step)
        if key not in self.numbers:
            self.numbers[key] = len(self.histories)
            self.histories.append(key)
        return self.numbers[key]

    # ---- a failure -----------------------------------------------------------------------------------------

    def fail(self) -> None:
        """Lose a rank, several, a node, or all; the rescue itself may be cut short."""
        what = self.chance.choice(["rank", "rank", "ranks", "node", "all", "all"])
        if what == "node":
            number = self.chance.randrange(len(self.nodes))
            lost, self.nodes[number] = self.nodes[number], Node()
            gone = [rank for rank in self.ranks if rank.node is lost]
        else:
            count = {"rank": 1, "ranks": self.chance.randrange(1, len(self.ranks) + 1)}.get(what, len(self.ranks))
            gone = self.chance.sample(self.ranks, count)
        for rank in gone:
            rank.alive = False
        told = {id(rank.node) for rank in gone if any(rank.node is node for node in self.nodes)}
        self.furthest = max((rank.clock for rank in self.ranks if id(rank.node) in told), default=0)
        self.delivers = self.chance.random() < 0.8

    def rescue(self) -> None:
        """Let each agent's ranks write; some get no time, some die meanwhile."""
        self.survivor = 0
        for node in self.nodes:
            ranks = [rank for rank in self.ranks if rank.alive and rank.node is node]
            undisturbed = self.chance.random() < 0.7
            for _ in range(1000 if undisturbed else self.chance.randrange(12)):
                waiting = [rank for rank in ranks if rank.alive and rank.answer == memory.NONE]
                if not waiting:
                    break
                rank = self.chance.choice(waiting)
                if not undisturbed and self.chance.random() < 0.1:
                    rank.alive, rank.part = False, None
                else:
                    self.save(rank, ranks)
            if undisturbed:
                assert all(rank.answer != memory.NONE for rank in ranks if rank.alive), "the rescue never ends"
                self.survivor = max([self.survivor, *(rank.step for rank in ranks if self.counts(rank))])
                self.survivor = max([self.survivor, *(self.could_make(rank) for rank in ranks)])

    def could_make(self, rank: Rank) -> int:
        """Return the step of a rank that died on the same node, or that another agent reports, if this rank has its
        gradients."""
        dead = [other for other in self.ranks if other.node is rank.node and not other.alive and rank.alive]
        is_behind = any(other.step > rank.step and other.answer == memory.NONE for other in dead)
        is_behind |= rank.alive and memory.step_of(self.furthest) > rank.step
        has_all = all(self.has_sent(other, rank.step) for other in self.ranks)
        return rank.step + 1 if is_behind and has_all and self.counts(rank) else 0

    def counts(self, rank: Rank) -> bool:
        """True if a survivor's state is what the next generation must begin with, or less."""
        has_saved = any(version.generation == self.generation for version, _ in self.folder)
        return memory.is_clean(rank.clock) and not (rank.assumed and has_saved)

    def save(self, rank: Rank, ranks: list[Rank]) -> None:
        """One turn of the writing thread: as `Survivor._try_to_save`, part by part."""
        node, now = rank.node, Version(1, self.generation, rank.step)
        if rank.part is not None:
            return self.write(rank)
        if not memory.is_clean(rank.clock) and self.mistake != "a rescue while dirty":
            if rank.clock % 2:
                return self.advance(rank)  # it reaches its boundary without the others
            rank.answer = memory.UNABLE
            return None
        if rank.step == 0:
            rank.answer = memory.UNABLE
            return None
        if self.mistake != "a step that is behind":
            if memory.is_there(node.held, now, assumed=rank.assumed):
                rank.answer = memory.SAVED
                return None
            others = [o for o in self.ranks if o.node is node and o is not rank and o.answer == memory.NONE]
            told = 0 if "the dead" in self.mistake else self.furthest
            gone = [] if self.mistake == "a step that the dead have made" else [o.clock for o in others if not o.alive]
            turn = memory.turn(rank.clock, [o.clock for o in others if o.alive], [*gone, told])
            if rank.patience and turn != "write":
                rank.patience -= 1
                return self.advance(rank) if turn == "wait" else None
        is_alone = all(other.part is None for other in ranks if other.alive)
        if is_alone or self.mistake == "two that write at once":
            rank.part, node.held = 0, self.stamp(rank) if self.mistake == "a part is missing" else None
        return None

    def write(self, rank: Rank) -> None:
        """Write its part, and after the last one make it count."""
        assert rank.part is not None, "it writes"
        if self.chance.random() < 0.3:
            return  # it takes a while
        rank.node.parts[rank.part] = rank.state
        rank.part += 1
        if rank.part == PARTS:
            rank.part, rank.answer, rank.node.held = None, memory.SAVED, self.stamp(rank)
            self.stories["rescued"] += 1

    def stamp(self, rank: Rank) -> Held:
        """Return the cells of the area."""
        size = PARTS if self.saves == "all" or rank.assumed else PARTS + 1
        return Held(Version(1, self.generation, rank.step), rank.loads, size, rank.state % 997, rank.assumed)

    # ---- the next generation -------------------------------------------------------------------------------

    def restart(self) -> None:
        """Let all ranks load what counts, or fail once more before the first step."""
        self.generation += 1
        present = Version(1, self.generation, 0)
        held = [node.held for node in self.nodes for _ in range(self.per_node)]
        if self.mistake == "an old generation's memory":
            held = [one and one._replace(version=one.version._replace(generation=0)) for one in held]
        found, saved = newest(held, present), max(self.folder, default=None)
        gone = "" if isinstance(found, FoundState) else found
        if isinstance(found, FoundState) and not any(
            found.held.version in slots for node in self.nodes for slots in node.small.values()
        ):
            gone = "no rank has left what is small"
        in_memory = isinstance(found, FoundState) and not gone and not memory.is_newer(saved and saved[0], found.held)
        if isinstance(found, FoundState) and in_memory:
            nodes = [node for node in self.nodes for _ in range(self.per_node)]
            states = {state for rank in found.ranks for state in nodes[rank].parts}
            assert len(states) == 1, "a mix of two states"
            (state,), loads, came_to = states, found.held.loads + 1, found.held.version
            assumed = found.held.assumed
            for node in {id(nodes[rank]): nodes[rank] for rank in found.ranks}.values():
                assert node.held is not None
                node.held = node.held._replace(loads=loads)
            self.stories["memory"] += 1
        else:
            state, loads, came_to = (0, 0, None) if saved is None else (saved[1], 0, saved[0])
            assumed = True
            self.stories["begin" if saved is None else "folder"] += 1
        self.check(state, came_to, gone)
        step = self.histories[state][2]
        self.ranks = [
            Rank(node, local, state, step, 2 * step * in_memory, loads, assumed=assumed)
            for node in self.nodes
            for local in range(self.per_node)
        ]
        for rank in self.ranks if in_memory else ():
            self.note(rank)

    def check(self, state: int, came_to: Version | None, gone: str) -> None:
        """Check the state with which all ranks begin. gone: why the memory does not count."""
        assert state != TORN, "a state that was not whole"
        step = self.histories[state][2]
        assert came_to is None or step == came_to.step, "another step than it is said to be"
        held = self.held_best()
        if gone:
            assert held is not None
            tried = held.loads >= (LOADS_ASSUMED_MAX if held.assumed else LOADS_MAX)
            assert tried is ("was loaded" in gone), gone
            assert tried or not self.survivor, f"{gone}, and a rank has outlived its group"
        else:
            assert step >= self.survivor, "a rank has outlived its group, and its step is lost"
        folder = self.folder_best()
        is_less = held is not None and held.assumed and folder is not None and folder[:2] == held.version[:2]
        known = [folder, held.version if held is not None and not gone and not is_less else None]
        best = max((one for one in known if one is not None), default=None)
        assert came_to == best, f"{came_to}, and {best} was whole"

    def held_best(self) -> Held | None:
        """Return the newest state in memory; for a generation in which a rank has saved, only that rank's."""
        whole = [one.held for one in self.nodes if one.held]
        named = {one.version.generation for one in whole if not one.assumed}
        return max((one for one in whole if not one.assumed or one.version.generation not in named), default=None)

    def folder_best(self) -> Version | None:
        return max(self.folder)[0] if self.folder else None


def walks(count: int, first: int = 0, mistake: Mistake = "") -> dict[str, int]:
    """Return the events of so many walks; raise with the seed if one was wrong."""
    sums: dict[str, int] = {}
    for seed in range(first, first + count):
        walk = Walk(seed, mistake)
        try:
            walk.run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        for name, number in walk.stories.items():
            sums[name] = sums.get(name, 0) + number
    return sums


def test_no_walk_begins_with_a_mix_or_with_less_than_what_was_whole() -> None:
    """A job that silently goes back, or mixes two steps, ends with a result that nobody trained."""
    seen = walks(1_000)
    assert all(seen[name] > 300 for name in ("memory", "folder", "begin", "rescued")), seen


@pytest.mark.long
def test_a_hundred_thousand_walks_do_not_either() -> None:
    """The important orders are rare."""
    walks(100_000, first=1_000_000)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_seeded_mistake_is_found(mistake: Mistake) -> None:
    """Otherwise the model proves nothing."""
    with pytest.raises(AssertionError):
        walks(1_000, mistake=mistake)


def test_a_state_that_leads_to_no_step_is_loaded_no_more_than_three_times() -> None:
    """Otherwise a state that makes every generation fail stays in memory for ever, and the folder is never used."""
    walk = Walk(1)
    walk.nodes, walk.per_node = [Node()], 2
    walk.ranks = [Rank(walk.nodes[0], local, 0, 0, 0, 0) for local in range(2)]
    for _ in range(40):
        for rank in walk.ranks:
            walk.advance(rank)
    walk.folder = []
    for number in range(LOADS_MAX + 1):
        walk.ranks[1].alive = False
        for _ in range(20):
            walk.save(walk.ranks[0], walk.ranks[:1])
        walk.restart()
        assert (walk.ranks[0].step > 0) is (number < LOADS_MAX)
