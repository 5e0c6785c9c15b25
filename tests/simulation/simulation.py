"""One run: the real operator (wiring, queue, stores, reflectors, plan) in a model of everything around it.

The clock is virtual, there is one thread, and all random numbers depend on the seed, so runs are exactly repeatable."""

from __future__ import annotations

import asyncio
import datetime as dt
import gc
import logging
import random
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from faults import Faults
from judge import TERMINAL, Judge, summary
from judge_memory import MemoryJudge
from model_agents import Agents, Life
from model_api import Change, Kind, ModelApi, Raw
from model_client import ModelClient
from model_elastic import Elastic
from model_kubelet import Cluster
from model_memory import Memories
from model_training import Process, Training
from msgspec.structs import replace
from scenario import FAULTS_SECONDS, HOSTILE, NEIGHBOURS, NODES, ONE_BY_ONE, PODS, RESTARTS, Deed, Failure, Scenario
from virtual_time import VirtualLoop

from ddpjob_operator.job import api, storage
from ddpjob_operator.kube.api.availability import Availability
from ddpjob_operator.kube.api.client import ApiError
from ddpjob_operator.kube.api.runtime import Runtime
from ddpjob_operator.kube.api.tokens import BoundPod
from ddpjob_operator.kube.lease import Durations, Election
from ddpjob_operator.kube.operator import Operator
from ddpjob_operator.kube.ports.receive import Sender
from ddpjob_operator.kube.settings import OperatorSettings
from ddpjob_operator.observed.reports import Report, read_report
from ddpjob_operator.pods import naming

JOBS = f"/apis/{api.GROUP}/{api.VERSION}/namespaces/default/{api.PLURAL}"
# Retries of a start wait up to half an hour, and a queue up to a minute.
ENDS_WITHIN_SECONDS = 3 * 3600.0
# A job is at rest when nothing has changed for this time.
REST_SECONDS = 120.0
# An attempt of eight nodes takes 60 writes: pods are created, bound, started, stopped, deleted.
# Ten attempts are allowed.
WRITES_MAX_BY_NODE = 150
WRITES_MAX_AT_LEAST = 600
# An absence of a node has effects after its return: its kubelet ends pods that are not wanted any more.
NODES_HEAL_SECONDS = 120.0
SCALED_BACK_SECONDS = 1.0
KUBELETS_WORD = {"evicted": "Evicted", "node shuts down": "Terminated", "pod's deadline": "DeadlineExceeded"}
BREAKS_A_POD = frozenset((*PODS, *NODES, *ONE_BY_ONE))


@dataclass
class Outcome:
    """The result of a run."""

    seed: int
    wrong: list[str]
    end: str
    taken: dict[str, str]
    """The faults that have happened, as input for `Faults(only=…)`."""
    story: list[str]
    seconds: float
    """In virtual time."""
    passed: dict[str, int] = field(default_factory=dict)
    """How often each point for faults was passed."""
    attempts: int = 0
    writes: int = 0
    counted: dict[str, int] = field(default_factory=dict)
    """Events that only happen in runs of several jobs (crowd.py)."""


class ErrorsAreWrong(logging.Handler):
    """Makes each error in the operator's log an error of the run."""

    def __init__(self, judge: Judge) -> None:
        super().__init__()
        self._judge = judge

    def emit(self, record: logging.LogRecord) -> None:
        """Add a logged error to the errors of the run. Python's logging calls this."""
        self._judge.wrong.append(f"the operator logs: {self.format(record)}")


