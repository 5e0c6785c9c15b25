"""`ddpjob logs`: print the logs of a job's nodes, from this machine or from a cluster."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TypeAlias

from ddpjob_cli.client.errors import ClusterError
from ddpjob_cli.commands.output import closed, say, write, write_printed
from ddpjob_cli.describe.terminal import TerminalPieces
from ddpjob_cli.manifest.yamlfile import InputError
from ddpjob_operator.job import ranges
from ddpjob_operator.job.wording import count

if TYPE_CHECKING:
    from ddpjob_cli.client.logs import ClusterLogs
    from ddpjob_cli.local.run_files.run_logs import LocalLogs

    LogSource: TypeAlias = LocalLogs | ClusterLogs  # nodes are numbered from 0, as in the job


def show(
    source: LogSource, rank: int | None, node: int | None, attempt: int | None, *, previous: bool, follow: bool
) -> int:
    """Write logs to stdout; return the exit code. Default: all nodes of the last attempt. Raise InputError."""
    wanted = source.node_of_rank(rank) if rank is not None else node
    chosen = _choose(source, attempt, previous, wait=follow)
    nodes = source.nodes(chosen) if wanted is None else [wanted]
    if not follow and wanted is not None and wanted not in source.nodes(chosen):
        raise InputError(f"{source.name}: node {wanted} has no log in attempt {chosen}")
    gone = source.gone(chosen) if wanted is None and not follow else []
    is_several = wanted is None and (follow or len(nodes) + len(gone) > 1)
    if follow:
        later = attempt is None and not previous
        pieces = source.follow(chosen, None if wanted is None else nodes, later=later)
    else:
        pieces = source.read(chosen, nodes)
    try:
        if is_several:
            _write_lines(source, pieces)
        else:
            _write(pieces)
    except OSError as error:
        return closed(error)
    if gone:
        whose = f"node{'s' * (len(gone) > 1)} {ranges.for_people(gone)}"
        say(f"{source.name}, attempt {chosen}: the pod of {whose} is gone, and its log with it")
    return 0


def _write_lines(source: LogSource, pieces: Iterator[tuple[int, bytes]]) -> None:
    """Write whole lines with the prefix of their node, because lines of two nodes would mix otherwise."""
    for node, lines in whole_lines(pieces):
        begin = source.prefix(node).encode()
        write_printed(b"".join(begin + line + b"\n" for line in lines))


def whole_lines(pieces: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, list[bytes]]]:
    """Yield whole lines of each node, and unfinished lines at the end, even if the source raises ClusterError."""
    rest: dict[int, bytes] = {}
    wrong: ClusterError | None = None
    try:
        for node, piece in pieces:
            *lines, rest[node] = (rest.get(node, b"") + piece).split(b"\n")
            yield node, lines
    except ClusterError as error:
        wrong = error
    yield from ((node, [line]) for node, line in rest.items() if line)
    if wrong is not None:
        raise wrong


def _write(pieces: Iterator[tuple[int, bytes]]) -> None:
    if not sys.stdout.isatty():
        for _, piece in pieces:
            write(piece)
        return
    shown = TerminalPieces()
    try:
        for _, piece in pieces:
            write(shown.feed(piece).encode())
    finally:
        write(shown.feed(b"", last=True).encode())


def _choose(source: LogSource, attempt: int | None, previous: bool, *, wait: bool) -> int:
    known = source.attempts()
    if not known:
        if wait:
            return attempt or 1
        raise InputError(f"{source.name}: {source.why_none()}")
    if attempt is None:
        if previous and len(known) == 1:
            raise InputError(f"--previous: {source.name} has {count(1, 'attempt')}")
        return known[-2] if previous else known[-1]
    if attempt not in known:
        raise InputError(f"--attempt {attempt}: {source.name} has logs of {', '.join(map(str, known))}")
    return attempt
