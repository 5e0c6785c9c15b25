"""The numbers themselves: a registry of prometheus-client for what is counted as it happens, and the series of jobs,
which are made anew from their statuses at each scrape, so that none is left of a job that is gone.

It has no clock and opens nothing; durations are handed in. Its methods may be called while another thread writes an
answer: prometheus-client has a lock for each value.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import prometheus_client
from prometheus_client import core, exposition
from prometheus_client.metrics import MetricWrapperBase

from ddpjob_operator.job import api
from ddpjob_operator.metrics import job_lines, names, of_status
from ddpjob_operator.metrics.of_change import Restart, SeenStatus, of_change
from ddpjob_operator.observed.reports import AgentReport

# The time at which each series was made, as one more series each: nothing here reads them.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]


_OPENMETRICS = "application/openmetrics-text;version=1.0.0"


class MeteredJob(NamedTuple):
    """A job as it is known now. status: None where it cannot be read."""

    namespace: str
    name: str
    uid: str
    status: api.Status | None
    created_at: dt.datetime | None = None


class QueueWaits(NamedTuple):
    """One work queue now; its name is one of names.QUEUES."""

    name: str
    depth: int = 0
    oldest_seconds: float = 0.0
    longest_seconds: float = 0.0
    working: int = 0
    unfinished_seconds: float = 0.0


class Moment(NamedTuple):
    """What is true at a scrape. jobs: None while this operator does not lead, so that a sum over all operators counts
    each once. leads: None where there is no operator, as in a local run."""

    now: dt.datetime
    jobs: Sequence[MeteredJob] | None
    version: str
    leads: bool | None = None
    lease: str = ""
    queues: Sequence[QueueWaits] = ()
    cached: Sequence[tuple[str, int]] = ()
    of_jobs: bool = True
    """Whether jobs have series of their own."""
    away: Collection[str] = ()
    """The uids of jobs that are there, and that another release acts for: it counts them meanwhile."""


class Meter:
    """Counts from its making on: one for a process."""

    def __init__(self, lock: AbstractContextManager[object] | None = None) -> None:
        """lock: needed where a scrape is written in another thread than the one that reports changes."""
        self.registry = prometheus_client.CollectorRegistry()
        self._metrics: dict[str, MetricWrapperBase] = {}
        self._children: dict[tuple[str, tuple[str, ...]], MetricWrapperBase] = {}
        self._spent: dict[str, dict[str, int]] = {}
        """The seconds that were counted of each job, by its uid."""
        self._shown: dict[str, dict[str, int]] = {}
        """The same of the last scrape."""
        self._newly: set[str] = set()
        self._ended: set[str] = set()
        """The jobs, by uid, that were counted first, or for the last time, after the snapshot of the last scrape."""
        self._lock = lock or nullcontext()
        self._elsewhere: set[str] = set()
        """The jobs, by uid, that count from when they are shown: others may have counted what they spent before."""
        self._since: dt.datetime | None = None
        """From when on all that jobs spend is counted here; None: it does not lead."""
        for metric in (*names.OF_OPERATOR, *names.OF_ALL_JOBS):
            self._register(metric)

    # ---------------------------------------------------------------- what happens

    def count(self, metric: names.Metric, *labels: str, by: float = 1.0) -> None:
        """Add to a counter."""
        child = self._child(metric, labels)
        assert isinstance(child, prometheus_client.Counter)
        child.inc(by)

    def observe(self, metric: names.Metric, seconds: float, *labels: str) -> None:
        """Add to a histogram."""
        child = self._child(metric, labels)
        assert isinstance(child, prometheus_client.Histogram)
        child.observe(seconds)

    def changed(
        self,
        old: api.Status,
        new: api.Status,
        now: dt.datetime,
        restart: Restart | None = None,
        agent: AgentReport | None = None,
    ) -> Restart | None:
        """The status of a job was written; returns what is to be kept of it until the next time, as `restart`. agent:
        the last report of its node 0's agent."""
        seen, restart = of_change(old, new, now, restart, agent)
        for each in seen:
            self._take(each)
        return restart

    def leads(self, now: dt.datetime) -> None:
        """From now on all that jobs spend is counted here, until a scrape in which this operator does not lead."""
        self._forget()
        self._since = now

    def spends(self, job: MeteredJob, now: dt.datetime) -> None:
        """A job that this operator acts for has changed: most jobs of a sweep begin and end between two scrapes."""
        self._newly.add(job.uid)
        self._add(job, now)

    def left_to_others(self, uid: str) -> None:
        """Another release acts for the job of this uid, and counts it."""
        self._elsewhere.add(uid)
        self._spent.pop(uid, None)

    def gone(self, job: MeteredJob, now: dt.datetime) -> None:
        """A job that this operator acted for is gone; its status is the last one."""
        self._ended.add(job.uid)
        self._add(job, now)
        self._spent.pop(job.uid, None)

    @property
    def remembered(self) -> int:
        """Of how many jobs something is kept."""
        return len(self._spent)

    # ---------------------------------------------------------------- what is served

    def text(self, moment: Moment, *, openmetrics: bool) -> tuple[bytes, str]:
        """The answer to a scrape and its content type: OpenMetrics, or Prometheus' older text, which node-exporter's
        textfile collector reads. Not to be called twice at once."""
        # With what any client sent as Accept, prometheus-client would echo a part of it as the content type.
        encode, content_type = exposition.choose_encoder(_OPENMETRICS if openmetrics else "")
        head, end = encode(_Families(self._at(moment))), b"# EOF\n" if openmetrics else b""
        return head.removesuffix(end) + self._of_each(moment, openmetrics) + end, content_type

    def _of_each(self, moment: Moment, openmetrics: bool) -> bytes:
        if moment.jobs is None or not moment.of_jobs:
            return b""
        spent = self._shown
        shown = ((j.namespace, j.name, j.status, spent[j.uid]) for j in moment.jobs if j.status and j.uid in spent)
        return job_lines.text(shown, moment.now, openmetrics=openmetrics)

    def _at(self, moment: Moment) -> list[core.Metric]:
        self._add_spent(moment)
        families = [f for f in self.registry.collect() if f.name not in _SET_AT_SCRAPE and f.samples]
        if moment.leads is None:
            families = [family for family in families if family.name not in _OF_OPERATOR]
        return [*families, *_of_operator(moment), *_of_jobs(moment)]

    def _add_spent(self, moment: Moment) -> None:
        """What jobs have spent since they were counted last. Before a job's first time others may have counted it."""
        self._shown = {}
        if moment.jobs is None:
            self._forget()
            return
        self._since = self._since or moment.now
        for job in moment.jobs:
            if job.uid not in self._ended and (spent := self._add(job, moment.now)) is not None:
                self._shown[job.uid] = spent
        kept = {job.uid for job in moment.jobs} | self._newly
        for uid in [uid for uid in list(self._spent) if uid not in kept]:
            self._spent.pop(uid, None)
        self._elsewhere = {*moment.away} - self._spent.keys()
        self._newly, self._ended = set(), set()

    def _add(self, job: MeteredJob, now: dt.datetime) -> dict[str, int] | None:
        """Count what a job has spent since it was counted last, and return all that it has spent; None: not known."""
        if job.status is None:
            return None  # what was counted stays, else all of it would be counted again once the status can be read
        spent = of_status.spent(job.status, now)
        with self._lock:
            before = self._spent.get(job.uid)
            if before is None:
                before = self._counted_by_others(job, spent)
            # A stall and a failure are found later than they began, and a clock may be set back: what was productive
            # until now is less then. Prometheus takes a counter that falls for one that began again at zero, and
            # increase() would have all of a week once more.
            spent = {name: max(seconds, before.get(name, 0)) for name, seconds in spent.items()}
            self._spent[job.uid] = spent
        for name, seconds in spent.items():
            if more := seconds - before.get(name, 0):
                self.count(names.SPENT_SECONDS, name, by=more)
        return spent

    def _counted_by_others(self, job: MeteredJob, spent: dict[str, int]) -> dict[str, int]:
        if job.status is None or self._since is None or job.uid in self._elsewhere:
            return spent
        return {} if self._is_new(job, self._since) else of_status.spent(job.status, self._since)

    def _forget(self) -> None:
        self._spent, self._elsewhere, self._since = {}, set(), None
        self._newly, self._ended = set(), set()

    def _is_new(self, job: MeteredJob, since: dt.datetime) -> bool:
        """Whether nobody else has counted what it has spent."""
        return job.uid not in self._elsewhere and job.created_at is not None and job.created_at >= since

    def _take(self, seen: SeenStatus) -> None:
        if seen.metric.kind == "counter":
            self.count(seen.metric, *seen.labels, by=seen.value)
        else:
            self.observe(seen.metric, seen.value, *seen.labels)

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
            return  # a gauge is set at the scrape
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


# A series that begins with its first event has no increase then: an alert on the first would never fire.
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


class _Families:
    """What prometheus-client's encoders take: they only ask for `collect`."""

    def __init__(self, families: list[core.Metric]) -> None:
        self._families = families

    def collect(self) -> list[core.Metric]:
        return self._families


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
        of_space[names.NO_STATE if job.status is None else of_status.state(job.status)] += 1
    yield _family(names.JOBS, [((space, state), n) for space, of in states.items() for state, n in of.items()])
