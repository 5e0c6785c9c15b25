"""multiprocessing.Process: start a list of processes, then join them.

join() never raises: without a check of the exit codes a crashed rank would end as success. (mp.spawn checks them.)
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
    mp.set_start_method("spawn")  # a forked child cannot use CUDA if the parent has used it
    nodes, node_rank, nproc = (int(os.environ[name]) for name in ("NNODES", "NODE_RANK", "NPROC_PER_NODE"))
    first = node_rank * nproc
    processes = [mp.Process(target=worker, args=(rank, nodes * nproc)) for rank in range(first, first + nproc)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if failed := {first + i: p.exitcode for i, p in enumerate(processes) if p.exitcode}:
        raise SystemExit(f"ranks that failed, with their exit codes: {failed}")


if __name__ == "__main__":
    main()
