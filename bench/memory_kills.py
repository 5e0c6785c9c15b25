"""Random kills of ranks whose state is in memory: are the bits those of an undisturbed run, which steps are made again?

    python bench/memory_kills.py                     # 200 kills, two in each training of two ranks under ddprun
    python bench/memory_kills.py --first 7 --kills 2  # the training of seed 7 alone: its choices, not its microseconds
    python bench/memory_kills.py --ranks 3            # a third rank, which lives where one dies in the rescue

Dropout, BatchNorm, AdamW, a scheduler; 40 steps, a save each 10. A kill waits for a step and for a moment of it
(forward, all-reduce, optimizer, boundary), then up to 4 ms more, and strikes from outside; the table has the moment to
which the rank had come. The second kill of a training strikes in its next generation, there also while it loads
(restore), or at once a rank that writes the state (rescue): of two ranks nobody is left then. Both kills are in that
row. With more than two ranks DistributedDataParallel looks for unused parameters, because it then never lays its
bucket out anew: gradients are added in the same order in each generation.

Parameters, buffers and optimizer state are compared by SHA-256 with those of the undisturbed run at the step from which
each generation goes on, and at the end; random numbers at the end. Ends with 1 if one of them was wrong.
"""

from __future__ import annotations

import argparse
import collections
import mmap
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import machine
from random_kills import Launcher, job

CELLS = 3  # of a rank in a generation: its pid, its moment, its last step
MOMENTS = ["between", "forward", "all-reduce", "optimizer", "boundary", "restore", "rescue"]
SPAN = {"forward": 0.004, "all-reduce": 0.004, "optimizer": 0.003, "boundary": 0.002, "restore": 0.02, "rescue": 0.003}
SECONDS_MAX = 120
TRAIN = """
import hashlib, mmap, os
import torch
import ddpjob
from ddpjob.checkpoint.in_memory.memory import Keeper

STEPS, RANKS, CELLS = 40, int(os.environ["WORLD_SIZE"]), 3
BETWEEN, FORWARD, REDUCE, OPTIMIZER, BOUNDARY, RESTORE, RESCUE = range(7)
generation, rank = int(os.environ["DDPJOB_GENERATION"]), int(os.environ["RANK"])
with open("cells", "r+b") as file:
    page = mmap.mmap(file.fileno(), 4096)
cells = memoryview(page).cast("q")[(generation * RANKS + rank) * CELLS :][:CELLS]
cells[0] = os.getpid()
save = Keeper.save

def at(moment):
    cells[1] = moment

def saves(keeper):
    at(RESCUE)
    save(keeper)
    at(BETWEEN)

def digest():
    state = [value for its in optimizer.state_dict()["state"].values() for value in its.values()]
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in [*net.state_dict().values(), *state])).hexdigest()[:16]

Keeper.save = saves
with ddpjob.init() as world:
    torch.manual_seed(7 + rank)
    layers = [torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.BatchNorm1d(128)) for _ in range(5)]
    net = torch.nn.Sequential(*layers, torch.nn.Linear(128, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    x = torch.linspace(-1, 1, 256 * 128).view(256, 128)
    snapshot = ddpjob.Snapshot("snapshots", world)
    objects = dict(model=net, optimizer=optimizer, scheduler=scheduler)
    at(RESTORE)
    step = snapshot.load(**objects)
    if world.is_main:
        print("BEGIN", generation, step, digest() if step else "-", flush=True)
    model = world.wrap(net, find_unused_parameters=RANKS > 2)
    while step < STEPS:
        at(FORWARD)
        optimizer.zero_grad()
        loss = model(torch.nn.functional.dropout(x, 0.2)).square().sum()
        at(REDUCE)
        loss.backward()
        at(OPTIMIZER)
        optimizer.step()
        scheduler.step()
        step += 1
        cells[2] = step
        at(BOUNDARY)
        ddpjob.should_stop(step)
        at(BETWEEN)
        if step % 10 == 0:
            snapshot.save(step, **objects)
        if world.is_main and os.environ.get("TABLE"):
            print("AT", step, digest(), flush=True)
    snapshot.close()
    print("END", rank, digest(), torch.rand(1).item(), flush=True)
"""


