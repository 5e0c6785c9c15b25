"""A node's memory has two areas for states. Surviving ranks, and ranks that make copies, write to these areas."""

import os
import signal
import threading
from collections.abc import Iterator

import pytest
import torch

from ddpjob.checkpoint.in_memory.shared import Shared
from ddpjob.checkpoint.state import packed
from ddpjob_core import memory
from ddpjob_core.memory import Held, Version
from ddprun.memory import Memory

BYTES = 1 << 12


def packed_state(step: int) -> packed.Packed:
    return packed.pack({"weight": torch.full((BYTES // 4,), float(step))})


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Shared]]:
    """Return two ranks of one node, whose memory has room for two states."""
    monkeypatch.setattr(packed, "PIECE_BYTES", BYTES // 4)
    agent = Memory(2)
    agent.begin(0)
    both = [Shared(agent.where(rank), 1, 0) for rank in range(2)]
    for rank in both:
        rank.cells[memory.PID] = os.getpid()
    for area in range(memory.AREAS):
        both[0].reserve(packed_state(1).size, area)
    yield both
    del agent


def copy(rank: Shared, step: int, area: int, *, counts: bool = True) -> Held:
    """Write a copy of a state that the script has passed to `save`."""
    state = packed_state(step)
    held = Held(Version(1, 0, step), 0, state.size, packed.total(state.tensors))
    rank.write_copy(area, state, held)
    if counts:
        assert rank.count_copy(area, held)
    return held


def write(rank: Shared, step: int, *, pieces: int = 99, assumed: bool = False) -> bool:
    """Write a state like a surviving rank that is killed after this many pieces; return True if it is complete."""
    state, written, copy_piece = packed_state(step), [], packed.copy_piece

    def copy_some(target: torch.Tensor, source: torch.Tensor) -> None:
        written.append(len(source))
        if len(written) > pieces:
            raise InterruptedError
        copy_piece(target, source)

    held = Held(Version(1, 0, step), 0, state.size, packed.total(state.tensors), assumed)
    packed.copy_piece = copy_some
    try:
        with rank.locked() as alone:
            assert alone
            rank.write_rescued(state, held, 1)
    except InterruptedError:
        return False
    finally:
        packed.copy_piece = copy_piece
    return True


def newest(rank: Shared) -> tuple[int, float]:
    """Return the step that a restart would use, and a value of its state."""
    held = rank.held()
    return held.version.step, float(packed.in_place(rank.newest(held.size))["weight"][-1])


@pytest.mark.parametrize("area", range(memory.AREAS))
def test_a_rescue_that_is_cut_short_keeps_the_last_saved_state(ranks: list[Shared], area: int) -> None:
    """A write that is cut short must leave the last saved state complete: without a folder there is no other."""
    copy(ranks[0], 3, 1 - area)
    copy(ranks[0], 5, area)
    assert not write(ranks[0], 8, pieces=1)
    assert newest(ranks[1]) == (5, 5.0)
    assert write(ranks[1], 8)
    assert newest(ranks[0]) == (8, 8.0)


def test_a_state_written_by_survivors_keeps_the_previous_one_until_it_is_complete(ranks: list[Shared]) -> None:
    """If a rank is killed while it writes a newer state, the older state must still be complete."""
    for step in range(1, 6):
        assert not write(ranks[0], step, pieces=2)
        assert step == 1 or newest(ranks[1]) == (step - 1, step - 1.0)
        assert write(ranks[1], step)
        assert newest(ranks[0]) == (step, float(step))


def test_a_saved_state_replaces_an_assumed_one_of_the_same_step(ranks: list[Shared]) -> None:
    """A copy with the objects of `save` must replace a copy of the same step with only the objects of `load`."""
    assert write(ranks[0], 4, assumed=True)
    assert write(ranks[1], 4)
    held = [ranks[0].held_in(area) for area in range(memory.AREAS)]
    assert [one and one.assumed for one in held] == [False, None]


def test_a_copy_does_not_count_while_survivors_overwrite_it(ranks: list[Shared]) -> None:
    """A copy that a surviving rank is overwriting mixes two states, so a restart must not use it."""
    copy(ranks[0], 5, 0)
    copied = copy(ranks[0], 6, 1, counts=False)
    assert not write(ranks[1], 6, pieces=1)
    assert not ranks[0].count_copy(1, copied), "and its writer does what survivors do"
    assert newest(ranks[0]) == (5, 5.0)
    assert write(ranks[1], 6)
    assert newest(ranks[0]) == (6, 6.0)


def test_a_rank_that_copies_waits_until_a_survivor_has_written(ranks: list[Shared]) -> None:
    """A rank that copies must wait for a surviving rank that is writing, because both write to the older area."""
    began, done = threading.Event(), threading.Event()

    def copies() -> None:
        began.set()
        with ranks[0].locked(waits=True):
            done.set()

    with ranks[1].locked():
        thread = threading.Thread(target=copies)
        thread.start()
        began.wait()
        assert not done.wait(0.2)
    thread.join()
    assert done.is_set()


def test_one_rank_writes_at_a_time_and_a_dead_writer_releases_the_lock(ranks: list[Shared]) -> None:
    """Only one rank may write at a time, because with two writers a state could have parts of two steps."""
    (read, write_end), (release, hold) = os.pipe(), os.pipe()
    if (pid := os.fork()) == 0:
        with ranks[0].locked():
            os.write(write_end, b"x")
            os.read(release, 1)
    os.read(read, 1)
    with ranks[1].locked() as alone:
        assert not alone
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert write(ranks[1], 8)
    for descriptor in (read, write_end, release, hold):
        os.close(descriptor)


def test_a_process_forked_meanwhile_does_not_block_the_others_from_writing(ranks: list[Shared]) -> None:
    """DataLoader workers that are forked while a thread has the memory's lock must not keep the lock."""
    with ranks[0].locked() as has_lock:
        assert has_lock
        if (worker := os.fork()) == 0:
            signal.pause()
    try:
        assert write(ranks[1], 8)
        with ranks[0].locked() as alone:
            assert alone
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)
