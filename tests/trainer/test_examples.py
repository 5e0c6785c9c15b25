"""The examples reach the results in their documentation, with any number of processes and after interruptions. Ranks
are forked from this process, because importing torch takes seconds. Several tests share one run."""

import functools
import importlib.util
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import free_port as ports
import psutil
import pytest
import torch
import yaml
from shell import eventually

import ddpjob
import ddpjob.process
from ddpjob_core.rules import RESUMABLE_EXIT_CODE

REPOSITORY = Path(__file__).parents[2]
TOLERANCE = 1e-5  # relative to the norm of the parameters; measured: 1.2e-6 (digits), 1.7e-6 (byte_lm)
LIMIT_SECONDS = 120

TEN = ("--epochs", "10")
TINY_LM = ("--epochs", "3", "--context", "32", "--layers", "1", "--width", "32", "--heads", "2")
TINY_TEXT_TOPICS = 10  # number of topics that are used; the text has 79
SHORT = {"digits": ("--epochs", "2"), "byte_lm": TINY_LM}
LAST_STEP_TOLD = 80  # a signal comes before this step
METRIC = {"digits": "accuracy", "byte_lm": "loss"}


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "trainer" / "examples" / f"{name}.py")
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPTS = {name: loaded(name) for name in SHORT}
SCRIPTS["byte_lm"].topics = dict(sorted(SCRIPTS["byte_lm"].topics.items())[:TINY_TEXT_TOPICS])


class Run(NamedTuple):
    """The results of a training with an example script."""

    exit_codes: list[int]
    lines: list[list[str]]  # each rank's stdout
    reported: list[dict[str, Any]]  # rank 0's calls of progress()
    model: Path

    @property
    def done(self) -> dict[str, Any]:
        assert self.exit_codes == [0] * len(self.exit_codes), self.lines
        return json.loads(self.lines[0][-1])

    @property
    def parameters(self) -> torch.Tensor:
        return torch.cat([value.flatten() for value in torch.load(self.model).values()])


class Signal(NamedTuple):
    """A signal that a rank gets when it reports this step."""

    rank: int
    step: int
    number: signal.Signals


def train(
    folder: Path, script: str, world_size: int, *options: str, hit: Signal | None = None, alone: bool = False
) -> Run:
    """Run the script with `world_size` ranks; return the results."""
    folder.mkdir()
    port = ports.free_port()
    options = (*options, "--save-model", str(folder / "model.pt"))
    torch.set_num_threads(1)  # a thread pool does not survive a fork
    fork = multiprocessing.get_context("fork")
    ranks = []
    for rank in range(world_size):
        place = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
        environ = {} if alone else {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks.append(fork.Process(target=_rank, args=(folder, script, rank, environ, options, hit)))
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
    folder: Path, script: str, rank: int, environ: dict[str, int | str], options: tuple[str, ...], hit: Signal | None
) -> None:
    for name in [name for name in os.environ if name.startswith(("DDPJOB_", "MASTER_"))]:
        del os.environ[name]
    os.environ |= {name: str(value) for name, value in environ.items()} | {"OMP_NUM_THREADS": "1"}
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.chdir(folder)
    sys.stdout = open(f"stdout-{rank}", "w", buffering=1)  # noqa: SIM115 - until the process ends
    ddpjob.progress = _recorder(open(os.devnull if rank else "progress", "w", buffering=1), rank, hit)  # noqa: SIM115
    try:
        SCRIPTS[script].main(options)
    except BaseException:
        traceback.print_exc(file=sys.stdout)
        raise


