"""The metrics: counters in a prometheus-client registry, and series of jobs built from statuses at each scrape, so
that no series of a deleted job remains. There is no clock and no I/O; durations are passed in. Methods may be called
while another thread writes an answer: prometheus-client locks each value."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import prometheus_client
from prometheus_client import core, exposition
from prometheus_client.metrics import MetricWrapperBase

from ddpjob_operator.job import api, requests
from ddpjob_operator.job.newest import Newest
from ddpjob_operator.metrics import job_lines, names
from ddpjob_operator.metrics.of_change import Restart, of_change
from ddpjob_operator.observed.reports import AgentReport

# Switched off: prometheus_client would add a series with the creation time to each series, which nobody reads.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]


_OPENMETRICS = "application/openmetrics-text;version=1.0.0"


# Limit of jobs kept because they began or ended after the last scrape: an operator may have no scraper.
CHANGED_MAX = 10_000


class MeteredJob(NamedTuple):
    """A job as it is known now. status: None if unreadable."""

    namespace: str
    name: str
    uid: str
    status: api.Status | None
    created_at: dt.datetime | None = None


class QueueWaits(NamedTuple):
    """The current state of a work queue. name: one of names.QUEUES."""

    name: str
    depth: int = 0
    oldest_seconds: float = 0.0
    longest_seconds: float = 0.0
    working: int = 0
    unfinished_seconds: float = 0.0


class Moment(NamedTuple):
    """State at a scrape.

    jobs: None if this operator does not lead, so that a sum over operators counts each job once. leads: None if there
    is no operator, as in a local run.
    """

    now: dt.datetime
    jobs: Sequence[MeteredJob] | None
    version: str
    leads: bool | None = None
    lease: str = ""
    queues: Sequence[QueueWaits] = ()
    cached: Sequence[tuple[str, int]] = ()
    of_jobs: bool = True
    """True if each job has its own series."""
    away: Collection[str] = ()
    """uids of jobs that another release manages, and counts."""


class Meter:
    """Holds the metrics of the operator. A process creates one Meter."""

    def __init__(self, lock: AbstractContextManager[object] | None = None) -> None:
        """lock: needed if scrapes are written in another thread than the one that reports changes."""
        self.registry = prometheus_client.CollectorRegistry()
        self._metrics: dict[str, MetricWrapperBase] = {}
        self._children: dict[tuple[str, tuple[str, ...]], MetricWrapperBase] = {}
        self._spent: dict[str, dict[str, int]] = {}
        """Seconds counted so far, by uid."""
        self._shown: dict[str, dict[str, int]] = {}
        """Seconds counted until the last scrape, by uid."""
        self._newly: Newest[str, None] = Newest(CHANGED_MAX)
        self._ended: Newest[str, None] = Newest(CHANGED_MAX)
        """Jobs (uid) first or last counted after the snapshot of the last scrape."""
        self._lock = lock or nullcontext()
        self._elsewhere: set[str] = set()
        """Jobs (uid) that are counted only from now on: others may have counted their earlier time."""
        self._since: dt.datetime | None = None
        """Time from which all that jobs spend is counted here; None if this operator does not lead."""
        for metric in (*names.OF_OPERATOR, *names.OF_ALL_JOBS):
            self._register(metric)

    # ---------------------------------------------------------------- what happens

    def count(self, metric: names.Metric, *labels: str, by: float = 1.0) -> None:
        """Add an amount to a counter."""
        child = self._child(metric, labels)
        assert isinstance(child, prometheus_client.Counter)
        child.inc(by)

    def observe(self, metric: names.Metric, seconds: float, *labels: str) -> None:
        """Add an observation to a histogram."""
        child = self._child(metric, labels)
        assert isinstance(child, prometheus_client.Histogram)
        child.observe(seconds)

    def answered(self, method: str, path: str, code: int, seconds: float, *, watch: bool = False) -> None:
        """Count an answer of the API server. code: 0 if there was none. seconds: until it was read."""
        verb, resource = verb_and_resource(method, path, watch=watch)
        known = method if method in names.METHODS else "OTHER"
        self.count(names.REQUESTS, known, verb, resource, str(code) if code else names.NO_CODE)
        self.observe(names.REQUEST_SECONDS, seconds, verb, resource)

    def changed(
        self,
        old: api.Status,
        new: api.Status,
        now: dt.datetime,
        restart: Restart | None = None,
        agent: AgentReport | None = None,
    ) -> Restart | None:
        """Count a status that was written. Return the next `restart`. agent: the last report of node 0's agent."""
        seen, restart = of_change(old, new, now, restart, agent)
        for each in seen:
            if each.metric.kind == "counter":
                self.count(each.metric, *each.labels, by=each.value)
            else:
                self.observe(each.metric, each.value, *each.labels)
        return restart

    def leads(self, now: dt.datetime) -> None:
        """Count the time that jobs spend from now on, until a scrape at which this operator does not lead."""
        self._forget()
        self._since = now

    def spends(self, job: MeteredJob, now: dt.datetime) -> None:
        """Count the time of a job that changed, because short jobs begin and end between two scrapes."""
        self._newly[job.uid] = None
        self._add(job, now)

    def left_to_others(self, uid: str) -> None:
        """Stop counting a job that another release now manages."""
        self._elsewhere.add(uid)
        self._spent.pop(uid, None)

    def gone(self, job: MeteredJob, now: dt.datetime) -> None:
        """Count a deleted job with its last status."""
        self._ended[job.uid] = None
        self._add(job, now)
        self._spent.pop(job.uid, None)

    @property
    def remembered(self) -> int:
        """Number of jobs for which counts are kept."""
        return len(self._spent.keys() | self._newly.keys() | self._ended.keys())

    # ---------------------------------------------------------------- what is served

    def text(self, moment: Moment, *, openmetrics: bool) -> tuple[bytes, str]:
        """Return the answer to a scrape and its content type. Do not call it concurrently.

        The format is OpenMetrics, or Prometheus' older text, which node-exporter's textfile collector reads.
        """
        # Do not pass the client's Accept header: prometheus-client would copy a part of it into the content type.
        encode, content_type = exposition.choose_encoder(_OPENMETRICS if openmetrics else "")
        families: Any = SimpleNamespace(collect=partial(self._at, moment))  # encoders use only collect() of a registry
        head, end, of_each = encode(families), b"# EOF\n" if openmetrics else b"", b""
        spent = self._shown
        if moment.jobs is not None and moment.of_jobs:
            shown = ((j.namespace, j.name, j.status, spent[j.uid]) for j in moment.jobs if j.status and j.uid in spent)
            of_each = job_lines.text(shown, moment.now, openmetrics=openmetrics)
        return head.removesuffix(end) + of_each + end, content_type

    def _at(self, moment: Moment) -> list[core.Metric]:
        self._add_spent(moment)
        families = [f for f in self.registry.collect() if f.name not in _SET_AT_SCRAPE and f.samples]
        if moment.leads is None:
            families = [family for family in families if family.name not in _OF_OPERATOR]
        return [*families, *_of_operator(moment), *_of_jobs(moment)]

    def _add_spent(self, moment: Moment) -> None:
        """Count the time that jobs have spent after they were last counted."""
        self._shown = {}
        if moment.jobs is None:
            self._forget()
            return
        self._since = self._since or moment.now
        for job in moment.jobs:
            if job.uid not in self._ended and (spent := self._add(job, moment.now)) is not None:
                self._shown[job.uid] = spent
        kept = {job.uid for job in moment.jobs} | self._newly.keys()
        for uid in [uid for uid in list(self._spent) if uid not in kept]:
            self._spent.pop(uid, None)
        self._elsewhere = {*moment.away} - self._spent.keys()
        self._newly, self._ended = Newest(CHANGED_MAX), Newest(CHANGED_MAX)

    def _add(self, job: MeteredJob, now: dt.datetime) -> dict[str, int] | None:
        """Count the time that a job spent after the last call. Return its total; None for an unreadable status."""
        if job.status is None:
            return None  # keep the counts: otherwise they would be added again once the status is readable
        spent = job_lines.spent(job.status, now)
        with self._lock:
            before = self._spent.get(job.uid)
            if before is None:
                before = self._counted_by_others(job, spent)
            # The productive time may shrink: a stall or failure is detected late, or a clock is set back.
            # Prometheus takes a falling counter for a restart from zero, so increase() would add all of it again.
            spent = {name: max(seconds, before.get(name, 0)) for name, seconds in spent.items()}
            self._spent[job.uid] = spent
        for name, seconds in spent.items():
            if more := seconds - before.get(name, 0):
                self.count(names.SPENT_SECONDS, name, by=more)
        return spent

    def _counted_by_others(self, job: MeteredJob, spent: dict[str, int]) -> dict[str, int]:
        if job.status is None or self._since is None or job.uid in self._elsewhere:
            return spent
        is_new = job.created_at is not None and job.created_at >= self._since
        return {} if is_new else job_lines.spent(job.status, self._since)

    def _forget(self) -> None:
        self._spent, self._elsewhere, self._since = {}, set(), None
        self._newly, self._ended = Newest(CHANGED_MAX), Newest(CHANGED_MAX)

    # ---------------------------------------------------------------- the registry

    def _register(self, metric: names.Metric) -> None:
        if metric.kind == "counter":
            made: MetricWrapperBase = prometheus_client.Counter(
                metric.name, metric.help, metric.labels, registry=self.registry
            )
        elif metric.kind == "histogram":
            made = prometheus_client.Histogram(
                metric.name, metric.help, metric.labels, registry=self.registry, buckets=metric.buckets
            )
        else:
            return  # gauges are set at the scrape
        self._metrics[metric.name] = made
        for labels in _FROM_THE_START.get(metric.name, ()):
            self._child(metric, labels)

    def _child(self, metric: names.Metric, labels: tuple[str, ...]) -> MetricWrapperBase:
        found = self._children.get((metric.name, labels))
        if found is None:
            made = self._metrics[metric.name]
            found = made.labels(*(names.bounded(label) for label in labels)) if metric.labels else made
            self._children[metric.name, labels] = found
        return found


