"""The building blocks hold what they claim: each asserts it itself, on every rank."""

import os
import re
import subprocess
import sys
from pathlib import Path

NOTES = Path(__file__).parents[2] / "trainer/examples/notes"
SECONDS_MAX = 150


def test_every_building_block_holds_its_claim_on_three_ranks(tmp_path: Path) -> None:
    """One group for all: a process that imports torch takes seconds to start."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", "blocks_all.py"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("DDPJOB_", "PET_"))}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(tmp_path)}
    done = subprocess.run(words, cwd=NOTES, env=environment, capture_output=True, text=True, timeout=SECONDS_MAX)
    assert done.returncode == 0, done.stderr
    blocks = sorted(path.stem for path in NOTES.glob("blocks_*.py") if path.stem != "blocks_all")
    # Not by lines: under torchrun's -u a text and the end of its line are two writes, and another rank may be between.
    assert sorted(re.findall(r"BLOCK (\w+) holds", done.stdout)) == blocks, "none is forgotten"
    assert "Rank 2 failed to pass monitoredBarrier in 1000 ms" in done.stdout, "the missing rank is named"
    losses = {m[1]: float(m[2]) for m in re.finditer(r"by_global_batch on (\d): loss (\S+),", done.stdout)}
    assert set(losses) == {"1", "2", "3"}
    assert max(losses.values()) - min(losses.values()) < 2e-5, "another number of processes, the same result"
    assert not list(tmp_path.glob("**/*.pt")), "what a block saves it removes"
