"""Run a thousand jobs without failures: check that each ends with 0 and prints nothing to stderr.

    python bench/finishes.py                                    # 1,000 jobs of 4 processes under ddprun
    python bench/finishes.py --torchrun --jobs 50
    python bench/finishes.py --from-one-process --jobs 3000     # torch imported once for all: a quarter of the time
    python bench/finishes.py --from-one-process --torch-alone   # without the library

Each job has an agent, its fork server and four ranks that join over gloo, and train or only sum. They leave in three
ways, a third of the jobs each: at the end of `with`, at the interpreter's exit, or with a collective that nobody waited
for. A traceback that torch prints at the end of a successful training (DistNetworkError, "recvValue failed") counts as
bad, because users could not tell it from a failure. Exits with 1 if any job was bad.

The 4 ranks run on --nodes 1, 2 or 4 of this machine, and --at-once jobs at a time. --preload is ddprun's; without
torch._dynamo no model is trained. --torch-alone leaves the group to torch. With --from-one-process agents are forked
from this process, with the imports done (tests/support/warm.py).
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import common
import warm

from ddprun import ports

RANKS = 4
SECONDS_MAX = 120  # a job takes 1 to 20 s on a busy machine
TRAIN = """
import os, sys
import torch, torch.distributed as dist, ddpjob

way = int(sys.argv[1]) % 3

def train(world):
    if "torch._dynamo" in sys.modules:  # DistributedDataParallel imports it: seconds, where it is not preloaded
        model = world.wrap(torch.nn.Linear(8, 8))
        for _ in range(3):
            model(torch.ones(4, 8)).sum().backward()
        sys.modules["__main__"].kept = model   # as in a script: it dies in the very last moment
    ddpjob.progress(3)  # what the library runs beside the script ends with it
    total = torch.full((100,), float(world.rank))
    work = dist.all_reduce(total, async_op=way == 2)
    if way != 2:
        assert total.tolist() == [6.0] * 100
    os.write(1, f"rank {world.rank} has ended\\n".encode())

"""
LEAVES = """
if way == 1:
    train(ddpjob.init())
else:
    with ddpjob.init() as world:
        train(world)
"""
LEAVES_NOTHING = """
import types
dist.init_process_group("gloo")
train(types.SimpleNamespace(rank=dist.get_rank(), wrap=torch.nn.parallel.DistributedDataParallel))
"""
EXPECTED = [f"rank {rank} has ended" for rank in range(RANKS)]


class Job:
    """One job, with a launcher for each node."""

    def __init__(self, folder: Path, number: int, asked: argparse.Namespace) -> None:
        self.number = number
        self._until = time.monotonic() + SECONDS_MAX
        self._held = ports.hold() if asked.nodes > 1 else None
        group = [f"--nnodes={asked.nodes}", f"--master-port={ports.number(self._held)}"] if self._held else []
        self._nodes = []
        for node in range(asked.nodes):
            words = [*words_of(asked), *group, *([f"--node-rank={node}"] if group else []), "train.py", str(number)]
            self._nodes.append(start(words, folder, warmly=asked.from_one_process))

    def bad(self) -> str | None:
        """Return None while the job is running; then what was wrong with its end, "" if nothing."""
        late = time.monotonic() > self._until
        if not late and any(node.poll() is None for node in self._nodes):
            return None
        for node in self._nodes:
            node.terminate()  # does nothing to a process that has ended
        said = "".join(text for node in self._nodes for text in node.communicate())
        if self._held is not None:
            self._held.close()
        codes = [node.returncode for node in self._nodes]
        if not late and not any(codes) and sorted(said.splitlines()) == EXPECTED:
            return ""
        return f"it {f'did not end in {SECONDS_MAX} s,' if late else 'ended with'} {codes}\n{said}"


def start(words: list[str], folder: Path, *, warmly: bool) -> subprocess.Popen[str]:
    """Start `python -m WORDS` in a new Python, like a pod, or warmly in a fork of this process."""
    others = "PET_", "DDPJOB_", "TORCHELASTIC_", "MASTER_"
    env = {k: v for k, v in os.environ.items() if not k.startswith(others)} | common.ONE_THREAD
    if warmly:
        return warm.start(words[0], words[1:], cwd=folder, env=env)
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-m", *words], cwd=folder, env=env, stdout=pipe, stderr=pipe, text=True)


def words_of(asked: argparse.Namespace) -> list[str]:
    """Return the launcher's module and options, for `python -m`."""
    ranks = f"--nproc-per-node={RANKS // asked.nodes}"
    if asked.torchrun:
        return ["torch.distributed.run", ranks]
    return ["ddprun", *(["--preload", asked.preload] if asked.preload else []), ranks, "--max-restarts=0"]


def run(asked: argparse.Namespace, folder: Path) -> int:
    """Run all jobs, `at_once` at a time. Return how many were bad."""
    running, started, bad = list[Job](), 0, 0
    while running or started < asked.jobs:
        if started < asked.jobs and len(running) < asked.at_once:
            running.append(Job(folder, started, asked))
            started += 1
        ended = [(job, said) for job in running if (said := job.bad()) is not None]
        for job, said in ended:
            running.remove(job)
            bad += bool(said)
            if said:
                print(f"job {job.number}: {said}", flush=True)
        time.sleep(0.01)
    return bad


def main() -> None:
    switches = {"torchrun": False, "torch_alone": False, "from_one_process": False}
    asked = common.options(__doc__, jobs=1000, at_once=1, nodes=1, preload="", **switches)
    if asked.from_one_process and (asked.torchrun or asked.preload):
        sys.exit("--from-one-process is for ddprun with its own preload")
    print(common.machine(), flush=True)
    began = time.monotonic()
    with common.script(TRAIN + (LEAVES_NOTHING if asked.torch_alone else LEAVES)) as folder:
        bad = run(asked, folder)
    how = " ".join(words_of(asked)) + (", from one process" if asked.from_one_process else "")
    print(f"{how}: {asked.jobs - bad} of {asked.jobs} jobs ended well, in {time.monotonic() - began:.0f} s")
    print(common.machine())
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
