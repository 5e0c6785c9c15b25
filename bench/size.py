"""Memory of the operator in a large cluster, and CPU time of a new leader; without a cluster and without requests.

    python bench/size.py --jobs 1250 --nodes 8           # pods of each job
    python bench/size.py --jobs 0 --stored 2000          # and suspended jobs of 280 kB, in one namespace

Fills the operator's caches as its first lists do, page by page from JSON as long as a real API server's. Then it
reconciles every job once, like a new leader. Prints one JSON document.
"""

import asyncio
import functools
import json
import random
import string
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import msgspec
import orjson

from ddpjob_operator.job import api, validation
from ddpjob_operator.kube.api import bounded_json
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
STORED_FIELDS = 3_250  # fields of 76 characters in the spec of a stored job, just below the operator's limit
# As long as managedFields of a real pod on Kubernetes 1.36 after kubelet, scheduler and operator wrote to it: 2.4 kB.
MANAGED_FIELDS = [{"manager": "ddpjob-operator", "operation": "Update", "fieldsV1": {"f:spec": "x" * 2_300}}]
# Kubernetes' own fields of a pod: token, tolerations and conditions. A running pod has 4.7 kB with managedFields.
CONDITIONS = [
    {"type": kind, "status": "True", "lastProbeTime": None, "lastTransitionTime": "2026-11-23T00:00:00Z"}
    for kind in ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled")
]
CONTAINER = {
    "name": "trainer",
    "ready": True,
    "restartCount": 0,
    "image": "registry.example.com/team/trainer:1",
    "imageID": "registry.example.com/team/trainer@sha256:" + "0" * 64,
    "containerID": "containerd://" + "0" * 64,
    "state": {"running": {"startedAt": "2026-11-23T00:00:00Z"}},
}
RUNNING = {"phase": "Running", "conditions": CONDITIONS, "containerStatuses": [CONTAINER]}


def manifest(name: str, nodes: int, **pod: Any) -> Raw:
    """Return a typical job, with an image and a command. pod: more fields of the pods' spec."""
    container = {"name": "trainer", "image": "trainer", "command": ["torchrun", "train.py"]}
    spec = {"nodes": nodes, "template": {"spec": {"containers": [container], **pod}}}
    return {"apiVersion": api.API_VERSION, "kind": api.KIND, "metadata": {"name": name}, "spec": spec}


def _no_login() -> Any:
    raise LoginError("a new leader whose copies are right sends no request")


def with_identity(raw: Raw, kind: int, number: int, **metadata: Any) -> Raw:
    """Add what the API server adds to the metadata of a new object. kind: a digit, because uids differ by kind."""
    uid, version = f"00000000-0000-4000-{kind}000-{number:012}", str(kind * 1_000_000 + number + 1)
    raw["metadata"] |= {"uid": uid, "resourceVersion": version, **metadata}
    return raw


def job_of(number: int, nodes: int) -> Raw:
    """Return a job as the API server stores it."""
    return with_identity(manifest(f"job-{number:05}", nodes), 0, number, namespace=f"team-{number % 20}", generation=1)


@functools.cache
def _fields(seed: int) -> dict[str, str]:
    draw = random.Random(seed)
    texts = ("".join(draw.choices(string.ascii_letters, k=76)) for _ in range(STORED_FIELDS))
    return {text[:36]: text[36:] for text in texts}


def stored_of(number: int) -> Raw:
    """Return a suspended job of 280 kB as the API server stores it."""
    raw = manifest(f"stored-{number}", 1, zz=_fields(number % 8))
    raw["spec"]["suspend"] = True
    return with_identity(raw, 3, number, namespace="stored", generation=1)


