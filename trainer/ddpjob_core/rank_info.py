"""The place of a process among the ranks of its job and of its node."""

from collections.abc import Callable
from typing import NamedTuple


class RankInfo(NamedTuple):
    """The place of a process in its group and on its node."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int


def on_node(rank: int, world_size: int, number: Callable[[str, int], int], local_rank: int | None = None) -> RankInfo:
    """Return the place of this rank: from the launcher's variables, or from the rank if the script starts it itself.

    number: returns an environment variable as an integer, else the default.
    """
    # A process that a script starts inherits the script's variables. Use LOCAL_RANK only if RANK is this rank.
    # Otherwise all ranks that a script starts in a pod with nprocPerNode: 1 would have local rank 0.
    of_this_rank = number("RANK", -1) == rank
    spawned_per_node = max(1, world_size // max(1, number("NNODES", 1)))
    per_node = (number("LOCAL_WORLD_SIZE", 0) if of_this_rank else 0) or spawned_per_node
    if local_rank is None:
        local_rank = number("LOCAL_RANK", rank % per_node) if of_this_rank else rank % per_node
    node_rank = number("NODE_RANK", number("GROUP_RANK", rank // per_node))
    return RankInfo(rank, world_size, local_rank, per_node, node_rank)
