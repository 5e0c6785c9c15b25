"""Events on DDPJobs, as `kubectl describe` shows them: best effort, bounded, never in the way of a job."""

from __future__ import annotations

import asyncio
import collections
import datetime as dt
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from ddpjob_operator import api, reasons
from ddpjob_operator.kube.client import ApiError, Client, Raw
from ddpjob_operator.kube.limit import at_most
from ddpjob_operator.plan import Event

_LOGGER = logging.getLogger(__name__)
QUEUE_MAX = 1_000
REPEAT_SECONDS = 300.0
REMEMBERED_MAX = 5_000
MESSAGE_MAX = 1_024  # the API server refuses a longer one
# A state that lasts less than this is not worth a line: a job whose pods run at once says that they run.
PASSING_SECONDS = 3.0
PASSING = frozenset({reasons.CREATING_PODS.name, reasons.STARTING_TRAINERS.name})


@dataclass
class _Waiting:
    job: api.Metadata
    event: Event
    at: dt.datetime
    due: float


class Events:
    """Takes events at once and sends them from a task of its own; more than QUEUE_MAX at a time are dropped."""

    def __init__(self, client: Client, *, clock: Callable[[], float] = time.monotonic, instance: str = "") -> None:
        self._client = client
        self._clock = clock
        self._instance = instance
        self._waiting: collections.deque[_Waiting] = collections.deque()
        self._sent: collections.OrderedDict[tuple[str, str, str], float] = collections.OrderedDict()
        self._wake = asyncio.Event()
        self._said = ""

    def send(self, job: api.Metadata, events: tuple[Event, ...], now: dt.datetime) -> None:
        """Never blocks and never fails. The same words about the same job are sent once in REPEAT_SECONDS."""
        for event in events:
            self._drop_what_has_passed(job.uid)
            if len(self._waiting) < QUEUE_MAX and not self._is_repeated(job, event):
                wait = PASSING_SECONDS if event.reason in PASSING else 0.0
                self._waiting.append(_Waiting(job, event, now, self._clock() + wait))
                self._wake.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._wake.clear()
            now = self._clock()
            ready = next((w for w in self._waiting if w.due <= now), None)
            if ready is not None:
                # Out of the queue before the wait for the server: meanwhile `send` changes it.
                self._waiting.remove(ready)
                await self._post(ready)
                continue
            nearest = min((w.due for w in self._waiting), default=None)
            try:
                async with at_most(None if nearest is None else nearest - now):
                    await self._wake.wait()
            except asyncio.TimeoutError:
                continue

    def _drop_what_has_passed(self, uid: str) -> None:
        passed = [w for w in self._waiting if w.job.uid == uid and w.event.reason in PASSING]
        for waiting in passed:
            self._waiting.remove(waiting)

    def _is_repeated(self, job: api.Metadata, event: Event) -> bool:
        now, key = self._clock(), (job.uid, event.reason, event.message)
        if now - self._sent.get(key, float("-inf")) < REPEAT_SECONDS:
            return True
        self._sent[key] = now
        self._sent.move_to_end(key)
        if len(self._sent) > REMEMBERED_MAX:
            self._sent.popitem(last=False)
        return False

    async def _post(self, waiting: _Waiting) -> None:
        job = waiting.job
        try:
            await self._client.create(
                f"/api/v1/namespaces/{job.namespace}/events",
                body(waiting.job, waiting.event, waiting.at, self._instance),
            )
        except ApiError as error:
            # A namespace that goes away takes no events; a right that is missing is said once.
            if str(error.message) != self._said and error.status != 404:
                self._said = str(error.message)
                _LOGGER.warning("an event was not sent: %s", error)
        except Exception:
            _LOGGER.exception("an event was not sent")  # the end of this task would end the operator


def body(job: api.Metadata, event: Event, at: dt.datetime, instance: str = "") -> Raw:
    """The Event object."""
    time_text = at.isoformat(timespec="seconds").replace("+00:00", "Z")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{job.name}.{uuid.uuid4().hex[:16]}", "namespace": job.namespace},
        "involvedObject": {
            "apiVersion": api.API_VERSION,
            "kind": api.KIND,
            "name": job.name,
            "namespace": job.namespace,
            "uid": job.uid,
            "resourceVersion": job.resource_version,
        },
        "type": event.type,
        "reason": event.reason,
        "message": event.message[:MESSAGE_MAX],
        "source": {"component": "ddpjob-operator"},
        "reportingComponent": "ddpjob-operator",
        "reportingInstance": instance,
        "firstTimestamp": time_text,
        "lastTimestamp": time_text,
        "count": 1,
    }
