"""A model of the training in the pods: ranks that meet, train together, save into one folder, and fail together."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from faults import Faults
from model_api import Raw, owner_uid
from virtual_time import VirtualLoop

from ddpjob_operator.pods import naming

if TYPE_CHECKING:
    from model_agents import Agents
    from model_elastic import Elastic

SYMPTOM = "RuntimeError: [/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.7]:31234"
NOBODY_CAME = "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients joined."
# Processes that no operator can end: a request cannot be taken back, or a user forced a deletion.
LATE = "the request for it has outlived its sender"
FORCED = "the user has forced it"
# The message with which torch 2.13 ends a rank that waits too long, from a separate thread.
WATCHDOG = (
    "[rank1]:[E1121 16:00:00.000000 ProcessGroupNCCL.cpp:685] [Rank 1] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=12, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600012 milliseconds before timing out.\n"
    "terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  [PG ID 0 Rank 1] Process group "
    "watchdog thread terminated with exception: [Rank 1] Watchdog caught collective operation timeout\n"
)
HANGS = -1
"""Exit code of a trainer that stops making steps and does not end."""
ENDS_EARLY = 0
"""Exit code of a trainer that makes fewer steps than its peers and ends with 0, so that they wait in vain."""
COMPLAINS = -2
"""Exit code of a trainer whose ranks only ever report lost peers."""
SAVE_SECONDS = 15.0
REPORT_SECONDS = 5.0
MEETING_SECONDS = 600.0
RESUMABLE = 75


@dataclass(eq=False)
class Process:
    """The trainer of one pod as it really is, whatever the API server knows about it."""

    pod: Raw
    name: str
    uid: str
    job: str
    job_uid: str
    attempt: int
    rank: int
    nodes: int
    run: tuple[str, str]
    """Where the trainer meets the other ranks: run id and port."""
    node: str
    environ: dict[str, str]
    started: str = ""
    """Start time, by the clock of its node."""
    alive: bool = True
    told: bool = False
    """True if the trainer was told to stop before its end."""
    excused: str = ""
    """Why the trainer may run next to a newer attempt: the cluster lost its node, or the user forced it."""
    told_after: int = 0
    """How often the trainer's node had been lost when the kubelet last reported this process."""
    terminated: Raw = field(default_factory=dict)
    phase_reason: str = ""
    """The pod's own reason, if the kubelet gives one: Evicted."""

    @staticmethod
    def of(pod: Raw, node: str) -> Process:
        """Return the process that a kubelet starts for a pod."""
        metadata = pod["metadata"]
        env = {e["name"]: e.get("value", "") for e in pod["spec"]["containers"][0].get("env", ())}
        return Process(
            pod=pod,
            name=metadata["name"],
            uid=metadata["uid"],
            job=metadata["labels"][naming.LABEL_JOB],
            job_uid=owner_uid(pod),
            attempt=int(env["DDPJOB_ATTEMPT"]),
            rank=int(env["NODE_RANK"]),
            nodes=int(env["PET_NNODES"].rpartition(":")[2]),
            run=(env["PET_RDZV_ID"], env["PET_MASTER_PORT"]),
            node=node,
            environ=env,
        )

    @property
    def is_agent(self) -> bool:
        """True if the process is a `ddprun` with one rank."""
        return bool(self.pod["spec"]["containers"][0]["command"][0] == "ddprun")

    @property
    def is_elastic(self) -> bool:
        """True if the process trains with a changing number of nodes."""
        return ":" in self.environ["PET_NNODES"]

    @property
    def least(self) -> int:
        """The smallest number of nodes that train."""
        return int(self.environ["PET_NNODES"].partition(":")[0])

    @property
    def replacement(self) -> int:
        """Number of the pod among those of the same rank in the same attempt."""
        return int(self.environ.get("DDPJOB_REPLACEMENT", 0))

    def __str__(self) -> str:
        return f"{self.name} (rank {self.rank}, attempt {self.attempt}) on {self.node}"


@dataclass(frozen=True)
class Failure:
    """How a trainer fails by itself in an attempt."""

    rank: int
    after_seconds: float
    code: int
    reason: str = "Error"
    message: str = "Traceback (most recent call last):\nOSError: no such shard: 7"

    @property
    def blames(self) -> bool:
        """True if the failure certainly comes from the application."""
        return self.message not in (SYMPTOM, WATCHDOG) and self.code not in (RESUMABLE, 126, 127, 143)


@dataclass
class Folder:
    """The checkpoints of a job. As with Snapshot, a newer attempt, leader or generation that writes locks older ones
    out."""

    step: float = 0.0
    life: tuple[int, ...] = (0, 0, 0)
    """Attempt, number of the leader, and generation."""
    refused: int = 0


