"""Measure what a user sees after a failure: `ddpjob run` compared with torchrun, four ranks on one node.

    python bench/failures.py [--names NAME ...]        # all take about ten minutes on two idle CPUs

Prints a CSV: number of lines on the screen, seconds until the prompt is back (hangs end after --patience), and position
from the end of the line with cause and rank; empty if no single line has both, as in torchrun's table.
"""

import csv
import os
import re
import signal
import socket
import subprocess
import sys
import time

from common import BIN, ONE_THREAD, options, script

SCRIPT = """
import os, sys, signal, time
{imports}
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
{before}
dist.init_process_group("gloo"{init})
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(64, 8))
optimizer = torch.optim.AdamW(model.parameters())
for step in {steps}:
    if step == 5:
        {fault}
        pass
    optimizer.zero_grad()
    model(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""
# By name of the failure: parts of the script, and a pattern for the line that names the cause.
CASES: dict[str, tuple[dict[str, str], str]] = {
    "ValueError in one rank": ({"fault": "if rank == 1: raise ValueError('odd batch')"}, "rank 1.*odd batch"),
    "the same in all ranks": ({"fault": "raise ValueError('odd batch')"}, "odd batch"),
    "before init, all ranks": ({"before": "raise ValueError('odd batch')"}, "odd batch"),
    "missing data file": ({"before": "open('data.bin')"}, "data.bin"),
    "wrong shape": ({"fault": "model(torch.randn(32, 63))"}, "shapes cannot be multiplied"),
    "CUDA out of memory in one rank": (
        {"fault": "if rank == 1: raise torch.cuda.OutOfMemoryError('CUDA out of memory.')"}, "rank 1.*out of memory",
    ),
    "4 PB on the CPU": ({"fault": "torch.empty(1 << 50)"}, "rank.*(alloc|memory)"),
    "SIGKILL of a rank": ({"fault": "if rank == 1: os.kill(os.getpid(), 9)"}, "rank 1.*SIGKILL"),
    "SIGSEGV": ({"fault": "if rank == 1: os.kill(os.getpid(), 11)"}, "rank 1.*(SIGSEGV|Segmentation)"),
    "sys.exit(3)": ({"fault": "if rank == 1: sys.exit(3)"}, "rank 1.*(exit code 3|exit status 3|exited with 3)"),
    "one rank leaves with 0": ({"fault": "if rank == 1: sys.exit(0)"}, "rank 1.*(exit code 0|ended|left)"),
    "disk full": (
        {"fault": "if rank == 1: torch.save(torch.zeros(1 << 20), 'full/model.pt')"}, "rank 1.*(No space|full|space)",
    ),
    "missing module": ({"imports": "import not_there"}, "not_there"),
    "syntax error": ({"imports": "def ("}, "SyntaxError|not valid Python"),
    "file not there": ({}, r"missing\.py"),
    "fixed port that is busy": (
        {"before": "os.environ['MASTER_PORT'] = '{port}'", "init": ", init_method='env://'"}, "{port}",
    ),
    "world_size=8 with 4 ranks": ({"init": ", world_size=8, rank=int(os.environ['RANK'])"}, "world_size"),
    "hang of rank 1": ({"fault": "if rank == 1: time.sleep(3600)"}, "rank 1|stacks"),
    "hang of rank 1 with progress()": (
        {
            "imports": "import ddpjob", "fault": "if rank == 1: time.sleep(3600)",
            "steps": "(ddpjob.progress(step=s) or s for s in range(9))",
        },
        "rank 1",
    ),
    "uneven batches": ({"fault": "if rank == 1: break"}, "rank 1"),
}  # fmt: skip


def main() -> None:
    given = options(__doc__, names=[*CASES], patience=100.0)
    out = csv.writer(sys.stdout)
    out.writerow(["failure", "ddpjob lines", "s", "line that names it", "torchrun lines", "s", "line that names it"])
    for name in given.names:
        row = [measured(name, program, given.patience) for program in ("ddpjob", "torchrun")]
        out.writerow([name, *row[0], *row[1]])
        sys.stdout.flush()


def measured(name: str, program: str, patience: float) -> tuple[int, str, str]:
    """Return the number of lines, the seconds, and the position from the end of the line that names the cause."""
    parts, words = CASES[name]
    defaults = {"imports": "", "before": "", "init": "", "fault": "", "steps": "range(20)"}
    busy = socket.create_server(("127.0.0.1", 0))
    port = str(busy.getsockname()[1])
    with busy, script(SCRIPT.format(**(defaults | parts)).replace("{port}", port)) as folder:
        file = "missing.py" if name == "file not there" else "train.py"
        (full := folder / "full").mkdir()
        is_mounted = name == "disk full" and not subprocess.call(["mount", "-t", "tmpfs", "-o", "size=1m", "x", full])
        own = ["run", "--nproc-per-node", "4", "--max-restarts", "0", file]
        argv = [BIN / program, *(own if program == "ddpjob" else ["--standalone", "--nproc-per-node", "4", file])]
        began = time.monotonic()
        process = subprocess.Popen(
            argv, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=os.environ | ONE_THREAD, start_new_session=True,
        )  # fmt: skip
        try:
            printed, took = process.communicate(timeout=patience)[0], f"{time.monotonic() - began:.1f}"
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            printed, took = process.communicate()[0], f"hangs (> {patience:.0f})"
        finally:
            if is_mounted:
                subprocess.check_call(["umount", full])
    lines = printed.rstrip("\n").split("\n")
    pattern = re.compile(words.replace("{port}", port), re.IGNORECASE)
    named = next((str(n) for n, line in enumerate(reversed(lines), 1) if pattern.search(line)), "")
    return len(lines), took, named


if __name__ == "__main__":
    main()
