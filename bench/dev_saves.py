"""Measure how long `ddpjob dev` takes from a save of the script to the first new step of all ranks.

    python bench/dev_saves.py                 # 20 saves of a script with DDP over gloo, on two nodes with a rank each
    python bench/dev_saves.py --cluster       # the same in the cluster of KUBECONFIG

--after is the number of seconds between two saves. ddprun forks the next ranks 5 s after the present ones have started,
so with `--after 1` each restart also waits for the forks.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import machine

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saves", type=int, default=20)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--after", type=float, default=6.5)
    parser.add_argument("--cluster", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        took = measured(Path(folder), given)
    print(f"{machine.line()}: median {statistics.median(took):.2f} s, slowest {max(took):.2f} s, of {len(took)}")


def measured(folder: Path, given: argparse.Namespace) -> list[float]:
    """Return the seconds from each save until every rank has printed the new version at its first step."""
    script, printed = folder / "code/train.py", folder / "printed"
    argv = [sys.executable, "-m", "ddpjob_cli", "dev", *["--cluster"] * given.cluster, "--nodes", str(given.nodes)]
    script.parent.mkdir()
    took = []
    with printed.open("w") as file:
        script.write_text(TRAIN)
        session = subprocess.Popen([*argv, script], cwd=folder, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    try:
        for number in range(given.saves + 1):
            began, wanted = time.monotonic(), f"version {number}."
            if number:
                script.write_text(TRAIN.replace("version 0.", wanted))
            while (text := printed.read_text()).count(wanted) < given.nodes:
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
    main()
