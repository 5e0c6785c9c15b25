"""Decide on node 0 if the group is stalled, and which rank is the cause. Pure.

Nodes report stalls at a level. The nodes with the highest level count; the group is stalled if all of them report a
stall. All ranks then report their positions. The cause is the rank furthest behind. This is the rank with the lowest
collective, because the others wait for it in the next; if collectives are equal, it has the lowest step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from ddpjob_core.failures import EXCEPTION_MAX, RESUMABLE_EXIT_CODE, Failure
from ddprun.core import deadlock
from ddprun.core.deadlock import Position
from ddprun.core.stall_monitor import BY_COLLECTIVES, StallReport

DOES_NOT = {"start": "made no step", "train": "made no step", "save": "saved", "evaluate": "evaluated"}


class Question:
    """A request to all nodes for the positions of their ranks, with the answers."""

    def __init__(self) -> None:
        self._positions: dict[int, Sequence[Position]] | None = None  # by node; only nodes that have answered

    @property
    def asked(self) -> bool:
        """True while nodes may still answer the request."""
        return self._positions is not None

    def ask(self) -> None:
        """Begin the request: nodes may now answer with their positions."""
        self._positions = {}

    def take(self, node: int, positions: Sequence[Position]) -> None:
        """Store the positions that a node has answered; ignore them if there is no request."""
        if self._positions is not None:
            self._positions[node] = positions

    def is_answered(self, nodes: Collection[int]) -> bool:
        """True if all nodes in `nodes` have answered."""
        return self._positions is not None and set(nodes) <= set(self._positions)


class TimeoutQuestion(Question):
    """The request for positions after a rank has waited for another until its timeout."""

    def settle(self, failures: Sequence[Failure], nodes: Collection[int]) -> Failure | None:
        """Return the failure of the rank that the others waited for, if that is clear.

        failures: of ended ranks. nodes: with running ranks.
        """
        answers, self._positions = self._positions or {}, None
        if not set(nodes) <= set(answers):
            return None
        return kept_waiting(failures, [position for node in sorted(nodes) for position in answers[node]])


class DeadlockSearch(Question):
    """The request for what each rank waits in, sent while no rank uses the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self._still: dict[int, bool] = {}  # by node: True if its ranks use no CPU
        self._is_known = False  # True from `settle` until a rank uses the CPU again or ends

    def heard(self, node: int, *, still: bool) -> None:
        """Record that all ranks of a node have used no CPU for seconds (still=True), or that a rank has used it."""
        self._is_known = self._is_known and still
        self._still[node] = still

    def forget(self, node: int) -> None:
        """Drop a node whose ranks have ended."""
        self._still.pop(node, None)
        self._is_known = False

    def is_due(self, nodes: Collection[int]) -> bool:
        """True if the leader should ask in what the ranks of these nodes wait: no rank uses CPU, no answer is known."""
        return not (self.asked or self._is_known) and bool(nodes) and all(self._still.get(node) for node in nodes)

    def settle(self, nodes: Collection[int]) -> Failure | None:
        """Return the deadlock, if it is certain and all nodes have answered. nodes: those with running ranks."""
        answers, self._positions, self._is_known = self._positions or {}, None, True
        if not set(nodes) <= set(answers) or not all(self._still.get(node) for node in nodes):
            return None
        positions = {p.rank: p for node in sorted(nodes) for p in answers[node]}
        found = deadlock.conflict(positions)
        if found is None:
            return None
        text = deadlock.sentence(found, positions)
        step, code = positions[found.other].step, RESUMABLE_EXIT_CODE
        return Failure(found.other, exit_code=code, exception=text[:EXCEPTION_MAX], step=step, stalled=True)


