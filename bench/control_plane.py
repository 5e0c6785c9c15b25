"""What jobs cost the control plane, beside bare pods of the same spec: CPU of its processes for each pod until all run.

    KUBECONFIG=… python bench/control_plane.py --jobs 50 --nodes 8 --rounds 2

Runs on the machine of a control plane that has its nodes played (kwok), since the CPU is read from /proc, by the names
of the processes. A round takes each way of --ways in turn: minimal pods, the operator's pods without and with their
variables, jobs with one operator, jobs with two. Nothing of one way is left when the next begins, and the processes
have come to rest. What they take then is taken off. The difference between two ways is the cost of what the second
adds. Prints one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests/support")]

from clusters import Namespace, Operator, installed_crd, until  # noqa: E402
from faulty_api import FaultyApi  # noqa: E402
from operator_api import bounded, client, create_jobs, job  # noqa: E402

from ddpjob_operator.job import validation  # noqa: E402
from ddpjob_operator.kube.api.limit import at_most  # noqa: E402
from ddpjob_operator.kube.work.executor import STRICT  # noqa: E402
from ddpjob_operator.pods import build  # noqa: E402

PROCESSES = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "etcd")
OF_THE_GOAL = PROCESSES[:3]
OPERATORS = {"one operator": 1, "two operators": 2}
MINIMAL, NO_VARIABLES, BARE = "minimal", "no variables", "bare"
WAYS = (MINIMAL, NO_VARIABLES, BARE, *OPERATORS)
REST_SECONDS, SETTLE_SECONDS, RUN_SECONDS_MAX = 5.0, 4.0, 300.0
REST_SECONDS_MAX, AT_REST = 300.0, 0.4
Cpu = dict[str, float]


def cpu_seconds() -> Cpu:
    """Of each process of the control plane so far. Exits where there is not one of each."""
    found: dict[str, list[float]] = {name: [] for name in PROCESSES}
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, IndexError):
            if folder.name.isdecimal() and (name := _program(folder)) in found:
                fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
                found[name].append((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
    if wrong := [f"{len(times)} of {name}" for name, times in found.items() if len(times) != 1]:
        sys.exit(f"/proc must show one process of each part of the control plane, and has {', '.join(wrong)}")
    return {name: times[0] for name, times in found.items()}


def _program(process: Path) -> str:
    return (process / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace").rpartition("/")[2]


def less(after: Cpu, before: Cpu) -> Cpu:
    """What was spent in between."""
    return {name: after[name] - before[name] for name in after}


def rest() -> Cpu:
    """Parts of a core that each takes at rest: once they take no more than in the five seconds before, because etcd and
    the garbage collector work on what was deleted for up to a minute. Exits where that does not come."""
    last, end = float("inf"), time.monotonic() + REST_SECONDS_MAX
    while time.monotonic() < end:
        start = cpu_seconds()
        time.sleep(REST_SECONDS)
        found = {name: spent / REST_SECONDS for name, spent in less(cpu_seconds(), start).items()}
        if (now := sum(found.values())) < AT_REST and now > last - 0.03:
            return found
        last = now
    sys.exit(f"not within {REST_SECONDS_MAX:.0f} s: the control plane takes less than {AT_REST} of a core")


async def bare_pods(namespace: str, groups: int, nodes: int, way: str) -> None:
    """As many pods as jobs have, as the operator makes them or less, by a loop of creates."""
    async with client() as api:
        calls: list[Awaitable[Any]] = []
        for number in range(groups):
            raw = job(f"job-{number}", namespace, nodes, "")
            raw["metadata"]["uid"] = "00000000-0000-0000-0000-000000000000"
            parsed, problems = validation.parse(raw)
            assert not problems, problems
            for rank in range(nodes):
                body = build.pod(parsed, 1, rank)
                del body["metadata"]["ownerReferences"]  # the garbage collector would delete them at once
                if way != BARE:
                    del body["spec"]["containers"][0]["env"]
                if way == MINIMAL:
                    trainer = {"name": "trainer", "image": "trainer", "command": ["torchrun", "train.py"]}
                    body["metadata"] = {name: body["metadata"][name] for name in ("name", "namespace")}
                    body["spec"] = {"containers": [trainer]}
                calls.append(api.create(f"/api/v1/namespaces/{namespace}/pods", body, STRICT))
        await bounded(calls)


async def until_all_run(namespace: str, count: int, making: Awaitable[Any]) -> None:
    """Wait by a watch, because lists would load the server that is measured."""
    path, running = f"/api/v1/namespaces/{namespace}/pods", set[str]()
    async with at_most(RUN_SECONDS_MAX), client() as api:
        version = [page.version async for page in api.pages(path)][-1]
        made = asyncio.ensure_future(making)
        while len(running) < count:  # the server ends the watch of a reader that it finds slow
            async for event in api.watch(path, version):
                raw = event["object"]
                version = raw["metadata"]["resourceVersion"]
                if (raw.get("status") or {}).get("phase") == "Running":
                    running.add(raw["metadata"]["name"])
                if len(running) >= count:
                    break
        await made


@contextlib.contextmanager
def operators(api: FaultyApi, namespace: str, count: int) -> Iterator[list[Operator]]:
    """So many replicas, of which one leads."""
    lease = {"DDPJOB_LEASE_NAMESPACE": namespace}
    with contextlib.ExitStack() as ends:
        made = [
            ends.enter_context(
                Operator(
                    api,
                    namespace,
                    kubeconfig=os.environ["KUBECONFIG"],
                    **lease,
                    DDPJOB_POD_NAME=f"operator-{number}",
                )
            )
            for number in range(count)
        ]
        for one in made:
            until(lambda one=one: "services are known" in one.log, "an operator has its lists", 60)
        until(lambda: not made or any("this operator leads" in one.log for one in made), "one of them leads", 60)
        yield made


def measure(api: FaultyApi, way: str, jobs: int, nodes: int) -> dict[str, float]:
    """CPU in ms for each pod, in one namespace that is gone afterwards."""
    space, pods = Namespace(api).make(), jobs * nodes
    try:
        with operators(api, space.name, OPERATORS.get(way, 0)) as running:
            at_rest = rest()
            before, began = cpu_seconds(), time.monotonic()
            ours = sum(one.cpu_seconds for one in running)
            making = create_jobs(space.name, jobs, nodes, "") if running else bare_pods(space.name, jobs, nodes, way)
            asyncio.run(until_all_run(space.name, pods, making))
            seconds = time.monotonic() - began
            time.sleep(SETTLE_SECONDS)  # the last statuses, Events and endpoints
            spent, lasted = less(cpu_seconds(), before), time.monotonic() - began
            ours = sum(one.cpu_seconds for one in running) - ours
            ms = {name: 1000 * (spent[name] - at_rest[name] * lasted) / pods for name in PROCESSES}
            space.kubectl("delete", "ddp,pods", "--all", "--wait=false", "--grace-period=0", "--force")
            until(lambda: not space.pods(), "the pods are gone", 300, every=1.0)
        of_goal = sum(ms[name] for name in OF_THE_GOAL)
        return {**ms, "all but etcd": of_goal, "operators": 1000 * ours / pods, "seconds until all run": seconds}
    finally:
        space.remove()
        time.sleep(SETTLE_SECONDS)


def main() -> None:
    parser = argparse.ArgumentParser(description="What jobs cost the control plane; see the head of this file.")
    parser.add_argument("--jobs", type=int, default=50)
    parser.add_argument("--nodes", type=int, default=8, help="pods per job")
    parser.add_argument("--rounds", type=int, default=2, help="medians are printed (%(default)s)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, metavar="WAY", help=", ".join(WAYS))
    options = parser.parse_args()
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in options.ways}
    load = os.getloadavg()
    with FaultyApi() as api, installed_crd():
        for _ in range(options.rounds):
            for way in options.ways:
                found = measure(api, way, options.jobs, options.nodes)
                runs[way].append(found)
                print(json.dumps({way: {name: round(value, 2) for name, value in found.items()}}), file=sys.stderr)
    medians = {
        way: {name: statistics.median(one[name] for one in found) for name in found[0]} for way, found in runs.items()
    }
    first = medians[options.ways[0]]["all but etcd"]
    print(
        json.dumps(
            {
                "cores": os.cpu_count(),
                "load": load,
                "jobs": options.jobs,
                "podsPerJob": options.nodes,
                "msOfCpuPerPod": {way: {n: round(v, 2) for n, v in found.items()} for way, found in medians.items()},
                "timesTheFirst": {way: round(found["all but etcd"] / first, 2) for way, found in medians.items()},
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
