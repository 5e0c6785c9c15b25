"""How much of the stored jobs the operator keeps in memory: as much as there is room for, however many there are.

Of a job that has begun all is kept. Any other (new, suspended, over, invalid, managed by another controller) is kept
whole while it is small and there is room; else `cut` leaves what decides whether there is anything to do for it. The
reconcile reads it again (kube/work/reconcile.py) unless `rests_until` says that there is nothing to do, and gives it
back at its end. A job that would begin needs a place in the Room of those that have begun, else it waits
(plan/lifecycle.py). What has begun goes on also without a place: then each of its reconciles reads it.

The remainders of cut jobs have rooms, too, because a namespace may hold any number of jobs. A job without a place there
is not kept at all. A change of it, and each list (every 10 minutes), brings it again.
"""

from __future__ import annotations

import collections
import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from ddpjob_operator.job import api, bounds, reasons
from ddpjob_operator.job.status import TERMINAL

Key = tuple[str, str]
Raw = Mapping[str, Any]

CUT = "cut"
"""The field of a job that was cut, which no API server has: the size of the whole."""
# What a job needs besides its own fields: its status, what is remembered of it. It is all that a cut job needs.
OF_A_JOB = 4_096
# In Python, of JSON: a character, an object or a list, and a value beside others. Measured: 0.7 to 1.1 of what it is,
# and up to three times as much where it is of empty lists.
OF_A_BYTE, OF_A_BRACKET, OF_A_COMMA = 2, 120, 70
# Twice to four times that of an ordinary job.
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
# What says how far it has come, and what is shown of it as metrics.
KEPT_OF_STATUS = (
    *("state", "reason", "stateTime", "observedGeneration", "attempt", "attemptTime", "runningTime", "firstStepTime"),
    *("startTime", "completionTime", "restarts", "nodes", "goodput"),
)
_VALUE_MAX = 1_024


def size_of_json(text: bytes) -> int:
    """About how much memory that takes as Python objects."""
    brackets = text.count(b"{") + text.count(b"[")
    return OF_A_BYTE * len(text) + OF_A_BRACKET * brackets + OF_A_COMMA * text.count(b",")


def size(raw: Raw) -> int:
    """The same of a job that is kept whole. Its status is the operator's own, and short."""
    if (known := raw.get(CUT)) is not None:
        return int(known)
    return OF_A_JOB + size_of_json(msgspec.json.encode([raw.get("metadata"), raw.get("spec")]))


def is_cut(raw: Raw) -> bool:
    """True if it must be read again before it is planned for."""
    return CUT in raw


def has_begun(raw: Raw) -> bool:
    """True if an attempt is under way, or comes without anybody's doing."""
    status = _mapping(raw.get("status"))
    attempt = status.get("attempt")
    return not _is_left_alone(raw) and status.get("state") in BEGUN and isinstance(attempt, int) and attempt > 0


def would_begin(job: api.DDPJob) -> bool:
    """True if a job that has not begun is to."""
    state, attempt = job.status.state, job.status.attempt
    has = state in BEGUN and attempt > 0
    return not (has or state in TERMINAL or job.spec.suspend or job.spec.managed_by or job.metadata.deletion_timestamp)


def cut(raw: Raw, whole: int) -> dict[str, Any]:
    """What is kept of a job that does nothing. whole: its size."""
    metadata, spec, status = (_mapping(raw.get(part)) for part in ("metadata", "spec", "status"))
    return {
        "metadata": _kept(metadata, KEPT_OF_METADATA),
        "spec": _kept(spec, KEPT_OF_SPEC),
        "status": _kept(status, KEPT_OF_STATUS),
        CUT: whole,
    }


def rests_until(raw: Raw, now: dt.datetime, *, has_objects: bool) -> dt.datetime | None:
    """Until when nothing is to be done for a job that was cut, unless it changes; None: it must be read.

    has_objects: whether pods or other objects of it are there.
    """
    forever = bounds.TIME_LAST
    if _is_left_alone(raw):
        return forever
    metadata, spec, status = (_mapping(raw.get(part)) for part in ("metadata", "spec", "status"))
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
    """True if nothing is done for a job unless it changes, or there is room for it to begin."""
    until = rests_until(raw, bounds.TIME_FIRST, has_objects=False)
    return until == bounds.TIME_LAST or waits_for_room(raw)


def waits_for_room(raw: Raw) -> bool:
    """True if the status of a job that was cut says that it waits for room, and nothing has changed since."""
    metadata, status = _mapping(raw.get("metadata")), _mapping(raw.get("status"))
    is_told = status.get("reason") == reasons.WAITING_FOR_ROOM.name
    is_suspended = _mapping(raw.get("spec")).get("suspend") is True
    return is_told and not is_suspended and status.get("observedGeneration") == metadata.get("generation")


