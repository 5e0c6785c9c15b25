"""Events of one generation of ranks, from the start of the ranks until all of them have ended."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from ddpjob_core.failures import BRIEF_MAX, Failure, abridged, root_cause
from ddprun.core.stall_rules import DeadlockSearch, Standstill, TimeoutQuestion

Ended = tuple[int, int]
"""A rank that ended with 0 before it was stopped, and its last step."""


@dataclass
class Generation:
    """Events of the generation that is running or ran last. Each start replaces it."""

    checking: bool = False  # True for a pre-flight
    reruns: str = ""  # why the ranks are restarted at once without a failure; "" if they are not
    finished: set[int] = field(default_factory=set)
    ended: list[Ended] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)  # as they arrived: clocks of nodes differ and jump
    unable: set[int] = field(default_factory=set)  # nodes that cannot start the program
    raised: dict[str, set[int]] = field(default_factory=dict)  # by exception: nodes that raised it
    awaited: str | None = None  # exception of a rank; other nodes get a moment to raise it too
    lost_pods: dict[int, int] = field(default_factory=dict)  # by node: replacement number of the pod lost first
    uncharged: Failure | None = None  # a lost node; when it connects again, its pod is the same or a new one
    standstill: Standstill = field(default_factory=Standstill)
    search: DeadlockSearch = field(default_factory=DeadlockSearch)
    question: TimeoutQuestion = field(default_factory=TimeoutQuestion)
    waited_for: Failure | None = None  # the rank that others waited for until their timeouts

    def note_raised(self, node: int, failures: Sequence[Failure]) -> None:
        """Record the exceptions of a node."""
        for failure in failures:
            self.raised.setdefault(compared(failure), set()).add(node)

    def have_all_raised(self, failure: Failure, nodes: Collection[int]) -> bool:
        """True if ranks of all these nodes raised this exception."""
        return len(self.raised.get(compared(failure), ())) == len(nodes)

    def others_may_raise_it(self, stopping: set[int]) -> bool:
        """True if ranks of a node that is stopping may still raise the awaited exception, and none raised another."""
        assert self.awaited is not None
        return bool(stopping - self.raised.get(self.awaited, set())) and set(self.raised) == {self.awaited}

    def end_of(self, node: int, failures: list[Failure], ended: Ended | None, *, lacks_program: bool) -> None:
        """Record that all ranks of a node have ended."""
        from ddpjob_core import rules

        self.add_ended(ended)
        self.unable |= {node} if lacks_program or any(map(rules.cannot_start, failures)) else set()
        self.note_raised(node, failures)
        self.failures = _merged(self.failures, failures)

    def add_ended(self, ended: Ended | None) -> None:
        """Record a rank that ended with 0 before it was stopped, if there is one."""
        self.ended += [ended] if ended is not None else []

    def cause(self) -> Failure:
        """Return the failure that stopped the generation."""
        assert self.failures, "a generation is stopped for a failure"
        # The rank that others waited for comes last: a rank that failed by itself is more likely the cause.
        # The awaited rank does not count if another rank ended with 0: the missing steps of that rank are the cause.
        stalled = [self.waited_for] if self.waited_for is not None and not self.ended else []
        return _explained(root_cause([*self.failures, *stalled]), self.ended)


def compared(failure: Failure) -> str:
    """Return the exception as other nodes report it: shortened, so that equal exceptions are equal texts."""
    return abridged(failure.exception, BRIEF_MAX)


def _merged(known: list[Failure], news: list[Failure]) -> list[Failure]:
    """Return a node's failures: those that it reports when its ranks have ended replace the known ones. Keep node 0's
    own findings (stalled, pre-flight), because a stopped rank does not report them.
    """
    by_rank = {failure.rank: failure for failure in news}
    ranks = {failure.rank for failure in known}
    kept = [f if f.stalled or f.preflight else by_rank.get(f.rank, f) for f in known]
    return kept + [failure for failure in news if failure.rank not in ranks]


def _explained(failure: Failure, ended: Sequence[Ended]) -> Failure:
    """Return the cause of a lost connection if the other rank ended with 0 (it made fewer steps), else the failure."""
    if not failure.only_complains or not ended or failure.rank is None:
        return failure
    from ddpjob_core import rules

    rank, step = min(ended)
    text = rules.ended_early(step or None, f"rank {failure.rank}", failure.step or None)
    return failure._replace(rank=rank, exit_code=0, signal="", exception=text, step=step, symptom=False, early=True)
