"""torch.multiprocessing.spawn on one node: the script starts its own processes; each gets its number as first argument.

Rank and world size are arguments. The address is this machine's, and with spec.nodes: 1 any free port will do. For
several nodes see spawn_nodes.py.
"""

import os

import common
import torch.distributed as dist
import torch.multiprocessing as mp


def worker(rank: int, world_size: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    common.train()
    dist.destroy_process_group()


def main() -> None:
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "12355")
    world_size = int(os.environ.get("NPROC_PER_NODE", "2"))
    mp.spawn(worker, args=(world_size,), nprocs=world_size)


if __name__ == "__main__":  # the new processes import this file: without the guard each would spawn again
    main()
