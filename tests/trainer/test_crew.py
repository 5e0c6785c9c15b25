"""Several threads write and read one state: it is the same as if one had."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch

from ddpjob.checkpoint import crew, packed
from ddpjob.checkpoint.shared import Shared, State
from ddpjob_core.memory import PART_BYTES, Version
from ddprun.memory import Memory

MIB = 1 << 20


def tensors() -> list[torch.Tensor]:
    """Larger than a piece, of no whole number of words, small, empty, and in an order of their own."""
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(9 * MIB, generator=generator),
        torch.randint(0, 255, (PART_BYTES + 5,), dtype=torch.uint8, generator=generator),
        torch.randn(7, 3, generator=generator),
        torch.zeros(0),
        torch.randn(64, 32, 16, 16, generator=generator).to(memory_format=torch.channels_last),
    ]


def test_results_come_in_the_order_of_what_they_are_of() -> None:
    """Sums of tensors are told apart by their place: in another order a good state would be refused."""
    seen = set()

    def work(number: int) -> int:
        seen.add(threading.current_thread().name)
        return number * number

    assert crew.each(work, range(1000), 4) == [number * number for number in range(1000)]
    assert crew.each(work, [], 4) == []
    assert not [thread for thread in threading.enumerate() if thread.name in seen - {"MainThread"}], "a script may fork"


def test_what_goes_wrong_in_any_thread_is_raised() -> None:
    """A part that nobody wrote would else count as written."""

    def work(number: int) -> None:
        if number == 7:
            raise OSError(28, "no space")

    for count in (1, 3):
        with pytest.raises(OSError, match="no space"):
            crew.each(work, range(9), count)


def test_where_no_thread_can_be_started_one_does_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of an interpreter, and where a container's limit of processes is reached: there the state is saved by
    a rank that ends by an exception."""

    def refused(_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    assert crew.each(str, range(5), 3) == ["0", "1", "2", "3", "4"]


def test_nobody_works_any_more_when_the_handler_of_a_signal_has_raised() -> None:
    """A time limit by `signal.alarm`, Ctrl-C: the memory is given back then, and a thread would write into it."""

    class TimeOverError(Exception):
        """What scripts raise."""

    others, told = threading.Event(), threading.Event()
    own, ended = [], []

    def handler(*_: Any) -> None:
        told.set()
        raise TimeOverError

    def work(number: int) -> None:
        if threading.current_thread() is threading.main_thread():
            assert others.wait(60)  # else this one would do it all
            own.append(number)
        else:
            others.set()
            while len(own) < 7:  # from then on it waits for this one
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGALRM)
            assert told.wait(60)
            time.sleep(0.2)  # who does not wait for this one looks before
            ended.append(number)

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.raises(TimeOverError):
            crew.each(work, range(8), 2)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert len(ended) == 1, "it came to the end of what it was at, and began nothing else"
    for thread in threading.enumerate():
        if thread.name == "ddpjob-memory-crew":
            thread.join()
    assert len(ended) == 1


def test_a_small_state_is_left_to_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(16))
    assert crew.threads(2, MIB) == 1
    assert crew.threads(2, 1500 * MIB) == crew.THREADS_MAX
    assert crew.threads(8, 1500 * MIB) == 2, "each of eight ranks of a node loads it at the same time"
    assert crew.threads(64, 1500 * MIB) == 1


@pytest.mark.parametrize("of_torch", [1, 2])
def test_the_sum_is_the_same_whoever_makes_it(of_torch: int) -> None:
    """A node with other processors would else refuse what another one has written."""
    before = torch.get_num_threads()
    torch.set_num_threads(of_torch)
    try:
        assert len({packed.total(tensors(), count) for count in (1, 2, 5)}) == 1
    finally:
        torch.set_num_threads(before)


def test_a_copy_has_the_same_bits_and_strides_and_memory_of_its_own() -> None:
    values = tensors()
    copies = packed.own(values, 3)
    for value, copy in zip(values, copies, strict=True):
        assert (copy.stride(), torch.equal(copy, value)) == (value.stride(), True)
        assert not value.numel() or copy.data_ptr() != value.data_ptr()


@pytest.mark.parametrize("kernel", ["gives pages at once", "before 5.14", "has no address left"])
def test_a_state_that_several_threads_write_is_whole(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    if kernel == "before 5.14":
        monkeypatch.setattr(packed, "_POPULATE_WRITE", 1 << 20)
    written_parts = []
    copy = packed.Parts.copy
    monkeypatch.setattr(packed.Parts, "copy", lambda *args: written_parts.append(args[2:]) or copy(*args))
    agent = Memory(1)
    agent.begin(0)
    shared, values = Shared(agent.where(0), 1, 0), tensors()
    state = packed.pack({"values": values, "step": 3})
    shared.reserve(state.size)
    written = State(state, 3, 0, assumed=False, threads=4)
    if kernel == "has no address left":
        monkeypatch.setattr(Shared, "_mapped", lambda *_: (_ for _ in ()).throw(OSError(12, "Cannot allocate memory")))
    with shared.begun(written) as is_begun:
        assert is_begun
        assert shared.write_parts(written, takes_over=True)
    monkeypatch.undo()
    assert len(written_parts) == len(set(written_parts)), "no thread writes what another one of its rank does"
    held = shared.held()
    assert held is not None
    assert (held.version, held.total) == (Version(1, 0, 3), packed.total(values))
    back = packed.in_place(shared.newest(held.size))
    assert back["step"] == 3
    assert packed.total(back["values"]) == held.total
    assert all(map(torch.equal, back["values"], values))
