"""How long a restart in place takes: kill -9 of one rank, until every rank has made two more steps.

    python bench/restart_in_place.py                      # 10 rounds, two ranks of one node
    python bench/restart_in_place.py --nodes 2            # a rank on each of two nodes of this machine; or --nodes 4

A step is a backward of DistributedDataParallel over gloo and one of the optimizer; nothing is saved, so it is the
launcher that is measured. Each round runs every variant once, so that load hits all alike; the ranks are killed in
turn, --after so many seconds of training: ddprun forks the ranks of the next generation 5 s after those of the present
one, so with `--after 0` a restart waits for forks. A variant that has not trained on after --limit counts as hung, and
is left out after three times. The same runs tell how long a cold start takes until every rank has made a step. The
clock is the machine's monotonic one everywhere.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import machine
import psutil

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
HUNG_MAX = 3
AFTER_SECONDS = 7.0


class Variant(NamedTuple):
    """A launcher and how it is asked to meet."""

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
    """A line of a rank."""

    rank: int
    step: int
    pid: int
    began: float
    """When the script's first line ran."""
    at: float


class Result(NamedTuple):
    """Of one round, in seconds."""

    cold: float
    """From the launchers' start until every rank has made a step."""
    script: float
    """From the kill until the first line of the first new rank."""
    restart: float
    """From the kill until every rank has made two steps."""


class Job:
    """One launcher for each node; all end with the block."""

    def __init__(self, variant: Variant, nodes: int, folder: Path, limit: float) -> None:
        self.ranks, self._log, self._limit = max(2, nodes), folder / "log", limit
        script = folder / "train.py"
        script.write_text(TRAIN)
        group = [f"--nnodes={nodes}", f"--nproc-per-node={self.ranks // nodes}", "--max-restarts=3"]
        # torchrun's c10d hangs at a restart of its own store unless it is told to share none; ddprun does not read it.
        env = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
        port = free_port()
        self.started = time.monotonic()
        with self._log.open("w") as log:
            self.agents = [
                psutil.Popen(
                    [
                        sys.executable,
                        "-m",
                        variant.module,
                        *variant.words,
                        *group,
                        *meet(variant, nodes, k, port),
                        script,
                    ],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=folder,
                    env=env,
                )
                for k in range(nodes)
            ]

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        below = [child for agent in self.agents if agent.is_running() for child in agent.children(recursive=True)]
        for process in [*self.agents, *below]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for agent in self.agents:
            agent.wait()

    def steps(self, number: int, after: float = 0.0) -> list[Step]:
        """Of every rank this step, in a process that began after that moment; waits, TimeoutError at the limit."""
        deadline = time.monotonic() + self._limit
        while time.monotonic() < deadline:
            found = {
                s.rank: s
                for s in map(read, self._log.read_text().splitlines())
                if s and s.step == number and s.began > after
            }
            if len(found) == self.ranks:
                return list(found.values())
            time.sleep(0.005)
        raise TimeoutError(self._log.read_text())


def meet(variant: Variant, nodes: int, node: int, port: int) -> list[str]:
    """The words by which the nodes find each other."""
    if variant.c10d:
        conf = f"--rdzv-conf=is_host={int(node == 0)}"
        return ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=bench", conf]
    return [f"--master-port={port}", f"--node-rank={node}", *(["--rdzv-id=bench"] if nodes > 1 else [])]


def free_port() -> int:
    """Nobody's, a moment ago."""
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        return int(any_port.getsockname()[1])


def read(line: str) -> Step | None:
    """A rank's line; None for what else is in the log."""
    words = line.split()
    if not line.startswith("STEP") or len(words) != 6:
        return None
    return Step(int(words[1]), int(words[2]), int(words[3]), float(words[4]), float(words[5]))


def restart(variant: Variant, nodes: int, victim: int, limit: float, after: float) -> Result | None:
    """One round; None where it hung."""
    with tempfile.TemporaryDirectory() as folder, Job(variant, nodes, Path(folder), limit) as job:
        try:
            cold = max(step.at for step in job.steps(1)) - job.started
            pid = next(step.pid for step in job.steps(2) if step.rank == victim % job.ranks)
            time.sleep(after)
            killed = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            again = job.steps(2, after=killed)
        except TimeoutError as error:
            print(f"{variant.name}: hung, rank {victim % job.ranks} was killed; the end of its log:")
            print(*str(error).splitlines()[-5:], sep="\n", flush=True)
            return None
    return Result(cold, min(s.began for s in again) - killed, max(s.at for s in again) - killed)


def compare(nodes: int, rounds: int, limit: float, after: float) -> None:
    """All variants by turns."""
    found: dict[Variant, list[Result | None]] = {variant: [] for variant in VARIANTS}
    for number in range(rounds):
        for variant, its in found.items():
            if its.count(None) < HUNG_MAX:
                its.append(restart(variant, nodes, number, limit, after))
    head = f"{max(2, nodes)} ranks, nodes: {nodes}"
    print(f"\n| {head} | restart | its slowest | until the script runs | cold start | hung |")
    print("|---|---|---|---|---|---|")
    for variant, its in found.items():
        good = [result for result in its if result is not None]
        columns = [median("restart"), slowest, median("script"), median("cold")]
        seconds = " | ".join(f"{of(good):.2f} s" if good else "" for of in columns)
        print(f"| {variant.name} | {seconds} | {its.count(None)} of {len(its)} |")
    for variant, its in found.items():
        print(f"{variant.name}: all: {', '.join('hung' if r is None else f'{r.restart:.2f}' for r in its)}")


def median(name: str) -> Callable[[list[Result]], float]:
    """Of that column."""
    return lambda results: statistics.median(getattr(result, name) for result in results)


def slowest(results: list[Result]) -> float:
    """Restart of all."""
    return max(result.restart for result in results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--nodes", type=int, default=1, choices=(1, 2, 4))
    parser.add_argument("--limit", type=float, default=60.0, help="seconds until a start or restart counts as hung")
    parser.add_argument("--after", type=float, default=AFTER_SECONDS, help="seconds of training before the kill")
    asked = parser.parse_args()
    print(machine.line())
    compare(asked.nodes, asked.rounds, asked.limit, asked.after)
    print(machine.line())


if __name__ == "__main__":
    main()
