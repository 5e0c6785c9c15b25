"""Train with torchft while replicas are killed, as its README shows: a lighthouse, and a manager for each replica.

Started by `elastic.py --torchft FOLDER`. Four replicas of one process with gloo train the model of `elastic.py`. Every
`--seconds` / `--changes` seconds one of replicas 1 to 3 is killed and started again. A batch is shared as by torchft's
DistributedSampler, by the largest number of replicas, and each replica knows its place in the data by the step. The
lighthouse has the options of torchft's README, and gloo's timeout is five seconds.
"""

from __future__ import annotations

import collections
import importlib.util
import itertools
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from elastic import BATCH, HUNG_SECONDS, NODES, ONE_THREAD, Training, difference

LIGHTHOUSE = """
import time
from torchft.coordination import LighthouseServer
server = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=10000, quorum_tick_ms=100)
print(server.address(), flush=True)
time.sleep(1e6)
"""
TRAIN = """
import datetime, os, sys, time, torch, ddpjob
from torch.distributed import TCPStore
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
replica, pause, width = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
names = f"notes-{replica}-{os.getpid()}", "now"
notes, now = (os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND) for name in names)
total = lambda: int(open("total").read()) if os.path.exists("total") else 1 << 40
torch.manual_seed(2)
x, y = torch.randn(256, 64), torch.randn(256, 1)
net = torch.nn.Linear(64, width)
sgd = torch.optim.SGD(net.parameters(), lr=0.01 / width, momentum=0.9)
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
manager = Manager(
    pg=ProcessGroupGloo(timeout=datetime.timedelta(seconds=5)),
    state_dict=lambda: {"net": net.state_dict(), "sgd": sgd.state_dict()},
    load_state_dict=lambda state: (net.load_state_dict(state["net"]), sgd.load_state_dict(state["sgd"])),
    min_replica_size=1, rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port,
    replica_id=f"replica_{replica}", timeout=datetime.timedelta(seconds=30), init_sync=False,
)
model, optimizer = DistributedDataParallel(manager, net), Optimizer(manager, sgd)
sampler, batches = ddpjob.GlobalBatchSampler(len(x), global_batch=16, seed=3), {}
def batch_of(step):
    epoch = step // 16
    if epoch not in batches:
        batches[epoch] = [list(batch) for batch in sampler.epoch(epoch)]
    return batches[epoch][step % 16]
while (step := manager.current_step()) < total():
    optimizer.zero_grad()
    batch = batch_of(step)[replica::4]
    (model(x[batch]) - y[batch]).square().sum(1).mean().backward()
    optimizer.step()
    if manager.current_step() > step:
        trained = batch if manager.is_participating() else []
        line = f"step {replica} {os.getpid()} {time.monotonic()} {step + 1} {','.join(map(str, trained))}\\n"
        os.write(notes, line.encode())
        if replica == 0:
            os.write(now, f"{manager.num_participants():9} {step + 1:9}\\n".encode())
    time.sleep(pause)
if replica == 0:
    torch.save([p.detach() for p in net.parameters()], "result.pt")
os._exit(0)
"""


class Replicas(Training):
    """The replicas of a training with torchft."""

    patience = 2 * HUNG_SECONDS

    def __init__(self, folder: Path, packages: Path, *script: object) -> None:
        super().__init__(folder)
        (folder / "replica.py").write_text(TRAIN)
        self._script, self._log = list(map(str, script)), (folder / "log").open("w")
        self._env = os.environ | ONE_THREAD | {"PYTHONPATH": str(packages)}
        words = [sys.executable, "-c", LIGHTHOUSE]
        self.lighthouse = subprocess.Popen(
            words, cwd=folder, env=self._env, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        assert self.lighthouse.stdout is not None
        self._env |= {"TORCHFT_LIGHTHOUSE": self.lighthouse.stdout.readline().strip()}
        self.processes = {replica: self.start(replica) for replica in range(NODES)}

    def start(self, replica: int) -> subprocess.Popen[bytes]:
        words = [sys.executable, "replica.py", str(replica), *self._script]
        return subprocess.Popen(words, cwd=self.folder, env=self._env, stdout=self._log, stderr=self._log)

    def ended(self) -> str:
        return "" if self.processes[0].poll() is None else (self.folder / "log").read_text()[-3000:]


def run(launcher: str, changes: int, given: Any, folder: Path) -> list[dict[str, Any]]:
    """Let replicas be killed; print what it costs the others, and what it changes."""
    if importlib.util.find_spec("torchft") is None and not (given.torchft / "torchft").is_dir():
        print(f"torchft is not installed in {given.torchft}: pip install --target {given.torchft} torchft")
        return []
    width, draw = given.megabytes * 2**20 // (4 * 65), random.Random(given.seed)
    replicas, killed, end = Replicas(folder, given.torchft, given.pause, width), [], "hung"
    try:
        replicas.trains(NODES)
        for _ in range(changes):
            victim = draw.randrange(1, NODES)
            began = time.monotonic()
            replicas.processes[victim].kill()
            replicas.processes[victim].wait()
            replicas.processes[victim] = replicas.start(victim)
            time.sleep(max(0.0, began + given.seconds / given.changes - time.monotonic()))
            replicas.trains(NODES)
            killed.append((began, time.monotonic()))
        (folder / "total").write_text(str(total := replicas.trains(NODES) + 100))
        codes = [process.wait(HUNG_SECONDS) for process in replicas.processes.values()]
        end = f"exit codes {codes}; relative L2 to one undisturbed process {difference(folder, total, width):.1e}"
    except (TimeoutError, subprocess.TimeoutExpired) as error:
        print(error)
    finally:
        for process in [*replicas.processes.values(), replicas.lighthouse]:
            process.kill()
            process.wait()
    trained: dict[int, list[str]] = collections.defaultdict(list)
    for note in (notes := replicas.notes()):
        trained[note.step] += filter(None, note.samples.split(","))
    pairs = list(itertools.pairwise(note.at for note in notes if note.rank == 0))
    pauses = [max(b - a for a, b in pairs if began < b and a < until) for began, until in killed]
    print(f"  a kill: longest pause of replica 0 {statistics.median(pauses):.2f} s (median), {max(pauses):.2f} s (max)")
    usual = statistics.median(b - a for a, b in pairs)
    lost = sum(max(0.0, b - a - 2 * usual) for a, b in pairs) / max(1, len(killed))
    print(f"  {lost:.2f} s in pauses of replica 0 for each kill with its return; a step takes {usual * 1e3:.0f} ms")
    missing = sum(BATCH - len(set(samples)) for samples in trained.values())
    twice = sum(len(samples) - len(set(samples)) for samples in trained.values())
    print(f"{launcher}: {len(killed)} kills; of {BATCH * len(trained)} samples {missing} missing, {twice} twice; {end}")
    return [{"launcher": launcher, "number": n, "kind": "kill", "cost": cost} for n, cost in enumerate(pauses)]
