"""Measure a job that changes its size: kills, nodes that leave and nodes that come, with ddprun and with torchrun.

    python bench/elastic.py                                     # 100 changes in 10 minutes, then 4 under torchrun
    python bench/elastic.py --changes 10 --seconds 60 --megabytes 100
    KUBECONFIG=… DDPJOB_TEST_NODE=… python bench/elastic.py --cluster --changes 20

1 to 4 nodes on this machine, two ranks each; node 0 stays. A change kills nodes, sends SIGTERM to their agents (as
`ddpjob run --resize` does), or starts nodes. The cost of a change is the time from rank 0's last step before the change
to its first step after it. Parts of the cost: detection (until a rank writes its state or stops), rescue (until all
ranks have written), stop (until all have ended), restart (until the last rank runs the script), load, first step. At
the end one process trains the same steps, for comparison. The model has --megabytes of parameters, and a rank waits
--pause seconds after each step. elastic_cluster.py describes the job in the cluster; --snooze is ddprun's there.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from common import ONE_THREAD, kill, machine, options, script, shown
from free_port import free_port

NPROC, NODES, SETTLED_STEPS, HUNG_SECONDS, SAMPLES, BATCH = 2, 4, 10, 90.0, 256, 16
PARTS = ("detection", "rescue", "stop", "restart", "load", "first step")
LINE_BYTES = 20
TRAIN = """
import os, sys, time
began = time.monotonic()
import torch, ddpjob
from ddpjob.checkpoint.in_memory.survivor import Survivor
rank, life = (os.environ.get(name, "0") for name in ("RANK", "TORCHELASTIC_RESTART_COUNT"))
names = f"notes-{os.uname().nodename}-{os.getpid()}", "now"
notes, now = (os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666) for name in names)
def note(what, step=0, at=None, samples=()):
    os.write(notes, f"{what} {rank} {life} {at or time.monotonic()} {step} {','.join(map(str, samples))}\\n".encode())
def noted(survivor, save=Survivor.save):
    note("told")
    save(survivor)
    note("wrote")
note("began", at=began)
Survivor.save = noted
total = lambda: int(open("total").read()) if os.path.exists("total") else 1 << 40
with ddpjob.init("gloo") as world:
    torch.manual_seed(2)
    x, y, width = torch.randn(256, 64), torch.randn(256, 1), int(sys.argv[2])
    net = torch.nn.Linear(64, width)
    model, optimizer = world.wrap(net), torch.optim.SGD(net.parameters(), lr=0.01 / width, momentum=0.9)
    sampler = ddpjob.GlobalBatchSampler(len(x), global_batch=16, seed=3)
    snapshot = ddpjob.Snapshot("snapshots", world)
    step = snapshot.load(model=model, optimizer=optimizer, sampler=sampler)
    note("loaded", step)
    while step < total():
        for batch in sampler.epoch(sampler.current_epoch):
            note("batch", step + 1, samples=batch)
            optimizer.zero_grad()
            ddpjob.accumulate(model, batch, sampler.global_batch, lambda i: (model(x[i]) - y[i]).square().sum())
            optimizer.step()
            step += 1
            note("step", step)
            if rank == "0":
                os.write(now, f"{world.world_size:9} {step:9}\\n".encode())
            stop = ddpjob.should_stop(step)
            if stop or step % 100 == 0:
                snapshot.save(step, model=model, optimizer=optimizer, sampler=sampler)
            if stop:
                note("told", step)
                raise ddpjob.Stopped(step)
            time.sleep(float(sys.argv[1]))
            if step >= total():
                break
    snapshot.close()
    if world.is_main:
        torch.save([p.detach() for p in net.parameters()], "result.pt")
