"""torch.multiprocessing.spawn on several nodes: rank = node rank × processes per node + number on this node.

The job runs this script once on each node, and provides the factors in NNODES, NODE_RANK and NPROC_PER_NODE.
"""

import os

import common
import torch.distributed as dist
import torch.multiprocessing as mp


def worker(local_rank: int, nodes: int, node_rank: int, nproc_per_node: int) -> None:
    rank = node_rank * nproc_per_node + local_rank
    dist.init_process_group("gloo", init_method="env://", rank=rank, world_size=nodes * nproc_per_node)
    common.train()
    dist.destroy_process_group()


def main() -> None:
    nodes, node_rank, nproc = (int(os.environ[name]) for name in ("NNODES", "NODE_RANK", "NPROC_PER_NODE"))
    mp.spawn(worker, args=(nodes, node_rank, nproc), nprocs=nproc)


if __name__ == "__main__":
    main()
