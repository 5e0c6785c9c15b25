"""The counts of restarts in operator and agents, while reports are lost, repeated, late and out of order, pods are
replaced and the operator crashes. With a wrong count a job fails too early, or restarts for ever."""

import datetime as dt
from typing import Any, NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ddpjob_core import budget, rules
from ddpjob_core.budget import STALLS_MAX, Attempt, Budget, Grant, Known, Limits, RestartHistory, Spent

NOW = dt.datetime(2031, 3, 5, 7, 11, 13, tzinfo=dt.timezone.utc)
# No step is reported, so a restart can only be refused because of a budget.
SILENT = Attempt(made_a_new_step=False, reports_steps=False, ran_seconds=30)
Turn = tuple[int, int]
"""Number of the attempt, and replacement number of node 0's pod in it."""


class Report(NamedTuple):
    turn: Turn
    spent: Spent


class Pod(NamedTuple):
    """A pod's grant (the restarts that its agent may use), and what the operator knew when it created the pod: its own
    restarts, and those that each agent had reported."""

    grant: Grant
    own: Spent
    heard: dict[Turn, Spent]


class Agent:
    """Node 0's agent, which uses the budget as `LeaderState` does."""

    def __init__(self, turn: Turn, pod: Pod, max_restarts: int | None) -> None:
        self.turn, self.pod = turn, pod
        self.budget = Budget.of(pod.grant, max_restarts)

    def join(self, pod: Pod) -> None:
        renewed = self.budget.renewed(pod.grant, self.turn[1])
        if renewed is not self.budget:
            self.budget, self.pod = renewed, pod

    @property
    def spent(self) -> Spent:
        return self.budget.history.spent

    def spends(self, to: Any) -> bool:
        limits = Limits(self.budget.application)
        verdict = rules.judge(to, self.budget.history, SILENT, limits, NOW)
        if not verdict.restart or not self.budget.allows(to, verdict.history):
            return False
        self.budget = self.budget._replace(history=verdict.history)
        return True


def added(*parts: Spent) -> Spent:
    return Spent(*(sum(column) for column in zip(Spent(), *parts, strict=True)))


class Ledger(RuleBasedStateMachine):
    """The operator's status (`history`, `known`, `attempt`, `replacements`), and the real counts (`own`, `heard`, the
    agents)."""

    @initialize(limit=st.integers(0, 4), max_restarts=st.none() | st.integers(0, 6))
    def submitted(self, limit: int, max_restarts: int | None) -> None:
        self.limits, self.max_restarts = Limits(limit), max_restarts
        self.history, self.known, self.attempt = RestartHistory(), Known(), 1
        self.replacements = [0, 0]
        self.own, self.heard, self.agents = Spent(), dict[Turn, Spent](), dict[Turn, Agent]()
        self.reports: list[Report] = []
        self.make_pod()

    # ---- the agents' side

    @rule(
        which=st.integers(0, 2),
        to=st.sampled_from(["application", "application", "infrastructure", "stall"]),
        is_heard=st.booleans(),
    )
    def restart_in_place(self, which: int, to: Any, is_heard: bool) -> None:
        """Restart in place. The agent of a replaced pod may do so too: it may not know that its node is lost."""
        agent = self._one_of(list(self.agents.values())[::-1], which)
        if agent is None:
            return
        before = agent.spent
        others = added(agent.pod.own, *(spent for turn, spent in agent.pod.heard.items() if turn != agent.turn))
        left = getattr(others, to) + getattr(before, to) < {**self._limit(), "infrastructure": 100}[to]
        is_allowed = left and (self.max_restarts is None or before.total < self.max_restarts)
        assert agent.spends(to) == is_allowed, f"of {self.limits}: {others} by others, {before} by this agent"
        if is_allowed:
            self._is_within(to, getattr(self._truth(but=agent.turn), to) - getattr(others, to))
            self.reports.append(Report(agent.turn, agent.spent))
            if is_heard:
                self.a_report_arrives(-1, is_written=True)

    @rule()
    def a_new_pod_joins(self) -> None:
        agent = self.agents.get((self.attempt, self.replacements[0]))
        if agent is not None:
            agent.join(self._pod())

    # ---- the operator's side

    @rule(which=st.integers(0, 100), is_written=st.booleans())
    def a_report_arrives(self, which: int, is_written: bool) -> None:
        """Deliver any report that was ever sent, again or for the first time, or crash before it is written."""
        report = self._one_of(self.reports, which)
        if report is not None and report.turn[0] == self.attempt and is_written:
            self._hear(report)

    @rule(
        to=st.sampled_from(["application", "infrastructure", "stall"]),
        node=st.integers(0, 1),
        leaves_a_message=st.booleans(),
        joins=st.booleans(),
    )
    def a_pod_is_replaced(self, to: Any, node: int, leaves_a_message: bool, joins: bool) -> None:
        """Replace a pod, and charge the replacement. A pod of node 0 that ends normally reports all restarts of its
        agent; a lost pod does not."""
        if node == 0 and leaves_a_message:
            self.the_last_report_arrives()
        if self._charge(to):
            self.replacements[node] += 1
            if node == 0:
                self.make_pod()
            elif joins:
                self.a_new_pod_joins()

    @rule(to=st.sampled_from(["application", "infrastructure", "stall", "suspended"]), leaves_a_message=st.booleans())
    def a_new_attempt_begins(self, to: Any, leaves_a_message: bool) -> None:
        if leaves_a_message:
            self.the_last_report_arrives()
        if to == "suspended" or self._charge(to):
            self.attempt += 1
            self.known, self.replacements = Known(), [0, 0]
            self.make_pod()

    @precondition(lambda self: self.agents)
    @rule()
    def the_last_report_arrives(self) -> None:
        turn = (self.attempt, self.replacements[0])
        if turn in self.agents:
            self._hear(Report(turn, self.agents[turn].spent))
            assert self.heard.get(turn, Spent()) == self.agents[turn].spent, "nothing of this agent is forgotten"

    # ---- what must always hold

    @invariant()
    def counts_are_what_was_spent_and_reported_each_once(self) -> None:
        if not hasattr(self, "known"):
            return
        spent = added(self.own, *self.heard.values())
        most = {"application": self.limits.backoff_limit + 1, "stall": STALLS_MAX + 1}
        assert self.history.spent == Spent(**{k: min(n, most.get(k, n)) for k, n in spent._asdict().items()})

    # ---- helpers

    def make_pod(self) -> None:
        """Create node 0's pod."""
        turn = (self.attempt, self.replacements[0])
        self.agents[turn] = Agent(turn, self._pod(), self.max_restarts)

    def _pod(self) -> Pod:
        """Return a pod. Its grant passes through text, as in an environment variable."""
        grant = Grant.of(self.history, self.limits, NOW, replaced=sum(self.replacements), known=self.known)
        return Pod(Grant.read(grant.text()), self.own, dict(self.heard))

    def _hear(self, report: Report) -> None:
        replacement = report.turn[1]
        new = budget.newly_spent(self.known, replacement, report.spent, self.history, self.limits, NOW)
        if replacement >= self.known.replacement:
            before = self.heard.get(report.turn, Spent())
            self.heard[report.turn] = Spent(*map(max, before, report.spent))
        if new.total:
            self.history = budget.with_newly_spent(
                self.history, new, self.limits, NOW,
                in_a_row=9, charged_in_a_row=9, peers_lost=0, made_a_new_step=False,
            )  # fmt: skip
            self.known = Known(replacement, added(self.known.of(replacement), new))

    def _charge(self, to: Any) -> bool:
        verdict = rules.judge(to, self.history, SILENT, self.limits, NOW)
        if verdict.restart:
            unheard = getattr(self._truth(), to) - getattr(added(self.own, *self.heard.values()), to)
            self.history, self.own = verdict.history, added(self.own, Spent(**{to: 1}))
            self._is_within(to, unheard)
        return verdict.restart

    def _is_within(self, to: str, crossed: int) -> None:
        limit = self._limit().get(to)
        spent = getattr(self._truth(), to)
        assert limit is None or spent <= limit + crossed, f"{spent} restarts by {to} of {limit}; {crossed} crossed"

    def _limit(self) -> dict[str, int]:
        return {"application": self.limits.backoff_limit, "stall": STALLS_MAX}

    def _truth(self, but: Turn | None = None) -> Spent:
        return added(self.own, *(agent.spent for turn, agent in self.agents.items() if turn != but))

    @staticmethod
    def _one_of(items: list[Any], which: int) -> Any:
        return items[which % len(items)] if items else None


