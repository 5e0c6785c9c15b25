"""A rank exceeds its container's memory limit, and the kernel kills it: from which state does training resume?"""

from typing import Any

from agents import Launcher, finish
from limited import Limited, limited

from ddpjob_core.failures import KILLED_BY_KERNEL

MIB = 1 << 20
# Script that runs the agent as in a container: all processes that it starts are in its cgroup.
AGENT = """
import os
with open(os.environ["CGROUP_PROCS"], "w") as procs:
    procs.write(str(os.getpid()))
from ddprun import main
main()
"""
TRAIN = """
import os

def processes():
    with open(os.environ["CGROUP_PROCS"]) as procs:
        return {int(line) for line in procs}

at_first = processes()  # the agent, its fork server, this rank

import hashlib, threading, time
import torch
import ddpjob

def takes_room():
    return any(thread.name == "ddpjob-memory-room" for thread in threading.enumerate())

def is_first_fork_server_gone():
    # The next one has imported torch too: until the first one is gone, 100 MiB more are in use.
    return len(at_first - processes()) == 1

def leave(room):
    with open(os.environ["CGROUP_USED"]) as used, open(os.environ["CGROUP_LIMIT"], "r+") as limit:
        before = limit.read()
        limit.write(str(int(used.read()) + room))
    return before

rank, generation = int(os.environ["RANK"]), int(os.environ["DDPJOB_GENERATION"])
width, layers = int(os.environ["WIDTH"]), int(os.environ["LAYERS"])
with ddpjob.init() as world:
    torch.manual_seed(7 + rank)
    model = world.wrap(torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers))))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    snapshot = ddpjob.Snapshot("snapshots", world)
    step = snapshot.load(model=model, optimizer=optimizer)
    if world.is_main:
        print("BEGIN", step, flush=True)
    while step < 12:
        optimizer.zero_grad()
        model(torch.nn.functional.dropout(torch.ones(2, width), 0.2)).square().sum().backward()
        optimizer.step()
        step += 1
        ddpjob.should_stop(step)
        if step == 2 and generation == 0 and "ROOM" in os.environ:
            while not is_first_fork_server_gone():
                time.sleep(0.01)
            before = leave(int(os.environ["ROOM"]))
        if step == 5 and generation == 0 and "ROOM" in os.environ:
            while not ddpjob.process.current.not_kept or takes_room():
                time.sleep(0.01)
            with open(os.environ["CGROUP_LIMIT"], "w") as limit:
                limit.write(before)  # a save has a copy of its own
        if step == 5:
            snapshot.save(step, model=model, optimizer=optimizer)
            snapshot.wait()
        if step == 8 and generation == 0 and rank == world.world_size - 1:
            taken = []
            while True:
                taken.append(b"x" * (16 << 20))
    bits = b"".join(tensor.detach().numpy().tobytes() for tensor in model.parameters())
    digest = hashlib.sha256(bits).hexdigest()
    os.write(1, f"END {rank} {digest} {torch.rand(1).item()}\\n".encode())  # one write: ranks share a pipe
"""


def trained(launcher: Launcher, place: Limited, ranks: int, **env: str) -> tuple[list[str], list[str], str]:
    """Return the steps at which the ranks began, how the ranks ended, and stderr."""
    launcher.script(AGENT, "in_a_container.py")
    where = {"CGROUP_PROCS": str(place.procs), "CGROUP_USED": str(place.used), "CGROUP_LIMIT": str(place.limit)}
    words: list[Any] = ["--nproc", ranks, "--max-restarts", 1, launcher.script(TRAIN)]
    done = finish(launcher.ddprun(*words, module="in_a_container", OMP_NUM_THREADS="1", **where, **env), 150)
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    return [line for line in lines if "BEGIN" in line], [line for line in lines if "END" in line], done.stderr


def test_a_rank_killed_by_the_kernel_for_its_memory_costs_no_step(launcher: Launcher) -> None:
    """A rank that the kernel kills for its memory, as after a batch that is too long, must cost no step: the other
    ranks have reserved memory for the state."""
    with limited(2048 * MIB) as place:
        began, ended, said = trained(launcher, place, 2, WIDTH="256", LAYERS="1")
    assert began == ["BEGIN 0", "BEGIN 8"], said
    assert f"restart 1: rank 1 was killed by SIGKILL ({KILLED_BY_KERNEL})" in said
    assert "resumed at step 8 from the memory on the nodes of ranks 0, 1" in said
    assert len({line.split()[2] for line in ended}) == 1, "both ranks have the same parameters"


def test_a_single_rank_without_room_resumes_from_the_folder_and_the_log_gave_the_reason(launcher):
    """A single rank without room (the limit leaves 100 MiB, the state takes 221 MiB) must resume from the folder, and
    the log must say so before. Small layers, because AdamW needs twice the largest."""
    with limited(1536 * MIB) as place:
        began, _, said = trained(launcher, place, 1, WIDTH="1024", LAYERS="16", ROOM=str(100 * MIB))
    assert began == ["BEGIN 0", "BEGIN 5"], said
    assert f"restart 1: rank 0 was killed by SIGKILL ({KILLED_BY_KERNEL})" in said
    assert "the state is not kept in memory: the container's memory limit is " in said
    assert "resumed at step 5 from " in said
