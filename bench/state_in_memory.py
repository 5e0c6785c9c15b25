"""What state in memory gives and costs: kill -9 of one rank, until every rank has made two more steps.

    python bench/state_in_memory.py                       # states of 1 and 100 MB, two ranks of one node, 5 rounds
    python bench/state_in_memory.py --megabytes 1500 --ranks 4 --rounds 3
    python bench/state_in_memory.py --ways memory --against /tmp/before/trainer  # git archive OLD trainer | tar -x
    python bench/state_in_memory.py --step                # what a step pays, with 300 tensors and AdamW

A state has parameters and AdamW's two moments; the folder is saved every 10 steps, and rank 1 is killed 7 steps after a
save. "folder" is the same script with `Snapshot(memory=False)`, "torchrun" one with torch.save and torch.load under
torchrun --standalone. Each round runs every variant once. Detection ends when the agent has the ranks write, the rescue
when the state is whole; the restart then ends with the first line of the last new rank (of torchrun the three are one).
The clock is the machine's monotonic one everywhere; in --step it is the CPU time of the thread, which other load
disturbs least, and steps with the memory and without it alternate in one run.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import mmap
import os
import select
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import machine
import psutil

from ddpjob_core import memory
from ddprun.memory import Memory

TRAIN = """
import os, signal, sys, time
began = time.monotonic()
import torch, torch.distributed as dist
megabytes, how = int(sys.argv[1]), sys.argv[2]
again, ours = os.environ["TORCHELASTIC_RESTART_COUNT"] == "1", how != "torchrun"
if ours:
    import ddpjob
    group = ddpjob.init()
    rank = group.rank
    if rank == 0 and not again:
        os.write(1, f"MEMORY {os.environ['DDPJOB_MEMORY']}\\n".encode())
else:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
torch.manual_seed(1)
width, layers = (128, 5) if megabytes == 1 else (1024, max(1, megabytes // 12))
model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(layers)])
model = group.wrap(model) if ours else torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
snapshot = ddpjob.Snapshot("snapshots", group, memory=how == "memory") if ours else None
built = time.monotonic()
step = 0
if ours:
    step = snapshot.load(model=model, optimizer=optimizer)
elif os.path.exists("saved"):
    saved = torch.load("saved")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
first, loaded = step, time.monotonic()
while step < 27 or (again and step < first + 2):
    optimizer.zero_grad()
    if not again and step == 17 and rank == 1:
        time.sleep(2)  # what was saved is in the folder
        os.write(1, f"KILL {time.monotonic()}\\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)
    model(torch.ones(4, width)).sum().backward()
    optimizer.step()
    step += 1
    if again and step == first + 1:
        one = time.monotonic()
    if ours:
        ddpjob.should_stop(step)
    if step % 10 == 0 and not again:
        if ours:
            snapshot.save(step, model=model, optimizer=optimizer)
        elif rank == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, "new")
            os.replace("new", "saved")
    if again and step == first + 2:
        os.write(1, f"STEP {rank} {first} {began} {built} {loaded} {one} {time.monotonic()}\\n".encode())
        break
if ours:
    snapshot.close()
    group.__exit__(None, None, None)
