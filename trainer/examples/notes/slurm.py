"""A script for srun, which starts one process for each task and passes the task's number in SLURM_PROCID.

It runs unchanged in a job that sets Slurm's variables from its own.
"""

import os

import common
import torch.distributed as dist


def main() -> None:
    rank, size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    if not 0 <= int(os.environ["SLURM_LOCALID"]) <= rank:
        raise ValueError("SLURM_LOCALID is not a number of a rank on its node")
    dist.init_process_group("gloo", rank=rank, world_size=size)
    common.train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
