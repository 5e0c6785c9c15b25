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
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(1_000_000):
    optimizer.zero_grad()
    model(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
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
        took = measured(Path(folder), given.saves, given.nodes, given.after, ["--cluster"] * given.cluster)
    print(f"{machine.line()}: median {statistics.median(took):.2f} s, slowest {max(took):.2f} s, of {len(took)}")


def measured(folder: Path, saves: int, nodes: int, after: float, words: list[str]) -> list[float]:
    """Return the seconds from each save until every rank has printed the new version at its first step."""
    script, printed = folder / "code/train.py", folder / "printed"
    argv = [sys.executable, "-m", "ddpjob_cli", "dev", *words, "--nodes", str(nodes), "code/train.py"]
    script.parent.mkdir()
    script.write_text(TRAIN)
    with printed.open("w") as file:
        session = subprocess.Popen(argv, cwd=folder, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    try:
        wait_for(session, printed, "version 0.", nodes)
        took = []
        for number in range(1, saves + 1):
            time.sleep(after)
            began = time.monotonic()
            script.write_text(TRAIN.replace("version 0.", f"version {number}."))
            wait_for(session, printed, f"version {number}.", nodes)
            took.append(time.monotonic() - began)
        return took
    finally:
        session.send_signal(signal.SIGINT)
        session.wait(SECONDS_MAX)


def wait_for(session: subprocess.Popen[bytes], printed: Path, what: str, times: int) -> None:
    end = time.monotonic() + SECONDS_MAX
    while printed.read_text().count(what) < times:
        if session.poll() is not None or time.monotonic() > end:
            sys.exit(f"{what} did not come:\n{printed.read_text()}")
        time.sleep(0.002)


if __name__ == "__main__":
    main()
