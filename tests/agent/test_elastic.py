"""Agents of a group whose number of nodes changes, on loopback: nodes come, are lost and leave. Without torch."""

import json
import signal
import subprocess

import psutil
import pytest
from agents import Launcher, finish
from appointments import LEFT, Appointments
from free_port import free_port
from shell import eventually

from ddpjob_core.members import Members

# Each rank records generation, world size, rank and node, and waits. If one rank gets SIGTERM, all ranks save.
TRAIN = """
import os, signal, sys, time
life, rank, size = (os.environ[name] for name in ("TORCHELASTIC_RESTART_COUNT", "RANK", "WORLD_SIZE"))
assert os.environ["GROUP_WORLD_SIZE"] == size and os.environ["GROUP_RANK"] == rank
def save(*_): open(f"told-{life}", "w").close()
signal.signal(signal.SIGTERM, save)
open(f"up-{life}-{size}-{rank}-{os.environ['NODE']}", "w").close()
while not os.path.exists("enough"):
    time.sleep(0.01)
    if os.path.exists("fails") and rank == "1":
        sys.exit(9)
    if os.path.exists(f"told-{life}"):
        open(f"saved-{life}-{rank}", "w").close()
        sys.exit(75)
"""


class Job:
    """The agents of an elastic job, by node."""

    def __init__(
        self, launcher: Launcher, nnodes: str, *words: object, snooze: float = 0, last_call: float = 5
    ) -> None:
        self.launcher = launcher
        conf = f"last_call_timeout={last_call},snooze={snooze},timeout=60"
        self._nnodes = nnodes
        group = ["--master-port", free_port(), "--rdzv-id", launcher.mark, "--rdzv-conf", conf]
        self._words = [*group, "--preload=json", *words, launcher.script(TRAIN)]
        self.agents: dict[int, subprocess.Popen[str]] = {}
        self.gone: list[subprocess.CompletedProcess[str]] = []

    def nnodes(self, nnodes: str) -> None:
        """Start later agents with this --nnodes, as the operator does after `kubectl scale`."""
        self._nnodes = nnodes

    def start(self, *nodes: int, replacement: int = 0, **env: str) -> None:
        for node in nodes:
            own = {"NODE": str(node), "DDPJOB_REPLACEMENT": str(replacement)} | env
            self.agents[node] = self.launcher.ddprun("--nnodes", self._nnodes, "--node-rank", node, *self._words, **own)

    def kill(self, node: int) -> None:
        """End a node as a power cut does."""
        agent = self.agents.pop(node)
        agent.kill()
        agent.communicate()

    def up(self, life: int) -> list[int]:
        """Wait until all ranks of a generation have started; return their nodes, in the order of the ranks."""

        def begun() -> list[int]:
            names = sorted(path.name.split("-")[2:] for path in self.launcher.folder.glob(f"up-{life}-*"))
            return [int(node) for _, _, node in names] if names and len(names) == int(names[0][0]) else []

        return eventually(begun)

    def done(self) -> dict[int, subprocess.CompletedProcess[str]]:
        """Let the ranks end; return how each agent ended."""
        (self.launcher.folder / "enough").touch()
        return {node: finish(agent) for node, agent in self.agents.items()}


def test_two_of_four_nodes_start_and_those_that_come_later_join(launcher: Launcher) -> None:
    job = Job(launcher, "2:4", last_call=0)
    job.start(0, 2)
    assert job.up(0) == [0, 2]
    job.start(1)
    assert job.up(1) == [0, 1, 2]
    job.start(3)
    assert job.up(2) == [0, 1, 2, 3]
    assert len(list(launcher.folder.glob("saved-0-*"))) == 2, "each could save first"
    done = job.done()
    assert {d.returncode for d in done.values()} == {0}
    said = done[0].stderr
    assert "ddprun: start of nodes 0,2; the others have not connected\n" in said
    assert "ddprun: restart 1 of nodes 0-2: node 1 joined\n" in said
    assert "ddprun: restart 2: node 3 joined\n" in said


def test_a_job_grows_beyond_the_number_of_nodes_with_which_it_started(launcher: Launcher) -> None:
    job = Job(launcher, "1:2")
    job.start(0, 1)
    assert job.up(0) == [0, 1]
    job.nnodes("1:3")
    job.start(2)
    assert job.up(1) == [0, 1, 2]
    assert {d.returncode for d in job.done().values()} == {0}


