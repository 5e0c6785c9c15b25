"""The world of one job on this machine: what the API server and the kubelets are to a job in a cluster.

It carries out the plan's actions on processes, and tells the plan what is there in the same words.
"""

from __future__ import annotations

import datetime as dt
import os
import selectors
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from ddpjob_operator.job import api
from ddpjob_operator.job.podspec import grace_seconds
from ddpjob_operator.local import node as nodes
from ddpjob_operator.local import pod_process, ports
from ddpjob_operator.local.logs import Log
from ddpjob_operator.observed import facts, stall
from ddpjob_operator.observed.cluster import Container, Observed, Pod
from ddpjob_operator.observed.reports import Report
from ddpjob_operator.plan import agent_restarts
from ddpjob_operator.plan.actions import Action, CreatePod, CreateService, DeletePod, EndPod, restart_grace_seconds
from ddpjob_operator.pods import build, environment, naming

TERMINATION_MESSAGE_BYTES = 4096
READ_BYTES = 1 << 18  # four times what a pipe holds: one read empties it


CREATING = Container("waiting", reason="ContainerCreating")


@dataclass
class LocalPod:
    """One pod: a node's process, its log, and what is known of it."""

    attempt: int
    rank: int
    replacement: int
    name: str
    node: nodes.Node
    log: Log
    said: Path
    """Where the trainer may say why it ended."""
    trainer: Container = CREATING
    reason: str = ""
    pid: int | None = None
    step: int | None = None
    """The last step that it reported."""
    deletion_requested_at: dt.datetime | None = None
    ended_first: bool = False
    """Whether it had ended before its supervisor was asked to stop it."""
    known: Pod | None = None
    """What the plan was told of it."""
    seen_ended: bool = False
    """Whether the plan has seen its end: a deleted pod goes away only then, so that its end is never missed."""
    open: set[int] = field(default_factory=set)
    """Descriptors that the loop still reads."""

    @property
    def live(self) -> bool:
        """Whether its processes may still run."""
        return self.node.exit is None


