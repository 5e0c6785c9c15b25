"""Tests of `Mode`: whether a restart can load the state from memory, and which events change this."""

import typing

import pytest

from ddpjob.checkpoint.in_memory.mode import Event, Mode, after

EVENTS: tuple[Event, ...] = typing.get_args(Event)


def test_the_agent_waits_only_after_names_proof_and_room() -> None:
    """A rank is READY after three events: it has objects, only optimizers change them, and memory is reserved."""
    before: dict[Mode, set[Event]] = {}
    for mode in Mode:
        for event in EVENTS:
            if after(mode, event) is not mode:
                before.setdefault(after(mode, event), set()).add(event)
    assert before[Mode.READY] == {"reserved"}
    assert before[Mode.PROVEN] == {"proven", "grown"}
    assert before[Mode.PROVING] == {"named"}


@pytest.mark.parametrize("mode", [Mode.EMPTY, Mode.PROVING, Mode.COPYING, Mode.OFF])
def test_room_that_was_reserved_late_promises_nothing(mode: Mode) -> None:
    """Memory that is reserved late must have no effect: the script may have passed other objects meanwhile."""
    assert after(mode, "reserved") is mode


def test_a_refused_state_stays_refused_and_a_changing_one_is_copied_from_then_on() -> None:
    """A refused state must never be kept again. A state that changes between steps must be copied from then on."""
    assert {after(Mode.OFF, event) for event in EVENTS} == {Mode.OFF}
    assert {after(Mode.COPYING, event) for event in EVENTS} == {Mode.COPYING, Mode.OFF}