def _recorder(file: Any, rank: int, hit: Signal | None) -> Callable[..., None]:
    def progress(step: int, total: int | None = None, samples: int | None = None, **metrics: Any) -> None:
        if hit is not None and (rank, step) == hit[:2]:
            os.kill(os.getpid(), hit.number)
        if hit is not None and (rank, step) == (hit.rank, LAST_STEP_TOLD):
            # Ranks look for a request twice a second. Without this wait, a fast training ends before they agree.
            eventually(lambda: ddpjob.process.current.agreement.promised)
        metrics = {name: float(v) if isinstance(v, torch.Tensor) else v for name, v in metrics.items()}
        file.write(json.dumps({"step": step, "total": total, "samples": samples, **metrics}) + "\n")

    return progress


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Return train() with a cache, because several tests use the same runs."""
    folder = tmp_path_factory.mktemp("examples")

    @functools.cache
    def made(script: str, world_size: int, *options: str, **more: Any) -> Run:
        return train(folder / str(len(list(folder.iterdir()))), script, world_size, *options, **more)

    return made


def distance(one: Run, other: Run) -> float:
    return float((one.parameters - other.parameters).norm() / one.parameters.norm())


# ---- the same for any number of processes ----------------------------------------------------------------------------


@pytest.mark.long  # 8 s of CPU; test_mnist.py and two epochs of digits are the fast tests
def test_digits_recognizes_97_of_100_unseen_digits_after_ten_epochs(run):
    assert run("digits", 1, *TEN).done["accuracy"] >= 0.97


# Three ranks suffice, because each further rank only adds CPU time.
def test_digits_learns_the_same_on_any_number_of_processes(run):
    two, three = run("digits", 2, *SHORT["digits"]), run("digits", 3, *SHORT["digits"])
    assert three.done["accuracy"] == two.done["accuracy"]
    assert distance(two, three) <= TOLERANCE
    assert three.done["world_size"] == 3


def test_byte_lm_learns_the_same_on_any_number_of_processes(run):
    two, three = run("byte_lm", 2, *TINY_LM), run("byte_lm", 3, *TINY_LM)
    assert three.done["loss"] == pytest.approx(two.done["loss"], abs=2e-6)
    assert distance(two, three) <= TOLERANCE


def test_byte_lm_improves_within_three_epochs(run):
    reported = run("byte_lm", 2, *TINY_LM).reported
    assert 5 < reported[0]["loss"] < 7, "that of a byte that is guessed is 5.5; it was multiplied by the ranks"
    assert run("byte_lm", 2, *TINY_LM).done["loss"] < 3.3


def test_without_launcher_variables_a_script_trains_alone(run):
    alone = run("byte_lm", 1, *TINY_LM, alone=True)
    assert alone.done["world_size"] == 1
    assert alone.done["params_sha256"] == run("byte_lm", 1, *TINY_LM).done["params_sha256"]


def test_small_micro_batches_change_nothing(run):
    whole, pieces = run("byte_lm", 2, *TINY_LM), run("byte_lm", 2, *TINY_LM, "--micro-batch", "12")
    assert distance(whole, pieces) <= TOLERANCE


# ---- the same bits, also after an interruption -----------------------------------------------------------------------


def test_a_killed_run_resumes_from_its_snapshot_with_bitwise_equal_results(run, tmp_path):
    options = (*SHORT["digits"], "--snapshot", str(tmp_path / "snapshots"), "--snapshot-every", "10")
    killed = train(tmp_path / "killed", "digits", 2, *options, hit=Signal(0, 77, signal.SIGKILL))
    resumed = train(tmp_path / "resumed", "digits", 2, *options)
    assert killed.exit_codes == [-signal.SIGKILL, 1]
    assert resumed.reported[0]["step"] in (61, 71), "the state of step 70 may have been on its way to the disk"
    assert resumed.done == run("digits", 2, *SHORT["digits"]).done


def test_a_run_killed_on_three_processes_ends_the_same_on_one(run, tmp_path):
    options = (*SHORT["digits"], "--snapshot", str(tmp_path / "snapshots"), "--snapshot-every", "10")
    train(tmp_path / "three", "digits", 3, *options, hit=Signal(0, 77, signal.SIGKILL))
    one = train(tmp_path / "one", "digits", 1, *options)
    assert one.reported[0]["step"] > 1
    assert distance(run("digits", 2, *SHORT["digits"]), one) <= TOLERANCE


def losses(*runs: Run) -> list[tuple[int, float]]:
    """Return (step, loss) of every step, in order."""
    return [(report["step"], report["loss"]) for run in runs for report in run.reported if "params" not in report]


def test_a_run_stopped_by_one_sigterm_continues_with_the_next_step_and_equal_losses(run, tmp_path):
    hit = Signal(random.randrange(2), random.randrange(2, LAST_STEP_TOLD), signal.SIGTERM)
    options = (*TINY_LM, "--snapshot", str(tmp_path / "snapshots"), "--snapshot-every", "1000")
    stopped = train(tmp_path / "stopped", "byte_lm", 2, *options, hit=hit)
    resumed = train(tmp_path / "resumed", "byte_lm", 2, *options)
    assert stopped.exit_codes == [RESUMABLE_EXIT_CODE] * 2, hit
    assert losses(stopped, resumed) == losses(run("byte_lm", 2, *TINY_LM)), hit
    assert resumed.done == run("byte_lm", 2, *TINY_LM).done, hit


class Recorded:
    """Copy of the digits example that also appends the loss of each step to a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script = folder / "train.py"
        self.script.write_text(
            "import json, os, runpy, time, ddpjob\n"
            "told, file = ddpjob.progress, open(f'losses-{os.environ[\"RANK\"]}', 'a', buffering=1)\n"
            "def progress(step, loss=None, **more):\n"
            "    if loss is not None:\n"
            "        file.write(json.dumps([step, float(loss)]) + '\\n')\n"
            "    told(step, loss=loss, **more)\n"
            "    time.sleep(0.01)\n"  # slow enough that a test can wait for a certain step
            "ddpjob.progress = progress\n"
            f"runpy.run_path({SCRIPTS['digits'].__file__!r}, run_name='__main__')\n"
        )

    def losses(self) -> list[tuple[int, float]]:
        path = self.folder / "losses-0"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [tuple(json.loads(line)) for line in lines if line.endswith("\n")]

    def wait_for_step(self, step: int) -> None:
        eventually(lambda: len(self.losses()) >= step, LIMIT_SECONDS)


