"""Our copy of the cluster, by job, from watches and lists. Answers to our own writes go in as well, so that
the next plan sees them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from ddpjob_operator.job import storage
from ddpjob_operator.job.bounds import UnreadableError

T = TypeVar("T")
Raw = Mapping[str, Any]
Key = tuple[str, str]
"""Namespace and name of a job."""
ObjectKey = tuple[str, str]
"""Namespace and name of an object."""

# An answer to a delete may arrive after the watch has shown that the object is gone; far fewer requests than this are
# ever under way.
UIDS_MAX = 10_000
_LOGGER = logging.getLogger(__name__)


class Uids:
    """The UIDS_MAX that were added last."""

    def __init__(self) -> None:
        self._uids: dict[str, None] = {}

    def __contains__(self, uid: str) -> bool:
        return uid in self._uids

    def add(self, uid: str) -> None:
        """The oldest makes room."""
        self._uids[uid] = None
        if len(self._uids) > UIDS_MAX:
            del self._uids[next(iter(self._uids))]

    def discard(self, uid: str) -> None:
        """Also where it is not one of them."""
        self._uids.pop(uid, None)


class Entry(msgspec.Struct, Generic[T], frozen=True):
    """One object, cut to what we read."""

    key: Key
    uid: str
    version: int
    value: T
    is_whole: bool = True


class Unreadable(NamedTuple):
    """An object that cannot be read."""

    key: Key
    uid: str
    why: str


def newest(_: T | None, later: T, __: int) -> T:
    """What is seen last is all that is known."""
    return later


class Store(Generic[T]):
    """Objects of one kind. `changed(key, old, new)` is called for each difference that the cut value shows.

    `merge(earlier, later, observation)` is what is known of an object (by its uid) once it was seen again; each
    observation has a higher number.
    """

    def __init__(
        self,
        cut: Callable[[Raw], T],
        key_of: Callable[[Raw], Key],
        changed: Callable[[Key, T | None, T | None], None],
        merge: Callable[[T | None, T, int], T] = newest,
    ) -> None:
        self._merge = merge
        self._observation = 0
        self._at_once: dict[str | Key, int] = {}
        """The observations of lists that are under way, by the namespace (empty: all) or the job that is listed."""
        self._cut = cut
        self._key_of = key_of
        self._changed = changed
        self._entries: dict[ObjectKey, Entry[T]] = {}
        self._by_job: dict[Key, dict[str, Entry[T]]] = {}
        self._tombstones = Uids()
        """Of objects that are gone, so that an older event or answer does not bring one back."""
        self._unreadable: dict[ObjectKey, Unreadable] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def entry(self, namespace: str, name: str) -> Entry[T] | None:
        """The object of this name."""
        return self._entries.get((namespace, name))

    def of(self, key: Key) -> list[T]:
        """The objects of a job."""
        return list(self.each(key))

    def each(self, key: Key) -> Iterator[T]:
        """The objects of a job, for who may need only the first of them; nothing is put meanwhile."""
        return (entry.value for entry in self._by_job.get(key, {}).values())

    def jobs(self) -> set[Key]:
        """The jobs that have objects."""
        return set(self._by_job)

    def unreadable(self, key: Key) -> str:
        """Which object of a job cannot be read, and why; empty: all can."""
        return next((one.why for one in self._unreadable.values() if one.key == key), "")

    def put(self, raw: Raw, *, is_whole: bool = True) -> None:
        """An object as it was at its resourceVersion. One that is older than what we have changes nothing.

        is_whole: whether it has all that the API server has of it; the answer to a create has our own body, and the
        watch brings what admission webhooks have changed, at the same version.
        One that cannot be read is left as it was last seen, and logged once; all others go on.
        """
        metadata = raw["metadata"]
        uid, at = metadata["uid"], version(metadata)
        place = _place_of(raw)
        old = self._entries.get(place)
        if uid in self._tombstones or (old is not None and at < old.version):
            return
        if old is not None and at == old.version != 0 and (old.is_whole or not is_whole):
            return
        key = self._key_of(raw)
        try:
            seen = self._cut(raw)
        except UnreadableError as error:
            self._set_unreadable(key, place, uid, error)
            return
        held_up = self._unreadable.pop(place, None)
        known = old.value if old is not None and old.uid == uid else None
        self._set(place, old, Entry(key, uid, at, self._merge(known, seen, self._observed(key)), is_whole))
        if held_up is not None:  # also where the object is as it was before
            self._changed(held_up.key, None, None)

    def put_again(self, raw: Raw) -> None:
        """An object that was taken for gone and is not, because it has just been read."""
        self._tombstones.discard(raw["metadata"]["uid"])
        self.put(raw)

    @contextlib.contextmanager
    def one_observation(self, namespace: str = "", key: Key | None = None) -> Iterator[None]:
        """For a list, whose pages come one after the other: what is put of it meanwhile was seen at once, in no order.
        Beside it come lists of other jobs, and the watch. namespace, key: as `retain` takes them."""
        scope = namespace if key is None else key
        if scope in self._at_once:
            yield
            return
        self._observation += 1
        self._at_once[scope] = self._observation
        try:
            yield
        finally:
            del self._at_once[scope]

    def _observed(self, key: Key) -> int:
        """The number of an observation that is made of a job now."""
        scopes: tuple[str | Key, ...] = (key, key[0], "") if self._at_once else ()
        if (listed := next((self._at_once[scope] for scope in scopes if scope in self._at_once), None)) is not None:
            return listed
        self._observation += 1
        return self._observation

    def remove(self, namespace: str, name: str, uid: str) -> None:
        """The object with this uid is gone, whatever else has its name by now."""
        self._tombstones.add(uid)
        if self._is_unreadable((namespace, name), uid):
            self._changed(self._unreadable.pop((namespace, name)).key, None, None)
        old = self._entries.get((namespace, name))
        if old is not None and old.uid == uid:
            self._set((namespace, name), old, None)

    def retain(self, named: Set[ObjectKey], list_version: int, namespace: str = "", key: Key | None = None) -> None:
        """The end of a list whose objects were put: what it did not name is gone, unless it is newer than the list.

        namespace: the one that was listed, empty for all. key: the job that was listed, None for all.
        """
        # Of one job its own are looked at alone: it is listed at each of its restarts, beside thousands of others.
        those = self._entries if key is None else {(key[0], name): e for name, e in self._by_job.get(key, {}).items()}
        for place, entry in list(those.items()):
            listed = not namespace or place[0] == namespace
            if listed and place not in named and entry.version <= list_version:
                self.remove(*place, entry.uid)
        for place, one in list(self._unreadable.items()):
            if (not namespace or place[0] == namespace) and key in (None, one.key) and place not in named:
                self.remove(*place, one.uid)

    def begin_anew(self, namespace: str) -> None:
        """The cluster was restored from a backup, and counts anew: whatever comes of a namespace, empty: of any, is
        newer than what we have, and what was deleted is there again."""
        self._tombstones = Uids()
        for place, entry in self._entries.items():
            if not namespace or place[0] == namespace:
                old = msgspec.structs.replace(entry, version=0)
                self._entries[place] = self._by_job[entry.key][place[1]] = old

    def has(self, raw: Raw) -> bool:
        """True if this object, as it was at its resourceVersion, is no news: it is here, gone, or cannot be read."""
        uid, place, entry = raw["metadata"]["uid"], _place_of(raw), self._entries.get(_place_of(raw))
        is_here = entry is not None and entry.version >= version(raw["metadata"]) > 0
        return is_here or uid in self._tombstones or self._is_unreadable(place, uid)

    def _is_unreadable(self, place: ObjectKey, uid: str) -> bool:
        return place in self._unreadable and self._unreadable[place].uid == uid

    def _set_unreadable(self, key: Key, place: ObjectKey, uid: str, error: UnreadableError) -> None:
        if not self._is_unreadable(place, uid):
            _LOGGER.warning("%s: %s; it is left out, and all else goes on", "/".join(place), error)
        self._unreadable[place] = Unreadable(key, uid, f"{place[1]}: {error}")
        self._changed(key, None, None)

    def _set(self, place: ObjectKey, old: Entry[T] | None, new: Entry[T] | None) -> None:
        if old is not None and (new is None or new.key != old.key):
            del self._entries[place]
            del self._by_job[old.key][place[1]]
            if not self._by_job[old.key]:
                del self._by_job[old.key]
            self._changed(old.key, old.value, None)
            old = None
        if new is None:
            return
        self._entries[place] = new
        self._by_job.setdefault(new.key, {})[place[1]] = new
        before = None if old is None else old.value
        if before != new.value:
            self._changed(new.key, before, new.value)


class Jobs(Store[Raw]):
    """The DDPJobs as they are stored, raw but for what `cut` takes out, and as much of each as there is room for
    (job/storage.py). `changed(key)` is called when one is new, newer or gone, and when one that waits for room has it;
    `seen(old, new)` also when the answer to our own write is put."""

    def __init__(
        self,
        changed: Callable[[Key], None],
        cut: Callable[[Any], Raw] = lambda raw: raw,
        seen: Callable[[Raw | None, Raw | None], None] = lambda _old, _new: None,
        limits: storage.StoredLimits = storage.DEFAULT,
    ) -> None:
        def told(key: Key, old: Raw | None, new: Raw | None) -> None:
            seen(old, new)
            if not self._is_quiet:
                changed(key)

        super().__init__(cut, _place_of, told)
        self.begun = storage.Room(limits.begun, limits.begun_in_namespace)
        """Those that have begun, and those that are about to."""
        self._resting = storage.Room(limits.resting, limits.resting_in_namespace)
        self._has_room = changed
        self._is_quiet = False
        self._held: set[Key] = set()
        self._written: dict[Key, Raw] = {}
        """The statuses that are being written."""

    def put(self, raw: Raw, *, is_whole: bool = True) -> None:
        """A job as it was at its resourceVersion, or what is left of it."""
        super().put(raw, is_whole=is_whole and not storage.is_cut(raw))
        self._settle(_place_of(raw))

    def remove(self, namespace: str, name: str, uid: str) -> None:
        """The job with this uid is gone."""
        super().remove(namespace, name, uid)
        self._settle((namespace, name))

    @contextlib.contextmanager
    def held(self, key: Key) -> Iterator[None]:
        """While a job is reconciled: all of it is kept that is put, and its place in a room."""
        self._held.add(key)
        try:
            yield
        finally:
            self._held.discard(key)
            self._settle(key)

    def _settle(self, key: Key) -> None:
        """Keep as much of a job as there is room for, and tell those that have waited for what it leaves."""
        if key in self._held:
            return
        entry = self._entries.get(key)
        if entry is None:
            self.begun.waits_no_more(key)
            self.begun.leave(key)
            self._resting.leave(key)
        elif not self._has_place(key, entry.value) and entry.is_whole:
            kept = storage.cut(entry.value, storage.size(entry.value))
            part = msgspec.structs.replace(entry, value=kept, is_whole=False)
            self._entries[key] = self._by_job[key][key[1]] = part
        for other in self.begun.next():
            self._has_room(other)

    def _has_place(self, key: Key, raw: Raw) -> bool:
        """Whether all of a job is kept, if there is all of it."""
        begun, needs = storage.has_begun(raw), storage.size(raw)
        (self._resting if begun else self.begun).leave(key)
        if storage.is_cut(raw) or not (begun or needs <= storage.SMALL):
            self.begun.leave(key)
            self._resting.leave(key)
            return False
        return (self.begun if begun else self._resting).take(key, needs)

    def __iter__(self) -> Iterator[Key]:
        return iter(list(self._entries))

    def get(self, key: Key) -> Raw | None:
        """The newest that we know."""
        entry = self._entries.get(key)
        return None if entry is None else entry.value

    def take(self, raw: Raw) -> bool:
        """Puts the job of a watch event if we have it; False: it is another job, and nothing was put.

        The event of our own write is left out: it may come before the answer, which is put as soon as it is there, and
        would be news then, of which the job is reconciled for nothing.
        """
        entry = self._entries.get(_place_of(raw))
        if entry is None or entry.uid != raw["metadata"]["uid"]:
            return False
        written = self._written.get(entry.key)
        if written is None or written != raw.get("status") or not _differ_in_status_alone(raw, entry.value):
            self.put(raw)
        return True

    def put_quietly(self, raw: Raw) -> None:
        """A job as the answer to our write of its status has it, or our question for it. Nobody is told: a write is
        refused unless it has the spec that was planned for, and who wrote or asked goes on with it."""
        self._is_quiet = True
        try:
            self.put(raw)
        finally:
            self._is_quiet = False

    @contextlib.contextmanager
    def writing(self, key: Key, status: Raw) -> Iterator[None]:
        """While this status of a job is being written."""
        self._written[key] = status
        try:
            yield
        finally:
            del self._written[key]


def _differ_in_status_alone(one: Raw, other: Raw) -> bool:
    """Whether neither the spec nor the metadata says something new: a deletion, labels, annotations, finalizers."""
    return one.get("spec") == other.get("spec") and _said(one["metadata"]) == _said(other["metadata"])


def _said(metadata: Raw) -> Raw:
    return {name: value for name, value in metadata.items() if name not in ("resourceVersion", "managedFields")}


def _place_of(raw: Raw) -> ObjectKey:
    return raw["metadata"].get("namespace", ""), raw["metadata"]["name"]


def version(metadata: Raw) -> int:
    """resourceVersions are numbers that can be compared, by promise since Kubernetes 1.35 and in fact since etcd 3.

    0 where an API server has something else: such an object is always taken for new.
    """
    return number(metadata.get("resourceVersion"))


def number(text: object) -> int:
    """The number that a resource version is."""
    return int(text) if isinstance(text, str) and text.isdecimal() and len(text) <= 20 else 0
