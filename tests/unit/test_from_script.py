"""A training script becomes a DDPJob: the first minute of a user with a script and no YAML."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import ddpjob_check as check
from ddpjob_check.job import known
from ddpjob_cli.commands import from_script, sources
from ddpjob_cli.commands.main import cli
from ddpjob_cli.commands.sources import Source
from ddpjob_cli.manifest import yamlfile
from ddpjob_cli.manifest.yamlfile import InputError
from ddpjob_convert import command
from ddpjob_operator.job import api, validation, wording
from ddpjob_operator.job.podspec import command_of

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "trainer/examples").rglob("*.py"))
DIGITS = ROOT / "trainer/examples/digits.py"
TORCHRUN = """
import argparse, torch, torchvision
import torch.distributed as dist
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--data", required=True)
dist.init_process_group("nccl")
data = torchvision.datasets.MNIST(root="/data/mnist")
torch.save({}, "model.pt")
"""
JOB = """
apiVersion: training.ddpjob.io/v1alpha1
kind: DDPJob
metadata: {name: mine}
spec:
  nodes: 2
  template: {spec: {containers: [{name: trainer, image: x, command: [torchrun, train.py, --lr, "1"]}]}}
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def job_of(text: str) -> api.DDPJob:
    """Return the job as the API server accepts it."""
    job, problems = validation.parse(yamlfile.read_job("x.yaml", None, text.encode()).data)
    assert problems == []
    assert list(validation.strict(job.spec)) == []
    return job


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_the_job_of_any_script_is_valid(path: Path) -> None:
    job = job_of(from_script.job_yaml(Source(str(path)), path.read_text()))
    assert job.spec.nodes in (1, 2)


def test_torchrun_starts_a_script_that_forms_a_group_with_its_arguments_as_they_were_typed() -> None:
    words = ["--epochs", "5", "--name", "a: b", "true", "-1"]
    job = job_of(from_script.job_yaml(Source("src/train.py", nodes="3", nproc="4", arguments=tuple(words)), TORCHRUN))
    assert command_of(job.spec.template) == ["torchrun", "src/train.py", *words]
    assert (job.metadata.name, job.spec.nodes, job.spec.nproc_per_node) == ("train", 3, 4)


def test_a_range_of_nodes_makes_an_elastic_job_here_and_in_the_YAML() -> None:
    source = Source(str(DIGITS), nodes="1:3")
    printed = job_of(sources.to_yaml(source))
    _, started = sources.load(source)
    for job in (printed, started):
        assert (job.spec.min_nodes, job.spec.nodes) == (1, 3)


@pytest.mark.parametrize("nodes", ["", ":", "1:", ":3", "1:2:3"])
def test_a_range_with_a_missing_number_is_refused(nodes: str) -> None:
    """`--nodes 1:` must be refused: it would run one node, the default of spec.nodes."""
    with pytest.raises(InputError, match="--nodes: must be a number of nodes, or MIN:MAX as 1:3"):
        sources.load(Source(str(DIGITS), nodes=nodes))


ALONE = """
import argparse, torch.distributed as dist
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
args = parser.parse_args()
if args.local_rank != -1:
    dist.init_process_group("gloo")
"""
SHELL = ["torchrun", "--no-python", "sh", "-c"]


LAUNCH = ["python", "-m", "torch.distributed.launch", "a/b.py", "--name", "a b", "$(NODE_RANK)"]


@pytest.mark.parametrize("default", ["default=-1", "required=True"])
@pytest.mark.parametrize(
    ("names", "command"),
    [
        ('"--local_rank"', [*SHELL, "exec python a/b.py --local_rank=$LOCAL_RANK --name 'a b' '$(NODE_RANK)'"]),
        ('"--local-rank"', LAUNCH),
        ('"--local-rank", "--local_rank"', LAUNCH),
    ],
)
def test_a_script_that_needs_its_local_rank_as_an_option_gets_it_and_check_accepts_the_job(names, command, default):
    """A script that needs its local rank as an option must get it: otherwise each rank trains alone or exits with 2."""
    script = ALONE.replace('"--local_rank"', names).replace("default=-1", default)
    text = from_script.job_yaml(Source("a/b.py", arguments=("--name", "a b", "$(NODE_RANK)")), script)
    job = job_of(text)
    assert command_of(job.spec.template) == command
    assert "# Line 4 needs the local rank as an option. torchrun does not pass this option" in text
    assert [f for f in check.check("train.py", script, known(job)) if f.severity == "error"] == []


