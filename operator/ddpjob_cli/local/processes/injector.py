"""Injects the faults of `--fail` and `--resize` that the run itself causes. Those of a rank happen in its process."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddpjob_cli.local.preparation import faults
from ddpjob_cli.local.processes import ranks
from ddpjob_cli.local.processes.cluster import LocalCluster, LocalPod
from ddpjob_operator.job import api, wording
from ddprun import processes

LOOK_SECONDS = 0.2  # seconds between checks whether the ranks are training again


@dataclass
class Kills:
    fault: faults.RepeatedFault
    due: float = math.inf
    """Monotonic time of the next kill. The first is `fault.seconds` after the ranks began to train."""
    count: int = 0

    def is_due(self, now: float) -> bool:
        """True if a rank is to be killed now. Call it only while the ranks are training."""
        if self.due == math.inf:
            self.due = now + self.fault.seconds
        return now >= self.due


class Injector:
    """Injects the faults that the run itself causes, and changes the number of nodes."""

    def __init__(self, given: Sequence[faults.Fault], cluster: LocalCluster, note: Callable[[str], None]) -> None:
        self._given, self._cluster, self._note, began = given, cluster, note, time.monotonic()
        self._nodes = [(began + fault.at_seconds, fault) for fault in given if isinstance(fault, faults.NodeFault)]
        self._resizes = [(began + fault.at_seconds, fault) for fault in given if isinstance(fault, faults.Resize)]
        self._repeated = [Kills(fault) for fault in given if isinstance(fault, faults.RepeatedFault)]

    def inject(self, job: api.DDPJob, *, trains: bool) -> None:
        """Inject what is due. trains: the ranks are training now."""
        now, pods = time.monotonic(), [pod for pod in self._cluster.pods.values() if pod.live]
        for due, fault in list(self._nodes):
            if now >= due and fault.node in {pod.place for pod in pods}:  # wait until the fault's node is running
                self._nodes.remove((due, fault))
                self._note(f"{fault.option}: node {fault.node} dies now")
                self._cluster.lose_node(fault.node)
        for due, resize in [each for each in self._resizes if now >= each[0]]:
            self._resizes.remove((due, resize))
            self._note(f"{resize.option}: there is room for {wording.count(resize.nodes, 'node')} now")
            self._cluster.resize(job, resize.nodes)
        for repeated in self._repeated:
            if trains and repeated.is_due(now):
                self._kill_rank(repeated, pods)

    def _kill_rank(self, repeated: Kills, pods: list[LocalPod]) -> None:
        """Kill the next rank: first rank 0, then each further rank, and rank 0 again after the last rank."""
        parent_of = processes.parents()
        found = [(pod.place, pid) for pod in pods for pid in ranks.of_node(pod.node.pid, parent_of)]
        if not found:  # the ranks are still starting
            return
        place, pid = found[repeated.count % len(found)]
        repeated.count, repeated.due = repeated.count + 1, time.monotonic() + repeated.fault.seconds
        self._note(f"{repeated.fault.option}: process {pid} of node {place} is killed now")
        processes.kill([pid])

    def due_in(self) -> float | None:
        """Return the seconds until `inject` has something to do; None if nothing is planned."""
        now = time.monotonic()
        waits = [due - now for due, _ in (*self._nodes, *self._resizes)]
        # A kill that is due waits until the ranks are training, so check again soon.
        waits += [max(LOOK_SECONDS, kills.due - now) for kills in self._repeated]
        return min((seconds for seconds in waits if seconds > 0), default=None)

    def missed(self, records: Path) -> list[faults.Fault]:
        """Return the faults that did not happen. records: folder of HAPPENED."""
        missed: list[faults.Fault] = [fault for _, fault in self._nodes]
        missed += [resize for _, resize in self._resizes]
        missed += [kills.fault for kills in self._repeated if not kills.count]
        missed += [f for place, f in enumerate(faults.of_ranks(self._given)) if not (records / str(place)).exists()]
        return [fault for fault in self._given if any(fault is other for other in missed)]
