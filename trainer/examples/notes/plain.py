"""Plain `python script.py` with one process per node, without any launcher.

The job sets MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE, and init_process_group reads nothing else.
"""

import common
import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo", init_method="env://")
    common.train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
