"""When the group is stalled, and which rank is the culprit: node 0's part of the watchdog. Pure; `LeaderState` has one.

A group is stalled when every node whose ranks count reports it. Then all ranks are asked where they are, and the one
that is furthest behind is named: by the collective that it began last, because the others wait in the next one for it;
else by its step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

from ddpjob_core.failures import EXCEPTION_MAX, RESUMABLE_EXIT_CODE, Failure
from ddprun.core import deadlock
from ddprun.core.stall_monitor import BY_COLLECTIVES, StallReport

DOES_NOT = {"start": "made no step", "train": "made no step", "save": "saved", "evaluate": "evaluated"}


class Position(NamedTuple):
    """Where a rank stands."""

    rank: int
    step: int = 0
    sequence: int = 0
    """Of its last collective in the default group; 0: unknown."""
    op: str = ""
    done: bool = True
    where: str = ""
    """The innermost line of its own code: train.py:41 in load_batch."""
    answers: bool = True
    """False: nothing in it could speak. Its step is known all the same."""
    idle: bool = False
    """Whether it needs no other rank any more, and has used no CPU since it is stalled."""
    apart: bool = False
    """Whether it waits in another group, or does not answer on its way out: its last collective in the default group
    does not say what it waits for."""
    shape: str = ""
    """Of what it brings to its last collective: [4, 3] float32."""
    waits: deadlock.Waits | None = None
    """What it waits in, if that was asked and is certain."""
    ended_after: int = -1
    """Of a process that has ended with 0: the operations that it had begun in the default group; -1: see Standing."""


class TimeoutQuestion:
    """What the nodes have said since a rank waited for another one until its timeout."""

    def __init__(self) -> None:
        self._positions: dict[int, Sequence[Position]] = {}  # by node, of those that have answered
        self.asked = False

    def ask(self) -> None:
        """From now on answers are waited for."""
        self.asked = True

    def answered(self, node: int, positions: Sequence[Position]) -> None:
        """A node says where its ranks are that still run."""
        self._positions[node] = positions

    def is_open(self, nodes: Collection[int]) -> bool:
        """Whether one of these nodes, where ranks run, is still to answer."""
        return self.asked and not set(nodes) <= set(self._positions)

    def settle(self, failures: Sequence[Failure], nodes: Collection[int]) -> Failure | None:
        """The rank that was waited for, where that is clear. failures: of the ranks that have ended. nodes: where ranks
        still run."""
        self.asked = False
        if not set(nodes) <= set(self._positions):
            return None
        return kept_waiting(failures, [position for node in sorted(nodes) for position in self._positions[node]])


class DeadlockSearch:
    """The nodes whose ranks have not run for seconds, and what their ranks wait in."""

    def __init__(self) -> None:
        self._still: dict[int, bool] = {}  # by node
        self._positions: dict[int, Sequence[Position]] | None = None  # by node, of those that have answered
        self._is_known = False  # what the ranks wait in, as long as none has run

    @property
    def asked(self) -> bool:
        """Whether the ranks were asked what they wait in."""
        return self._positions is not None

    def heard(self, node: int, *, still: bool) -> None:
        """The ranks of a node have not run for seconds, or one has."""
        self._is_known = self._is_known and still
        self._still[node] = still

    def forget(self, node: int) -> None:
        """Its ranks have ended."""
        self._still.pop(node, None)
        self._is_known = False

    def is_due(self, nodes: Collection[int]) -> bool:
        """Whether to ask now: no rank of these nodes, where ranks run, has run since anything was known."""
        return not (self.asked or self._is_known) and bool(nodes) and all(self._still.get(node) for node in nodes)

    def ask(self) -> None:
        """From now on answers are waited for."""
        self._positions = {}

    def answered(self, node: int, positions: Sequence[Position], nodes: Collection[int]) -> bool:
        """A node says what its ranks wait in; whether all of these nodes have."""
        if self._positions is None:
            return False
        self._positions[node] = positions
        return set(nodes) <= set(self._positions)

    def settle(self, nodes: Collection[int]) -> Failure | None:
        """Return the deadlock, if all of these nodes have answered and it is certain. nodes: where ranks run."""
        answers, self._positions, self._is_known = self._positions or {}, None, True
        if not set(nodes) <= set(answers) or not all(self._still.get(node) for node in nodes):
            return None
        positions = {p.rank: p for node in sorted(nodes) for p in answers[node]}
        standings = [deadlock.Standing(p.rank, p.waits, p.where, p.ended_after) for p in positions.values()]
        found = deadlock.conflict(standings)
        if found is None:
            return None
        text = deadlock.sentence(found, {standing.rank: standing for standing in standings})
        step, code = positions[found.other].step, RESUMABLE_EXIT_CODE
        return Failure(found.other, exit_code=code, exception=text[:EXCEPTION_MAX], step=step, stalled=True)


class Standstill:
    """What the nodes have said in this generation."""

    def __init__(self) -> None:
        self._reports: dict[int, StallReport] = {}
        self._positions: dict[int, list[Position]] | None = None  # by node, of those that have answered

    @property
    def asked(self) -> bool:
        """Whether the ranks were asked where they are."""
        return self._positions is not None

    def heard(self, node: int, report: StallReport) -> bool:
        """A node's ranks get on, or stand still; whether this is the moment to ask."""
        self._reports[node] = report
        return not self.asked and self.stalled

    def forget(self, node: int) -> float | None:
        """Its ranks have ended, and so got on: for how long the others may stand from now on, if they do."""
        self._reports.pop(node, None)
        return max(report.seconds for report in self._counting) if self.stalled else None

    def ask(self) -> None:
        """From now on answers are waited for."""
        self._positions = {}

    def answered(self, node: int, report: StallReport, positions: Sequence[Position], nodes: Collection[int]) -> bool:
        """A node says where its ranks are; whether all of these nodes have."""
        if self._positions is None:
            return False
        self._reports[node] = report
        self._positions[node] = list(positions)
        return set(nodes) <= set(self._positions)

    def settle(self) -> Failure | None:
        """What is found, if the group is stalled after all; the next answer is to another question."""
        positions = [position for node in sorted(self._positions or {}) for position in (self._positions or {})[node]]
        counting, self._positions = self._counting, None
        stalled = self.stalled
        # The nodes restart their clocks after each question.
        self._reports = {node: report._replace(stalled=False) for node, report in self._reports.items()}
        if not stalled or not positions:
            return None
        # Without the library nobody can say "I evaluate": only who waits in a collective for another one proves a hang,
        # or who has no more collectives to come and does nothing.
        in_none = all(position.done for position in positions)
        if counting[0].level == BY_COLLECTIVES and in_none and not all(position.idle for position in positions):
            return None
        seconds = min(report.seconds for report in counting)
        phase = min(counting, key=lambda report: report.seconds).phase
        return failure(positions, seconds, phase)

    @property
    def _counting(self) -> list[StallReport]:
        level = max((report.level for report in self._reports.values()), default=0)
        return [report for report in self._reports.values() if report.level == level and level > 0]

    @property
    def stalled(self) -> bool:
        """Whether no rank that counts gets on."""
        return bool(self._counting) and all(report.stalled for report in self._counting)


