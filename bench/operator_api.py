"""Cost of the operator: CPU time per pod, also of the API server, and time until all pods exist.

    KUBECONFIG=… python bench/operator_api.py --jobs 100 --nodes 8 --ends-by KEY=30s

Needs a cluster with simulated nodes (kwok) and a stage that ends pods by the annotation that --ends-by names. A bare
loop, before and after the operator, creates the same number of equal pods, with the same client and as many requests in
flight. Both times end when a watch of full pods in this process has seen the last pod. The watch uses the same CPUs, so
it is also part of the bare loop and of its CPU time. While the operator creates its jobs, a job of one pod is applied
and timed too. Prints one JSON document on stdout.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Iterable
from typing import Any

import common
from clusters import Namespace, Operator, installed_crd, kubectl, until
from faulty_api import FaultyApi
from size import manifest

from ddpjob_operator.job import validation
from ddpjob_operator.kube.api.client import Client, collection
from ddpjob_operator.kube.work.executor import OF_JOB_MAX, STRICT
from ddpjob_operator.pods import build

PROBE = "probe"


def job(name: str, namespace: str, nodes: int, run_for: str) -> dict[str, Any]:
    """Return a job whose pods are running as soon as they have a node. run_for: annotation KEY=VALUE that ends them."""
    made = manifest(name, nodes)
    made["metadata"]["namespace"] = namespace
    made["spec"]["template"]["metadata"] = {"annotations": dict([run_for.split("=", 1)])}
    return made


async def bounded(calls: Iterable[Awaitable[Any]]) -> None:
    """Await the calls with at most the operator's number of requests in flight for one job."""
    slots = asyncio.Semaphore(OF_JOB_MAX)

    async def one(call: Awaitable[Any]) -> None:
        async with slots:
            await call

    await asyncio.gather(*(one(call) for call in calls))


async def bare_loop(namespace: str, pods: int) -> tuple[float, float]:
    """Create this many pods like the operator's, and nothing else. Return the seconds from the first request until a
    watch has seen them all, and the CPU seconds of this process, including the watch."""
    raw = job("bare", namespace, pods, "a=b")
    raw["metadata"]["uid"] = "00000000-0000-0000-0000-000000000000"
    parsed, problems = validation.parse(raw)
    assert not problems, problems
    bodies = [build.pod(parsed, 1, rank) for rank in range(pods)]
    for body in bodies:
        del body["metadata"]["ownerReferences"]  # otherwise the garbage collector deletes these pods at once
    async with Client() as api:
        began, cpu = time.perf_counter(), time.process_time()
        watching = asyncio.ensure_future(all_pods_there(namespace, pods))
        await bounded(api.create(f"/api/v1/namespaces/{namespace}/pods", body, STRICT) for body in bodies)
        seen = await watching
        return max(seen.values()) - began, time.process_time() - cpu


async def all_pods_there(namespace: str, count: int) -> dict[str, float]:
    """Return when (perf_counter) a watch has seen the last pod; repeated lists would load the measured server."""
    path = f"/api/v1/namespaces/{namespace}/pods"
    seen: dict[str, float] = {}
    async with Client() as api:
        while len(seen) < count:  # list and watch again: the server ends the watch of a client that is too slow
            version = ""
            async for page in api.pages(path):
                version = page.version
                for item in page.items:
                    seen.setdefault(item["metadata"]["name"], time.perf_counter())
            if len(seen) >= count:
                break
            async for event in api.watch(path, version):
                if event["type"] == "ADDED":
                    seen[event["object"]["metadata"]["name"]] = time.perf_counter()
                if len(seen) >= count:
                    break
    return seen