@dataclass(frozen=True)
class StoredLimits:
    """Bytes of memory."""

    memory: int
    """Of the whole operator. What the jobs leave is for itself, pods, reports, and what is being read."""
    begun: int
    """Of all jobs that have begun."""
    begun_in_namespace: int
    resting: int
    """Of all that have not, and are kept whole so that they need not be read again."""
    resting_in_namespace: int
    cut: int = 1 << 25
    """Of the remainders of jobs that rest; as much again of those for which something is to be done."""
    cut_in_namespace: int = 1 << 24

    @staticmethod
    def of(memory: int) -> StoredLimits:
        """Of an operator that may use so much."""
        return StoredLimits(memory, memory // 4, memory // 8, memory // 8, memory // 16, memory // 16, memory // 32)


DEFAULT = StoredLimits.of(512 << 20)


class Room:
    """Which jobs have a place in a part of the memory, and which wait for one."""

    def __init__(self, total: int, of_namespace: int) -> None:
        self._total, self._of_namespace = total, of_namespace
        self._sizes: dict[Key, int] = {}
        self._in_namespace: collections.Counter[str] = collections.Counter()
        self._sum = 0
        self._waiting: dict[str, dict[Key, int]] = {}
        """By namespace, of which the one that was served last is at the end; who has waited longest is first."""
        self._has_more = False
        """True if there is more room than when the waiting were told last."""

    @property
    def used(self) -> int:
        """By all that have a place."""
        return self._sum

    def used_in(self, namespace: str) -> int:
        """By those of a namespace."""
        return self._in_namespace[namespace]

    def take(self, key: Key, needs: int) -> bool:
        """True if the job has a place. One that has it keeps it, unless it has grown and there is no room for that."""
        more = needs - self._sizes.get(key, 0)
        if more > 0 and self._fullness(key[0], more):
            self.leave(key)
            return False
        self._sizes[key] = needs
        self._in_namespace[key[0]] += more
        self._sum += more
        self._has_more |= more < 0
        self.waits_no_more(key)
        return True

    def ask(self, key: Key, needs: int) -> str:
        """Why a job that would begin has no place, for its user; empty: it has one. It waits then."""
        if self.take(key, needs):
            return ""
        self._waiting.setdefault(key[0], {})[key] = needs
        return f"{self._fullness(key[0], needs)}; this one needs {_mib(needs)}"

    def leave(self, key: Key) -> None:
        """It needs no place."""
        if (had := self._sizes.pop(key, None)) is None:
            return
        self._in_namespace[key[0]] -= had
        if not self._in_namespace[key[0]]:
            del self._in_namespace[key[0]]
        self._sum -= had
        self._has_more = True

    def waits_no_more(self, key: Key) -> None:
        """It has a place, does not want one any more, or is gone."""
        those = self._waiting.get(key[0], {})
        if those.pop(key, None) is not None and not those:
            del self._waiting[key[0]]

    def next(self) -> list[Key]:
        """Those that have waited, and have room now, if all of them ask for it. Each is named once."""
        if not self._has_more:
            return []
        self._has_more, found, total = False, list[Key](), self._sum
        for namespace, those in list(self._waiting.items()):
            here = self._in_namespace[namespace]
            for key, needs in list(those.items()):
                # Who needs much is not passed by those behind him.
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
        """Why there is no room for more; empty: there is."""
        if self._in_namespace[namespace] + more > self._of_namespace:
            return (
                f"the jobs of namespace {namespace} that have begun fill what the operator keeps in memory for one "
                f"namespace ({_mib(self._of_namespace)})"
            )
        if self._sum + more > self._total:
            return (
                f"the jobs of all namespaces that have begun fill what the operator keeps of them ({_mib(self._total)})"
            )
        return ""


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.3g} MiB"


def _is_left_alone(raw: Raw) -> bool:
    """True if it is being deleted, or another controller manages it."""
    by_another = _mapping(raw.get("spec")).get("managedBy")
    return bool(by_another) or bool(_mapping(raw.get("metadata")).get("deletionTimestamp"))


def _kept(given: Raw, names: tuple[str, ...]) -> dict[str, Any]:
    """Whoever has written them, they are short."""
    return {name: given[name] for name in names if name in given and _is_short(given[name])}


def _is_short(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= _VALUE_MAX
    return isinstance(value, int | float | None) or len(msgspec.json.encode(value)) <= _VALUE_MAX


def _mapping(value: object) -> Raw:
    return value if isinstance(value, Mapping) else {}
