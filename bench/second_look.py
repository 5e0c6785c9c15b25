"""What it costs to look for changes that a watch has not shown (kube/second_look.py), and to read an event of a pod.

    KUBECONFIG=… python bench/second_look.py --pods 400
    python bench/second_look.py --no-cluster

With a cluster it creates pods as the operator makes them, lists their names and versions as the operator does every
LOOK_SECONDS, and deletes them. Prints one JSON document on stdout.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests/support")]

from clusters import Namespace  # noqa: E402
from faulty_api import FaultyApi  # noqa: E402
from operator_api import bare_loop, client, job  # noqa: E402

from ddpjob_operator.job import validation  # noqa: E402
from ddpjob_operator.kube import observe, reading  # noqa: E402
from ddpjob_operator.kube.second_look import LOOK_SECONDS  # noqa: E402
from ddpjob_operator.pods import build, naming  # noqa: E402

LOOKS = 20


def event() -> bytes:
    """Of a pod of an 8-node job that runs, as an API server sends it: with defaults and managedFields."""
    raw = job("bench", "default", 8, "")
    raw["metadata"]["uid"] = "00000000-0000-0000-0000-000000000000"
    parsed, problems = validation.parse(raw)
    assert not problems, problems
    body = build.pod(parsed, 1, 3)
    body["metadata"] |= {"uid": "1", "resourceVersion": "7"}
    state = {"name": "trainer", "image": "trainer", "ready": True, "state": {"running": {"startedAt": None}}}
    kinds = ("PodScheduled", "Initialized", "Ready", "ContainersReady")
    conditions = [{"type": kind, "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"} for kind in kinds]
    body["status"] = {"phase": "Running", "conditions": conditions, "containerStatuses": [state]}
    body["metadata"]["managedFields"] = [{"manager": "ddpjob-operator", "fieldsV1": _fields(body)}]
    return orjson.dumps({"type": "MODIFIED", "object": body})


def _fields(value: Any) -> Any:
    if isinstance(value, dict):
        return {f"f:{name}": _fields(one) for name, one in value.items()}
    if isinstance(value, list):
        return {f"k:{i}": _fields(one) for i, one in enumerate(value)}
    return {}


def microseconds(work: Callable[[], object], times: int = 2000) -> float:
    """CPU of one call."""
    work()
    began = time.process_time()
    for _ in range(times):
        work()
    return round(1e6 * (time.process_time() - began) / times, 1)


def reading_cost() -> dict[str, float]:
    line = event()
    seen = reading.event(line, "pods")["object"]
    assert observe.pod(seen) == observe.pod(reading.event(line)["object"])
    return {
        "bytes": len(line),
        "usToReadItWhole": microseconds(lambda: reading.event(line)),
        "usToReadWhatIsNeeded": microseconds(lambda: reading.event(line, "pods")),
        "usToCutIt": microseconds(lambda: observe.pod(seen)),
    }


async def looks(namespace: str) -> dict[str, float]:
    """Of LOOKS in a row: bytes, seconds, and CPU of this process."""
    size = 0
    whole = reading.page

    def page(content: bytes, kind: str = "") -> reading.Listed:
        nonlocal size
        size += len(content)
        return whole(content, kind)

    vars(reading)["page"] = page
    objects = 0
    async with client() as api:
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(LOOKS):
            async for found in api.versions(f"/api/v1/namespaces/{namespace}/pods", naming.LABEL_JOB):
                objects += len(found.items)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    return {
        "pods": objects // LOOKS,
        "bytesPerPod": round(size / objects),
        "usPerPod": round(1e6 * seconds / objects, 1),
        "usOfOwnCpuPerPod": round(1e6 * cpu / objects, 1),
        "looksPerHour": round(3600 / LOOK_SECONDS),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="What a second look costs; see the head of this file.")
    parser.add_argument("--pods", type=int, default=400)
    parser.add_argument("--no-cluster", action="store_true", help="only what needs none")
    options = parser.parse_args()
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg()}
    result: dict[str, Any] = {"machine": machine, "event": reading_cost()}
    if not options.no_cluster:
        with FaultyApi() as api:
            space = Namespace(api).make()
            try:
                asyncio.run(bare_loop(space.name, options.pods))
                result["look"] = asyncio.run(looks(space.name))
            finally:
                space.remove()
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
