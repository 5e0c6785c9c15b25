"""Random kills of a job of ddprun: any process, any moment, agents included; does it end, and with its result?

    python bench/random_kills.py                       # 300 jobs of 2 nodes x 2 ranks, half of them with an operator
    python bench/random_kills.py --first 41 --jobs 1   # that one again: the same choices, not the same microseconds

What is killed, replaced and asked is tests/agent/test_random_kills.py; a few of its seeds run with the tests. A job
hangs when it has not ended after 100 s. Ends with 1 if one job of all was bad, and says its seed and its story.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import machine

TESTS = Path(__file__).parents[1] / "tests"
sys.path.insert(0, str(TESTS / "support"))

from agents import Launcher  # noqa: E402


def kills() -> Any:
    """The test, as a module."""
    spec = importlib.util.spec_from_file_location("random_kills_test", TESTS / "agent/test_random_kills.py")
    assert spec is not None, "the test is there"
    assert spec.loader is not None, "it is a file"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def job() -> Iterator[tuple[Launcher, list[str]]]:
    """A launcher in a folder of its own, and what it leaves; both are gone afterwards, and so are its processes."""
    left: list[str] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        launcher = Launcher(Path(folder))
        try:
            yield launcher, left
        finally:
            survivors = launcher.marked()
            for process in survivors:
                process.kill()
            left += [f"it left {len(survivors)} processes"] * bool(survivors)


def bad(run: Any, seed: int) -> str:
    """What was wrong with the job of this seed; nothing where nothing was."""
    with job() as (launcher, left):
        try:
            run(launcher, seed, operator=seed % 2 == 1)
        except Exception as error:
            return f"seed {seed}: {type(error).__name__}: {error}"
    return "".join(f"seed {seed}: {what}" for what in left)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=300)
    parser.add_argument("--first", type=int, default=1, help="seed of the first (%(default)s)")
    parser.add_argument("--at-once", type=int, default=2, help="so many jobs run beside each other (%(default)s)")
    asked = parser.parse_args()
    print(machine.line(), flush=True)
    run, began, wrong = kills().test_whatever_is_killed_the_job_ends_with_its_result, time.monotonic(), 0
    with ThreadPoolExecutor(asked.at_once) as pool:
        for said in pool.map(lambda seed: bad(run, seed), range(asked.first, asked.first + asked.jobs)):
            wrong += bool(said)
            if said:
                print(said, flush=True)
    seconds = time.monotonic() - began
    print(f"{asked.jobs - wrong} of {asked.jobs} jobs ended with their result, in {seconds:.0f} s")
    print(machine.line())
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
