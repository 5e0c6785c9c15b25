"""Ranks are killed around the step at which the model grows or gets another optimizer."""

from typing import Any

import killed_training
from agents import Launcher
from killed_training import began, words

# At step 10 a layer with a BatchNorm is added, with equal weights on all ranks.
# The size depends on the step, so the script reads the step first (`load` without objects), then builds the model.
TRAIN = """
import hashlib, json, os, signal
import torch
import ddpjob
from ddpjob_core import copies

generation, kill = int(os.environ["DDPJOB_GENERATION"]), json.loads(os.environ.get("KILL", "{}"))
how, knows = os.environ.get("HOW", "group"), not os.environ.get("BUILDS_SMALL")
if os.environ.get("COPIES"):
    copies.COST_MAX = 1e9  # a copy costs nothing: each step is copied

def strike(where, step, rank):
    if [where, step, rank] in kill.get(str(generation), []):
        os.kill(os.getpid(), signal.SIGKILL)

def layer(width_in, width_out):
    return torch.nn.Sequential(torch.nn.Linear(width_in, width_out), torch.nn.BatchNorm1d(width_out))

def grow():
    global model, optimizer
    torch.manual_seed(99)
    net.append(layer(4, 4096))
    if how == "group":
        optimizer.add_param_group({"params": net[-1].parameters(), "lr": 1e-3})
    else:
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    model = world.wrap(net)

with ddpjob.init() as world:
    torch.manual_seed(7)
    net = torch.nn.Sequential(layer(8, 256), layer(256, 4))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    snapshot = ddpjob.Snapshot(os.environ["SNAPSHOTS"], world)
    x = torch.linspace(-1, 1, 256).view(32, 8)
    if knows:
        step = snapshot.load()
        drawn = torch.get_rng_state()
        if step > 10:
            grow()
        if step:
            net.load_state_dict(snapshot.state["model"])
            optimizer.load_state_dict(snapshot.state["optimizer"])
            torch.set_rng_state(drawn)
    else:
        step = snapshot.load(model=net, optimizer=optimizer)
    if world.is_main:
        print("BEGIN", step, flush=True)
    if step <= 10:
        model = world.wrap(net)
    while step < 24:
        if step == 10:
            drawn = torch.get_rng_state()
            grow()
            torch.set_rng_state(drawn)
        optimizer.zero_grad()
        strike("forward", step + 1, world.rank)
        loss = model(torch.nn.functional.dropout(x, 0.2)).square().sum()
        strike("backward", step + 1, world.rank)
        loss.backward()
        optimizer.step()
        step += 1
        ddpjob.should_stop(step)
        for thread in __import__("threading").enumerate():
            if thread.name == "ddpjob-memory-room":
                thread.join()
        if step in (3, 17):
            snapshot.save(step, model=net, optimizer=optimizer)
            snapshot.wait()
    snapshot.close()
    bits = b"".join(t.detach().numpy().tobytes() for t in net.state_dict().values())
    digest = hashlib.sha256(bits).hexdigest()
    os.write(1, f"END {world.rank} {digest} {torch.rand(1).item()}\\n".encode())  # one write: ranks share a pipe
"""


def trained(launcher: Launcher, folder: str, kill: dict[str, Any], **how: Any) -> Any:
    return killed_training.trained(launcher, TRAIN, kill, SNAPSHOTS=folder, **how)


def test_a_growing_model_resumes_bitwise_from_the_folder_and_soon_from_memory_again(launcher):
    """After a restart ranks must not use running means of another step, and must soon keep states in memory again: the
    grown model needs more memory than was reserved."""
    ends = sorted(words(trained(launcher, "undisturbed", {}), "END"))
    for step, first, said in [
        (11, 3, "the state is not written: "),
        (13, 3, "an optimizer has other parameters than before: until it was trained for 3 steps, a restart goes on"),
        (16, 15, "resumed at step 15 from the memory on the nodes of ranks 0, 1"),
    ]:
        done = trained(launcher, f"killed-{step}", {"0": [["backward", step, 1]]})
        assert began(done) == [0, first], done[0].stderr
        assert sorted(words(done, "END")) == ends, done[0].stderr
        assert said in done[0].stderr
        assert "parameters changed" not in done[0].stderr, "DistributedDataParallel wrote them when it took the model"


def test_a_model_that_was_not_passed_to_load_is_kept_from_its_first_save_and_the_log_reports_it(launcher):
    kill = {"0": [["backward", 11, 1]], "1": [["backward", 13, 1]]}
    done = trained(launcher, "unnamed", kill)
    assert began(done) == [0, 3, 3], done[0].stderr
    said = "load() did not get all objects that are trained: until save() or keep() gets them, nothing is kept"
    assert said in done[0].stderr.partition("restart 1:")[2].partition("restart 2:")[0]
    assert said not in done[0].stderr.partition("restart 1:")[0], "save() has named it at step 3"


def test_a_script_that_starts_with_the_small_model_resumes_from_the_folder_and_the_log_gives_the_reason(launcher):
    """A script that starts with a small model must resume from the folder: the larger model's state does not fit it."""
    ends = sorted(words(trained(launcher, "undisturbed", {}, BUILDS_SMALL="1"), "END"))
    done = trained(launcher, "killed", {"0": [["backward", 16, 1]]}, BUILDS_SMALL="1")
    assert began(done) == [0, 3], done[0].stderr
    assert sorted(words(done, "END")) == ends, done[0].stderr
    assert "step 15 in memory is not used: rank 0: model is not as it was: Unexpected key(s)" in done[0].stderr
    assert "Traceback" not in done[0].stderr.partition("restart 1:")[2]


def test_a_save_without_the_new_optimizer_makes_a_restart_use_the_folder(launcher: Launcher) -> None:
    """After a save without the new optimizer a restart must use the folder: memory has the old optimizer's state."""
    ends = sorted(words(trained(launcher, "undisturbed", {}, HOW="optimizer"), "END"))
    kill = {"0": [["backward", 15, 1]], "1": [["backward", 21, 0]]}
    done = trained(launcher, "killed", kill, HOW="optimizer")
    assert began(done) == [0, 3, 20], done[0].stderr
    assert sorted(words(done, "END")) == ends, done[0].stderr
    assert (
        "optimizer: the script has replaced the object that it passed to save(): the state is kept in memory again"
        in done[0].stderr
    )
