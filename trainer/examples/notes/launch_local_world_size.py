"""A script with an option for the number of processes on its node, --local_world_size, as in PyTorch's old DDP example.

It divides the node's GPUs among them. The job provides the number: --local_world_size=$(NPROC_PER_NODE).
"""

import argparse
import os

import common
import torch
import torch.distributed as dist


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", "--local-rank", type=int, default=0)
    parser.add_argument("--local_world_size", type=int, default=1)
    args = parser.parse_args()
    if args.local_world_size != int(os.environ["LOCAL_WORLD_SIZE"]):
        raise SystemExit(f"--local_world_size={args.local_world_size}, and the launcher started "
                         f"{os.environ['LOCAL_WORLD_SIZE']} processes here")  # fmt: skip
    gpus = torch.cuda.device_count() // args.local_world_size
    mine = range(args.local_rank * gpus, (args.local_rank + 1) * gpus)
    dist.init_process_group("gloo")
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}, GPUs {list(mine)}", flush=True)
    common.train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
