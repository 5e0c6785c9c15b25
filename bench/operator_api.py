"""Cost of the operator: CPU time per pod, and time until all pods exist. job_cost.py measures the API server.

    KUBECONFIG=… python bench/operator_api.py --jobs 100 --nodes 8 --ends-by KEY=30s

Needs a cluster with simulated nodes (kwok) and a stage that ends pods by the annotation that --ends-by names. A bare
loop, before and after the operator, creates the same number of equal pods, with the same client and as many requests in
flight. Both times end when a watch of full pods in this process has seen the last pod. The watch uses the same CPUs, so
it is also part of the bare loop and of its CPU time. While the operator creates its jobs, a job of one pod is applied
and timed too. Prints one JSON document on stdout.
"""

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

import common
from clusters import Namespace, Operator, installed_crd, read, until
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


async def bounded(calls: Callable[[Client], Iterable[Awaitable[Any]]]) -> None:
    """Send requests like the operator: with its client, and as many at a time as it sends for one job."""
    slots = asyncio.Semaphore(OF_JOB_MAX)

    async def one(call: Awaitable[Any]) -> None:
        async with slots:
            await call

    async with Client() as client:
        await asyncio.gather(*(one(call) for call in calls(client)))


@contextlib.contextmanager
def namespace(api: FaultyApi) -> Iterator[Namespace]:
    """Yield a new namespace, and wait until it is gone afterwards."""
    space = Namespace(api).make()
    try:
        yield space
    finally:
        space.remove()
        until(lambda: read(f"/api/v1/namespaces/{space.name}") is None, f"{space.name} is gone", 300, 1.0)


async def bare_loop(api: FaultyApi, pods: int) -> tuple[float, float]:
    """Create this many pods like the operator's, and nothing else. Return the seconds from the first request until a
    watch has seen them all, and the CPU seconds of this process, including the watch."""
    with namespace(api) as space:
        raw = job("bare", space.name, pods, "a=b")
        raw["metadata"]["uid"] = "00000000-0000-0000-0000-000000000000"
        parsed, _ = validation.parse(raw)
        bodies = [build.pod(parsed, 1, rank) for rank in range(pods)]
        for body in bodies:  # otherwise the garbage collector deletes these pods at once
            del body["metadata"]["ownerReferences"]
        began, cpu = time.perf_counter(), time.process_time()
        watching = asyncio.ensure_future(all_pods_there(space.name, pods))
        await bounded(lambda client: (client.create(collection("pods", space.name), body, STRICT) for body in bodies))
        return max((await watching).values()) - began, time.process_time() - cpu


async def all_pods_there(namespace: str, count: int) -> dict[str, float]:
    """Return when (perf_counter) a watch has seen each pod; repeated lists would load the measured server."""
    seen: dict[str, float] = {}
    async with Client() as api:
        while len(seen) < count:  # watch again: the server ends the watch of a client that is too slow
            async for event in api.watch(collection("pods", namespace), ""):  # "": existing pods are added first
                if event["type"] == "ADDED":
                    seen.setdefault(event["object"]["metadata"]["name"], time.perf_counter())
                if len(seen) >= count:
                    break
    return seen


async def jobs_until_pods(namespace: str, count: int, nodes: int, run_for: str) -> tuple[float, float]:
    """Create jobs, and after half of several jobs a job of one pod. Return two durations in seconds: from the first
    create to the last pod, and from the answer to the create of the job of one pod until its pod exists."""
    applied, probed = 0.0, count > 1
    jobs = [job(f"job-{number}", namespace, nodes, run_for) for number in range(count)]
    jobs[count // 2 : count // 2] = [job(PROBE, namespace, 1, run_for)] * probed

    async def create(client: Client, body: dict[str, Any]) -> None:
        nonlocal applied
        await client.create(collection("ddpjobs", namespace), body)
        applied = time.perf_counter() if body["metadata"]["name"] == PROBE else applied

    began = time.perf_counter()
    watching = asyncio.ensure_future(all_pods_there(namespace, count * nodes + probed))
    await bounded(lambda client: (create(client, body) for body in jobs))
    seen = await watching
    return max(seen.values()) - began, max(0.0, seen.get(f"{PROBE}-1-0", applied) - applied)


def finished(space: Namespace, count: int) -> bool:
    return sum((j.get("status") or {}).get("state") == "Succeeded" for j in space.jobs()) == count


def timed(api: FaultyApi, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the operator connected directly to the API server; before and after, a loop without it makes the pods."""
    pods, key = options.jobs * options.nodes, options.ends_by.partition("=")[0]
    with namespace(api) as ours:
        with Operator(api, ours.name, anew=True, kubeconfig=os.environ["KUBECONFIG"]) as operator:
            until(lambda: "services are known" in operator.log, "the operator has started")
            time.sleep(2)
            idle = operator.memory_bytes
            first, _ = asyncio.run(jobs_until_pods(ours.name, 1, 2, f"{key}=1s"))
            until(lambda: finished(ours, 1), "the first job ends")
            ours.kubectl("delete", "ddp", "--all")
            until(lambda: not ours.pods(), "it is gone", 300)
            before, loop_cpu = asyncio.run(bare_loop(api, pods))
            cpu = operator.cpu_seconds
            seconds, probe = asyncio.run(jobs_until_pods(ours.name, options.jobs, options.nodes, options.ends_by))
            found = {
                "jobs": options.jobs,
                "podsPerJob": options.nodes,
                "secondsUntilAllPodsExist": round(seconds, 2),
                "secondsOfAJobOfOnePodIntoThem": round(probe, 3),
                "bareLoopCpuMsPerPod": round(1000 * loop_cpu / pods, 2),
                "operatorCpuMsPerPodUntilCreated": round(1000 * (operator.cpu_seconds - cpu) / pods, 2),
                "secondsFromApplyToBothPodsOfOneJob": round(first, 3),
                "operatorMemoryMiBIdle": idle >> 20,
            }
            # Printed at once, because the end of the jobs may take longer than the cluster is available.
            print(json.dumps({**found, "secondsOfTheFirstBareLoop": round(before, 2)}), file=sys.stderr)
            until(lambda: finished(ours, options.jobs + (options.jobs > 1)), "all jobs succeed", 600)
            found["operatorMemoryMiBAtTheEnd"] = operator.memory_bytes >> 20
        bare = [before, asyncio.run(bare_loop(api, pods))[0]]
        ratio = round(2 * seconds / sum(bare), 2)
        return {**found, "secondsOfBareLoops": [round(one, 2) for one in bare], "ratio": ratio}


def main() -> None:
    options = common.options(__doc__, jobs=100, nodes=8, ends_by="ends-by=30s")
    with FaultyApi() as api, installed_crd():
        print(json.dumps({"machine": common.machine(), "timed": timed(api, options)}, indent=2))


if __name__ == "__main__":
    main()