@pytest.mark.parametrize(
    "line",
    [
        "from trl import SFTConfig, SFTTrainer",
        "from sentence_transformers import SentenceTransformerTrainer",
        "from megatron.training import pretrain",
        "from nemo.collections import llm",
        "from fastai.distributed import *",
        "from ultralytics import YOLO",
    ],
)
def test_a_library_that_forms_the_group_by_itself_gets_no_warning_about_training_alone(line: str) -> None:
    notes = from_script.read("train.py", f"{line}\n").notes
    assert notes[0] == "A framework forms the group: torchrun starts its processes."


def test_findings_are_written_as_comments() -> None:
    text = from_script.job_yaml(Source("train.py"), TORCHRUN)
    for said in ("nccl, which needs a GPU", "Required arguments: --data", "--epochs (5)", "/data/mnist", "saves files"):
        assert said in text, text
    assert "nvidia.com/gpu: 1" in text
    assert len(text.splitlines()) < 25


@pytest.mark.parametrize(
    ("nargs", "said"),
    [
        ("nargs='?', default='imagenet'", "Optional arguments: data ('imagenet')"),
        ("nargs='*'", "Optional arguments: data"),
        ("nargs=argparse.REMAINDER", "Optional arguments: data"),
        ("nargs='+'", "Required arguments: data"),
        ("default='imagenet'", "Required arguments: data"),
    ],
)
def test_an_optional_argument_is_not_called_needed(nargs: str, said: str) -> None:
    """An optional argument must not be reported as required, such as the folder of PyTorch's imagenet example."""
    script = f"import argparse\nargparse.ArgumentParser().add_argument('data', {nargs})\n"
    assert f"# {said}\n" in from_script.job_yaml(Source("train.py"), script)


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("train.py", "train"),
        ("a/Train_BERT.py", "train-bert"),
        ("3d.py", "job-3d"),
        ("pkg.mod", "mod"),
        ("./run.train.sh", "run-train"),
        ("_.py", "job"),
        ("Übung mit é.py", "ubung-mit-e"),
    ],
)
def test_the_job_name_is_valid_in_kubernetes(script: str, name: str) -> None:
    assert wording.name_of(script) == name
    module = ["-m"] if script == "pkg.mod" else []
    assert command.convert(["torchrun", *module, script]).metadata["name"] == name, "as `ddpjob convert` names it"


@pytest.mark.parametrize("name", ["y", "no", "on", "null", "true"])
def test_a_script_named_like_a_yaml_keyword_gives_a_job_of_that_name(name: str) -> None:
    """The name must be quoted in YAML, because YAML reads `y` as true, and `ddpjob run y.py` would be refused."""
    assert job_of(from_script.job_yaml(Source(f"{name}.py"), "")).metadata.name == name


AWKWARD = (
    "y",
    "N",
    "=",
    "~",
    "-",
    "1",
    "1e3",
    "0x1",
    "a: b",
    "#",
    "",
    "é",
    "a\nb",
    "[",
    "'",
    '"',
    "2026-01-01",
    "1:30",
)


def test_arguments_stay_as_they_were_typed() -> None:
    """Arguments must be quoted in YAML if it would read them as true, null or a number."""
    job = job_of(from_script.job_yaml(Source("train.py", arguments=AWKWARD), ""))
    assert command_of(job.spec.template) == ["torchrun", "train.py", *AWKWARD]