def verb_and_resource(method: str, path: str, *, watch: bool = False) -> tuple[str, str]:
    """Return a request's verb and resource in RBAC's terms; names.OTHER for unknown ones."""
    asked = requests.read(method, path, watch=watch and method == "GET")
    resource = f"{asked.plural}/{asked.subresource}" if asked.subresource else asked.plural
    verb = asked.verb if method in names.METHODS else names.OTHER
    return verb, resource if resource in names.RESOURCES else names.OTHER


# Labels of series that exist from the start with 0, so that the first event is an increase and an alert fires.
_FROM_THE_START: dict[str, list[tuple[str, ...]]] = {
    names.RECONCILES.name: [("ddpjob", result) for result in names.RESULTS],
    names.RECONCILE_ERRORS.name: [("ddpjob",)],
    names.RECONCILE_SECONDS.name: [("ddpjob",)],
    names.QUEUE_ADDS.name: [(name,) for name in names.QUEUES],
    names.QUEUE_RETRIES.name: [(name,) for name in names.QUEUES],
    names.QUEUE_SECONDS.name: [(name,) for name in names.QUEUES],
    names.WORK_SECONDS.name: [(name,) for name in names.QUEUES],
    names.WATCH_RESTARTS.name: [(name, cause) for name in names.CACHES for cause in ("end", "error")],
    names.MISSED.name: [(name,) for name in names.CACHES],
    names.FINISHED.name: list(names.ENDS),
    names.RESTARTS.name: [(name, scope) for name in names.CLASSES for scope in names.SCOPES],
    names.SPENT_SECONDS.name: [(name,) for name in names.SPENT],
    names.DETECTION.name: [(scope,) for scope in names.SCOPES],
    names.RESTART_SECONDS.name: [
        (scope, until) for scope in names.SCOPES for until in names.UNTIL if (scope, until) != ("rank", "running")
    ],
    names.START_SECONDS.name: [(until,) for until in names.UNTIL],
}
_SET_AT_SCRAPE: frozenset[str] = frozenset(m.name for m in names.ALL if m.kind in ("gauge", "info", "stateset"))
_OF_OPERATOR = frozenset(m.name for m in names.OF_OPERATOR)


