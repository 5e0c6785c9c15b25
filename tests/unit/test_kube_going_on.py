"""Which jobs make their further pods: so many of a namespace at a time, and in the end each."""

from __future__ import annotations

import collections

from hypothesis import given
from hypothesis import strategies as st

from ddpjob_operator.kube.going_on import GoingOn
from ddpjob_operator.kube.shares import Line
from ddpjob_operator.kube.store import Key

A, B, C, D = (("team", name) for name in "abcd")


def test_where_there_is_room_a_job_goes_on_at_once() -> None:
    told: list[Key] = []
    going_on = GoingOn(told.append, at_a_time=2)
    assert going_on.may(A, Line.MORE, 7)
    assert going_on.may(B, Line.MORE, 7)
    assert told == []


def test_a_job_that_waits_is_told_when_another_is_done_and_needs_no_new_room() -> None:
    told: list[Key] = []
    going_on = GoingOn(told.append, at_a_time=1)
    assert going_on.may(A, Line.MORE, 7)
    assert not going_on.may(B, Line.MORE, 7)
    assert not going_on.may(B, Line.MORE, 7), "an event of it changes nothing"
    going_on.over(B)
    assert told == []
    going_on.over(A)
    assert told == [B]
    assert going_on.may(B, Line.MORE, 7)
    assert not going_on.may(A, Line.MORE, 7)


def test_one_that_was_told_and_makes_nothing_leaves_its_room_to_the_next() -> None:
    """It was suspended, or is gone."""
    told: list[Key] = []
    going_on = GoingOn(told.append, at_a_time=1)
    for key in (A, B, C):
        going_on.may(key, Line.MORE, 7)
    going_on.over(A)
    going_on.over(B)
    assert told == [B, C]


def test_the_smallest_and_the_one_that_has_waited_longest_are_told_in_turn() -> None:
    told: list[Key] = []
    going_on = GoingOn(told.append, at_a_time=1)
    for key, pods in ((A, 1), (B, 999), (C, 7), (D, 1)):
        going_on.may(key, Line.MORE, pods)
    for key in (A, D, B):
        going_on.over(key)
    assert told == [D, B, C]


def test_neither_a_restart_nor_another_namespace_waits_for_new_jobs_to_go_on() -> None:
    going_on = GoingOn(lambda _key: None, at_a_time=1)
    assert going_on.may(A, Line.MORE, 7)
    assert going_on.may(B, Line.AGAIN, 7)
    assert going_on.may(("other", "a"), Line.MORE, 7)


def test_a_job_that_restarts_while_it_waits_waits_with_the_restarts() -> None:
    told: list[Key] = []
    going_on = GoingOn(told.append, at_a_time=1)
    for key in (A, B):
        going_on.may(key, Line.MORE, 7)
    assert going_on.may(B, Line.AGAIN, 8)
    going_on.over(A)
    assert told == [], "it has left the other line"
    assert going_on.may(C, Line.MORE, 7)


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(list(Line)), st.booleans()), max_size=200))
def test_never_more_than_so_many_go_on_and_each_that_waits_is_told(steps: list[tuple[int, Line, bool]]) -> None:
    told: collections.deque[Key] = collections.deque()
    going_on = GoingOn(told.append, at_a_time=2)
    line_of: dict[Key, Line] = {}
    waits: set[Key] = set()
    for number, line, asks in steps:
        key = ("team", str(number))
        if asks and key not in line_of and going_on.may(key, line, number):
            line_of[key] = line
            waits.discard(key)
        elif asks and key not in line_of:
            waits.add(key)
        elif not asks:
            going_on.over(key)
            line_of.pop(key, None)
        while told:
            key = told.popleft()
            waits.discard(key)
            assert going_on.may(key, line, 1), "who was told may go on"
            line_of[key] = line
    for key in list(line_of):
        going_on.over(key)
    while told:
        waits.discard(told[0])
        going_on.over(told.popleft())
    assert waits == set()
    assert going_on._jobs == going_on._going_in == going_on._waits_in == {}
