"""Every rank holds the same parameters: DDP copies rank 0's at the start, and each step changes all in the same way.

torchrun --nproc-per-node 2 trainer/examples/notes/blocks_same_parameters.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def everyones(model: nn.Module) -> list[torch.Tensor]:
    """Return the parameters of each rank, as one vector per rank."""
    mine = nn.utils.parameters_to_vector(model.parameters()).detach()
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    return gathered


def main() -> None:
    rank = dist.get_rank()
    torch.manual_seed(rank)  # each rank begins with other weights, and sees other data
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    before = everyones(net)
    model = DistributedDataParallel(net)
    wrapped = everyones(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
    after = everyones(model)

    assert not torch.equal(before[0], before[1]), "the seeds differ, so the weights do"
    assert all(torch.equal(of_rank, before[0]) for of_rank in wrapped), "DDP gives rank 0's weights to all"
    assert all(torch.equal(of_rank, after[0]) for of_rank in after), "after a step all ranks have equal bits"
    assert not torch.equal(after[0], wrapped[0]), "and it was a step"
    if rank == 0:
        for name, vectors in {"before DDP": before, "in DDP": wrapped, "after a step": after}.items():
            print(f"{name}: sums of the parameters {[round(float(v.sum()), 6) for v in vectors]}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
