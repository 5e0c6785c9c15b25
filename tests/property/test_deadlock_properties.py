"""A deadlock is reported only if it is certain: never in a program that can complete, always in one that cannot."""

import random
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from ddprun.core.deadlock import Call, GroupCalls, Position, Waits, conflict, sentence, waits_of, written

RECENT = 6
EXAMPLES = 100
ROOTED = ("broadcast", "reduce", "gather", "scatter")
GROUPS = {
    2: {"0": (0, 1), "1": (0, 1), "2": (0, 1)},
    3: {"0": (0, 1, 2), "1": (0, 1), "2": (1, 2), "3": (0, 2)},
    4: {"0": (0, 1, 2, 3), "1": (0, 1), "2": (2, 3), "3": (1, 2, 3)},
}


class Op(NamedTuple):
    """A line of a rank's program. how: sync, async (a pause waits for it), backward (two collectives), or pause."""

    how: str
    group: str = "0"
    op: str = "all_reduce"
    size: int = 16
    root: int = 0


class Begun:
    def __init__(self, op: Op, number: int) -> None:
        self.op, self.number, self.done = op, number, False


class Rank:
    def __init__(self, program: list[Op]) -> None:
        self.program, self.at = program, 0
        self.begun: dict[str, list[Begun]] = {}
        self.waits_for: list[Begun] = []
        self.how = ""

    @property
    def has_ended(self) -> bool:
        return self.at >= len(self.program) and not self.waits_for

    @property
    def can_run(self) -> bool:
        return not self.has_ended and all(call.done for call in self.waits_for)

    def run(self) -> None:
        self.waits_for = []
        if self.at >= len(self.program):
            return
        op, self.at = self.program[self.at], self.at + 1
        calls = [self._begin(op) for _ in range({"backward": 2, "pause": 0}.get(op.how, 1))]
        self.how = op.how
        if op.how in ("sync", "backward"):
            self.waits_for = calls
        elif op.how == "pause":
            self.waits_for = [call for calls in self.begun.values() for call in calls]  # handle.wait() for each call

    def _begin(self, op: Op) -> Begun:
        calls = self.begun.setdefault(op.group, [])
        calls.append(Begun(op, len(calls) + 1))
        return calls[-1]


class World:
    """Ranks, and collectives that complete at the earliest moment that any backend allows."""

    def __init__(self, programs: list[list[Op]]) -> None:
        self.ranks = [Rank(program) for program in programs]
        self.groups = GROUPS[len(programs)]

    def may_end(self, rank: int, call: Begun) -> bool:
        others = [other for other in self.groups[call.op.group] if other != rank]
        brought = [self._brings(other, call) for other in others]
        if call.op.op == "reduce" or (call.op.op in ROOTED and rank == call.op.root):
            return any(brought) or not others
        if call.op.op in ROOTED:  # a broadcast or scatter completes with the root's call
            return self._brings(call.op.root, call)
        return all(brought)

    def _brings(self, other: int, call: Begun) -> bool:
        calls = self.ranks[other].begun.get(call.op.group, [])
        there = calls[call.number - 1].op if len(calls) >= call.number else None
        if there is None or there.op != call.op.op or there.size < call.op.size:
            return False
        return there.op not in ROOTED or there.root == call.op.root

    def moves(self) -> list[tuple[Rank, Begun | None]]:
        found: list[tuple[Rank, Begun | None]] = [(rank, None) for rank in self.ranks if rank.can_run]
        for number, rank in enumerate(self.ranks):
            calls = [call for calls in rank.begun.values() for call in calls if not call.done]
            found += [(rank, call) for call in calls if self.may_end(number, call)]
        return found

    def step(self, chance: random.Random) -> bool:
        moves = self.moves()
        if not moves:
            return False
        rank, call = chance.choice(moves)
        if call is None:
            rank.run()
        else:
            call.done = True
        return True

    def positions(self) -> dict[int, Position]:
        return {number: self._position(number, rank) for number, rank in enumerate(self.ranks)}

    def _position(self, number: int, rank: Rank) -> Position:
        if rank.has_ended:
            return Position(number, ended_after=len(rank.begun.get("0", [])))
        if rank.how not in ("sync", "backward") or rank.can_run:
            return Position(number)
        groups = []
        for name, members in self.groups.items():
            if number in members:
                calls = rank.begun.get(name, [])
                if any(not call.done for call in calls[:-RECENT]):
                    return Position(number)
                groups.append(
                    GroupCalls(name, () if name == "0" else members, len(calls), tuple(map(told, calls[-RECENT:])))
                )
        waits = Waits(rank.how, len(self.ranks), tuple(groups))
        return Position(number, waits=waits, where=f"train.py:{rank.at} in step")


def told(begun: Begun) -> Call:
    op = begun.op
    root = op.root if op.op in ROOTED and begun.op.how == "sync" else -1
    return Call(begun.number, op.op, f"[{op.size // 4}] float32", op.size, begun.done, root)