async def jobs_until_pods(namespace: str, count: int, nodes: int, run_for: str) -> tuple[float, float]:
    """Create jobs, and after half of several jobs a job of one pod. Return two durations in seconds: from the first
    create to the last pod, and from the answer to the create of the job of one pod until its pod exists."""
    path, applied, probed = collection("ddpjobs", namespace), 0.0, count > 1
    async with Client() as api:

        async def probe() -> None:
            nonlocal applied
            await api.create(path, job(PROBE, namespace, 1, run_for))
            applied = time.perf_counter()

        calls: list[Awaitable[Any]] = [
            api.create(path, job(f"job-{i}", namespace, nodes, run_for)) for i in range(count)
        ]
        calls[count // 2 : count // 2] = [probe()] * probed
        began = time.perf_counter()
        watching = asyncio.ensure_future(all_pods_there(namespace, count * nodes + probed))
        await bounded(calls)
        seen = await watching
    return max(seen.values()) - began, max(0.0, seen.get(f"{PROBE}-1-0", applied) - applied)


def finished(space: Namespace, count: int) -> bool:
    return sum((j.get("status") or {}).get("state") == "Succeeded" for j in space.jobs()) == count


def loops(api: FaultyApi, pods: int) -> tuple[float, float]:
    """Run the loop without the operator in a new namespace, and remove the namespace afterwards."""
    space = Namespace(api).make()
    try:
        return asyncio.run(bare_loop(space.name, pods))
    finally:
        space.kubectl("delete", "pods", "--all", "--wait=false", "--grace-period=0", "--force")
        until(lambda: not space.pods(), "the bare pods are gone", 300)
        space.remove()
        time.sleep(3)


def api_server_seconds() -> float:
    """Return the CPU seconds that the API server has used."""
    lines = kubectl("get", "--raw", "/metrics").splitlines()
    return float(next(line for line in lines if line.startswith("process_cpu_seconds_total ")).split()[1])


def timed(api: FaultyApi, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the operator connected directly to the API server; before and after, a loop without it makes the pods."""
    ours, pods = Namespace(api).make(), options.jobs * options.nodes
    key = options.ends_by.partition("=")[0]

    def per_pod(seconds: float) -> float:
        """Return milliseconds per pod."""
        return round(1000 * seconds / pods, 2)

    try:
        with Operator(api, ours.name, anew=True, kubeconfig=os.environ["KUBECONFIG"]) as operator:
            until(lambda: "services are known" in operator.log, "the operator has started")
            time.sleep(2)
            idle = operator.memory_bytes
            first, _ = asyncio.run(jobs_until_pods(ours.name, 1, 2, f"{key}=1s"))
            until(lambda: finished(ours, 1), "the first job ends")
            ours.kubectl("delete", "ddp", "--all")
            until(lambda: not ours.pods(), "it is gone", 300)
            server = api_server_seconds()
            before, loop_cpu = loops(api, pods)
            cpu, loop_server, server = operator.cpu_seconds, api_server_seconds() - server, api_server_seconds()
            seconds, probe = asyncio.run(jobs_until_pods(ours.name, options.jobs, options.nodes, options.ends_by))
            found = {
                "jobs": options.jobs,
                "podsPerJob": options.nodes,
                "secondsUntilAllPodsExist": round(seconds, 2),
                "secondsOfAJobOfOnePodIntoThem": round(probe, 3),
                "bareLoopCpuMsPerPod": per_pod(loop_cpu),
                "operatorCpuMsPerPodUntilCreated": per_pod(operator.cpu_seconds - cpu),
                "secondsFromApplyToBothPodsOfOneJob": round(first, 3),
                "operatorMemoryMiBIdle": idle >> 20,
            }
            # Printed at once, because the end of the jobs may take longer than the cluster is available.
            print(json.dumps({**found, "secondsOfTheFirstBareLoop": round(before, 2)}), file=sys.stderr)
            until(lambda: finished(ours, options.jobs + (options.jobs > 1)), "all jobs succeed", 600)
            found["operatorCpuMsPerPodUntilFinished"] = per_pod(operator.cpu_seconds - cpu)
            # CPU of the loop includes the deletion of its pods. Both figures include the watches of this process.
            found["apiServerCpuMsPerPodOfTheLoop"] = per_pod(loop_server)
            found["apiServerCpuMsPerPodOfTheJobs"] = per_pod(api_server_seconds() - server)
            found["operatorMemoryMiBAtTheEnd"] = operator.memory_bytes >> 20
        bare = [before, loops(api, pods)[0]]
        ratio = round(2 * seconds / sum(bare), 2)
        return {**found, "secondsOfBareLoops": [round(one, 2) for one in bare], "ratio": ratio}
    finally:
        ours.remove()


def main() -> None:
    options = common.options(__doc__, jobs=100, nodes=8, ends_by="ends-by=30s")
    with FaultyApi() as api, installed_crd():
        print(json.dumps({"machine": common.machine(), "timed": timed(api, options)}, indent=2))


if __name__ == "__main__":
    main()
