"""What gangs and queues cost: what the operator adds to an admission, requests per job, and a crowd of jobs.

    KUBECONFIG=… python bench/gangs.py admission --gang kueue
    KUBECONFIG=… python bench/gangs.py requests --gang native
    KUBECONFIG=… python bench/gangs.py crowd --gang none --jobs 50 --start-deadline 30

Needs a cluster that plays its nodes (kwok, label type=kwok) with a stage that ends pods by the annotation
testbed/run-for, and for --gang native or kueue what tests/api/test_gangs.py and test_queue.py need. Each pod takes a
whole node. Prints one JSON document on stdout.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests/support"))

from clusters import Namespace, Operator, installed_crd, job, until  # noqa: E402
from faulty_api import OWN_TOKEN, FaultyApi  # noqa: E402

from ddpjob_operator.kube.client import Client, collection  # noqa: E402

KUEUE = "/apis/kueue.x-k8s.io/v1beta1"
ENDS_WITHIN_SECONDS = 280.0
LAST_EVENTS_SECONDS = 6.0


def one(name: str, gang: str, nodes: int, run_for: str, **spec: Any) -> dict[str, Any]:
    """A job each of whose pods takes a node of its own, and ends by itself."""
    body = job(name, container={"resources": {"requests": {"cpu": "100"}}}, nodes=nodes, gang=gang, **spec)
    template = body["spec"]["template"]
    template["spec"] |= {"nodeSelector": {"type": "kwok"}, "terminationGracePeriodSeconds": 1}
    template["metadata"] = {"annotations": {"testbed/run-for": run_for}}
    return body


def call(api: FaultyApi, path: str, kind: str, name: str, **spec: Any) -> None:
    version = KUEUE.removeprefix("/apis/")
    api.call("POST", KUEUE + path, {"apiVersion": version, "kind": kind, "metadata": {"name": name}, **spec})


@contextmanager
def queue(space: Namespace, cpus: int) -> Iterator[None]:
    """The LocalQueue `default` with so much quota."""
    name, quota = space.name, [{"name": "cpu", "nominalQuota": cpus}]
    groups = [{"coveredResources": ["cpu"], "flavors": [{"name": name, "resources": quota}]}]
    call(space.api, "/resourceflavors", "ResourceFlavor", name, spec={})
    call(space.api, "/clusterqueues", "ClusterQueue", name, spec={"namespaceSelector": {}, "resourceGroups": groups})
    call(space.api, f"/namespaces/{name}/localqueues", "LocalQueue", "default", spec={"clusterQueue": name})
    try:
        yield
    finally:
        space.kubectl("delete", "ddp", "--all", "--wait=false", check=False)
        space.kubectl("delete", "--wait=false", f"clusterqueue/{name}", f"resourceflavor/{name}", check=False)


class Times:
    """When something was seen first or last, in seconds."""

    def __init__(self) -> None:
        self.first: dict[tuple[str, str], float] = {}
        self.last: dict[tuple[str, str], float] = {}

    def see(self, what: str, name: str) -> None:
        now = time.perf_counter()
        self.first.setdefault((what, name), now)
        self.last[what, name] = now


async def watch(path: str, see: Callable[[Any], None]) -> None:
    async with Client() as api:
        version = ""
        async for page in api.pages(path):
            version = page.version
        async for event in api.watch(path, version):
            if event["type"] in ("ADDED", "MODIFIED"):
                see(event)


def watches(space: Namespace, times: Times, gang: str) -> list[asyncio.Task[None]]:
    """Of jobs, pods and, of a queue, Workloads."""

    def of_job(event: Any) -> None:
        raw = event["object"]
        times.see(str((raw.get("status") or {}).get("state")), raw["metadata"]["name"])

    def of_pod(event: Any) -> None:
        raw = event["object"]
        name = raw["metadata"]["labels"]["training.ddpjob.io/job"]
        if event["type"] == "ADDED":
            times.see("pod made", name)
        elif raw["status"].get("phase") == "Running" and ("ran", raw["metadata"]["name"]) not in times.first:
            times.see("ran", raw["metadata"]["name"])
            times.see("pod runs", name)

    def of_workload(event: Any) -> None:
        raw = event["object"]
        if any(c["type"] == "Admitted" and c["status"] == "True" for c in conditions(raw)):
            times.see("admitted", raw["metadata"]["name"])

    paths = {collection("ddpjobs", space.name): of_job, f"/api/v1/namespaces/{space.name}/pods": of_pod}
    if gang == "kueue":
        paths[f"{KUEUE}/namespaces/{space.name}/workloads"] = of_workload
    return [asyncio.ensure_future(watch(path, see)) for path, see in paths.items()]


def conditions(raw: Any) -> Any:
    return (raw.get("status") or {}).get("conditions") or ()


async def create(space: Namespace, bodies: list[dict[str, Any]]) -> None:
    async with Client() as api:
        await asyncio.gather(*(api.create(collection("ddpjobs", space.name), body) for body in bodies))


async def ended(times: Times, names: list[str], seconds: float) -> bool:
    end = time.perf_counter() + seconds
    while not all(("Succeeded", name) in times.first for name in names):
        if time.perf_counter() > end:
            return False
        await asyncio.sleep(0.1)
    return True


async def one_by_one(space: Namespace, options: argparse.Namespace) -> dict[str, Any]:
    """Jobs that have the cluster for themselves: what lies between their admission and Running, and is ours."""
    times = Times()
    tasks = watches(space, times, options.gang)
    await asyncio.sleep(2)
    names = [f"job-{number}" for number in range(options.jobs)]
    for name in names:
        await create(space, [one(name, options.gang, options.nodes, "1s")])
        assert await ended(times, [name], 60), f"{name} has not ended"
    for task in tasks:
        task.cancel()
    began = "admitted" if options.gang == "kueue" else "Pending"
    to_pods = [times.last["pod made", n] - times.first[began, n] for n in names]
    to_running = [times.first["Running", n] - times.last["pod runs", n] for n in names]
    sums = [a + b for a, b in zip(to_pods, to_running, strict=True)]
    found = {f"from {began} to the last pod": to_pods, "from the last pod that runs to Running": to_running}
    return {"milliseconds (median, least, most)": {k: spread(v) for k, v in {**found, "both": sums}.items()}}


def spread(seconds: list[float]) -> list[int]:
    return [round(1000 * value) for value in (statistics.median(seconds), min(seconds), max(seconds))]


async def crowd(space: Namespace, options: argparse.Namespace) -> dict[str, Any]:
    """All at once, with room for half of them."""
    times = Times()
    tasks = watches(space, times, options.gang)
    await asyncio.sleep(2)
    names = [f"job-{number}" for number in range(options.jobs)]
    deadline = {"startDeadlineSeconds": options.start_deadline} if options.start_deadline else {}
    began = time.perf_counter()
    await create(space, [one(n, options.gang, options.nodes, options.run_for, **deadline) for n in names])
    all_ended = await ended(times, names, ENDS_WITHIN_SECONDS)
    for task in tasks:
        task.cancel()
    ends = [times.first["Succeeded", n] - began for n in names if ("Succeeded", n) in times.first]
    found = {j["metadata"]["name"]: j.get("status") or {} for j in space.jobs()}
    attempts = collections.Counter(status.get("attempt", 0) for status in found.values())
    return {
        "allEnded": all_ended,
        "jobsEnded": len(ends),
        "secondsUntilTheLastEnd": round(max(ends, default=0.0), 1),
        "secondsUntilHalfHaveEnded": round(sorted(ends)[len(ends) // 2], 1) if ends else None,
        "jobsByAttempts": dict(sorted(attempts.items())),
    }


def counted(space: Namespace, options: argparse.Namespace) -> dict[str, Any]:
    """Requests of the operator per job from create to end; it goes through a proxy."""
    began = time.monotonic()
    names = [f"job-{number}" for number in range(options.jobs)]
    for name in names:
        asyncio.run(create(space, [one(name, options.gang, options.nodes, "2s")]))
        until(lambda: space.status(name).get("state") == "Succeeded", f"{name} ends", 60)  # noqa: B023
    time.sleep(LAST_EVENTS_SECONDS)
    seen = [str(s) for s in space.api.seen if s.at >= began and s.verb not in ("watch", "list")]
    per_job = {what: round(n / len(names), 2) for what, n in sorted(collections.Counter(seen).items())}
    return {"requestsPerJob": per_job, "sumPerJob": round(sum(per_job.values()), 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description="What gangs and queues cost; see the head of this file.")
    parser.add_argument("what", choices=("admission", "requests", "crowd"))
    parser.add_argument("--gang", choices=("none", "native", "kueue"), required=True)
    parser.add_argument("--jobs", type=int, default=10)
    parser.add_argument("--nodes", type=int, default=8, help="pods per job")
    parser.add_argument("--room", type=int, default=25, help="jobs that fit into the queue's quota at once")
    parser.add_argument("--run-for", default="5s", help="crowd: how long a pod runs")
    parser.add_argument("--start-deadline", type=int, default=0, help="crowd: startDeadlineSeconds; 0: the default")
    options = parser.parse_args()
    with FaultyApi() as api, installed_crd():
        space = Namespace(api).make()
        gangs = "" if options.gang == "none" else options.gang
        proxied = {"token": OWN_TOKEN} if options.what == "requests" else {"kubeconfig": os.environ["KUBECONFIG"]}
        operator = Operator(api, space.name, DDPJOB_GANGS=gangs, **proxied)
        try:
            with operator:
                until(lambda: "services are known" in operator.log, "the operator has started", 60)
                time.sleep(2)
                if options.gang == "kueue":
                    with queue(space, 100 * options.nodes * options.room):
                        found = measured(space, options)
                else:
                    found = measured(space, options)
        finally:
            space.remove()
    print(json.dumps({"load": os.getloadavg(), "what": vars(options), **found}, indent=1))


def measured(space: Namespace, options: argparse.Namespace) -> dict[str, Any]:
    if options.what == "requests":
        return counted(space, options)
    return asyncio.run(one_by_one(space, options) if options.what == "admission" else crowd(space, options))


if __name__ == "__main__":
    main()