class OperatorProcess:
    """A process of the operator, from its start until it ends or is killed."""

    def __init__(self, simulation: Simulation, name: str) -> None:
        self.name = name
        self.skew = dt.timedelta()
        self.simulation = simulation
        self._tasks: list[asyncio.Task[None]] = []
        loop, scenario = simulation.loop, simulation.scenario
        self.client = ModelClient(simulation.api, loop, simulation.faults, name, self.crash)
        self.lease_client = ModelClient(simulation.api, loop, simulation.faults, f"{name} lease", self.crash)
        self.client.stale_by = scenario.stale_by
        self.client.on_event = simulation.event
        self.client.on_shown = lambda raw: simulation.judge.shown(name, raw)
        where = () if scenario.clusterwide else ("default",)
        room = storage.DEFAULT if scenario.has_room else storage.StoredLimits(0, 1 << 27, 1 << 26, 0, 0)
        told: dict[str, Any] = {"gangs": scenario.gangs, "events": scenario.events, "room": room}
        settings = OperatorSettings(namespaces=where, health_port=0, **told)
        runtime = Runtime(loop.time, self.now, simulation.chance, simulation.log, lambda: None)
        self.client.availability = self.lease_client.availability = Availability(runtime)
        client: Any = self.client
        leader = None
        if scenario.operators > 1:
            lease_client: Any = self.lease_client
            leader = Election(lease_client, "default", "ddpjob", name, Durations(), runtime=runtime)
            self.client.may_write = leader.holds
        self.operator = Operator(settings, client, leader, runtime=runtime, end_within=self._ends_by_itself)

    def now(self) -> dt.datetime:
        """Return the time by the wall clock of this process."""
        return self.simulation.loop.now() + self.skew

    def start(self) -> None:
        self.simulation.tell(self.name, "starts")
        self._tasks = [self._task(self._start()), self._task(self._watch_jobs())]

    def crash(self) -> None:
        """Act like kill -9: the memory is lost, but requests that were sent may still be carried out."""
        if self.client.dead:
            return
        self.simulation.tell(self.name, "crashes")
        self.client.dead = self.lease_client.dead = True
        self.end()
        self.simulation.start_operator_soon(self)

    async def stop(self) -> None:
        """Stop the operator as a SIGTERM does."""
        self.simulation.tell(self.name, "stops")
        for task in self._tasks:
            task.cancel()
        await self.operator.stop()
        if not self.client.dead:  # a process that has ended has a successor, which is starting
            self.client.dead = self.lease_client.dead = True
            self.simulation.start_operator_soon(self)

    def end(self) -> None:
        """End all tasks of the process."""
        self.operator.tasks.end()
        for task in self._tasks:
            task.cancel()
        self.operator.tasks.cancel()

    def clock_jumps(self, seconds: float) -> None:
        """Change the wall clock, but not the monotonic clock."""
        self.skew += dt.timedelta(seconds=int(seconds))

    def _ends_by_itself(self, _seconds: float) -> None:
        """Restart, as a kubelet restarts the operator's container."""
        if not self.client.dead:
            self.simulation.loop.create_task(self.stop())

    async def _start(self) -> None:
        await self.operator.start()

    async def _watch_jobs(self) -> None:
        """Act like kopf: list, then watch from that version; list again if the version is too old."""
        version = ""
        while True:
            version = await self._watch_jobs_from(version)

    async def _watch_jobs_from(self, version: str) -> str:
        try:
            if not version:
                raws, version = await self.client.list(JOBS)
                for raw in raws:
                    self.operator.caches.jobs.put(raw)
            async for event in self.client.watch(JOBS, version):
                if event["type"] == "DELETED":
                    self.operator.job_told("DELETED", event["object"]["metadata"])
                else:
                    self.operator.caches.jobs.put(event["object"])
                version = event["object"]["metadata"]["resourceVersion"]
        except ApiError as error:
            await asyncio.sleep(1)
            return "" if error.status == 410 else version
        return version

    def _task(self, work: Any) -> asyncio.Task[None]:
        task = self.simulation.loop.create_task(work)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.client.dead:
            text = "".join(traceback.format_exception(error))
            self.simulation.judge.wrong.append(f"{self.name} has ended: {text}")