@dataclass(eq=False)
class Group:
    """Ranks that have met, under torchrun or plain Python."""

    ranks: dict[int, Process] = field(default_factory=dict)
    started_at: float | None = None
    step: float = 0.0
    broken: bool = False
    stuck_at: float | None = None
    """When steps stopped although all ranks are alive."""
    present: list[Process] = field(default_factory=list)
    """The ranks that were present when training started."""


class Training:
    """All trainings of the model. `ends(process, code, reason, message)` is the kernel's report to the kubelet."""

    def __init__(
        self,
        loop: VirtualLoop,
        faults: Faults,
        seconds: float,
        fails: Callable[[Process, int], Failure | None],
        reachable: Callable[[Process], bool],
    ) -> None:
        self.ends: Callable[[Process, int, str, str], None] = lambda *_: None
        self.agents: Agents
        self.elastic: Elastic
        self.connected: Callable[[Process, Process], bool] = lambda one, other: True
        self.reports: Callable[..., None] | None = None
        """Called with a rank's process and step every REPORT_SECONDS, under ddprun also with its `Life`. None: no
        reports."""
        self.wrong: list[str] = []
        """Violations."""
        self.folders: dict[str, Folder] = {}
        self.groups: dict[tuple[str, str], Group] = {}
        self.completed: set[tuple[str, int, int]] = set()
        """(job uid, attempt, rank) of ranks that really ended with 0 by themselves."""
        self.failed: set[tuple[str, int]] = set()
        """(job uid, attempt) in which the application really failed by itself."""
        self.culprits: dict[tuple[str, int], int] = {}
        """By (job uid, attempt), the rank whose application really failed first."""
        self.early: set[tuple[str, int]] = set()
        """(job uid, attempt) in which the culprit ended with 0 while its peers waited for it."""
        self.hung: set[tuple[str, int]] = set()
        """(job uid, attempt) that really hung."""
        self.loop, self.faults, self.seconds = loop, faults, seconds
        self.fails, self.reachable = fails, reachable
        self.random = random.Random(f"{faults.seed} training")

    def step(self, job_uid: str) -> float:
        """Return the step of the newest checkpoint."""
        return self.folders.setdefault(job_uid, Folder()).step

    def saves(self, first: Process, step: float, turn: int = 0, generation: int = 0) -> bool:
        """Let rank 0 write a checkpoint; return False if a newer attempt, leader or generation has already written."""
        folder, life = self.folders.setdefault(first.job_uid, Folder()), (first.attempt, turn, generation)
        if folder.life > life:
            folder.refused += 1
            return False
        folder.life, folder.step = life, max(folder.step, step)
        return True

    def application_failed(self, process: Process) -> None:
        """Record a real failure of the application, in a pod that may continue."""
        self.failed.add((process.job_uid, -len(self.failed) - 1))

    def joins(self, process: Process) -> None:
        """Start a process, which looks for its peers."""
        if process.is_agent:
            return self.agents.begin(process)
        if process.is_elastic:
            return self.elastic.joins(process)
        group = self.groups.setdefault(process.run, Group())
        if not any(p.alive for p in group.ranks.values()):
            group = self.groups[process.run] = Group()
        other = group.ranks.get(process.rank)
        if other is not None and other.alive and other.excused != FORCED:
            self.wrong.append(f"two processes are rank {process.rank} of one group: {other} and {process}")
        group.ranks[process.rank] = process
        if any(p.attempt != process.attempt or p.job_uid != process.job_uid for p in group.ranks.values()):
            self.wrong.append(f"processes of two attempts have met: {[str(p) for p in group.ranks.values()]}")
        failure = self.fails(process, process.attempt)
        if failure is not None and failure.after_seconds == 0:
            self.loop.call_later(0.1, self._fail, process, failure)
        self.loop.call_later(MEETING_SECONDS, self._waits_in_vain, group, process)
        if len(group.ranks) == process.nodes:
            self.loop.call_later(self.random.uniform(0.2, 2), self._start, group)
        return None

    def left(self, process: Process, code: int) -> None:
        """End a process. Its peers see a closed connection, or hang in a collective."""
        if code == 0 and not process.told:
            self.completed.add((process.job_uid, process.attempt, process.rank))
        if process.is_agent:
            return self.agents.left(process)
        if process.is_elastic:
            return self.elastic.left(process, code)
        group = self.groups[process.run]
        if code == 0 and not process.told:
            return None
        group.broken = True
        for peer in group.ranks.values():
            if peer.alive and group.started_at is not None:
                self._suffers(peer)
        return None

    def _waits_in_vain(self, group: Group, process: Process) -> None:
        if group.started_at is None or process not in group.present:
            self._end(process, 1, "Error", NOBODY_CAME)

    def _suffers(self, peer: Process) -> None:
        if self.faults.at("peers") == "hang":
            self.loop.call_later(self.faults.number("peers", 60, 400), self._end, peer, 134, "Error", WATCHDOG)
        else:
            self.loop.call_later(self.random.uniform(0.2, 6), self._end, peer, 1, "Error", SYMPTOM)

    def _start(self, group: Group) -> None:
        first = group.ranks[0]
        if group.started_at is not None or not self._whole(group):
            return
        group.started_at, group.step = self.loop.time(), self.step(first.job_uid)
        group.present = [*group.ranks.values()]
        for process in group.ranks.values():
            failure = self.fails(process, process.attempt)
            if failure is not None and failure.after_seconds:
                self.loop.call_later(failure.after_seconds, self._fail, process, failure)
        if self.reports is not None:
            self.loop.call_later(0.2, self._report, group, self.reports)
        self.loop.call_later(SAVE_SECONDS, self._save, group)
        self.loop.call_later(max(0.1, self.seconds - group.step), self._complete, group)

    def _save(self, group: Group) -> None:
        if group.broken or group.stuck_at is not None or not all(p.alive for p in group.ranks.values()):
            return
        if not self.saves(group.ranks[0], self._step(group)):
            self._end(group.ranks[0], 1, "Error", "ddpjob.SupersededError: a newer attempt has written")
            return
        self.loop.call_later(SAVE_SECONDS, self._save, group)

    def _step(self, group: Group) -> float:
        """Return the current step; one second is one step."""
        assert group.started_at is not None
        until = self.loop.time() if group.stuck_at is None else group.stuck_at
        return group.step + until - group.started_at

    def _report(self, group: Group, reports: Callable[..., None]) -> None:
        """Report each rank's step, also if it is not new."""
        alive = [p for p in group.present if p.alive]
        for process in alive:
            reports(process, int(self._step(group)))
        if alive:
            self.loop.call_later(REPORT_SECONDS, self._report, group, reports)

    def _complete(self, group: Group) -> None:
        if group.stuck_at is not None or not self._whole(group):
            return
        for process in group.ranks.values():
            self.loop.call_later(self.random.uniform(0, 0.5), self._end, process, 0, "Completed", "")

    def _whole(self, group: Group) -> bool:
        ranks = group.ranks.values()
        # A node that is cut off may reach the folder and its neighbours, but not the other nodes.
        together = len({p.node for p in ranks}) == 1 or all(self.reachable(p) for p in ranks)
        if not together:
            for peer in ranks:
                self._suffers(peer)
            group.broken = True
        return not group.broken and all(p.alive for p in ranks)

    def _fail(self, process: Process, failure: Failure) -> None:
        group = self.groups[process.run]
        if failure.code == HANGS:
            if group.started_at is not None and group.stuck_at is None and self._whole(group):
                group.stuck_at = self.loop.time()
                self.hung.add((process.job_uid, process.attempt))
            return
        if failure.code in (COMPLAINS, ENDS_EARLY) and not self._leaves(group, process, failure.code == COMPLAINS):
            return
        if process.alive:
            self.failed.add((process.job_uid, process.attempt))
            if not process.told and failure.blames:
                self.culprits.setdefault((process.job_uid, process.attempt), process.rank)
        self._end(process, failure.code, failure.reason, failure.message)

    def _leaves(self, group: Group, process: Process, complains: bool) -> bool:
        """End the group. If `complains`, all ranks report only lost peers. Otherwise this rank ends in its own way, and
        all others report lost peers. Return True if this rank must still be ended."""
        if group.started_at is None or not self._whole(group):
            return False
        group.broken = True
        self.failed.add((process.job_uid, process.attempt))
        for rank in group.ranks.values():
            if complains or rank is not process:
                self._suffers(rank)
        if not complains:
            self.early.add((process.job_uid, process.attempt))
        return not complains

    def _end(self, process: Process, code: int, reason: str, message: str) -> None:
        if process.alive:
            self.ends(process, code, reason, message)


def terminated(code: int, reason: str, message: str, at: Any, started: Any = None) -> Raw:
    """Return the kubelet's state for an ended container; one that never ran starts and ends at the same time."""
    return {"exitCode": code, "reason": reason, "message": message, "startedAt": started or at, "finishedAt": at}
