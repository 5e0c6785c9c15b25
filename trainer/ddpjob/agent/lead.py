"""What node 0's agent decides for all: when a generation starts, stops, starts again, and when the job is over.

Pure: events in with the time, orders out; `agent.py` carries them. The leader's own node is node 0 like any other,
and a job of one node follows the same rules.

    gathering   until every node is here and nothing of the last generation runs anywhere
    running     until a rank fails, a node is lost, or all nodes have finished
    stopping    until every node that is here has said that its ranks are gone
    pausing     the back-off
    over
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from .options import Budget

if TYPE_CHECKING:
    from .. import rules

Failure = dict[str, Any]  # a termination message (termination.py): rank, exitCode, signal, exception, time, …
State = Literal["gathering", "running", "stopping", "pausing", "over"]


class Start(NamedTuple):
    """To every node: start your ranks."""

    generation: int


class Stop(NamedTuple):
    """To these nodes: end your ranks, and say when they are gone."""

    nodes: Collection[int]
    generation: int
    patient: bool
    """Whether ranks may have something to save together: they were told to stop and have not lost each other."""


class End(NamedTuple):
    """To every node: it is over."""

    code: int
    """0, or how the guilty rank ended; 75 where nobody is guilty."""
    failure: Failure | None
    why: str


RESUMABLE = 75  # rules.RESUMABLE_EXIT_CODE; the rules are imported when ranks run, for a job waits for this import
Order = Start | Stop | End


class Lead:
    """The state of one job, as its leader knows it."""

    def __init__(self, nodes: int, budget: Budget, join_seconds: float, now: float) -> None:
        self.state: State = "gathering"
        self.generation = -1
        self.orders: list[Order] = []
        self._nodes, self._budget = nodes, budget
        self._join_seconds = join_seconds
        self._here: set[int] = set()
        self._finished: set[int] = set()
        self._stopping: set[int] = set()  # nodes that have not yet said that their ranks are gone
        self._told = False
        self._failures: list[Failure] = []  # as they came: clocks of nodes differ, and jump
        self._history: rules.History | None = None  # nothing has failed
        self.said = ""  # what the last failure was, and what it cost
        self._since = now  # of this state
        self._ran_seconds = 0.0  # the last generation
        self._until: float | None = now + join_seconds

    @property
    def restarts(self) -> int:
        """In place, so far."""
        return 0 if self._history is None else self._history.total

    @property
    def deadline(self) -> float | None:
        """When `tick` has something to do."""
        return self._until

    def joined(self, node: int, now: float, generation: int = -1) -> None:
        """An agent is here, no rank runs with it, and the last that did were of that generation."""
        assert node not in self._here, "a node is lost before it comes again"
        self._here.add(node)
        self.generation = max(self.generation, generation)  # a leader that replaces another one goes on from there
        self._start_if_all_are_here(now)

    def lost(self, node: int, now: float) -> None:
        """An agent is gone, or does not answer."""
        if node not in self._here:
            return
        self._here.discard(node)
        self._stopping.discard(node)
        self._finished.discard(node)
        if self.state == "running":
            self._stop([_vanished(node)], now)
        elif self.state == "stopping":
            self._failures.append(_vanished(node))
            self._settle_if_all_have_stopped(now)

    def failed(self, node: int, failures: list[Failure], now: float) -> None:
        """A rank of this node has ended with something else than 0."""
        if self.state == "running" and node in self._here:
            self._stop(failures, now)

    def stopped(self, node: int, failures: list[Failure], now: float) -> None:
        """No rank of this node runs any more."""
        if self.state == "stopping" and node in self._stopping:
            self._stopping.discard(node)
            known = {failure["rank"]: failure for failure in self._failures}
            for failure in failures:
                if failure["rank"] in known:
                    known[failure["rank"]].update(failure)
                else:
                    self._failures.append(failure)
            self._settle_if_all_have_stopped(now)

    def finished(self, node: int, now: float) -> None:
        """Every rank of this node has ended with 0."""
        if self.state == "running" and node in self._here:
            self._finished.add(node)
            if len(self._finished) == self._nodes:
                self._end(0, None, "all ranks have ended", now)

    def told(self, now: float) -> None:
        """A node was told from outside to end: no generation follows this one."""
        self._told = True
        if self.state in ("gathering", "pausing"):
            self._end(RESUMABLE, None, "told to stop", now)

    def tick(self, now: float) -> None:
        """Time has passed."""
        if self._until is None or now < self._until:
            return
        if self.state == "pausing":
            self._enter("gathering", now, self._join_seconds)
            self._start_if_all_are_here(now)
        elif self.state == "gathering":
            missing = sorted(set(range(self._nodes)) - self._here)
            why = f"nodes {', '.join(map(str, missing))} did not come within {self._join_seconds:g} s"
            self._end(RESUMABLE, None, why, now)

    def _start_if_all_are_here(self, now: float) -> None:
        if self.state == "gathering" and len(self._here) == self._nodes:
            self.generation += 1
            self._finished, self._failures = set(), []
            self._enter("running", now, None)
            self.orders.append(Start(self.generation))

    def _stop(self, failures: list[Failure], now: float) -> None:
        self._failures += failures
        self._ran_seconds = now - self._since
        patient = self._told or any(failure.get("resumable") for failure in failures)
        self._stopping = set(self._here)
        self._enter("stopping", now, None)
        if self._stopping:
            self.orders.append(Stop(frozenset(self._stopping), self.generation, patient))
        else:
            self._settle_if_all_have_stopped(now)

    def _settle_if_all_have_stopped(self, now: float) -> None:
        if self._stopping:
            return None
        failure = root_cause(self._failures)
        code = int(failure["exitCode"])
        if self._told:
            return self._end(RESUMABLE, None, "told to stop", now)
        verdict = self._judge(failure, now)
        if isinstance(verdict, str):
            return self._end(code, failure, f"{describe(failure)}; {verdict}", now)
        self.said = f"{describe(failure)}; charged to {verdict.charged_to}, waiting {verdict.wait_seconds} s"
        self._history = verdict.history
        self._enter("pausing", now, verdict.wait_seconds)
        return self.tick(now)

    def _judge(self, failure: Failure, now: float) -> rules.Verdict | str:
        """The restart that follows, or why none does."""
        import datetime as dt

        from .. import rules

        evidence = rules.Evidence(
            exit_code=failure["exitCode"], exception=failure["exception"], vanished=failure.get("vanished", False)
        )
        found = "infrastructure" if failure["symptom"] else rules.classify(evidence)
        # The agent sees no steps yet: a generation that lasted is what shows that it went well.
        attempt = rules.Attempt(made_a_new_step=False, reports_steps=False, ran_seconds=self._ran_seconds)
        # Seconds of this agent, not of a clock that may jump: only their differences count.
        moment = dt.datetime.fromtimestamp(max(0.0, now), dt.timezone.utc)
        limits = rules.Limits(backoff_limit=self._budget.application)
        verdict = rules.judge(found, self._history or rules.History(), attempt, limits, moment)
        if not verdict.restart:
            return f"{found}: {verdict.stop}"
        after = verdict.history
        left = self._budget
        if after.infrastructure > left.infrastructure or after.stall > left.stall or after.total > left.total:
            return f"{found}: no restart in place is left"
        return verdict

    def _end(self, code: int, failure: Failure | None, why: str, now: float) -> None:
        self._enter("over", now, None)
        self.orders.append(End(code, failure, why))

    def _enter(self, state: State, now: float, seconds: float | None) -> None:
        self.state, self._since = state, now
        self._until = None if seconds is None else now + seconds


def root_cause(failures: list[Failure]) -> Failure:
    """The first that is not the mere symptom of another one, a lost node only where nothing else is known."""
    assert failures, "a generation is stopped for a failure"
    return min(failures, key=lambda f: 2 if f["symptom"] else 1 if f.get("vanished") or f["resumable"] else 0)


def describe(failure: Failure) -> str:
    """rank 3 ended with exit code 7 (ValueError: no such shard: 7)"""
    if failure.get("vanished"):
        return f"node {failure['node']} is lost"
    how = failure["signal"] or f"exit code {failure['exitCode']}"
    return f"rank {failure['rank']} ended with {how}" + (f" ({failure['exception']})" if failure["exception"] else "")


def _vanished(node: int) -> Failure:
    return {
        "rank": -1,
        "node": node,
        "exitCode": RESUMABLE,
        "signal": "",
        "exception": "",
        "resumable": False,
        "symptom": False,
        "vanished": True,
    }