def test_a_script_whose_name_begins_with_a_dash_is_no_option_of_the_launcher() -> None:
    job = job_of(from_script.job_yaml(Source("-x.py"), ""))
    assert command_of(job.spec.template) == ["torchrun", "./-x.py"]


@pytest.mark.parametrize(
    "start",
    [
        Source("a\nb.py"),
        Source("\udcff.py"),
        Source("a\x1b[31m.py"),
        Source(None, "a\nb"),
        Source("a.py", arguments=("\udcff",)),
    ],
    ids=repr,
)
def test_a_name_that_yaml_cannot_hold_is_refused_and_shown(start: Source) -> None:
    """A script's name must be refused if it adds YAML by a line break, or causes a traceback by invalid UTF-8."""
    with pytest.raises(InputError, match=r"rename it|it cannot be part of a job") as refused:
        from_script.job_yaml(start, None if start.module else "")
    assert str(refused.value).isprintable()


NOT_UTF_8 = [{"settings": ("metadata.name=\udcff",)}, {"variables": ("A=\udcff",)}, {"arguments": ("\udcff",)}]


@pytest.mark.parametrize("words", NOT_UTF_8, ids=repr)
def test_options_of_a_yaml_file_that_are_not_utf_8_are_refused(mine: Path, words: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="not UTF-8"):
        sources.load(Source(str(mine), **words))


def test_a_number_of_nodes_cannot_inject_a_line_of_yaml() -> None:
    with pytest.raises(InputError, match=r"spec.nodes: must be a whole number"):
        sources.load(Source(None, "mod", nodes="2\n  suspend: true"))


@pytest.mark.parametrize("name", ["big.py", "big.ipynb"])
def test_a_file_of_2_gb_is_no_script_and_is_not_read(tmp_path: Path, name: str) -> None:
    """A file of 2 GB must be refused without a read, which would take 50 s and 4 GB of memory."""
    path = tmp_path / name
    with path.open("wb") as file:
        file.truncate(2 << 30)
    with (
        pytest.raises(InputError, match=rf"{name}: larger than \d+ MiB"),
        sources.as_file(Source(str(path))) as given,
    ):
        sources.load(given)


def test_a_script_that_is_not_valid_python_is_named_with_its_line() -> None:
    with pytest.raises(InputError, match=r"train.py:2: not valid Python"):
        from_script.job_yaml(Source("train.py"), "x = 1\nx = = 2\n")


@pytest.mark.parametrize(
    ("command", "made"),
    [
        ("[python, {file}]", ["python", "{file}", "a", "--log", "5"]),
        ("[ddprun, {file}, --old, x]", ["ddprun", "{file}", "--", "a", "--log", "5"]),
        ("[torchrun, {file}, --]", ["torchrun", "{file}", "--", "a", "--log", "5"]),
    ],
)
def test_arguments_also_reach_a_command_that_is_set_by_option(tmp_path: Path, command: str, made: list[str]) -> None:
    """`ddpjob run av.py --set …command=[python, av.py] -- a b` must not drop a and b."""
    file = str(tmp_path / "av.py")
    Path(file).write_text("")
    setting = f"spec.template.spec.containers[0].command={command.format(file=file)}"
    _, job = sources.load(Source(file, settings=(setting,), arguments=("a", "--log", "5")))
    assert command_of(job.spec.template) == [word.format(file=file) for word in made]
    with pytest.raises(
        InputError, match=r"no script was found in the command, so the arguments after -- cannot be passed to one"
    ):
        sources.load(Source(file, settings=(setting.partition("=")[0] + "=[sleep, '1']",), arguments=("a",)))


ABBREVIATE = [["--log", "5"], ["--mo=0.1"], ["x", "--no"], ["--max", "3"], ["--", "x"]]
DO_NOT = [["--epochs", "5"], ["--log-dir", "x"], ["--log-level", "3"], ["x", "--", "--log"], ["-m"], []]


