"""A rank is killed, and the surviving ranks write the state to their agent's memory, so no step is repeated.

Each test trains with torch: keep the tests few, and check many things in one training. The agents are forked from this
process, which has imported torch (tests/support/warm.py)."""

import time

import pytest
from agents import Launcher
from killed_training import began, trained, words

from ddpjob_core import memory

# Dropout draws random numbers, BatchNorm has buffers, AdamW and the scheduler have state.
TRAIN = """
import hashlib, json, os, random, signal, sys, threading, time
import torch
import ddpjob

STEPS = int(os.environ.get("STEPS", "24"))
generation, kill = int(os.environ["DDPJOB_GENERATION"]), json.loads(os.environ.get("KILL", "{}"))

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 1)
    def forward(self, x):
        return self.last(torch.nn.functional.dropout(torch.relu(self.norm(self.first(x))), 0.2))

def strike(where, step, rank):
    for one in kill.get(str(generation), []):
        if one == [where, step, rank]:
            os.kill(os.getpid(), signal.SIGKILL)

def in_the_optimizers_step(step, rank):
    # The sums of gloo fail in one rank when the other dies right after its own: not before all have theirs.
    open(f"summed-{generation}-{step}-{rank}", "w").close()
    while ["optimizer", step, rank] in kill.get(str(generation), []) and not all(
        os.path.exists(f"summed-{generation}-{step}-{other}") for other in range(int(os.environ["WORLD_SIZE"]))
    ):
        time.sleep(0.001)
    strike("optimizer", step, rank)

with ddpjob.init() as world:
    torch.manual_seed(7 + world.rank)
    random.seed(world.rank)
    model = world.wrap(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    sampler = ddpjob.GlobalBatchSampler(64, global_batch=16, seed=3)
    x = torch.linspace(-1, 1, 512).view(64, 8)
    snapshot = ddpjob.Snapshot("snapshots", world)
    objects = dict(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler)
    step = snapshot.load(**objects)
    if os.environ.get("SAVED_FIRST") and not step:
        snapshot.save(1, **objects)
    if world.is_main:
        print("BEGIN", step, flush=True)
    optimizer.register_step_pre_hook(lambda *_: in_the_optimizers_step(step + 1, world.rank))
    # Backward begins with this one: the other ranks wait in the all-reduce then.
    model.module.last.bias.register_hook(lambda gradient: strike("all-reduce", step + 1, world.rank))
    while step < STEPS:
        for batch in sampler.epoch(sampler.current_epoch):
            optimizer.zero_grad()
            strike("forward", step + 1, world.rank)
            ddpjob.accumulate(model, batch, 16, lambda i: model(x[i]).square().sum() + random.random())
            optimizer.step()
            scheduler.step()
            step += 1
            ddpjob.progress(step=step, total=STEPS)
            ddpjob.should_stop(step)
            strike("boundary", step, world.rank)
            if step % 10 == int(os.environ.get("SAVE_AT", "4")):
                snapshot.save(step, **objects)
                snapshot.wait()
            if step >= STEPS:
                break
    snapshot.close()
    bits = b"".join(t.detach().numpy().tobytes() for t in model.module.state_dict().values())
    said = f"END {world.rank} {hashlib.sha256(bits).hexdigest()} {torch.rand(1).item()} {random.random()}"
    os.write(1, f"{said}\\n".encode())  # one write: ranks share a pipe
"""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """Return the last lines of an undisturbed training: for each rank the bits of its model and its next random
    numbers."""
    return sorted(words(trained(Launcher(tmp_path_factory.mktemp("undisturbed")), TRAIN, {}), "END"))


def test_a_rank_killed_anywhere_in_a_step_repeats_no_step_and_the_result_is_bitwise_equal(launcher, undisturbed):
    kill = {
        "0": [["forward", 9, 1]],  # the script has not saved before this step
        "1": [["all-reduce", 12, 0]],
        "2": [["boundary", 17, 1]],
        # The survivor has finished the optimizer's step, and is one step ahead of the killed rank's last state.
        # After the restart the killed rank must drop out the same neurons.
        "3": [["optimizer", 20, 1]],
        "4": [["optimizer", 21, 0]],
        "5": [["forward", 23, 0]],
    }
    done = trained(launcher, TRAIN, kill, SAVE_AT="9")
    assert began(done) == [0, 8, 11, 17, 20, 21, 22], done[0].stderr
    assert sorted(words(done, "END")) == undisturbed, done[0].stderr
    for step in (8, 11, 17, 20, 21, 22):
        assert f"resumed at step {step} from the memory on the nodes of ranks 0, 1" in done[0].stderr
        assert f"; step {step} is in memory" in done[0].stderr, "and the agent says so when it restarts"


