"""The Python code in README and docs/ runs as printed."""

import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import documents
import pytest

Ranks = Callable[[Callable[[int], Any], int], list[Any]]


@pytest.mark.parametrize("block", [b for b in documents.blocks("python") if not b.not_run], ids=str)
def test_a_script_of_a_page_runs_as_printed_and_a_second_time(block, tmp_path, monkeypatch, run_ranks):
    (tmp_path / "train.py").write_text(block.text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    for _ in range(2):
        run_ranks(lambda _: runpy.run_path("train.py", run_name="__main__") and None, 1)


def test_the_first_script_of_the_library_page_runs_in_a_new_interpreter(tmp_path: Path) -> None:
    """The first script of library.md must run in a new interpreter, where a missing import is noticed."""
    block = next(b for b in documents.blocks("python") if b.page.name == "library.md")
    (tmp_path / "train.py").write_text(block.text)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # more threads than idle cores would be slow
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_code_block_that_is_not_run_gives_the_reason() -> None:
    """Each code block that no test runs must give a reason, or blocks would silently stay untested."""
    marked = {b.page.name: b.not_run for b in documents.blocks("python") if b.not_run}
    known = [
        "debugging.md",
        "frameworks.md",
        "gang-adapters.md",
        "memory.md",
        "python.md",
        "tracking.md",
        "tutorial.md",
    ]
    assert sorted(marked) == known, "a new mark needs a reason"
    assert all(len(reason.split()) > 3 for reason in marked.values())
