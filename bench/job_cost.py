"""Measure what a job costs the API server, part by part, in CPU time per pod; and the operator's own CPU time.

    KUBECONFIG=… python bench/job_cost.py --jobs 100 --nodes 8 --rounds 3
    KUBECONFIG=… python bench/job_cost.py --url ""      # pods of an operator that receives no progress reports

Runs on the machine of an API server with simulated nodes (kwok), because it reads CPU times from /proc. Each of PARTS
adds a part of what the operator creates: all jobs get their objects with the parts so far, until all pods are running.
So a part costs the difference to the part before. Requests cost their price times the number that the operator sends.
What the server uses at rest is subtracted. Prints each round, and the medians.
"""

import asyncio
import datetime as dt
import json
import os
import re
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import common
import psutil
from clusters import METADATA, Namespace, Operator, installed_crd, read, until
from faulty_api import FaultyApi
from operator_api import bounded, job, namespace

from ddpjob_operator.job import api, validation
from ddpjob_operator.kube.api.client import Client, collection
from ddpjob_operator.kube.work import events
from ddpjob_operator.kube.work.executor import STATUS, STRICT
from ddpjob_operator.plan.actions import Event
from ddpjob_operator.pods import build

PARTS = MINIMAL, FIELDS, _, SERVICE = "minimal pod", "other fields", "variables", "Service and endpoints"
SENT = {  # labels in the API server's metric of answered requests
    "job": 'resource="ddpjobs".*subresource="",verb="POST"',
    "status write": 'resource="ddpjobs".*subresource="status",verb="PUT"',
    "Event": 'group="",resource="events".*verb="POST"',
}
REST_SECONDS, SETTLE_SECONDS = 5.0, 3.0


def cost(server: psutil.Process, units: int, work: Callable[[], object]) -> float:
    """Return the server's milliseconds of CPU for one of `units` of work, without what it uses at rest."""
    used = [sum(server.cpu_times()[:2])]
    while len(used) < 3 or used[-1] - used[-2] < used[-2] - used[-3] - 0.1:  # until its use falls no more
        time.sleep(REST_SECONDS)
        used.append(sum(server.cpu_times()[:2]))
    began, rest = time.monotonic(), (used[-1] - used[-3]) / (2 * REST_SECONDS)
    work()
    time.sleep(SETTLE_SECONDS)  # for endpoints, and for what watches still send
    return 1000 * (sum(server.cpu_times()[:2]) - used[-1] - rest * (time.monotonic() - began)) / units


def sent() -> dict[str, float]:
    """Return how many requests of each kind the API server has answered."""
    text = (read("/metrics") or b"").decode()
    found = {what: re.findall(rf"apiserver_request_total.*{one}.* (\S+)\n", text) for what, one in SENT.items()}
    return {what: sum(map(float, counts)) for what, counts in found.items()}


def create(space: Namespace, plural: str, bodies: Iterable[dict[str, Any]]) -> None:
    asyncio.run(bounded(lambda to: (to.create(collection(plural, space.name), body, STRICT) for body in bodies)))


def create_jobs(space: Namespace, given: Any) -> None:
    create(space, api.PLURAL, (job(f"job-{n}", space.name, given.nodes, "a=b") for n in range(given.jobs)))


def pod(one: api.DDPJob, place: int, part: str, url: str) -> dict[str, Any]:
    """Return a pod as the operator builds it, with the parts up to this one."""
    body = build.pod(one, 1, place, reporting=build.Reporting(url) if url else None)
    if part in (MINIMAL, FIELDS):
        del body["spec"]["containers"][0]["env"]
    if part == MINIMAL:
        return {**body, "metadata": {"name": body["metadata"]["name"]}, "spec": one.spec.template["spec"]}
    return body


def start(space: Namespace, part: str, given: Any) -> None:
    """Create what the operator would create, up to this part, and wait until all pods are running."""
    jobs = [validation.parse(raw)[0] for raw in space.jobs()]
    create(space, "services", (build.service(one) for one in jobs if part == SERVICE))
    create(space, "pods", (pod(one, place, part, given.url) for one in jobs for place in range(given.nodes)))
    all_run(space, "pods", "status.phase")