@pytest.mark.parametrize("env", [{}, {"DDPJOB_RESTARTS_LEFT": LEFT}], ids=["alone", "operator"])
def test_the_others_go_on_without_a_lost_node_and_its_new_pod_joins_them(launcher, env):
    job = Job(launcher, "2:3", "--max-restarts", 0)
    job.start(0, 1, 2, **env)
    assert job.up(0) == [0, 1, 2]
    job.kill(1)
    assert job.up(1) == [0, 2]
    job.start(1, replacement=1, **env)
    assert job.up(2) == [0, 1, 2]
    done = job.done()
    assert {d.returncode for d in done.values()} == {0}
    assert "ddprun: restart 1 of nodes 0,2: node 1 is lost\n" in done[0].stderr
    assert "charged" not in done[0].stderr
    launcher.forget_killed()


def test_a_spare_takes_the_place_of_a_lost_node_at_once_and_its_own_end_changes_nothing(launcher: Launcher) -> None:
    job, env = Job(launcher, "2:3", "--max-restarts", 0, snooze=500, last_call=500), {"DDPJOB_SPARES": "1"}
    job.start(0, 1, 2, **env)
    first = job.up(0)
    (spare,) = {1, 2} - set(first)

    def says_that_it_is_a_spare(node: int) -> None:
        assert job.agents[node].stderr is not None
        assert "this one is a spare" in job.agents[node].stderr.readline()

    says_that_it_is_a_spare(spare)
    job.kill(first[1])
    assert job.up(1) == [0, spare]
    for replacement in (1, 2):
        job.start(first[1], replacement=replacement, **env)
        says_that_it_is_a_spare(first[1])
        if replacement == 1:
            job.kill(first[1])
    done = job.done()
    assert {d.returncode for d in done.values()} == {0}
    said = done[0].stderr
    assert f"ddprun: restart 1 of nodes {Members((0, spare)).text}: node {first[1]} is lost\n" in said
    assert "restart 2" not in said
    assert "charged" not in said
    launcher.forget_killed()


def test_fewer_than_the_smallest_number_wait_for_another_node(launcher: Launcher) -> None:
    job = Job(launcher, "2:3")
    job.start(0, 1, 2)
    job.up(0)
    job.kill(1)
    job.kill(2)
    eventually(lambda: not psutil.Process(job.agents[0].pid).children(recursive=True)[1:])
    job.start(1)
    assert job.up(1) == [0, 1]
    assert {d.returncode for d in job.done().values()} == {0}
    launcher.forget_killed()


def test_a_node_that_is_told_to_stop_leaves_after_all_have_saved_and_the_others_go_on(launcher: Launcher) -> None:
    job = Job(launcher, "1:3")
    job.start(0, 1, 2)
    job.up(0)
    job.agents[1].terminate()
    assert finish(job.agents.pop(1)).returncode == 75
    assert job.up(1) == [0, 2]
    assert len(list(launcher.folder.glob("saved-0-*"))) == 3
    assert {d.returncode for d in job.done().values()} == {0}


def test_a_node_that_waits_says_so_once_and_ends_with_the_others(launcher: Launcher) -> None:
    job = Job(launcher, "1:2", snooze=500, last_call=0)
    job.start(0, DDPJOB_TERMINATION_LOG="message")
    assert job.up(0) == [0]
    job.start(1)
    assert job.agents[1].stderr is not None
    assert job.agents[1].stderr.readline() == "ddprun: the other nodes train; this one joins them in 500 s\n"
    done = job.done()
    assert [done[node].returncode for node in (0, 1)] == [0, 0]
    assert done[1].stderr == ""
    message = json.loads((launcher.folder / "message").read_text())
    assert message["agent"]["members"] == "0", "an operator waits for no other node"
    assert message["ended"] is True


