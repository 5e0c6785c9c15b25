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
from ddprun.core.generation import Generation, compared

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
        self._budget, self._policy = budget, policy
        self._has_operator, self._is_local = has_operator, is_local
        self._turn = turn
        self._furthest_before = furthest_step  # furthest_step when the last failure was charged here
        self._ran_seconds = 0.0  # duration of the last generation
        self._trained_before = furthest_step > 0
        self._trained_here = False  # True if ranks here made or loaded a step, or ran so long that they must have

    @property
    def restarts(self) -> int:
        """Number of restarts in place."""
        return self._budget.history.total

    @property
    def has_trained(self) -> bool:
        """True if the job has trained, in this attempt or an earlier one."""
        return self._trained_here or self._trained_before

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
        self._trained_here |= step > 0 or saved > 0

    def ran(self, seconds: float) -> None:
        """Record the duration of a generation that is being stopped."""
        self._ran_seconds = seconds
        self._trained_here |= seconds >= TRAINED_SECONDS

    def judge(
        self, failure: Failure, current: Generation, members: Members, now: float, *, does_without: bool
    ) -> tuple[Failure, rules.Verdict | str]:
        """Return the failure with its class, and the verdict or why there is no restart.

        does_without: True if a node was lost and the others go on without a charge.
        """
        import datetime as dt

        from ddpjob_core import rules

        attempt = Attempt(
            made_a_new_step=self.furthest_step > self._furthest_before,
            reports_steps=self.furthest_step > 0,
            ran_seconds=self._ran_seconds,
            only_complaints=failure.only_complains,
        )
        # Seconds of the monotonic clock, because only differences are used.
        moment = dt.datetime.fromtimestamp(max(0.0, now), dt.timezone.utc)
        limits, history = Limits(backoff_limit=self._budget.application), self._budget.history
        found, is_elsewhere = self._class_of(failure, current, members, attempt)
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
        self, failure: Failure, current: Generation, members: Members, attempt: Attempt
    ) -> tuple[rules.Class, bool]:
        """Return the class after the user's failurePolicy, and True if another node may have the missing program."""
        from ddpjob_core import rules

        code, history = failure.exit_code, self._budget.history
        before = self.failures[-1] if self.failures else None
        # Some ranks may be stopped before they make the same mistake, so the second time is enough.
        everywhere = again = before is not None and compared(before) == compared(failure)
        everywhere |= current.have_all_raised(failure, members)
        is_permanent = rules.classify(failure) == "permanent" and not failure.symptom
        others_may_start = is_permanent and self._has_operator and not self._is_local and rules.cannot_start(failure)
        if rules.cannot_start(failure):
            # An import may succeed the next time, but an agent is certain that a program is missing.
            is_certain = (again or failure.lacks_program) and not others_may_start
            everywhere = is_certain or len(current.unable) >= len(members)
        stepped, trained = self._trained_here, self._trained_before
        found = rules.class_of(failure, everywhere=everywhere, stepped=stepped, trained=trained)
        found = "infrastructure" if failure.symptom else found
        if self._is_local and is_permanent and found == "infrastructure":
            found = "application"  # a local run has no other nodes
        if self._is_local and before is not None and not attempt.made_a_new_step:
            is_again = found in rules.OWN and rules.is_again(failure, before)
            found = "permanent" if is_again else found
        found = rules.of_complaints(found, history, attempt)
        ignored = any(rule.matches(code) for rule in self._policy)
        is_elsewhere = found == "infrastructure" and others_may_start and not ignored
        outside = rules.from_outside(failure) or failure.unstarted
        return rules.with_policy(found, code, self._policy, from_outside=outside), is_elsewhere
