"""docs/frameworks.md: each framework ends in order when it is told to stop, and goes on from that step.

They need packages that `make test` does not install, because it would take longer and more room than all its tests:
`make test-frameworks` does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
WHY = "not installed: `make test-frameworks` installs it"
SIGTERM_TO_RANK_1 = json.dumps([{"rank": 1, "step": 60, "signal": "TERM"}])


def start(script: str, snapshots: Path, **environ: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    variables = {"SNAPSHOTS": str(snapshots), "NNODES": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, str(ROOT / "trainer/examples/frameworks" / script)],
        env=os.environ | variables | environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def output(process: subprocess.Popen[str]) -> str:
    try:
        return process.communicate(timeout=150)[0]
    finally:
        process.kill()


@pytest.mark.parametrize(
    ("package", "script"), [("accelerate", "accelerate_loop.py"), ("lightning", "lightning_fit.py")]
)
def test_a_rank_that_gets_sigterm_stops_all_after_one_step_and_the_next_start_goes_on(
    package: str, script: str, tmp_path: Path
) -> None:
    """A drained node would cost all steps since the last periodic checkpoint."""
    pytest.importorskip(package, reason=WHY)
    first = start(script, tmp_path, DDPJOB_FAULTS=SIGTERM_TO_RANK_1)
    said = output(first)
    assert first.returncode != 0, said
    assert "exitcode  : 75" in said, said
    assert "done: " not in said
    again = start(script, tmp_path)
    said = output(again)
    assert (again.returncode, "done: 200 steps" in said) == (0, True), said


def test_hugging_faces_trainer_saves_at_one_step_of_all_ranks_and_goes_on_there(tmp_path: Path) -> None:
    """With the signal to one rank alone, the others would wait in a collective until its time-out."""
    pytest.importorskip("transformers", reason=WHY)
    first = start("hf_trainer.py", tmp_path)
    deadline = time.monotonic() + 120
    while not (tmp_path / "checkpoint-50").exists():
        assert time.monotonic() < deadline
        assert first.poll() is None, output(first)
        time.sleep(0.02)
    rank = next(c for c in psutil.Process(first.pid).children() if c.environ().get("RANK") == "1")
    rank.terminate()
    said = output(first)
    assert "exitcode  : 75" in said, said
    (last,) = [max(int(folder.name.split("-")[1]) for folder in tmp_path.glob("checkpoint-*"))]
    assert 50 < last < 200
    again = start("hf_trainer.py", tmp_path)
    said = output(again)
    assert f"resumes from {tmp_path}/checkpoint-{last}" in said
    assert (again.returncode, "done: 200 steps" in said) == (0, True), said