"""
PARTS = ["detection", "rescue", "restart", "its construction", "load", "first step", "second", "all"]
WAYS = ["memory", "folder", "torchrun"]
BEFORE = "memory before"
Seconds = list[float]
TORCHRUN = ["torch.distributed.run", "--standalone", "--max-restarts=1"]
STEPS_AT_ONCE = 64  # of --step, before the other variant makes as many
SECONDS_MAX = 120.0  # torchrun's static rendezvous hung in most restarts


class Watched:
    """When the agent has the ranks write their state, and when it is whole: seen from outside, every 0.5 ms."""

    def __init__(self, word: str) -> None:
        agent, file, pipe = map(int, word.split(":")[:3])
        self.ordered = self.whole = 0.0
        self._pipe = os.open(f"/proc/{agent}/fd/{pipe}", os.O_RDONLY | os.O_NONBLOCK)
        descriptor = os.open(f"/proc/{agent}/fd/{file}", os.O_RDWR)
        self._cells = memoryview(mmap.mmap(descriptor, memory.PAGE_BYTES)).cast("q")
        os.close(descriptor)
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        poller = select.poll()
        poller.register(self._pipe, select.POLLIN)
        poller.poll()
        self.ordered, until = time.monotonic(), time.monotonic() + 30
        os.close(self._pipe)
        step = memory.area_cell(0, memory.AREA_STEP)
        while not self._cells[step] and time.monotonic() < until:
            time.sleep(0.0005)
        self.whole = time.monotonic() if self._cells[step] else 0.0


def end(pid: int) -> None:
    """Kill a launcher and its ranks, which may be in sessions of their own."""
    launcher = psutil.Process(pid)
    for process in [launcher, *launcher.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def restart(megabytes: int, ranks: int, how: str, against: str = "") -> tuple[int, Seconds] | None:
    """(steps repeated, the seconds of PARTS); None: it failed. 0.0: not seen, because no agent of ours is there."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(TRAIN)
        module = TORCHRUN if how == "torchrun" else ["ddprun"]
        words = [sys.executable, "-m", *module, f"--nproc-per-node={ranks}", "train.py", str(megabytes)]
        words.append("memory" if how == BEFORE else how)
        # torchrun's c10d hangs at a restart of its own store unless it is told to share none; ddprun does not read it.
        env = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
        if how == BEFORE:
            env["PYTHONPATH"] = against
        with Path(folder, "said").open("w") as said:
            job = subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, stderr=said, text=True, env=env)
            lines, watched = [], None
            too_long = threading.Timer(SECONDS_MAX, end, [job.pid])
            too_long.start()
            assert job.stdout is not None, "it was asked for"
            for line in job.stdout:
                lines.append(line.split())
                if lines[-1][:1] == ["MEMORY"]:
                    watched = Watched(lines[-1][1])
            job.wait()
            too_long.cancel()
        killed = [float(line[1]) for line in lines if line[:1] == ["KILL"]]
        steps = [[float(word) for word in line[2:]] for line in lines if line[:1] == ["STEP"]]
        if job.returncode != 0 or len(killed) != 1 or len(steps) != ranks:
            print(Path(folder, "said").read_text()[-2000:])
            return None
    first, began, built, loaded, one, ended = (max(column) for column in zip(*steps, strict=True))
    ordered = watched.ordered if watched else killed[0]
    whole = max(ordered, watched.whole) if watched and how in ("memory", BEFORE) else ordered
    marks = [killed[0], ordered, whole, began, built, loaded, one, ended]
    parts = [after - before for before, after in itertools.pairwise(marks)]
    return 17 - int(first), [*parts, ended - killed[0]]


def compare(sizes: list[int], ranks: int, rounds: int, ways: list[str], against: str) -> None:
    """A table: medians, the slowest of all, and the median of all beside that of torchrun."""
    print(f"| {ranks} ranks | steps repeated | {' | '.join(PARTS)} | slowest | beside torchrun |")
    print("|---" * (len(PARTS) + 4) + "|")
    for megabytes in sizes:
        found: dict[str, list[tuple[int, Seconds]]] = {how: [] for how in [*ways, *[BEFORE][: bool(against)]]}
        for _ in range(rounds):
            for how, its in found.items():
                if (result := restart(megabytes, ranks, how, against)) is not None:
                    its.append(result)
        others = [seconds[-1] for _, seconds in found.get("torchrun", [])]
        for how, its in found.items():
            if not its:
                print(f"| {megabytes} MB, {how} | failed |")
                continue
            medians = [statistics.median(column) for column in zip(*(seconds for _, seconds in its), strict=True)]
            repeated = ", ".join(sorted({str(steps) for steps, _ in its}))
            seconds = " | ".join(f"{part:.2f} s" for part in [*medians, max(s[-1] for _, s in its)])
            ratio = f"{medians[-1] / statistics.median(others):.2f}" if others else ""
            print(f"| {megabytes} MB, {how} | {repeated} | {seconds} | {ratio} |", flush=True)


class Clock:
    """CPU time of this thread between calls, by name."""

    def __init__(self) -> None:
        self.spent: dict[str, list[float]] = {}
        self._began = 0.0

    def start(self, *_: object) -> None:
        """Start to measure a part."""
        self._began = time.thread_time()

    def stop(self, name: str) -> Callable[..., None]:
        """Return what ends the part of this name."""
        spent = self.spent.setdefault(name, [])

        def stop(*_: object) -> None:
            spent.append(time.thread_time() - self._began)

        return stop


