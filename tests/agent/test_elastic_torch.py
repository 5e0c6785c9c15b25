"""Nodes come, are lost and leave, also the leader, without a change of the result. With torch and gloo."""

import subprocess
from pathlib import Path

import elastic_training
import pytest
from agents import Launcher, finish
from appointments import LEFT, Appointments
from free_port import free_port
from shell import eventually

TOTAL = 600
SCRIPT = elastic_training.SCRIPT.replace("ddpjob.Snapshot(folder, world)", "ddpjob.Snapshot(folder or None, world)")
SCRIPT = SCRIPT.replace("step += 1", "step += 1; world.is_main and print(step, file=made, flush=True)")
BEGINS = "made = open('made', 'a'); world.is_main and print(world.world_size, file=open('sizes', 'a'))"
SCRIPT = SCRIPT.replace("loss_of =", f"{BEGINS}; loss_of =")
BEFORE, SLEEPS = SCRIPT.partition("            stop = ")[0], "            time.sleep"
KEEPS = "            snapshot.keep(step, model=model, optimizer=optimizer, sampler=sampler)\n"
ONLY_KEEPS = BEFORE + KEEPS + SLEEPS + SCRIPT.partition(SLEEPS)[2]


class Training:
    """The nodes of one training."""

    def __init__(
        self, launcher: Launcher, least: int, most: int, folder: str, told: Appointments, script: str = SCRIPT
    ) -> None:
        self.launcher = launcher
        port = free_port()
        told.appoint(1, 0, port)
        self._group = ["--nnodes", f"{least}:{most}", "--master-port", port, "--rdzv-id", launcher.mark]
        self._group += ["--rdzv-conf", "last_call_timeout=0,snooze=0", "--node-rank"]
        self._script = [launcher.script(script), folder, 0.03]
        self._env = {"DDPJOB_RESTARTS_LEFT": LEFT, **told.env}
        self.agents: dict[int, subprocess.Popen[str]] = {}

    def start(self, *nodes: int, replacement: int = 0, **env: str) -> None:
        for node in nodes:
            own = {"DDPJOB_REPLACEMENT": str(replacement), "OMP_NUM_THREADS": "1", **self._env, **env}
            own["DDPJOB_TERMINATION_LOG"] = str(self.launcher.folder / f"termination-{node}-{replacement}.json")
            self.agents[node] = self.launcher.warm(*self._group, node, *self._script, **own)

    def kill(self, node: int) -> None:
        agent = self.agents.pop(node)
        agent.kill()
        agent.communicate()

    def noted(self, name: str) -> list[int]:
        """Return the lines that rank 0 has written: its steps (`made`), or the world sizes (`sizes`)."""
        path = self.launcher.folder / name
        return [int(line) for line in path.read_text().splitlines()] if path.exists() else []

    def trains_with(self, *sizes: int) -> None:
        """Wait until the group has had these sizes in this order, and has made 20 steps with the last size."""
        eventually(lambda: self.noted("sizes") == list(sizes), 60)
        until = len(self.noted("made")) + 20
        eventually(lambda: len(self.noted("made")) >= until, 60)

    def done(self) -> dict[int, subprocess.CompletedProcess[str]]:
        return {node: finish(agent) for node, agent in self.agents.items()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return elastic_training.alone(tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize(
    ("folder", "script", "code"),
    [
        pytest.param("snapshots", SCRIPT, 75, marks=pytest.mark.long),
        ("", SCRIPT, 75),
        ("", ONLY_KEEPS, 143),
    ],
    ids=["folder", "memory", "only keep()"],
)
def test_nodes_that_come_and_are_lost_cost_no_step_and_change_no_result(
    launcher: Launcher, undisturbed: list[float], appointments: Appointments, folder: str, script: str, code: int
) -> None:
    training = Training(launcher, 2, 3, folder, appointments, script)
    training.start(0, 1)
    training.trains_with(2)
    training.start(2)
    training.trains_with(2, 3)
    training.kill(1)
    training.trains_with(2, 3, 2)
    training.start(1, replacement=1)
    training.trains_with(2, 3, 2, 3)
    appointments.appoint(2, 1)
    training.kill(0)
    training.trains_with(2, 3, 2, 3, 2)
    training.start(0, replacement=1, DDPJOB_LEADER_APPOINTED="1")
    training.trains_with(2, 3, 2, 3, 2, 3)
    training.agents[2].terminate()
    left = finish(training.agents.pop(2))
    assert left.returncode == code
    done = training.done()
    said = "\n".join(d.stderr for d in (*done.values(), left))
    assert {d.returncode for d in done.values()} == {0}, said
    assert training.noted("sizes") == [2, 3, 2, 3, 2, 3, 2], said
    assert "the number of ranks has changed; random states are seeded" in said
    made = training.noted("made")
    assert (made, made[-1]) == (sorted(set(made)), TOTAL), said
    assert len(made) > TOTAL - len(training.noted("sizes")), "rank 0 may end between a step and the line about it"
    result = elastic_training.result(done[1].stdout)
    error = sum((one - other) ** 2 for one, other in zip(result, undisturbed, strict=True)) ** 0.5
    assert error <= 1e-5 * sum(value**2 for value in undisturbed) ** 0.5
    for path in Path(launcher.folder / "tmp").glob("ddprun_*"):  # left by the killed agent
        subprocess.run(["rm", "-r", path], check=True)
