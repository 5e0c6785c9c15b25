"""A script from before PyTorch 2.0 that accepts only --local_rank.

torch.distributed.launch now says --local-rank, which argparse does not take for it: "unrecognized arguments", or "the
following arguments are required". Unchanged, the script still runs: torchrun --no-python starts a shell for each
process, which spells the option.
"""

import argparse

import common
import torch.distributed as dist


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, required=True)  # ddpjob: ignore[local-rank-one-spelling]
    parser.parse_args()
    dist.init_process_group("gloo", init_method="env://")
    common.train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
