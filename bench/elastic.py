"""Measure a job that changes its size: kills, nodes that leave and nodes that come, with ddprun and with torchrun.

    python bench/elastic.py                                     # 100 changes in 10 minutes, then 4 under torchrun
    python bench/elastic.py --changes 10 --seconds 60 --megabytes 100 --csv changes.csv

1 to 4 nodes on this machine, two ranks each; node 0 stays. A change kills nodes, sends SIGTERM to their agents (as
`ddpjob run --resize` does), or starts nodes. The cost of a change is the time from rank 0's last step before the change
to its first step after it. Parts of the cost: detection (until a rank writes its state or stops), rescue (until all
ranks have written), stop (until all have ended), restart (until the last rank runs the script), load, first step. At
the end one process trains the same steps, for comparison.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import csv
import itertools
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import machine
import psutil
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))

from free_port import free_port

NPROC, NODES, SETTLED_STEPS, HUNG_SECONDS, SAMPLES, BATCH = 2, 4, 10, 90.0, 256, 16
PARTS = ("detection", "rescue", "stop", "restart", "load", "first step")
LINE_BYTES, ONE_THREAD = 20, {"OMP_NUM_THREADS": "1"}
TRAIN = """
import os, sys, time
began = time.monotonic()
import torch, ddpjob
from ddpjob.checkpoint.in_memory.survivor import Survivor
rank, life = (os.environ.get(name, "0") for name in ("RANK", "TORCHELASTIC_RESTART_COUNT"))
notes, now = (os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND) for name in (f"notes-{os.getpid()}", "now"))
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


class Job:
    """The agents of one job on this machine, by node."""

    def __init__(self, launcher: str, folder: Path, *script: object) -> None:
        (folder / "train.py").write_text(TRAIN)
        self.folder, self._launcher, self._port = folder, launcher, free_port()
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
        if agent.is_running():
            for process in [agent, *(agent.children(recursive=True) if number == signal.SIGKILL else [])]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
        agent.wait(HUNG_SECONDS)

    def trains(self, ranks: int) -> int:
        """Wait until this number of ranks has made some steps. Return the last step. Raise TimeoutError."""
        deadline, size, since, step = time.monotonic() + HUNG_SECONDS, 0, 0, 0
        while size != ranks or step < since + SETTLED_STEPS:
            if time.monotonic() > deadline or self.agents[0].poll() is not None:
                raise TimeoutError((self.folder / "log-0").read_text()[-3000:])
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
    return {"kind": kind, "from": NPROC * here, "to": NPROC * wanted, "at": began, "settled": time.monotonic()}


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
    """Return how many steps a rank has repeated, and in how many epochs a sample is missing or comes twice."""
    lives: dict[tuple[str, int], set[int]] = collections.defaultdict(set)
    for n in notes:
        lives[n.what, n.step].add(n.life)
    ended = {step: its for (what, step), its in lives.items() if what == "step"}
    seen: dict[int, list[str]] = collections.defaultdict(list)
    for n in notes:
        if n.what == "batch" and n.samples and n.life == max(lives["batch", n.step]):
            seen[(n.step - 1) * BATCH // SAMPLES] += n.samples.split(",")
    epochs = (seen[epoch] for epoch in range(max(ended, default=0) * BATCH // SAMPLES))
    wrong = sum(len(epoch) != SAMPLES or len(set(epoch)) != SAMPLES for epoch in epochs)
    return sum(len(its) - 1 for its in ended.values()), wrong


def difference(folder: Path, total: int, width: int) -> float:
    """Return the relative L2 distance to the parameters of one undisturbed process after the same steps."""
    (alone := folder / "alone").mkdir()
    (alone / "total").write_text(str(total))
    words = [sys.executable, folder / "train.py", "0", str(width)]
    subprocess.run(words, cwd=alone, env=os.environ | ONE_THREAD, check=True, capture_output=True)
    one, other = (torch.cat([p.flatten() for p in torch.load(path / "result.pt")]) for path in (folder, alone))
    return float((one - other).norm() / other.norm())


def run(launcher: str, changes: int, given: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Let a job change its size; print and return its changes."""
    width = given.megabytes * 2**20 // (4 * 65)
    job, draw, found, end = Job(launcher, folder, given.pause, width), random.Random(given.seed), [], "hung"
    try:
        for node in range(NODES):
            job.start(node)
        job.trains(NPROC * NODES)
        began = time.monotonic()
        for number in range(changes):
            found.append({"launcher": launcher, "number": number, **change(job, draw)})
            time.sleep(max(0.0, began + given.seconds / given.changes * (number + 1) - time.monotonic()))
        (folder / "total").write_text(str(total := job.trains(NPROC * len(job.agents)) + 100))
        codes = [agent.wait(HUNG_SECONDS) for agent in job.agents.values()]
        end = f"exit codes {codes}; relative L2 to one undisturbed process {difference(folder, total, width):.1e}"
    except (TimeoutError, psutil.TimeoutExpired) as error:
        print(error)
    finally:
        for node in list(job.agents):
            job.end(node, signal.SIGKILL)
    notes = job.notes()
    found = [measured(one, notes, job.restarts) for one in found]
    for kind, part in itertools.product(("kill", "leave", "come"), ("cost", *PARTS)):
        if known := [one[part] for one in found if one["kind"] == kind and part in one]:
            print(
                f"  {kind}: {part} {statistics.median(known):.2f} s (median of {len(known)}), {max(known):.2f} s (max)"
            )
    print(
        "{}: {} changes; {} steps repeated, {} epochs with a sample missing or twice; {}".format(
            launcher, len(found), *repeated(notes), end
        ),
        flush=True,
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--changes", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=600.0, help="for these changes (%(default)s)")
    parser.add_argument("--torchrun", type=int, default=4, help="changes under torchrun (%(default)s)")
    parser.add_argument("--megabytes", type=int, default=1, help="of parameters (%(default)s)")
    parser.add_argument("--pause", type=float, default=0.02, help="seconds between two steps (%(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--csv", default=os.devnull, help="file for a line per change")
    given, rows = parser.parse_args(), []
    for launcher, changes in (("ddprun", given.changes), ("torchrun", given.torchrun)):
        print(machine.line())
        with tempfile.TemporaryDirectory() as folder:
            rows += run(launcher, changes, given, Path(folder)) if changes else []
    with open(given.csv, "w") as file:
        writer = csv.DictWriter(file, ["launcher", "number", "kind", "from", "to", "cost", *PARTS], lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()} for row in rows)


if __name__ == "__main__":
    main()
