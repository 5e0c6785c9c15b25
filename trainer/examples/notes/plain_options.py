"""A script that gets everything as options: --world_size, --node_rank, --master_addr, --master_port.

The command fills them from the job's variables: --world_size=$(NNODES) --node_rank=$(NODE_RANK) ….
"""

import argparse

import common
import torch.distributed as dist


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--world_size", type=int, required=True)
    parser.add_argument("--node_rank", type=int, required=True)
    parser.add_argument("--master_addr", required=True)
    parser.add_argument("--master_port", type=int, required=True)
    args = parser.parse_args()
    where = f"tcp://{args.master_addr}:{args.master_port}"
    dist.init_process_group("gloo", init_method=where, world_size=args.world_size, rank=args.node_rank)
    common.train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
