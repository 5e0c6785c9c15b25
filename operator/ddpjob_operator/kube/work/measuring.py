"""Adapters through which the operator's parts report measurements: none of them knows the metrics registry."""

from __future__ import annotations

from ddpjob_operator.job import requests
from ddpjob_operator.kube.api.client import NO_ANSWER
from ddpjob_operator.kube.work.queue import QueueMeter
from ddpjob_operator.metrics import names
from ddpjob_operator.metrics.meter import Meter

CONTROLLER = "ddpjob"


def verb_and_resource(method: str, path: str, *, watch: bool = False) -> tuple[str, str]:
    """Return a request's verb and resource in RBAC's terms; names.OTHER for unknown ones."""
    asked = requests.read(method, path, watch=watch and method == "GET")
    resource = f"{asked.plural}/{asked.subresource}" if asked.subresource else asked.plural
    verb = asked.verb if method in names.METHODS else names.OTHER
    return verb, resource if resource in names.RESOURCES else names.OTHER


class Requests:
    """Counts each answer of the API server."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def __call__(self, method: str, path: str, code: int, seconds: float, *, watch: bool = False) -> None:
        """seconds: until the answer began (watch) or was read. code: NO_ANSWER if there was none."""
        verb, resource = verb_and_resource(method, path, watch=watch)
        shown = names.NO_CODE if code == NO_ANSWER else str(code)
        known = method if method in names.METHODS else "OTHER"
        self._meter.count(names.REQUESTS, known, verb, resource, shown)
        self._meter.observe(names.REQUEST_SECONDS, seconds, verb, resource)


class OfQueue(QueueMeter):
    """Counts what a queue does. controller: it is the queue of jobs, which controller-runtime's dashboards show."""

    def __init__(self, meter: Meter, name: str, *, controller: bool = False) -> None:
        self._meter, self._name, self._controller = meter, name, controller

    def added(self) -> None:
        """Count a request for a key."""
        self._meter.count(names.QUEUE_ADDS, self._name)

    def waited(self, seconds: float) -> None:
        """Record how late a key was worked on."""
        self._meter.observe(names.QUEUE_SECONDS, seconds, self._name)

    def worked(self, seconds: float, result: str) -> None:
        """Record the end of the work on a key."""
        self._meter.observe(names.WORK_SECONDS, seconds, self._name)
        if result == "error":
            self._meter.count(names.QUEUE_RETRIES, self._name)
        if self._controller:
            self._meter.observe(names.RECONCILE_SECONDS, seconds, CONTROLLER)
            self._meter.count(names.RECONCILES, CONTROLLER, result)
            if result == "error":
                self._meter.count(names.RECONCILE_ERRORS, CONTROLLER)
