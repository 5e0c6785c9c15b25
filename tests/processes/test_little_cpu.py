"""An operator process that gets a fifth of a CPU, with a model of an API server."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

from clusters import Operator, until
from model_server import ModelServer

JOBS, NODES = 3, 8
SHARE, PERIOD_SECONDS = 0.2, 0.1


@contextlib.contextmanager
def throttled(pid: int) -> Iterator[None]:
    """Throttle a process like the kernel does with `cpu: 200m`: after 20 ms of CPU time, stop it until the 100 ms
    period is over. A limit by wall clock would leave the process too little CPU time on a busy machine."""
    over, cpu = threading.Event(), (~pid << 3) | 2  # clock id of another process, as clock_getcpuclockid() returns it

    def run() -> None:
        while not over.is_set():
            end, least = time.monotonic() + PERIOD_SECONDS, time.clock_gettime(cpu) + PERIOD_SECONDS * SHARE
            while time.monotonic() < end and time.clock_gettime(cpu) < least:
                time.sleep(0.001)
            os.kill(pid, signal.SIGSTOP)
            time.sleep(max(0, end - time.monotonic()))
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def manifest(name: str) -> dict[str, Any]:
    container = {"name": "trainer", "image": "trainer", "command": ["torchrun", "train.py"]}
    return {
        "apiVersion": "training.ddpjob.io/v1alpha1",
        "kind": "DDPJob",
        "metadata": {"name": name},
        "spec": {"nodes": NODES, "template": {"spec": {"containers": [container]}}},
    }


def test_with_a_fifth_of_a_cpu_jobs_of_eight_pods_start_and_end() -> None:
    """With a fifth of a CPU jobs must start and end: the operator may be slow, but lose no job and write no more."""
    with ModelServer() as server, Operator(server) as operator:  # type: ignore[arg-type]
        server.apply(manifest("first"))
        until(lambda: len(server.pods()) == NODES, f"the operator acts: {operator.log}")
        with throttled(operator.process.pid):
            names = [f"job-{number}" for number in range(JOBS)]
            for name in names:
                server.apply(manifest(name))
            until(lambda: len(server.pods()) == NODES * (JOBS + 1), "all pods are created")
            server.runs(*server.pods())
            until(lambda: server.states()["Running"] == JOBS + 1, "all jobs run")
            server.exits(*server.pods(), code=0)
            until(lambda: server.states()["Succeeded"] == JOBS + 1, "all jobs have succeeded")
        assert server.seen["POST pods"] == NODES * (JOBS + 1)
        assert operator.process.poll() is None
        assert "ERROR" not in operator.log
