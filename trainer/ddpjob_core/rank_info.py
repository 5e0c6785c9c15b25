"""Where a process is among the ranks of a job, and among those of its node."""

from collections.abc import Callable
from typing import NamedTuple


class RankInfo(NamedTuple):
    """Where a process is in its group and on its node."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int


def on_node(rank: int, world_size: int, number: Callable[[str, int], int], local_rank: int | None = None) -> RankInfo:
    """The place of that rank: launchers name its node; of a process that a script starts itself the rank tells it.

    number: the variable of the environment as a number, else the default.
    """
    # A process that a script starts inherits the variables of its node, but those of a rank hold for one rank only:
    # otherwise all ranks that start in a pod with nprocPerNode 1 would be its local rank 0.
    of_this_rank = number("RANK", -1) == rank
    spawned_per_node = max(1, world_size // max(1, number("NNODES", 1)))
    per_node = (number("LOCAL_WORLD_SIZE", 0) if of_this_rank else 0) or spawned_per_node
    if local_rank is None:
        local_rank = number("LOCAL_RANK", rank % per_node) if of_this_rank else rank % per_node
    node_rank = number("NODE_RANK", number("GROUP_RANK", rank // per_node))
    return RankInfo(rank, world_size, local_rank, per_node, node_rank)
