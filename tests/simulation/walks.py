"""Many walks of jobs through a queue: `PYTHONPATH=tests/support python tests/simulation/walks.py --seeds 100000`."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence

from model_queue import Walk

BLOCK = 50


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code: 1 if there is a violation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="how many walk at a time")
    given = parser.parse_args(arguments)
    started, bad, evictions, seeds = time.monotonic(), 0, 0, range(given.first, given.first + given.seeds)
    with multiprocessing.Pool(given.processes) as pool:
        for done, (seed, wrong, evicted) in enumerate(pool.imap_unordered(_walk, seeds, BLOCK), 1):
            bad, evictions = bad + bool(wrong), evictions + evicted
            if wrong:
                print(f"walk {seed}: {wrong[0]}", flush=True)
            if sys.stderr.isatty():
                print(f"\r{done} of {given.seeds} walks", end="", file=sys.stderr)
    seconds = time.monotonic() - started
    print(
        f"{given.seeds} walks from {given.first} on with {evictions} evictions in {seconds:.0f} s: "
        f"{given.seeds / seconds:.0f} walks/s, {bad} show a fault"
    )
    return 1 if bad else 0


def _walk(seed: int) -> tuple[int, list[str], int]:
    walk = Walk(seed)
    return seed, walk.run(), walk.evictions


if __name__ == "__main__":
    sys.exit(main())
