"""Jobs that end well do so every time: bench/finishes.py, as often as a test run can afford. Under ddprun the agents
are forked from a process that has torch: 1.2 to 2 s of CPU each. By day four jobs; at night over a hundred, and a few
that start as in a pod and under torchrun. The bench runs thousands (bench/results). tests/trainer/test_gloo_teardown.py
tests each known fault separately."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench/finishes.py"
FORKED = "--from-one-process --at-once=2"


@pytest.mark.timeout(900)  # a minute and a half of one core at most, which other tests may need
@pytest.mark.parametrize(
    "words",
    [
        f"{FORKED} --jobs=4 --torch-alone",  # before ranks kept their groups: a hang in 2 of 16, an abort in 2 of 40
        *(
            pytest.param(words, marks=pytest.mark.long)
            for words in (
                f"{FORKED} --preload=torch --jobs=65 --nodes=2",
                f"{FORKED} --jobs=54",
                "--jobs=5",
                "--torchrun --jobs=5",
            )
        ),
    ],
)
def test_every_job_ends_with_0_and_without_a_word_too_many(words: str) -> None:
    done = subprocess.run([sys.executable, BENCH, *words.split()], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
