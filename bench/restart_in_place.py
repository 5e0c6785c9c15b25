"""How long a restart in place takes: kill -9 of one of two ranks, until both have finished a collective again.

    python bench/restart_in_place.py                  # 5 rounds; each variant once a round, so that load hits all alike
    python bench/restart_in_place.py --nodes 2        # one rank on each of two nodes of this machine, ddprun only
    python bench/restart_in_place.py --start          # how long an agent needs until its rank runs, and its memory

The collective is an all_reduce of 10 bytes over gloo, after torch and DistributedDataParallel have been imported and
the model been made. The clock is the machine's monotonic one, in all processes. Memory is PSS, from smaps_rollup: what
several processes share is counted once, a part to each.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import machine
import psutil

TRAIN = """
import os, time
began = time.monotonic()
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 8))
value = torch.ones(10, dtype=torch.uint8)
dist.all_reduce(value)
life = os.environ["TORCHELASTIC_RESTART_COUNT"]
os.write(1, f"DONE {life} {dist.get_rank()} {os.getpid()} {began} {time.monotonic()}\\n".encode())  # whole lines
if life == "0":
    time.sleep(1000)
dist.destroy_process_group()
"""
VARIANTS = {
    "ddprun": ["ddpjob.agent"],
    "ddprun --no-preload": ["ddpjob.agent", "--no-preload"],
    "torchrun --max-restarts 1": ["torch.distributed.run"],
}


class Job:
    """Two ranks, on one node or two."""

    def __init__(self, folder: Path, words: list[str], nodes: int) -> None:
        self.log = folder / "log"
        script = folder / "train.py"
        script.write_text(TRAIN)
        with socket.socket() as any_port:
            any_port.bind(("127.0.0.1", 0))
            port = any_port.getsockname()[1]
        # With a port torchrun is static, and then its restart hangs under gloo: new ranks read the addresses of dead
        # ones in the agent's store. Without one it is c10d, which hangs likewise unless it is told to share no store.
        meet = ["--master-port", str(port)] if nodes > 1 else []
        group = ["--nnodes", str(nodes), "--nproc-per-node", str(2 // nodes), *meet]
        with self.log.open("w") as log:
            self.agents = [
                subprocess.Popen(
                    [sys.executable, "-m", *words, *group, "--node-rank", str(k), "--max-restarts", "1", script],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=folder,
                    env={**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
                )
                for k in range(nodes)
            ]

    def done(self, life: str) -> list[list[str]]:
        """What both ranks have printed in a generation; waits for it."""
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline:
            rows = [line.split()[1:] for line in self.log.read_text().splitlines() if line.startswith("DONE")]
            found = [row for row in rows if row[0] == life]
            if len(found) == 2:
                return found
            time.sleep(0.01)
        for agent in self.agents:
            agent.terminate()
        raise TimeoutError(self.log.read_text())

    def end(self) -> None:
        """Wait for its end."""
        for agent in self.agents:
            assert agent.wait(60) == 0, self.log.read_text()


def restart_seconds(words: list[str], nodes: int) -> tuple[float, float]:
    """From the kill to both ranks' all_reduce, and of it until the first new rank's first line."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), words, nodes)
        victim = next(int(row[2]) for row in job.done("0") if row[1] == "1")
        killed = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        rows = job.done("1")
        job.end()
    return max(float(row[4]) for row in rows) - killed, min(float(row[3]) for row in rows) - killed


def memory() -> None:
    """PSS of the agent, the fork server and the two ranks, with and without preload."""
    for name in ("ddprun", "ddprun --no-preload"):
        with tempfile.TemporaryDirectory() as folder:
            job = Job(Path(folder), VARIANTS[name], 1)
            ranks = {int(row[2]) for row in job.done("0")}
            processes = [psutil.Process(job.agents[0].pid), *psutil.Process(job.agents[0].pid).children(recursive=True)]
            parts = {}
            for process in processes:
                who = "agent" if process.pid == job.agents[0].pid else "rank" if process.pid in ranks else "fork server"
                parts.setdefault(who, []).append(pss_mib(process.pid))
            said = ", ".join(f"{who} {' + '.join(f'{mib:.0f}' for mib in its)}" for who, its in parts.items())
            print(f"{name}: PSS in MiB: {said}; together {sum(map(sum, parts.values())):.0f}")
            agent = psutil.Process(job.agents[0].pid)
            before = sum(agent.cpu_times()[:2])
            time.sleep(5)
            print(f"{name}: CPU of the agent in 5 s at rest: {sum(agent.cpu_times()[:2]) - before:.2f} s")
            job.agents[0].terminate()
            job.agents[0].wait()


def pss_mib(pid: int) -> float:
    with open(f"/proc/{pid}/smaps_rollup") as rollup:
        return next(int(line.split()[1]) for line in rollup if line.startswith("Pss:")) / 1024


def start() -> None:
    """Until a rank runs, from the start of the agent; beside an empty Python in the same round."""
    script = "import sys, time; open(sys.argv[1], 'a').write(str(time.monotonic()) + '\\n')"
    ours, empty = [], []
    with tempfile.TemporaryDirectory() as folder:
        env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        env["PYTHONPYCACHEPREFIX"] = folder  # as in an image, where the package is compiled
        said = Path(folder, "said")
        for _ in range(21):
            for times, words in ((empty, []), (ours, ["-m", "ddpjob.agent", "--no-python", sys.executable])):
                began = time.monotonic()
                subprocess.run([sys.executable, *words, "-c", script, str(said)], check=True, env=env)
                times.append(float(said.read_text().split()[-1]) - began)
    alone, with_agent = statistics.median(empty[1:]), statistics.median(ours[1:])
    print(f"until the first line of a Python script: {alone * 1e3:.0f} ms; under ddprun {with_agent * 1e3:.0f} ms")
    print(f"least: {min(empty) * 1e3:.0f} ms; under ddprun {min(ours) * 1e3:.0f} ms")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--nodes", type=int, default=1, choices=(1, 2))
    parser.add_argument("--start", action="store_true")
    asked = parser.parse_args()
    print(machine.line())
    if asked.start:
        start()
        return memory()
    names = [name for name in VARIANTS if asked.nodes == 1 or name.startswith("ddprun")]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(asked.rounds):
        for name in names:
            times[name].append(restart_seconds(VARIANTS[name], asked.nodes))
    for name, its in times.items():
        whole, first = (statistics.median(part) for part in zip(*its, strict=True))
        spread = ", ".join(f"{seconds:.2f}" for seconds, _ in its)
        print(f"{name}: {whole:.2f} s (until the script's first line {first:.2f} s); all: {spread}")
    print(machine.line())
    return None


if __name__ == "__main__":
    main()
