"""Memory of the operator in a large cluster, and CPU time of a new leader; without a cluster and without requests.

    python bench/size.py --jobs 1250 --nodes 8

Fills the operator's caches as its first lists do, page by page from JSON as long as a real API server's. Then it
reconciles every job once, like a new leader. Prints one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import msgspec
import orjson

from ddpjob_operator.job import api, validation
from ddpjob_operator.kube.api import reading
from ddpjob_operator.kube.api.client import Client, LoginError, RequestLimits
from ddpjob_operator.kube.api.runtime import SYSTEM
from ddpjob_operator.kube.operator import Operator
from ddpjob_operator.kube.settings import OperatorSettings
from ddpjob_operator.observed.cluster import Observed
from ddpjob_operator.plan.plan import plan
from ddpjob_operator.pods import build

Raw = dict[str, Any]
PAGE = RequestLimits().page
CLUSTER_NODES = 2_000
# As long as managedFields of a real pod on Kubernetes 1.36 after kubelet, scheduler and operator wrote to it: 2.4 kB.
MANAGED_FIELDS = [{"manager": "ddpjob-operator", "operation": "Update", "fieldsV1": {"f:spec": "x" * 2_300}}]
# Kubernetes' own fields of a pod: token, tolerations and conditions. A running pod has 4.7 kB with managedFields.
CONDITIONS = [
    {"type": kind, "status": "True", "lastProbeTime": None, "lastTransitionTime": "2026-11-23T00:00:00Z"}
    for kind in ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled")
]
RUNNING = {
    "phase": "Running",
    "conditions": CONDITIONS,
    "containerStatuses": [
        {
            "name": "trainer",
            "ready": True,
            "restartCount": 0,
            "image": "registry.example.com/team/trainer:1",
            "imageID": "registry.example.com/team/trainer@sha256:" + "0" * 64,
            "containerID": "containerd://" + "0" * 64,
            "state": {"running": {"startedAt": "2026-11-23T00:00:00Z"}},
        }
    ],
}


def manifest(name: str, nodes: int) -> dict[str, Any]:
    """Return a typical job, with an image and a command."""
    container = {"name": "trainer", "image": "trainer", "command": ["torchrun", "train.py"]}
    return {
        "apiVersion": api.API_VERSION,
        "kind": api.KIND,
        "metadata": {"name": name},
        "spec": {"nodes": nodes, "template": {"spec": {"containers": [container]}}},
    }


def _no_login() -> Any:
    raise LoginError("a new leader whose copies are right sends no request")


def job_of(number: int, nodes: int) -> Raw:
    """Return a job as the API server stores it."""
    raw = manifest(f"job-{number:05}", nodes)
    uid = f"00000000-0000-4000-8000-{number:012}"
    raw["metadata"] |= {
        "namespace": f"team-{number % 20}",
        "uid": uid,
        "generation": 1,
        "resourceVersion": str(number + 1),
    }
    return raw


def pods_of(raw: Raw, number: int, nodes: int) -> list[Raw]:
    """Return the job's pods, all running."""
    parsed, problems = validation.parse(raw)
    assert not problems, problems
    pods = []
    for place in range(nodes):
        body = build.pod(parsed, 1, place)
        serial = number * nodes + place
        body["metadata"] |= {
            "uid": f"00000000-0000-4000-9000-{serial:012}",
            "resourceVersion": str(1_000_000 + serial),
            "managedFields": MANAGED_FIELDS,
        }
        body["spec"]["nodeName"] = f"node-{serial % CLUSTER_NODES:04}"
        pods.append({**body, "status": RUNNING})
    return pods


def node_of(number: int) -> Raw:
    """Return a cluster node that is ready."""
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    return {"metadata": {"name": f"node-{number:04}", "uid": f"n{number}", "resourceVersion": "1"}, "status": ready}


def service_of(raw: Raw, number: int) -> Raw:
    body = build.service(validation.parse(raw)[0])
    body["metadata"] |= {"uid": f"00000000-0000-4000-a000-{number:012}", "resourceVersion": str(2_000_000 + number)}
    return body


def put_list(plural: str, objects: list[Raw], sink: Any) -> None:
    """Put a page of a list into a cache, parsed from its JSON as from the API server."""
    text = orjson.dumps({"metadata": {"resourceVersion": "3000000"}, "items": objects})
    for one in reading.page(text, plural).items:
        sink.put(one)


def settled(operator: Operator, raw: Raw) -> Raw:
    """Return the job with the status that an operator would have written."""
    key = (raw["metadata"]["namespace"], raw["metadata"]["name"])
    job, problems = validation.parse(raw)
    running = Observed(service=True, pods=tuple(operator.caches.pods.of(key)), nodes={})
    for seen in (Observed(service=False, pods=()), *[running] * 3):  # the attempt is recorded before pods exist
        todo = plan(job, seen, SYSTEM.now(), problems=problems)
        job = msgspec.structs.replace(job, status=todo.status or job.status)
    assert job.status.state == "Running", job.status
    return {**raw, "status": msgspec.to_builtins(job.status)}


def resident_mib(field: str) -> int:
    """Return VmRSS or VmHWM (the peak so far) of this process in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) >> 10


async def measure(jobs: int, nodes: int) -> Raw:
    """Return the memory of the caches, and the CPU seconds of the first pass over all jobs."""
    operator = Operator(OperatorSettings(), Client(_no_login))
    empty = resident_mib("VmRSS")
    began = time.process_time()
    page: list[Raw] = []
    made = 0.0
    for number in range(jobs):
        before = time.process_time()
        raw = job_of(number, nodes)
        page += pods_of(raw, number, nodes)
        services = [service_of(raw, number)]
        made += time.process_time() - before
        put_list("services", services, operator.caches.services)
        if len(page) >= PAGE or number == jobs - 1:
            put_list("pods", page, operator.caches.pods)
            page = []
    listed = time.process_time() - began - made
    for number in range(jobs):
        operator.caches.jobs.put(reading.job(orjson.loads(orjson.dumps(settled(operator, job_of(number, nodes))))))
    for reflector in operator.reflectors:
        reflector.synced.set()
    for number in range(min(CLUSTER_NODES, jobs * nodes)):
        operator.caches.nodes.put(node_of(number))
    operator.caches.nodes.drop(set(), 1)
    assert (len(operator.caches.jobs), len(operator.caches.pods)) == (jobs, jobs * nodes)
    began = time.process_time()
    for key in operator.caches.jobs:
        await operator.reconciler.reconcile(key)
    passed = time.process_time() - began
    return {
        "jobs": jobs,
        "pods": jobs * nodes,
        "memoryMiBEmpty": empty,
        "memoryMiB": resident_mib("VmRSS"),
        "memoryMiBPeak": resident_mib("VmHWM"),
        "cpuSecondsToReadTheLists": round(listed, 2),
        "cpuSecondsOfTheFirstPass": round(passed, 2),
        "cpuMsPerJobOfTheFirstPass": round(1000 * passed / jobs, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1_250)
    parser.add_argument("--nodes", type=int, default=8, help="pods per job")
    options = parser.parse_args()
    found = asyncio.run(measure(options.jobs, options.nodes))
    print(json.dumps({"cores": os.cpu_count(), "load": os.getloadavg(), **found}, indent=2))


if __name__ == "__main__":
    main()
