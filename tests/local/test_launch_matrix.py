"""Every common way to launch works as a DDPJob and trains the same. What cannot work is refused with the reason.

Each way prints a hash of exact numbers (trainer/examples/notes/common.py): equal hashes mean the same samples in the
same steps. Each process that imports torch costs 2 s of CPU, and 2 s more for its first DDP. So in
`make test` all ways that one script can use share a run, and a script without torch checks the rank numbers under the
two other parsers of torch's launcher. `make test-long` trains each example in examples/notes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from free_port import free_port
from shell import Cli

ROOT = Path(__file__).parents[2]
NOTES = sorted(path.stem for path in (ROOT / "examples/notes").glob("*.yaml"))
# torch.distributed.launch, and torchrun with the c10d rendezvous.
LAUNCHED_OTHERWISE = "launch-underscore", "torchrun-c10d"
# Script that replaces the script of an example, and prints the rank's numbers.
PLACE = """
import os, sys
names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"
given = [word.partition("=")[2] for word in sys.argv if word.replace("-", "_").startswith("__local_rank=")]
assert given in ([], [os.environ["LOCAL_RANK"]]), sys.argv
assert os.environ["MASTER_ADDR"] and int(os.environ["MASTER_PORT"])
os.write(1, ("PLACE " + " ".join(os.environ[name] for name in names) + "\\n").encode())
"""
SECONDS_MAX = 250  # six processes import torch, which takes seconds, and again after a restart

# Script that uses each rendezvous, one after the other, in processes that the script itself starts.
EVERY_METHOD = """
import os, sys
sys.path.insert(0, "trainer/examples/notes")
import common
import ddpjob
import torch.distributed as dist
import torch.multiprocessing as mp

folder, library_port, own_port = sys.argv[1:]
FILE, HOST = f"file://{folder}/meet-", f"tcp://{os.environ['MASTER_ADDR']}:"

def main(local_rank, node_rank, nproc, world_size):
    place = {"rank": node_rank * nproc + local_rank, "world_size": world_size}
    for method in ("env://", HOST + library_port, FILE + "library"):
        with ddpjob.init("gloo", init_method=method, **place):
            common.train()
    for method in (FILE + "own", HOST + own_port):
        dist.init_process_group("gloo", init_method=method, **place)
        common.train()
        dist.destroy_process_group()

if __name__ == "__main__":
    node_rank, nproc, world_size = (int(os.environ[v]) for v in ("NODE_RANK", "NPROC_PER_NODE", "DDPJOB_WORLD_SIZE"))
    mp.spawn(main, args=(node_rank, nproc, world_size), nprocs=nproc)
"""


@pytest.fixture(scope="module")
def alone() -> str:
    """Return the hash that a process prints which trains alone, without a job."""
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    words = [sys.executable, str(ROOT / "trainer/examples/notes/plain.py")]
    done = subprocess.run(words, env=os.environ | environment, capture_output=True, text=True, timeout=SECONDS_MAX)
    found = re.fullmatch(r"PARAMS ([0-9a-f]{64}) world 1\n", done.stdout)
    assert found, done.stderr
    return found[1]


@pytest.mark.parametrize("name", LAUNCHED_OTHERWISE)
def test_each_way_to_start_torchrun_gives_each_rank_its_rank_numbers(cli: Cli, name: str) -> None:
    """Each way to start torchrun must give each rank its numbers, without a contradiction to the job's variables."""
    text = (ROOT / f"examples/notes/{name}.yaml").read_text()
    script = cli.folder / "place.py"
    script.write_text(PLACE)
    spec = yaml.safe_load(text)["spec"]
    (cli.folder / "job.yaml").write_text(re.sub(r"trainer/examples/notes/\w+\.py", str(script), text))
    nodes, nproc = spec["nodes"], spec["nprocPerNode"]
    ranks = {f"PLACE {n * nproc + k} {k} {nodes * nproc} {nproc} {n}" for n in range(nodes) for k in range(nproc)}
    assert lines_of(cli, "job.yaml", "PLACE", "--cpu") == ranks


@pytest.mark.long  # up to six processes with torch and DDP each: 8 to 25 s of CPU
@pytest.mark.parametrize("name", NOTES)
def test_each_recipe_trains_in_one_world_to_the_same_parameters(cli: Cli, alone: str, name: str) -> None:
    text = (ROOT / f"examples/notes/{name}.yaml").read_text().replace("23456", str(free_port()))
    spec = yaml.safe_load(text)["spec"]
    (cli.folder / "job.yaml").write_text(text)
    world_size = spec["nodes"] * spec.get("nprocPerNode", 1)
    # Check the world size, too, because a world of another size, even of one rank, gives the same hash.
    assert trained(cli, "job.yaml", "--cpu") == {f"PARAMS {alone} world {world_size}"}


# Tested elsewhere: torchrun by env:// in test_torchrun.py and by tcp:// in tests/trainer/test_init.py.
# test_uneven_ranks.py has ranks without a launcher by env://, and test_in_place.py has ddprun.
def test_ranks_spawned_by_the_script_meet_by_env_tcp_and_file(cli: Cli, alone: str) -> None:
    command = ["python", "train.py", str(cli.folder), str(free_port()), str(free_port())]
    job = cli.file(EVERY_METHOD, container={"command": command}, nodes=1, nprocPerNode=2)
    assert trained(cli, job) == {f"PARAMS {alone} world 2"}


@pytest.mark.parametrize(
    ("command", "spec", "sentence"),
    [
        ("torchrun --standalone x.py", {}, "torchrun --standalone is for one node, and spec.nodes is 2"),
        ("torchrun --rdzv-backend=c10d x.py", {}, "Add --rdzv_endpoint=$(MASTER_ADDR):$(MASTER_PORT)"),
        (
            "python x.py --dist-url file:///tmp/meet",
            {},
            "2 nodes share no folder there, so the rendezvous never completes",
        ),
    ],
)
def test_a_launch_that_cannot_work_is_refused_before_anything_starts(cli, command, spec, sentence):
    job = cli.file("", container={"command": command.split()}, **spec)
    (cli.folder / "x.py").write_text("print('started')")
    done = cli.here("run", job)
    assert sentence in done.stderr
    assert (done.returncode, done.stdout) == (2, "")


def test_a_mistake_that_only_the_script_can_detect_is_refused_before_any_rank_waits(cli: Cli) -> None:
    trainer = {
        "command": ["python", "backend.py", "--backend=nccl"],  # this PyTorch lacks nccl, or there is no CUDA device
        "workingDir": str(ROOT / "trainer/examples/notes"),
        "env": [{"name": "CUDA_VISIBLE_DEVICES", "value": ""}],
    }
    done = cli.run("run", cli.file("", container=trainer, nodes=1, backoffLimit=0), code=1)
    assert 'backend: "nccl"' in done.stdout


def trained(cli: Cli, job: Path | str, *options: str) -> set[str]:
    """Return what rank 0 printed about its parameters."""
    os.symlink(ROOT / "trainer", cli.folder / "trainer")
    return lines_of(cli, job, "PARAMS", *options)


def lines_of(cli: Cli, job: Path | str, word: str, *options: str) -> set[str]:
    """Return the lines of the ranks that begin with this word, after the job has succeeded."""
    with cli.start("run", job, *options) as process:
        out, err = process.communicate(timeout=SECONDS_MAX)
    assert process.returncode == 0, f"{err}\n{out}"
    return set(re.findall(rf"^\[[\d:]+\] ({word} .*)$", out, re.MULTILINE))
