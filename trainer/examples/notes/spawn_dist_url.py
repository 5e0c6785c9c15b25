"""The options of PyTorch's imagenet example: --world-size counts nodes, --rank is the node rank, --dist-url an address.

The script multiplies both by the number of processes per node, and spawns the processes.
"""

import argparse

import common
import torch.distributed as dist
import torch.multiprocessing as mp


def worker(local_rank: int, args: argparse.Namespace) -> None:
    rank = args.rank * args.nproc + local_rank
    world_size = args.world_size * args.nproc
    dist.init_process_group(args.dist_backend, init_method=args.dist_url, world_size=world_size, rank=rank)
    common.train()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--world-size", type=int, default=1, help="nodes")
    parser.add_argument("--rank", type=int, default=0, help="of this node")
    parser.add_argument("--nproc", type=int, default=2, help="processes on each node")
    parser.add_argument("--dist-url", default="tcp://127.0.0.1:23456")
    parser.add_argument("--dist-backend", default="gloo")
    args = parser.parse_args()
    mp.spawn(worker, args=(args,), nprocs=args.nproc)


if __name__ == "__main__":
    main()
