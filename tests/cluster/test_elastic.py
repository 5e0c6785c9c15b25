"""An elastic job on real pods: one node comes late, its pod is deleted, its node is cut off. The result is the same as
without these events."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from clusters import kubectl
from elastic_training import SCRIPT, alone, result
from pods import Space, charged, job, trainer

pytestmark = [pytest.mark.alone, pytest.mark.timeout(900)]
STARTS_WITHIN = 150  # importing torch takes long
LAST_CALL_SECONDS = 5  # seconds that torchrun waits for more nodes after the minimum has joined; 30 by default


@pytest.fixture
def schedulable(nodes: list[str]) -> Iterator[list[str]]:
    """Return the nodes, and let all of them accept pods again at the end."""
    yield nodes
    for node in nodes:
        kubectl("uncordon", node, check=False)


def elastic(name: str, folder: str, launcher: str) -> dict[str, Any]:
    made = job(name, minNodes=1, onePodPerNode=True)
    # Under ddprun the training goes on during the faults, so it takes longer.
    program = ["--no-python", "python", "-u", "-c", SCRIPT, folder, "0.1" if launcher == "torchrun" else "0.15"]
    trainer(made)["command"] = [launcher, f"--rdzv-conf=last_call_timeout={LAST_CALL_SECONDS},snooze=2", *program]
    trainer(made)["resources"] = {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}}
    trainer(made)["volumeMounts"] = [{"name": "snapshots", "mountPath": folder}]
    trainer(made)["securityContext"] = {"runAsUser": 0}
    pod = made["spec"]["template"]["spec"]
    pod["securityContext"] = {}
    pod["volumes"] = [{"name": "snapshots", "hostPath": {"path": folder, "type": "DirectoryOrCreate"}}]
    return made


# `make test` runs other tests instead, without torch. test_faults.py: under torchrun a deleted pod restarts all ranks.
# test_in_place.py: under ddprun only the deleted pod is replaced.
@pytest.mark.parametrize(
    ("launcher", "deletes_a_pod"),
    [("torchrun", False), ("ddprun", False), pytest.param("torchrun", True, marks=pytest.mark.long)],
)
def test_an_elastic_job_trains_on_with_the_available_nodes_and_ends_as_if_undisturbed(
    space: Space,
    schedulable: list[str],
    tmp_path: Path,
    break_node: Callable[[str, str], None],
    launcher: str,
    deletes_a_pod: bool,
) -> None:
    kubectl("label", "namespace", space.name, "--overwrite", "pod-security.kubernetes.io/enforce=privileged")
    name, late = "elastic", schedulable[1]

    # One node has room for one pod, which is enough to train. The second node joins later in the same attempt.
    kubectl("cordon", late)
    space.apply(elastic(name, f"/var/tmp/ddpjob-{space.name}", launcher))
    status = trains(space, name, "1/2")
    assert (status["attempt"], status["reason"]) == (1, "EnoughNodesRun")
    assert "Unschedulable: 1 of 2 pods" in status["message"]
    kubectl("uncordon", late)
    assert trains(space, name, "2/2")["attempt"] == 1

    attempt = 1
    if deletes_a_pod:  # all ranks restart, but no budget counts this restart
        space.kubectl("delete", "pod", f"{name}-1-1", "--wait=false")
        attempt = 2
        assert trains(space, name, "2/2", attempt)["attempt"] == 2

    # A node is cut off: the job continues without it, and accepts it again later.
    cut = space.node_of(f"{name}-{attempt}-1")
    break_node("cut", cut)
    attempt += launcher == "torchrun"
    status = trains(space, name, "1/2", attempt)
    assert charged(status)[0] == 0
    break_node("join", cut)
    status = trains(space, name, "2/2", attempt, or_ended=True)
    assert status["attempt"] == attempt

    status = space.ends(name, 240)
    assert status["state"] == "Succeeded", status
    if launcher == "ddprun":
        assert (status["goodput"].get("lostSteps", 0), status["goodput"].get("restartingSeconds", 0)) == (0, 0)
        assert space.pods(name)[f"{name}-1-0"]["status"]["containerStatuses"][0]["restartCount"] == 0
    log = space.kubectl("logs", f"{name}-{attempt}-0")
    assert result(log) == pytest.approx(alone(tmp_path), abs=1e-5)


def trains(space: Space, name: str, nodes: str, attempt: int = 1, *, or_ended: bool = False) -> dict[str, Any]:
    """Wait until this many nodes have made a new step together; return the status."""

    def so_many(status: dict[str, Any]) -> bool:
        if or_ended and status.get("state") == "Succeeded":
            return True
        shown = (status.get("display") or {}).get("nodes")
        return bool(status.get("state") == "Running" and shown == nodes and status["attempt"] == attempt)

    before = space.waits(name, so_many, f"{nodes} nodes of {name} run", STARTS_WITHIN)
    step = (
        (before.get("progress") or {}).get("step", 0) if (before.get("progress") or {}).get("attempt") == attempt else 0
    )
    return space.waits(
        name,
        lambda s: s.get("state") == "Succeeded" or s.get("progress", {}).get("step", 0) != step,
        f"{name} makes steps",
        STARTS_WITHIN,
    )
