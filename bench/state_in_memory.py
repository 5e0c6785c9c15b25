"""Benefit and cost of state in memory: time from kill -9 of one rank until every rank has made two more steps.

    python bench/state_in_memory.py                       # states of 1 and 100 MB, two ranks of one node, 5 rounds
    python bench/state_in_memory.py --megabytes 1500 --ranks 4 --rounds 3
    python bench/state_in_memory.py --step                # cost per step, with 300 tensors and AdamW

A state has parameters and AdamW's two moments. The script saves to the folder every 10 steps, and rank 1 is killed 7
steps after a save. "folder" is the same script with `Snapshot(memory=False)`; "torchrun" is a script with torch.save
and torch.load under torchrun --standalone. Each round runs every variant once. --step compares the CPU time of a
thread, because other load disturbs it least; steps with and without the memory alternate.
"""

import os
import statistics
import subprocess
import sys
import time

import psutil
from common import ONE_THREAD, kill, machine, options, script, shown

from ddpjob_core.memory import PROVE_EVERY
from ddprun.memory import Memory

TRAIN = """
import os, signal, sys, time
import torch, torch.distributed as dist
megabytes, how = int(sys.argv[1]), sys.argv[2]
again, ours = os.environ["TORCHELASTIC_RESTART_COUNT"] == "1", how != "torchrun"
if ours:
    import ddpjob
    group = ddpjob.init()
    rank = group.rank
else:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
torch.manual_seed(1)
width, layers = (128, 5) if megabytes == 1 else (1024, max(1, megabytes // 12))
model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(layers)])
model = group.wrap(model) if ours else torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
snapshot = ddpjob.Snapshot("snapshots", group, memory=how == "memory") if ours else None
step = 0
if ours:
    step = snapshot.load(model=model, optimizer=optimizer)
elif os.path.exists("saved"):
    saved = torch.load("saved")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
first = step
while step < 27 or (again and step < first + 2):
    optimizer.zero_grad()
    if not again and step == 17 and rank == 1:
        time.sleep(2)  # what was saved is in the folder
        os.write(1, f"KILL {time.monotonic()}\\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)
    model(torch.ones(4, width)).sum().backward()
    optimizer.step()
    step += 1
    if ours:
        ddpjob.should_stop(step)
    if step % 10 == 0 and not again:
        if ours:
            snapshot.save(step, model=model, optimizer=optimizer)
        elif rank == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, "new")
            os.replace("new", "saved")
    if again and step == first + 2:
        os.write(1, f"STEP {first} {time.monotonic()}\\n".encode())
        break
if ours:
    snapshot.close()
    group.__exit__(None, None, None)
"""
TORCHRUN = ["torch.distributed.run", "--standalone", "--max-restarts=1"]
STEPS = 6 * PROVE_EVERY  # with --step
SECONDS_MAX = 120.0  # limit of a run, because torchrun's static rendezvous hung in most restarts


def restart(megabytes: int, ranks: int, how: str) -> list[tuple[int, float]]:
    """Return repeated steps, and seconds from the kill until every rank has made two more; [] if the run failed."""
    with script(TRAIN) as folder, (folder / "stderr").open("w") as stderr:
        module = TORCHRUN if how == "torchrun" else ["ddprun"]
        words = [sys.executable, "-m", *module, f"--nproc-per-node={ranks}", "train.py", str(megabytes), how]
        # torchrun's c10d hangs at a restart of its own store unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE is set.
        env = os.environ | ONE_THREAD | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        job = psutil.Popen(words, cwd=folder, stdout=subprocess.PIPE, stderr=stderr, text=True, env=env)
        try:
            printed = job.communicate(timeout=SECONDS_MAX)[0]
        except subprocess.TimeoutExpired:
            kill(job)
            printed = job.communicate()[0]
        lines = [line.split() for line in printed.splitlines()]
        killed = [float(line[1]) for line in lines if line[:1] == ["KILL"]]
        steps = [(int(line[1]), float(line[2])) for line in lines if line[:1] == ["STEP"]]
        if job.returncode != 0 or len(killed) != 1 or len(steps) != ranks:
            print((folder / "stderr").read_text()[-2000:])
            return []
    return [(17 - max(first for first, _ in steps), max(ended for _, ended in steps) - killed[0])]


