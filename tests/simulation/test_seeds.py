"""Thousands of lives of a job, each with its own misfortunes. `make simulate SEEDS=100000` for more."""

from __future__ import annotations

import time

import pytest
from scenario import scenario
from simulate import failing, report, shrink
from simulation import simulate

pytestmark = pytest.mark.timeout(900)  # all is computing: a busy machine needs its time
SEEDS = 2000
BLOCK = 250
# Seeds that have shown a bug once. As the code changes a seed tells another story, but these cost little.
ONCE_FAILED = (
    *(22, 42, 63, 69, 91, 150, 191, 233, 335, 534, 812),
    *(11287, 12110, 12128, 12139, 14037, 15831, 16161, 16498, 16636),
    *(453, 6825, 8338, 4767),  # under ddprun
)


def check(seeds: range | tuple[int, ...]) -> None:
    started = time.monotonic()
    bad = failing(seeds)
    print(f"{len(seeds) / (time.monotonic() - started):.0f} seeds/s")
    assert not bad, report(shrink(min(bad, key=lambda outcome: len(outcome.taken))))


@pytest.mark.parametrize("first", range(0, SEEDS, BLOCK))
def test_whatever_goes_wrong_no_two_groups_train_and_the_job_ends_as_it_should(first: int) -> None:
    check(range(first, first + BLOCK))


def test_seeds_that_have_failed_once_stay_fixed() -> None:
    check(ONCE_FAILED)


@pytest.mark.parametrize("seed", [3, 4, 36, 115])
def test_a_seed_tells_the_same_story_to_the_word_each_time(seed: int) -> None:
    assert simulate(scenario(seed)).story == simulate(scenario(seed)).story


@pytest.mark.parametrize("seed", range(8))
def test_the_recorded_faults_of_a_seed_are_all_that_is_needed_to_repeat_it(seed: int) -> None:
    outcome = simulate(scenario(seed))
    assert simulate(scenario(seed), outcome.taken).story == outcome.story
