"""The examples train what they promise, whatever the number of processes and however often they are interrupted.

Ranks are forked from this process, which has imported torch: a process that imports it anew takes seconds. A run is
made once and looked at by several tests.
"""

import functools
import importlib.util
import json
import multiprocessing
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import yaml

import ddpjob

REPOSITORY = Path(__file__).parents[2]
TOLERANCE = 1e-5  # of the parameters' length; measured at full length: 1.2e-6 (digits), 1.7e-6 (byte_lm)
LIMIT_SECONDS = 120

TEN = ("--epochs", "10")
TINY_LM = ("--epochs", "3", "--context", "32", "--layers", "1", "--width", "32", "--heads", "2")
TINY_TEXT_TOPICS = 10  # of 79
SHORT = {"digits": ("--epochs", "2"), "byte_lm": TINY_LM}
METRIC = {"digits": "accuracy", "byte_lm": "loss"}


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "trainer" / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPTS = {name: loaded(name) for name in SHORT}
SCRIPTS["byte_lm"].topics = dict(sorted(SCRIPTS["byte_lm"].topics.items())[:TINY_TEXT_TOPICS])


class Run(NamedTuple):
    """What a run left behind."""

    exit_codes: list[int]
    lines: list[list[str]]  # of each rank's stdout
    reported: list[dict[str, Any]]  # rank 0's calls of progress()
    model: Path

    @property
    def done(self) -> dict[str, Any]:
        assert self.exit_codes == [0] * len(self.exit_codes), self.lines
        return json.loads(self.lines[0][-1])

    @property
    def parameters(self) -> torch.Tensor:
        return torch.cat([value.flatten() for value in torch.load(self.model).values()])


