"""Modules that a command imports, each in a new Python."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["-h"]], ids=" ".join)
def test_help_imports_only_click_and_the_command_line(arguments: list[str]) -> None:
    """Help must not import YAML, msgspec and the job's types: each help page and each Tab would take twice as long."""
    code = (
        "import sys; before = set(sys.modules); from ddpjob_cli.commands.main import main\n"
        "try: main()\n"
        "finally: print(*set(sys.modules) - before, file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    imported = {name for name in done.stderr.split() if name.partition(".")[0] not in sys.stdlib_module_names}
    ours = {name for name in imported if name.startswith("ddpjob")}
    assert {name.partition(".")[0] for name in imported - ours} == {"click"}
    assert {name for name in ours if not name.startswith("ddpjob_cli.commands")} == {"ddpjob_cli"}
    slow = {"asyncio", "http.client", "ipaddress", "json", "pathlib", "ssl", "subprocess", "urllib.parse"}
    assert not slow & set(done.stderr.split()), "take milliseconds each"


def test_commands_that_need_no_cluster_do_not_import_its_client() -> None:
    """`ddpjob --help` and the local run must start without a delay."""
    slow = "{'kubernetes', 'urllib3', 'pathspec', 'torch', 'yaml', 'rich'}"
    look = f"import sys; print({slow} & set(sys.modules))"
    text = f"import ddpjob_cli.commands.main, ddpjob_cli.client.errors; {look}"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_library_imports_the_command_line_only_on_request() -> None:
    """The library must import the command line only on request: a trainer image may lack it."""
    code = (
        "import sys, ddpjob; assert not {'ddpjob_cli', 'yaml', 'torch'} & set(sys.modules)\n"
        "ddpjob.submit; assert not {'torch', 'cloudpickle', 'kopf'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_operator_without_its_packages_names_what_to_install() -> None:
    """Without its packages the operator must name what to install; "No module named 'kopf'" alone does not."""
    only_the_base = (
        "import importlib.util, sys; find = importlib.util.find_spec;"
        "importlib.util.find_spec = lambda name: None if name == 'kopf' else find(name);"
        "from ddpjob_operator.kube.program import start; sys.exit(start([]))"
    )
    command = [sys.executable, "-c", only_the_base]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (
        2, "ddpjob-operator: kopf is not installed: pip install 'ddpjob[operator]'\n"
    )  # fmt: skip


def test_modules_of_the_folder_are_not_imported(tmp_path: Path) -> None:
    """Modules of the folder must not be imported: a stranger's yaml.py would replace the library that reads jobs."""
    for name in ("yaml", "click", "json", "ast", "msgspec", "rich", "sitecustomize", "ddpjob"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('it was imported')\n")
    wrong = "import torch.distributed as d, os\nd.init_process_group(rank=int(os.environ['LOCAL_RANK']))\n"
    (tmp_path / "train.py").write_text(wrong)
    program = "import sys; sys.path[0] = sys.path[0] or '/nowhere'; from ddpjob_cli.commands.main import main; main()"
    command = [sys.executable, "-c", program, "check", "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert "was imported" not in done.stdout + done.stderr
    assert "rank-is-local-rank" in done.stdout
