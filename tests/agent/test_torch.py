"""Comparison with the real torchrun, and torch in the ranks. Most processes here import torch: keep the tests few."""

import json
import subprocess
import sys

from agents import Launcher, finish

PRINT_ENVIRON = """
import json, os
json.dump(dict(os.environ), open(f"environ-{os.environ['RANK']}.json", "w"))
"""
# Intended differences: ddprun has no store of its own, restarts by itself, and gives each rank a file for its failure.
OWN = {"TORCHELASTIC_USE_AGENT_STORE": ("False", "True"), "TORCHELASTIC_MAX_RESTARTS": ("3", "0")}
ADDED = {"DDPJOB_TERMINATION_LOG", "DDPJOB_BEATS", "DDPJOB_GENERATION", "DDPJOB_MEMORY", "DDPJOB_END", "PYTHONHASHSEED"}
EACH_RUN = {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "MASTER_ADDR"}


def environs(launcher: Launcher, count: int) -> list[dict[str, str]]:
    return [json.loads((launcher.folder / f"environ-{rank}.json").read_text()) for rank in range(count)]


def test_a_rank_gets_the_environment_that_torchrun_gives_it(launcher: Launcher) -> None:
    """A rank must get torchrun's environment: Lightning, Accelerate and others choose their start by it."""
    del launcher.env["DDPJOB_TERMINATION_LOG"]
    words = ["--nproc-per-node", 2, launcher.script(PRINT_ENVIRON)]
    assert finish(launcher.ddprun("--no-preload", *words)).returncode == 0
    ours = environs(launcher, 2)
    assert finish(launcher.ddprun(*words, module="torch.distributed.run")).returncode == 0
    for rank, (mine, theirs) in enumerate(zip(ours, environs(launcher, 2), strict=True)):
        assert set(mine) - ADDED == set(theirs), f"rank {rank}"
        for name in set(theirs) - EACH_RUN:
            assert (mine[name], theirs[name]) == OWN.get(name, (theirs[name], theirs[name])), name


TRAIN = """
import hashlib, os
import numpy, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

life = os.environ["TORCHELASTIC_RESTART_COUNT"]
torch.manual_seed(7)
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10):
    if life == "0" and step == 5 and rank == 1 and FAIL: os.kill(os.getpid(), 9)
    x = torch.full((8, 16), float(step + rank))
    optimizer.zero_grad(); model(x).square().mean().backward(); optimizer.step()
state = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
os.write(1, f"{rank} {life} {torch.get_num_threads()} {hashlib.sha256(state).hexdigest()}\\n".encode())
dist.barrier()
dist.destroy_process_group()
"""


def test_a_killed_rank_of_two_nodes_resumes_to_the_parameters_of_an_undisturbed_run(launcher):
    script = launcher.script(TRAIN.replace("FAIL", "os.environ.get('FAIL')"))
    agents = launcher.nodes(2, "--nproc", 1, script, is_warm=True, FAIL="1", OMP_NUM_THREADS="1")
    done = [finish(agent, 150) for agent in agents]
    assert [d.returncode for d in done] == [0, 0], done[0].stderr + done[1].stderr
    ours = [d.stdout.split() for d in done]
    assert [(rank, life) for rank, life, _, _ in ours] == [("0", "1"), ("1", "1")]
    undisturbed = finish(launcher.warm("--nproc-per-node", 2, script, OMP_NUM_THREADS="1"), 150)
    theirs = sorted(line.split() for line in undisturbed.stdout.splitlines())
    assert [words[2:] for words in ours] == [words[2:] for words in theirs], "threads, and the hash of the parameters"


FIRST_STEP = """
import sys
class Looks:  # what is there already is not looked for
    names = set()
    def find_spec(self, name, path=None, target=None):
        self.names.add(name)
sys.meta_path.insert(0, Looks())
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(2, 2))
model(torch.ones(1, 2)).sum().backward()
torch.optim.SGD(model.parameters()).step()
said = len(Looks.names & set(sys.modules)), torch.rand(1).item(), torch.cuda.is_initialized()
sys.stdout.write(" ".join(map(str, said)) + "\\n")
dist.destroy_process_group()
"""


def test_the_default_preload_contains_all_imports_of_the_first_ddp_step(launcher: Launcher) -> None:
    launcher.env.pop("TORCHINDUCTOR_CACHE_DIR", None)  # set by an import of torch._inductor in this process
    assert finish(launcher.ddprun("--nproc", 2, "--no-preload", launcher.script(PRINT_ENVIRON))).returncode == 0
    new, _ = environs(launcher, 2)
    script = launcher.script(PRINT_ENVIRON + FIRST_STEP)
    done = finish(launcher.ddprun("--nproc", 2, script), 150)
    assert (done.returncode, done.stderr) == (0, ""), "the fork server was refused"
    (imports, number, cuda), (_, other_number, _) = (line.split() for line in done.stdout.splitlines())
    assert int(imports) < 5, "imports that every restart would pay"
    assert number != other_number, "ranks that draw the same numbers drop out the same neurons"
    assert cuda == "False"
    added = set(environs(launcher, 2)[0]) - set(new)
    assert added == {"TORCHINDUCTOR_CACHE_DIR"}, "torch._dynamo sets it while it is imported"


def test_a_rank_that_is_faster_than_rank_0_connects_to_its_store_at_the_first_try(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import os, socket, sys, time
        import torch.distributed as dist
        rendezvous = sys.modules["torch.distributed.rendezvous"]
        class Store(rendezvous.TCPStore):
            def __init__(self, host_name, port, *args, is_master, **kwargs):
                if not is_master:  # refused here, torch would look again after half a second
                    socket.create_connection((host_name, port), 20).close()
                super().__init__(host_name, port, *args, is_master=is_master, **kwargs)
        rendezvous.TCPStore = Store
        if os.environ["RANK"] == "0":
            time.sleep(0.3)
        dist.init_process_group("gloo")
        dist.destroy_process_group()
        """
    )
    done = finish(launcher.warm("--nproc", 2, "--max-restarts", 0, script), 150)
    assert (done.returncode, done.stderr) == (0, "")


def test_no_module_of_the_agent_imports_torch_or_third_party_packages() -> None:
    ours = ", ".join(f"ddprun.{name}" for name in ("agent", "options", "leader", "follower", "wire", "logs"))
    code = f"import sys; before = set(sys.modules); import {ours}; print(*set(sys.modules) - before)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    foreign = {name.partition(".")[0] for name in said.stdout.split()} - set(sys.stdlib_module_names)
    assert foreign <= {"ddpjob", "ddpjob_core", "ddprun"}
