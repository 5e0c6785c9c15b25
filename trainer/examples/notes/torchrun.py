"""torchrun starts this script once per process, and passes the rank in environment variables.

init_process_group without arguments reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT: init_method="env://". The job
gives torchrun its options (PET_NNODES, PET_NODE_RANK, …), so the command needs none.
"""

import common
import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo")
    common.train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
