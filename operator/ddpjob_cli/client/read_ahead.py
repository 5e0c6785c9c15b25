"""Several logs one after the other, their beginnings read at once.

The API server waits for the kubelet of a lost node as long as a request may take. One log after the other, each lost
node costs that time again.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple, TypeVar

AHEAD_MAX = 16
"""Logs that are read besides the one that is printed."""
BYTES_MAX = 1 << 20
"""Of each. A longer one is read again when it is printed: until then its connection would be idle, and be dropped, for
as long as whoever reads stdout likes."""

T = TypeVar("T")
Read = Callable[[T], Generator[bytes, None, None]]


class _Begun(NamedTuple):
    pieces: list[bytes]
    error: BaseException | None = None
    is_whole: bool = True


def each(read: Read[T], logs: Sequence[T]) -> Iterator[Iterator[bytes]]:
    """The pieces of each log, in order. They raise what `read` raises."""
    later = iter(logs[1:])
    ahead: deque[queue.Queue[_Begun]] = deque()
    for number, log in enumerate(logs):
        begun = ahead.popleft() if number else None  # the first is printed as it comes
        ahead.extend(_begin(read, one) for one in itertools.islice(later, AHEAD_MAX - len(ahead)))
        yield read(log) if begun is None else _pieces(read, log, begun)


def _pieces(read: Read[T], log: T, begun: queue.Queue[_Begun]) -> Iterator[bytes]:
    found = begun.get()
    yield from found.pieces if found.is_whole else read(log)
    if found.error is not None:
        raise found.error


def _begin(read: Read[T], log: T) -> queue.Queue[_Begun]:
    """Reads in a thread; where what it has read will be."""
    answer: queue.Queue[_Begun] = queue.Queue(1)

    def run() -> None:
        pieces: list[bytes] = []
        size = 0
        try:
            with contextlib.closing(read(log)) as new:
                for piece in new:
                    pieces.append(piece)
                    size += len(piece)
                    if size > BYTES_MAX:
                        answer.put(_Begun([], is_whole=False))
                        return
            answer.put(_Begun(pieces))
        except BaseException as error:  # raised where the log is printed
            answer.put(_Begun(pieces, error))

    threading.Thread(target=run, daemon=True).start()
    return answer