def all_run(space: Namespace, plural: str, field: str) -> None:
    """Wait until this field is Running in all objects. Only names are read, and only of the others."""
    others = f"{collection(plural, space.name)}?fieldSelector={field}!%3DRunning"
    until(lambda: not space.api.call("GET", others, accept=METADATA)["items"], f"all {plural} run", 300, every=1.0)


async def write_statuses(client: Client, one: api.Metadata, status: dict[str, Any]) -> None:
    """Write two statuses, as in a start: one before the pods are created, and one when they are running."""
    known = {"name": one.name, "namespace": one.namespace, "uid": one.uid, "resourceVersion": one.resource_version}
    body = {"apiVersion": api.API_VERSION, "kind": api.KIND, "metadata": known}
    for more in ({"state": "Pending", "message": "attempt 1: creating pods"}, {}):
        path = f"{collection(api.PLURAL, one.namespace)}/{one.name}/status"
        answer = await client.replace(path, {**body, "status": status | more}, STATUS)
        known["resourceVersion"] = answer["metadata"]["resourceVersion"]


def measured(proxy: FaultyApi, server: psutil.Process, given: Any) -> dict[str, float]:
    """Return milliseconds of CPU per pod and per request, and the number of each request per job."""
    pods, found = given.jobs * given.nodes, dict[str, float]()
    for part in PARTS:
        with namespace(proxy) as space:
            create_jobs(space, given)  # the owners of the objects; no operator is running
            found[part] = cost(server, pods, partial(start, space, part, given))
    with namespace(proxy) as space:
        settings = {"kubeconfig": os.environ["KUBECONFIG"], "DDPJOB_STATUS_URL": given.url}
        with Operator(proxy, space.name, anew=True, **settings) as operator:
            until(lambda: "services are known" in operator.log, "the operator has started")
            before, cpu = sent(), operator.cpu_seconds
            work = partial(create_jobs, space, given), partial(all_run, space, api.PLURAL, "status.state")
            found["with the operator"] = cost(server, pods, lambda: [each() for each in work])
            found["the operator itself"] = 1000 * (operator.cpu_seconds - cpu) / pods  # with some seconds at rest
            found |= {f"{what}s": (count - before[what]) / given.jobs for what, count in sent().items()}
        status = space.jobs()[0]["status"]
    with namespace(proxy) as space:
        found["job"] = cost(server, given.jobs, partial(create_jobs, space, given))
        jobs = [validation.parse(raw)[0].metadata for raw in space.jobs()]
        writes = bounded(lambda client: (write_statuses(client, one, status) for one in jobs))
        found["status write"] = cost(server, 2 * given.jobs, partial(asyncio.run, writes))
        event, now = Event("Normal", "AllNodesRun", "all nodes are running"), dt.datetime.now(dt.timezone.utc)
        bodies = [events.body(one, event, now, "bench", "1") for one in jobs]
        found["Event"] = cost(server, given.jobs, partial(create, space, "events", bodies))
    print(found, flush=True)
    return found


def main() -> None:
    given = common.options(__doc__, jobs=100, nodes=8, rounds=3, url="http://ddpjob-operator-status.ddpjob:8081")
    (server,) = (process for process in psutil.process_iter() if process.name() == "kube-apiserver")
    with FaultyApi() as proxy, installed_crd():
        rounds = [measured(proxy, server, given) for _ in range(given.rounds)]
    ms = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    parts = {part: ms[part] - before for part, before in zip(PARTS, (0.0, *map(ms.get, PARTS)), strict=False)}
    parts |= {f"{ms[f'{what}s']:g} × {what}": ms[what] * ms[f"{what}s"] / given.nodes for what in SENT}
    parts["sum"] = sum(parts.values())
    shown = {key: {k: round(v, 2) for k, v in each.items()} for key, each in (("measured", ms), ("parts", parts))}
    print(json.dumps({"machine": common.machine(), **shown}, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
