"""`ddpjob run`, `submit` and `init` separate their own arguments from those of the script, as torchrun does."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from shell import Cli

from ddpjob_cli.commands import script_words, sources
from ddpjob_operator.job.podspec import command_of

TRAIN = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("-e", "--env")
parser.add_argument("--logs")
"""
CLICK = (
    'import click\n@click.command()\n@click.option("--dry-run/--no-dry-run")\n@click.option("--report")\ndef f(): 0\n'
)
TYPER = "import typer\napp = typer.Typer()\n@app.command()\ndef f(env: str = '', *, dry_run=False): 0\n"
FIRE = "import fire\ndef f(logs): 0\ndef g(report): 0\nfire.Fire(f)\n"


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "bare.py").write_text("import sys\nprint(sys.argv)\n")
    (tmp_path / "clicked.py").write_text(CLICK)
    (tmp_path / "typed.py").write_text(TYPER)
    (tmp_path / "fired.py").write_text(FIRE)
    (tmp_path / "apart.py").write_text("from opts import parser\nparser.parse_args()\n")
    (tmp_path / "opts.py").write_text(TRAIN)
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").write_text("")
    (tmp_path / "package/train.py").write_text("from .opts import parser\n")
    (tmp_path / "package/opts.py").write_text(TRAIN)
    return Cli(tmp_path)


def made(cli: Cli, words: str) -> dict[str, Any]:
    """Return the spec of the job that `ddpjob init WORDS` prints."""
    done = cli.here("init", *shlex.split(words))
    assert done.returncode == 0, done.stderr
    return yaml.safe_load(done.stdout)["spec"]


@pytest.mark.parametrize(
    ("typed", "command"),
    [
        ("train.py --lr 0.1 --epochs 5", "torchrun train.py --lr 0.1 --epochs 5"),
        ("train.py 5 --nodes 3", "torchrun train.py 5 --nodes 3"),
        ("train.py --help", "torchrun train.py --help"),
        ("train.py -h", "torchrun train.py -h"),
        ("train.py -- --env A=1", "torchrun train.py --env A=1"),
        ("train.py -- --nodes 3", "torchrun train.py --nodes 3"),
        ("-- train.py --nodes 3", "torchrun train.py --nodes 3"),
        ("train.py --lr 1 -- x", "torchrun train.py --lr 1 -- x"),
        ("train.py -m resnet", "torchrun train.py -m resnet"),
        ("-m package.train --lr 0.1", "torchrun -m package.train --lr 0.1"),
        ("-mpackage.train --help", "torchrun -m package.train --help"),
        ("--module=package.train 5", "torchrun -m package.train 5"),
    ],
)
def test_all_words_from_the_first_unknown_word_on_belong_to_the_script(cli: Cli, typed: str, command: str) -> None:
    """`ddpjob run train.py --lr 0.1` must pass --lr to the script, and not fail with `No such option '--lr'`."""
    spec = made(cli, typed)
    assert spec["template"]["spec"]["containers"][0]["command"] == command.split()
    assert spec["nodes"] == 1, "as torchrun: one node unless more are given"


@pytest.mark.parametrize(
    "typed",
    [
        "--nodes 3 --nproc-per-node 2 --max-restarts 1 train.py --lr 1",
        "train.py --nodes 3 --nproc-per-node 2 --max-restarts 1 --lr 1",
        "--nnodes=3 train.py --nproc_per_node=2 --max_restarts=1 --lr 1",
        "--nproc_per_node 2 --max-restarts=1 train.py --nnodes 3 -- --lr 1",
    ],
)
def test_torchrun_spellings_of_our_options_are_accepted_before_and_directly_after_the_script(cli, typed):
    spec = made(cli, typed)
    assert (spec["nodes"], spec["nprocPerNode"], spec["backoffLimit"]) == (3, 2, 1)
    assert spec["template"]["spec"]["containers"][0]["command"] == ["torchrun", "train.py", "--lr", "1"]


