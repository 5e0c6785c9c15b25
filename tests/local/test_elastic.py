"""Elastic jobs as local processes: the same YAML, torchrun's own variables, and a lost node."""

import json
import time
from pathlib import Path

import pytest
from shell import Cli, status_of

pytestmark = pytest.mark.timeout(300)

# Script that records the variables that a script of PyTorch's elastic examples prints; torch is not imported.
PRINTS = """
import json, os, time
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
         "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS",
         "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"]
if os.environ["DDPJOB_ATTEMPT"] == "1":
    time.sleep(1000)
said = {name: os.environ[name] for name in names}
open(f"said-{said['RANK']}.json", "w").write(json.dumps(said))
"""


@pytest.fixture
def job(cli: Cli) -> Path:
    """Return a job of fixed size; the tests pass the range on the command line."""
    return cli.file(PRINTS, container={"command": ["torchrun", "--no-python", "python", "train.py"]})


def test_a_lost_node_restarts_the_group_with_all_variables_of_torchrun(cli: Cli, job: Path) -> None:
    """After a lost node all variables of torchrun must be set, and the second attempt have its own rendezvous."""
    cli.run("run", job, "--nodes", "1:2", "--fail", "node=1,at=4s", "--status", "status.json", "--no-check", code=0)
    status = status_of(cli.folder / "status.json")
    assert (status["state"], status["attempt"], status["attemptNodes"]) == ("Succeeded", 2, 2)
    assert status["restarts"]["application"] == 0
    said = [json.loads((cli.folder / f"said-{rank}.json").read_text()) for rank in (0, 1)]
    assert [s["GROUP_RANK"] for s in said] == ["0", "1"]
    assert {s["WORLD_SIZE"] for s in said} == {s["GROUP_WORLD_SIZE"] for s in said} == {"2"}
    assert {s["TORCHELASTIC_MAX_RESTARTS"] for s in said} == {"3"}
    assert {s["TORCHELASTIC_RUN_ID"].rpartition("-")[2] for s in said} == {"2"}, "the attempt"
    assert len({(s["MASTER_ADDR"], s["MASTER_PORT"]) for s in said}) == 1


# The scripts below need no torch, so ddprun does not import it.
PRELOADS_NO_TORCH = "spec.template.spec.containers[0].command=[ddprun, --preload, json, train.py, '{until}']"
CHANGES = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
assert os.environ["DDPJOB_ATTEMPT"] == "1"
open(f"size-{os.environ['WORLD_SIZE']}", "w").close()
while not (os.environ["WORLD_SIZE"] == "2" and os.path.exists("size-1") and time.time() > float(sys.argv[1])):
    time.sleep(0.05)
"""


WAITS = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
while time.time() < float(sys.argv[1]):
    time.sleep(0.05)
"""


def test_nodes_under_ddprun_are_lost_leave_and_come_back_in_one_attempt(cli: Cli) -> None:
    """Nodes under ddprun must leave and come back in one attempt, without a wait of the other nodes."""
    (cli.folder / "train.py").write_text(CHANGES)
    words = ["--nodes", "1:2", "--fail", "node=1,at=3s", "--resize", "1,at=15s", "--resize", "2,at=20s"]
    words += ["--status", "status.json", "--no-check"]
    words += ["--set", PRELOADS_NO_TORCH.format(until=time.time() + 21)]
    done = cli.run("run", *words, "train.py", code=0, says="--resize 1,at=15s: there is room for 1 node now")
    assert "takes its place, the others go on (not charged to backoffLimit" in done.stderr
    status = status_of(cli.folder / "status.json")
    assert (status["state"], status["attempt"], status["restarts"]["application"]) == ("Succeeded", 1, 0)


def test_the_others_go_on_without_node_0(cli: Cli) -> None:
    """The other nodes must go on without node 0, and not wait until it is back."""
    (cli.folder / "train.py").write_text(WAITS)
    words = ["--nodes", "1:2", "--fail", "node=0,at=8s", "--status", "status.json", "--no-check"]
    words += ["--set", PRELOADS_NO_TORCH.format(until=time.time() + 20)]
    cli.run("run", *words, "train.py", code=0)
    status = status_of(cli.folder / "status.json")
    assert (status["attempt"], status["leader"], status["restarts"]["application"]) == (1, {"term": 2, "place": 1}, 0)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--nodes", "3:2"], "spec.minNodes: must be at most spec.nodes"),
        (["--nodes", "0:2"], "spec.minNodes: must be at least 1, is 0"),
        (["--nodes", "1:"], "--nodes: must be a number of nodes, or MIN:MAX"),
        (["--nodes", "1:2", "--resize", "1,at=1s"], "--resize 1,at=1s: needs a job with --nodes MIN:MAX under ddprun"),
        (["--resize", "1"], "--resize 1: must be a number of nodes and a time: 2,at=30s"),
        (["--resize", "1,at=soon"], "--resize 1,at=soon: at must be a time such as 20s or 2m"),
        (
            ["--nodes", "1:2", "--set", "spec.template.spec.containers[0].command=[python, train.py]"],
            "with ddprun or torchrun",
        ),
    ],
)
def test_an_impossible_range_is_refused_before_anything_starts(cli, job, words, text):
    done = cli.here("run", job, *words)
    assert done.returncode == 2
    assert text in done.stderr
