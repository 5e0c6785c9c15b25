"""Measure `ddpjob run`: start of the command line, time to the first step compared with torchrun, CPU while running.

    python bench/local_run.py [--rounds 3]

Runs alternate (A B A B …), because on a busy machine their ratio varies less than the seconds.
"""

import os
import statistics
import subprocess
import sys
import time

import psutil
from common import BIN, ONE_THREAD, machine, options, script

TRAIN = """
import time, torch, torch.distributed as dist
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
RUN = [BIN / "ddpjob", "run", "--nodes", "2", "--no-check", "--launcher", "torchrun", "train.py"]
STATIC = [BIN / "torchrun", "--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", "--master-port=29401"]
BY_HAND = [[*STATIC, f"--node-rank={node}", "train.py"] for node in (0, 1)]


def first_step(*commands: list[object]) -> float:
    """Return the seconds from the start of the commands until both ranks have made a step."""
    with script(TRAIN) as folder:
        began, env = time.time(), os.environ | ONE_THREAD
        running = [subprocess.Popen(words, cwd=folder, env=env, stdout=-3, stderr=-3) for words in commands]
        assert [one.wait() for one in running] == [0] * len(commands)
        return max(float((folder / f"first-step-{rank}").read_text()) for rank in (0, 1)) - began


def cpu_of_the_shell(text: str) -> float:
    """Return the share of one core that `ddpjob run` itself, without its trainers, uses during 10 s."""
    with script(text) as folder, psutil.Popen(RUN, cwd=folder, stdout=-3, stderr=-3) as shell:
        time.sleep(5)
        before = sum(shell.cpu_times()[:2])
        time.sleep(10)
        return (sum(shell.cpu_times()[:2]) - before) / 10


def seconds_of(*argv: object) -> float:
    """Return the wall time of a command in seconds."""
    began = time.perf_counter()
    subprocess.run(argv, check=True, capture_output=True)
    return time.perf_counter() - began


def main() -> None:
    rounds = options(__doc__, rounds=3).rounds
    print(machine())
    starts = [(seconds_of(BIN / "ddpjob", "--help"), seconds_of(sys.executable, "-c", "pass")) for _ in range(11)]
    ours, bare = (statistics.median(each) for each in zip(*starts, strict=True))
    print(f"ddpjob --help            {ours:.3f} s (python -c pass: {bare:.3f} s; medians of 11)")
    steps = [(first_step(RUN), first_step(*BY_HAND)) for _ in range(rounds)]
    ours, bare = (statistics.median(each) for each in zip(*steps, strict=True))
    ratio = statistics.median(a / b for a, b in steps)
    print(f"first step, 2 nodes      {ours:.2f} s with ddpjob run, {bare:.2f} s with torchrun by hand: {ratio:.2f}")
    idle, busy = cpu_of_the_shell(IDLE), cpu_of_the_shell(STEPS)
    print(f"CPU of the shell         {idle:.1%} of a core without reports, {busy:.1%} with 200 steps a second")


if __name__ == "__main__":
    main()
