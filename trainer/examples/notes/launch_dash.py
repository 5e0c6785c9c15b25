"""python -m torch.distributed.launch passes each process --local-rank=N, with a dash since PyTorch 2.0.

The launcher is deprecated; it is torchrun with this option. With --use-env it passes no option (launch_use_env.py).
"""

import argparse

import common
import torch
import torch.distributed as dist


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local-rank", type=int, required=True)
    args = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(args.local_rank % torch.cuda.device_count())
    dist.init_process_group("gloo", init_method="env://")
    common.train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
