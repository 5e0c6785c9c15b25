"""When the number of processes changes: DataPartitioner gives similar results, GlobalBatchSampler equal ones.

A partition by fractions gives each process a fixed part of the data, and a step takes a batch of each part, so the
samples of a step depend on the number of processes. GlobalBatchSampler takes the same samples for any number.

    torchrun --nproc-per-node 3 trainer/examples/notes/blocks_partitions.py
"""

from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpjob

SAMPLES, GLOBAL_BATCH, EPOCHS, SEED = 240, 24, 8, 7
Shares = Callable[[int, int], Iterator[list[int]]]


def by_partition(rank: int, ranks: int) -> Iterator[list[int]]:
    mine = ddpjob.DataPartitioner(SAMPLES, [1 / ranks] * ranks, SEED).use(rank)
    size = GLOBAL_BATCH // ranks
    for epoch in range(EPOCHS):
        mine.set_epoch(epoch)  # another order of the same samples
        yield from (mine[start : start + size] for start in range(0, len(mine) - size + 1, size))


def by_global_batch(rank: int, ranks: int) -> Iterator[list[int]]:
    sampler = ddpjob.GlobalBatchSampler(SAMPLES, GLOBAL_BATCH, SEED, rank=rank, world_size=ranks)
    for epoch in range(EPOCHS):
        yield from sampler.epoch(epoch)


def trained(shares: Shares, group: dist.ProcessGroup, rank: int) -> tuple[float, torch.Tensor]:
    """Return the loss on all samples, relative to their variance (1: like predicting the mean), and the parameters."""
    torch.manual_seed(SEED)
    inputs = torch.randn(SAMPLES, 6)
    targets = torch.sin(inputs[:, :1] + inputs[:, 1:2])
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    model = DistributedDataParallel(net, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

    def summed_loss(indices: list[int]) -> torch.Tensor:
        return nn.functional.mse_loss(model(inputs[indices]), targets[indices], reduction="sum")

    for indices in shares(rank, dist.get_world_size(group)):
        optimizer.zero_grad()
        ddpjob.accumulate(model, indices, GLOBAL_BATCH, summed_loss)
        optimizer.step()
    with torch.no_grad():
        loss = nn.functional.mse_loss(net(inputs), targets) / targets.var()
    return float(loss), nn.utils.parameters_to_vector(net.parameters()).detach()


def fractions() -> None:
    """Show that sizes are rounded by largest remainder, and that parts are disjoint and the same on all ranks."""
    parts = ddpjob.DataPartitioner(10, [0.5, 0.25, 0.25], seed=SEED)
    members = [parts.use(i).indices for i in range(3)]
    assert sorted(map(len, members)) == [2, 3, 5], "sizes are rounded, and add up"
    assert sorted(i for part in members for i in part) == list(range(10)), "every sample is in exactly one part"
    of_rank_0 = [members]
    dist.broadcast_object_list(of_rank_0, src=0)
    assert members == of_rank_0[0], "the seed alone decides, so all ranks cut alike"
    parts.set_epoch(1)
    assert parts.use(0).indices != members[0], "another epoch, another order"
    assert sorted(parts.use(0).indices) == sorted(members[0]), "of the same samples"
    if dist.get_rank() == 0:
        print(f"10 samples by 0.5, 0.25, 0.25: {members}; part 0 in epoch 1: {parts.use(0).indices}", flush=True)


def main() -> None:
    fractions()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    groups = {size: dist.new_group(list(range(size))) for size in range(1, world_size + 1)}
    for shares in (by_partition, by_global_batch):
        found = {size: trained(shares, group, rank) for size, group in groups.items() if rank < size}
        if rank != 0:
            continue
        losses = {size: loss for size, (loss, _) in found.items()}
        one = found[1][1]
        distances = {size: float((parameters - one).norm() / one.norm()) for size, (_, parameters) in found.items()}
        if shares is by_partition:
            assert max(losses.values()) - min(losses.values()) < 0.05, f"similar losses, not {losses}"
            assert max(distances.values()) > 1e-4, f"but other parameters, not {distances}"
        else:
            assert max(distances.values()) < 1e-5, f"equal parameters up to rounding, not {distances}"
        for size in found:
            text = f"{shares.__name__} on {size}: loss {losses[size]:.5f}, distance to one process"
            print(f"{text} {distances[size]:.1e}", flush=True)
    dist.barrier()


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))  # the default is 30 minutes
    main()
    dist.destroy_process_group()
