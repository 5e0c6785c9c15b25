"""Each script in trainer/examples/notes asserts its own behaviour, and the test runs the script on every rank."""

import contextlib
import os
import re
import runpy
import sys
import tempfile
from pathlib import Path

NOTES = Path(__file__).parents[2] / "trainer/examples/notes"
WORLD_SIZE = 3


def test_every_building_block_keeps_its_promise_on_three_ranks(run_ranks, tmp_path, free_port):
    """Each building block must do what it shows, on three ranks with torchrun's variables."""

    def body(rank: int) -> None:
        where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD_SIZE, "LOCAL_WORLD_SIZE": WORLD_SIZE}
        os.environ |= {name: str(value) for name, value in where.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port), "CUDA_VISIBLE_DEVICES": ""}
        tempfile.tempdir = str(tmp_path)
        sys.path.insert(0, str(NOTES))  # Python adds the folder of a script, too
        with open(tmp_path / f"out-{rank}", "w") as out, contextlib.redirect_stdout(out):
            runpy.run_path(str(NOTES / "blocks_all.py"), run_name="__main__")

    run_ranks(body, WORLD_SIZE)
    printed = "".join((tmp_path / f"out-{rank}").read_text() for rank in range(WORLD_SIZE))
    blocks = sorted(path.stem for path in NOTES.glob("blocks_*.py") if path.stem != "blocks_all")
    assert sorted(re.findall(r"BLOCK (\w+) holds", printed)) == blocks, "none is forgotten"
    assert "Rank 2 failed to pass monitoredBarrier in 1000 ms" in printed, "the missing rank is named"
    losses = {m[1]: float(m[2]) for m in re.finditer(r"by_global_batch on (\d): loss (\S+),", printed)}
    assert set(losses) == {"1", "2", "3"}
    assert max(losses.values()) - min(losses.values()) < 2e-5, "another number of processes, the same result"
    assert not list(tmp_path.glob("**/*.pt")), "what a block saves it removes"
