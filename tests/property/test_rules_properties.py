"""No sequence of failures exceeds a budget, and no failure counts against the wrong one."""

import datetime as dt
from typing import get_args

from hypothesis import given
from hypothesis import strategies as st

from ddpjob_core import budget, rules
from ddpjob_core.failure_policy import Action, PolicyRule

NOW = dt.datetime(2031, 3, 5, 7, 11, 13, tzinfo=dt.timezone.utc)
classes = st.sampled_from(get_args(rules.Class))
attempts = st.builds(budget.Attempt, st.booleans(), st.booleans(), st.floats(0, 1e6))
limits = st.builds(budget.Limits, st.integers(0, 5), st.none() | st.integers(1, 4000))
# Seconds between two failures; a negative number is a clock that was set back.
failures = st.lists(st.tuples(classes, attempts, st.integers(-100, 4000)), max_size=40)
Failures = list[tuple[rules.Class, budget.Attempt, int]]
Step = tuple[rules.Class, budget.RestartHistory, rules.Verdict, dt.datetime]


def life(of: Failures, allowed: budget.Limits) -> list[Step]:
    """Return each failure with the history before it, the verdict and the time, until the job ends."""
    history, now, steps = budget.RestartHistory(), NOW, []
    for found, attempt, later in of:
        now += dt.timedelta(seconds=later)
        verdict = rules.judge(found, history, attempt, allowed, now)
        steps.append((found, history, verdict, now))
        history = verdict.history
        if not verdict.restart:
            break
    return steps


@given(failures, limits)
def test_budgets_are_never_exceeded(of: Failures, allowed: budget.Limits) -> None:
    for _, _, verdict, now in life(of, allowed):
        assert budget.counted(verdict.history, allowed, now) <= allowed.backoff_limit or not verdict.restart
        assert verdict.history.stall <= budget.STALLS_MAX
        assert verdict.history.in_a_row <= max(budget.INFRASTRUCTURE_IN_A_ROW_MAX, len(of))
        assert 0 <= verdict.wait_seconds <= budget.BACK_OFF_SECONDS_MAX


@given(failures, limits)
def test_infrastructure_failures_never_use_up_the_backoff_limit(of: Failures, allowed: budget.Limits) -> None:
    for found, before, verdict, _ in life(of, allowed):
        if found in ("infrastructure", "stall"):
            assert verdict.history.application == before.application
            assert verdict.history.charged_at == before.charged_at
            assert verdict.stop != "BackoffLimitExceeded"
            assert verdict.charged_to == found


@given(failures, limits)
def test_each_restart_extends_the_history_by_one(of: Failures, allowed: budget.Limits) -> None:
    for _, before, verdict, _ in life(of, allowed):
        after = verdict.history
        if not verdict.restart:
            assert after == before, "what did not restart is not a restart"
            assert verdict.stop
            continue
        assert after.total == before.total + 1
        assert after.application >= before.application
        assert after.infrastructure >= before.infrastructure
        assert after.stall >= before.stall
        assert len(after.charged_at) <= allowed.backoff_limit + 1, "the status must not grow"


@given(failures)
def test_a_job_that_makes_steps_ends_only_by_its_own_budgets(of: Failures) -> None:
    well = [(found, budget.Attempt(True, True, 60.0), later) for found, _, later in of]
    for _, _, verdict, _ in life(well, budget.Limits()):
        assert verdict.stop not in ("NoProgress", "TooManyInfrastructureFailures")
        assert verdict.wait_seconds == 0


@given(classes, st.none() | st.integers(0, 255), st.lists(st.builds(
    PolicyRule, st.sampled_from(get_args(Action)), st.frozensets(st.integers(1, 255)), st.booleans()
)))  # fmt: skip
def test_no_policy_charges_the_application_for_a_failure_of_others(found, code, listed):
    """No policy may charge the application for others' failures, such as a drain with `FailJob` for code 143."""
    assert rules.with_policy(found, code, listed, from_outside=True) == found
    assert rules.with_policy("stall", code, listed) == "stall"
    assert rules.with_policy(found, code, listed) in get_args(rules.Class)


@given(classes.filter(lambda found: found != "stall"), st.integers(1, 255))
def test_an_explicit_rule_always_applies_to_the_exit_of_a_process(found: rules.Class, code: int) -> None:
    """An explicit rule must apply to each exit of a process, also with the codes 75 and 143."""
    for action, want in (("FailJob", "permanent"), ("Count", "application"), ("Ignore", "infrastructure")):
        rule = PolicyRule(action, frozenset({code}))  # type: ignore[arg-type]
        assert rules.with_policy(found, code, [rule]) == want


@given(
    st.sampled_from(["application", "outOfMemory", "infrastructure", "stall"]),
    st.builds(budget.Attempt, st.just(False), st.booleans(), st.floats(0, 1e6), st.booleans()),
    st.integers(0, 200),
)
def test_every_failure_class_has_a_limit_however_long_its_attempts_run(found, attempt, limit):
    """Every failure class must have a limit, or a job without step reports may restart for ever."""
    bounds = {"infrastructure": budget.INFRASTRUCTURE_IN_A_ROW_MAX, "stall": budget.STALLS_MAX}
    history, now, allowed = budget.RestartHistory(), NOW, budget.Limits(limit)
    for _ in range(1000):
        charged = rules.of_complaints(found, history, attempt)
        verdict = rules.judge(charged, history, attempt, allowed, now)
        history, now = verdict.history, now + dt.timedelta(hours=1)
        if not verdict.restart:
            break
    assert not verdict.restart
    only_complaints = found == "infrastructure" and attempt.only_complaints
    bound = limit + rules.PEERS_LOST_FREE if only_complaints else bounds.get(found, limit)
    assert history.total <= bound
