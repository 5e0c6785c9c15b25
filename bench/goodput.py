"""Which part of the time a training makes new steps while it is killed once a minute.

    python bench/goodput.py                         # 1,000 s, two nodes of two ranks, a rank a minute
    python bench/goodput.py --pods                  # a whole pod a minute: its agent and its ranks, kill -9
    python bench/goodput.py --seconds 120 --every 20

A local run (`ddpjob run`) of a small model with AdamW; a step takes at least --step seconds, saves go to the folder
every 200 steps. A kill costs the time from the last new step before it to the first one after it, less the median time
of a step: detection, rescue, restart, load and steps that are made again. Goodput is what is left of the time from the
first step to the last. What the status says (whole seconds, imports and the first start included) is printed beside it,
and so is the part of the time that the steps themselves have taken. The victims are drawn by --seed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import machine
import psutil

TRAIN = """
import os, sys, time
import torch, torch.distributed as dist
import ddpjob
seconds, least = float(sys.argv[1]), float(sys.argv[2])
with ddpjob.init() as world:
    torch.manual_seed(1)
    model = world.wrap(torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(5)]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    snapshot = ddpjob.Snapshot("snapshots", world)
    step = snapshot.load(model=model, optimizer=optimizer)
    agent = os.environ["DDPJOB_MEMORY"].split(":")[0]
    with open(f"{world.rank}.pid.new", "w") as file:
        file.write(f"{os.getpid()} {agent}")
    os.replace(f"{world.rank}.pid.new", f"{world.rank}.pid")
    steps = open("steps", "a", buffering=1)
    ends = False
    while not ends:
        began = time.monotonic()
        optimizer.zero_grad()
        model(torch.ones(4, 128)).sum().backward()
        optimizer.step()
        step += 1
        time.sleep(max(0.0, began + least - time.monotonic()))
        ddpjob.progress(step=step)
        ddpjob.should_stop(step)
        if world.is_main:
            steps.write(f"{step} {time.monotonic()}\\n")
        if step % 200 == 0:
            snapshot.save(step, model=model, optimizer=optimizer)
        if step % 20 == 0:
            first = float(open("steps").readline().split()[1])
            flag = torch.tensor([float(time.monotonic() > first + seconds)])
            dist.broadcast(flag, src=0)
            ends = bool(flag.item())
    snapshot.close()
"""
JOB = """
apiVersion: training.ddpjob.io/v1alpha1
kind: DDPJob
metadata: {name: goodput}
spec:
  nodes: 2
  nprocPerNode: 2
  backoffLimit: 1000
  template:
    spec:
      containers:
        - name: trainer
          image: example.com/goodput
          command: [DDPRUN, train.py, "SECONDS", "STEP"]
          env: [{name: OMP_NUM_THREADS, value: "1"}]
"""
BIN = Path(sys.executable).parent


def victims(folder: Path, chance: random.Random, ranks: int, *, pods: bool) -> list[psutil.Process]:
    """The rank, or all processes of the pod, that is killed next; waits until it has loaded."""
    rank = chance.randrange(ranks)
    while True:
        with contextlib.suppress(FileNotFoundError, psutil.NoSuchProcess):
            pid, agent = map(int, (folder / f"{rank}.pid").read_text().split())
            one = psutil.Process(agent if pods else pid)
            return [one, *one.children(recursive=True)] if pods else [one]
        time.sleep(0.05)


def kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def steps_of(folder: Path) -> list[tuple[int, float]]:
    """(step, when) of rank 0, of all generations."""
    path = folder / "steps"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(line.split()[0]), float(line.split()[1])) for line in lines if len(line.split()) == 2]


def judged(steps: list[tuple[int, float]], kills: list[float]) -> str:
    """Goodput, what was made twice, and how long each kill cost."""
    new, furthest, repeated = [], 0, 0
    for step, when in steps:
        if step > furthest:
            new.append(when)
            furthest = step
        else:
            repeated += 1
    gaps = [after - before for before, after in itertools.pairwise(new)]
    usual = statistics.median(gaps)
    cost = [max(g for b, g in zip(new, gaps, strict=False) if b <= k + 1 and b + g >= k) - usual for k in kills]
    took = new[-1] - new[0]
    return "\n".join(
        [
            f"{len(new)} steps in {took:.0f} s, median {usual * 1e3:.1f} ms; {len(kills)} kills, {repeated} repeated",
            f"a kill cost {statistics.median(cost):.2f} s (median), {max(cost):.2f} s (most), all {sum(cost):.1f} s",
            f"goodput {1 - sum(cost) / took:.2%}; steps at their median: {usual * len(gaps) / took:.2%}",
        ]
    )


def run(asked: argparse.Namespace, folder: Path) -> int:
    chance, kills = random.Random(asked.seed), []
    (folder / "train.py").write_text(TRAIN)
    job_file = JOB.replace("DDPRUN", str(BIN / "ddprun")).replace("SECONDS", str(asked.seconds))
    (folder / "job.yaml").write_text(job_file.replace("STEP", str(asked.step)))
    words = [BIN / "ddpjob", "run", "job.yaml", "--cpu", "--plain", "--status", "status.json", "--no-check"]
    with (folder / "log").open("w") as log:
        job = subprocess.Popen(words, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
        try:
            while job.poll() is None and not steps_of(folder):
                time.sleep(0.1)
            began = time.monotonic()
            while job.poll() is None:
                due = began + asked.every * (len(kills) + 1)
                if due > began + asked.seconds - asked.every / 2:
                    break  # the last restart is seen to its end
                time.sleep(max(0.0, due - time.monotonic()))
                which = victims(folder, chance, 4, pods=asked.pods)
                kills.append(time.monotonic())
                kill(which)
            job.wait()
        finally:
            if job.poll() is None:
                job.terminate()
                job.wait()
    if len(steps_of(folder)) < 3:
        print((folder / "log").read_text()[-3000:])
        return 1
    print(judged(steps_of(folder), kills))
    status = json.loads((folder / "status.json").read_text())
    print(json.dumps(status.get("status", status).get("goodput")))
    print("\n".join((folder / "log").read_text().splitlines()[-3:]))
    return job.returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1000.0)
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two kills (%(default)s)")
    parser.add_argument("--step", type=float, default=0.05, help="seconds that a step takes at least (%(default)s)")
    parser.add_argument("--pods", action="store_true", help="kill pods in place of ranks")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    print(machine.line())
    with tempfile.TemporaryDirectory() as folder:
        code = run(asked, Path(folder))
    print(machine.line())
    sys.exit(code)


if __name__ == "__main__":
    main()
