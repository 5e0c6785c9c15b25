"""`ddpjob logs`: what the nodes of a job have printed, from any source."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

from ddpjob_cli.client.errors import ClusterError
from ddpjob_cli.commands.output import closed, say, write, write_printed
from ddpjob_cli.describe.terminal import TerminalPieces
from ddpjob_cli.manifest.yamlfile import InputError
from ddpjob_operator.job import ranges
from ddpjob_operator.job.wording import count

if TYPE_CHECKING:
    from ddpjob_cli.client.logs import ClusterLogs
    from ddpjob_cli.local.kept.run_logs import LocalLogs

    LogSource: TypeAlias = LocalLogs | ClusterLogs  # nodes are numbered from 0, as in the job


class LogLines:
    """Whole lines on stdout, each with its prefix if several nodes are shown."""

    def __init__(self, source: LogSource, several: bool) -> None:
        self._source = source
        self._several = several
        self._rest: dict[int, bytes] = {}
        self._pieces = TerminalPieces() if sys.stdout.isatty() else None

    def write(self, node: int, piece: bytes) -> None:
        """Write complete lines. The beginning of a line waits for its end; otherwise lines of two nodes would mix."""
        if not self._several:
            write(piece if self._pieces is None else self._pieces.feed(piece).encode())
            return
        *lines, self._rest[node] = (self._rest.get(node, b"") + piece).split(b"\n")
        prefix = self._source.prefix(node).encode()
        write_printed(b"".join(prefix + line + b"\n" for line in lines))

    def close(self) -> None:
        if self._pieces is not None:
            write(self._pieces.feed(b"", last=True).encode())
        for node, rest in self._rest.items():
            if rest:
                write_printed(self._source.prefix(node).encode() + rest + b"\n")


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
    lines = LogLines(source, several=wanted is None and (follow or len(nodes) + len(gone) > 1))
    if follow:
        later = attempt is None and not previous
        pieces = source.follow(chosen, None if wanted is None else nodes, later=later)
    else:
        pieces = source.read(chosen, nodes)
    try:
        _write_all(pieces, lines)
    except OSError as error:
        return closed(error)
    if gone:
        whose = f"node{'s' * (len(gone) > 1)} {ranges.for_people(gone)}"
        say(f"{source.name}, attempt {chosen}: the pod of {whose} is gone, and its log with it")
    return 0


def _write_all(pieces: Iterator[tuple[int, bytes]], lines: LogLines) -> None:
    """Write everything from a source, including the last lines if it raises at the end."""
    try:
        for node, piece in pieces:
            lines.write(node, piece)
    except ClusterError:
        lines.close()
        raise
    lines.close()


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