def test_each_restart_is_counted_once_and_operator_and_agents_together_stay_within_the_limit() -> None:
    run_state_machine_as_test(Ledger, settings=settings(stateful_step_count=30))


def story() -> None:
    """Play one order of events in which each of the bugs below shows."""
    ledger = Ledger()
    ledger.submitted(limit=4, max_restarts=None)
    ledger.restart_in_place(which=0, to="application", is_heard=True)
    ledger.a_report_arrives(which=0, is_written=True)
    ledger.counts_are_what_was_spent_and_reported_each_once()
    ledger.a_pod_is_replaced("infrastructure", node=1, leaves_a_message=False, joins=True)
    ledger.restart_in_place(which=0, to="application", is_heard=False)
    ledger.a_pod_is_replaced("infrastructure", node=0, leaves_a_message=True, joins=False)
    ledger.a_pod_is_replaced("infrastructure", node=1, leaves_a_message=False, joins=True)
    for _ in range(2):
        ledger.restart_in_place(which=0, to="application", is_heard=True)
        ledger.a_pod_is_replaced("infrastructure", node=1, leaves_a_message=False, joins=True)
    ledger.restart_in_place(which=0, to="application", is_heard=True)
    ledger.counts_are_what_was_spent_and_reported_each_once()
    assert ledger.history.spent == Spent(application=4, infrastructure=5), "and the fifth was refused"


def test_the_history_is_correct_without_a_bug() -> None:
    story()


def _forgets(_: Known, replacement: int) -> Spent:
    return Spent()


def _is_any_agent(self: Known, replacement: int) -> Spent:
    return self.spent


def _counts_again() -> Any:
    newly_spent = budget.newly_spent
    return lambda known, *more: newly_spent(Known(), *more)


def _grants_the_limit() -> Any:
    of = Grant.of
    return staticmethod(lambda history, limits, at, **more: of(RestartHistory(), limits, at, **more))


def _goes_by_any_grant() -> Any:
    return lambda self, grant, replacement: self._by(grant, Spent())


@pytest.mark.parametrize(
    ("where", "name", "mutant"),
    [
        (Known, "of", _forgets),
        (Known, "of", _is_any_agent),
        (budget, "newly_spent", _counts_again()),
        (Grant, "of", _grants_the_limit()),
        (Budget, "renewed", _goes_by_any_grant()),
    ],
    ids=["known forgotten", "known of any agent", "counted again", "the limit granted again", "known part ignored"],
)
def test_a_deliberate_bug_in_the_counts_is_found(monkeypatch, where, name, mutant):
    """A deliberate bug in the counts must be found, or the tests above could miss a wrong count."""
    monkeypatch.setattr(where, name, mutant)
    with pytest.raises(AssertionError):
        story()
