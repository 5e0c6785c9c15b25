"""Stored jobs never take more memory than their share, and the operator knows when to read a job again."""

import datetime as dt
import random
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import World, digits

from ddpjob_operator.job import api, bounds, storage
from ddpjob_operator.kube.watch import store
from ddpjob_operator.observed.cluster import Observed
from ddpjob_operator.plan.plan import plan

TOTAL, OF_NAMESPACE = 100, 60
steps = st.tuples(st.sampled_from(["ask", "ask", "leave", "forget"]), st.integers(0, 11), st.integers(1, 40))


class Jobs:
    """Jobs that request memory, and the sizes that the test expects."""

    def __init__(self) -> None:
        self.room = storage.Room(TOTAL, OF_NAMESPACE)
        self.sizes: dict[storage.Key, int] = {}
        self.waiting: dict[storage.Key, int] = {}

    def ask(self, key: storage.Key, needs: int) -> bool:
        has_place = not self.room.ask(key, needs)
        self.sizes.pop(key, None)
        self.waiting.pop(key, None)
        (self.sizes if has_place else self.waiting)[key] = needs
        return has_place

    def leave(self, key: storage.Key, _: int = 0) -> None:
        self.room.leave(key)
        self.sizes.pop(key, None)

    def forget(self, key: storage.Key, _: int = 0) -> None:
        self.room.waits_no_more(key)
        self.waiting.pop(key, None)

    def hear(self) -> list[storage.Key]:
        """Let waiting jobs take the memory that they were offered."""
        told = self.room.next()
        assert all(self.ask(key, self.waiting[key]) for key in told), "who is told has room"
        return told

    def check(self) -> None:
        assert self.room.used == sum(self.sizes.values()) <= TOTAL
        for space in {key[0] for key in self.sizes}:
            used = sum(size for key, size in self.sizes.items() if key[0] == space)
            assert self.room.used_in(space) == used <= OF_NAMESPACE


@given(st.lists(steps, max_size=80))
def test_no_room_is_given_twice_and_waiting_jobs_are_woken_when_there_is_room(walk: list[tuple[str, int, int]]) -> None:
    jobs = Jobs()
    for what, number, needs in walk:
        getattr(jobs, what)((f"team-{number % 3}", f"job-{number}"), needs)
        jobs.hear()
        jobs.check()
    for key in list(jobs.sizes):
        jobs.leave(key)
    while told := jobs.hear():
        for key in told:
            jobs.leave(key)
    assert not jobs.waiting


def lives(chance: random.Random) -> World:
    """Generate a job for which the operator has mostly nothing left to do; some were just resumed."""
    ttl = chance.choice([None, 0, 50])
    more: dict[str, Any] = {} if ttl is None else {"ttlSecondsAfterFinished": ttl}
    world = digits(nodes=1, suspend=chance.random() < 0.3, **more)
    world.settle()
    if world.status.state != "Suspended" and chance.random() < 0.8:
        world.runs(0).settle()
        if chance.random() < 0.4:
            world.exits(0, code=chance.choice([0, 127])).settle()
        elif chance.random() < 0.8:
            world.change(suspend=True).settle()
            world.stops_all().settle()
    return world.change(suspend=False) if chance.random() < 0.2 else world


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 200))
def test_a_job_that_is_not_read_again_has_nothing_to_do(seed: int, seconds: int) -> None:
    """A job that is not read again must have nothing to do, or a resume or a deletion is ignored for ever."""
    world = lives(random.Random(seed))
    metadata = msgspec.to_builtins(world.job.metadata)
    raw: dict[str, Any] = {"metadata": metadata, "spec": msgspec.to_builtins(world.job.spec)}
    kept = storage.cut(raw | {"status": msgspec.to_builtins(world.status)}, 1)
    now = world.now + dt.timedelta(seconds=seconds)
    until = storage.rests_until(kept, now, has_objects=False)
    todo = plan(world.job, Observed(), now)
    if until is not None:
        assert (todo.status, todo.actions) == (None, ())
        if todo.requeue_at is not None:
            assert storage.rests_until(kept, todo.requeue_at, has_objects=False) is None
    is_quiet = todo.status is None and not todo.actions
    if is_quiet and world.status.state in ("Suspended", "Succeeded", "Failed"):
        assert until is not None, "thousands of jobs would be read again at each start of an operator"


