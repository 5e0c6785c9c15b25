"""torch.distributed.launch --use-env passes no option: the local rank is in LOCAL_RANK, as under torchrun."""

import os

import common
import torch
import torch.distributed as dist


def main() -> None:
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    dist.init_process_group("gloo", init_method="env://")
    common.train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
