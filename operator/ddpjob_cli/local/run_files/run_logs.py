"""The logs of a run on this machine, as `ddpjob logs` reads them."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from pathlib import Path

from ddpjob_cli.local.run_files import runs
from ddpjob_cli.manifest.yamlfile import InputError

POLL_SECONDS = 0.2


class LocalLogs:
    def __init__(self, run: runs.Run) -> None:
        self.run = run
        self.name = f"{run.facts.job}, run {run.facts.run[:8]}"

    def attempts(self) -> list[int]:
        return list(self.run.logs())

    def nodes(self, attempt: int) -> list[int]:
        return list(self.run.logs().get(attempt, ()))

    def gone(self, attempt: int) -> list[int]:  # noqa: ARG002 - that of another source
        return []

    def why_none(self) -> str:
        return "no node has a log yet"

    def node_of_rank(self, rank: int) -> int:
        facts = self.run.facts
        if facts.spawns:
            raise InputError(f"--rank {rank}: the script of {facts.job} starts its ranks; choose with --node")
        if not 0 <= rank < facts.world_size:
            raise InputError(f"--rank {rank}: {facts.job} has the ranks 0 to {facts.world_size - 1}")
        if not facts.ranks_follow_nodes:
            raise InputError(f"--rank {rank}: torchrun assigns ranks to nodes as they arrive; choose with --node")
        return rank // facts.nproc_per_node

    def prefix(self, node: int) -> str:
        facts = self.run.facts
        follow = facts.nproc_per_node == 1 and facts.ranks_follow_nodes and not facts.spawns
        return f"[{node}:{node}] " if follow else f"[{node}] "

    def read(self, attempt: int, nodes: Collection[int]) -> Iterator[tuple[int, bytes]]:
        logs = self.run.logs().get(attempt, {})
        for node in nodes:
            for path in logs.get(node, ()):
                yield from ((node, piece) for piece in runs.chunks(path))

    def follow(self, attempt: int, nodes: Collection[int] | None, *, later: bool) -> Iterator[tuple[int, bytes]]:
        """Yield (node, piece) of an attempt until the run ends. later: also later attempts. nodes: None for all."""
        offsets: dict[Path, int] = {}
        while True:
            found = runs.read(self.run.folder)
            running = found is not None and found.running
            for number, of_attempt in self.run.logs().items():
                wanted = of_attempt if number == attempt or (later and number > attempt) else {}
                for node, paths in wanted.items():
                    for path in paths if nodes is None or node in nodes else ():
                        for piece in runs.chunks(path, offsets.get(path, 0)):
                            offsets[path] = offsets.get(path, 0) + len(piece)
                            yield node, piece
            if not running:
                return
            time.sleep(POLL_SECONDS)
