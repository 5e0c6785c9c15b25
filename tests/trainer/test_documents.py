"""The Python in README and docs/ runs as it is printed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import documents
import pytest


@pytest.mark.parametrize("block", [b for b in documents.blocks("python") if not b.not_run], ids=str)
def test_a_script_of_a_page_runs_as_it_is_printed_and_a_second_time(block: documents.Block, tmp_path: Path) -> None:
    """None of the snippets ran, so the first try of the library was a NameError."""
    (tmp_path / "train.py").write_text(block.text)
    alone = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    alone["OMP_NUM_THREADS"] = "1"  # as a job sets it; more threads than idle cores make small tensors ten times slower
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "train.py"],
            cwd=tmp_path,
            env=alone,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
