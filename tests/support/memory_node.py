"""A small training that keeps its state in the memories of its nodes' agents. Each generation is forked."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import ddpjob
from ddpjob import process
from ddpjob_core.memory import numbered
from ddprun.memory import Memory

RANKS = 2


class Node:
    """The memory of the agent on each of the nodes, and the ranks that use it."""

    def __init__(
        self, folder: Path, run_ranks: Callable[[Callable[[int], Any], int], list[Any]], *, nodes: int = 1
    ) -> None:
        self.folder, self.run_ranks = folder, run_ranks
        self._memories = [Memory(RANKS) for _ in range(nodes)]

    def lose(self, node: int, by: Memory | None = None) -> Memory:
        """Replace a node by another one, by default a new one with empty memory. Return the lost memory."""
        lost, self._memories[node] = self._memories[node], by or Memory(RANKS)
        return lost

    def run(self, generation: int, body: Callable[[], Any], *, ranks: int = 1, **more: Any) -> Any:
        """Return what the body returns on rank 0. more: as for `run_all`."""
        return self.run_all(generation, body, ranks=ranks, **more)[0]

    def run_all(
        self, generation: int, body: Callable[[], Any], *, ranks: int, ends: bool = False, term: int = 0
    ) -> list[Any]:
        """Run the body on each rank, and return all results. Ranks are spread over the nodes. ends: the training ends
        with the body. Otherwise the ranks are killed afterwards, and write nothing more into the folder. term: number
        of the leader."""
        for memory in self._memories:
            memory.begin(numbered(term, generation))

        def main(rank: int) -> Any:
            local_rank, node = divmod(rank, len(self._memories))
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "DDPJOB_UID": "uid-1"}
            os.environ["DDPJOB_MEMORY"] = self._memories[node].where(local_rank)
            os.environ |= {"DDPJOB_GENERATION": str(generation), "DDPJOB_TERM": str(term)}
            url = f"file://{self.folder}/meet-{term}-{generation}"
            with ddpjob.init("gloo", init_method=url, rank=rank, world_size=ranks):
                found = body()
                if not ends:
                    process.current.before_leaving.clear()
                    process.current.unsaved.clear()
                return found

        return self.run_ranks(main, ranks)

    @property
    def step(self) -> int | None:
        """The step of the state in memory."""
        whole = self._memories[0].whole
        return None if whole is None else whole.step


def rescue() -> None:
    """Write the state as a survivor does after another rank's failure."""
    if process.current.keeper is not None:
        process.current.keeper.survivor.save()


def settle() -> None:
    """Wait until the background thread has reserved room for the state."""
    for thread in threading.enumerate():
        if thread.name == "ddpjob-memory-room":
            thread.join()


def parts(norm: type[torch.nn.Module] = torch.nn.BatchNorm1d) -> dict[str, Any]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), norm(8), torch.nn.Linear(8, 1))
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters())}


def begin(folder: str | None = "snapshots") -> tuple[dict[str, Any], ddpjob.Snapshot, int]:
    """Return model and optimizer, a Snapshot, and the step that it has loaded into them."""
    objects, snapshot = parts(), ddpjob.Snapshot(folder)
    return objects, snapshot, snapshot.load(**objects)


def make_step(model: Any, optimizer: Any) -> None:
    """Make a step without telling the library, which sees only the optimizer's step."""
    optimizer.zero_grad()
    model(torch.randn(4, 4)).square().sum().backward()
    optimizer.step()


def saved(snapshot: ddpjob.Snapshot, step: int, **state: Any) -> None:
    """Save, and wait until the folder has the state."""
    snapshot.save(step, **state)
    snapshot.wait()


def steps(
    first: int, last: int, model: Any, optimizer: Any, before_boundary: Callable[[], object] = lambda: None
) -> None:
    """Train the steps `first` + 1 to `last`."""
    for step in range(first + 1, last + 1):
        optimizer.zero_grad()
        model(torch.full((4, 4), float(step)) + torch.randn(4, 4)).square().sum().backward()
        optimizer.step()
        before_boundary()
        ddpjob.should_stop(step)
        settle()
