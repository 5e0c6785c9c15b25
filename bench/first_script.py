"""Measure commands, seconds and lines on the screen from an installed clone to the output of a user's own script.

    python bench/first_script.py [--ddpjob OTHER_CLONE/.venv/bin/ddpjob]

The clone and the install are not repeated: `make demo` prints their time. A failed try counts as a command, so each
list of tries has all commands that a user types until one works.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TRAIN = """
import argparse, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(parser.parse_args().epochs):
    model(torch.ones(4, 8)).pow(2).sum().backward()
    optimizer.step()
    if dist.get_rank() == 0: print("epoch", epoch, "of", dist.get_world_size(), "ranks", flush=True)
dist.destroy_process_group()
"""
DIGITS = """
import torch, torch.distributed as dist
from sklearn.datasets import load_digits
dist.init_process_group("gloo")
x, y = (torch.as_tensor(a) for a in load_digits(return_X_y=True))
---
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 10))
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
---
for epoch in range(3):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(net(x.float()), y)
    loss.backward()
    optimizer.step()
    print("epoch", epoch, loss.item(), flush=True)
dist.destroy_process_group()
"""
TRIES = {
    "torchrun user, train.py": ["run train.py --epochs 2", "run train.py -- --epochs 2"],
    "notebook user, train.ipynb": ["run train.ipynb"],
    "one machine, 4 processes": [
        "run --nproc-per-node 4 train.py --epochs 2",
        "run --nodes 1 --nproc-per-node 4 train.py -- --epochs 2",
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ddpjob", default=str(Path(sys.executable).parent / "ddpjob"))
    program = parser.parse_args().ddpjob
    print("who,commands,seconds until the script prints,lines until then,lines in all,conditions")
    with tempfile.TemporaryDirectory(prefix="ddpjob-bench-") as folder:
        (Path(folder) / "train.py").write_text(TRAIN)
        cells = [{"cell_type": "code", "source": text, "metadata": {}, "outputs": []} for text in DIGITS.split("---\n")]
        (Path(folder) / "train.ipynb").write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4}))
        for who, tries in TRIES.items():
            load = os.getloadavg()[0]
            print(f"{who},{','.join(map(str, measured(program, tries, folder)))},load {load:.0f}", flush=True)


def measured(program: str, tries: list[str], folder: str) -> tuple[int, float, int, int]:
    """Return the number of commands, the seconds and lines until the script prints, and the number of all lines."""
    began, lines, first = time.monotonic(), 0, (0.0, 0)
    for number, words in enumerate(tries, 1):
        command = [program, *words.split()]
        with subprocess.Popen(
            command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                lines += 1
                if "epoch 0" in line and not first[1]:
                    first = round(time.monotonic() - began, 1), lines
        if process.returncode == 0:
            return number, *first, lines
    raise SystemExit(f"{tries}: none has worked")


if __name__ == "__main__":
    main()
