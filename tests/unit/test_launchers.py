"""The launcher of a script is ddprun unless something needs torchrun. Then one line names the reason."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from shell import Cli

from ddpjob_cli.commands import launchers

INIT = "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
STORE = "from torch.distributed import TCPStore\nimport os\nhost, port = os.environ['MASTER_ADDR'], 1\n"
LOCAL_RANK = """
import argparse, torch.distributed as dist
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, required=True)
args = parser.parse_args()
dist.init_process_group("gloo")
"""


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path)


def run(cli: Cli, script: str, *options: str, name: str = "train.py") -> tuple[list[str], str]:
    """Return the command that `ddpjob run` starts, and its stderr."""
    (cli.folder / name).write_text(script)
    done = cli.here("run", "--dry-run", *options, *([] if "-m" in options else [name]))
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))[-1]["spec"]["containers"][0]["command"], done.stderr


def test_ddprun_starts_a_script_without_a_message_about_it(cli: Cli) -> None:
    assert run(cli, INIT) == run(cli, INIT, "--nodes", "1:2") == (["ddprun", "train.py"], "")
    assert run(cli, INIT, "--launcher", "torchrun") == (["torchrun", "train.py"], "")
    assert run(cli, INIT, "-m", "train") == (["ddprun", "-m", "train"], "")


@pytest.mark.parametrize(
    ("script", "options", "why"),
    [
        ("import os\nos.environ['KMP_AFFINITY'] = 'none'\n" + INIT, [], "line 2 sets KMP_AFFINITY, which torch reads"),
        ("import os\nos.environ.setdefault('KMP_BLOCKTIME', '1')\n" + INIT, [], "line 2 sets KMP_BLOCKTIME"),
        ("import os\nos.environ.update(TORCH_COMPILE_DEBUG='1')\nimport mine\n", [], "line 2 sets TORCH_COMPILE_DEBUG"),
        (STORE + "TCPStore(host, port)\n", [], "line 4 connects to a store that torchrun serves"),
        (STORE + "TCPStore(host, port, 2, False)\n", [], "line 4 connects to a store that torchrun serves"),
    ],
)  # fmt: skip
def test_torchrun_starts_scripts_that_ddprun_cannot_and_one_line_gives_the_reason(cli, script, options, why):
    """torchrun must start a script that hangs or loses a setting under ddprun, and a line must give the reason."""
    command, said = run(cli, script, *options)
    assert command[0] == "torchrun"
    assert said.startswith(f"torchrun starts the ranks: {why}")
    assert len(said.splitlines()) == 1


def test_a_module_is_analyzed_like_a_script(cli: Cli) -> None:
    (command, said) = run(cli, "import os\nos.environ['MKL_CBWR'] = 'AVX'\n" + INIT, "-m", "train")
    assert command == ["torchrun", "-m", "train"]
    assert "line 2 sets MKL_CBWR" in said


@pytest.mark.parametrize(
    "script",
    [
        "import os\nos.environ['OMP_NUM_THREADS'] = '4'\n" + INIT,  # works: applied when the script imports torch
        "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '1'\n" + INIT,  # works: torch reads the variable later
        INIT + "import os\nos.environ['KMP_AFFINITY'] = 'none'\n",  # has no effect under torchrun either
        STORE + "TCPStore(host, port, 2, os.environ['RANK'] == '0')\n",
        STORE + "TCPStore(host, port, is_master=True)\nTCPStore(host, port)\n",
        "print(1)\n",
        "import torch\ntorch.cuda.init()\n",
    ],
)
def test_code_that_works_after_a_fork_is_left_to_ddprun(cli: Cli, script: str) -> None:
    command, said = run(cli, script)
    assert command == ["ddprun", "train.py"]
    assert "torchrun starts" not in said


def test_ddprun_passes_the_local_rank_to_a_script_that_has_it_as_an_option(cli: Cli) -> None:
    """ddprun must pass the local rank as an option to a script that has it; under torchrun only a shell can."""
    command, _ = run(cli, LOCAL_RANK)
    assert command == ["ddprun", "train.py", "--", "--local_rank=${local_rank}"]
    assert run(cli, LOCAL_RANK, "--launcher", "torchrun")[0][:2] == ["torchrun", "--no-python"]


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("job.yaml", "kind: DDPJob\n", "names the launcher in its command"),
        ("s.py", "from torch import multiprocessing as m\nm.spawn(id)\n", "starts the processes of its node by itself"),
    ],
)  # fmt: skip
def test_a_launcher_for_a_command_that_has_one_is_refused(cli: Cli, name: str, text: str, why: str) -> None:
    (cli.folder / name).write_text(text)
    done = cli.here("run", "--launcher", "ddprun", name)
    assert (done.returncode, done.stderr) == (2, f"--launcher ddprun: {name} {why}; leave the option out\n")


def test_ddprun_starts_ranks_only_with_the_python_that_torchrun_would_use(tmp_path: Path) -> None:
    """ddprun must use the Python that torchrun would use: another environment may have another torch, or none."""
    for name in ("torchrun", "python"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    environ = {"PATH": str(tmp_path)}
    if launchers.missing_here(environ):  # True if there is no torch next to this interpreter
        assert f"{tmp_path}, where PyTorch is installed, has no ddprun" in launchers.missing_here(environ)
        (tmp_path / "ddprun").symlink_to(tmp_path / "torchrun")
    assert launchers.missing_here(environ) == ""


@pytest.mark.parametrize(
    ("options", "command"),
    [
        ([], "ddprun"),
        (["--image", "registry.example:5000/a/ddpjob-trainer:0.1.0"], "ddprun"),
        (["--image", "ddpjob-trainer@sha256:0"], "ddprun"),
        (["--image", "pytorch/pytorch"], "torchrun"),
        (["--set", "spec.template.spec.containers[0].image=mine"], "torchrun"),
        (["--image", "mine", "--launcher", "ddprun"], "ddprun"),
        (["--launcher", "torchrun"], "torchrun"),
    ],
)
def test_submit_writes_ddprun_only_for_an_image_that_is_known_to_have_it(cli, options, command):
    """A pod whose image lacks ddprun never starts, so submit must not assume ddprun in an unknown image."""
    (cli.folder / "train.py").write_text(INIT)
    done = cli.here("submit", "--dry-run", *options, "train.py")
    job: Any = next(body for body in yaml.safe_load_all(done.stdout) if body["kind"] == "DDPJob")
    assert job["spec"]["template"]["spec"]["containers"][0]["command"] == [command, "train.py"]
    says_how = "with the package ddpjob in it, add --launcher ddprun" in done.stderr
    assert says_how == (command == "torchrun" and "--launcher" not in options)


def test_init_writes_torchrun_for_an_unknown_image_and_tells_what_ddprun_needs(cli: Cli) -> None:
    (cli.folder / "train.py").write_text(INIT)
    plain, asked = (cli.here("init", *options, "train.py").stdout for options in ([], ["--launcher", "ddprun"]))
    assert "command: [torchrun, train.py]" in plain
    assert plain.count("--launcher ddprun") == 1
    assert "command: [ddprun, train.py]" in asked
    assert "--launcher" not in asked