def _family(metric: names.Metric, samples: Iterable[tuple[tuple[str, ...], float]]) -> core.Metric:
    family = core.Metric(metric.name, metric.help, metric.kind)
    for labels, value in samples:
        family.add_sample(metric.shown, dict(zip(metric.labels, map(names.bounded, labels), strict=True)), value)
    return family


def _of_operator(moment: Moment) -> Iterator[core.Metric]:
    if moment.leads is None:
        return
    queues = moment.queues
    yield _family(names.INFO, [((moment.version,), 1.0)])
    yield _family(names.LEADS, [((), float(moment.leads))])
    yield _family(names.LEADER, [((moment.lease,), float(moment.leads))])
    yield _family(names.ACTIVE_WORKERS, [((q.name,), q.working) for q in queues if q.name == names.QUEUES[0]])
    of_queue: tuple[tuple[names.Metric, Callable[[QueueWaits], float]], ...] = (
        (names.QUEUE_DEPTH, lambda queue: queue.depth),
        (names.QUEUE_OLDEST, lambda queue: queue.oldest_seconds),
        (names.LONGEST_SECONDS, lambda queue: queue.longest_seconds),
        (names.UNFINISHED_SECONDS, lambda queue: queue.unfinished_seconds),
    )
    for metric, value in of_queue:
        yield _family(metric, [((queue.name,), value(queue)) for queue in queues])
    yield _family(names.CACHE_OBJECTS, [((resource,), count) for resource, count in moment.cached])


def _of_jobs(moment: Moment) -> Iterator[core.Metric]:
    if moment.jobs is None:
        return
    states: dict[str, dict[str, int]] = {}
    for job in moment.jobs:
        of_space = states.setdefault(job.namespace, dict.fromkeys((*names.STATES, names.NO_STATE), 0))
        of_space[names.NO_STATE if job.status is None else job_lines.state(job.status)] += 1
    yield _family(names.JOBS, [((space, state), n) for space, of in states.items() for state, n in of.items()])
