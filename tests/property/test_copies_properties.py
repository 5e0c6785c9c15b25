"""When the state is copied, and over what: for any plans, and for ranks that are killed between any two things."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpjob_core import copies, memory
from ddpjob_core.copies import CopyPlan
from ddpjob_core.memory import COPY_SLOTS, FoundState, Held, Mark, Version, newest

VERSIONS = st.builds(Version, st.just(1), st.integers(0, 3), st.integers(1, 20))
SECONDS = st.floats(1e-6, 1e3)


@given(SECONDS, SECONDS)
def test_copies_take_no_more_than_their_share_and_are_no_rarer_than_that_needs(copy: float, step: float) -> None:
    """Too many slow down each training, too few lose more steps at each failure."""
    every = copies.every(copy, step)
    assert every & (every - 1) == 0
    assert copy <= copies.COST_MAX * every * step or every == copies.EVERY_MAX
    assert every == 1 or copy > copies.COST_MAX * (every // 2) * step


@given(st.integers(0, 20), st.integers(0, 20), st.floats(0, 1))
def test_copies_that_have_taken_too_much_become_rarer_and_others_not(wanted: int, present: int, share: float) -> None:
    """On a busy machine single figures are too low, and the training would be slower than was said."""
    every = copies.corrected(1 << wanted, 1 << present, share)
    assert every >= 1 << wanted
    assert every > 1 << present or share <= copies.COST_MAX or every == copies.EVERY_MAX
    assert every == 1 << wanted or share > copies.COST_MAX / 2


@given(st.data(), st.integers(1, 7))
def test_all_ranks_copy_at_the_same_steps_whatever_plans_rank_0_makes(data: st.DataObject, gap: int) -> None:
    """A rank that does not copy where the others do has no random states of that step."""
    present, told, own_next, due = None, [], None, []
    steps = range(gap, 60 * gap, gap)
    for step in steps:
        if own_next is not None and step >= own_next.first:
            present, own_next = own_next, None
        every = 1 if present is None else present.every
        if own_next is None and data.draw(st.integers(0, 4)) == 0:
            first = copies.first_of_next(step, step - gap, every)
            assert first > step, "the other ranks may have passed this one"
            own_next = CopyPlan(first, data.draw(st.sampled_from([1, 2, 8, 32])))
            told.append((step, own_next))
        due.append(present is not None and copies.is_due(present, step, step - gap))
    delay = data.draw(st.booleans())  # whether the plan is seen at the boundary at which it is made, or at the next one
    plan, waiting, seen, others = None, None, 0, []
    for step in steps:
        if waiting is None and copies.looks(step, step - gap, 1 if plan is None else plan.every):
            known = [each for made, each in told[seen:] if made < step + (not delay)]
            if known:
                waiting, seen = known[0], seen + 1
        if waiting is not None and step >= waiting.first:
            plan, waiting = waiting, None
        others.append(plan is not None and copies.is_due(plan, step, step - gap))
    assert others == due


@given(st.tuples(*[st.none() | st.builds(Held, VERSIONS, st.just(0), st.just(1), st.just(1))] * memory.AREAS))
def test_a_copy_is_never_written_over_the_newest_state(held: tuple[Held | None, ...]) -> None:
    """Where it is cut short, nothing would be left."""
    area = copies.area_for(held)
    whole = [one.version for one in held if one is not None]
    assert held[area] is None or whole.count(held[area].version) > 1 or held[area].version != max(whole)  # type: ignore[union-attr]


@given(st.lists(st.none() | VERSIONS, min_size=3, max_size=3), st.none() | VERSIONS, st.none() | VERSIONS)
def test_random_states_of_the_newest_state_are_never_written_over(
    versions: list[Version | None], held: Version | None, loaded: Version | None
) -> None:
    """The rank would draw other numbers after a restart."""
    slot = copies.slot_for(versions, held, loaded)
    newest = max((version for version in (held, loaded) if version is not None), default=None)
    assert versions[slot] is None or versions[slot] != newest or set(versions) == {newest}
    assert versions[slot] is None or None not in versions, "an empty one first"


@given(st.builds(CopyPlan, st.integers(0, 10**9), st.integers(1, 1 << 20), st.booleans(), st.booleans()))
def test_a_plan_is_what_the_other_ranks_read(plan: CopyPlan) -> None:
    """They would copy at other steps."""
    assert copies.plan_of(plan.as_text()) == plan


@given(st.integers(0, 5), st.integers(0, 400), st.integers(1, 9))
def test_ranks_may_be_far_beyond_a_copy_but_not_beyond_the_next_two(power: int, ahead: int, gap: int) -> None:
    """All ranks are lost at once at any step between two copies; and one that counts micro-batches is found."""
    held, mark = Held(Version(1, 0, 500), 0, 1, 1, every=1 << power), Mark(0, 500 + ahead, 500 + ahead - gap)
    assert isinstance(newest([held], Version(1, 1, 0), (), [mark]), FoundState) is (ahead <= gap + 2 * (1 << power))


# ---- walks -------------------------------------------------------------------------------------------------

PARTS = 3
TORN = -1
Mistake = Literal["", "the newest is written over", "cells before bytes", "counts at once", "one slot"]
MISTAKES: tuple[Mistake, ...] = ("the newest is written over", "cells before bytes", "counts at once", "one slot")


@dataclass
class Node:
    """An agent's memory: two areas, and by local rank the versions of its slots."""

    parts: list[list[int]] = field(default_factory=lambda: [[0] * PARTS for _ in range(memory.AREAS)])
    held: list[Held | None] = field(default_factory=lambda: [None] * memory.AREAS)
    slots: dict[int, list[Version | None]] = field(default_factory=dict)
    since: int = 0
    """The generation with which it began: it has no random states of an older one."""
    best: Version | None = None
    """The newest state that was ever whole here."""

    @property
    def newest(self) -> Held | None:
        return max((held for held in self.held if held is not None), key=lambda held: held.version, default=None)