class Cells:
    """What the ranks of all generations say of themselves while they train."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.ranks = ranks
        path = folder / "cells"
        path.write_bytes(bytes(4096))
        with path.open("r+b") as file:
            self._all = memoryview(mmap.mmap(file.fileno(), 4096)).cast("q")

    def of(self, generation: int, rank: int) -> tuple[int, str, int]:
        """(pid, moment, last step)"""
        pid, moment, step = self._all[(generation * self.ranks + rank) * CELLS :][:CELLS]
        return pid, MOMENTS[moment], step

    def reached(self, generation: int) -> int:
        """The last step that a rank of it has made."""
        return max(self.of(generation, rank)[2] for rank in range(self.ranks))


class Plan(NamedTuple):
    """A kill."""

    generation: int
    rank: int
    step: int
    moment: str
    delay: float


class Training(NamedTuple):
    """What came of one training."""

    kills: list[tuple[str, int]]
    """The moment of each, and how many steps were made again after it."""
    wrong: list[str]


def plans(seed: int, ranks: int) -> list[Plan]:
    """The two kills of a training."""
    chance = random.Random(seed)
    victim, first = chance.randrange(ranks), chance.choice(MOMENTS[1:5])
    one = Plan(0, victim, chance.randrange(6, 30), first, chance.uniform(0, SPAN[first]))
    moment = chance.choice(MOMENTS[1:])
    if moment == "rescue":
        other = (victim + (1 if ranks == 2 else chance.randrange(1, ranks))) % ranks
        return [one, Plan(0, other, 0, moment, chance.uniform(0, SPAN[moment]))]
    step = 0 if moment == "restore" else one.step + chance.randrange(1, 8)
    return [one, Plan(1, chance.randrange(ranks), step, moment, chance.uniform(0, SPAN[moment]))]


def strike(cells: Cells, plan: Plan, agent: subprocess.Popen[str]) -> str:
    """Wait for the moment, and kill; the moment in which the rank was, "" where the training ended first."""
    until = time.monotonic() + SECONDS_MAX
    while True:
        assert time.monotonic() < until, "it hangs"
        pid, moment, step = cells.of(plan.generation, plan.rank)
        if moment == plan.moment and step >= plan.step:
            break
        if agent.poll() is not None or (plan.generation == 0 and cells.of(1, 0)[0]):
            return ""
        time.sleep(0.0001)
    time.sleep(plan.delay)
    if cells.of(plan.generation, plan.rank)[1] == "between" and plan.moment == "rescue":
        return ""  # what it held is written
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return ""
    return cells.of(plan.generation, plan.rank)[1]


def train(launcher: Launcher, ranks: int, wanted: list[Plan], **env: str) -> tuple[list[tuple[int, str]], Cells, Any]:
    """A training to its end, with these kills: of each its generation and its moment."""
    cells = Cells(launcher.folder, ranks)
    words = ["--nproc", ranks, "--max-restarts", 99, launcher.script(TRAIN)]
    agent = launcher.warm(*words, OMP_NUM_THREADS="1", **env)
    struck = [(plan.generation, moment) for plan in wanted if (moment := strike(cells, plan, agent))]
    out, err = agent.communicate(timeout=SECONDS_MAX)
    return struck, cells, subprocess.CompletedProcess(agent.args, agent.returncode, out, err)


def lines(done: Any, first: str) -> list[list[str]]:
    """Those that begin so, without that word."""
    return [line.split()[1:] for line in done.stdout.splitlines() if line.startswith(first)]


def judged(seed: int, ranks: int, table: dict[str, str], ends: list[list[str]]) -> Training:
    """The training of this seed, beside the undisturbed one."""
    with job() as (launcher, left):
        try:
            struck, cells, done = train(launcher, ranks, plans(seed, ranks))
        except (AssertionError, subprocess.TimeoutExpired):
            return Training([], ["it hangs"])
        repeated, wrong = resumed(cells, done, table)
        if done.returncode or sorted(lines(done, "END")) != expected(done, table, ends):
            wrong.append(f"it ended with {done.returncode}, and {lines(done, 'END')}")
    kills = []
    for generation, moment in struck:
        both = (generation, "rescue") in struck
        kills.append(("rescue" if both else moment, repeated.get(generation, repeated.get(generation + 1, 0))))
    if wrong or any(count and (ranks > 2 or moment != "rescue") for moment, count in kills):
        said = [line for line in done.stderr.splitlines() if line.startswith("ddp")]
        print(f"seed {seed}: {struck}, repeated {repeated}", *said, sep="\n    ", flush=True)
    return Training(kills, wrong + left)


def expected(done: Any, table: dict[str, str], ends: list[list[str]]) -> list[list[str]]:
    """What the ranks have at the end: where none made a step after the last restart, all have the buffers of rank 0.

    DistributedDataParallel gives them to all before each forward pass, so nothing is trained with any others.
    """
    *_, (_, step, _) = lines(done, "BEGIN")
    if step != max(table, key=int):
        return ends
    return [[rank, table[step], drawn] for rank, _, drawn in ends]


def resumed(cells: Cells, done: Any, table: dict[str, str]) -> tuple[dict[int, int], list[str]]:
    """How many steps were made again after each generation; where one went on from wrong bits."""
    repeated, wrong, high = {}, [], 0
    begins = {int(generation): (int(step), digest) for generation, step, digest in lines(done, "BEGIN")}
    for generation in range(4):
        if generation in begins:
            step, digest = begins[generation]
            if step and table[str(step)] != digest:
                wrong.append(f"it went on from other bits than those of step {step}")
            if generation:
                repeated[generation - 1], high = high - step, step
        high = max(high, cells.reached(generation))
    return repeated, wrong


def undisturbed(ranks: int) -> tuple[dict[str, str], list[list[str]]]:
    """The digest at each step, and what the ranks have at the end."""
    with job() as (launcher, _):
        _, _, done = train(launcher, ranks, [], TABLE="1")
        assert done.returncode == 0, done.stderr
        return dict(lines(done, "AT")), sorted(lines(done, "END"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--first", type=int, default=1, help="seed of the first training (%(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="of a training (%(default)s)")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is ended
    print(machine.line(), flush=True)
    table, ends = undisturbed(asked.ranks)
    found: dict[str, list[int]] = collections.defaultdict(list)
    seed, wrong, began = asked.first, 0, time.monotonic()
    while sum(map(len, found.values())) < asked.kills:
        one = judged(seed, asked.ranks, table, ends)
        for moment, count in one.kills:
            found[moment].append(count)
        for what in one.wrong:
            print(f"seed {seed}: {what}", flush=True)
        wrong, seed = wrong + bool(one.wrong), seed + 1
    print("| killed in | kills | repeat no step | most steps repeated |\n|---|---|---|---|")
    for moment in MOMENTS:
        if its := found.get(moment):
            print(f"| {moment} | {len(its)} | {sum(count <= 0 for count in its)} | {max(its)} |")
    count, seconds = sum(map(len, found.values())), time.monotonic() - began
    print(f"{count} kills in {seed - asked.first} trainings, {wrong} of them wrong, in {seconds:.0f} s")
    print(machine.line())
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
