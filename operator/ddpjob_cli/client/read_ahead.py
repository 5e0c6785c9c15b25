"""Several logs one after the other, their beginnings read at once.

The API server waits for the kubelet of a lost node as long as a request may take. One log after the other, each lost
node costs that time again.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple, TypeVar

from ddpjob_cli.client.connection import in_background

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
    ahead: deque[Future[_Begun]] = deque()
    for number, log in enumerate(logs):
        begun = ahead.popleft() if number else None  # the first is printed as it comes
        new = itertools.islice(later, AHEAD_MAX - len(ahead))
        ahead.extend(in_background(partial(_begun, read, one)) for one in new)
        yield read(log) if begun is None else _pieces(read, log, begun)


def _pieces(read: Read[T], log: T, begun: Future[_Begun]) -> Iterator[bytes]:
    found = begun.result()
    yield from found.pieces if found.is_whole else read(log)
    if found.error is not None:
        raise found.error


def _begun(read: Read[T], log: T) -> _Begun:
    pieces: list[bytes] = []
    size = 0
    try:
        with contextlib.closing(read(log)) as new:
            for piece in new:
                pieces.append(piece)
                size += len(piece)
                if size > BYTES_MAX:
                    return _Begun([], is_whole=False)
    except BaseException as error:  # raised where the log is printed
        return _Begun(pieces, error)
    return _Begun(pieces)
