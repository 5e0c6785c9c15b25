"""DDP's options: device_ids and output_device, find_unused_parameters, no_sync.

torchrun --nproc-per-node 2 trainer/examples/notes/blocks_ddp_options.py
"""

import common
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class TwoHeads(nn.Module):
    """A model that does not use one of its two heads, like a skipped layer or an auxiliary head of a real model."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def devices() -> None:
    """A model on a GPU gets this GPU's index, the local rank, as device_ids; a model on the CPU must get none."""
    if torch.cuda.is_available():
        local = dist.get_rank() % torch.cuda.device_count()  # valid on one node; on several use LOCAL_RANK
        on_gpu = DistributedDataParallel(nn.Linear(2, 2).to(local), device_ids=[local], output_device=local)
        assert on_gpu(torch.ones(1, 2)).device.index == local, "device_ids moves the inputs, too"
        say(f"device_ids=[{local}]: {on_gpu.device}")
    try:
        DistributedDataParallel(nn.Linear(2, 2), device_ids=[0])
    except ValueError as error:
        say(f"device_ids for a model on the CPU: {str(error).splitlines()[0]}")
    else:
        raise AssertionError("device_ids for a model on the CPU is refused")
    assert DistributedDataParallel(nn.Linear(2, 2)).device.type == "cpu", "without device_ids it stays on the CPU"


def unused_parameters() -> None:
    """DDP waits for the gradient of every parameter, so a parameter without one needs find_unused_parameters."""
    x = torch.ones(4, 16)
    ignorant = DistributedDataParallel(TwoHeads())
    ignorant(x).sum().backward()
    try:
        ignorant(x)  # raises, because the first step's gradient reduction has not ended
    except RuntimeError as error:
        say(f"a parameter without gradient: {str(error).splitlines()[0][:72]}…")
    else:
        raise AssertionError("DDP sees in the next step that a parameter had no gradient")
    knowing = DistributedDataParallel(TwoHeads(), find_unused_parameters=True)
    for _ in range(2):
        knowing(x).sum().backward()
    assert knowing.module.unused.weight.grad is None, "find_unused_parameters: what is not used has no gradient"
    say("find_unused_parameters=True: two steps, and the unused weight has no gradient")


def no_sync() -> None:
    """Several backward passes with one all-reduce: in no_sync() gradients are only added up on this rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    inputs, targets = common.tiny_data().tensors
    pieces = [slice(rank, 16, world_size), slice(16 + rank, 32, world_size)]
    accumulated, at_once = (DistributedDataParallel(common.tiny_model()) for _ in "ab")
    with accumulated.no_sync():
        loss(accumulated, inputs[pieces[0]], targets[pieces[0]]).backward()
    alone = accumulated.module.weight.grad.clone()
    everyone = [torch.empty_like(alone) for _ in range(world_size)]
    dist.all_gather(everyone, alone)
    assert not torch.equal(everyone[0], everyone[1]), "in no_sync() each rank has its own gradient"
    loss(accumulated, inputs[pieces[1]], targets[pieces[1]]).backward()  # outside no_sync(): averages the sum of both
    loss(at_once, inputs[rank::world_size], targets[rank::world_size]).backward()
    distance = float((accumulated.module.weight.grad - at_once.module.weight.grad).abs().max())
    assert distance < 1e-12, f"accumulated and at once differ by {distance}"
    say(f"no_sync: gradients of two pieces and of all at once differ by at most {distance:g}")


def loss(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(inputs), targets, reduction="sum")


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def main() -> None:
    devices()
    unused_parameters()
    no_sync()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
