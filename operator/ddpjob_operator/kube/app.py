"""The operator's process: `ddpjob-operator`, or `python -m ddpjob_operator`.

kopf gives the process its frame (login, start, stop) and watches the DDPJobs; pods and Services go through our own
reflectors. Every change only marks a job, and the queue looks at it. Of several operators the one that holds the Lease
has a running queue; the others keep their copies warm. In a cluster it uses the pod's service account, elsewhere
KUBECONFIG.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime as dt
import gc
import itertools
import logging
import os
import socket
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from typing import Any

import kopf
import uvloop
from aiohttp import web

from ddpjob_operator.failures.redaction import clean, mask
from ddpjob_operator.job import api
from ddpjob_operator.kube import access, kopf_session, observe, reading
from ddpjob_operator.kube.claims import Claims, namespace_of
from ddpjob_operator.kube.client import ApiError, Client, Limits
from ddpjob_operator.kube.events import Events
from ddpjob_operator.kube.executor import Caches, Executor
from ddpjob_operator.kube.forward import Forwarder
from ddpjob_operator.kube.lease import Durations, Leader
from ddpjob_operator.kube.listing import Careful, take
from ddpjob_operator.kube.login import login
from ddpjob_operator.kube.nodes import Nodes
from ddpjob_operator.kube.queue import Queue
from ddpjob_operator.kube.receive import Receiver, Sender
from ddpjob_operator.kube.reconcile import LISTEN_SECONDS, Reconciler
from ddpjob_operator.kube.reflector import Reflector
from ddpjob_operator.kube.store import Jobs, Key, Store
from ddpjob_operator.kube.tokens import BoundPod, Verifier
from ddpjob_operator.observed import facts
from ddpjob_operator.observed.cluster import Pod
from ddpjob_operator.observed.reports import Report
from ddpjob_operator.plan.actions import Settings as PlanSettings
from ddpjob_operator.pods import build, naming

_LOGGER = logging.getLogger("ddpjob_operator")
# Pods of one job change in bursts. When the last of them runs or has ended the job is looked at soon; while only some
# do, after a while: each look may write the status, and 8 pods would make 16 of them (bench/operator_api.py).
WHOLE_SECONDS = 0.1
PART_SECONDS = 3.0
UNSYNCED_SECONDS = 0.2
SWEEP_SECONDS = 600.0
# kopf holds a page of jobs at a time; somebody may have put a megabyte into each.
JOBS_PAGE = 10
# Longer than any bounded request, with its retries, could take.
STUCK_SECONDS = 600.0


class ErrorBackoffs:
    """kopf's waits between failing requests, for ever: after its default of 54 s it would end the process.

    A class, because kopf iterates anew for each request, and a generator is used up by the first (kopf 1.45,
    clients/api.py).
    """

    def __iter__(self) -> Iterator[float]:
        """1, 2, 4 … 30 s, and on."""
        yield from (1.0, 2.0, 4.0, 8.0, 16.0)
        yield from itertools.repeat(30.0)


@dataclasses.dataclass(frozen=True)
class Settings:
    """How this process runs; from environment variables."""

    namespaces: tuple[str, ...] = ()
    """DDPJOB_WATCH_NAMESPACES, a list with commas. Empty: all, which needs a ClusterRole."""
    health_port: int = 8080
    """DDPJOB_HEALTH_PORT: where /healthz answers. 0: nowhere."""
    status_port: int = 0
    """DDPJOB_STATUS_PORT: where the receiver of progress listens. 0: nowhere."""
    status_url: str = ""
    """DDPJOB_STATUS_URL: where trainers find that receiver. Empty: they do not report."""
    log_level: str = "INFO"
    """DDPJOB_LOG_LEVEL."""
    rules: PlanSettings = dataclasses.field(default_factory=PlanSettings)
    """DDPJOB_LOST_NODE_SECONDS and DDPJOB_KEEP_LOG_TAIL."""
    lease_namespace: str = ""
    """DDPJOB_LEASE_NAMESPACE: where the Lease is by which one of several acts. Empty: this one always does."""
    lease_name: str = "ddpjob-operator"
    """DDPJOB_LEASE_NAME."""
    claim_namespace: str = "kube-system"
    """DDPJOB_CLAIM_NAMESPACE: where the releases that watch all namespaces find each other (claims.py)."""
    lease: Durations = dataclasses.field(default_factory=Durations)
    """DDPJOB_LEASE_SECONDS, DDPJOB_LEASE_RENEW_SECONDS, DDPJOB_LEASE_RETRY_SECONDS."""
    pod_name: str = ""
    """DDPJOB_POD_NAME: what the Lease calls its holder. Empty: the host's name."""
    pod_ip: str = ""
    """DDPJOB_POD_IP: where the others hand on reports of progress. Empty: they refuse them."""

    @staticmethod
    def read(environment: Mapping[str, str]) -> Settings:
        """From environment variables. Raises ValueError with the variable, its value and the mend."""
        names = [name.strip() for name in environment.get("DDPJOB_WATCH_NAMESPACES", "").split(",")]
        level = environment.get("DDPJOB_LOG_LEVEL", "INFO").upper()
        if level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
            raise ValueError(f'DDPJOB_LOG_LEVEL: must be DEBUG, INFO, WARNING or ERROR, is "{level}"')
        return Settings(
            namespaces=tuple(dict.fromkeys(name for name in names if name)),
            health_port=_port(environment, "DDPJOB_HEALTH_PORT", 8080),
            status_port=_port(environment, "DDPJOB_STATUS_PORT", 0),
            status_url=environment.get("DDPJOB_STATUS_URL", ""),
            log_level=level,
            rules=PlanSettings(
                lost_node_seconds=_seconds(environment, "DDPJOB_LOST_NODE_SECONDS", 30),
                keep_log_tail=_switch(environment, "DDPJOB_KEEP_LOG_TAIL", True),
            ),
            lease_namespace=environment.get("DDPJOB_LEASE_NAMESPACE", ""),
            lease_name=environment.get("DDPJOB_LEASE_NAME", "ddpjob-operator"),
            claim_namespace=environment.get("DDPJOB_CLAIM_NAMESPACE", "kube-system"),
            lease=Durations.read(environment),
            pod_name=environment.get("DDPJOB_POD_NAME", ""),
            pod_ip=environment.get("DDPJOB_POD_IP", ""),
        )

    @property
    def status_address(self) -> str:
        """Where other operators reach our receiver; empty: they do not."""
        host = f"[{self.pod_ip}]" if ":" in self.pod_ip else self.pod_ip
        return f"{host}:{self.status_port}" if host and self.status_port else ""


