"""Jobs that can never succeed, each for another reason, must end or report what they wait for. In `scenario.py` faults
stop after a while, and the job must then succeed. Here the fault stays."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from unittest import mock

from judge import TERMINAL, summary
from model_api import Raw, stamp
from model_kubelet import Cluster, Node
from model_training import SYMPTOM, WATCHDOG, Failure, Process, terminated
from scenario import Scenario
from simulation import Simulation

HOURS = 30
LONG_SECONDS = 600.0
ALWAYS = range(1, 400)
EARLY = -3
"""Exit code of a rank that ends with 0 while its peers wait for it in the next collective."""
Start = Callable[[Cluster, Node, Raw, bool], None]


def always(rank: int, after_seconds: float, code: int, message: str = "") -> dict[int, Failure]:
    """Return a failure of this rank that happens in every attempt."""
    return {attempt: Failure(rank, after_seconds, code, message=message) for attempt in ALWAYS}


SCRIPTS: dict[str, dict[int, Failure]] = {
    "a collective that only some ranks call, found by torch after ten minutes": always(1, 600.0, 134, WATCHDOG),
    "the same on gloo, after half an hour": always(0, 1800.0, 1, SYMPTOM),
    "complaints about peers within seconds": always(1, 5.0, 1, SYMPTOM),
    "a rank that ends early": always(0, 20.0, EARLY),
    "another rank that ends early": always(1, 20.0, EARLY),
    "exit code 75 every eleven minutes": always(0, 660.0, 75),
    "exit code 143 every eleven minutes": always(1, 660.0, 143),
    "a program that one rank does not have": always(1, 0.0, 127),
    "an error in the script": always(1, 3.0, 1, "ValueError: no such shard: 7"),
}


class Doomed(Simulation):
    """A job with a fault that never ends. It runs to its end, or for more than a day."""

    def __init__(self, what: Scenario, *, peers_complain: bool = True) -> None:
        """peers_complain: True if ranks that wait for a rank which has exited with 0 report this after a time."""
        super().__init__(what)
        self._peers_complain = peers_complain
        self._fails = self.training._fail
        self.training._fail = self._fail  # type: ignore[method-assign]

    def _fail(self, process: Process, failure: Failure) -> None:
        if failure.code != EARLY:
            self._fails(process, failure)
            self.training.culprits.clear()  # in this simulation no failure need be blamed on a rank
            return
        group = self.training.groups[process.run]
        if process.alive:
            self.training.failed.add((process.job_uid, process.attempt))
        self.training._end(process, 0, "Completed", "")
        for peer in group.present if self._peers_complain else ():
            self.training._suffers(peer)

    async def _run(self) -> None:
        self._start_operator("operator-0")
        self._apply(self.scenario.name)
        for index, deed in enumerate(self.scenario.deeds):
            self.loop.call_at(deed.at, self._do, f"deed#{index}", deed)
        end = HOURS * 3600.0
        while self.loop.time() < end and not self.judge.wrong and self.state not in TERMINAL:
            await asyncio.sleep(10)
        if self.state not in TERMINAL:
            self._check_that_it_says_why()

    def _floods(self) -> bool:
        return False  # do not judge endless loops, because a hundred restarts need more writes than a healthy job

    @property
    def status(self) -> Raw:
        return self.judge.statuses.get(self.uids[-1], {}) if self.uids else {}

    @property
    def state(self) -> str:
        return str(self.status.get("state", ""))

    @property
    def warnings(self) -> Counter[str]:
        """Return how often each Warning was sent."""
        lines = [line.split() for line in self.story if " event " in line and "Warning" in line]
        return Counter(line[-1] for line in lines)

    def _check_that_it_says_why(self) -> None:
        if self._changed_at + LONG_SECONDS > self.loop.time():
            return  # the operator retries
        if not self.warnings:
            self.judge.wrong.append(f"it waits for hours, and no Warning says so: {summary(self.status)}")
        if not any(word in self.status.get("message", "") for word in ("kubectl", "stopping", "not ready since")):
            self.judge.wrong.append(f"it waits for hours, and does not say how to see why: {summary(self.status)}")


@contextlib.contextmanager
def kubelets(start: Start) -> Iterator[None]:
    """Replace the function by which kubelets start containers."""
    with mock.patch.object(Cluster, "_start", start):
        yield


def never_mounts(cluster: Cluster, node: Node, raw: Raw, sure: bool = False) -> None:
    """Model a volume that nobody provides: the container stays in ContainerCreating forever."""
    cluster._status(node, raw, "Pending", {"waiting": {"reason": "ContainerCreating"}})


def broken(name: str) -> Start:
    """Model a GPU without a driver on this node."""
    start = Cluster._start

    def _start(cluster: Cluster, node: Node, raw: Raw, sure: bool = False) -> None:
        if node.name != name:
            return start(cluster, node, raw, sure)
        message = "nvidia-container-cli: initialization error: nvml error: driver not loaded"
        ended = terminated(128, "StartError", message, stamp(cluster._loop.now()))
        return cluster._status(node, raw, "Failed", {"terminated": ended})

    return _start


def live(what: Scenario, *, peers_complain: bool = True) -> Doomed:
    """Run a job with a fault that never ends."""
    found = Doomed(what, peers_complain=peers_complain)
    found.run()
    return found