class Launchers(Recorded):
    """Two nodes of a job, each with a torchrun."""

    def __init__(self, folder: Path, port: int, *options: str) -> None:
        super().__init__(folder)
        self.nodes = [self._node(rank, [str(self.script), *options], port) for rank in range(2)]

    def _node(self, rank: int, command: list[str], port: int) -> "subprocess.Popen[str]":
        environ = {
            **os.environ,
            "PYTHONPATH": str(Path(ddpjob.__file__).parents[1]),
            "OMP_NUM_THREADS": "1",
            "PET_NNODES": "2",
            "PET_NPROC_PER_NODE": "1",
            "PET_NODE_RANK": str(rank),
            "PET_MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_PORT": str(port),
            "PET_SHUTDOWN_TIMEOUT": "25",
            "DDPJOB_TERMINATION_LOG": str(self.folder / f"termination-{rank}"),
        }
        launcher = [sys.executable, "-m", "torch.distributed.run", *command]
        return subprocess.Popen(launcher, env=environ, cwd=self.folder, stderr=subprocess.PIPE, text=True)

    def end(self) -> list[str]:
        return [node.communicate(timeout=LIMIT_SECONDS)[1] for node in self.nodes]

    def kill(self) -> None:
        for node in self.nodes:
            if node.poll() is None:
                for child in psutil.Process(node.pid).children(recursive=True):
                    child.kill()
                node.kill()
                node.communicate()