@pytest.mark.parametrize(
    ("typed", "ours", "theirs"),
    [
        ("train.py --env A=1 --lr 2", "--env A=1 train.py --lr 2", "train.py -- --env A=1 --lr 2"),
        ("train.py --nodes 2 --env=A", "--nodes 2 --env=A train.py", "--nodes 2 train.py -- --env=A"),
        ("train.py --logs x", "--logs x train.py", "train.py -- --logs x"),
        ("clicked.py --report x", "--report x clicked.py", "clicked.py -- --report x"),
        ("clicked.py --dry_run", "--dry_run clicked.py", "clicked.py -- --dry_run"),
        ("typed.py --env=A", "--env=A typed.py", "typed.py -- --env=A"),
        ("typed.py --dry-run", "--dry-run typed.py", "typed.py -- --dry-run"),
        ("fired.py --report x --logs y", "--report x --logs y fired.py", "--report x fired.py -- --logs y"),
        ("apart.py --env A=1", "--env A=1 apart.py", "apart.py -- --env A=1"),
        ("-m package.train --env A=1", "--env A=1 -m package.train", "-m package.train -- --env A=1"),
    ],
)
def test_an_option_that_the_script_has_too_is_refused_with_both_spellings(cli, typed, ours, theirs):
    """An option that the script has, too, such as --env, must be refused with both spellings."""
    done = cli.here("run", *typed.split())
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert (
        f"type ddpjob run {ours} for the option of ddpjob run, or ddpjob run {theirs} for the script's" in done.stderr
    )


def test_an_option_before_the_script_is_ours_even_if_the_script_declares_it(cli: Cli) -> None:
    done = cli.here("run", "--env", "A=1", "--dry-run", "train.py", "--", "--env", "B")
    pods = list(yaml.safe_load_all(done.stdout))
    trainer = pods[-1]["spec"]["containers"][0]
    assert trainer["command"] == ["ddprun", "train.py", "--env", "B"]
    assert {"name": "A", "value": "1"} in trainer["env"]
    assert "goes to" not in done.stderr


def test_a_misplaced_option_of_ours_is_named_if_the_script_does_not_declare_it(cli: Cli) -> None:
    """An option of ours in the wrong place must be named: the script's own error does not show that."""
    done = cli.here("init", "train.py", "--lr", "1", "--nodes", "2")
    assert done.returncode == 0
    assert "--nodes goes to train.py, which declares no such option" in done.stderr
    for words in (
        ["train.py", "--", "--nodes", "2"],
        ["bare.py", "x", "--nodes", "2"],
        ["train.py", "x", "--env", "A"],
    ):
        assert cli.here("init", *words).stderr == "", words


@pytest.mark.parametrize(
    ("typed", "instead"),
    [
        ("run torchrun train.py --lr 1", "ddpjob run train.py --lr 1"),
        ("run -- torchrun train.py", "ddpjob run train.py"),
        ("run --cpu torchrun --nnodes=1 --nproc_per_node 4 train.py x", "--nodes 1 --nproc-per-node 4 train.py x"),
        ("run /usr/bin/torchrun --standalone -m package.train --lr 1", "ddpjob run -m package.train --lr 1"),
        ("run python -u train.py 5", "ddpjob run train.py 5"),
        ("run python3.11 -m package.train", "ddpjob run -m package.train"),
        ("run python -m torch.distributed.run --nproc-per-node=2 train.py", "ddpjob run --nproc-per-node 2 train.py"),
        ("submit torchrun train.py", "ddpjob submit train.py"),
        ("run ddprun --nproc_per_node 4 train.py x", "ddpjob run --nproc-per-node 4 train.py x"),
        ("submit ddprun train.py", "ddpjob submit --launcher ddprun train.py"),
        ("init python train.py", "ddpjob init train.py"),
        ("run torchrun", "ddpjob run FILE"),
        ("run nohup torchrun train.py --lr 1", "nohup ddpjob run train.py --lr 1"),
        ("init -x.py", "ddpjob init -- -x.py"),
        ("run train.py --nodes", "Option '--nodes' requires an argument."),
        ("run -m", "Option '-m' requires an argument."),
        ("run accelerate launch t.py", "ddpjob convert -- accelerate launch t.py > job.yaml, then ddpjob run job.yaml"),
        ("run --cpu srun python t.py 1", "ddpjob run --cpu --nodes NODES --nproc-per-node RANKS t.py 1"),
        ("mpirun -np 2 python t.py", "ddpjob run --nodes NODES --nproc-per-node RANKS t.py"),
        ("run bash train.sh", "not the shell script train.sh: give the command in it that starts the training"),
        ("train.py --lr 1", "ddpjob run train.py --lr 1"),
        ("torchrun train.py", "ddpjob run train.py"),
        ("--nodes 2 train.py", "ddpjob run --nodes 2 train.py"),
        ("run --lr 0.1 --nodes 2 train.py", "ddpjob run --nodes 2 train.py --lr 0.1"),
        ("run --epochs 5", "ddpjob run FILE --epochs 5"),
        ("run --standalone train.py", "leave it out"),
    ],
)  # fmt: skip
def test_an_option_typed_out_of_habit_is_answered_with_the_right_one(cli: Cli, typed: str, instead: str) -> None:
    done = cli.here(*typed.split())
    assert done.returncode == 2
    assert instead in done.stderr
    assert "id you mean" not in done.stderr


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("run --nods 2 train.py", "did you mean --nodes?"),
        ("run --fial x train.py", "did you mean --fail?"),
        ("run --nproc 2 train.py", "did you mean --nproc-per-node?"),
        ("run job.yaml --nods 2", "Did you mean '--nodes'?"),
        ("chekc train.py", "Did you mean 'check'?"),
        *((f"run {option} 1 train.py", "") for option in ("--epochs", "--resume", "--gpus", "--port", "--gpu", "--x")),
        ("check train.py --gpus 2", ""),
        ("run job.yaml --epochs 2", ""),
        ("trani train.py", ""),
    ],
)
def test_only_similar_options_are_suggested(cli: Cli, typed: str, meant: str) -> None:
    """For `--epochs` the error must not suggest `--report` or `--yes`."""
    done = cli.here(*typed.split())
    assert done.returncode == 2
    assert meant in done.stderr
    assert meant or "id you mean" not in done.stderr


