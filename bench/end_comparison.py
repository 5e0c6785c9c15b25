"""What the comparison of replicas at the end costs a rank (reporting/rank_end.py), for 100 million parameters on a CPU.

    python bench/end_comparison.py [--parameters 100] [--rounds 9]

CPU seconds of one thread, because the machine may be busy: the sums at the end, those over the first 32 KiB of each
parameter in a backward pass that is noted, and what 1,000 passes between those copy. To compare: a plain sum of the
bits, and SHA-256 of the same bytes. With --device cuda: seconds of the clock on a GPU. Prints one JSON document on
stdout.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable

import torch

from ddpjob.reporting.rank_end import PREFIX_WORDS, Recent, checksums

VALUES = 100_000_000


def milliseconds(work: Callable[[], object], rounds: int, clock: Callable[[], float]) -> dict[str, float]:
    """Best and median."""
    taken = []
    for _ in range(rounds):
        began = clock()
        work()
        taken.append(1000 * (clock() - began))
    return {"best": round(min(taken), 2), "median": round(statistics.median(taken), 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=100, help="tensors of equal size (100)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    clock = time.process_time if options.device == "cpu" else time.perf_counter
    tensors = [torch.randn(VALUES // options.parameters, device=options.device) for _ in range(options.parameters)]

    def plain() -> object:
        return torch.stack([tensor.view(torch.int64).sum() for tensor in tensors]).tolist()

    def hashed() -> object:
        return [hashlib.sha256(tensor.cpu().numpy().data).digest() for tensor in tensors]

    recent, passes = Recent(), 1000

    def kept() -> object:
        return [recent.add(torch, tensors[made % len(tensors)], made, 0) for made in range(passes)]

    found = {
        "a thousand passes between": milliseconds(kept, options.rounds, clock),
        "end": milliseconds(lambda: checksums(torch, tensors), options.rounds, clock),
        "backward pass": milliseconds(lambda: checksums(torch, tensors, PREFIX_WORDS), options.rounds, clock),
        "plain sum": milliseconds(plain, options.rounds, clock),
        "sha256": milliseconds(hashed, 3, clock),
    }
    about = {"torch": torch.__version__, "load": round(os.getloadavg()[0], 1)}
    print(json.dumps({**about, **vars(options), "milliseconds": found}))


if __name__ == "__main__":
    main()
