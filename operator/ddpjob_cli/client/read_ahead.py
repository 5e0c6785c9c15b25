"""Reads several logs in order, but starts reading ahead. The API server waits for the kubelet of a lost node as long as
a request may take, and reading one log after the other would pay that for each lost node."""

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
"""Logs that are read ahead of the one that is printed."""
BYTES_MAX = 1 << 20
"""Bytes read ahead of each log. A longer log is read again when it is printed: until then its idle connection could be
dropped, for as long as the reader of stdout takes."""

T = TypeVar("T")
Read = Callable[[T], Generator[bytes, None, None]]


class _Begun(NamedTuple):
    pieces: list[bytes]
    error: BaseException | None = None
    is_whole: bool = True


def each(read: Read[T], logs: Sequence[T]) -> Iterator[Iterator[bytes]]:
    """Yield the pieces of each log, in order. They raise what `read` raises."""
    later = iter(logs[1:])
    ahead: deque[Future[_Begun]] = deque()
    for number, log in enumerate(logs):
        begun = ahead.popleft() if number else None  # the first is printed as it arrives
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
    except BaseException as error:  # raised when this log is printed
        return _Begun(pieces, error)
    return _Begun(pieces)