class Operator:
    """All parts, wired. `start` and `stop` frame its life; `job_seen` is told of every change of a DDPJob."""

    def __init__(
        self, settings: Settings, client: Client, leader: Leader | None = None, claims: Claims | None = None
    ) -> None:
        """`client` writes only while `leader` holds its Lease, and where `claims` hold; without them this operator is
        the only one."""
        self.settings = settings
        self.broken = False
        self.stop_flag = asyncio.Event()
        self._client = client
        self._leader = leader
        self._claims = claims
        self._leads = leader is None
        self._ending_since: float | None = None
        """Since when a term of leading comes to its end."""
        self.caches = Caches(
            Jobs(self._mark, reading.job),
            Store(observe.pod, _job_of, self._pod_changed, facts.merge),
            Store(observe.service, _job_of, lambda key, _old, _new: self._mark(key)),
            Nodes(self._node_changed, _now),
        )
        self._careful = Careful("DDPJobs")
        self._make_parts_of_a_term()
        self._reflectors = [
            Reflector(client, plural, namespace, naming.LABEL_JOB, sink)
            for namespace in settings.namespaces or ("",)
            for plural, sink in (("pods", self.caches.pods), ("services", self.caches.services))
        ]
        # Only a ClusterRole can allow it; without it the pods themselves show that their node is lost.
        self._nodes = None if settings.namespaces else Reflector(client, "nodes", "", "", self.caches.nodes)
        self._tasks: list[asyncio.Task[None]] = []
        self._term: list[asyncio.Task[None]] = []
        self._first_lists: asyncio.Task[None] | None = None
        self._health: web.AppRunner | None = None
        self._forwarder = Forwarder(leader.leader_address if leader else lambda: None)
        verify = Verifier(client.get, _say_hidden).pod
        self._receiver = Receiver(verify, self.locate, self.report, forward=self._forwarder.forward)

    def _make_parts_of_a_term(self) -> None:
        """What was remembered in one term of leading ends with it: old refusals, reports and waits are not true."""
        self._queue: Queue[Key] = Queue(self._look, clock=time.monotonic)
        self._events = Events(self._client, instance=os.environ.get("HOSTNAME", ""))
        reporting = build.Reporting(self.settings.status_url) if self.settings.status_url else None
        executor = Executor(
            self._client,
            self.caches,
            self._events,
            now=_now,
            clock=time.monotonic,
            reporting=reporting,
            progressed=self._queue.progressed,
        )
        rules = self.settings.rules
        self._reconciler = Reconciler(self.caches, executor, now=_now, clock=time.monotonic, settings=rules)

    async def start(self) -> None:
        """Returns once the DDPJobs can be watched; waits for the CRD and the rights to do so."""
        self._health = await _serve_health(self.settings.health_port, self.unhealthy, self.standing_by)
        if self.settings.status_port:
            await self._receiver.start(None, self.settings.status_port)
        for reflector in (*self._reflectors, *([self._nodes] if self._nodes else [])):
            self._run(reflector.what, reflector.run())
        if self._leader is None:
            self._begin_term()
        self._first_lists = asyncio.create_task(self._settle())
        await access.wait_for_jobs(self._client, self.settings.namespaces or ("",))
        await self._say_missing_rights()
        self._run("sweep", self._sweep())
        if self._leader is not None:
            # Not earlier: an operator that may not even see the jobs must not keep the Lease from one that may.
            if self._claims is not None:
                self._run("claims", self._claims.run(self._claims_changed))
            self._run("lease", self._leader.run())
            self._run("terms", self._lead(self._leader))

    async def stop(self) -> None:
        """Nothing is written after this."""
        # kopf waits 5 s for a task of its own that waits for this flag (kopf 1.45, reactor/running.py).
        self.stop_flag.set()
        tasks = [*self._tasks, *self._term, *([self._first_lists] if self._first_lists else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._leader is not None:
            await self._leader.release()
            await self._leader.close()
        if self._claims is not None:
            await self._claims.close()
        await self._receiver.stop()
        await self._forwarder.close()
        if self._health is not None:
            await self._health.cleanup()
        await self._client.close()

    def job_seen(self, kind: str | None, raw: dict[str, Any]) -> None:
        """A watch event of a DDPJob; kind None is its place in a list."""
        metadata = raw["metadata"]
        if kind == "DELETED":
            self.caches.jobs.remove((metadata["namespace"], metadata["name"]), metadata["uid"])
        else:
            self.caches.jobs.put(raw)

    def locate(self, bound: BoundPod) -> Sender | None:
        """Which node of which job a pod is."""
        entry = self.caches.pods.get(bound.namespace, bound.name)
        if entry is None or entry.uid != bound.uid:
            return None
        job = self.caches.jobs.get(entry.key)
        if job is None or job["metadata"]["uid"] != entry.value.owner_uid:
            return None
        return Sender(*entry.key, rank=entry.value.rank, attempt=entry.value.attempt)

    def report(self, sender: Sender, report: Report) -> None:
        """What a trainer reports."""
        key = (sender.namespace, sender.job)
        if (in_seconds := self._reconciler.report(key, report)) is not None:
            self._mark(key, in_seconds)

    def unhealthy(self) -> str:
        """Why a restart would help, or nothing. An API server that is away is no such reason."""
        for task in self._tasks:
            if task.done():
                return f"{task.get_name()} has ended"
        if self._queue.stuck_seconds() > STUCK_SECONDS:
            return f"a look at a job has got no answer for {self._queue.stuck_seconds():.0f} s"
        if self._ending_since is not None and (took := time.monotonic() - self._ending_since) > STUCK_SECONDS:
            return f"it stopped leading {took:.0f} s ago, and what it did then has not ended"
        for reflector in self._reflectors:
            silent = time.monotonic() - reflector.tried_at
            if silent > STUCK_SECONDS:
                return f"the watch of {reflector.what} has done nothing for {silent:.0f} s"
        return ""

    def standing_by(self) -> str:
        """Which jobs another release has; that is no reason for a restart."""
        return "; ".join(self._claims.standing_by()) if self._claims is not None else ""

    def _acts(self, namespace: str) -> bool:
        return self._claims is None or self._claims.hold(namespace)

    def _claims_changed(self) -> None:
        self._reconciler.forget(lambda key: not self._acts(key[0]))
        for key in self.caches.jobs:
            if self._acts(key[0]):
                self._mark(key)

    async def _lead(self, leader: Leader) -> None:
        while True:
            await leader.gained()
            self._begin_term()
            await leader.lost()
            await self._end_term()

    def _begin_term(self) -> None:
        self._leads = True
        parts = {"events": self._events.run(), "queue": self._queue.run(), "reports": self._listen()}
        self._term = [self._run(name, work) for name, work in parts.items()]
        for key in self.caches.jobs:
            self._queue.add(key)

    async def _end_term(self) -> None:
        """Returns once no write is under way: requests are cut off, not waited for."""
        self._leads = False
        self._ending_since = time.monotonic()
        self._tasks = [task for task in self._tasks if task not in self._term]
        for task in self._term:
            task.cancel()
        await asyncio.gather(*self._term, return_exceptions=True)
        self._ending_since = None
        self._make_parts_of_a_term()

    async def _settle(self) -> None:
        for reflector in self._reflectors:
            await reflector.synced.wait()
        _LOGGER.info("%d pods and %d services are known", len(self.caches.pods), len(self.caches.services))
        # What has been loaded so far stays: the collector need not walk through it again and again.
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 20, 50)

    async def _look(self, key: Key) -> float | None:
        if not self._acts(key[0]):
            return None  # looked at when that changes
        # Before both lists are there, a pod that is not in our copy would look as if it had vanished.
        here = (r for r in self._reflectors if r.namespace in ("", key[0]))
        if not all(r.synced.is_set() for r in here):
            return UNSYNCED_SECONDS
        return await self._reconciler.look(key)

    def _mark(self, key: Key, in_seconds: float = 0.0) -> None:
        # While another operator leads a queue would only grow, by the names of all jobs that ever were.
        if self._leads:
            self._queue.add(key, in_seconds)

    async def _listen(self) -> None:
        while True:
            await asyncio.sleep(LISTEN_SECONDS)
            try:
                self._reconciler.listen()
            except Exception:
                _LOGGER.exception("whether reports get here is not known")  # its end would end the operator

    def _pod_changed(self, key: Key, old: Pod | None, new: Pod | None) -> None:
        if new is None and old is not None:
            self._reconciler.deleted_pods(key, old)
        if new is None or (new.ended and new.trainer.exit_code != 0) or new.deletion_requested_at is not None:
            self._mark(key)
        elif old is None or dataclasses.replace(old, node=new.node, scheduled_at=new.scheduled_at) != new:
            # A node alone is nothing to say.
            self._mark(key, WHOLE_SECONDS if self._is_whole(key, new) else PART_SECONDS)

    def _node_changed(self, name: str) -> None:
        jobs = self.caches.pods.keys()
        for key in jobs:
            if any(pod.node == name and pod.live for pod in self.caches.pods.of(key)):
                self._mark(key)

    def _is_whole(self, key: Key, changed: Pod) -> bool:
        """Whether the trainers of all nodes are in the same state now."""
        nodes = ((self.caches.jobs.get(key) or {}).get("spec") or {}).get("nodes", 1)
        pods = sorted(self.caches.pods.of(key), key=lambda pod: pod.replacement)
        attempt = {pod.rank: pod for pod in pods if pod.attempt == changed.attempt}
        alike = all(pod.trainer.state == changed.trainer.state for pod in attempt.values())
        return alike and changed.trainer.state != "waiting" and len(attempt) >= nodes

    async def _sweep(self) -> None:
        """Drops jobs that are gone: kopf says nothing of those that went while its watch was broken."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            for namespace in self.settings.namespaces or ("",):
                await self._list_jobs(namespace)

    async def _list_jobs(self, namespace: str) -> None:
        where = f"namespaces/{namespace}/" if namespace else ""
        jobs = self.caches.jobs
        try:
            await take(
                self._client.pages(f"/apis/{api.GROUP}/{api.VERSION}/{where}{api.PLURAL}"),
                lambda raw: self._careful.put(jobs, raw),
                lambda named, version: jobs.retain(named, version, namespace),
            )
        except ApiError as error:
            _LOGGER.warning("the jobs were not listed anew: %s", error)
        except Exception:
            _LOGGER.exception("the jobs were not listed anew")  # the end of the sweep would end the operator

    async def _say_missing_rights(self) -> None:
        try:
            for line in await access.missing_rights(self._client, self.settings.namespaces or ("",)):
                _LOGGER.warning("%s", line)
        except ApiError as error:
            _LOGGER.info("the operator's own rights were not checked: %s", error)

    def _run(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._ended)
        self._tasks.append(task)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        # All tasks run for ever. Half an operator would keep silent about jobs: none at all is restarted.
        _LOGGER.error("%s has ended, so the operator ends", task.get_name(), exc_info=task.exception())
        self.broken = True
        self.stop_flag.set()


def handlers(operator: Operator) -> kopf.OperatorRegistry:
    """What kopf calls. `on.event` alone: no annotation, no finalizer, no patch is ever written by kopf."""
    registry = kopf.OperatorRegistry()

    @kopf.on.startup(registry=registry)
    async def start(settings: kopf.OperatorSettings, **_: Any) -> None:
        settings.posting.enabled = False
        settings.peering.standalone = True
        # No right to watch CRDs and namespaces is needed: the kind and the namespaces are known.
        settings.scanning.disabled = True
        settings.networking.error_backoffs = ErrorBackoffs()
        settings.networking.request_timeout = 60.0
        settings.networking.connect_timeout = 5.0
        settings.watching.inactivity_timeout = 90.0
        # kopf lists all jobs in one answer, unless it is told not to.
        settings.watching.chunk_size = JOBS_PAGE
        await operator.start()

    @kopf.on.cleanup(registry=registry)
    async def stop(**_: Any) -> None:
        await operator.stop()

    logins: AsyncIterator[None] = _paced(5.0)

    @kopf.on.login(registry=registry, backoff=5.0)
    async def log_in(**_: Any) -> kopf.AiohttpSession:
        await logins.__anext__()
        info = await asyncio.to_thread(login)
        # Read anew before a rotated token ends (the kubelet rotates at 80 % of an hour). A time of its own also makes
        # each login differ: kopf never takes back credentials that are equal to refused ones, and would end.
        expiration = dt.datetime.now(dt.timezone.utc) + dt.timedelta(minutes=10)
        return kopf_session.session(info, expiration=expiration)

    @kopf.on.event(api.GROUP, api.VERSION, api.PLURAL, registry=registry)
    async def job_changed(event: Mapping[str, Any], **_: Any) -> None:
        operator.job_seen(event["type"], event["object"])

    return registry


async def serve(settings: Settings) -> int:
    """Runs until SIGTERM or SIGINT; the exit code."""
    operator = _operator(settings)
    try:
        await kopf.operator(
            registry=handlers(operator),
            standalone=True,
            clusterwide=not settings.namespaces,
            namespaces=settings.namespaces,
            stop_flag=operator.stop_flag,
        )
    except Exception as error:
        # kopf ends when it cannot watch for good, as when the CRD is removed. A new start waits for it calmly.
        _LOGGER.error("kopf has ended, so the operator ends: %s", error)
        return 1
    return 1 if operator.broken else 0


def main() -> None:
    """The program `ddpjob-operator`."""
    try:
        settings = Settings.read(os.environ)
    except ValueError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    told = logging.StreamHandler(sys.stderr)
    told.setFormatter(_Formatter("%(asctime)s %(levelname)-7s %(message)s"))
    logging.basicConfig(level=settings.log_level, handlers=[told])
    if settings.log_level != "DEBUG":
        for noisy in ("kopf", "asyncio", "aiohttp.access"):
            logging.getLogger(noisy).setLevel(logging.WARNING)
        for handler in logging.getLogger().handlers:
            handler.addFilter(_without_stack_where_the_server_said_no)
    sys.exit(uvloop.run(serve(settings)))


class _Formatter(logging.Formatter):
    """The log quotes what users and servers have written, and is read on terminals."""

    def format(self, record: logging.LogRecord) -> str:
        """One record, cleaned and without credentials."""
        return mask(clean(super().format(record)))


def _operator(settings: Settings) -> Operator:
    if not settings.lease_namespace:
        return Operator(settings, Client())
    leader, claims = _leader(settings), _claims(settings)
    client = Client(may_write=lambda path: leader.holds() and claims.hold(namespace_of(path)))
    return Operator(settings, client, leader, claims)


def _leader(settings: Settings) -> Leader:
    # A name of its own for each process: one that was started anew knows nothing of what the last one was writing.
    identity = f"{settings.pod_name or socket.gethostname()}_{uuid.uuid4().hex[:8]}"
    place = settings.lease_namespace, settings.lease_name
    return Leader(_client_for_leases(settings), *place, identity, settings.lease, settings.status_address)


def _claims(settings: Settings) -> Claims:
    release = f"{settings.lease_namespace}/{settings.lease_name}"
    where = settings.namespaces, settings.claim_namespace
    return Claims(_client_for_leases(settings), *where, release, settings.lease)


def _client_for_leases(settings: Settings) -> Client:
    seconds = settings.lease.turn_seconds
    return Client(limits=Limits(connect_seconds=seconds, request_seconds=seconds, tries=2))


async def _serve_health(
    port: int, unhealthy: Callable[[], str], remark: Callable[[], str] = str
) -> web.AppRunner | None:
    """/healthz from the first moment on, also while the CRD is missing; kopf's own probe starts only after that."""
    if port == 0:
        return None

    async def answer(_: web.Request) -> web.Response:
        why, more = unhealthy(), remark()
        return web.Response(status=503 if why else 200, text=f"{why or 'ok'}{more and f'; {more}'}\n")

    app = web.Application()
    app.router.add_get("/healthz", answer)
    # A peer that says nothing holds no connection: the kubelet asks anew each time.
    runner = web.AppRunner(app, access_log=None, keepalive_timeout=5.0)
    await runner.setup()
    await web.TCPSite(runner, port=port).start()
    return runner


async def _paced(seconds: float) -> AsyncIterator[None]:
    """Gives at most one turn per `seconds`: refused credentials must not make kopf log in in a tight loop."""
    last = float("-inf")
    while True:
        await asyncio.sleep(max(0.0, last + seconds - time.monotonic()))
        last = time.monotonic()
        yield


def _now() -> dt.datetime:
    """Whole seconds, as all of Kubernetes tells the time."""
    return dt.datetime.now(dt.timezone.utc).replace(microsecond=0)


def _job_of(raw: Mapping[str, Any]) -> Key:
    metadata = raw["metadata"]
    owner = observe.controller(raw)
    name = observe.job_name(raw) or (owner.get("name", "") if owner.get("kind") == api.KIND else "")
    return metadata.get("namespace", ""), name


def _port(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, str(default))
    if not text.isdecimal() or int(text) > 65535:
        raise ValueError(f'{name}: must be a port from 0 (off) to 65535, is "{text}"')
    return int(text)


def _seconds(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, str(default))
    if not text.isdecimal() or not 1 <= int(text) <= 86_400:
        raise ValueError(f'{name}: must be whole seconds from 1 to 86400, is "{text}"')
    return int(text)


def _switch(environment: Mapping[str, str], name: str, default: bool) -> bool:
    text = environment.get(name, "true" if default else "false").lower()
    if text not in ("true", "false"):
        raise ValueError(f'{name}: must be true or false, is "{text}"')
    return text == "true"


def _without_stack_where_the_server_said_no(record: logging.LogRecord) -> bool:
    """kopf tells an answer of the API server with three stacks of its own code; a bug of ours keeps its stack."""
    error = record.exc_info[1] if record.exc_info else None
    if type(error).__module__.partition(".")[0] in ("kopf", "aiohttp"):
        record.exc_info = record.exc_text = None
    return True


def _say_hidden(why: str) -> None:
    _LOGGER.warning("progress is off: %s", why)