@given(st.dictionaries(st.text(max_size=5), st.text(max_size=3_000)), st.integers(0, 2_000), st.booleans())
def test_a_cut_object_keeps_at_most_a_kilobyte_per_field(texts: dict[str, str], numbers: int, is_list: bool) -> None:
    value: Any = [texts] * 3 if is_list else texts
    fields = dict.fromkeys((*storage.KEPT_OF_SPEC, *storage.KEPT_OF_STATUS, *storage.KEPT_OF_METADATA), value)
    raw = {"metadata": fields, "spec": fields | {"template": value}, "status": fields | {"message": "x" * numbers}}
    of = len(storage.KEPT_OF_SPEC) + len(storage.KEPT_OF_STATUS) + len(storage.KEPT_OF_METADATA)
    assert len(msgspec.json.encode(storage.cut(raw, 1))) <= of * 6_000 + 200
    assert set(api.Status.__struct_encode_fields__) >= set(storage.KEPT_OF_STATUS)


def test_a_job_that_outgrows_its_room_loses_its_place_and_regains_it_later() -> None:
    """A job that outgrows its memory must lose it, and get it back later: annotations may grow to 256 kB."""
    room = storage.Room(TOTAL, OF_NAMESPACE)
    key, other = ("team", "a"), ("team", "b")
    assert room.take(key, 30)
    assert room.take(other, 30)
    assert not room.take(key, 31)
    assert room.used == 30
    assert room.take(key, 30)


LIMITS = storage.StoredLimits(0, 60_000, 40_000, 40_000, 30_000, 8 * storage.OF_A_JOB, 5 * storage.OF_A_JOB)
STATES = {
    "new": (False, {}),
    "suspended": (True, {"state": "Suspended", "reason": "Suspended", "observedGeneration": 1}),
    "ended": (False, {"state": "Succeeded", "observedGeneration": 1, "completionTime": "2031-03-05T07:00:00Z"}),
    "waits": (False, {"state": "Pending", "reason": "WaitingForRoom", "observedGeneration": 1}),
    "begun": (False, {"state": "Running", "attempt": 1, "observedGeneration": 1}),
}
jobs = st.tuples(st.sampled_from(sorted(STATES)), st.integers(0, 30), st.sampled_from([100, 1_000, 40_000]))
changes = st.tuples(st.sampled_from(["put", "put", "put", "held", "remove"]), jobs)


def of_size(version: int, state: str, number: int, text: int) -> dict[str, Any]:
    suspend, status = STATES[state]
    metadata = {"namespace": f"team-{number % 3}", "name": f"j{number}", "uid": f"u{number}.{version}"}
    metadata |= {"resourceVersion": str(version), "generation": 1}
    return {"metadata": metadata, "spec": {"suspend": suspend, "text": "x" * text}, "status": status}


def kept_of(kept: store.Jobs, namespace: str) -> int:
    """Return the bytes kept for a namespace, or for all if it is ""."""
    raws = [kept.get(key) or {} for key in kept if namespace in ("", key[0])]
    return sum(storage.OF_A_JOB if storage.is_cut(raw) else storage.size(raw) for raw in raws)


@given(st.lists(changes, max_size=120))
def test_memory_for_all_jobs_is_bounded_per_namespace_and_in_total(walk):
    """Memory must be limited per namespace and in total: a tenant may store a million suspended jobs of 2 kB."""
    kept = store.Jobs(lambda _key: None, limits=LIMITS)
    for version, (what, given_job) in enumerate(walk, 1):
        raw = of_size(version, *given_job)
        key = (raw["metadata"]["namespace"], raw["metadata"]["name"])
        known = kept.get(key)
        if what == "remove" and known is not None:
            kept.remove(*key, known["metadata"]["uid"])
        elif what == "held":
            with kept.held(key):
                kept.put(raw)
                assert kept.get(key) == raw, "a job that is reconciled is there, and whole"
        else:
            kept.put(raw)
        assert kept.get(key) is not None or what == "remove" or kept.leaves_out(key[0])
        for namespace in ("team-0", "team-1", "team-2"):
            most = LIMITS.begun_in_namespace + LIMITS.resting_in_namespace + 2 * LIMITS.cut_in_namespace
            assert kept_of(kept, namespace) <= most
        assert kept_of(kept, "") <= LIMITS.begun + LIMITS.resting + 2 * LIMITS.cut
    for key in list(kept):
        kept.remove(*key, (kept.get(key) or {})["metadata"]["uid"])
    for number in range(5):
        kept.put(of_size(1_000, "suspended", 3 * number, 40_000))
    assert len(kept) == 5, "all places are free again"


@given(jobs)
def test_an_idle_job_needs_nothing_at_any_time(given_job: tuple[str, int, int]) -> None:
    """An idle job must need no action at any time, because the operator reads it only when it changes."""
    raw = of_size(1, *given_job)
    for seconds in (None, 0, 100):
        timed = raw | {"spec": raw["spec"] | ({} if seconds is None else {"ttlSecondsAfterFinished": seconds})}
        if storage.rests(timed) and not storage.waits_for_room(timed):
            assert storage.rests_until(timed, bounds.TIME_LAST, has_objects=False) is not None
