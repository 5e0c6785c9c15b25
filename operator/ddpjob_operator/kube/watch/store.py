"""Our copy of the cluster, indexed by job.

In: watch events and lists (watch/reflector.py), and the answers to our own reads and writes, so that the next plan sees
them before the watch shows them. Out: the objects of one job, for the reconcile, and one call of `changed` per visible
difference, which enqueues the job. Everything runs on the event loop, so there are no locks.

Answers and events arrive in any order. Three rules keep an older one from undoing a newer one: the higher
resourceVersion wins, a UID that is gone stays gone (`_tombstones`), and a list removes nothing newer than itself.

The price, compared to client-go's informer cache: objects are cut on arrival, so a rule that needs another field needs
a change of `cut`, too. The design depends on numeric resourceVersions (see `version`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from ddpjob_operator.job import storage
from ddpjob_operator.job.bounds import UnreadableError
from ddpjob_operator.job.newest import Newest

T = TypeVar("T")
Raw = Mapping[str, Any]
Key = tuple[str, str]
"""Namespace and name of a job."""
ObjectKey = tuple[str, str]
"""Namespace and name of an object."""

# Maximum number of remembered UIDs of deleted objects. Only responses in flight need them, and those are far fewer.
UIDS_MAX = 10_000
_LOGGER = logging.getLogger(__name__)


class Entry(msgspec.Struct, Generic[T], frozen=True):
    """One object, cut to the fields that decisions read."""

    key: Key
    uid: str
    version: int
    value: T
    is_whole: bool = True


class Unreadable(NamedTuple):
    """An object that cannot be parsed: its job's key, its UID and the reason."""

    key: Key
    uid: str
    why: str


def newest(_: T | None, later: T, __: int) -> T:
    """Default merge of two observations of an object: return the later one."""
    return later


