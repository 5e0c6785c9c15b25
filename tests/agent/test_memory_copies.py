"""If a rank dies and no other rank has a valid state, the job resumes from a copy in memory, with the same bits."""

from pathlib import Path
from typing import Any

import killed_training
from agents import Launcher
from killed_training import began, words

# Weights are clipped at the beginning of each step, so they change between should_stop() and the optimizer's step.
TRAIN = """
import hashlib, json, os, signal
import torch
import ddpjob
from ddpjob.checkpoint.state import packed
from ddpjob_core import copies

copies.COST_MAX = 1e9  # a copy costs nothing: each step is copied
generation, kill = int(os.environ["DDPJOB_GENERATION"]), json.loads(os.environ.get("KILL", "{}"))

def strike(where, step, rank):
    if [where, step, rank] in kill.get(str(generation), []):
        os.kill(os.getpid(), signal.SIGKILL)

copy = packed.copy_piece

def copy_and_die_within(target, source):
    copy(target[: len(target) // 2], source[: len(target) // 2])
    strike("copy", step, world.rank)
    copy(target, source)

packed.copy_piece = copy_and_die_within
with ddpjob.init() as world:
    torch.manual_seed(7 + world.rank)
    model = world.wrap(torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    x = torch.linspace(-1, 1, 512).view(64, 8)
    snapshot = ddpjob.Snapshot("snapshots", world)
    objects = dict(model=model, optimizer=optimizer, scheduler=scheduler)
    step = snapshot.load(**objects)
    if world.is_main:
        print("BEGIN", step, flush=True)
    while step < 48:
        if os.environ.get("CLIPS"):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.clamp_(-0.3, 0.3)
        optimizer.zero_grad()
        strike("forward", step + 1, world.rank)
        loss = model(torch.nn.functional.dropout(x, 0.2)).square().sum()
        loss.backward()
        optimizer.step()
        scheduler.step()
        step += 1
        ddpjob.progress(step=step, total=48)
        ddpjob.should_stop(step)
        for thread in __import__("threading").enumerate():
            if thread.name == "ddpjob-memory-room":
                thread.join()
        if step == 3:
            snapshot.save(step, **objects)
            snapshot.wait()
    snapshot.close()
    bits = b"".join(t.detach().numpy().tobytes() for t in model.state_dict().values())
    digest = hashlib.sha256(bits).hexdigest()
    os.write(1, f"END {world.rank} {digest} {torch.rand(1).item()}\\n".encode())  # one write: ranks share a pipe
"""


def trained(folder: Path, kill: dict[str, Any], *, nproc: int = 1, **how: Any) -> Any:
    folder.mkdir()
    return killed_training.trained(Launcher(folder), TRAIN, kill, nproc=nproc, **how)


def test_weights_changed_by_the_script_itself_are_restored_bitwise_from_a_copy(tmp_path: Path) -> None:
    """If a script itself changes weights, a restart must use a copy, because a survivor's state may be wrong. The last
    rank is killed, then the rank that writes a copy, then all ranks."""
    how: dict[str, Any] = {"nodes": 2, "CLIPS": "1"}
    undisturbed = sorted(words(trained(tmp_path / "one", {}, **how), "END"))
    kill = {
        "0": [["forward", 20, 1]],
        "1": [["copy", 31, 0]],
        "2": [["forward", 44, 0], ["forward", 44, 1]],
    }
    done = trained(tmp_path / "other", kill, **how)
    said = "\n".join(d.stderr for d in done)
    steps = began(done)
    assert steps[0] == 0, said
    assert steps[1] in (18, 19), "the copy of step 19 counts where its writer has heard of the failure in time"
    assert steps[2] == 30, said
    assert steps[3] in (42, 43), said
    assert sorted(words(done, "END")) == undisturbed, said
    assert "the state is copied at each step, because parameters or optimizer state change" in said
    assert f"resumed at step {steps[1]} from a copy in the memory on the node" in said
    assert "seeded" not in said