"""


class Note(NamedTuple):
    """A line that a rank has written."""

    what: str
    rank: int
    life: int
    at: float
    step: int
    samples: str


class Training:
    """A training whose ranks write notes into a folder of this machine."""

    patience = HUNG_SECONDS

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def ended(self) -> str:
        """Return the end of the log if the training has ended, else ""."""
        raise NotImplementedError

    def trains(self, ranks: int) -> int:
        """Wait until this number of ranks has made some steps. Return the last step. Raise TimeoutError."""
        deadline, size, since, step = time.monotonic() + self.patience, 0, 0, 0
        while size != ranks or step < since + SETTLED_STEPS:
            if time.monotonic() > deadline or self.ended():
                raise TimeoutError(self.ended() or f"{ranks} ranks do not train, but {size}")
            time.sleep(0.02)
            with contextlib.suppress(OSError), (self.folder / "now").open("rb") as file:
                file.seek(-LINE_BYTES, os.SEEK_END)
                before, (size, step) = size, map(int, file.read(LINE_BYTES).split())
                since = since if size == before == ranks else step
        return step

    def notes(self) -> list[Note]:
        """Return what all ranks have noted, in the order of time."""
        words = (line.split(" ") for path in self.folder.glob("notes-*") for line in path.read_text().splitlines())
        return sorted(
            (Note(w[0], int(w[1]), int(w[2]), float(w[3]), int(w[4]), w[5]) for w in words), key=lambda n: n.at
        )


class Job(Training):
    """The agents of one job on this machine, by node."""

    def __init__(self, launcher: str, folder: Path, *script: object) -> None:
        super().__init__(folder)
        self._launcher, self._port = launcher, free_port()
        self._words = [f"--nnodes=1:{NODES}", f"--nproc-per-node={NPROC}", "--max-restarts=1000", "--rdzv-id=bench"]
        self._words += ["train.py", *map(str, script)]
        self.agents: dict[int, psutil.Popen] = {}
        self._replaced: collections.Counter[int] = collections.Counter()
        self.restarts: list[float] = []
        """Times at which all ranks of a generation had ended, as node 0's agent logs them."""

    def start(self, node: int) -> None:
        port = self._port
        where = ["ddprun", f"--master-port={port}", f"--node-rank={node}", "--rdzv-conf=last_call_timeout=0,snooze=0"]
        if self._launcher == "torchrun":
            conf = f"--rdzv-conf=last_call_timeout=5,is_host={int(node == 0)}"
            where = ["torch.distributed.run", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", conf]
        own = ONE_THREAD | {"DDPJOB_REPLACEMENT": str(self._replaced[node]), "DDPJOB_TERMINATION_LOG": ""}
        self._replaced[node] += 1
        log = (self.folder / f"log-{node}").open("a")
        self.agents[node] = psutil.Popen(
            [sys.executable, "-m", *where, *self._words],
            cwd=self.folder,
            env=os.environ | own | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            stdout=log,
            stderr=log if node else subprocess.PIPE,
            text=True,
        )
        if node == 0:
            threading.Thread(target=self._hear, args=(self.agents[0].stderr, log), daemon=True).start()

    def _hear(self, said: Any, log: Any) -> None:
        for line in said:
            self.restarts += [time.monotonic()] if line.startswith("ddprun: restart") else []
            print(line, end="", file=log, flush=True)

    def end(self, node: int, number: int) -> None:
        """End a node; SIGKILL ends all its processes, as a power cut does."""
        agent = self.agents.pop(node)
        kill(agent) if number == signal.SIGKILL else agent.send_signal(number)
        agent.wait(HUNG_SECONDS)

    def ended(self) -> str:
        return "" if self.agents[0].poll() is None else (self.folder / "log-0").read_text()[-3000:]


def change(job: Job, draw: random.Random) -> dict[str, Any]:
    """Go to another number of nodes."""
    here = len(job.agents)
    wanted = draw.choice([n for n in range(1, NODES + 1) if n != here])
    kind = "come" if wanted > here else draw.choices(["kill", "leave"], [2, 1])[0]
    away, present = set(range(NODES)) - set(job.agents), set(job.agents) - {0}
    nodes = draw.sample(sorted(away if kind == "come" else present), abs(wanted - here))
    began = time.monotonic()
    for node in nodes:
        job.start(node) if kind == "come" else job.end(node, signal.SIGKILL if kind == "kill" else signal.SIGTERM)
    job.trains(NPROC * wanted)
    return {"kind": kind, "at": began, "settled": time.monotonic()}


def measured(one: dict[str, Any], notes: list[Note], restarts: list[float]) -> dict[str, Any]:
    """Replace the times of a change by its cost, and by its parts if there was one restart."""
    at, settled = one.pop("at"), one.pop("settled")
    steps = [n for n in notes if n.what == "step" and n.rank == 0 and n.at <= settled]
    pairs = [(a, b) for a, b in itertools.pairwise(steps) if a.life != b.life and b.at > at]
    one["cost"] = sum(after.at - max(before.at, at) for before, after in pairs)
    ended = [moment for moment in restarts if at < moment < settled]
    if len(pairs) == len(ended) == 1:
        (before, after), times = pairs[0], collections.defaultdict(list)
        for n in notes:
            times[n.what, n.life].append(n.at)
        told = [moment for moment in times["told", before.life] if moment > at] or [before.at]
        begin = at if one["kind"] == "kill" else min(told)  # new nodes import torch earlier, while the others train
        ends = [min(told), max(times["wrote", before.life], default=max(told)), ended[0]]
        ends += [max(times["began", after.life]), max(times["loaded", after.life]), after.at]
        one |= dict(zip(PARTS, (b - a for a, b in itertools.pairwise([begin, *ends])), strict=True))
    return one


def repeated(notes: list[Note]) -> tuple[int, int]:
    """Return how many steps were repeated, and in how many epochs a sample is missing or comes twice."""
    begins, lives = {n.life: n.step for n in notes if n.what == "loaded"}, collections.defaultdict(set)
    for n in notes:
        if n.what == "step":
            lives[n.step].add(n.life)
    seen: dict[int, list[str]] = collections.defaultdict(list)
    for n in notes:  # a rank may be stopped after a step and before its note, so the next load shows which steps count
        if n.what == "batch" and n.samples and n.life == max(life for life, step in begins.items() if step < n.step):
            seen[(n.step - 1) * BATCH // SAMPLES] += n.samples.split(",")
    epochs = (seen[epoch] for epoch in range(max(lives, default=0) * BATCH // SAMPLES))
    wrong = sum(len(epoch) != SAMPLES or len(set(epoch)) != SAMPLES for epoch in epochs)
    return sum(len(its) - 1 for its in lives.values()), wrong


def difference(folder: Path, total: int, width: int) -> float:
    """Return the relative L2 distance to the parameters of one undisturbed process after the same steps."""
    (alone := folder / "alone").mkdir()
    (alone / "total").write_text(str(total))
    words = [sys.executable, folder / "train.py", "0", str(width)]
    subprocess.run(words, cwd=alone, env=os.environ | ONE_THREAD, check=True, capture_output=True)
    one, other = (torch.cat([p.flatten() for p in torch.load(path / "result.pt")]) for path in (folder, alone))
    return float((one - other).norm() / other.norm())


def run(launcher: str, changes: int, given: argparse.Namespace, folder: Path) -> None:
    """Let a job change its size, and print what its changes cost."""
    width = given.megabytes * 2**20 // (4 * 65)
    job, draw, found = Job(launcher, folder, given.pause, width), random.Random(given.seed), []
    end, total = "hung", 0
    try:
        for node in range(NODES):
            job.start(node)
        job.trains(NPROC * NODES)
        began = time.monotonic()
        for number in range(changes):
            found.append(change(job, draw))
            time.sleep(max(0.0, began + given.seconds / given.changes * (number + 1) - time.monotonic()))
        (folder / "total").write_text(str(last := job.trains(NPROC * len(job.agents)) + 100))
        end, total = f"exit codes {[agent.wait(HUNG_SECONDS) for agent in job.agents.values()]}", last
    except (TimeoutError, psutil.TimeoutExpired) as error:
        print(error)
    finally:
        for node in list(job.agents):
            job.end(node, signal.SIGKILL)
    notes = job.notes()
    summary(launcher, [measured(one, notes, job.restarts) for one in found], notes, end, folder, total, width)


def summary(
    launcher: str, found: list[dict[str, Any]], notes: list[Note], end: str, folder: Path, total: int, width: int
) -> None:
    """Print the medians by kind of change, and what happened to the steps, the samples and the parameters."""
    for kind, part in itertools.product(sorted({one["kind"] for one in found}), ("cost", "beyond detection", *PARTS)):
        if known := [one[part] for one in found if one["kind"] == kind and part in one]:
            print(f"  {kind}: {part}: {shown(known)}")
    at = [n.at for n in notes if n.what == "step" and n.rank == 0]
    goodput = 1 - sum(one["cost"] for one in found) / (at[-1] - at[0]) if len(at) > 1 else 0.0
    if total:
        end += f"; relative L2 to one undisturbed process {difference(folder, total, width):.1e}"
    steps, epochs = repeated(notes)
    print(f"{launcher}: {len(found)} changes, goodput {goodput:.1%}; {steps} steps repeated, ", end="")
    print(f"{epochs} epochs with a sample missing or twice; {end}", flush=True)


def main() -> None:
    words = {"changes": 100, "seconds": 600.0, "torchrun": 4, "megabytes": 1, "pause": 0.02, "seed": 1}
    given = options(__doc__, **words, cluster=False, snooze=30.0)
    print(machine())
    runs = {"cluster": given.changes} if given.cluster else {"ddprun": given.changes, "torchrun": given.torchrun}
    for launcher, changes in runs.items():
        do = importlib.import_module("elastic_cluster").run if given.cluster else run
        with script(TRAIN, "/var/tmp") as folder:
            if changes:
                do(launcher, changes, given, folder)
        print(machine())


if __name__ == "__main__":
    main()
