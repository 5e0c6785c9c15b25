"""The scripts of docs/frameworks.md and tracking.md: each framework saves when it is stopped, and resumes from there.
`make test-frameworks` installs the packages that they need. `make test` does not, because these take more time and
space than all other tests."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
WHY = "not installed: `make test-frameworks` installs it"
SIGTERM_TO_RANK_0, SIGTERM_TO_RANK_1 = (json.dumps([{"rank": i, "step": 60, "signal": "TERM"}]) for i in range(2))


def start(script: str, snapshots: Path, **environ: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    variables = {"SNAPSHOTS": str(snapshots), "NNODES": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, str(ROOT / "trainer/examples/frameworks" / script)],
        env=os.environ | variables | environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def output(process: subprocess.Popen[str]) -> str:
    try:
        return process.communicate(timeout=150)[0]
    finally:
        process.kill()


@pytest.mark.parametrize(
    ("package", "script"), [("accelerate", "accelerate_loop.py"), ("lightning", "lightning_fit.py")]
)
def test_a_rank_that_gets_sigterm_stops_all_after_one_step_and_the_next_start_resumes(package, script, tmp_path):
    pytest.importorskip(package, reason=WHY)
    first = start(script, tmp_path, DDPJOB_FAULTS=SIGTERM_TO_RANK_1)
    said = output(first)
    assert first.returncode != 0, said
    assert "exitcode  : 75" in said, said
    assert "done: " not in said
    again = start(script, tmp_path)
    said = output(again)
    assert (again.returncode, "done: 200 steps" in said) == (0, True), said


def test_the_hugging_face_trainer_saves_at_the_same_step_on_all_ranks_and_resumes_there(tmp_path: Path) -> None:
    """Hugging Face's Trainer must save at the same step on all ranks: the others would wait in a collective."""
    pytest.importorskip("transformers", reason=WHY)
    first = start("hf_trainer.py", tmp_path)
    deadline = time.monotonic() + 120
    while not (tmp_path / "checkpoint-50").exists():
        assert time.monotonic() < deadline
        assert first.poll() is None, output(first)
        time.sleep(0.02)
    rank = next(c for c in psutil.Process(first.pid).children() if c.environ().get("RANK") == "1")
    rank.terminate()
    said = output(first)
    assert "exitcode  : 75" in said, said
    (last,) = [max(int(folder.name.split("-")[1]) for folder in tmp_path.glob("checkpoint-*"))]
    assert 50 < last < 200
    again = start("hf_trainer.py", tmp_path)
    said = output(again)
    assert f"resumes from {tmp_path}/checkpoint-{last}" in said
    assert (again.returncode, "done: 200 steps" in said) == (0, True), said


STOPS_IN_AN_EPOCH = """
import os, signal, sys, torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from ddpjob.huggingface import StopTogether

class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(1, 1)
    def forward(self, x, labels):
        y = self.line(x)
        return {"loss": torch.nn.functional.mse_loss(y, labels), "logits": y}

class Told(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        if state.global_step == 25:
            os.kill(os.getpid(), signal.SIGTERM)
    def on_evaluate(self, args, state, control, **_):
        print("evaluated at step", state.global_step, flush=True)
    def on_train_end(self, args, state, control, **_):
        print("the end is told to all callbacks", flush=True)

data = [{"x": torch.tensor([i / 160]), "labels": torch.tensor([3 * i / 160 + 1])} for i in range(160)]
arguments = TrainingArguments(
    sys.argv[1], num_train_epochs=10, per_device_train_batch_size=8, eval_strategy="epoch", save_strategy="epoch",
    save_total_limit=1, load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=True,
    disable_tqdm=True, report_to=[], use_cpu=True,
)
trainer = Trainer(Line(), arguments, train_dataset=data, eval_dataset=data, callbacks=[Told(), StopTogether()])
trainer.train()
"""


def test_the_hugging_face_trainer_exits_right_after_the_checkpoint_and_keeps_it(tmp_path: Path) -> None:
    """Hugging Face's Trainer must exit right after the checkpoint: it would evaluate, and remove checkpoints."""
    pytest.importorskip("transformers", reason=WHY)
    (tmp_path / "train.py").write_text(STOPS_IN_AN_EPOCH)
    told = subprocess.run(
        [sys.executable, "train.py", "out"],
        cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=150, check=False,
    )  # fmt: skip
    assert told.returncode == 75, told.stdout
    last = max(int(folder.name.split("-")[1]) for folder in (tmp_path / "out").glob("checkpoint-*"))
    assert 25 < last < 40, told.stdout
    assert told.stdout.count("evaluated at step") == 1, told.stdout
    assert "the end is told to all callbacks" in told.stdout