@pytest.mark.parametrize("words", [*ABBREVIATE, *DO_NOT], ids=str)
def test_arguments_that_resemble_torchrun_options_are_put_after_dashes(tmp_path: Path, words: list[str]) -> None:
    """Arguments after `--` that look like torchrun's options must be separated: `--log 5` would end in its usage."""
    behind = ["--", *words] if words in ABBREVIATE else words
    file = tmp_path / "train.py"
    file.write_text("")
    for source, head in (
        (Source(str(file)), ["torchrun", str(file)]),
        (Source(None, module="pkg.train"), ["torchrun", "-m", "pkg.train"]),
    ):
        _, job = sources.load(replace(source, arguments=tuple(words)))
        assert command_of(job.spec.template) == [*head, *behind]
    spawns = "import torch.multiprocessing as mp\nmp.spawn(f, nprocs=2)\n"
    job = job_of(from_script.job_yaml(Source("train.py", arguments=tuple(words)), spawns))
    assert command_of(job.spec.template) == ["python", "train.py", *words], "Python takes nothing away"
    for line in ("torchrun --nnodes 2 train.py", "accelerate launch train.py"):
        made = command.convert([*line.split(), *words]).spec["template"]["spec"]["containers"][0]["command"]
        assert made == ["torchrun", "train.py", *(words if words[:1] == ["--"] else behind)]


@pytest.mark.parametrize("given", ['--, --lr, "1"', '--lr, "1"'])
def test_arguments_after_dashes_replace_those_of_the_yaml_and_keep_launcher_dashes(mine: Path, given: str) -> None:
    mine.write_text(JOB.replace('--lr, "1"', given))
    for words, dashes in (("--log", "2"), ["--"]), (("--epochs", "2"), ["--"] if given[:3] == "--," else []):
        _, job = sources.load(Source(str(mine), arguments=words))
        assert command_of(job.spec.template) == ["torchrun", "train.py", *dashes, *words]


def test_two_values_for_one_field_are_refused(mine: Path) -> None:
    """The command must refuse `--nodes 3 --set spec.nodes=2`, because it is ambiguous."""
    with pytest.raises(InputError, match=r"--nodes 3 and --set spec.nodes=2: two values"):
        sources.load(Source(str(mine), nodes="3", settings=("spec.nodes=2",)))
    with pytest.raises(InputError, match=r"--nodes 1:3 and --set spec.minNodes=2: two values"):
        sources.load(Source(str(mine), nodes="1:3", settings=("spec.minNodes=2",)))


def test_the_cells_of_a_notebook_become_a_script(tmp_path: Path) -> None:
    path = tmp_path / "try.ipynb"
    path.write_text(
        '{"cells": [{"cell_type": "markdown", "source": ["# x"]}, '
        '{"cell_type": "code", "source": ["%pip list\\n", "if 1:\\n", "    !ls\\n", "x = !ls"]}]}'
    )
    with sources.as_file(Source(str(path))) as source:
        assert source.file is not None
        assert Path(source.file).read_text() == "pass\nif 1:\n    pass\nx = None\n"
    assert not Path(source.file).exists()


@pytest.mark.parametrize(
    ("cell", "script"),
    [
        ("%time train()", "train()"),
        ("if 1:\n    %timeit -n 1 -r1 train(a)", "if 1:\n    train(a)"),
        ("x = %time train(a)", "x = train(a)"),
        ("prun -q train()", "train()"),
        ("%time train(a, \\\n  b)\ncd data", "train(a, \\\n  b)\npass"),
        ("%time", "pass"),
        ("time", "time"),
        ("%timers on", "pass"),
    ],
)
def test_code_that_a_notebook_magic_measures_is_run(tmp_path: Path, cell: str, script: str) -> None:
    """The code after a magic must run, or `%time train()` would train nothing and the job would succeed."""
    path = tmp_path / "try.ipynb"
    path.write_text(json.dumps({"cells": [{"cell_type": "code", "source": cell}]}))
    with sources.as_file(Source(str(path))) as source:
        assert Path(source.file or "").read_text() == f"{script}\n"


