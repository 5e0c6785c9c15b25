"""A Reconciler with a model of the API server, without queue and watches."""

from typing import Any

from worlds import START

from ddpjob_operator.kube.api.runtime import Runtime
from ddpjob_operator.kube.operator import _job_of
from ddpjob_operator.kube.watch import observe
from ddpjob_operator.kube.watch.nodes import NodeCache
from ddpjob_operator.kube.watch.store import Jobs, Store
from ddpjob_operator.kube.work.executor import Executor
from ddpjob_operator.kube.work.job_state import JobStates
from ddpjob_operator.kube.work.lookup import Caches, Lookup
from ddpjob_operator.kube.work.reconcile import Reconciler
from ddpjob_operator.kube.work.reports import Reports
from ddpjob_operator.observed import facts
from ddpjob_operator.plan.actions import Settings


def caches(jobs: Jobs | None = None, nodes: NodeCache | None = None) -> Caches:
    """Return caches without objects of a cluster."""
    return Caches(
        jobs if jobs is not None else Jobs(lambda _: None),
        Store(observe.pod, _job_of, lambda *_: None, facts.merge),
        Store(observe.service, _job_of, lambda *_: None),
        nodes if nodes is not None else NodeCache(lambda _: None, lambda: START),
    )


def reconciler(client: Any, caches: Caches, runtime: Runtime) -> Reconciler:
    """Return a Reconciler. client: the API server, whose `send` receives the Events."""
    states, lookup = JobStates(caches.jobs), Lookup(client, caches, runtime)
    reports = Reports(caches.jobs, states, runtime, 10.0)
    executor = Executor(client, caches, lookup, client, runtime)
    return Reconciler(caches, states, reports, lookup, executor, runtime, Settings())