def train(turn: int, done: int, *, memory_is_on: bool) -> None:
    """Make STEPS_AT_ONCE steps for each byte of `turn`, and write how long each took. For a process of its own."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    from ddpjob.checkpoint.in_memory.memory import Keeper
    from ddpjob.checkpoint.in_memory.shared import Shared
    from ddpjob.checkpoint.state.half_done import SinceLastStep

    torch.manual_seed(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(150)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10**6)
    clock, keeper, step = Clock(), None, 0
    mark = clock.stop("at the boundary")
    if memory_is_on:
        agent, last = Memory(1), list(model.parameters())[-1]
        agent.begin(0)
        objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        register_optimizer_step_pre_hook(clock.start)
        keeper = Keeper(Shared(agent.where(0), 1, 0), 0, 2, "")
        register_optimizer_step_pre_hook(clock.stop("before the optimizer's step"))
        last.register_post_accumulate_grad_hook(clock.start)
        keeper.register(objects)
        last.register_post_accumulate_grad_hook(clock.stop("at the first gradient"))
        register_optimizer_step_post_hook(clock.start)
        watch = SinceLastStep(0)
        register_optimizer_step_post_hook(clock.stop("after the optimizer's step"))
    while os.read(turn, 1):
        began = time.thread_time()
        for _ in range(STEPS_AT_ONCE):
            optimizer.zero_grad()
            torch.rand(1)  # as dropout does: the random states differ at each step
            torch.cat([parameter.view(-1) for parameter in model.parameters()]).sum().backward()
            optimizer.step()
            scheduler.step()
            step += 1
            clock.start()
            if keeper is not None:
                keeper.boundary(step)
            mark()
        os.write(done, struct.pack("d", (time.thread_time() - began) / STEPS_AT_ONCE))
    if keeper is not None:
        assert watch is not None, "its hook ends with it"
        assert keeper.is_on, "it was turned off"
        for name, seconds in clock.spent.items():
            its = seconds[STEPS_AT_ONCE:]  # proven, and with an area
            print(f"  {name}: median {statistics.median(its) * 1e3:.3f} ms, least {min(its) * 1e3:.3f}", flush=True)
    os._exit(0)


def step_cost(rounds: int) -> None:
    """Milliseconds of CPU time of a step with and without the memory, in turns, and what each hook takes."""
    import torch

    torch.set_num_threads(1)
    turns, dones, pids = [], [], []
    for memory_is_on in (True, False):
        (turn, give), (report, done) = os.pipe(), os.pipe()
        if (pid := os.fork()) == 0:
            for descriptor in (give, report, *turns):
                os.close(descriptor)
            train(turn, done, memory_is_on=memory_is_on)
        os.close(turn)
        os.close(done)
        turns, dones, pids = [*turns, give], [*dones, report], [*pids, pid]
    pairs = []
    for number in range(rounds):
        pair = []
        for give, report in zip(turns, dones, strict=True):
            os.write(give, b"x")
            pair.append(struct.unpack("d", os.read(report, 8))[0] * 1e3)
        if number == 0:
            time.sleep(0.2)  # the area is reserved meanwhile
        else:
            pairs.append(pair)
    own, without = (statistics.median(column) for column in zip(*pairs, strict=True))
    cost = statistics.median(one - other for one, other in pairs)
    print(f"a step: {own:.3f} ms with the memory, {without:.3f} without; median of {len(pairs)} pairs: {cost:+.3f} ms")
    for give, pid in zip(turns, pids, strict=True):
        os.close(give)
        os.waitpid(pid, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[1, 100])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="which variants; all by default")
    parser.add_argument("--against", default="", help="trainer/ of another commit, whose memory is measured in turns")
    parser.add_argument("--step", action="store_true", help="what a step pays")
    asked = parser.parse_args()
    print(machine.line())
    if asked.step:
        step_cost(max(asked.rounds, 7))
    else:
        compare(asked.megabytes, asked.ranks, asked.rounds, asked.ways, asked.against)
    print(machine.line())


if __name__ == "__main__":
    main()
