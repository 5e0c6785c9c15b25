"""How much of the stored jobs the operator keeps in memory.

A job that has begun is kept whole. Any other job is kept whole if it is small and there is room. Otherwise `cut` keeps
only the fields that show if there is work to do. The reconcile then reads the job again, unless `rests_until` finds
that there is no work.

A Room is a share of the memory, and a job's place is the part of it that is reserved for the job. Without a place in
the Room of begun jobs, a job does not begin (plan/lifecycle.py). Cut jobs have Rooms too. A cut job without a place is
reconciled only when it changes and at each list (every 10 minutes)."""

from __future__ import annotations

import collections
import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from ddpjob_operator.job import api, bounds, reasons
from ddpjob_operator.job.podspec import mapping
from ddpjob_operator.job.status import TERMINAL

Key = tuple[str, str]
Raw = Mapping[str, Any]

CUT = "cut"  # field with the size of the complete job, in a job that is kept only in part; never sent
# Bytes per job in addition to metadata and spec: its status and its JobState. A job that was cut needs less in total.
OF_A_JOB = 4_096
# Bytes of Python memory per JSON character, per object or list, and per other value.
# Measured: the estimate is 0.7 to 1.1 times the real size, and up to three times the real size for empty lists.
OF_A_BYTE, OF_A_BRACKET, OF_A_COMMA = 2, 120, 70
# Jobs of at most this many bytes are kept whole if there is room. An ordinary job has a quarter to a half of this size.
SMALL = 65_536
BEGUN = ("Pending", "Starting", "Running", "Restarting", "Failing")

KEPT_OF_METADATA = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
)
KEPT_OF_SPEC = ("suspend", "nodes", "managedBy", "ttlSecondsAfterFinished")
# Fields kept of every job: the operator decides by them if it must reconcile the job, and the metrics show them.
KEPT_OF_STATUS = (
    *("state", "reason", "stateTime", "observedGeneration", "attempt", "attemptTime", "runningTime", "firstStepTime"),
    *("startTime", "completionTime", "restarts", "nodes", "goodput"),
)
_VALUE_MAX = 1_024


def size_of_json(text: bytes) -> int:
    """Return an estimate of the memory that decoded JSON takes as Python objects."""
    brackets = text.count(b"{") + text.count(b"[")
    return OF_A_BYTE * len(text) + OF_A_BRACKET * brackets + OF_A_COMMA * text.count(b",")


def size(raw: Raw) -> int:
    if (known := raw.get(CUT)) is not None:
        return int(known)
    return OF_A_JOB + size_of_json(msgspec.json.encode([raw.get("metadata"), raw.get("spec")]))


def is_cut(raw: Raw) -> bool:
    return CUT in raw


def has_begun(raw: Raw) -> bool:
    """True if an attempt is running, or will start without a user's action."""
    status = mapping(raw, "status")
    attempt = status.get("attempt")
    return not _is_left_alone(raw) and status.get("state") in BEGUN and isinstance(attempt, int) and attempt > 0


def would_begin(job: api.DDPJob) -> bool:
    """True if a job has not begun and may begin: it is not finished, suspended, deleted or managed by others."""
    state, attempt = job.status.state, job.status.attempt
    has = state in BEGUN and attempt > 0
    return not (has or state in TERMINAL or job.spec.suspend or job.spec.managed_by or job.metadata.deletion_timestamp)


def cut(raw: Raw, whole: int) -> dict[str, Any]:
    """Return a job with only the few fields that a cut job keeps. whole: size of the complete job."""
    metadata, spec, status = (mapping(raw, part) for part in ("metadata", "spec", "status"))
    return {
        "metadata": _kept(metadata, KEPT_OF_METADATA),
        "spec": _kept(spec, KEPT_OF_SPEC),
        "status": _kept(status, KEPT_OF_STATUS),
        CUT: whole,
    }


def rests_until(raw: Raw, now: dt.datetime, *, has_objects: bool) -> dt.datetime | None:
    """Return until when a cut job needs no reconcile unless it changes; None: read the job now.

    has_objects: pods or other objects of the job exist."""
    forever = bounds.TIME_LAST
    if _is_left_alone(raw):
        return forever
    metadata, spec, status = (mapping(raw, part) for part in ("metadata", "spec", "status"))
    if has_objects or status.get("observedGeneration") != metadata.get("generation"):
        return None
    if status.get("state") == "Suspended" and status.get("reason") == reasons.SUSPENDED.name:
        return forever if spec.get("suspend") is True else None
    if status.get("state") not in TERMINAL:
        return None
    ended, ttl = bounds.time(status.get("completionTime")), spec.get("ttlSecondsAfterFinished")
    if ended is None or ttl is None:
        return None if ended is None else forever
    over = ended + dt.timedelta(seconds=bounds.seconds(ttl))
    return over if over > now else None


def rests(raw: Raw) -> bool:
    """True if a job needs no reconcile until it changes or until there is room for its start."""
    until = rests_until(raw, bounds.TIME_FIRST, has_objects=False)
    return until == bounds.TIME_LAST or waits_for_room(raw)