def failure(positions: Sequence[Position], seconds: float, phase: str) -> Failure:
    """made no step for 300 s: rank 3 stands after collective 1041 (all_reduce), the others at 1042; in train.py:41 …"""
    culprit = furthest_behind(positions)
    return _named(culprit, positions, f"{DOES_NOT.get(phase, DOES_NOT['train'])} for {seconds:.0f} s")


def _named(culprit: Position, positions: Sequence[Position], stood: str) -> Failure:
    doing = f"; in {culprit.where}" if culprit.where else ""
    exception = f"{stood}: {_compared(culprit, positions)}{doing}"[:EXCEPTION_MAX]
    return Failure(culprit.rank, exit_code=RESUMABLE_EXIT_CODE, exception=exception, step=culprit.step, stalled=True)


def only_waited(failures: Sequence[Failure]) -> bool:
    """Whether one of these ranks has waited for another one until its timeout, and none has failed by itself."""
    return any(f.waited_in for f in failures) and all(f.waited_in or f.symptom for f in failures)


def kept_waiting(failures: Sequence[Failure], positions: Sequence[Position]) -> Failure | None:
    """made no progress until rank 0 timed out: rank 3 has ended collective 1041 (all_reduce), the others are at 1042

    None where it is not clear that one rank alone is in the way. failures: of the ranks that have ended. positions: of
    those that still run.
    """
    timeouts = [failure for failure in failures if failure.waited_in and failure.rank is not None]
    ended = [Position(failure.rank or 0, failure.step, failure.waited_in, done=False) for failure in timeouts]
    everybody = [*ended, *positions]
    culprit = furthest_behind(everybody) if ended and positions else None
    if culprit is None or culprit in ended or culprit.apart:
        return None
    others = [position for position in everybody if position is not culprit]
    if not (_is_behind(culprit, others) if culprit.answers else all(position.answers for position in others)):
        return None
    return _named(culprit, everybody, f"made no progress until rank {timeouts[0].rank} timed out")


