"""The collectives: what each rank holds before and after. Every rank calls each, in the same order.

torchrun --nproc-per-node 3 trainer/examples/notes/blocks_collectives.py
"""

import math
from datetime import timedelta

import torch
import torch.distributed as dist


def main() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    numbers = [float(r + 1) for r in range(world_size)]  # rank r holds r + 1

    for name, expected in {
        "SUM": sum(numbers), "PRODUCT": math.prod(numbers), "MIN": min(numbers), "MAX": max(numbers),
    }.items():  # fmt: skip
        x = torch.tensor(numbers[rank])
        dist.all_reduce(x, op=getattr(dist.ReduceOp, name))
        assert x == expected, f"all_reduce leaves the {name} on every rank"
        say(f"all_reduce {name}: {numbers} -> {x:g} on every rank")

    x = torch.tensor(numbers[rank])
    dist.reduce(x, dst=0)
    assert rank != 0 or x == sum(numbers), "reduce leaves the sum on rank dst; what the others hold is undefined"
    say(f"reduce: {numbers} -> {x:g} on rank 0")

    x = torch.tensor(numbers[rank])
    dist.broadcast(x, src=0)
    assert x == numbers[0], "broadcast leaves src's value on every rank"
    say(f"broadcast: rank 0's {x:g} -> every rank")

    mine = torch.empty(2)
    parts = [torch.tensor([r, r * 10.0]) for r in range(world_size)]
    dist.scatter(mine, parts if rank == 0 else None, src=0)
    assert mine.tolist() == [rank, rank * 10], "scatter hands part r of src's list to rank r"
    say(f"scatter: {[part.tolist() for part in parts]} on rank 0 -> one of them to each")

    gathered = [torch.empty(2) for _ in range(world_size)]
    dist.gather(mine, gathered if rank == 0 else None, dst=0)
    assert rank != 0 or torch.equal(torch.stack(gathered), torch.stack(parts)), "gather is the way back"
    say(f"gather: one of them from each -> {[part.tolist() for part in gathered]} on rank 0")

    everywhere = [torch.empty(2) for _ in range(world_size)]
    dist.all_gather(everywhere, mine)
    assert torch.equal(torch.stack(everywhere), torch.stack(parts)), "all_gather gives all of them to every rank"
    say(f"all_gather: one of them from each -> {[part.tolist() for part in everywhere]} on every rank")

    dist.barrier()  # no rank continues before all have arrived
    say("barrier: all are here")


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))  # the default is 30 minutes
    main()
    dist.destroy_process_group()
