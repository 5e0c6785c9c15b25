"""Measure how long `ddpjob dev` takes from a save of the script to the first new step of all ranks.

    python bench/dev_saves.py                 # 20 saves of a script with DDP over gloo, on two nodes with a rank each
    python bench/dev_saves.py --cluster       # the same in the cluster of KUBECONFIG

--after is the number of seconds between two saves. ddprun forks the next ranks 5 s after the present ones have started,
so with `--after 1` each restart also waits for the forks.
"""

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import common

TRAIN = """
import time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(64, 8))
for step in range(1_000_000):
    model(torch.randn(32, 64)).square().mean().backward()
    if step == 0:
        print("first step of version 0.")
    time.sleep(0.05)
"""
SECONDS_MAX = 120.0


def measured(given: argparse.Namespace) -> list[float]:
    """Return the seconds from each save until every rank has printed the new version at its first step."""
    argv = [common.BIN / "ddpjob", "dev", *["--cluster"] * given.cluster, "--nodes", str(given.nodes), "train.py"]
    took = []
    with common.script(TRAIN) as folder, tempfile.NamedTemporaryFile() as file:
        session = subprocess.Popen(argv, cwd=folder, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        try:
            for number in range(given.saves + 1):
                began, wanted = time.monotonic(), f"version {number}."
                if number:
                    (folder / "train.py").write_text(TRAIN.replace("version 0.", wanted))
                while (text := Path(file.name).read_text()).count(wanted) < given.nodes:
                    if session.poll() is not None or time.monotonic() > began + SECONDS_MAX:
                        sys.exit(f"{wanted} did not come:\n{text}")
                    time.sleep(0.002)
                took.append(time.monotonic() - began)
                time.sleep(given.after)
            return took[1:]  # without the start
        finally:
            session.send_signal(signal.SIGINT)
            session.wait(SECONDS_MAX)


if __name__ == "__main__":
    options = common.options(__doc__, saves=20, nodes=2, after=6.5, cluster=False)
    print(f"{common.machine()}: {common.shown(measured(options))}")