@pytest.mark.long  # 17 s of CPU for two launchers and two ranks with torch; the fast test above stops forked ranks
def test_sigterm_to_the_launcher_of_one_node_stops_both_nodes_and_the_losses_continue(run, tmp_path, free_port):
    """SIGTERM to torchrun of one node must stop both nodes after a save, and a restart must continue the losses."""
    step = random.randrange(2, 30)
    options = (*SHORT["digits"], "--snapshot", str(tmp_path / "snapshots"), "--snapshot-every", "1000")
    job = Launchers(tmp_path, free_port, *options)
    try:
        job.wait_for_step(step)
        job.nodes[1].terminate()
        said = job.end()
    finally:
        job.kill()
    assert [node.returncode for node in job.nodes] == [1, 1], said
    assert f"exitcode  : {RESUMABLE_EXIT_CODE}" in said[0], "the node that was not told"
    messages = [json.loads((tmp_path / f"termination-{rank}").read_text()) for rank in range(2)]
    assert [(told["rank"], told["resumable"]) for told in messages] == [(0, True), (1, True)]
    assert {told["step"] for told in messages} == {len(job.losses())}
    resumed = train(tmp_path / "resumed", "digits", 2, *options)
    assert [*job.losses(), *losses(resumed)] == losses(run("digits", 2, *SHORT["digits"])), step
    assert resumed.done == run("digits", 2, *SHORT["digits"]).done


def test_a_run_restarted_after_its_end_prints_the_same_and_trains_no_step(run, tmp_path):
    options = ("--epochs", "1", "--snapshot", str(tmp_path / "snapshots"))
    first = train(tmp_path / "first", "digits", 1, *options)
    second = train(tmp_path / "second", "digits", 1, *options)
    assert second.done == first.done
    assert len(second.reported) == 1


# ---- output for users ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SHORT)
def test_rank_0_ends_with_one_json_line_and_the_others_print_nothing(run, script):
    done = run(script, 2, *SHORT[script])
    assert done.done.keys() == {"event", "steps", METRIC[script], "world_size", "params_sha256"}
    assert done.done["event"] == "done"
    assert [line for line in done.lines[0] if line.startswith("{")] == done.lines[0][-1:]
    assert done.lines[1] == []


@pytest.mark.parametrize(("script", "steps"), [("digits", 90), ("byte_lm", 102)])
def test_every_step_is_reported_and_the_last_report_has_the_result(run, script, steps):
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


@pytest.mark.parametrize("script", SHORT)
@pytest.mark.parametrize("words", [("--snapshot-every", "0"), ("--epochs", "-1"), ("--global-batch", "0")])
def test_a_count_below_one_is_refused_before_anything_starts(script, words, capsys):
    """--snapshot-every 0 must not raise ZeroDivisionError, and --epochs -1 must not succeed without a step."""
    with pytest.raises(SystemExit) as ended:
        SCRIPTS[script].main(words)
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f"error: argument {words[0]}: {words[1]} is less than 1\n")


def test_nothing_is_saved_by_default(run):
    left = {path.name for path in run("digits", 2, *SHORT["digits"]).model.parent.iterdir()}
    assert left == {"model.pt", "progress", "stdout-0", "stdout-1"}


# ---- as a job --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SHORT)
def test_the_example_job_uses_only_existing_options_of_the_script(script):
    job = yaml.safe_load((REPOSITORY / "examples" / f"{script}.yaml").read_text())
    trainer = job["spec"]["template"]["spec"]["containers"][0]
    launcher, path, *options = trainer["command"]
    mounted = [mount["mountPath"] for mount in trainer["volumeMounts"]]
    expected = "ddprun" if script == "digits" else "torchrun"  # the digits example shows a restart in place
    assert (job["kind"], trainer["name"], launcher) == ("DDPJob", "trainer", expected)
    assert (REPOSITORY / path).samefile(REPOSITORY / "trainer" / "examples" / f"{script}.py")
    assert SCRIPTS[script].options(options).snapshot in mounted


@pytest.mark.parametrize("script", SHORT)
def test_an_example_is_short_enough_to_read(script):
    text = (REPOSITORY / "trainer" / "examples" / f"{script}.py").read_text()
    assert len(text.splitlines()) <= 200
