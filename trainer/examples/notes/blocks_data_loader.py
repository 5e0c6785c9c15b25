"""DataLoader with workers and DistributedSampler: every rank reads its own share, in a different order each epoch.

torchrun --nproc-per-node 2 trainer/examples/notes/blocks_data_loader.py
"""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

SAMPLES = 24


def main() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    data = TensorDataset(torch.arange(SAMPLES))
    # shuffle= belongs to the sampler: DataLoader refuses a sampler together with shuffle=True.
    sampler = DistributedSampler(data, num_replicas=world_size, rank=rank, shuffle=True, seed=7)
    loader = DataLoader(data, batch_size=2, sampler=sampler, num_workers=2)

    seen = []
    for epoch in (0, 0, 1):  # epoch 0 twice, as if set_epoch were forgotten once: its order is the same
        sampler.set_epoch(epoch)
        seen.append(torch.cat([batch for (batch,) in loader]))
    assert torch.equal(seen[0], seen[1]), "without another set_epoch the order is the same"
    assert not torch.equal(seen[0], seen[2]), "set_epoch changes it"

    shares = [torch.empty_like(seen[2]) for _ in range(world_size)]
    dist.all_gather(shares, seen[2])
    together = sorted(torch.cat(shares).tolist())
    # 24 is divisible by 2, 3 and 4 ranks. Otherwise the sampler repeats samples, or drops some with drop_last=True.
    assert together == list(range(SAMPLES)), "the shares of all ranks are the whole data set, each sample once"
    print(f"rank {rank}: epoch 0 {seen[0].tolist()}, epoch 1 {seen[2].tolist()}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