def waits_for_room(raw: Raw) -> bool:
    """True if the job's status says that it waits for room in memory, and its spec has not changed since."""
    metadata, status = mapping(raw, "metadata"), mapping(raw, "status")
    is_told = status.get("reason") == reasons.WAITING_FOR_ROOM.name
    is_suspended = mapping(raw, "spec").get("suspend") is True
    return is_told and not is_suspended and status.get("observedGeneration") == metadata.get("generation")


@dataclass(frozen=True)
class StoredLimits:
    memory: int
    """Bytes for the whole operator, also for its own code, pods, reports, and objects being read."""
    begun: int
    """Bytes for all jobs that have begun."""
    begun_in_namespace: int
    resting: int
    """Bytes for all jobs that have not begun and are kept whole, so that they need not be read again."""
    resting_in_namespace: int
    cut: int = 1 << 25
    """Bytes for jobs kept only in part without work to do; as many again for those with work to do."""
    cut_in_namespace: int = 1 << 24
    reports: int = 1 << 26
    """Bytes for the last reports of all ranks but rank 0."""
    reports_in_namespace: int = 1 << 25

    @staticmethod
    def of(memory: int) -> StoredLimits:
        shares = (1, 4, 8, 8, 16, 16, 32, 8, 16)
        return StoredLimits(*(memory // share for share in shares))


DEFAULT = StoredLimits.of(512 << 20)


class Room:
    """A share of the memory: the bytes reserved for each job (its place), and the queue of waiting jobs."""

    def __init__(self, total: int, of_namespace: int) -> None:
        self._total, self._of_namespace = total, of_namespace
        self._sizes: dict[Key, int] = {}
        self._in_namespace: collections.Counter[str] = collections.Counter()
        self._sum = 0
        self._waiting: dict[str, dict[Key, int]] = {}
        """By namespace: the namespace served last is at the end, and its longest waiting job comes first."""
        self._has_more = False  # True if room was freed after the last call of `next`

    @property
    def used(self) -> int:
        return self._sum

    def used_in(self, namespace: str) -> int:
        return self._in_namespace[namespace]

    def take(self, key: Key, needs: int) -> bool:
        """Reserve `needs` bytes for the job; return True. If too few are left, free the job's bytes; return False."""
        if not self.grow(key, needs):
            self.leave(key)
            return False
        return True

    def grow(self, key: Key, needs: int) -> bool:
        """Like `take`, but if too few bytes are left, the job keeps the bytes that it has reserved."""
        more = needs - self._sizes.get(key, 0)
        if more > 0 and self._fullness(key[0], more):
            return False
        self._sizes[key] = needs
        self._in_namespace[key[0]] += more
        self._sum += more
        self._has_more |= more < 0
        self.waits_no_more(key)
        return True

    def ask(self, key: Key, needs: int) -> str:
        """Return "" if `take` could reserve the bytes; else queue the job and return the reason, for its user."""
        if self.take(key, needs):
            return ""
        self._waiting.setdefault(key[0], {})[key] = needs
        return f"{self._fullness(key[0], needs)}; this one needs {_mib(needs)}"

    def leave(self, key: Key) -> None:
        if (had := self._sizes.pop(key, None)) is None:
            return
        self._in_namespace[key[0]] -= had
        if not self._in_namespace[key[0]]:
            del self._in_namespace[key[0]]
        self._sum -= had
        self._has_more = True

    def waits_no_more(self, key: Key) -> None:
        those = self._waiting.get(key[0], {})
        if those.pop(key, None) is not None and not those:
            del self._waiting[key[0]]

    def next(self) -> list[Key]:
        """Remove from the queue the waiting jobs that all fit now, and return them."""
        if not self._has_more:
            return []
        self._has_more, found, total = False, list[Key](), self._sum
        for namespace, those in list(self._waiting.items()):
            here = self._in_namespace[namespace]
            for key, needs in list(those.items()):
                # A smaller job never overtakes a large job, because the large job might then wait forever.
                if here + needs > self._of_namespace or total + needs > self._total:
                    break
                here, total = here + needs, total + needs
                found.append(key)
            if found and found[-1][0] == namespace:
                self._waiting[namespace] = self._waiting.pop(namespace)
        for key in found:
            self.waits_no_more(key)
        return found

    def _fullness(self, namespace: str, more: int) -> str:
        """Return why there is no room for `more` bytes; "" if there is."""
        if self._in_namespace[namespace] + more > self._of_namespace:
            return (
                f"the started jobs of namespace {namespace} fill the memory that the operator has for one "
                f"namespace ({_mib(self._of_namespace)})"
            )
        if self._sum + more > self._total:
            return f"the started jobs of all namespaces fill the operator's memory for them ({_mib(self._total)})"
        return ""


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.3g} MiB"


def _is_left_alone(raw: Raw) -> bool:
    """True if the job is being deleted, or another controller manages it."""
    by_another = mapping(raw, "spec").get("managedBy")
    return bool(by_another) or bool(mapping(raw, "metadata").get("deletionTimestamp"))


def _kept(given: Raw, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields with these names, except long values: a user may have written fields of any length."""
    return {name: given[name] for name in names if name in given and _is_short(given[name])}


def _is_short(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= _VALUE_MAX
    return isinstance(value, int | float | None) or len(msgspec.json.encode(value)) <= _VALUE_MAX