def test_options_may_stand_anywhere_around_a_YAML_file(cli: Cli) -> None:
    job = cli.file("pass")
    for words in ((job, "--nodes", "3"), (job, "x", "--nnodes", "3"), ("--nodes", "3", job, "--", "--lr", "1")):
        done = cli.here("run", "--dry-run", *words)
        assert done.returncode == 0, done.stderr
        assert len(list(yaml.safe_load_all(done.stdout))) == 4, "a Service and three pods"
    assert cli.here("run", job, "--help").stdout.startswith("Usage: ddpjob run")
    limited = cli.here("run", job, "--max-restarts", "2", "--set", "spec.backoffLimit=1")
    assert "--max-restarts 2 and --set spec.backoffLimit=1: two values" in limited.stderr


@pytest.mark.parametrize(
    ("given", "devices", "said"),
    [
        ({}, 0, "defaults: --nodes 1, --nproc-per-node 1"),
        ({}, 8, "defaults: --nodes 1, --nproc-per-node 1 (8 GPUs here: --nproc-per-node gpu)"),
        ({"nodes": "2"}, 1, "default: --nproc-per-node 1"),
        ({"nodes": "2", "nproc": "4"}, 8, ""),
        ({"settings": ("spec.nodes=2",), "nproc": "1"}, 0, ""),
    ],
)
def test_the_title_shows_numbers_that_are_defaults(cli: Cli, given: Any, devices: int, said: str) -> None:
    """The title must show defaults, for example that `ddpjob run train.py` uses one of eight GPUs."""
    source = sources.Source(str(cli.folder / "train.py"), **given)
    assert sources.defaults(source, sources.load(source)[1], devices) == said
    job = sources.Source(str(cli.file("pass")))
    assert sources.defaults(job, sources.load(job)[1], 8) == ""


def test_torchrun_words_for_a_number_of_processes_refer_to_this_machine() -> None:
    assert sources.processes("gpu", 8) == sources.processes("auto", 8) == "8"
    assert int(sources.processes("cpu", 8) or 0) >= 1
    assert (sources.processes("4", 0), sources.processes(None, 8)) == ("4", None)
    with pytest.raises(sources.InputError, match="no GPU was found"):
        sources.processes("gpu", 0)


def test_a_suggestion_is_a_typo_or_a_prefix() -> None:
    known = ["--nodes", "--report", "--cpu", "--set", "--metrics-file"]
    given = ("--nodse", "--node", "--metrics", "--cpus", "--gpu", "--port", "--se", "--nodes-of-mine")
    meant = ["--nodes", "--nodes", "--metrics-file", "--cpu", "", "", "--set", ""]
    assert [script_words.close(name, known) for name in given] == meant


def test_the_command_of_a_script_is_the_same_with_and_without_dashes(cli: Cli) -> None:
    one = made(cli, "train.py --log 5")["template"]
    other = made(cli, "train.py -- --log 5")["template"]
    assert command_of(one) == command_of(other) == ["torchrun", "train.py", "--", "--log", "5"]
