"""Events on DDPJobs for `kubectl describe`: best effort, bounded, and never delaying a job."""

from __future__ import annotations

import collections
import datetime as dt
from collections.abc import Callable
from dataclasses import dataclass

from ddpjob_operator.job import api, reasons
from ddpjob_operator.job.newest import Newest
from ddpjob_operator.kube.api.client import ApiError, Client, Raw
from ddpjob_operator.kube.api.runtime import LogOnce, Runtime
from ddpjob_operator.kube.watch.store import Key
from ddpjob_operator.kube.work.queue import Queue
from ddpjob_operator.metrics import names
from ddpjob_operator.metrics.meter import Meter
from ddpjob_operator.plan.actions import Event

QUEUE_MAX = 1_000
# Each job may have this many waiting Events: a job that restarts all the time leaves room for other jobs.
QUEUE_OF_JOB_MAX = 50
REPEAT_SECONDS = 300.0
REMEMBERED_MAX = 5_000
MESSAGE_MAX = 1_024  # the API server refuses longer messages
# PASSING states that end within these seconds get no Event.
PASSING_SECONDS = 3.0
# While creates of pods wait in a namespace, its Events wait too, except warnings: LATER_SECONDS longer at most.
# Every AGAIN_SECONDS, check whether creates of pods are still waiting.
LATER_SECONDS, AGAIN_SECONDS = 10.0, 1.0
# PASSING states wait this many seconds longer, because they usually end when the pods are created.
PASSING_LATER_SECONDS = 60.0
PASSING = frozenset({reasons.CREATING_PODS.name, reasons.STARTING_TRAINERS.name})


@dataclass
class _WaitingEvent:
    job: api.Metadata
    event: Event
    at: dt.datetime
    due: float


