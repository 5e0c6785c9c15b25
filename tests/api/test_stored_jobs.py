"""Many large jobs of one namespace, with a real API server: how much memory they take, and that other jobs continue.
Needs kubectl and KUBECONFIG of any cluster. tests/unit/test_stored_jobs.py tests the single cases."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clusters import MERGE, Namespace, Operator, job, until
from faulty_api import FaultyApi

JOBS = 40
# A job in memory takes 2 MiB or more.
GROWTH_MIB_MAX = 40
MEMORY_MIB = 64
"""An eighth of this is for jobs of one namespace that have begun: 15 of these jobs."""


@pytest.fixture
def other(api: FaultyApi) -> Iterator[Namespace]:
    """Yield the namespace of another user."""
    made = Namespace(api)
    try:
        yield made.make()
    finally:
        made.remove()


def large(number: int) -> dict[str, Any]:
    """Return a suspended job of 250 kB."""
    env = [{"name": f"V{one}", "value": "x" * 1_000} for one in range(240)]
    return job(f"large-{number}", nodes=1, suspend=True, container={"env": env})


def peak_mib(operator: Operator) -> int:
    """Return the peak memory of the operator."""
    lines = Path(f"/proc/{operator.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) >> 10


def reasons(namespace: Namespace) -> list[str]:
    return [(one.get("status") or {}).get("reason", "") for one in namespace.jobs()]


def test_forty_large_jobs_exhaust_neither_the_operator_nor_the_room_of_others(namespace, other, operators):
    operator = operators(namespace.name, other.name, DDPJOB_MEMORY_MIB=str(MEMORY_MIB)).watches(2)
    for number in range(JOBS):
        namespace.api.call("POST", namespace.jobs_path, large(number))
        if number == 0:
            until(lambda: reasons(namespace) == ["Suspended"], "one has been read whole")
            before = peak_mib(operator)
    until(lambda: reasons(namespace) == ["Suspended"] * JOBS, "all are recorded as suspended", 120)
    assert peak_mib(operator) - before < GROWTH_MIB_MAX, f"of {JOBS} suspended jobs only a small form is kept"

    for one in namespace.jobs():
        path = f"{namespace.jobs_path}/{one['metadata']['name']}"
        namespace.api.call("PATCH", path, {"spec": {"suspend": False}}, MERGE)
    until(lambda: "WaitingForRoom" in reasons(namespace), "some wait for room", 120)
    other.apply(job("small", nodes=1))
    until(lambda: other.pod_names() == ["small-1-0"], "somebody else's job has its pod", 60)

    def settled() -> bool:
        return {*reasons(namespace)} <= {"WaitingForRoom", "WaitingForNodes", "Unschedulable"}

    until(settled, f"each has its pod or waits: {set(reasons(namespace))}", 120)
    waiting = reasons(namespace).count("WaitingForRoom")
    assert 0 < waiting < JOBS, "as many have begun as there is room for"
    assert len(namespace.pod_names()) == JOBS - waiting
    assert f"namespace {namespace.name}" in next(
        one["status"]["message"] for one in namespace.jobs() if one["status"]["reason"] == "WaitingForRoom"
    )

    begun = namespace.pod_names()[0].rpartition("-1-0")[0]
    namespace.api.call("DELETE", f"{namespace.jobs_path}/{begun}")
    until(lambda: reasons(namespace).count("WaitingForRoom") == waiting - 1, "the next one has the room", 60)
