"""Work on many bytes by several threads of this process: sums and copies let go of the interpreter's lock.

Ranks mostly have one thread of torch each (OMP_NUM_THREADS=1, as under torchrun), and when a state is written after a
failure or loaded, the other processors of the node have nothing to do.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

THREADS_MAX = 8
"""More of them wait for the memory."""
WORTH_BYTES = 32 << 20
"""Less is done sooner than threads are started."""
PIECE_BYTES = 16 << 20


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

    Where no thread can be started, as while the interpreter ends, this one does all of it.
    """
    results: list[Any] = [None] * len(items)
    errors: list[BaseException] = []
    numbers = iter(range(len(items)))  # CPython's: two threads never get the same

    def go() -> None:
        try:
            for number in numbers:
                results[number] = work(items[number])
                if errors:
                    return
        except BaseException as error:
            errors.append(error)

    others = [threading.Thread(target=go, name="ddpjob-memory-crew", daemon=True) for _ in items[1:count]]
    started = []
    with contextlib.suppress(RuntimeError):
        for other in others:
            other.start()
            started.append(other)
    go()
    for other in started:
        other.join()
    if errors:
        raise errors[0]
    return results