def _is_behind(culprit: Position, others: Sequence[Position]) -> bool:
    """Whether all others have begun a later collective. Who does not answer on its way out has left all of them."""
    counting = [position for position in others if position.answers or not position.apart]
    return culprit.sequence > 0 and all(position.sequence > culprit.sequence for position in counting)


def furthest_behind(positions: Sequence[Position]) -> Position:
    """The lowest collective first, then the lowest step; of those in one collective, who has left it.

    A rank that does not answer is held by something below Python, or has nobody to answer: it is the one where all the
    others do nothing but wait.
    """
    known = [position for position in positions if position.sequence]
    alike = Counter((position.sequence, position.op, position.shape) for position in known)
    silent = [position for position in positions if not position.answers]
    if silent and not any(position.done for position in positions if position.answers):
        return min(silent, key=lambda p: (p.step, p.rank))
    return min(
        known or positions,
        key=lambda p: (p.sequence, not p.done, alike[p.sequence, p.op, p.shape], p.step, p.rank),
    )


def _compared(culprit: Position, positions: Sequence[Position]) -> str:
    who, others = f"rank {culprit.rank}", [position for position in positions if position.rank != culprit.rank]
    collective = f"{culprit.sequence} ({culprit.op})"
    if culprit.idle and culprit.done:
        last = f"has ended its last collective, {collective}," if culprit.sequence else "has trained"
        return f"{who} {last} and does not end" + ("" if culprit.answers else ", nor answer")
    if not culprit.answers:
        return f"{who} stands at step {culprit.step} and does not answer, the others wait"
    if culprit.sequence:
        name = f"collective {collective}"
        known = sorted({position.sequence for position in others if position.sequence})
        stands = "has ended" if culprit.done else "stands in"
    else:
        name, stands = f"step {culprit.step}", "stands at"
        known = sorted({position.step for position in others})
    if known and known[-1] == (culprit.sequence or culprit.step):
        return f"{who} {stands} {name}{_in_another(culprit, others)}"
    return f"{who} {stands} {name}" + (f", the others are at {_span(known)}" if known else "")


def _in_another(culprit: Position, others: Sequence[Position]) -> str:
    """Whether another rank is in another collective under the same number, or brings another shape to it."""
    own = (culprit.op, culprit.shape)
    for other in others if culprit.sequence else ():
        if other.sequence == culprit.sequence and (other.op, other.shape) != own:
            shape = f" with {culprit.shape}" if culprit.shape and other.op == culprit.op else ""
            theirs = " ".join(filter(None, (other.op, other.shape if other.op == culprit.op else "")))
            return f"{shape}, rank {other.rank} in {other.sequence} ({theirs})"
    return ", as the others do"


def _span(numbers: list[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