def pods_of(raw: Raw, number: int, nodes: int) -> Iterator[Raw]:
    """Yield the job's pods, all running."""
    parsed, problems = validation.parse(raw)
    assert not problems, problems
    for place in range(nodes):
        serial = number * nodes + place
        body = with_identity(build.pod(parsed, 1, place), 1, serial, managedFields=MANAGED_FIELDS)
        body["spec"]["nodeName"] = f"node-{serial % CLUSTER_NODES:04}"
        yield {**body, "status": RUNNING}


def node_of(number: int) -> Raw:
    """Return a cluster node that is ready."""
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    return {"metadata": {"name": f"node-{number:04}", "uid": f"n{number}", "resourceVersion": "1"}, "status": ready}


def put_list(plural: str, objects: list[Raw], sink: Any) -> None:
    """Put a page of a list into a cache, parsed from its JSON as from the API server."""
    text = orjson.dumps({"metadata": {"resourceVersion": "3000000"}, "items": objects})
    for one in bounded_json.page(text, plural).items:
        sink.put(one)


def settled(operator: Operator, raw: Raw, state: str) -> bytes:
    """Return the JSON of the job with the status that an operator would have written."""
    job, problems = validation.parse(raw)
    pods = tuple(operator.caches.pods.of((raw["metadata"]["namespace"], raw["metadata"]["name"])))
    running = Observed(service=bool(pods), pods=pods, nodes={})
    for seen in (Observed(service=False, pods=()), *[running] * 3):  # the attempt is recorded before pods exist
        todo = plan(job, seen, SYSTEM.now(), problems=problems)
        job = msgspec.structs.replace(job, status=todo.status or job.status)
    assert job.status.state == state, job.status
    return orjson.dumps({**raw, "status": msgspec.to_builtins(job.status)})


def resident_mib(field: str) -> int:
    """Return VmRSS or VmHWM (the peak so far) of this process in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) >> 10


async def measure(jobs: int, nodes: int, stored: int) -> Raw:
    """Return the memory of the caches, and the CPU seconds of the first pass over all jobs."""
    operator = Operator(OperatorSettings(), Client(_no_login))
    caches, empty = operator.caches, resident_mib("VmRSS")
    page: list[Raw] = []
    began, made = time.process_time(), 0.0
    for number in range(jobs):
        before = time.process_time()
        raw = job_of(number, nodes)
        page += pods_of(raw, number, nodes)
        services = [with_identity(build.service(validation.parse(raw)[0]), 2, number)]
        made += time.process_time() - before
        put_list("services", services, caches.services)
        if len(page) >= PAGE or number == jobs - 1:
            put_list("pods", page, caches.pods)
            page = []
    listed = time.process_time() - began - made
    for number in range(jobs):
        caches.jobs.put(bounded_json.job(orjson.loads(settled(operator, job_of(number, nodes), "Running"))))
    for number in range(stored):
        caches.jobs.put(bounded_json.stored_job(settled(operator, stored_of(number), "Suspended")))
    for reflector in operator.reflectors:
        reflector.synced.set()
    for number in range(min(CLUSTER_NODES, jobs * nodes)):
        caches.nodes.put(node_of(number))
    caches.nodes.drop(set(), 1)
    assert (len(caches.jobs), len(caches.pods)) == (jobs + stored, jobs * nodes)
    began = time.process_time()
    for key in caches.jobs:
        await operator.reconciler.reconcile(key)
    passed = time.process_time() - began
    return {
        "jobs": jobs + stored,
        "pods": jobs * nodes,
        "memoryMiBEmpty": empty,
        "memoryMiB": resident_mib("VmRSS"),
        "memoryMiBPeak": resident_mib("VmHWM"),
        "cpuSecondsToReadTheLists": round(listed, 2),
        "cpuSecondsOfTheFirstPass": round(passed, 2),
    }


if __name__ == "__main__":
    options = common.options(__doc__, jobs=1_250, nodes=8, stored=0)
    found = asyncio.run(measure(options.jobs, options.nodes, options.stored))
    print(json.dumps({"machine": common.machine(), **found}, indent=2))
