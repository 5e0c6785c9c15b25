"""The local commands of README and docs/, in the order of each page, as a reader types them."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import documents
import pytest
from documents import ROOT

pytestmark = [
    pytest.mark.long,  # up to four trainings of two nodes per page; `make test` only parses the commands
    pytest.mark.timeout(900),
]
HERE = tuple(f"ddpjob {name} " for name in ("run", "init", "check", "list", "logs", "report"))
# Commands that each page needs before its first command.
BEFORE = {
    "README.md": [],
    "tutorial.md": [],
    "local.md": [
        # Under ddprun the ranks would start again in their pods, and there would be no attempt before the last.
        "ddpjob run examples/digits.yaml --fail rank=1,step=20,exit=3 "
        "--set 'spec.template.spec.containers[0].command[0]=torchrun' -- --epochs 2",
        "ddpjob init --nodes 2 train.py | sed 's/name: train$/name: mine/' > mine.yaml",
    ],
    "failures.md": [],
    "library.md": ["ddpjob init --nodes 2 train.py > train.yaml"],
}


# The tutorial inserts the two lines of MISTAKE after this line for its `ddpjob check`.
AFTER = "            step += 1\n"
MISTAKE = "            if world.is_main:\n                torch.distributed.all_reduce(loss)\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the tutorial's script and the examples, isolated from this machine."""
    page = next(b for b in documents.blocks("python") if b.page.name == "tutorial.md" and not b.not_run)
    (tmp_path / "train.py").write_text(page.text + "\n")
    for name in ("examples", "trainer"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


@pytest.mark.parametrize("page", BEFORE)
def test_the_commands_of_a_page_work_as_printed(folder: Path, page: str) -> None:
    for words in BEFORE[page]:
        typed(folder, words)
    for command, printed in commands(page):
        if "--fail" in command:
            # If the old folder stayed, the run would resume at its end and have no step left to fail at.
            shutil.rmtree(folder / "snapshots", ignore_errors=True)
        is_wrong = command.startswith("ddpjob check")
        with changed(folder / "train.py", MISTAKE if is_wrong else ""):
            shown = typed(folder, command, code=1 if is_wrong else 0)
        for line in printed:
            assert re.search(shape(line), shown), f"{command} does not print: {line}\n{shown}"


@contextlib.contextmanager
def changed(script: Path, lines: str) -> Iterator[None]:
    """Insert lines into the script, and remove them at the end of the context."""
    text = script.read_text()
    assert AFTER in text
    script.write_text(text.replace(AFTER, AFTER + lines))
    yield
    script.write_text(text)


def commands(page: str) -> list[tuple[str, list[str]]]:
    """Yield each local command of a page, with the lines that are printed below it."""
    found: list[tuple[str, list[str]]] = []
    for block in documents.blocks("console"):
        if block.page.name != page or block.not_run:
            continue
        for line in block.text.replace("\\\n", " ").splitlines():
            if line.startswith("$ "):
                found.append((line[2:].partition("  #")[0].strip(), []))
            elif line.startswith(("✔", "✖", "[", "JOB ", "train ")) or "error[" in line:
                found[-1][1].append(line)
    return [
        (command, printed)
        for command, printed in found
        if f"{command} ".startswith(HERE) and "--cluster" not in command
    ]


def shape(line: str) -> str:
    """Return a regular expression for a printed line in which numbers, names of runs and … may differ."""
    words = re.split(r"\s+", line.partition("…")[0].strip())
    free = r"\d|[0-9a-f]{8}-|^~/|^(Succeeded|AGE)$"
    return r"\s+".join(r"\S+" if re.search(free, word) else re.escape(word) for word in words if word)


def typed(folder: Path, command: str, code: int = 0) -> str:
    """Run a command, and return its output."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {"PATH": path, "HOME": str(folder), "XDG_STATE_HOME": str(folder / "state"), "KUBECONFIG": ""}
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=os.environ | own,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == code, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout + done.stderr