def test_a_mistake_in_a_notebook_is_named_by_its_cell(tmp_path, monkeypatch, ddpjob):
    """A mistake must be named by its cell. The script made from the notebook is in /tmp, under an unknown name."""
    cells = ["import os", "import torch.distributed as d\nd.init_process_group(rank=int(os.environ['LOCAL_RANK']))"]
    path = tmp_path / "try.ipynb"
    path.write_text(json.dumps({"cells": [{"cell_type": "code", "source": cell} for cell in cells]}))
    monkeypatch.chdir(tmp_path)
    done = ddpjob("run", "try.ipynb", "--nodes", 2, code=2)
    assert done.err.startswith("try.ipynb:cell 2:2: error[rank-is-local-rank]")


def test_no_yaml_is_written_for_a_command_that_starts_a_notebook(tmp_path: Path) -> None:
    """No YAML must be written for a command that starts a notebook: as a script it would run without effect."""
    path = tmp_path / "try.ipynb"
    path.write_text('{"cells": []}')
    with pytest.raises(InputError, match=r"jupyter nbconvert --to script .*then ddpjob init .*try.py"):
        sources.to_yaml(Source(str(path)))


def test_a_variable_without_a_value_is_copied_from_the_environment(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--env NAME` copies the value of NAME from the environment, as `docker run -e NAME` does."""
    monkeypatch.setenv("TAKEN", "over")
    document, _ = sources.load(Source(str(mine), variables=("TAKEN",)))
    assert document.data["spec"]["template"]["spec"]["containers"][0]["env"] == [{"name": "TAKEN", "value": "over"}]
    with pytest.raises(InputError, match="NOT_THERE"):
        sources.load(Source(str(mine), variables=("NOT_THERE",)))


def test_a_mistyped_process_count_does_not_start_a_thousand_processes() -> None:
    job = job_of(JOB.replace("nodes: 2", "nodes: 1000"))
    with pytest.raises(InputError, match="1,000 processes"):
        sources.warn_of_size(job, allowed=False)
    with pytest.raises(InputError, match="more than"):
        sources.warn_of_size(job_of(JOB.replace("nodes: 2", f"nodes: {65 + (os.cpu_count() or 0)}")), allowed=False)
    assert "1,000 processes" in sources.warn_of_size(job, allowed=True)
    assert sources.warn_of_size(job_of(JOB), allowed=False) == ""
    job = job_of(JOB.replace("nodes: 2", "nodes: 1\n  nprocPerNode: 1000"))
    assert sources.warn_of_size(job, allowed=True).startswith("1 node × 1000 are 1,000 processes on ")


def test_a_dry_run_of_thousands_of_nodes_prints_a_part_of_its_like_pods() -> None:
    """A dry run must print only some of many like pods: 5,000 pods are 400,000 lines."""
    many = JOB.replace("nodes: 2", "nodes: 66")
    done = CliRunner().invoke(cli, ["run", "-", "--dry-run"], input=many)
    assert (done.exit_code, done.stdout.count("kind: Pod")) == (0, 64)
    assert "64 of 66 pods are printed" in done.stderr
    done = CliRunner().invoke(cli, ["run", "-", "--dry-run", "--yes"], input=many)
    assert (done.stdout.count("kind: Pod"), done.stderr) == (66, "")


@pytest.mark.parametrize("typed", ["print('a script')\n", JOB])
def test_stdin_may_be_a_script_or_a_yaml_file(typed: str) -> None:
    done = CliRunner().invoke(cli, ["run", "-", "--dry-run"], input=typed)
    assert done.exit_code == 0, done.output
    assert ("stdin.py" in done.stdout) == typed.startswith("print")


def test_an_error_in_a_job_made_for_a_script_names_no_line_of_the_script(tmp_path: Path) -> None:
    """An error in a job made for a script must not name a line of the script, as in `train.py:15: spec.template…`."""
    script = tmp_path / "train.py"
    script.write_text("import torch\n")
    document, _ = sources.load(Source(str(script)))
    assert document.place(("spec", "template")) == str(script)