def ops(
    hows: tuple[str, ...], names: tuple[str, ...], kinds: tuple[str, ...], sizes: tuple[int, ...]
) -> st.SearchStrategy[Op]:
    made = st.builds(Op, st.sampled_from(hows), st.sampled_from(names), st.sampled_from(kinds), st.sampled_from(sizes))
    backward = made.map(lambda op: op._replace(op="all_reduce") if op.how == "backward" else op)
    return backward.map(lambda op: op._replace(size=0) if op.op == "barrier" else op)


@st.composite
def worlds(
    draw: st.DrawFn,
    *,
    hows: tuple[str, ...],
    kinds: tuple[str, ...],
    sizes: tuple[int, ...] = (16, 64),
    default_only: bool = False,
) -> World:
    """Generate the same lines for all ranks of a group, and then add some mistakes."""
    size = draw(st.integers(2, 4))
    names = ("0",) if default_only else tuple(GROUPS[size])
    lines = draw(st.lists(ops(hows, names, kinds, sizes), min_size=1, max_size=8))
    programs = []
    for rank in range(size):
        own = [op._replace(root=GROUPS[size][op.group][0]) for op in lines if rank in GROUPS[size][op.group]]
        for _ in range(draw(st.integers(0, 2)) if draw(st.booleans()) else 0):
            if own:
                at = draw(st.integers(0, len(own) - 1))
                mine = [name for name in names if rank in GROUPS[size][name]]
                kind = draw(st.sampled_from(("drop", "swap", "other")))
                if kind == "drop":
                    del own[at]
                elif kind == "swap":
                    own[at], own[at - 1] = own[at - 1], own[at]
                else:
                    other = draw(ops(hows, tuple(mine), kinds, sizes))
                    own[at] = other._replace(root=draw(st.sampled_from(GROUPS[size][other.group])))
        programs.append(own)
    return World(programs)


def completes(world: World) -> bool:
    """True if the program can complete, in whatever order: a call that can end now can also end later."""
    copy, chance = World([rank.program for rank in world.ranks]), random.Random(0)
    while copy.step(chance):
        pass
    return all(rank.has_ended for rank in copy.ranks)


ALL = ("all_reduce", "barrier", "all_gather")


@settings(max_examples=EXAMPLES)
@given(worlds(hows=("sync", "sync", "async", "backward", "pause"), kinds=(*ALL, *ROOTED)), st.integers(0, 2**32))
def test_a_program_that_can_complete_is_never_called_deadlocked(world: World, seed: int) -> None:
    """A program that can complete must never be called deadlocked: its job would be restarted."""
    if not completes(world):
        return
    chance = random.Random(seed)
    while True:
        assert conflict(world.positions()) is None
        if not world.step(chance):
            return


@settings(max_examples=EXAMPLES)
@given(worlds(hows=("sync", "sync", "async", "backward", "pause"), kinds=(*ALL, *ROOTED)), st.integers(0, 2**32))
def test_ranks_that_are_called_deadlocked_never_make_progress(world: World, seed: int) -> None:
    """Even if the program cannot complete, each reported collective must already be blocked, and stay blocked."""
    chance = random.Random(seed)
    while world.step(chance):
        found = conflict(world.positions())
        if found is not None:
            (stuck,) = [c for c in world.ranks[found.rank].begun[found.group.name] if c.number == found.call.number]
            while world.step(chance):
                pass
            assert not stuck.done
            return


def sure(*, default_only: bool) -> st.SearchStrategy[World]:
    return worlds(hows=("sync",), kinds=ALL, sizes=(16,), default_only=default_only)


@settings(max_examples=EXAMPLES)
@given(st.booleans().flatmap(lambda alone: sure(default_only=alone)), st.integers(0, 2**32))
def test_a_program_that_cannot_complete_is_called_deadlocked_once_nothing_moves(world: World, seed: int) -> None:
    """A program that cannot complete must be called deadlocked when nothing moves, and not after half an hour."""
    chance = random.Random(seed)
    while world.step(chance):
        pass
    of_subgroups = any(name != "0" for rank in world.ranks for name in rank.begun)
    ended = [rank.has_ended for rank in world.ranks]
    if all(ended) or (any(ended) and of_subgroups):
        return
    found = conflict(world.positions())
    assert found is not None
    text = sentence(found, world.positions())
    assert text.startswith("is deadlocked: rank ")
    assert "train.py:" in text


@given(worlds(hows=("sync",), kinds=ALL), st.integers(0, 2**32))
def test_the_collective_that_a_rank_waits_in_survives_the_transfer_between_agents(world: World, seed: int) -> None:
    chance = random.Random(seed)
    while world.step(chance):
        for position in world.positions().values():
            assert waits_of(written(position.waits)) == position.waits
