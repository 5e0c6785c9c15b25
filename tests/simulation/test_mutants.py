"""The simulation finds each of these deliberate bugs. If it missed one, its other runs would prove little."""

from __future__ import annotations

import warnings

import mutants
import pytest
from scenario import scenario
from simulate import shrink
from simulation import Outcome, simulate

pytestmark = pytest.mark.timeout(900)  # CPU bound: a busy machine needs longer
SEEDS_MAX = 2000
# The first seed that finds each bug: a search takes hundreds of runs.
# If a code change makes the seed miss its bug, the test searches, passes, and warns with the new seed.
SEEDS: dict[mutants.Mutant, int] = {
    mutants.no_fence: 71,
    mutants.random_names: 79,
    mutants.writes_unread: 665,
    mutants.act_before_record: 1,
    mutants.exit_zero_is_success: 57,
    mutants.last_word_believed: 99,
    mutants.kubelets_end_is_success: 125,
    mutants.early_end_unseen: 72,
    mutants.complaints_free: 28,
    mutants.a_pod_may_say_anything: 21,
    mutants.old_run_id: 184,
    mutants.replaced_at_once: 32,
    mutants.words_added_up: 3,
    mutants.words_dropped: 3,
    mutants.unreadable_is_empty: 1,
    mutants.invalid_spec_first: 22,
}
SHRUNK_BY_DAY = mutants.no_fence


def found_by(mutant: mutants.Mutant) -> Outcome:
    """Return the failing run of the bug's own seed, or of the first seed that finds it."""
    for seed in (SEEDS[mutant], *range(SEEDS_MAX)):
        outcome = simulate(scenario(seed))
        if outcome.wrong:
            if seed != SEEDS[mutant]:
                warnings.warn(f"{mutant.__name__} is now found by seed {seed}: change SEEDS", stacklevel=2)
            return outcome
    pytest.fail(f"not found in {SEEDS_MAX} seeds")


def test_each_mutant_has_a_seed() -> None:
    assert list(SEEDS) == list(mutants.ALL)


@pytest.mark.parametrize("mutant", mutants.ALL, ids=lambda mutant: mutant.__name__)
def test_the_simulation_finds_a_deliberate_bug(mutant: mutants.Mutant) -> None:
    with mutant():
        found = found_by(mutant)
    # The same faults without the bug do no harm, so the test has found the bug.
    fixed = simulate(scenario(found.seed), found.taken)
    assert not fixed.wrong, fixed.wrong


@pytest.mark.parametrize(
    "mutant",
    [m if m is SHRUNK_BY_DAY else pytest.param(m, marks=pytest.mark.long) for m in mutants.ALL],
    ids=lambda mutant: mutant.__name__,
)
def test_a_failing_seed_is_reduced_to_few_faults(mutant: mutants.Mutant) -> None:
    with mutant():
        found = found_by(mutant)
        small = shrink(found)
    assert small.wrong
    assert len(small.taken) <= len(found.taken)
    fixed = simulate(scenario(found.seed), small.taken)
    assert not fixed.wrong, fixed.wrong
