"""What the local world keeps of pods, and what it gives back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from shell import eventually
from worlds import job

from ddpjob_operator.local.cluster import LocalCluster
from ddpjob_operator.local.pod_process import Slot
from ddpjob_operator.plan.actions import CreatePod, DeletePod
from ddpjob_operator.pods import build


@pytest.fixture
def world(tmp_path: Path) -> Iterator[LocalCluster]:
    slot = Slot(tmp_path, tmp_path / "volumes", dict(os.environ))
    made = LocalCluster(tmp_path, [slot], build.Reporting("http://127.0.0.1:1"), lambda _pod, _lines: None)
    yield made
    made.close()


def test_a_pod_that_is_gone_holds_no_descriptor_and_no_process(world: LocalCluster) -> None:
    """A run with many restarts, or 64 nodes and a few, ended in `Too many open files`."""
    what = job(nodes=1, container={"command": ["true"]})
    kept = []  # as the screen keeps them: what they have printed is told after their end

    def attempt(number: int) -> int:
        world.execute(what, (CreatePod(number, 0),))
        (pod,) = world.pods.values()
        kept.append(pod)
        while pod.open:
            for key, _ in world.selector.select(1):
                world.handle(key)
        world.observe()
        world.execute(what, (DeletePod(pod.name, pod.name),))
        world.observe()
        return len(os.listdir("/proc/self/fd"))

    first = attempt(1)
    assert [attempt(number) for number in (2, 3, 4)] == [first] * 3
    assert eventually(lambda: not any(os.path.exists(f"/proc/{pod.node.pid}") for pod in kept))