@dataclass(eq=False)
class Rank:
    """A process; `todo` is what it does before the next optimizer step."""

    node: Node
    local: int
    step: int
    state: int
    todo: list[str] = field(default_factory=list)
    area: int = 0
    written: bool = False
    """Whether what it has copied waits for the next optimizer step."""
    counted: int = 0
    alive: bool = True
    mark: Mark | None = None


class Walk:
    """The life of one job whose ranks copy."""

    def __init__(self, seed: int, mistake: Mistake = "") -> None:
        self.chance, self.mistake = random.Random(seed), mistake
        self.nodes = [Node() for _ in range(self.chance.choice([1, 1, 2, 3]))]
        self.per_node = self.chance.choice([1, 2, 3])
        self.plan = CopyPlan(self.chance.randrange(1, 6), self.chance.choice([1, 1, 2, 4]))
        self.generation, self.numbers = 0, {(0, 0, 0): 0}
        self.stories = {"copies": 0, "begin": 0, "finished": 0}
        self.marks: dict[tuple[int, int], Mark] = {}
        self.loaded: Version | None = None
        self.newest_loaded: Version | None = None
        """Of all generations until now."""
        self.begin(0, 0)

    def begin(self, step: int, state: int) -> None:
        self.ranks = [Rank(node, local, step, state) for node in self.nodes for local in range(self.per_node)]

    def run(self) -> None:
        """Some generations; raises AssertionError where one begins with what it must not."""
        for _ in range(self.chance.randrange(2, 9)):
            for _ in range(self.chance.randrange(0, 40 * len(self.ranks))):
                self.advance(self.chance.choice(self.ranks))
            self.fail()
            self.restart()

    def advance(self, rank: Rank) -> None:
        """One thing of one rank."""
        if not rank.alive:
            return
        if rank.todo:
            getattr(self, rank.todo.pop(0))(rank)
        elif all(other.alive and other.step >= rank.step and not other.todo for other in self.ranks) or any(
            other.step > rank.step for other in self.ranks
        ):  # the gradients are summed: all have come to this boundary and done what there is to do
            self.count(rank)
            self.step(rank)

    def step(self, rank: Rank) -> None:
        """The optimizer's step, and the boundary after it."""
        before, rank.step = rank.step, rank.step + 1
        rank.state = self.numbers.setdefault((rank.state, self.generation, rank.step), len(self.numbers))
        rank.mark = Mark(self.generation, rank.step, before) if before else None
        counted, rank.counted = rank.counted, rank.step
        if copies.is_due(self.plan, rank.step, counted):
            rank.todo = ["note", *(["open", *["part"] * PARTS, "close"] if rank.local == 0 else [])]
            if self.mistake == "cells before bytes" and rank.local == 0:
                rank.todo = ["note", "open", "close", "count", *["part"] * PARTS]
            if self.mistake == "counts at once" and rank.local == 0:
                rank.todo.append("count")

    def note(self, rank: Rank) -> None:
        """Its random states."""
        slots = rank.node.slots.setdefault(rank.local, [None] * len(COPY_SLOTS))
        held = rank.node.newest
        slot = copies.slot_for(slots, held and held.version, self.loaded) if self.mistake != "one slot" else 0
        slots[slot] = self.version(rank)

    def open(self, rank: Rank) -> None:
        """The area that is written holds nothing from now on."""
        node = rank.node
        rank.area = copies.area_for(node.held)
        if self.mistake == "the newest is written over" and node.newest is not None:
            rank.area = node.held.index(node.newest)
        node.held[rank.area], node.parts[rank.area] = None, [TORN] * PARTS

    def part(self, rank: Rank) -> None:
        parts = rank.node.parts[rank.area]
        parts[parts.index(TORN)] = rank.state

    def close(self, rank: Rank) -> None:
        rank.written = True

    def count(self, rank: Rank) -> None:
        """What was copied counts."""
        if rank.written:
            rank.written = False
            held = Held(self.version(rank), 0, PARTS, rank.state % 997, every=self.plan.every)
            rank.node.held[rank.area], rank.node.best = held, held.version

    def version(self, rank: Rank) -> Version:
        return Version(1, self.generation, rank.step)

    def fail(self) -> None:
        """A rank, several, a node, or all; then the writers that live may finish what they have under way."""
        what = self.chance.choice(["rank", "ranks", "node", "all"])
        if what == "node" and len(self.nodes) > 1:
            number = self.chance.randrange(len(self.nodes))
            lost, self.nodes[number] = self.nodes[number], Node(since=self.generation + 1)
            gone = [rank for rank in self.ranks if rank.node is lost]
        else:
            count = {"rank": 1, "ranks": self.chance.randrange(1, len(self.ranks) + 1)}.get(what, len(self.ranks))
            gone = self.chance.sample(self.ranks, count)
        for rank in gone:
            rank.alive = False
        for rank in self.ranks:
            if rank.alive and rank.local == 0 and self.chance.random() < 0.7:
                while rank.todo:
                    getattr(self, rank.todo.pop(0))(rank)
                if rank.written and len(self.nodes) == 1 and self.all_are_at(rank):
                    self.count(rank)
                    self.stories["finished"] += 1

    def all_are_at(self, rank: Rank) -> bool:
        return all(self.version(rank) in rank.node.slots.get(local, []) for local in range(self.per_node))

    def restart(self) -> None:
        """All ranks begin with what counts; judged by what was whole."""
        marks = [rank.mark for rank in self.ranks if rank.node in self.nodes]
        self.generation += 1
        nodes = [node for node in self.nodes for _ in range(self.per_node)]
        best = max((node.best for node in self.nodes if node.best is not None), default=None)
        found = newest([node.newest for node in nodes], Version(1, self.generation, 0), (), marks)
        if not isinstance(found, FoundState):
            assert best is None or "loaded before" in found, found
            self.stories["begin"], self.loaded, self.newest_loaded = self.stories["begin"] + 1, None, None
            self.nodes = [Node(since=self.generation) for _ in self.nodes]  # the folder's state is another history
            return self.begin(0, 0)
        version = found.held.version
        assert version == best, "older than what was whole"
        states = set()
        for node in {id(nodes[rank]): nodes[rank] for rank in found.ranks}.values():
            area = next(a for a, held in enumerate(node.held) if held is not None and held.version == version)
            states |= set(node.parts[area])
            node.held[area] = node.held[area]._replace(loads=found.held.loads + 1)  # type: ignore[union-attr]
        assert len(states) == 1, "a mix of two states"
        assert TORN not in states, "a state that was not whole"
        # Where the only holder of what was loaded is lost, what is older counts again, as often as it is loaded: ranks
        # may have written over their random states of it, and are seeded anew.
        is_newer = self.newest_loaded is None or version >= self.newest_loaded
        for node in self.nodes if is_newer else ():
            for slots in node.slots.values() if node.since <= version.generation else ():
                assert version in slots, "a rank whose node lives has lost its random states"
        self.stories["copies"], self.loaded = self.stories["copies"] + 1, version
        self.newest_loaded = version if is_newer else self.newest_loaded
        return self.begin(version.step, states.pop())


def walks(count: int, first: int = 0, mistake: Mistake = "") -> dict[str, int]:
    """What has happened in so many; raises where one was wrong, with its seed."""
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


def test_no_walk_begins_with_a_copy_that_is_not_whole_or_not_the_newest_or_without_its_random_states() -> None:
    """Kills come between any two things that any rank does."""
    seen = walks(500)
    assert all(seen[name] > 50 for name in ("copies", "begin", "finished")), seen


def test_a_copy_that_counts_again_because_the_node_with_a_newer_one_is_lost_may_be_loaded_more_than_once() -> None:
    """A rank that had gone on from the newer one has no random states of it, at the second load as at the first."""
    walks(1, first=1_012_506)


@pytest.mark.long
@pytest.mark.timeout(900)  # 160 s of an idle processor
def test_a_hundred_thousand_walks_with_copies_do_not_either() -> None:
    """The orders that matter are rare."""
    walks(100_000, first=1_000_000)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_seeded_mistake_of_copies_is_found(mistake: Mistake) -> None:
    """A model that misses them proves nothing."""
    with pytest.raises(AssertionError):
        walks(500, mistake=mistake)
