"""Process groups: the rank, the world size, and a group of some ranks.

torchrun --nproc-per-node 3 trainer/examples/notes/blocks_groups.py
"""

import torch
import torch.distributed as dist


def main() -> None:
    assert dist.is_available(), "this PyTorch is built without torch.distributed"
    assert dist.is_initialized(), "init_process_group has not been called"
    rank, world_size = dist.get_rank(), dist.get_world_size()

    # All ranks call new_group for all groups, in the same order, also for groups that they do not belong to.
    even = dist.new_group(list(range(0, world_size, 2)))
    odd = dist.new_group(list(range(1, world_size, 2)))
    mine = odd if rank % 2 else even
    members = list(range(rank % 2, world_size, 2))

    total = torch.tensor(rank)
    dist.all_reduce(total, group=mine)
    assert total == sum(members), "a collective of a group counts its members only"
    assert (dist.get_rank(mine), dist.get_world_size(mine)) == (rank // 2, len(members)), "a group has ranks of its own"
    other = even if rank % 2 else odd
    assert dist.get_rank(other) == -1, "who is not in a group has rank -1 there"
    print(f"rank {rank} of {world_size}: rank {dist.get_rank(mine)} in the group of {members}, sum {total}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
