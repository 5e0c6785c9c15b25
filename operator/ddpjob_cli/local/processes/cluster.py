"""The pods of one job as processes on this machine, in place of an API server and kubelets."""

from __future__ import annotations

import datetime as dt
import json
import os
import selectors
import shutil
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ddpjob import own_files
from ddpjob_cli.local.preparation import debugging, faults, pod_process
from ddpjob_cli.local.processes import node as nodes
from ddpjob_cli.local.processes import ranks
from ddpjob_cli.local.processes.logs import Log
from ddpjob_cli.local.run_files import run_folder
from ddpjob_core.findings import NamedFinding
from ddpjob_operator.job import api, launcher, reasons, wording
from ddpjob_operator.job.launch import command
from ddpjob_operator.observed import facts, stall
from ddpjob_operator.observed.cluster import THIS_MACHINE, Container, Observed, Pod
from ddpjob_operator.observed.reports import Report, latest
from ddpjob_operator.plan import leadership
from ddpjob_operator.plan.actions import Action, CreatePod, CreateService, DeletePod, EndPod
from ddpjob_operator.pods import build, environment, naming
from ddprun import ports, processes

TERMINATION_MESSAGE_BYTES = 4096
READ_BYTES = 1 << 18  # bytes: four times a pipe's capacity, so one read empties it
ELASTIC_CONF = "last_call_timeout=5,snooze=0"  # seconds; short, because local nodes start together
CREATING = Container("waiting", reason="ContainerCreating")


@dataclass
class LocalPod:
    """One pod: a node's process, its log, and its state."""

    attempt: int
    place: int
    replacement: int
    name: str
    node: nodes.NodeProcess
    log: Log
    gpus: tuple[str, ...]
    """Devices that the node's processes see, as in CUDA_VISIBLE_DEVICES."""
    termination_log: Path
    trainer: Container = CREATING
    step: int | None = None
    step_at: dt.datetime | None = None
    deletion_requested_at: dt.datetime | None = None
    known: Pod | None = None
    seen_ended: bool = False
    """True if the plan has seen the pod's end. A deleted pod is removed only after that, so no end is missed."""
    open: set[int] = field(default_factory=set)
    """Descriptors that the event loop still reads."""

    @property
    def live(self) -> bool:
        return self.node.end is None

    @property
    def pid(self) -> int | None:
        """Pid of the trainer's first process, once it is started."""
        return self.node.trainer_pid


class RefusedError(Exception):
    """A process, a port or a folder could not be created. The text names the node and the reason."""


