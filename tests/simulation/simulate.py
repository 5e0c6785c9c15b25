"""Run many seeds or one: `make simulate SEEDS=100000`, `python tests/simulation/simulate.py --seed 7141`."""

from __future__ import annotations

import argparse
import gc
import itertools
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from crowd import crowd_scenario, growing_scenario, simulate_crowd
from scenario import Scenario, elastic_scenario, gang_scenario, memory_scenario, scenario
from simulation import Outcome, simulate

SHRINK_RUNS_MAX = 400
BLOCK = 50
Life = Callable[[int], Scenario]


def run(what: Scenario, only: Mapping[str, str] | None = None) -> Outcome:
    """Simulate one job, or several in one cluster."""
    return simulate_crowd(what, only) if what.more else simulate(what, only)


def shrink(outcome: Outcome, life: Life = scenario) -> Outcome:
    """Return a run of the same seed with as few faults as possible that still shows a violation."""
    best, runs = outcome, 0
    size = max(1, len(best.taken) // 2)
    while size and runs < SHRINK_RUNS_MAX:
        for part in _parts(list(best.taken), size):
            runs += 1
            found = run(life(best.seed), {k: v for k, v in best.taken.items() if k not in part})
            if found.wrong and len(found.taken) < len(best.taken):
                best = found
                break
        else:
            size //= 2
    return best


def report(outcome: Outcome) -> str:
    """Return a report about a failing seed, for people."""
    faults = [f"  {key}: {what}" for key, what in outcome.taken.items()]
    return "\n".join(
        [*outcome.story, "", f"seed {outcome.seed}: {outcome.wrong[0]}", "with these faults:", *faults, repeat(outcome)]
    )


def repeat(outcome: Outcome) -> str:
    """Return the command that repeats a run."""
    how = "an elastic job: --elastic, with a gang: --gang, with state in memory: --memory, several jobs: --crowd, "
    how += "elastic jobs in a queue: --growing"
    return f"repeat: python tests/simulation/simulate.py --seed {outcome.seed} ({how})"


def failing(seeds: Sequence[int], life: Life = scenario) -> list[Outcome]:
    """Return the runs of these seeds that show a violation."""
    return lives(seeds, life)[0]


def lives(seeds: Sequence[int], life: Life = scenario) -> tuple[list[Outcome], Counter[str]]:
    """Return the runs that show a violation, and how often each event has happened in all runs."""
    bad: list[Outcome] = []
    counted: Counter[str] = Counter()
    for seed in seeds:
        outcome = run(life(seed))
        counted.update(outcome.counted)
        bad += [outcome] if outcome.wrong else []
    return bad, counted


def _parts(keys: Sequence[str], size: int) -> Iterator[set[str]]:
    for start in range(0, len(keys), size):
        yield set(keys[start : start + size])


def _many(first: int, count: int, life: Life, processes: int | None) -> int:
    blocks = [range(n, min(n + BLOCK, first + count)) for n in range(first, first + count, BLOCK)]
    started = time.monotonic()
    bad: list[Outcome] = []
    counted: Counter[str] = Counter()
    # Without Python's garbage collector a life takes 20 % less time, and a process of 200 lives 150 MB more memory.
    with multiprocessing.Pool(processes, gc.disable, maxtasksperchild=4) as pool:
        for done, (found, more) in zip(
            itertools.count(1), pool.imap_unordered(partial(lives, life=life), blocks), strict=False
        ):
            bad += found
            counted.update(more)
            for outcome in found:
                print(f"seed {outcome.seed}: {outcome.wrong[0]}", flush=True)
            if sys.stderr.isatty():
                print(f"\r{done * BLOCK} of {count} seeds", end="", file=sys.stderr)
        pool.close()
        pool.join()  # without this, the CPU time of the pool's processes is unknown
    seconds, cpu = time.monotonic() - started, os.times().children_user + os.times().children_system
    seen = "".join(f", {number} {what}" for what, number in counted.items())
    print(
        f"{count} seeds from {first} on in {seconds:.0f} s, {cpu:.0f} s of CPU: {count / seconds:.0f} seeds/s{seen}, "
        f"{len(bad)} show a fault",
        flush=True,
    )
    if bad:
        print(report(shrink(min(bad, key=lambda outcome: len(outcome.taken)), life)))
    return 1 if bad else 0


def _one(seed: int, whole: bool, life: Life) -> int:
    outcome = run(life(seed))
    if outcome.wrong and not whole:
        outcome = shrink(outcome, life)
    print(report(outcome) if outcome.wrong else "\n".join([*outcome.story, f"seed {seed}: {outcome.end}"]))
    return 1 if outcome.wrong else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code: 1 if there is a violation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="this one alone, with its story; what fails is made small first")
    parser.add_argument("--whole", action="store_true", help="with all its faults")
    parser.add_argument("--elastic", action="store_true", help="lives of elastic jobs")
    parser.add_argument("--gang", action="store_true", help="lives of jobs with a gang")
    parser.add_argument("--memory", action="store_true", help="lives of jobs whose ranks leave their state in memory")
    parser.add_argument("--crowd", action="store_true", help="lives of two or three jobs, as gangs or in a queue")
    parser.add_argument("--growing", action="store_true", help="lives of two elastic jobs in a queue, under ddprun")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="how many seeds run at a time")
    given = parser.parse_args(arguments)
    kinds = {
        memory_scenario: given.memory,
        elastic_scenario: given.elastic,
        gang_scenario: given.gang,
        crowd_scenario: given.crowd,
        growing_scenario: given.growing,
    }
    life = next((kind for kind, is_asked in kinds.items() if is_asked), scenario)
    if given.seed is not None:
        return _one(given.seed, given.whole, life)
    return _many(given.first, given.seeds, life, given.processes)


if __name__ == "__main__":
    sys.exit(main())
