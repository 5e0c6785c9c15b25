"""monitored_barrier(timeout): rank 0 names the missing rank, while barrier() only waits for half an hour.

Only gloo has it. In a job with nccl create a gloo group for it, as here.

    torchrun --nproc-per-node 2 trainer/examples/notes/blocks_monitored_barrier.py
"""

from datetime import timedelta

import torch.distributed as dist

SECONDS = 1


def main() -> None:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    group = dist.new_group(backend="gloo")
    dist.monitored_barrier(group, timeout=timedelta(seconds=30))  # returns, because all ranks call it
    if rank != last:
        try:
            dist.monitored_barrier(group, timeout=timedelta(seconds=SECONDS))
        except RuntimeError as error:
            if rank == 0:
                first = str(error).splitlines()[0]
                assert f"Rank {last} failed to pass monitoredBarrier" in first, first
                print(f"monitored_barrier without rank {last}: {first}", flush=True)
        else:
            raise AssertionError(f"rank {last} did not come")
    dist.barrier()  # the default group is not affected


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))  # the default is 30 minutes
    main()
    dist.destroy_process_group()
