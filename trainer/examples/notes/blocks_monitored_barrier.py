"""monitored_barrier(timeout): rank 0 names the rank that is missing, while barrier() waits for half an hour.

It is gloo's. In a job on nccl make a gloo group for it, as here.

    torchrun --nproc-per-node 2 trainer/examples/notes/blocks_monitored_barrier.py
"""

from datetime import timedelta

import torch.distributed as dist

SECONDS = 1


def main() -> None:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    group = dist.new_group(backend="gloo")
    dist.monitored_barrier(group, timeout=timedelta(seconds=30))  # all ranks have arrived: it returns
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
    dist.barrier()  # of the other group, which is not affected


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))  # by default barrier() waits half an hour
    main()
    dist.destroy_process_group()
