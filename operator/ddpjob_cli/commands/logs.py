"""`ddpjob logs`: what the nodes of a job have printed, from wherever its logs are."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from typing import Protocol

from ddpjob_cli.client.errors import ClusterError
from ddpjob_cli.commands.cluster import say
from ddpjob_cli.commands.output import closed, write, write_printed
from ddpjob_cli.describe.terminal import TerminalPieces
from ddpjob_cli.manifest.yamlfile import InputError
from ddpjob_operator.job import ranges
from ddpjob_operator.job.wording import count


class LogSource(Protocol):
    """Where the logs of one job are: on this machine, or in a cluster. Nodes are numbered as in the job, from 0."""

    name: str
    """The job, as a message names it."""

    def attempts(self) -> list[int]:
        """The attempts that have logs, in order."""
        ...

    def nodes(self, attempt: int) -> list[int]:
        """The nodes that have a log in an attempt, in order."""
        ...

    def gone(self, attempt: int) -> list[int]:
        """The nodes that ran in an attempt and have no log any more, in order."""
        ...

    def why_none(self) -> str:
        """The sentence where no attempt has a log."""
        ...

    def node_of_rank(self, rank: int) -> int:
        """The node on which a rank runs. Raises InputError where there is no such rank, or where it is not known."""
        ...

    def prefix(self, node: int) -> str:
        """What stands before a line where several nodes are shown: `[1:1] `."""
        ...

    def read(self, attempt: int, nodes: Collection[int]) -> Iterator[tuple[int, bytes]]:
        """What nodes have printed up to now, one after the other, as (node, piece of any size). Raises ClusterError
        after the last for those whose log could not be read."""
        ...

    def follow(self, attempt: int, nodes: Collection[int] | None, *, later: bool) -> Iterator[tuple[int, bytes]]:
        """What nodes print from the beginning of an attempt until the job ends, as (node, piece); None is all nodes.

        later: with the attempts that follow it.
        """
        ...


class LogLines:
    """Whole lines on stdout, each with its prefix where several nodes are shown."""

    def __init__(self, source: LogSource, several: bool) -> None:
        self._source = source
        self._several = several
        self._rest: dict[int, bytes] = {}
        self._pieces = TerminalPieces() if sys.stdout.isatty() else None

    def write(self, node: int, piece: bytes) -> None:
        """Write what is complete; the begin of a line waits for its end, or lines of two nodes would mix."""
        if not self._several:
            write(piece if self._pieces is None else self._pieces.feed(piece).encode())
            return
        *lines, self._rest[node] = (self._rest.get(node, b"") + piece).split(b"\n")
        prefix = self._source.prefix(node).encode()
        write_printed(b"".join(prefix + line + b"\n" for line in lines))

    def close(self) -> None:
        """Write the last lines of those that ended without an end of line."""
        if self._pieces is not None:
            write(self._pieces.feed(b"", last=True).encode())
        for node, rest in self._rest.items():
            if rest:
                write_printed(self._source.prefix(node).encode() + rest + b"\n")


def show(
    source: LogSource, rank: int | None, node: int | None, attempt: int | None, *, previous: bool, follow: bool
) -> int:
    """Write logs to stdout; the exit code. Without a choice: all nodes of the last attempt. Raises InputError."""
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
    """All that a source gives, with the last lines also where it raises at the end."""
    try:
        for node, piece in pieces:
            lines.write(node, piece)
    except ClusterError:
        lines.close()
        raise
    lines.close()


def _choose(source: LogSource, attempt: int | None, previous: bool, *, wait: bool) -> int:
    """The attempt that is shown; the last one without a wish."""
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