class LocalCluster:
    """Processes, ports and folders of one job. `say(pod, lines)` takes what the nodes print."""

    def __init__(
        self,
        folder: Path,
        places: list[pod_process.Place],
        reporting: build.Reporting,
        say: Callable[[LocalPod, list[str]], None],
    ) -> None:
        self.folder = folder
        self.selector = selectors.DefaultSelector()
        self.pods: dict[str, LocalPod] = {}
        self.reports: dict[int, Report] = {}
        self.agent: Report | None = None
        self.trackers: dict[int, stall.StepTracker] = {}
        self._places = places
        self._reporting = reporting
        self._say = say
        self._service = False
        self._ports: dict[int, ports.Port] = {}
        self._looks = 0

    def observe(self) -> Observed:
        """What is there now. A pod that was deleted and whose end has been seen before is gone."""
        for name in [n for n, p in self.pods.items() if p.seen_ended and p.deletion_requested_at and not p.open]:
            del self.pods[name]
        self._looks += 1
        for pod in self.pods.values():
            pod.known = facts.merge(pod.known, self._view(pod), self._looks)
        seen = tuple(pod.known for pod in self.pods.values() if pod.known is not None)
        for pod in self.pods.values():
            pod.seen_ended = not pod.live
        newest = max(self._ports, default=None)
        meet = "" if newest is None else f"{pod_process.LOOPBACK}:{self._ports[newest].number}"
        return Observed(
            service=self._service,
            pods=seen,
            reports=dict(self.reports),
            agent=self.agent.agent if self.agent is not None and self.agent.attempt == newest else None,
            trackers={rank: pace for rank, pace in self.trackers.items() if pace.attempt == newest},
            master_addr=meet,
        )

    def execute(self, job: api.DDPJob, actions: tuple[Action, ...]) -> None:
        """Carry out a plan's actions. Raises OSError where the machine refuses a process, a port or a folder."""
        for action in actions:
            if isinstance(action, CreateService):
                self._service = True
            elif isinstance(action, CreatePod):
                self._create(job, action)
            elif isinstance(action, DeletePod):
                self._delete(job, action)
            elif isinstance(action, EndPod):  # no log goes here in any case
                self._delete(job, DeletePod(action.name, action.uid, restart_grace_seconds(job.spec)))

    def body(self, job: api.DDPJob, action: CreatePod) -> build.Body:
        """The pod as the cluster would get it, but for the address where the ranks meet."""
        meet = naming.Endpoint(pod_process.LOOPBACK, self._port(job, action.attempt).number)
        return build.pod(job, action.attempt, action.rank, meet, self._reporting, replacement=action.replacement)

    def take(self, report: Report) -> None:
        """What a rank of the present attempt reports of its training; one that does not say its attempt means that."""
        if report.agent is not None:
            self.agent = agent_restarts.latest(self.agent, report)
            return
        self.reports[report.rank] = report
        told = replace(report, attempt=report.attempt or max(self._ports, default=0))
        pace = stall.update(
            self.trackers.get(report.rank), told, report.received_at or dt.datetime.now(dt.timezone.utc)
        )
        if pace is not None:
            self.trackers[report.rank] = pace
        for pod in self.pods.values():
            if pod.rank == report.node_rank:
                pod.step = report.step

    def handle(self, key: selectors.SelectorKey) -> None:
        """A node has printed or reported something."""
        pod: LocalPod = key.data
        if key.fd == pod.node.report:
            self._handle_report(pod)
        else:
            self._read_output(pod)

    def lose_node(self, rank: int) -> None:
        """What a power cut does to a node: nothing of it is left, and nobody says why."""
        for pod in self._live():
            if pod.rank == rank:
                os.kill(pod.node.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Everything stops now."""
        for pod in self._live():
            pod.node.kill()

    def close(self) -> None:
        """Kill what still runs, and give ports and descriptors back; the logs stay."""
        for pod in self.pods.values():
            pod.node.close()
        nodes.kill_orphans(set())
        for port in self._ports.values():
            port.release()
        self.selector.close()

    def _live(self) -> Iterator[LocalPod]:
        return (pod for pod in self.pods.values() if pod.live)

    def _create(self, job: api.DDPJob, action: CreatePod) -> None:
        body = self.body(job, action)
        name = body["metadata"]["name"]
        base = self._places[action.rank]
        place = pod_process.Place(base.cwd, self.folder / "volumes" / name, base.environment, base.gpus)
        process = pod_process.process(body, place)
        for folder in process.folders:
            folder.mkdir(parents=True, exist_ok=True)
        said = place.volumes.with_suffix(".termination-log")
        said.parent.mkdir(parents=True, exist_ok=True)
        said.touch()
        process.env[environment.TERMINATION_LOG] = str(said)
        node = nodes.Node(action.rank)
        node.start(nodes.Order(process.argv, process.env, process.cwd, grace_seconds(job.spec.template)))
        log = Log(self.folder / f"{name}.log")
        pod = LocalPod(action.attempt, action.rank, action.replacement, name, node, log, said)
        self.pods[name] = pod
        for fd in (node.output, node.report):
            pod.open.add(fd)
            self.selector.register(fd, selectors.EVENT_READ, pod)

    def _delete(self, job: api.DDPJob, action: DeletePod) -> None:
        pod = self.pods.get(action.name)
        if pod is None:
            return
        grace = grace_seconds(job.spec.template) if action.grace_seconds is None else action.grace_seconds
        pod.deletion_requested_at = dt.datetime.now(dt.timezone.utc)
        if pod.live:
            pod.node.stop(grace)

    def _port(self, job: api.DDPJob, attempt: int) -> ports.Port:
        """The port of an attempt, reserved when its first pod is made; the ports of older attempts are given back."""
        if attempt not in self._ports:
            self._ports[attempt] = ports.reserve(naming.port(job.metadata.uid, attempt))
            for older in [a for a in self._ports if a < attempt]:
                self._ports.pop(older).release()
        return self._ports[attempt]

    def _view(self, pod: LocalPod) -> Pod:
        ended = pod.trainer.state == "ended"
        phase = "Running" if pod.trainer.state == "running" else "Pending"
        if ended:
            phase = "Succeeded" if pod.trainer.exit_code == 0 else "Failed"
        return Pod(
            name=pod.name,
            uid=pod.name,
            owner_uid=self.folder.name,
            attempt=pod.attempt,
            rank=pod.rank,
            replacement=pod.replacement,
            job="",
            node=os.uname().nodename,
            phase=phase,
            reason=pod.reason,
            deletion_requested_at=pod.deletion_requested_at,
            trainer=pod.trainer,
            ended_first=pod.ended_first,
        )

    def _read_output(self, pod: LocalPod) -> None:
        try:
            data = os.read(pod.node.output, READ_BYTES)
        except BlockingIOError:
            return
        if data:
            self._say(pod, list(pod.log.feed(data)))
        else:
            self._forget(pod, pod.node.output)
            self._say(pod, list(pod.log.close()))

    def _handle_report(self, pod: LocalPod) -> None:
        for event in pod.node.handle_report():
            if isinstance(event, nodes.SupervisorLost):
                nodes.kill_orphans({p.node.pid for p in self._live() if p is not pod})
            self._drain(pod)
            _note(pod, event)
        if pod.node.exit is not None:
            self._forget(pod, pod.node.report)

    def _drain(self, pod: LocalPod) -> None:
        """What was printed before the end is read before the end is told: the cause stands in the last lines."""
        if pod.node.exit is not None:
            while pod.node.output in pod.open and _readable(pod.node.output):
                self._read_output(pod)

    def _forget(self, pod: LocalPod, fd: int) -> None:
        if fd in pod.open:
            pod.open.discard(fd)
            self.selector.unregister(fd)


def _note(pod: LocalPod, event: nodes.Event) -> None:
    """What a supervisor reports, in the kubelet's words."""
    if isinstance(event, nodes.Started):
        pod.pid = event.pid
        pod.trainer = Container("running", ready=True)
    elif isinstance(event, nodes.NotStarted):
        pod.trainer = _ended(event.code, "StartError", dt.datetime.now(dt.timezone.utc), event.error)
    elif isinstance(event, nodes.SupervisorLost):
        pod.reason = "SupervisorLost"
        pod.trainer = _ended(None, "SupervisorLost", _time(event.time), event.error)
    elif isinstance(event, nodes.Exited):
        code = event.code if event.signal is None else 128 + event.signal
        message = _termination_message(pod.said) or pod.log.tail
        pod.ended_first = not event.told_to_stop
        pod.trainer = _ended(code, "Completed" if code == 0 else "Error", _time(event.time), message)


def _termination_message(path: Path) -> str:
    """As a kubelet reads it: the first 4096 bytes, or nothing."""
    try:
        with path.open("rb") as file:
            return file.read(TERMINATION_MESSAGE_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _ended(code: int | None, reason: str, at: dt.datetime, message: str) -> Container:
    # As the kubelet does it with FallbackToLogsOnError: a good end has no message.
    return Container("ended", reason, "" if code == 0 else message, exit_code=code, ended_at=at)


def _time(seconds: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(seconds, dt.timezone.utc)


def _readable(fd: int) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        return bool(selector.select(0))
