"""Every task of a running operator is ended, one after the other, with a model of an API server. kopf's tasks are
included, so the operator runs in a process of its own, as in a cluster."""

from __future__ import annotations

import random
import re
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import task_ender
from clusters import Operator, until
from free_port import free_port
from model_server import ModelServer

END_SECONDS, STOP_SECONDS = 5.0, 10.0
LATE_SECONDS = 5.0  # seconds that a busy machine may need more
QUICK_LEASE = {"DDPJOB_LEASE_SECONDS": "3", "DDPJOB_LEASE_RENEW_SECONDS": "2", "DDPJOB_LEASE_RETRY_SECONDS": "0.5"}
# One task of each kind. The long test ends all tasks.
OURS = ("pods in b", "lease", "queue")
KOPFS = ("watcher for ddpjobs", "multidimensional")


def manifest(name: str, namespace: str) -> dict[str, Any]:
    container = {"name": "trainer", "image": "trainer", "command": ["torchrun", "train.py"]}
    return {
        "apiVersion": "training.ddpjob.io/v1alpha1",
        "kind": "DDPJob",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"nodes": 2, "template": {"spec": {"containers": [container]}}},
    }


class World:
    """An operator for two namespaces with a Lease. It is restarted after it has ended."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.server = ModelServer()
        self._jobs = 0
        self._starts = 0
        self.operator: Operator | None = None

    def __enter__(self) -> World:
        self.server.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self.operator is not None:
            self.operator.__exit__()
        self.server.__exit__()

    def running(self) -> Operator:
        """Return the running operator; start a new one if it has ended."""
        if self.operator is None or self.operator.process.poll() is not None:
            if self.operator is not None:
                self.operator.__exit__()
            self._starts += 1
            self.socket = self._folder / f"tasks-{self._starts}"
            self.port = free_port()
            variables = {task_ender.SOCKET: str(self.socket), "DDPJOB_LEASE_NAMESPACE": "ops", **QUICK_LEASE}
            variables |= {"DDPJOB_GANGS": "kueue", "DDPJOB_HEALTH_PORT": str(self.port)}
            self.operator = Operator(self.server, "a", "b", **variables)  # type: ignore[arg-type]
            self.acts()
        return self.operator

    def acts(self) -> None:
        """Check that the operator creates the pods of a new job, then delete the job."""
        assert self.operator is not None
        self._jobs += 1
        name = f"job-{self._jobs}"
        self.server.apply(manifest(name, "a" if self._jobs % 2 else "b"))
        pods = {f"{name}-1-0", f"{name}-1-1"}
        until(lambda: pods <= set(self.server.pods()), f"the pods of {name} are made: {self.operator.log}", 40)
        self.server.delete_job(name)

    def healthy(self) -> bool:
        """True if the operator answers the kubelet's probe with ok."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/healthz", timeout=5) as answer:
            return bool(answer.status == 200)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with task_ender.installed(), World(tmp_path) as made:
        yield made


def is_over(world: World, name: str) -> None:
    """End a task, and check that the operator then ends with a reason or works as before."""
    operator = world.running()
    began = time.monotonic()
    assert name in task_ender.tasks(world.socket, end=name), name
    try:
        code = operator.process.wait(END_SECONDS + LATE_SECONDS)
    except subprocess.TimeoutExpired:
        assert world.healthy(), name
        world.acts()
        return
    log = operator.log
    assert time.monotonic() - began < END_SECONDS + LATE_SECONDS, name
    assert code == 1, f"{name}: a container that ends with {code} looks as if it had been told to; {log}"
    assert re.search("ERROR .*, so the operator ends", log), f"{name}: nobody learns why: {log}"


@pytest.mark.parametrize("start", [*OURS, *KOPFS])
def test_the_end_of_any_task_ends_the_operator_with_a_reason(world: World, start: str) -> None:
    """The end of any task must end the operator with a reason, or it answers its probe and does no work."""
    world.running()
    name = next(name for name in task_ender.tasks(world.socket) if name.startswith(start))
    is_over(world, name)
    assert world.operator is not None
    assert world.operator.process.poll() == 1
    if start in OURS:
        assert f"{start} has ended, so the operator ends" in world.operator.log


@pytest.mark.long  # takes 90 s; the test above ends only one task of each kind
def test_whichever_task_ends_the_operator_continues_or_ends_with_a_reason(world: World) -> None:
    """The end of any other task must also end the operator, or change nothing."""
    chance = random.Random(35)
    world.running()
    left = task_ender.tasks(world.socket)
    chance.shuffle(left)
    assert len(left) > 30
    for name in left:
        world.running()
        time.sleep(chance.uniform(0, 0.5))
        if name in task_ender.tasks(world.socket):
            is_over(world, name)


@pytest.mark.parametrize("silent", [False, True])
def test_sigterm_ends_the_operator_soon(world: World, silent: bool) -> None:
    """The operator must give back the Lease within seconds at SIGTERM, even if the API server never answers."""
    operator = world.running()
    world.server.silent = silent
    began = time.monotonic()
    assert operator.stop() == 0
    assert time.monotonic() - began < STOP_SECONDS + LATE_SECONDS
    assert "ERROR" not in operator.log
