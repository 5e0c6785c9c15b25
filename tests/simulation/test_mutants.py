"""A simulation that finds nothing proves nothing: each of these bugs, made on purpose, is found within its seeds."""

from __future__ import annotations

import mutants
import pytest
from scenario import scenario
from simulate import shrink
from simulation import Outcome, simulate

pytestmark = pytest.mark.timeout(900)  # all is computing: a busy machine needs its time
SEEDS = 2000


def first_to_find() -> Outcome:
    for seed in range(SEEDS):
        outcome = simulate(scenario(seed))
        if outcome.wrong:
            return outcome
    pytest.fail(f"not found in {SEEDS} seeds")


@pytest.mark.parametrize("mutant", mutants.ALL, ids=lambda mutant: mutant.__name__)
def test_the_simulation_finds_a_bug_made_on_purpose(mutant: mutants.Mutant) -> None:
    with mutant():
        found = first_to_find()
        small = shrink(found)
    assert small.wrong
    assert len(small.taken) <= len(found.taken)
    # Without the bug the same faults do no harm: it is the bug that was found.
    fixed = simulate(scenario(found.seed), small.taken)
    assert not fixed.wrong, fixed.wrong
    print(f"seed {found.seed}: {small.wrong[0]}, with {small.taken}")
