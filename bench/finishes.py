"""Run a thousand jobs without failures: check that each ends with 0 and prints nothing to stderr.

    python bench/finishes.py                                    # 1,000 jobs of 4 processes under ddprun
    python bench/finishes.py --torchrun --jobs 50
    python bench/finishes.py --from-one-process --jobs 3000     # torch imported once for all: a quarter of the time
    python bench/finishes.py --from-one-process --torch-alone   # without the library

Each job has an agent, its fork server and four ranks that join over gloo, and train or only sum. They leave in three
ways, a third of the jobs each: at the end of `with`, at the interpreter's exit, or with a collective that nobody waited
for. A traceback that torch prints at the end of a successful training (DistNetworkError, "recvValue failed") counts as
bad, because users could not tell it from a failure. Exits with 1 if any job was bad.

--from-one-process: agents are forked from this process. An agent normally starts a new Python as its fork server; here
the server continues in the agent's process, with the imports done. Nothing else differs.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import os
import runpy
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

import machine

from ddprun import ports

RANKS = 4
LOG_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND
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
    """One job; its output is in a log file."""

    def __init__(self, folder: Path, number: int, asked: argparse.Namespace) -> None:
        self.number, self.log = number, folder / f"log-{number}"
        self._until = time.monotonic() + SECONDS_MAX
        start = fork_agent if asked.from_one_process else start_launcher
        script = [str(folder / "train.py"), str(number)]
        self._held = ports.hold() if asked.nodes > 1 else None
        meet = ["--nnodes", str(asked.nodes), "--master-port", str(ports.number(self._held))] if self._held else []
        nodes = [[*words_of(asked), *meet, *(["--node-rank", str(k)] if meet else [])] for k in range(asked.nodes)]
        self._running = [start([*words, *script], self.log) for words in nodes]
        self._codes: list[int] = []

    def bad(self) -> str | None:
        """Return None while the job is running; then what was wrong with its end, "" if nothing."""
        late = time.monotonic() > self._until
        for agent in list(self._running):
            if late:
                os.killpg(agent, signal.SIGTERM)
            pid, status = os.waitpid(agent, 0 if late else os.WNOHANG)
            if pid:
                self._running.remove(agent)
                self._codes.append(os.waitstatus_to_exitcode(status))
        if self._running:
            return None
        if self._held is not None:
            self._held.close()
        said = self.log.read_text()
        self.log.unlink()
        if not late and not any(self._codes) and sorted(said.splitlines()) == EXPECTED:
            return ""
        return f"it {f'did not end in {SECONDS_MAX} s,' if late else 'ended with'} {self._codes}\n{said}"


def start_launcher(argv: list[str], log: Path) -> int:
    """Start the launcher in a new Python, like a pod. Return its pid."""
    actions = [(os.POSIX_SPAWN_OPEN, 1, str(log), LOG_FLAGS, 0o600), (os.POSIX_SPAWN_DUP2, 1, 2)]
    words = [sys.executable, "-m", *argv]
    return os.posix_spawn(sys.executable, words, environment(), file_actions=actions, setpgroup=0)


def fork_agent(argv: list[str], log: Path) -> int:
    """Fork an agent that has all imports of this process. Return its pid."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setpgid(0, 0)
        out = os.open(log, LOG_FLAGS, 0o600)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.close(out)
        changed = environment()
        os.environ.clear()
        os.environ.update(changed)
        os.execvpe = begin_here  # type: ignore[assignment]
        sys.argv[:] = argv
        runpy.run_module(argv[0], run_name="__main__", alter_sys=False)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(70)


def begin_here(_file: str, argv: list[str], environ: dict[str, str]) -> NoReturn:
    """Replace os.execvpe: start the program in this process, and close the descriptors that an exec would close."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.get_inheritable(int(name)):
                os.close(int(name))
    os.environ.clear()
    os.environ.update(environ)
    assert argv[1] == "-u", argv
    sys.argv[:] = argv[2:]
    code = 0
    try:
        runpy.run_path(argv[2], run_name="__main__")
    except BaseException as error:
        code = 1
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        else:
            sys.excepthook(*sys.exc_info())
    ctypes.pythonapi.Py_Exit(code)  # the interpreter's complete exit, which this benchmark tests
    raise AssertionError("it has ended")


def environment() -> dict[str, str]:
    """Return this environment without a launcher's variables. OMP_NUM_THREADS is set, or torchrun prints a note."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PET_", "DDPJOB_", "TORCHELASTIC_", "MASTER_"))}
    return kept | {"OMP_NUM_THREADS": "1"}


def words_of(asked: argparse.Namespace) -> list[str]:
    """Return the launcher's module and options, for `python -m`."""
    ranks = f"--nproc-per-node={RANKS // asked.nodes}"
    if asked.torchrun:
        return ["torch.distributed.run", ranks]
    return ["ddprun", *(["--preload", asked.preload] if asked.preload else []), ranks, "--max-restarts=0"]


def run(asked: argparse.Namespace, folder: Path) -> int:
    """Run all jobs, `at_once` at a time. Return how many were bad."""
    (folder / "train.py").write_text(TRAIN + (LEAVES_NOTHING if asked.torch_alone else LEAVES))
    waiting, bad = list(range(asked.jobs)), 0
    running: list[Job] = []
    while waiting or running:
        while waiting and len(running) < asked.at_once:
            running.append(Job(folder, waiting.pop(0), asked))
        for job in list(running):
            said = job.bad()
            if said is not None:
                running.remove(job)
                bad += bool(said)
                if said:
                    print(f"job {job.number}: {said}", flush=True)
        time.sleep(0.01)
    return bad


def import_all(preload: str) -> None:
    """Import what a fork server would import."""
    for name in (preload or "torch,torch._dynamo").split(","):
        __import__(name)
    import ddprun.options
    import ddprun.run  # noqa: F401

    gc.collect()
    gc.freeze()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=1, help="so many jobs run beside each other (%(default)s)")
    parser.add_argument("--nodes", type=int, choices=(1, 2, 4), default=1, help="of this machine; 4 ranks in all")
    parser.add_argument("--torchrun", action="store_true", help="under torchrun instead of ddprun")
    parser.add_argument("--preload", default="", help="as ddprun's; without torch._dynamo no model is trained")
    parser.add_argument("--torch-alone", action="store_true", help="a script that leaves its group to torch")
    parser.add_argument("--from-one-process", action="store_true", help="fork all agents from one that has torch")
    asked = parser.parse_args()
    if asked.from_one_process:
        if asked.torchrun:
            parser.error("--from-one-process: torchrun starts its ranks by itself")
        import_all(asked.preload)
    print(machine.line(), flush=True)
    began = time.monotonic()
    folder = tempfile.mkdtemp()  # TemporaryDirectory would be removed by the first forked rank that ends
    try:
        bad = run(asked, Path(folder))
    finally:
        shutil.rmtree(folder)
    how = " ".join(words_of(asked)) + (", from one process" if asked.from_one_process else "")
    seconds = time.monotonic() - began
    print(f"{how}: {asked.jobs - bad} of {asked.jobs} jobs ended well, in {seconds:.0f} s")
    print(machine.line())
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
