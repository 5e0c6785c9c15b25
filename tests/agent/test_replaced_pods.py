"""Several nodes on loopback with an operator: only the pod that is lost or told to stop is replaced."""

import json
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
from agents import Launcher, finish
from free_port import free_port
from shell import eventually, lives

LEFT = json.dumps({"application": 3, "infrastructure": 100, "stall": 10, "inARow": 0, "chargedInARow": 0})

# Every rank records its start and runs until it may end. After SIGTERM to one rank all ranks save.
# Each rank checks for a common file, which stands for the step on which the library's ranks agree.
TRAIN = """
import os, signal, sys, time
life, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
def save(*_): open(f"told-{life}", "w").close()
signal.signal(signal.SIGTERM, save)
open(f"up-{life}-{rank}", "w").close()
while not os.path.exists("enough"):
    time.sleep(0.01)
    if os.path.exists(f"told-{life}"):
        time.sleep(0.2 * int(rank))   # they do not end at the same moment
        open(f"saved-{life}-{rank}", "w").close()
        sys.exit(75)
"""


class Job:
    """The agents of a job, each with the replacement number of its pod."""

    def __init__(self, launcher: Launcher, nodes: int, *words: object) -> None:
        self.launcher, self.nodes = launcher, nodes
        self._group = ["--nnodes", nodes, "--master-port", free_port(), "--rdzv-id", launcher.mark]
        self._words = words
        self.agents = [self.start(node) for node in range(nodes)]

    def start(self, node: int, replacement: int = 0, left: str = LEFT) -> subprocess.Popen[str]:
        """Start a pod of this node; left: the remaining budgets, as an operator passes them."""
        words = [*self._group, "--node-rank", node, *self._words]
        own = {"DDPJOB_REPLACEMENT": str(replacement), "DDPJOB_TERMINATION_LOG": str(self._log(node, replacement))}
        return self.launcher.ddprun(*words, DDPJOB_RESTARTS_LEFT=left, **own)

    def message(self, node: int, replacement: int = 0) -> Any:
        """Return the pod's termination message; None if there is none."""
        path = self._log(node, replacement)
        return json.loads(path.read_text()) if path.exists() else None

    def up(self, life: int) -> None:
        """Wait until all ranks of a generation have begun."""
        eventually(lambda: len(list(self.launcher.folder.glob(f"up-{life}-*"))) == self.nodes)

    def lives(self) -> list[int]:
        """Return the numbers of the generations that have started."""
        return sorted({int(path.name.split("-")[1]) for path in self.launcher.folder.glob("up-*")})

    def processes(self, node: int) -> set[int]:
        """Return the agent and the fork server of a node, while no rank is running."""
        agent = psutil.Process(self.agents[node].pid)
        return {agent.pid, *(p.pid for p in agent.children() if lives(p))}

    def wait_without_ranks(self, but: int) -> None:
        """Wait until all nodes except `but` have ended their ranks; their agents and fork servers keep running."""
        others = [node for node in range(self.nodes) if node != but]
        eventually(lambda: all(len(self.processes(node)) == 2 for node in others))
        assert all(self.agents[node].poll() is None for node in others)

    def done(self) -> list[subprocess.CompletedProcess[str]]:
        """Let the ranks end; return how each agent ended."""
        (self.launcher.folder / "enough").touch()
        return [finish(agent) for agent in self.agents]

    def _log(self, node: int, replacement: int) -> Path:
        return self.launcher.folder / f"termination-{node}-{replacement}.json"


@pytest.fixture
def job(launcher: Launcher) -> Job:
    found = Job(launcher, 3, "--preload=json", launcher.script(TRAIN))
    found.up(0)
    return found


@pytest.mark.parametrize("lost", [0, 1])
def test_a_new_pod_for_a_lost_one_is_enough(job: Job, lost: int) -> None:
    """A new pod for a lost one must be enough: the other agents and fork servers stay, and the operator counts."""
    running = {node: job.processes(node) for node in range(3)}
    job.agents[lost].kill()
    job.agents[lost].communicate()
    job.wait_without_ranks(lost)
    for node in {0, 1, 2} - {lost}:
        assert len(job.processes(node) & running[node]) == 2, "agent and fork server are those of before"
    job.agents[lost] = job.start(lost, 1)
    job.up(1)
    done = job.done()
    assert [d.returncode for d in done] == [0, 0, 0]
    assert job.lives() == [0, 1], "one generation later, also where the leader is new"
    assert not any("charged to" in d.stderr for d in done)
    assert job.message(0, replacement=int(lost == 0)) is None
    job.launcher.forget_killed()


@pytest.mark.parametrize("node", [0, 1])
def test_when_one_pod_is_stopped_all_ranks_save_and_the_others_wait_for_its_replacement(job: Job, node: int) -> None:
    job.agents[node].terminate()
    assert finish(job.agents[node]).returncode == 75
    job.wait_without_ranks(node)
    assert len(list(job.launcher.folder.glob("saved-0-*"))) == 3
    assert not (job.message(node) or {}).get("ended"), "the group has not ended"
    job.agents[node] = job.start(node, 1)
    job.up(1)
    assert [d.returncode for d in job.done()] == [0, 0, 0]
    assert job.lives() == [0, 1]


def test_a_replaced_pod_cannot_disturb_the_new_one(launcher: Launcher) -> None:
    job = Job(launcher, 2, "--no-preload", launcher.script(TRAIN))
    job.up(0)
    job.agents[1].kill()
    job.agents[1].communicate()
    job.agents[1] = job.start(1, 2)
    job.up(1)
    late = job.start(1, 1)
    eventually(lambda: "pod 1 of node 1 is outdated" in job.agents[0].stderr.readline())
    late.terminate()
    assert finish(late).returncode == 143
    assert [d.returncode for d in job.done()] == [0, 0]
    assert job.lives() == [0, 1]
    launcher.forget_killed()


def test_a_newer_pod_takes_the_place_of_one_that_is_still_connected(launcher: Launcher) -> None:
    """A newer pod must take the place of one that is still connected, whose node may be cut off."""
    job = Job(launcher, 2, "--no-preload", launcher.script(TRAIN))
    job.up(0)
    old, job.agents[1] = job.agents[1], job.start(1, 1)
    job.up(1)
    assert [d.returncode for d in job.done()] == [0, 0]
    assert job.lives() == [0, 1]
    old.terminate()
    finish(old)


def test_every_pod_has_a_final_message_and_that_of_node_0_has_the_charges(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import os, signal, time
        if os.environ["RANK"] == "1": os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000)
        """
    )
    job = Job(launcher, 3, "--no-preload", "--max-restarts", 1, script)
    assert [finish(agent).returncode for agent in job.agents] == [75, 137, 75]
    counts = {"application": 1, "infrastructure": 0, "stall": 0, "inARow": 1, "chargedInARow": 1}
    account = {"replacement": 0, "generation": 1, "restarts": counts}
    end = {"ddpjob": 1, "exitCode": 75, "ended": True, "failed": True}
    assert job.message(0) == {**end, "agent": account}
    guilty = job.message(1)
    assert (guilty["rank"], guilty["signal"], guilty["ended"]) == (1, "SIGKILL", True)
    assert "agent" not in guilty
    assert job.message(2) == end
