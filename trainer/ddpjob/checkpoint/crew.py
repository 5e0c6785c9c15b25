"""Work on many bytes by several threads of this process: sums and copies let go of the interpreter's lock.

Ranks mostly have one thread of torch each (OMP_NUM_THREADS=1, as under torchrun), and when a state is written after a
failure or loaded, the other processors of the node have nothing to do.
"""

import collections
import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

THREADS_MAX = 8
"""More of them wait for the memory."""
WORTH_BYTES = 32 << 20
"""Less is done sooner than threads are started."""
PIECE_BYTES = 16 << 20
LOOK_SECONDS = 0.001


def threads(processes: int, size: int) -> int:
    """How many threads of this process work on so many bytes while so many processes of its machine do the same."""
    if size < WORTH_BYTES:
        return 1
    return max(1, min(THREADS_MAX, len(os.sched_getaffinity(0)) // max(1, processes)))


def pieces(size: int) -> list[tuple[int, int]]:
    """Where each piece of so many bytes begins and ends."""
    return [(begin, min(size, begin + PIECE_BYTES)) for begin in range(0, size, PIECE_BYTES)]


def each(work: Callable[[Item], Result], items: Sequence[Item], count: int) -> list[Result]:
    """The result of each item, by so many threads, of which this one is the first. Raises what `work` has raised.

    Where no thread can be started, as while the interpreter ends, this one does all of it. When it returns or raises
    nobody works any more, also where the handler of a signal has raised: the memory may be given back then.
    """
    crew = _Crew(work, items, min(count, len(items)))
    try:
        crew.work_together()
    except BaseException as error:
        crew.errors.append(error)
    crew.is_over = True
    while crew.waits():
        pass
    if crew.errors:
        raise crew.errors[0]
    return crew.results


class _Crew:
    """The threads of one call."""

    def __init__(self, work: Callable[[Any], Any], items: Sequence[Any], count: int) -> None:
        self._work, self._items = work, items
        self._todo = collections.deque(range(len(items)))
        self._busy = [False] * count
        self._others: list[threading.Thread] = []
        self.results: list[Any] = [None] * len(items)
        self.errors: list[BaseException] = []
        self.is_over = False

    def work_together(self) -> None:
        """Until all is done, or something went wrong."""
        for own in range(1, len(self._busy)):
            other = threading.Thread(target=self._help_out, args=(own,), name="ddpjob-memory-crew", daemon=True)
            self._others.append(other)
            with contextlib.suppress(RuntimeError):
                other.start()
        self._go()
        self._join()

    def _join(self) -> None:
        for other in self._others:
            with contextlib.suppress(RuntimeError):  # it was not started
                other.join()

    def _go(self) -> None:
        while not (self.errors or self.is_over):
            try:
                number = self._todo.popleft()
            except IndexError:
                return
            self.results[number] = self._work(self._items[number])

    def _help_out(self, own: int) -> None:
        self._busy[own] = True  # first: who sees nobody busy after it was over knows that nobody begins
        try:
            self._go()
        except BaseException as error:
            self.errors.append(error)
        self._busy[own] = False

    def waits(self) -> bool:
        """A moment, where somebody is busy. What a signal's handler raises meanwhile is raised later."""
        try:
            if not any(self._busy):
                self._join()
                return False
            time.sleep(LOOK_SECONDS)
        except BaseException as error:
            self.errors.append(error)
        return True
