"""A whole local run with the real torchrun. Each process here imports torch: keep these tests few."""

import json
import os
from pathlib import Path

from shell import Cli, status_of

ROOT = Path(__file__).parents[2]


def test_the_example_trains_on_two_nodes_under_torchrun_and_reports(cli: Cli) -> None:
    os.symlink(ROOT / "trainer", cli.folder / "trainer")
    words = ["run", ROOT / "examples/digits.yaml", "--status", "status.json"]
    command = "spec.template.spec.containers[0].command"
    done = cli.run(*words, "--set", f"{command}[0]=torchrun", "--set", f"{command}[3]='1'", code=0)
    last = json.loads(next(line for line in done.stdout.splitlines() if '"done"' in line).removeprefix("[0:0] "))
    assert (last["world_size"], last["steps"]) == (2, 45)
    status = status_of(cli.folder / "status.json")
    assert status["state"] == "Succeeded"
    assert (status["progress"]["step"], status["progress"]["worldSize"]) == (45, 2)
    assert last["params_sha256"].startswith(status["progress"]["metrics"]["params"])


def test_under_torchrun_the_guilty_rank_and_its_exit_code_are_named_and_not_the_launcher(cli: Cli) -> None:
    """The failed rank and its exit code must be named, because torchrun itself always exits with 1."""
    job = cli.file(
        "import os, sys, time\nif os.environ['RANK'] == '3': sys.exit(7)\ntime.sleep(1000)",
        container={"command": ["torchrun", "train.py"]},
        nprocPerNode=2,
        backoffLimit=0,  # each further attempt would import torch twice
    )
    done = cli.run("run", job, "--status", "status.json", code=1)
    failure = status_of(cli.folder / "status.json")["lastFailure"]
    assert (failure["rank"], failure["nodeRank"], failure["exitCode"]) == (3, 1, 7)
    assert "rank 3 (node 1)" in done.stderr
    assert "ended with exit code 7" in done.stderr
