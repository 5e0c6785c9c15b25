"""Resources of pods that the local run keeps, and those that it releases."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from shell import eventually
from worlds import job

from ddpjob_cli.local.preparation.pod_process import Slot
from ddpjob_cli.local.processes.cluster import LocalCluster, LocalPod
from ddpjob_operator.job import api
from ddpjob_operator.plan.actions import CreatePod, DeletePod
from ddpjob_operator.pods import build


@pytest.fixture
def world(tmp_path: Path) -> Iterator[LocalCluster]:
    slot = Slot(tmp_path, tmp_path / "volumes", dict(os.environ))
    made = LocalCluster(tmp_path, [slot], build.Reporting("http://127.0.0.1:1"), lambda _pod, _lines: None)
    yield made
    made.close()


def run_and_delete(world: LocalCluster, what: api.DDPJob, attempt: int) -> LocalPod:
    """Run a pod that ends by itself, and delete it."""
    world.execute(what, (CreatePod(attempt, 0),))
    (pod,) = world.pods.values()
    while pod.open:
        for key, _ in world.selector.select(1):
            world.handle(key)
    world.observe()
    world.execute(what, (DeletePod(pod.name, pod.name),))
    world.observe()
    return pod


def test_an_empty_dir_is_removed_with_its_pod(world: LocalCluster) -> None:
    """An emptyDir must be removed with its pod: a cache of 20 GB per attempt would fill the disk."""
    trainer = {
        "name": "trainer",
        "image": "i",
        "command": ["sh", "-c", "echo 1 > /cache/file && cat /cache/file"],
        "volumeMounts": [{"name": "v", "mountPath": "/cache"}],
    }
    what = job(nodes=1, template={"spec": {"containers": [trainer], "volumes": [{"name": "v", "emptyDir": {}}]}})
    pod = run_and_delete(world, what, 1)
    assert pod.log.path.read_text() == "1\n"
    assert not (world.folder / "volumes" / pod.name).exists()


def test_a_removed_pod_holds_no_descriptor_and_no_process(world: LocalCluster) -> None:
    """A removed pod must hold no descriptor and no process, or a long run fails with `Too many open files`."""
    what = job(nodes=1, container={"command": ["true"]})
    kept = []  # the screen also keeps a pod until its output was shown

    def attempt(number: int) -> int:
        kept.append(run_and_delete(world, what, number))
        return len(os.listdir("/proc/self/fd"))

    first = attempt(1)
    assert [attempt(number) for number in (2, 3, 4)] == [first] * 3
    assert eventually(lambda: not any(os.path.exists(f"/proc/{pod.node.pid}") for pod in kept))
