"""An elastic job on real pods: one node comes late, its pod is deleted, its node is cut off. The result is the same as
without these events. If the cut leader trains on, only the group of the next leader writes."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from clusters import kubectl, until
from elastic_training import SCRIPT, alone, result
from pods import Space, charged, job, spread, trainer

pytestmark = [pytest.mark.alone, pytest.mark.timeout(900)]
STARTS_WITHIN = 150  # importing torch takes long
LAST_CALL_SECONDS = 5  # seconds that torchrun waits for more nodes after the minimum has joined; 30 by default


@pytest.fixture
def schedulable(nodes: list[str]) -> Iterator[list[str]]:
    """Return the nodes, and let all of them accept pods again at the end."""
    yield nodes
    for node in nodes:
        kubectl("uncordon", node, check=False)


def elastic(name: str, folder: str, launcher: str, program: list[str], **spec: Any) -> dict[str, Any]:
    made = job(name, minNodes=1, **spec)
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
    folder = f"/var/tmp/ddpjob-{space.name}"
    # Under ddprun the training goes on during the faults, so it takes longer.
    program = ["--no-python", "python", "-u", "-c", SCRIPT, folder, "0.1" if launcher == "torchrun" else "0.15"]
    space.apply(elastic(name, folder, launcher, program, onePodPerNode=True))
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


# Script: rank 0 notes in the shared folder what it loads and saves. The group of a later leader begins when the cut
# leader's group has saved, so that both have a state to save.
TWO_GROUPS = """
import os, sys, time, torch, torch.distributed as dist, ddpjob
folder = sys.argv[1]
me = f"{os.environ['HOSTNAME'].rpartition('-')[2]}-r{os.environ['DDPJOB_REPLACEMENT']}"

def note(what, step, by):
    if world.is_main:
        print(me, world.world_size, what, step, by, file=open(f"{folder}/notes", "a"))

def is_awaited():
    last = open(f"{folder}/notes").readlines()[-1].split()
    return last[0] == "0-r0" and (last[1] == "2" or last[2] == "loads")

with ddpjob.init("gloo") as world:
    model = world.wrap(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    snapshot = ddpjob.Snapshot(folder, world)
    while world.is_main and me != "0-r0" and is_awaited():
        time.sleep(0.1)
    step = snapshot.load(model=model, optimizer=optimizer)
    note("loads", step, snapshot.state.get("by"))
    enough = torch.zeros(1)
    while not enough:
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        step += 1
        ddpjob.progress(step=step)
        stop = ddpjob.should_stop(step)
        if stop or step % 5 == 0:
            try:
                snapshot.save(step, model=model, optimizer=optimizer, by=me)
                snapshot.wait()
            except ddpjob.Superseded:
                note("is refused", step, me)
                raise
            note("saves", step, me)
        if stop:
            raise ddpjob.Stopped(step)
        time.sleep(0.1)
        enough.fill_(os.path.exists(f"{folder}/enough"))
        dist.broadcast(enough, 0)
    snapshot.close()
"""


def test_only_the_newer_of_two_groups_writes_and_nothing_of_the_older_one_is_loaded_later(
    space: Space, nodes: list[str], break_node: Callable[[str, str], None]
) -> None:
    """A leader without network trains on. Its steps must not replace those of the group that the job continues with.

    The leader is alone on its node: without DNS, two pods of the job would not find each other after the restart.
    """
    kubectl("label", "namespace", space.name, "--overwrite", "pod-security.kubernetes.io/enforce=privileged")
    folder = f"/var/tmp/ddpjob-{space.name}"
    body = spread(elastic("split", folder, "ddprun", ["/script/train.py", folder], nodes=2))
    trainer(body)["volumeMounts"] += [{"name": "script", "mountPath": "/script"}]
    trainer(body)["env"] = [{"name": "DDPJOB_STATUS_INTERVAL", "value": "1"}]
    body["spec"]["template"]["spec"]["volumes"] += [{"name": "script", "configMap": {"name": "script"}}]
    space.kubectl("create", "configmap", "script", f"--from-literal=train.py={TWO_GROUPS}")
    space.apply(body)

    def noted(by: int, *words: str) -> Callable[[], bool]:
        return lambda: any(line[: len(words)] == [*words] for line in notes(by))

    def notes(by: int) -> list[list[str]]:
        said = space.kubectl("exec", f"split-1-{by}", "--", "cat", f"{folder}/notes", check=False)
        return [line.split() for line in said.splitlines()]

    until(noted(0, "0-r0", "2", "saves"), "all nodes train", STARTS_WITHIN)
    cut = space.node_of("split-1-0")
    break_node("cut", cut)
    new = space.waits("split", lambda s: s["leader"]["term"] == 2, "another leads", 120)["leader"]["place"]
    older, newer = "0-r0", f"{new}-r0"
    until(lambda: any(line[0] == older and line[2] == "is" for line in notes(new)), "the older is refused", 120)
    break_node("join", cut)
    until(noted(new, newer, "2", "saves"), "all nodes train under the new leader", STARTS_WITHIN)
    space.kubectl("exec", f"split-1-{new}", "--", "touch", f"{folder}/enough")
    found = notes(new)
    status = space.ends("split", 120)
    assert (status["state"], status["attempt"], charged(status)[0]) == ("Succeeded", 1, 0), status
    assert status["leader"] == {"term": 2, "place": new}
    begins = next(n for n, line in enumerate(found) if line[:1] + line[2:3] == [newer, "loads"])
    loaded, after = found[begins], [line for line in found[begins + 1 :] if line[2] in ("saves", "loads")]
    assert loaded[-1] == older, "the newer group continues from what the older one has saved alone"
    # The older group notes a save a moment after it.
    assert not [line for line in after if line[0] == older and int(line[3]) > int(loaded[3])], found
    assert {line[-1] for line in after if line[0] != older} == {newer}, found
