"""What the operator costs in CPU for each pod, without a cluster: a storm of jobs on a model of an API server.

    python bench/storm.py --jobs 100 --nodes 8

The operator is a process of its own, connected over HTTP without TLS, and pods' events are as long as those of a real
API server. `bench/operator_api.py` measures the same on a real one, where times count too: those of this model are its
own, not those of an API server. Prints one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests/support"), str(ROOT / "tests/simulation")]

from clusters import Operator  # noqa: E402
from model_server import ModelServer  # noqa: E402

from ddpjob_operator.job import api as types  # noqa: E402

# A pod on Kubernetes 1.36 that kubelet, scheduler and operator have written has 2.4 kB of it.
MANAGED_FIELDS = [{"manager": "ddpjob-operator", "operation": "Update", "fieldsV1": {"f:spec": "x" * 2_300}}]
SECONDS_MAX = 180.0


def manifest(name: str, nodes: int) -> dict[str, Any]:
    """A job with an image and a command, as most have."""
    container = {"name": "trainer", "image": "trainer", "command": ["torchrun", "train.py"]}
    return {
        "apiVersion": types.API_VERSION,
        "kind": types.KIND,
        "metadata": {"name": name},
        "spec": {"nodes": nodes, "template": {"spec": {"containers": [container]}}},
    }


def until(is_true: Callable[[], bool], what: str) -> None:
    """Waits for a condition without much CPU of its own."""
    end = time.monotonic() + SECONDS_MAX
    while not is_true():
        if time.monotonic() > end:
            sys.exit(f"not within {SECONDS_MAX:.0f} s: {what}")
        time.sleep(0.1)


def storm(jobs: int, nodes: int) -> dict[str, Any]:
    """CPU for each pod until it is created, runs and has ended, and requests for each job."""
    names, pods = [f"job-{i}" for i in range(jobs)], jobs * nodes
    with ModelServer() as server, Operator(server) as operator:  # type: ignore[arg-type]
        server.managed_fields = MANAGED_FIELDS
        server.apply(manifest("first", 1))
        until(lambda: server.pods() == ["first-1-0"], "the operator acts")
        time.sleep(2)
        seen, cpu, idle = server.seen.copy(), [operator.cpu_seconds], operator.memory_bytes

        def done(what: Callable[[], bool], text: str) -> None:
            until(what, text)
            cpu.append(operator.cpu_seconds)

        for name in names:
            server.apply(manifest(name, nodes))
        done(lambda: len(server.pods()) == pods + 1, "all pods are created")
        server.runs(*server.pods())
        done(lambda: server.states()["Running"] == jobs + 1, "all jobs run")
        server.exits(*server.pods(), code=0)
        done(lambda: server.states()["Succeeded"] == jobs + 1, "all jobs have succeeded")
        time.sleep(3)  # the last events
        requests = {what: round(n / jobs, 2) for what, n in sorted((server.seen - seen).items())}
        until_created, until_running, until_ended = (round(1000 * (one - cpu[0]) / pods, 2) for one in cpu[1:])
        return {
            "jobs": jobs,
            "podsPerJob": nodes,
            "cpuMsPerPodUntilCreated": until_created,
            "cpuMsPerPodUntilRunning": until_running,
            "cpuMsPerPodUntilEnded": until_ended,
            "requestsPerJob": requests,
            "memoryMiBIdle": idle >> 20,
            "memoryMiBAtTheEnd": operator.memory_bytes >> 20,
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description="What the operator costs without a cluster; see the head of this file."
    )
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--nodes", type=int, default=8, help="pods per job")
    options = parser.parse_args()
    found = storm(options.jobs, options.nodes)
    print(json.dumps({"cores": os.cpu_count(), "load": os.getloadavg(), **found}, indent=2))


if __name__ == "__main__":
    main()
