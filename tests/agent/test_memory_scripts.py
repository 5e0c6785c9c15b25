"""Examples, and a script whose DataLoader has workers, are killed and resume from memory. Each test trains with
torch: keep the tests few. The agents are forked from this process, which has imported torch (tests/support/warm.py)."""

import json
import shutil
from pathlib import Path
from typing import Any

from agents import Launcher, finish

EXAMPLES = Path(__file__).parents[2] / "trainer" / "examples"

# The script runs an example and kills a rank right after a step, before should_stop. Rank 0 records each step.
EXAMPLE = """
import json, os, runpy, signal
import ddpjob

told, kill = ddpjob.progress, json.loads(os.environ["KILL"])
generation, rank = os.environ["DDPJOB_GENERATION"], int(os.environ["RANK"])

def progress(step, *words, params=None, **more):
    told(step, *words, **more)
    if rank == 0 and params is None:
        with open("steps", "a") as file:
            print(step, file=file)
    if kill.get(generation) == [rank, step]:
        os.kill(os.getpid(), signal.SIGKILL)

ddpjob.progress = progress
runpy.run_path(os.environ["EXAMPLE"], run_name="__main__")
"""


def trained(launcher: Launcher, text: str, kill: dict[str, Any], *words: str, **env: str) -> Any:
    """Train two ranks to the end, with these kills, and return the finished agent."""
    env = {"OMP_NUM_THREADS": "1", "KILL": json.dumps(kill)} | env
    script = launcher.script(text)
    done = finish(
        launcher.warm("--nproc", 2, "--max-restarts", 99, script, *words, **env), 150
    )  # seconds; shorter than the time limit of pytest
    assert done.returncode == 0, done.stderr
    for folder in (launcher.folder / "tmp").glob("pymp-*"):  # remove temporary folders that killed processes have left
        shutil.rmtree(folder)
    return done


def result(done: Any) -> dict[str, Any]:
    """Return the results that an example prints in its last line."""
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_killed_example_repeats_no_step_and_ends_with_bitwise_equal_results(launcher, tmp_path_factory):
    words = ("--epochs", "1", "--global-batch", "64", "--snapshot", "snapshots", "--snapshot-every", "1000")
    env = {"EXAMPLE": str(EXAMPLES / "digits.py")}
    whole = trained(Launcher(tmp_path_factory.mktemp("whole")), EXAMPLE, {}, *words, **env)
    killed = trained(launcher, EXAMPLE, {"0": [1, 9], "1": [0, 17]}, *words, **env)
    assert result(killed) == result(whole), killed.stderr
    steps = [int(line) for line in (launcher.folder / "steps").read_text().splitlines()]
    assert steps == list(range(1, result(whole)["steps"] + 1)), killed.stderr
    for step in (9, 17):
        assert f"resumed at step {step} from the memory on the nodes of ranks 0, 1" in killed.stderr


# Two worker processes per rank read ahead. The script uses Adam, a scheduler and accumulated gradients.
LOADER = """
import hashlib, json, os, signal
import torch
import ddpjob

EPOCHS, kill = 5, json.loads(os.environ["KILL"])
generation, rank = os.environ["DDPJOB_GENERATION"], int(os.environ["RANK"])

def strike(where, step):
    if kill.get(generation) == [where, rank, step]:
        os.kill(os.getpid(), signal.SIGKILL)

with ddpjob.init() as world:
    torch.manual_seed(3)
    model = world.wrap(torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    sampler = ddpjob.GlobalBatchSampler(64, global_batch=16, seed=3)
    data = torch.utils.data.TensorDataset(torch.arange(64), torch.linspace(-1, 1, 512).view(64, 8))
    loader = torch.utils.data.DataLoader(data, batch_sampler=sampler, num_workers=2)
    snapshot = ddpjob.Snapshot("snapshots", world)
    step = snapshot.load(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler)
    for epoch in range(sampler.current_epoch, EPOCHS):
        for batches, (indices, x) in enumerate(loader, start=1):
            optimizer.zero_grad()
            strike("forward", step + 1)
            ddpjob.accumulate(model, x, 16, lambda part: model(part).square().sum(), micro_batch=3)
            optimizer.step()
            scheduler.step()
            step += 1
            with open(f"samples-{rank}", "a") as file:
                print(json.dumps([epoch, step, indices.tolist()]), file=file)
            place = sampler.state_dict(epoch=epoch, batches=batches)
            snapshot.keep(step, model=model, optimizer=optimizer, scheduler=scheduler, sampler=place)
            strike("boundary", step)
    snapshot.close()
    bits = b"".join(value.numpy().tobytes() for value in model.module.state_dict().values())
    os.write(1, f"END {hashlib.sha256(bits).hexdigest()}\\n".encode())  # one write: ranks share a pipe
"""


def test_no_sample_is_skipped_or_repeated_if_dataloader_workers_read_ahead(tmp_path_factory):
    """No batch that workers have read ahead may be skipped or repeated after a restart; no metric would show it."""
    whole = trained(Launcher(tmp_path_factory.mktemp("whole")), LOADER, {})
    # Kills: in the middle of an epoch, between two steps, and right after the last batch.
    kill = {"0": ["forward", 1, 7], "1": ["boundary", 0, 10], "2": ["boundary", 1, 12]}
    # A short name: workers send tensors through a socket in this folder, whose path has at most 107 bytes.
    launcher = Launcher(tmp_path_factory.mktemp("killed"))
    killed = trained(launcher, LOADER, kill)
    assert not launcher.marked(), "an agent leaves no process behind"
    assert sorted(killed.stdout.splitlines()) == sorted(whole.stdout.splitlines()), killed.stderr
    files = [launcher.folder / f"samples-{rank}" for rank in (0, 1)]
    lines = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    assert [[step for _, step, _ in one] for one in lines] == [list(range(1, 21))] * 2, "each step is made once"
    for epoch in range(5):
        seen = [index for one in lines for of, _, indices in one if of == epoch for index in indices]
        assert sorted(seen) == list(range(64)), f"each sample once in epoch {epoch}"
