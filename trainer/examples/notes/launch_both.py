"""A script for PyTorch 1 and 2: it accepts --local_rank and --local-rank, and reads LOCAL_RANK if neither is passed.

So it works under torch.distributed.launch with and without --use-env, and under torchrun.
"""

import argparse
import os

import common
import torch.distributed as dist


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", "--local-rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
    args = parser.parse_args()
    dist.init_process_group("gloo", init_method="env://")
    if args.local_rank != int(os.environ["LOCAL_RANK"]):
        raise SystemExit(f"--local_rank={args.local_rank}, and LOCAL_RANK is {os.environ['LOCAL_RANK']}")
    common.train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
