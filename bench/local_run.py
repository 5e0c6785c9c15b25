"""Measure `ddpjob run`: start of the command line, time to the first step compared with torchrun, CPU while running.

    python bench/local_run.py [--rounds 3]

Runs alternate (A B A B …), because on a busy machine their ratio varies less than the seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import machine

TRAIN = """
    import os, time, torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    model(torch.ones(4, 8)).sum().backward()
    open(f"first-step-{dist.get_rank()}", "w").write(str(time.time()))
    dist.barrier()
    dist.destroy_process_group()
"""
IDLE = "import time; time.sleep(20)"
STEPS = """
    import time, ddpjob
    end = time.time() + 20
    step = 0
    while time.time() < end:
        step += 1
        ddpjob.progress(step=step, total=100000, samples=64, loss=1.0 / step)
        time.sleep(0.005)
"""
BIN = Path(sys.executable).parent


def job(script: str, command: list[str]) -> Path:
    """Write a job file for two nodes to a new folder. Return the folder."""
    folder = Path(tempfile.mkdtemp(prefix="ddpjob-bench-"))
    (folder / "train.py").write_text(textwrap.dedent(script))
    trainer = {"name": "trainer", "image": "none", "command": command}
    spec = {"nodes": 2, "template": {"spec": {"containers": [trainer]}}}
    head = {"apiVersion": "training.ddpjob.io/v1alpha1", "kind": "DDPJob", "metadata": {"name": "bench"}}
    (folder / "job.yaml").write_text(json.dumps({**head, "spec": spec}))
    return folder


def first_step_of_ddpjob() -> float:
    """Return the seconds from `ddpjob run` until both ranks have made a step."""
    folder = job(TRAIN, ["torchrun", "train.py"])
    began = time.time()
    subprocess.run([BIN / "ddpjob", "run", "job.yaml"], cwd=folder, check=True, capture_output=True)
    return max(float((folder / f"first-step-{r}").read_text()) for r in (0, 1)) - began


def first_step_of_torchrun() -> float:
    """Return the seconds until both ranks have made a step, with torchrun started by hand for both nodes at once."""
    folder = job(TRAIN, [])
    # One intra-op thread per rank, as in DDPJobs; torchrun would set the same and print a note.
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    static = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", "--master-port=29401"]
    began = time.time()
    ranks = [
        subprocess.Popen([BIN / "torchrun", *static, f"--node-rank={n}", "train.py"], cwd=folder, env=env)
        for n in (0, 1)
    ]
    assert [rank.wait() for rank in ranks] == [0, 0]
    return max(float((folder / f"first-step-{r}").read_text()) for r in (0, 1)) - began


def cpu_of_the_shell(script: str) -> float:
    """Return the share of one core that `ddpjob run` itself, without its trainers, uses during 10 s."""
    folder = job(script, [sys.executable, "train.py"])
    with subprocess.Popen([BIN / "ddpjob", "run", "job.yaml"], cwd=folder, stdout=-3, stderr=-3) as process:
        time.sleep(5)
        before = own_cpu_seconds(process.pid)
        time.sleep(10)
        return (own_cpu_seconds(process.pid) - before) / 10


def own_cpu_seconds(pid: int) -> float:
    """Return the user and system seconds of a process, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def seconds_of(*argv: object) -> float:
    """Return the wall time of a command in seconds."""
    began = time.perf_counter()
    subprocess.run([str(a) for a in argv], check=True, capture_output=True)
    return time.perf_counter() - began


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    print(machine.line())
    starts = [(seconds_of(BIN / "ddpjob", "--help"), seconds_of(sys.executable, "-c", "pass")) for _ in range(11)]
    print(f"ddpjob --help            {statistics.median(a for a, _ in starts):.3f} s (python -c pass: "
          f"{statistics.median(b for _, b in starts):.3f} s; medians of 11)")  # fmt: skip
    steps = [(first_step_of_ddpjob(), first_step_of_torchrun()) for _ in range(rounds)]
    ratio = statistics.median(a / b for a, b in steps)
    print(f"first step, 2 nodes      {statistics.median(a for a, _ in steps):.2f} s with ddpjob run, "
          f"{statistics.median(b for _, b in steps):.2f} s with torchrun by hand: ratio {ratio:.2f}")  # fmt: skip
    print(f"CPU of the shell         {cpu_of_the_shell(IDLE):.1%} of a core while nothing is printed or reported, "
          f"{cpu_of_the_shell(STEPS):.1%} with 200 steps a second")  # fmt: skip


if __name__ == "__main__":
    main()
