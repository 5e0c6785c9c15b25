"""A rank dies, and the other ranks cannot write the state immediately: a second rank is killed, or a rank is slow."""

import pytest
from agents import Launcher, finish

from ddprun.leader import clock_of

# The model has one parameter. With several, DDP rearranges its buckets after the first step of each start,
# and the gradients of more than two ranks are added in another order.
TRAIN = """
import hashlib, os, signal, time
import torch
import ddpjob
from ddpjob.checkpoint.state import packed

packed.PIECE_BYTES = 1 << 18
rank, generation = int(os.environ["RANK"]), int(os.environ["DDPJOB_GENERATION"])
strikes = generation == 0 and "UNDISTURBED" not in os.environ
copy, pieces = packed.copy_piece, []

def copy_or_die(target, source):
    pieces.append(len(source))
    if strikes and not os.path.exists("killed") and len(pieces) == 2:
        copy(target[: len(target) // 2], source[: len(target) // 2])
        open("killed", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    copy(target, source)
    with open(f"written-{rank}", "a") as file:
        print(len(source), file=file)

packed.copy_piece = copy_or_die
with ddpjob.init() as world:
    torch.manual_seed(7 + rank)
    model = world.wrap(torch.nn.Linear(512, 512, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    snapshot = ddpjob.Snapshot("snapshots", world)
    step = snapshot.load(model=model, optimizer=optimizer)
    if world.is_main:
        print("BEGIN", step, flush=True)
    while step < 14:
        optimizer.zero_grad()
        model(torch.nn.functional.dropout(torch.linspace(-1, 1, 2048).view(4, 512), 0.2)).square().sum().backward()
        optimizer.step()
        step += 1
        ddpjob.should_stop(step)
        if strikes and step == 8 and rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    bits = b"".join(tensor.detach().numpy().tobytes() for tensor in model.parameters())
    digest = hashlib.sha256(bits).hexdigest()
    os.write(1, f"END {rank} {digest} {torch.rand(1).item()}\\n".encode())  # one write: ranks share a pipe
"""


def trained(launcher: Launcher, **env: str) -> tuple[list[str], list[str], str]:
    """Return the steps at which the ranks began, how the ranks ended, and stderr."""
    words = ["--nproc", 3, "--max-restarts", 3, launcher.script(TRAIN)]
    done = finish(launcher.warm(*words, OMP_NUM_THREADS="1", **env), 150)
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    return [line for line in lines if "BEGIN" in line], [line for line in lines if "END" in line], done.stderr


def test_a_survivor_killed_while_writing_costs_no_step_as_long_as_a_third_rank_lives(launcher):
    """If a survivor is killed while it writes the state, a third rank must write the complete state: a bad node or too
    little memory often kills two ranks."""
    _, undisturbed, _ = trained(launcher, UNDISTURBED="yes")
    began, ended, said = trained(launcher)
    assert began == ["BEGIN 0", "BEGIN 8"], said
    assert ended == undisturbed, said
    assert "resumed at step 8 from the memory on the nodes of ranks 0, 1, 2" in said
    counts = sorted(len(path.read_text().splitlines()) for path in launcher.folder.glob("written-*"))
    assert counts[0] == 1, "one was killed within its second piece"
    assert counts[1] > counts[0], "the third one has written all"


# Rank 0 dies after it has finished its step, when rank 1 has only the gradients of that step.
LATE = """
import os, signal, time
import torch
import ddpjob

generation = int(os.environ["DDPJOB_GENERATION"])
with ddpjob.init() as world:
    model = world.wrap(torch.nn.Linear(8, 8, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    snapshot = ddpjob.Snapshot("snapshots", world)
    step = snapshot.load(model=model, optimizer=optimizer)
    if world.is_main:
        print("BEGIN", step, flush=True)
    while step < 12:
        optimizer.zero_grad()
        model(torch.ones(4, 8)).square().sum().backward()
        if (generation, step, world.rank) == (0, 7, 1):
            while not os.path.exists("killed"):
                time.sleep(0.001)
            time.sleep(0.1)
        optimizer.step()
        step += 1
        ddpjob.should_stop(step)
        if (generation, step, world.rank) == (0, 8, 0):
            open("killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_late_survivor_on_another_node_completes_the_step_of_the_dead_rank(launcher: Launcher) -> None:
    """With one GPU per node, a slow survivor must complete the step that the dead rank has completed."""
    agents = launcher.nodes(2, "--max-restarts", 3, launcher.script(LATE), is_warm=True, OMP_NUM_THREADS="1")
    done = [finish(agent, 120) for agent in agents]
    assert [one.returncode for one in done] == [0, 0], [one.stderr for one in done]
    assert done[0].stdout.splitlines() == ["BEGIN 0", "BEGIN 8"], done[0].stderr
    assert "resumed at step 8 from the memory on the node of rank 1" in done[0].stderr


@pytest.mark.parametrize("clock", [-2, 1 << 53, True, 7.5, "9", None, [1]])
def test_an_invalid_step_number_hides_no_failure(clock: object) -> None:
    """An invalid step number, such as a negative one, must not turn a script's exception into a lost node."""
    assert clock_of({"event": "failed", "clock": clock}) == 0
    assert clock_of({"event": "failed"}) == 0
    assert clock_of({"event": "failed", "clock": 16}) == 16


# Backward runs inside optimizer.step(), as with LBFGS. Rank 0 dies there, while rank 1 waits for rank 0's data.
CLOSURE = """
import mmap, os, signal, time
import torch
import ddpjob
from ddpjob_core import memory

generation = int(os.environ["DDPJOB_GENERATION"])
agent, file, _, ranks, local_rank = map(int, os.environ["DDPJOB_MEMORY"].split(":"))
with open(f"/proc/{agent}/fd/{file}", "r+b", buffering=0) as opened:
    pages = memoryview(mmap.mmap(opened.fileno(), (1 + ranks) * memory.PAGE_BYTES)).cast("q")
cells = pages[(1 + local_rank) * memory.PAGE_BYTES // 8 :]
with ddpjob.init() as world:
    model = world.wrap(torch.nn.Linear(8, 8, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    snapshot = ddpjob.Snapshot("snapshots", world)
    step = snapshot.load(model=model, optimizer=optimizer)
    if world.is_main:
        print("BEGIN", step, flush=True)
    while step < 12:
        if (generation, step, world.rank) == (0, 7, 1):
            while cells[memory.ANSWER] == memory.NONE:  # until its agent has told it, however busy this machine is
                time.sleep(0.001)

        def closure():
            optimizer.zero_grad()
            if (generation, step, world.rank) == (0, 7, 0):
                os.kill(os.getpid(), signal.SIGKILL)
            loss = model(torch.ones(4, 8)).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        step += 1
        ddpjob.should_stop(step)
"""


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 1), (1, 3)])
def test_a_rank_does_not_begin_a_step_that_needs_the_dead_rank(launcher: Launcher, nodes: int, ranks: int) -> None:
    """A surviving rank must not begin a step that needs the dead rank, because it could never complete that step."""
    words = ["--nproc", ranks, "--max-restarts", 3, launcher.script(CLOSURE)]
    agents = launcher.nodes(nodes, *words, is_warm=True, OMP_NUM_THREADS="1")
    done = [finish(agent, 120) for agent in agents]
    assert [one.returncode for one in done] == [0] * nodes, [one.stderr for one in done]
    assert done[0].stdout.splitlines() == ["BEGIN 0", "BEGIN 7"], done[0].stderr
