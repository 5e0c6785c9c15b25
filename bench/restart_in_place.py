"""Measure a restart in place: seconds from kill -9 of one rank until every rank has made two more steps.

    python bench/restart_in_place.py                      # 10 rounds, two ranks of one node
    python bench/restart_in_place.py --nodes 2            # a rank on each of two nodes of this machine; or --nodes 4

A step is a backward pass of DistributedDataParallel over gloo and one of the optimizer. Nothing is saved, so only the
launcher is measured. Each round runs every variant once, so that load affects all in the same way. A different rank is
killed in each round, after 7 s of training, because ddprun forks the next ranks 5 s after the present ones. A start or
restart of more than a minute counts as hung; after three, the variant is left out. The runs also measure a cold start.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import machine
import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))

from free_port import free_port

TRAIN = """
import os, time
began = time.monotonic()
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 1_000_000):
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    if step <= 2:  # whole lines: several ranks write into the log
        os.write(1, f"STEP {dist.get_rank()} {step} {os.getpid()} {began} {time.monotonic()}\\n".encode())
    time.sleep(0.02)
"""
DDPRUN, TORCHRUN = "ddprun", "torch.distributed.run"
HUNG_MAX, HUNG_SECONDS, AFTER_SECONDS = 3, 60.0, 7.0


class Variant(NamedTuple):
    """A launcher and its rendezvous."""

    name: str
    module: str
    words: tuple[str, ...] = ()
    c10d: bool = False


VARIANTS = (
    Variant("ddprun", DDPRUN),
    Variant("ddprun --no-preload", DDPRUN, ("--no-preload",)),
    Variant("torchrun, c10d", TORCHRUN, c10d=True),
    Variant("torchrun, static", TORCHRUN),
)


class Step(NamedTuple):
    """A line that a rank prints after its first and second step."""

    rank: int
    step: int
    pid: int
    began: float
    """Time at which the script's first line ran."""
    at: float


class Result(NamedTuple):
    """Durations of one round, in seconds."""

    cold: float
    """Seconds from the launchers' start until every rank has made a step."""
    restart: float
    """Seconds from the kill until every rank has made two steps."""


class Job:
    """One launcher for each node, all started by the constructor."""

    def __init__(self, variant: Variant, nodes: int, folder: Path) -> None:
        self.ranks, self._log = max(2, nodes), folder / "log"
        script = folder / "train.py"
        script.write_text(TRAIN)
        group = [f"--nnodes={nodes}", f"--nproc-per-node={self.ranks // nodes}", "--max-restarts=3"]
        # torchrun's c10d hangs at a restart of its own store unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE is set.
        env = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
        port = free_port()
        launch = [sys.executable, "-m", variant.module, *variant.words, *group]
        commands = [[*launch, *meet(variant, nodes, node, port), script] for node in range(nodes)]
        self.started = time.monotonic()
        with self._log.open("w") as log:
            self.agents = [psutil.Popen(c, stdout=log, stderr=subprocess.STDOUT, cwd=folder, env=env) for c in commands]

    def kill(self) -> None:
        """Kill the launchers and all processes below them."""
        below = [child for agent in self.agents if agent.is_running() for child in agent.children(recursive=True)]
        for process in [*self.agents, *below]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for agent in self.agents:
            agent.wait()

    def steps(self, number: int, after: float = 0.0) -> list[Step]:
        """Wait for this step of every rank, in processes that began after that moment. Raise TimeoutError."""
        deadline = time.monotonic() + HUNG_SECONDS
        while time.monotonic() < deadline:
            found = {s.rank: s for s in self._printed() if s.step == number and s.began > after}
            if len(found) == self.ranks:
                return list(found.values())
            time.sleep(0.005)
        raise TimeoutError(self._log.read_text())

    def _printed(self) -> Iterator[Step]:
        for line in self._log.read_text().splitlines():
            words = line.split()
            if line.startswith("STEP") and len(words) == 6:
                yield Step(int(words[1]), int(words[2]), int(words[3]), float(words[4]), float(words[5]))


def meet(variant: Variant, nodes: int, node: int, port: int) -> list[str]:
    """Return the options for the rendezvous."""
    if variant.c10d:
        conf = f"--rdzv-conf=is_host={int(node == 0)}"
        return ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=bench", conf]
    return [f"--master-port={port}", f"--node-rank={node}", *(["--rdzv-id=bench"] if nodes > 1 else [])]


def restart(variant: Variant, nodes: int, victim: int) -> Result | None:
    """Run one round and return its durations; None if it hung."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ends:
        job = Job(variant, nodes, Path(folder))
        ends.callback(job.kill)
        try:
            cold = max(step.at for step in job.steps(1)) - job.started
            pid = next(step.pid for step in job.steps(2) if step.rank == victim % job.ranks)
            time.sleep(AFTER_SECONDS)
            killed = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            return Result(cold, max(s.at for s in job.steps(2, after=killed)) - killed)
        except TimeoutError as error:
            print(f"{variant.name}: hung, rank {victim % job.ranks} was killed; the end of its log:")
            print(*str(error).splitlines()[-5:], sep="\n", flush=True)
            return None


def compare(nodes: int, rounds: int) -> None:
    """Run all variants in turns and print a table."""
    found: dict[Variant, list[Result | None]] = {variant: [] for variant in VARIANTS}
    for number in range(rounds):
        for variant, its in found.items():
            if its.count(None) < HUNG_MAX:
                its.append(restart(variant, nodes, number))
    print(f"\n| {max(2, nodes)} ranks, nodes: {nodes} | restart | slowest | cold start | hung |\n|---|---|---|---|---|")
    for variant, its in found.items():
        good = [result for result in its if result is not None]
        restarts = [result.restart for result in good] or [float("nan")]
        cold = statistics.median([result.cold for result in good] or [float("nan")])
        seconds = f"{statistics.median(restarts):.2f} s | {max(restarts):.2f} s | {cold:.2f} s"
        print(f"| {variant.name} | {seconds} | {its.count(None)} of {len(its)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--nodes", type=int, default=1, choices=(1, 2, 4))
    asked = parser.parse_args()
    print(machine.line())
    compare(asked.nodes, asked.rounds)
    print(machine.line())


if __name__ == "__main__":
    main()
