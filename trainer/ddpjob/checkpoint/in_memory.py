"""What a `Snapshot` does with the memory of its node: nothing, where there is no agent, or the script wants none."""

import os
from collections.abc import Mapping
from typing import Any

from ddpjob import process
from ddpjob.checkpoint import recall
from ddpjob.checkpoint.memory import Keeper
from ddpjob.checkpoint.shared import Shared
from ddpjob.core.memory import Found, Version
from ddpjob.group.join import World


class InMemory:
    """The memory as one Snapshot uses it. A script with two of them goes on from their folders, as without memory: one
    state from memory and one from a folder would be of two steps."""

    def __init__(self, world: World | None, attempt: int, generation: int, *, wanted: bool) -> None:
        self._present = Version(attempt, generation, 0)
        self._keeper: Keeper | None = None
        self._shared: Shared | None = None
        self._world = world
        current = process.current
        current.snapshots += 1
        self._used = wanted and world is not None and _is_rank(world) and "DDPJOB_MEMORY" in os.environ
        if current.keeper is not None:
            current.keeper.turn_off("the script has a second Snapshot")
        elif self._used and current.snapshots == 1:
            self._begin()

    @property
    def is_on(self) -> bool:
        """Whether what it is told is kept."""
        return self._keeper is not None and self._keeper.is_on

    def _begin(self) -> None:
        assert self._world is not None, "without a group there is no rank"
        where = os.environ["DDPJOB_MEMORY"]
        if not where or self._world.device.type != "cpu":
            return
        try:
            self._shared = Shared(where, self._present.attempt, self._present.generation)
            self._keeper = Keeper(self._shared, self._world.rank, self._world.world_size)
        except (OSError, ValueError) as error:
            process.log(f"rank {self._world.rank}: the state is not kept in memory: {error}")
            return
        process.current.keeper = self._keeper
        process.current.at_boundary = self._keeper.boundary

    def find(self) -> Found | None:
        """The newest state that is whole in the memory of any node; every rank calls it."""
        if not self._used or self._world is None or self._present.generation == 0 or process.current.snapshots > 1:
            return None  # what is in memory was left by an earlier generation
        return recall.find(self._shared, self._world.rank, self._world.world_size, self._present)

    def fetch(self, found: Found, objects: Mapping[str, Any]) -> recall.Fetched | None:
        """That state, if it has these names and is as it was written; every rank calls it."""
        assert self._world is not None, "it was found"
        rank, world_size = self._world.rank, self._world.world_size
        fetched = recall.fetch(self._shared, found, rank, world_size, set(objects))
        if fetched is None:
            return None
        if self._shared is not None and self._world.local_rank == 0 and rank in found.ranks:
            self._shared.count_load()
        if fetched.seeded:
            process.log(
                f"rank {rank}: its random states were lost with its node: seeded from another rank's, the same way at "
                f"each resume"
            )
        return fetched

    def resumed(self, found: Found, objects: Mapping[str, Any], fetched: recall.Fetched) -> None:
        """The objects have the state that was found: it is kept again, also where this node had none.

        Not where the script saves values, of which `load` knows no more than the objects that they are loaded into: the
        place of a sampler that DataLoader workers read ahead is not what the sampler itself says.
        """
        if self._keeper is not None and not fetched.by_value and objects.keys() == fetched.state.keys():
            self._keeper.resumed(found.held.version.step, found.held.loads + 1)
            self._keeper.register(objects)
            self._keeper.boundary(found.held.version.step, named=True)

    def saved(self, step: int, objects: Mapping[str, Any]) -> None:
        """The script has named them as the state of this step."""
        if self._keeper is not None:
            self._keeper.register(objects)
            self._keeper.boundary(step, named=True)


def _is_rank(world: World) -> bool:
    """Whether it is what the agent has started, and not a process that the script has."""
    return (world.rank, world.world_size) == (process.number("RANK", -1), process.number("WORLD_SIZE", -1))