FITS_TWICE = """
import os, sys, torch
from lightning.pytorch import LightningModule, Trainer
from ddpjob import process
from ddpjob.lightning import JobCallback

class Line(LightningModule):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(1, 1)
    def training_step(self, batch, _):
        return self.line(batch[0]).square().mean()
    def validation_step(self, batch, _):
        print("validates, declared:", process.current.paused, flush=True)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)

loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(80, 1)), batch_size=8)
model, callback = Line(), JobCallback("last.ckpt")
for steps in (10, 400):  # as where a part of a model is trained first
    trainer = Trainer(
        max_steps=steps, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[callback], num_sanity_val_steps=0,
        check_val_every_n_epoch=1,
    )
    trainer.fit(model, loader, torch.utils.data.DataLoader(loader.dataset, batch_size=80))
    print("fitted, declared:", process.current.paused, flush=True)
"""


def test_the_second_fit_of_lightning_saves_at_sigterm_and_validations_are_declared_pauses(tmp_path: Path) -> None:
    """The second fit of Lightning must save at SIGTERM, although each fit restores the handler at its end. A long
    validation must not count as a stall."""
    pytest.importorskip("lightning", reason=WHY)
    (tmp_path / "train.py").write_text(FITS_TWICE)
    told = subprocess.run(
        [sys.executable, "train.py"], env=os.environ | {"DDPJOB_FAULTS": SIGTERM_TO_RANK_0},
        cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=150, check=False,
    )  # fmt: skip
    assert told.returncode == 75, (told.returncode, told.stdout)
    assert (tmp_path / "last.ckpt").exists(), told.stdout
    assert "validates, declared: evaluate" in told.stdout, told.stdout
    assert "fitted, declared: None" in told.stdout, told.stdout


def test_progress_writes_event_files_without_a_step_twice(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason=WHY)
    text = DRAWS_A_CURVE.replace('SummaryWriter("runs", purge_step=step + 1) if world.is_main else None', "None")
    text = text.replace("total=60)", "total=60, loss=1 / step, text='a')\n        time.sleep(0.1)")
    (tmp_path / "train.py").write_text(text)
    variables = ("--env", "DDPJOB_TENSORBOARD=own", "--env", "DDPJOB_STATUS_INTERVAL=0.3")
    command = ["-m", "ddpjob_cli", "run", *variables, "--fail", "rank=0,step=35,signal=KILL", "train.py"]
    subprocess.run([sys.executable, *command], cwd=tmp_path, timeout=150, check=True)
    curve = reader.EventAccumulator(str(tmp_path / "own")).Reload().Scalars("loss")
    steps = [point.step for point in curve]
    assert len(steps) > 5
    assert steps == sorted(set(steps))
    assert [point.value for point in curve] == pytest.approx([1 / step for step in steps], rel=0.01)


DRAWS_A_CURVE = """import time

import ddpjob, torch
from torch.utils.tensorboard import SummaryWriter

with ddpjob.init() as world:
    model = world.wrap(torch.nn.Linear(8, 1).to(world.device))
    snapshot = ddpjob.Snapshot("snapshots", world)
    step = snapshot.load(model=model)
    writer = SummaryWriter("runs", purge_step=step + 1) if world.is_main else None
    while step < 60:
        step += 1
        if writer:
            writer.add_scalar("loss", 1 / step, step)
        ddpjob.progress(step=step, total=60)
        if step % 20 == 0:
            snapshot.save(step, model=model)
    snapshot.close()
    if writer:
        writer.close()
"""


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("launcher", ["ddprun", "torchrun"])
def test_a_curve_has_each_step_once_even_if_a_rank_was_killed(launcher: str, rank: int, tmp_path: Path) -> None:
    """A curve must have each step once after a kill: no repeated steps, and no gaps."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason=WHY)
    (tmp_path / "train.py").write_text(DRAWS_A_CURVE)
    words = ["run", "--nproc-per-node=2", "--launcher", launcher, "--fail", f"rank={rank},step=35,signal=KILL"]
    command = [sys.executable, "-m", "ddpjob_cli", *words, "train.py"]
    subprocess.run(command, cwd=tmp_path, timeout=150, check=True)
    curve = reader.EventAccumulator(str(tmp_path / "runs")).Reload().Scalars("loss")
    assert [point.step for point in curve] == list(range(1, 61))
