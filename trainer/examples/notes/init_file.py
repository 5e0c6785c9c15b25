"""init_method="file:///folder/file": the rendezvous uses a file in a folder that all ranks share.

torch does not remove the file after a crash, and the next run with this file would wait for processes that have ended.
So each run needs a new name, here from the job's DDPJOB_UID and DDPJOB_ATTEMPT.
"""

import argparse
import os

import common
import torch.distributed as dist


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True, help="shared by all ranks")
    run = "-".join(os.environ.get(name, "") for name in ("DDPJOB_UID", "DDPJOB_ATTEMPT"))
    where = f"file://{parser.parse_args().folder}/meet-{run}"
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world_size)
    common.train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
