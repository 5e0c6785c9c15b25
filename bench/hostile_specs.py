"""Measure the longest time for which one DDPJob can block the operator's event loop.

    python bench/hostile_specs.py --draws 500 --seed 1

Draws random jobs of up to 1.5 MB that cost as much work as possible (tests/support/hostile_specs.py), and measures each
step that the operator does without yielding to other jobs. Prints the most expensive job of each step, the worst first.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))

import hostile_specs

TIMES = 2  # measurements of each step; the faster one counts, because other processes can only slow it down


def cpu_ms(raw: dict[str, Any]) -> dict[str, float]:
    """Return the CPU time of this process in milliseconds, by step."""
    taken = {}
    for step, work in hostile_specs.steps(raw):
        began = time.process_time()
        work()
        taken[step] = round(1e3 * (time.process_time() - began), 1)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    worst: dict[str, dict[str, Any]] = {}
    with hostile_specs.warm():
        for draw in range(options.draws):
            what, raw = hostile_specs.job(random.Random(options.seed * 1_000_003 + draw))
            rounds = [cpu_ms(raw) for _ in range(TIMES)]
            for step, ms in rounds[0].items():
                least = min(ms, *(other.get(step, ms) for other in rounds[1:]))
                if least > worst.get(step, {"ms": -1.0})["ms"]:
                    worst[step] = {"step": step, "ms": least, "bytes": len(json.dumps(raw)), "draw": draw, "job": what}
    print(json.dumps(sorted(worst.values(), key=lambda one: -one["ms"]), indent=1))


if __name__ == "__main__":
    main()