class Store(Generic[T]):
    """Objects of one kind. `changed(key, old, new)` is called for each difference between two stored values.

    `merge(earlier, later, number)` combines two observations of a UID. Numbers of observations increase; all objects of
    one list share a number, because a list does not show in which order they changed.
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
        """Observation numbers of running lists, by the listed namespace ("": all) or job."""
        self._cut = cut
        self._key_of = key_of
        self._changed = changed
        self._entries: dict[ObjectKey, Entry[T]] = {}
        self._by_job: dict[Key, dict[str, Entry[T]]] = {}
        self._tombstones: Newest[str, None] = Newest(UIDS_MAX)
        """UIDs that are gone. Otherwise a late event or answer would bring one back."""
        self._unreadable: dict[ObjectKey, Unreadable] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def entry(self, namespace: str, name: str) -> Entry[T] | None:
        return self._entries.get((namespace, name))

    def of(self, key: Key) -> list[T]:
        return list(self.each(key))

    def each(self, key: Key) -> Iterator[T]:
        """Iterate over the objects of a job without a copy. The store must not change meanwhile."""
        return (entry.value for entry in self._by_job.get(key, {}).values())

    def jobs(self) -> list[Key]:
        """Return the keys of the jobs that have stored objects."""
        return list(self._by_job)

    def unreadable(self, key: Key) -> str:
        """Return which object of a job cannot be read, and why; "" if all objects can be read."""
        return next((one.why for one in self._unreadable.values() if one.key == key), "")

    def put(self, raw: Raw, *, is_whole: bool = True) -> None:
        """Store an object. An object older than the stored one changes nothing.

        is_whole: False for the answer to a create, which repeats our own body; the watch then shows the same version
        with the changes of admission webhooks. If an object cannot be read, its last readable state stays.
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
        if held_up is not None:  # the job waited for this object, and must continue even if the object has not changed
            self._changed(held_up.key, None, None)

    def put_again(self, raw: Raw) -> None:
        """Store an object that counted as gone and was just read."""
        self._tombstones.pop(raw["metadata"]["uid"], None)
        self.put(raw)

    @contextlib.contextmanager
    def one_observation(self, namespace: str = "", key: Key | None = None) -> Iterator[set[ObjectKey]]:
        """Within this `with` block, store one list: all its objects get the same observation number."""
        scope = namespace if key is None else key
        # An operator lists each job after its restart. Check only one job's objects: there may be thousands of jobs.
        places = set(self._entries) if key is None else {(key[0], name) for name in self._by_job.get(key, ())}
        places |= {place for place, one in self._unreadable.items() if key in (None, one.key)}
        places = {place for place in places if not namespace or place[0] == namespace}
        if scope in self._at_once:
            yield places
            return
        self._observation += 1
        self._at_once[scope] = self._observation
        try:
            yield places
        finally:
            del self._at_once[scope]

    def _observed(self, key: Key) -> int:
        """Return the observation number for an object of this job."""
        scopes: tuple[str | Key, ...] = (key, key[0], "") if self._at_once else ()
        if (listed := next((self._at_once[scope] for scope in scopes if scope in self._at_once), None)) is not None:
            return listed
        self._observation += 1
        return self._observation

    def remove(self, namespace: str, name: str, uid: str) -> None:
        """Remove the object with this UID. An object that was created later with the same name stays."""
        self._tombstones[uid] = None
        if self._is_unreadable((namespace, name), uid):
            self._changed(self._unreadable.pop((namespace, name)).key, None, None)
        old = self._entries.get((namespace, name))
        if old is not None and old.uid == uid:
            self._set((namespace, name), old, None)

    def drop(self, unlisted: Set[ObjectKey], list_version: int) -> None:
        for place in sorted(unlisted):  # otherwise the jobs would be enqueued in the order of the names' hashes
            if (entry := self._entries.get(place)) is not None and entry.version <= list_version:
                self.remove(*place, entry.uid)
            if (one := self._unreadable.get(place)) is not None:
                self.remove(*place, one.uid)

    def begin_anew(self, namespace: str) -> None:
        """Accept any version from now on, as in `Sink`. Deleted objects may exist again with the same UIDs."""
        self._tombstones.clear()
        for place, entry in self._entries.items():
            if not namespace or place[0] == namespace:
                old = msgspec.structs.replace(entry, version=0)
                self._entries[place] = self._by_job[entry.key][place[1]] = old

    def has(self, raw: Raw) -> bool:
        """True if this object changes nothing: its version or a newer one is known, or it is gone or unreadable."""
        uid, place, entry = raw["metadata"]["uid"], _place_of(raw), self._entries.get(_place_of(raw))
        is_here = entry is not None and entry.version >= version(raw["metadata"]) > 0
        return is_here or uid in self._tombstones or self._is_unreadable(place, uid)

    def _is_unreadable(self, place: ObjectKey, uid: str) -> bool:
        return place in self._unreadable and self._unreadable[place].uid == uid

    def _set_unreadable(self, key: Key, place: ObjectKey, uid: str, error: UnreadableError) -> None:
        if not self._is_unreadable(place, uid):
            _LOGGER.warning("%s: %s; it is ignored, and everything else continues", "/".join(place), error)
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
    """The DDPJobs, raw except for what `cut` removes. A job is kept whole if there is room (job/storage.py), and only
    in part otherwise. If there is no room for the part either, the store behaves as if the job did not exist, until its
    next change or list.

    `changed(key)` is called when a job is new, changed or gone, and when there is room for one that waited. `seen(old,
    new)` is also called for the answer to our own write.
    """

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
        """Room for jobs that have begun or are about to."""
        self._resting = storage.Room(limits.resting, limits.resting_in_namespace)
        self._cut_resting = storage.Room(limits.cut, limits.cut_in_namespace)
        self._cut_wanting = storage.Room(limits.cut, limits.cut_in_namespace)
        self._rooms = (self.begun, self._resting, self._cut_resting, self._cut_wanting)
        self._left_out: set[str] = set()
        self._seen = seen
        self._has_room = changed
        self._is_quiet = False
        self._held: set[Key] = set()
        self._written: dict[Key, Raw] = {}
        """The statuses of writes in flight."""

    def put(self, raw: Raw, *, is_whole: bool = True) -> None:
        """Store a complete job or a part of it, unless the job is new and there is no room for it."""
        key = _place_of(raw)
        if key in self._entries or key in self._held or self._room_for(key, raw):
            super().put(raw, is_whole=is_whole and not storage.is_cut(raw))
            self._settle(key)
        else:
            self._leave_out(key)

    def leaves_out(self, namespace: str) -> bool:
        """True if this namespace has, or had, more jobs than there is room for."""
        return namespace in self._left_out

    def remove(self, namespace: str, name: str, uid: str) -> None:
        super().remove(namespace, name, uid)
        self._settle((namespace, name))

    @contextlib.contextmanager
    def held(self, key: Key) -> Iterator[None]:
        """Keep the complete job and its reserved memory while the job is being reconciled."""
        self._held.add(key)
        try:
            yield
        finally:
            self._held.discard(key)
            self._settle(key)

    def _settle(self, key: Key) -> None:
        """Cut or drop a job that has no memory reserved, and enqueue jobs for which memory was freed."""
        if key in self._held:
            return
        entry = self._entries.get(key)
        room = None if entry is None else self._room_for(key, entry.value)
        if entry is None or room is None:
            self.begun.waits_no_more(key)
            for other in self._rooms:
                other.leave(key)
        if entry is not None and room is None:
            del self._entries[key], self._by_job[key]
            self._leave_out(key)
            self._seen(entry.value, None)
        elif entry is not None and entry.is_whole and room in (self._cut_resting, self._cut_wanting):
            kept = storage.cut(entry.value, storage.size(entry.value))
            part = msgspec.structs.replace(entry, value=kept, is_whole=False)
            self._entries[key] = self._by_job[key][key[1]] = part
        for waiting in self.begun.next():
            self._has_room(waiting)

    def _room_for(self, key: Key, raw: Raw) -> storage.Room | None:
        """Return the Room (share of the memory) that has reserved memory for the job; None if no Room has enough."""
        begun, needs = storage.has_begun(raw), storage.size(raw)
        whole = self.begun if begun else self._resting
        part = self._cut_resting if not begun and storage.rests(raw) else self._cut_wanting
        for other in self._rooms:
            if other not in (whole, part):
                other.leave(key)
        if not storage.is_cut(raw) and (begun or needs <= storage.SMALL) and whole.take(key, needs):
            part.leave(key)
            return whole
        whole.leave(key)
        return part if part.take(key, storage.OF_A_JOB) else None

    def _leave_out(self, key: Key) -> None:
        if key[0] not in self._left_out:
            self._left_out.add(key[0])
            text = "namespace %s has more suspended, finished and waiting DDPJobs than fit into memory: some are "
            text += "not in the metrics, and those that wait for room begin up to 10 minutes later"
            _LOGGER.warning(text, key[0])

    def __iter__(self) -> Iterator[Key]:
        return iter(list(self._entries))

    def get(self, key: Key) -> Raw | None:
        """Return the newest known state of a job: complete, or the part that is kept."""
        entry = self._entries.get(key)
        return None if entry is None else entry.value

    def take(self, raw: Raw) -> bool:
        """Store the job of a watch event if its UID is known; return False if it is not.

        The event of our own status write may arrive before the answer. The event is ignored: otherwise each status
        write would cost one reconcile more.
        """
        entry = self._entries.get(_place_of(raw))
        if entry is None or entry.uid != raw["metadata"]["uid"]:
            return False
        written, known = self._written.get(entry.key), entry.value
        same = raw.get("spec") == known.get("spec") and _edited(raw["metadata"]) == _edited(known["metadata"])
        if written is None or written != raw.get("status") or not same:
            self.put(raw)
        return True

    def put_quietly(self, raw: Raw) -> None:
        """Store the answer to our own status write or read without a call of `changed`, because the caller continues
        with it. A status write cannot hide an edit: the API server refuses it if the job has changed.
        """
        self._is_quiet = True
        try:
            self.put(raw)
        finally:
            self._is_quiet = False

    @contextlib.contextmanager
    def writing(self, key: Key, status: Raw) -> Iterator[None]:
        """Within this `with` block, which writes the status, let `take` ignore the watch event of the write."""
        self._written[key] = status
        try:
            yield
        finally:
            del self._written[key]


def _edited(metadata: Raw) -> Raw:
    """Return what users and controllers change: deletion, labels, annotations, finalizers."""
    return {name: value for name, value in metadata.items() if name not in ("resourceVersion", "managedFields")}


def _place_of(raw: Raw) -> ObjectKey:
    return raw["metadata"].get("namespace", ""), raw["metadata"]["name"]


def version(metadata: Raw) -> int:
    """Return the resourceVersion as a number, comparable within one kind. If it is no number: 0, which counts as new.

    Kubernetes guarantees the order from 1.35 on (KEP-5504). Older API servers pass on etcd's revision, a number too.
    """
    return number(metadata.get("resourceVersion"))


def number(text: object) -> int:
    """Return a resource version as a number; 0 if it is no number."""
    return int(text) if isinstance(text, str) and text.isdecimal() and len(text) <= 20 else 0
