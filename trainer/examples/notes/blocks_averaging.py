"""DDP's work by hand: sum the gradients of all ranks, divide by their number, step. Both give the same result.

DDP sums in buckets while the backward pass is still running; by hand the sum comes after the pass.

    torchrun --nproc-per-node 2 trainer/examples/notes/blocks_averaging.py
"""

import common
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 3


def average_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def main() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    inputs, targets = common.tiny_data().tensors
    by_hand, by_ddp = common.tiny_model(), DistributedDataParallel(common.tiny_model())
    for model in (by_hand, by_ddp):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(STEPS):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs[rank::world_size]), targets[rank::world_size]).backward()
            if model is by_hand:
                average_gradients(model)
            optimizer.step()
    one, other = (nn.utils.parameters_to_vector(model.parameters()).detach() for model in (by_hand, by_ddp))
    distance = float((one - other).abs().max())
    # By hand the sum is divided; DDP divides each rank's part. With 3 ranks the last bits differ.
    assert distance < 1e-12, f"by hand and DDP differ by {distance}"
    if rank == 0:
        print(f"after {STEPS} steps, averages by hand and by DDP differ by at most {distance:g}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
