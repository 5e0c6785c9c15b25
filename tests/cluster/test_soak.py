"""For half an hour jobs train, fail and pause while operators die, nodes are cut off and the API server goes away."""

import json
import os
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from clusters import kubectl, until
from pods import MEET, Space, job, trainer

SECONDS = float(os.environ.get("DDPJOB_TEST_SOAK_SECONDS", "1800"))
pytestmark = [pytest.mark.long, pytest.mark.alone, pytest.mark.timeout(2 * SECONDS + 1200)]
# test_faults.py tests the same faults one by one. Here they come in random order.
AT_ONCE = 6
FAULT_EVERY_SECONDS = 20, 45
ENDS_WITHIN_SECONDS = 400.0  # after the last fault
MEMORY_MAX = 150 << 20
OPERATORS = ("-l", "app.kubernetes.io/name=ddpjob-operator")

TRAINS = f"""
import os, signal, socket, sys, time
rank, attempt = int(os.environ["RANK"]), int(os.environ["DDPJOB_ATTEMPT"])
life = attempt - 1 + int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
{MEET}
time.sleep(3)
"""
ENDS = "time.sleep(9)"
FAILS_ONCE = f"if life == 0 and rank == 1: sys.exit(3)\n{ENDS}"


def trains(name: str) -> dict[str, Any]:
    return job(name, TRAINS + ENDS)


def fails_once(name: str) -> dict[str, Any]:
    return job(name, TRAINS + FAILS_ONCE)


def fails_always(name: str) -> dict[str, Any]:
    return job(name, TRAINS + "sys.exit(3)", backoffLimit=1)


def fails_once_in_place(name: str) -> dict[str, Any]:
    made = job(name, TRAINS + FAILS_ONCE)
    trainer(made)["command"] = ["ddprun", "--no-python", "python", "-u", "-c", TRAINS + FAILS_ONCE]
    return made


def is_paused(name: str) -> dict[str, Any]:
    return job(name, TRAINS + ENDS, suspend=True)


KINDS = (trains, fails_once, fails_always, fails_once_in_place, is_paused)


@dataclass
class Soak:
    """The state of the soak test: jobs, injected faults and the operator's memory."""

    space: Space
    operator: str
    rng: random.Random
    ended: dict[str, str] = field(default_factory=dict)
    """State and reason of each job that has ended."""
    made: int = 0
    memory: dict[str, list[int]] = field(default_factory=dict)
    """Resident bytes of each operator pod, over time."""
    tracebacks: list[str] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    """Names of the faults that were injected."""

    def turn(self) -> None:
        """Check all jobs once; keep the number of jobs constant."""
        running = 0
        for found in self.space.get("ddp")["items"]:
            name, status = found["metadata"]["name"], found.get("status") or {}
            if status.get("state") in ("Succeeded", "Failed"):
                self.ended[name] = f"{status['state']} {status['reason']}"
            else:
                running += 1
            if found["spec"].get("suspend") and status.get("state") == "Suspended":
                self.resume(name)
        self._look_at_operators()
        if running < AT_ONCE:
            kind = KINDS[self.made % len(KINDS)]
            self.made += 1
            body = kind(f"{kind.__name__.replace('_', '-')}-{self.made}")
            body["spec"]["ttlSecondsAfterFinished"] = 180
            self.space.apply(body)

    def resume(self, name: str) -> None:
        self.space.kubectl("patch", "ddp", name, "--type=merge", "-p", '{"spec":{"suspend":false}}', check=False)

    def _look_at_operators(self) -> None:
        for pod in kubectl("-n", self.operator, "get", "pods", *OPERATORS, "-o", "name").split():
            name = pod.removeprefix("pod/")
            path = f"/api/v1/namespaces/{self.operator}/pods/{name}:8082/proxy/metrics"
            told = kubectl("get", "--raw", path, check=False)
            if found := re.search(r"^process_resident_memory_bytes (\S+)$", told, re.MULTILINE):
                self.memory.setdefault(name, []).append(int(float(found[1])))
            log = kubectl("-n", self.operator, "logs", name, "--since=60s", check=False)
            if "Traceback" in log:
                self.tracebacks.append(log)

    def kill_an_operator(self) -> None:
        pods = kubectl("-n", self.operator, "get", "pods", *OPERATORS, "-o", "name").split()
        kubectl("-n", self.operator, "delete", self.rng.choice(pods), "--grace-period=0", "--force", "--wait=false")

    def delete_a_pod(self) -> None:
        pods = self.space.kubectl("get", "pods", "--field-selector=status.phase=Running", "-o", "name").split()
        if pods:
            self.space.kubectl("delete", self.rng.choice(pods), "--wait=false", check=False)

    def goes_on(self, seconds: float) -> None:
        """Let the soak test run for this many seconds."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.turn()
            time.sleep(1)


def test_half_an_hour_of_random_faults_loses_no_job_and_leaves_nothing(
    space: Space,
    operator: str,
    nodes: list[str],
    break_node: Callable[[str, str], None],
    take_api_server_away: Callable[[float], None],
) -> None:
    seed = int(os.environ.get("DDPJOB_TEST_SOAK_SEED", "1"))
    soak = Soak(space, operator, random.Random(seed))

    def cut_a_node_off() -> None:
        node = soak.rng.choice(nodes)
        break_node("cut", node)
        soak.goes_on(soak.rng.uniform(5, 40))
        break_node("join", node)

    def stop_the_api_server() -> None:
        take_api_server_away(soak.rng.uniform(3, 15))

    faults = (soak.kill_an_operator, soak.delete_a_pod, cut_a_node_off, stop_the_api_server)
    began = time.monotonic()
    while time.monotonic() < began + SECONDS:
        soak.goes_on(soak.rng.uniform(*FAULT_EVERY_SECONDS))
        fault = soak.rng.choice(faults)
        soak.done.append(fault.__name__)
        fault()

    last = soak.made

    def all_have_ended() -> bool:
        soak.made = last  # create no more jobs
        for found in space.get("ddp")["items"]:
            status = found.get("status") or {}
            if status.get("state") in ("Succeeded", "Failed"):
                soak.ended[found["metadata"]["name"]] = f"{status['state']} {status['reason']}"
            elif found["spec"].get("suspend"):
                soak.resume(found["metadata"]["name"])
        return len(soak.ended) == soak.made

    until(all_have_ended, "all jobs end", ENDS_WITHIN_SECONDS)
    for name, end in soak.ended.items():
        expected = "Failed BackoffLimitExceeded" if name.startswith("fails-always") else "Succeeded AllNodesCompleted"
        assert end == expected, f"seed {seed}: {name} ended {end}; {json.dumps(soak.done)}"
    assert not soak.tracebacks, soak.tracebacks[0]
    until(lambda: "No resources found" in space.kubectl("get", "ddp,pods,services"), "all is deleted by its TTL", 300)

    peaks = {name: max(seen) for name, seen in soak.memory.items()}
    print(f"{SECONDS:g} s, {soak.made} jobs, faults {[(f.__name__, soak.done.count(f.__name__)) for f in faults]}")
    print(f"operators' memory at the peak, MiB: {[peak >> 20 for peak in peaks.values()]}")
    assert max(peaks.values()) < MEMORY_MAX
    # Check for a leak in the pod with the most samples: its second half must not use more memory than the first.
    longest = max(soak.memory.values(), key=len)
    half = len(longest) // 2
    assert max(longest[half:]) < max(longest[:half]) * 1.1 + (4 << 20), [seen >> 20 for seen in longest]
