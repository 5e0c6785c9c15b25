"""Prove a deadlock: ranks wait in collectives that can never complete. Pure functions; `LeaderState` calls them.

In: one `Position` per rank, taken while no rank has run for STILL_SECONDS. It lists the collectives the rank has begun
(`reporting/waiting.py`). Out: a conflict and a sentence for the user; None if the deadlock is not certain. Nothing is
kept between calls.

A collective can never complete if a rank of its group

    is in a different operation with the same number in the same group, or contributes fewer bytes to the same one
    has not begun it, and is blocked in a collective that can never complete either
    has exited without beginning it

`_World.stuck` starts with every waiting rank and removes ranks until nothing changes (a greatest fixed point). A rank
stays only if none of its open collectives can complete, because a completed one may let it begin others.

The cost of certainty: with one rank in an unknown state there is no answer. Operations not listed in _NEED_ALL or
_NEED_ANY never count as stuck. An exited rank is only compared in the default group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

SYNC = "sync"
DEFAULT_GROUP = "0"
# Every rank of the group must contribute before any rank has the result.
_NEED_ALL = frozenset(("all_reduce", "sparse_all_reduce", "barrier", "all_gather"))
# A rank may complete these although some ranks do not take part. It is stuck only if no other rank can contribute.
_NEED_ANY = frozenset(("broadcast", "reduce", "gather", "scatter", "all_to_all"))
_WITHOUT_INPUT = ("barrier", "scatter")  # any other operation without input may complete without a peer
_OF_EQUAL_SIZE = frozenset(("all_reduce", "all_gather"))


class Call(NamedTuple):
    """A collective that a rank has begun."""

    number: int
    """Number of the collective in its group."""
    op: str
    shape: str = ""
    size: int = -1
    """Bytes that the rank contributes; -1: unknown."""
    done: bool = False
    root: int = -1
    """The rank that sends or collects; -1: unknown."""


class GroupCalls(NamedTuple):
    """The collectives of a rank in one group."""

    name: str
    ranks: tuple[int, ...]
    """Empty: all ranks."""
    begun: int
    """Number of the newest collective; -1 if unknown."""
    recent: tuple[Call, ...]
    """The latest collectives, oldest first, with all that are not done."""


class Waits(NamedTuple):
    """The collectives that a blocked rank waits in."""

    how: str
    """SYNC if the rank is blocked until its newest collective completes. Any other value: it may still begin others."""
    size: int
    """The number of ranks."""
    groups: tuple[GroupCalls, ...]

    def open_calls(self) -> Iterator[tuple[GroupCalls, Call]]:
        """Yield the collectives that this rank has begun and not completed."""
        return ((group, call) for group in self.groups for call in group.recent if not call.done)

    def group(self, like: GroupCalls) -> GroupCalls | None:
        """Return this rank's record of that group; None if its name or its ranks differ."""
        found = next((group for group in self.groups if group.name == like.name), None)
        return found if found is not None and found.ranks == like.ranks else None


class Position(NamedTuple):
    """How far a rank is, and where it waits."""

    rank: int
    step: int = 0
    sequence: int = 0
    """Number of the rank's last collective in the default group; 0 if unknown."""
    op: str = ""
    done: bool = True
    """False while the rank is in that collective."""
    where: str = ""
    """The innermost line of the script: train.py:41 in load_batch."""
    answers: bool = True
    """False if no thread of the rank could answer. Its step is known anyway."""
    idle: bool = False
    """True if the rank needs no other rank any more, and has used no CPU during the stall."""
    apart: bool = False
    """True if the rank waits in another group, or is exiting and does not answer: its last collective in the default
    group does not show what it waits for.
    """
    shape: str = ""
    """Shape of the rank's contribution to its last collective: [4, 3] float32."""
    waits: Waits | None = None
    """The collectives that the rank waits in; None if it has ended, or if they are not certain."""
    ended_after: int = -1
    """Operations begun in the default group by a process that ended with 0; -1 if it has not ended, or if unknown."""


class CollectiveConflict(NamedTuple):
    """A rank and the other rank that its collective can never get data from."""

    rank: int
    group: GroupCalls
    call: Call
    other: int
    why: str
    """"other": a different collective at this number; "behind": blocked elsewhere before this one; "ended": exited."""


def conflict(ranks: Mapping[int, Position]) -> CollectiveConflict | None:
    """Return the conflict that explains a deadlock best; None if there is none, or if it is not certain."""
    live = {rank: p.waits for rank, p in ranks.items() if p.waits is not None}
    if not live or any(p.waits is None and p.ended_after < 0 for p in ranks.values()):
        return None
    if set(ranks) != set(range(len(ranks))) or any(waits.size != len(ranks) for waits in live.values()):
        return None
    world = _World(ranks, live)
    stuck = world.stuck()
    found = [c for rank in sorted(stuck) if live[rank].how == SYNC for c in world.conflicts(rank, stuck)]
    return min(found, key=world.preference, default=None)