@pytest.mark.parametrize(("nnodes", "ended"), [("1:2", None), ("2", True)])
def test_a_node_that_does_not_reach_node_0_ends_alone_if_the_others_may_train(launcher, nnodes, ended):
    """A node whose network is broken must be replaced, and the nodes that train must not restart with it."""
    words = ["--nnodes", nnodes, "--node-rank", 1, "--master-port", free_port(), "--rdzv-conf", "timeout=1"]
    done = finish(launcher.ddprun(*words, "--no-preload", launcher.script(TRAIN), DDPJOB_TERMINATION_LOG="message"))
    assert done.returncode == 75
    assert json.loads((launcher.folder / "message").read_text()).get("ended") is ended


def test_a_node_that_waits_does_not_take_the_failure_of_another_for_its_own(launcher: Launcher) -> None:
    """A node that waits must not take another node's failed rank for its own, because ranks get new numbers."""
    job = Job(launcher, "2:3", "--max-restarts", 0, snooze=500)
    job.start(0, 1, 2)
    job.up(0)
    job.kill(1)
    assert job.up(1) == [0, 2]
    job.start(1, replacement=1)
    assert job.agents[1].stderr is not None
    assert "joins them in" in job.agents[1].stderr.readline()
    (launcher.folder / "fails").touch()
    assert {node: finish(agent).returncode for node, agent in job.agents.items()} == {0: 75, 1: 75, 2: 9}
    launcher.forget_killed()


def test_the_others_go_on_without_node_0_once_the_operator_appoints_a_leader(launcher, appointments):
    job = Job(launcher, "2:3")
    env = {"DDPJOB_RESTARTS_LEFT": LEFT, **appointments.env}
    job.start(0, 1, 2, **env)
    assert job.up(0) == [0, 1, 2]
    appointments.appoint(2, 1)
    job.kill(0)
    assert job.up(1) == [1, 2], "rank 0 runs on the leader's node"
    job.start(0, replacement=1, DDPJOB_LEADER_APPOINTED="1", **env)
    assert job.up(2) == [1, 0, 2]
    done = job.done()
    assert {d.returncode for d in done.values()} == {0}
    assert "ddprun: node 1 is appointed the leader, term 2\n" in done[2].stderr
    assert "ddprun: restart 1 of nodes 1-2: node 1 leads now\n" in done[1].stderr
    launcher.forget_killed()


def test_a_leader_that_was_taken_for_lost_follows_the_new_one(launcher: Launcher, appointments: Appointments) -> None:
    job = Job(launcher, "1:2")
    job.start(0, 1, DDPJOB_RESTARTS_LEFT=LEFT, **appointments.env)
    assert job.up(0) == [0, 1]
    job.agents[0].send_signal(signal.SIGSTOP)
    appointments.appoint(2, 1)
    eventually(lambda: (launcher.folder / "up-1-1-0-1").exists(), 60)
    job.agents[0].send_signal(signal.SIGCONT)
    eventually(lambda: list(launcher.folder.glob("up-*-2-1-0")), 60)
    assert {d.returncode for d in job.done().values()} == {0}


def test_the_only_node_that_is_left_leads_itself(launcher: Launcher, appointments: Appointments) -> None:
    """The only node that is left must lead itself: its ranks end before the operator sees that node 0 is lost."""
    job = Job(launcher, "1:2")
    job.start(0, 1, DDPJOB_RESTARTS_LEFT=LEFT, **appointments.env)
    assert job.up(0) == [0, 1]
    job.kill(0)
    eventually(lambda: not psutil.Process(job.agents[1].pid).children(recursive=True)[1:])
    appointments.appoint(2, 1)
    assert job.up(1) == [1]
    assert {d.returncode for d in job.done().values()} == {0}
    launcher.forget_killed()


def test_a_leader_learns_what_the_operator_has_spent_of_its_budget(launcher, appointments):
    """The operator charges a failure that ends a pod, and a new pod may need minutes until it joins the others."""
    appointments.appoint(1, 0, application=0, replaced=1)
    job = Job(launcher, "1:2")
    job.start(0, 1, DDPJOB_RESTARTS_LEFT=LEFT, **appointments.env)
    assert job.up(0) == [0, 1]
    eventually(lambda: appointments.answered > 2)  # the leader has asked again, so it has the first answer
    (launcher.folder / "fails").touch()
    assert {node: finish(agent).returncode for node, agent in job.agents.items()} == {0: 75, 1: 9}
    assert not list(launcher.folder.glob("up-1-*"))
