"""The kind of a file without a suffix: one rule for run, init, submit and check."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from ddpjob_cli.commands import kinds, sources
from ddpjob_cli.commands.main import cli
from ddpjob_cli.manifest.yamlfile import InputError
from ddpjob_operator.job.podspec import command_of

ENTRY_POINT = (
    "# -*- coding: utf-8 -*-\nimport sys\nfrom pkg.cli import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
)
JOB = "apiVersion: training.ddpjob.io/v1alpha1\nkind: DDPJob\nmetadata: {name: j}\n"

SCRIPTS = {
    "shebang": "#!/usr/bin/env python3\n",
    "entry point of pip": f"#!/opt/venv/bin/python\n{ENTRY_POINT}",
    "entry point of pip in a long path": f"#!/bin/sh\n'''exec' \"/o p/python\" \"$0\" \"$@\"\n' '''\n{ENTRY_POINT}",
    "no shebang": "import torch\n",
    "with a line of dashes": '"""Trains.\n\n---------\nkind: none\n"""\nimport torch\n',
    "with annotations": "kind: str\nspec: dict\nmain()\n",
    "latin-1": "# coding: latin-1\nname = 'é'\nimport torch\n",
    "with a mistake": "import torch\nx = = 2\n",
    "with a mistake and dashes": "import torch\n'''\n---\n'''\nx = = 2\n",
    "Python 2": "#!/usr/bin/python\nprint 'x'\n",
}
JOBS = {
    "YAML": f"{JOB}spec:\n  nodes: 2\n",
    "YAML that Python reads as annotations": f"{JOB}spec: {{nodes: 2}}\n",
    "JSON": '{"kind": "DDPJob", "spec": {"nodes": 2}}',
    "several documents": f"---\n{JOB}---\n{JOB}",
    "a comment": f"# a job\n{JOB}spec:\n  template: {{}}\n",
    "YAML with a mistake": f"{JOB}spec: [\n",
    "nothing": "",
}
PROGRAMS = {
    "bash": "#!/bin/bash\ntorchrun train.py\n",
    "sh": "#!/bin/sh\nset -e\nexec python train.py\n",
    "perl": "#!/usr/bin/perl\nuse strict;\n",
}


ALL = {"script": SCRIPTS, "job": JOBS, "program": PROGRAMS}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, texts in ALL.items() for name in texts])
def test_the_content_of_a_file_without_a_suffix_decides_its_kind(kind: str, name: str, tmp_path: Path) -> None:
    """A shebang must decide the kind of a file without a suffix: `ddpjob run ./train` must not read it as YAML."""
    text = ALL[kind][name]
    path = tmp_path / "train"
    path.write_bytes(text.encode("latin-1" if name == "latin-1" else "utf-8"))
    assert kinds.of(str(path)) == kind
    for suffix, known in ((".py", "script"), (".ipynb", "notebook"), (".yaml", "job"), (".json", "job")):
        assert kinds.of(f"{path}{suffix}") == known, "a known suffix is believed, also of a file that is not there"


def test_irregular_files_are_not_read(tmp_path: Path) -> None:
    """A pipe, as in `ddpjob run <(make-job)`, must not be read to find its kind, because it can be read only once."""
    for path in (tmp_path, tmp_path / "missing", Path("/dev/null")):
        assert (kinds.of(str(path)), kinds.of(str(path), "script")) == ("job", "script")


def test_a_script_without_a_suffix_is_run_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = "import torch.distributed as d, os\nd.init_process_group(rank=int(os.environ['LOCAL_RANK']))\n"
    Path("train").write_text(f"#!/usr/bin/env python\n{wrong}")
    _, job = sources.load(sources.Source("./train", arguments=("--lr", "1")))
    assert (job.metadata.name, command_of(job.spec.template)) == ("train", ["torchrun", "./train", "--lr", "1"])
    printed = CliRunner().invoke(cli, ["init", "--nodes", "2", "./train"], standalone_mode=False)
    Path("job").write_text(printed.stdout)
    for words in (["train", "--nodes", "2"], ["job"], ["job", "train"]):
        said = CliRunner().invoke(cli, ["check", *words], standalone_mode=False)
        assert said.stdout.startswith("train:3: error[rank-is-local-rank]"), words
    _, again = sources.load(sources.Source("job", arguments=("--lr", "2")))
    assert command_of(again.spec.template) == ["torchrun", "./train", "--lr", "2"]


@pytest.mark.parametrize("command", ["run", "init", "submit"])
def test_a_program_that_is_not_python_is_refused_with_the_advice_to_give_a_command(tmp_path, command):
    """Many people start torchrun from a train.sh, and type that name first. It must not be called wrong Python."""
    for name, text in (("run", PROGRAMS["bash"]), ("run.sh", "torchrun train.py\n")):
        path = tmp_path / name
        path.write_text(text)
        with pytest.raises(InputError, match="neither a Python script nor a DDPJob: give the command in it"):
            CliRunner().invoke(cli, [command, str(path)], standalone_mode=False, catch_exceptions=False)