def compare(sizes: list[int], ranks: int, rounds: int) -> None:
    """Print what a kill costs each variant."""
    for megabytes in sizes:
        found: dict[str, list[tuple[int, float]]] = {how: [] for how in ("memory", "folder", "torchrun")}
        for _ in range(rounds):
            for how, its in found.items():
                its += restart(megabytes, ranks, how)
        for how, its in found.items():
            took = shown([seconds for _, seconds in its]) if its else "failed"
            print(f"{megabytes} MB, {how}: {took}; steps repeated: {sorted({steps for steps, _ in its})}", flush=True)


def added(kept: int) -> tuple[float, float, float]:
    """Return medians in CPU milliseconds: what the memory adds to a step, what a proof of the state adds, and a step
    without the memory. Two equal trainings alternate in one thread; kept is the one (0 or 1) whose hooks run."""
    import torch
    from torch.optim import optimizer as hooks

    from ddpjob import process
    from ddpjob.checkpoint.in_memory.memory import Keeper
    from ddpjob.checkpoint.in_memory.shared import Shared
    from ddpjob.checkpoint.state.half_done import SinceLastStep

    class Model(torch.nn.Sequential):
        generator = torch.default_generator

        def forward(self) -> torch.Tensor:
            torch.rand(1, generator=self.generator)  # change the random states at each step, as dropout does
            return torch.cat([parameter.view(-1) for parameter in self.parameters()]).sum()

    trainings = []
    for number in range(2):
        model = Model(*[torch.nn.Linear(32, 32) for _ in range(150)])
        if number != kept:  # a draw of this training would be one between two steps of the other one
            model.generator = torch.Generator()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        model = torch.nn.parallel.DistributedDataParallel(model)
        trainings.append((model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 10**6)))
    places = [hooks._global_optimizer_pre_hooks, hooks._global_optimizer_post_hooks]
    for place in places:
        place.clear()
    agent = Memory(1)
    agent.begin(0)
    watch, shared = SinceLastStep(0), Shared(agent.where(0), 1, 0)
    keeper = process.current.keeper = Keeper(shared, 0, 2, None, None, watch.pending, has_folder=True)
    keeper.register(dict(zip(("model", "optimizer", "scheduler"), trainings[kept], strict=True)))
    own = [dict(place) for place in places]
    spent: list[list[float]] = [[], []]
    for step in range(1, STEPS + 1):
        for number, (model, optimizer, scheduler) in enumerate(trainings):
            for place, its in zip(places, own, strict=True):
                place.clear()
                place.update(its if number == kept else {})
            began = time.thread_time()
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
            scheduler.step()
            if number == kept:
                keeper.boundary(step)
            spent[number == kept].append((time.thread_time() - began) * 1e3)
        if step == 8:
            time.sleep(0.3)  # let a thread reserve the area
    assert keeper.is_on, "it was turned off"
    del watch  # its hook has lived until here
    more = [one - other for other, one in zip(*spent, strict=True)][PROVE_EVERY:]
    proofs = [sum(more[first : first + 2]) for first in range(PROVE_EVERY - 1, len(more) - 1, PROVE_EVERY)]
    usual = statistics.median(more)
    return usual, statistics.median(proofs) - 2 * usual, statistics.median(spent[0])


def step_cost(rounds: int) -> None:
    """Print the milliseconds of CPU time that the memory adds to a step."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    # one training may have better addresses than the other, so each is kept in turn
    found = [[statistics.mean(values) for values in zip(added(0), added(1), strict=True)] for _ in range(rounds)]
    usual, proof, without = (statistics.median(column) for column in zip(*found, strict=True))
    runs = ", ".join(f"{each[0]:.3f}" for each in found)
    print(f"the memory adds {usual:.3f} ms ({runs}) to a step of {without:.3f} ms, and {proof:.3f} ms to every")
    print(f"{PROVE_EVERY}th step, which proves the state: {usual + proof / PROVE_EVERY:.3f} ms on average")


def main() -> None:
    asked = options(__doc__, megabytes=[1, 100], ranks=2, rounds=5, step=False)
    print(machine())
    if asked.step:
        step_cost(asked.rounds)
    else:
        compare(asked.megabytes, asked.ranks, asked.rounds)
    print(machine())


if __name__ == "__main__":
    main()
