"""A training whose ranks are killed while it runs, under agents that are forked from this process (warm.py)."""

import json
import subprocess
from typing import Any

from agents import Launcher, finish


def trained(
    launcher: Launcher, text: str, kill: dict[str, Any], *, nodes: int = 1, nproc: int = 2, **env: str
) -> list[subprocess.CompletedProcess[str]]:
    """Run the training to its end, with these kills; return each agent's output."""
    script = launcher.script(text)
    env = {"OMP_NUM_THREADS": "1", "KILL": json.dumps(kill)} | env
    agents = (
        launcher.nodes(nodes, "--nproc", nproc, "--max-restarts", 99, script, is_warm=True, **env)
        if nodes > 1
        else [launcher.warm("--nproc", nproc, "--max-restarts", 99, script, **env)]
    )
    done = [finish(agent, 150) for agent in agents]
    assert [d.returncode for d in done] == [0] * nodes, "\n".join(d.stderr for d in done)
    return done


def words(done: list[subprocess.CompletedProcess[str]], first: str) -> list[list[str]]:
    """Return the ranks' lines with this prefix, split into words without the prefix."""
    return [line.split()[1:] for d in done for line in d.stdout.splitlines() if line.startswith(first)]


def began(done: list[subprocess.CompletedProcess[str]]) -> list[int]:
    """Return the steps at which the generations began, as the ranks printed them."""
    return [int(step) for step, *_ in words(done, "BEGIN")]
