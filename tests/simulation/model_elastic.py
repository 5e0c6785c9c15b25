"""A model of torchrun's elastic jobs (c10d): nodes that meet at node 0's store, and restarts in their pods."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from model_training import MEETING_SECONDS, REPORT_SECONDS, SAVE_SECONDS, SYMPTOM, Process

if TYPE_CHECKING:
    from model_training import Failure, Training

LAST_CALL_SECONDS = 30.0
STORE_LOST = (
    "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the C10d store has failed. "
    "See inner exception for details."
)
NOT_COMPLETED = "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError"


@dataclass(eq=False)
class Rendezvous:
    least: int
    most: int
    there: dict[int, Process] = field(default_factory=dict)
    """By place, the nodes whose torchrun is running, whether they train or wait."""
    training: tuple[Process, ...] = ()
    generation: int = 0
    started_at: float = 0.0
    step: float = 0.0
    closed: bool = False
    """Training has ended, or node 0 is gone: nobody can join."""
    left: dict[int, int] = field(default_factory=dict)
    """By place, how often its torchrun may still restart its ranks."""

    def living(self) -> list[Process]:
        return [p for p in self.there.values() if p.alive]


class Elastic:
    """All elastic trainings of the model."""

    def __init__(self, training: Training) -> None:
        self._training, self._loop = training, training.loop
        self._random = random.Random(f"{training.faults.seed} elastic")
        self.groups: dict[tuple[str, str], Rendezvous] = {}
        self.torn: Counter[str] = Counter()
        """By job uid, how often a cut network alone has cost each torchrun a restart."""
        self.shrunk = self.joined = 0
        """How often training began with fewer nodes than the maximum, and how often more nodes joined later."""

    def joins(self, process: Process) -> None:
        """Start a torchrun."""
        least, most = map(int, process.environ["PET_NNODES"].split(":"))
        group = self.groups.get(process.run)
        if group is None or (process.rank == 0 and group.closed):  # the store is lost with node 0's old pod
            group = self.groups[process.run] = Rendezvous(least, most)
        other = group.there.get(process.rank)
        if other is not None and other.alive and not other.excused:
            self._training.wrong.append(f"two processes are node {process.rank} of one group: {other} and {process}")
        group.there[process.rank] = process
        group.left[process.rank] = int(process.environ["PET_MAX_RESTARTS"])
        self._loop.call_later(MEETING_SECONDS, self._waits_in_vain, group, process)
        if group.training:
            self._again(group)
        else:
            self._meets(group)

    def left(self, process: Process, code: int) -> None:
        """End a torchrun."""
        group = self.groups[process.run]
        if group.there.get(process.rank) is not process:
            return
        if code == 0 and not process.told:
            group.closed = True
            return
        if process.rank == 0:
            group.closed, group.training = True, ()
            for peer in group.living():
                self._end_soon(peer, STORE_LOST)
        elif process in group.training:
            self._loses_a_peer(group, process)

    def _meets(self, group: Rendezvous) -> None:
        if len(group.living()) >= group.most:
            self._loop.call_later(self._random.uniform(0.2, 2), self._start, group, group.generation)
        elif len(group.living()) >= group.least:
            self._loop.call_later(LAST_CALL_SECONDS, self._start, group, group.generation)

    def _again(self, group: Rendezvous) -> None:
        """Restart all ranks in their pods, and let waiting nodes join them."""
        group.training = ()
        self._meets(group)

    def _start(self, group: Rendezvous, generation: int) -> None:
        host = group.there.get(0)
        if group.closed or group.training or generation != group.generation or host is None or not host.alive:
            return
        together = [p for p in group.living() if p is host or self._training.connected(host, p)]
        if len(together) < group.least:
            return
        self.shrunk += len(together) < group.most
        self.joined += group.generation > 0 and len(together) > 1
        group.training, group.started_at = tuple(together), self._loop.time()
        group.generation += 1
        group.step = self._training.step(host.job_uid)
        for process in together:
            failure = self._training.fails(process, process.attempt)
            if failure is not None:
                self._later(group, failure.after_seconds or 0.1, lambda p=process, f=failure: self._fail(group, p, f))
        self._later(group, SAVE_SECONDS, lambda: self._save(group))
        self._later(group, max(0.1, self._training.seconds - group.step), lambda: self._complete(group))
        if self._training.reports is not None:
            self._later(group, 0.2, lambda: self._report(group))

    def _later(self, group: Rendezvous, seconds: float, work: Callable[[], None]) -> None:
        """Call `work` after `seconds`, if the generation is still alive and connected."""
        generation = group.generation

        def if_it_still_trains() -> None:
            if group.training and group.generation == generation and all(p.alive for p in group.training):
                host = group.training[0]
                apart = [p for p in group.training[1:] if not self._training.connected(host, p)]
                work() if not apart else self._is_torn(group, apart[0])

        self._loop.call_later(seconds, if_it_still_trains)

    def _save(self, group: Rendezvous) -> None:
        # All generations of torchrun have the attempt's number, so only earlier attempts are refused.
        if not self._training.saves(group.training[0], self._step(group)):
            self._end(group.training[0], 1, "Error", "ddpjob.SupersededError: a newer attempt has written")
            return
        self._later(group, SAVE_SECONDS, lambda: self._save(group))

    def _step(self, group: Rendezvous) -> float:
        return group.step + self._loop.time() - group.started_at

    def _report(self, group: Rendezvous) -> None:
        assert self._training.reports is not None
        for process in group.training:
            self._training.reports(process, int(self._step(group)))
        self._later(group, REPORT_SECONDS, lambda: self._report(group))

    def _complete(self, group: Rendezvous) -> None:
        group.closed = True
        for process in group.training:
            self._loop.call_later(self._random.uniform(0, 0.5), self._end, process, 0, "Completed", "")

    def _fail(self, group: Rendezvous, process: Process, failure: Failure) -> None:
        """Let a rank fail. torchrun restarts it as often as allowed, and then ends with 1, unless the kernel ends the
        container."""
        training = self._training
        training.application_failed(process)
        if failure.code == 137:
            if not process.told:
                training.culprits.setdefault((process.job_uid, process.attempt), process.rank)
            self._end(process, failure.code, failure.reason, failure.message)
        elif group.left[process.rank] > 0:
            group.left[process.rank] -= 1
            self._loses_a_peer(group, process)
        else:
            if not process.told:
                training.culprits.setdefault((process.job_uid, process.attempt), process.rank)
            self._end(process, 1, "Error", failure.message)

    def _is_torn(self, group: Rendezvous, cut_off: Process) -> None:
        self.torn[cut_off.job_uid] += 1
        self._loses_a_peer(group, cut_off)

    def _loses_a_peer(self, group: Rendezvous, lost: Process) -> None:
        """Let ranks of the other nodes fail, too. Each torchrun counts this as its own restart."""
        if lost.alive:
            self._loop.call_later(self._random.uniform(1, 10), self._rejoins, group, lost)
        for peer in group.training:
            if peer is not lost and peer.alive:
                if group.left[peer.rank] > 0:
                    group.left[peer.rank] -= 1
                else:
                    self._end_soon(peer, SYMPTOM)
        self._again(group)

    def _rejoins(self, group: Rendezvous, process: Process) -> None:
        """Let a node join again whose ranks failed, or that was cut off."""
        host = group.there[0]
        if not process.alive or process in group.training:
            return
        if group.closed or not host.alive or not self._training.connected(host, process):
            self._end_soon(process, STORE_LOST)
        elif group.training:
            self._again(group)

    def _waits_in_vain(self, group: Rendezvous, process: Process) -> None:
        if process not in group.training:
            self._end(process, 1, "Error", NOT_COMPLETED if group.there.get(0) else STORE_LOST)

    def _end_soon(self, peer: Process, message: str) -> None:
        self._loop.call_later(self._random.uniform(0.2, 6), self._end, peer, 1, "Error", message)

    def _end(self, process: Process, code: int, reason: str, message: str) -> None:
        if process.alive:
            self._training.ends(process, code, reason, message)