class Simulation:
    """The operator, the cluster, the training and the judge of one run."""

    def __init__(self, scenario: Scenario, only: Mapping[str, str] | None = None) -> None:
        self.scenario = scenario
        self.story: list[str] = []
        self.loop = VirtualLoop()
        self.loop.set_exception_handler(self._bug)
        self.faults = Faults(scenario.seed, scenario.rates, only)
        self.api = ModelApi(self.loop.time, self.loop.now)
        self.training = Training(self.loop, self.faults, scenario.training_seconds, self._failure_of, self._reachable)
        self.memory_judge = MemoryJudge(self.training.wrong)
        memories = Memories(self.training, scenario.script, self.memory_judge.begins)
        self.training.agents = agents = Agents(self.training, self._connected, memories)
        self.training.elastic, self.training.connected = Elastic(self.training), self._connected
        agents.heard, agents.told_by_operator = self._hear_agent, self._leader_of
        agents.asks = lambda process: process.is_elastic and self.jobs[process.job].receiver
        agents.has_name = lambda process: self.cluster.has_name(process)
        nodes, slots = scenario.cluster_nodes, scenario.slots
        self.cluster = Cluster(self.loop, self.api, self.faults, self.training, nodes, slots)
        self.judge = Judge(self.cluster, self.training, lambda: self.api.all(api.PLURAL))
        self.judge.also.append(self.memory_judge.check_status)
        self.judge.leadership = self._leadership
        self.api.listeners.append(self.judge.changed)
        self.api.listeners.append(self._hear)
        self.api.refuses = self._refuses
        if scenario.gang:
            self.api.served.add("scheduling.k8s.io/v1alpha2")
        if scenario.reports:
            self.training.reports = self._report
        self.operators: list[OperatorProcess] = []
        self.done: set[str] = set()
        """The kinds of deeds that were done."""
        self.uids: list[str] = []
        """uids of the applied jobs, in order."""
        self.newest: dict[str, str] = {}
        """By job name, the uid that was applied last."""
        self.jobs = {one.name: one for one in (scenario, *scenario.more)}
        """The jobs of the cluster, by name."""
        self.on_event: Callable[[Raw], None] = lambda body: None
        self.on_deed: Callable[[str], None] = lambda text: None
        self._random = random.Random(f"{scenario.seed} simulation")
        self.chance = random.Random(f"{scenario.seed} operator")
        """Random numbers of the operators."""
        self.log = logging.Logger("simulation", logging.ERROR)
        self.log.addHandler(ErrorsAreWrong(self.judge))
        self._quota = False
        self._changed_at = 0.0
        self._made = 0

    # ---------------------------------------------------------------- the run

    def run(self) -> Outcome:
        """Run from the moment when the user applies the job until the job ends, or until the first error."""
        # When the garbage collector ends the generators of a killed operator depends on the other objects of the
        # process. Without it a seed repeats.
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            self.loop.run_until_complete(self._run())
            self._end()
        finally:
            self.loop.close()
            if was_enabled:
                gc.enable()
        status = self.judge.statuses.get(self.uids[-1], {}) if self.uids else {}
        return Outcome(
            seed=self.scenario.seed,
            wrong=self.judge.wrong,
            end=" ".join(self._end_state(name) for name in self.jobs),
            taken=self.faults.taken,
            story=self.story,
            seconds=self.loop.time(),
            passed=dict(self.faults._count),
            attempts=status.get("attempt", 0),
            writes=sum(len(log) for log in self.api.log.values()),
        )

    async def _run(self) -> None:
        for number in range(self.scenario.operators):
            self._start_operator(f"operator-{number}")
        for name, one in self.jobs.items():
            self.loop.call_later(one.starts_at, self._apply, name) if one.starts_at else self._apply(name)
        for index, deed in enumerate(self.scenario.deeds):
            self.loop.call_at(deed.at, self._do, f"deed#{index}", deed)
        last = max((*(deed.at for deed in self.scenario.deeds), *(one.starts_at for one in self.jobs.values())))
        if last or any(self.scenario.rates.values()):
            await self._until(FAULTS_SECONDS, lambda: self.loop.time() > last and self._is_at_rest())
        self._stop_faults()
        end = self.loop.time() + ENDS_WITHIN_SECONDS
        if not await self._until(end, self._is_at_rest):
            self.judge.wrong.append(f"not at rest {ENDS_WITHIN_SECONDS:.0f} s after the last fault: {self._where()}")
        if not self.judge.wrong:
            self._check_end()

    async def _until(self, end: float, is_true: Any) -> bool:
        """Wait until is_true() or an error. Return True if one of them happens before `end`, otherwise False."""
        while self.loop.time() < end:
            if self.judge.wrong or self._floods():
                return True
            if is_true():
                return True
            await asyncio.sleep(min(10.0, end - self.loop.time()))
        return bool(is_true())

    def _floods(self) -> bool:
        if self._changed_at < 0:
            return True
        written = sum(len(self.api.log[plural]) for plural in ("pods", "services", api.PLURAL))
        most = sum(max(WRITES_MAX_AT_LEAST, WRITES_MAX_BY_NODE * one.spec["nodes"]) for one in self.jobs.values())
        if written > most:
            self._changed_at = -1.0
            self.judge.wrong.append(f"more than {most} writes: the operator writes in circles")
        return written > most

    def _stop_faults(self) -> None:
        """Stop all faults, and repair the cluster."""
        self.tell("", "no faults from now on")
        self.faults.stopped = True
        self._quota = False
        for operator in self.operators:
            operator.client.away = operator.lease_client.away = False
        for name, node in self.cluster.nodes.items():
            # A node without power stays away, because the job can continue elsewhere.
            if node.powered:
                self.cluster.back(name)
        for plural in ("pods", "services", "podgroups"):
            for raw in self.api.all(plural):
                if "conflict" in raw["metadata"].get("annotations", {}):
                    self.api.remove(plural, raw, "user")

    def _end(self) -> None:
        for operator in self.operators:
            operator.client.dead = operator.lease_client.dead = True
            operator.end()
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.wait(tasks))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())

    def _bug(self, _: object, context: Any) -> None:
        error = context.get("exception")
        stack = "".join(traceback.format_exception(error)) if error is not None else ""
        self.judge.wrong.append(f"a callback has failed: {context['message']} {stack}")

    # ---------------------------------------------------------------- the end of the run

    def _is_at_rest(self) -> bool:
        """True if nothing has changed for a while, and nothing will change."""
        if self.loop.time() - self._changed_at < REST_SECONDS or self._ours("podgroups"):
            return False  # all groups must be deleted before the job is at rest
        return all(self._rests(name) for name in self.jobs)

    def _rests(self, name: str) -> bool:
        job = self.api.find(api.PLURAL, name)
        if job is None:
            # A deleted job's pod on a dead node stays until the node is removed, as in a real cluster.
            return all(self._is_on_dead_node(pod) for pod in self._ours("pods") if _job_of(pod) == name)
        status = job.get("status") or {}
        ends = status.get("state") in TERMINAL or (job["spec"].get("suspend") and status.get("state") == "Suspended")
        ttl = job["spec"].get("ttlSecondsAfterFinished")
        return bool(ends) and (ttl is None or bool(job["spec"].get("suspend"))) and not self._live()

    def _ours(self, plural: str) -> list[Raw]:
        return [raw for raw in self.api.all(plural) if raw["metadata"].get("ownerReferences")]

    def _is_on_dead_node(self, pod: Raw) -> bool:
        node = self.cluster.nodes.get(pod["spec"].get("nodeName", ""))
        return node is not None and not node.powered

    def _live(self) -> list[Process]:
        return [p for p in self.cluster.processes() if self.cluster.nodes[p.node].powered]

    def _where(self) -> str:
        pods = [f"{p['metadata']['name']} {p['status'].get('phase')}" for p in self._ours("pods")]
        jobs = {name: self.api.find(api.PLURAL, name) for name in self.jobs}
        states = [summary(job.get("status") or {}) if job else f"no job {name}" for name, job in jobs.items()]
        groups = [f"; group {g['metadata']['name']}" for g in self._ours("podgroups")]
        return f"{', '.join(states)}; pods {pods}; live {[str(p) for p in self._live()]}{''.join(groups)}"

    def _end_state(self, name: str) -> str:
        job = self.api.find(api.PLURAL, name)
        return "Gone" if job is None else str((job.get("status") or {}).get("state", ""))

    def _check_end(self) -> None:
        """Check that the job ends as without faults, unless the application or the user has caused another end."""
        for name in self.jobs:
            is_gone = self.api.find(api.PLURAL, name) is None
            if is_gone and any(_job_of(service) == name for service in self._ours("services")):
                self.judge.wrong.append("the job is gone, and its service is not")
            status = self._last_status(name)
            if status.get("state") == "Failed" and not self._may_fail(name):
                self.judge.wrong.append(f"the job failed, and nothing that happened is its fault: {summary(status)}")

    def _last_status(self, name: str) -> Raw:
        """Return the last status of a job, which may be deleted."""
        return self.judge.statuses.get(self.newest.get(name, ""), {})

    def _may_fail(self, name: str) -> bool:
        uid = self.newest[name]
        failed = sum(1 for job_uid, _ in self.training.failed | self.training.hung if job_uid == uid)
        if not RESTARTS:
            return bool(failed or self.done & BREAKS_A_POD)
        failed += self.judge.unseen_cuts[uid] + (self.training.elastic.torn[uid] if failed else 0)
        limit = self.jobs[name].spec.get("backoffLimit", 3)
        return failed > limit or failed >= 3 or "clock jumps" in self.done

    # ---------------------------------------------------------------- events

    def tell(self, who: str, *what: object) -> None:
        """Add a line to the story."""
        self.story.append(f"t+{self.loop.time():7.1f}  {who:12} {' '.join(map(str, what))}")

    def event(self, body: Raw) -> None:
        """Record an Event that the operator has sent."""
        self.tell("event", body["type"], body["reason"])
        self.on_event(body)

    def start_operator_soon(self, dead: OperatorProcess) -> None:
        """Restart an operator after some seconds, as the kubelet of its pod does."""
        self.loop.call_later(self._random.uniform(1, 20), self._start_operator, dead.name, dead)

    def _start_operator(self, name: str, dead: OperatorProcess | None = None) -> None:
        process = OperatorProcess(self, name)
        self.judge.forget(name)
        self.operators = [o for o in self.operators if o is not dead] + [process]
        if dead is not None:
            process.skew = dead.skew
        process.start()

    def _apply(self, name: str) -> None:
        code, answer = self.api.request("POST", JOBS, None, self.jobs[name].manifest(), "user")
        if code == 201:
            self.uids.append(answer["metadata"]["uid"])
            self.newest[name] = self.uids[-1]

    def _failure_of(self, process: Process, life: int) -> Failure | None:
        failure = self.jobs[process.job].failures.get(life)
        if failure is None or failure.rank != process.rank or len(self.uids) > len(self.jobs):
            return None
        key = f"failure#{life}" if process.job == self.scenario.name else f"failure#{life} of {process.job}"
        return failure if self.faults.happens(key, str(failure)) else None

    def _report(self, process: Process, step: int, life: Life | None = None) -> None:
        """Send a rank's report to the leading operator if the rank reaches it."""
        for one, sender in self._receivers(process):
            # The receiver reads the node from the token.
            rank = process.rank if life is None else life.members.node_rank(process.rank)
            place = {"rank": rank, "node_rank": sender.node_rank, "replacement": sender.replacement}
            saved = int(self.training.step(process.job_uid)) or None
            begin = {} if life is None else _begin(step, life)
            report = Report(
                step=step, saved_step=saved, attempt=sender.attempt, received_at=one.now(), **place, **begin
            )
            one.operator.report(sender, report)

    def _hear_agent(self, process: Process, body: bytes) -> bool:
        """Send an agent's report. Return True if it was received."""
        heard = False
        for one, sender in self._receivers(process):
            report = replace(read_report(body, one.now()), attempt=sender.attempt)
            assert report.agent is not None, "an agent reports"
            one.operator.report(sender, report)
            self.judge.heard(one.name, process, report.agent, self.loop.time())
            heard = True
        return heard

    def _leader_of(self, process: Process) -> Raw | None:
        """Return an operator's answer to an agent that asks who leads."""
        answers = [one.operator.leader_of(sender) for one, sender in self._receivers(process)]
        for answer in answers:
            self.judge.told(process, answer)
        return next((answer for answer in answers if answer is not None), None)

    def _leadership(self, name: str) -> object:
        """Return an object that changes whenever an operator loses its Lease, also if it gets the Lease back."""
        return next((one.operator.states for one in self.operators if one.name == name), None)

    def _receivers(self, process: Process) -> Iterator[tuple[OperatorProcess, Sender]]:
        """Yield the operators that accept a report of this process, each with the sender's node."""
        for one in self.operators if self._reachable(process) and self.jobs[process.job].receiver else ():
            if one.operator.leads and not one.client.away and not one.client.dead:
                sender = one.operator.locate(BoundPod("default", process.name, process.uid))
                if sender is not None:
                    yield one, sender

    def _connected(self, one: Process, other: Process) -> bool:
        return self.cluster.connected(one, other)

    def _reachable(self, process: Process) -> bool:
        return self.cluster.reachable(process)

    def _refuses(self, plural: str, body: Raw) -> str:
        return "exceeded quota: model" if self._quota and plural == "pods" else ""

    def _hear(self, kind: Kind, change: Change) -> None:
        if kind.plural in ("nodes", "leases"):
            return
        self._changed_at = self.loop.time()
        name = change.object["metadata"]["name"]
        if kind.plural == api.PLURAL:
            old, new = (change.old or {}).get("status") or {}, (change.new or {}).get("status") or {}
            if summary(old) != summary(new) or change.new is None:
                self.tell(change.actor, f"{name}:", summary(new) if change.new else "is gone")
            return
        verb = "gone" if change.new is None else "made" if change.old is None else self._pod_news(change)
        if verb:
            self.tell(change.actor, f"{kind.kind.lower()} {name}", verb)

    def _pod_news(self, change: Change) -> str:
        old, new = change.old or {}, change.new or {}
        asked = "deletionTimestamp" in new["metadata"] and "deletionTimestamp" not in old["metadata"]
        if asked:
            return f"to stop within {new['metadata']['deletionGracePeriodSeconds']} s"
        phases = [raw.get("status", {}).get("phase") for raw in (old, new)]
        ends = [c["state"]["terminated"]["exitCode"] for c in new.get("status", {}).get("containerStatuses", ())
                if "terminated" in c["state"]]  # fmt: skip
        return f"{phases[1]} {ends or ''}" if phases[0] != phases[1] else ""

    # ---------------------------------------------------------------- deeds

    def _do(self, key: str, deed: Deed) -> None:
        if self.faults.stopped or not self.faults.happens(key, str(deed)):
            return
        self.tell("", "DEED", deed)
        if deed.what != "suspend":  # a suspension is announced when its write succeeds
            self.on_deed(f"fault: {deed.what}")
        self.done.add(deed.what)
        if deed.what in BREAKS_A_POD or deed.what in ("suspend", "delete", "delete and apply"):
            self._disturb(NODES_HEAL_SECONDS + deed.seconds if deed.what in NODES else 0.0)
        if deed.what in NODES or deed.what == "nodes cut":
            self._node(deed)
        elif deed.what in BREAKS_A_POD:
            self._pod(deed)
        elif deed.what in HOSTILE:
            self._hostile_pod(deed)
        elif deed.what in NEIGHBOURS:
            self._beside_a_gang(deed)
        elif deed.what in ("quota", "conflicting pod", "conflicting service"):
            self._in_the_way(deed)
        elif deed.what in ("crash", "restart", "clock jumps", "api server away", "operator cut off"):
            self._operator(deed)
        else:
            self._user(deed)

    def _disturb(self, seconds: float) -> None:
        """Mark the attempts as disturbed: objects were changed from outside, so any failure may come first."""
        for uid in self.uids:
            attempt = self.judge.statuses.get(uid, {}).get("attempt", 0)
            self.judge.disturbed |= {(uid, attempt), (uid, attempt + 1)}
        if seconds > 0:
            self.loop.call_later(5, self._disturb, seconds - 5)

    def _aim(self, deed: Deed) -> str:
        """Return the name of the job to which a planned action applies."""
        return list(self.jobs)[deed.number % len(self.jobs)]

    def _user(self, deed: Deed) -> None:
        name = self._aim(deed)
        job = self.api.find(api.PLURAL, name)
        if job is None:
            return
        if deed.what == "touch":
            self.api.change(api.PLURAL, job, "user", metadata={"annotations": {"touched": str(deed.at)}})
        elif deed.what == "scaled":
            self._scale(job, self.jobs[name].spec.get("minNodes"), deed.number)
        elif deed.what == "status edited":
            self._edit_status(name, deed)
        elif deed.what == "spec made invalid":
            self._make_invalid(job)
        elif deed.what == "suspend":
            self._suspend(name, True)
            self.loop.call_later(deed.seconds, self._suspend, name, False)
        else:
            self.api.request("DELETE", f"{JOBS}/{name}", None, {}, "user")
            if deed.what == "delete and apply":
                self.loop.call_later(deed.seconds if deed.number % 2 else 0.0, self._apply, name)

    def _scale(self, job: Raw, least: int | None, number: int) -> None:
        if least is None or "spares" in job["spec"]:  # a job with spares keeps its size
            return
        nodes = least + number % (self.scenario.cluster_nodes - least + 2)
        self.tell("user", f"scales to {nodes}")
        self._put(job, nodes=nodes)
        if number % 3 == 0:  # the user changes it back soon
            self.loop.call_later(SCALED_BACK_SECONDS, self._scale_back, job)

    def _scale_back(self, old: Raw) -> None:
        job = self.api.find(api.PLURAL, old["metadata"]["name"])
        if job is not None and job["metadata"]["uid"] == old["metadata"]["uid"]:
            self.tell("user", f"scales back to {old['spec']['nodes']}")
            self._put(job, nodes=old["spec"]["nodes"])

    def _put(self, job: Raw, **spec: Any) -> None:
        path = f"{JOBS}/{job['metadata']['name']}"
        self.api.request("PUT", path, None, {**job, "spec": {**job["spec"], **spec}}, "user")

    def _edit_status(self, name: str, deed: Deed) -> None:
        """Write a status that no operator can read, and repair it later."""
        self._set_lost_steps(name, -1 - deed.number)
        self.loop.call_later(deed.seconds, self._set_lost_steps, name, 0)

    def _set_lost_steps(self, name: str, value: int) -> None:
        job = self.api.find(api.PLURAL, name)
        status = (job or {}).get("status") or {}
        if job is not None and status.get("attempt"):
            goodput = {**(status.get("goodput") or {}), "lostSteps": value}
            self.api.change(api.PLURAL, job, "user", status={**status, "goodput": goodput})

    def _make_invalid(self, job: Raw) -> None:
        """Make the spec of a started job invalid, as an old CRD allows. The job must still end. Users repair the spec
        when they resume the job."""
        status = job.get("status") or {}
        if status.get("attempt") and status.get("state") != "Suspended" and not job["spec"].get("suspend"):
            self._put(job, preflight="sometimes")

    def _suspend(self, name: str, yes: bool) -> None:
        job = self.api.find(api.PLURAL, name)
        if job is not None:
            kept = {k: v for k, v in job["spec"].items() if yes or k != "preflight"}
            self.tell("user", "suspends" if yes else "resumes")
            self.on_deed(f"user {'suspends' if yes else 'resumes'} the job")
            self._put({**job, "spec": kept}, suspend=yes)

    def _operator(self, deed: Deed) -> None:
        process = self.operators[deed.number % len(self.operators)]
        if deed.what == "crash":
            process.crash()
        elif deed.what == "restart" and not process.client.dead:
            self.loop.create_task(process.stop())
        elif deed.what == "clock jumps":
            process.clock_jumps(deed.seconds * (60 if deed.number % 2 else -60))
        else:
            away = self.operators if deed.what == "api server away" else [process]
            for one in away:
                one.client.away = one.lease_client.away = True
                self.loop.call_later(deed.seconds, self._is_back, one)

    def _is_back(self, process: OperatorProcess) -> None:
        process.client.away = process.lease_client.away = False

    def _in_the_way(self, deed: Deed) -> None:
        if deed.what == "quota":
            self._quota = True
            self.loop.call_later(deed.seconds, self._lift_quota)
            return
        of = self._aim(deed)
        status = self._last_status(of)
        plural, name, spec = "services", of, {}
        if deed.what == "conflicting pod":
            plural, name = "pods", f"{of}-{status.get('attempt', 0) + 1}-{deed.number % 2}"
            spec = {"containers": [{"name": "other"}], "nodeName": "elsewhere"}
        body = {"metadata": {"name": name, "annotations": {"conflict": "yes"}}, "spec": spec}
        code, answer = self.api.request("POST", f"/api/v1/namespaces/default/{plural}", None, body, "user")
        if code == 201:
            self.loop.call_later(deed.seconds, self.api.remove, plural, answer, "user")

    def _hostile_pod(self, deed: Deed) -> None:
        """Create a pod with our labels whose grace period ends after the last date that Python can represent."""
        labels = {naming.LABEL_JOB: self._aim(deed), naming.LABEL_ATTEMPT: "1", naming.LABEL_RANK: "9" * 30}
        metadata = {"name": f"hostile-{deed.at:.0f}", "labels": labels, "annotations": {"conflict": "yes"}}
        body = {"metadata": metadata, "spec": {"containers": [{"name": "other"}], "nodeName": "elsewhere"}}
        code, answer = self.api.request("POST", "/api/v1/namespaces/default/pods", None, body, "user")
        if code == 201:
            late = {"deletionTimestamp": "2272-12-29T18:23:49Z", "deletionGracePeriodSeconds": 100_000_000_000}
            self.api.change("pods", answer, "user", metadata=late)

    def _beside_a_gang(self, deed: Deed) -> None:
        if deed.what == "group deleted":
            for raw in self._ours("podgroups"):
                self.api.remove("podgroups", raw, "user")
            return
        for number, name in enumerate(sorted(self.cluster.nodes)):
            if number % 2 == deed.number % 2:
                self.cluster.nodes[name].neighbours += 1
                self.loop.call_later(deed.seconds, self._neighbour_goes, name)

    def _neighbour_goes(self, name: str) -> None:
        self.cluster.nodes[name].neighbours -= 1

    def _lift_quota(self) -> None:
        self._quota = False

    def _pod(self, deed: Deed) -> None:
        pods = sorted(self._ours("pods"), key=lambda p: str(p["metadata"]["name"]))
        placed = [p for p in pods if p["spec"].get("nodeName") in self.cluster.nodes]
        if not placed:
            return
        pod = placed[deed.number % len(placed)]
        self.tell("", "it hits", pod["metadata"]["name"])
        if deed.what == "pod deleted":
            self.cluster.delete_pod(pod, "user")
        elif deed.what == "pod forced":
            self.cluster.delete_pod(pod, "user", 0)
        elif deed.what == "drained":
            self.cluster.disrupt(pod, "EvictionByEvictionAPI")
        elif deed.what == "agent killed":
            self._kill_agent(pod)
        else:
            self.cluster.under_pressure(pod, KUBELETS_WORD[deed.what])

    def _kill_agent(self, pod: Raw) -> None:
        uid = pod["metadata"]["uid"]
        process = self.cluster.nodes[pod["spec"]["nodeName"]].processes.get(uid)
        if process is not None and process.is_agent and not process.told:
            self.training.agents.kill(process)

    def _node(self, deed: Deed) -> None:
        names = sorted(self.cluster.nodes)
        if deed.what == "nodes cut":
            self._cut_several(names, deed)
            return
        # Only one node dies, or the job might have no node left.
        name = names[0 if deed.what == "node dies" else deed.number % len(names)]
        if deed.what == "node cut":
            self.cluster.cut(name)
        elif deed.what in ("node killed", "node dies"):
            self.cluster.kill(name)
        else:
            self.cluster.remove_node(name, lives_on=round(deed.at) % 3 == 0)
        if deed.what != "node dies":
            self.loop.call_later(deed.seconds, self.cluster.back, name)

    def _cut_several(self, names: list[str], deed: Deed) -> None:
        """Cut off a part of the cluster, one node after the other. Its nodes still reach each other."""
        for number in range(2):
            name = names[(deed.number + number) % len(names)]
            self.loop.call_later(number * deed.number, self.cluster.cut, name, f"side {deed.at}")
            self.loop.call_later(10 + deed.seconds, self.cluster.back, name)


def _begin(step: int, life: Life) -> dict[str, Any]:
    """Return what a rank reports about the start of its generation."""
    assert life.loaded is not None, "it has loaded"
    resumed = life.loaded.state.step if life.loaded.origin else None
    phase = "start" if step <= (resumed or 0) else "train"
    return {"resumed_step": resumed, "resumed_from": life.loaded.origin, "generation": life.generation, "phase": phase}


def _job_of(raw: Raw) -> str:
    """Return the name of the job from an object's label."""
    return str((raw["metadata"].get("labels") or {}).get(naming.LABEL_JOB, ""))


def simulate(scenario: Scenario, only: Mapping[str, str] | None = None) -> Outcome:
    """Run a scenario. See Simulation.run."""
    return Simulation(scenario, only).run()