class Events:
    """Queues Events and sends them from separate tasks. Beyond QUEUE_MAX waiting Events, some are dropped."""

    def __init__(
        self,
        client: Client,
        runtime: Runtime,
        *,
        instance: str = "",
        meter: Meter | None = None,
        level: str = "All",
        busy: Callable[[str], bool] = lambda _namespace: False,
    ) -> None:
        """level: as in the settings. busy: True if creates of pods are waiting in a namespace; normal events then wait,
        too.
        """
        self._client, self._runtime, self._clock = client, runtime, runtime.clock
        self._instance, self._level, self._busy = instance, level, busy
        self._waiting: dict[str, collections.deque[_WaitingEvent]] = {}
        """Events by uid of the job, oldest first."""
        self._count = 0
        self.queue: Queue[Key] = Queue(runtime, name=names.QUEUES[1], meter=meter, at_a_time=8, of_namespace=4)
        """Jobs by namespace and uid. Events of one job are sent one at a time, so that their order is kept."""
        self._sent: Newest[tuple[str, str, str], float] = Newest(REMEMBERED_MAX)
        self._told: Newest[str, None] = Newest(REMEMBERED_MAX)
        """Jobs (uid) that have had an Event."""
        self._log = LogOnce(runtime.log.warning)
        self._named = 0

    def __len__(self) -> int:
        return self._count

    def send(self, job: api.Metadata, events: tuple[Event, ...], now: dt.datetime) -> None:
        """Queue events; never block or fail. Equal messages about one job are sent once in REPEAT_SECONDS."""
        for event in events:
            for passing in [w for w in self._waiting.get(job.uid, ()) if w.event.reason in PASSING]:
                self._remove(passing)
            if not self._is_wanted(job, event):
                continue
            if self._has_room(job) and not self._is_repeated(job, event):
                wait = PASSING_SECONDS if event.reason in PASSING else 0.0
                self._waiting.setdefault(job.uid, collections.deque()).append(
                    _WaitingEvent(job, event, now, self._clock() + wait)
                )
                self._count += 1
                self.queue.add((job.namespace, job.uid), wait)
                if not wait:
                    self._told[job.uid] = None

    def gone(self, uid: str) -> None:
        """Drop waiting events of a deleted job, except warnings."""
        for waiting in [w for w in self._waiting.get(uid, ()) if w.event.type != "Warning"]:
            self._remove(waiting)

    def _is_wanted(self, job: api.Metadata, event: Event) -> bool:
        """True if the level allows the Event. A job with an earlier Event also gets routine ones; otherwise its last
        Event would report that the job is starting."""
        if self._level == "Warning":
            return event.type == "Warning"
        return self._level == "All" or not event.is_routine or job.uid in self._told

    async def run(self) -> None:
        """Send queued Events until cancelled."""
        await self.queue.run(self._send_next)

    def _has_room(self, job: api.Metadata) -> bool:
        """Return True if there is room. A full queue first drops one of the fullest namespace, if not the job's."""
        if len(self._waiting.get(job.uid, ())) >= QUEUE_OF_JOB_MAX:
            return False
        if self._count < QUEUE_MAX:
            return True
        counts: collections.Counter[str] = collections.Counter()
        for waiting in self._waiting.values():
            counts[waiting[0].job.namespace] += len(waiting)
        fullest, _ = counts.most_common(1)[0]
        if fullest == job.namespace:
            return False
        those = (w for w in self._waiting.values() if w[0].job.namespace == fullest)
        self._remove(max(those, key=len)[-1])
        return True

    def _remove(self, waiting: _WaitingEvent) -> None:
        uid = waiting.job.uid
        self._waiting[uid].remove(waiting)
        self._count -= 1
        if not self._waiting[uid]:
            del self._waiting[uid]

    async def _send_next(self, key: Key) -> float | None:
        """Send the first due event of a job. Return the seconds until its next event."""
        _, uid = key
        ready = next((w for w in self._waiting.get(uid, ()) if w.due <= self._clock()), None)
        if ready is not None and self._makes_way(ready):
            return LATER_SECONDS if ready.event.reason in PASSING else AGAIN_SECONDS
        if ready is not None:
            self._remove(ready)
            await self._post(ready)
        return min((max(0.0, w.due - self._clock()) for w in self._waiting.get(uid, ())), default=None)

    def _makes_way(self, waiting: _WaitingEvent) -> bool:
        """True if the event should wait, because pods are being created and no warning of the job is waiting."""
        later = PASSING_LATER_SECONDS if waiting.event.reason in PASSING else LATER_SECONDS
        is_new = self._clock() < waiting.due + later
        warns = any(w.event.type == "Warning" for w in self._waiting[waiting.job.uid])
        return is_new and not warns and self._busy(waiting.job.namespace)

    def _is_repeated(self, job: api.Metadata, event: Event) -> bool:
        now, key = self._clock(), (job.uid, event.reason, event.message)
        if now - self._sent.get(key, float("-inf")) < REPEAT_SECONDS:
            return True
        self._sent[key] = now
        return False

    async def _post(self, waiting: _WaitingEvent) -> None:
        job = waiting.job
        self._told[job.uid] = None
        # The number in the name grows, because kubectl sorts events of one second by name and causes must come first.
        self._named = max(self._named + 1, int(self._runtime.utc().timestamp() * 1e6))
        suffix = f"{self._named:014x}{self._runtime.random.getrandbits(64) % 2**16:04x}"
        try:
            event = body(job, waiting.event, waiting.at, self._instance, suffix)
            await self._client.create(f"/api/v1/namespaces/{job.namespace}/events", event)
        except ApiError as error:
            # A namespace in deletion accepts no events (404). Other errors, such as a missing right, are logged once.
            if error.status != 404:
                self._log(f"an event was not sent: {error}")
        except Exception:
            self._runtime.log.exception("an event was not sent")  # raising would end this task, and so the operator


def body(job: api.Metadata, event: Event, at: dt.datetime, instance: str, suffix: str) -> Raw:
    """Return the Event object. suffix: makes its name unique."""
    time_text = at.isoformat(timespec="seconds").replace("+00:00", "Z")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{job.name}.{suffix}", "namespace": job.namespace},
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
