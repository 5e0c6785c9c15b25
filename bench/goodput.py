"""Measure which share of the time training makes new steps while a rank is killed repeatedly (ddprun, torchrun).

    python bench/goodput.py                                     # 120 s of examples/digits.py, a kill every 10 s
    python bench/goodput.py --seconds 1000 --every 60
    python bench/goodput.py --launchers ddprun --script 'train.py --epochs 9'   # another training that reports steps

A local run (`ddpjob run --fail every=…`), by default of two nodes with a rank each. A kill costs the time from the last
new step before the kill to the first new step after it, minus the median time of a step: detection, restart, imports,
load and repeated steps. Goodput is the rest of the time from the first step to the last, as a share.
"""

import argparse
import itertools
import shlex
import signal
import statistics
import subprocess
import time
from pathlib import Path

from common import BIN, ROOT, machine, options, script, shown

DIGITS = f"'{ROOT}/trainer/examples/digits.py' --epochs 10000 --snapshot snapshots"
# Wrapper script: runs the training script and records when rank 0 reports a step.
NOTES_STEPS = """
import os, runpy, sys, time
import ddpjob
report = ddpjob.progress
if os.environ["RANK"] == "0":
    steps = open("steps", "a", buffering=1)
    def progress(step, *words, **given):
        steps.write(f"{step} {time.monotonic()} {os.getpid()}\\n")
        report(step, *words, **given)
    ddpjob.progress = progress
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def steps_of(folder: Path) -> list[tuple[int, float, int]]:
    """Return (step, time, pid) of each step that rank 0 has reported, in all generations."""
    path = folder / "steps"
    words = (line.split() for line in path.read_text().splitlines()) if path.exists() else ()
    return [(int(w[0]), float(w[1]), int(w[2])) for w in words if len(w) == 3]


def judged(steps: list[tuple[int, float, int]]) -> str:
    """Return the goodput, the number of repeated steps, and the median cost of a kill in seconds."""
    new: list[tuple[int, float, int]] = []
    for one in steps:
        if not new or one[0] > new[-1][0]:
            new.append(one)
    pairs = list(itertools.pairwise(new))
    usual = statistics.median(later[1] - earlier[1] for earlier, later in pairs)
    gaps = [later[1] - earlier[1] for earlier, later in pairs if later[2] != earlier[2]]
    took, cost = new[-1][1] - new[0][1], sum(gaps) - usual * len(gaps)
    killed = f"a kill to the next new step {shown(gaps)}" if gaps else "no step after a kill"
    return (
        f"{len(new)} steps in {took:.0f} s, median {usual * 1e3:.1f} ms; {len(gaps)} kills, {len(steps) - len(new)} "
        f"steps repeated; {killed}; goodput {1 - cost / took:.2%}"
    )


def run(launcher: str, given: argparse.Namespace, folder: Path) -> str:
    """Train with this launcher for the given time, and print the goodput."""
    words = f"run --launcher {launcher} --nodes {given.nodes} --cpu --plain --no-check --max-restarts 1000"
    words += f" --fail every={given.every}s train.py -- {given.script}"
    with (folder / "log").open("w") as log:
        job = subprocess.Popen([BIN / "ddpjob", *shlex.split(words)], cwd=folder, stdout=log, stderr=subprocess.STDOUT)
        try:
            while job.poll() is None and not steps_of(folder):
                time.sleep(0.1)
            end = time.monotonic() + given.seconds
            while job.poll() is None and time.monotonic() < end:
                time.sleep(0.1)
        finally:
            job.send_signal(signal.SIGTERM)
            job.wait()
    return judged(found) if len(found := steps_of(folder)) > 2 else (folder / "log").read_text()[-3000:]


def main() -> None:
    given = options(__doc__, seconds=120.0, every=10.0, launchers=["ddprun", "torchrun"], nodes=2, script=DIGITS)
    for launcher in given.launchers:
        print(machine())
        with script(NOTES_STEPS) as folder:
            print(f"{launcher}: {run(launcher, given, folder)}", flush=True)


if __name__ == "__main__":
    main()
