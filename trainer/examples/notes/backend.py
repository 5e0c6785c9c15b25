"""The backends: gloo works everywhere, also for tensors on a GPU. nccl needs a GPU for each process. mpi needs PyTorch
built with MPI, and no published build is. ddpjob.init() reports a missing GPU or MPI before a rank waits for others.
"""

import argparse

import common

import ddpjob


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="auto", help="auto is nccl where the process sees a GPU, else gloo")
    parser.add_argument("--device", help="cpu or cuda; default cuda where the process sees one")
    args = parser.parse_args()
    with ddpjob.init(args.backend, device=args.device) as world:
        print(f"rank {world.rank} of {world.world_size}: {world.backend} on {world.device}", flush=True)
        common.train(world.device)


if __name__ == "__main__":
    main()