def test_a_node_without_survivors_gets_the_state_from_the_memory_of_another_node(launcher, undisturbed):
    """A node without survivors must get the state from another node's memory, as with one GPU per pod."""
    done = trained(launcher, TRAIN, {"0": [["forward", 9, 1]], "1": [["all-reduce", 13, 0]]}, nodes=2, nproc=1)
    assert began(done) == [0, 8, 12], done[0].stderr
    assert sorted(words(done, "END")) == undisturbed, done[0].stderr
    assert "from the memory on the node of rank 0" in done[0].stderr
    assert "from the memory on the node of rank 1" in done[0].stderr


def test_a_data_position_passed_by_the_script_is_that_of_the_step(launcher: Launcher) -> None:
    """A data position that the script passes must be restored: DataLoader workers read ahead of training."""
    by_value = TRAIN.replace("snapshot.save(step, **objects)", "snapshot.save(step, **now())").replace(
        "ddpjob.should_stop(step)", "ddpjob.should_stop(step); snapshot.keep(step, **now())"
    )
    ahead = by_value.replace(
        "    while step < STEPS",
        "    now = lambda: {**objects, 'sampler': sampler.state_dict()}\n    while step < STEPS",
    )
    kill = {"0": [["forward", 9, 1]], "1": [["all-reduce", 9, 1]], "2": [["forward", 14, 0]]}
    done = trained(launcher, ahead, kill)
    assert began(done) == [0, 8, 8, 13], done[0].stderr


# The state has many pieces. Two ranks do not finish writing: one dies, the other is stopped by SIGSTOP.
IN_PIECES = """
import hashlib, json, os, signal, time
import torch
import ddpjob
from ddpjob.checkpoint.state import packed

packed.PIECE_BYTES = 1 << 18
generation, rank = int(os.environ["DDPJOB_GENERATION"]), int(os.environ["RANK"])
copy, pieces = packed.copy_piece, []

def copy_or_end(target, source):
    pieces.append(len(source))
    if generation < 2 and len(pieces) == 2 and not os.path.exists(f"struck-{generation}"):
        copy(target[: len(target) // 2], source[: len(target) // 2])
        open(f"struck-{generation}", "w").close()
        os.kill(os.getpid(), signal.SIGKILL if generation == 0 else signal.SIGSTOP)
    copy(target, source)

def digest():
    optimizer_state = optimizer.state_dict()["state"].values()
    tensors = [*model.parameters(), *(value for state in optimizer_state for value in state.values())]
    return hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)).hexdigest()

packed.copy_piece = copy_or_end
with ddpjob.init() as world:
    torch.manual_seed(1)
    model = world.wrap(torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(5)]))
    optimizer = torch.optim.Adam(model.parameters())
    snapshot = ddpjob.Snapshot("snapshots", world)
    step = snapshot.load(model=model, optimizer=optimizer)
    if world.is_main:
        print("BEGIN", step, digest() if step else "-", time.monotonic(), flush=True)
    while step < 12:
        optimizer.zero_grad()
        model(torch.full((4, 256), 1.0 + step + world.rank)).square().sum().backward()
        optimizer.step()
        step += 1
        ddpjob.should_stop(step)
        if (generation, step, world.rank) in ((0, 8, 0), (1, 10, 0)):
            print("KILL", step, digest(), time.monotonic(), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_another_survivor_writes_the_state_if_the_first_dies_and_a_stopped_one_costs_its_time_limit(launcher):
    """If a rank dies while it writes the state, another rank must write it. A rank that is stopped (SIGSTOP) while it
    writes must cost only its time limit; then the ranks restart from the folder."""
    done = trained(launcher, IN_PIECES, {}, nproc=4)
    assert words(done, "BEGIN")[1][:2] == words(done, "KILL")[0][:2], done[0].stderr
    assert began(done)[:2] == [0, 8], done[0].stderr
    assert len(began(done)) == 3, done[0].stderr


SILENT = """
import mmap, os, sys, time
from ddpjob_core import memory
if os.environ["DDPJOB_GENERATION"] == "1":
    sys.exit(0)
agent, file, _, ranks, local_rank = map(int, os.environ["DDPJOB_MEMORY"].split(":"))
if local_rank == 0:
    with open(f"/proc/{agent}/fd/{file}", "r+b", buffering=0) as opened:
        pages = memoryview(mmap.mmap(opened.fileno(), (1 + ranks) * memory.PAGE_BYTES)).cast("q")
    pages[memory.PAGE_BYTES // 8 + memory.PID] = os.getpid()
    open("ready", "w").close()
    time.sleep(60)
while not os.path.exists("ready"):
    time.sleep(0.01)
sys.exit(1)
"""


def test_a_rank_that_does_not_write_the_state_delays_the_restart_only_by_its_time_limit(launcher: Launcher) -> None:
    """A rank that is stopped or waits for a disk must not delay the restart beyond the time limit."""
    began = time.monotonic()
    done = launcher.done("--nproc", 2, "--no-preload", launcher.script(SILENT))
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began > memory.limit_seconds(0), "it had its time"
