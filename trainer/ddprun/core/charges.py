"""Charge failures to the budgets of the job, and decide whether its ranks are restarted.

An operator, if there is one, replaces a lost pod and charges for it. Restarts without a new pod are charged here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddpjob_core.budget import (
    INFRASTRUCTURE_IN_A_ROW_MAX,
    NO_PROGRESS_MAX,
    STALLS_MAX,
    TRAINED_SECONDS,
    Attempt,
    Budget,
    Grant,
    Limits,
)
from ddpjob_core.failure_policy import PolicyRule
from ddpjob_core.failures import Failure
from ddpjob_core.members import Members
from ddprun.core.generation import Generation, compared, is_wrong

if TYPE_CHECKING:
    from ddpjob_core import rules

REPEATS = "a restart would fail in the same way: not restarted"
# Texts by the reason for which a job fails. For any other reason the text names the budget that is spent.
NOT_RESTARTED: dict[str, str] = {
    "NoProgress": f"{NO_PROGRESS_MAX} restarts in a row brought no new step: not restarted",
    "TooManyStalls": f"{STALLS_MAX} restarts for stalls: not restarted again",
    "TooManyInfrastructureFailures": f"{INFRASTRUCTURE_IN_A_ROW_MAX} restarts in a row for lost nodes: not restarted",
}
CHARGED_MAX = 5


class Charges:
    """The restarts that one leader has charged, and what is left of the budgets."""

    def __init__(
        self,
        budget: Budget,
        *,
        policy: Sequence[PolicyRule],
        has_operator: bool,
        is_local: bool,
        furthest_step: int,
        turn: int | None,
    ) -> None:
        """Arguments: see `LeaderState`."""
        self.failures: list[Failure] = []  # the last failures that cost a restart here, oldest first
        self.furthest_step = furthest_step  # highest step of all ranks, generations and earlier attempts
        self.has_trained = False  # True if the job has made or loaded a step, or ran so long that it must have trained
        self._budget, self._policy = budget, policy
        self._has_operator, self._is_local = has_operator, is_local
        self._turn = turn
        self._furthest_before = furthest_step  # furthest_step when the last failure was charged here
        self._ran_seconds = 0.0  # duration of the last generation

    @property
    def restarts(self) -> int:
        """Number of restarts in place."""
        return self._budget.history.total

    @property
    def counts(self) -> dict[str, int]:
        """Restarts charged by this leader, by class; restarts in a row, including those counted by the operator."""
        return self._budget.report

    def granted(self, grant: Grant, replacement: int) -> None:
        """Apply the operator's counts. replacement: number of the pod of the leader."""
        self._budget = self._budget.renewed(grant, replacement if self._turn is None else self._turn)

    def reached(self, step: int, saved: int) -> None:
        """Record a step that a rank has made. saved: step of the newest checkpoint that was saved or loaded."""
        self.furthest_step = max(self.furthest_step, step)
        self.has_trained |= saved > 0

    def ran(self, seconds: float) -> None:
        """Record the duration of a generation that is being stopped."""
        self._ran_seconds = seconds
        self.has_trained |= self.furthest_step > 0 or seconds >= TRAINED_SECONDS

    def judge(
        self, failure: Failure, current: Generation, number: int, members: Members, now: float, *, does_without: bool
    ) -> tuple[Failure, rules.Verdict | str]:
        """Return the failure with its class, and the verdict or why there is no restart.

        number: of the generation. does_without: True if a node was lost and the others go on without a charge.
        """
        import datetime as dt

        from ddpjob_core import rules

        attempt = Attempt(
            made_a_new_step=self.furthest_step > self._furthest_before,
            reports_steps=self.furthest_step > 0,
            ran_seconds=self._ran_seconds,
            only_complaints=failure.symptom and not failure.unstarted,
        )
        # Seconds of the monotonic clock, because only differences are used.
        moment = dt.datetime.fromtimestamp(max(0.0, now), dt.timezone.utc)
        limits, history = Limits(backoff_limit=self._budget.application), self._budget.history
        found, is_elsewhere = self._class_of(failure, current, number, members, attempt)
        failure = failure._replace(failure_class=found)
        self._furthest_before = self.furthest_step
        verdict = rules.judge(found, history, attempt, limits, moment)
        if is_elsewhere and found == "infrastructure":
            return failure, "another node may have the program"
        if verdict.charged_to is None:
            by_policy = any(rule.matches(failure.exit_code) for rule in self._policy)
            return failure, "not restarted, by failurePolicy" if by_policy else REPEATS
        if verdict.restart and (does_without or self._budget.allows(verdict.charged_to, verdict.history)):
            return failure, verdict
        return failure, NOT_RESTARTED.get(verdict.stop) or self._spent()

    def charge(self, failure: Failure, verdict: rules.Verdict) -> None:
        """Count a restart. failure: with its place and generation, because the next one may have other members."""
        self._budget = self._budget._replace(history=verdict.history)
        self.failures = [*self.failures, failure][-CHARGED_MAX:]

    def note_uncharged(self, verdict: rules.Verdict) -> None:
        """Count a restart that costs nothing, because the others go on without the lost node."""
        spent = self._budget.history.infrastructure
        self._budget = self._budget._replace(history=verdict.history._replace(infrastructure=spent))

    def _spent(self) -> str:
        most = self._budget.max_restarts
        return "no restarts left in place" if most is None else f"no restarts left (--max-restarts {most})"

    def _class_of(
        self, failure: Failure, current: Generation, number: int, members: Members, attempt: Attempt
    ) -> tuple[rules.Class, bool]:
        """Return the class after the user's failurePolicy, and True if another node may have the missing program."""
        from ddpjob_core import rules

        code, history = failure.exit_code, self._budget.history
        found = "infrastructure" if failure.symptom else rules.classify(failure)
        if failure.lacks_program and found in ("permanent", "application"):
            # As in the operator, a missing program counts as permanent if the job never trained and no node has it.
            one_may_have_it = len(current.unable) < len(members) and self._has_operator
            found = "infrastructure" if one_may_have_it else "permanent"
            if self.furthest_step or number > 0:
                found = "application"
        is_again = self._is_local and not attempt.made_a_new_step and self._is_again(failure)
        if found == "application" and (is_again or self._repeats(failure, current, members)):
            found = "permanent"
        found = rules.of_complaints(found, history, attempt)
        ignored = any(rule.matches(code) for rule in self._policy)
        is_elsewhere = found == "infrastructure" and failure.lacks_program and not ignored
        outside = rules.from_outside(failure) or failure.unstarted
        return rules.with_policy(found, code, self._policy, from_outside=outside), is_elsewhere

    def _repeats(self, failure: Failure, current: Generation, members: Members) -> bool:
        """True for a mistake of the script, or a missing script or module, before the first step: on all nodes, or
        twice in a row, because some ranks may be stopped before they make the mistake. The operator has the same rule.
        """
        again = bool(self.failures) and compared(self.failures[-1]) == compared(failure)
        return is_wrong(failure) and (current.have_all_raised(failure, members) or again) and not self.has_trained

    def _is_again(self, failure: Failure) -> bool:
        """True for an exception of the same type and line as the last one. Only checked if all nodes are on one
        machine, where no node is the cause. The plan has the same rule for attempts (`plan/settlement.py`).
        """
        if not self.failures or not failure.where or failure.exit_code in (None, 0):
            return False
        kind, before = (f.exception.partition(":")[0] for f in (failure, self.failures[-1]))
        return kind != "" and (kind, failure.where) == (before, self.failures[-1].where)