class _World:
    def __init__(self, ranks: Mapping[int, Position], live: dict[int, Waits]) -> None:
        self._ranks, self._live = ranks, live

    def stuck(self) -> set[int]:
        """Return the largest set of ranks whose open collectives can never complete."""
        stuck = {rank for rank, waits in self._live.items() if any(True for _ in waits.open_calls())}
        while True:
            left = {rank for rank in stuck if all(self._never(rank, *open_, stuck) for open_ in self._open(rank))}
            if left == stuck:
                return stuck
            stuck = left

    def conflicts(self, rank: int, stuck: Collection[int]) -> Iterator[CollectiveConflict]:
        for group, call in self._open(rank):
            for other in self._members(group, rank):
                if why := self._keeps(rank, group, call, other, stuck):
                    yield CollectiveConflict(rank, group, call, other, why)

    def preference(self, found: CollectiveConflict) -> tuple[Any, ...]:
        """Sort key: mismatched operations first, and among them the pair whose other rank differs from the majority."""
        place = ("other", "ended", "behind").index(found.why)
        alike = Counter(self._op(rank, found) for rank in self._live)
        rarity = alike[self._op(found.other, found)] - alike[self._op(found.rank, found)]
        return place, rarity if found.why == "other" else 0, found.rank, found.other

    def _op(self, rank: int, found: CollectiveConflict) -> tuple[str, str]:
        call = self._call(rank, found.group, found.call.number)
        return ("", "") if call is None else (call.op, call.shape)

    def _open(self, rank: int) -> list[tuple[GroupCalls, Call]]:
        return list(self._live[rank].open_calls())

    def _members(self, group: GroupCalls, but: int) -> list[int]:
        return [rank for rank in group.ranks or sorted(self._ranks) if rank != but]

    def _call(self, rank: int, group: GroupCalls, number: int) -> Call | None:
        waits = self._live.get(rank)
        own = None if waits is None else waits.group(group)
        return None if own is None else next((call for call in own.recent if call.number == number), None)

    def _never(self, rank: int, group: GroupCalls, call: Call, stuck: Collection[int]) -> bool:
        """True if this collective can never complete on this rank."""
        others = self._members(group, rank)
        if not others or (call.size == 0 and call.op not in _WITHOUT_INPUT):
            return False
        kept = (bool(self._keeps(rank, group, call, other, stuck)) for other in others)
        return any(kept) if call.op in _NEED_ALL else call.op in _NEED_ANY and all(kept)

    def _keeps(self, rank: int, group: GroupCalls, call: Call, other: int, stuck: Collection[int]) -> str:
        """Return why the other rank will never contribute to this collective; "" if it still may."""
        waits = self._live.get(other)
        if waits is None:
            is_short = group.name == DEFAULT_GROUP and 0 <= self._ranks[other].ended_after < call.number
            return "ended" if is_short else ""
        own = waits.group(group)
        if own is None:
            return ""
        there = self._call(other, group, call.number)
        if there is not None:
            return "other" if _differ(rank, call, other, there, len(group.ranks or self._ranks)) else ""
        return "behind" if 0 <= own.begun < call.number and waits.how == SYNC and other in stuck else ""


def _differ(rank: int, call: Call, other: int, there: Call, members: int) -> bool:
    """True if the other rank's collective with this number is a different one, or contributes too few bytes."""
    known = _NEED_ALL | _NEED_ANY
    if call.op not in known or there.op not in known:
        return False
    if call.op != there.op:
        return True
    if call.op in _OF_EQUAL_SIZE:
        return 0 <= there.size < call.size
    if min(call.root, there.root) < 0 or call.root == there.root:
        return False
    return members == 2 or (call.root, there.root) == (rank, other)


def sentence(found: CollectiveConflict, ranks: Mapping[int, Position]) -> str:
    """Return for example `is deadlocked: rank 0 waits in all_reduce [4] float32 (collective 12, train.py:9), …`."""
    one = f"rank {found.rank} waits in {_named(found.group, found.call, ranks[found.rank].where)}"
    other = ranks[found.other]
    if other.waits is None:
        return f"is deadlocked: {one}, and rank {found.other} has ended without it"
    if found.why == "other":
        own = other.waits.group(found.group)
        there = next(call for call in own.recent if call.number == found.call.number) if own is not None else found.call
        verb, where = ("was in", "") if there.done else ("in", other.where)
        return f"is deadlocked: {one}, rank {found.other} {verb} {_named(found.group, there, where)}: these never meet"
    group, call = next(other.waits.open_calls())
    first = f"rank {found.other} first in {_named(group, call, other.where)}"
    return f"is deadlocked: {one}, {first}: each waits for the other"


def _named(group: GroupCalls, call: Call, where: str) -> str:
    to = "to" if call.op in ("gather", "reduce") else "from"
    what = " ".join(filter(None, (call.op, call.shape, f"{to} rank {call.root}" if call.root >= 0 else "")))
    of = "" if group.name == DEFAULT_GROUP else f" of group {group.name}"
    return f"{what} (collective {call.number}{of}{f', {where}' if where else ''})"


def waits_of(written: Any) -> Waits | None:
    """Parse what a rank or another node has written. Raise KeyError, TypeError or ValueError if it is invalid."""
    if not written:
        return None
    groups = []
    for group in written["groups"]:
        calls = tuple(
            Call(int(number), str(op)[:40], str(shape)[:60], int(size), done is True, int(root))
            for number, op, shape, size, done, root in group["recent"]
        )
        groups.append(GroupCalls(str(group["name"])[:64], tuple(map(int, group["ranks"])), int(group["begun"]), calls))
    return Waits(str(written["how"])[:16], int(written["size"]), tuple(groups))


def written(waits: Waits | None) -> dict[str, Any] | None:
    """Return what a rank waits in as JSON for another agent; the inverse of `waits_of`."""
    if waits is None:
        return None
    groups = [{**group._asdict(), "recent": [list(call) for call in group.recent]} for group in waits.groups]
    return {"how": waits.how, "size": waits.size, "groups": groups}
