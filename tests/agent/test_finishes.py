"""Jobs that end well always end cleanly: bench/finishes.py with few jobs. Under ddprun the agents are forked from a
process that has imported torch: 1.2 to 2 s of CPU each. `make test` runs four jobs, `make test-long` over a hundred.
Some run as in a pod and under torchrun. tests/trainer/test_gloo_teardown.py tests each known fault separately."""

import os
from pathlib import Path

import pytest
import warm

BENCH = Path(__file__).parents[2] / "bench/finishes.py"
FORKED = "--from-one-process --at-once=2"


@pytest.mark.timeout(900)  # takes up to 90 s on one core that other tests use, too
@pytest.mark.parametrize(
    "words",
    [
        f"{FORKED} --jobs=4 --torch-alone",  # unless ranks keep their groups, 2 of 16 jobs hang and 2 of 40 abort
        *(
            pytest.param(words, marks=pytest.mark.long)
            for words in (
                f"{FORKED} --jobs=65 --nodes=2",
                f"{FORKED} --jobs=54",
                "--jobs=5",
                "--torchrun --jobs=5",
            )
        ),
    ],
)
def test_every_job_exits_with_0_and_without_unexpected_output(words: str) -> None:
    # The bench is a fork of this process, too, because an import of torch costs as much as three of the jobs.
    bench = warm.start(BENCH.stem, words.split(), cwd=BENCH.parent, env=os.environ)
    out, err = bench.communicate()
    assert bench.returncode == 0, out + err
