"""After a failure an agent waits for ranks that may still write the state to its memory, before it ends the ranks."""

import mmap
import os
import signal
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shell import eventually

from ddpjob import threads
from ddpjob_core import memory
from ddprun.memory import Memory

LIMIT = memory.limit_seconds(0)
LATE, TOO_LATE = 4 * LIMIT, memory.longest_seconds(0)


class Node:
    """The memory of an agent. The test writes to it what ranks would write."""

    def __init__(self) -> None:
        self.agents = Memory(2)
        self.agents.begin(3)
        agent, file, *_ = map(int, self.agents.where(0).split(":"))
        descriptor = os.open(f"/proc/{agent}/fd/{file}", os.O_RDWR)
        self.cells = memoryview(mmap.mmap(descriptor, 3 * memory.PAGE_BYTES)).cast("q")
        os.close(descriptor)

    def rank(self, local_rank: int, *, step: int, is_dirty: bool = False) -> None:
        """Register a rank. step: its last completed step. is_dirty: True if it is inside its next optimizer step."""
        page = (1 + local_rank) * memory.PAGE_BYTES // 8
        self.cells[page + memory.PID], self.cells[page + memory.CLOCK] = 1, 2 * step + is_dirty

    def whole(self, step: int, generation: int = 3) -> None:
        """Write a complete state of this step to the memory."""
        for cell, value in ((memory.AREA_GENERATION, generation), (memory.AREA_STEP, step)):
            self.cells[memory.area_cell(0, cell)] = value


@pytest.fixture
def child() -> Iterator[Callable[[Callable[[], object]], int]]:
    """Return a function that forks a process which repeats some work forever, and returns its pid."""
    pids = []

    def start(work: Callable[[], object]) -> int:
        if (pid := os.fork()) == 0:
            while True:
                work()
        pids.append(pid)
        return pid

    yield start
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def settled(pid: int, *, is_held_up: bool) -> int:
    """Wait until `threads.is_held_up` returns this value: True if the process waits for CPU time. Return its pid."""
    eventually(lambda: threads.is_held_up(pid) is is_held_up, 60)
    return pid


def test_a_stopped_or_sleeping_rank_gets_its_time_limit_and_no_more(child):
    """If a rank is stopped by SIGSTOP or waits for a lock, the job must restart without its state after the limit."""
    for work in (lambda: os.kill(os.getpid(), signal.SIGSTOP), signal.pause):
        node = Node()
        node.rank(0, step=5)
        pid = settled(child(work), is_held_up=False)
        assert node.agents.waits_for({0: pid}, 0.0)
        assert node.agents.waits_for({0: pid}, LIMIT / 2)
        assert not node.agents.waits_for({0: pid}, LIMIT)


def test_a_rank_without_cpu_time_gets_ten_more_seconds(child: Callable[[Callable[[], object]], int]) -> None:
    """A rank that gets no CPU time on a busy node must be waited for longer, because otherwise steps are lost."""
    node = Node()
    node.rank(0, step=5)
    pid = settled(child(lambda: None), is_held_up=True)
    assert node.agents.waits_for({0: pid}, 0.0)
    assert node.agents.waits_for({0: pid}, LATE)
    assert not node.agents.waits_for({0: pid}, TOO_LATE)


def test_the_time_limit_restarts_with_each_written_piece(child: Callable[[Callable[[], object]], int]) -> None:
    """The write of a large state on a slow machine must not be cut off shortly before its end."""
    node = Node()
    node.rank(0, step=5)
    pid = settled(child(signal.pause), is_held_up=False)
    for pieces in range(3):
        assert node.agents.waits_for({0: pid}, 0.8 * pieces * LIMIT)
        node.cells[memory.WROTE] += 1
    assert node.agents.waits_for({0: pid}, 2.4 * LIMIT)
    assert not node.agents.waits_for({0: pid}, 3.4 * LIMIT)


def test_a_rank_whose_step_is_already_in_memory_is_not_waited_for() -> None:
    node = Node()
    node.rank(0, step=5)
    node.whole(5, generation=2)
    assert node.agents.waits_for({0: os.getpid()}, 0.0), "that is an older state"
    node.whole(5)
    assert not node.agents.waits_for({0: os.getpid()}, 0.0)


@pytest.mark.parametrize("is_killed_in_it", [False, True])
@pytest.mark.parametrize("where", ["this node", "another node"])
def test_a_rank_that_can_still_reach_the_next_step_is_waited_for(where: str, is_killed_in_it: bool) -> None:
    """Rank 0 must be waited for if it has the gradients of the next step, because another rank was in that step or has
    passed it. Memory has the step before."""
    node = Node()
    node.rank(0, step=5)
    node.whole(5)
    node.rank(1, step=5)
    assert not node.agents.waits_for({0: os.getpid()}, 0.0), "no rank has come to it"
    if where == "this node":
        node.rank(1, step=5 if is_killed_in_it else 6, is_dirty=is_killed_in_it)
    else:
        node.agents.order(furthest=11 if is_killed_in_it else 12)
    assert node.agents.waits_for({0: os.getpid()}, 0.0)
    node.whole(6)
    assert not node.agents.waits_for({0: os.getpid()}, 0.0)


def test_progress_reported_by_another_node_counts_only_in_its_generation() -> None:
    """A new generation must start with FURTHEST 0 (furthest step of any rank), or its ranks wait for a step that no
    rank has completed."""
    node = Node()
    node.agents.order(furthest=12)
    node.agents.begin(4)
    assert not node.cells[memory.FURTHEST]
    assert not node.agents.clock


@given(st.integers(0, 9), st.integers(0, 4), st.floats(0, 99), st.floats(0, 99), st.integers(0, 1 << 33), st.booleans())
def test_the_wait_for_any_rank_is_limited(clock, whole, seconds, still, size, is_held_up):
    """A rank in an endless loop must not prevent the restart of the other ranks."""
    waits = memory.is_waited_for(clock, whole, seconds, still, size, is_held_up)
    assert not waits or seconds < memory.longest_seconds(size)
    assert not waits or is_held_up or still < memory.limit_seconds(size)
    assert not waits or not whole or clock > 2 * whole