def train(folder: Path, script: str, world_size: int, *options: str, killed_at: int = 0, alone: bool = False) -> Run:
    """Run the script as so many ranks; with killed_at rank 0 gets SIGKILL when it reports that step."""
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = (*options, "--save-model", str(folder / "model.pt"))
    torch.set_num_threads(1)  # a pool of threads would be lost in the fork
    fork = multiprocessing.get_context("fork")
    ranks = []
    for rank in range(world_size):
        place = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
        environ = {} if alone else {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks.append(fork.Process(target=_rank, args=(folder, script, rank, environ, options, killed_at)))
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(LIMIT_SECONDS)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    reported = [json.loads(line) for line in (folder / "progress").read_text().splitlines()]
    lines = [(folder / f"stdout-{rank}").read_text().splitlines() for rank in range(world_size)]
    return Run([process.exitcode or 0 for process in ranks], lines, reported, folder / "model.pt")


def _rank(
    folder: Path, script: str, rank: int, environ: dict[str, int | str], options: tuple[str, ...], killed_at: int
) -> None:
    for name in [name for name in os.environ if name.startswith(("DDPJOB_", "MASTER_"))]:
        del os.environ[name]
    os.environ |= {name: str(value) for name, value in environ.items()} | {"OMP_NUM_THREADS": "1"}
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.chdir(folder)
    sys.stdout = open(f"stdout-{rank}", "w", buffering=1)  # noqa: SIM115 - until the process ends
    ddpjob.progress = _recorder(open("progress", "w", buffering=1), rank, killed_at)  # noqa: SIM115
    try:
        SCRIPTS[script].main(options)
    except BaseException:
        traceback.print_exc(file=sys.stdout)
        raise


def _recorder(file: Any, rank: int, killed_at: int) -> Callable[..., None]:
    def progress(step: int, total: int | None = None, samples: int | None = None, **metrics: Any) -> None:
        if rank == 0 and step == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0:
            metrics = {name: float(v) if isinstance(v, torch.Tensor) else v for name, v in metrics.items()}
            file.write(json.dumps({"step": step, "total": total, "samples": samples, **metrics}) + "\n")

    return progress


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """train(), once for the same question."""
    folder = tmp_path_factory.mktemp("examples")

    @functools.cache
    def made(script: str, world_size: int, *options: str, **more: Any) -> Run:
        return train(folder / str(len(list(folder.iterdir()))), script, world_size, *options, **more)

    return made


def distance(one: Run, other: Run) -> float:
    return float((one.parameters - other.parameters).norm() / one.parameters.norm())


# ---- the same for any number of processes ----------------------------------------------------------------------------


def test_digits_reads_97_of_100_unseen_digits_after_ten_epochs(run):
    assert run("digits", 2, *TEN).done["accuracy"] >= 0.97


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_digits_learns_the_same_on_any_number_of_processes(run, world_size):
    two, other = run("digits", 2, *TEN), run("digits", world_size, *TEN)
    assert other.done["accuracy"] == two.done["accuracy"]
    assert distance(two, other) <= TOLERANCE
    assert other.done["world_size"] == world_size


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_byte_lm_learns_the_same_on_any_number_of_processes(run, world_size):
    two, other = run("byte_lm", 2, *TINY_LM), run("byte_lm", world_size, *TINY_LM)
    assert other.done["loss"] == pytest.approx(two.done["loss"], abs=2e-6)
    assert distance(two, other) <= TOLERANCE


def test_byte_lm_learns_something_in_three_epochs(run):
    reported = run("byte_lm", 2, *TINY_LM).reported
    assert reported[0]["loss"] > 5
    assert run("byte_lm", 2, *TINY_LM).done["loss"] < 3.3


@pytest.mark.parametrize("script", SHORT)
def test_without_any_variable_of_a_launcher_a_script_trains_alone(run, script):
    alone = run(script, 1, *SHORT[script], alone=True)
    assert alone.done["world_size"] == 1
    assert alone.done["params_sha256"] == run(script, 1, *SHORT[script]).done["params_sha256"]


def test_small_micro_batches_change_nothing(run):
    whole, pieces = run("byte_lm", 2, *TINY_LM), run("byte_lm", 2, *TINY_LM, "--micro-batch", "12")
    assert distance(whole, pieces) <= TOLERANCE


# ---- equal bits, also after an interruption --------------------------------------------------------------------------


@pytest.mark.parametrize("script", SHORT)
def test_two_runs_at_the_same_world_size_end_with_equal_bits(run, tmp_path, script):
    again = train(tmp_path / "again", script, 2, *SHORT[script])
    assert again.done == run(script, 2, *SHORT[script]).done


@pytest.mark.parametrize("script", SHORT)
def test_a_killed_run_goes_on_from_its_snapshot_to_the_bits_of_an_undisturbed_one(run, tmp_path, script):
    options = (*SHORT[script], "--snapshot", str(tmp_path / "snapshots"), "--snapshot-every", "10")
    killed = train(tmp_path / "killed", script, 2, *options, killed_at=77)
    resumed = train(tmp_path / "resumed", script, 2, *options)
    assert killed.exit_codes == [-signal.SIGKILL, 1]
    assert resumed.reported[0]["step"] in (61, 71), "the state of step 70 may have been on its way to the disk"
    assert resumed.done == run(script, 2, *SHORT[script]).done


def test_a_run_killed_on_three_processes_ends_the_same_on_one(run, tmp_path):
    options = (*SHORT["digits"], "--snapshot", str(tmp_path / "snapshots"), "--snapshot-every", "10")
    train(tmp_path / "three", "digits", 3, *options, killed_at=77)
    one = train(tmp_path / "one", "digits", 1, *options)
    assert one.reported[0]["step"] > 1
    assert distance(run("digits", 2, *SHORT["digits"]), one) <= TOLERANCE


def test_a_run_started_again_after_its_end_says_the_same_and_trains_no_step(run, tmp_path):
    options = ("--epochs", "1", "--snapshot", str(tmp_path / "snapshots"))
    first = train(tmp_path / "first", "digits", 1, *options)
    second = train(tmp_path / "second", "digits", 1, *options)
    assert second.done == first.done
    assert len(second.reported) == 1


# ---- what one sees ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SHORT)
def test_rank_0_ends_with_one_json_line_and_the_others_print_nothing(run, script):
    done = run(script, 2, *SHORT[script])
    assert done.done.keys() == {"event", "steps", METRIC[script], "world_size", "params_sha256"}
    assert done.done["event"] == "done"
    assert [line for line in done.lines[0] if line.startswith("{")] == done.lines[0][-1:]
    assert done.lines[1] == []


@pytest.mark.parametrize(("script", "steps"), [("digits", 90), ("byte_lm", 102)])
def test_every_step_is_reported_and_the_last_report_holds_the_result(run, script, steps):
    done = run(script, 2, *SHORT[script])
    assert [report["step"] for report in done.reported] == [*range(1, steps + 1), steps]
    assert {report["total"] for report in done.reported} == {steps}
    assert done.reported[-1]["params"] == done.done["params_sha256"][:12]
    assert done.reported[-1][METRIC[script]] == done.done[METRIC[script]]


def test_digits_prints_its_accuracy_after_each_epoch(run):
    assert [line.rsplit(" ", 1)[0] for line in run("digits", 2, *SHORT["digits"]).lines[0][:-1]] == [
        "epoch 1 accuracy",
        "epoch 2 accuracy",
    ]


def test_nothing_is_saved_unless_asked_for(run):
    left = {path.name for path in run("digits", 2, *SHORT["digits"]).model.parent.iterdir()}
    assert left == {"model.pt", "progress", "stdout-0", "stdout-1"}


# ---- as a job --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SHORT)
def test_the_example_job_runs_the_script_with_options_that_it_has(script):
    job = yaml.safe_load((REPOSITORY / "examples" / f"{script}.yaml").read_text())
    trainer = job["spec"]["template"]["spec"]["containers"][0]
    launcher, path, *options = trainer["command"]
    mounted = [mount["mountPath"] for mount in trainer["volumeMounts"]]
    assert (job["kind"], trainer["name"], launcher) == ("DDPJob", "trainer", "torchrun")
    assert (REPOSITORY / path).samefile(REPOSITORY / "trainer" / "examples" / f"{script}.py")
    assert SCRIPTS[script].options(options).snapshot in mounted


@pytest.mark.parametrize("script", SHORT)
def test_an_example_is_short_enough_to_be_read(script):
    text = (REPOSITORY / "trainer" / "examples" / f"{script}.py").read_text()
    assert len(text.splitlines()) <= 200
