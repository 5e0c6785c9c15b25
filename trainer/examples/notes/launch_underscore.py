"""A script from before PyTorch 2.0 that accepts only --local_rank.

torch.distributed.launch now passes --local-rank, which argparse refuses: "unrecognized arguments", or "the following
arguments are required". The script still works unchanged: torchrun --no-python starts a shell for each process, and the
shell passes the option with the old spelling.
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
