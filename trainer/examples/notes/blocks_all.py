"""All building blocks in one group.

torchrun --nproc-per-node 3 trainer/examples/notes/blocks_all.py
"""

import blocks_averaging
import blocks_collectives
import blocks_data_loader
import blocks_ddp_options
import blocks_groups
import blocks_monitored_barrier
import blocks_partitions
import blocks_same_parameters
import blocks_save_load

import ddpjob

BLOCKS = (
    blocks_groups, blocks_collectives, blocks_averaging, blocks_ddp_options, blocks_same_parameters,
    blocks_monitored_barrier, blocks_data_loader, blocks_partitions, blocks_save_load,
)  # fmt: skip


def main() -> None:
    with ddpjob.init("gloo") as world:
        for block in BLOCKS:
            block.main()
            if world.is_main:
                print(f"BLOCK {block.__name__} holds", flush=True)


if __name__ == "__main__":
    main()