class Standstill(Question):
    """The request for positions after a stall, and the nodes' stall reports in this generation."""

    def __init__(self) -> None:
        super().__init__()
        self._reports: dict[int, StallReport] = {}

    def heard(self, node: int, report: StallReport) -> bool:
        """Store a node's report. True if it is time to ask for positions."""
        self._reports[node] = report
        return not self.asked and self.stalled

    def forget(self, node: int) -> float | None:
        """Drop a node whose ranks have ended. Return the seconds that the others may stay stalled from now on; None
        if they are not stalled."""
        self._reports.pop(node, None)
        return max(report.seconds for report in self._counting) if self.stalled else None

    def answered(self, node: int, report: StallReport, positions: Sequence[Position], nodes: Collection[int]) -> bool:
        """Store a node's report and the positions of its ranks. True if all nodes in `nodes` have answered."""
        if self.asked:
            self._reports[node] = report
        self.take(node, positions)
        return self.is_answered(nodes)

    def settle(self) -> Failure | None:
        """End the request. Return the failure if the group is still stalled and a hang is certain."""
        positions = [position for _, of_node in sorted((self._positions or {}).items()) for position in of_node]
        counting, stalled, self._positions = self._counting, self.stalled, None
        # From this request on the nodes measure the next stall.
        self._reports = {node: report._replace(stalled=False) for node, report in self._reports.items()}
        if not stalled or not positions:
            return None
        # Without the library a rank cannot report that it is evaluating.
        # So only a rank that waits in a collective, or that is idle and needs no other rank, proves a hang.
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
        """True if all nodes that report at the highest level are stalled."""
        return bool(self._counting) and all(report.stalled for report in self._counting)


def failure(positions: Sequence[Position], seconds: float, phase: str) -> Failure:
    """Return a stall as a failure, for example: made no step for 300 s: rank 3 has ended collective 1041 (all_reduce),
    the others are at 1042; in train.py:41 …
    """
    culprit = furthest_behind(positions)
    return _named(culprit, positions, f"{DOES_NOT.get(phase, DOES_NOT['train'])} for {seconds:.0f} s")


def _named(culprit: Position, positions: Sequence[Position], stood: str) -> Failure:
    doing = f"; in {culprit.where}" if culprit.where else ""
    exception = f"{stood}: {_compared(culprit, positions)}{doing}"[:EXCEPTION_MAX]
    return Failure(culprit.rank, exit_code=RESUMABLE_EXIT_CODE, exception=exception, step=culprit.step, stalled=True)


def only_waited(failures: Sequence[Failure]) -> bool:
    """True if the failures are a rank that waited for another until its timeout, and consequences of that."""
    return any(f.waited_in for f in failures) and all(f.waited_in or f.symptom for f in failures)


def kept_waiting(failures: Sequence[Failure], positions: Sequence[Position]) -> Failure | None:
    """Return a timeout as a failure, for example: made no progress until rank 0 timed out: rank 3 has ended collective
    1041 (all_reduce), the others are at 1042.

    Return None if it is not clear that a single rank is the cause. failures: of ended ranks. positions: of running
    ranks.
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
    """True if all other ranks have begun a later collective, except ranks that are exiting and do not answer."""
    counting = [position for position in others if position.answers or not position.apart]
    return culprit.sequence > 0 and all(position.sequence > culprit.sequence for position in counting)


def furthest_behind(positions: Sequence[Position]) -> Position:
    """Return the rank whose collective has the lowest number. Of several ranks prefer one that has completed the
    collective, then the rarest operation or shape, then the lowest step.

    A rank that does not answer is blocked below Python, or has no thread that could answer. Such a rank is the cause if
    all others only wait.
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
    span = " to ".join(map(str, sorted({*known[:1], *known[-1:]})))
    return f"{who} {stands} {name}" + (f", the others are at {span}" if known else "")


def _in_another(culprit: Position, others: Sequence[Position]) -> str:
    """Describe another rank's collective with the same number, if its operation or shape is different."""
    own = (culprit.op, culprit.shape)
    for other in others if culprit.sequence else ():
        if other.sequence == culprit.sequence and (other.op, other.shape) != own:
            shape = f" with {culprit.shape}" if culprit.shape and other.op == culprit.op else ""
            theirs = " ".join(filter(None, (other.op, other.shape if other.op == culprit.op else "")))
            return f"{shape}, rank {other.rank} in {other.sequence} ({theirs})"
    return ", as the others do"