class LocalCluster:
    """The processes, ports and folders of one job. show: gets the nodes' output, in which names rewrites FILE:LINE."""

    def __init__(
        self,
        folder: Path,
        slots: list[pod_process.Slot],
        reporting: build.Reporting,
        show: Callable[[LocalPod, list[str]], None],
        names: Callable[[str], str] = str,
    ) -> None:
        self.folder = folder
        self.selector = selectors.DefaultSelector()
        self.pods: dict[str, LocalPod] = {}
        self.reports: dict[int, Report] = {}
        self.agent: Report | None = None
        self.trackers: dict[int, stall.StepTracker] = {}
        self._slots = slots
        self._reporting = reporting
        self._show, self._names = show, names
        self._room = len(slots)
        self._without_room: dict[str, tuple[api.DDPJob, CreatePod, dt.datetime]] = {}  # waiting pods, by name
        self._service = False
        self._ports: dict[int, socket.socket] = {}
        self._ports_of_leaders: dict[tuple[int, int], socket.socket] = {}  # by attempt and term
        self._observations = 0
        self._group_sizes: dict[tuple[int, int], tuple[float, int]] = {}
        """By attempt and place: start time and WORLD_SIZE of the newest rank that was seen."""

    def look_at_ranks(self, parent_of: Mapping[int, int]) -> None:
        """Record the ranks' WORLD_SIZE, because a program before the launcher may not pass on the job's variables."""
        for pod in self._live():
            for pid in ranks.of_node(pod.node.pid, parent_of)[:1]:
                known = self._group_sizes.get((pod.attempt, pod.place), (0.0, 0))
                # Keep the newest process, a rank. A wrapper of the launcher is older, and has the pod's WORLD_SIZE.
                self._group_sizes[pod.attempt, pod.place] = max(known, ranks.started_among(pid))

    def waits_in_vain(self, job: api.DDPJob, parent_of: Mapping[int, int]) -> Iterator[str]:
        """Yield the reasons why launchers wait for nodes that will never connect."""
        running = (
            (job.spec.members.node_rank(pod.place), words, ranks.environ(pid))
            for pod in self._live()
            for pid in sorted(processes.descendants(pod.node.pid, parent_of))
            if any(map(command.starts_ranks, words := processes.words(pid)))
        )
        return launcher.waits_in_vain(job.spec, running)

    def observe(self) -> Observed:
        """Return the current state. A deleted pod is dropped only after an earlier call has shown its end."""
        for name in self.ended_pods():
            # `close` closes the three descriptors of the pod, and reaps its process.
            self.pods.pop(name).node.close()
            shutil.rmtree(self.folder / "volumes" / name, ignore_errors=True)  # an emptyDir is removed with its pod
        self._observations += 1
        for pod in self.pods.values():
            pod.known = facts.merge(pod.known, self._view(pod), self._observations)
        seen = tuple(pod.known for pod in self.pods.values() if pod.known is not None)
        seen += tuple(self._waiting(name) for name in self._without_room)
        for pod in self.pods.values():
            pod.seen_ended = not pod.live
        newest = max(self._ports, default=None)
        sizes = [size for (attempt, _), (_, size) in self._group_sizes.items() if attempt == newest]
        rendezvous = "" if newest is None else f"{pod_process.LOOPBACK}:{ports.number(self._ports[newest])}"
        return Observed(
            service=self._service,
            pods=seen,
            reports=dict(self.reports),
            agent=self.agent.agent if self.agent is not None and self.agent.attempt == newest else None,
            trackers={rank: pace for rank, pace in self.trackers.items() if pace.attempt == newest},
            master_addr=rendezvous,
            agents_ask=True,
            group_size=sizes[0] if len(sizes) == len(self._slots) and len({*sizes}) == 1 else None,
        )

    def ended_pods(self) -> list[str]:
        """Return deleted pods whose end was observed and whose output was shown. The next `observe` removes them."""
        return [n for n, p in self.pods.items() if p.seen_ended and p.deletion_requested_at and not p.open]

    def execute(self, job: api.DDPJob, actions: tuple[Action, ...]) -> None:
        for action in actions:
            if isinstance(action, CreateService):
                self._service = True
            elif isinstance(action, CreatePod):
                try:
                    self._start(job, action)
                except OSError as error:
                    what = f"{error.filename}: " if error.filename else ""
                    raise RefusedError(f"node {action.place} cannot be started: {what}{error.strerror}") from None
            elif isinstance(action, (DeletePod, EndPod)):  # EndPod keeps the log; here logs are files and stay
                self._delete(job, action)

    def body(self, job: api.DDPJob, action: CreatePod) -> build.Body:
        """Return the pod as in a cluster, except for the address of the rendezvous."""
        rendezvous = naming.Endpoint(pod_process.LOOPBACK, self._port(action.attempt))
        return build.pod(job, action.attempt, action.place, rendezvous, self._reporting, replacement=action.replacement)

    def take(self, report: Report, place: int | None) -> None:
        """Store the report of a rank or an agent. place: number of the sending node, if known."""
        if report.agent is not None:
            self.agent = latest(self.agent, report)
            return
        self.reports[report.rank] = report
        dated = replace(report, attempt=report.attempt or max(self._ports, default=0))
        now = report.received_at or dt.datetime.now(dt.timezone.utc)
        if (pace := stall.update(self.trackers.get(report.rank), dated, now)) is not None:
            self.trackers[report.rank] = pace
        for pod in self.pods.values():
            # Skip an ended pod: otherwise its step would advance together with its replacement's.
            if pod.place == place and pod.live and pod.attempt == dated.attempt:
                pod.step, pod.step_at = report.step or None, now

    def is_paused(self) -> bool:
        """True if a rank of the current attempt has reported that it saves or evaluates."""
        newest = max(self._ports, default=0)
        return any(t.attempt == newest and t.phase in ("save", "evaluate") for t in self.trackers.values())

    def initialized(self) -> dt.datetime | None:
        """Return when the first rank that made no step began to report in this attempt; None without such a rank."""
        newest = max(self._ports, default=0)
        times = [t.advanced_at for t in self.trackers.values() if t.attempt == newest and t.phase == "start"]
        return min(times, default=None)

    def handle(self, key: selectors.SelectorKey) -> None:
        pod: LocalPod = key.data
        if key.fd == pod.node.report:
            self._handle_report(pod)
        else:
            self._read_output(pod)

    def lose_node(self, place: int) -> None:
        """End a node like a power failure: all its processes are killed, and no reason is reported."""
        for pod in self._live():
            if pod.place == place:
                os.kill(pod.node.pid, signal.SIGKILL)

    def resize(self, job: api.DDPJob, nodes: int) -> None:
        """Change how many nodes this machine offers: stop the nodes with the highest numbers, or start them again."""
        self._room = nodes
        for pod in [pod for pod in self._live() if pod.place >= nodes]:
            self._delete(job, DeletePod(pod.name, pod.name, None))
        for name in [name for name, (_, action, _) in self._without_room.items() if action.place < nodes]:
            its_job, action, _ = self._without_room.pop(name)
            self.execute(its_job, (action,))

    def kill(self) -> None:
        for pod in self._live():
            pod.node.stop(grace_seconds=0)

    def close(self) -> None:
        for pod in self.pods.values():
            pod.node.close()
        nodes.kill_orphans(set())
        for held in (*self._ports.values(), *self._ports_of_leaders.values()):
            held.close()
        self.selector.close()

    def _live(self) -> Iterator[LocalPod]:
        return (pod for pod in self.pods.values() if pod.live)

    def _start(self, job: api.DDPJob, action: CreatePod) -> None:
        body = self.body(job, action)
        name = body["metadata"]["name"]
        if action.place >= self._room:
            self._without_room[name] = job, action, dt.datetime.now(dt.timezone.utc)
            return
        base = self._slots[action.place]
        slot = pod_process.Slot(base.cwd, self.folder / "volumes" / name, base.environment, base.gpus)
        process = pod_process.process(body, slot)
        slot.volumes.parent.mkdir(mode=0o700, exist_ok=True)
        for folder in process.folders:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        termination_log = slot.volumes.with_suffix(".termination-log")
        termination_log.touch(mode=0o600)
        process.env[environment.TERMINATION_LOG] = str(termination_log)
        if job.spec.facts.restarts_in_place:  # variables of local agents that pods do not get
            process.env["DDPJOB_LOCAL"] = "1"
            process.env.setdefault("PET_RDZV_CONF", ELASTIC_CONF)
        if base.terminal is not None:
            debugging.attach(process, base.terminal, self.folder)
        if faults.VARIABLE in process.env:
            records = self.folder / run_folder.FAULTS
            records.mkdir(mode=0o700, exist_ok=True)
            process.env[faults.HAPPENED] = str(records)
        grace = job.spec.facts.grace_seconds
        node = nodes.NodeProcess(action.place, process.argv, process.env, process.cwd, grace)
        log = Log(self.folder / f"{name}.log", self._names)
        devices = base.gpus or ()
        pod = LocalPod(action.attempt, action.place, action.replacement, name, node, log, devices, termination_log)
        self.pods[name] = pod
        for fd in (node.output, node.report):
            pod.open.add(fd)
            self.selector.register(fd, selectors.EVENT_READ, pod)

    def _delete(self, job: api.DDPJob, action: DeletePod | EndPod) -> None:
        pod = self.pods.get(action.name)
        self._without_room.pop(action.name, None)
        if pod is None:
            return
        grace = job.spec.facts.grace_seconds if action.grace_seconds is None else action.grace_seconds
        pod.deletion_requested_at = dt.datetime.now(dt.timezone.utc)
        if pod.live:
            pod.node.stop(grace)

    def _port(self, attempt: int) -> int:
        """Return an attempt's port, reserved when its first pod is created. Release the ports of older attempts."""
        if attempt not in self._ports:
            self._ports[attempt] = ports.hold()
            for older in [a for a in self._ports if a < attempt]:
                self._ports.pop(older).close()
        return ports.number(self._ports[attempt])

    def leader(self, job: api.DDPJob) -> dict[str, Any] | None:
        """Return the answer to agents that ask which node leads. On one machine each leader needs a port of its own."""
        attempt, term = job.status.attempt, leadership.leader(job, job.status).term
        if term > 1 and (attempt, term) not in self._ports_of_leaders:
            self._ports_of_leaders[attempt, term] = ports.hold()
        port = self._port(attempt) if term == 1 else ports.number(self._ports_of_leaders[attempt, term])
        pod = self.pods.get(leadership.pod_name(job))
        return leadership.answer(job, None if pod is None else pod.known, port)

    def _waiting(self, name: str) -> Pod:
        """Return a pod that exceeds the number of nodes of this machine, as a scheduler reports such a pod: pending."""
        _, action, since = self._without_room[name]
        return Pod(
            name=name,
            uid=name,
            owner_uid=self.folder.name,
            attempt=action.attempt,
            place=action.place,
            replacement=action.replacement,
            unschedulable=f"--resize: there is room for {wording.count(self._room, 'node')}",
            unschedulable_since=since,
        )

    def _view(self, pod: LocalPod) -> Pod:
        phase = "Running" if pod.trainer.state == "running" else "Pending"
        if pod.trainer.state == "ended":
            phase = "Succeeded" if pod.trainer.exit_code == 0 else "Failed"
        return Pod(
            name=pod.name,
            uid=pod.name,
            owner_uid=self.folder.name,
            attempt=pod.attempt,
            place=pod.place,
            replacement=pod.replacement,
            job="",
            node=THIS_MACHINE,
            phase=phase,
            reason=pod.trainer.reason if pod.node.end is not None and pod.node.end.is_lost else "",
            deletion_requested_at=pod.deletion_requested_at,
            address=pod_process.LOOPBACK if pod.trainer.state == "running" else "",
            trainer=pod.trainer,
            ended_first=pod.node.end is not None and pod.node.end.ended_first,
        )

    def _read_output(self, pod: LocalPod) -> None:
        try:
            data = os.read(pod.node.output, READ_BYTES)
        except BlockingIOError:
            return
        if data:
            self._show(pod, list(pod.log.feed(data)))
        else:
            self._forget(pod, pod.node.output)
            self._show(pod, list(pod.log.close()))

    def _handle_report(self, pod: LocalPod) -> None:
        pod.node.handle_report()
        if (end := pod.node.end) is None:
            pod.trainer = Container("running", ready=True)
            return
        if end.is_lost:
            nodes.kill_orphans({p.node.pid for p in self._live()})
        # Read the output before recording the end, because its last lines show the cause.
        while pod.node.output in pod.open and processes.readable(pod.node.output, 0):
            self._read_output(pod)
        written = ""
        with suppress(OSError):
            # Read the same number of bytes as a kubelet.
            written = own_files.read_file(pod.termination_log, TERMINATION_MESSAGE_BYTES).decode(errors="replace")
        message = end.message or self._names(written) or _doubt(end) + pod.log.tail
        ended_at = dt.datetime.fromtimestamp(end.time, dt.timezone.utc)
        pod.trainer = Container("ended", end.reason, message, exit_code=end.code, ended_at=ended_at)
        self._forget(pod, pod.node.report)

    def _forget(self, pod: LocalPod, fd: int) -> None:
        if fd in pod.open:
            pod.open.discard(fd)
            self.selector.unregister(fd)


def _doubt(end: nodes.End) -> str:
    """Return a termination message if the launcher outlived the command and was then killed; else ""."""
    launchers = [one for words in end.left if (one := command.by_torchrun(words)) is not None]
    if not launchers or (end.code and end.ended_first):
        return ""
    started = " ".join((launchers[0].launcher, *launchers[0].named))
    text = (
        f"the shell that started `{started}` ended on SIGTERM without forwarding it or waiting; write exec {started} …"
    )
    if end.ended_first:
        text = f"the command ended while `{started}` was running, so `{started}` was killed: wait for it "
        text += "(setsid --wait, wait)"
    found = NamedFinding(reasons.EXIT_CODE_LOST.name, text)
    return json.dumps({"ddpjob": 1, "findings": [found.as_dict()]}) + "\n"
